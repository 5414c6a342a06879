//! Chooses the terminals of a grammar and writes it as Lark.
//!
//! Terminals should be large: a mask is computed fast within a terminal, and slowly across many. But the lexer of the
//! compiled grammar ends a terminal only where no alternative terminal can continue. That is correct if no text of a
//! terminal, with a character that may follow it, is a prefix of a longer text of a terminal at the same position. So
//! every regular part starts as one terminal, and those whose longest match may be wrong are split until all are
//! correct. Terminals of one character always are.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    fmt::Write,
    rc::Rc,
};

use super::{
    CharSet, Node, NodeId, Source,
    occurrences::{Occurrences, Part, Symbol, TooLarge},
    overlap::{Automaton, MAX_STATES, Overlap, compare},
    regular::Regular,
};

/// Most comparisons of states of two terminals, for a whole grammar.
const MAX_COMPARISONS: usize = 20_000_000;

/// Maximum number of steps for finding pairs of terminals, in machine words, for a whole grammar.
const MAX_STEPS: usize = 200_000_000;

/// Most states of the automata of a grammar.
const MAX_ALL_STATES: usize = 400_000;

/// Writes a grammar as Lark. `ends` are tokens that no `!<...>` matches.
pub fn write(source: &mut Source, regular: &Regular, ends: &[u32]) -> String {
    let tokens = TokenSets::new(source, ends);
    let mut splitter = Splitter {
        source,
        regular,
        tokens: &tokens,
        split: HashSet::new(),
        splits_all: false,
        automata: HashMap::new(),
        overlaps: HashMap::new(),
        budget: MAX_COMPARISONS,
        steps: MAX_STEPS,
        states: MAX_ALL_STATES,
    };
    let layout = loop {
        let layout = splitter.layout();
        if splitter.splits_all || !splitter.improve(&layout) {
            break layout;
        }
    };
    Writer { source: splitter.source, tokens: &tokens, rules: BTreeSet::new() }.write(&layout)
}

/// Rules with their terminals.
#[derive(Default)]
struct Layout {
    /// Rules that are no part of a terminal, the grammar's first.
    rules: Vec<(usize, Part)>,
    terminals: Vec<NodeId>,
    index: HashMap<NodeId, usize>,
}

struct Splitter<'s> {
    source: &'s mut Source,
    regular: &'s Regular,
    tokens: &'s TokenSets,
    /// Regular nodes that are no terminals.
    split: HashSet<NodeId>,
    /// True if all terminals have one character.
    splits_all: bool,
    automata: HashMap<NodeId, Option<Rc<Automaton>>>,
    overlaps: HashMap<(NodeId, NodeId), Option<Overlap>>,
    /// Comparisons that may still be made.
    budget: usize,
    /// Steps that may still be made.
    steps: usize,
    /// States that further automata may have.
    states: usize,
}

impl Splitter<'_> {
    fn layout(&mut self) -> Layout {
        let mut layout = Layout::default();
        let mut known = HashSet::from([self.source.root]);
        let mut rest = vec![self.source.root];
        while let Some(rule) = rest.pop() {
            let part = self.part(self.source.rules[rule], &mut layout);
            part.for_each_rule(&mut |rule| rest.extend(known.insert(rule).then_some(rule)));
            layout.rules.push((rule, part));
        }
        layout
    }

    fn part(&mut self, node: NodeId, layout: &mut Layout) -> Part {
        if self.regular.is(self.source, node) {
            if let Node::Rule(rule) = self.source.nodes[node] {
                let body = self.source.rules[rule];
                return if self.is_terminal(body) { self.part(body, layout) } else { Part::Rule(rule) };
            }
            if self.is_terminal(node) {
                let is_empty = self.automaton(node).is_none_or(|automaton| automaton.first().0.is_empty());
                return if is_empty { Part::Sequence(Vec::new()) } else { layout.terminal(node) };
            }
        }
        let found = self.source.nodes[node].clone();
        let mut parts = |nodes: &[NodeId]| nodes.iter().map(|&node| self.part(node, layout)).collect();
        match found {
            Node::Sequence(items) => Part::Sequence(parts(&items)),
            Node::Choice(items) => Part::Choice(parts(&items)),
            Node::Repeat { item, min, max } => Part::Repeat(Box::new(self.part(item, layout)), min, max),
            Node::Rule(rule) => Part::Rule(rule),
            Node::Token { id, is_negated } => Part::Tokens(self.tokens.sets(id, is_negated)),
            Node::Class(_) | Node::Text(_) => {
                unreachable!("a class is a terminal, and a split text is a sequence")
            }
        }
    }

    /// Returns true if a regular node is a terminal as a whole.
    fn is_terminal(&mut self, node: NodeId) -> bool {
        if matches!(self.source.nodes[node], Node::Class(_)) {
            return true;
        }
        if self.splits_all || self.automaton(node).is_none() {
            self.split(node);
        }
        !self.split.contains(&node)
    }

    /// Has the parts of a node be terminals instead of the node.
    fn split(&mut self, node: NodeId) {
        match &self.source.nodes[node] {
            Node::Class(_) => return,
            Node::Text(text) => {
                let classes: Vec<_> = text.chars().map(|char| Node::Class(CharSet::one(char))).collect();
                let classes = classes.into_iter().map(|class| self.source.add(class)).collect();
                self.source.nodes[node] = Node::Sequence(classes);
            }
            // As a terminal, the rule's body would be the same terminal again.
            &Node::Rule(rule) => self.split(self.source.rules[rule]),
            _ => {}
        }
        self.split.insert(node);
    }

    fn automaton(&mut self, node: NodeId) -> Option<Rc<Automaton>> {
        let (source, states) = (&*self.source, &mut self.states);
        let new = || {
            let most = MAX_STATES.min(*states);
            let automaton = Automaton::new(source, node, most);
            *states -= automaton.as_ref().map_or(most, Automaton::size).min(*states);
            automaton.map(Rc::new)
        };
        self.automata.entry(node).or_insert_with(new).clone()
    }

    /// Splits terminals that can continue where another one ends. Returns true if there were any.
    fn improve(&mut self, layout: &Layout) -> bool {
        let automata: Vec<_> = layout.terminals.iter().filter_map(|&node| self.automaton(node)).collect();
        let (first, is_nullable): (Vec<_>, Vec<_>) =
            automata.iter().map(|automaton| automaton.first()).unzip();
        let mut too_long = HashSet::new();
        let found = Occurrences::find(&layout.rules, &is_nullable, self.steps).and_then(|occurrences| {
            occurrences.pairs(&first, |a, b, after| {
                let (Symbol::Terminal(a), Symbol::Terminal(b)) = (a, b) else { return Ok(a == b) };
                if !first[a].intersects(&first[b]) {
                    return Ok(false);
                }
                let nodes = (layout.terminals[a], layout.terminals[b]);
                let budget = &mut self.budget;
                let overlap = self.overlaps.entry(nodes);
                let overlap = overlap.or_insert_with(|| compare(&automata[a], &automata[b], budget));
                let overlap = overlap.as_ref().ok_or(TooLarge)?;
                if overlap.after.intersects(after) {
                    too_long.insert(nodes.1);
                }
                Ok(overlap.have_common)
            })
        });
        match found {
            Ok(steps) => self.steps = steps,
            Err(TooLarge) => self.splits_all = true,
        }
        for &node in &too_long {
            self.split(node);
        }
        self.splits_all || !too_long.is_empty()
    }
}

impl Layout {
    fn terminal(&mut self, node: NodeId) -> Part {
        let new = self.terminals.len();
        let index = *self.index.entry(node).or_insert(new);
        if index == new {
            self.terminals.push(node);
        }
        Part::Terminal(index)
    }
}

/// The tokens that a grammar names, one set for each, and a set of all others. A token is in one set, since the lexer of the
/// compiled grammar finds a token in one terminal only.
struct TokenSets {
    named: Vec<u32>,
    ends: Vec<u32>,
}

impl TokenSets {
    fn new(source: &Source, ends: &[u32]) -> Self {
        let named = source.nodes.iter().filter_map(|node| match node {
            Node::Token { id, .. } => Some(*id),
            _ => None,
        });
        let named: BTreeSet<u32> = named.collect();
        Self { named: named.into_iter().collect(), ends: ends.to_vec() }
    }

    /// Returns the token sets that a node matches.
    fn sets(&self, id: u32, is_negated: bool) -> Vec<usize> {
        let others = self.named.iter().enumerate().filter(|(_, named)| (**named == id) != is_negated);
        others.map(|(set, _)| set).chain(is_negated.then_some(self.named.len())).collect()
    }

    fn write(&self, set: usize) -> String {
        match self.named.get(set) {
            Some(id) => format!("<[{id}]>"),
            None => {
                let ids: BTreeSet<_> = self.named.iter().chain(&self.ends).map(u32::to_string).collect();
                format!("<[^{}]>", ids.into_iter().collect::<Vec<_>>().join(","))
            }
        }
    }
}

struct Writer<'s> {
    source: &'s Source,
    tokens: &'s TokenSets,
    /// Rules that are part of a terminal and are not written yet.
    rules: BTreeSet<usize>,
}

impl Writer<'_> {
    fn write(mut self, layout: &Layout) -> String {
        let mut text = format!("start: r{}\n", self.source.root);
        for (rule, part) in &layout.rules {
            let _ = writeln!(text, "r{rule}: {}", self.part(part));
        }
        for (index, &node) in layout.terminals.iter().enumerate() {
            let _ = writeln!(text, "L{index}: {}", self.terminal(node));
        }
        let mut written = HashSet::new();
        while let Some(rule) = self.rules.pop_first() {
            if written.insert(rule) {
                let _ = writeln!(text, "R{rule}: {}", self.terminal(self.source.rules[rule]));
            }
        }
        text
    }

    fn part(&self, part: &Part) -> String {
        match part {
            Part::Terminal(index) => format!("L{index}"),
            Part::Rule(rule) => format!("r{rule}"),
            Part::Tokens(sets) => choice(sets.iter().map(|&set| self.tokens.write(set)).collect()),
            Part::Sequence(parts) => sequence(parts.iter().map(|part| self.part(part)).collect()),
            Part::Choice(parts) => choice(parts.iter().map(|part| self.part(part)).collect()),
            Part::Repeat(part, min, max) => {
                let is_atom = !matches!(**part, Part::Sequence(_) | Part::Repeat(..));
                repeat(self.part(part), is_atom, *min, *max)
            }
        }
    }

    fn terminal(&mut self, node: NodeId) -> String {
        match &self.source.nodes[node] {
            Node::Class(set) => class(set),
            Node::Text(text) => format!("/{}/", text.chars().map(escape).collect::<String>()),
            Node::Rule(rule) => {
                self.rules.insert(*rule);
                format!("R{rule}")
            }
            Node::Sequence(items) => sequence(items.iter().map(|&item| self.terminal(item)).collect()),
            Node::Choice(items) => choice(items.iter().map(|&item| self.terminal(item)).collect()),
            Node::Repeat { item, min, max } => {
                let is_atom = !matches!(self.source.nodes[*item], Node::Sequence(_) | Node::Repeat { .. });
                repeat(self.terminal(*item), is_atom, *min, *max)
            }
            Node::Token { .. } => unreachable!("a terminal has no tokens"),
        }
    }
}

fn sequence(items: Vec<String>) -> String {
    if items.is_empty() { "\"\"".to_owned() } else { items.join(" ") }
}

fn choice(items: Vec<String>) -> String {
    format!("({})", items.join(" | "))
}

fn repeat(item: String, is_atom: bool, min: u32, max: Option<u32>) -> String {
    let item = if is_atom { item } else { format!("({item})") };
    match (min, max) {
        (_, Some(0)) => "\"\"".to_owned(),
        (0, None) => item + "*",
        (1, None) => item + "+",
        (0, Some(1)) => item + "?",
        (min, None) => format!("{item}{{{min},}}"),
        (min, Some(max)) => format!("{item}{{{min},{max}}}"),
    }
}

fn class(set: &CharSet) -> String {
    let mut text = String::from("/[");
    for (low, high) in set.ranges() {
        text += &escape(low);
        if high != low {
            text += "-";
            text += &escape(high);
        }
    }
    text + "]/"
}

/// Returns a character in a regular expression between slashes.
fn escape(char: char) -> String {
    if char.is_alphanumeric() || char == ' ' || char == '_' {
        char.to_string()
    } else {
        format!("\\x{{{:X}}}", u32::from(char))
    }
}
