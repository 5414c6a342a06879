//! Adapters (LoRA) that requests can name, and their loads into resident models.
//!
//! An adapter is listed beside the models, with its base as parent. It is loaded into its base's engine by the first request
//! that uses it. One that is replaced or removed stays in the engine until its running requests have ended.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};

use paguro_engine::{Adapter, AdapterError, AdapterWeights};
use paguro_model::AdapterFile;

use super::{Lease, Models, Resident, Slot, blocking};
use crate::{
    error::ApiError,
    source::{AdapterPlace, LoadError, ModelEntry},
};

/// An adapter of the settings.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterSetting {
    /// Its name in requests.
    pub name: String,
    /// Name of the model that it changes.
    pub base: String,
    /// Its file or folder.
    pub path: PathBuf,
}

/// Adapters of the server at its start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AdapterSettings {
    /// The adapters.
    pub given: Vec<AdapterSetting>,
    /// Folders from which requests may load others.
    pub folders: Vec<PathBuf>,
}

/// Maximum bytes of a name.
const MAX_NAME: usize = 256;

/// An adapter in the table.
#[derive(Clone, Debug)]
pub struct NamedAdapter {
    /// Its name in requests.
    pub name: String,
    /// Name of its base.
    pub base: String,
    /// Its file or folder.
    pub path: PathBuf,
    /// Scale with which it applies to requests that name its base only. (llama.cpp's `/lora-adapters`.)
    pub scale: f32,
    created: u64,
    /// Number of the load, which distinguishes it from earlier ones of its name.
    generation: u64,
}

/// All adapters, in order of their ids.
#[derive(Debug, Default)]
pub(super) struct AdapterTable {
    folders: Vec<PathBuf>,
    adapters: Mutex<(Vec<NamedAdapter>, u64)>,
}

impl AdapterTable {
    pub(super) fn new(settings: AdapterSettings) -> Self {
        let AdapterSettings { given, folders } = settings;
        // Adapters of the command line may be loaded again.
        let folders = given.iter().map(|adapter| adapter.path.clone()).chain(folders);
        let folders = folders.filter_map(|folder| folder.canonicalize().ok()).collect();
        let table = Self { folders, adapters: Mutex::default() };
        given.into_iter().for_each(|AdapterSetting { name, base, path }| table.put(name, base, path));
        table
    }

    fn all(&self) -> MutexGuard<'_, (Vec<NamedAdapter>, u64)> {
        self.adapters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an adapter, or replaces the one with its name and base.
    fn put(&self, name: String, base: String, path: PathBuf) {
        let mut all = self.all();
        let (adapters, generations) = &mut *all;
        *generations += 1;
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        let new = NamedAdapter { name, base, path, scale: 0.0, created, generation: *generations };
        match adapters.iter_mut().find(|it| (&it.name, &it.base) == (&new.name, &new.base)) {
            Some(old) => *old = new,
            None => adapters.push(new),
        }
    }

    /// Returns the adapters with this name.
    fn named(&self, name: &str) -> Vec<NamedAdapter> {
        self.all().0.iter().filter(|adapter| adapter.name == name).cloned().collect()
    }

    /// Resolves the path of a request: it must be in one of the folders.
    fn allowed(&self, path: &str) -> Result<PathBuf, ApiError> {
        let refuse = || {
            let message = format!(
                "`{path}` is neither in the library nor an adapter that was given to `paguro serve --lora`"
            );
            ApiError::Forbidden(message)
        };
        let path = Path::new(path).canonicalize().map_err(|_| refuse())?;
        match self.folders.iter().any(|folder| path.starts_with(folder)) {
            true => Ok(path),
            false => Err(refuse()),
        }
    }
}

/// Adapters that are loaded in a resident model, by name and number of their load.
#[derive(Debug, Default)]
pub(super) struct LoadedAdapters {
    loaded: Mutex<HashMap<String, (u64, Adapter)>>,
    /// Held during a load, so that requests share it.
    loading: tokio::sync::Mutex<()>,
}

impl LoadedAdapters {
    fn loaded(&self) -> MutexGuard<'_, HashMap<String, (u64, Adapter)>> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self, named: &NamedAdapter) -> Option<Adapter> {
        let loaded = self.loaded();
        let found = loaded.get(&named.name).filter(|(generation, _)| *generation == named.generation);
        found.map(|(_, adapter)| adapter.clone())
    }

    /// Returns all of them, in order of their names.
    pub(super) fn list(&self) -> Vec<Adapter> {
        let mut all: Vec<_> = self.loaded().values().map(|(_, adapter)| adapter.clone()).collect();
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

impl Models {
    /// Returns all adapters in order of their ids.
    pub fn adapters(&self) -> Vec<NamedAdapter> {
        self.adapters.all().0.clone()
    }

    /// Finds an adapter by `NAME`, or by `BASE::NAME`. `None` if no adapter has the name.
    pub(super) async fn find_adapter(
        &self,
        name: &str,
    ) -> Result<Option<(NamedAdapter, ModelEntry)>, ApiError> {
        let (base, own) = match name.split_once("::") {
            Some((base, own)) => (Some(base), own),
            None => (None, name),
        };
        let mut found = self.adapters.named(own);
        if found.is_empty() {
            return Ok(None);
        }
        if let Some(base) = base {
            let base = self.find_model(base).await?.name;
            found.retain(|adapter| adapter.base == base);
        }
        match found.as_slice() {
            [] => Ok(None),
            [adapter] => Ok(Some((adapter.clone(), self.find_model(&adapter.base).await?))),
            [one, ..] => {
                let message =
                    format!("several models have an adapter `{own}`; name one as `{}::{own}`", one.base);
                Err(ApiError::invalid("model", message))
            }
        }
    }

    /// Returns the entry of an adapter: that of its base, under its own name.
    pub(super) fn adapter_entry(adapter: &NamedAdapter, base: ModelEntry) -> ModelEntry {
        let (path, base_name) = (adapter.path.clone(), base.name.clone());
        ModelEntry {
            name: adapter.name.clone(),
            version: format!("{}+{}", base.version, adapter.generation),
            created: adapter.created,
            adapter: Some(AdapterPlace { base: base_name, path }),
            ..base
        }
    }

    /// Returns the entries of all adapters whose base exists.
    pub(super) fn adapter_entries(&self, models: &[ModelEntry]) -> Vec<ModelEntry> {
        let entry = |adapter: &NamedAdapter| {
            let base = models.iter().find(|model| model.name == adapter.base)?;
            Some(Self::adapter_entry(adapter, base.clone()))
        };
        self.adapters.all().0.iter().filter_map(entry).collect()
    }

    /// Adds an adapter for later requests, and loads it into its base. With `replace`, it may have the name of another one.
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
        let path = self.adapters.allowed(path)?;
        let base = match base {
            Some(base) => self.find_model(base).await?,
            None => self.find_model(&self.only().await?).await?,
        };
        let taken = self.adapters.named(name);
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
        let adapter = open(&lease, name.into(), path.clone()).await?;
        self.adapters.put(name.to_owned(), base.name.clone(), path);
        let put = self.adapters.named(name).into_iter().find(|adapter| adapter.base == base.name);
        if let Some(put) = put {
            lease.adapters_loaded().loaded().insert(put.name, (put.generation, adapter));
        }
        Ok(())
    }

    /// Removes an adapter. Its running requests end with it.
    ///
    /// # Errors
    /// There is none of this name.
    pub async fn unload_adapter(&self, name: &str) -> Result<(), ApiError> {
        let Some((adapter, _)) = self.find_adapter(name).await? else {
            return Err(ApiError::NotFound(format!(
                "there is no adapter `{name}`; /lora-adapters lists the adapters"
            )));
        };
        self.adapters.all().0.retain(|it| it.generation != adapter.generation);
        for resident in self.slots().values().filter_map(Slot::resident) {
            let mut loaded = resident.adapters.loaded();
            loaded.retain(|_, (generation, _)| *generation != adapter.generation);
        }
        Ok(())
    }

    /// Sets the scales with which adapters apply to requests that name only their base; those of others become 0.
    ///
    /// # Errors
    /// An id does not exist, or a scale is not finite.
    pub fn scale_adapters(&self, scales: &[(usize, f32)]) -> Result<(), ApiError> {
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
        let all = self.adapters();
        let uses: Vec<(NamedAdapter, f32)> = match (lora, named) {
            (Some(list), _) => {
                check_scales(list, all.len())?;
                list.iter().map(|&(id, scale)| (all[id].clone(), scale)).collect()
            }
            (None, Some(named)) => vec![(named, 1.0)],
            (None, None) => {
                let base = &lease.resident().entry.name;
                let own = all.into_iter().filter(|adapter| adapter.base == *base);
                own.map(|adapter| (adapter.clone(), adapter.scale)).collect()
            }
        };
        for (named, scale) in uses.into_iter().filter(|(_, scale)| *scale != 0.0) {
            let base = &lease.resident().entry.name;
            if named.base != *base {
                let message = format!("`{}` is an adapter of `{}`, not of `{base}`", named.name, named.base);
                return Err(ApiError::invalid("lora", message));
            }
            let adapter = self.loaded_adapter(&lease, &named).await?;
            lease.adapters.push((adapter, scale));
        }
        Ok(lease)
    }

    /// Returns a loaded adapter, which is loaded first if necessary.
    async fn loaded_adapter(&self, lease: &Lease, named: &NamedAdapter) -> Result<Adapter, ApiError> {
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
        let adapter = open(lease, named.name.as_str().into(), named.path.clone()).await?;
        loaded.loaded().insert(named.name.clone(), (named.generation, adapter.clone()));
        Ok(adapter)
    }
}

fn check_scales(scales: &[(usize, f32)], count: usize) -> Result<(), ApiError> {
    for (index, (id, scale)) in scales.iter().enumerate() {
        if *id >= count {
            let message = format!("there is no adapter {id}; /lora-adapters lists the {count} adapters");
            return Err(ApiError::NotFound(message));
        }
        if !scale.is_finite() || scales[..index].iter().any(|(other, _)| other == id) {
            return Err(ApiError::invalid(
                "lora",
                format!("adapter {id} has the scale {scale}, or two scales"),
            ));
        }
    }
    Ok(())
}

/// Opens an adapter and loads it into the engine of a leased model.
async fn open(lease: &Lease, name: Arc<str>, path: PathBuf) -> Result<Adapter, ApiError> {
    let Resident { model, handle, .. } = lease.resident();
    let (model, handle) = (model.clone(), handle.clone());
    let load = move || {
        let file = AdapterFile::open(&path).map_err(|error| LoadError::Unsupported(error.to_string()))?;
        handle.check_adapter(&name, file.rank(), file.bytes()).map_err(|error| refused(&error))?;
        let pairs = file.fit(&model).map_err(|error| LoadError::Unsupported(error.to_string()))?;
        handle.load_adapter(AdapterWeights { name, pairs }).map_err(|error| refused(&error))
    };
    Ok(blocking(load).await?)
}
