//! Buffers of a planned step.

use paguro_backend::{Carried, Output, PageId, PageMove, StateUse, Step, StepSequence};

use crate::{cost::Work, prefix::BlockKey, sequence::Sequence};

/// Copies of states into pages, which run before the next planned step.
#[derive(Debug, Default)]
pub(super) struct Saves {
    pub moves: Vec<PageMove>,
    /// Keys of the blocks that end at the checkpoints.
    pub keys: Vec<BlockKey>,
}

/// Buffers of a step, which the next steps reuse. [`Sequence::rows`] is the number of rows of a sequence.
#[derive(Debug, Default)]
pub(super) struct PlannedStep {
    /// Copies of pages and states, which run before the step.
    pub moves: Vec<PageMove>,
    /// Keys of the blocks that end at the checkpoints that `moves` write.
    pub saved: Vec<BlockKey>,
    /// Ids of the requests whose states `moves` restore.
    pub restored: Vec<u64>,
    pub tokens: Vec<u32>,
    pub carried: Vec<Carried>,
    pub sequences: Vec<StepSequence>,
    pub pages: Vec<PageId>,
    /// Request id and first branch of each sequence, if the step was planned ahead; otherwise empty. Some of these
    /// sequences may have ended since.
    pub owners: Vec<(u64, usize)>,
}

impl PlannedStep {
    /// Adds a sequence with rows for `tokens` at positions from `start` on. `state` has the state slots that the rows read
    /// and write.
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
        // Rows of requests are tokens at their positions.
        let (given, coordinates, spans) = (&[], &[], &[]);
        Step { tokens, carried, given, coordinates, spans, sequences, pages, outputs }
    }

    /// Returns the work of the step, from which the cost model estimates its time.
    pub fn work(&self) -> Work {
        let sequences = self.sequences.iter();
        sequences.fold(Work::default(), |work, sequence| work.and(sequence.start, sequence.rows.len()))
    }
}
