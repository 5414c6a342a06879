//! Adapters (LoRA) of a server: those of `--lora`, and those of the library.

use std::{path::PathBuf, sync::Arc};

use paguro_library::{Library, ModelRecord};
use paguro_model::{AdapterFile, LoadOptions};
use paguro_server::{
    AdapterPlace, AdapterSetting, AdapterSettings, Details, LoadError, ModelEntry, ModelSource,
};
use serde_json::Map;

use super::{ServedModels, identity::seconds};
use crate::{
    adapters,
    failure::{Failure, Outcome},
    presets::Preset,
};

impl ServedModels {
    /// Reads the adapters of `--lora`, and checks that they fit their models.
    ///
    /// # Errors
    /// One cannot be read or does not fit, or its name is that of another or of a model.
    pub fn adapters(&self, loras: &[String]) -> Outcome<AdapterSettings> {
        let mut given: Vec<AdapterSetting> = Vec::new();
        for text in loras {
            let adapter = adapters::named(text, &self.first)?;
            let failed = |error: LoadError| Failure::usage(format!("--lora {text}: {error}"));
            let base = self.find(&adapter.base).map_err(failed)?;
            let adapter = AdapterSetting { base: base.name.clone(), ..adapter };
            let is_same =
                |other: &AdapterSetting| (&other.name, &other.base) == (&adapter.name, &adapter.base);
            if given.iter().any(is_same) || self.find(&adapter.name).is_ok() {
                let failure = Failure::usage(format!("--lora {text}: the name `{}` is taken", adapter.name));
                return Err(failure.hint("choose another name: --lora NAME=PATH"));
            }
            let model = self.open(&base).map_err(failed)?;
            let model = model.load(&LoadOptions { max_context: base.details.context });
            let model = model.map_err(|error| Failure::from_error(&error))?;
            let file = AdapterFile::open(&adapter.path).map_err(|error| Failure::from_error(&error))?;
            file.fit(&model).map_err(|error| Failure::from_error(&error))?;
            given.push(adapter);
        }
        let folders = self.library.iter().map(|library| library.root().to_owned()).collect();
        Ok(AdapterSettings { given, folders })
    }

    /// Returns the entry of an adapter of the library: that of its base, with its own name, files and defaults.
    pub(super) fn recorded_adapter(&self, library: &Library, record: &ModelRecord) -> ModelEntry {
        let name = record.name.short();
        let stored = Preset::with_recorded(record);
        let preset = self.own_preset(&name).or(stored.clone().unwrap_or_default());
        let template: Option<Arc<str>> = preset.chat_template.as_deref().map(Arc::from);
        let base = self.base_entry(library, record, &preset);
        let usable = stored.map(drop).and(record.details.problem.clone().map_or(Ok(()), Err));
        let found = usable.and_then(|()| {
            let path = library.path(record).map_err(|error| error.to_string())?;
            Ok((base?, path))
        });
        let (base, path) = match found {
            Ok(found) => found,
            Err(problem) => {
                let details = Details { problem: Some(problem), ..Details::default() };
                let (version, adapter) = (String::new(), None);
                let (created, bytes, defaults) = (0, 0, Map::new());
                let none = ModelEntry {
                    name: String::new(),
                    version,
                    created,
                    bytes,
                    defaults,
                    chat_template: None,
                    details,
                    adapter,
                };
                (none, PathBuf::new())
            }
        };
        let mut defaults = base.defaults;
        defaults.extend(record.defaults.clone());
        ModelEntry {
            version: preset.version(record.digest().to_string()),
            created: seconds(record.created_at),
            bytes: record.size(),
            defaults: preset.defaults(defaults),
            chat_template: template.clone().or(base.chat_template),
            details: Details {
                format: record.format.name(),
                parameters: record.details.parameters,
                quantization: record.details.quantization.clone(),
                in_place: record.files.iter().any(|file| file.location.is_some()),
                pulled: matches!(record.source, paguro_library::Source::Hub { .. }),
                ..base.details
            },
            adapter: Some(AdapterPlace {
                name: name.clone(),
                base: base.name,
                path,
                template,
                in_library: true,
            }),
            name,
        }
    }

    /// Returns the entry of the model that an adapter of the library changes, or the reason for which there is none.
    fn base_entry(
        &self,
        library: &Library,
        adapter: &ModelRecord,
        preset: &Preset,
    ) -> Result<ModelEntry, String> {
        let name = match &preset.base {
            Some(base) => base.clone(),
            None => adapters::base_name(adapter, &library.list().map_err(|error| error.to_string())?)?,
        };
        let missing = |error: LoadError| format!("its base cannot be used: {error}");
        let entry = match self.named(&name) {
            Some((name, source)) => self.own_entry(name, source),
            None => {
                let (library, record) = self.record(&name).map_err(missing)?;
                if record.is_adapter() {
                    return Err(format!("its base `{name}` is an adapter itself"));
                }
                self.recorded(library, &record)
            }
        };
        match &entry.details.problem {
            Some(problem) => Err(format!("its base `{name}` cannot run: {problem}")),
            None => Ok(entry),
        }
    }
}
