//! The possible orders of a grammar's terminals, and pairs of terminals that can start at one position.

use std::collections::{HashMap, HashSet};

use super::CharSet;

/// Most terminals and tokens of a grammar that are compared.
const MAX_OCCURRENCES: usize = 2_048;

/// A rule's body with its terminals.
#[derive(Clone, Debug)]
pub enum Part {
    /// A terminal by its index.
    Terminal(usize),
    /// One of these tokens, as sets.
    Tokens(Vec<usize>),
    /// A rule by its index.
    Rule(usize),
    /// Parts one after the other.
    Sequence(Vec<Part>),
    /// One of several parts.
    Choice(Vec<Part>),
    /// A part several times.
    Repeat(Box<Part>, u32, Option<u32>),
}

impl Part {
    /// Calls `visit` for each rule that a part names.
    pub fn for_each_rule(&self, visit: &mut impl FnMut(usize)) {
        match self {
            Self::Terminal(_) | Self::Tokens(_) => {}
            Self::Rule(rule) => visit(*rule),
            Self::Sequence(parts) | Self::Choice(parts) => {
                parts.iter().for_each(|part| part.for_each_rule(visit));
            }
            Self::Repeat(part, ..) => part.for_each_rule(visit),
        }
    }
}

/// Symbol of an occurrence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Symbol {
    /// A terminal by its index.
    Terminal(usize),
    /// Some token.
    Tokens,
}

/// A set of occurrences.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Set(Vec<u64>);

impl Set {
    fn empty(count: usize) -> Self {
        Self(vec![0; count.div_ceil(64)])
    }

    /// Adds the members of another set. Returns whether there were new ones.
    fn add_all(&mut self, other: &Self) -> bool {
        let mut grew = 0;
        for (word, &other) in self.0.iter_mut().zip(&other.0) {
            grew |= other & !*word;
            *word |= other;
        }
        grew != 0
    }

    fn add(&mut self, member: usize) {
        self.0[member / 64] |= 1 << (member % 64);
    }

    fn members(&self) -> impl Iterator<Item = usize> {
        self.0.iter().enumerate().flat_map(|(index, &word)| {
            (0..64).filter(move |bit| word >> bit & 1 == 1).map(move |bit| index * 64 + bit)
        })
    }
}

/// All occurrences of terminals and tokens in a grammar.
#[derive(Debug)]
pub struct Occurrences {
    symbols: Vec<Symbol>,
    /// Occurrences that can directly follow each occurrence.
    next: Vec<Set>,
    /// The occurrences with which an answer may begin.
    first: Set,
    /// Remaining number of steps, in machine words.
    steps: usize,
}

/// A grammar that is too large for the comparison.
#[derive(Debug)]
pub struct TooLarge;

/// First set of a part: occurrences with which its texts may begin.
#[derive(Clone)]
struct First {
    set: Set,
    is_nullable: bool,
}

/// The rules of a grammar whose terminals are counted.
struct Walk<'p> {
    /// The place of each rule in the list of rules.
    index: Vec<Option<usize>>,
    is_nullable: &'p [bool],
    first: Vec<First>,
    /// Occurrences that can follow each rule.
    follow: Vec<Set>,
    occurrences: Occurrences,
    changed: bool,
    /// The next occurrence.
    at: usize,
}

impl Occurrences {
    /// Finds the occurrences of the rules, of which the first is the grammar's. Says of each terminal whether it may be
    /// empty.
    pub fn find(rules: &[(usize, Part)], is_nullable: &[bool], steps: usize) -> Result<Self, TooLarge> {
        let mut symbols = Vec::new();
        rules.iter().for_each(|(_, part)| list(part, &mut symbols));
        let count = symbols.len();
        if count > MAX_OCCURRENCES {
            return Err(TooLarge);
        }
        let mut index = vec![None; rules.iter().map(|(rule, _)| rule + 1).max().unwrap_or(0)];
        rules.iter().enumerate().for_each(|(at, (rule, _))| index[*rule] = Some(at));
        let occurrences =
            Self { symbols, next: vec![Set::empty(count); count], first: Set::empty(count), steps };
        let first = vec![First { set: Set::empty(count), is_nullable: false }; rules.len()];
        let follow = vec![Set::empty(count); rules.len()];
        let mut walk = Walk { index, is_nullable, first, follow, occurrences, changed: true, at: 0 };
        while std::mem::take(&mut walk.changed) {
            walk.at = 0;
            for (at, (_, part)) in rules.iter().enumerate() {
                let first = walk.first(part)?;
                let known = &mut walk.first[at];
                walk.changed |= known.set.add_all(&first.set) || known.is_nullable != first.is_nullable;
                known.is_nullable = first.is_nullable;
            }
        }
        walk.changed = true;
        while std::mem::take(&mut walk.changed) {
            walk.at = 0;
            for (at, (_, part)) in rules.iter().enumerate() {
                let follow = walk.follow[at].clone();
                walk.follow(part, &follow)?;
            }
        }
        let first = walk.first.first().map_or_else(|| Set::empty(count), |first| first.set.clone());
        Ok(Self { first, ..walk.occurrences })
    }

    /// Finds pairs of occurrences that can start at one position of an answer, and calls `visit` for each, with the
    /// characters that can follow the first one. `visit` returns true if one text can match both. Returns the remaining
    /// steps.
    pub fn pairs(
        mut self,
        first_chars: &[CharSet],
        mut visit: impl FnMut(Symbol, Symbol, &CharSet) -> Result<bool, TooLarge>,
    ) -> Result<usize, TooLarge> {
        let count = self.symbols.len();
        let after: Vec<CharSet> = self.next.iter().map(|next| self.chars(next, first_chars)).collect();
        // Occurrences share their following sets, so each pair of sets is expanded once.
        let mut sets: HashMap<&Set, usize> = HashMap::new();
        let mut next = Vec::with_capacity(count);
        for set in &self.next {
            let new = sets.len();
            next.push(*sets.entry(set).or_insert(new));
        }
        let mut expanded = HashSet::new();
        let mut known = vec![Set::empty(count); count];
        let mut rest: Vec<(u32, u32)> = Vec::new();
        let mut new = Some((&self.first, &self.first));
        loop {
            if let Some((left, right)) = new.take() {
                for a in left.members() {
                    self.steps = self.steps.checked_sub(right.0.len()).ok_or(TooLarge)?;
                    let known = &mut known[a];
                    let unknown: Vec<u64> =
                        right.0.iter().zip(&known.0).map(|(new, old)| new & !old).collect();
                    let unknown = Set(unknown);
                    known.add_all(&unknown);
                    rest.extend(unknown.members().map(|b| (a as u32, b as u32)));
                }
            }
            let Some((a, b)) = rest.pop() else { return Ok(self.steps) };
            let (a, b) = (a as usize, b as usize);
            self.steps = self.steps.checked_sub(1).ok_or(TooLarge)?;
            if visit(self.symbols[a], self.symbols[b], &after[a])? && expanded.insert((next[a], next[b])) {
                new = Some((&self.next[a], &self.next[b]));
            }
        }
    }

    fn chars(&self, set: &Set, first_chars: &[CharSet]) -> CharSet {
        let mut seen = vec![false; first_chars.len()];
        let mut chars = CharSet::default();
        for occurrence in set.members() {
            if let Symbol::Terminal(terminal) = self.symbols[occurrence]
                && !std::mem::replace(&mut seen[terminal], true)
            {
                chars = chars.union(&first_chars[terminal]);
            }
        }
        chars
    }
}

/// Lists the symbols at the occurrences of a part, in order.
fn list(part: &Part, symbols: &mut Vec<Symbol>) {
    match part {
        Part::Terminal(terminal) => symbols.push(Symbol::Terminal(*terminal)),
        Part::Tokens(_) => symbols.push(Symbol::Tokens),
        Part::Rule(_) => {}
        Part::Sequence(parts) | Part::Choice(parts) => parts.iter().for_each(|part| list(part, symbols)),
        Part::Repeat(part, ..) => list(part, symbols),
    }
}

impl Walk<'_> {
    fn pay(&mut self) -> Result<(), TooLarge> {
        let words = self.occurrences.first.0.len() + 1;
        self.occurrences.steps = self.occurrences.steps.checked_sub(words).ok_or(TooLarge)?;
        Ok(())
    }

    fn rule(&self, rule: usize) -> usize {
        self.index[rule].expect("all rules that are named are there")
    }

    /// Returns the first set of a part, and advances to the occurrence after it.
    fn first(&mut self, part: &Part) -> Result<First, TooLarge> {
        self.pay()?;
        let empty = || Set::empty(self.occurrences.symbols.len());
        Ok(match part {
            Part::Terminal(_) | Part::Tokens(_) => {
                let mut set = empty();
                set.add(self.at);
                self.at += 1;
                First { set, is_nullable: self.may_be_empty(part) }
            }
            Part::Rule(rule) => self.first[self.rule(*rule)].clone(),
            Part::Sequence(parts) => {
                let mut first = First { set: empty(), is_nullable: true };
                for part in parts {
                    let next = self.first(part)?;
                    if first.is_nullable {
                        first.set.add_all(&next.set);
                        first.is_nullable = next.is_nullable;
                    }
                }
                first
            }
            Part::Choice(parts) => {
                let mut first = First { set: empty(), is_nullable: parts.is_empty() };
                for part in parts {
                    let next = self.first(part)?;
                    first.set.add_all(&next.set);
                    first.is_nullable |= next.is_nullable;
                }
                first
            }
            Part::Repeat(part, min, _) => {
                let first = self.first(part)?;
                First { is_nullable: first.is_nullable || *min == 0, ..first }
            }
        })
    }

    fn may_be_empty(&self, part: &Part) -> bool {
        match part {
            Part::Terminal(terminal) => self.is_nullable[*terminal],
            _ => false,
        }
    }

    /// Records that the occurrences of `follow` can follow a part, and advances to the next occurrence.
    fn follow(&mut self, part: &Part, follow: &Set) -> Result<(), TooLarge> {
        self.pay()?;
        match part {
            Part::Terminal(_) | Part::Tokens(_) => {
                self.occurrences.next[self.at].add_all(follow);
                self.at += 1;
            }
            Part::Rule(rule) => {
                let rule = self.rule(*rule);
                self.changed |= self.follow[rule].add_all(follow);
            }
            Part::Choice(parts) => {
                for part in parts {
                    self.follow(part, follow)?;
                }
            }
            Part::Sequence(parts) => {
                let begin = self.at;
                let firsts: Vec<First> =
                    parts.iter().map(|part| self.first(part)).collect::<Result<_, _>>()?;
                let mut follows = vec![follow.clone()];
                for first in firsts[1.min(firsts.len())..].iter().rev() {
                    let mut set = first.set.clone();
                    if first.is_nullable {
                        set.add_all(&follows[follows.len() - 1]);
                    }
                    follows.push(set);
                }
                self.at = begin;
                for (part, follow) in parts.iter().zip(follows.iter().rev()) {
                    self.follow(part, follow)?;
                }
            }
            Part::Repeat(part, _, max) => {
                let begin = self.at;
                let mut set = follow.clone();
                if *max != Some(1) {
                    set.add_all(&self.first(part)?.set);
                }
                self.at = begin;
                self.follow(part, &set)?;
            }
        }
        Ok(())
    }
}
