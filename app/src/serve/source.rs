//! The models of a server and the start of their engines.

use std::{
    collections::{BTreeMap, HashMap},
    fs, io,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use paguro_backend::{KvDtype, Weights};
use paguro_engine::{DiskCache, Engine, EngineOptions, EnginePlan, HostMemory, PageBudget};
use paguro_kv_store::Store;
use paguro_model::{LoadOptions, ModelError, ModelFile, ModelShape};
use paguro_registry::{ModelRecord, Registry, RegistryError};
use paguro_server::{
    Alias, Details, Grant, KvEvents, LoadError, LoadPlan, Loaded, ModelEntry, ModelPreset, ModelSource,
    Outside, Presets,
};
use serde_json::Map;

use super::disk;
use crate::{
    cli::{BatchTokensArg, RunOnArgs, ServeOptions},
    devices::{self, Chosen},
    failure::{Failure, Outcome},
    load,
    models::{EMBEDDED, EMBEDDED_FILE, Source},
    presets::Preset,
    settings::LibrarySettings,
    units,
};

/// Default maximum of tokens with pages, and of the tokens of one sequence.
const MOST_TOKENS: usize = 65_536;

/// Minimum context of a load, if the model supports it.
const LEAST_TOKENS: usize = 1024;

/// Models by name, and the settings of their loads.
#[derive(Debug)]
pub struct Shelf {
    models: Vec<(String, Source)>,
    /// Name of the first model on the command line, or of the embedded one.
    first: String,
    /// The library; `None` without a home.
    library: Option<Arc<Registry>>,
    on: RunOnArgs,
    threads: Option<usize>,
    /// `--ctx`.
    context: Option<usize>,
    kv_bytes: Option<u64>,
    kv_dtype: KvDtype,
    /// Memory limit of all models together, in bytes.
    memory: u64,
    parallel: usize,
    batch_tokens: usize,
    step_time: Duration,
    queue: usize,
    /// `--max-queue-tokens`.
    queue_tokens: Option<usize>,
    /// Presets of the settings file by model name.
    presets: BTreeMap<String, Preset>,
    /// Details of opened models by name and version, so that lists open each file once.
    known: Mutex<HashMap<(String, String), Details>>,
    /// A device for plans, kept because opening one can take long.
    planner: Mutex<Option<Chosen>>,
    /// Places for K and V besides the device.
    tiers: Tiers,
}

/// Places for K and V besides the device, which all models share.
#[derive(Debug)]
pub struct Tiers {
    /// Memory of the host.
    pub host: Option<Arc<HostMemory>>,
    /// The store on disk.
    pub store: Option<Arc<Store>>,
    /// Receiver of events about them.
    pub events: Option<KvEvents>,
}

impl Shelf {
    /// Creates the table of the embedded model, the models of the settings, and the library.
    ///
    /// # Errors
    /// A model is missing or invalid, or two have one name.
    pub fn new(
        options: &ServeOptions,
        on: RunOnArgs,
        memory: u64,
        settings: &LibrarySettings,
        library: Option<Arc<Registry>>,
        tiers: Tiers,
    ) -> Outcome<Self> {
        let mut models = vec![(EMBEDDED.to_owned(), Source::Embedded)];
        let mut first = None;
        for name in options.models.iter().chain(&options.more_models) {
            let source = Source::find(Some(name), settings)?;
            let Source::Path(path) = &source else {
                first.get_or_insert_with(|| name.clone());
                continue;
            };
            // Errors of the model are reported at the start instead of at the first request.
            load::file(&source)?;
            let name = served_name(path);
            first.get_or_insert_with(|| name.clone());
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
            first: first.unwrap_or_else(|| EMBEDDED.to_owned()),
            library,
            on,
            threads: options.threads,
            context: options.ctx,
            kv_bytes: options.kv_memory.map(|bytes| bytes.0),
            kv_dtype: options.kv_dtype.map_or(defaults.kv_dtype, KvDtype::from),
            memory,
            parallel,
            step_time: options.step_time.map_or(defaults.step_time, |time| time.0),
            batch_tokens: BatchTokensArg { batch_tokens: options.batch_tokens }.or_default(parallel),
            queue: options.max_queue.unwrap_or(defaults.queue_capacity),
            queue_tokens: options.max_queue_tokens,
            presets: options.presets.clone(),
            known: Mutex::default(),
            planner: Mutex::default(),
            tiers,
        })
    }

    /// Completes aliases without a model with the first model on the command line, or else the embedded one.
    ///
    /// # Errors
    /// An alias is the name of a served model.
    pub fn aliases(&self, aliases: &[Alias]) -> Outcome<Vec<Alias>> {
        let complete = |alias: &Alias| {
            if self.named(&alias.pattern).is_some() {
                let failure =
                    Failure::usage(format!("--alias {0}: a model is served as `{0}`", alias.pattern));
                return Err(failure.hint("choose another name"));
            }
            let model = alias.model.clone().unwrap_or_else(|| self.first.clone());
            Ok(Alias { model: Some(model), ..alias.clone() })
        };
        let of_preset = |(model, preset): (&String, &Preset)| {
            let alias = |name: &String| Alias { pattern: name.clone(), model: Some(model.clone()) };
            preset.aliases.iter().map(alias).collect::<Vec<_>>()
        };
        let of_presets = self.presets.iter().flat_map(of_preset).collect::<Vec<_>>();
        aliases.iter().chain(&of_presets).map(complete).collect()
    }

    /// Returns a model outside of the library. Case is ignored, as in the library, so that no name hides another.
    fn named(&self, name: &str) -> Option<&(String, Source)> {
        let same = |other: &&(String, Source)| other.0.eq_ignore_ascii_case(name);
        self.models.iter().find(|(other, _)| other == name).or_else(|| self.models.iter().find(same))
    }

    /// Returns a model of the library.
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

    /// Returns the preset of a model in the settings file.
    fn own_preset(&self, name: &str) -> Preset {
        let same = |(other, _): &(&String, &Preset)| other.eq_ignore_ascii_case(name);
        self.presets.iter().find(same).map(|(_, preset)| preset.clone()).unwrap_or_default()
    }

    /// Returns the preset of a model: that of the settings file, completed by the library's.
    fn preset(&self, name: &str) -> Result<Preset, LoadError> {
        let own = self.own_preset(name);
        if self.named(name).is_some() {
            return Ok(own);
        }
        let (_, record) = self.record(name)?;
        Ok(own.or(Preset::of(&record).map_err(LoadError::Failed)?))
    }

    /// Returns the maximum tokens of a sequence for a model trained for `trained` tokens.
    fn wanted(&self, preset: &Preset, trained: usize, asked: Option<usize>) -> usize {
        let own = match preset.ctx.or(self.context) {
            Some(0) => trained,
            Some(tokens) => tokens,
            None => trained.min(MOST_TOKENS),
        };
        asked.map_or(own, |asked| own.max(asked.min(trained)))
    }

    fn engine_options(&self, preset: &Preset, context: usize, pages: PageBudget) -> EngineOptions {
        EngineOptions {
            pages,
            max_context: Some(context),
            max_sequences: self.parallel,
            max_batch_tokens: self.batch_tokens,
            step_time: self.step_time,
            queue_capacity: self.queue,
            queue_tokens: self.queue_tokens,
            kv_dtype: preset.kv_dtype.map_or(self.kv_dtype, KvDtype::from),
            ..EngineOptions::default()
        }
    }

    /// Files of a model and their digest, if there is a store that needs it.
    fn weights(&self, source: &Source, file: &ModelFile) -> Option<disk::Weights> {
        let store = self.tiers.store.as_ref()?;
        match disk::Weights::of(store.dir(), source, file) {
            Ok(weights) => Some(weights),
            Err(error) => {
                tracing::warn!(model = source.name(), "no cache on disk for this model: {error}");
                None
            }
        }
    }

    /// Returns the memory and limits of an engine for sequences of `context` tokens.
    fn engine_plan(
        &self,
        file: &ModelFile,
        preset: &Preset,
        context: usize,
        pages: PageBudget,
    ) -> Result<EnginePlan, LoadError> {
        let shape = file.shape(&LoadOptions { max_context: Some(context) });
        let ModelShape { program, weights, .. } = shape.map_err(|error| unusable(&error))?;
        let options = self.engine_options(preset, context, pages);
        let mut planner = self.planner.lock().unwrap_or_else(PoisonError::into_inner);
        let device = match &mut *planner {
            Some(device) => device,
            none => none.insert(devices::open(&self.on, self.threads, &|_| ()).map_err(failed)?),
        };
        let plan = Engine::plan(device.backend.as_ref(), &program, &weights, context, &options);
        plan.map_err(|error| failed(Failure::from_error(&error)))
    }

    /// Returns true if models are planned for the CPU.
    fn plans_for_cpu(&self) -> bool {
        let planner = self.planner.lock().unwrap_or_else(PoisonError::into_inner);
        planner.as_ref().is_none_or(|device| device.backend.name() == "cpu")
    }

    fn load_plan(
        &self,
        file: &ModelFile,
        preset: &Preset,
        asked: Option<usize>,
    ) -> Result<LoadPlan, LoadError> {
        let context = self.wanted(preset, file.context_length().unwrap_or(MOST_TOKENS), asked).max(1);
        let tokens = context.saturating_mul(self.parallel).min(MOST_TOKENS.max(context));
        let plan = self.engine_plan(file, preset, context, PageBudget::Tokens(tokens))?;
        // Exactly the bytes of the settings, if given.
        let given = self.kv_bytes.map(|bytes| bytes.saturating_add(plan.page_bytes));
        let enough = plan.kv_for(context);
        Ok(LoadPlan {
            weights: plan.memory.weights,
            buffers: plan.memory.buffers.saturating_add(plan.memory.states),
            kv_least: given.unwrap_or_else(|| plan.kv_for(context.min(LEAST_TOKENS))),
            kv_enough: given.unwrap_or(enough),
            kv_most: given.unwrap_or_else(|| plan.memory.kv.max(enough)),
            context,
        })
    }

    /// Returns the properties from a file's header, and the reason for which the model cannot run, if there is one.
    fn details(&self, file: &ModelFile, preset: &Preset) -> Details {
        let description = file.description();
        let (plan, context, problem) = match self.load_plan(file, preset, None) {
            Ok(plan) => (Some(plan), Some(self.context_of(&plan, file, preset)), None),
            Err(error) => (None, None, Some(error.to_string())),
        };
        Details {
            format: if file.format().starts_with("GGUF") { "gguf" } else { "safetensors" },
            architecture: file.architecture().map(str::to_owned),
            parameters: description.parameters,
            quantization: description.quantization,
            context,
            sequences: self.parallel,
            plan,
            problem,
        }
    }

    /// Returns the maximum tokens of a sequence if the model gets all memory.
    fn context_of(&self, plan: &LoadPlan, file: &ModelFile, preset: &Preset) -> usize {
        let kv = self.memory.saturating_sub(plan.with(0)).min(plan.kv_most);
        if kv >= plan.kv_enough && self.kv_bytes.is_none() {
            return plan.context;
        }
        let engine = self.engine_plan(file, preset, plan.context, PageBudget::Bytes(kv));
        engine.map_or(plan.context, |engine| engine.max_context)
    }

    /// Returns cached [`Shelf::details`]. Files that could not be opened are opened again.
    fn known_details(
        &self,
        entry: &ModelEntry,
        preset: &Preset,
        open: impl FnOnce() -> Result<ModelFile, String>,
    ) -> Details {
        let key = (entry.name.clone(), entry.version.clone());
        let known = || self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(details) = known().get(&key) {
            return details.clone();
        }
        let details = match open() {
            Ok(file) => self.details(&file, preset),
            Err(problem) => return lost(problem),
        };
        let mut known = known();
        // A name has one version at a time.
        known.retain(|(name, _), _| *name != entry.name);
        known.insert(key, details.clone());
        details
    }

    /// Returns the entry of a model outside of the library.
    fn own_entry(&self, name: &str, source: &Source) -> ModelEntry {
        let preset = self.own_preset(name);
        let entry = |version: String, created, bytes, details| ModelEntry {
            name: name.to_owned(),
            version: preset.version(version),
            created,
            bytes,
            parameters: preset.parameters(Map::new()),
            chat_template: preset.chat_template.as_deref().map(Arc::from),
            details,
        };
        match Identity::of(source) {
            Ok(Identity { version, created, bytes }) => {
                let mut entry = entry(version, created, bytes, Details::default());
                let open = || load::file(source).map_err(|failure| failure.message().to_owned());
                entry.details = self.known_details(&entry, &preset, open);
                entry
            }
            Err(error) => {
                let problem = format!("cannot read {}: {error}", source.name());
                entry("lost".to_owned(), 0, 0, lost(problem))
            }
        }
    }

    /// Returns the entry of a model of the library, from its record and its file.
    fn recorded(&self, library: &Registry, record: &ModelRecord) -> ModelEntry {
        let name = record.name.short();
        let stored = Preset::of(record);
        let preset = self.own_preset(&name).or(stored.clone().unwrap_or_default());
        let mut entry = ModelEntry {
            version: preset.version(record.digest().to_string()),
            created: seconds(record.created_at),
            bytes: record.size(),
            parameters: preset.parameters(record.parameters.clone()),
            chat_template: preset.chat_template.as_deref().map(Arc::from),
            details: Details::default(),
            name,
        };
        let missing = record.files.iter().filter_map(|file| file.location.as_deref()).find_map(|path| {
            let error = fs::metadata(path).err()?;
            Some(format!("cannot read {}: {error}", path.display()))
        });
        let open = || {
            let path = library.path(record).map_err(|error| error.to_string())?;
            ModelFile::open(&path).map_err(|error| error.to_string())
        };
        let mut details = match missing.or(stored.err()) {
            Some(problem) => lost(problem),
            None => self.known_details(&entry, &preset, open),
        };
        details.format = record.format.name();
        details.architecture = record.details.architecture.clone();
        details.parameters = record.details.parameters;
        details.quantization = record.details.quantization.clone();
        entry.details = details;
        entry
    }
}

impl ModelSource for Shelf {
    fn list(&self) -> Result<Vec<ModelEntry>, LoadError> {
        let mut entries: Vec<_> =
            self.models.iter().map(|(name, source)| self.own_entry(name, source)).collect();
        if let Some(library) = &self.library {
            // A library that was damaged meanwhile does not affect other models.
            let records = library.list().unwrap_or_else(|error| {
                tracing::error!("the models of the library are not listed: {error}");
                Vec::new()
            });
            let is_own = |name: &str| self.models.iter().any(|(own, _)| own == name);
            let records = records.iter().filter(|record| !is_own(&record.name.short()));
            for record in records {
                let entry = self.recorded(library, record);
                let aliases: Vec<_> = record.aliases().filter(|alias| !is_own(alias)).collect();
                entries.extend(
                    aliases.iter().map(|&alias| ModelEntry { name: alias.to_owned(), ..entry.clone() }),
                );
                entries.push(entry);
            }
        }
        Ok(entries)
    }

    fn find(&self, name: &str) -> Result<ModelEntry, LoadError> {
        match self.named(name) {
            Some((name, source)) => Ok(self.own_entry(name, source)),
            None => {
                let (library, record) = self.record(name)?;
                Ok(self.recorded(library, &record))
            }
        }
    }

    fn open(&self, entry: &ModelEntry) -> Result<ModelFile, LoadError> {
        load::file(&self.source(&entry.name)?).map_err(failed)
    }

    fn plan(&self, entry: &ModelEntry, context: Option<usize>) -> Result<LoadPlan, LoadError> {
        self.load_plan(&self.open(entry)?, &self.preset(&entry.name)?, context)
    }

    fn load(&self, wanted: &ModelEntry, grant: Grant) -> Result<Loaded, LoadError> {
        let (source, preset) = (self.source(&wanted.name)?, self.preset(&wanted.name)?);
        let mut file = load::file(&source).map_err(failed)?;
        let weights = self.weights(&source, &file);
        if weights.is_some() {
            // Opened after its files were looked at: if they are still the same at the end, the digest is theirs.
            file = load::file(&source).map_err(failed)?;
        }
        let pages = PageBudget::Bytes(grant.kv);
        // The number of pages limits the context, which determines windows and RoPE.
        let context = self.engine_plan(&file, &preset, grant.context, pages)?.max_context;
        if context < grant.context {
            let (model, wanted) = (&wanted.name, grant.context);
            tracing::info!(model, wanted, context, "memory for K and V bounds the context");
        }
        let model = file.load(&LoadOptions { max_context: Some(context) });
        let mut model = model.map_err(|error| unusable(&error))?;
        if let Some(source) = &preset.chat_template {
            let template = file.chat_template(source, &model.tokenizer);
            model.chat_template = Some(template.map_err(|error| unusable(&error))?);
            (model.tool_template, model.template_problem) = (None, None);
        }
        let mut options = self.engine_options(&preset, context, pages);
        options.host.clone_from(&self.tiers.host);
        options.events = self.tiers.events.as_ref().map(|events| events.of(&wanted.name));
        options.disk = self.tiers.store.as_ref().zip(weights.as_ref()).map(|(store, it)| {
            DiskCache::new(store.clone(), &wanted.name, it.digest.as_ref().map(|id| &id[..]))
        });
        let block_size = options.block_size;
        let notice = |line: &str| tracing::warn!(model = wanted.name, "{line}");
        let start = |device: Chosen| {
            let backend = device.backend.as_ref();
            let plan = Engine::plan(backend, &model.program, &model.weights, context, &options);
            let memory = plan.map_err(|error| Failure::from_error(&error))?.memory;
            let (needed, free) = (memory.total(), backend.capacity().bytes_free);
            // The memory limit was computed at the start, and other programs use the device's memory.
            if needed > free && !self.plans_for_cpu() {
                let [needed, free] = [needed, free].map(units::bytes);
                let device = backend.name();
                return Err(Failure::new(format!(
                    "the model needs {needed}, but the {device} has {free} free"
                )));
            }
            let engine = Engine::start(backend, &model, options.clone());
            let engine = engine.map_err(|error| Failure::from_error(&error))?;
            Ok((engine, memory, backend.name().to_owned()))
        };
        let started = devices::with(&self.on, self.threads, &notice, start);
        let (engine, memory, device) = started.map_err(failed)?;
        if let Err(problem) = model.find_judge(&wanted.name) {
            tracing::warn!(model = &*wanted.name, problem, "cannot rerank");
        }
        // The device has its own copy. These handles would keep the file open and its disk space in use.
        model.weights = Weights::default();
        let is_own = !matches!(source, Source::Library { .. });
        let is_other = |now: Identity| preset.version(now.version) != wanted.version;
        let is_current = weights.as_ref().is_none_or(disk::Weights::is_current);
        if !is_current || (is_own && Identity::of(&source).is_ok_and(is_other)) {
            let name = source.name();
            return Err(LoadError::Failed(format!("{name} was changed while it was loaded; try again")));
        }
        if let (Some(store), Some(weights)) = (&self.tiers.store, weights) {
            let _ = weights.read_later(store.dir(), engine.handle(), &wanted.name);
        }
        Ok(Loaded { model: model.into(), engine, device, memory, block_size })
    }

    fn preset(&self, name: &str) -> Result<Presets, LoadError> {
        let stored = match self.named(name) {
            Some(_) => None,
            None => Some(Preset::of(&self.record(name)?.1).map_err(LoadError::Failed)?),
        };
        let settings = self.own_preset(name);
        Ok(Presets { stored: stored.map(ModelPreset::from), settings: settings.into() })
    }

    fn set_preset(&self, name: &str, new: ModelPreset) -> Result<(), LoadError> {
        if self.named(name).is_some() {
            return Err(LoadError::Invalid(format!(
                "`{name}` is not in the library, which keeps the defaults of models; the file with the \
                 server's settings can have them, as `[preset.{name}]`"
            )));
        }
        let (library, record) = self.record(name)?;
        // A preset that cannot be read is replaced; aliases are changed elsewhere.
        let aliases = Preset::of(&record).unwrap_or_default().aliases;
        let preset = Preset { aliases, ..Preset::try_from(new).map_err(LoadError::Invalid)? };
        preset.check().map_err(|failure| LoadError::Invalid(failure.message().to_owned()))?;
        let stored = library.set_extra(&record.name.to_string(), preset.to_record());
        stored.map(drop).map_err(|error| LoadError::Failed(error.to_string()))
    }

    fn forget(&self, name: &str) {
        if let Some(store) = &self.tiers.store {
            store.remove_model(name);
        }
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

/// Returns the reason for which a model cannot run.
fn unusable(error: &ModelError) -> LoadError {
    match error {
        ModelError::Io { .. } | ModelError::Unreadable { .. } => LoadError::Failed(error.to_string()),
        _ => LoadError::Unsupported(error.to_string()),
    }
}

/// Returns the name under which a file is served: its own without folder and extension.
fn served_name(path: &Path) -> String {
    let full = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let name = if full.is_dir() { full.file_name() } else { full.file_stem() };
    name.map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned())
}

/// Identity of a model's files, which detects replaced files.
struct Identity {
    version: String,
    /// Time of the last change, in seconds since 1970.
    created: u64,
    bytes: u64,
}

impl Identity {
    fn of(source: &Source) -> io::Result<Self> {
        let (modified, bytes, node) = match source {
            Source::Embedded => (UNIX_EPOCH, EMBEDDED_FILE.len() as u64, 0),
            Source::Path(path) | Source::Library { path, .. } => {
                let metadata = fs::metadata(path)?;
                let files = newest(path, &metadata);
                (files.0, files.1, node(&metadata))
            }
        };
        let nanoseconds = modified.duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos());
        Ok(Self { version: format!("{nanoseconds}-{bytes}-{node}"), created: seconds(modified), bytes })
    }
}

/// Returns the inode number of a file.
#[cfg(unix)]
fn node(metadata: &fs::Metadata) -> u64 {
    std::os::unix::fs::MetadataExt::ino(metadata)
}

/// Returns 0: there are no inode numbers.
#[cfg(not(unix))]
fn node(_: &fs::Metadata) -> u64 {
    0
}

/// Returns the details of a model that cannot be opened.
fn lost(problem: String) -> Details {
    Details { problem: Some(problem), ..Details::default() }
}

fn failed(failure: Failure) -> LoadError {
    LoadError::Failed(failure.message().to_owned())
}

/// Returns the seconds since 1970.
fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// Returns the time of the last change of a file, or of the files directly in a folder, and the bytes of all of them.
fn newest(path: &Path, metadata: &fs::Metadata) -> (SystemTime, u64) {
    let modified = |metadata: &fs::Metadata| metadata.modified().unwrap_or(UNIX_EPOCH);
    if !metadata.is_dir() {
        return (modified(metadata), metadata.len());
    }
    let files = fs::read_dir(path).into_iter().flatten().flatten();
    let files = files.filter_map(|file| fs::metadata(file.path()).ok());
    files.fold((modified(metadata), 0), |(newest, bytes), file| {
        (newest.max(modified(&file)), bytes + file.len())
    })
}
