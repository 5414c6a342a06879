//! Resident models. A model is loaded on its first request and stays while requests use it and for `keep_alive`
//! afterwards. If another model needs the memory, the least recently used one is unloaded.

mod adapter_table;
mod adapters;
mod resident;

use std::{
    collections::{HashMap, HashSet, hash_map::Entry},
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use paguro_engine::MemoryPlan;
use paguro_library::{digest_name, plain_name};
use paguro_model::ModelFile;
use tokio::{
    sync::{Notify, watch},
    task::spawn_blocking,
};

use adapter_table::AdapterTable;
pub use adapter_table::{AdapterSetting, AdapterSettings, NamedAdapter};
use adapters::Named;
use resident::Slot;
pub use resident::{KeepAliveSetter, Lease, Resident, ResidentInfo};

use crate::{
    error::ApiError,
    source::{Grant, LoadError, LoadPlan, Loaded, ModelEntry, ModelPreset, ModelSource, Outside, Presets},
    units::bytes,
};

/// Limits of residency.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Residency {
    /// Memory limit of all resident models together, in bytes: weights, K and V, buffers.
    pub memory: u64,
    /// Time that an unused model stays loaded; `None` for ever.
    pub keep_alive: Option<Duration>,
    /// Time that a request waits for memory.
    pub patience: Duration,
}

/// All models: those that are resident, and the source of the others.
#[derive(Debug)]
pub struct Models {
    source: Arc<dyn ModelSource>,
    residency: Residency,
    /// Returns freed memory to the system.
    release_memory: fn(),
    slots: Mutex<HashMap<Key, Slot>>,
    adapters: AdapterTable,
    /// Notified when a request stops using a model, and when a model is unloaded.
    changed: Notify,
    /// Number of successful loads.
    pub loads: AtomicU64,
    /// Number of failed loads.
    pub failed_loads: AtomicU64,
    /// Number of models unloaded to free memory or for lack of use.
    pub unloads: AtomicU64,
}

/// Name and version of a model.
type Key = (String, String);

impl Models {
    /// Creates the table without resident models.
    pub fn new(
        source: Arc<dyn ModelSource>,
        residency: Residency,
        adapters: AdapterSettings,
        release_memory: fn(),
    ) -> Arc<Self> {
        Arc::new(Self {
            source,
            residency,
            release_memory,
            slots: Mutex::default(),
            adapters: AdapterTable::new(adapters),
            changed: Notify::new(),
            loads: AtomicU64::new(0),
            failed_loads: AtomicU64::new(0),
            unloads: AtomicU64::new(0),
        })
    }

    /// Returns the memory limit of all resident models together, in bytes.
    pub fn memory(&self) -> u64 {
        self.residency.memory
    }

    /// Returns the context of the resident model, or else the one that a load would have.
    pub fn context(&self, entry: &ModelEntry) -> Option<usize> {
        let key = (entry.name.clone(), entry.version.clone());
        let resident = self.slots().get(&key).and_then(Slot::resident).map(|it| it.handle.max_context());
        resident.or(entry.details.context)
    }

    /// Returns all models that requests can name, then all adapters.
    ///
    /// # Errors
    /// The library cannot be read.
    pub async fn list(&self) -> Result<Vec<ModelEntry>, ApiError> {
        let source = self.source.clone();
        let mut models = blocking(move || source.list()).await?;
        let adapters = self.adapter_entries(&models);
        models.extend(adapters);
        Ok(models)
    }

    /// Returns the adapter with this name, or the model with this name or digest.
    ///
    /// # Errors
    /// [`ApiError::ModelNotFound`], or the library cannot be read.
    pub async fn find(&self, name: &str) -> Result<ModelEntry, ApiError> {
        Ok(self.find_named(name).await?.entry)
    }

    /// Returns the model with this name or digest.
    async fn find_model(&self, name: &str) -> Result<ModelEntry, ApiError> {
        let (source, name) = (self.source.clone(), name.to_owned());
        let find = move || match (source.find(&name), digest_name(&name)) {
            (Err(missing @ LoadError::NotFound(_)), Some((base, digits))) => {
                // As listed: an alias has a digest of its own.
                let is_meant = |entry: &ModelEntry| {
                    let is_named = plain_name(&entry.name).eq_ignore_ascii_case(plain_name(base));
                    (base.is_empty() || is_named) && entry.digest().starts_with(&digits)
                };
                let found = source.list()?.into_iter().find(is_meant);
                // Lists have aliases as well, whose model has another name.
                found.map_or(Err(missing), |entry| source.find(&entry.name))
            }
            (found, _) => found,
        };
        Ok(blocking(find).await?)
    }

    /// Returns the model of a request that names none: the only one that is loaded, or else the only one there is.
    ///
    /// # Errors
    /// There are several, or the library cannot be read.
    pub async fn only(&self) -> Result<String, ApiError> {
        let resident = self.resident();
        if let [resident] = &resident[..] {
            return Ok(resident.entry.name.clone());
        }
        let source = self.source.clone();
        let usable = move || {
            let mut entries = source.list()?;
            entries.retain(|entry| entry.details.problem.is_none() && entry.adapter.is_none());
            // An alias has the version of its model.
            let mut seen = HashSet::new();
            entries.retain(|entry| seen.insert(entry.version.clone()));
            Ok(entries)
        };
        match &blocking(usable).await?[..] {
            [only] if resident.is_empty() => Ok(only.name.clone()),
            _ => {
                let message = "`model` is missing, and this server has several models; /v1/models lists them";
                Err(ApiError::invalid("model", message))
            }
        }
    }

    /// Deletes the cached data of a removed model's requests.
    pub fn forget(&self, name: String) {
        self.forget_adapter(&name);
        let source = self.source.clone();
        spawn_blocking(move || source.forget(&name));
    }

    /// Checks that the adapter at `path` fits the model `base`. May block.
    ///
    /// # Errors
    /// It does not, with the names and shapes of both.
    pub fn check_adapter(&self, path: &Path, base: &str) -> Result<(), LoadError> {
        self.source.check_adapter(path, base)
    }

    /// Returns the place of a model outside of the library.
    pub fn outside(&self, name: &str) -> Option<Outside> {
        self.source.outside(name)
    }

    /// Returns the defaults of a model.
    ///
    /// # Errors
    /// [`ApiError::ModelNotFound`], or the library's error.
    pub async fn preset(&self, name: &str) -> Result<Presets, ApiError> {
        let name = match self.find_named(name).await?.adapter {
            // Only the library keeps presets of adapters.
            Some((adapter, base)) if !adapter.is_stored() => base.name,
            _ => name.to_owned(),
        };
        let source = self.source.clone();
        Ok(blocking(move || source.preset(&name)).await?)
    }

    /// Replaces the stored defaults of a model.
    ///
    /// # Errors
    /// A value is refused, or the model is outside of the library.
    pub async fn set_preset(&self, name: &str, preset: ModelPreset) -> Result<(), ApiError> {
        let (source, name) = (self.source.clone(), name.to_owned());
        Ok(blocking(move || source.set_preset(&name, preset)).await?)
    }

    /// Opens a model's file to read its header.
    ///
    /// # Errors
    /// The file cannot be read.
    pub async fn open(&self, entry: &ModelEntry) -> Result<ModelFile, ApiError> {
        let entry = match &entry.adapter {
            Some(adapter) => self.find_model(&adapter.base).await?,
            None => entry.clone(),
        };
        let source = self.source.clone();
        Ok(blocking(move || source.open(&entry)).await?)
    }

    /// Leases a model, which is loaded if necessary.
    ///
    /// # Errors
    /// The model is missing, cannot be loaded, or does not fit into memory.
    pub async fn lease(self: &Arc<Self>, name: &str) -> Result<Lease, ApiError> {
        self.lease_for(name, None).await
    }

    /// Leases a model for sequences of `context` tokens. If its context is shorter, it is loaded again where memory
    /// allows and no request uses it. Otherwise the lease has the shorter context.
    ///
    /// # Errors
    /// As [`Models::lease`].
    pub async fn lease_for(self: &Arc<Self>, name: &str, context: Option<usize>) -> Result<Lease, ApiError> {
        self.lease_with(name, context, None).await
    }

    /// Leases a model like [`Models::lease_for`], with adapters of this list of ids and scales instead of the one that `name`
    /// names.
    ///
    /// # Errors
    /// As [`Models::lease`]; an adapter is missing, or does not fit its base.
    pub async fn lease_with(
        self: &Arc<Self>,
        name: &str,
        context: Option<usize>,
        lora: Option<&[(usize, f32)]>,
    ) -> Result<Lease, ApiError> {
        let Named { entry, adapter } = self.find_named(name).await?;
        match adapter {
            None => self.adapt(self.lease_model(&entry, context).await?, None, lora).await,
            Some((adapter, base)) => {
                let mut lease = self.lease_model(&base, context).await?;
                lease.entry = entry;
                self.adapt(lease, Some(adapter), lora).await
            }
        }
    }

    /// Leases a model without adapters.
    async fn lease_model(
        self: &Arc<Self>,
        entry: &ModelEntry,
        context: Option<usize>,
    ) -> Result<Lease, ApiError> {
        let key = (entry.name.clone(), entry.version.clone());
        let mut may_grow = true;
        loop {
            let found = match self.slots().get(&key) {
                Some(Slot::Ready(resident)) => Ok(Lease::new(resident, self)),
                Some(Slot::Loading { outcome, .. }) => Err(Some(outcome.clone())),
                None => Err(None),
            };
            let mut outcome = match found {
                Ok(lease) => match context.filter(|&context| context > lease.handle.max_context()) {
                    None => return Ok(lease),
                    Some(context) => match self.make_way_to_grow(lease, context, &mut may_grow).await {
                        Some(lease) => return Ok(lease),
                        None => continue,
                    },
                },
                Err(outcome) => outcome,
            };
            let outcome = outcome.get_or_insert_with(|| self.start_loading(&key, entry, context));
            let ended = outcome.wait_for(Option::is_some).await;
            match ended.as_deref() {
                Ok(Some(Err(error))) => return Err(error.clone().into()),
                // The model may have been unloaded again since it was loaded.
                Ok(_) => {}
                Err(_) => return Err(ApiError::Unavailable("the server is shutting down".into())),
            }
        }
    }

    /// Returns the resident models in order of their names.
    pub fn resident(&self) -> Vec<ResidentInfo> {
        let mut list: Vec<_> = self
            .slots()
            .values()
            .filter_map(|slot| match slot {
                Slot::Ready(resident) => Some(resident.info()),
                Slot::Loading { .. } => None,
            })
            .collect();
        list.sort_by(|a, b| a.entry.name.cmp(&b.entry.name));
        list
    }

    /// Unloads models after `keep_alive` without use. Never returns.
    pub async fn unload_unused(&self) {
        loop {
            let now = Instant::now();
            let next = self.slots().values().filter_map(|slot| slot.resident()?.expires()).min();
            match next {
                Some(at) if at <= now => {
                    let due = |resident: &Resident| resident.expires().is_some_and(|at| at <= now);
                    self.unload_one(due).await;
                }
                Some(at) => {
                    let sleep = tokio::time::sleep_until(at.into());
                    tokio::select! { () = sleep => {}, () = self.changed.notified() => {} }
                }
                None => self.changed.notified().await,
            }
        }
    }

    /// Unloads a model unless it is in use. Returns true if it was loaded.
    pub async fn unload(&self, name: &str) -> bool {
        self.unload_one(|resident| resident.entry.name == name).await
    }

    /// Unloads all models, also those in use, and waits for their engines.
    pub async fn unload_all(&self) {
        let slots: Vec<_> = self.slots().drain().collect();
        for (_, slot) in slots {
            if let Slot::Ready(resident) = slot {
                self.end(resident).await;
            }
        }
    }

    /// Unloads a model whose context is too short, if it can be loaded with a longer one. Otherwise returns the lease.
    async fn make_way_to_grow(&self, lease: Lease, context: usize, may_grow: &mut bool) -> Option<Lease> {
        let wanted = context.min(lease.model.context_length);
        let (entry, loaded) = (lease.entry.clone(), lease.handle.max_context());
        let is_alone = |users: usize| lease.usage().users == users;
        let grows = std::mem::take(may_grow)
            && wanted > loaded
            && is_alone(1)
            && self.has_room_for(&entry, wanted).await
            && is_alone(1);
        if !grows {
            if lease.first_clamped() {
                let model = entry.name;
                tracing::info!(
                    model,
                    wanted = context,
                    loaded,
                    "a request wants a longer context than there is"
                );
            }
            return Some(lease);
        }
        drop(lease);
        tracing::info!(model = entry.name, loaded, wanted, "unloading, to load it with a longer context");
        self.unload_one(|resident| resident.entry == entry).await;
        None
    }

    /// Returns true if a model could be loaded for a sequence of `context` tokens after all unused models were unloaded.
    async fn has_room_for(&self, entry: &ModelEntry, context: usize) -> bool {
        let (source, wanted) = (self.source.clone(), entry.clone());
        let Ok(plan) = blocking(move || source.plan(&wanted, Some(context))).await else { return false };
        let stays = |slot: &&Slot| match slot {
            Slot::Ready(resident) => resident.entry != *entry && resident.usage().users > 0,
            Slot::Loading { .. } => true,
        };
        let taken: u64 = self.slots().values().filter(stays).map(Slot::bytes).sum();
        plan.context >= context && taken.saturating_add(plan.with(plan.kv_enough)) <= self.residency.memory
    }

    /// Starts loading a model, unless another request already has. Loading continues if the client disconnects, because
    /// most clients retry.
    fn start_loading(
        self: &Arc<Self>,
        key: &Key,
        entry: &ModelEntry,
        context: Option<usize>,
    ) -> watch::Receiver<Option<Result<(), LoadError>>> {
        let (sender, receiver) = watch::channel(None);
        match self.slots().entry(key.clone()) {
            Entry::Occupied(slot) => match slot.get() {
                Slot::Loading { outcome, .. } => return outcome.clone(),
                Slot::Ready(_) => {
                    sender.send_replace(Some(Ok(())));
                    return receiver;
                }
            },
            Entry::Vacant(slot) => {
                slot.insert(Slot::Loading { reserved: 0, outcome: receiver.clone() });
            }
        }
        let (models, key, entry) = (self.clone(), key.clone(), entry.clone());
        tokio::spawn(async move {
            let loaded = models.load(&key, &entry, context).await;
            let outcome = match loaded {
                Ok(loaded) => {
                    models.loads.fetch_add(1, Ordering::Relaxed);
                    let adapters = models.planned_bytes(&entry.name);
                    let resident = Resident::new(entry, loaded, adapters, models.residency.keep_alive);
                    models.slots().insert(key, Slot::Ready(Arc::new(resident)));
                    Ok(())
                }
                Err(error) => {
                    models.failed_loads.fetch_add(1, Ordering::Relaxed);
                    tracing::warn!(model = entry.name, %error, "the model could not be loaded");
                    models.slots().remove(&key);
                    Err(error)
                }
            };
            sender.send_replace(Some(outcome));
            models.changed.notify_waiters();
        });
        receiver
    }

    async fn load(&self, key: &Key, entry: &ModelEntry, context: Option<usize>) -> Result<Loaded, LoadError> {
        let (source, wanted) = (self.source.clone(), entry.clone());
        let plan = blocking(move || source.plan(&wanted, context)).await?;
        let plan = LoadPlan { adapters: self.planned_bytes(&entry.name), ..plan };
        let kv = self.make_room(key, entry, &plan).await?;
        let started = Instant::now();
        let (source, wanted) = (self.source.clone(), entry.clone());
        let grant = Grant { kv, context: plan.context };
        let release_memory = self.release_memory;
        let work = move || {
            let loaded = source.load(&wanted, grant);
            // Reading a tokenizer frees much memory, as does a failed load.
            release_memory();
            loaded
        };
        let loaded = blocking(work).await?;
        let seconds = started.elapsed().as_secs_f64();
        let MemoryPlan { weights, host, kv, states, buffers } = loaded.memory;
        let (context, device) = (loaded.engine.handle().max_context(), &loaded.device);
        tracing::info!(
            model = entry.name,
            seconds,
            device,
            context,
            weights,
            host,
            kv,
            states,
            buffers,
            "loaded"
        );
        if loaded.memory.total() > plan.with(grant.kv) {
            let planned = plan.with(grant.kv);
            tracing::warn!(model = entry.name, planned, "the model takes more memory than was planned");
        }
        Ok(loaded)
    }

    /// Reserves memory for a model. Unloads unused models, and waits for models in use. Returns the bytes for K and V:
    /// those of the settings if they fit, otherwise the rest beside models in use, but at least `kv_least`.
    async fn make_room(&self, key: &Key, entry: &ModelEntry, plan: &LoadPlan) -> Result<u64, LoadError> {
        let Residency { memory, patience, .. } = self.residency;
        let least = plan.with(plan.kv_least);
        if least > memory {
            return Err(LoadError::TooLarge(format!(
                "`{}` needs {} of memory (weights {}, buffers {}, adapters {}, at least {} for K and V), but all models together \
                 may take {}; raise --memory, or use a smaller model, --kv-dtype q8 or --kv-dtype q4",
                entry.name,
                bytes(least),
                bytes(plan.weights),
                bytes(plan.buffers),
                bytes(plan.adapters),
                bytes(plan.kv_least),
                bytes(memory)
            )));
        }
        let deadline = Instant::now() + patience;
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            // The future is registered before the check, so that it misses no notification.
            changed.as_mut().enable();
            {
                let mut slots = self.slots();
                let taken: u64 = slots.values().map(Slot::bytes).sum();
                let left = memory.saturating_sub(taken);
                let some_can_go = slots.values().any(Slot::is_unused);
                if left >= plan.with(plan.kv_enough) || left >= least && !some_can_go {
                    let granted = left.min(plan.with(plan.kv_most));
                    if let Some(Slot::Loading { reserved, .. }) = slots.get_mut(key) {
                        *reserved = granted;
                    }
                    return Ok(granted - plan.with(0));
                }
            }
            if self.unload_one(|_| true).await {
                continue;
            }
            if tokio::time::timeout_at(deadline.into(), changed).await.is_err() {
                let name = &entry.name;
                return Err(LoadError::Failed(format!(
                    "there is no room for `{name}`: the models that are loaded are all in use; try again later"
                )));
            }
        }
    }

    /// Unloads the least recently used of the unused models that `may_go` accepts, and waits for its engine. Returns
    /// false if there is none.
    async fn unload_one(&self, may_go: impl Fn(&Resident) -> bool) -> bool {
        let resident = {
            let mut slots = self.slots();
            let unused = slots.iter().filter_map(|(key, slot)| {
                let resident = slot.resident()?;
                let usage = *resident.usage();
                (usage.users == 0 && may_go(resident)).then_some((usage.since, key))
            });
            let Some(key) = unused.min().map(|(_, key)| key.clone()) else { return false };
            match slots.remove(&key) {
                Some(Slot::Ready(resident)) => resident,
                _ => return false,
            }
        };
        tracing::info!(model = resident.entry.name, "unloaded");
        self.unloads.fetch_add(1, Ordering::Relaxed);
        self.end(resident).await;
        self.changed.notify_waiters();
        true
    }

    /// Ends an engine and waits for it, so that its memory is free afterwards. A lease that is being dropped may hold
    /// it slightly longer.
    async fn end(&self, resident: Arc<Resident>) {
        let Some(mut resident) = Arc::into_inner(resident) else { return };
        let release_memory = self.release_memory;
        let end = move || {
            resident.end();
            drop(resident);
            release_memory();
        };
        // A panic of the engine thread was already caught.
        let _ = spawn_blocking(end).await;
    }

    fn slots(&self) -> MutexGuard<'_, HashMap<Key, Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs work that may block or panic on a blocking thread.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, LoadError> + Send + 'static,
) -> Result<T, LoadError> {
    spawn_blocking(work)
        .await
        .unwrap_or_else(|error| Err(LoadError::Failed(format!("loading ended: {error}"))))
}
