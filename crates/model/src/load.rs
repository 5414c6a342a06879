//! Opening of a model: a file or folder, and its conversion to a [`Model`].

mod defaults;
mod describe;
mod model;
mod retrieval;
mod templates;

use std::{
    borrow::Cow,
    path::{Path, PathBuf},
    sync::Arc,
};

use paguro_backend::{ByteSource, Program, WeightFormat};

use self::defaults::{gguf_defaults, hf_defaults, hf_stop_tokens};
pub use self::{
    defaults::GenerationDefaults,
    describe::{Conversion, Description, MetadataEntry},
    model::{LoadOptions, Model, ModelShape},
};
use crate::{
    arch::{self, Config, Definition, Linears, Lowered, Names, Naming, Tensors},
    chat::ChatTemplate,
    error::ModelError,
    gguf::{Contents, Gguf},
    hf::{self, HfFolder, quantized},
    tensor::Tensor,
    tokenizer::Tokenizer,
    vision::{self, Vision},
};

/// A model's file or folder, opened and checked but not lowered: all that `inspect` shows can be had even of models
/// that are not supported.
#[derive(Debug)]
pub struct ModelFile {
    name: String,
    source: Source,
    /// The vision tower of a GGUF file.
    projector: Option<Box<Gguf>>,
    /// The assistant that drafts for it.
    assistant: Option<Box<ModelFile>>,
    /// All files with weights.
    files: Vec<PathBuf>,
    /// True if a tower is ignored.
    text_only: bool,
}

#[derive(Debug)]
enum Source {
    Gguf(Box<Gguf>),
    Hf(Box<HfFolder>),
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
        let is_part_of_folder =
            |name: &str| name.ends_with(".safetensors") || ["config.json", hf::TORCH_WEIGHTS].contains(&name);
        let file_name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let folder = match path.parent() {
            _ if metadata.is_dir() => Some(path),
            Some(parent) if is_part_of_folder(file_name) => Some(parent),
            _ => None,
        };
        if let Some(folder) = folder {
            let source = Source::Hf(Box::new(HfFolder::open(folder)?));
            return Ok(Self::new(name_of(folder), source));
        }
        let gguf = Gguf::open(path)?;
        let name = gguf.metadata.str("general.name").map_or_else(|| name_of(path), str::to_owned);
        Ok(Self::new(name, Source::Gguf(Box::new(gguf))))
    }

    fn new(name: String, source: Source) -> Self {
        let files = match &source {
            Source::Gguf(gguf) => gguf.files.clone(),
            Source::Hf(folder) => folder.files.clone(),
        };
        Self { name, source, projector: None, assistant: None, files, text_only: false }
    }

    /// Adds the vision tower of a GGUF file: an mmproj file.
    ///
    /// # Errors
    /// [`ModelError`], if it is none, or if the model is a folder, which has its tower.
    pub fn with_projector(mut self, path: &Path) -> Result<Self, ModelError> {
        if matches!(self.source, Source::Hf(_)) {
            let problem = "a folder of Hugging Face has its vision tower in its own files".to_owned();
            return Err(ModelError::NotAModel { path: path.to_owned(), problem });
        }
        let gguf = Gguf::open(path)?;
        let kind = gguf.metadata.str("general.architecture").unwrap_or_default();
        if kind != "clip" {
            let problem =
                format!("it is a file of architecture `{kind}`, no projector (mmproj, architecture `clip`)");
            return Err(ModelError::NotAModel { path: path.to_owned(), problem });
        }
        self.files.extend(gguf.files.iter().cloned());
        self.projector = Some(Box::new(gguf));
        Ok(self)
    }

    /// Sets the assistant that drafts for the model. Only vectors and tokens are read, to check that it fits.
    ///
    /// # Errors
    /// [`ModelError`], if it is none, that of another model, or has other tokens. The model has no assistant then.
    pub fn set_assistant(&mut self, path: &Path) -> Result<(), ModelError> {
        self.assistant = None;
        let assistant = Self::open(path)?;
        if !assistant.is_assistant() {
            let kind = assistant.architecture().unwrap_or_default();
            let problem = format!("it is a model of architecture `{kind}` and no assistant");
            return Err(ModelError::NotAModel { path: path.to_owned(), problem });
        }
        self.assistant = Some(Box::new(assistant));
        let fits = self.lower(None).and_then(|_| self.compare_tokens());
        if fits.is_err() {
            self.assistant = None;
        }
        fits
    }

    /// Compares the tokens of the assistant with those of the model. An assistant without a tokenizer has those of its model.
    fn compare_tokens(&self) -> Result<(), ModelError> {
        let Some(assistant) = &self.assistant else { return Ok(()) };
        let may_differ = match (&assistant.source, &self.source) {
            (Source::Gguf(own), Source::Gguf(model)) => {
                let [own, model] = [own, model].map(|gguf| Tokenizer::listed_in(&gguf.metadata));
                // Comparing lists takes a small part of the time of reading tokenizers.
                own.is_some() && own != model
            }
            (Source::Gguf(own), Source::Hf(_)) => Tokenizer::listed_in(&own.metadata).is_some(),
            (Source::Hf(folder), _) => folder.has_tokenizer(),
        };
        if !may_differ {
            return Ok(());
        }
        match self.tokenizer()?.difference(&assistant.tokenizer()?) {
            None => Ok(()),
            Some(problem) => {
                let (assistant, model) = (assistant.name.clone(), self.name.clone());
                Err(ModelError::Assistant { assistant, model, problem })
            }
        }
    }

    /// Returns the assistant that drafts for the model.
    pub fn assistant(&self) -> Option<&Self> {
        self.assistant.as_deref()
    }

    /// Returns true for an assistant, which drafts for another model and is none by itself.
    pub fn is_assistant(&self) -> bool {
        self.definition().is_some_and(|definition| definition.drafts_for.is_some())
    }

    /// Returns true if assistants may draft for the model.
    pub fn may_have_assistant(&self) -> bool {
        self.definition().is_some_and(Definition::may_have_assistant)
    }

    /// Returns the definition of a supported architecture.
    fn definition(&self) -> Option<&'static Definition> {
        let name = self.architecture()?;
        match &self.source {
            Source::Gguf(_) => Definition::from_gguf(name).ok(),
            Source::Hf(_) => Definition::from_hf(name).ok(),
        }
    }

    /// Ignores the vision tower.
    #[must_use]
    pub fn text_only(mut self) -> Self {
        self.text_only = true;
        self
    }

    /// Returns what an mmproj file of a folder's vision tower would contain; `None` if the folder has none. That of a GGUF file is a file
    /// of its own.
    ///
    /// # Errors
    /// [`ModelError`], for towers that cannot be written.
    pub fn projector_contents(&self) -> Result<Option<Contents>, ModelError> {
        match &self.source {
            Source::Gguf(_) => Ok(None),
            Source::Hf(folder) => vision::projector_contents(folder, &self.usable_tensors()?, &self.name),
        }
    }

    /// Returns the type of the projector in an mmproj file.
    pub fn projector(&self) -> Option<&str> {
        vision::projector_type(self.projector.as_deref()?)
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
        Ok(Self::new(name, Source::Gguf(Box::new(gguf))))
    }

    /// Returns the name in the metadata, or else the file's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the kind of file: `GGUF v3`.
    pub fn format(&self) -> String {
        match &self.source {
            Source::Gguf(gguf) => format!("GGUF v{}", gguf.version),
            Source::Hf(_) => "Hugging Face folder".to_owned(),
        }
    }

    /// Returns the architecture as the file names it, supported or not.
    pub fn architecture(&self) -> Option<&str> {
        match &self.source {
            Source::Gguf(gguf) => gguf.metadata.str("general.architecture"),
            Source::Hf(folder) => folder.config.get("architectures")?.get(0)?.as_str(),
        }
    }

    /// Returns true if rows attend in both directions, so that the model writes no text.
    pub fn is_encoder(&self) -> bool {
        let name = self.architecture().unwrap_or_default();
        let is_causal = match &self.source {
            Source::Gguf(gguf) => gguf.metadata.bool(&format!("{name}.attention.causal")),
            Source::Hf(_) => None,
        };
        is_causal == Some(false) || self.definition().is_some_and(Definition::is_encoder)
    }

    /// Returns the files with weights; none for a model in memory.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// Returns all tensors.
    pub fn tensors(&self) -> &[Tensor] {
        match &self.source {
            Source::Gguf(gguf) => &gguf.tensors,
            Source::Hf(folder) => &folder.tensors,
        }
    }

    /// Returns all tensors as architectures use them: quantized matrices of a folder are in a format that backends
    /// compute with, converted while they are read.
    ///
    /// # Errors
    /// [`ModelError`] for a quantization that is not supported, or tensors that do not fit together.
    pub fn usable_tensors(&self) -> Result<Cow<'_, [Tensor]>, ModelError> {
        match &self.source {
            Source::Gguf(gguf) => Ok(Cow::Borrowed(&gguf.tensors)),
            Source::Hf(folder) => quantized::resolve(&folder.config, &folder.tensors),
        }
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

    /// Lowers the model without its tokenizer, to plan its memory. Only vectors are read.
    ///
    /// # Errors
    /// [`ModelError`], with the unsupported, missing or contradictory part.
    pub fn shape(&self, options: &LoadOptions) -> Result<ModelShape, ModelError> {
        let (config, Lowered { mut program, weights, mtp }) = self.lower(options.max_context)?;
        let (vision, _) = self.usable_vision(&mut program, None)?;
        Ok(ModelShape {
            context_length: config.context_length,
            program,
            weights,
            mtp: mtp.map(Arc::new),
            vision: vision.map(Arc::new),
        })
    }

    /// Reads the vision tower, if there is one. One in a folder that cannot be used, and that nobody has asked for, is a problem of pictures
    /// only.
    fn usable_vision(
        &self,
        program: &mut Program,
        tokenizer: Option<&Tokenizer>,
    ) -> Result<(Option<Vision>, Option<String>), ModelError> {
        let text = program.clone();
        match self.vision(program, tokenizer) {
            Ok(vision) => Ok((vision, None)),
            Err(error) if self.projector.is_some() => Err(error),
            Err(error) => {
                *program = text;
                Ok((None, Some(error.to_string())))
            }
        }
    }

    /// Reads the vision tower, if there is one, and changes the text model's program for it.
    fn vision(
        &self,
        program: &mut Program,
        tokenizer: Option<&Tokenizer>,
    ) -> Result<Option<Vision>, ModelError> {
        let has_tower = self.projector.is_some() || matches!(self.source, Source::Hf(_));
        if self.text_only || program.bidirectional || !has_tower {
            return Ok(None);
        }
        match (&self.source, &self.projector) {
            (Source::Gguf(gguf), Some(projector)) => {
                let own;
                let tokenizer = match tokenizer {
                    Some(tokenizer) => tokenizer,
                    None => {
                        own = self.tokenizer()?;
                        &own
                    }
                };
                Vision::from_gguf(projector, gguf, program, tokenizer).map(Some)
            }
            (Source::Hf(folder), _) if Vision::is_in(folder) => {
                let own;
                let tokenizer = match tokenizer {
                    Some(tokenizer) => tokenizer,
                    None => {
                        own = self.tokenizer()?;
                        &own
                    }
                };
                Vision::from_hf(folder, &self.usable_tensors()?, program, tokenizer)
            }
            _ => Ok(None),
        }
    }

    /// Lowers the model and creates its tokenizer.
    ///
    /// # Errors
    /// [`ModelError`], with the unsupported, missing or contradictory part.
    pub fn load(&self, options: &LoadOptions) -> Result<Model, ModelError> {
        let (config, Lowered { mut program, weights, mtp }) = self.lower(options.max_context)?;
        let tokenizer = self.tokenizer()?;
        let (vision, vision_problem) = self.usable_vision(&mut program, Some(&tokenizer))?;
        let (defaults, mut stop_tokens) = match &self.source {
            Source::Gguf(gguf) => (gguf_defaults(gguf), Vec::new()),
            Source::Hf(folder) => (hf_defaults(&folder.generation), hf_stop_tokens(folder)),
        };
        stop_tokens.extend_from_slice(tokenizer.stop_tokens());
        stop_tokens.retain(|&token| (token as usize) < program.vocab);
        stop_tokens.sort_unstable();
        stop_tokens.dedup();
        let mut head = self.text_head()?;
        head.check(program.hidden)?;
        head.sparse.iter_mut().for_each(|sparse| sparse.find_unused(&tokenizer));
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
            linears: Linears::new(&config, self.naming(), &program, &weights),
            program,
            weights,
            mtp: mtp.map(Arc::new),
            vision: vision.map(Arc::new),
            vision_problem,
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

    /// Returns the names and arrangement of tensors in its files.
    fn naming(&self) -> Naming {
        match &self.source {
            Source::Gguf(_) => Naming::Gguf,
            Source::Hf(_) => Naming::Hf,
        }
    }

    /// Lowers the model with its assistant, and returns its weights.
    fn lower(&self, max_context: Option<usize>) -> Result<(Config, Lowered), ModelError> {
        let (config, mut lowered) = self.with_parts(max_context, |config, names, tensors| {
            if config.definition.drafts_for.is_some() {
                return Err(ModelError::AssistantAlone(self.name.clone()));
            }
            let max_context = max_context.unwrap_or(config.context_length);
            let lowered = arch::lower(&config, &names, tensors, max_context)?;
            Ok((config, lowered))
        })?;
        if let Some(assistant) = &self.assistant {
            let head = assistant.with_parts(max_context, |own, names, tensors| {
                arch::lower_assistant(&own, &names, tensors, (&config, &lowered))
            });
            let head = head.map_err(|error| match error {
                ModelError::Config(problem) => {
                    let (assistant, model) = (assistant.name.clone(), self.name.clone());
                    ModelError::Assistant { assistant, model, problem }
                }
                other => other,
            })?;
            lowered.mtp = Some(head);
        }
        Ok((config, lowered))
    }

    /// Calls a function with the hyperparameters, the names of tensors and the tensors.
    fn with_parts<T>(
        &self,
        max_context: Option<usize>,
        then: impl FnOnce(Config, Names, Tensors<'_>) -> Result<T, ModelError>,
    ) -> Result<T, ModelError> {
        match &self.source {
            Source::Gguf(gguf) => {
                let architecture = gguf.metadata.require_str("general.architecture")?;
                let definition = Definition::from_gguf(architecture)?;
                let mut tensors = Tensors::new(definition.gguf, &WeightFormat::ALL, self.tensors());
                let config = arch::config_from_gguf(&gguf.metadata, &mut tensors, max_context)?;
                then(config, Names::gguf(definition), tensors)
            }
            Source::Hf(folder) => {
                let config = hf_config(folder, max_context)?;
                let resolved = self.usable_tensors()?;
                let formats: &[WeightFormat] = match &resolved {
                    Cow::Borrowed(_) => &arch::FLOATS,
                    Cow::Owned(_) => &WeightFormat::ALL,
                };
                let tensors = Tensors::new(config.definition.gguf, formats, &resolved);
                let names = Names::hf(config.definition, |name| tensors.has(name));
                then(config, names, tensors)
            }
        }
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
