//! Finds the regular parts of a grammar: those without recursion and without tokens. They can be terminals.

use super::{Node, NodeId, Source};

/// The regular rules of a grammar.
#[derive(Debug)]
pub struct Regular {
    rules: Vec<bool>,
}

impl Regular {
    /// Returns true if a node is regular.
    pub fn is(&self, source: &Source, node: NodeId) -> bool {
        match source.nodes[node] {
            Node::Class(_) | Node::Text(_) => true,
            Node::Token { .. } => false,
            Node::Rule(rule) => self.rules[rule],
            _ => source.children(node).iter().all(|&child| self.is(source, child)),
        }
    }
}

/// Makes loops of rules that end with themselves, and puts regular neighbors into nodes of their own.
pub fn prepare(source: &mut Source) -> Regular {
    for rule in 0..source.rules.len() {
        unroll(source, rule);
    }
    let regular = find(source);
    for rule in 0..source.rules.len() {
        if !regular.rules[rule] {
            let nodes: Vec<_> = source.body(rule).collect();
            nodes.into_iter().for_each(|node| group(source, &regular, node));
        }
    }
    regular
}

/// Rules are regular once all rules that they name are.
fn find(source: &Source) -> Regular {
    let count = source.rules.len();
    let mut users = vec![Vec::new(); count];
    let mut waiting = vec![0usize; count];
    for (rule, waiting) in waiting.iter_mut().enumerate() {
        for node in source.body(rule) {
            match source.nodes[node] {
                Node::Rule(used) => {
                    users[used].push(rule);
                    *waiting += 1;
                }
                // Never becomes regular.
                Node::Token { .. } => *waiting += 1,
                _ => {}
            }
        }
    }
    let mut rules = vec![false; count];
    let mut found: Vec<usize> = (0..count).filter(|&rule| waiting[rule] == 0).collect();
    while let Some(rule) = found.pop() {
        rules[rule] = true;
        for &user in &users[rule] {
            waiting[user] -= 1;
            if waiting[user] == 0 {
                found.push(user);
            }
        }
    }
    Regular { rules }
}

/// Joins adjacent regular items of a sequence, and regular alternatives of a choice.
fn group(source: &mut Source, regular: &Regular, node: NodeId) {
    let children = source.children(node).to_vec();
    let is_regular: Vec<bool> = children.iter().map(|&child| regular.is(source, child)).collect();
    if is_regular.iter().all(|&is| is) {
        return;
    }
    match source.nodes[node] {
        Node::Sequence(_) => {
            let mut items = Vec::new();
            let mut at = 0;
            while at < children.len() {
                let run = is_regular[at..].iter().take_while(|&&is| is).count();
                items.push(match run {
                    0 | 1 => children[at],
                    _ => source.add(Node::Sequence(children[at..at + run].to_vec())),
                });
                at += run.max(1);
            }
            source.nodes[node] = Node::Sequence(items);
        }
        Node::Choice(_) => {
            let of_kind = |kind: bool| {
                let with_kind = children.iter().zip(&is_regular);
                with_kind.filter(move |(_, is)| **is == kind).map(|(child, _)| *child)
            };
            let regular: Vec<_> = of_kind(true).collect();
            let mut items: Vec<_> = of_kind(false).collect();
            match regular.as_slice() {
                [] => {}
                [one] => items.push(*one),
                _ => items.push(source.add(Node::Choice(regular))),
            }
            source.nodes[node] = Node::Choice(items);
        }
        _ => {}
    }
}

/// Makes a loop of a rule that names itself only at its ends, as in `blank ::= ([ \t\n] blank)?`.
fn unroll(source: &mut Source, rule: usize) {
    let names_itself = |source: &Source, node| source.nodes[node] == Node::Rule(rule);
    let uses = source.body(rule).filter(|&node| names_itself(source, node)).count();
    if uses == 0 {
        return;
    }
    let mut ends = Ends { rule, loops: Vec::new(), last: Vec::new(), uses: 0 };
    ends.add(source, source.rules[rule], Vec::new());
    if ends.uses != uses || ends.last.is_empty() {
        return;
    }
    ends.loops.retain(|items| !items.is_empty());
    let mut choice = |alternatives: Vec<Vec<NodeId>>| {
        let alternatives = alternatives.into_iter().map(|items| source.add(Node::Sequence(items))).collect();
        source.add(Node::Choice(alternatives))
    };
    let (item, last) = (choice(ends.loops), choice(ends.last));
    let item = source.add(Node::Repeat { item, min: 0, max: None });
    source.rules[rule] = source.add(Node::Sequence(vec![item, last]));
}

/// Alternatives of a recursive rule: those that end with the rule, without it, and the others.
struct Ends {
    rule: usize,
    loops: Vec<Vec<NodeId>>,
    last: Vec<Vec<NodeId>>,
    /// Number of occurrences of the rule at an end.
    uses: usize,
}

impl Ends {
    /// Adds the alternatives of a node that ends the rule, after the nodes of `before`.
    fn add(&mut self, source: &Source, node: NodeId, mut before: Vec<NodeId>) {
        match &source.nodes[node] {
            Node::Rule(rule) if *rule == self.rule => {
                self.uses += 1;
                self.loops.push(before);
            }
            Node::Choice(items) => items.iter().for_each(|&item| self.add(source, item, before.clone())),
            Node::Sequence(items) if let [first @ .., last] = items.as_slice() => {
                before.extend(first);
                self.add(source, *last, before);
            }
            Node::Repeat { item, min: 0, max: Some(1) } => {
                self.last.push(before.clone());
                self.add(source, *item, before);
            }
            _ => {
                before.push(node);
                self.last.push(before);
            }
        }
    }
}
