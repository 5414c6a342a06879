//! Multi-head latent attention (DeepSeek V2 and V3).

use crate::{KvSlot, Linear, Norm, PositionScale};

/// Latent attention. K and V of all heads are functions of one latent vector, and only that is stored. The matrices
/// that would expand it are applied to queries and to the result instead ("absorbed"), for prompts and answers.
///
/// ```text
/// h = norm(x)
/// q = query(h)                        [heads, plain + rotated]
/// c, r = h·Wdownᵀ                     [latent], [rotated]
/// k = latent_norm(c) ++ rope(r)       one K head, which goes into the page; its first `latent` elements are V
/// q[i] = q[i].plain·absorb[i]ᵀ ++ rope(q[i].rotated)                    of each head i; times position_scale
/// a[i] = softmax(q[i]·Kᵀ * scale)·V                                     causal
/// x += branch_scale * post_norm((a[0]·value[0]ᵀ ++ a[1]·value[1]ᵀ ++ ..)·Wᵀ + b)
/// ```
#[derive(Clone, Debug)]
pub struct Latent {
    /// Norm of the residual stream, `[hidden]`.
    pub norm: Option<Norm>,
    /// Heads and their sizes.
    pub shape: LatentShape,
    /// Makes queries.
    pub query: LatentQuery,
    /// `[latent + rotated, hidden]`
    pub down: Linear,
    /// `[latent]`
    pub latent_norm: Norm,
    /// `[heads, latent, plain]`, without a bias.
    pub absorb: Linear,
    /// `[heads, value, latent]`, without a bias.
    pub value: Linear,
    /// Index into [`Program::ropes`](crate::Program::ropes).
    pub rope: usize,
    /// Multiplies queries by a function of their position.
    pub position_scale: Option<PositionScale>,
    /// Multiplies scores, positive.
    pub scale: f32,
    /// Slot of the latent vector: in a group with one head of `latent + rotated` elements.
    pub kv: KvSlot,
    /// `[hidden, heads * value]`
    pub out: Linear,
    /// Norm of the output before it is added.
    pub post_norm: Option<Norm>,
}

/// Dimensions of latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentShape {
    /// Query heads.
    pub heads: usize,
    /// Elements of a query that are not rotated.
    pub plain: usize,
    /// Elements of a query, and of the K head, that are rotated.
    pub rotated: usize,
    /// Elements of the latent vector.
    pub latent: usize,
    /// Elements of a head of the output.
    pub value: usize,
}

/// Makes queries, `[heads, plain + rotated]`.
#[derive(Clone, Copy, Debug)]
pub enum LatentQuery {
    /// `h·Wᵀ`; the matrix is `[heads * (plain + rotated), hidden]`.
    Direct(Linear),
    /// `norm(h·Wdownᵀ)·Wupᵀ`
    Down {
        /// `[rank, hidden]`
        down: Linear,
        /// Elements between the two matrices.
        rank: usize,
        /// `[rank]`
        norm: Norm,
        /// `[heads * (plain + rotated), rank]`
        up: Linear,
    },
}

impl LatentShape {
    /// Returns the number of elements of a row of queries before they are absorbed.
    pub fn query_width(&self) -> usize {
        self.heads * (self.plain + self.rotated)
    }

    /// Returns the number of elements of the K head.
    pub fn key_dim(&self) -> usize {
        self.latent + self.rotated
    }

    /// Returns the number of elements of a row of the output's heads.
    pub fn value_width(&self) -> usize {
        self.heads * self.value
    }
}

impl LatentQuery {
    /// Its matrices.
    pub fn linears(&self) -> impl Iterator<Item = &Linear> {
        let (first, second) = match self {
            Self::Direct(linear) => (linear, None),
            Self::Down { down, rank: _, norm: _, up } => (down, Some(up)),
        };
        [first].into_iter().chain(second)
    }
}
