//! Feed-forward networks: dense, or a mixture of experts.

use super::{Linear, Norm, VectorId};

/// ```text
/// h = norm(x)
/// g = activation(h·Wgateᵀ) ⊙ (h·Wupᵀ)        without a gate: g = activation(h·Wupᵀ)
/// x += branch_scale * post_norm(g·Wdownᵀ)    each matmul with its bias, if there is one
/// ```
#[derive(Clone, Debug)]
pub struct Dense {
    /// Norm of the residual stream, `[hidden]`.
    pub norm: Option<Norm>,
    /// Width of the rows between up and down.
    pub width: usize,
    /// `[width, hidden]`
    pub gate: Option<Linear>,
    /// `[width, hidden]`
    pub up: Linear,
    /// Applied to the gate, or without a gate to up.
    pub activation: Activation,
    /// `[hidden, width]`
    pub down: Linear,
    /// Norm of the output before it is added.
    pub post_norm: Option<Norm>,
}

/// ```text
/// h = norm(x)
/// y = sum of weight[e] * expert[e](h) over the chosen experts e, in ascending order
/// x += branch_scale * post_norm(shared(h) + y)
/// x += branch_scale * post_norm(dense(x) + sum_norm(y))    with a dense network beside the experts
/// ```
///
/// An expert is gated, as [`Dense`] is, or has no gate (Nemotron 3). With an [`ExpertLatent`], experts read and write rows
/// of its width: `y = (sum of weight[e] * expert[e](h·Wdownᵀ))·Wupᵀ`.
///
/// The matrices of all experts are stacked: a [`Matrix`](crate::Matrix) of [`count`](Experts::count) parts, and biases
/// one expert after the other.
#[derive(Clone, Debug)]
pub struct Experts {
    /// Norm of the residual stream, `[hidden]`.
    pub norm: Option<Norm>,
    /// Chooses and weighs experts.
    pub router: Router,
    /// Number of experts.
    pub count: usize,
    /// Width of an expert between up and down.
    pub width: usize,
    /// Narrower rows that the experts read and write (Nemotron 3 Super); never with a network beside them.
    pub latent: Option<ExpertLatent>,
    /// `[count, width, hidden]`
    pub gate: Option<Linear>,
    /// `[count, width, hidden]`
    pub up: Linear,
    /// Applied to the gate, or without a gate to up.
    pub activation: Activation,
    /// `[count, hidden, width]`
    pub down: Linear,
    /// A network for all rows, beside the chosen experts.
    pub shared: Option<SharedExpert>,
    /// A network for all rows with its own input and norms (Gemma 4); never with a shared expert.
    pub beside: Option<Box<Beside>>,
    /// Norm of the output before it is added.
    pub post_norm: Option<Norm>,
}

/// The two matrices around experts whose rows have another width than the residual stream. That width replaces `hidden`
/// in the shapes of their matrices.
#[derive(Clone, Copy, Debug)]
pub struct ExpertLatent {
    /// Elements of a row that an expert reads.
    pub width: usize,
    /// `[width, hidden]`
    pub down: Linear,
    /// `[hidden, width]`
    pub up: Linear,
}

/// A dense network whose output is added to that of experts.
#[derive(Clone, Debug)]
pub struct Beside {
    /// Reads the residual stream; its output is added after its own [`Dense::post_norm`].
    pub dense: Dense,
    /// Norm of the sum of the experts, `[hidden]`.
    pub sum_norm: Norm,
}

/// Chooses the experts of a row and their weights: `scores = activation(h·Wᵀ + b)`; the [`used`](Router::used) experts
/// with the largest `scores + selection_bias` are chosen, among equals the one with the lowest id; their weights are
/// their scores, perhaps divided by their sum, times [`factor`](Router::factor) and [`expert_scale`](Router::expert_scale).
#[derive(Clone, Debug)]
pub struct Router {
    /// Norm of the residual stream, `[hidden]`, of a router that reads something else than the experts (Gemma 4).
    pub norm: Option<Norm>,
    /// `[count, hidden]`; not quantized, because a rounding difference may choose another expert.
    pub linear: Linear,
    /// Kind of scores.
    pub scores: Scores,
    /// Added to scores for the choice only, `[count]` (DeepSeek V3, GLM 4.5).
    pub selection_bias: Option<VectorId>,
    /// Chooses among the experts of some groups only.
    pub groups: Option<ExpertGroups>,
    /// Number of experts for each row.
    pub used: usize,
    /// Divides the weights by their sum.
    pub renormalize: bool,
    /// Multiplies the weights.
    pub factor: f32,
    /// Multiplies the weight of each expert, `[count]` (Gemma 4).
    pub expert_scale: Option<VectorId>,
}

/// Groups of consecutive experts, of which a row uses some (DeepSeek V2 and V3): those with the largest sums of their
/// [`best`](ExpertGroups::best) largest scores, as the choice of experts compares them; among equals the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Number of groups, which divides the number of experts.
    pub count: usize,
    /// Number of groups for each row.
    pub used: usize,
    /// Scores that are summed up.
    pub best: usize,
}

/// Conversion of a router's logits to scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scores {
    /// Softmax over all experts. With [`Router::renormalize`] this is the softmax over the chosen ones.
    Softmax,
    /// Sigmoid of each.
    Sigmoid,
}

/// A dense network with the input of the experts, so it has no norms of its own.
#[derive(Clone, Debug)]
pub struct SharedExpert {
    /// Width of the rows between up and down.
    pub width: usize,
    /// `[width, hidden]`; it has one if the experts do.
    pub gate: Option<Linear>,
    /// `[width, hidden]`
    pub up: Linear,
    /// `[hidden, width]`
    pub down: Linear,
    /// `[1, hidden]`: the output is multiplied by `sigmoid(h·Wᵀ)` (Qwen 1.5 MoE).
    pub output_gate: Option<Linear>,
}

/// The activation of a feed-forward network. With a gate `g` and an input `u`, it is `f(g) * u` unless stated
/// otherwise.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// `x * sigmoid(x)`
    Silu,
    /// `0.5 x (1 + tanh(sqrt(2/π) (x + 0.044715 x³)))`
    GeluTanh,
    /// `0.5 x (1 + erf(x / sqrt(2)))`
    Gelu,
    /// `max(x, 0)²`
    Relu2,
    /// `g' * sigmoid(alpha * g') * (u' + 1)` with `g' = min(g, limit)` and `u' = clamp(u, -limit, limit)`: only with
    /// a gate (gpt-oss).
    ClampedSwiglu {
        /// Slope of the sigmoid.
        alpha: f32,
        /// Bound of gate and input.
        limit: f32,
    },
}
