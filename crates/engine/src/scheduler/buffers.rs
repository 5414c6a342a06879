//! Buffers of a planned step.

use std::{cmp::Ordering, iter::Peekable, ops::Range, sync::Arc};

use paguro_backend::{
    AdapterUse, Carried, Coordinates, GivenRows, Output, OutputValue, PageId, PageMove, StateUse, Step,
    StepError, StepSequence,
};

use crate::{
    cost::Work,
    encoder::Encoded,
    layout::BlockLayout,
    prefix::BlockKey,
    sequence::{Rank, Sequence, SequenceOutput, SequenceOutputs},
};

/// Copies of states into pages, which run before the next planned step.
#[derive(Debug, Default)]
pub(super) struct Saves {
    pub moves: Vec<PageMove>,
    /// Keys of the blocks that end at the checkpoints.
    pub keys: Vec<BlockKey>,
}

/// Buffers of a step, which the next steps reuse. [`PlannedRows`](crate::sequence::PlannedRows) has the number of rows of a sequence.
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
    /// Rows of pictures: rows of the step, and the first of them among those of the picture.
    pub given: Vec<(Range<usize>, Arc<Encoded>, usize)>,
    /// Coordinates of all rows, if rotations have some.
    pub coordinates: Vec<Coordinates>,
    /// True if some rows have coordinates other than their position.
    has_coordinates: bool,
    /// Rows that see each other, if the model has such.
    pub spans: Vec<Range<usize>>,
    pub adapters: Vec<AdapterUse>,
    pub sequences: Vec<StepSequence>,
    pub pages: Vec<PageId>,
    /// True if all sequences decode.
    pub decodes: bool,
    /// Number of rows that check drafted tokens.
    pub drafted: usize,
    /// Owners of `sequences`, in the same order. Some of them may have ended since.
    pub owners: Vec<Owner>,
}

/// A sequence with rows in a step.
#[derive(Debug)]
pub(super) struct Owner {
    /// Its rank, which it keeps while it runs and no other sequence has.
    pub rank: Rank,
    /// Number of its rows.
    pub rows: usize,
    /// Outputs of its rows.
    pub outputs: SequenceOutputs,
}

/// Position in the outputs of a step, which are those of its owners in order.
pub(super) struct OutputCursor<'a> {
    owners: Peekable<std::slice::Iter<'a, Owner>>,
    next: usize,
}

impl<'a> OutputCursor<'a> {
    /// Returns the rows and outputs of a sequence in the step, and the indices of the outputs; `None` if it has no rows there.
    /// Sequences must be in order of rank; owners that have ended since are passed over.
    pub fn of(&mut self, sequence: &Sequence) -> Option<(Range<usize>, &'a Owner)> {
        let rank = sequence.rank();
        while let Some(owner) = self.owners.next_if(|owner| owner.rank <= rank) {
            let indices = self.next..self.next + owner.outputs.len();
            self.next = indices.end;
            if owner.rank == rank {
                return Some((indices, owner));
            }
        }
        None
    }
}

impl PlannedStep {
    /// Adds a sequence with rows for `tokens` at positions from `start` on. `state` has the state slots that the rows read
    /// and write.
    pub fn add(
        &mut self,
        sequence: &Sequence,
        start: usize,
        tokens: &[u32],
        state: Option<StateUse>,
        outputs: SequenceOutputs,
        layout: &BlockLayout,
    ) {
        self.add_pictures(sequence, start..start + tokens.len(), layout);
        self.owners.push(Owner { rank: sequence.rank(), rows: tokens.len(), outputs });
        let Self { tokens: all, sequences, pages, .. } = self;
        let (first_row, first_page) = (all.len(), pages.len());
        all.extend_from_slice(tokens);
        for (rows, ..) in self.given.iter().rev().take_while(|(rows, ..)| rows.start >= first_row) {
            // Embeddings for layers are those of padding.
            all[rows.clone()].fill(0);
        }
        for table in &sequence.kv.tables {
            pages.extend_from_slice(&table.pages);
        }
        let uses = sequence.request.adapters.uses.iter();
        self.adapters.extend(uses.map(|(adapter, scale)| AdapterUse {
            sequence: sequences.len(),
            adapter: adapter.id(),
            scale: *scale,
        }));
        sequences.push(StepSequence {
            rows: first_row..all.len(),
            start,
            tables: first_page..pages.len(),
            state,
        });
    }

    /// Adds what rows of pictures need beside tokens.
    fn add_pictures(&mut self, sequence: &Sequence, positions: Range<usize>, layout: &BlockLayout) {
        let pictures = &sequence.request.pictures;
        if layout.has_axes {
            self.coordinates.extend(positions.clone().map(|position| pictures.coordinates(position)));
            self.has_coordinates |= !pictures.is_empty();
        }
        let row = |position: usize| self.tokens.len() + position - positions.start;
        for place in pictures.places_in(positions.clone()) {
            let own = place.rows.start.max(positions.start)..place.rows.end.min(positions.end);
            let rows = row(own.start)..row(own.end);
            if layout.has_spans {
                self.spans.push(rows.clone());
            }
            if let Some(encoded) = &sequence.encoded[place.picture] {
                let first = place.first + own.start - place.rows.start;
                self.given.push((rows, Arc::clone(encoded), first));
            }
        }
    }

    /// Returns the rows of pictures.
    pub fn given(&self) -> Vec<GivenRows<'_>> {
        let rows = self.given.iter().flat_map(|(rows, encoded, first)| {
            let values = encoded.part(*first, rows.len());
            rows.clone().zip(values).map(|(row, values)| GivenRows { rows: row..row + 1, values })
        });
        rows.collect()
    }

    pub fn clear(&mut self) {
        self.given.clear();
        self.coordinates.clear();
        self.has_coordinates = false;
        self.spans.clear();
        self.adapters.clear();
        self.moves.clear();
        self.saved.clear();
        self.restored.clear();
        self.tokens.clear();
        self.carried.clear();
        self.sequences.clear();
        self.pages.clear();
        self.owners.clear();
        (self.decodes, self.drafted) = (true, 0);
    }

    pub fn step<'a>(&'a self, given: &'a [GivenRows<'a>], outputs: &'a [Output<'a>]) -> Step<'a> {
        let Self { tokens, carried, coordinates, spans, adapters, sequences, pages, .. } = self;
        let coordinates = if self.has_coordinates { coordinates.as_slice() } else { &[] };
        Step { tokens, carried, given, coordinates, spans, adapters, sequences, pages, outputs }
    }

    /// Returns the position before the first output.
    pub fn cursor(&self) -> OutputCursor<'_> {
        OutputCursor { owners: self.owners.iter().peekable(), next: 0 }
    }

    /// Checks that values answer the outputs of the step.
    ///
    /// # Errors
    /// Their number or kinds are wrong.
    pub fn check(&self, values: &[OutputValue]) -> Result<(), StepError> {
        let problem = |which: &str| {
            Err(StepError::Device(format!("the runner answered {which} outputs than were asked for")))
        };
        let fits = |(output, value): (SequenceOutput, &OutputValue)| match output {
            SequenceOutput::Score { .. } => matches!(value, OutputValue::Score(_)),
            SequenceOutput::Embedding { .. }
            | SequenceOutput::Mean { .. }
            | SequenceOutput::Hidden { .. } => {
                matches!(value, OutputValue::Embedding(_))
            }
            SequenceOutput::Sample { .. } => matches!(value, OutputValue::Sampled(_)),
        };
        let count: usize = self.owners.iter().map(|owner| owner.outputs.len()).sum();
        match values.len().cmp(&count) {
            Ordering::Less => problem("fewer"),
            Ordering::Greater => problem("more"),
            Ordering::Equal => {
                let outputs = self.owners.iter().flat_map(|owner| owner.outputs.iter());
                if outputs.zip(values).all(fits) { Ok(()) } else { problem("other") }
            }
        }
    }

    /// Writes the outputs of the step. Its owners are in `running`, in the same order.
    pub fn write_outputs<'a>(&self, running: &'a [Sequence], outputs: &mut Vec<Output<'a>>) {
        let mut running = running.iter();
        for (part, owner) in self.sequences.iter().zip(&self.owners) {
            let sequence = running.by_ref().find(|sequence| sequence.rank() == owner.rank);
            let sequence = sequence.expect("a sequence with rows runs");
            sequence.write_outputs((part.rows.start, part.start), &owner.outputs, outputs);
        }
    }

    /// Returns the work of the step, from which the cost model estimates its time.
    pub fn work(&self) -> Work {
        let sequences = self.sequences.iter();
        sequences.fold(Work::default(), |work, sequence| work.and(sequence.start, sequence.rows.len()))
    }
}
