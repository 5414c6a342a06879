//! Files and folders: durable writes, idempotent removal, comparison.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    path::{Path, PathBuf},
};

use sha2::{Digest as _, Sha256};

use crate::{cancel::Cancel, digest::Digest, error::LibraryError};

/// Bytes that are copied at a time.
pub(crate) const CHUNK: usize = 256 << 10;

/// Reads to the end and passes each piece to `sink`; returns the digest and the number of bytes.
pub(crate) fn hash(
    reader: &mut impl Read,
    mut sink: impl FnMut(&[u8]) -> Result<(), LibraryError>,
    failed: impl FnOnce(io::Error) -> LibraryError,
    cancel: &Cancel,
    progress: &mut impl FnMut(u64),
) -> Result<(Digest, u64), LibraryError> {
    let (mut hasher, mut size, mut buffer) = (Sha256::new(), 0, vec![0; CHUNK]);
    loop {
        cancel.check()?;
        let n = match reader.read(&mut buffer) {
            Ok(0) => return Ok((Digest::finish(hasher), size)),
            Ok(n) => n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(failed(error)),
        };
        hasher.update(&buffer[..n]);
        sink(&buffer[..n])?;
        size += n as u64;
        progress(size);
    }
}

/// Returns the digest and the size of a file.
pub(crate) fn hash_file(
    path: &Path,
    cancel: &Cancel,
    mut progress: impl FnMut(u64),
) -> Result<(Digest, u64), LibraryError> {
    regular(path)?;
    let mut file = File::open(path).map_err(LibraryError::io("read", path))?;
    hash(&mut file, |_| Ok(()), LibraryError::io("read", path), cancel, &mut progress)
}

/// Refuses everything that is not a regular file, before it is opened: opening a pipe waits for its writer.
pub(crate) fn regular(path: &Path) -> Result<fs::Metadata, LibraryError> {
    let metadata = fs::metadata(path).map_err(LibraryError::io("open", path))?;
    match kind(&metadata) {
        None => Ok(metadata),
        Some(kind) => Err(LibraryError::NotAModel {
            path: path.to_owned(),
            problem: format!("it is {kind}, not a regular file"),
        }),
    }
}

/// Returns the kind of a file that is not a regular one.
pub(crate) fn kind(metadata: &fs::Metadata) -> Option<&'static str> {
    let kind = metadata.file_type();
    if kind.is_file() {
        return None;
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        if kind.is_fifo() {
            return Some("a pipe");
        } else if kind.is_socket() {
            return Some("a socket");
        } else if kind.is_char_device() || kind.is_block_device() {
            return Some("a device");
        }
    }
    Some(if kind.is_dir() { "a folder" } else { "something else" })
}

/// Returns true if both paths lead to one file. Errors count as no.
pub(crate) fn is_same(a: &Path, b: &Path) -> bool {
    same_file::is_same_file(a, b).unwrap_or(false)
}

/// Returns the paths in a folder; none if it does not exist.
pub(crate) fn entries(folder: &Path) -> Result<Vec<PathBuf>, LibraryError> {
    let read = || fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<io::Result<_>>();
    match read() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        read => read.map_err(LibraryError::io("read the folder", folder)),
    }
}

/// Returns the last part of a path, as text.
pub(crate) fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Forbids writing into a blob, through whichever of its names.
pub(crate) fn protect(path: &Path) -> Result<(), LibraryError> {
    let set = || {
        let mut permissions = fs::metadata(path)?.permissions();
        permissions.set_readonly(true);
        fs::set_permissions(path, permissions)
    };
    set().map_err(LibraryError::io("protect", path))
}

/// Removes a file that may have gone already; returns its bytes.
pub(crate) fn remove_file(path: &Path) -> Result<u64, LibraryError> {
    let size = fs::symlink_metadata(path).map_or(0, |metadata| metadata.len());
    match fs::remove_file(path) {
        Ok(()) => Ok(size),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        Err(error) => Err(LibraryError::io("remove", path)(error)),
    }
}

/// Removes a folder that may have gone already.
pub(crate) fn remove_folder(path: &Path) -> Result<(), LibraryError> {
    match fs::remove_dir_all(path) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(LibraryError::io("remove", path)(error)),
    }
}

/// Makes a file's content survive a loss of power.
pub(crate) fn sync_file(path: &Path) -> Result<(), LibraryError> {
    let writable = OpenOptions::new().write(true).open(path);
    writable.and_then(|file| file.sync_all()).map_err(LibraryError::io("write", path))
}

/// Makes the names in a folder durable, where the system supports it.
pub(crate) fn sync_folder(path: &Path) -> Result<(), LibraryError> {
    if cfg!(unix) {
        File::open(path).and_then(|folder| folder.sync_all()).map_err(LibraryError::io("write", path))?;
    }
    Ok(())
}

/// Writes a file whole or not at all: beside it, synced, renamed.
pub(crate) fn write_durably(path: &Path, bytes: &[u8]) -> Result<(), LibraryError> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let write = || {
        let mut file = shared_builder(0o666).prefix(".new-").tempfile_in(folder)?;
        file.write_all(bytes)?;
        file.as_file().sync_all()?;
        file.persist(path)?;
        Ok(())
    };
    write().map_err(LibraryError::io("write", path))?;
    sync_folder(folder)
}

/// Temporary files are their owner's alone by default; those of a library become part of it, and it may be several
/// users'. The process's umask still counts.
pub(crate) fn shared_builder(mode: u32) -> tempfile::Builder<'static, 'static> {
    let mut builder = tempfile::Builder::new();
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(mode));
    #[cfg(not(unix))]
    let _ = mode;
    builder
}
