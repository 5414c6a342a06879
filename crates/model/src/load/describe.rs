//! Descriptions of a model's files, for people and for conversion to GGUF. Models that are not supported have them as well.

use std::collections::{BTreeMap, HashSet};

use paguro_backend::WeightFormat;
use serde_json::{Map, Value};

use super::{ModelFile, Source, defaults::hf_defaults, hf_config};
use crate::{
    arch::Definition,
    error::ModelError,
    export,
    gguf::{self, Contents},
    hf::quantized::{self, Scheme},
    tensor::{DType, Tensor},
};

/// A model's size, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// Number of weights, in all tensors.
    pub parameters: u64,
    /// Bytes of the file, or of all files.
    pub file_bytes: u64,
    /// Name of the quantization: `Q4_K_M`, `BF16`.
    pub quantization: String,
}

/// A format that matrices are converted to while they are read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conversion {
    /// The file's own format.
    pub from: String,
    /// Format for backends.
    pub to: WeightFormat,
    /// Number of matrices.
    pub matrices: usize,
    /// False if products of scales and quants are rounded, or, in a quantized format, the scales.
    pub exact: bool,
}

/// A key/value of a file, as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetadataEntry {
    /// Its key, with the file as a prefix for Hugging Face's files: `config.json: hidden_size`.
    pub key: String,
    /// Type of the value.
    pub kind: &'static str,
    /// The value; of long arrays the beginning.
    pub value: String,
}

impl ModelFile {
    /// Returns all key/values.
    pub fn metadata(&self) -> Vec<MetadataEntry> {
        match &self.source {
            Source::Gguf(gguf) => {
                let entry = |(key, value): (&str, &gguf::Value)| MetadataEntry {
                    key: key.to_owned(),
                    kind: value.type_name(),
                    value: value.to_string(),
                };
                gguf.metadata.iter().map(entry).collect()
            }
            Source::Hf(folder) => {
                let config = json_entries("config.json", &folder.config);
                config.chain(json_entries("generation_config.json", &folder.generation)).collect()
            }
        }
    }

    /// Returns the model's size.
    pub fn description(&self) -> Description {
        let (file_type, file_bytes) = match &self.source {
            Source::Gguf(gguf) => (gguf.file_type().map(str::to_owned), gguf.bytes),
            Source::Hf(folder) => {
                (Scheme::of(&folder.config).ok().flatten().map(|it| it.name()), folder.bytes)
            }
        };
        let parameters = self.tensors().iter().map(Tensor::elements).fold(0, u64::saturating_add);
        let quantization = file_type.unwrap_or_else(|| self.majority_type());
        Description { parameters, file_bytes, quantization }
    }

    /// Returns what a single GGUF file of this model would contain.
    ///
    /// # Errors
    /// [`ModelError`], for folders that cannot be converted.
    pub fn contents(&self) -> Result<Contents, ModelError> {
        match &self.source {
            Source::Gguf(gguf) => {
                let mut metadata = gguf.metadata.clone();
                for key in ["split.no", "split.count", "split.tensors.count"] {
                    metadata.remove(key);
                }
                Ok(Contents { metadata, tensors: gguf.tensors.clone() })
            }
            Source::Hf(folder) => {
                let parts = export::Parts {
                    name: &self.name,
                    defaults: hf_defaults(&folder.generation),
                    templates: self.chat_templates()?,
                    majority: self.majority_type(),
                };
                export::contents(folder, &parts)
            }
        }
    }

    /// Returns the formats that quantized matrices of a folder are converted to while they are read. Empty for files whose
    /// tensors are read as they are.
    pub fn conversions(&self) -> Vec<Conversion> {
        let Source::Hf(folder) = &self.source else { return Vec::new() };
        let (Ok(Some(scheme)), Ok(usable)) = (Scheme::of(&folder.config), self.usable_tensors()) else {
            return Vec::new();
        };
        let kept: HashSet<(&str, &DType)> =
            folder.tensors.iter().map(|tensor| (tensor.name.as_str(), &tensor.dtype)).collect();
        let Ok(rounded) = quantized::rounded(&folder.config, &folder.tensors) else { return Vec::new() };
        let mut counts = BTreeMap::new();
        for tensor in usable.iter().filter(|it| !kept.contains(&(it.name.as_str(), &it.dtype))) {
            if let DType::Weight(format) = tensor.dtype {
                let exact = format.is_quantized() && !rounded.contains(&tensor.name);
                *counts.entry((format, exact)).or_insert(0) += 1;
            }
        }
        let conversion = |((to, exact), matrices)| Conversion { from: scheme.name(), to, matrices, exact };
        counts.into_iter().map(conversion).collect()
    }

    /// Returns the type that most bytes have.
    fn majority_type(&self) -> String {
        let mut bytes = BTreeMap::new();
        for tensor in self.tensors() {
            *bytes.entry(tensor.dtype.to_string()).or_insert(0) += tensor.bytes.len();
        }
        let most = bytes.into_iter().max_by_key(|entry| entry.1);
        most.map_or_else(|| "no weights".to_owned(), |entry| entry.0)
    }

    /// Returns all key/values, a Hugging Face folder's under the keys that GGUF has for them; those without such a key
    /// are left out.
    pub fn gguf_metadata(&self) -> Vec<MetadataEntry> {
        let Source::Hf(folder) = &self.source else { return self.metadata() };
        let class = self.architecture().unwrap_or_default();
        let name = Definition::from_hf(class).map_or_else(|_| class.to_owned(), |it| it.gguf.to_owned());
        let nested = folder.config.get("text_config").and_then(Value::as_object);
        let value = |key: &str| folder.config.get(key).or_else(|| nested?.get(key));
        const KEYS: [(&str, &str); 8] = [
            ("max_position_embeddings", "context_length"),
            ("hidden_size", "embedding_length"),
            ("num_hidden_layers", "block_count"),
            ("intermediate_size", "feed_forward_length"),
            ("num_attention_heads", "attention.head_count"),
            ("num_key_value_heads", "attention.head_count_kv"),
            ("vocab_size", "vocab_size"),
            ("sliding_window", "attention.sliding_window"),
        ];
        let number = |(theirs, ours): (&str, &str)| {
            let value = value(theirs)?.as_u64()?.to_string();
            Some(MetadataEntry { key: format!("{name}.{ours}"), kind: "u32", value })
        };
        let text = |key: &str, value: &str| MetadataEntry {
            key: key.to_owned(),
            kind: "string",
            value: value.to_owned(),
        };
        let general = [text("general.architecture", &name), text("general.name", &self.name)];
        general.into_iter().chain(KEYS.into_iter().filter_map(number)).collect()
    }

    /// Returns the trained context, if the files state it. Even unsupported models may have one.
    pub fn context_length(&self) -> Option<usize> {
        match &self.source {
            Source::Gguf(gguf) => {
                let architecture = gguf.metadata.str("general.architecture")?;
                Some(gguf.metadata.u32(&format!("{architecture}.context_length"))? as usize)
            }
            Source::Hf(folder) => {
                let of = |config: &Map<String, Value>| config.get("max_position_embeddings")?.as_u64();
                let text = || of(folder.config.get("text_config")?.as_object()?);
                match hf_config(folder, None) {
                    // Some positions of RoBERTa's are of no use, and sentence-transformers may read shorter texts.
                    Ok(config) => Some(config.context_length),
                    Err(_) => of(&folder.config).or_else(text)?.try_into().ok(),
                }
            }
        }
    }
}

fn json_entries(file: &'static str, object: &Map<String, Value>) -> impl Iterator<Item = MetadataEntry> {
    object.iter().map(move |(key, value)| {
        let kind = match value {
            Value::Null => "null",
            Value::Bool(_) => "bool",
            Value::Number(_) => "number",
            Value::String(_) => "string",
            Value::Array(_) => "array",
            Value::Object(_) => "object",
        };
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        MetadataEntry { key: format!("{file}: {key}"), kind, value: text }
    })
}
