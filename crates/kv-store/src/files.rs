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

/// Locked by all processes that have the store open, exclusively by one that wants it alone.
const LOCK: &str = "lock";
/// Locked by the process that removes segments.
const LEADER: &str = "leader";
const KEY: &str = "key";
/// A note to the leader: another process has no room.
const ROOM: &str = "room-wanted";
/// Attempts to acquire a held lock, and the pause between them. A process that was just started may share the lock until it
/// runs its own program.
const TRIES: usize = 10;
const PAUSE: Duration = Duration::from_millis(50);
/// Age at which a temporary file has no writer any more.
const UNFINISHED: Duration = Duration::from_secs(60);

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

/// Opens a file that is only locked.
fn lock_file(path: &Path) -> io::Result<File> {
    let mut options = private();
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, rustix::fs::OFlags::NOFOLLOW.bits() as i32);
    options.create(true).truncate(false).read(true).write(true).open(path)
}

/// Takes the lock of a store, alone or with other processes.
pub(crate) fn lock(dir: &Path, is_shared: bool) -> Result<File, StoreError> {
    let path = dir.join(LOCK);
    let failed = |source| StoreError::Io { action: "lock", path: path.clone(), source };
    let file = lock_file(&path).map_err(failed)?;
    for _ in 0..TRIES {
        match if is_shared { file.try_lock_shared() } else { file.try_lock() } {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) => thread::sleep(PAUSE),
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
    }
    Err(StoreError::InUse { dir: dir.to_owned() })
}

/// Becomes the leader of a store. `None` if another process is.
pub(crate) fn lead(dir: &Path) -> io::Result<Option<File>> {
    let file = lock_file(&dir.join(LEADER))?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// The lease of a segment that a process appends to: a locked file beside it. A process that was killed holds none.
#[derive(Debug)]
pub(crate) struct Lease {
    path: PathBuf,
    _file: File,
}

impl Lease {
    /// Takes the lease of a new segment. `None` if another process has taken the number.
    pub fn take(dir: &Path, number: u64) -> io::Result<Option<Self>> {
        let path = lease(dir, number);
        let file = match private().create_new(true).read(true).write(true).open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(None),
            Err(error) => return Err(error),
        };
        match file.try_lock() {
            // Another process may have looked at the file before it was locked, and removed it.
            Ok(()) => {
                let is_there = fs::metadata(&path)
                    .is_ok_and(|found| file.metadata().is_ok_and(|own| identity(&own) == identity(&found)));
                Ok(is_there.then_some(Self { path, _file: file }))
            }
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // A file without a lock is no lease.
        let _ = fs::remove_file(&self.path);
    }
}

fn lease(dir: &Path, number: u64) -> PathBuf {
    dir.join(format!("writing-{number:016x}"))
}

/// Returns true if a process appends to a segment. A lease of a process that was killed is removed.
pub(crate) fn is_leased(dir: &Path, number: u64) -> bool {
    let path = lease(dir, number);
    let Ok(file) = regular(&path) else { return false };
    match file.try_lock() {
        Ok(()) => {
            let _ = fs::remove_file(&path);
            false
        }
        Err(_) => true,
    }
}

/// Leaves a note to the leader that another process needs room.
pub(crate) fn want_room(dir: &Path) -> io::Result<()> {
    private().create(true).truncate(true).write(true).open(dir.join(ROOM)).map(drop)
}

/// Returns true if another process needs room, and removes its note.
pub(crate) fn is_room_wanted(dir: &Path) -> bool {
    fs::remove_file(dir.join(ROOM)).is_ok()
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

/// Returns the key of a store that was just opened: a new one if there is none. Only the leader creates it; others wait for it.
pub(crate) fn first_key(dir: &Path, leads: bool) -> Result<Key, StoreError> {
    for _ in 0..TRIES {
        match key(dir, leads) {
            Ok(key) => return Ok(key),
            Err(error) if leads => return Err(error),
            Err(_) => thread::sleep(PAUSE),
        }
    }
    key(dir, false)
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
    // Several processes may write the same file, also ones with equal numbers in other containers.
    let mut name = [0; 8];
    getrandom::fill(&mut name).map_err(io::Error::other)?;
    let new = path.with_extension(format!("{:016x}.new", u64::from_ne_bytes(name)));
    let mut file = private().create_new(true).write(true).open(&new)?;
    file.write_all(bytes)?;
    drop(file);
    fs::rename(&new, path).inspect_err(|_| drop(fs::remove_file(&new)))
}

/// Removes files that killed processes have left in the middle of [`replace`].
pub(crate) fn remove_unfinished(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let is_new = entry.path().extension().is_some_and(|end| end == "new");
        let age = entry.metadata().and_then(|file| file.modified()).ok().and_then(|time| time.elapsed().ok());
        if is_new && age.is_some_and(|age| age > UNFINISHED) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Identity of a file, which differs between files that had the same name one after the other.
pub(crate) fn identity(file: &fs::Metadata) -> u64 {
    #[cfg(unix)]
    return std::os::unix::fs::MetadataExt::ino(file);
    #[cfg(not(unix))]
    file.created()
        .ok()
        .and_then(|time| time.duration_since(std::time::UNIX_EPOCH).ok())
        .map_or(0, |it| it.as_nanos() as u64)
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
