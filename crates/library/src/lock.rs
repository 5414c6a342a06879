//! Locks between processes. The system releases them when a process ends, however it ends.
//!
//! A writer holds a shared lock on the library from before it stores the first file until the catalogue has the model. A
//! process that deletes unused files holds it exclusively. Each download has a lock, so that two pulls of one file share
//! one download. A third lock orders changes of the catalogue and of the records.

use std::{
    fs::{File, OpenOptions, TryLockError},
    path::Path,
    thread,
    time::Duration,
};

use crate::{cancel::Cancel, error::LibraryError};

/// Interval between attempts to acquire a lock.
const PAUSE: Duration = Duration::from_millis(50);
/// Maximum number of attempts of callers that do not wait.
const PATIENCE: usize = 20;

/// A held lock.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

impl Lock {
    /// Waits for a shared lock.
    pub(crate) fn shared(path: &Path) -> Result<Self, LibraryError> {
        let file = open(path)?;
        file.lock_shared().map_err(LibraryError::io("lock", path))?;
        Ok(Self { _file: file })
    }

    /// Waits for the exclusive lock.
    pub(crate) fn exclusive(path: &Path) -> Result<Self, LibraryError> {
        let file = open(path)?;
        file.lock().map_err(LibraryError::io("lock", path))?;
        Ok(Self { _file: file })
    }

    /// Acquires the exclusive lock, or fails with [`LibraryError::Busy`] after some attempts. A process that this one
    /// has just started may share its open files, and so its locks, until it executes its program.
    pub(crate) fn exclusive_soon(path: &Path) -> Result<Self, LibraryError> {
        let mut pauses = 0..PATIENCE;
        Self::exclusive_if(path, || pauses.next().ok_or(LibraryError::Busy).map(drop))
    }

    /// Acquires the exclusive lock if it is free.
    pub(crate) fn try_exclusive(path: &Path) -> Result<Option<Self>, LibraryError> {
        let file = open(path)?;
        match file.try_lock() {
            Ok(()) => Ok(Some(Self { _file: file })),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(LibraryError::io("lock", path)(error)),
        }
    }

    /// Waits for the exclusive lock until it is free or the caller cancels; reports the wait once.
    pub(crate) fn exclusive_unless(
        path: &Path,
        cancel: &Cancel,
        waiting: impl FnOnce(),
    ) -> Result<Self, LibraryError> {
        let mut waiting = Some(waiting);
        Self::exclusive_if(path, || {
            if let Some(waiting) = waiting.take() {
                waiting();
            }
            cancel.check()
        })
    }

    /// Retries the exclusive lock until it is free or `may_pause` returns an error.
    fn exclusive_if(
        path: &Path,
        mut may_pause: impl FnMut() -> Result<(), LibraryError>,
    ) -> Result<Self, LibraryError> {
        loop {
            if let Some(lock) = Self::try_exclusive(path)? {
                return Ok(lock);
            }
            may_pause()?;
            thread::sleep(PAUSE);
        }
    }
}

fn open(path: &Path) -> Result<File, LibraryError> {
    OpenOptions::new()
        .create(true)
        .truncate(false)
        .read(true)
        .write(true)
        .open(path)
        .map_err(LibraryError::io("open", path))
}
