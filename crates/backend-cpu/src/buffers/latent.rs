//! Buffers of latent attention.

use paguro_backend::{LatentQuery, Mixer, Program};

use crate::buffers::{MatmulInput, Shared};

/// Buffers between the phases.
pub struct LatentBuffers {
    /// `[rows, rank]`
    pub rank: Shared<f32>,
    /// Queries before they are absorbed, `[rows, heads, plain + rotated]`.
    pub query: Shared<f32>,
    /// Inputs of the heads' matrices, `[heads, rows]`.
    pub input: MatmulInput,
    /// Outputs of the heads' matrices, `[heads, rows, latent or value]`.
    pub heads: Shared<f32>,
}

/// Largest dimensions of latent attention in a program; zeros without any.
#[derive(Clone, Copy, Debug, Default)]
pub struct LatentSizes {
    pub heads: usize,
    pub rank: usize,
    pub query: usize,
    /// Inputs of a head's matrix.
    pub input: usize,
    /// Outputs of a head's matrix.
    pub output: usize,
    /// Elements of a row of the output's heads.
    value: usize,
}

impl LatentSizes {
    /// Returns the sizes of a program.
    pub fn of(program: &Program) -> Self {
        let mut sizes = Self::default();
        for mixer in program.mixers() {
            let Mixer::Latent(op) = mixer else { continue };
            let shape = &op.shape;
            let rank = match &op.query {
                LatentQuery::Direct(_) => 0,
                LatentQuery::Down { down: _, rank, norm: _, up: _ } => *rank,
            };
            sizes = Self {
                heads: sizes.heads.max(shape.heads),
                rank: sizes.rank.max(rank),
                query: sizes.query.max(shape.query_width()),
                input: sizes.input.max(shape.plain).max(shape.latent),
                output: sizes.output.max(shape.value).max(shape.latent),
                value: sizes.value.max(shape.value_width()),
            };
        }
        sizes
    }

    /// Returns the number of elements of the widest row.
    pub fn widest(&self) -> usize {
        self.rank.max(self.value).max(self.output)
    }

    /// Floats of the buffers, for each row.
    pub fn floats(&self) -> usize {
        self.rank + self.query + self.heads * (self.input + self.output)
    }
}
