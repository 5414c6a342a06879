//! Which models are resident. A model is loaded when it is first asked for, stays while somebody uses it and
//! `keep_alive` longer, and makes room, the least recently used first, when another one needs the memory.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use paguro_engine::{Engine, Handle, MemoryPlan};
use paguro_model::{Model, ModelFile};
use tokio::{
    sync::{Notify, watch},
    task::spawn_blocking,
};

use crate::{
    error::ApiError,
    source::{Grant, LoadError, LoadPlan, Loaded, ModelEntry, ModelSource, Outside},
};

/// How residency is bounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Residency {
    /// Bytes that all resident models take together: weights, K and V, buffers.
    pub memory: u64,
    /// How long an unused model stays; `None` is for ever.
    pub keep_alive: Option<Duration>,
    /// How long a request waits for others to end so that its model finds room.
    pub patience: Duration,
}

/// All models: those that are resident, and the source of the others.
#[derive(Debug)]
pub struct Models {
    source: Arc<dyn ModelSource>,
    residency: Residency,
    /// Gives memory back to the system that an unloaded model has left.
    release_memory: fn(),
    slots: Mutex<HashMap<Key, Slot>>,
    /// Somebody has stopped using a model, or a model has gone.
    changed: Notify,
    /// Loads so far, by how they ended.
    pub loads: AtomicU64,
    /// See [`Models::loads`].
    pub failed_loads: AtomicU64,
    /// Models that had to go, for others or because nobody used them.
    pub unloads: AtomicU64,
}

/// Name and version: a name that means something else now is another model.
type Key = (String, String);

#[derive(Debug)]
enum Slot {
    Loading {
        /// Bytes set aside for it; none while it waits for room.
        reserved: u64,
        /// `None` until it has ended.
        outcome: watch::Receiver<Option<Result<(), LoadError>>>,
    },
    Ready(Arc<Resident>),
}

/// A model that is loaded.
#[derive(Debug)]
pub struct Resident {
    /// What it was loaded from.
    pub entry: ModelEntry,
    /// The model.
    pub model: Arc<Model>,
    /// The way to ask it.
    pub handle: Handle,
    /// The device's name.
    pub device: String,
    /// Bytes that it takes.
    pub memory: MemoryPlan,
    /// Tokens in a page.
    pub block_size: usize,
    /// Taken out when it ends, because that waits for a thread.
    engine: Option<Engine>,
    usage: Mutex<Use>,
    /// True once the log says that requests want a longer context than there is.
    is_clamped: AtomicBool,
}

#[derive(Clone, Copy, Debug)]
struct Use {
    /// Requests that hold it.
    users: usize,
    /// When the last one let go.
    since: Instant,
    keep_alive: Option<Duration>,
}

/// The right to use a resident model: it stays as long as this lives.
#[derive(Debug)]
pub struct Lease {
    resident: Arc<Resident>,
    models: Arc<Models>,
}

/// A resident model, for lists.
#[derive(Clone, Debug)]
pub struct ResidentInfo {
    /// What it was loaded from.
    pub entry: ModelEntry,
    /// The model.
    pub model: Arc<Model>,
    /// The way to ask it.
    pub handle: Handle,
    /// The device's name.
    pub device: String,
    /// Bytes that it takes.
    pub memory: MemoryPlan,
    /// Tokens in a page.
    pub block_size: usize,
    /// Requests that hold it.
    pub users: usize,
    /// In how long it goes if nobody asks for it; `None` is never. While it is in use, counted from now.
    pub expires_in: Option<Duration>,
}

impl Models {
    /// Nothing is loaded yet.
    pub fn new(source: Arc<dyn ModelSource>, residency: Residency, release_memory: fn()) -> Arc<Self> {
        Arc::new(Self {
            source,
            residency,
            release_memory,
            slots: Mutex::default(),
            changed: Notify::new(),
            loads: AtomicU64::new(0),
            failed_loads: AtomicU64::new(0),
            unloads: AtomicU64::new(0),
        })
    }

    /// Bytes that all resident models may take together.
    pub fn memory(&self) -> u64 {
        self.residency.memory
    }

    /// Most tokens of a prompt with its answer: of the resident model, or as it would be loaded.
    pub fn context(&self, entry: &ModelEntry) -> Option<usize> {
        let key = (entry.name.clone(), entry.version.clone());
        let resident = self.slots().get(&key).and_then(Slot::resident).map(|it| it.handle.max_context());
        resident.or(entry.details.context)
    }

    /// All models that can be asked for.
    ///
    /// # Errors
    /// What is wrong with the library.
    pub async fn list(&self) -> Result<Vec<ModelEntry>, ApiError> {
        let source = self.source.clone();
        Ok(blocking(move || source.list()).await?)
    }

    /// The model that a name means.
    ///
    /// # Errors
    /// [`ApiError::ModelNotFound`], or what is wrong with the library.
    pub async fn find(&self, name: &str) -> Result<ModelEntry, ApiError> {
        let (source, name) = (self.source.clone(), name.to_owned());
        Ok(blocking(move || source.find(&name)).await?)
    }

    /// Where a model lies that is not the library's.
    pub fn outside(&self, name: &str) -> Option<Outside> {
        self.source.outside(name)
    }

    /// Opens a model's file, to see what it says of itself.
    ///
    /// # Errors
    /// What is wrong with it.
    pub async fn open(&self, entry: &ModelEntry) -> Result<ModelFile, ApiError> {
        let (source, entry) = (self.source.clone(), entry.clone());
        Ok(blocking(move || source.open(&entry)).await?)
    }

    /// The model of this name, loaded now if it is not yet.
    ///
    /// # Errors
    /// There is none, it cannot be loaded, or there is no room for it.
    pub async fn lease(self: &Arc<Self>, name: &str) -> Result<Lease, ApiError> {
        self.lease_for(name, None).await
    }

    /// As [`Models::lease`], for sequences of `context` tokens: a model that nobody uses is loaded again with more pages
    /// where memory allows. Otherwise its context stays, and the caller has to make do with it.
    ///
    /// # Errors
    /// As [`Models::lease`].
    pub async fn lease_for(self: &Arc<Self>, name: &str, context: Option<usize>) -> Result<Lease, ApiError> {
        let entry = self.find(name).await?;
        let key = (entry.name.clone(), entry.version.clone());
        let mut may_grow = true;
        loop {
            let found = match self.slots().get(&key) {
                Some(Slot::Ready(resident)) => Ok(self.hold(resident)),
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
            let outcome = outcome.get_or_insert_with(|| self.start_loading(&key, &entry, context));
            let ended = outcome.wait_for(Option::is_some).await;
            match ended.as_deref() {
                Ok(Some(Err(error))) => return Err(error.clone().into()),
                // Ready; though it may have had to go again before we came to take it.
                Ok(_) => {}
                Err(_) => return Err(ApiError::Unavailable("the server is shutting down".into())),
            }
        }
    }

    /// Resident models, by name.
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

    /// Unloads models whose time has come, for as long as the server runs.
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

    /// Unloads everything, used or not, and waits until it is gone. Nothing is loaded after this if nobody asks.
    pub async fn unload_all(&self) {
        let slots: Vec<_> = self.slots().drain().collect();
        for (_, slot) in slots {
            if let Slot::Ready(resident) = slot {
                self.end(resident).await;
            }
        }
    }

    /// Unloads a model whose context is too short, if it can be loaded with a longer one. Returns the lease if it stays.
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
            if !lease.is_clamped.swap(true, Ordering::Relaxed) {
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

    /// Whether a model has room for a sequence of `context` tokens when all that nobody uses is unloaded.
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

    fn hold(self: &Arc<Self>, resident: &Arc<Resident>) -> Lease {
        resident.usage().users += 1;
        Lease { resident: resident.clone(), models: self.clone() }
    }

    /// Starts to load a model, unless somebody has started meanwhile. It goes on if whoever asked goes away: most
    /// likely they come back.
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
                    let resident = Resident::new(entry, loaded, models.residency.keep_alive);
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
        let kv = self.make_room(key, entry, &plan).await?;
        let started = Instant::now();
        let (source, wanted) = (self.source.clone(), entry.clone());
        let grant = Grant { kv, context: plan.context };
        let release_memory = self.release_memory;
        let work = move || {
            let loaded = source.load(&wanted, grant);
            // Reading a tokenizer leaves much behind, and so does a load that failed.
            release_memory();
            loaded
        };
        let loaded = blocking(work).await?;
        let seconds = started.elapsed().as_secs_f64();
        let MemoryPlan { weights, kv, buffers } = loaded.memory;
        let (context, device) = (loaded.engine.handle().max_context(), &loaded.device);
        tracing::info!(model = entry.name, seconds, device, context, weights, kv, buffers, "loaded");
        if loaded.memory.total() > plan.with(grant.kv) {
            let planned = plan.with(grant.kv);
            tracing::warn!(model = entry.name, planned, "the model takes more memory than was planned");
        }
        Ok(loaded)
    }

    /// Sets memory aside, unloading what nobody uses and waiting for what somebody does. Returns the bytes for K and V: as
    /// many as settings want, where that leaves the models alone that are loaded or they can go; what is left beside models
    /// that are in use, but enough for a short conversation, where they cannot.
    async fn make_room(&self, key: &Key, entry: &ModelEntry, plan: &LoadPlan) -> Result<u64, LoadError> {
        let Residency { memory, patience, .. } = self.residency;
        let least = plan.with(plan.kv_least);
        if least > memory {
            let (name, LoadPlan { weights, buffers, kv_least, .. }) = (&entry.name, plan);
            return Err(LoadError::TooLarge(format!(
                "`{name}` needs {least} bytes of memory (weights {weights}, buffers {buffers}, at least \
                 {kv_least} for K and V), but all models together may take {memory}; raise --memory, or \
                 use a smaller model or --kv-dtype q8"
            )));
        }
        let deadline = Instant::now() + patience;
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            // From here on no change is missed.
            changed.as_mut().enable();
            {
                let mut slots = self.slots();
                let taken: u64 = slots.values().map(Slot::bytes).sum();
                let left = memory.saturating_sub(taken);
                let some_can_go = slots.values().any(Slot::is_unused);
                if left >= plan.with(plan.kv_enough) || left >= least && !some_can_go {
                    let bytes = left.min(plan.with(plan.kv_most));
                    if let Some(Slot::Loading { reserved, .. }) = slots.get_mut(key) {
                        *reserved = bytes;
                    }
                    return Ok(bytes - plan.with(0));
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

    /// Unloads the unused model that was used longest ago, of those that may go, and waits until it is gone.
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

    /// Ends an engine and waits for it, so that its memory is free when this returns. (A lease that is just being
    /// dropped may hold it a moment longer.)
    async fn end(&self, resident: Arc<Resident>) {
        let Some(mut resident) = Arc::into_inner(resident) else { return };
        let release_memory = self.release_memory;
        let end = move || {
            drop(resident.engine.take());
            drop(resident);
            release_memory();
        };
        // A panic of the engine thread was caught there; dropping it has nothing to report.
        let _ = spawn_blocking(end).await;
    }

    fn slots(&self) -> MutexGuard<'_, HashMap<Key, Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs what may block, or panic, elsewhere.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, LoadError> + Send + 'static,
) -> Result<T, LoadError> {
    spawn_blocking(work)
        .await
        .unwrap_or_else(|error| Err(LoadError::Failed(format!("loading ended: {error}"))))
}

impl Slot {
    fn resident(&self) -> Option<&Resident> {
        match self {
            Self::Ready(resident) => Some(resident),
            Self::Loading { .. } => None,
        }
    }

    /// True for a resident model that nobody uses.
    fn is_unused(&self) -> bool {
        self.resident().is_some_and(|resident| resident.usage().users == 0)
    }

    fn bytes(&self) -> u64 {
        match self {
            Self::Ready(resident) => resident.memory.total(),
            Self::Loading { reserved, .. } => *reserved,
        }
    }
}

impl Resident {
    fn new(entry: ModelEntry, loaded: Loaded, keep_alive: Option<Duration>) -> Self {
        let Loaded { model, engine, device, memory, block_size } = loaded;
        let usage = Use { users: 0, since: Instant::now(), keep_alive };
        let handle = engine.handle();
        Self {
            entry,
            model,
            handle,
            device,
            memory,
            block_size,
            engine: Some(engine),
            usage: Mutex::new(usage),
            is_clamped: AtomicBool::new(false),
        }
    }

    fn usage(&self) -> MutexGuard<'_, Use> {
        self.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// When it goes; `None` while somebody uses it, and if it may stay for ever.
    fn expires(&self) -> Option<Instant> {
        let Use { users, since, keep_alive } = *self.usage();
        if users == 0 { since.checked_add(keep_alive?) } else { None }
    }

    fn info(&self) -> ResidentInfo {
        let Use { users, since, keep_alive } = *self.usage();
        let idle = if users == 0 { since.elapsed() } else { Duration::ZERO };
        ResidentInfo {
            entry: self.entry.clone(),
            model: self.model.clone(),
            handle: self.handle.clone(),
            device: self.device.clone(),
            memory: self.memory,
            block_size: self.block_size,
            users,
            expires_in: keep_alive.map(|time| time.saturating_sub(idle)),
        }
    }
}

impl Drop for Resident {
    /// Waiting for the engine's thread must not hold up a thread that serves others.
    fn drop(&mut self) {
        if let (Some(engine), Ok(runtime)) = (self.engine.take(), tokio::runtime::Handle::try_current()) {
            runtime.spawn_blocking(move || drop(engine));
        }
    }
}

impl Lease {
    /// How long the model stays after its last use, from now on; `None` is for ever.
    pub fn keep_alive(&self, time: Option<Duration>) {
        self.resident.usage().keep_alive = time;
    }
}

impl std::ops::Deref for Lease {
    type Target = Resident;

    fn deref(&self) -> &Resident {
        &self.resident
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut usage = self.resident.usage();
        usage.users -= 1;
        if usage.users == 0 {
            usage.since = Instant::now();
            drop(usage);
            self.models.changed.notify_waiters();
        }
    }
}
