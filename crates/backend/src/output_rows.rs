//! Outputs of a step by row, for backends that compute the end of each row once.

use std::ops::Range;

use crate::{Limits, Output, OutputKind, Step};

/// Rows of a step with outputs. The buffers are reused from step to step.
#[derive(Clone, Debug, Default)]
pub struct OutputRows {
    /// Rows with outputs, each once: ascending those whose logits are needed, then ascending the others.
    pub rows: Vec<usize>,
    /// Number of rows whose logits are needed.
    pub logit_rows: usize,
    /// Outputs that are means, as indices into [`Step::outputs`], and their rows, as indices into `rows`.
    pub means: Vec<(usize, Range<usize>)>,
    /// True for each row of the step whose logits an output needs.
    needs_logits: Vec<bool>,
    /// Rows of all outputs and these, in the order of `rows`; true for rows without logits.
    by_row: Vec<(bool, usize, usize)>,
    /// Outputs, in the order of `rows`.
    outputs: Vec<usize>,
    /// Start of each row's outputs in `outputs`, and the end.
    starts: Vec<usize>,
}

impl OutputRows {
    /// Allocates buffers for the largest step.
    pub fn new(limits: &Limits) -> Self {
        Self {
            rows: Vec::with_capacity(limits.max_outputs),
            logit_rows: 0,
            means: Vec::with_capacity(limits.max_sequences),
            needs_logits: vec![false; limits.max_rows],
            by_row: Vec::with_capacity(limits.max_outputs),
            outputs: Vec::with_capacity(limits.max_outputs),
            starts: Vec::with_capacity(limits.max_outputs + 1),
        }
    }

    /// Finds the rows of a step.
    pub fn plan(&mut self, step: &Step<'_>) {
        self.needs_logits.fill(false);
        for output in step.outputs.iter().filter(|output| output.kind.needs_logits()) {
            self.needs_logits[output.row] = true;
        }
        self.by_row.clear();
        for (output, of) in step.outputs.iter().enumerate() {
            self.by_row.extend(step.rows_of(of).map(|row| (!self.needs_logits[row], row, output)));
        }
        self.by_row.sort_unstable();
        self.rows.clear();
        self.outputs.clear();
        self.starts.clear();
        self.means.clear();
        for (index, &(_, row, output)) in self.by_row.iter().enumerate() {
            if self.rows.last() != Some(&row) {
                self.rows.push(row);
                self.starts.push(index);
            }
            self.outputs.push(output);
            let Output { row: first, kind: OutputKind::Mean } = step.outputs[output] else { continue };
            if row == first {
                let at = self.rows.len() - 1;
                self.means.push((output, at..at + step.rows_of(&step.outputs[output]).len()));
            }
        }
        self.starts.push(self.outputs.len());
        self.logit_rows = self.rows.iter().filter(|&&row| self.needs_logits[row]).count();
    }

    /// Returns the outputs of a row as indices into [`Step::outputs`]. `index` is an index into [`OutputRows::rows`].
    pub fn outputs_of(&self, index: usize) -> &[usize] {
        &self.outputs[self.starts[index]..self.starts[index + 1]]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AttentionMode, KvDtype, StepSequence};

    const LIMITS: Limits = Limits {
        block_size: 32,
        pages: 8,
        max_rows: 6,
        max_sequences: 3,
        max_outputs: 6,
        max_context: 6,
        states: 0,
        kv_dtype: KvDtype::F16,
        attention: AttentionMode::Paged,
        expert_slots: None,
    };

    #[test]
    fn outputs_are_found_by_row() {
        let mut planned = OutputRows::new(&LIMITS);
        let mut plan = |outputs: &[Output<'_>]| {
            planned.plan(&Step { tokens: &[0; 6], outputs, ..Step::default() });
            let found = (0..planned.rows.len()).map(|index| planned.outputs_of(index).to_vec());
            (planned.rows.clone(), planned.logit_rows, found.collect::<Vec<_>>())
        };
        let outputs = [5, 2, 5, 0, 5].map(|row| Output { row, kind: OutputKind::Logits });
        assert_eq!(plan(&outputs), (vec![0, 2, 5], 3, vec![vec![3], vec![1], vec![0, 2, 4]]));

        // Rows with embeddings only are last.
        let outputs = [
            (1, OutputKind::Residual),
            (4, OutputKind::Embedding),
            (4, OutputKind::Logits),
            (3, OutputKind::Logits),
        ];
        let outputs = outputs.map(|(row, kind)| Output { row, kind });
        assert_eq!(plan(&outputs), (vec![3, 4, 1], 2, vec![vec![3], vec![1, 2], vec![0]]));
    }

    #[test]
    fn rows_of_means_are_together() {
        let sequence = |rows| StepSequence { rows, start: 0, tables: 0..0, state: None };
        let sequences = [sequence(0..2), sequence(2..5), sequence(5..6)];
        let outputs = [
            (2, OutputKind::Mean),
            (0, OutputKind::Logits),
            (5, OutputKind::Mean),
            (3, OutputKind::Embedding),
            (1, OutputKind::Residual),
        ];
        let outputs = outputs.map(|(row, kind)| Output { row, kind });
        let mut planned = OutputRows::new(&LIMITS);
        planned.plan(&Step { tokens: &[0; 6], sequences: &sequences, outputs: &outputs, ..Step::default() });
        assert_eq!((planned.rows.as_slice(), planned.logit_rows), (&[0, 1, 2, 3, 4, 5][..], 1));
        assert_eq!(planned.means, [(0, 2..5), (2, 5..6)]);
        assert_eq!(planned.outputs_of(3), [0, 3]);
    }
}
