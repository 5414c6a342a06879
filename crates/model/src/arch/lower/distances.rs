//! Embeddings of token types, and biases of scores by distance.

use paguro_backend::{DistanceBias, TokenTypes};

use super::Lowering;
use crate::{
    arch::{config::Distances, names::Part},
    error::ModelError,
};

/// Distance from which on T5's buckets are the last one of their direction.
const MAX_DISTANCE: f32 = 128.0;
/// Most numbers of a table of biases.
const MAX_BIASES: usize = 1 << 26;

impl Lowering<'_, '_> {
    /// Returns the embeddings of token types, if the file has some.
    pub(super) fn token_types(&mut self) -> Result<Option<TokenTypes>, ModelError> {
        let name = format!("{}.weight", self.names.model(Part::TokenTypes));
        let shape = self.tensors.shape(&name);
        let Some(shape) = shape else { return Ok(None) };
        let count = if shape.len() > 1 { shape[0] } else { 1 };
        let table = self.tensors.vectors(&name, count, self.config.hidden)?;
        let table = table.map(|table| self.tensors.add_vector(table));
        Ok(table.map(|table| TokenTypes { table, count }))
    }

    /// Returns the biases of scores by distance, for sequences of up to `max_context` tokens.
    pub(super) fn distances(&mut self, max_context: usize) -> Result<Option<DistanceBias>, ModelError> {
        let (heads, reach) = (self.config.heads, max_context.max(1) - 1);
        if self.config.block.distances == Distances::None {
            return Ok(None);
        }
        let width = 2 * reach + 1;
        if width.saturating_mul(heads) > MAX_BIASES {
            let problem = format!("{heads} heads with a bias for each distance up to {reach}");
            return Err(ModelError::Config(problem));
        }
        let table = match self.config.block.distances {
            Distances::None | Distances::Alibi => {
                let of_head =
                    |head| (0..width).map(move |at| -slope(head, heads) * at.abs_diff(reach) as f32);
                (0..heads).flat_map(of_head).collect()
            }
            Distances::Buckets => {
                let name = format!("{}.weight", self.names.model(Part::DistanceBuckets));
                let buckets = self.tensors.rows(&name).unwrap_or(0);
                if !(4..=1 << 16).contains(&buckets) || !buckets.is_multiple_of(4) {
                    return Err(ModelError::Config(format!("{buckets} buckets of distances")));
                }
                let values = self.tensors.values(&name, &[buckets, heads])?;
                let of_head = |head| {
                    let values = &values;
                    (0..width).map(move |at| values[bucket(at, reach, buckets) * heads + head])
                };
                (0..heads).flat_map(of_head).collect()
            }
        };
        Ok(Some(DistanceBias { table: self.tensors.add_vector(table), reach }))
    }
}

/// ALiBi's slope of a head: a geometric series that ends at 2⁻⁸, and where the number of heads is no power of two, every
/// second one of the next finer series.
fn slope(head: usize, heads: usize) -> f32 {
    let whole = 1 << heads.ilog2();
    let exponent = match head < whole {
        true => 8.0 * (head + 1) as f32 / whole as f32,
        false => 4.0 * (2 * (head - whole) + 1) as f32 / whole as f32,
    };
    (-exponent).exp2()
}

/// T5's bucket of entry `at` of a row of biases: half of the buckets are for keys before the query, half for later ones.
/// The first half of those have a distance each, the others grow exponentially.
fn bucket(at: usize, reach: usize, buckets: usize) -> usize {
    let (half, distance) = (buckets / 2, at.abs_diff(reach));
    let exact = half / 2;
    let within = if distance < exact {
        distance
    } else {
        let ratio = (distance as f32 / exact as f32).ln() / (MAX_DISTANCE / exact as f32).ln();
        (exact + (ratio * (half - exact) as f32) as usize).min(half - 1)
    };
    if at > reach { half + within } else { within }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slopes_and_buckets_are_those_of_the_papers() {
        let slopes = |heads| (0..heads).map(|head| slope(head, heads)).collect::<Vec<_>>();
        assert_eq!(slopes(4), [0.25, 0.0625, 0.015625, 0.00390625]);
        assert_eq!(slopes(6)[4..], [0.5, 0.125]);
        let buckets: Vec<_> = [0, 1, 7, 8, 20, 127, 128, 500].map(|far| bucket(600 - far, 600, 32)).to_vec();
        assert_eq!(buckets, [0, 1, 7, 8, 10, 15, 15, 15]);
        assert_eq!(bucket(601, 600, 32), 17);
        assert_eq!(bucket(1100, 600, 32), 31);
    }
}
