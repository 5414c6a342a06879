//! Identity of a model's files.

use std::{
    fs, io,
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

use crate::models::{EMBEDDED_FILE, Source};

/// Identity of a model's files, which detects replaced files.
pub(super) struct Identity {
    pub(super) version: String,
    /// Time of the last change, in seconds since 1970.
    pub(super) created: u64,
    pub(super) bytes: u64,
}

impl Identity {
    pub(super) fn of(source: &Source) -> io::Result<Self> {
        let (modified, bytes, node) = match source {
            Source::Embedded => (UNIX_EPOCH, EMBEDDED_FILE.len() as u64, 0),
            Source::Path(path) | Source::Library { path, .. } => {
                let metadata = fs::metadata(path)?;
                let files = newest(path, &metadata);
                (files.0, files.1, node(&metadata))
            }
        };
        let nanoseconds = modified.duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos());
        let created = match source {
            Source::Embedded => program_time(),
            _ => modified,
        };
        Ok(Self { version: format!("{nanoseconds}-{bytes}-{node}"), created: seconds(created), bytes })
    }
}

/// Returns the time at which this program was built or installed.
fn program_time() -> SystemTime {
    let time = || std::env::current_exe()?.metadata()?.modified();
    time().unwrap_or(UNIX_EPOCH)
}

/// Returns the inode number of a file.
#[cfg(unix)]
fn node(metadata: &fs::Metadata) -> u64 {
    std::os::unix::fs::MetadataExt::ino(metadata)
}

/// Returns 0: there are no inode numbers.
#[cfg(not(unix))]
fn node(_: &fs::Metadata) -> u64 {
    0
}

/// Returns the seconds since 1970.
pub(super) fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// Returns the time of the last change of a file, or of the files directly in a folder, and the bytes of all of them.
fn newest(path: &Path, metadata: &fs::Metadata) -> (SystemTime, u64) {
    let modified = |metadata: &fs::Metadata| metadata.modified().unwrap_or(UNIX_EPOCH);
    if !metadata.is_dir() {
        return (modified(metadata), metadata.len());
    }
    let files = fs::read_dir(path).into_iter().flatten().flatten();
    let files = files.filter_map(|file| fs::metadata(file.path()).ok());
    files.fold((modified(metadata), 0), |(newest, bytes), file| {
        (newest.max(modified(&file)), bytes + file.len())
    })
}
