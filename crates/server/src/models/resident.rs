//! Loaded models, and the leases that keep them loaded.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use paguro_engine::{Adapter, Engine, Handle, MemoryPlan};
use paguro_model::Model;
use tokio::sync::watch;

use super::{Models, adapters::LoadedAdapters};
use crate::source::{LoadError, Loaded, ModelEntry};

/// State of a model in the table.
#[derive(Debug)]
pub(super) enum Slot {
    Loading {
        /// Reserved bytes; 0 while it waits for memory.
        reserved: u64,
        /// Result of loading; `None` until it has ended.
        outcome: watch::Receiver<Option<Result<(), LoadError>>>,
    },
    Ready(Arc<Resident>),
}

/// A loaded model.
#[derive(Debug)]
pub struct Resident {
    /// Source of the model.
    pub entry: ModelEntry,
    /// The model.
    pub model: Arc<Model>,
    /// Handle of its engine.
    pub handle: Handle,
    /// The device's name.
    pub device: String,
    /// Its memory.
    pub memory: MemoryPlan,
    /// Tokens in a page.
    pub block_size: usize,
    /// `None` after the engine has ended. Ending it waits for its thread.
    engine: Option<Engine>,
    /// Its adapters.
    pub(super) adapters: LoadedAdapters,
    /// Bytes that were planned for adapters.
    planned_adapters: u64,
    usage: Mutex<Use>,
    /// True after a request for a longer context was logged.
    is_clamped: AtomicBool,
}

/// Number of leases of a model, and the end of the last one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Use {
    /// Number of requests that hold a lease.
    pub(super) users: usize,
    /// End of the last lease.
    pub(super) since: Instant,
    keep_alive: Option<Duration>,
}

/// A lease of a resident model, which stays loaded while the lease exists.
#[derive(Debug)]
pub struct Lease {
    /// The model as the request names it: its own entry, or that of an adapter.
    pub entry: ModelEntry,
    /// The model, with the tokens and the chat template of the adapter that the request names.
    pub model: Arc<Model>,
    /// Adapters of the request with their scales.
    pub adapters: Vec<(Adapter, f32)>,
    resident: Arc<Resident>,
    models: Arc<Models>,
}

/// A resident model, for lists.
#[derive(Clone, Debug)]
pub struct ResidentInfo {
    /// Source of the model.
    pub entry: ModelEntry,
    /// The model.
    pub model: Arc<Model>,
    /// Handle of its engine.
    pub handle: Handle,
    /// The device's name.
    pub device: String,
    /// Its memory without adapters.
    pub memory: MemoryPlan,
    /// Bytes of the model and its adapters.
    pub bytes: u64,
    /// Tokens in a page.
    pub block_size: usize,
    /// Adapters that are loaded.
    pub adapters: Vec<Adapter>,
    /// Number of requests that hold a lease.
    pub users: usize,
    /// Time until it is unloaded without further requests; `None` is never. For a model in use, counted from now.
    pub expires_in: Option<Duration>,
}

impl Slot {
    pub(super) fn resident(&self) -> Option<&Resident> {
        match self {
            Self::Ready(resident) => Some(resident),
            Self::Loading { .. } => None,
        }
    }

    /// Returns true for a resident model without leases.
    pub(super) fn is_unused(&self) -> bool {
        self.resident().is_some_and(|resident| resident.usage().users == 0)
    }

    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::Ready(resident) => resident.bytes(),
            Self::Loading { reserved, .. } => *reserved,
        }
    }
}

impl Resident {
    pub(super) fn new(
        entry: ModelEntry,
        loaded: Loaded,
        planned_adapters: u64,
        keep_alive: Option<Duration>,
    ) -> Self {
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
            adapters: LoadedAdapters::default(),
            planned_adapters,
            usage: Mutex::new(usage),
            is_clamped: AtomicBool::new(false),
        }
    }

    /// Returns the bytes that it uses or may use.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes_with(0)
    }

    /// Returns the bytes with another adapter of `bytes`.
    pub(super) fn bytes_with(&self, bytes: u64) -> u64 {
        self.memory.total() + self.planned_adapters.max(self.adapters.bytes() + bytes)
    }

    /// Ends the engine and waits for its thread.
    pub(super) fn end(&mut self) {
        drop(self.engine.take());
    }

    /// Returns true the first time that a request needs a longer context than the loaded one.
    pub(super) fn first_clamped(&self) -> bool {
        !self.is_clamped.swap(true, Ordering::Relaxed)
    }

    pub(super) fn usage(&self) -> MutexGuard<'_, Use> {
        self.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the time at which the model is unloaded; `None` while it is in use, and if it stays for ever.
    pub(super) fn expires(&self) -> Option<Instant> {
        let Use { users, since, keep_alive } = *self.usage();
        if users == 0 { since.checked_add(keep_alive?) } else { None }
    }

    pub(super) fn info(&self) -> ResidentInfo {
        let Use { users, since, keep_alive } = *self.usage();
        let idle = if users == 0 { since.elapsed() } else { Duration::ZERO };
        ResidentInfo {
            entry: self.entry.clone(),
            model: self.model.clone(),
            handle: self.handle.clone(),
            device: self.device.clone(),
            memory: self.memory,
            bytes: self.memory.total() + self.adapters.bytes(),
            block_size: self.block_size,
            adapters: self.adapters.list(),
            users,
            expires_in: keep_alive.map(|time| time.saturating_sub(idle)),
        }
    }
}

impl Drop for Resident {
    /// Ends the engine on another thread, because ending waits.
    fn drop(&mut self) {
        if let (Some(engine), Ok(runtime)) = (self.engine.take(), tokio::runtime::Handle::try_current()) {
            runtime.spawn_blocking(move || drop(engine));
        }
    }
}

/// Setter of a resident model's `keep_alive`.
#[derive(Debug)]
pub struct KeepAliveSetter(Weak<Resident>);

impl KeepAliveSetter {
    /// Sets the time that the model stays loaded after its last use; `None` is for ever.
    pub fn set(&self, time: Option<Duration>) {
        if let Some(resident) = self.0.upgrade() {
            resident.usage().keep_alive = time;
        }
    }
}

impl Lease {
    /// Adds a lease of a resident model.
    pub(super) fn new(resident: &Arc<Resident>, models: &Arc<Models>) -> Self {
        resident.usage().users += 1;
        Self {
            entry: resident.entry.clone(),
            model: resident.model.clone(),
            adapters: Vec::new(),
            resident: resident.clone(),
            models: models.clone(),
        }
    }

    /// Returns the model, without adapters.
    pub(super) fn resident(&self) -> &Resident {
        &self.resident
    }

    /// Returns the model without its adapter, if the adapter has tokens or a chat template of its own.
    pub fn base_of_dialect(&self) -> Option<&Arc<Model>> {
        Some(&self.resident.model).filter(|base| !Arc::ptr_eq(base, &self.model))
    }

    /// Returns the adapters that are loaded in the model.
    pub(super) fn adapters_loaded(&self) -> &LoadedAdapters {
        &self.resident.adapters
    }

    /// Returns a setter of `keep_alive` that is valid after this lease has ended.
    pub fn keep_alive_setter(&self) -> KeepAliveSetter {
        KeepAliveSetter(Arc::downgrade(&self.resident))
    }

    /// Sets the time that the model stays loaded after its last use; `None` is for ever.
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
