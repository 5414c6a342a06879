//! Locks between processes. The system releases them when a process ends, however it ends.

use std::{
    fs::{File, OpenOptions, TryLockError},
    path::Path,
    thread,
    time::Duration,
};

use crate::{cancel::Cancel, error::RegistryError};

/// How often a lock that somebody else has is tried again.
const PAUSE: Duration = Duration::from_millis(50);
/// How often at most, for those who do not want to wait for somebody's work.
const PATIENCE: usize = 20;

/// A held lock.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

impl Lock {
    /// Waits until nobody has the lock exclusively; any number may share it.
    pub(crate) fn shared(path: &Path) -> Result<Self, RegistryError> {
        let file = open(path)?;
        file.lock_shared().map_err(RegistryError::io("lock", path))?;
        Ok(Self { _file: file })
    }

    /// Waits until nobody has the lock.
    pub(crate) fn exclusive(path: &Path) -> Result<Self, RegistryError> {
        let file = open(path)?;
        file.lock().map_err(RegistryError::io("lock", path))?;
        Ok(Self { _file: file })
    }

    /// Takes the lock, or fails with [`RegistryError::Busy`] if somebody keeps it for long: a process that has just been
    /// started by somebody else in this one may share its open files, and so its locks, until it runs its own program.
    pub(crate) fn exclusive_soon(path: &Path) -> Result<Self, RegistryError> {
        let mut pauses = 0..PATIENCE;
        Self::exclusive_if(path, || pauses.next().ok_or(RegistryError::Busy).map(drop))
    }

    /// Takes the lock if nobody has it.
    pub(crate) fn try_exclusive(path: &Path) -> Result<Option<Self>, RegistryError> {
        let file = open(path)?;
        match file.try_lock() {
            Ok(()) => Ok(Some(Self { _file: file })),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(RegistryError::io("lock", path)(error)),
        }
    }

    /// Waits until nobody has the lock, or the caller has enough; says once that it waits.
    pub(crate) fn exclusive_unless(
        path: &Path,
        cancel: &Cancel,
        waiting: impl FnOnce(),
    ) -> Result<Self, RegistryError> {
        let mut waiting = Some(waiting);
        Self::exclusive_if(path, || {
            if let Some(waiting) = waiting.take() {
                waiting();
            }
            cancel.check()
        })
    }

    /// Tries until nobody has the lock, as long as nothing speaks against another pause.
    fn exclusive_if(
        path: &Path,
        mut may_pause: impl FnMut() -> Result<(), RegistryError>,
    ) -> Result<Self, RegistryError> {
        loop {
            if let Some(lock) = Self::try_exclusive(path)? {
                return Ok(lock);
            }
            may_pause()?;
            thread::sleep(PAUSE);
        }
    }
}

fn open(path: &Path) -> Result<File, RegistryError> {
    OpenOptions::new()
        .create(true)
        .truncate(false)
        .read(true)
        .write(true)
        .open(path)
        .map_err(RegistryError::io("open", path))
}
