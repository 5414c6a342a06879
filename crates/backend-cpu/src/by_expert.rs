//! Rows in the order of their experts.

use std::ops::Range;

use crate::buffers::ExpertSizes;

/// Rows sorted by expert.
#[derive(Debug, Default)]
pub struct RowsByExpert {
    /// Experts that some row has chosen: those with most rows first, so that all workers end together.
    pub(super) experts: Vec<usize>,
    /// Slots of each expert: `first[e]..first[e + 1]`.
    first: Vec<usize>,
    /// Row of each slot.
    pub(super) rows: Vec<usize>,
    /// Slot of each choice, `[rows, used]`.
    pub(super) slots: Vec<usize>,
}

impl RowsByExpert {
    /// Allocates buffers for the largest step.
    pub fn new(sizes: ExpertSizes, max_rows: usize) -> Self {
        let slots = max_rows * sizes.used;
        Self {
            experts: Vec::with_capacity(sizes.count),
            first: Vec::with_capacity(sizes.count + 1),
            rows: Vec::with_capacity(slots),
            slots: Vec::with_capacity(slots),
        }
    }

    /// Sorts choices, `[rows, used]`, of `count` experts: by expert, then by row.
    pub(super) fn sort(&mut self, ids: &[u32], used: usize, count: usize) {
        self.first.clear();
        self.first.resize(count + 1, 0);
        ids.iter().for_each(|&id| self.first[id as usize + 1] += 1);
        for expert in 0..count {
            self.first[expert + 1] += self.first[expert];
        }
        self.rows.clear();
        self.rows.resize(ids.len(), 0);
        self.slots.clear();
        for (choice, &id) in ids.iter().enumerate() {
            // Counted up here, and back by one expert below.
            let slot = self.first[id as usize];
            self.first[id as usize] += 1;
            self.rows[slot] = choice / used;
            self.slots.push(slot);
        }
        self.first.rotate_right(1);
        self.first[0] = 0;
        self.experts.clear();
        let Self { experts, first, .. } = self;
        experts.extend((0..count).filter(|&expert| first[expert] < first[expert + 1]));
        experts.sort_by_key(|&expert| (first[expert].wrapping_sub(first[expert + 1]), expert));
    }

    /// Returns the slots of an expert.
    pub(super) fn slots_of(&self, expert: usize) -> Range<usize> {
        self.first[expert]..self.first[expert + 1]
    }

    /// Returns the expert of a slot.
    pub(super) fn expert_of(&self, slot: usize) -> usize {
        self.first.partition_point(|&first| first <= slot) - 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_sorted_by_expert() {
        let mut by_expert = RowsByExpert::default();
        // Rows 0 to 3 with two of five experts each.
        by_expert.sort(&[0, 3, 3, 4, 0, 3, 1, 3], 2, 5);
        assert_eq!(by_expert.experts, [3, 0, 1, 4]);
        assert_eq!(by_expert.rows, [0, 2, 3, 0, 1, 2, 3, 1]);
        assert_eq!(by_expert.slots, [0, 3, 4, 7, 1, 5, 2, 6]);
        let experts: Vec<usize> = (0..8).map(|slot| by_expert.expert_of(slot)).collect();
        assert_eq!(experts, [0, 0, 1, 3, 3, 3, 3, 4]);
    }
}
