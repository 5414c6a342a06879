//! Hugging Face folders: `config.json`, safetensors, `tokenizer.json` and further files.

pub(crate) mod quantized;
mod safetensors;
mod torch;

use std::{
    collections::HashMap,
    fs, io,
    io::Read,
    path::{Component, Path, PathBuf},
    sync::Arc,
};

use paguro_backend::ByteSource;
use serde_json::{Map, Value};

use crate::{
    error::ModelError,
    file::{WeightFile, open_regular},
    prompts::{self, Prompts},
    tensor::Tensor,
    text_head::kind_of,
};

/// Reads the tensors of a file, which gets this number, in order. The error describes the file's problem.
type ReadTensors = fn(&Arc<dyn ByteSource>, usize) -> Result<Vec<Tensor>, String>;

/// Returns the tensors of a file of weights, and its size in bytes.
fn open(path: &Path, file: usize, read: ReadTensors) -> Result<(Vec<Tensor>, u64), ModelError> {
    let source = WeightFile::open(path).map_err(|source| ModelError::Io { path: path.to_owned(), source })?;
    let found = read(&source, file).map_err(|problem| bad(path, &problem))?;
    Ok((found, source.size()))
}

/// The part of a folder that has weights and shapes.
#[derive(Debug)]
pub(crate) struct HfFolder {
    pub(crate) path: PathBuf,
    /// `config.json`.
    pub(crate) config: Map<String, Value>,
    /// Content of `generation_config.json`; empty if there is none.
    pub(crate) generation: Map<String, Value>,
    /// All tensors, in the order of the files.
    pub(crate) tensors: Vec<Tensor>,
    /// The files with tensors.
    pub(crate) files: Vec<PathBuf>,
    /// Bytes of these files together.
    pub(crate) bytes: u64,
}

// More than any real file of its kind has; a larger one is not read into memory.
const MAX_FILES: usize = 512;
const MAX_CONFIG: u64 = 4 << 20;
const MAX_INDEX: u64 = 64 << 20;
const MAX_TOKENIZER: u64 = 256 << 20;
const MAX_TEMPLATE: u64 = 4 << 20;

/// The weights of folders without safetensors.
pub(crate) const TORCH_WEIGHTS: &str = "pytorch_model.bin";

impl HfFolder {
    /// Reads `config.json` and the headers of the weights.
    ///
    /// # Errors
    /// [`ModelError`], with the missing or damaged part.
    pub(crate) fn open(path: &Path) -> Result<Self, ModelError> {
        let config_path = path.join("config.json");
        let config = read_object(&config_path, MAX_CONFIG)?.ok_or_else(|| no_config(path))?;
        let generation = read_object(&path.join("generation_config.json"), MAX_CONFIG)?.unwrap_or_default();
        let files = weight_files(path)?;
        let (mut tensors, mut bytes) = (Vec::new(), 0);
        for (i, file) in files.iter().enumerate() {
            let read = if file.ends_with(TORCH_WEIGHTS) { torch::read } else { safetensors::read };
            let (found, size) = open(file, i, read)?;
            tensors.extend(found);
            bytes += size;
        }
        check_unique(path, &tensors)?;
        Ok(Self { path: path.to_owned(), config, generation, tensors, files, bytes })
    }

    /// `tokenizer.json`.
    pub(crate) fn tokenizer(&self) -> Result<Vec<u8>, ModelError> {
        let path = self.path.join("tokenizer.json");
        read_file(&path, MAX_TOKENIZER)?.ok_or_else(|| ModelError::NotAModel {
            path: self.path.clone(),
            problem: "the folder has no tokenizer.json (a tokenizer.model alone is not supported; \
                      save the tokenizer with a current version of transformers)"
                .to_owned(),
        })
    }

    /// Returns true if the folder has a tokenizer.
    pub(crate) fn has_tokenizer(&self) -> bool {
        self.path.join("tokenizer.json").is_file()
    }

    /// Returns `tokenizer_config.json`, if there is one.
    pub(crate) fn tokenizer_config(&self) -> Result<Option<Vec<u8>>, ModelError> {
        read_file(&self.path.join("tokenizer_config.json"), MAX_TOKENIZER)
    }

    /// Returns the files of sentence-transformers: `modules.json`, a list or null, and the configuration of the pooling; empty
    /// if there are none.
    pub(crate) fn pooling(&self) -> Result<(Value, Map<String, Value>), ModelError> {
        let path = self.path.join("modules.json");
        let modules = match read_file(&path, MAX_CONFIG)? {
            Some(bytes) => serde_json::from_slice(&bytes)
                .map_err(|error| bad(&path, &format!("it is not JSON: {error}")))?,
            None => Value::Null,
        };
        if !modules.is_null() && !modules.is_array() {
            return Err(bad(&path, "it is not a list of modules"));
        }
        let pooling = modules.as_array().into_iter().flatten().find(|module| kind_of(module) == "Pooling");
        let folder = match pooling {
            Some(module) if module.get("path").is_some() => self.module_folder(module)?,
            _ => "1_Pooling",
        };
        let config = self.module_file(folder, "config.json");
        match read_object(&config, MAX_CONFIG)? {
            None if pooling.is_some() => Err(bad(&config, "it is missing, but modules.json names it")),
            found => Ok((modules, found.unwrap_or_default())),
        }
    }

    /// Returns the folder of a module, which must be one of this folder's.
    pub(crate) fn module_folder<'m>(&self, module: &'m Value) -> Result<&'m str, ModelError> {
        let path = module.get("path").and_then(Value::as_str).unwrap_or_default();
        let mut parts = Path::new(path).components();
        match (parts.next(), parts.next()) {
            (Some(Component::Normal(part)), None) if part == path => Ok(path),
            _ => {
                let problem = format!("`{path}` is not a folder of the model's");
                Err(bad(&self.path.join("modules.json"), &problem))
            }
        }
    }

    /// Returns the maximum number of tokens of a text, as sentence-transformers has it in `sentence_bert_config.json`.
    pub(crate) fn longest_text(&self) -> Result<Option<usize>, ModelError> {
        let path = self.path.join("sentence_bert_config.json");
        let config = read_object(&path, MAX_CONFIG)?.unwrap_or_default();
        let Some(longest) = config.get("max_seq_length").filter(|longest| !longest.is_null()) else {
            return Ok(None);
        };
        let tokens = longest.as_u64().and_then(|longest| usize::try_from(longest).ok());
        match tokens.filter(|&tokens| tokens > 0) {
            Some(tokens) => Ok(Some(tokens)),
            None => {
                Err(bad(&path, &format!("`max_seq_length` is {longest}, which is not a number of tokens")))
            }
        }
    }

    /// Returns the configuration of a module of sentence-transformers in the folder `module`.
    pub(crate) fn module_config(&self, module: &str) -> Result<Map<String, Value>, ModelError> {
        let path = self.module_file(module, "config.json");
        read_object(&path, MAX_CONFIG)?.ok_or_else(|| bad(&path, "it is missing, but modules.json names it"))
    }

    /// Returns the tensors of a module of sentence-transformers; none if it has no file of them.
    pub(crate) fn module_tensors(&self, module: &str) -> Result<Vec<Tensor>, ModelError> {
        let path = self.module_file(module, "model.safetensors");
        let of_torch = self.module_file(module, TORCH_WEIGHTS);
        if path.is_file() {
            Ok(open(&path, 0, safetensors::read)?.0)
        } else if of_torch.is_file() {
            Ok(open(&of_torch, 0, torch::read)?.0)
        } else {
            Ok(Vec::new())
        }
    }

    /// Returns the tensors of the PyTorch file `name`; `None` if there is no such file.
    pub(crate) fn torch_tensors(&self, name: &str) -> Result<Option<Vec<Tensor>>, ModelError> {
        let path = self.path.join(name);
        if !path.exists() && !path.is_symlink() {
            return Ok(None);
        }
        Ok(Some(open(&path, 0, torch::read)?.0))
    }

    /// Returns the path of a file of a module. The library has it under a plain name: `1_Pooling.config.json`.
    pub(crate) fn module_file(&self, folder: &str, file: &str) -> PathBuf {
        let plain = self.path.join(format!("{folder}.{file}"));
        if plain.is_file() { plain } else { self.path.join(folder).join(file) }
    }

    /// Returns the prompts of `config_sentence_transformers.json`; none without that file.
    pub(crate) fn prompts(&self) -> Result<Prompts, ModelError> {
        let path = self.path.join("config_sentence_transformers.json");
        let config = read_object(&path, MAX_CONFIG)?.unwrap_or_default();
        prompts::from_hf(&config).map_err(|problem| bad(&path, &problem))
    }

    /// Returns the configuration of the image processor: `preprocessor_config.json`, and over it that of `processor_config.json`,
    /// which newer folders have.
    pub(crate) fn image_processor(&self) -> Result<Map<String, Value>, ModelError> {
        let mut config =
            read_object(&self.path.join("preprocessor_config.json"), MAX_CONFIG)?.unwrap_or_default();
        let newer = read_object(&self.path.join("processor_config.json"), MAX_CONFIG)?.unwrap_or_default();
        if let Some(Value::Object(processor)) = newer.get("image_processor") {
            config.extend(processor.iter().map(|(key, value)| (key.clone(), value.clone())));
        }
        Ok(config)
    }

    /// `chat_template.jinja`, which newer folders have instead of a template in `tokenizer_config.json`.
    pub(crate) fn chat_template(&self) -> Result<Option<String>, ModelError> {
        let path = self.path.join("chat_template.jinja");
        let Some(bytes) = read_file(&path, MAX_TEMPLATE)? else { return Ok(None) };
        String::from_utf8(bytes).map(Some).map_err(|_| bad(&path, "it is not UTF-8"))
    }
}

/// Returns the configuration and the tensors of an adapter: `adapter_config.json`, and the file `weights`.
///
/// # Errors
/// [`ModelError`], with the missing or damaged part.
pub(crate) fn open_adapter(
    folder: &Path,
    weights: &str,
) -> Result<(Map<String, Value>, Vec<Tensor>), ModelError> {
    let path = folder.join("adapter_config.json");
    let config = read_object(&path, MAX_CONFIG)?.ok_or_else(|| bad(&path, "it is missing"))?;
    Ok((config, open(&folder.join(weights), 0, safetensors::read)?.0))
}

/// Returns a file of a folder about its tokens; `None` if there is none.
///
/// # Errors
/// It cannot be read.
pub(crate) fn read_small(folder: &Path, name: &str) -> Result<Option<Vec<u8>>, ModelError> {
    read_file(&folder.join(name), MAX_TOKENIZER)
}

fn no_config(path: &Path) -> ModelError {
    let ggufs = match fs::read_dir(path) {
        Ok(entries) => entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect(),
        Err(_) => Vec::new(),
    };
    let gguf = ggufs.iter().filter(|name| name.ends_with(".gguf")).min();
    let problem = match gguf {
        Some(name) => {
            format!("the folder has no config.json; to open the GGUF file in it, name the file ({name})")
        }
        None => "the folder has no config.json".to_owned(),
    };
    ModelError::NotAModel { path: path.to_owned(), problem }
}

/// Returns the files with weights: the safetensors files of the index, or the only one, or else that of PyTorch.
fn weight_files(folder: &Path) -> Result<Vec<PathBuf>, ModelError> {
    let index_path = folder.join("model.safetensors.index.json");
    if let Some(index) = read_object(&index_path, MAX_INDEX)? {
        return indexed_files(folder, &index_path, &index);
    }
    let single = folder.join("model.safetensors");
    if single.is_file() {
        return Ok(vec![single]);
    }
    let torch = folder.join(TORCH_WEIGHTS);
    if torch.is_file() {
        return Ok(vec![torch]);
    }
    let has = |name: &str| folder.join(name).exists();
    let other = ["pytorch_model.bin.index.json", "consolidated.00.pth", "tf_model.h5", "flax_model.msgpack"];
    let problem = match other.into_iter().find(|name| has(name)) {
        Some(name) => {
            format!("weights in `{name}` are not supported; convert them to model.safetensors or to GGUF")
        }
        None => "the folder has neither model.safetensors nor model.safetensors.index.json".to_owned(),
    };
    Err(ModelError::NotAModel { path: folder.to_owned(), problem })
}

fn indexed_files(folder: &Path, path: &Path, index: &Map<String, Value>) -> Result<Vec<PathBuf>, ModelError> {
    let map = index.get("weight_map").and_then(Value::as_object);
    let map = map.ok_or_else(|| bad(path, "it has no `weight_map`"))?;
    let mut names: Vec<&str> = Vec::new();
    for (tensor, name) in map {
        let name = name.as_str().ok_or_else(|| bad(path, &format!("`{tensor}` is in no file")))?;
        // The index may only name files of this folder.
        let mut parts = Path::new(name).components();
        let is_plain =
            matches!((parts.next(), parts.next()), (Some(Component::Normal(part)), None) if part == name);
        if !is_plain || name.contains(['/', '\\']) {
            return Err(bad(path, &format!("`{name}` is not a file name of this folder")));
        }
        names.push(name);
    }
    names.sort_unstable();
    names.dedup();
    let files: Vec<_> = names.into_iter().map(|name| folder.join(name)).collect();
    match files.iter().find(|file| !file.is_file()) {
        Some(missing) => Err(bad(path, &format!("it names `{}`, which is missing", missing.display()))),
        None if files.is_empty() => Err(bad(path, "its `weight_map` is empty")),
        None if files.len() > MAX_FILES => {
            Err(bad(path, &format!("it names {} files, but a model has at most {MAX_FILES}", files.len())))
        }
        None => Ok(files),
    }
}

fn check_unique(folder: &Path, tensors: &[Tensor]) -> Result<(), ModelError> {
    let mut files = HashMap::with_capacity(tensors.len());
    for tensor in tensors {
        if files.insert(tensor.name.as_str(), tensor.file).is_some() {
            return Err(bad(folder, &format!("tensor `{}` is in two files", tensor.name)));
        }
    }
    Ok(())
}

fn bad(path: &Path, problem: &str) -> ModelError {
    ModelError::BadFile { path: path.to_owned(), problem: problem.to_owned() }
}

/// Returns a JSON object, `None` if the file does not exist.
fn read_object(path: &Path, limit: u64) -> Result<Option<Map<String, Value>>, ModelError> {
    let Some(bytes) = read_file(path, limit)? else { return Ok(None) };
    serde_json::from_slice(&name_infinities(&bytes))
        .map(Some)
        .map_err(|error| bad(path, &format!("not a JSON object: {error}")))
}

/// Puts quotes around `Infinity` outside of strings, which Python writes as a number and JSON does not allow.
fn name_infinities(bytes: &[u8]) -> Vec<u8> {
    const NAME: &[u8] = b"Infinity";
    let (mut out, mut rest, mut in_string) = (Vec::with_capacity(bytes.len() + 16), bytes, false);
    while let Some((&byte, after)) = rest.split_first() {
        match byte {
            b'\\' if in_string && !after.is_empty() => {
                out.extend([byte, after[0]]);
                rest = &after[1..];
                continue;
            }
            b'"' => in_string = !in_string,
            _ if !in_string && rest.starts_with(NAME) => {
                out.extend([b"\"", NAME, b"\""].concat());
                rest = &rest[NAME.len()..];
                continue;
            }
            _ => {}
        }
        out.push(byte);
        rest = after;
    }
    out
}

/// Returns the whole file, `None` if it does not exist.
fn read_file(path: &Path, limit: u64) -> Result<Option<Vec<u8>>, ModelError> {
    let io = |source| ModelError::Io { path: path.to_owned(), source };
    let (file, metadata) = match open_regular(path) {
        Ok(opened) => opened,
        // A link that leads nowhere is not an absent file.
        Err(error) if error.kind() == io::ErrorKind::NotFound && !path.is_symlink() => return Ok(None),
        Err(error) => return Err(io(error)),
    };
    let mut bytes = Vec::new();
    // Files of the system that claim to be empty may have no end.
    file.take(metadata.len().min(limit + 1)).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > limit {
        return Err(bad(path, &format!("it has more than {} MiB, which no such file has", limit >> 20)));
    }
    // Editors of Windows write a byte order mark, which JSON does not allow.
    if bytes.starts_with(BYTE_ORDER_MARK) {
        bytes.drain(..BYTE_ORDER_MARK.len());
    }
    Ok(Some(bytes))
}

/// UTF-8's byte order mark.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn infinities_become_strings() {
        let text = br#"{"a": [0.0, Infinity], "b": "no \"Infinity\" here"}"#;
        let named = String::from_utf8(name_infinities(text)).unwrap();
        assert_eq!(named, r#"{"a": [0.0, "Infinity"], "b": "no \"Infinity\" here"}"#);
    }
}
