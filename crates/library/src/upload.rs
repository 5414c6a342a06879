//! Uploads: files that arrive in parts over minutes, from a client that may disconnect at any time. The library is not
//! locked while they grow; [`Library::prune`] skips them because their files are locked.

use std::{
    fs::File,
    io::Write,
    path::{Path, PathBuf},
};

use sha2::{Digest as _, Sha256};
use tempfile::NamedTempFile;

use crate::{cancel::Cancel, digest::Digest, error::LibraryError, library::Library};

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
    pub(crate) fn new(file: NamedTempFile, blobs: PathBuf) -> Result<Self, LibraryError> {
        file.as_file().lock().map_err(LibraryError::io("lock", file.path()))?;
        Ok(Self { file, hash: Sha256::new(), blobs })
    }

    /// Appends bytes. Blocks on the disk.
    ///
    /// # Errors
    /// The disk is full or fails.
    pub fn write(&mut self, piece: &[u8]) -> Result<(), LibraryError> {
        self.hash.update(piece);
        self.file.write_all(piece).map_err(LibraryError::io("write", &self.blobs))
    }
}

/// Returns true if a file is one that arrives right now.
pub(crate) fn is_arriving(file: &Path) -> bool {
    File::open(file).is_ok_and(|file| matches!(file.try_lock(), Err(std::fs::TryLockError::WouldBlock)))
}

impl Library {
    /// Starts an upload.
    ///
    /// # Errors
    /// The file cannot be created.
    pub fn begin_upload(&self) -> Result<Upload, LibraryError> {
        self.writable()?;
        self.store.begin_upload()
    }

    /// Stores an uploaded blob until a model uses it ([`Library::create_from_blobs`]) or [`Library::prune`] deletes
    /// it.
    ///
    /// # Errors
    /// [`LibraryError::DigestMismatch`], if the content does not match; it is then discarded.
    pub fn finish_upload(&self, upload: Upload, expected: Digest) -> Result<(), LibraryError> {
        let Upload { file, hash, .. } = upload;
        let found = Digest::finish(hash);
        if found != expected {
            let what = "the upload".to_owned();
            return Err(LibraryError::DigestMismatch { what, expected, found });
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
        let library = Library::open(&folder.path().join("library")).unwrap();
        let digest = Digest::of(b"whole");
        let mut upload = library.begin_upload().unwrap();
        upload.write(b"who").unwrap();
        // Other processes may prune meanwhile, but the upload stays.
        assert_eq!(library.prune(false).unwrap(), Pruned::default());
        upload.write(b"le").unwrap();
        library.finish_upload(upload, digest).unwrap();
        assert!(library.has_blob(&digest));
        assert_eq!(library.prune(false).unwrap(), Pruned { files: 1, bytes: 5 });
    }

    #[test]
    fn an_upload_that_ends_early_or_is_something_else_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let library = Library::open(&folder.path().join("library")).unwrap();
        let mut left = library.begin_upload().unwrap();
        left.write(b"half").unwrap();
        drop(left);
        let mut wrong = library.begin_upload().unwrap();
        wrong.write(b"other").unwrap();
        let refused = library.finish_upload(wrong, Digest::of(b"whole")).unwrap_err();
        assert!(matches!(refused, LibraryError::DigestMismatch { .. }), "{refused}");
        assert_eq!(fs::read_dir(library.root().join("tmp")).unwrap().count(), 0);
    }
}
