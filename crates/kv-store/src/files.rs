//! The folder of a store: permissions, the key, the lock, reads at positions.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Read, Write},
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::Duration,
};

use crate::{StoreError, record::Key};

const LOCK: &str = "lock";
const KEY: &str = "key";
/// How often a lock that somebody else has is tried, and the pause between two tries. A process that was just started may
/// share the lock until it runs its own program.
const TRIES: usize = 10;
const PAUSE: Duration = Duration::from_millis(50);

/// Segments with this number or a higher one are not of a store, so that a number always follows the last one.
const NUMBERS: u64 = 1 << 56;

/// An access to a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// An item is read.
    Read,
    /// A record is appended.
    Write,
}

/// A disk with errors and delays, for tests. It is called before each access with the number of bytes, and may wait or fail. A write of
/// which it allows fewer bytes is torn there, and fails.
pub type FaultyDisk = Arc<dyn Fn(Access, usize) -> io::Result<usize> + Send + Sync>;

/// Creates the folder with permissions for the user only, or removes the permissions of others.
pub(crate) fn folder(dir: &Path) -> Result<(), StoreError> {
    let failed = |source| StoreError::Io { action: "create", path: dir.to_owned(), source };
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(dir).map_err(failed)?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = fs::metadata(dir).map_err(failed)?.permissions().mode();
        if mode & 0o077 != 0 {
            fs::set_permissions(dir, fs::Permissions::from_mode(0o700)).map_err(failed)?;
        }
    }
    Ok(())
}

/// Options for new files: only the user reads them, and a link is never followed to another file.
pub(crate) fn private() -> OpenOptions {
    let mut options = OpenOptions::new();
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options
}

/// Takes the lock of a store.
pub(crate) fn lock(dir: &Path) -> Result<File, StoreError> {
    let path = dir.join(LOCK);
    let failed = |source| StoreError::Io { action: "lock", path: path.clone(), source };
    let mut options = private();
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, rustix::fs::OFlags::NOFOLLOW.bits() as i32);
    let file = options.create(true).truncate(false).read(true).write(true).open(&path).map_err(failed)?;
    for _ in 0..TRIES {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) => thread::sleep(PAUSE),
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
    }
    Err(StoreError::InUse { dir: dir.to_owned() })
}

/// Returns the key of a store. If there is none and it may `create` one, a new one, with which no older record is valid.
pub(crate) fn key(dir: &Path, create: bool) -> Result<Key, StoreError> {
    let path = dir.join(KEY);
    let failed = |action, source| StoreError::Io { action, path: path.clone(), source };
    let mut key = [0; 32];
    match regular(&path).and_then(|mut file| file.read_exact(&mut key)) {
        Ok(()) => return Ok(key),
        Err(error) if !create => return Err(failed("read", error)),
        Err(_) => {}
    }
    getrandom::fill(&mut key).map_err(|error| failed("create", io::Error::other(error)))?;
    replace(&path, &key).map_err(|error| failed("create", error))?;
    Ok(key)
}

/// Opens a file for reading, unless it is a link or no file. Never waits.
pub(crate) fn regular(path: &Path) -> io::Result<File> {
    if !fs::symlink_metadata(path)?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    File::open(path)
}

/// Writes a small file that only the user can read, in one step: it has the old content or the new one.
///
/// # Errors
/// The system's.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let new = path.with_extension("new");
    let _ = fs::remove_file(&new);
    let mut file = private().create_new(true).write(true).open(&new)?;
    file.write_all(bytes)?;
    drop(file);
    fs::rename(&new, path)
}

/// Returns the name of a segment.
pub(crate) fn segment(dir: &Path, number: u64) -> PathBuf {
    dir.join(format!("segment-{number:016x}.kv"))
}

/// Numbers of all segments of a folder, in order.
pub(crate) fn segments(dir: &Path) -> io::Result<Vec<u64>> {
    let mut numbers = Vec::new();
    for entry in fs::read_dir(dir)? {
        let name = entry?.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix("segment-")?.strip_suffix(".kv"));
        let number = number.filter(|number| number.len() == 16);
        let number = number.and_then(|number| u64::from_str_radix(number, 16).ok());
        numbers.extend(number.filter(|number| *number < NUMBERS));
    }
    numbers.sort_unstable();
    numbers.dedup();
    Ok(numbers)
}

/// Fills `out` with the bytes of a file from `offset` on.
pub(crate) fn read_at(file: &File, out: &mut [u8], offset: u64) -> io::Result<()> {
    #[cfg(unix)]
    return std::os::unix::fs::FileExt::read_exact_at(file, out, offset);
    #[cfg(not(unix))]
    {
        use std::io::{Seek, SeekFrom};
        let mut file = file;
        file.seek(SeekFrom::Start(offset))?;
        file.read_exact(out)
    }
}

/// Returns the bytes that are free for the user on the disk of a folder, or of the first folder above it that exists.
/// `None` where the system does not report it.
pub fn free_bytes(dir: &Path) -> Option<u64> {
    #[cfg(unix)]
    {
        let existing = dir.ancestors().find(|folder| folder.exists())?;
        let stat = rustix::fs::statvfs(existing).ok()?;
        stat.f_bavail.checked_mul(stat.f_frsize)
    }
    #[cfg(not(unix))]
    {
        let _ = dir;
        None
    }
}
