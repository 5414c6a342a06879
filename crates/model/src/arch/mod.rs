//! The architectures: one file each, with a [`Definition`]; [`ALL`] lists them.
//!
//! Metadata of a file becomes a [`Config`], which is lowered to a program with weights ([`lower()`]). Nearly all of
//! that is common to all architectures; a definition contains the differences.

mod config;
mod config_check;
mod export;
mod gguf;
mod hf;
mod kv;
mod linears;
mod lower;
mod names;
mod tensors;

mod bert;
mod cohere2;
mod deepseek;
mod deepseek2;
mod ernie4_5;
mod eurobert;
mod exaone4;
mod falcon_h1;
mod gemma2;
mod gemma3;
mod gemma4;
mod glm4;
mod glm4moe;
mod gpt2;
mod gpt_neox;
mod gpt_oss;
mod granite;
mod granitehybrid;
mod hunyuan;
mod lfm2;
mod llama;
mod mamba2;
mod minimax_m2;
mod mistral3;
mod mistral4;
mod modern_bert;
mod nemotron;
mod nemotron_h;
mod olmo2;
mod olmoe;
mod phi2;
mod phi3;
mod qwen2;
mod qwen2moe;
mod qwen3;
mod qwen35;
mod qwen3moe;
mod qwen_vl;
mod seed_oss;
mod smollm3;
mod stablelm;
mod starcoder2;

use paguro_backend::RopeStyle;

pub use self::lower::MtpHead;
pub(crate) use self::{
    config::{Block, Config, DeltaFiles, ExpertsConfig, Multipliers, Recurrent, SsdConfig, SsdNorm},
    export::{LONGEST, Original, differences, export, target},
    gguf::config as config_from_gguf,
    hf::config as config_from_hf,
    linears::{Linears, Naming, Piece},
    lower::{Lowered, lower, lower_assistant, with_layer},
    names::{Names, hf_stacks},
    tensors::{FLOATS, Tensors},
};
use self::{
    gguf::Keys,
    hf::{Defaults, Fields},
    names::Part,
};
use crate::{error::ModelError, gguf::Value};

/// Every architecture that can be lowered.
const ALL: &[&Definition] = &[
    &llama::DEF,
    &mistral3::DEF,
    &mistral4::DEF,
    &qwen2::DEF,
    &qwen2moe::DEF,
    &qwen3::DEF,
    &qwen3moe::DEF,
    &qwen35::DENSE,
    &qwen35::MOE,
    &qwen35::NEXT,
    &lfm2::DENSE,
    &lfm2::MOE,
    &mamba2::DEF,
    &nemotron_h::DENSE,
    &nemotron_h::MOE,
    &granitehybrid::DEF,
    &falcon_h1::DEF,
    &qwen_vl::QWEN2_VL,
    &qwen_vl::QWEN3_VL,
    &qwen_vl::QWEN3_VL_MOE,
    &gemma2::DEF,
    &gemma3::DEF,
    &gemma4::DEF,
    &gemma4::ASSISTANT,
    &gpt_oss::DEF,
    &phi2::DEF,
    &phi3::DEF,
    &smollm3::DEF,
    &granite::DEF,
    &granite::MOE,
    &olmo2::DEF,
    &olmoe::DEF,
    &seed_oss::DEF,
    &exaone4::DEF,
    &hunyuan::DENSE,
    &hunyuan::MOE,
    &ernie4_5::DEF,
    &ernie4_5::MOE,
    &ernie4_5::PADDLE_OCR,
    &glm4::DEF,
    &glm4moe::DEF,
    &minimax_m2::DEF,
    &deepseek::DEF,
    &deepseek2::DEF,
    &cohere2::DEF,
    &nemotron::DEF,
    &starcoder2::DEF,
    &stablelm::DEF,
    &gpt2::DEF,
    &gpt_neox::DEF,
    &bert::BERT,
    &bert::ROBERTA,
    &bert::MPNET,
    &bert::NOMIC,
    &bert::NOMIC_MOE,
    &bert::JINA,
    &modern_bert::DEF,
    &eurobert::DEF,
    &gemma3::EMBEDDING,
];

/// An architecture: its names in files, and its differences from Llama.
pub(crate) struct Definition {
    /// GGUF's `general.architecture`, which also prefixes its keys.
    pub(crate) gguf: &'static str,
    /// Classes that Hugging Face's `config.json` may name.
    pub(crate) hf: &'static [&'static str],
    /// Parts of all its models.
    block: Block,
    /// Its mixture of experts; `None` refuses models with experts.
    experts: Option<ExpertsConfig>,
    /// Elements that RoPE pairs in GGUF files, whose converter may reorder rows, and in Hugging Face's.
    rope_styles: [RopeStyle; 2],
    /// Keys of GGUF files, without the architecture, that change a model's results and that `from_gguf` or the common
    /// code reads for this architecture. They are refused for others.
    gguf_keys: &'static [&'static str],
    /// Reads the GGUF metadata of this architecture besides the common keys.
    from_gguf: fn(&mut Keys<'_, '_>, &mut Config) -> Result<(), ModelError>,
    /// Defaults of transformers for omitted fields, by class.
    hf_defaults: fn(&str) -> Defaults,
    /// Reads the fields of `config.json` of this architecture besides the common ones.
    from_hf: fn(&Fields<'_>, &mut Config) -> Result<(), ModelError>,
    /// Changes the configuration of a folder to that of its GGUF file: some classes of transformers are several architectures there,
    /// and files lack some values.
    to_gguf: fn(&mut Config),
    /// Returns keys of GGUF files besides the common ones, or with other values than those.
    further_gguf_keys: fn(&Config) -> Vec<(&'static str, Value)>,
    /// Tensors that GGUF files call otherwise than Llama's.
    gguf_names: &'static [(Part, &'static str)],
    /// Tensor names in Hugging Face's files that differ from Llama's; `{}` is an expert's number.
    hf_names: &'static [(Part, &'static str)],
    /// Text before a layer's number in Hugging Face's files.
    hf_layers: &'static str,
    /// Arrangement of matrices in Hugging Face's files.
    hf_matrices: HfMatrices,
    /// True if heads for multi-token prediction have one of the model's layers with attention; others are not run.
    mtp: bool,
    /// The architecture, by GGUF's name, of the models that it drafts for: an assistant. `None` for models of their own.
    pub(crate) drafts_for: Option<&'static str>,
    /// Beginnings of the names of tensors without effect on text, such as towers for images; ends, where they begin with a
    /// dot.
    hf_ignored: &'static [&'static str],
}

/// Arrangement of matrices in Hugging Face's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HfMatrices {
    /// `[out, in]`
    Plain,
    /// `[in, out]` (GPT-2's Conv1D).
    Transposed,
    /// Q, K and V are one matrix, `[heads, 3, head_dim, in]`.
    QkvByHead,
}

impl Definition {
    /// Llama: the base of all definitions.
    const LLAMA: Self = Self {
        gguf: "llama",
        hf: &[],
        block: Block::LLAMA,
        experts: None,
        rope_styles: [RopeStyle::HalfSplit; 2],
        gguf_keys: &[],
        from_gguf: |_, _| Ok(()),
        hf_defaults: |_| Defaults::COMMON,
        from_hf: |_, _| Ok(()),
        to_gguf: |_| {},
        further_gguf_keys: |_| Vec::new(),
        gguf_names: &[],
        hf_names: &[],
        hf_layers: "layers",
        hf_matrices: HfMatrices::Plain,
        mtp: false,
        drafts_for: None,
        hf_ignored: &[],
    };

    /// Finds a definition by GGUF's name.
    pub(crate) fn from_gguf(name: &str) -> Result<&'static Self, ModelError> {
        let known = ALL.iter().copied().find(|definition| definition.gguf == name);
        known.ok_or_else(|| unsupported(name, ALL.iter().map(|definition| definition.gguf)))
    }

    /// Returns true if rows attend in both directions.
    pub(crate) fn is_encoder(&self) -> bool {
        self.block.bidirectional
    }

    /// Returns true if there are assistants of its models.
    pub(crate) fn may_have_assistant(&self) -> bool {
        ALL.iter().any(|definition| definition.drafts_for == Some(self.gguf))
    }

    /// Finds a definition by the class in Hugging Face's `config.json`.
    pub(crate) fn from_hf(class: &str) -> Result<&'static Self, ModelError> {
        let known = ALL.iter().copied().find(|definition| definition.hf.contains(&class));
        known.ok_or_else(|| unsupported(class, ALL.iter().flat_map(|definition| definition.hf).copied()))
    }
}

/// Returns true if this architecture, by the name that files have for it, is that of assistants, which draft for a certain model and are none
/// by themselves.
pub fn is_assistant(architecture: &str) -> bool {
    let names =
        |definition: &Definition| definition.gguf == architecture || definition.hf.contains(&architecture);
    ALL.iter().any(|definition| definition.drafts_for.is_some() && names(definition))
}

/// RoPE pairs neighbours, in both kinds of files.
const INTERLEAVED: [RopeStyle; 2] = [RopeStyle::Interleaved; 2];
/// The converter to GGUF reorders rows of Q and K so that neighbours are pairs.
const REORDERED: [RopeStyle; 2] = [RopeStyle::Interleaved, RopeStyle::HalfSplit];

fn unsupported(name: &str, supported: impl Iterator<Item = &'static str>) -> ModelError {
    let supported: Vec<_> = supported.collect();
    ModelError::Architecture { name: name.to_owned(), supported: supported.join(", ") }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn names_are_unique() {
        let mut seen = HashSet::new();
        for definition in ALL {
            assert!(seen.insert(definition.gguf), "{} is defined twice", definition.gguf);
            for class in definition.hf {
                assert!(seen.insert(class), "{class} is defined twice");
            }
        }
    }
}
