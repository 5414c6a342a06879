//! Restoration of the catalogue from records beside the models.

use std::{
    fs,
    path::{Path, PathBuf},
    time::SystemTime,
};

use crate::{
    cancel::Cancel,
    catalogue::{self, Catalogue, Contents},
    error::LibraryError,
    files::{entries, hash_file, name_of, remove_file, shared_builder, sync_folder},
    import::{self, Found},
    library::{Library, stamp},
    lock::Lock,
    manifest::Manifests,
    name::{LATEST, ModelName},
    open,
    record::{FileRecord, Format, Inspect, ModelRecord, OnProgress, Source},
    store::view_name,
    verify::read_all,
};

/// Result of a rebuild.
#[derive(Debug, Default)]
pub struct Rebuilt {
    /// Models that the catalogue names again.
    pub models: Vec<Restored>,
    /// Models that it has named before.
    pub known: usize,
    /// The catalogue that was in the way, under its new name.
    pub set_aside: Option<PathBuf>,
    /// Records that could not be read.
    pub unreadable: Vec<String>,
    /// Number of files without a model.
    pub unused: usize,
}

/// A model that the catalogue names again.
#[derive(Debug)]
pub struct Restored {
    /// Its record.
    pub model: ModelRecord,
    /// The fault of its files.
    pub problems: Vec<String>,
}

impl Library {
    /// Restores the catalogue of the library in this folder from the records beside the models, or from the folders of
    /// links where records are missing. A damaged catalogue is renamed; missing models are added to an intact one. All
    /// files of restored models are read.
    ///
    /// # Errors
    /// A catalogue of a newer version, an error of the system, or [`LibraryError::Cancelled`].
    pub fn rebuild(
        root: &Path,
        inspect: &Inspect<'_>,
        cancel: &Cancel,
        progress: &OnProgress<'_>,
    ) -> Result<Rebuilt, LibraryError> {
        let root = root.canonicalize().map_err(LibraryError::io("open", root))?;
        let path = root.join(catalogue::FILE);
        let opening = || Lock::exclusive(&root.join("open.lock"));
        // Others may look at the library meanwhile, and neither change the catalogue nor delete files.
        let manifests = Manifests::new(&root);
        manifests.make_folder()?;
        let changing = manifests.change()?;
        let _writing = Lock::shared(&root.join("library.lock"))?;
        let first = opening()?;
        let whole = match Catalogue::contents(&path) {
            Ok(contents) => contents == Contents::Catalogue && is_whole(&path)?,
            Err(LibraryError::CatalogueDamaged { .. }) => false,
            Err(error) => return Err(error),
        };
        let mut rebuilt = Rebuilt::default();
        // The catalogue is restored into a new file, which replaces the old one when it is complete.
        let beside = path.with_extension("db-new");
        for extension in ["db-new", "db-new-wal", "db-new-shm"] {
            remove_file(&path.with_extension(extension))?;
        }
        let library = Self::parts(&root, if whole { &path } else { &beside }, |_| Ok(()))?;
        library.writable()?;
        drop(first);
        let known = library.catalogue.names()?;
        rebuilt.known = known.len();
        let mut models = Vec::new();
        for model in library.manifests.unknown(&known, true)? {
            match model {
                Ok(model) => models.push(model),
                Err(error) => rebuilt.unreadable.push(error.to_string()),
            }
        }
        library.add_from_views(&mut models, &mut rebuilt.unreadable, inspect, cancel)?;
        let items = library.items(&models);
        let problems = read_all(&items, cancel, progress)?;
        let mut found: Vec<(&FileRecord, String)> = Vec::new();
        for (item, problem) in items.iter().zip(&problems) {
            let problem = problem.as_ref().map(ToString::to_string);
            if item.record.location.is_none() {
                library.store.set_damage(&item.record.digest, problem.as_deref())?;
            }
            found.extend(problem.map(|problem| (&item.record, problem)));
        }
        for mut model in models {
            let of_model = found.iter().filter(|(file, _)| {
                model.files.iter().any(|own| (own.digest, &own.location) == (file.digest, &file.location))
            });
            let problems: Vec<_> =
                of_model.map(|(file, problem)| format!("{}: {problem}", file.name)).collect();
            if problems.is_empty()
                && let Ok(path) = library.place(&model.name.to_string(), model.format, &model.files)
                && let Ok(details) = inspect(&path)
            {
                model.stamp = stamp(&details.inspected_by, &model.files);
                model.details = details;
            }
            library.catalogue.put(&model, false)?;
            rebuilt.models.push(Restored { model, problems });
        }
        rebuilt.unused = library.unused()?;
        // Closed, so that all of it is in one file.
        drop(library);
        let last = opening()?;
        if !whole {
            rebuilt.set_aside = open::set_aside(&root)?;
            fs::rename(&beside, &path).map_err(LibraryError::io("rename", &beside))?;
            sync_folder(&root)?;
        }
        let library = Self::parts(&root, &path, |_| Ok(()))?;
        drop((last, changing));
        library.complete_manifests()?;
        Ok(rebuilt)
    }

    /// Counts the blobs that the catalogue does not name.
    fn unused(&self) -> Result<usize, LibraryError> {
        let named: Vec<String> = (self.list()?.iter().flat_map(|model| &model.files))
            .map(|file| file.digest.file_name())
            .collect();
        let blobs = entries(&self.store.blobs())?;
        Ok(blobs.iter().filter(|blob| !named.contains(&name_of(blob))).count())
    }

    /// Adds models of folders of links without a record. Such a folder is named by its content, which shows whether it
    /// is complete; the model's name is derived from its file.
    fn add_from_views(
        &self,
        models: &mut Vec<ModelRecord>,
        unreadable: &mut Vec<String>,
        inspect: &Inspect<'_>,
        cancel: &Cancel,
    ) -> Result<(), LibraryError> {
        let names = self.catalogue.names()?;
        let mut known: Vec<String> = models.iter().map(|model| view_name(&model.files)).collect();
        known.extend(self.list()?.iter().map(|model| view_name(&model.files)));
        for view in entries(&self.store.views())? {
            let name = name_of(&view);
            if !view.is_dir() || known.contains(&name) {
                continue;
            }
            let mut links = entries(&view)?;
            // The model comes before its companions.
            links.sort_by_key(|link| (import::is_companion(&name_of(link)), link.clone()));
            let mut files = Vec::new();
            for link in links {
                let (digest, size) = hash_file(&link, cancel, |_| {})?;
                files.push(FileRecord { name: name_of(&link), size, digest, location: None });
            }
            let file_names: Vec<&str> = files.iter().map(|file| file.name.as_str()).collect();
            let Ok(format) = import::format_of(&view, &file_names) else { continue };
            if view_name(&files) != name {
                let problem = "there is no record of its model, and its files have changed";
                unreadable.push(format!("`{}`: {problem}", view.display()));
                continue;
            }
            let open = if format == Format::Gguf { view.join(&files[0].name) } else { view.clone() };
            let Ok(details) = inspect(&open) else { continue };
            for file in &files {
                if !self.store.has(&file.digest) {
                    self.publish_link(&view.join(&file.name), file, cancel)?;
                }
            }
            let found = Found { open, format, files: Vec::new() };
            let base = match format {
                Format::Gguf => import::name(&found, &details)?,
                // The folder has no other name than its digest.
                Format::Safetensors => ModelName::new(&format!("restored-{}", &name[..8]), LATEST)?,
            };
            let taken = |name: &ModelName| {
                names.iter().chain(models.iter().map(|model| &model.name)).any(|other| other.is_same(name))
            };
            let mut name = base.clone();
            for number in 2.. {
                if !taken(&name) {
                    break;
                }
                name = ModelName::new(&format!("{}-{number}", base.base()), base.tag())?;
            }
            let now = SystemTime::now();
            models.push(ModelRecord {
                name,
                source: Source::Import { path: view },
                format,
                details,
                defaults: serde_json::Map::new(),
                files,
                created_at: now,
                modified_at: now,
                extra: serde_json::Map::new(),
                stamp: String::new(),
            });
        }
        Ok(())
    }

    /// Makes a blob of a link whose blob is gone.
    fn publish_link(&self, link: &Path, file: &FileRecord, cancel: &Cancel) -> Result<(), LibraryError> {
        let folder = self.store.temporary();
        let beside = shared_builder(0o777)
            .tempdir_in(&folder)
            .map_err(LibraryError::io("make a folder in", &folder))?;
        let new = beside.path().join("link");
        fs::hard_link(link, &new).map_err(LibraryError::io("make a hard link", &new))?;
        self.store.publish(&new, &file.digest, cancel)
    }
}

/// Returns true if a catalogue can be read to its end.
fn is_whole(path: &Path) -> Result<bool, LibraryError> {
    match Catalogue::open_read_only(path).and_then(|catalogue| {
        catalogue.check()?;
        catalogue.all()
    }) {
        Ok(_) => Ok(true),
        Err(LibraryError::CatalogueDamaged { .. } | LibraryError::Catalogue(_)) => Ok(false),
        Err(error) => Err(error),
    }
}
