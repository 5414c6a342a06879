//! Uploads: files that arrive in parts over minutes, from a client that may disconnect at any time. The library is not
//! locked while they grow; [`Registry::prune`] skips them because their files are locked.

use std::{
    fs::File,
    io::Write,
    path::{Path, PathBuf},
};

use sha2::{Digest as _, Sha256};
use tempfile::NamedTempFile;

use crate::{cancel::Cancel, digest::Digest, error::RegistryError, library::Registry};

/// A file that arrives in parts. It is deleted on drop.
#[derive(Debug)]
pub struct Upload {
    /// Locked as long as it is open.
    file: NamedTempFile,
    hash: Sha256,
    /// Folder of its final name.
    blobs: PathBuf,
}

impl Upload {
    pub(crate) fn new(file: NamedTempFile, blobs: PathBuf) -> Result<Self, RegistryError> {
        file.as_file().lock().map_err(RegistryError::io("lock", file.path()))?;
        Ok(Self { file, hash: Sha256::new(), blobs })
    }

    /// Appends bytes. Blocks on the disk.
    ///
    /// # Errors
    /// The disk is full or fails.
    pub fn write(&mut self, piece: &[u8]) -> Result<(), RegistryError> {
        self.hash.update(piece);
        self.file.write_all(piece).map_err(RegistryError::io("write", &self.blobs))
    }
}

/// Returns true if a file is one that arrives right now.
pub(crate) fn is_arriving(file: &Path) -> bool {
    File::open(file).is_ok_and(|file| matches!(file.try_lock(), Err(std::fs::TryLockError::WouldBlock)))
}

impl Registry {
    /// Starts an upload.
    ///
    /// # Errors
    /// The file cannot be created.
    pub fn begin_upload(&self) -> Result<Upload, RegistryError> {
        self.writable()?;
        self.store.begin_upload()
    }

    /// Stores an uploaded blob until a model uses it ([`Registry::create_from_blobs`]) or [`Registry::prune`] deletes
    /// it.
    ///
    /// # Errors
    /// [`RegistryError::DigestMismatch`], if the content does not match; it is then discarded.
    pub fn finish_upload(&self, upload: Upload, expected: Digest) -> Result<(), RegistryError> {
        let Upload { file, hash, .. } = upload;
        let found = Digest::finish(hash);
        if found != expected {
            let what = "the upload".to_owned();
            return Err(RegistryError::DigestMismatch { what, expected, found });
        }
        let _writing = self.writing()?;
        self.store.publish(file.path(), &expected, &Cancel::default())?;
        // The file was renamed or deleted, so there is nothing to delete.
        let _ = file.into_temp_path().keep();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::Pruned;

    #[test]
    fn an_upload_locks_nothing_and_is_left_alone_while_it_arrives() {
        let folder = tempfile::tempdir().unwrap();
        let registry = Registry::open(&folder.path().join("library")).unwrap();
        let digest = Digest::of(b"whole");
        let mut upload = registry.begin_upload().unwrap();
        upload.write(b"who").unwrap();
        // Other processes may prune meanwhile, but the upload stays.
        assert_eq!(registry.prune(false).unwrap(), Pruned::default());
        upload.write(b"le").unwrap();
        registry.finish_upload(upload, digest).unwrap();
        assert!(registry.has_blob(&digest));
        assert_eq!(registry.prune(false).unwrap(), Pruned { files: 1, bytes: 5 });
    }

    #[test]
    fn an_upload_that_ends_early_or_is_something_else_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let registry = Registry::open(&folder.path().join("library")).unwrap();
        let mut left = registry.begin_upload().unwrap();
        left.write(b"half").unwrap();
        drop(left);
        let mut wrong = registry.begin_upload().unwrap();
        wrong.write(b"other").unwrap();
        let refused = registry.finish_upload(wrong, Digest::of(b"whole")).unwrap_err();
        assert!(matches!(refused, RegistryError::DigestMismatch { .. }), "{refused}");
        assert_eq!(fs::read_dir(registry.root().join("tmp")).unwrap().count(), 0);
    }
}
