//! Files on disk: blobs, named by their content, and folders of links in which a model's blobs have their original
//! names.
//!
//! A blob appears under its name atomically, complete, verified and synced; incomplete files are in other folders. So
//! every file in `blobs/` can be trusted, and all others can be deleted while no process writes.
//!
//! If the name of a new blob exists, the existing file is verified, and replaced if it is damaged. A model is opened
//! through a folder of hard links, because split models and Hugging Face folders find their parts by name.

use std::{
    collections::HashSet,
    fs,
    io::{self, Read, Write},
    path::{Path, PathBuf},
};

use crate::{
    cancel::Cancel,
    digest::Digest,
    error::LibraryError,
    files::{
        entries, hash, hash_file, is_same, name_of, protect, remove_file, remove_folder, shared_builder,
        sync_file, sync_folder,
    },
    record::{FileRecord, listing},
    upload::{Upload, is_arriving},
};

#[derive(Debug)]
pub(crate) struct Store {
    root: PathBuf,
}

impl Store {
    pub(crate) fn new(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// Makes the folders that are not there.
    pub(crate) fn make_folders(&self) -> Result<(), LibraryError> {
        let folders =
            [self.blobs(), self.partial(), self.locks(), self.views(), self.temporary(), self.damaged()];
        for folder in folders {
            fs::create_dir_all(&folder).map_err(LibraryError::io("make the folder", &folder))?;
        }
        Ok(())
    }

    pub(crate) fn blobs(&self) -> PathBuf {
        self.root.join("blobs")
    }

    fn partial(&self) -> PathBuf {
        self.root.join("partial")
    }

    fn locks(&self) -> PathBuf {
        self.root.join("locks")
    }

    pub(crate) fn views(&self) -> PathBuf {
        self.root.join("models")
    }

    pub(crate) fn temporary(&self) -> PathBuf {
        self.root.join("tmp")
    }

    /// Has a file for each blob that is known to be damaged.
    fn damaged(&self) -> PathBuf {
        self.root.join("damaged")
    }

    /// Returns the path of a blob, which need not exist.
    pub(crate) fn blob(&self, digest: &Digest) -> PathBuf {
        self.blobs().join(digest.file_name())
    }

    /// Returns the path of the partial file of a download, which an interrupted download continues.
    pub(crate) fn partial_file(&self, key: &str) -> PathBuf {
        self.partial().join(key)
    }

    /// Returns the lock of a download under this key.
    pub(crate) fn lock_file(&self, key: &str) -> PathBuf {
        self.locks().join(key)
    }

    /// Stores the content of a reader if it matches `expected`.
    pub(crate) fn put(
        &self,
        what: &str,
        mut reader: impl Read,
        expected: Option<Digest>,
        cancel: &Cancel,
        mut progress: impl FnMut(u64),
    ) -> Result<(Digest, u64), LibraryError> {
        let folder = self.temporary();
        // The file is deleted on drop, after any error.
        let mut file = shared_builder(0o666)
            .tempfile_in(&folder)
            .map_err(LibraryError::io("make a file in", &folder))?;
        let (digest, size) = hash(
            &mut reader,
            |piece| file.write_all(piece).map_err(LibraryError::io("write", self.blobs())),
            |error| LibraryError::io("read", what)(error),
            cancel,
            &mut progress,
        )?;
        if let Some(expected) = expected.filter(|&expected| expected != digest) {
            return Err(LibraryError::DigestMismatch { what: what.to_owned(), expected, found: digest });
        }
        self.publish(file.path(), &digest, cancel)?;
        // The file was renamed or deleted, so there is nothing to delete.
        let _ = file.into_temp_path().keep();
        Ok((digest, size))
    }

    /// Returns a file that arrives in pieces.
    pub(crate) fn begin_upload(&self) -> Result<Upload, LibraryError> {
        let folder = self.temporary();
        let file = shared_builder(0o666)
            .tempfile_in(&folder)
            .map_err(LibraryError::io("make a file in", &folder))?;
        Upload::new(file, self.blobs())
    }

    /// Gives a complete, checked file of this library its name. A blob that has the name already is read: it stays if it
    /// is sound, since models share it by links; otherwise the new file replaces it, in the models' folders as well.
    pub(crate) fn publish(&self, file: &Path, digest: &Digest, cancel: &Cancel) -> Result<(), LibraryError> {
        // The content must be on disk before the name.
        sync_file(file)?;
        protect(file)?;
        self.name_blob(file, digest, cancel)
    }

    /// Returns true if a file can have another name in the library: it is on the same file system, and the system
    /// allows links to files of their owner.
    pub(crate) fn can_link(&self, path: &Path) -> bool {
        self.second_name(path).is_ok()
    }

    /// Makes a hard link to a file of another program in a temporary folder.
    fn second_name(&self, path: &Path) -> Result<tempfile::TempDir, LibraryError> {
        let folder = self.temporary();
        let new = shared_builder(0o777)
            .tempdir_in(&folder)
            .map_err(LibraryError::io("make a folder in", &folder))?;
        // A link to a symbolic link would depend on its target.
        let real = path.canonicalize().map_err(LibraryError::io("open", path))?;
        fs::hard_link(&real, new.path().join("link"))
            .map_err(LibraryError::io("make a hard link to", path))?;
        Ok(new)
    }

    /// Gives a file of another program a second name in the library, if its content matches `expected`. Its permissions
    /// stay as they are.
    pub(crate) fn put_link(
        &self,
        path: &Path,
        expected: Option<Digest>,
        cancel: &Cancel,
        mut progress: impl FnMut(u64),
    ) -> Result<(Digest, u64), LibraryError> {
        // Another model of the other program may have the same file.
        if let Some(digest) = expected.filter(|digest| self.has(digest) && is_same(&self.blob(digest), path))
        {
            return Ok((digest, self.blob_size(&digest)?));
        }
        let folder = self.second_name(path)?;
        // The file that is read is the one that is kept, even if the other name changes meanwhile.
        let link = folder.path().join("link");
        let (digest, size) = hash_file(&link, cancel, &mut progress)?;
        if let Some(expected) = expected.filter(|&expected| expected != digest) {
            let what = path.display().to_string();
            return Err(LibraryError::DigestMismatch { what, expected, found: digest });
        }
        // The other program has written the file; it may not be open for writing here.
        let _ = sync_file(&link);
        self.name_blob(&link, &digest, cancel)?;
        Ok((digest, size))
    }

    /// Gives a complete file the name of a blob.
    fn name_blob(&self, file: &Path, digest: &Digest, cancel: &Cancel) -> Result<(), LibraryError> {
        let blob = self.blob(digest);
        match fs::hard_link(file, &blob) {
            Ok(()) => drop(remove_file(file)?),
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(LibraryError::io("make a hard link", &blob)(error));
            }
            Err(_) if self.is_sound(digest, cancel, |_| {})? => drop(remove_file(file)?),
            Err(_) => self.replace(file, &blob)?,
        }
        sync_folder(&self.blobs())?;
        self.set_damage(digest, None)
    }

    /// Reads a blob. Returns true if it exists and matches its name.
    pub(crate) fn is_sound(
        &self,
        digest: &Digest,
        cancel: &Cancel,
        progress: impl FnMut(u64),
    ) -> Result<bool, LibraryError> {
        match hash_file(&self.blob(digest), cancel, progress) {
            Ok((found, _)) => Ok(found == *digest),
            Err(LibraryError::Cancelled) => Err(LibraryError::Cancelled),
            // A blob that cannot be read is as good as damaged.
            Err(_) => Ok(false),
        }
    }

    /// Replaces a blob and the links to it by a file. Readers that have opened the old file keep it.
    fn replace(&self, file: &Path, blob: &Path) -> Result<(), LibraryError> {
        let mut links = Vec::new();
        for view in entries(&self.views())? {
            links.extend(entries(&view)?.into_iter().filter(|link| is_same(link, blob)));
        }
        fs::rename(file, blob).map_err(LibraryError::io("write", blob))?;
        links.iter().try_for_each(|link| self.link(blob, link))
    }

    /// Creates a hard link to the blob, atomically if `link` exists.
    fn link(&self, blob: &Path, link: &Path) -> Result<(), LibraryError> {
        let folder = self.temporary();
        let new = shared_builder(0o777)
            .tempdir_in(&folder)
            .map_err(LibraryError::io("make a folder in", &folder))?;
        let beside = new.path().join("link");
        fs::hard_link(blob, &beside).map_err(LibraryError::io("make a hard link", &beside))?;
        fs::rename(&beside, link).map_err(LibraryError::io("make a hard link", link))
    }

    /// Records the problem of a blob, or that it has none.
    pub(crate) fn set_damage(&self, digest: &Digest, problem: Option<&str>) -> Result<(), LibraryError> {
        let mark = self.damaged().join(digest.hex());
        match problem {
            Some(problem) => fs::write(&mark, problem).map_err(LibraryError::io("write", &mark)),
            None => remove_file(&mark).map(drop),
        }
    }

    /// Returns the recorded fault of a blob.
    pub(crate) fn damage(&self, digest: &Digest) -> Option<String> {
        fs::read_to_string(self.damaged().join(digest.hex())).ok()
    }

    /// Checks, without reading the blobs, that they exist, have their sizes, and are not known to be damaged.
    pub(crate) fn check(&self, model: &str, files: &[FileRecord]) -> Result<(), LibraryError> {
        for file in files.iter().filter(|file| file.location.is_none()) {
            let damaged = |problem: String| LibraryError::Damaged {
                name: model.to_owned(),
                file: file.name.clone(),
                problem,
            };
            let blob = self.blob(&file.digest);
            match fs::metadata(&blob) {
                Ok(found) if found.len() == file.size => {}
                Ok(found) => {
                    let problem = format!("it has {} bytes instead of {}", found.len(), file.size);
                    return Err(damaged(problem));
                }
                Err(error) => return Err(damaged(format!("`{}`: {error}", blob.display()))),
            }
            if let Some(problem) = self.damage(&file.digest) {
                return Err(damaged(problem));
            }
        }
        Ok(())
    }

    /// Returns the folder in which these files have their names. Missing files are created as hard links to the
    /// blobs.
    pub(crate) fn view(&self, model: &str, files: &[FileRecord]) -> Result<PathBuf, LibraryError> {
        self.check(model, files)?;
        let view = self.view_of(files);
        if view.is_dir() {
            for file in files {
                let (blob, link) = (self.blob(&file.digest), view.join(&file.name));
                if !is_same(&blob, &link) {
                    self.link(&blob, &link)?;
                }
            }
            return Ok(view);
        }
        let folder = self.temporary();
        let new = shared_builder(0o777)
            .tempdir_in(&folder)
            .map_err(LibraryError::io("make a folder in", &folder))?;
        for file in files {
            let link = new.path().join(&file.name);
            fs::hard_link(self.blob(&file.digest), &link)
                .map_err(LibraryError::io("make a hard link", &link))?;
        }
        match fs::rename(new.path(), &view) {
            Ok(()) => {
                // The file was renamed, so there is nothing to delete.
                let _ = new.keep();
                Ok(view)
            }
            // Somebody else was faster.
            Err(_) if is_complete(&view, files) => Ok(view),
            Err(error) => Err(LibraryError::io("make the folder", &view)(error)),
        }
    }

    /// Returns the path to open for these files in a read-only library: the folder of links if it exists, or a single
    /// blob.
    pub(crate) fn existing_view(
        &self,
        model: &str,
        files: &[FileRecord],
    ) -> Result<Option<PathBuf>, LibraryError> {
        self.check(model, files)?;
        Ok(Some(self.view_of(files)).filter(|view| is_complete(view, files)))
    }

    /// Returns the folder in which these files have their names, there or not.
    pub(crate) fn view_of(&self, files: &[FileRecord]) -> PathBuf {
        self.views().join(view_name(files))
    }

    /// Returns true if a blob exists and is not known to be damaged.
    pub(crate) fn has(&self, digest: &Digest) -> bool {
        self.blob(digest).is_file() && self.damage(digest).is_none()
    }

    /// Returns a blob's bytes.
    pub(crate) fn blob_size(&self, digest: &Digest) -> Result<u64, LibraryError> {
        match fs::metadata(self.blob(digest)) {
            Ok(metadata) => Ok(metadata.len()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(LibraryError::NoBlob(*digest)),
            Err(error) => Err(LibraryError::io("read", self.blob(digest))(error)),
        }
    }

    /// Deletes those of these files that no record of `kept` uses, and returns the freed bytes. The caller holds the
    /// library's exclusive lock.
    pub(crate) fn release(&self, files: &[FileRecord], kept: &Kept) -> Result<u64, LibraryError> {
        let view = view_name(files);
        if !kept.views.contains(&view) {
            remove_folder(&self.views().join(view))?;
        }
        let mut freed = 0;
        let stored = files.iter().filter(|file| file.location.is_none());
        for file in stored.filter(|file| !kept.blobs.contains(&file.digest.file_name())) {
            let blob = self.blob(&file.digest);
            // Another program may have the file under a name of its own.
            let is_last = link_count(&blob) < 2;
            let size = remove_file(&blob)?;
            freed += if is_last { size } else { 0 };
            self.set_damage(&file.digest, None)?;
        }
        sync_folder(&self.blobs())?;
        Ok(freed)
    }

    /// Deletes all files that are not in `kept`. The caller holds the library's exclusive lock.
    pub(crate) fn sweep(&self, kept: &Kept) -> Result<Pruned, LibraryError> {
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
        for mark in entries(&self.damaged())? {
            if !kept.blobs.contains(&format!("sha256-{}", name_of(&mark))) {
                remove_file(&mark)?;
            }
        }
        self.sweep_unfinished(&mut pruned)?;
        // Users of these locks also hold the library's lock, so there are none.
        for lock in entries(&self.locks())? {
            remove_file(&lock)?;
        }
        sync_folder(&self.blobs())?;
        Ok(pruned)
    }

    /// Deletes downloads and copies that are not complete. The caller holds the library's exclusive lock.
    pub(crate) fn sweep_unfinished(&self, pruned: &mut Pruned) -> Result<(), LibraryError> {
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
        Ok(())
    }

    /// Counts the blobs, without reading any.
    pub(crate) fn count(&self) -> usize {
        entries(&self.blobs()).map_or(0, |blobs| blobs.len())
    }
}

/// Blobs that the catalogue still names.
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

/// Files that were deleted.
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

/// Names the folder of a set of names and contents.
pub(crate) fn view_name(files: &[FileRecord]) -> String {
    Digest::of(listing(files).as_bytes()).hex()
}

/// Returns the number of names of a file; 1 where the system does not report it.
fn link_count(path: &Path) -> u64 {
    #[cfg(unix)]
    return fs::metadata(path).map_or(1, |file| std::os::unix::fs::MetadataExt::nlink(&file));
    #[cfg(not(unix))]
    {
        let _ = path;
        1
    }
}

fn is_complete(view: &Path, files: &[FileRecord]) -> bool {
    files.iter().all(|file| fs::metadata(view.join(&file.name)).is_ok_and(|found| found.len() == file.size))
}
