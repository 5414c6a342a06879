//! Outputs of a step by row, for backends that compute the end of each row once.

use crate::{Limits, Step};

/// Rows of a step with outputs. The buffers are reused from step to step.
#[derive(Clone, Debug, Default)]
pub struct OutputRows {
    /// Rows with outputs, each once: ascending those whose logits are needed, then ascending the others.
    pub rows: Vec<usize>,
    /// Number of rows whose logits are needed.
    pub logit_rows: usize,
    /// True for each row of the step whose logits an output needs.
    needs_logits: Vec<bool>,
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
            needs_logits: vec![false; limits.max_rows],
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
        self.outputs.clear();
        self.outputs.extend(0..step.outputs.len());
        self.outputs.sort_unstable_by_key(|&output| {
            let row = step.outputs[output].row;
            (!self.needs_logits[row], row, output)
        });
        self.rows.clear();
        self.starts.clear();
        for (index, &output) in self.outputs.iter().enumerate() {
            let row = step.outputs[output].row;
            if self.rows.last() != Some(&row) {
                self.rows.push(row);
                self.starts.push(index);
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
    use crate::{AttentionMode, KvDtype, Output, OutputKind};

    #[test]
    fn outputs_are_found_by_row() {
        let limits = Limits {
            block_size: 32,
            pages: 8,
            max_rows: 6,
            max_sequences: 1,
            max_outputs: 5,
            max_context: 6,
            states: 0,
            kv_dtype: KvDtype::F16,
            attention: AttentionMode::Paged,
            expert_slots: None,
        };
        let mut planned = OutputRows::new(&limits);
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
}
