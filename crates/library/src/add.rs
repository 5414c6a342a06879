//! Models that enter the library: pulls, imports, copies, uploads.

use std::path::Path;

use serde_json::{Map, Value};

use crate::{
    adapter::{BASE, belongs_to_adapter, is_adapter},
    cancel::Cancel,
    digest::Digest,
    error::LibraryError,
    found::FoundModel,
    hub::{self, Hub, Reference},
    import::{self, Found, ImportOptions},
    library::{Library, PullOptions, now, stamp},
    lock::Lock,
    name::ModelName,
    record::{Details, FileRecord, Format, Inspect, ModelRecord, OnProgress, Progress, Source},
};

/// Result of an import of another program's model.
#[derive(Clone, Debug)]
pub enum Taken {
    /// The model is in the library now.
    New(ModelRecord),
    /// The library had it before, under the same name.
    Same(ModelRecord),
}

impl Library {
    /// Pulls a model from a hub, or its changed files. A model of that name is replaced when the new one is complete.
    ///
    /// Concurrent pulls of one model, in any processes, download each file once.
    ///
    /// # Errors
    /// [`LibraryError`]; the library is unchanged, and the downloaded parts are kept for the next attempt.
    pub fn pull(
        &self,
        hub: &Hub,
        reference: &Reference,
        options: &PullOptions,
        inspect: &Inspect<'_>,
        progress: &OnProgress<'_>,
    ) -> Result<ModelRecord, LibraryError> {
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
        let new = New {
            name,
            source,
            format: chosen.format,
            files,
            defaults: Map::new(),
            extra: Map::new(),
            replace: true,
        };
        self.record(writing, new, inspect)
    }

    /// Queries the name and size that a pulled model would have.
    ///
    /// # Errors
    /// As for [`Library::pull`]; the library is not changed.
    pub fn look_up(
        &self,
        hub: &Hub,
        reference: &Reference,
        options: &PullOptions,
    ) -> Result<(ModelName, u64), LibraryError> {
        let repository = hub.repository(reference, &options.cancel, &|_| {})?;
        let chosen = hub::choose(&repository, reference.choice.as_ref())?;
        let name = match &options.name {
            Some(name) => name.clone(),
            None => ModelName::new(&repository.name, &chosen.tag)?,
        };
        Ok((name, chosen.files.iter().map(|file| file.size).sum()))
    }

    /// Imports a GGUF file (with its siblings, if the model is split) or a Hugging Face folder.
    ///
    /// # Errors
    /// [`LibraryError`]; the library is as it was. [`LibraryError::CannotRun`] unless `options.force`.
    pub fn import(
        &self,
        path: &Path,
        options: &ImportOptions,
        inspect: &Inspect<'_>,
        progress: &OnProgress<'_>,
    ) -> Result<ModelRecord, LibraryError> {
        match self.import_again(path, options, inspect, progress)? {
            Taken::New(record) => Ok(record),
            Taken::Same(record) => Err(LibraryError::NameTaken { name: record.name.to_string() }),
        }
    }

    /// As [`Library::import`]. If the library has the same content under this name already, nothing is changed.
    ///
    /// # Errors
    /// As for [`Library::import`].
    pub fn import_again(
        &self,
        path: &Path,
        options: &ImportOptions,
        inspect: &Inspect<'_>,
        progress: &OnProgress<'_>,
    ) -> Result<Taken, LibraryError> {
        self.writable()?;
        let found = import::find(path)?;
        let name = |details: &Details| import::name(&found, details);
        self.take(&found, &path.display().to_string(), &name, options, inspect, progress)
    }

    /// Imports a model of another program. If the library has it under its name already, nothing is read.
    ///
    /// # Errors
    /// As for [`Library::import`], and [`LibraryError::Unusable`].
    pub fn import_found(
        &self,
        model: &FoundModel,
        options: &ImportOptions,
        inspect: &Inspect<'_>,
        progress: &OnProgress<'_>,
    ) -> Result<Taken, LibraryError> {
        self.writable()?;
        let name = |details: &Details| model.library_name(details);
        self.take(model.files()?, &model.reference(), &name, options, inspect, progress)
    }

    /// Returns the models of the library that consist of the files of another program's model.
    ///
    /// # Errors
    /// The catalogue cannot be read.
    pub fn same_as(&self, model: &FoundModel) -> Result<Vec<ModelName>, LibraryError> {
        let Ok(found) = model.files() else { return Ok(Vec::new()) };
        let records = self.list()?.into_iter();
        // A library that had the content before has no link to this file.
        let is_from = |record: &ModelRecord| {
            matches!(&record.source, Source::Import { path } if *path == found.open)
                && import::has_sizes_of(record, found)
        };
        let same =
            records.filter(|record| import::is_same_model(&self.store, record, found) || is_from(record));
        Ok(same.map(|record| record.name).collect())
    }

    /// Imports files that were found.
    fn take(
        &self,
        found: &Found,
        what: &str,
        name: &dyn Fn(&Details) -> Result<ModelName, LibraryError>,
        options: &ImportOptions,
        inspect: &Inspect<'_>,
        progress: &OnProgress<'_>,
    ) -> Result<Taken, LibraryError> {
        let failed = |source| LibraryError::Inspect { name: what.to_owned(), source };
        // The model is inspected before it is copied, which may take minutes.
        let details = inspect(&found.open).map_err(failed)?;
        if !options.force {
            refuse_unusable(&details, what)?;
        }
        let name = match &options.name {
            Some(name) => name.clone(),
            None => name(&details)?,
        };
        let short = name.short();
        if options.reserved.iter().any(|other| other.eq_ignore_ascii_case(&short)) {
            let problem = "a model inside the program has it, so another one is needed";
            return Err(LibraryError::BadName { name: short, problem });
        }
        match self.catalogue.get(&name)? {
            Some(old) if !options.replace && import::is_same_model(&self.store, &old, found) => {
                return Ok(Taken::Same(old));
            }
            // The library may have had the content before, so that it has no link to these files.
            Some(old) if !options.replace => {
                return match import::has_content_of(&old, found, options, progress)? {
                    true => Ok(Taken::Same(old)),
                    false => Err(LibraryError::NameTaken { name: name.to_string() }),
                };
            }
            _ => {}
        }
        let writing = self.writing()?;
        let files = import::store_files(&self.store, found, options, progress)?;
        progress(Progress::Recording);
        let new = New {
            name,
            source: Source::Import { path: found.open.clone() },
            format: found.format,
            files,
            defaults: options.defaults.clone(),
            extra: options.extra.clone(),
            replace: options.replace,
        };
        self.record(writing, new, &|_| Ok(details.clone())).map(Taken::New)
    }

    /// Adds another name of a model. Both share their blobs, and either may be removed.
    ///
    /// # Errors
    /// As for [`Library::find`], and [`LibraryError::NameTaken`] unless `replace`.
    pub fn copy(&self, from: &str, to: &ModelName, replace: bool) -> Result<ModelRecord, LibraryError> {
        self.writable()?;
        let writing = self.writing()?;
        let old = self.find(from)?;
        if old.name.is_same(to) {
            return Err(LibraryError::NameTaken { name: to.to_string() });
        }
        let new = New { name: to.clone(), replace, ..New::like(&old) };
        self.record(writing, new, &|_| Ok(old.details.clone()))
    }

    /// Creates a model from another one, with other defaults. The two may have one name.
    ///
    /// # Errors
    /// As for [`Library::find`].
    pub fn create_from_model(
        &self,
        name: &ModelName,
        from: &str,
        defaults: Map<String, Value>,
    ) -> Result<ModelRecord, LibraryError> {
        self.writable()?;
        let writing = self.writing()?;
        let old = self.find(from)?;
        let source = Source::Model { name: old.name.to_string() };
        let new = New { name: name.clone(), source, defaults, replace: true, ..New::like(&old) };
        self.record(writing, new, &|_| Ok(old.details.clone()))
    }

    /// Creates a model from stored blobs and their file names: one GGUF file, all files of a split model, or those of a
    /// Hugging Face folder.
    ///
    /// # Errors
    /// [`LibraryError::NoBlob`], invalid file names, or files that are not a model.
    pub fn create_from_blobs(
        &self,
        name: &ModelName,
        files: &[(String, Digest)],
        defaults: Map<String, Value>,
        inspect: &Inspect<'_>,
    ) -> Result<ModelRecord, LibraryError> {
        self.create_with(name, files, (defaults, Map::new()), inspect)
    }

    /// Creates an adapter from stored blobs and their file names: one GGUF file, or those of a folder. It changes the model
    /// `base`, which need not be in the library.
    ///
    /// # Errors
    /// As for [`Library::create_from_blobs`].
    pub fn create_adapter(
        &self,
        name: &ModelName,
        files: &[(String, Digest)],
        defaults: Map<String, Value>,
        base: &str,
        inspect: &Inspect<'_>,
    ) -> Result<ModelRecord, LibraryError> {
        let extra = [(BASE.to_owned(), base.into())].into_iter().collect();
        // Clients upload all small files of a folder.
        let is_folder = is_adapter(files.iter().map(|(name, _)| name.as_str()));
        let belongs = |(name, _): &&(String, Digest)| !is_folder || belongs_to_adapter(name);
        let files: Vec<_> = files.iter().filter(belongs).cloned().collect();
        self.create_with(name, &files, (defaults, extra), inspect)
    }

    fn create_with(
        &self,
        name: &ModelName,
        files: &[(String, Digest)],
        (defaults, extra): (Map<String, Value>, Map<String, Value>),
        inspect: &Inspect<'_>,
    ) -> Result<ModelRecord, LibraryError> {
        self.writable()?;
        let writing = self.writing()?;
        let names: Vec<&str> = files.iter().map(|file| file.0.as_str()).collect();
        let format = import::format_of(Path::new(&name.to_string()), &names)?;
        let record = |(name, digest): &(String, Digest)| {
            let size = self.store.blob_size(digest)?;
            Ok(FileRecord { name: name.clone(), size, digest: *digest, location: None })
        };
        let mut files = files.iter().map(record).collect::<Result<Vec<_>, LibraryError>>()?;
        // The first file of a split model also has the first name. The model comes before its companions.
        files.sort_by_key(|file| (import::is_companion(&file.name), file.name.clone()));
        for file in &files {
            if !self.store.is_sound(&file.digest, &Cancel::default(), |_| {})? {
                // The client is then told that the blob is missing, and uploads it again.
                self.store.set_damage(&file.digest, Some("its content has changed since it was stored"))?;
                return Err(LibraryError::NoBlob(file.digest));
            }
        }
        let source = Source::Upload;
        let new = New { name: name.clone(), source, format, files, defaults, extra, replace: true };
        self.record(writing, new, &|path| {
            let details = inspect(path)?;
            refuse_unusable(&details, name)?;
            Ok(details)
        })
    }

    /// Records a model whose files are in the library, after `inspect` has opened it.
    fn record(&self, writing: Lock, new: New, inspect: &Inspect<'_>) -> Result<ModelRecord, LibraryError> {
        let name = new.name.to_string();
        let path = self.place(&name, new.format, &new.files)?;
        let details = inspect(&path).map_err(|source| LibraryError::Inspect { name, source })?;
        let changing = self.manifests.change()?;
        let replaced = self.catalogue.get(&new.name)?;
        let now = now();
        let record = ModelRecord {
            created_at: replaced.as_ref().map_or(now, |old| old.created_at),
            extra: extra_of(new.extra, replaced.as_ref(), &details),
            stamp: stamp(&details.inspected_by, &new.files),
            name: new.name,
            source: new.source,
            format: new.format,
            details,
            defaults: new.defaults,
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
}

/// Refuses a model that the program cannot run.
fn refuse_unusable(details: &Details, name: impl ToString) -> Result<(), LibraryError> {
    match &details.problem {
        Some(problem) => Err(LibraryError::CannotRun { name: name.to_string(), problem: problem.clone() }),
        None => Ok(()),
    }
}

/// Returns the settings of a new model: those of the model that it replaces, if that has some. A model has no base, and an
/// adapter keeps its base unless the new settings name one.
fn extra_of(
    new: Map<String, Value>,
    replaced: Option<&ModelRecord>,
    details: &Details,
) -> Map<String, Value> {
    let base = new.get(BASE).cloned();
    let mut extra = match replaced {
        Some(old) if !old.extra.is_empty() => old.extra.clone(),
        _ => new,
    };
    if details.adapter.is_none() {
        extra.remove(BASE);
    } else if let Some(base) = base {
        extra.insert(BASE.to_owned(), base);
    }
    extra
}

/// A model that is about to be recorded.
struct New {
    name: ModelName,
    source: Source,
    format: Format,
    files: Vec<FileRecord>,
    defaults: Map<String, Value>,
    /// Settings, unless the model replaces one that has its own.
    extra: Map<String, Value>,
    replace: bool,
}

impl New {
    fn like(old: &ModelRecord) -> Self {
        Self {
            name: old.name.clone(),
            source: old.source.clone(),
            format: old.format,
            files: old.files.clone(),
            defaults: old.defaults.clone(),
            // Presets are those of a name, but an adapter is of no use without its base.
            extra: old
                .extra
                .get_key_value(BASE)
                .map(|(name, base)| (name.clone(), base.clone()))
                .into_iter()
                .collect(),
            replace: false,
        }
    }
}
