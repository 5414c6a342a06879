//! The models of a server, by name: the embedded one, those of the settings, and the library.
//!
//! [`adapters`] reads adapters, [`plan`] computes memory and limits of a load, [`replicas`] starts several engines, [`source`] implements the server's `ModelSource`, and [`identity`]
//! detects files that were replaced.

mod adapters;
mod identity;
mod named;
mod plan;
mod replicas;
mod source;

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use paguro_backend::KvDtype;
use paguro_engine::{AdapterLimits, EngineOptions, HostMemory};
use paguro_kv_store::Store;
use paguro_library::{Library, LibraryError, ModelRecord, plain_name};
use paguro_model::{ModelError, ModelFile};
use paguro_server::{Alias, Details, KvEvents, LoadError, ModelEntry};
use serde_json::Map;

use self::{
    identity::{Identity, seconds},
    named::Named,
};
use super::disk;
use crate::{
    assistant,
    cli::{BatchTokensArg, RunOnArgs, ServeOptions, Speculate},
    devices::{Chosen, Devices},
    failure::{Failure, Outcome},
    load,
    models::{EMBEDDED, Source},
    presets::Preset,
    projector::Projector,
    settings::LibrarySettings,
};

/// Models by name, and the settings of their loads.
#[derive(Debug)]
pub struct ServedModels {
    models: Vec<(String, Source)>,
    /// Name of the first model on the command line, or of the embedded one.
    first: String,
    /// The library; `None` without a home.
    library: Option<Arc<Library>>,
    devices: Devices,
    on: RunOnArgs,
    threads: Option<usize>,
    /// `--ctx`.
    context: Option<usize>,
    kv_bytes: Option<u64>,
    kv_dtype: KvDtype,
    /// `--speculate`.
    speculate: Speculate,
    /// The model of `--draft`, and the path of the first model, for which it drafts.
    draft: Option<(Source, PathBuf)>,
    /// Memory limit of all models together, in bytes.
    memory: u64,
    parallel: usize,
    batch_tokens: usize,
    /// `--batch-tokens`, for encoders.
    encoder_tokens: Option<usize>,
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
    /// `--mmproj` with the name of its model.
    projector: Option<(String, PathBuf)>,
    /// `--no-mmproj`.
    text_only: bool,
    /// `--image-max-tokens`.
    image_tokens: Option<usize>,
    /// `--max-loras`, `--max-lora-rank`, `--max-lora-memory`.
    adapter_limits: AdapterLimits,
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

impl ServedModels {
    /// Creates the table of the embedded model, the models of the settings, and the library.
    ///
    /// # Errors
    /// A model is missing or invalid, or two have one name.
    pub fn new(
        options: &ServeOptions,
        (devices, on): (Devices, RunOnArgs),
        memory: u64,
        settings: &LibrarySettings,
        library: Option<Arc<Library>>,
        tiers: Tiers,
    ) -> Outcome<Self> {
        let mut named = Named::new();
        let mut folders = options.model_folders.clone();
        for name in options.models.iter().chain(&options.more_models) {
            let path = Path::new(name);
            if path.is_dir() && !path.join("config.json").is_file() {
                folders.push(path.to_owned());
                continue;
            }
            named.add(name, settings)?;
        }
        folders.iter().try_for_each(|folder| named.add_folder(folder))?;
        let Named { models, first } = named;
        let projector = match &options.mmproj {
            None => None,
            Some(file) => {
                let of = models
                    .iter()
                    .find(|(name, source)| first.as_ref() == Some(name) && matches!(source, Source::Path(_)));
                let Some((name, source)) = of else {
                    let failure = Failure::usage("--mmproj needs a model: a GGUF file on the command line");
                    return Err(failure.hint("paguro serve MODEL.gguf --mmproj FILE"));
                };
                Projector::File(file.clone()).open(source, |_| {})?;
                Some((name.clone(), file.clone()))
            }
        };
        let draft = match &options.draft {
            None => None,
            Some(draft) => {
                let own = models.iter().find(|(name, _)| first.as_ref() == Some(name));
                let model = match (own, &first) {
                    (Some((_, source)), _) => source.clone(),
                    (None, Some(name)) => Source::find(Some(name), settings)?,
                    (None, None) => Source::Embedded,
                };
                let Some(path) = model.path() else {
                    let failure = Failure::usage("--draft needs a model on the command line");
                    return Err(failure.hint("paguro serve MODEL --draft DRAFT_MODEL"));
                };
                let draft = Source::find(Some(draft), settings)?;
                // Errors are reported at the start instead of at the first request.
                load::check_draft(&draft, &model)?;
                Some((draft, path.to_owned()))
            }
        };
        let defaults = EngineOptions::default();
        let parallel = options.parallel.unwrap_or(defaults.max_sequences);
        Ok(Self {
            models,
            first: first.unwrap_or_else(|| EMBEDDED.to_owned()),
            library,
            devices,
            on,
            threads: options.threads,
            context: options.ctx,
            kv_bytes: options.kv_memory.map(|bytes| bytes.0),
            kv_dtype: options.kv_dtype.map_or(defaults.kv_dtype, KvDtype::from),
            speculate: options.speculate.unwrap_or_default(),
            draft,
            memory,
            parallel,
            step_time: options.step_time.map_or(defaults.step_time, |time| time.0),
            batch_tokens: BatchTokensArg { batch_tokens: options.batch_tokens }.or_default(parallel),
            encoder_tokens: options.batch_tokens,
            queue: options.max_queue.unwrap_or(defaults.queue_capacity),
            queue_tokens: options.max_queue_tokens,
            presets: options.presets.clone(),
            projector,
            text_only: options.no_mmproj == Some(true),
            image_tokens: options.image_max_tokens.map(|tokens| tokens as usize),
            adapter_limits: AdapterLimits {
                count: options.max_loras.unwrap_or(defaults.adapters.count),
                rank: options.max_lora_rank.unwrap_or(defaults.adapters.rank),
                bytes: options.max_lora_memory.map_or(defaults.adapters.bytes, |bytes| bytes.0),
            },
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

    /// Returns a model outside of the library. Case and the parts of a name that may be omitted are ignored, as in the
    /// library, so that no name hides another.
    fn named(&self, name: &str) -> Option<&(String, Source)> {
        let plain = plain_name(name);
        let same = |other: &&(String, Source)| plain_name(&other.0).eq_ignore_ascii_case(plain);
        self.models.iter().find(|(other, _)| other == name).or_else(|| self.models.iter().find(same))
    }

    /// Returns a model of the library.
    fn record(&self, name: &str) -> Result<(&Library, ModelRecord), LoadError> {
        let not_found = || LoadError::NotFound(name.to_owned());
        let library = self.library.as_deref().ok_or_else(not_found)?;
        match library.find(name) {
            Ok(record) => Ok((library, record)),
            Err(LibraryError::NotFound { .. } | LibraryError::BadName { .. }) => Err(not_found()),
            Err(error @ LibraryError::Ambiguous { .. }) => Err(LoadError::Ambiguous(error.to_string())),
            Err(error) => Err(LoadError::Failed(error.to_string())),
        }
    }

    /// Returns the place of a model's files.
    fn source(&self, name: &str) -> Result<Source, LoadError> {
        if let Some((_, source)) = self.named(name) {
            return Ok(source.clone());
        }
        let (library, record) = self.record(name)?;
        let path = library.path(&record).map_err(|error| LoadError::Failed(error.to_string()))?;
        Ok(Source::Library { name: record.name.short(), path })
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
        Ok(own.or(Preset::with_recorded(&record).map_err(LoadError::Failed)?))
    }

    /// Returns the files of a model and their digest, if there is a store that needs it.
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

    /// Returns cached [`ServedModels::details`]. Files that could not be opened are opened again.
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

    /// Opens a model with its projector and its assistant.
    pub(super) fn file(&self, name: &str, source: &Source) -> Outcome<ModelFile> {
        let named = self.projector.as_ref().filter(|(model, _)| model == name).map(|(_, file)| file.clone());
        let note = |line: &str| tracing::warn!(model = name, "{line}");
        let mut file = Projector::new(named, self.text_only).open(source, note)?;
        let assistants = || self.library.as_deref().map(assistant::of_library).unwrap_or_default();
        let draft = self.drafts_for(&file).cloned();
        assistant::add(&mut file, source, draft.as_ref(), assistants, note)?;
        Ok(file)
    }

    /// Returns the entry of a model outside of the library.
    fn own_entry(&self, name: &str, source: &Source) -> ModelEntry {
        let preset = self.own_preset(name);
        let entry = |version: String, created, bytes, details| ModelEntry {
            name: name.to_owned(),
            version: preset.version(version),
            created,
            bytes,
            defaults: preset.defaults(Map::new()),
            chat_template: preset.chat_template.as_deref().map(Arc::from),
            details,
            adapter: None,
        };
        match Identity::of(source) {
            Ok(Identity { version, created, bytes }) => {
                let mut entry = entry(version, created, bytes, Details::default());
                let open = || self.file(name, source).map_err(|failure| failure.message().to_owned());
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
    fn recorded(&self, library: &Library, record: &ModelRecord) -> ModelEntry {
        if record.is_adapter() {
            return self.recorded_adapter(library, record);
        }
        let name = record.name.short();
        let stored = Preset::with_recorded(record);
        let preset = self.own_preset(&name).or(stored.clone().unwrap_or_default());
        let mut entry = ModelEntry {
            version: preset.version(record.digest().to_string()),
            created: seconds(record.created_at),
            bytes: record.size(),
            defaults: preset.defaults(record.defaults.clone()),
            chat_template: preset.chat_template.as_deref().map(Arc::from),
            details: Details::default(),
            adapter: None,
            name,
        };
        let missing = record.files.iter().filter_map(|file| file.location.as_deref()).find_map(|path| {
            let error = fs::metadata(path).err()?;
            Some(format!("cannot read {}: {error}", path.display()))
        });
        let open = || {
            let path = library.path(record).map_err(|error| error.to_string())?;
            let name = record.name.short();
            let source = Source::Library { name: name.clone(), path };
            self.file(&name, &source).map_err(|failure| failure.message().to_owned())
        };
        let mut details = match missing.or(stored.err()) {
            Some(problem) => lost(problem),
            None => self.known_details(&entry, &preset, open),
        };
        details.format = record.format.name();
        details.architecture = record.details.architecture.clone();
        details.parameters = record.details.parameters;
        details.quantization = record.details.quantization.clone();
        details.in_place = record.files.iter().any(|file| file.location.is_some());
        details.pulled = matches!(record.source, paguro_library::Source::Hub { .. });
        entry.details = details;
        entry
    }
}

/// Returns the reason for which a model cannot run.
fn unusable(error: &ModelError) -> LoadError {
    match error {
        ModelError::Io { .. } | ModelError::Unreadable { .. } => LoadError::Failed(error.to_string()),
        _ => LoadError::Unsupported(error.to_string()),
    }
}

/// Returns the details of a model that cannot be opened.
fn lost(problem: String) -> Details {
    Details { problem: Some(problem), ..Details::default() }
}

/// Converts a failure of the program to an error of a load.
fn failed(failure: Failure) -> LoadError {
    LoadError::Failed(failure.message().to_owned())
}
