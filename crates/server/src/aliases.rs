//! Aliases of models from the server's settings.

use std::{path::Path, sync::Arc};

use paguro_model::ModelFile;

use crate::settings::Alias;
use crate::source::{
    Grant, LoadError, LoadPlan, Loaded, ModelEntry, ModelPreset, ModelSource, Outside, Presets,
};

/// A source that also finds models by aliases.
#[derive(Debug)]
pub struct Aliased {
    source: Arc<dyn ModelSource>,
    aliases: Vec<Alias>,
}

impl Aliased {
    /// Adds aliases to a source.
    pub fn wrap(source: Arc<dyn ModelSource>, aliases: Vec<Alias>) -> Arc<dyn ModelSource> {
        if aliases.is_empty() { source } else { Arc::new(Self { source, aliases }) }
    }
}

impl ModelSource for Aliased {
    /// Also lists aliases without a pattern, because clients look for them.
    fn list(&self) -> Result<Vec<ModelEntry>, LoadError> {
        let mut models = self.source.list()?;
        for alias in self.aliases.iter().filter(|alias| !alias.pattern.contains('*')) {
            if models.iter().all(|model| model.name != alias.pattern)
                && let Ok(entry) = self.find(&alias.pattern)
            {
                models.push(ModelEntry { name: alias.pattern.clone(), ..entry });
            }
        }
        Ok(models)
    }

    /// Resolves a name. A model's own name takes precedence over an alias, and an earlier alias over a later one.
    fn find(&self, name: &str) -> Result<ModelEntry, LoadError> {
        let missing = match self.source.find(name) {
            Err(error @ LoadError::NotFound(_)) => error,
            found => return found,
        };
        match self.aliases.iter().find(|alias| alias.fits(name)) {
            None => Err(missing),
            Some(Alias { model: Some(model), .. }) => self.source.find(model),
            Some(Alias { model: None, .. }) => self.source.list()?.into_iter().next().ok_or(missing),
        }
    }

    fn open(&self, entry: &ModelEntry) -> Result<ModelFile, LoadError> {
        self.source.open(&self.find(&entry.name)?)
    }

    fn plan(&self, entry: &ModelEntry, context: Option<usize>) -> Result<LoadPlan, LoadError> {
        self.source.plan(entry, context)
    }

    fn load(&self, entry: &ModelEntry, grant: Grant) -> Result<Loaded, LoadError> {
        self.source.load(entry, grant)
    }

    fn check_adapter(&self, path: &Path, base: &str) -> Result<(), LoadError> {
        self.source.check_adapter(path, &self.find(base)?.name)
    }

    fn preset(&self, name: &str) -> Result<Presets, LoadError> {
        self.source.preset(&self.find(name)?.name)
    }

    fn set_preset(&self, name: &str, preset: ModelPreset) -> Result<(), LoadError> {
        self.source.set_preset(&self.find(name)?.name, preset)
    }

    fn forget(&self, name: &str) {
        self.source.forget(name);
    }

    fn outside(&self, name: &str) -> Option<Outside> {
        self.source.outside(name)
    }
}
