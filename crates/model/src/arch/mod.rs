//! The architectures: what a file says about a model becomes a [`Config`], and that becomes a program with weights.
//!
//! All supported architectures are one shape with options: norm, attention, norm, gated feed-forward. What differs
//! between them is in [`Config`], what differs between file formats in [`Names`].

mod gguf;
mod hf;
mod kv;
mod lower;
mod names;
mod tensors;

use paguro_backend::Activation;

use crate::{error::ModelError, rope::RopeConfig};

pub(crate) use gguf::config as config_from_gguf;
pub(crate) use hf::config as config_from_hf;
pub(crate) use lower::lower;
pub(crate) use names::Names;
pub(crate) use tensors::{FLOATS, Tensors};

/// The architectures that can be lowered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Architecture {
    /// Llama 1 to 3, and all that are one: TinyLlama, Mistral, SmolLM, Yi.
    Llama,
    Qwen2,
    Qwen3,
    Gemma2,
    Gemma3,
    Phi3,
}

impl Architecture {
    const ALL: [Self; 6] = [Self::Llama, Self::Qwen2, Self::Qwen3, Self::Gemma2, Self::Gemma3, Self::Phi3];

    /// As GGUF's `general.architecture` has it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Gemma2 => "gemma2",
            Self::Gemma3 => "gemma3",
            Self::Phi3 => "phi3",
        }
    }

    /// By GGUF's name.
    pub(crate) fn from_gguf(name: &str) -> Result<Self, ModelError> {
        let known = Self::ALL.into_iter().find(|architecture| architecture.name() == name);
        known.ok_or_else(|| unsupported(name, Self::ALL.map(Self::name).as_slice()))
    }

    /// By the class that Hugging Face's `config.json` names.
    pub(crate) fn from_hf(class: &str) -> Result<Self, ModelError> {
        let known = HF_CLASSES.into_iter().find(|known| known.0 == class).map(|known| known.1);
        known.ok_or_else(|| unsupported(class, HF_CLASSES.map(|known| known.0).as_slice()))
    }

    fn has_head_norms(self) -> bool {
        matches!(self, Self::Qwen3 | Self::Gemma3)
    }

    fn is_gemma(self) -> bool {
        matches!(self, Self::Gemma2 | Self::Gemma3)
    }
}

const HF_CLASSES: [(&str, Architecture); 8] = [
    ("LlamaForCausalLM", Architecture::Llama),
    ("MistralForCausalLM", Architecture::Llama),
    ("Qwen2ForCausalLM", Architecture::Qwen2),
    ("Qwen3ForCausalLM", Architecture::Qwen3),
    ("Gemma2ForCausalLM", Architecture::Gemma2),
    ("Gemma3ForCausalLM", Architecture::Gemma3),
    ("Gemma3ForConditionalGeneration", Architecture::Gemma3),
    ("Phi3ForCausalLM", Architecture::Phi3),
];

fn unsupported(name: &str, supported: &[&str]) -> ModelError {
    ModelError::Architecture { name: name.to_owned(), supported: supported.join(", ") }
}

/// Everything about a model but its weights, whatever file it came from.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) architecture: Architecture,
    /// What it was trained for.
    pub(crate) context_length: usize,
    pub(crate) hidden: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) ffn: usize,
    pub(crate) norm_eps: f32,
    /// Added to norm weights: Hugging Face's Gemma files store the difference from one, GGUF the weight itself.
    pub(crate) norm_offset: f32,
    /// Multiplies embeddings.
    pub(crate) embed_scale: f32,
    /// Multiplies attention scores.
    pub(crate) attention_scale: f32,
    pub(crate) attention_soft_cap: Option<f32>,
    pub(crate) logit_soft_cap: Option<f32>,
    pub(crate) activation: Activation,
    /// Whether the head is the embedding table; `None` where the tensors decide.
    pub(crate) tied: Option<bool>,
    /// The distinct rotary embeddings.
    pub(crate) ropes: Vec<RopeConfig>,
    /// One for each layer.
    pub(crate) layers: Vec<Layer>,
}

/// What differs between layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layer {
    /// How far back it sees; `None` sees all.
    pub(crate) window: Option<u32>,
    /// Index into [`Config::ropes`].
    pub(crate) rope: usize,
}

impl Config {
    /// Refuses numbers that no model has, so that lowering can compute with them. `tensors` is how many the file has:
    /// a bound for the number of layers.
    fn check(self, tensors: usize) -> Result<Self, ModelError> {
        let bad = |problem: String| Err(ModelError::Config(problem));
        let sizes = [
            ("context length", self.context_length),
            ("hidden size", self.hidden),
            ("number of heads", self.heads),
            ("number of K/V heads", self.kv_heads),
            ("head size", self.head_dim),
            ("feed-forward size", self.ffn),
            ("number of layers", self.layers.len()),
        ];
        for (what, size) in sizes {
            // Products of any two of them fit 64 bits, and no model comes near.
            if size == 0 || size > 1 << 30 {
                return bad(format!("the {what} is {size}"));
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return bad(format!("{} heads cannot share {} K/V heads evenly", self.heads, self.kv_heads));
        }
        if self.layers.len() > tensors {
            return bad(format!("{} layers, but only {tensors} tensors", self.layers.len()));
        }
        for rope in &self.ropes {
            if !rope.dims.is_multiple_of(2) || rope.dims == 0 || rope.dims > self.head_dim {
                let problem = "which has to be an even number of them";
                return bad(format!(
                    "RoPE rotates {} of a head's {} elements, {problem}",
                    rope.dims, self.head_dim
                ));
            }
            let numbers = [rope.base, rope.factor, rope.magnitude];
            if numbers.iter().any(|number| !number.is_finite() || *number <= 0.0) || rope.base <= 1.0 {
                let [base, factor, magnitude] = numbers;
                return bad(format!(
                    "RoPE has base {base}, scaling factor {factor} and magnitude {magnitude}"
                ));
            }
        }
        let floats = [self.embed_scale, self.attention_scale, 1.0 + self.norm_eps];
        let caps = [self.attention_soft_cap, self.logit_soft_cap].into_iter().flatten();
        if floats.into_iter().chain(caps).any(|number| !number.is_finite() || number <= 0.0) {
            return bad("a scale, a soft cap or the norm's epsilon is not a positive number".to_owned());
        }
        Ok(self)
    }
}
