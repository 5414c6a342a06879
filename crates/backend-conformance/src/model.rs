//! Small models with random weights, of every shape that a program can have.

mod arrange;
mod builder;
mod ssd;
mod tensors;

use paguro_backend::{
    Activation, DeltaShape, Exit, ExpertGroups, Input, KeySharing, KvLayout, KvSlot, LatentShape, NormKind,
    PositionScale, Program, QkNormKind, Residual, RopeStyle, Scores, StateLayout, StateShape, WeightFormat,
    Weights,
};

use self::builder::Builder;
use super::Rng;

/// Shape of a random model. The default is a small Llama; each case changes the fields that it tests.
#[derive(Clone, Debug)]
pub struct ModelShape {
    /// Encoding of all matrices.
    pub format: WeightFormat,
    /// Encoding of the matrices with more bits in mixtures such as Q4_K_M, values and down; `None` for the same as all
    /// others.
    pub finer: Option<WeightFormat>,
    /// See [`Program::hidden`].
    pub hidden: usize,
    /// See [`Program::vocab`].
    pub vocab: usize,
    /// See [`Attention::heads`](paguro_backend::Attention::heads).
    pub heads: usize,
    /// See [`KvGroup::kv_heads`](paguro_backend::KvGroup::kv_heads).
    pub kv_heads: usize,
    /// See [`KvGroup::head_dim`](paguro_backend::KvGroup::head_dim).
    pub head_dim: usize,
    /// `kv_heads` and `head_dim` of layers with a window, where they are others.
    pub window_heads: Option<(usize, usize)>,
    /// See [`Dense::width`](paguro_backend::Dense::width).
    pub ffn: usize,
    /// The sliding window of each layer, and so the number of layers.
    pub windows: Vec<Option<u32>>,
    /// Layer slots in a page; layers of one window that do not fit in one group's pages form another group. `None`
    /// makes one group for each window.
    pub layer_slots: Option<usize>,
    /// Pairs of elements in RoPE.
    pub rope_style: RopeStyle,
    /// Elements of a head that RoPE rotates; `None` is all of them.
    pub rotated: Option<usize>,
    /// See [`Rope::magnitude`](paguro_backend::Rope::magnitude).
    pub rope_magnitude: f32,
    /// True if every second layer has no RoPE.
    pub skips_ropes: bool,
    /// Number of learned positions.
    pub positions: Option<usize>,
    /// See [`Attention::position_scale`](paguro_backend::Attention::position_scale).
    pub position_scale: Option<PositionScale>,
    /// Matmuls with a bias.
    pub biases: Biases,
    /// Kind of all norms except those of heads; [`NormKind::Layer`] has biases.
    pub norms: NormKind,
    /// Norms before attention and feed-forward.
    pub pre_norms: bool,
    /// Norms of queries and keys.
    pub qk_norm: Option<QkNormKind>,
    /// True if layers without a window use K as V.
    pub keys_as_values: bool,
    /// Norms of the heads of V.
    pub v_norm: bool,
    /// Last layers, which read the K and V of the last other layer with the same window.
    pub shared_kv: usize,
    /// Elements of an embedding for each layer, if there are some.
    pub layer_embeds: Option<usize>,
    /// See [`Layer::output_scale`](paguro_backend::Layer::output_scale).
    pub output_scale: f32,
    /// Norms after attention and feed-forward.
    pub post_norms: bool,
    /// Soft cap of attention scores.
    pub attention_cap: Option<f32>,
    /// Sinks of attention.
    pub sinks: bool,
    /// Soft cap of logits.
    pub logit_cap: Option<f32>,
    /// See [`Head::scale`](paguro_backend::Head::scale).
    pub logit_scale: f32,
    /// True if the head is the embedding's table.
    pub tied: bool,
    /// See [`Embed::scale`](paguro_backend::Embed::scale).
    pub embed_scale: f32,
    /// See [`Layer::branch_scale`](paguro_backend::Layer::branch_scale).
    pub branch_scale: f32,
    /// See [`Layer::residual`](paguro_backend::Layer::residual).
    pub residual: Residual,
    /// True if feed-forward networks have a gate.
    pub gated: bool,
    /// Activation of feed-forward networks.
    pub activation: Activation,
    /// Experts in all layers except the first one.
    pub experts: Option<ExpertsShape>,
    /// Latent attention of a random model.
    pub latent: LatentShape,
    /// Rank of its queries.
    pub rank: Option<usize>,
    /// The mixer of each layer: `a` is attention, `l` latent attention, `c` a short convolution, `d` a delta rule, `s` a scan, `h`
    /// the sum of attention and a scan, `-` none. Empty is attention in all layers.
    pub mixers: &'static str,
    /// The layers without a feed-forward network, as `-` in a letter for each layer. Empty is none.
    pub networks: &'static str,
    /// Mixers with a state.
    pub recurrent: RecurrentShape,
    /// True if the output of attention has a gate.
    pub attention_gate: bool,
    /// See [`Program::bidirectional`].
    pub bidirectional: bool,
    /// Largest distance of [`Attention::distance_bias`](paguro_backend::Attention::distance_bias), if there is one.
    pub distance_bias: Option<usize>,
    /// Number of token types, if there are some.
    pub types: Option<usize>,
    /// True if the sum of embeddings has a norm.
    pub embed_norm: bool,
    /// See [`Program::given_parts`].
    pub given_parts: usize,
    /// True if given rows are joined with embeddings, see [`Joined`](paguro_backend::Joined).
    pub joined: bool,
    /// The program whose pages all layers read, see [`Program::shares_pages`].
    pub pages_of: Option<PagesOf>,
    /// See [`Rope::axes`](paguro_backend::Rope::axes): the axes of the first pairs, which repeat. Empty is none.
    pub axes: &'static [u8],
    /// Layers that see spans.
    pub spans: Spans,
    /// True if the residual stream has norms after each branch, see [`Layer::norm_after_mixer`](paguro_backend::Layer::norm_after_mixer).
    pub norms_after: bool,
}

/// Pages of another program, and its width.
#[derive(Clone, Debug)]
pub struct PagesOf {
    kv: KvLayout,
    /// Slots of the last layer with a window, and of the last one without.
    slots: [Option<KvSlot>; 2],
    hidden: usize,
}

impl PagesOf {
    /// Returns those of a program.
    pub fn program(program: &Program) -> Self {
        let has_window = |slot: &KvSlot| program.kv.groups[slot.group].window.is_some();
        let last = |window: bool| {
            program.attentions().map(|op| op.kv).filter(|slot| has_window(slot) == window).last()
        };
        Self { kv: program.kv.clone(), slots: [last(true), last(false)], hidden: program.hidden }
    }
}

/// Layers that see spans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spans {
    /// None.
    None,
    /// Those with a window (Gemma 4).
    Windows,
    /// All (Gemma 3).
    All,
}

/// Mixers with a state of a random model.
#[derive(Clone, Copy, Debug)]
pub struct RecurrentShape {
    /// See [`Convolution::taps`](paguro_backend::Convolution::taps).
    pub taps: usize,
    /// True if convolutions have a bias.
    pub bias: bool,
    /// Elements of a short convolution.
    pub width: usize,
    /// Heads of a delta rule or a scan.
    pub delta: DeltaShape,
    /// See [`DeltaRule::sharing`](paguro_backend::DeltaRule::sharing).
    pub sharing: KeySharing,
    /// Groups of the norm of a scan's output; zero has no norm.
    pub norm_groups: usize,
    /// True if the norm precedes the gate.
    pub norm_before_gate: bool,
    /// True if scans and sums have scales, and bounds of their steps.
    pub scales: bool,
    /// See [`Program::droppable_rows`].
    pub droppable: usize,
}

impl Default for RecurrentShape {
    fn default() -> Self {
        Self {
            taps: 4,
            bias: false,
            width: 64,
            delta: DeltaShape { key_heads: 2, value_heads: 4, key_dim: 32, value_dim: 32 },
            sharing: KeySharing::Consecutive,
            norm_groups: 1,
            norm_before_gate: false,
            scales: false,
            droppable: 0,
        }
    }
}

/// The mixture of experts of a random model. The default is a small Qwen 3 MoE.
#[derive(Clone, Copy, Debug)]
pub struct ExpertsShape {
    /// See [`Experts::count`](paguro_backend::Experts::count).
    pub count: usize,
    /// See [`Router::used`](paguro_backend::Router::used).
    pub used: usize,
    /// See [`Experts::width`](paguro_backend::Experts::width).
    pub width: usize,
    /// See [`Router::scores`](paguro_backend::Router::scores).
    pub scores: Scores,
    /// See [`Router::selection_bias`](paguro_backend::Router::selection_bias).
    pub selection_bias: bool,
    /// See [`Router::renormalize`](paguro_backend::Router::renormalize).
    pub renormalize: bool,
    /// See [`Router::factor`](paguro_backend::Router::factor).
    pub factor: f32,
    /// See [`Router::groups`](paguro_backend::Router::groups).
    pub groups: Option<ExpertGroups>,
    /// Width of the rows that experts read, where it is not that of the residual stream.
    pub latent: Option<usize>,
    /// Encoding of the router.
    pub router: WeightFormat,
    /// Width of the shared expert, if there is one.
    pub shared: Option<usize>,
    /// True if it has a gate on its output.
    pub output_gate: bool,
    /// Width of a dense network beside the experts, whose router has a separate norm and a scale for each expert.
    pub beside: Option<usize>,
    /// True if rounding can flip no choice: routers read elements of the residual stream to which no layer adds, so
    /// that all logits of a row are off by one and the same factor.
    pub stable: bool,
}

impl Default for ExpertsShape {
    fn default() -> Self {
        Self {
            count: 8,
            used: 2,
            width: 64,
            scores: Scores::Softmax,
            selection_bias: false,
            renormalize: true,
            factor: 1.0,
            groups: None,
            latent: None,
            router: WeightFormat::F32,
            shared: None,
            output_gate: false,
            beside: None,
            stable: true,
        }
    }
}

/// Matmuls with a bias in a random model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Biases {
    /// None.
    None,
    /// Those of q, k and v (Qwen 2).
    Qkv,
    /// Those of q, k and v; the last element of each key head is far larger than the others.
    LargeKeys,
    /// Format of every matrix.
    All,
}

impl Default for ModelShape {
    fn default() -> Self {
        Self {
            format: WeightFormat::F32,
            finer: None,
            hidden: 64,
            vocab: 131,
            heads: 4,
            kv_heads: 2,
            head_dim: 64,
            window_heads: None,
            ffn: 96,
            windows: vec![None; 2],
            layer_slots: None,
            rope_style: RopeStyle::HalfSplit,
            rotated: None,
            rope_magnitude: 1.0,
            skips_ropes: false,
            positions: None,
            position_scale: None,
            biases: Biases::None,
            norms: NormKind::Rms,
            pre_norms: true,
            qk_norm: None,
            keys_as_values: false,
            v_norm: false,
            shared_kv: 0,
            layer_embeds: None,
            output_scale: 1.0,
            post_norms: false,
            attention_cap: None,
            sinks: false,
            logit_cap: None,
            logit_scale: 1.0,
            tied: false,
            embed_scale: 1.0,
            branch_scale: 1.0,
            residual: Residual::Sequential,
            gated: true,
            activation: Activation::Silu,
            experts: None,
            latent: LatentShape { heads: 4, plain: 32, rotated: 16, latent: 64, value: 32 },
            rank: Some(48),
            mixers: "",
            networks: "",
            recurrent: RecurrentShape::default(),
            attention_gate: false,
            bidirectional: false,
            distance_bias: None,
            types: None,
            embed_norm: false,
            given_parts: 0,
            joined: false,
            pages_of: None,
            axes: &[],
            spans: Spans::None,
            norms_after: false,
        }
    }
}

impl ModelShape {
    /// Returns the mixer of a layer, as a letter of [`ModelShape::mixers`].
    fn mixer(&self, layer: usize) -> char {
        self.mixers.chars().nth(layer).unwrap_or('a')
    }

    /// Returns true if a layer reads the K and V of an earlier one.
    fn shares_kv(&self, layer: usize) -> bool {
        self.pages_of.is_some() || layer + self.shared_kv >= self.windows.len()
    }

    /// Returns the shapes of the states of all layers that have one.
    fn states(&self) -> StateLayout {
        let RecurrentShape { taps, width, delta, droppable, .. } = self.recurrent;
        let state = |layer: usize| {
            let (channels, delta) = match self.mixer(layer) {
                'c' => (width, None),
                'd' | 's' | 'h' => (delta.channels(), Some(delta)),
                _ => return None,
            };
            Some(StateShape { rows: taps - 1 + droppable, channels, delta })
        };
        StateLayout { layers: (0..self.windows.len()).filter_map(state).collect() }
    }

    /// Returns a small Llama with matrices of this format and dimensions that its blocks divide.
    pub fn of_format(format: WeightFormat) -> Self {
        let small = Self { format, ..Self::default() };
        match format.block_len() {
            // No dimension is a multiple of a power of two.
            1 => Self { hidden: 72, ffn: 109, ..small },
            32 => Self { hidden: 96, ffn: 160, ..small },
            _ => Self { hidden: 256, ffn: 512, ..small },
        }
    }

    /// Returns a model of this shape with other ends.
    pub(crate) fn build_with(
        &self,
        seed: u64,
        ends: impl FnOnce(&mut Builder<'_>) -> (Input, Exit),
    ) -> RandomModel {
        let mut builder = Builder { shape: self, rng: Rng::new(seed), weights: Weights::default() };
        let mut program = builder.program();
        (program.input, program.exit) = ends(&mut builder);
        program.vocab = 0;
        RandomModel { program, weights: builder.weights }
    }

    /// Returns a model of this shape; the same one for the same seed.
    pub fn build(&self, seed: u64) -> RandomModel {
        let mut builder = Builder { shape: self, rng: Rng::new(seed), weights: Weights::default() };
        let program = builder.program();
        RandomModel { program, weights: builder.weights }
    }
}

/// A model without a meaning.
#[derive(Clone, Debug)]
pub struct RandomModel {
    /// Its operations.
    pub program: Program,
    /// Its weights, scaled so that activations stay of order one.
    pub weights: Weights,
}
