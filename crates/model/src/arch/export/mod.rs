//! A Hugging Face folder as a GGUF file has it: names, arrangements and keys, the reverse of what reading does.
//!
//! Most tensors keep their arrangement and get another name ([`tensors`]). Tensors that folders arrange in many ways, such as experts,
//! are taken from the program to which the folder is lowered. [`check`] reads the result as a GGUF file and compares it with the folder,
//! so a model that would lose a property is refused.

mod check;
mod elsewhere;
mod keys;
mod multipliers;
mod rope;
mod sources;
mod tensors;

use paguro_backend::{Program, WeightFormat, Weights};

pub(crate) use self::elsewhere::differences;
use self::multipliers::Factors as Multiplied;
use super::{Config, Lowered, Names, Tensors, config::Distances};
use crate::{
    error::ModelError,
    gguf::{Array, Contents, Metadata, Value},
    tensor::Tensor,
};

/// A context that is longer than those of all models.
pub(crate) const LONGEST: usize = 1 << 30;

/// Numbers of a folder's `config.json` that a [`Config`] lacks.
#[derive(Clone, Debug, Default)]
pub(crate) struct Original {
    /// The context of a model's first training, beyond which longrope has other factors.
    pub(crate) context: Option<usize>,
    /// RoPE's sections, which only matter for images.
    pub(crate) sections: Option<Vec<i32>>,
    /// Number of first layers to which rows of images are added, in architectures that can have some.
    pub(crate) deepstack: usize,
}

/// Converts a folder. `long` is its configuration for the longest context, `short` for the shortest; they differ in longrope's
/// factors alone, which change beyond the original context.
///
/// # Errors
/// [`ModelError::Unsupported`] for models that a GGUF file would not have as they are.
pub(crate) fn export(
    long: &Config,
    short: &Config,
    original: &Original,
    names: &Names,
    tensors: &[Tensor],
) -> Result<Contents, ModelError> {
    // Files of llama.cpp have no architecture with buckets of distances.
    let has_no_name = long.block.distances == Distances::Buckets;
    if has_no_name || long.definition.is_encoder() != long.block.bidirectional {
        return Err(unsupported(long));
    }
    let places = Tensors::new(long.definition.gguf, &WeightFormat::ALL, tensors);
    let Lowered { program, weights, mtp } = super::lower(long, names, places, long.context_length)?;
    let names = &names.with_mtp(long.layers.len(), |name| tensors.iter().any(|tensor| tensor.name == name));
    let (config, multiplied) = multipliers::fold(target(long));
    let gguf = Names::gguf(config.definition);
    let metadata = Metadata::default();
    let position_offset = long.position_offset;
    let mut export = Export {
        config: &config,
        names,
        gguf,
        metadata,
        program: &program,
        weights: &weights,
        position_offset,
        first_layer: 0,
        heads: usize::from(mtp.is_some()),
    };
    export.keys(short, original)?;
    let mut converted = export.tensors(tensors, &multiplied)?;
    converted.extend(export.rope_factors(short));
    if let Some(mtp) = &mtp {
        let (with_layer, metadata) = (super::with_layer(&config), Metadata::default());
        let head = Export {
            config: &with_layer,
            names,
            gguf: Names::gguf(config.definition),
            metadata,
            program: &mtp.program,
            weights: &mtp.weights,
            position_offset,
            first_layer: config.layers.len(),
            heads: 0,
        };
        converted.extend(head.tensors(tensors, &multiplied)?);
    }
    let contents = Contents { metadata: export.metadata, tensors: converted };
    check::check(&config, &contents, (&program, &weights, mtp.as_ref()), &multiplied)?;
    Ok(contents)
}

/// Returns the configuration with the definition that the file gets: some classes of transformers are several
/// architectures of GGUF.
pub(crate) fn target(config: &Config) -> Config {
    let mut config = config.clone();
    let has_states = config.layers.iter().any(|layer| layer.recurrent);
    config.experts = config.experts.filter(|_| config.layers.iter().any(|layer| layer.experts));
    if let Some(experts) = &mut config.experts
        && !config.block.zeros
    {
        experts.dense_layers = config.layers.iter().take_while(|layer| !layer.experts).count();
    }
    (config.definition.to_gguf)(&mut config);
    config.position_offset = 0;
    if !has_states {
        config.recurrent = None;
        config.block.zeros = config.definition.block.zeros;
    }
    config
}

fn unsupported(config: &Config) -> ModelError {
    ModelError::unsupported(format!("converting folders of `{}` models to GGUF", config.definition.gguf))
}

/// A conversion, with the keys that are written so far.
struct Export<'a> {
    /// The configuration as the file has it.
    config: &'a Config,
    names: &'a Names,
    gguf: Names,
    metadata: Metadata,
    /// The folder's program.
    program: &'a Program,
    weights: &'a Weights,
    /// Rows of the folder's table of positions that are not used.
    position_offset: usize,
    /// Number of the program's first layer: 0, or that of a head for multi-token prediction.
    first_layer: usize,
    /// Number of these heads, which are further layers of the file.
    heads: usize,
}

impl Export<'_> {
    fn set(&mut self, key: &str, value: Value) {
        self.metadata.set(&format!("{}.{key}", self.config.definition.gguf), value);
    }

    fn size(&mut self, key: &str, size: usize) {
        self.set(key, Value::U32(size as u32));
    }

    fn number(&mut self, key: &str, number: f64) {
        self.set(key, Value::F32(number as f32));
    }

    /// Sets a number for each layer, or one number if all are equal.
    fn by_layer(&mut self, key: &str, numbers: &[usize]) {
        match numbers.split_first() {
            Some((first, rest)) if rest.iter().any(|number| number != first) => {
                let numbers = numbers.iter().map(|&number| number as i32).collect();
                self.set(key, Value::Array(Array::I32(numbers)));
            }
            first => self.size(key, first.map_or(0, |first| *first.0)),
        }
    }
}
