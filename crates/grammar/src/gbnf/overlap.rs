//! Compares the languages of two terminals.

use std::collections::{HashMap, HashSet};

use super::{CharSet, Node, NodeId, Source};

/// Most states of a terminal's automaton.
pub const MAX_STATES: usize = 4_096;

/// Counted repetitions up to this many are written out; above, any number counts, so more texts than there are.
const MAX_COPIES: u32 = 32;

/// A terminal as a finite automaton. Its language is the terminal's, or more.
#[derive(Debug)]
pub struct Automaton {
    states: Vec<State>,
    start: usize,
    /// Most states that it may have.
    most: usize,
}

#[derive(Debug)]
enum State {
    Char(CharSet, usize),
    Either(usize, usize),
    End,
}

/// States that read a character, and whether the text may end.
#[derive(Debug, Default)]
struct Reach {
    states: Vec<usize>,
    ends: bool,
}

impl Automaton {
    /// Returns the automaton of a regular node; `None` if it would have more than `most` states.
    pub fn new(source: &Source, node: NodeId, most: usize) -> Option<Self> {
        let mut automaton = Self { states: vec![State::End], start: 0, most };
        automaton.start = automaton.add(source, node, 0)?;
        Some(automaton)
    }

    /// Returns the number of states.
    pub fn size(&self) -> usize {
        self.states.len()
    }

    fn state(&mut self, state: State) -> Option<usize> {
        self.states.push(state);
        (self.states.len() <= self.most).then(|| self.states.len() - 1)
    }

    /// Adds a node before the state `next`, and returns its first state.
    fn add(&mut self, source: &Source, node: NodeId, next: usize) -> Option<usize> {
        match &source.nodes[node] {
            Node::Class(set) => self.state(State::Char(set.clone(), next)),
            Node::Text(text) => text
                .chars()
                .rev()
                .try_fold(next, |next, char| self.state(State::Char(CharSet::one(char), next))),
            Node::Rule(rule) => self.add(source, source.rules[*rule], next),
            Node::Sequence(items) => {
                items.iter().rev().try_fold(next, |next, &item| self.add(source, item, next))
            }
            Node::Choice(items) => {
                let [others @ .., last] = items.as_slice() else { return Some(next) };
                let last = self.add(source, *last, next)?;
                others.iter().rev().try_fold(last, |other, &item| {
                    let first = self.add(source, item, next)?;
                    self.state(State::Either(first, other))
                })
            }
            &Node::Repeat { item, min, max } if max.unwrap_or(min) > MAX_COPIES => {
                self.repeat(source, item, min.min(1), None, next)
            }
            &Node::Repeat { item, min, max } => self.repeat(source, item, min, max, next),
            Node::Token { .. } => None,
        }
    }

    fn repeat(
        &mut self,
        source: &Source,
        item: NodeId,
        min: u32,
        max: Option<u32>,
        next: usize,
    ) -> Option<usize> {
        let mut first = next;
        match max {
            Some(max) => {
                for _ in min..max {
                    let more = self.add(source, item, first)?;
                    first = self.state(State::Either(more, next))?;
                }
            }
            None => {
                first = self.state(State::End)?;
                let more = self.add(source, item, first)?;
                self.states[first] = State::Either(more, next);
            }
        }
        (0..min).try_fold(first, |first, _| self.add(source, item, first))
    }

    /// Follows the choices from a state.
    fn reach(&self, state: usize) -> Reach {
        let mut reach = Reach::default();
        let (mut rest, mut seen) = (vec![state], HashSet::new());
        while let Some(state) = rest.pop() {
            match &self.states[state] {
                _ if !seen.insert(state) => {}
                State::Char(..) => reach.states.push(state),
                State::Either(a, b) => rest.extend([*a, *b]),
                State::End => reach.ends = true,
            }
        }
        reach
    }

    fn char(&self, state: usize) -> (&CharSet, usize) {
        match &self.states[state] {
            State::Char(set, next) => (set, *next),
            _ => unreachable!("only states that read a character are reached"),
        }
    }

    /// Returns the characters with which a text may begin, and whether it may be empty.
    pub fn first(&self) -> (CharSet, bool) {
        let reach = self.reach(self.start);
        let first = reach.states.iter().fold(CharSet::default(), |set, &state| set.union(self.char(state).0));
        (first, reach.ends)
    }
}

/// Overlap of two terminals.
#[derive(Clone, Debug)]
pub struct Overlap {
    /// True if both match one text that is not empty.
    pub have_common: bool,
    /// Characters that can follow a text of the first terminal in a longer text of the second.
    pub after: CharSet,
}

/// Compares two automata. Subtracts the number of comparisons from `budget`; `None` if it is exceeded.
pub fn compare(a: &Automaton, b: &Automaton, budget: &mut usize) -> Option<Overlap> {
    let mut overlap = Overlap { have_common: false, after: CharSet::default() };
    let (mut reach_a, mut reach_b) = (HashMap::new(), HashMap::new());
    let mut seen = HashSet::new();
    let mut rest = vec![(a.start, b.start)];
    let mut is_start = true;
    while let Some((at_a, at_b)) = rest.pop() {
        let in_a = reach_a.entry(at_a).or_insert_with(|| a.reach(at_a));
        let in_b = reach_b.entry(at_b).or_insert_with(|| b.reach(at_b));
        *budget = budget.checked_sub(1 + in_a.states.len() * in_b.states.len() + in_b.states.len())?;
        if in_a.ends && !is_start {
            overlap.have_common |= in_b.ends;
            for &state in &in_b.states {
                overlap.after = overlap.after.union(b.char(state).0);
            }
        }
        is_start = false;
        for &state_a in &in_a.states {
            let (set_a, next_a) = a.char(state_a);
            for &state_b in &in_b.states {
                let (set_b, next_b) = b.char(state_b);
                if set_a.intersects(set_b) && seen.insert((next_a, next_b)) {
                    rest.push((next_a, next_b));
                }
            }
        }
    }
    Some(overlap)
}
