//! Everything about a model but its weights, whatever file it came from.

use paguro_backend::{Activation, DeltaShape, NormKind, PositionScale, QkNormKind, Residual, Scores};

use super::Definition;
use crate::{error::ModelError, rope::RopeConfig};

/// What the layers of a model are made of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Block {
    pub(crate) norms: NormKind,
    /// Norms before attention and feed-forward network.
    pub(crate) pre_norms: bool,
    /// Norms of their outputs.
    pub(crate) post_norms: bool,
    /// The feed-forward network reads the norm of attention.
    pub(crate) one_norm: bool,
    pub(crate) qk_norm: Option<QkNormKind>,
    /// Some of the models have no norms of queries and keys.
    pub(crate) optional_qk_norm: bool,
    pub(crate) activation: Activation,
    /// Feed-forward networks have a gate.
    pub(crate) gated: bool,
    /// Gate and up are one matrix.
    pub(crate) fused_gate_up: bool,
    pub(crate) residual: Residual,
    pub(crate) sinks: bool,
    /// The output of attention has a gate; its rows and those of Q alternate, head by head.
    pub(crate) attention_gate: bool,
    /// Learned embeddings of positions.
    pub(crate) positions: bool,
}

impl Block {
    /// Llama's.
    pub(crate) const LLAMA: Self = Self {
        norms: NormKind::Rms,
        pre_norms: true,
        post_norms: false,
        one_norm: false,
        qk_norm: None,
        optional_qk_norm: false,
        activation: Activation::Silu,
        gated: true,
        fused_gate_up: false,
        residual: Residual::Sequential,
        sinks: false,
        attention_gate: false,
        positions: false,
    };
}

/// A mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ExpertsConfig {
    pub(crate) count: usize,
    /// Experts of a row.
    pub(crate) used: usize,
    /// Width of an expert.
    pub(crate) width: usize,
    pub(crate) scores: Scores,
    /// A bias for the choice.
    pub(crate) selection_bias: bool,
    pub(crate) renormalize: bool,
    /// Multiplies weights.
    pub(crate) factor: f32,
    /// Width of a shared expert; zero without one.
    pub(crate) shared: usize,
    /// The shared expert has a gate on its output.
    pub(crate) output_gate: bool,
    /// Layers without experts, from the first one on.
    pub(crate) dense_layers: usize,
    /// Fused gates and ups of Hugging Face's files are `[experts, hidden, 2 * width]`, not `[experts, 2 * width, hidden]`,
    /// where their shape does not tell.
    pub(crate) transposed: bool,
    /// Their columns alternate between gate and up.
    pub(crate) alternating: bool,
}

impl ExpertsConfig {
    /// Softmax over all experts, renormalized over the chosen ones: Mixtral, Qwen 3. Numbers come from files.
    pub(crate) const SOFTMAX: Self = Self {
        count: 0,
        used: 0,
        width: 0,
        scores: Scores::Softmax,
        selection_bias: false,
        renormalize: true,
        factor: 1.0,
        shared: 0,
        output_gate: false,
        dense_layers: 0,
        transposed: false,
        alternating: false,
    };

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
}

/// How files arrange a delta rule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct DeltaFiles {
    /// In GGUF files, value heads alternate between key heads.
    pub(crate) alternating: bool,
}

/// Everything about a model but its weights, whatever file it came from.
#[derive(Clone)]
pub(crate) struct Config {
    pub(crate) definition: &'static Definition,
    /// Tokens that it was trained for.
    pub(crate) context_length: usize,
    pub(crate) hidden: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    /// Width of dense feed-forward networks.
    pub(crate) ffn: usize,
    pub(crate) block: Block,
    pub(crate) experts: Option<ExpertsConfig>,
    pub(crate) recurrent: Option<Recurrent>,
    pub(crate) norm_eps: f32,
    /// Added to norm weights: some files store the difference from one.
    pub(crate) norm_offset: f32,
    /// Multiplies embeddings.
    pub(crate) embed_scale: f32,
    /// Multiplies attention scores.
    pub(crate) attention_scale: f32,
    pub(crate) attention_soft_cap: Option<f32>,
    pub(crate) position_scale: Option<PositionScale>,
    /// Multiplies what layers add to the residual stream.
    pub(crate) branch_scale: f32,
    /// Multiplies logits.
    pub(crate) logit_scale: f32,
    pub(crate) logit_soft_cap: Option<f32>,
    /// Whether the head is the embedding table; `None` where the tensors decide.
    pub(crate) tied: Option<bool>,
    /// The distinct rotary embeddings.
    pub(crate) ropes: Vec<RopeConfig>,
    /// One for each layer.
    pub(crate) layers: Vec<Layer>,
    /// Layers of the file behind those that are run: they predict tokens further ahead.
    pub(crate) extra_layers: usize,
}

/// What differs between layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layer {
    /// How far back it sees; `None` sees all.
    pub(crate) window: Option<u32>,
    /// Index into [`Config::ropes`]; `None` has no RoPE.
    pub(crate) rope: Option<usize>,
    /// Experts instead of a dense network.
    pub(crate) experts: bool,
    /// [`Config::recurrent`] instead of attention.
    pub(crate) recurrent: bool,
}

impl Recurrent {
    /// Refuses numbers that no model has.
    fn check(self) -> Result<(), String> {
        let (taps, shape) = match self {
            Self::Conv { taps } => (taps, None),
            Self::Delta { taps, shape, .. } => (taps, Some(shape)),
        };
        if !(2..=64).contains(&taps) {
            return Err(format!("a convolution over {taps} tokens"));
        }
        let Some(DeltaShape { key_heads, value_heads, key_dim, value_dim }) = shape else { return Ok(()) };
        for (what, size) in [
            ("number of key heads", key_heads),
            ("number of value heads", value_heads),
            ("size of a key head", key_dim),
            ("size of a value head", value_dim),
        ] {
            if size == 0 || size > 1 << 14 {
                return Err(format!("the {what} of linear attention is {size}"));
            }
        }
        match value_heads.is_multiple_of(key_heads) {
            true => Ok(()),
            false => Err(format!("{value_heads} value heads cannot share {key_heads} key heads evenly")),
        }
    }
}

impl Config {
    /// Layers with a window, as the list says; others see all.
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

    /// Refuses numbers that no model has, so that lowering can compute with them. `tensors` is how many the file has:
    /// a bound for the number of layers.
    pub(crate) fn check(self, tensors: usize) -> Result<Self, ModelError> {
        let bad = |problem: String| Err(ModelError::Config(problem));
        let experts =
            self.experts.unwrap_or(ExpertsConfig { count: 1, used: 1, width: 1, ..ExpertsConfig::SOFTMAX });
        let sizes = [
            ("context length", self.context_length),
            ("hidden size", self.hidden),
            ("number of heads", self.heads),
            ("number of K/V heads", self.kv_heads),
            ("head size", self.head_dim),
            ("feed-forward size", self.ffn),
            ("number of layers", self.layers.len()),
            ("number of experts", experts.count),
            ("number of experts for each token", experts.used),
            ("size of an expert", experts.width),
        ];
        for (what, size) in sizes {
            // Products of any two of them fit 64 bits, and no model comes near.
            if size == 0 || size > 1 << 30 {
                return bad(format!("the {what} is {size}"));
            }
        }
        if let Some(recurrent) = self.recurrent {
            recurrent.check().map_err(ModelError::Config)?;
        }
        if self.layers.iter().all(|layer| layer.recurrent) {
            return Err(ModelError::unsupported("a model without attention"));
        }
        if experts.count > 1 << 16 {
            return bad(format!("the number of experts is {}", experts.count));
        }
        if experts.used > experts.count {
            return bad(format!("{} of {} experts for each token", experts.used, experts.count));
        }
        if experts.shared > 1 << 30 {
            return bad(format!("the size of the shared experts is {}", experts.shared));
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return bad(format!("{} heads cannot share {} K/V heads evenly", self.heads, self.kv_heads));
        }
        if self.layers.len() > tensors {
            return bad(format!("{} layers, but only {tensors} tensors", self.layers.len()));
        }
        if let Some(problem) = self.ropes.iter().find_map(|rope| rope.check(self.head_dim).err()) {
            return bad(problem);
        }
        let floats = [
            self.embed_scale,
            self.attention_scale,
            self.branch_scale,
            self.logit_scale,
            experts.factor,
            1.0 + self.norm_eps,
        ];
        let caps = [self.attention_soft_cap, self.logit_soft_cap].into_iter().flatten();
        if floats.into_iter().chain(caps).any(|number| !number.is_finite() || number <= 0.0) {
            return bad("a scale, a soft cap or the norm's epsilon is not a positive number".to_owned());
        }
        if let Some(scale) = self.position_scale
            && (!scale.beta.is_finite() || scale.original == 0)
        {
            return bad("the scale of queries by their position is not a number".to_owned());
        }
        Ok(self)
    }
}
