//! Buffers of mixtures of experts.

use paguro_backend::{FeedForward, Program};

use crate::buffers::{MatmulInput, Shared};

/// Buffers between the phases of a mixture of experts; `slots` is rows times experts per row.
pub struct ExpertBuffers {
    /// Logits of the router, `[rows, experts]`.
    pub logits: Shared<f32>,
    /// Logits of the output gate of the shared expert, `[rows]`.
    pub output_gate: Shared<f32>,
    /// Chosen experts, ascending for each row, `[rows, used]`.
    pub ids: Shared<u32>,
    /// Their weights, `[rows, used]`.
    pub weights: Shared<f32>,
    /// Input of the experts, `[slots, hidden]`, and later of their last matmul, `[slots, width]`.
    pub input: MatmulInput,
    /// `[slots, width]`
    pub gate: Shared<f32>,
    /// `[slots, width]`
    pub up: Shared<f32>,
    /// Outputs of the experts, `[slots, hidden]`, or as wide as their rows.
    pub out: Shared<f32>,
    /// Rows of experts of their own width.
    pub latent: Shared<f32>,
    /// Sums of such experts, `[rows, hidden]`.
    pub latent_out: Shared<f32>,
}

/// Largest dimensions of the mixtures of experts in a program; zeros without any.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExpertSizes {
    /// Experts.
    pub count: usize,
    /// Experts of a row.
    pub used: usize,
    /// Width of an expert.
    pub width: usize,
    /// Width of a shared expert, or of a network beside experts.
    pub shared: usize,
    /// Elements of a sum of experts that is normed by itself.
    pub sum: usize,
    /// Elements of a row of experts of their own width.
    pub latent: usize,
}

impl ExpertSizes {
    /// Returns the sizes of a program.
    pub fn of(program: &Program) -> Self {
        let mut sizes = Self::default();
        for layer in &program.layers {
            if let FeedForward::Experts(experts) = &layer.ffn {
                let shared = experts.shared.as_ref().map_or(0, |shared| shared.width);
                if let Some(beside) = &experts.beside {
                    sizes.shared = sizes.shared.max(beside.dense.width);
                    sizes.sum = program.hidden;
                }
                sizes.latent = sizes.latent.max(experts.latent.map_or(0, |latent| latent.width));
                sizes.count = sizes.count.max(experts.count);
                sizes.used = sizes.used.max(experts.router.used);
                sizes.width = sizes.width.max(experts.width);
                sizes.shared = sizes.shared.max(shared);
            }
        }
        sizes
    }
}
