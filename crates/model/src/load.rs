//! Opening of a model: a file or folder, and its conversion to a [`Model`].

use std::{
    borrow::Cow,
    collections::{BTreeMap, HashSet},
    path::{Path, PathBuf},
    sync::Arc,
};

use paguro_backend::{ByteSource, Program, SamplingParams, WeightFormat, Weights};
use serde_json::{Map, Value};

use crate::{
    arch::{self, Config, Definition, Names, Tensors},
    chat::{ChatInput, ChatTemplate, TemplateError, TemplateTokens},
    error::ModelError,
    export,
    gguf::{self, Contents, Gguf},
    hf::{
        HfFolder,
        quantized::{self, Scheme},
    },
    judge::{self, Judge},
    pooling::{self, Pooling, PoolingError},
    prompts::Prompts,
    tensor::{DType, Tensor},
    text_head::TextHead,
    tokenizer::{Tokenizer, TokenizerConfig},
};

/// A model that is ready to be loaded by a backend.
#[derive(Debug)]
pub struct Model {
    /// Name in the metadata, or else the file's name.
    pub name: String,
    /// Architecture as the file names it: `llama`, `LlamaForCausalLM`.
    pub architecture: String,
    /// Its size, for people.
    pub description: Description,
    /// Tokens that it was trained for.
    pub context_length: usize,
    /// Maximum tokens of a sequence, for which `program` was made: [`LoadOptions::max_context`], or `context_length`.
    pub max_context: usize,
    /// The model, lowered.
    pub program: Program,
    /// Its weights, which stay in the file.
    pub weights: Weights,
    /// Its tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Chat template.
    pub chat_template: Option<ChatTemplate>,
    /// Chat template for chats with tools, if it differs.
    pub tool_template: Option<ChatTemplate>,
    /// Problem of the file's chat template, if there is one. All functions besides chats work without a template.
    pub template_problem: Option<TemplateError>,
    /// Recommended sampling parameters.
    pub defaults: GenerationDefaults,
    /// Tokens that end an answer: end of text, of turn, of message. Sorted.
    pub stop_tokens: Vec<u32>,
    /// Pooling of embeddings, or the reason for which there are none.
    pub pooling: Result<Pooling, PoolingError>,
    /// Layers after pooling.
    pub head: TextHead,
    /// Texts that it wants before texts to embed, by name.
    pub prompts: Prompts,
    /// The question about a document, if the files say that the model is a [`Judge`].
    pub judge_template: Option<String>,
    /// The judge, once [`Model::find_judge`] has read it from the weights.
    pub judge: Option<Judge>,
}

/// Choices at opening.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadOptions {
    /// Maximum sequence length; `None` for the trained context. It selects longrope's factors and determines whether a
    /// sliding window has an effect.
    pub max_context: Option<usize>,
}

/// The parts of a model that its memory depends on.
#[derive(Debug)]
pub struct ModelShape {
    /// Tokens that it was trained for.
    pub context_length: usize,
    /// The model, lowered.
    pub program: Program,
    /// Its weights, which stay in the file.
    pub weights: Weights,
}

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

/// Recommended sampling parameters; `None` where the model has no recommendation.
#[derive(Clone, Debug, Default, PartialEq)]
#[allow(missing_docs)] // named as the sampling parameters that they set
pub struct GenerationDefaults {
    pub temperature: Option<f32>,
    pub top_k: Option<u32>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    /// Number of tokens that the penalty considers.
    pub penalty_window: Option<u32>,
    /// Length of an answer.
    pub max_tokens: Option<usize>,
}

impl GenerationDefaults {
    /// Returns the default sampling parameters. The model's recommendations are used without ours, even if they set
    /// only some values, because a mixture would be neither. Without any: temperature 0.8, top-k 40, top-p 0.95, min-p
    /// 0.05.
    pub fn sampling(&self) -> SamplingParams {
        let off = SamplingParams::default();
        let recommends =
            [self.temperature, self.top_p, self.min_p].iter().any(Option::is_some) || self.top_k.is_some();
        let ours = if recommends {
            SamplingParams { temperature: 1.0, ..off }
        } else {
            SamplingParams { temperature: 0.8, top_k: 40, top_p: 0.95, min_p: 0.05, ..off }
        };
        SamplingParams {
            temperature: self.temperature.unwrap_or(ours.temperature),
            top_k: self.top_k.unwrap_or(ours.top_k),
            top_p: self.top_p.unwrap_or(ours.top_p),
            min_p: self.min_p.unwrap_or(ours.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(ours.repetition_penalty),
            penalty_window: self.penalty_window.or(ours.penalty_window),
            ..ours
        }
    }
}

/// A model's file or folder, opened and checked but not lowered: all that `inspect` shows can be had even of models
/// that are not supported.
#[derive(Debug)]
pub struct ModelFile {
    name: String,
    source: Source,
}

#[derive(Debug)]
enum Source {
    Gguf(Box<Gguf>),
    Hf(Box<HfFolder>),
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

impl Model {
    /// Returns the reason why the model cannot chat although its file has a chat template: the template does not compile, or
    /// it fails on a chat of one message.
    pub fn chat_problem(&self) -> Option<String> {
        let Some(template) = &self.chat_template else {
            return self.template_problem.as_ref().map(ToString::to_string);
        };
        let input = ChatInput::from_turns([("user", "Hello")]);
        template.prompt(&input, &self.tokenizer).err().map(|problem| problem.to_string())
    }

    /// True if the model only reads texts: its rows attend in both directions, so that it cannot go on from a text.
    pub fn is_encoder(&self) -> bool {
        self.program.bidirectional
    }

    /// Reads the [`Judge`] that the model is, if it is one by its files or by `name`. Needs the weights.
    ///
    /// # Errors
    /// A head that cannot be read, or a vocabulary without the two words.
    pub fn find_judge(&mut self, name: &str) -> Result<(), String> {
        self.judge = Judge::of(self, name)?;
        Ok(())
    }

    /// Returns a pair of texts as the ids of a prompt of at most `limit` tokens, for a model that reads both at once, such as
    /// a reranker. If there are more tokens, the longer text loses its end. `None` if `limit` has no room for a text.
    pub fn encode_pair(&self, first: &str, second: &str, limit: usize) -> Option<Vec<u32>> {
        let types = self.program.embed.types.map_or(1, |types| types.count as u32);
        let id = |(token, kind): (u32, u32)| {
            let kind = if kind < types { kind } else { 0 };
            kind * self.program.vocab as u32 + token
        };
        Some(self.tokenizer.encode_pair(first, second, limit)?.into_iter().map(id).collect())
    }

    /// Opens a GGUF file, one of several of a split model, or a Hugging Face folder.
    ///
    /// # Errors
    /// [`ModelError`].
    pub fn open(path: &Path, options: &LoadOptions) -> Result<Self, ModelError> {
        ModelFile::open(path)?.load(options)
    }

    /// Opens a GGUF file in memory, such as one that is embedded in the program.
    ///
    /// # Errors
    /// [`ModelError`].
    pub fn from_static(name: &str, bytes: &'static [u8], options: &LoadOptions) -> Result<Self, ModelError> {
        ModelFile::from_static(name, bytes)?.load(options)
    }
}

impl ModelFile {
    /// Opens `path`: a GGUF file, a Hugging Face folder, or a file of one.
    ///
    /// # Errors
    /// [`ModelError`], if it is not a model or is damaged.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let metadata = std::fs::metadata(path).map_err(|source| match source.kind() {
            std::io::ErrorKind::NotFound => ModelError::NotAModel {
                path: path.to_owned(),
                problem: match path.read_link() {
                    Ok(target) => format!("it is a link to `{}`, which does not exist", target.display()),
                    Err(_) => "there is no such file or folder".to_owned(),
                },
            },
            _ => ModelError::Io { path: path.to_owned(), source },
        })?;
        let is_part_of_folder = |name: &str| name.ends_with(".safetensors") || name == "config.json";
        let file_name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let folder = match path.parent() {
            _ if metadata.is_dir() => Some(path),
            Some(parent) if is_part_of_folder(file_name) => Some(parent),
            _ => None,
        };
        if let Some(folder) = folder {
            let source = Source::Hf(Box::new(HfFolder::open(folder)?));
            return Ok(Self { name: name_of(folder), source });
        }
        let gguf = Gguf::open(path)?;
        let name = gguf.metadata.str("general.name").map_or_else(|| name_of(path), str::to_owned);
        Ok(Self { name, source: Source::Gguf(Box::new(gguf)) })
    }

    /// Reads a GGUF file that is embedded in the program; `name` is used if it does not name itself.
    ///
    /// # Errors
    /// [`ModelError`].
    pub fn from_static(name: &str, bytes: &'static [u8]) -> Result<Self, ModelError> {
        Self::from_bytes(name, Arc::new(bytes))
    }

    /// Reads a GGUF file in memory; `name` is used if its metadata has none.
    ///
    /// # Errors
    /// [`ModelError`].
    pub fn from_bytes(name: &str, source: Arc<dyn ByteSource>) -> Result<Self, ModelError> {
        let gguf = Gguf::from_bytes(source)?;
        let name = gguf.metadata.str("general.name").unwrap_or(name).to_owned();
        Ok(Self { name, source: Source::Gguf(Box::new(gguf)) })
    }

    /// Returns the name in the metadata, or else the file's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The kind of file: `GGUF v3`.
    pub fn format(&self) -> String {
        match &self.source {
            Source::Gguf(gguf) => format!("GGUF v{}", gguf.version),
            Source::Hf(_) => "Hugging Face folder".to_owned(),
        }
    }

    /// The architecture as the file names it, supported or not.
    pub fn architecture(&self) -> Option<&str> {
        match &self.source {
            Source::Gguf(gguf) => gguf.metadata.str("general.architecture"),
            Source::Hf(folder) => folder.config.get("architectures")?.get(0)?.as_str(),
        }
    }

    /// True if rows attend in both directions, so that the model writes no text.
    pub fn is_encoder(&self) -> bool {
        let name = self.architecture().unwrap_or_default();
        let definition = match &self.source {
            Source::Gguf(_) => Definition::from_gguf(name),
            Source::Hf(_) => Definition::from_hf(name),
        };
        definition.is_ok_and(Definition::is_encoder)
    }

    /// The files with weights; none for a model in memory.
    pub fn files(&self) -> &[PathBuf] {
        match &self.source {
            Source::Gguf(gguf) => &gguf.files,
            Source::Hf(folder) => &folder.files,
        }
    }

    /// All tensors.
    pub fn tensors(&self) -> &[Tensor] {
        match &self.source {
            Source::Gguf(gguf) => &gguf.tensors,
            Source::Hf(folder) => &folder.tensors,
        }
    }

    /// All key/values.
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

    /// The model's size.
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

    /// All tensors as architectures use them: quantized matrices of a folder are in a format that backends compute with,
    /// converted while they are read.
    ///
    /// # Errors
    /// [`ModelError`] for a quantization that is not supported, or tensors that do not fit together.
    pub fn usable_tensors(&self) -> Result<Cow<'_, [Tensor]>, ModelError> {
        match &self.source {
            Source::Gguf(gguf) => Ok(Cow::Borrowed(&gguf.tensors)),
            Source::Hf(folder) => quantized::resolve(&folder.config, &folder.tensors),
        }
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

    /// The type that most bytes have.
    fn majority_type(&self) -> String {
        let mut bytes = BTreeMap::new();
        for tensor in self.tensors() {
            *bytes.entry(tensor.dtype.to_string()).or_insert(0) += tensor.bytes.len();
        }
        let most = bytes.into_iter().max_by_key(|entry| entry.1);
        most.map_or_else(|| "no weights".to_owned(), |entry| entry.0)
    }

    /// Returns the model's tokenizer, which even unsupported models have.
    ///
    /// # Errors
    /// [`ModelError`], with the unsupported, missing or contradictory part.
    pub fn tokenizer(&self) -> Result<Tokenizer, ModelError> {
        Ok(match &self.source {
            Source::Gguf(gguf) => Tokenizer::from_gguf(&gguf.metadata)?,
            Source::Hf(folder) => {
                let config = folder.tokenizer_config()?;
                Tokenizer::from_hf(&folder.tokenizer()?, config.as_deref())?
            }
        })
    }

    /// All key/values, a Hugging Face folder's under the keys that GGUF has for them; those without such a key are left out.
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

    /// Lowers the model without its tokenizer, to plan its memory. Only vectors are read.
    ///
    /// # Errors
    /// [`ModelError`], with the unsupported, missing or contradictory part.
    pub fn shape(&self, options: &LoadOptions) -> Result<ModelShape, ModelError> {
        let (config, program, weights) = self.lower(options.max_context)?;
        Ok(ModelShape { context_length: config.context_length, program, weights })
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

    /// Lowers the model and creates its tokenizer.
    ///
    /// # Errors
    /// [`ModelError`], with the unsupported, missing or contradictory part.
    pub fn load(&self, options: &LoadOptions) -> Result<Model, ModelError> {
        let (config, program, weights) = self.lower(options.max_context)?;
        let tokenizer = self.tokenizer()?;
        let (defaults, mut stop_tokens) = match &self.source {
            Source::Gguf(gguf) => (gguf_defaults(gguf), Vec::new()),
            Source::Hf(folder) => (hf_defaults(&folder.generation), hf_stop_tokens(folder)),
        };
        stop_tokens.extend_from_slice(tokenizer.stop_tokens());
        stop_tokens.retain(|&token| (token as usize) < program.vocab);
        stop_tokens.sort_unstable();
        stop_tokens.dedup();
        let head = self.text_head()?;
        head.check(program.hidden)?;
        let (sources, tokens) = (self.chat_templates()?, self.template_tokens(&tokenizer)?);
        let mut template_problem = None;
        let mut template = |name: &str| {
            let source = sources.iter().find(|source| source.0 == name)?;
            let compiled = ChatTemplate::new(&source.1, tokens.clone());
            compiled.map_err(|problem| template_problem = Some(problem)).ok()
        };
        let (chat_template, tool_template) = (template("default"), template("tool_use"));
        Ok(Model {
            name: self.name.clone(),
            architecture: self.architecture().unwrap_or_default().to_owned(),
            description: self.description(),
            context_length: config.context_length,
            max_context: options.max_context.unwrap_or(config.context_length),
            program,
            weights,
            tokenizer: Arc::new(tokenizer),
            chat_template,
            tool_template,
            template_problem,
            defaults,
            stop_tokens,
            pooling: self.pooling()?,
            head,
            prompts: self.prompts()?,
            judge_template: self.judge_template(&sources),
            judge: None,
        })
    }

    /// Returns the pooling of embeddings, or the reason for which there are none.
    ///
    /// # Errors
    /// [`ModelError`], for files of a folder that cannot be read.
    pub fn pooling(&self) -> Result<Result<Pooling, PoolingError>, ModelError> {
        Ok(match &self.source {
            Source::Gguf(gguf) => pooling::from_gguf(&gguf.metadata, self.architecture().unwrap_or_default()),
            Source::Hf(folder) => {
                let (modules, config) = folder.pooling()?;
                let class = self.architecture().unwrap_or_default();
                pooling::from_hf(&modules, &config, class, &folder.config)
            }
        })
    }

    /// Layers after pooling.
    fn text_head(&self) -> Result<TextHead, ModelError> {
        let architecture = self.architecture().unwrap_or_default();
        match &self.source {
            Source::Gguf(gguf) => TextHead::from_gguf(&gguf.metadata, architecture, &gguf.tensors),
            Source::Hf(folder) => TextHead::from_hf(folder, architecture, &folder.pooling()?.0),
        }
    }

    /// True if the model scores pairs of texts by a classifier with one label.
    ///
    /// # Errors
    /// [`ModelError`], for a classifier that cannot be read.
    pub fn has_scores(&self) -> Result<bool, ModelError> {
        Ok(self.text_head()?.classifier.is_some_and(|classifier| classifier.labels.len() == 1))
    }

    /// True if the model judges documents by its files or by `name`: see [`Judge`].
    ///
    /// # Errors
    /// [`ModelError`], for files of a folder that cannot be read.
    pub fn is_judge(&self, name: &str) -> Result<bool, ModelError> {
        let by_name = judge::template_of([name].into_iter(), &[]).is_some();
        Ok(by_name || self.judge_template(&self.chat_templates()?).is_some())
    }

    fn judge_template(&self, templates: &[(String, String)]) -> Option<String> {
        let (by_base, by_path) = match &self.source {
            Source::Gguf(gguf) => (gguf.metadata.str("general.basename"), None),
            Source::Hf(folder) => (None, folder.config.get("_name_or_path").and_then(Value::as_str)),
        };
        let names = [Some(self.name.as_str()), by_base, by_path];
        judge::template_of(names.into_iter().flatten(), templates)
    }

    /// Texts that the model wants before texts to embed, by name. GGUF files have none.
    ///
    /// # Errors
    /// [`ModelError`], for files of a folder that cannot be read.
    pub fn prompts(&self) -> Result<Prompts, ModelError> {
        match &self.source {
            Source::Gguf(_) => Ok(Prompts::default()),
            Source::Hf(folder) => folder.prompts(),
        }
    }

    /// Compiles the chat templates as in loading, and drops them.
    ///
    /// # Errors
    /// A template that exceeds a bound, [`TemplateError::TooLarge`]. Others that do not compile only disable chats.
    pub fn check_templates(&self) -> Result<(), ModelError> {
        for (_, source) in self.chat_templates()? {
            let compiled = ChatTemplate::new(&source, TemplateTokens::default());
            if let Err(problem @ TemplateError::TooLarge(_)) = compiled {
                return Err(problem.into());
            }
        }
        Ok(())
    }

    /// The sources of all chat templates with their names, `default` for the only one; even models that cannot run may have
    /// them.
    ///
    /// # Errors
    /// [`ModelError`], for files of a folder that cannot be read.
    pub fn chat_templates(&self) -> Result<Vec<(String, String)>, ModelError> {
        match &self.source {
            Source::Gguf(gguf) => {
                const KEY: &str = "tokenizer.chat_template";
                let named =
                    gguf.metadata.iter().filter_map(|(key, value)| match (key.strip_prefix(KEY)?, value) {
                        ("", gguf::Value::String(source)) => Some(("default".to_owned(), source.clone())),
                        (name, gguf::Value::String(source)) => {
                            Some((name.strip_prefix('.')?.to_owned(), source.clone()))
                        }
                        _ => None,
                    });
                Ok(named.collect())
            }
            Source::Hf(folder) => {
                let mut named = hf_tokenizer_config(folder)?.chat_templates;
                if let Some(source) = folder.chat_template()? {
                    // The newer place.
                    named.retain(|template| template.0 != "default");
                    named.push(("default".to_owned(), source));
                }
                Ok(named)
            }
        }
    }

    /// The tokens that chat templates write.
    /// Compiles another chat template for this model.
    ///
    /// # Errors
    /// [`ModelError`], for a template that does not compile, and for files of a folder that cannot be read.
    pub fn chat_template(&self, source: &str, tokenizer: &Tokenizer) -> Result<ChatTemplate, ModelError> {
        Ok(ChatTemplate::new(source, self.template_tokens(tokenizer)?)?)
    }

    fn template_tokens(&self, tokenizer: &Tokenizer) -> Result<TemplateTokens, ModelError> {
        match &self.source {
            Source::Gguf(gguf) => {
                let token = |id: Option<u32>| id.map(|id| tokenizer.token_name(id).into_owned());
                let other = |key: &str| token(gguf.metadata.u32(&format!("tokenizer.ggml.{key}_token_id")));
                Ok(TemplateTokens {
                    bos: token(tokenizer.bos()),
                    eos: token(tokenizer.eos()),
                    pad: other("padding"),
                    unk: other("unknown"),
                })
            }
            Source::Hf(folder) => {
                let config = hf_tokenizer_config(folder)?;
                Ok(TemplateTokens {
                    bos: config.bos_token,
                    eos: config.eos_token,
                    pad: config.pad_token,
                    unk: config.unk_token,
                })
            }
        }
    }

    fn lower(&self, max_context: Option<usize>) -> Result<(Config, Program, Weights), ModelError> {
        let tensors = self.tensors();
        let resolved;
        let (config, names, tensors) = match &self.source {
            Source::Gguf(gguf) => {
                let architecture = gguf.metadata.require_str("general.architecture")?;
                let definition = Definition::from_gguf(architecture)?;
                let mut tensors = Tensors::new(definition.gguf, &WeightFormat::ALL, tensors);
                let config = arch::config_from_gguf(&gguf.metadata, &mut tensors, max_context)?;
                (config, Names::gguf(definition), tensors)
            }
            Source::Hf(folder) => {
                let config = hf_config(folder, max_context)?;
                resolved = self.usable_tensors()?;
                let formats: &[WeightFormat] = match &resolved {
                    Cow::Borrowed(_) => &arch::FLOATS,
                    Cow::Owned(_) => &WeightFormat::ALL,
                };
                let tensors = Tensors::new(config.definition.gguf, formats, &resolved);
                let names = Names::hf(config.definition, |name| tensors.has(name));
                (config, names, tensors)
            }
        };
        let max_context = max_context.unwrap_or(config.context_length);
        let (program, weights) = arch::lower(&config, &names, tensors, max_context)?;
        Ok((config, program, weights))
    }
}

/// Reads the hyperparameters of a folder. Texts of encoders are not longer than sentence-transformers reads them.
fn hf_config(folder: &HfFolder, max_context: Option<usize>) -> Result<Config, ModelError> {
    let mut config = arch::config_from_hf(&folder.config, folder.tensors.len(), max_context)?;
    config.limit_texts(folder.longest_text()?);
    Ok(config)
}

fn name_of(path: &Path) -> String {
    // `.` and `..` have no name of their own.
    let full = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let stem = if full.is_dir() { full.file_name() } else { full.file_stem() };
    stem.map_or_else(|| path.display().to_string(), |stem| stem.to_string_lossy().into_owned())
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

fn gguf_defaults(gguf: &Gguf) -> GenerationDefaults {
    let number = |key: &str| gguf.metadata.f32(&format!("general.sampling.{key}"));
    let integer = |key: &str| gguf.metadata.u32(&format!("general.sampling.{key}"));
    GenerationDefaults {
        temperature: number("temp"),
        top_k: integer("top_k"),
        top_p: number("top_p"),
        min_p: number("min_p"),
        repetition_penalty: number("penalty_repeat"),
        penalty_window: integer("penalty_last_n"),
        max_tokens: None,
    }
}

fn hf_defaults(generation: &Map<String, Value>) -> GenerationDefaults {
    let number = |key: &str| Some(generation.get(key)?.as_f64()? as f32);
    let integer = |key: &str| generation.get(key)?.as_u64()?.try_into().ok();
    let greedy = generation.get("do_sample").and_then(Value::as_bool) == Some(false);
    GenerationDefaults {
        temperature: if greedy { Some(0.0) } else { number("temperature") },
        top_k: integer("top_k"),
        top_p: number("top_p"),
        min_p: number("min_p"),
        repetition_penalty: number("repetition_penalty"),
        penalty_window: None,
        max_tokens: integer("max_new_tokens").map(|tokens: u32| tokens as usize),
    }
}

/// `eos_token_id` of both configurations: a number or a list.
fn hf_stop_tokens(folder: &HfFolder) -> Vec<u32> {
    let ids = [&folder.generation, &folder.config].into_iter().filter_map(|file| file.get("eos_token_id"));
    let ids = ids.flat_map(|value| match value {
        Value::Array(ids) => ids.as_slice(),
        single => std::slice::from_ref(single),
    });
    ids.filter_map(|id| id.as_u64()?.try_into().ok()).collect()
}

fn hf_tokenizer_config(folder: &HfFolder) -> Result<TokenizerConfig, ModelError> {
    let config = folder.tokenizer_config()?;
    Ok(config.as_deref().map(TokenizerConfig::parse).transpose()?.unwrap_or_default())
}
