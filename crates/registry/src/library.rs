//! The public interface of the library.

use std::{
    fs,
    io::Read,
    path::{Path, PathBuf},
    sync::Mutex,
    time::{SystemTime, UNIX_EPOCH},
};

use serde_json::{Map, Value};

use crate::{
    cancel::Cancel,
    catalogue::Catalogue,
    digest::Digest,
    error::RegistryError,
    hub::{self, Hub, Reference},
    import::{self, ImportOptions},
    lock::Lock,
    manifest::Manifests,
    name::{Meaning, ModelName, meaning, similar},
    open::Limit,
    record::{Details, FileRecord, Format, Inspect, ModelRecord, OnProgress, Progress, Source},
    reserve::Reserve,
    store::{Kept, Pruned, Store},
};

/// The models of this machine. Several threads may use it.
#[derive(Debug)]
pub struct Registry {
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
    /// library; [`Registry::prune`] frees them later.
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

impl Registry {
    /// Its folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns all models, most recently changed first.
    ///
    /// # Errors
    /// The catalogue cannot be read.
    pub fn list(&self) -> Result<Vec<ModelRecord>, RegistryError> {
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
    ) -> Result<Vec<(ModelRecord, Option<String>)>, RegistryError> {
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
    /// without the owner, if unique; with the prefix `hf:` or `hf.co/`; or one of its aliases.
    ///
    /// # Errors
    /// [`RegistryError::NotFound`] with similar names, [`RegistryError::Ambiguous`].
    pub fn find(&self, name: &str) -> Result<ModelRecord, RegistryError> {
        match self.find_named(name) {
            Err(RegistryError::NotFound { name, similar }) => {
                self.find_alias(&name)?.ok_or(RegistryError::NotFound { name, similar })
            }
            found => found,
        }
    }

    /// Finds a model without aliases.
    fn find_named(&self, name: &str) -> Result<ModelRecord, RegistryError> {
        let names = self.catalogue.names()?;
        let not_found =
            || RegistryError::NotFound { name: name.to_owned(), similar: similar(name, names.iter()) };
        match meaning(name, names.iter()) {
            // The model may have been removed meanwhile.
            Meaning::One(found) => self.catalogue.get(found)?.ok_or_else(not_found),
            Meaning::Several(found) => Err(RegistryError::Ambiguous {
                name: name.to_owned(),
                candidates: found.into_iter().map(ModelName::short).collect(),
            }),
            Meaning::None => Err(not_found()),
        }
    }

    /// The model that has this alias.
    fn find_alias(&self, name: &str) -> Result<Option<ModelRecord>, RegistryError> {
        let plain = |name: &str| name.strip_suffix(":latest").unwrap_or(name).to_lowercase();
        let name = plain(name);
        let has_it = |record: &ModelRecord| record.aliases().any(|alias| plain(alias) == name);
        Ok(self.catalogue.all()?.into_iter().find(has_it))
    }

    /// Returns the path to open for the model of this name: a GGUF file (the first of a split model), or a folder.
    ///
    /// # Errors
    /// As for [`Registry::find`] and [`Registry::path`].
    pub fn resolve(&self, name: &str) -> Result<PathBuf, RegistryError> {
        self.path(&self.find(name)?)
    }

    /// Returns the path to open for a model that was found.
    ///
    /// # Errors
    /// [`RegistryError::Damaged`] or [`RegistryError::Moved`], if its files are not there any more.
    pub fn path(&self, record: &ModelRecord) -> Result<PathBuf, RegistryError> {
        // The lock prevents deletion of the blobs while the folder of links is created.
        let _writing = if self.limit().is_none() { Some(self.writing()?) } else { None };
        self.place(&record.name.to_string(), record.format, &record.files)
    }

    pub(crate) fn place(
        &self,
        name: &str,
        format: Format,
        files: &[FileRecord],
    ) -> Result<PathBuf, RegistryError> {
        let Some(first) = files.first() else {
            let problem = "it has none".to_owned();
            return Err(RegistryError::Damaged { name: name.to_owned(), file: String::new(), problem });
        };
        for file in files {
            let Some(path) = &file.location else { continue };
            let moved = |problem| RegistryError::Moved { name: name.to_owned(), path: path.clone(), problem };
            match fs::metadata(path) {
                Ok(found) if found.is_file() && found.len() == file.size => {}
                Ok(_) => return Err(moved("has changed since; import it again")),
                Err(_) => return Err(moved("is not there any more")),
            }
        }
        match (&first.location, format) {
            (Some(path), Format::Gguf) => Ok(path.clone()),
            (Some(path), Format::Safetensors) => Ok(path.parent().unwrap_or(path).to_owned()),
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

    /// The folder of links to a model's files is missing and cannot be made.
    fn no_links(&self, limit: &Limit) -> RegistryError {
        match limit {
            Limit::Full => RegistryError::DiskFull { path: self.root.clone() },
            Limit::ReadOnly(problem) => {
                let problem =
                    format!("{problem}, and the folder with the names of the model's files is missing");
                RegistryError::ReadOnly { path: self.root.clone(), problem }
            }
        }
    }

    /// Pulls a model from a hub, or its changed files. A model of that name is replaced when the new one is complete.
    ///
    /// Concurrent pulls of one model, in any processes, download each file once.
    ///
    /// # Errors
    /// [`RegistryError`]; the library is unchanged, and the downloaded parts are kept for the next attempt.
    pub fn pull(
        &self,
        hub: &Hub,
        reference: &Reference,
        options: &PullOptions,
        inspect: &Inspect<'_>,
        progress: &OnProgress<'_>,
    ) -> Result<ModelRecord, RegistryError> {
        let cancel = &options.cancel;
        self.writable()?;
        let repository = hub.repository(reference, cancel, progress)?;
        let chosen = hub::choose(&repository, reference.choice.as_ref())?;
        let name = match &options.name {
            Some(name) => name.clone(),
            None => ModelName::new(&repository.name, &chosen.tag)?,
        };
        let writing = self.writing()?;
        let files = hub.download(&self.store, &repository, &chosen.files, cancel, progress)?;
        progress(Progress::Recording);
        let source = Source::Hub {
            endpoint: hub.endpoint().to_owned(),
            repo: repository.name,
            commit: repository.commit,
        };
        let new = New { name, source, format: chosen.format, files, parameters: Map::new(), replace: true };
        self.record(writing, new, inspect)
    }

    /// Queries the name and size that a pulled model would have.
    ///
    /// # Errors
    /// As for [`Registry::pull`]; the library is not changed.
    pub fn look_up(
        &self,
        hub: &Hub,
        reference: &Reference,
        options: &PullOptions,
    ) -> Result<(ModelName, u64), RegistryError> {
        let repository = hub.repository(reference, &options.cancel, &|_| {})?;
        let chosen = hub::choose(&repository, reference.choice.as_ref())?;
        let name = match &options.name {
            Some(name) => name.clone(),
            None => ModelName::new(&repository.name, &chosen.tag)?,
        };
        Ok((name, chosen.files.iter().map(|file| file.size).sum()))
    }

    /// Takes in a GGUF file (with its siblings, if the model is split) or a Hugging Face folder.
    ///
    /// # Errors
    /// [`RegistryError`]; the library is as it was. [`RegistryError::CannotRun`] unless `options.force`.
    pub fn import(
        &self,
        path: &Path,
        options: &ImportOptions,
        inspect: &Inspect<'_>,
        progress: &OnProgress<'_>,
    ) -> Result<ModelRecord, RegistryError> {
        self.writable()?;
        let found = import::find(path)?;
        let failed = |source| RegistryError::Inspect { name: path.display().to_string(), source };
        // The model is inspected before it is copied, which may take minutes.
        let details = inspect(&found.open).map_err(failed)?;
        if !options.force {
            refuse_unusable(&details, path.display())?;
        }
        let name = match &options.name {
            Some(name) => name.clone(),
            None => import::name(&found, &details)?,
        };
        self.check_free(&name, options.replace)?;
        let writing = self.writing()?;
        let files = import::take_in(&self.store, &found, options, progress)?;
        progress(Progress::Recording);
        let source = Source::Import { path: found.open.clone() };
        let parameters = Map::new();
        let new = New { name, source, format: found.format, files, parameters, replace: options.replace };
        self.record(writing, new, &|_| Ok(details.clone()))
    }

    /// Adds another name of a model. Both share their blobs, and either may be removed.
    ///
    /// # Errors
    /// As for [`Registry::find`], and [`RegistryError::NameTaken`] unless `replace`.
    pub fn copy(&self, from: &str, to: &ModelName, replace: bool) -> Result<ModelRecord, RegistryError> {
        self.writable()?;
        let writing = self.writing()?;
        let old = self.find(from)?;
        if old.name.is_same(to) {
            return Err(RegistryError::NameTaken { name: to.to_string() });
        }
        let new = New { name: to.clone(), replace, ..New::like(&old) };
        self.record(writing, new, &|_| Ok(old.details.clone()))
    }

    /// Makes a model from another one, with other parameters. The two may have one name.
    ///
    /// # Errors
    /// As for [`Registry::find`].
    pub fn create_from_model(
        &self,
        name: &ModelName,
        from: &str,
        parameters: Map<String, Value>,
    ) -> Result<ModelRecord, RegistryError> {
        self.writable()?;
        let writing = self.writing()?;
        let old = self.find(from)?;
        let source = Source::Model { name: old.name.to_string() };
        let new = New { name: name.clone(), source, parameters, replace: true, ..New::like(&old) };
        self.record(writing, new, &|_| Ok(old.details.clone()))
    }

    /// Creates a model from stored blobs and their file names: one GGUF file, all files of a split model, or those of a
    /// Hugging Face folder.
    ///
    /// # Errors
    /// [`RegistryError::NoBlob`], invalid file names, or files that are not a model.
    pub fn create_from_blobs(
        &self,
        name: &ModelName,
        files: &[(String, Digest)],
        parameters: Map<String, Value>,
        inspect: &Inspect<'_>,
    ) -> Result<ModelRecord, RegistryError> {
        self.writable()?;
        let writing = self.writing()?;
        let names: Vec<&str> = files.iter().map(|file| file.0.as_str()).collect();
        let format = import::format_of(Path::new(&name.to_string()), &names)?;
        let record = |(name, digest): &(String, Digest)| {
            let size = self.store.blob_size(digest)?;
            Ok(FileRecord { name: name.clone(), size, digest: *digest, location: None })
        };
        let mut files = files.iter().map(record).collect::<Result<Vec<_>, RegistryError>>()?;
        // The first file of a split model also has the first name.
        files.sort_by(|a, b| a.name.cmp(&b.name));
        for file in &files {
            if !self.store.is_sound(&file.digest, &Cancel::default(), |_| {})? {
                // The client is then told that the blob is missing, and uploads it again.
                self.store.set_damage(&file.digest, Some("its content has changed since it was stored"))?;
                return Err(RegistryError::NoBlob(file.digest));
            }
        }
        let new =
            New { name: name.clone(), source: Source::Upload, format, files, parameters, replace: true };
        self.record(writing, new, &|path| {
            let details = inspect(path)?;
            refuse_unusable(&details, name)?;
            Ok(details)
        })
    }

    /// Sets the default parameters of a model's requests.
    ///
    /// # Errors
    /// As for [`Registry::find`].
    pub fn set_parameters(
        &self,
        name: &str,
        parameters: Map<String, Value>,
    ) -> Result<ModelRecord, RegistryError> {
        self.change(name, |old| ModelRecord { parameters, modified_at: now(), ..old })
    }

    /// Sets the settings of a model that are kept when its files are replaced.
    ///
    /// # Errors
    /// As for [`Registry::find`].
    pub fn set_extra(&self, name: &str, extra: Map<String, Value>) -> Result<ModelRecord, RegistryError> {
        self.change(name, |old| ModelRecord { extra, modified_at: now(), ..old })
    }

    fn change(
        &self,
        name: &str,
        change: impl FnOnce(ModelRecord) -> ModelRecord,
    ) -> Result<ModelRecord, RegistryError> {
        self.writable()?;
        let found = self.find(name)?;
        let changing = self.manifests.change()?;
        let not_found = || RegistryError::NotFound { name: name.to_owned(), similar: Vec::new() };
        let old = self.catalogue.get(&found.name)?.ok_or_else(not_found)?;
        let new = change(old);
        self.manifests.put(&changing, &new, || self.catalogue.put(&new, true))?;
        Ok(new)
    }

    /// Forgets a model, which an alias does not name, and deletes those of its files that no other model has. Files that were imported by reference
    /// stay where they are.
    ///
    /// # Errors
    /// As for [`Registry::find`].
    pub fn remove(&self, name: &str) -> Result<Removed, RegistryError> {
        let record = self.find_named(name).or_else(|error| match self.find_alias(name)? {
            // Removing another name of a model may not mean the model.
            Some(record) => {
                Err(RegistryError::NotFound { name: name.to_owned(), similar: vec![record.name.short()] })
            }
            None => Err(error),
        })?;
        let forget = || {
            self.writable()?;
            let changing = self.manifests.change()?;
            let forget = || self.catalogue.delete(&record.name);
            if self.manifests.delete(&changing, &record.name, forget)? {
                return Ok(());
            }
            Err(RegistryError::NotFound { name: name.to_owned(), similar: Vec::new() })
        };
        let mut freed_before = 0;
        match self.freeing(forget) {
            Err(RegistryError::DiskFull { .. }) => {
                // The files are deleted before the catalogue is changed, which takes little time.
                if let Some(_alone) = Lock::try_exclusive(&self.lock_file())? {
                    freed_before = self.store.release(&record.files, &self.kept(Some(&record.name))?)?;
                }
                self.freeing(forget)?;
            }
            done => done?,
        }
        let freed = self.release(&record.files)?.map(|freed| freed + freed_before);
        self.reserve.ensure();
        Ok(Removed { record, freed })
    }

    /// Deletes everything that belongs to no model: unfinished downloads, unused uploads, remains of killed processes.
    /// `force` also deletes files of models that have records but are missing in the catalogue.
    ///
    /// # Errors
    /// [`RegistryError::Busy`] while another process pulls or imports, [`RegistryError::UnknownModels`] unless `force`.
    pub fn prune(&self, force: bool) -> Result<Pruned, RegistryError> {
        self.freeing(|| {
            self.deletable()?;
            let _alone = Lock::exclusive_soon(&self.lock_file())?;
            let names = self.catalogue.names()?;
            let changing = self.manifests.change()?;
            self.manifests.reconcile(&changing, &names)?;
            let unknown = self.manifests.unknown(&names, false)?;
            if force {
                for model in unknown {
                    self.manifests.discard(&changing, model)?;
                }
            } else if !unknown.is_empty() {
                let models: Result<Vec<_>, _> = unknown.into_iter().collect();
                let models = models?.iter().map(|model| model.name.short()).collect();
                return Err(RegistryError::UnknownModels { models });
            }
            self.store.sweep(&self.kept(None)?)
        })
    }

    /// Returns true if the blob exists.
    pub fn has_blob(&self, digest: &Digest) -> bool {
        self.store.has(digest)
    }

    /// Stores a blob until a model uses it ([`Registry::create_from_blobs`]) or [`Registry::prune`] deletes it.
    ///
    /// # Errors
    /// [`RegistryError::DigestMismatch`], if the content does not match; it is then discarded.
    pub fn put_blob(&self, reader: impl Read, digest: Digest) -> Result<(), RegistryError> {
        self.writable()?;
        let _writing = self.writing()?;
        self.store.put("the upload", reader, Some(digest), &Cancel::default(), |_| {})?;
        Ok(())
    }

    /// Records a model whose files are here, once `inspect` has opened it.
    fn record(&self, writing: Lock, new: New, inspect: &Inspect<'_>) -> Result<ModelRecord, RegistryError> {
        let name = new.name.to_string();
        let path = self.place(&name, new.format, &new.files)?;
        let details = inspect(&path).map_err(|source| RegistryError::Inspect { name, source })?;
        let changing = self.manifests.change()?;
        let replaced = self.catalogue.get(&new.name)?;
        let now = now();
        let record = ModelRecord {
            created_at: replaced.as_ref().map_or(now, |old| old.created_at),
            extra: replaced.as_ref().map(|old| old.extra.clone()).unwrap_or_default(),
            stamp: stamp(&details.inspected_by, &new.files),
            name: new.name,
            source: new.source,
            format: new.format,
            details,
            parameters: new.parameters,
            files: new.files,
            modified_at: now,
        };
        let commit = || self.catalogue.put(&record, new.replace);
        self.manifests.put(&changing, &record, commit).map_err(|error| self.lack_of_space(error))?;
        drop(changing);
        drop(writing);
        if let Some(old) = replaced {
            self.release(&old.files)?;
        }
        Ok(record)
    }

    /// Locks the library so that no process deletes files that are not in the catalogue yet, or any more.
    pub(crate) fn writing(&self) -> Result<Lock, RegistryError> {
        Lock::shared(&self.lock_file())
    }

    pub(crate) fn lock_file(&self) -> PathBuf {
        self.root.join("library.lock")
    }

    /// Deletes files that only a removed model has used; `None` if another process is writing and might use them.
    fn release(&self, files: &[FileRecord]) -> Result<Option<u64>, RegistryError> {
        let Some(_alone) = Lock::try_exclusive(&self.lock_file())? else { return Ok(None) };
        self.store.release(files, &self.kept(None)?).map(Some)
    }

    /// Returns the names in the catalogue, and the records beside it, in case the catalogue is not the right one; all of it for models
    /// other than `except`.
    fn kept(&self, except: Option<&ModelName>) -> Result<Kept, RegistryError> {
        let (mut kept, models) = (Kept::default(), self.catalogue.all()?);
        let names: Vec<_> = models.iter().map(|model| model.name.clone()).collect();
        let others = models.iter().filter(|model| Some(&model.name) != except);
        others.for_each(|model| kept.add(&model.files));
        for model in self.manifests.unknown(&names, false)? {
            kept.add(&model?.files);
        }
        Ok(kept)
    }

    /// Refuses a taken name before long work.
    fn check_free(&self, name: &ModelName, replace: bool) -> Result<(), RegistryError> {
        match self.catalogue.get(name)? {
            Some(_) if !replace => Err(RegistryError::NameTaken { name: name.to_string() }),
            _ => Ok(()),
        }
    }
}

/// Refuses a model that the program cannot run.
fn refuse_unusable(details: &Details, name: impl ToString) -> Result<(), RegistryError> {
    match &details.problem {
        Some(problem) => Err(RegistryError::CannotRun { name: name.to_string(), problem: problem.clone() }),
        None => Ok(()),
    }
}

/// Returns the time with the catalogue's precision of milliseconds.
fn now() -> SystemTime {
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

/// A model that is about to be recorded.
struct New {
    name: ModelName,
    source: Source,
    format: Format,
    files: Vec<FileRecord>,
    parameters: Map<String, Value>,
    replace: bool,
}

impl New {
    fn like(old: &ModelRecord) -> Self {
        Self {
            name: old.name.clone(),
            source: old.source.clone(),
            format: old.format,
            files: old.files.clone(),
            parameters: old.parameters.clone(),
            replace: false,
        }
    }
}
