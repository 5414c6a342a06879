//! What lies on disk: blobs, named by their content, and folders in which a model's blobs have the names that the model's
//! readers want to see.
//!
//! A blob appears under its name in one step, complete, checked and synced; what is still incomplete lies elsewhere. So
//! whatever lies in `blobs/` can be trusted, and all the rest can be deleted when nobody is writing.

use std::{
    collections::HashSet,
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    path::{Path, PathBuf},
};

use sha2::{Digest as _, Sha256};

use crate::{
    cancel::Cancel,
    digest::Digest,
    error::RegistryError,
    record::{FileRecord, listing},
    upload::{Upload, is_arriving},
};

/// Bytes that are copied at a time.
pub(crate) const CHUNK: usize = 256 << 10;

#[derive(Debug)]
pub(crate) struct Store {
    root: PathBuf,
}

impl Store {
    pub(crate) fn open(root: &Path) -> Result<Self, RegistryError> {
        let store = Self { root: root.to_owned() };
        for folder in [store.blobs(), store.partial(), store.locks(), store.views(), store.temporary()] {
            fs::create_dir_all(&folder).map_err(RegistryError::io("make the folder", &folder))?;
        }
        Ok(store)
    }

    fn blobs(&self) -> PathBuf {
        self.root.join("blobs")
    }

    fn partial(&self) -> PathBuf {
        self.root.join("partial")
    }

    fn locks(&self) -> PathBuf {
        self.root.join("locks")
    }

    fn views(&self) -> PathBuf {
        self.root.join("models")
    }

    fn temporary(&self) -> PathBuf {
        self.root.join("tmp")
    }

    /// Where a blob lies, or would.
    pub(crate) fn blob(&self, digest: &Digest) -> PathBuf {
        self.blobs().join(digest.file_name())
    }

    /// Where a download under this key grows, to be gone on with after an interruption.
    pub(crate) fn partial_file(&self, key: &str) -> PathBuf {
        self.partial().join(key)
    }

    /// The lock of a download under this key.
    pub(crate) fn lock_file(&self, key: &str) -> PathBuf {
        self.locks().join(key)
    }

    /// Takes in what a reader gives, as far as it is what `expected` says.
    pub(crate) fn put(
        &self,
        what: &str,
        mut reader: impl Read,
        expected: Option<Digest>,
        cancel: &Cancel,
        mut progress: impl FnMut(u64),
    ) -> Result<(Digest, u64), RegistryError> {
        let folder = self.temporary();
        // Removed when dropped, which is what becomes of it after every error.
        let mut file = shared_builder(0o666)
            .tempfile_in(&folder)
            .map_err(RegistryError::io("make a file in", &folder))?;
        let (digest, size) = hash(
            &mut reader,
            |piece| file.write_all(piece).map_err(RegistryError::io("write", self.blobs())),
            |error| RegistryError::io("read", what)(error),
            cancel,
            &mut progress,
        )?;
        if let Some(expected) = expected.filter(|&expected| expected != digest) {
            return Err(RegistryError::DigestMismatch { what: what.to_owned(), expected, found: digest });
        }
        self.publish(file.path(), &digest)?;
        // It has another name now, or has gone: there is nothing left to remove.
        let _ = file.into_temp_path().keep();
        Ok((digest, size))
    }

    /// A file that arrives in pieces.
    pub(crate) fn begin_upload(&self) -> Result<Upload, RegistryError> {
        let folder = self.temporary();
        let file = shared_builder(0o666)
            .tempfile_in(&folder)
            .map_err(RegistryError::io("make a file in", &folder))?;
        Upload::new(file, self.blobs())
    }

    /// Gives a complete, checked file of this library its name. If it has been there already, that one stays, unless it
    /// was damaged: models share it by links, and somebody may be making one.
    pub(crate) fn publish(&self, file: &Path, digest: &Digest) -> Result<(), RegistryError> {
        let blob = self.blob(digest);
        // The name must not be on disk before the content is.
        let writable = OpenOptions::new().write(true).open(file);
        writable.and_then(|file| file.sync_all()).map_err(RegistryError::io("write", file))?;
        read_only(file)?;
        let size = |path: &Path| fs::metadata(path).map(|found| found.len());
        match fs::hard_link(file, &blob) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(RegistryError::io("make a hard link", &blob)(error));
            }
            Err(_) if size(&blob).ok() != size(file).ok() => {
                fs::rename(file, &blob).map_err(RegistryError::io("write", &blob))?;
            }
            Ok(()) | Err(_) => {
                remove_file(file)?;
            }
        }
        sync_folder(&self.blobs())
    }

    /// The folder in which these files have their names. It is made if it is not there, from hard links to the blobs.
    pub(crate) fn view(&self, model: &str, files: &[FileRecord]) -> Result<PathBuf, RegistryError> {
        let view = self.views().join(view_name(files));
        if is_complete(&view, files) {
            return Ok(view);
        }
        let folder = self.temporary();
        let new = shared_builder(0o777)
            .tempdir_in(&folder)
            .map_err(RegistryError::io("make a folder in", &folder))?;
        for file in files {
            let blob = self.blob(&file.digest);
            let damaged = |problem: String| RegistryError::Damaged {
                name: model.to_owned(),
                file: file.name.clone(),
                problem,
            };
            match fs::metadata(&blob) {
                Ok(found) if found.len() == file.size => {}
                Ok(found) => {
                    let problem = format!("it has {} bytes instead of {}", found.len(), file.size);
                    return Err(damaged(problem));
                }
                Err(error) => return Err(damaged(format!("`{}`: {error}", blob.display()))),
            }
            let link = new.path().join(&file.name);
            fs::hard_link(&blob, &link).map_err(RegistryError::io("make a hard link", &link))?;
        }
        // One that is there and not complete was damaged from outside.
        remove_folder(&view)?;
        match fs::rename(new.path(), &view) {
            Ok(()) => {
                // It has another name now: there is nothing left to remove.
                let _ = new.keep();
                Ok(view)
            }
            // Somebody else was faster.
            Err(_) if is_complete(&view, files) => Ok(view),
            Err(error) => Err(RegistryError::io("make the folder", &view)(error)),
        }
    }

    /// Whether a blob is there.
    pub(crate) fn has(&self, digest: &Digest) -> bool {
        self.blob(digest).is_file()
    }

    /// A blob's bytes.
    pub(crate) fn blob_size(&self, digest: &Digest) -> Result<u64, RegistryError> {
        match fs::metadata(self.blob(digest)) {
            Ok(metadata) => Ok(metadata.len()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(RegistryError::NoBlob(*digest)),
            Err(error) => Err(RegistryError::io("read", self.blob(digest))(error)),
        }
    }

    /// Deletes those of these files that no record of `kept` has; the bytes that this has freed. The caller holds the
    /// library's exclusive lock.
    pub(crate) fn release(&self, files: &[FileRecord], kept: &Kept) -> Result<u64, RegistryError> {
        let view = view_name(files);
        if !kept.views.contains(&view) {
            remove_folder(&self.views().join(view))?;
        }
        let mut freed = 0;
        let stored = files.iter().filter(|file| file.location.is_none());
        for file in stored.filter(|file| !kept.blobs.contains(&file.digest.file_name())) {
            freed += remove_file(&self.blob(&file.digest))?;
        }
        sync_folder(&self.blobs())?;
        Ok(freed)
    }

    /// Deletes everything that `kept` does not have. The caller holds the library's exclusive lock.
    pub(crate) fn sweep(&self, kept: &Kept) -> Result<Pruned, RegistryError> {
        let mut pruned = Pruned::default();
        // Views first: their links are to blobs, which count.
        for view in entries(&self.views())? {
            if !kept.views.contains(&name_of(&view)) {
                remove_folder(&view)?;
            }
        }
        for blob in entries(&self.blobs())? {
            if !kept.blobs.contains(&name_of(&blob)) {
                pruned.count(remove_file(&blob)?);
            }
        }
        for file in entries(&self.partial())? {
            pruned.count(remove_file(&file)?);
        }
        for left in entries(&self.temporary())? {
            if left.is_dir() {
                remove_folder(&left)?;
            } else if !is_arriving(&left) {
                pruned.count(remove_file(&left)?);
            }
        }
        // Who uses one of these also has the library's lock, so nobody does.
        for lock in entries(&self.locks())? {
            remove_file(&lock)?;
        }
        sync_folder(&self.blobs())?;
        Ok(pruned)
    }
}

/// Temporary files are their owner's alone by default; those of a library become part of it, and it may be several
/// users'. The process's umask still counts.
fn shared_builder(mode: u32) -> tempfile::Builder<'static, 'static> {
    let mut builder = tempfile::Builder::new();
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(mode));
    #[cfg(not(unix))]
    let _ = mode;
    builder
}

/// What the catalogue still names.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    blobs: HashSet<String>,
    views: HashSet<String>,
}

impl Kept {
    /// Adds a model's files.
    pub(crate) fn add(&mut self, files: &[FileRecord]) {
        self.views.insert(view_name(files));
        let stored = files.iter().filter(|file| file.location.is_none());
        self.blobs.extend(stored.map(|file| file.digest.file_name()));
    }
}

/// What was deleted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pruned {
    /// Blobs, unfinished downloads and copies.
    pub files: usize,
    /// Their bytes.
    pub bytes: u64,
}

impl Pruned {
    fn count(&mut self, bytes: u64) {
        self.files += 1;
        self.bytes += bytes;
    }
}

/// Reads to the end, giving each piece away; the digest and the number of bytes.
fn hash(
    reader: &mut impl Read,
    mut sink: impl FnMut(&[u8]) -> Result<(), RegistryError>,
    failed: impl FnOnce(io::Error) -> RegistryError,
    cancel: &Cancel,
    progress: &mut impl FnMut(u64),
) -> Result<(Digest, u64), RegistryError> {
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

/// The digest and size of a file outside of the library.
pub(crate) fn hash_file(
    path: &Path,
    cancel: &Cancel,
    mut progress: impl FnMut(u64),
) -> Result<(Digest, u64), RegistryError> {
    let mut file = File::open(path).map_err(RegistryError::io("read", path))?;
    hash(&mut file, |_| Ok(()), RegistryError::io("read", path), cancel, &mut progress)
}

/// One folder for each set of names and contents.
fn view_name(files: &[FileRecord]) -> String {
    Digest::of(listing(files).as_bytes()).hex()
}

fn is_complete(view: &Path, files: &[FileRecord]) -> bool {
    files.iter().all(|file| fs::metadata(view.join(&file.name)).is_ok_and(|found| found.len() == file.size))
}

fn entries(folder: &Path) -> Result<Vec<PathBuf>, RegistryError> {
    let read = || fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<io::Result<_>>();
    read().map_err(RegistryError::io("read the folder", folder))
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Nobody shall write into a blob, through whichever of its names.
fn read_only(path: &Path) -> Result<(), RegistryError> {
    let set = || {
        let mut permissions = fs::metadata(path)?.permissions();
        permissions.set_readonly(true);
        fs::set_permissions(path, permissions)
    };
    set().map_err(RegistryError::io("protect", path))
}

/// Removes a file that may have gone already; its bytes.
fn remove_file(path: &Path) -> Result<u64, RegistryError> {
    let size = fs::metadata(path).map_or(0, |metadata| metadata.len());
    match fs::remove_file(path) {
        Ok(()) => Ok(size),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        Err(error) => Err(RegistryError::io("remove", path)(error)),
    }
}

/// Removes a folder that may have gone already.
fn remove_folder(path: &Path) -> Result<(), RegistryError> {
    match fs::remove_dir_all(path) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(RegistryError::io("remove", path)(error)),
    }
}

/// Makes names in a folder survive a loss of power, where the system can say so.
fn sync_folder(path: &Path) -> Result<(), RegistryError> {
    if cfg!(unix) {
        File::open(path).and_then(|folder| folder.sync_all()).map_err(RegistryError::io("write", path))?;
    }
    Ok(())
}
