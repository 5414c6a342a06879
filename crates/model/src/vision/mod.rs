//! Vision: the tower of a model that sees, its image processor, and the changes of the text model that belong to it.
//!
//! A tower is a [`Program`] of its own. It begins with patches of pixels and ends with rows of the text model
//! ([`Merged`](paguro_backend::Merged)), whose parts replace embeddings and are added after layers. Each family has one file, with
//! its names in both kinds of files, and its program. Everything that is common is in `lower.rs`, `files.rs` and `input.rs`.

mod adapt;
mod export;
mod files;
mod gemma3;
mod gemma4;
mod glm4v;
mod idefics3;
mod input;
mod internvl;
mod kimi;
mod lfm2;
mod lower;
mod paddleocr;
mod pixtral;
mod places;
mod qwen2vl;
mod qwen3vl;

use std::fmt;

use paguro_backend::{Digest, Program, Visitor, Weights};
use paguro_vision::{Family, Filter, Processor, SizeRule, SmallSides};
use serde_json::{Map, Value};

pub(crate) use self::export::contents as projector_contents;
pub use self::input::TowerInput;
use self::{
    files::{TowerFile, Values},
    input::Arrangement,
    places::{Places, Resize},
};
use crate::{
    error::ModelError,
    gguf::{Gguf, Metadata},
    hf::HfFolder,
    tensor::Tensor,
    tokenizer::Tokenizer,
};

/// Vision of a model.
#[derive(Debug)]
pub struct Vision {
    /// Form of the prompt around a picture.
    pub family: Family,
    /// Sizes and normalization of pictures.
    pub processor: Processor,
    /// Token in whose place rows of a picture are.
    pub image_token: u32,
    /// Text that chat templates write for a picture.
    pub marker: String,
    /// Hash of the tower's program and of the processor, for keys of pictures.
    pub digest: [u8; 32],
    /// The tower.
    pub tower: Tower,
    /// Name of the projector, as mmproj files have it.
    projector: &'static str,
}

/// A program that makes rows of the text model of pixels.
pub struct Tower {
    /// The program.
    pub program: Program,
    /// Its weights, which stay in the file.
    pub weights: Weights,
    arrangement: Arrangement,
}

impl fmt::Debug for Tower {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tower of {} layers", self.program.layers.len())
    }
}

/// A family of towers.
pub(crate) struct TowerFamily {
    /// Values of `clip.projector_type`.
    projectors: &'static [&'static str],
    /// Classes that `config.json` may name.
    classes: &'static [&'static str],
    /// Beginnings of the names of its tensors in folders, with what replaces them; the first that fits.
    prefixes: &'static [(&'static str, &'static str)],
    /// Form of the prompt.
    family: Family,
    /// Name of the projector in mmproj files.
    projector: &'static str,
    /// Text that chat templates write for a picture.
    marker: &'static str,
    /// Token of rows, by its text; keys of `config.json` come first.
    image_token: &'static str,
    /// Keys of `config.json` with the number of this token.
    image_token_keys: &'static [&'static str],
    /// Reads and lowers a tower.
    lower: fn(&mut TowerFile<'_, '_>) -> Result<Lowered, ModelError>,
    /// Names of its tensors in folders, and in mmproj files that are written of them.
    names: (&'static lower::BlockNames, export::Renames),
    /// Adds its own keys of mmproj files.
    keys: Keys,
    /// True if Q, K and V are separate in mmproj files.
    splits_qkv: bool,
    /// True if neighbours are pairs of rotations in mmproj files.
    interleaves: bool,
    /// Number that its norms add, if files do not name it.
    eps: f32,
    /// Changes of the text model's program.
    adapt: fn(&mut adapt::Text<'_>) -> Result<(), ModelError>,
}

/// A function of `config.json`, its `vision_config` and the image processor that adds keys.
type Keys = fn(&Map<String, Value>, &Map<String, Value>, &Map<String, Value>, &mut Metadata);

/// A tower and its processor.
pub(crate) struct Lowered {
    program: Program,
    arrangement: Arrangement,
    processor: Processor,
}

impl Lowered {
    /// Returns a tower without windows, which has the patches and squares of its processor.
    fn new(program: Program, places: Places, processor: Processor) -> Self {
        let arrangement = Arrangement {
            patch: processor.patch as usize,
            merge: processor.merge as usize,
            window: None,
            class: None,
            places,
            values: Arrangement::values(processor.mean, processor.std),
        };
        Self { program, arrangement, processor }
    }
}

/// Every family.
const ALL: &[&TowerFamily] = &[
    &qwen3vl::QWEN3_VL,
    &qwen2vl::QWEN2_5_VL,
    &gemma3::DEF,
    &gemma4::DEF,
    &gemma4::UNIFIED,
    &pixtral::DEF,
    &idefics3::DEF,
    &internvl::DEF,
    &lfm2::DEF,
    &glm4v::DEF,
    &paddleocr::DEF,
    &kimi::VL,
    &kimi::K25,
];

/// Values of `clip.projector_type` of known families that are not supported, with their names.
const UNSUPPORTED: &[(&str, &str)] = &[
    ("qwen2vl_merger", "Qwen2-VL"),
    ("gemma3nv", "Gemma 3n"),
    ("llama4", "Llama 4"),
    ("glm5v", "GLM-5V"),
    ("resampler", "MiniCPM-V"),
    ("minicpmv4_6", "MiniCPM-V 4.6"),
    ("mlp", "LLaVA"),
    ("ldp", "MobileVLM"),
    ("cogvlm", "CogVLM"),
    ("deepseekocr", "DeepSeek-OCR"),
    ("ultravox", "Ultravox (audio)"),
    ("qwen2a", "Qwen2-Audio (audio)"),
    ("voxtral", "Voxtral (audio)"),
];

/// Returns the projector type of an mmproj file.
pub(crate) fn projector_type(gguf: &Gguf) -> Option<&str> {
    let metadata = &gguf.metadata;
    metadata.str("clip.vision.projector_type").or_else(|| metadata.str("clip.projector_type"))
}

impl Vision {
    /// Returns the name of the projector, as mmproj files have it: `qwen3vl_merger`.
    pub fn projector_type(&self) -> &str {
        self.projector
    }

    /// Reads the tower of an mmproj file for a text model with this metadata and this program, which is changed for it.
    pub(crate) fn from_gguf(
        mmproj: &Gguf,
        text: &Gguf,
        program: &mut Program,
        tokenizer: &Tokenizer,
    ) -> Result<Self, ModelError> {
        let kind = mmproj.metadata.str("general.architecture").unwrap_or_default();
        if kind != "clip" {
            return Err(ModelError::Config(format!(
                "the projector is a file of architecture `{kind}`, expected `clip`: an mmproj file"
            )));
        }
        let name = projector_type(mmproj).unwrap_or_default();
        let family =
            ALL.iter().find(|family| family.projectors.contains(&name)).ok_or_else(|| refuse(name))?;
        let mut file =
            TowerFile::new(family, Values::Gguf(&mmproj.metadata), &mmproj.tensors, program.hidden);
        let lowered = (family.lower)(&mut file)?;
        let weights = file.finish()?;
        (family.adapt)(&mut adapt::Text::gguf(&text.metadata, program, &lowered.program))?;
        Self::new(family, lowered, weights, program, tokenizer, None)
    }

    /// Returns true if a folder may have a tower.
    pub(crate) fn is_in(folder: &HfFolder) -> bool {
        let class = folder.config.get("architectures").and_then(|list| list.get(0)).and_then(Value::as_str);
        let is_known = class.is_some_and(|class| ALL.iter().any(|family| family.classes.contains(&class)));
        is_known && folder.config.get("vision_config").is_some_and(Value::is_object)
    }

    /// Reads the tower of a folder; `None` if it has none.
    pub(crate) fn from_hf(
        folder: &HfFolder,
        tensors: &[Tensor],
        program: &mut Program,
        tokenizer: &Tokenizer,
    ) -> Result<Option<Self>, ModelError> {
        let class = folder.config.get("architectures").and_then(|list| list.get(0)).and_then(Value::as_str);
        let Some(family) =
            ALL.iter().find(|family| class.is_some_and(|class| family.classes.contains(&class)))
        else {
            return Ok(None);
        };
        let own = own_tensors(tensors, family.prefixes);
        if own.is_empty() || !folder.config.get("vision_config").is_some_and(Value::is_object) {
            return Ok(None);
        }
        let processor = folder.image_processor()?;
        let values = Values::Hf { config: &folder.config, processor: &processor };
        let mut file = TowerFile::new(family, values, &own, program.hidden);
        let lowered = (family.lower)(&mut file)?;
        let weights = file.finish()?;
        (family.adapt)(&mut adapt::Text::hf(&folder.config, program, &lowered.program))?;
        let token = family.image_token_keys.iter().find_map(|key| folder.config.get(*key)?.as_u64());
        let token = token.and_then(|token| u32::try_from(token).ok());
        Self::new(family, lowered, weights, program, tokenizer, token).map(Some)
    }

    fn new(
        family: &'static TowerFamily,
        lowered: Lowered,
        weights: Weights,
        text: &Program,
        tokenizer: &Tokenizer,
        image_token: Option<u32>,
    ) -> Result<Self, ModelError> {
        let Lowered { program, arrangement, processor } = lowered;
        program.check(&weights).map_err(|error| ModelError::Config(format!("the vision tower: {error}")))?;
        let image_token =
            image_token.or_else(|| tokenizer.token_id(family.image_token)).ok_or_else(|| {
                ModelError::Config(format!(
                    "the tokenizer has no `{}`, in whose place images are",
                    family.image_token
                ))
            })?;
        if image_token as usize >= text.vocab {
            return Err(ModelError::Config(format!(
                "the image token {image_token} is not in the vocabulary"
            )));
        }
        let (width, parts) = (program.residual_width(), text.given_parts);
        if width != parts * text.hidden {
            return Err(ModelError::Config(format!(
                "the projector writes rows of {width} numbers, but the text model reads {parts} of {}: the files belong \
                 to different models",
                text.hidden
            )));
        }
        // Templates write the image token itself, whatever it is called, or a token of its own that stands for all of them.
        let marker = match family.marker == family.image_token {
            true => tokenizer.token_name(image_token).into_owned(),
            false => family.marker.to_owned(),
        };
        let mut digest = Digest::default();
        digest.bytes(&program.digest());
        add_processor(&mut digest, &processor);
        let tower = Tower { program, weights, arrangement };
        Ok(Self {
            family: family.family,
            processor,
            image_token,
            marker,
            digest: digest.finish(),
            tower,
            projector: family.projector,
        })
    }
}

/// Adds all that determines a tower's input for a picture.
fn add_processor(digest: &mut Digest, processor: &Processor) {
    let Processor { rule, filter, mean, std, patch, merge } = processor;
    let rule = match *rule {
        SizeRule::Smart { min_pixels, max_pixels, small } => {
            let small = match small {
                SmallSides::Rounded => 0,
                SmallSides::Truncated => 1,
                SmallSides::InTurn => 2,
            };
            vec![0, min_pixels, max_pixels, small]
        }
        SizeRule::Square { side } => vec![1, side.into(), 0, 0],
        SizeRule::Budget { tokens } => vec![2, tokens.into(), 0, 0],
        SizeRule::LongestEdge { pixels } => vec![3, pixels.into(), 0, 0],
        SizeRule::Tiles { longest_edge, tile, split } => {
            vec![4, longest_edge.into(), tile.into(), split.into()]
        }
        SizeRule::Grid { tile, min_tiles, max_tiles } => {
            vec![5, tile.into(), min_tiles.into(), max_tiles.into()]
        }
        SizeRule::Flexible { min_tokens, max_tokens, tolerance, tile, min_tiles, max_tiles } => {
            let counts = [min_tokens, max_tokens, tile, min_tiles, max_tiles];
            let counts = counts.into_iter().map(u64::from);
            [6, tolerance.to_bits()].into_iter().chain(counts).collect()
        }
        SizeRule::Padded { max_patches, max_side } => vec![7, max_patches.into(), max_side.into(), 0],
    };
    let filter = match filter {
        Filter::Bilinear => 0,
        Filter::Bicubic => 1,
        Filter::Lanczos => 2,
    };
    let channels = mean.iter().chain(std).map(|value| value.to_bits().into());
    let sides = [(*patch).into(), (*merge).into(), filter];
    rule.into_iter().chain(channels).chain(sides).for_each(|number| digest.number(number));
}

/// Returns the tensors of a tower, with short names.
fn own_tensors(tensors: &[Tensor], prefixes: &[(&str, &str)]) -> Vec<Tensor> {
    let short = |tensor: &Tensor| {
        let found = prefixes.iter().find_map(|(from, to)| Some((to, tensor.name.strip_prefix(from)?)));
        found.map(|(to, rest)| Tensor { name: format!("{to}{rest}"), ..tensor.clone() })
    };
    tensors.iter().filter_map(short).collect()
}

fn refuse(projector: &str) -> ModelError {
    let supported = ALL.iter().flat_map(|family| family.projectors).copied().collect::<Vec<_>>().join(", ");
    let known = UNSUPPORTED.iter().find(|(name, _)| *name == projector);
    let what = match known {
        Some((name, family)) => format!("the projector `{name}` of {family}"),
        None => format!("the projector `{projector}`"),
    };
    ModelError::unsupported_but(what, &supported)
}

/// A JSON object, empty if it is something else.
fn object<'a>(json: &'a Map<String, Value>, key: &str) -> Option<&'a Map<String, Value>> {
    json.get(key).and_then(Value::as_object)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn names_of_projectors_and_classes_are_unique() {
        let mut seen = HashSet::new();
        let projectors = ALL.iter().flat_map(|family| family.projectors.iter().chain(family.classes));
        for name in projectors.chain(UNSUPPORTED.iter().map(|(name, _)| name)) {
            assert!(seen.insert(name), "{name} is there twice");
        }
    }
}
