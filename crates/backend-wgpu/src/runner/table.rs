//! The table of embeddings for layers, whose rows the host reads from its file by token.
//!
//! A step that carries tokens needs rows of tokens that the host does not know yet. It is encoded while the step before runs, and
//! held until the tokens of that step have been read.

use bytemuck::cast_slice;
use paguro_backend::{Matrix, Step, StepError};

use super::{GpuRunner, flight_index};
use crate::lower::LOGIT_ROWS;

/// The table, and the rows of a step.
pub(super) struct Table {
    matrix: Matrix,
    /// Tokens of the step that was planned last.
    tokens: Vec<u32>,
    /// Rows of its carried tokens, and their places among the device's tokens of the step before.
    carried: Vec<(usize, usize)>,
    /// `[rows, cols]`
    rows: Vec<f32>,
    encoded: Vec<u8>,
}

impl Table {
    pub(super) fn new(matrix: Matrix) -> Self {
        Self { matrix, tokens: Vec::new(), carried: Vec::new(), rows: Vec::new(), encoded: Vec::new() }
    }

    /// Reads the rows of the tokens.
    fn read(&mut self) -> Result<&[f32], StepError> {
        let Self { matrix, tokens, rows, encoded, .. } = self;
        rows.resize(tokens.len() * matrix.cols, 0.0);
        for (row, &token) in rows.chunks_exact_mut(matrix.cols).zip(&*tokens) {
            matrix.decode_row(token as usize, encoded, row)?;
        }
        matrix.check_source()?;
        Ok(rows)
    }
}

impl GpuRunner {
    /// Uploads the rows of a step's tokens. A step that carries tokens is held instead, if it `may_wait`.
    pub(super) fn prepare_table_rows(&mut self, step: &Step<'_>, may_wait: bool) -> Result<(), StepError> {
        let Some(table) = &mut self.table else { return Ok(()) };
        table.tokens.clear();
        table.tokens.extend(step.tokens);
        table.carried.clear();
        // `submit` has checked that the outputs are carried.
        let place =
            |output: usize| self.carried.iter().position(|&other| other == output).unwrap_or_default();
        table.carried.extend(step.carried.iter().map(|carried| (carried.row, place(carried.output))));
        if step.carried.is_empty() {
            return self.upload_table_rows();
        }
        // Data for sampling from several slices of outputs cannot be uploaded at once.
        if may_wait && step.outputs.len() <= LOGIT_ROWS {
            self.canaries.hold();
            return Ok(());
        }
        self.read_early()?;
        self.upload_table_rows()
    }

    /// Uploads the rows of the tokens, of which the carried ones have been read.
    fn upload_table_rows(&mut self) -> Result<(), StepError> {
        let (Some(table), Some(buffer)) = (&mut self.table, &self.model.table_rows) else { return Ok(()) };
        for &(row, place) in &table.carried {
            table.tokens[row] = self.tokens[place];
        }
        self.device.queue.write_buffer(buffer, 0, cast_slice(table.read()?));
        Ok(())
    }

    /// Reads the step before the one that is being submitted, before it is collected.
    fn read_early(&mut self) -> Result<(), StepError> {
        if self.early.is_none() {
            self.early = Some(self.read(self.submitted - 1));
        }
        match &self.early {
            Some(Ok(false)) => Ok(()),
            Some(Err(error)) => Err(StepError::Device(format!("the step before failed: {error}"))),
            _ => Err(self.gave_up()),
        }
    }

    /// Submits the step that is held, if there is one. The step before has been read.
    pub(super) fn release(&mut self) {
        if !self.canaries.holds() || self.awaits_inputs {
            return;
        }
        let uploaded = self.upload_table_rows();
        let flight = &mut self.flights[flight_index(self.submitted)];
        match uploaded {
            Ok(()) => flight.submission = self.canaries.release(&self.device),
            Err(error) => {
                flight.failure = Some(error);
                self.canaries.discard(self.submitted);
            }
        }
    }

    /// Submits the step that is held before the step before it is collected, for commands that must follow it.
    ///
    /// # Errors
    /// The step before failed.
    pub(super) fn flush(&mut self) -> Result<(), StepError> {
        if self.canaries.holds() {
            self.read_early()?;
            self.release();
        }
        Ok(())
    }
}
