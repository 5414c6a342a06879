//! The models that the server can be asked for, and how they are started.

use std::{
    fs,
    path::Path,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use paguro_backend::{Backend, KvDtype};
use paguro_engine::{Engine, EngineOptions, PageBudget};
use paguro_model::{LoadOptions, Model, ModelError, ModelFile};
use paguro_registry::{ModelRecord, Registry, RegistryError};
use paguro_server::{LoadError, Loaded, ModelEntry, ModelSource, Outside};
use serde_json::Map;

use crate::{
    cli::{BatchTokensArg, RunOnArgs, ServeOptions},
    devices,
    failure::{Failure, Outcome},
    load,
    models::{EMBEDDED, EMBEDDED_FILE, Source},
    settings::LibrarySettings,
};

/// Tokens that a sequence can have unless something else is asked for, as in `paguro run`.
const DEFAULT_CONTEXT: usize = 8192;

/// Tokens that there are pages for, at most, unless something else is asked for.
const MOST_TOKENS: usize = 65_536;

/// Models by name, and what they are run with.
#[derive(Debug)]
pub struct Shelf {
    models: Vec<(String, Source)>,
    /// What else there is; `None` without a home.
    library: Option<Arc<Registry>>,
    on: RunOnArgs,
    threads: Option<usize>,
    /// `--ctx`.
    context: Option<usize>,
    kv_bytes: Option<u64>,
    kv_dtype: KvDtype,
    /// Bytes for all models together.
    memory: u64,
    parallel: usize,
    batch_tokens: usize,
    queue: usize,
    /// `--max-queue-tokens`.
    queue_tokens: Option<usize>,
}

impl Shelf {
    /// The model in the binary, those that the settings name, and all of the library.
    ///
    /// # Errors
    /// One that is not there or not a model, two of one name.
    pub fn new(
        options: &ServeOptions,
        on: RunOnArgs,
        memory: u64,
        settings: &LibrarySettings,
        library: Option<Arc<Registry>>,
    ) -> Outcome<Self> {
        let mut models = vec![(EMBEDDED.to_owned(), Source::Embedded)];
        for name in &options.models {
            let source = Source::find(Some(name), settings)?;
            let Source::Path(path) = &source else { continue };
            // What is wrong with it is better said now than to whoever asks first.
            load::file(&source)?;
            let name = served_name(path);
            if let Some((_, other)) = models.iter().find(|(other, _)| *other == name) {
                let failure = Failure::usage(format!("two models would be served as `{name}`"));
                return Err(failure.hint(format!(
                    "{} and {}: rename one of them",
                    other.name(),
                    source.name()
                )));
            }
            models.push((name, source));
        }
        let defaults = EngineOptions::default();
        let parallel = options.parallel.unwrap_or(defaults.max_sequences);
        Ok(Self {
            models,
            library,
            on,
            threads: options.threads,
            context: options.ctx,
            kv_bytes: options.kv_memory.map(|bytes| bytes.0),
            kv_dtype: options.kv_dtype.map_or(defaults.kv_dtype, KvDtype::from),
            memory,
            parallel,
            batch_tokens: BatchTokensArg { batch_tokens: options.batch_tokens }.or_default(parallel),
            queue: options.max_queue.unwrap_or(defaults.queue_capacity),
            queue_tokens: options.max_queue_tokens,
        })
    }

    /// The names that are served besides the library's.
    pub fn names(&self) -> Vec<&str> {
        self.models.iter().map(|(name, _)| name.as_str()).collect()
    }

    /// A model that is not the library's. As in the library, upper and lower case are one, so that no name shadows another.
    fn named(&self, name: &str) -> Option<&(String, Source)> {
        let same = |other: &&(String, Source)| other.0.eq_ignore_ascii_case(name);
        self.models.iter().find(|(other, _)| other == name).or_else(|| self.models.iter().find(same))
    }

    /// A model of the library.
    fn record(&self, name: &str) -> Result<(&Registry, ModelRecord), LoadError> {
        let not_found = || LoadError::NotFound(name.to_owned());
        let library = self.library.as_deref().ok_or_else(not_found)?;
        match library.find(name) {
            Ok(record) => Ok((library, record)),
            Err(RegistryError::NotFound { .. } | RegistryError::BadName { .. }) => Err(not_found()),
            Err(error @ RegistryError::Ambiguous { .. }) => Err(LoadError::Ambiguous(error.to_string())),
            Err(error) => Err(LoadError::Failed(error.to_string())),
        }
    }

    fn source(&self, name: &str) -> Result<Source, LoadError> {
        if let Some((_, source)) = self.named(name) {
            return Ok(source.clone());
        }
        let (library, record) = self.record(name)?;
        let path = library.path(&record).map_err(|error| LoadError::Failed(error.to_string()))?;
        Ok(Source::Library { name: record.name.short(), path, parameters: Vec::new() })
    }

    fn engine_options(&self, model: &Model, backend: &dyn Backend) -> EngineOptions {
        let defaults = EngineOptions::default();
        let context = match self.context {
            Some(0) => model.context_length,
            Some(tokens) => tokens,
            None => model.context_length.min(DEFAULT_CONTEXT),
        };
        let tokens = context.saturating_mul(self.parallel).min(MOST_TOKENS.max(context));
        let page_bytes = backend.page_bytes(&model.program, defaults.block_size, self.kv_dtype) as u64;
        let blocks = tokens.div_ceil(defaults.block_size) as u64;
        let rest = self.memory.saturating_sub(model.description.file_bytes);
        let bytes = self.kv_bytes.unwrap_or(blocks.saturating_mul(page_bytes).min(rest));
        EngineOptions {
            pages: PageBudget::Bytes(bytes.saturating_add(page_bytes)),
            max_context: Some(context),
            max_sequences: self.parallel,
            max_batch_tokens: self.batch_tokens,
            queue_capacity: self.queue,
            queue_tokens: self.queue_tokens,
            kv_dtype: self.kv_dtype,
            ..defaults
        }
    }
}

impl ModelSource for Shelf {
    fn list(&self) -> Result<Vec<ModelEntry>, LoadError> {
        let mut entries =
            self.models.iter().map(|(name, source)| entry(name, source)).collect::<Result<Vec<_>, _>>()?;
        if let Some(library) = &self.library {
            let records = library.list().map_err(|error| LoadError::Failed(error.to_string()))?;
            let records = records.iter().map(recorded);
            let names: Vec<String> = self.models.iter().map(|(name, _)| name.clone()).collect();
            entries.extend(records.filter(|entry| !names.contains(&entry.name)));
        }
        Ok(entries)
    }

    fn find(&self, name: &str) -> Result<ModelEntry, LoadError> {
        match self.named(name) {
            Some((name, source)) => entry(name, source),
            None => Ok(recorded(&self.record(name)?.1)),
        }
    }

    fn open(&self, entry: &ModelEntry) -> Result<ModelFile, LoadError> {
        load::file(&self.source(&entry.name)?)
            .map_err(|failure| LoadError::Failed(failure.message().to_owned()))
    }

    fn load(&self, wanted: &ModelEntry) -> Result<Loaded, LoadError> {
        let failed = |failure: Failure| LoadError::Failed(failure.message().to_owned());
        let file = load::file(&self.source(&wanted.name)?).map_err(failed)?;
        let longest = Some(self.context.unwrap_or(DEFAULT_CONTEXT)).filter(|&tokens| tokens > 0);
        let model = file.load(&LoadOptions { max_context: longest });
        let model = model.map_err(|error| unusable(&file, &error))?;
        let device = devices::open(&self.on, self.threads).map_err(failed)?;
        let backend = device.backend.as_ref();
        let options = self.engine_options(&model, backend);
        let block_size = options.block_size;
        let page_bytes = backend.page_bytes(&model.program, block_size, options.kv_dtype) as u64;
        let engine = Engine::start(backend, &model, options);
        let engine = engine.map_err(|error| failed(Failure::from_error(&error)))?;
        let pages = engine.handle().stats().pages_total as u64;
        Ok(Loaded {
            bytes: model.description.file_bytes + pages * page_bytes,
            model: model.into(),
            engine,
            device: backend.name().to_owned(),
            block_size,
        })
    }

    fn outside(&self, name: &str) -> Option<Outside> {
        let (_, source) = self.named(name)?;
        match source {
            Source::Embedded => Some(Outside::Program { file: "tales.gguf", bytes: EMBEDDED_FILE }),
            Source::Path(path) => Some(Outside::Disk(path.clone())),
            Source::Library { .. } => None,
        }
    }
}

/// Architectures that read texts from both ends, by the beginnings of their names.
const ENCODERS: [&str; 9] = [
    "bert",
    "nomic-bert",
    "jina-bert",
    "modern-bert",
    "neo-bert",
    "eurobert",
    "t5encoder",
    "XLMRoberta",
    "Roberta",
];

/// Why a model cannot be run, now or later.
fn unusable(file: &ModelFile, error: &ModelError) -> LoadError {
    if let ModelError::Io { .. } = error {
        return LoadError::Failed(error.to_string());
    }
    let name = file.architecture().unwrap_or_default();
    let is_encoder = ENCODERS.iter().any(|encoder| name.to_lowercase().starts_with(&encoder.to_lowercase()));
    LoadError::Unsupported(match is_encoder {
        true => format!(
            "the model is an encoder (`{name}`), and encoders are not supported; embeddings come from decoder models"
        ),
        false => error.to_string(),
    })
}

/// The name that a file is served under: its own, without folder and extension.
fn served_name(path: &Path) -> String {
    let full = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let name = if full.is_dir() { full.file_name() } else { full.file_stem() };
    name.map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned())
}

fn entry(name: &str, source: &Source) -> Result<ModelEntry, LoadError> {
    let (created, bytes) = match source {
        Source::Embedded => (0, EMBEDDED_FILE.len() as u64),
        Source::Path(path) | Source::Library { path, .. } => {
            let failed = |error| LoadError::Failed(format!("cannot read {}: {error}", path.display()));
            let metadata = fs::metadata(path).map_err(failed)?;
            (metadata.modified().map_or(0, seconds), size(path, &metadata))
        }
    };
    let version = format!("{created}-{bytes}");
    Ok(ModelEntry { name: name.to_owned(), version, created, bytes, parameters: Map::new() })
}

fn recorded(record: &ModelRecord) -> ModelEntry {
    ModelEntry {
        name: record.name.short(),
        version: record.digest().to_string(),
        created: seconds(record.created_at),
        bytes: record.size(),
        parameters: record.parameters.clone(),
    }
}

/// Since 1970.
fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// Bytes of a file, or of the files directly in a folder.
fn size(path: &Path, metadata: &fs::Metadata) -> u64 {
    if !metadata.is_dir() {
        return metadata.len();
    }
    let files = fs::read_dir(path).into_iter().flatten().flatten();
    files.filter_map(|file| fs::metadata(file.path()).ok()).map(|file| file.len()).sum()
}
