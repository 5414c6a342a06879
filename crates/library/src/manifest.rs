//! Records beside the models: a small file for each, from which a lost catalogue can be restored.
//!
//! The catalogue and the records change together. A new record is written as `KEY.new` before the catalogue contains
//! the model, and becomes `KEY.json` afterwards; before a model is removed, its record becomes `KEY.gone`. So a
//! `KEY.json` that is missing in the catalogue shows that the record was written for another catalogue.

use std::{
    collections::HashSet,
    fs,
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{
    adapter::AdapterDetails,
    digest::Digest,
    error::LibraryError,
    files::{entries, remove_file, sync_folder, write_durably},
    lock::Lock,
    name::ModelName,
    record::{Details, FileRecord, Format, ModelRecord, Source},
};

/// The form of the files. A file of a newer form is not understood, and is never deleted unasked.
const VERSION: u32 = 1;

/// The folder with the records.
#[derive(Debug)]
pub(crate) struct Manifests {
    folder: PathBuf,
}

/// Content of a record's file.
#[derive(Debug, Serialize, Deserialize)]
struct Manifest {
    version: u32,
    name: String,
    source: Source,
    format: Format,
    architecture: Option<String>,
    parameter_count: u64,
    quantization: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    adapter: Option<AdapterDetails>,
    /// Defaults of requests.
    #[serde(rename = "parameters")]
    defaults: Map<String, Value>,
    files: Vec<ManifestFile>,
    /// Milliseconds since 1970.
    created_at: u64,
    modified_at: u64,
    #[serde(default)]
    extra: Map<String, Value>,
}

#[derive(Debug, Serialize, Deserialize)]
struct ManifestFile {
    name: String,
    size: u64,
    digest: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    location: Option<PathBuf>,
}

/// Keeps others from changing the catalogue and the records.
#[derive(Debug)]
pub(crate) struct Changing {
    _lock: Lock,
}

impl Manifests {
    pub(crate) fn new(root: &Path) -> Self {
        Self { folder: root.join("manifests") }
    }

    pub(crate) fn make_folder(&self) -> Result<(), LibraryError> {
        fs::create_dir_all(&self.folder).map_err(LibraryError::io("make the folder", &self.folder))
    }

    /// Waits for the lock of changes to the catalogue and the records.
    pub(crate) fn change(&self) -> Result<Changing, LibraryError> {
        Ok(Changing { _lock: Lock::exclusive(&self.folder.join("lock"))? })
    }

    fn path(&self, name: &ModelName, extension: &str) -> PathBuf {
        self.folder.join(key(name)).with_extension(extension)
    }

    /// Returns true if the model has a record.
    pub(crate) fn has(&self, name: &ModelName) -> bool {
        self.path(name, "json").is_file()
    }

    /// Changes the catalogue with `commit` such that it will name `model`, and its record with it.
    pub(crate) fn put(
        &self,
        _changing: &Changing,
        model: &ModelRecord,
        commit: impl FnOnce() -> Result<(), LibraryError>,
    ) -> Result<(), LibraryError> {
        let (new, path) = (self.path(&model.name, "new"), self.path(&model.name, "json"));
        write_durably(&new, &to_json(model)?)?;
        if let Err(error) = commit() {
            // A record that stays is deleted by `reconcile`.
            let _ = remove_file(&new);
            return Err(error);
        }
        fs::rename(&new, &path).map_err(LibraryError::io("write", &path))?;
        sync_folder(&self.folder)
    }

    /// Changes the catalogue with `commit` such that it will not name `name`; removes the record if it did.
    pub(crate) fn delete(
        &self,
        _changing: &Changing,
        name: &ModelName,
        commit: impl FnOnce() -> Result<bool, LibraryError>,
    ) -> Result<bool, LibraryError> {
        let (path, gone) = (self.path(name, "json"), self.path(name, "gone"));
        let had_one = fs::rename(&path, &gone).is_ok();
        let deleted = commit();
        if matches!(deleted, Ok(true)) {
            remove_file(&gone)?;
        } else if had_one {
            fs::rename(&gone, &path).map_err(LibraryError::io("write", &path))?;
        }
        deleted
    }

    /// Completes changes of killed processes as the catalogue states.
    pub(crate) fn reconcile(&self, _changing: &Changing, known: &[ModelName]) -> Result<(), LibraryError> {
        let known: HashSet<String> = known.iter().map(key).collect();
        for path in entries(&self.folder)? {
            let stem = path.file_stem().unwrap_or_default().to_string_lossy();
            match path.extension().and_then(|extension| extension.to_str()) {
                Some("new" | "gone") if known.contains(&*stem) => {
                    let settled = path.with_extension("json");
                    fs::rename(&path, &settled).map_err(LibraryError::io("write", &settled))?;
                }
                Some("new" | "gone") => drop(remove_file(&path)?),
                _ => {}
            }
        }
        Ok(())
    }

    /// Reads the records of models that are not in `known`, sorted by name; unreadable ones come last. `uncommitted`
    /// adds those of models that the catalogue may not contain yet.
    pub(crate) fn unknown(
        &self,
        known: &[ModelName],
        uncommitted: bool,
    ) -> Result<Vec<Result<ModelRecord, LibraryError>>, LibraryError> {
        let known: HashSet<String> = known.iter().map(key).collect();
        let mut models = Vec::new();
        for path in entries(&self.folder)? {
            let stem = path.file_stem().unwrap_or_default().to_string_lossy();
            let wanted = match path.extension().and_then(|extension| extension.to_str()) {
                Some("json") => true,
                Some("new") => uncommitted && !path.with_extension("json").is_file(),
                _ => false,
            };
            if wanted && !known.contains(&*stem) {
                models.push(read(&path));
            }
        }
        models.sort_by_key(|model| match model {
            Ok(model) => (false, model.name.to_string()),
            Err(error) => (true, error.to_string()),
        });
        Ok(models)
    }

    /// Counts the records.
    pub(crate) fn count(&self) -> usize {
        let is_record = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "json");
        entries(&self.folder).map_or(0, |paths| paths.iter().filter(|path| is_record(path)).count())
    }

    /// Removes a record of a model that is not in the catalogue.
    pub(crate) fn discard(
        &self,
        _changing: &Changing,
        model: Result<ModelRecord, LibraryError>,
    ) -> Result<(), LibraryError> {
        match model {
            Ok(model) => remove_file(&self.path(&model.name, "json")).map(drop),
            Err(LibraryError::BadManifest { path, .. }) => remove_file(&path).map(drop),
            Err(error) => Err(error),
        }
    }
}

/// Names of models differ in more than upper and lower case, and are longer than file names may be.
fn key(name: &ModelName) -> String {
    Digest::of(name.to_string().to_lowercase().as_bytes()).hex()
}

fn to_json(model: &ModelRecord) -> Result<Vec<u8>, LibraryError> {
    let millis = |time: SystemTime| {
        time.duration_since(UNIX_EPOCH).map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(0))
    };
    let file = |file: &FileRecord| ManifestFile {
        name: file.name.clone(),
        size: file.size,
        digest: file.digest.to_string(),
        location: file.location.clone(),
    };
    let manifest = Manifest {
        version: VERSION,
        name: model.name.to_string(),
        source: model.source.clone(),
        format: model.format,
        architecture: model.details.architecture.clone(),
        parameter_count: model.details.parameters,
        quantization: model.details.quantization.clone(),
        adapter: model.details.adapter.clone(),
        defaults: model.defaults.clone(),
        files: model.files.iter().map(file).collect(),
        created_at: millis(model.created_at),
        modified_at: millis(model.modified_at),
        extra: model.extra.clone(),
    };
    // The only value that JSON cannot have is a path that is not Unicode.
    serde_json::to_vec_pretty(&manifest).map_err(|error| LibraryError::NotAModel {
        path: model.name.to_string().into(),
        problem: format!("it cannot be recorded: {error}"),
    })
}

fn read(path: &Path) -> Result<ModelRecord, LibraryError> {
    let bytes = fs::read(path).map_err(LibraryError::io("read", path))?;
    let bad = |problem: String| LibraryError::BadManifest { path: path.to_owned(), problem };
    let manifest: Manifest = serde_json::from_slice(&bytes).map_err(|error| bad(error.to_string()))?;
    if manifest.version > VERSION {
        return Err(bad(format!("it is of version {}, this program knows {VERSION}", manifest.version)));
    }
    let time = |millis| UNIX_EPOCH + Duration::from_millis(millis);
    let file = |file: ManifestFile| {
        Ok(FileRecord {
            name: file.name,
            size: file.size,
            digest: file.digest.parse()?,
            location: file.location,
        })
    };
    let files: Result<Vec<_>, LibraryError> = manifest.files.into_iter().map(file).collect();
    let files = files.map_err(|error| bad(error.to_string()))?;
    if files.is_empty() || files.iter().any(|file| !crate::import::is_file_name(&file.name)) {
        return Err(bad("it has no files, or one with a name that no file can have".to_owned()));
    }
    Ok(ModelRecord {
        name: manifest.name.parse().map_err(|error: LibraryError| bad(error.to_string()))?,
        source: manifest.source,
        format: manifest.format,
        details: Details {
            architecture: manifest.architecture,
            parameters: manifest.parameter_count,
            quantization: manifest.quantization,
            adapter: manifest.adapter,
            problem: None,
            inspected_by: String::new(),
        },
        defaults: manifest.defaults,
        files,
        created_at: time(manifest.created_at.min(1 << 46)),
        modified_at: time(manifest.modified_at.min(1 << 46)),
        extra: manifest.extra,
        stamp: String::new(),
    })
}
