//! Slots: names of the memory that nodes read and write, and its sizes.

use std::collections::HashMap;

use paguro_backend::{KvSlot, VectorId};

use super::node::Acts;

/// A piece of memory. Layers use those of intermediate results one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Slot {
    /// Words of a step.
    Step,
    /// Sampled tokens. The last word is `gave_up` in `handoff.wgsl`.
    Tokens,
    /// Given rows, `[given rows, parts, hidden]`.
    Given,
    /// The residual stream, `[rows, hidden]`.
    Stream,
    /// Rows between two operations at an end of a tower.
    Rows(usize),
    /// Rows that are made of several ones, `[rows, taps, width]`.
    Merged,
    /// A branch that is normed before it is added.
    Branch,
    /// The branch that waits until another one has read the residual stream.
    Waiting,
    /// Activations in eight bits, and behind them those for cooperative matrices.
    Quants(Acts),
    /// Their scales and sums.
    Scales(Acts),
    /// Activations in floats, and behind them those for cooperative matrices.
    Floats(Acts),
    /// Sums of squares by block of a row, padded to a multiple of four with zeros.
    Squares,
    /// Factors of the norms of rows.
    Factors,
    /// A zero that the shader compiler cannot fold.
    Zero,
    /// Results of matmuls of one layout each.
    Scratch(usize),
    /// Queries, `[rows, heads, head_dim]`.
    Queries,
    /// Sums of partials of attention.
    PartialSums,
    /// Their maxima and sums of weights.
    PartialTops,
    /// Both with handoff.
    HandoffPartials,
    /// Gathered pages of K, or of V.
    Gathered { is_k: bool },
    /// Logits of routers.
    RouterLogits,
    /// Chosen experts, `[rows, used]`.
    Chosen,
    /// Their weights.
    Weights,
    /// Their places in tiles.
    Places,
    /// The row of each place.
    Sources,
    /// The expert of each tile.
    TileExperts,
    /// Results of experts, by place.
    Results,
    /// Results of a network beside the experts.
    Shared,
    /// Gates of shared experts.
    OutputGate,
    /// Sums of experts, where a norm or a matmul precedes their addition.
    Sum,
    /// Rows of the experts' own width: their inputs, later the sums of their outputs.
    Narrow,
    /// Activations in half precision, by place.
    Halves,
    /// Results of matmuls of a mixer with a state.
    Mixed,
    /// Queries, keys and values of such a mixer.
    Convolved,
    /// Decays.
    Decays,
    /// Strengths.
    Betas,
    /// Results.
    Values,
    /// Gates of attention's output.
    Gates,
    /// Queries of latent attention before they are absorbed.
    LatentQueries,
    /// Queries between their two matrices.
    LatentRank,
    /// Latent vectors with the elements that are rotated.
    LatentKeys,
    /// Results of all heads.
    LatentValues,
    /// Rows of the table of embeddings for layers, `[rows, count * width]`.
    TableRows,
    /// Embeddings for layers, `[rows, count * width]`.
    Embeds,
    /// Gate of an embedding.
    EmbedGate,
    /// `[LOGIT_ROWS, vocab]`
    Logits,
    /// `[outputs, hidden]`
    Embeddings,
    /// Means of embeddings, `[sequences, hidden]`.
    Means,
    /// See `sample.wgsl`.
    Samples,
    /// See `adjust.wgsl`.
    Edits,
    /// See `sample.wgsl`.
    Masks,
    /// Best tokens of chunks of the vocabulary.
    Best,
    /// Pages of K, or of V, of a layer.
    Pages { kv: KvSlot, is_k: bool },
    /// A part of all sequences' states in a layer.
    State(usize, StatePart),
    /// A vector of the weights.
    Vector(VectorId),
    /// Two numbers between which others are, as bits.
    Bounds([u32; 2]),
    /// Joined biases, by their index in the emitted program.
    Bias(usize),
    /// A plane of a part of a matrix, by their indices in the emitted program.
    Plane { matrix: usize, part: usize, plane: usize },
    /// The same of all experts of a layer with slots, in the host's memory.
    HostPlane { matrix: usize, part: usize, plane: usize },
    /// The same of a layer's experts without a slot, for one layer at a time. `stack` numbers the matmuls of a layer.
    Staged { stack: usize, part: usize, plane: usize },
    /// Places of a layer's experts (`place_experts.wgsl`).
    Pool(usize),
    /// Experts to copy (`fill_experts.wgsl`).
    Fills,
    /// Rotations of positions 256 apart, or of those below 256.
    Rotations { rope: usize, is_far: bool },
    /// The table of adapters of a step's rows, or of a slice of its outputs (`low_rank.rs`).
    Adapted { of_outputs: bool },
    /// Products with A of adapters, in floats.
    Low,
    /// The same with handoff to the next matmul: every second matmul has the other buffer.
    LowWords(usize),
    /// The same in half precision, in the order of matrices.
    LowHalves,
    /// A of adapters of a site.
    A(usize),
    /// B of adapters of a site.
    B(usize),
    /// Words of handoff of even or odd layers.
    Words(usize),
    /// Queries and the stream between layers, of even or odd layers.
    Between(usize),
}

/// A part of a layer's states.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StatePart {
    /// Inputs of the convolution.
    Inputs,
    /// Matrices of value heads.
    Matrices,
    /// Keys of a chunk.
    Keys,
    /// Updates of a chunk.
    Updates,
    /// Decays of a chunk.
    Decays,
}

impl Slot {
    /// Returns a slot of intermediate results for people.
    pub fn what(self) -> &'static str {
        match self {
            Self::Step => "steps",
            Self::Stream => "the residual stream",
            Self::Quants(_) | Self::Scales(_) | Self::Floats(_) | Self::Halves => "activations",
            Self::Queries | Self::LatentQueries => "queries",
            Self::PartialSums | Self::PartialTops | Self::HandoffPartials => "partial attention",
            Self::Results | Self::Shared | Self::Sum => "results of experts",
            Self::Logits | Self::RouterLogits => "logits",
            Self::Masks => "masks",
            Self::Edits => "bias and penalties",
            Self::Staged { .. } => "experts of one layer",
            Self::Adapted { .. } | Self::Low | Self::LowWords(_) | Self::LowHalves => "adapters of a step",
            _ => "intermediate results",
        }
    }

    /// Pages of K and of V of a layer.
    pub fn pages(kv: KvSlot) -> [Self; 2] {
        [true, false].map(|is_k| Self::Pages { kv, is_k })
    }
}

/// Words of each slot of intermediate results: the most that any node of any class of rows needs.
#[derive(Clone, Debug, Default)]
pub struct Sizes {
    /// Words by slot.
    pub words: HashMap<Slot, usize>,
    /// Blocks of activations, of either source.
    pub act_blocks: usize,
    /// Words of their copies in half precision.
    pub act_halves: usize,
}

impl Sizes {
    /// Requires a slot to have this many words.
    pub fn need(&mut self, slot: Slot, words: usize) {
        let known = self.words.entry(slot).or_default();
        *known = words.max(*known);
    }

    /// Returns the words of a slot.
    pub fn words(&self, slot: Slot) -> usize {
        self.words.get(&slot).copied().unwrap_or_default()
    }

    /// Bytes of all slots.
    pub fn bytes(&self) -> u64 {
        4 * self.words.values().sum::<usize>() as u64
    }

    /// Adds the slots of activations, whose sizes are equal.
    pub fn finish(&mut self) {
        let Self { act_blocks: blocks, act_halves: halves, .. } = *self;
        for acts in [Acts::Plain, Acts::Normed] {
            self.need(Slot::Quants(acts), 8 * blocks + halves);
            self.need(Slot::Scales(acts), 2 * blocks);
            self.need(Slot::Floats(acts), 32 * blocks + halves);
        }
    }
}
