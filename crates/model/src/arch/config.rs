//! Hyperparameters of a model, independent of the file format.

use paguro_backend::{
    Activation, DeltaShape, ExpertGroups, LatentShape, NormKind, PositionScale, QkNormKind, Residual, Scores,
};

use super::Definition;
use crate::rope::RopeConfig;

/// Declares a type with a constant, of which definitions change single fields.
macro_rules! with_defaults {
    (
        $(#[$type_meta:meta])* pub(crate) struct $name:ident
        $(#[$doc:meta])* $constant:ident { $($(#[$meta:meta])* pub(crate) $field:ident: $type:ty = $value:expr,)* }
    ) => {
        $(#[$type_meta])*
        pub(crate) struct $name {
            $($(#[$meta])* pub(crate) $field: $type,)*
        }

        impl $name {
            $(#[$doc])*
            pub(crate) const $constant: Self = Self { $($field: $value),* };
        }
    };
}

with_defaults! {
    /// Parts of a model's layers.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub(crate) struct Block
    /// Llama's.
    LLAMA {
        pub(crate) norms: NormKind = NormKind::Rms,
        /// Norms before attention and feed-forward network.
        pub(crate) pre_norms: bool = true,
        /// Norms of their outputs.
        pub(crate) post_norms: bool = false,
        /// The feed-forward network reads the norm of attention.
        pub(crate) one_norm: bool = false,
        pub(crate) qk_norm: Option<QkNormKind> = None,
        /// Some of the models have no norms of queries and keys.
        pub(crate) optional_qk_norm: bool = false,
        pub(crate) activation: Activation = Activation::Silu,
        /// Feed-forward networks have a gate.
        pub(crate) gated: bool = true,
        /// Gate and up are one matrix.
        pub(crate) fused_gate_up: bool = false,
        pub(crate) residual: Residual = Residual::Sequential,
        pub(crate) sinks: bool = false,
        /// The output of attention has a gate; its rows and those of Q alternate, head by head.
        pub(crate) attention_gate: bool = false,
        /// Learned embeddings of positions.
        pub(crate) positions: bool = false,
        /// Layers differ in their K/V heads and in the width of their feed-forward networks.
        pub(crate) varies: bool = false,
        /// The definition reads RoPE from `config.json` itself.
        pub(crate) own_ropes: bool = false,
        /// Heads of V have a norm without weights.
        pub(crate) v_norm: bool = false,
        /// Layers may scale their output.
        pub(crate) output_scale: bool = false,
        /// True for latent attention, see [`LatentShape`].
        pub(crate) latent: bool = false,
        /// False if no layer attends.
        pub(crate) attention: bool = true,
        /// True if layers with a state also have attention, and add both outputs.
        pub(crate) beside: bool = false,
        /// Rows attend in both directions (encoders).
        pub(crate) bidirectional: bool = false,
        /// Norm of the sum of embeddings.
        pub(crate) embed_norm: bool = false,
        /// Embeddings of token types, where the file has some.
        pub(crate) token_types: bool = false,
        /// Norms of the residual stream after each branch; the last one is the model's output norm.
        pub(crate) norms_after: bool = false,
        /// Biases of scores by distance.
        pub(crate) distances: Distances = Distances::None,
        /// True if zero K/V heads and feed-forward widths in GGUF files represent layers without them.
        pub(crate) zeros: bool = false,
    }
}

/// Biases of scores by the distance of query and key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Distances {
    None,
    /// ALiBi with the usual slopes.
    Alibi,
    /// T5's buckets, with a table for each head.
    Buckets,
}

with_defaults! {
    /// A mixture of experts.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub(crate) struct ExpertsConfig
    /// Softmax over all experts, renormalized over the chosen ones: Mixtral, Qwen 3. The numbers of experts are in
    /// files.
    SOFTMAX {
        pub(crate) count: usize = 0,
        /// Groups of experts, of which a row uses some.
        pub(crate) groups: Option<ExpertGroups> = None,
        /// Experts of a row.
        pub(crate) used: usize = 0,
        /// Width of an expert.
        pub(crate) width: usize = 0,
        pub(crate) scores: Scores = Scores::Softmax,
        /// A bias for the choice.
        pub(crate) selection_bias: bool = false,
        pub(crate) renormalize: bool = true,
        /// Multiplies weights.
        pub(crate) factor: f32 = 1.0,
        /// Width of a shared expert; zero without one.
        pub(crate) shared: usize = 0,
        /// The shared expert has a gate on its output.
        pub(crate) output_gate: bool = false,
        /// Elements of the rows that experts read, where they are not the model's; zero elsewhere.
        pub(crate) latent: usize = 0,
        /// Layers without experts, from the first one on.
        pub(crate) dense_layers: usize = 0,
        /// True if layers have a dense network beside the experts, and a router with its own norm and scales (Gemma 4).
        pub(crate) beside: bool = false,
        /// True if fused gates and ups in Hugging Face's files are `[experts, hidden, 2 * width]` instead of `[experts, 2 *
        /// width, hidden]`, for shapes that do not determine it.
        pub(crate) transposed: bool = false,
        /// Their columns alternate between gate and up.
        pub(crate) alternating: bool = false,
    }
}

impl ExpertsConfig {
    /// Sigmoids with a bias for the choice: DeepSeek V3's kind.
    pub(crate) const SIGMOID: Self = Self { scores: Scores::Sigmoid, selection_bias: true, ..Self::SOFTMAX };
}

/// Mixers with a state, of the layers that have one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Recurrent {
    /// A short convolution over `taps` rows.
    Conv { taps: usize },
    /// The gated delta rule, after a convolution over `taps` rows.
    Delta { taps: usize, shape: DeltaShape, files: DeltaFiles },
    /// The scan of Mamba-2.
    Ssd(SsdConfig),
}

/// The scan of Mamba-2.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SsdConfig {
    /// Rows of its convolution.
    pub(crate) taps: usize,
    /// Its groups are the key heads.
    pub(crate) shape: DeltaShape,
    pub(crate) norm: SsdNorm,
    /// Least and largest step.
    pub(crate) limits: (f32, f32),
    /// Multiplies z.
    pub(crate) gate_scale: f32,
    /// Multiplies steps before their bias.
    pub(crate) dt_scale: f32,
    /// Multiply C, B and x before the convolution.
    pub(crate) channel_scales: [f32; 3],
}

/// The norm of a scan's output, of each group by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SsdNorm {
    None,
    AfterGate,
    BeforeGate,
}

/// Multipliers of inputs and outputs of mixers and feed-forward networks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Multipliers {
    pub(crate) attention_in: f32,
    pub(crate) attention_out: f32,
    pub(crate) scan_in: f32,
    pub(crate) scan_out: f32,
    pub(crate) ffn_in: f32,
}

impl Multipliers {
    /// Ones.
    pub(crate) const NONE: Self =
        Self { attention_in: 1.0, attention_out: 1.0, scan_in: 1.0, scan_out: 1.0, ffn_in: 1.0 };
}

/// Arrangement of a delta rule in files.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct DeltaFiles {
    /// True if value heads in GGUF files are interleaved by key heads.
    pub(crate) alternating: bool,
}

/// Hyperparameters of a model, independent of the file format.
#[derive(Clone)]
pub(crate) struct Config {
    pub(crate) definition: &'static Definition,
    /// Tokens that it was trained for.
    pub(crate) context_length: usize,
    pub(crate) hidden: usize,
    pub(crate) heads: usize,
    /// K/V heads of layers without a [`Geometry::kv_heads`].
    pub(crate) kv_heads: usize,
    /// Head dimension of layers without a [`Geometry::head_dim`].
    pub(crate) head_dim: usize,
    /// Width of dense feed-forward networks, of layers without a [`Geometry::ffn`] of their own.
    pub(crate) ffn: usize,
    /// Elements of a token's embedding for each layer; zero without any.
    pub(crate) layer_embed: usize,
    /// Dimensions of latent attention, and the rank of its queries, if they have one.
    pub(crate) latent: Option<(LatentShape, Option<usize>)>,
    pub(crate) block: Block,
    pub(crate) experts: Option<ExpertsConfig>,
    pub(crate) recurrent: Option<Recurrent>,
    pub(crate) norm_eps: f32,
    /// Added to norm weights: some files store the difference from one.
    pub(crate) norm_offset: f32,
    /// Rows of the table of positions before that of position 0.
    pub(crate) position_offset: usize,
    /// Multiplies embeddings.
    pub(crate) embed_scale: f32,
    /// Multiplies attention scores.
    pub(crate) attention_scale: f32,
    pub(crate) attention_soft_cap: Option<f32>,
    pub(crate) position_scale: Option<PositionScale>,
    /// Factor of the branches that layers add to the residual stream.
    pub(crate) branch_scale: f32,
    pub(crate) multipliers: Multipliers,
    /// Multiplies logits.
    pub(crate) logit_scale: f32,
    pub(crate) logit_soft_cap: Option<f32>,
    /// True if the head is the embedding table; `None` if the tensors determine it.
    pub(crate) tied: Option<bool>,
    /// The distinct rotary embeddings.
    pub(crate) ropes: Vec<RopeConfig>,
    /// Parameters of each layer.
    pub(crate) layers: Vec<Layer>,
    /// Number of further layers in the file, which are for multi-token prediction.
    pub(crate) extra_layers: usize,
    /// True if RoPE is in sections, and the converter to GGUF reorders rows of Q and K so that halves of a head are pairs instead of
    /// neighbours (GLM-4V).
    pub(crate) halves_in_gguf: bool,
}

/// Parameters that differ between layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layer {
    /// Window; `None` for full attention.
    pub(crate) window: Option<u32>,
    /// Index into [`Config::ropes`]; `None` has no RoPE.
    pub(crate) rope: Option<usize>,
    /// Experts instead of a dense network.
    pub(crate) experts: bool,
    /// [`Config::recurrent`] instead of attention, or beside it.
    pub(crate) recurrent: bool,
    /// False in a layer that only has a feed-forward network.
    pub(crate) mixer: bool,
    /// False in a layer that only has a mixer.
    pub(crate) network: bool,
    pub(crate) geometry: Geometry,
}

/// Dimensions of a layer that differ from those of the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Geometry {
    pub(crate) kv_heads: Option<usize>,
    pub(crate) head_dim: Option<usize>,
    pub(crate) ffn: Option<usize>,
    /// True if it reads the K and V of the last previous layer with the same window and its own K and V.
    pub(crate) shares_kv: bool,
    /// True if K is also V in layers without a matrix for V.
    pub(crate) keys_as_values: bool,
}

/// Dimensions that all files have, under names of their own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) context_length: usize,
    pub(crate) hidden: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) ffn: usize,
    pub(crate) layers: usize,
}

impl Config {
    /// Returns the hyperparameters of a model with these dimensions and with `rope` in all layers. A definition changes what its
    /// files have otherwise.
    pub(crate) fn plain(
        definition: &'static Definition,
        sizes: Sizes,
        norm_eps: f32,
        rope: Option<RopeConfig>,
    ) -> Self {
        let Sizes { context_length, hidden, heads, kv_heads, head_dim, ffn, layers } = sizes;
        let layer = Layer {
            window: None,
            rope: rope.as_ref().map(|_| 0),
            experts: false,
            recurrent: false,
            mixer: true,
            network: true,
            geometry: Geometry::default(),
        };
        Self {
            definition,
            context_length,
            hidden,
            heads,
            kv_heads,
            head_dim,
            ffn,
            layer_embed: 0,
            latent: None,
            block: definition.block,
            experts: None,
            recurrent: None,
            norm_eps,
            norm_offset: 0.0,
            position_offset: 0,
            embed_scale: 1.0,
            attention_scale: 1.0 / (head_dim as f32).sqrt(),
            attention_soft_cap: None,
            position_scale: None,
            branch_scale: 1.0,
            multipliers: Multipliers::NONE,
            logit_scale: 1.0,
            logit_soft_cap: None,
            tied: None,
            ropes: rope.into_iter().collect(),
            layers: vec![layer; layers],
            extra_layers: 0,
            halves_in_gguf: false,
        }
    }

    /// Sets the mixture of experts, which all layers have but the first ones.
    pub(crate) fn set_experts(&mut self, experts: Option<ExpertsConfig>) {
        self.experts = experts;
        let dense = experts.map_or(self.layers.len(), |experts| experts.dense_layers);
        self.layers.iter_mut().enumerate().for_each(|(index, layer)| layer.experts = index >= dense);
    }

    /// K/V heads of a layer.
    pub(crate) fn kv_heads_of(&self, layer: usize) -> usize {
        self.layers[layer].geometry.kv_heads.unwrap_or(self.kv_heads)
    }

    /// Returns true if a layer has attention.
    pub(crate) fn attends(&self, layer: usize) -> bool {
        let Layer { recurrent, mixer, .. } = self.layers[layer];
        mixer && (!recurrent || self.block.beside)
    }

    /// Returns the number of elements of a head of a layer.
    pub(crate) fn head_dim_of(&self, layer: usize) -> usize {
        self.layers[layer].geometry.head_dim.unwrap_or(self.head_dim)
    }

    /// Returns the width of a layer's dense network.
    pub(crate) fn ffn_of(&self, layer: usize) -> usize {
        self.layers[layer].geometry.ffn.unwrap_or(self.ffn)
    }

    /// Returns the layer whose K and V a layer reads, if it is not its own.
    pub(crate) fn kv_source(&self, layer: usize) -> Option<usize> {
        let window = self.layers[layer].window;
        let is_source = |other: &usize| {
            let Layer { window: own, geometry, .. } = self.layers[*other];
            own == window && !geometry.shares_kv && self.attends(*other)
        };
        (0..layer).rev().find(is_source).filter(|_| self.layers[layer].geometry.shares_kv)
    }

    /// Sets a window for the layers in the list; others have full attention.
    pub(crate) fn set_windows(&mut self, window: Option<u32>, local: &[bool]) {
        for (layer, &local) in self.layers.iter_mut().zip(local) {
            layer.window = window.filter(|&window| local && window > 0);
        }
    }

    /// Every layer has the window but every `period`-th; a period of 0 or 1 leaves no layer without, or none with one.
    pub(crate) fn set_window_period(&mut self, window: Option<u32>, period: usize) {
        let local: Vec<bool> =
            (0..self.layers.len()).map(|layer| period == 0 || layer % period < period - 1).collect();
        self.set_windows(window, &local);
    }

    /// As [`Config::set_windows`], of encoders: `span` is how far rows see in both directions together.
    pub(crate) fn set_spans(&mut self, span: u32, local: &[bool]) {
        self.set_windows(Some(span / 2 + 1), local);
    }

    /// Bounds the context of an encoder by the longest text of sentence-transformers.
    pub(crate) fn limit_texts(&mut self, longest: Option<usize>) {
        if let Some(longest) = longest.filter(|_| self.block.bidirectional) {
            self.context_length = self.context_length.min(longest);
        }
    }

    /// Takes RoPE from all layers.
    pub(crate) fn remove_ropes(&mut self) {
        self.ropes.clear();
        self.layers.iter_mut().for_each(|layer| layer.rope = None);
    }

    /// Every layer has a state but every `period`-th, which attends.
    pub(crate) fn set_recurrent_period(&mut self, period: usize) {
        for (index, layer) in self.layers.iter_mut().enumerate() {
            layer.recurrent = !(index + 1).is_multiple_of(period);
        }
    }

    /// Takes RoPE from layers without a window.
    pub(crate) fn rotate_windows_only(&mut self) {
        for layer in &mut self.layers {
            layer.rope = layer.rope.filter(|_| layer.window.is_some());
        }
    }

    /// Gives layers with a window a RoPE of their own.
    pub(crate) fn set_local_rope(&mut self, rope: RopeConfig) {
        self.ropes.push(rope);
        for layer in self.layers.iter_mut().filter(|layer| layer.window.is_some()) {
            layer.rope = layer.rope.map(|_| self.ropes.len() - 1);
        }
    }
}
