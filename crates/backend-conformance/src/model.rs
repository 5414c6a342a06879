//! Small models with random weights, of every shape that a program can have.

use paguro_backend::{
    Activation, Attention, Beside, Bytes, Convolution, DeltaRule, DeltaShape, Dense, DistanceBias, Embed,
    ExpertGroups, ExpertLatent, Experts, FeedForward, Head, KeySharing, KvGroup, KvSlot, Latent, LatentQuery,
    LatentShape, Layer, LayerEmbeds, LayerInput, Linear, Matrix, MatrixId, Mixer, Norm, NormKind,
    PositionScale, Positions, Program, QkNorm, QkNormKind, Residual, Rope, RopeStyle, Router, Scores,
    SharedExpert, ShortConv, StateLayout, StateShape, TableId, TokenTypes, VectorId, WeightFormat, Weights,
};

use super::{Rng, random::random_matrix};

mod arrange;
mod ssd;

use arrange::arrange;

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
    /// See [`Attention::heads`].
    pub heads: usize,
    /// See [`KvGroup::kv_heads`].
    pub kv_heads: usize,
    /// See [`KvGroup::head_dim`].
    pub head_dim: usize,
    /// `kv_heads` and `head_dim` of layers with a window, where they are others.
    pub window_heads: Option<(usize, usize)>,
    /// See [`Dense::width`].
    pub ffn: usize,
    /// The sliding window of each layer, and so the number of layers.
    pub windows: Vec<Option<u32>>,
    /// Layer slots in a page; layers of one window that do not fit in one group's pages form another group. `None`
    /// makes one group for each window.
    pub slots: Option<usize>,
    /// Pairs of elements in RoPE.
    pub rope_style: RopeStyle,
    /// Elements of a head that RoPE rotates; `None` is all of them.
    pub rotated: Option<usize>,
    /// See [`Rope::magnitude`].
    pub rope_magnitude: f32,
    /// True if every second layer has no RoPE.
    pub skips_ropes: bool,
    /// Number of learned positions.
    pub positions: Option<usize>,
    /// See [`Attention::position_scale`].
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
    /// See [`Layer::output_scale`].
    pub output_scale: f32,
    /// Norms after attention and feed-forward.
    pub post_norms: bool,
    /// Soft cap of attention scores.
    pub attention_cap: Option<f32>,
    /// Sinks of attention.
    pub sinks: bool,
    /// Soft cap of logits.
    pub logit_cap: Option<f32>,
    /// See [`Head::scale`].
    pub logit_scale: f32,
    /// True if the head is the embedding's table.
    pub tied: bool,
    /// See [`Embed::scale`].
    pub embed_scale: f32,
    /// See [`Layer::branch_scale`].
    pub branch_scale: f32,
    /// See [`Layer::residual`].
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
    /// Largest distance of [`Attention::distance_bias`], if there is one.
    pub distance_bias: Option<usize>,
    /// Number of token types, if there are some.
    pub types: Option<usize>,
    /// True if the sum of embeddings has a norm.
    pub embed_norm: bool,
    /// True if the residual stream has norms after each branch, see [`Layer::norm_after_mixer`].
    pub norms_after: bool,
}

/// Mixers with a state of a random model.
#[derive(Clone, Copy, Debug)]
pub struct RecurrentShape {
    /// See [`Convolution::taps`].
    pub taps: usize,
    /// True if convolutions have a bias.
    pub bias: bool,
    /// Elements of a short convolution.
    pub width: usize,
    /// Heads of a delta rule or a scan.
    pub delta: DeltaShape,
    /// See [`DeltaRule::sharing`].
    pub sharing: KeySharing,
    /// Groups of the norm of a scan's output; zero has no norm.
    pub norm_groups: usize,
    /// True if the norm precedes the gate.
    pub norm_before_gate: bool,
    /// True if scans and sums have scales, and bounds of their steps.
    pub scales: bool,
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
        }
    }
}

/// The mixture of experts of a random model. The default is a small Qwen 3 MoE.
#[derive(Clone, Copy, Debug)]
pub struct ExpertsShape {
    /// See [`Experts::count`].
    pub count: usize,
    /// See [`Router::used`].
    pub used: usize,
    /// See [`Experts::width`].
    pub width: usize,
    /// See [`Router::scores`].
    pub scores: Scores,
    /// See [`Router::selection_bias`].
    pub selection_bias: bool,
    /// See [`Router::renormalize`].
    pub renormalize: bool,
    /// See [`Router::factor`].
    pub factor: f32,
    /// See [`Router::groups`].
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
    /// Every product's.
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
            slots: None,
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
            norms_after: false,
        }
    }
}

impl ModelShape {
    /// The mixer of a layer, as a letter of [`ModelShape::mixers`].
    fn mixer(&self, layer: usize) -> char {
        self.mixers.chars().nth(layer).unwrap_or('a')
    }

    /// True if a layer reads the K and V of an earlier one.
    fn shares_kv(&self, layer: usize) -> bool {
        layer + self.shared_kv >= self.windows.len()
    }

    /// Shapes of the states of all layers that have one.
    fn states(&self) -> StateLayout {
        let RecurrentShape { taps, width, delta, .. } = self.recurrent;
        let state = |layer: usize| {
            let (channels, delta) = match self.mixer(layer) {
                'c' => (width, None),
                'd' | 's' | 'h' => (delta.channels(), Some(delta)),
                _ => return None,
            };
            Some(StateShape { rows: taps - 1, channels, delta })
        };
        StateLayout { layers: (0..self.windows.len()).filter_map(state).collect() }
    }

    /// A small Llama with matrices of this format and dimensions that its blocks divide.
    pub fn of_format(format: WeightFormat) -> Self {
        let small = Self { format, ..Self::default() };
        match format.block_len() {
            // No dimension is a multiple of a power of two.
            1 => Self { hidden: 72, ffn: 109, ..small },
            32 => Self { hidden: 96, ffn: 160, ..small },
            _ => Self { hidden: 256, ffn: 512, ..small },
        }
    }

    /// A model of this shape; the same one for the same seed.
    pub fn build(&self, seed: u64) -> RandomModel {
        let mut builder = Builder { shape: self, rng: Rng::new(seed), weights: Weights::default() };
        let program = builder.program();
        RandomModel { program, weights: builder.weights }
    }
}

/// Elements of the residual stream that stable routers read.
const CODE: usize = 16;

/// A model without a meaning.
#[derive(Clone, Debug)]
pub struct RandomModel {
    /// Its operations.
    pub program: Program,
    /// Its weights, scaled so that activations stay of order one.
    pub weights: Weights,
}

struct Builder<'a> {
    shape: &'a ModelShape,
    rng: Rng,
    weights: Weights,
}

impl Builder<'_> {
    fn program(&mut self) -> Program {
        let shape = self.shape;
        let ModelShape { hidden, vocab, .. } = *shape;
        let (kv, places) = arrange(shape);
        let table = self.matrix("embedding", 1, vocab, hidden, 1.0);
        let positions = shape
            .positions
            .map(|count| Positions { table: self.matrix("positions", 1, count, hidden, 0.7), count });
        let types = shape.types.map(|count| {
            let table = (0..count * hidden).map(|_| 0.7 * self.rng.normal()).collect();
            TokenTypes { table: self.vector(table), count }
        });
        let embed_norm = shape.embed_norm.then(|| self.norm(hidden));
        let layer_embeds = shape.layer_embeds.map(|width| self.layer_embeds(width));
        let mut states = 0..;
        let layers = places.iter().enumerate().map(|(layer, &place)| {
            let mixer = match shape.mixer(layer) {
                'c' => Mixer::Conv(self.conv(layer, states.next().unwrap_or(0))),
                'd' => Mixer::DeltaRule(self.delta(layer, states.next().unwrap_or(0))),
                'l' => Mixer::Latent(Box::new(self.latent(layer, place))),
                's' => Mixer::Ssd(Box::new(self.ssd(layer, states.next().unwrap_or(0)))),
                'h' => {
                    let attention = self.attention(layer, &kv.groups[place.group], place);
                    self.sum(attention, layer, states.next().unwrap_or(0))
                }
                '-' => Mixer::None,
                _ => Mixer::Attention(self.attention(layer, &kv.groups[place.group], place)),
            };
            let ffn = match shape.experts.filter(|_| layer > 0) {
                _ if shape.networks.chars().nth(layer) == Some('-') => FeedForward::None,
                Some(experts) => FeedForward::Experts(self.experts(layer, &experts)),
                None => FeedForward::Dense(self.dense(layer, shape.ffn)),
            };
            let input = shape.layer_embeds.map(|width| self.layer_input(layer, width));
            let (residual, branch_scale, output_scale) =
                (shape.residual, shape.branch_scale, shape.output_scale);
            let [norm_after_mixer, norm_after_ffn] =
                [(); 2].map(|()| shape.norms_after.then(|| self.norm(hidden)));
            Layer {
                mixer,
                ffn,
                residual,
                norm_after_mixer,
                norm_after_ffn,
                branch_scale,
                input,
                output_scale,
            }
        });
        let layers = layers.collect();
        let norm = self.norm(hidden);
        let linear = match shape.tied {
            true => Linear { matrix: table, bias: None },
            false => self.linear("head", vocab, hidden, 1.0, shape.biases == Biases::All),
        };
        let local = shape.window_heads.map_or(shape.head_dim, |heads| heads.1);
        let mut ropes = vec![(1e4, shape.head_dim), (1e3, local)];
        if shape.mixers.contains('l') {
            ropes.push((1e3, shape.latent.rotated));
        }
        Program {
            hidden,
            vocab,
            bidirectional: shape.bidirectional,
            ropes: ropes.into_iter().map(|(base, head_dim)| self.rope(base, head_dim)).collect(),
            kv,
            state: shape.states(),
            embed: Embed {
                table,
                scale: shape.embed_scale,
                positions,
                types,
                norm: embed_norm,
                layers: layer_embeds,
            },
            layers,
            head: Head { norm, linear, scale: shape.logit_scale, soft_cap: shape.logit_cap },
        }
    }

    fn attention(&mut self, layer: usize, group: &KvGroup, place: KvSlot) -> Attention {
        let shape = self.shape;
        let (heads, hidden, head_dim) = (shape.heads, shape.hidden, group.head_dim);
        let name = |what: &str| format!("layer {layer} {what}");
        let qkv = shape.biases != Biases::None;
        // Wide enough scores that attention chooses, and does not merely average.
        let sharp = 1.6;
        let norm = self.pre_norm();
        let q = self.linear(&name("q"), heads * head_dim, hidden, sharp, qkv);
        let is_own = !shape.shares_kv(layer);
        let has_v = is_own && !(shape.keys_as_values && shape.windows[layer].is_none());
        let k = is_own.then(|| self.linear(&name("k"), group.width(), hidden, sharp, qkv));
        let v = has_v.then(|| self.linear(&name("v"), group.width(), hidden, 1.0, qkv));
        if let (Biases::LargeKeys, Some(bias)) = (shape.biases, k.and_then(|k| k.bias)) {
            let heads = self.weights.vectors[bias.0 as usize].chunks_exact_mut(head_dim);
            heads.for_each(|head| head[head_dim - 1] = 40.0);
        }
        let v_norm = (is_own && shape.v_norm).then(|| self.rms_norm(head_dim));
        let qk_norm = shape.qk_norm.map(|kind| {
            let widths = match kind {
                QkNormKind::Row => [heads * head_dim, group.width()],
                QkNormKind::Head | QkNormKind::HeadAfterRope => [head_dim; 2],
            };
            let [q, k] = widths.map(|width| self.rms_norm(width));
            QkNorm { q, k, kind }
        });
        let gate = shape
            .attention_gate
            .then(|| self.linear(&name("gate of attention"), heads * head_dim, hidden, 1.5, qkv));
        let distance_bias = shape.distance_bias.map(|reach| {
            let table = (0..heads * (2 * reach + 1)).map(|_| self.rng.normal()).collect();
            DistanceBias { table: self.vector(table), reach }
        });
        let sinks = shape.sinks.then(|| (0..heads).map(|_| 2.0 + self.rng.normal()).collect());
        Attention {
            norm,
            heads,
            q,
            k,
            v,
            qk_norm,
            v_norm,
            // Layers with a window use the second RoPE, as in Gemma 3.
            rope: (!shape.skips_ropes || layer.is_multiple_of(2))
                .then_some(usize::from(shape.windows[layer].is_some())),
            position_scale: shape.position_scale,
            scale: 1.0 / (head_dim as f32).sqrt(),
            soft_cap: shape.attention_cap,
            distance_bias,
            sinks: sinks.map(|sinks| self.vector(sinks)),
            kv: place,
            gate,
            out: self.onto_stream(&name("project"), 1, heads * head_dim),
            post_norm: shape.post_norms.then(|| self.norm(hidden)),
        }
    }

    fn latent(&mut self, layer: usize, kv: KvSlot) -> Latent {
        let shape = self.shape;
        let (hidden, sizes, all) = (shape.hidden, shape.latent, shape.biases == Biases::All);
        let LatentShape { heads, plain, latent, value, .. } = sizes;
        let name = |what: &str| format!("layer {layer} {what}");
        let norm = self.pre_norm();
        let query = match shape.rank {
            None => LatentQuery::Direct(self.linear(&name("q"), sizes.query_width(), hidden, 1.6, all)),
            Some(rank) => LatentQuery::Down {
                down: self.linear(&name("q down"), rank, hidden, 1.0, all),
                rank,
                norm: self.rms_norm(rank),
                up: self.linear(&name("q up"), sizes.query_width(), rank, 1.6, all),
            },
        };
        Latent {
            norm,
            shape: sizes,
            query,
            down: self.linear(&name("latent"), sizes.key_dim(), hidden, 1.6, all),
            latent_norm: self.rms_norm(latent),
            absorb: self.stack(&name("absorb"), heads, latent, plain, 1.0, false),
            value: self.stack(&name("value"), heads, value, latent, 1.0, false),
            rope: 2,
            position_scale: shape.position_scale,
            scale: 1.0 / (sizes.key_dim() as f32).sqrt(),
            kv,
            out: self.onto_stream(&name("project"), 1, sizes.value_width()),
            post_norm: shape.post_norms.then(|| self.norm(hidden)),
        }
    }

    fn conv(&mut self, layer: usize, state: usize) -> ShortConv {
        let shape = self.shape;
        let width = shape.recurrent.width;
        let name = |what: &str| format!("layer {layer} {what}");
        ShortConv {
            norm: self.pre_norm(),
            width,
            input: self.linear(&name("input"), 3 * width, shape.hidden, 1.2, shape.biases == Biases::All),
            convolution: self.convolution(width),
            out: self.onto_stream(&name("project"), 1, width),
            post_norm: shape.post_norms.then(|| self.norm(shape.hidden)),
            state,
        }
    }

    fn delta(&mut self, layer: usize, state: usize) -> DeltaRule {
        let shape = self.shape;
        let RecurrentShape { delta, sharing, .. } = shape.recurrent;
        let (hidden, heads) = (shape.hidden, delta.value_heads);
        let all = shape.biases == Biases::All;
        let name = |what: &str| format!("layer {layer} {what}");
        let norm = self.pre_norm();
        let qkv = self.linear(&name("qkv"), delta.channels(), hidden, 1.5, all);
        let gate = self.linear(&name("z"), delta.value_width(), hidden, 1.5, all);
        let [alpha, beta] = ["alpha", "beta"].map(|what| self.linear(&name(what), heads, hidden, 1.5, all));
        let convolution = self.convolution(delta.channels());
        // From heads with a memory of a few tokens to heads with more than a chunk.
        let decay = (0..heads).map(|_| -(2.0 * self.rng.normal() - 3.0).exp()).collect();
        let dt = (0..heads).map(|_| self.rng.normal()).collect();
        DeltaRule {
            norm,
            shape: delta,
            sharing,
            qkv,
            gate,
            alpha,
            beta,
            convolution,
            decay: self.vector(decay),
            dt: self.vector(dt),
            out_norm: self.rms_norm(delta.value_dim),
            out: self.onto_stream(&name("project"), 1, delta.value_width()),
            post_norm: shape.post_norms.then(|| self.norm(hidden)),
            state,
        }
    }

    fn convolution(&mut self, channels: usize) -> Convolution {
        let RecurrentShape { taps, bias, .. } = self.shape.recurrent;
        let rms = 1.0 / (taps as f32).sqrt();
        let weight = (0..taps * channels).map(|_| rms * self.rng.normal()).collect();
        let bias = bias.then(|| (0..channels).map(|_| 0.3 * self.rng.normal()).collect());
        Convolution { taps, weight: self.vector(weight), bias: bias.map(|bias| self.vector(bias)) }
    }

    fn layer_embeds(&mut self, width: usize) -> LayerEmbeds {
        let shape = self.shape;
        let count = shape.windows.len();
        let table = self.matrix("embeddings for layers", 1, shape.vocab, count * width, 1.0);
        debug_assert_eq!(table.0 as usize + 1, self.weights.matrices.len());
        self.weights.tables.extend(self.weights.matrices.pop());
        let projection = self.linear("projection for layers", count * width, shape.hidden, 1.0, false);
        LayerEmbeds { table: TableId(0), scale: 0.7, count, width, projection, norm: self.rms_norm(width) }
    }

    fn layer_input(&mut self, layer: usize, width: usize) -> LayerInput {
        let shape = self.shape;
        let name = |what: &str| format!("layer {layer} {what}");
        let all = shape.biases == Biases::All;
        LayerInput {
            index: layer,
            gate: self.linear(&name("input gate"), width, shape.hidden, 1.5, all),
            activation: shape.activation,
            out: self.onto_stream(&name("input"), 1, width),
            post_norm: shape.post_norms.then(|| self.norm(shape.hidden)),
        }
    }

    fn dense(&mut self, layer: usize, ffn: usize) -> Dense {
        let shape = self.shape;
        let hidden = shape.hidden;
        let name = |what: &str| format!("layer {layer} {what}");
        let all = shape.biases == Biases::All;
        Dense {
            norm: self.pre_norm(),
            width: ffn,
            gate: shape.gated.then(|| self.linear(&name("gate"), ffn, hidden, 1.5, all)),
            up: self.linear(&name("up"), ffn, hidden, 1.5, all),
            activation: shape.activation,
            down: self.onto_stream(&name("down"), 1, ffn),
            post_norm: shape.post_norms.then(|| self.norm(hidden)),
        }
    }

    fn experts(&mut self, layer: usize, experts: &ExpertsShape) -> Experts {
        let shape = self.shape;
        let hidden = shape.hidden;
        let ExpertsShape { count, used, width, scores, renormalize, factor, .. } = *experts;
        let name = |what: &str| format!("layer {layer} {what}");
        let all = shape.biases == Biases::All;
        let norm = self.pre_norm();
        let bias = experts.selection_bias.then(|| (0..count).map(|_| 0.3 * self.rng.normal()).collect());
        let beside = experts
            .beside
            .map(|width| Box::new(Beside { dense: self.dense(layer, width), sum_norm: self.norm(hidden) }));
        let router_norm = experts.beside.and_then(|_| self.pre_norm());
        let scales = experts.beside.map(|_| (0..count).map(|_| 1.0 + 0.4 * self.rng.normal()).collect());
        let latent = experts.latent.map(|width| ExpertLatent {
            width,
            down: self.linear(&name("experts in"), width, hidden, 1.0, all),
            up: self.onto_stream(&name("experts out"), 1, width),
        });
        let row = experts.latent.unwrap_or(hidden);
        Experts {
            norm,
            beside,
            router: Router {
                norm: router_norm,
                expert_scale: scales.map(|scales| self.vector(scales)),
                linear: self.router(&name("router"), experts, all),
                scores,
                selection_bias: bias.map(|bias| self.vector(bias)),
                groups: experts.groups,
                used,
                renormalize,
                factor,
            },
            count,
            width,
            latent,
            gate: shape.gated.then(|| self.stack(&name("experts gate"), count, width, row, 1.5, all)),
            up: self.stack(&name("experts up"), count, width, row, 1.5, all),
            activation: shape.activation,
            down: match latent {
                Some(_) => self.stack(&name("experts down"), count, row, width, 1.0, all),
                None => self.onto_stream(&name("experts down"), count, width),
            },
            shared: experts.shared.map(|width| SharedExpert {
                width,
                gate: shape.gated.then(|| self.linear(&name("shared gate"), width, hidden, 1.5, all)),
                up: self.linear(&name("shared up"), width, hidden, 1.5, all),
                down: self.onto_stream(&name("shared down"), 1, width),
                output_gate: experts
                    .output_gate
                    .then(|| self.linear(&name("output gate"), 1, hidden, 1.0, false)),
            }),
            post_norm: shape.post_norms.then(|| self.norm(hidden)),
        }
    }

    fn router(&mut self, name: &str, experts: &ExpertsShape, bias: bool) -> Linear {
        let hidden = self.shape.hidden;
        let read = if experts.stable { CODE.min(hidden) } else { hidden };
        let gain = 2.0 / (read as f32).sqrt();
        let weight = |(index, noise): (usize, f32)| if index % hidden < read { gain * noise } else { 0.0 };
        let values: Vec<f32> =
            (0..experts.count * hidden).map(|index| weight((index, self.rng.normal()))).collect();
        let bytes = experts.router.quantize(&values).expect("plain formats have encoders");
        self.weights.matrices.push(Matrix {
            name: name.to_owned(),
            format: experts.router,
            parts: 1,
            rows: experts.count,
            cols: hidden,
            bytes: Bytes::from(bytes),
        });
        let bias = bias.then(|| (0..experts.count).map(|_| 0.5 * self.rng.normal()).collect());
        Linear {
            matrix: MatrixId(self.weights.matrices.len() as u32 - 1),
            bias: bias.map(|bias| self.vector(bias)),
        }
    }

    fn rope(&self, base: f32, head_dim: usize) -> Rope {
        let rotated = self.shape.rotated.unwrap_or(head_dim);
        let frequency = |pair: usize| base.powf(-2.0 * pair as f32 / rotated as f32);
        Rope {
            style: self.shape.rope_style,
            frequencies: (0..rotated / 2).map(frequency).collect(),
            magnitude: self.shape.rope_magnitude,
        }
    }

    fn pre_norm(&mut self) -> Option<Norm> {
        self.shape.pre_norms.then(|| self.norm(self.shape.hidden))
    }

    fn norm(&mut self, width: usize) -> Norm {
        let norm = self.rms_norm(width);
        match self.shape.norms {
            NormKind::Rms => norm,
            NormKind::Layer => {
                let bias = (0..width).map(|_| 0.2 * self.rng.normal()).collect();
                Norm { kind: NormKind::Layer, bias: Some(self.vector(bias)), ..norm }
            }
        }
    }

    fn rms_norm(&mut self, width: usize) -> Norm {
        let weight = (0..width).map(|_| 1.0 + 0.2 * self.rng.normal()).collect();
        // Large enough that a forgotten eps shows.
        Norm { kind: NormKind::Rms, weight: self.vector(weight), bias: None, eps: 0.05 }
    }

    fn linear(&mut self, name: &str, rows: usize, cols: usize, gain: f32, bias: bool) -> Linear {
        self.stack(name, 1, rows, cols, gain, bias)
    }

    fn stack(&mut self, name: &str, parts: usize, rows: usize, cols: usize, gain: f32, bias: bool) -> Linear {
        let matrix = self.matrix(name, parts, rows, cols, gain / (cols as f32).sqrt());
        let bias = bias.then(|| (0..parts * rows).map(|_| 0.5 * self.rng.normal()).collect());
        Linear { matrix, bias: bias.map(|bias| self.vector(bias)) }
    }

    /// Matrices whose outputs are added to the residual stream: nothing to the elements that stable routers read.
    fn onto_stream(&mut self, name: &str, parts: usize, cols: usize) -> Linear {
        let hidden = self.shape.hidden;
        let linear = self.stack(name, parts, hidden, cols, 1.0, self.shape.biases == Biases::All);
        if self.shape.experts.is_some_and(|experts| experts.stable) {
            let matrix = &mut self.weights.matrices[linear.matrix.0 as usize];
            let part_bytes = hidden * matrix.format.row_bytes(cols);
            let mut bytes = matrix.bytes.read().expect("in memory").into_owned();
            for part in bytes.chunks_exact_mut(part_bytes) {
                // Zeros decode to zeros in all formats.
                part[..CODE.min(hidden) * matrix.format.row_bytes(cols)].fill(0);
            }
            matrix.bytes = Bytes::from(bytes);
            if let Some(bias) = linear.bias {
                let bias = &mut self.weights.vectors[bias.0 as usize];
                bias.chunks_exact_mut(hidden).for_each(|bias| bias[..CODE.min(hidden)].fill(0.0));
            }
        }
        linear
    }

    fn vector(&mut self, vector: Vec<f32>) -> VectorId {
        self.weights.vectors.push(vector);
        VectorId(self.weights.vectors.len() as u32 - 1)
    }

    fn matrix(&mut self, name: &str, parts: usize, rows: usize, cols: usize, rms: f32) -> MatrixId {
        let is_finer = name.ends_with(" v") || name.ends_with(" down");
        let format = self.shape.finer.filter(|_| is_finer).unwrap_or(self.shape.format);
        let matrix = random_matrix(name, format, parts * rows, cols, rms, &mut self.rng);
        self.weights.matrices.push(Matrix { parts, rows, ..matrix });
        MatrixId(self.weights.matrices.len() as u32 - 1)
    }
}
