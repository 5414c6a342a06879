//! Merging neighbours until nothing merges: the part that both kinds of byte-pair encoding share.
//!
//! A heap holds every pair that could merge, best first, so a text of `n` symbols without a single boundary takes
//! `O(n log n)`, not `O(n²)`.

use std::{cmp::Reverse, collections::BinaryHeap, ops::Range};

/// Result of merging two neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Merge {
    /// Lower ranks merge first.
    pub(super) rank: u32,
    /// The token that they become.
    pub(super) token: u32,
}

/// A stretch of the text that is, or may become, one token.
#[derive(Clone, Copy, Debug)]
pub(super) struct Symbol {
    /// `None` for a span without a token, which is compared by its text.
    pub(super) token: Option<u32>,
    start: usize,
    end: usize,
    prev: usize,
    next: usize,
}

impl Symbol {
    /// Returns its span in the text.
    pub(super) fn span(&self) -> Range<usize> {
        self.start..self.end
    }
}

/// No neighbour. Also the `next` of a symbol that its left neighbour swallowed.
const NONE: usize = usize::MAX;

/// A pair that could merge. Equal ranks merge from left to right.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    merge: MergeOrder,
    /// End of the right symbol. If it has changed, one of the two has merged with another symbol.
    end: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct MergeOrder {
    rank: u32,
    left: usize,
    token: u32,
}

/// Buffers of [`Merger::run`], reused from word to word.
#[derive(Debug, Default)]
pub(super) struct Merger {
    symbols: Vec<Symbol>,
    heap: BinaryHeap<Reverse<Candidate>>,
}

impl Merger {
    /// Merges neighbouring `symbols` (consecutive spans of one text, each with its token) while `merge` returns a
    /// result, lowest rank and leftmost first, and calls `emit` for the remaining symbols.
    pub(super) fn run(
        &mut self,
        symbols: impl Iterator<Item = (Range<usize>, Option<u32>)>,
        merge: impl Fn(&Symbol, &Symbol) -> Option<Merge>,
        mut emit: impl FnMut(&Symbol),
    ) {
        self.symbols.clear();
        self.heap.clear();
        for (index, (span, token)) in symbols.enumerate() {
            let prev = index.checked_sub(1).unwrap_or(NONE);
            self.symbols.push(Symbol { token, start: span.start, end: span.end, prev, next: index + 1 });
        }
        let Some(last) = self.symbols.last_mut() else { return };
        last.next = NONE;
        for left in 0..self.symbols.len() - 1 {
            self.consider(left, &merge);
        }

        while let Some(Reverse(Candidate { merge: MergeOrder { left, token, .. }, end })) = self.heap.pop() {
            let Symbol { start, next: right, prev, .. } = self.symbols[left];
            if right == NONE || self.symbols[right].end != end {
                continue;
            }
            let next = self.symbols[right].next;
            self.symbols[left] = Symbol { token: Some(token), start, end, prev, next };
            self.symbols[right].next = NONE;
            if next != NONE {
                self.symbols[next].prev = left;
                self.consider(left, &merge);
            }
            if prev != NONE {
                self.consider(prev, &merge);
            }
        }

        let mut index = 0;
        while index != NONE {
            emit(&self.symbols[index]);
            index = self.symbols[index].next;
        }
    }

    fn consider(&mut self, left: usize, merge: &impl Fn(&Symbol, &Symbol) -> Option<Merge>) {
        let right = &self.symbols[self.symbols[left].next];
        if let Some(Merge { rank, token }) = merge(&self.symbols[left], right) {
            self.heap.push(Reverse(Candidate { merge: MergeOrder { rank, left, token }, end: right.end }));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Token ids of single letters are their bytes; `rules[i]` merges two tokens into `256 + i`, at rank `i`.
    fn merged(text: &[u8], rules: &[(u32, u32)]) -> Vec<u32> {
        let mut out = Vec::new();
        Merger::default().run(
            text.iter().enumerate().map(|(i, &byte)| (i..i + 1, Some(u32::from(byte)))),
            |left, right| {
                let rule = rules
                    .iter()
                    .position(|&rule| (Some(rule.0), Some(rule.1)) == (left.token, right.token))?;
                Some(Merge { rank: rule as u32, token: 256 + rule as u32 })
            },
            |symbol| out.extend(symbol.token),
        );
        out
    }

    /// The definition: look for the best pair in the whole text, merge it, start again.
    fn naive(text: &[u8], rules: &[(u32, u32)]) -> Vec<u32> {
        let mut tokens: Vec<u32> = text.iter().map(|&byte| u32::from(byte)).collect();
        loop {
            let best = (0..tokens.len().saturating_sub(1))
                .filter_map(|i| Some((rules.iter().position(|&rule| rule == (tokens[i], tokens[i + 1]))?, i)))
                .min();
            let Some((rule, at)) = best else { return tokens };
            tokens[at] = 256 + rule as u32;
            tokens.remove(at + 1);
        }
    }

    proptest! {
        #[test]
        fn is_what_the_naive_way_gives(
            text in proptest::collection::vec(b'a'..=b'c', 0..40),
            raw in proptest::collection::vec((0..12_usize, 0..12_usize), 0..12),
        ) {
            // Rules refer to letters and to earlier rules; each pair once.
            let mut rules: Vec<(u32, u32)> = Vec::new();
            for (i, (left, right)) in raw.into_iter().enumerate() {
                let token = |n: usize| if n < 3 { (b'a' + n as u8).into() } else { 256 + ((n - 3) % (i + 1)) as u32 };
                let rule = (token(left), token(right));
                if !rules.contains(&rule) {
                    rules.push(rule);
                }
            }
            prop_assert_eq!(merged(&text, &rules), naive(&text, &rules));
        }
    }

    #[test]
    fn a_million_equal_letters_take_a_moment() {
        let text = vec![b'a'; 1 << 20];
        let rules: Vec<_> = std::iter::once((97, 97)).chain((0..10).map(|i| (256 + i, 256 + i))).collect();
        assert_eq!(merged(&text, &rules).len(), (1 << 20) >> 11);
    }
}
