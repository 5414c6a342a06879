//! What a token costs in bytes that must be read: the ceiling that a memory's speed sets.

use paguro_backend::{KvDtype, Linear, Matrix, Op, Program, Weights};

use super::{Case, Test};
use crate::failure::{Failure, Outcome};

/// What one forward pass of a model reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cost {
    /// Weights of all layers, once for each step, in bytes as the file stores them.
    layers: u64,
    /// Weights of the head, once for each step that asks for logits.
    head: u64,
    /// For each layer: how far back it sees, and bytes of K and V for each position.
    attention: Vec<(Option<u32>, u64)>,
}

impl Cost {
    /// Adds up what the operations read from weights, and from pages that store `kv_dtype`.
    ///
    /// # Errors
    /// An operation whose reads are not known here.
    pub fn new(program: &Program, weights: &Weights, kv_dtype: KvDtype) -> Outcome<Self> {
        let stored = |linear: &Linear| bytes(weights.matrix(linear.matrix));
        let position = (program.kv.page_bytes(1, kv_dtype) / program.kv.slots) as u64;
        let mut cost = Self { layers: 0, head: 0, attention: Vec::new() };
        for op in &program.ops {
            match op {
                // A row for each token: nothing beside the rest.
                Op::Embed(_) => {}
                Op::NormQkvRopeStore(op) => cost.layers += stored(&op.q) + stored(&op.k) + stored(&op.v),
                Op::Attend(op) => cost.attention.push((program.kv.groups[op.kv.group].window, position)),
                Op::ProjectAdd(op) => cost.layers += stored(&op.project),
                Op::NormGateUp(op) => cost.layers += stored(&op.gate) + stored(&op.up),
                Op::DownAdd(op) => cost.layers += stored(&op.down),
                Op::NormLogits(op) => cost.head += stored(&op.head),
                other => {
                    return Err(Failure::new(format!("bench does not know what {} reads", other.name())));
                }
            }
        }
        Ok(cost)
    }

    /// Bytes for one token of a test, when a prompt is read in chunks of `chunk` rows.
    pub fn per_token(&self, case: &Case, chunk: usize) -> f64 {
        let Case { test, tokens, depth, batch } = *case;
        match test {
            // Each step reads the weights once for all sequences, and the K and V of each up to where it is.
            Test::Decode => {
                let kv: u64 = (depth + 1..=depth + tokens).map(|position| self.kv(position)).sum();
                (self.layers + self.head) as f64 / batch as f64 + kv as f64 / tokens as f64
            }
            // Each chunk reads the weights once, and the K and V once for all of its rows.
            Test::Prefill => {
                let ends = (1..=tokens.div_ceil(chunk)).map(|i| depth + (i * chunk).min(tokens));
                let kv: u64 = ends.map(|end| self.kv(end)).sum();
                let steps = (tokens * batch).div_ceil(chunk) as u64;
                (self.layers * steps + self.head) as f64 / (tokens * batch) as f64 + kv as f64 / tokens as f64
            }
        }
    }

    /// Bytes of K and V that a sequence of `len` tokens has for its last position to see.
    fn kv(&self, len: usize) -> u64 {
        self.attention
            .iter()
            .map(|&(window, bytes)| bytes * window.map_or(len as u64, |w| u64::from(w).min(len as u64)))
            .sum()
    }
}

fn bytes(matrix: &Matrix) -> u64 {
    (matrix.rows * matrix.format.row_bytes(matrix.cols)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const COST: Cost = Cost { layers: 1000, head: 200, attention: Vec::new() };

    fn case(test: Test, tokens: usize, depth: usize, batch: usize) -> Case {
        Case { test, tokens, depth, batch }
    }

    #[test]
    fn decoding_shares_the_weights_but_not_the_pages() {
        let cost = Cost { attention: vec![(None, 10), (Some(4), 10)], ..COST };
        // Positions 101 and 102 see 101 and 102 tokens in the full layer, 4 in the other.
        assert_eq!(cost.per_token(&case(Test::Decode, 2, 100, 1), 512), 1200.0 + 1015.0 + 40.0);
        assert_eq!(cost.per_token(&case(Test::Decode, 2, 100, 4), 512), 300.0 + 1015.0 + 40.0);
    }

    #[test]
    fn prefill_reads_once_for_each_chunk() {
        assert_eq!(COST.per_token(&case(Test::Prefill, 512, 0, 1), 512), 1200.0 / 512.0);
        assert_eq!(COST.per_token(&case(Test::Prefill, 600, 0, 1), 512), 2200.0 / 600.0);
        let cost = Cost { attention: vec![(None, 10)], ..COST };
        assert_eq!(
            cost.per_token(&case(Test::Prefill, 8, 100, 1), 4),
            2200.0 / 8.0 + 10.0 * (104.0 + 108.0) / 8.0
        );
    }
}
