//! The server's view of the models.

use paguro_backend::Weights;
use paguro_engine::{DiskCache, Engine, EngineOptions, EnginePlan, PageBudget};
use paguro_library::ModelRecord;
use paguro_model::{LoadOptions, ModelFile};
use paguro_server::{
    Grant, LoadError, LoadPlan, Loaded, ModelEntry, ModelPreset, ModelSource, Outside, Presets,
};

use super::{
    ServedModels, failed,
    identity::Identity,
    replicas::{self, Started},
    unusable,
};
use crate::{
    assistant,
    devices::Chosen,
    failure::Failure,
    load,
    models::{EMBEDDED_FILE, Source},
    placement::Placing,
    presets::Preset,
    serve::disk,
    units,
};

impl ModelSource for ServedModels {
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
            let is_model = |record: &&ModelRecord| !assistant::is_record(record);
            let records = records.iter().filter(is_model).filter(|record| !is_own(&record.name.short()));
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
        self.file(&entry.name, &self.source(&entry.name)?).map_err(failed)
    }

    fn plan(&self, entry: &ModelEntry, context: Option<usize>) -> Result<LoadPlan, LoadError> {
        if let Some(adapter) = &entry.adapter {
            return self.plan(&self.find(&adapter.base)?, context);
        }
        self.load_plan(&self.open(entry)?, &self.preset(&entry.name)?, context)
    }

    fn load(&self, wanted: &ModelEntry, grant: Grant) -> Result<Loaded, LoadError> {
        let (source, preset) = (self.source(&wanted.name)?, self.preset(&wanted.name)?);
        let mut file = self.file(&wanted.name, &source).map_err(failed)?;
        let weights = self.weights(&source, &file);
        if weights.is_some() {
            // Opened after its files were listed: if they are the same at the end, the digest is theirs.
            file = self.file(&wanted.name, &source).map_err(failed)?;
        }
        let pages = PageBudget::Bytes(grant.kv);
        // The number of pages limits the context, which determines windows and RoPE.
        let (plan, placement) = self.engine_plan(&file, &preset, grant.context, pages)?;
        let pages = if placement.stages.len() > 1 { PageBudget::Pages(plan.pages) } else { pages };
        let (context, expert_slots) = (plan.max_context, plan.expert_slots);
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
        let mut options = EngineOptions { expert_slots, ..self.engine_options(&preset, context, pages) };
        if let Some(source) = self.drafts_for(&file) {
            options.draft = load::draft_of(source, &model).map_err(failed)?;
        }
        let mut options = load::with_head(&model, options);
        options.host.clone_from(&self.tiers.host);
        options.events = self.tiers.events.as_ref().map(|events| events.of(&wanted.name));
        options.disk = self.tiers.store.as_ref().zip(weights.as_ref()).map(|(store, it)| {
            DiskCache::new(store.clone(), &wanted.name, it.digest.as_ref().map(|id| &id[..]))
        });
        let block_size = options.block_size;
        let notice = |line: &str| tracing::warn!(model = wanted.name, "{line}");
        let start_on = |device: &Chosen, options: &EngineOptions| {
            let placing = Placing::of(device, &model);
            let placement = placing.on_these(&placement);
            let EnginePlan { memory, pages, .. } = placing.plan_on_gpus(&placement, options)?;
            let parts = placing.parts(&placement, options, pages)?;
            for (part, (stage, _)) in parts.iter().zip(&placement.stages) {
                let backend = &*device.find(*stage).unwrap_or(device.main()).backend;
                let (needed, free) = (part.memory.total(), backend.capacity().bytes_free);
                // The memory limit was computed at the start, and other programs use the device's memory.
                if needed > free && !self.plans_for_cpu() {
                    let [needed, free] = [needed, free].map(units::bytes);
                    let device = backend.name();
                    return Err(Failure::new(format!(
                        "the model needs {needed}, but the {device} has {free} free"
                    )));
                }
            }
            if let Some(line) = placement.describe() {
                tracing::info!(model = wanted.name, "{line}");
            }
            let placed = placement.on(device);
            let engine = Engine::start(placed.backend(), &model, options.clone());
            let engine = engine.map_err(|error| Failure::from_error(&error))?;
            Ok(Started { engine, memory, device: placement.label(placed.backend(), &parts) })
        };
        let start = |device: Chosen| match &device.engines()[..] {
            [device] => start_on(device, &options),
            devices => replicas::start(&wanted.name, devices, &options, start_on),
        };
        let started = self.devices.with(&self.on, self.threads, &notice, start);
        let Started { engine, memory, device } = started.map_err(failed)?;
        if let Some(problem) = engine.handle().draft_problem() {
            tracing::info!(model = &*wanted.name, problem, "the model's head does not draft");
        }
        if let Err(problem) = model.find_judge(&wanted.name) {
            tracing::warn!(model = &*wanted.name, problem, "cannot rerank");
        }
        // The device has its own copy. These handles would keep the file open and its disk space in use.
        model.weights = Weights::default();
        model.mtp = None;
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
        // A preset that cannot be read is replaced; aliases and bases are changed elsewhere.
        let Preset { aliases, base, .. } = Preset::of(&record).unwrap_or_default();
        let preset = Preset { aliases, base, ..Preset::try_from(new).map_err(LoadError::Invalid)? };
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
