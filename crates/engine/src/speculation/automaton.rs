//! A suffix automaton that is built one token at a time (Blumer et al.: The smallest automaton recognizing the subwords of
//! a text, 1985). It knows, after each token, the longest end of the text that also occurs earlier, and a place of that
//! occurrence.
//!
//! A state is a set of ends of the text's parts: all parts that end at the same positions. A text of `n` tokens has at
//! most `2n` states and `3n` edges, and all steps together take a time that is linear in `n`. Edges of a state are a
//! list; those of the few states with many edges are also in a hash table.

use std::collections::HashMap;

/// Number of edges up to which a state's list is searched.
const LISTED: u32 = 8;

/// No state, or no edge.
const NONE: u32 = u32::MAX;

/// An occurrence of the longest end of the text that also occurs earlier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Match {
    /// Number of its tokens, at least 1.
    pub len: usize,
    /// Position after the earlier occurrence.
    pub next: usize,
}

#[derive(Clone, Copy, Debug)]
struct State {
    /// Length of the longest part.
    len: u32,
    /// State of the longest end of these parts that is in another state; `NONE` of the root.
    link: u32,
    /// Position of the last token of an occurrence, the latest one for states that were matches.
    end: u32,
    /// First edge.
    first: u32,
    /// Number of edges.
    degree: u32,
}

#[derive(Clone, Copy, Debug)]
struct Edge {
    token: u32,
    to: u32,
    /// Next edge of the same state.
    next: u32,
}

/// The automaton with its text.
#[derive(Clone, Debug)]
pub(crate) struct SuffixAutomaton {
    text: Vec<u32>,
    states: Vec<State>,
    edges: Vec<Edge>,
    /// Edges of states with more than [`LISTED`] of them.
    table: HashMap<(u32, u32), u32>,
    /// State of the whole text.
    last: u32,
    found: Option<Match>,
}

impl Default for SuffixAutomaton {
    fn default() -> Self {
        let root = State { len: 0, link: NONE, end: 0, first: NONE, degree: 0 };
        Self {
            text: Vec::new(),
            states: vec![root],
            edges: Vec::new(),
            table: HashMap::new(),
            last: 0,
            found: None,
        }
    }
}

impl SuffixAutomaton {
    /// Returns the text so far.
    pub fn text(&self) -> &[u32] {
        &self.text
    }

    /// Returns the longest end of the text that also occurs earlier.
    pub fn found(&self) -> Option<Match> {
        self.found
    }

    /// Appends a token to the text.
    pub fn push(&mut self, token: u32) {
        let end = self.text.len() as u32;
        self.text.push(token);
        let current = self.add_state(State { len: end + 1, link: 0, end, first: NONE, degree: 0 });
        let mut at = self.last;
        let mut known = None;
        while at != NONE {
            known = self.edge(at, token);
            if known.is_some() {
                break;
            }
            self.add_edge(at, token, current);
            at = self.states[at as usize].link;
        }
        if let Some(edge) = known {
            let next = self.edges[edge as usize].to;
            let link = match self.states[at as usize].len + 1 == self.states[next as usize].len {
                true => next,
                false => self.divide(at, token, next),
            };
            self.states[current as usize].link = link;
        }
        self.last = current;
        let link = self.states[current as usize].link;
        let state = &mut self.states[link as usize];
        self.found = (link != 0).then(|| {
            let earlier = std::mem::replace(&mut state.end, end);
            Match { len: state.len as usize, next: earlier as usize + 1 }
        });
    }

    /// Moves the parts of `next` that are one `token` longer than those of `at` to a state of their own, and returns it.
    fn divide(&mut self, mut at: u32, token: u32, next: u32) -> u32 {
        let State { link, end, first, .. } = self.states[next as usize];
        let len = self.states[at as usize].len + 1;
        let part = self.add_state(State { len, link, end, first: NONE, degree: 0 });
        let mut edge = first;
        while edge != NONE {
            let Edge { token, to, next } = self.edges[edge as usize];
            self.add_edge(part, token, to);
            edge = next;
        }
        while at != NONE {
            let Some(edge) = self.edge(at, token).filter(|&edge| self.edges[edge as usize].to == next) else {
                break;
            };
            self.edges[edge as usize].to = part;
            at = self.states[at as usize].link;
        }
        self.states[next as usize].link = part;
        part
    }

    fn add_state(&mut self, state: State) -> u32 {
        self.states.push(state);
        self.states.len() as u32 - 1
    }

    fn edge(&self, from: u32, token: u32) -> Option<u32> {
        let State { first, degree, .. } = self.states[from as usize];
        if degree > LISTED {
            return self.table.get(&(from, token)).copied();
        }
        let mut edge = first;
        while edge != NONE {
            let Edge { token: other, next, .. } = self.edges[edge as usize];
            if other == token {
                return Some(edge);
            }
            edge = next;
        }
        None
    }

    fn add_edge(&mut self, from: u32, token: u32, to: u32) {
        let edge = self.edges.len() as u32;
        let State { first, degree, .. } = &mut self.states[from as usize];
        self.edges.push(Edge { token, to, next: *first });
        (*first, *degree) = (edge, *degree + 1);
        if *degree == LISTED + 1 {
            let mut edge = edge;
            while edge != NONE {
                let Edge { token, next, .. } = self.edges[edge as usize];
                self.table.insert((from, token), edge);
                edge = next;
            }
        } else if *degree > LISTED {
            self.table.insert((from, token), edge);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns the length of the longest end of `text` that also occurs earlier, by comparing.
    fn longest(text: &[u32]) -> usize {
        let occurs = |len: &usize| {
            let end = &text[text.len() - len..];
            text[..text.len() - 1].windows(*len).any(|part| part == end)
        };
        (1..text.len()).take_while(occurs).last().unwrap_or(0)
    }

    fn check(tokens: &[u32]) -> Result<(), String> {
        let mut automaton = SuffixAutomaton::default();
        for (index, &token) in tokens.iter().enumerate() {
            automaton.push(token);
            let text = &tokens[..=index];
            let expected = longest(text);
            let Some(Match { len, next }) = automaton.found() else {
                if expected > 0 {
                    return Err(format!("{text:?}: nothing instead of {expected}"));
                }
                continue;
            };
            if len != expected || next > index || text[next - len..next] != text[text.len() - len..] {
                return Err(format!("{text:?}: {len} before {next} instead of {expected}"));
            }
        }
        let (states, edges) = (automaton.states.len(), automaton.edges.len());
        match states <= 2 * tokens.len() + 1 && edges <= 3 * tokens.len() {
            true => Ok(()),
            false => Err(format!("{states} states and {edges} edges for {} tokens", tokens.len())),
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn the_longest_end_that_occurs_earlier_is_found(
            tokens in (1..40_u32).prop_flat_map(|vocab| prop::collection::vec(0..vocab, 0..120))
        ) {
            check(&tokens).map_err(TestCaseError::fail)?;
        }

        /// A text of a few parts that return: long matches.
        #[test]
        fn long_repetitions_are_found(
            parts in prop::collection::vec(prop::collection::vec(0..30_u32, 1..30), 1..4),
            order in prop::collection::vec((0..4_usize, 0..30_usize), 1..8),
        ) {
            let part = |&(part, cut): &(usize, usize)| {
                let part = &parts[part % parts.len()];
                part[..part.len() - cut % part.len()].to_vec()
            };
            check(&order.iter().flat_map(part).collect::<Vec<_>>()).map_err(TestCaseError::fail)?;
        }
    }

    #[test]
    fn the_latest_occurrence_of_a_match_is_found() {
        let mut automaton = SuffixAutomaton::default();
        // `1 2` with three ends; each match is the one before.
        for (token, expected) in [(1, None), (2, None), (3, None), (1, Some((1, 1))), (2, Some((2, 2)))]
            .into_iter()
            .chain([(4, None), (1, Some((1, 4))), (2, Some((2, 5))), (4, Some((3, 6)))])
        {
            automaton.push(token);
            let found = automaton.found().map(|Match { len, next }| (len, next));
            assert_eq!(found, expected, "{:?}", automaton.text());
        }
    }

    /// Texts of a single token, of different tokens, and of a period: all within the bounds of states and edges.
    #[test]
    fn states_and_edges_are_linear_in_the_text() {
        const TOKENS: u32 = 50_000;
        let texts: [fn(u32) -> u32; 5] =
            [|_| 7, |at| at, |at| at % 1000, |at| at.wrapping_mul(at) % 257, u32::trailing_zeros];
        for make in texts {
            let mut automaton = SuffixAutomaton::default();
            (0..TOKENS).for_each(|at| automaton.push(make(at)));
            assert!(automaton.states.len() <= 2 * TOKENS as usize, "{}", automaton.states.len());
            assert!(automaton.edges.len() <= 3 * TOKENS as usize, "{}", automaton.edges.len());
        }
    }
}
