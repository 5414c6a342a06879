//! The buffers that a planned step is written to.

use paguro_backend::{Carried, Output, PageId, PageMove, StateUse, Step, StepSequence};

use crate::{cost::Work, prefix::BlockKey, sequence::Sequence};

/// Copies of states into pages, to be made before the next step that is planned.
#[derive(Debug, Default)]
pub(super) struct Saves {
    pub moves: Vec<PageMove>,
    /// Blocks before these checkpoints.
    pub keys: Vec<BlockKey>,
}

/// Buffers of a step, reused from step to step. [`Sequence::rows`] has the rows of each sequence.
#[derive(Debug, Default)]
pub(super) struct PlannedStep {
    /// To be made before the step.
    pub moves: Vec<PageMove>,
    /// Blocks before the checkpoints that these moves write.
    pub saved: Vec<BlockKey>,
    /// Requests whose states these moves restore.
    pub restored: Vec<u64>,
    pub tokens: Vec<u32>,
    pub carried: Vec<Carried>,
    pub sequences: Vec<StepSequence>,
    pub pages: Vec<PageId>,
    /// For a step planned ahead: request and first branch of each sequence, some of which may have ended since.
    pub owners: Vec<(u64, usize)>,
}

impl PlannedStep {
    /// Adds a sequence with these tokens from position `start` on, and the states that they use.
    pub fn add(&mut self, sequence: &Sequence, start: usize, tokens: &[u32], state: Option<StateUse>) {
        let Self { tokens: all, sequences, pages, .. } = self;
        let (first_row, first_page) = (all.len(), pages.len());
        all.extend_from_slice(tokens);
        for table in &sequence.tables {
            pages.extend_from_slice(&table.pages);
        }
        sequences.push(StepSequence {
            rows: first_row..all.len(),
            start,
            tables: first_page..pages.len(),
            state,
        });
    }

    pub fn clear(&mut self) {
        self.moves.clear();
        self.saved.clear();
        self.restored.clear();
        self.tokens.clear();
        self.carried.clear();
        self.sequences.clear();
        self.pages.clear();
        self.owners.clear();
    }

    pub fn step<'a>(&'a self, outputs: &'a [Output<'a>]) -> Step<'a> {
        let Self { tokens, carried, sequences, pages, .. } = self;
        Step { tokens, carried, sequences, pages, outputs }
    }

    /// Returns the step's work, by which its time is estimated.
    pub fn work(&self) -> Work {
        let sequences = self.sequences.iter();
        sequences.fold(Work::default(), |work, sequence| work.and(sequence.start, sequence.rows.len()))
    }
}
