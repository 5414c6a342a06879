//! The device's pages by number: the free ones, and the reference counts of the others.

use std::{cmp::Reverse, collections::BinaryHeap};

use paguro_backend::PageId;

use crate::options::PageOrder;

/// State of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Page 0: padded rows write it, no row reads it, and it has no owner.
    Scratch,
    /// In the free list.
    Free,
    /// Named by this many entries of block tables, at least one.
    Held(u32),
    /// Not in a block table; held by the prefix cache until the page is needed.
    Kept,
}

/// All pages, allocated once. The contents are in the runner; this type counts references.
#[derive(Debug)]
pub(crate) struct Arena {
    states: Vec<State>,
    /// Place of each page in the order of handing out, `[pages]`.
    places: Vec<u32>,
    /// Free pages, the first in that order on top: a sequence alone gets its pages in order, every time.
    free: BinaryHeap<Reverse<(u32, PageId)>>,
}

impl Arena {
    /// `pages` pages, page 0 included.
    pub fn new(pages: usize, order: PageOrder) -> Self {
        let mut places: Vec<u32> = (0..pages as u32).collect();
        if let PageOrder::Scattered { seed } = order {
            shuffle(&mut places, seed);
        }
        let mut states = vec![State::Free; pages];
        states[0] = State::Scratch;
        let free = (1..pages).map(|page| Reverse((places[page], PageId(page as u32)))).collect();
        Self { states, places, free }
    }

    /// Returns the number of pages that sequences can use.
    pub fn usable(&self) -> usize {
        self.states.len() - 1
    }

    pub fn free(&self) -> usize {
        self.free.len()
    }

    pub fn state(&self, page: PageId) -> State {
        self.states[page.0 as usize]
    }

    /// Returns the pages that only the prefix cache holds, in ascending order.
    pub fn kept(&self) -> impl Iterator<Item = PageId> {
        let states = (0..).zip(&self.states);
        states.filter(|(_, state)| **state == State::Kept).map(|(page, _)| PageId(page))
    }

    /// Allocates a free page for one block table.
    pub fn allocate(&mut self) -> Option<PageId> {
        let Reverse((_, page)) = self.free.pop()?;
        assert_eq!(self.state(page), State::Free, "page {page:?} was in the free list");
        self.states[page.0 as usize] = State::Held(1);
        Some(page)
    }

    /// Adds a reference of a block table.
    pub fn share(&mut self, page: PageId) {
        let state = &mut self.states[page.0 as usize];
        *state = match *state {
            State::Held(references) => State::Held(references + 1),
            State::Kept => State::Held(1),
            other => panic!("page {page:?} is shared but {other:?}"),
        };
    }

    /// Removes a reference of a block table. Returns true if it was the last one; the page must then be passed to
    /// [`Arena::free_page`] or [`Arena::keep`].
    pub fn release(&mut self, page: PageId) -> bool {
        let state = &mut self.states[page.0 as usize];
        match *state {
            State::Held(1) => true,
            State::Held(references) => {
                *state = State::Held(references - 1);
                false
            }
            other => panic!("page {page:?} is released but {other:?}"),
        }
    }

    /// Returns a page to the free list, from its last holder or from the prefix cache.
    pub fn free_page(&mut self, page: PageId) {
        let state = &mut self.states[page.0 as usize];
        assert!(matches!(*state, State::Held(1) | State::Kept), "page {page:?} is given back but {state:?}");
        *state = State::Free;
        self.free.push(Reverse((self.places[page.0 as usize], page)));
    }

    /// Passes the page from its last holder to the prefix cache.
    pub fn keep(&mut self, page: PageId) {
        let state = &mut self.states[page.0 as usize];
        assert_eq!(*state, State::Held(1), "page {page:?} is kept");
        *state = State::Kept;
    }

    /// Recounts all references from the block tables of all sequences (without scratch entries) and the pages of the
    /// prefix cache.
    pub fn check(
        &self,
        entries: impl Iterator<Item = PageId>,
        kept: impl Iterator<Item = PageId>,
    ) -> Result<(), String> {
        let mut references = vec![0_u32; self.states.len()];
        for page in entries {
            references[page.0 as usize] += 1;
        }
        let mut expected: Vec<State> = references
            .iter()
            .map(|&count| if count == 0 { State::Free } else { State::Held(count) })
            .collect();
        if references[0] > 0 {
            return Err("a block table holds the scratch page".into());
        }
        expected[0] = State::Scratch;
        for page in kept {
            let state = &mut expected[page.0 as usize];
            if *state != State::Free {
                return Err(format!("page {page:?} is kept by the cache but also {state:?}"));
            }
            *state = State::Kept;
        }
        if let Some(page) = (0..self.states.len()).find(|&page| self.states[page] != expected[page]) {
            return Err(format!("page {page} is {:?} but should be {:?}", self.states[page], expected[page]));
        }
        let mut listed = vec![false; self.states.len()];
        for Reverse((_, page)) in &self.free {
            if std::mem::replace(&mut listed[page.0 as usize], true) {
                return Err(format!("page {page:?} is in the free list twice"));
            }
        }
        match (0..self.states.len()).find(|&page| listed[page] != (self.states[page] == State::Free)) {
            Some(page) => {
                Err(format!("page {page} is {:?}, in the free list: {}", self.states[page], listed[page]))
            }
            None => Ok(()),
        }
    }
}

/// Fisher-Yates with the SplitMix64 generator (Steele, Lea, Flood 2014): the same order for the same seed.
fn shuffle(items: &mut [u32], seed: u64) {
    let mut state = seed;
    for last in (1..items.len()).rev() {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        items.swap(last, (z % (last as u64 + 1)) as usize);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_come_in_order_even_after_they_went_back_out_of_order() {
        let mut arena = Arena::new(6, PageOrder::InOrder);
        let taken: Vec<_> = std::iter::from_fn(|| arena.allocate()).collect();
        assert_eq!(taken, [1, 2, 3, 4, 5].map(PageId));
        for page in [3, 1, 5, 2, 4].map(PageId) {
            assert!(arena.release(page));
            arena.free_page(page);
        }
        assert_eq!(std::iter::from_fn(|| arena.allocate()).collect::<Vec<_>>(), taken);
    }

    #[test]
    fn scattered_order_is_a_permutation_that_depends_on_the_seed_only() {
        let order = |seed| {
            let mut arena = Arena::new(100, PageOrder::Scattered { seed });
            std::iter::from_fn(move || arena.allocate()).map(|page| page.0).collect::<Vec<_>>()
        };
        let mut sorted = order(7);
        assert_eq!(order(7), sorted);
        assert_ne!(order(8), sorted);
        let neighbours = sorted.windows(2).filter(|pair| pair[1] == pair[0] + 1).count();
        assert!(neighbours < 10, "{neighbours} of 98 pairs are in order");
        sorted.sort();
        assert_eq!(sorted, (1..100).collect::<Vec<_>>());
    }

    #[test]
    #[should_panic(expected = "is released but Free")]
    fn releasing_a_free_page_is_a_defect() {
        let mut arena = Arena::new(3, PageOrder::InOrder);
        arena.release(PageId(1));
    }

    #[test]
    fn check_finds_leaks_and_wrong_counts() {
        let mut arena = Arena::new(4, PageOrder::InOrder);
        let page = arena.allocate().unwrap();
        assert!(arena.check([page].into_iter(), [].into_iter()).is_ok());
        let leak = arena.check([].into_iter(), [].into_iter()).unwrap_err();
        assert_eq!(leak, "page 1 is Held(1) but should be Free");
        arena.share(page);
        let count = arena.check([page].into_iter(), [].into_iter()).unwrap_err();
        assert_eq!(count, "page 1 is Held(2) but should be Held(1)");
        arena.release(page);
        arena.release(page);
        arena.keep(page);
        assert!(arena.check([].into_iter(), [page].into_iter()).is_ok());
        assert!(arena.check([].into_iter(), [].into_iter()).is_err());
    }
}
