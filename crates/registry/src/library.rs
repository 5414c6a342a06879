//! The library as its users see it.

use std::{
    fs,
    io::Read,
    path::{Path, PathBuf},
    time::SystemTime,
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
    name::{Meaning, ModelName, meaning, similar},
    record::{FileRecord, Format, Inspect, ModelRecord, OnProgress, Progress, Source},
    store::{Kept, Pruned, Store},
};

/// The models of this machine. It may be used from several threads.
#[derive(Debug)]
pub struct Registry {
    root: PathBuf,
    catalogue: Catalogue,
    pub(crate) store: Store,
}

/// A model that was removed.
#[derive(Clone, Debug)]
pub struct Removed {
    /// What it was.
    pub record: ModelRecord,
    /// Bytes that were freed: those of files that no other model has. `None` if another process is writing to the
    /// library; [`Registry::prune`] frees them later.
    pub freed: Option<u64>,
}

/// Choices of a pull.
#[derive(Clone, Debug, Default)]
pub struct PullOptions {
    /// The model's name in the library; without it, `owner/repository` and what was chosen of it.
    pub name: Option<ModelName>,
    /// Stops the pull. What was downloaded is kept, and used when the pull is asked for again.
    pub cancel: Cancel,
}

impl Registry {
    /// Opens the library in this folder; it is made if there is none.
    ///
    /// # Errors
    /// A folder that cannot be written, a catalogue that is damaged or of a newer version.
    pub fn open(root: &Path) -> Result<Self, RegistryError> {
        fs::create_dir_all(root).map_err(RegistryError::io("make the folder", root))?;
        // Hard links to what lies elsewhere would follow a change of the working directory.
        let root = root.canonicalize().map_err(RegistryError::io("open", root))?;
        let _opening = Lock::exclusive(&root.join("open.lock"))?;
        let store = Store::open(&root)?;
        let catalogue = Catalogue::open(&root.join("library.db"))?;
        Ok(Self { root, catalogue, store })
    }

    /// Opens the library in this folder if there is one: looking for a model makes none.
    ///
    /// # Errors
    /// As for [`Registry::open`].
    pub fn open_existing(root: &Path) -> Result<Option<Self>, RegistryError> {
        if root.join("library.db").is_file() { Self::open(root).map(Some) } else { Ok(None) }
    }

    /// Its folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// All models, those that changed last first.
    ///
    /// # Errors
    /// A catalogue that cannot be read.
    pub fn list(&self) -> Result<Vec<ModelRecord>, RegistryError> {
        self.catalogue.all()
    }

    /// The model that a name means: the whole name in any case; without its tag, if that is `latest` or there is only
    /// one; without its owner, if there is only one; with `hf:` or `hf.co/` before it.
    ///
    /// # Errors
    /// [`RegistryError::NotFound`] with similar names, [`RegistryError::Ambiguous`].
    pub fn find(&self, name: &str) -> Result<ModelRecord, RegistryError> {
        let names = self.catalogue.names()?;
        let not_found =
            || RegistryError::NotFound { name: name.to_owned(), similar: similar(name, names.iter()) };
        match meaning(name, names.iter()) {
            // It may have been removed meanwhile.
            Meaning::One(found) => self.catalogue.get(found)?.ok_or_else(not_found),
            Meaning::Several(found) => Err(RegistryError::Ambiguous {
                name: name.to_owned(),
                candidates: found.into_iter().map(ModelName::short).collect(),
            }),
            Meaning::None => Err(not_found()),
        }
    }

    /// What to open for the model of this name: a GGUF file (of a split model the first), or a folder.
    ///
    /// # Errors
    /// As for [`Registry::find`] and [`Registry::path`].
    pub fn resolve(&self, name: &str) -> Result<PathBuf, RegistryError> {
        self.path(&self.find(name)?)
    }

    /// What to open for a model that was found.
    ///
    /// # Errors
    /// [`RegistryError::Damaged`] or [`RegistryError::Moved`], if its files are not there any more.
    pub fn path(&self, record: &ModelRecord) -> Result<PathBuf, RegistryError> {
        // Nobody may delete the blobs while a folder of links to them is being made.
        let _writing = self.writing()?;
        self.place(&record.name.to_string(), record.format, &record.files)
    }

    fn place(&self, name: &str, format: Format, files: &[FileRecord]) -> Result<PathBuf, RegistryError> {
        let Some(first) = files.first() else {
            let problem = "it has none".to_owned();
            return Err(RegistryError::Damaged { name: name.to_owned(), file: String::new(), problem });
        };
        for file in files {
            let Some(path) = &file.location else { continue };
            let moved = |problem| RegistryError::Moved { name: name.to_owned(), path: path.clone(), problem };
            match fs::metadata(path) {
                Ok(found) if found.len() == file.size => {}
                Ok(_) => return Err(moved("has changed since; import it again")),
                Err(_) => return Err(moved("is not there any more")),
            }
        }
        match (&first.location, format) {
            (Some(path), Format::Gguf) => Ok(path.clone()),
            (Some(path), Format::Safetensors) => Ok(path.parent().unwrap_or(path).to_owned()),
            (None, format) => {
                let view = self.store.view(name, files)?;
                Ok(if format == Format::Gguf { view.join(&first.name) } else { view })
            }
        }
    }

    /// Gets a model from a hub, or what is new of it. A model of that name is replaced when the new one is complete.
    ///
    /// Two pulls of one model at a time, in any processes, download each file once.
    ///
    /// # Errors
    /// [`RegistryError`]; the library is as it was, and what was downloaded serves the next attempt.
    pub fn pull(
        &self,
        hub: &Hub,
        reference: &Reference,
        options: &PullOptions,
        inspect: &Inspect<'_>,
        progress: &OnProgress<'_>,
    ) -> Result<ModelRecord, RegistryError> {
        let cancel = &options.cancel;
        let repository = hub.repository(reference, cancel)?;
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

    /// Takes in a GGUF file (with its siblings, if the model is split) or a Hugging Face folder.
    ///
    /// # Errors
    /// [`RegistryError`]; the library is as it was.
    pub fn import(
        &self,
        path: &Path,
        options: &ImportOptions,
        inspect: &Inspect<'_>,
        progress: &OnProgress<'_>,
    ) -> Result<ModelRecord, RegistryError> {
        let found = import::find(path)?;
        let failed = |source| RegistryError::Inspect { name: path.display().to_string(), source };
        // Before minutes of copying: what cannot be opened need not be copied.
        let details = inspect(&found.open).map_err(failed)?;
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

    /// Gives a model another name as well. Nothing is copied: both share their blobs, and either may be removed.
    ///
    /// # Errors
    /// As for [`Registry::find`], and [`RegistryError::NameTaken`] unless `replace`.
    pub fn copy(&self, from: &str, to: &ModelName, replace: bool) -> Result<ModelRecord, RegistryError> {
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
        let writing = self.writing()?;
        let old = self.find(from)?;
        let source = Source::Model { name: old.name.to_string() };
        let new = New { name: name.clone(), source, parameters, replace: true, ..New::like(&old) };
        self.record(writing, new, &|_| Ok(old.details.clone()))
    }

    /// Makes a model from blobs that were put here before, and their file names. One GGUF file, all of a split model, or
    /// those of a Hugging Face folder.
    ///
    /// # Errors
    /// [`RegistryError::NoBlob`], names that are no file names, files that are no model.
    pub fn create_from_blobs(
        &self,
        name: &ModelName,
        files: &[(String, Digest)],
        parameters: Map<String, Value>,
        inspect: &Inspect<'_>,
    ) -> Result<ModelRecord, RegistryError> {
        let writing = self.writing()?;
        let names: Vec<&str> = files.iter().map(|file| file.0.as_str()).collect();
        let format = import::format_of(Path::new(&name.to_string()), &names)?;
        let record = |(name, digest): &(String, Digest)| {
            let size = self.store.blob_size(digest)?;
            Ok(FileRecord { name: name.clone(), size, digest: *digest, location: None })
        };
        let mut files = files.iter().map(record).collect::<Result<Vec<_>, RegistryError>>()?;
        // The first of a split model is first by its name, too.
        files.sort_by(|a, b| a.name.cmp(&b.name));
        let new =
            New { name: name.clone(), source: Source::Upload, format, files, parameters, replace: true };
        self.record(writing, new, inspect)
    }

    /// Changes what a model's requests begin with.
    ///
    /// # Errors
    /// As for [`Registry::find`].
    pub fn set_parameters(
        &self,
        name: &str,
        parameters: Map<String, Value>,
    ) -> Result<ModelRecord, RegistryError> {
        let found = self.find(name)?;
        let now = SystemTime::now();
        if !self.catalogue.set_parameters(&found.name, &parameters, now)? {
            return Err(RegistryError::NotFound { name: name.to_owned(), similar: Vec::new() });
        }
        Ok(ModelRecord { parameters, modified_at: now, ..found })
    }

    /// Forgets a model, and deletes those of its files that no other model has. Files that were imported by reference
    /// stay where they are.
    ///
    /// # Errors
    /// As for [`Registry::find`].
    pub fn remove(&self, name: &str) -> Result<Removed, RegistryError> {
        let record = self.find(name)?;
        if !self.catalogue.delete(&record.name)? {
            return Err(RegistryError::NotFound { name: name.to_owned(), similar: Vec::new() });
        }
        let freed = self.release(&record.files)?;
        Ok(Removed { record, freed })
    }

    /// Deletes everything that belongs to no model: unfinished downloads, uploads that nothing was made of, what a killed
    /// process has left.
    ///
    /// # Errors
    /// [`RegistryError::Busy`] while another process pulls or imports.
    pub fn prune(&self) -> Result<Pruned, RegistryError> {
        let _alone = Lock::exclusive_soon(&self.lock_file())?;
        self.store.sweep(&self.kept()?)
    }

    /// Whether a blob is here.
    pub fn has_blob(&self, digest: &Digest) -> bool {
        self.store.has(digest)
    }

    /// Takes in a blob. It stays until a model is made of it ([`Registry::create_from_blobs`]) or [`Registry::prune`]
    /// deletes it.
    ///
    /// # Errors
    /// [`RegistryError::DigestMismatch`], if it is not what its digest says; nothing is kept then.
    pub fn put_blob(&self, reader: impl Read, digest: Digest) -> Result<(), RegistryError> {
        let _writing = self.writing()?;
        self.store.put("the upload", reader, Some(digest), &Cancel::default(), |_| {})?;
        Ok(())
    }

    /// Records a model whose files are here, once `inspect` has opened it.
    fn record(&self, writing: Lock, new: New, inspect: &Inspect<'_>) -> Result<ModelRecord, RegistryError> {
        let name = new.name.to_string();
        let path = self.place(&name, new.format, &new.files)?;
        let details = inspect(&path).map_err(|source| RegistryError::Inspect { name, source })?;
        let replaced = self.catalogue.get(&new.name)?;
        let now = SystemTime::now();
        let record = ModelRecord {
            created_at: replaced.as_ref().map_or(now, |old| old.created_at),
            name: new.name,
            source: new.source,
            format: new.format,
            details,
            parameters: new.parameters,
            files: new.files,
            modified_at: now,
        };
        self.catalogue.put(&record, new.replace)?;
        drop(writing);
        if let Some(old) = replaced {
            self.release(&old.files)?;
        }
        // As the catalogue has it: its times are of milliseconds.
        Ok(self.catalogue.get(&record.name)?.unwrap_or(record))
    }

    /// Keeps others from deleting what is not yet, or no longer, in the catalogue.
    pub(crate) fn writing(&self) -> Result<Lock, RegistryError> {
        Lock::shared(&self.lock_file())
    }

    fn lock_file(&self) -> PathBuf {
        self.root.join("library.lock")
    }

    /// Deletes what only a forgotten model has had; `None` if somebody is writing and might want it.
    fn release(&self, files: &[FileRecord]) -> Result<Option<u64>, RegistryError> {
        let Some(_alone) = Lock::try_exclusive(&self.lock_file())? else { return Ok(None) };
        self.store.release(files, &self.kept()?).map(Some)
    }

    fn kept(&self) -> Result<Kept, RegistryError> {
        let mut kept = Kept::default();
        for model in self.catalogue.all()? {
            kept.add(&model.files);
        }
        Ok(kept)
    }

    /// Refuses early what would be refused after long work.
    fn check_free(&self, name: &ModelName, replace: bool) -> Result<(), RegistryError> {
        match self.catalogue.get(name)? {
            Some(_) if !replace => Err(RegistryError::NameTaken { name: name.to_string() }),
            _ => Ok(()),
        }
    }
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
