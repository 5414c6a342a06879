//! The library: its models by name, their files and settings. `add.rs` adds models, `remove.rs` removes them.

use std::{
    fs,
    io::Read,
    path::{Path, PathBuf},
    sync::Mutex,
    time::{SystemTime, UNIX_EPOCH},
};

use serde_json::{Map, Value};

use crate::name::{digest_name, plain_name};
use crate::{
    cancel::Cancel,
    catalogue::Catalogue,
    digest::Digest,
    error::LibraryError,
    lock::Lock,
    manifest::Manifests,
    name::{Meaning, ModelName, meaning, similar},
    open::Limit,
    record::{FileRecord, Format, Inspect, ModelRecord},
    reserve::Reserve,
    store::Store,
};

/// The models of this machine. Several threads may use it.
#[derive(Debug)]
pub struct Library {
    pub(crate) root: PathBuf,
    pub(crate) catalogue: Catalogue,
    pub(crate) store: Store,
    pub(crate) manifests: Manifests,
    pub(crate) reserve: Reserve,
    pub(crate) limit: Mutex<Option<Limit>>,
}

/// A model that was removed.
#[derive(Clone, Debug)]
pub struct Removed {
    /// Its record.
    pub record: ModelRecord,
    /// Bytes that were freed: those of files that no other model has. `None` if another process is writing to the
    /// library; [`Library::prune`] frees them later.
    pub freed: Option<u64>,
}

/// Choices of a pull.
#[derive(Clone, Debug, Default)]
pub struct PullOptions {
    /// Name in the library; `None` for `owner/repository` and the chosen variant.
    pub name: Option<ModelName>,
    /// Cancels the pull. The downloaded part is kept for the next pull of the same file.
    pub cancel: Cancel,
}

impl Library {
    /// Returns the folder of the library.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns all models, most recently changed first.
    ///
    /// # Errors
    /// The catalogue cannot be read.
    pub fn list(&self) -> Result<Vec<ModelRecord>, LibraryError> {
        self.catalogue.all()
    }

    /// Returns all models, each with the reason for which it cannot run, if there is one. Models that another version
    /// of the program has inspected, or whose files have changed, are inspected again.
    ///
    /// # Errors
    /// The catalogue cannot be read.
    pub fn list_with_problems(
        &self,
        version: &str,
        inspect: &Inspect<'_>,
    ) -> Result<Vec<(ModelRecord, Option<String>)>, LibraryError> {
        let look = |mut model: ModelRecord| {
            let problem = match self.path(&model) {
                Err(error) => Some(error.to_string()),
                Ok(_) if model.stamp == stamp(version, &model.files) => model.details.problem.clone(),
                Ok(path) => match inspect(&path) {
                    Err(error) => Some(error.to_string()),
                    Ok(details) => {
                        model.stamp = stamp(&details.inspected_by, &model.files);
                        model.details = details;
                        if self.limit().is_none() {
                            // If the result cannot be stored, the model is inspected again next time.
                            let _ = self.catalogue.set_details(&model);
                        }
                        model.details.problem.clone()
                    }
                },
            };
            (model, problem)
        };
        Ok(self.list()?.into_iter().map(look).collect())
    }

    /// Returns the model with this name: its full name in any case; without the tag, if that is `latest` or unique;
    /// without the owner, if unique; with the prefix `hf:`, `hf.co/` or `library/`; one of its aliases; or its digest
    /// ([`digest_name`]).
    ///
    /// # Errors
    /// [`LibraryError::NotFound`] with similar names, [`LibraryError::Ambiguous`].
    pub fn find(&self, name: &str) -> Result<ModelRecord, LibraryError> {
        match self.find_named(name) {
            Err(LibraryError::NotFound { name, similar }) => {
                let found = match self.find_alias(&name)? {
                    None => self.find_digest(&name)?,
                    found => found,
                };
                found.ok_or(LibraryError::NotFound { name, similar })
            }
            Err(error @ LibraryError::BadName { .. }) => self.find_digest(name)?.ok_or(error),
            found => found,
        }
    }

    /// Returns the model that `name` names by its digest.
    fn find_digest(&self, name: &str) -> Result<Option<ModelRecord>, LibraryError> {
        let Some((base, digits)) = digest_name(name) else { return Ok(None) };
        if !base.is_empty() {
            let named = self.find_named(base).ok();
            return Ok(named.filter(|record| record.digest().hex().starts_with(&digits)));
        }
        Ok(self.catalogue.all()?.into_iter().find(|record| record.digest().hex().starts_with(&digits)))
    }

    /// Finds a model without aliases.
    pub(crate) fn find_named(&self, name: &str) -> Result<ModelRecord, LibraryError> {
        let names = self.catalogue.names()?;
        let not_found =
            || LibraryError::NotFound { name: name.to_owned(), similar: similar(name, names.iter()) };
        match meaning(name, names.iter()) {
            // The model may have been removed meanwhile.
            Meaning::One(found) => self.catalogue.get(found)?.ok_or_else(not_found),
            Meaning::Several(found) => Err(LibraryError::Ambiguous {
                name: name.to_owned(),
                candidates: found.into_iter().map(ModelName::short).collect(),
            }),
            Meaning::None => Err(not_found()),
        }
    }

    /// Returns the model that has this alias.
    pub(crate) fn find_alias(&self, name: &str) -> Result<Option<ModelRecord>, LibraryError> {
        let plain = |name: &str| plain_name(name).to_lowercase();
        let name = plain(name);
        let has_it = |record: &ModelRecord| record.aliases().any(|alias| plain(alias) == name);
        Ok(self.catalogue.all()?.into_iter().find(has_it))
    }

    /// Returns the path to open for the model of this name: a GGUF file (the first of a split model), or a folder.
    ///
    /// # Errors
    /// As for [`Library::find`] and [`Library::path`].
    pub fn resolve(&self, name: &str) -> Result<PathBuf, LibraryError> {
        self.path(&self.find(name)?)
    }

    /// Returns the path to open for a model that was found.
    ///
    /// # Errors
    /// [`LibraryError::Damaged`] or [`LibraryError::Moved`], if its files are not there any more.
    pub fn path(&self, record: &ModelRecord) -> Result<PathBuf, LibraryError> {
        // The lock prevents deletion of the blobs while the folder of links is created.
        let _writing = if self.limit().is_none() { Some(self.writing()?) } else { None };
        self.place(&record.name.to_string(), record.format, &record.files)
    }

    pub(crate) fn place(
        &self,
        name: &str,
        format: Format,
        files: &[FileRecord],
    ) -> Result<PathBuf, LibraryError> {
        let Some(first) = files.first() else {
            let problem = "it has none".to_owned();
            return Err(LibraryError::Damaged { name: name.to_owned(), file: String::new(), problem });
        };
        for file in files {
            let Some(path) = &file.location else { continue };
            let moved = |problem| LibraryError::Moved { name: name.to_owned(), path: path.clone(), problem };
            match fs::metadata(path) {
                Ok(found) if found.is_file() && found.len() == file.size => {}
                Ok(_) => return Err(moved("has changed since; import it again")),
                Err(_) => return Err(moved("is not there any more")),
            }
        }
        match (&first.location, format) {
            (Some(path), Format::Gguf) => Ok(path.clone()),
            (Some(path), Format::Safetensors) => {
                // Files of modules lie in folders of their own.
                let config = files.iter().find(|file| file.name == "config.json");
                let path = config.and_then(|file| file.location.as_ref()).unwrap_or(path);
                Ok(path.parent().unwrap_or(path).to_owned())
            }
            (None, format) => {
                let view = match self.limit() {
                    None => self.store.view(name, files)?,
                    Some(limit) => match (self.store.existing_view(name, files)?, &files) {
                        (Some(view), _) => view,
                        // A single file can be opened under any name.
                        (None, [only]) if format == Format::Gguf => return Ok(self.store.blob(&only.digest)),
                        (None, _) => return Err(self.no_links(&limit)),
                    },
                };
                Ok(if format == Format::Gguf { view.join(&first.name) } else { view })
            }
        }
    }

    /// Returns the error of a missing folder of links to a model's files, which cannot be created.
    fn no_links(&self, limit: &Limit) -> LibraryError {
        match limit {
            Limit::Full => LibraryError::DiskFull { path: self.root.clone() },
            Limit::ReadOnly(problem) => {
                let problem =
                    format!("{problem}, and the folder with the names of the model's files is missing");
                LibraryError::ReadOnly { path: self.root.clone(), problem }
            }
        }
    }

    /// Sets the defaults of a model's requests.
    ///
    /// # Errors
    /// As for [`Library::find`].
    pub fn set_defaults(
        &self,
        name: &str,
        defaults: Map<String, Value>,
    ) -> Result<ModelRecord, LibraryError> {
        self.change(name, |old| ModelRecord { defaults, modified_at: now(), ..old })
    }

    /// Sets the settings of a model that are kept when its files are replaced.
    ///
    /// # Errors
    /// As for [`Library::find`].
    pub fn set_extra(&self, name: &str, extra: Map<String, Value>) -> Result<ModelRecord, LibraryError> {
        self.change(name, |old| ModelRecord { extra, modified_at: now(), ..old })
    }

    fn change(
        &self,
        name: &str,
        change: impl FnOnce(ModelRecord) -> ModelRecord,
    ) -> Result<ModelRecord, LibraryError> {
        self.writable()?;
        let found = self.find(name)?;
        let changing = self.manifests.change()?;
        let not_found = || LibraryError::NotFound { name: name.to_owned(), similar: Vec::new() };
        let old = self.catalogue.get(&found.name)?.ok_or_else(not_found)?;
        let new = change(old);
        self.manifests.put(&changing, &new, || self.catalogue.put(&new, true))?;
        Ok(new)
    }

    /// Returns true if the blob exists.
    pub fn has_blob(&self, digest: &Digest) -> bool {
        self.store.has(digest)
    }

    /// Stores a blob until a model uses it ([`Library::create_from_blobs`]) or [`Library::prune`] deletes it.
    ///
    /// # Errors
    /// [`LibraryError::DigestMismatch`], if the content does not match; it is then discarded.
    pub fn put_blob(&self, reader: impl Read, digest: Digest) -> Result<(), LibraryError> {
        self.writable()?;
        let _writing = self.writing()?;
        self.store.put("the upload", reader, Some(digest), &Cancel::default(), |_| {})?;
        Ok(())
    }

    /// Locks the library so that no process deletes files that are not in the catalogue yet, or any more.
    pub(crate) fn writing(&self) -> Result<Lock, LibraryError> {
        Lock::shared(&self.lock_file())
    }

    pub(crate) fn lock_file(&self) -> PathBuf {
        self.root.join("library.lock")
    }
}

/// Returns the time with the catalogue's precision of milliseconds.
pub(crate) fn now() -> SystemTime {
    let now = SystemTime::now();
    let fraction = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.subsec_nanos() % 1_000_000);
    now - std::time::Duration::from_nanos(fraction.into())
}

/// Returns an identifier of the program's version and the inspected files. Files of the library never change; others
/// are identified by the time of their last change.
pub(crate) fn stamp(version: &str, files: &[FileRecord]) -> String {
    let mut text = version.to_owned();
    for path in files.iter().filter_map(|file| file.location.as_ref()) {
        let modified = fs::metadata(path).and_then(|metadata| metadata.modified());
        let modified = modified.ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        text += &format!(" {}", modified.map_or(0, |since| since.as_nanos()));
    }
    text
}
