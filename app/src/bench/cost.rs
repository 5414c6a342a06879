//! Bytes read per token, from which the read bandwidth of the memory gives an upper bound of the speed.

use paguro_backend::{DeltaShape, KvDtype, Matrix, Mixer, Program, Role, STATE_CHUNK, Weights};

use super::{Case, Test};

/// Bytes that a forward pass of a model reads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Weights of all layers without their experts, read once per step, in bytes as the file stores them.
    layers: u64,
    /// Stacks of experts.
    experts: Vec<ExpertCost>,
    /// Weights of the head, read once per step with logits.
    head: u64,
    /// States of a sequence, which a row reads and a chunk of a prompt folds.
    states: u64,
    /// Window of each layer, and bytes of K and V for each position.
    attention: Vec<(Option<u32>, u64)>,
}

/// A stack of a matrix of each expert of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ExpertCost {
    count: usize,
    /// Number of experts that a row reads.
    used: usize,
    /// Bytes of one expert.
    bytes: u64,
}

impl ExpertCost {
    /// Returns the expected bytes of a step with `rows` rows, if all choices are equally probable.
    fn of_step(&self, rows: usize) -> f64 {
        let unused = (1.0 - self.used as f64 / self.count as f64).powf(rows as f64);
        self.count as f64 * (1.0 - unused) * self.bytes as f64
    }
}

impl Cost {
    /// Sums the reads of the layers from weights, and from pages that store `kv_dtype`.
    pub fn new(program: &Program, weights: &Weights, kv_dtype: KvDtype) -> Self {
        let mut cost = Self::default();
        for (id, role) in program.matrices() {
            let bytes = bytes(weights.matrix(id));
            match role {
                // A step reads one row for each token, which is negligible.
                Role::Lookup => {}
                Role::Layer => cost.layers += bytes,
                Role::Experts { used, count } => {
                    cost.experts.push(ExpertCost { count, used, bytes: bytes / count as u64 });
                }
                Role::Head => cost.head += bytes,
            }
        }
        for mixer in program.mixers() {
            if let Some((place, _)) = mixer.attends() {
                let group = program.kv.groups[place.group];
                cost.attention.push((group.window, group.token_bytes(kv_dtype) as u64));
            }
            match mixer {
                Mixer::DeltaRule(op) => cost.states += state(&op.shape),
                Mixer::Ssd(op) => cost.states += state(&op.shape),
                Mixer::None | Mixer::Attention(_) | Mixer::Conv(_) | Mixer::Latent(_) | Mixer::Sum(_) => {}
            }
        }
        cost
    }

    /// Returns the bytes of the layers' weights that a step with `rows` rows reads.
    fn weights(&self, rows: usize) -> f64 {
        self.layers as f64 + self.experts.iter().map(|experts| experts.of_step(rows)).sum::<f64>()
    }

    /// Returns the bytes per token of a test with prompts in chunks of `chunk` rows.
    pub fn per_token(&self, case: &Case, chunk: usize) -> f64 {
        let Case { test, tokens, depth, batch, .. } = *case;
        match test {
            // Each step reads the weights once for all sequences, and the K and V of each sequence up to its position.
            Test::Decode => {
                let kv: u64 = (depth + 1..=depth + tokens).map(|position| self.kv(position)).sum();
                let sequence = kv as f64 / tokens as f64 + self.states as f64;
                (self.weights(batch) + self.head as f64) / batch as f64 + sequence
            }
            // Each chunk reads the weights once, and the K and V once for all of its rows.
            Test::Prefill => {
                let ends = (1..=tokens.div_ceil(chunk)).map(|i| depth + (i * chunk).min(tokens));
                let kv: u64 = ends.map(|end| self.kv(end)).sum();
                let (rows, steps) = (tokens * batch, (tokens * batch).div_ceil(chunk));
                let last = rows - (steps - 1) * chunk;
                let weights = self.weights(chunk) * (steps - 1) as f64 + self.weights(last);
                let states = self.states * tokens.div_ceil(STATE_CHUNK) as u64;
                (weights + self.head as f64) / rows as f64 + (kv + states) as f64 / tokens as f64
            }
        }
    }

    /// Returns the bytes of K and V that the last position of a sequence with `len` tokens reads.
    fn kv(&self, len: usize) -> u64 {
        self.attention
            .iter()
            .map(|&(window, bytes)| bytes * window.map_or(len as u64, |w| u64::from(w).min(len as u64)))
            .sum()
    }
}

/// Returns the bytes of a state that a row reads: the matrix of each head, and on average half of a chunk's keys and
/// updates.
fn state(shape: &DeltaShape) -> u64 {
    let chunk = (shape.key_width() + shape.value_width()) * STATE_CHUNK / 2;
    ((shape.value_width() * shape.key_dim + chunk) * size_of::<f32>()) as u64
}

fn bytes(matrix: &Matrix) -> u64 {
    matrix.bytes.len() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::BenchDrafts;

    const COST: Cost =
        Cost { layers: 1000, experts: Vec::new(), head: 200, states: 0, attention: Vec::new() };

    fn case(test: Test, tokens: usize, depth: usize, batch: usize) -> Case {
        Case { test, tokens, depth, batch, drafts: BenchDrafts::Off }
    }

    #[test]
    fn decoding_shares_the_weights_but_not_the_pages() {
        let cost = Cost { attention: vec![(None, 10), (Some(4), 10)], ..COST };
        // Positions 101 and 102 see 101 and 102 tokens in the full layer, 4 in the other.
        assert_eq!(cost.per_token(&case(Test::Decode, 2, 100, 1), 512), 1200.0 + 1015.0 + 40.0);
        assert_eq!(cost.per_token(&case(Test::Decode, 2, 100, 4), 512), 300.0 + 1015.0 + 40.0);
    }

    #[test]
    fn experts_are_read_if_they_are_used() {
        let cost = Cost { experts: vec![ExpertCost { count: 8, used: 2, bytes: 100 }], ..COST };
        assert_eq!(cost.per_token(&case(Test::Decode, 1, 0, 1), 512), 1200.0 + 200.0);
        // Two rows use 8 * (1 - 0.75²) experts.
        assert_eq!(cost.per_token(&case(Test::Decode, 1, 0, 2), 512), 600.0 + 175.0);
        assert!((cost.per_token(&case(Test::Prefill, 512, 0, 1), 512) - 2000.0 / 512.0).abs() < 1e-9);
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
