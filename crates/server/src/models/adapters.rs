//! Adapters (LoRA) that requests can name, and their loads into resident models.
//!
//! An adapter is listed beside the models, with its base as parent. It is loaded into its base's engine by the first request
//! that uses it. One that is replaced or removed stays in the engine until its running requests have ended. Adapters of the
//! library enter the table when they are listed or named.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use paguro_engine::{Adapter, AdapterError, AdapterWeights};
use paguro_model::{AdapterFile, Model};

use super::{Lease, Models, NamedAdapter, Resident, Slot, blocking};
use crate::{
    error::ApiError,
    source::{AdapterPlace, LoadError, ModelEntry},
    units::bytes,
};

/// Maximum bytes of a name.
const MAX_NAME: usize = 256;

/// An adapter that is loaded in a resident model.
#[derive(Clone, Debug)]
struct LoadedAdapter {
    /// Number of its load.
    generation: u64,
    adapter: Adapter,
    /// The model with the adapter's own tokens and chat template, if it has some.
    dialect: Option<Arc<Model>>,
}

/// Adapters that are loaded in a resident model, by name.
#[derive(Debug, Default)]
pub(super) struct LoadedAdapters {
    loaded: Mutex<HashMap<String, LoadedAdapter>>,
    /// Held during a load, so that requests share it.
    loading: tokio::sync::Mutex<()>,
}

impl LoadedAdapters {
    fn loaded(&self) -> MutexGuard<'_, HashMap<String, LoadedAdapter>> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self, named: &NamedAdapter) -> Option<LoadedAdapter> {
        self.loaded().get(&named.name).filter(|it| it.generation == named.generation).cloned()
    }

    /// Returns the bytes of all of them.
    pub(super) fn bytes(&self) -> u64 {
        self.loaded().values().map(|it| it.adapter.bytes()).sum()
    }

    /// Returns all of them, in order of their names.
    pub(super) fn list(&self) -> Vec<Adapter> {
        let mut all: Vec<_> = self.loaded().values().map(|it| it.adapter.clone()).collect();
        all.sort_by(|one, other| one.name().cmp(other.name()));
        all
    }
}

/// Converts an error of the engine.
fn refused(error: &AdapterError) -> LoadError {
    match error {
        AdapterError::Limit { .. } => LoadError::TooLarge(error.to_string()),
        AdapterError::Load(_) => LoadError::Unsupported(error.to_string()),
        _ => LoadError::Failed(error.to_string()),
    }
}

/// The adapter or model that a name stands for.
#[derive(Debug)]
pub(super) struct Named {
    pub(super) entry: ModelEntry,
    /// The adapter, and the entry of its base; `None` for a model.
    pub(super) adapter: Option<(NamedAdapter, ModelEntry)>,
}

impl Models {
    /// Returns the adapters of the table in order of their ids. Those of the library may be missing.
    fn known_adapters(&self) -> Vec<NamedAdapter> {
        self.adapters.all().0.clone()
    }

    /// Returns all adapters in order of their ids.
    ///
    /// # Errors
    /// The library cannot be read.
    pub async fn adapters(&self) -> Result<Vec<NamedAdapter>, ApiError> {
        let source = self.source.clone();
        let entries = blocking(move || source.list()).await?;
        let usable = entries.iter().filter(|entry| entry.details.problem.is_none());
        let stored: Vec<(&AdapterPlace, &str)> =
            usable.filter_map(|entry| Some((entry.adapter.as_ref()?, entry.version.as_str()))).collect();
        let is_gone = |it: &NamedAdapter| {
            let is_it = |(place, version): &(&AdapterPlace, &str)| {
                (&it.name, &it.base, it.stored.as_deref()) == (&place.name, &place.base, Some(*version))
            };
            it.is_stored() && !stored.iter().any(is_it)
        };
        let gone = self.adapters.remove(is_gone);
        self.unload_loads(&gone);
        for (place, version) in stored {
            if self.adapters.given(&place.name).is_empty() {
                self.adapters.put_stored(place, version);
            }
        }
        Ok(self.known_adapters())
    }

    /// Finds a model or an adapter by `NAME`, or an adapter by `BASE::NAME`.
    ///
    /// # Errors
    /// [`ApiError::ModelNotFound`]; several models have an adapter of this name; an adapter of the library has no base.
    pub(super) async fn find_named(&self, name: &str) -> Result<Named, ApiError> {
        let (base, own) = match name.split_once("::") {
            Some((base, own)) => (Some(self.find_model(base).await?.name), own),
            None => (None, name),
        };
        let mut given = self.adapters.given(own);
        given.retain(|adapter| base.as_ref().is_none_or(|base| adapter.base == *base));
        match given.as_slice() {
            [] => {}
            [adapter] => {
                let base = self.find_model(&adapter.base).await?;
                let entry = Self::adapter_entry(adapter, base.clone());
                return Ok(Named { entry, adapter: Some((adapter.clone(), base)) });
            }
            [one, ..] => {
                let message =
                    format!("several models have an adapter `{own}`; name one as `{}::{own}`", one.base);
                return Err(ApiError::invalid("model", message));
            }
        }
        let entry = self.find_model(own).await?;
        let Some(place) = &entry.adapter else {
            return match base {
                None => Ok(Named { entry, adapter: None }),
                Some(_) => Err(ApiError::ModelNotFound(name.to_owned())),
            };
        };
        if let Some(problem) = &entry.details.problem {
            return Err(LoadError::Unsupported(format!("`{}`: {problem}", entry.name)).into());
        }
        if base.is_some_and(|base| base != place.base) {
            return Err(ApiError::ModelNotFound(name.to_owned()));
        }
        let base = self.find_model(&place.base).await?;
        let adapter = self.adapters.put_stored(place, &entry.version);
        self.adapters.plan(adapter.generation);
        Ok(Named { entry, adapter: Some((adapter, base)) })
    }

    /// Returns the entry of an adapter that is not the library's: that of its base, under its own name.
    fn adapter_entry(adapter: &NamedAdapter, base: ModelEntry) -> ModelEntry {
        let place = AdapterPlace { base: base.name.clone(), ..adapter.place() };
        ModelEntry {
            name: adapter.name.clone(),
            version: format!("{}+{}", base.version, adapter.generation),
            created: adapter.created,
            bytes: adapter.bytes,
            adapter: Some(place),
            ..base
        }
    }

    /// Returns the entries of all adapters that are not the library's and whose base exists.
    pub(super) fn adapter_entries(&self, models: &[ModelEntry]) -> Vec<ModelEntry> {
        let entry = |adapter: &NamedAdapter| {
            let base = models.iter().find(|model| model.name == adapter.base && model.adapter.is_none())?;
            Some(Self::adapter_entry(adapter, base.clone()))
        };
        self.adapters.all().0.iter().filter(|it| !it.is_stored()).filter_map(entry).collect()
    }

    /// Adds an adapter for later requests, and loads it into its base. With `replace`, it may have the name of another one.
    /// `path` is a path, or the name of an adapter of the library.
    ///
    /// # Errors
    /// The path is not allowed, the name is taken, or the adapter does not fit its base.
    pub async fn load_adapter(
        self: &Arc<Self>,
        name: &str,
        path: &str,
        base: Option<&str>,
        replace: bool,
    ) -> Result<(), ApiError> {
        let is_plain = !name.is_empty() && name.len() <= MAX_NAME && !name.contains("::");
        if !is_plain || name.chars().any(char::is_control) {
            return Err(ApiError::invalid("lora_name", format!("`{name}` cannot be the name of an adapter")));
        }
        let stored = self.find_model(path).await.ok().and_then(|entry| entry.adapter);
        let (path, template, base) = match stored {
            Some(place) => (place.path, place.template, Some(base.map_or(place.base, str::to_owned))),
            None => (self.adapters.allowed(path)?, None, base.map(str::to_owned)),
        };
        let base = match base {
            Some(base) => self.find_model(&base).await?,
            None => self.find_model(&self.only().await?).await?,
        };
        let taken = self.adapters.given(name);
        if taken.iter().any(|adapter| adapter.base == base.name) {
            if !replace {
                let message = format!("the adapter `{name}` is loaded; `load_inplace` replaces it");
                return Err(ApiError::invalid("lora_name", message));
            }
        } else if self.find_model(name).await.is_ok() {
            return Err(ApiError::invalid("lora_name", format!("`{name}` is the name of a model")));
        }
        // Before the table changes, so that a wrong file replaces nothing.
        let lease = self.lease_model(&base, None).await?;
        let place =
            AdapterPlace { name: name.to_owned(), base: base.name, path, template, in_library: false };
        let (adapter, dialect) = self.open_adapter(&lease, place.clone()).await?;
        let NamedAdapter { name, generation, .. } = self.adapters.put(place, None);
        lease.adapters_loaded().loaded().insert(name, LoadedAdapter { generation, adapter, dialect });
        Ok(())
    }

    /// Removes an adapter. Its running requests end with it. One of the library is loaded again by the next request that
    /// names it.
    ///
    /// # Errors
    /// There is none of this name.
    pub async fn unload_adapter(&self, name: &str) -> Result<(), ApiError> {
        let adapter = match self.find_named(name).await {
            Ok(Named { adapter: Some((adapter, _)), .. }) => adapter,
            Ok(Named { adapter: None, .. }) | Err(ApiError::ModelNotFound(_)) => {
                return Err(ApiError::NotFound(format!(
                    "there is no adapter `{name}`; /lora-adapters lists the adapters"
                )));
            }
            Err(error) => return Err(error),
        };
        let gone = self.adapters.remove(|it| it.generation == adapter.generation);
        self.unload_loads(&gone);
        Ok(())
    }

    /// Removes an adapter that has left the library.
    pub(super) fn forget_adapter(&self, name: &str) {
        let gone = self.adapters.remove(|it| it.is_stored() && it.name == name);
        self.unload_loads(&gone);
    }

    /// Drops the handles of these loads, so that the adapters leave their engines when their requests have ended.
    fn unload_loads(&self, generations: &[u64]) {
        if generations.is_empty() {
            return;
        }
        for resident in self.slots().values().filter_map(Slot::resident) {
            resident.adapters.loaded().retain(|_, it| !generations.contains(&it.generation));
        }
    }

    /// Sets the scales with which adapters apply to requests that name only their base; those of others become 0.
    ///
    /// # Errors
    /// An id does not exist, or a scale is not finite; the library cannot be read.
    pub async fn scale_adapters(&self, scales: &[(usize, f32)]) -> Result<(), ApiError> {
        self.adapters().await?;
        let mut all = self.adapters.all();
        check_scales(scales, all.0.len())?;
        all.0.iter_mut().for_each(|adapter| adapter.scale = 0.0);
        scales.iter().for_each(|&(id, scale)| all.0[id].scale = scale);
        Ok(())
    }

    /// Returns a lease with the adapters of a request: the one that it names, those of its list `lora` (ids and scales), or
    /// else those that apply to all requests of the base.
    pub(super) async fn adapt(
        &self,
        mut lease: Lease,
        named: Option<NamedAdapter>,
        lora: Option<&[(usize, f32)]>,
    ) -> Result<Lease, ApiError> {
        let uses: Vec<(NamedAdapter, f32)> = match (lora, &named) {
            (Some([]), _) => Vec::new(),
            (Some(list), _) => {
                let all = self.adapters().await?;
                check_scales(list, all.len())?;
                list.iter().map(|&(id, scale)| (all[id].clone(), scale)).collect()
            }
            (None, Some(named)) => vec![(named.clone(), 1.0)],
            (None, None) => {
                let base = &lease.resident().entry.name;
                let own = self.known_adapters().into_iter().filter(|adapter| adapter.base == *base);
                own.map(|adapter| (adapter.clone(), adapter.scale)).collect()
            }
        };
        for (adapter, scale) in uses.into_iter().filter(|(_, scale)| *scale != 0.0) {
            let base = &lease.resident().entry.name;
            if adapter.base != *base {
                let message =
                    format!("`{}` is an adapter of `{}`, not of `{base}`", adapter.name, adapter.base);
                return Err(ApiError::invalid("lora", message));
            }
            let loaded = self.loaded_adapter(&lease, &adapter).await?;
            if let (None, Some(_), Some(dialect)) = (lora, &named, loaded.dialect) {
                lease.model = dialect;
            }
            lease.adapters.push((loaded.adapter, scale));
        }
        Ok(lease)
    }

    /// Returns a loaded adapter, which is loaded first if necessary.
    async fn loaded_adapter(&self, lease: &Lease, named: &NamedAdapter) -> Result<LoadedAdapter, ApiError> {
        let loaded = lease.adapters_loaded();
        if let Some(adapter) = loaded.get(named) {
            return Ok(adapter);
        }
        let _loading = loaded.loading.lock().await;
        if let Some(adapter) = loaded.get(named) {
            return Ok(adapter);
        }
        // An earlier one of this name makes room when its requests have ended.
        loaded.loaded().remove(&named.name);
        let (adapter, dialect) = self.open_adapter(lease, named.place()).await?;
        let adapter = LoadedAdapter { generation: named.generation, adapter, dialect };
        loaded.loaded().insert(named.name.clone(), adapter.clone());
        Ok(adapter)
    }

    /// Opens an adapter and loads it into the engine of a leased model. Also returns the model with the adapter's own tokens
    /// and chat template, if it has some.
    async fn open_adapter(
        &self,
        lease: &Lease,
        place: AdapterPlace,
    ) -> Result<(Adapter, Option<Arc<Model>>), ApiError> {
        let unsupported = |error: paguro_model::ModelError| LoadError::Unsupported(error.to_string());
        let Resident { model, handle, .. } = lease.resident();
        let (model, handle) = (model.clone(), handle.clone());
        let name: Arc<str> = place.name.as_str().into();
        let (checked, checks) = (name.clone(), handle.clone());
        let open = move || {
            let file = AdapterFile::open(&place.path).map_err(unsupported)?;
            checks.check_adapter(&checked, file.rank(), file.bytes()).map_err(|error| refused(&error))?;
            Ok((file, place))
        };
        let (file, place) = blocking(open).await?;
        self.make_room_for_adapter(lease, &name, file.bytes()).await?;
        let load = move || {
            let pairs = file.fit(&model).map_err(unsupported)?;
            let dialect = file.dialect(&model, place.template.as_deref()).map_err(unsupported)?;
            let adapter =
                handle.load_adapter(AdapterWeights { name, pairs }).map_err(|error| refused(&error))?;
            Ok((adapter, dialect.map(Arc::new)))
        };
        Ok(blocking(load).await?)
    }

    /// Returns the bytes that are planned for the adapters of a model.
    pub(super) fn planned_bytes(&self, base: &str) -> u64 {
        self.adapters.all().0.iter().filter(|it| it.is_planned && it.base == base).map(|it| it.bytes).sum()
    }

    /// Unloads unused models until an adapter of a leased model fits into the memory of all models.
    async fn make_room_for_adapter(&self, lease: &Lease, name: &str, needed: u64) -> Result<(), LoadError> {
        let memory = self.memory();
        loop {
            let taken = {
                let own = lease.resident();
                let all = self.slots().values().map(Slot::bytes).sum::<u64>();
                all.saturating_sub(own.bytes()).saturating_add(own.bytes_with(needed))
            };
            if taken <= memory {
                return Ok(());
            }
            if !self.unload_one(|_| true).await {
                return Err(LoadError::TooLarge(format!(
                    "the adapter `{name}` needs {}, and the loaded models take {} of the {} of --memory; raise --memory, or unload \
                     an adapter",
                    bytes(needed),
                    bytes(taken - needed.min(taken)),
                    bytes(memory)
                )));
            }
        }
    }
}

fn check_scales(scales: &[(usize, f32)], count: usize) -> Result<(), ApiError> {
    for (index, (id, scale)) in scales.iter().enumerate() {
        if *id >= count {
            let message = format!("there is no adapter {id}; /lora-adapters lists the {count} adapters");
            return Err(ApiError::NotFound(message));
        }
        let problem = match scales[..index].iter().any(|(other, _)| other == id) {
            true => "has two scales",
            false if !scale.is_finite() => "has a scale that is not finite in single precision",
            false => continue,
        };
        return Err(ApiError::invalid("lora", format!("adapter {id} {problem}")));
    }
    Ok(())
}
