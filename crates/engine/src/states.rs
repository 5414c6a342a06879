//! Slots for the states of sequences: the free ones, and the reference counts of the others.
//!
//! A running sequence has one slot. Branches of a request start with a common slot. Each moves to its own slot in its
//! first step, in which it reads the shared one. So with one slot more than places, at least one branch can always
//! continue.
//!
//! Slots are planned at load: one for each place of a running sequence, and one more. If they would take more than half
//! of the memory beside the weights, there are fewer places.

use std::{cmp::Reverse, collections::BinaryHeap};

use paguro_backend::{StateId, StateUse};

/// All slots. The contents live in the runner.
#[derive(Debug)]
pub(crate) struct States {
    /// Uses of each slot by sequences.
    references: Vec<u32>,
    /// The lowest number first.
    free: BinaryHeap<Reverse<StateId>>,
}

impl States {
    /// `slots` slots; none for models whose sequences have no states.
    pub fn new(slots: usize) -> Self {
        let free = (0..slots as u32).map(|slot| Reverse(StateId(slot))).collect();
        Self { references: vec![0; slots], free }
    }

    /// Slots for `sequences` sequences that run.
    pub fn slots_for(sequences: usize) -> usize {
        if sequences > 1 { sequences + 1 } else { sequences }
    }

    pub fn total(&self) -> usize {
        self.references.len()
    }

    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Reserves the state use of a sequence's next step, whose state has been `now` so far. `None` if no slot is free
    /// for a shared state. Models without slots have no state use.
    pub fn reserve(&mut self, now: Option<StateUse>) -> Option<Option<StateUse>> {
        if self.references.is_empty() {
            return Some(None);
        }
        match now {
            Some(state) if self.is_shared(state) => {
                Some(Some(StateUse { read: state.write, write: self.take()? }))
            }
            Some(own) => Some(Some(own)),
            None => Some(Some(StateUse::in_place(self.take()?))),
        }
    }

    fn take(&mut self) -> Option<StateId> {
        let Reverse(slot) = self.free.pop()?;
        self.references[slot.0 as usize] = 1;
        Some(slot)
    }

    /// Returns true if several sequences continue from this state.
    pub fn is_shared(&self, state: StateUse) -> bool {
        self.references[state.write.0 as usize] > 1
    }

    /// Adds a sequence that continues from this state, which no planned step changes.
    pub fn share(&mut self, state: StateUse) {
        self.references[state.write.0 as usize] += 1;
    }

    /// The step is computed: a state that it read is not needed any more.
    pub fn settle(&mut self, state: &mut StateUse) {
        if state.read != state.write {
            self.let_go(state.read);
            state.read = state.write;
        }
    }

    /// Releases the state of a sequence.
    pub fn release(&mut self, mut state: StateUse) {
        self.settle(&mut state);
        self.let_go(state.write);
    }

    fn let_go(&mut self, slot: StateId) {
        let references = &mut self.references[slot.0 as usize];
        assert!(*references > 0, "state {slot:?} is released but free");
        *references -= 1;
        if *references == 0 {
            self.free.push(Reverse(slot));
        }
    }

    /// Recounts everything against the states of all sequences.
    pub fn check(&self, used: impl Iterator<Item = StateUse>) -> Result<(), String> {
        let mut references = vec![0; self.references.len()];
        for StateUse { read, write } in used {
            references[write.0 as usize] += 1;
            if read != write {
                references[read.0 as usize] += 1;
            }
        }
        if references != self.references {
            return Err(format!(
                "sequences use states {references:?}, but {:?} are counted",
                self.references
            ));
        }
        let unused = references.iter().filter(|references| **references == 0).count();
        let is_free = |slot: &Reverse<StateId>| references[slot.0.0 as usize] == 0;
        match self.free.len() == unused && self.free.iter().all(is_free) {
            true => Ok(()),
            false => Err(format!("{unused} states are unused, but {:?} are free", self.free)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn branches_part_one_step_after_the_other() {
        let mut states = States::new(States::slots_for(3));
        let trunk = states.reserve(None).unwrap().unwrap();
        (0..2).for_each(|_| states.share(trunk));
        let mut branches: Vec<_> = (0..3).map(|_| states.reserve(Some(trunk)).unwrap().unwrap()).collect();
        assert!(branches.iter().all(|branch| branch.read == trunk.write && branch.write != trunk.write));
        assert_eq!((states.free(), states.check(branches.iter().copied())), (0, Ok(())));
        branches.iter_mut().for_each(|branch| states.settle(branch));
        assert_eq!(states.free(), 1);
        // A slot that is not shared is kept.
        assert_eq!(states.reserve(Some(branches[0])), Some(Some(branches[0])));
        branches.into_iter().for_each(|branch| states.release(branch));
        assert_eq!((states.free(), states.check(std::iter::empty())), (4, Ok(())));
    }

    #[test]
    fn branches_wait_for_a_slot() {
        let mut states = States::new(3);
        let trunk = states.reserve(None).unwrap().unwrap();
        (0..3).for_each(|_| states.share(trunk));
        let mut first = states.reserve(Some(trunk)).unwrap().unwrap();
        let second = states.reserve(Some(trunk)).unwrap().unwrap();
        assert_eq!(states.reserve(Some(trunk)), None);
        states.settle(&mut first);
        states.release(first);
        assert!(states.reserve(Some(trunk)).is_some_and(|state| state.is_some()));
        assert!(states.check([second, trunk].into_iter()).is_err());
    }

    #[test]
    fn without_slots_nothing_is_used() {
        let mut states = States::new(0);
        assert_eq!(states.reserve(None), Some(None));
    }
}
