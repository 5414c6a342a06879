//! The adapters (LoRA) that requests can name.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};

use crate::{error::ApiError, source::AdapterPlace};

/// An adapter of the settings.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterSetting {
    /// Its name in requests.
    pub name: String,
    /// Name of the model that it changes.
    pub base: String,
    /// Its file or folder.
    pub path: PathBuf,
}

/// Adapters of the server at its start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AdapterSettings {
    /// The adapters.
    pub given: Vec<AdapterSetting>,
    /// Folders from which requests may load others.
    pub folders: Vec<PathBuf>,
}

/// An adapter in the table.
#[derive(Clone, Debug)]
pub struct NamedAdapter {
    /// Its name in requests.
    pub name: String,
    /// Name of its base.
    pub base: String,
    /// Its file or folder.
    pub path: PathBuf,
    /// Chat template that replaces its own.
    pub(super) template: Option<Arc<str>>,
    /// Version of the library's adapter; `None` for one of the settings or of a request.
    pub(super) stored: Option<String>,
    /// Scale with which it applies to requests that name its base only. (llama.cpp's `/lora-adapters`.)
    pub scale: f32,
    /// Bytes of its files.
    pub(super) bytes: u64,
    /// True if memory is planned for it when its base is loaded: it is one of the settings, or a request has named it.
    pub(super) is_planned: bool,
    pub(super) created: u64,
    /// Number of the load, which distinguishes it from earlier ones of its name.
    pub(super) generation: u64,
}

impl NamedAdapter {
    /// Returns true for an adapter of the library.
    pub(super) fn is_stored(&self) -> bool {
        self.stored.is_some()
    }

    pub(super) fn place(&self) -> AdapterPlace {
        let Self { name, base, path, template, .. } = self.clone();
        AdapterPlace { name, base, path, template, in_library: self.is_stored() }
    }
}

/// All adapters, in order of their ids.
#[derive(Debug, Default)]
pub(super) struct AdapterTable {
    folders: Vec<PathBuf>,
    adapters: Mutex<(Vec<NamedAdapter>, u64)>,
}

impl AdapterTable {
    pub(super) fn new(settings: AdapterSettings) -> Self {
        let AdapterSettings { given, folders } = settings;
        // Adapters of the command line may be loaded again.
        let folders = given.iter().map(|adapter| adapter.path.clone()).chain(folders);
        let folders = folders.filter_map(|folder| folder.canonicalize().ok()).collect();
        let table = Self { folders, adapters: Mutex::default() };
        for AdapterSetting { name, base, path } in given {
            table.put(AdapterPlace { name, base, path, template: None, in_library: false }, None);
        }
        table
    }

    pub(super) fn all(&self) -> MutexGuard<'_, (Vec<NamedAdapter>, u64)> {
        self.adapters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an adapter, or replaces the one with its name and base.
    pub(super) fn put(&self, place: AdapterPlace, stored: Option<String>) -> NamedAdapter {
        let mut all = self.all();
        let (adapters, generations) = &mut *all;
        *generations += 1;
        let generation = *generations;
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        let AdapterPlace { name, base, path, template, .. } = place;
        let mut new = NamedAdapter {
            is_planned: stored.is_none(),
            bytes: bytes_of(&path),
            name,
            base,
            path,
            template,
            stored,
            scale: 0.0,
            created,
            generation,
        };
        match adapters.iter_mut().find(|it| (&it.name, &it.base) == (&new.name, &new.base)) {
            Some(old) => {
                new.scale = if new.is_stored() { old.scale } else { 0.0 };
                *old = new.clone();
            }
            None => adapters.push(new.clone()),
        }
        new
    }

    /// Adds an adapter of the library, unless the table has this version of it.
    pub(super) fn put_stored(&self, place: &AdapterPlace, version: &str) -> NamedAdapter {
        let is_it = |it: &&NamedAdapter| {
            (&it.name, &it.base, it.stored.as_deref()) == (&place.name, &place.base, Some(version))
        };
        let known = self.all().0.iter().find(is_it).cloned();
        known.unwrap_or_else(|| self.put(place.clone(), Some(version.to_owned())))
    }

    /// Plans memory for an adapter.
    pub(super) fn plan(&self, generation: u64) {
        let mut all = self.all();
        let named = all.0.iter_mut().find(|it| it.generation == generation);
        named.into_iter().for_each(|it| it.is_planned = true);
    }

    /// Removes the adapters that `is_gone` selects, and returns the numbers of their loads.
    pub(super) fn remove(&self, is_gone: impl Fn(&NamedAdapter) -> bool) -> Vec<u64> {
        let mut all = self.all();
        let gone =
            all.0.iter().filter(|adapter| is_gone(adapter)).map(|adapter| adapter.generation).collect();
        all.0.retain(|adapter| !is_gone(adapter));
        gone
    }

    /// Returns the adapters with this name that are not those of the library.
    pub(super) fn given(&self, name: &str) -> Vec<NamedAdapter> {
        let is_given = |it: &&NamedAdapter| it.name == name && !it.is_stored();
        self.all().0.iter().filter(is_given).cloned().collect()
    }

    /// Resolves the path of a request: it must be in one of the folders.
    pub(super) fn allowed(&self, path: &str) -> Result<PathBuf, ApiError> {
        let refuse = || {
            let message = format!(
                "`{path}` is neither in the library nor an adapter that was given to `paguro serve --lora`"
            );
            ApiError::Forbidden(message)
        };
        let path = Path::new(path).canonicalize().map_err(|_| refuse())?;
        match self.folders.iter().any(|folder| path.starts_with(folder)) {
            true => Ok(path),
            false => Err(refuse()),
        }
    }
}

/// Returns the bytes of a file, or of the files in a folder.
fn bytes_of(path: &Path) -> u64 {
    let size = |path: &Path| path.metadata().ok().filter(|file| file.is_file()).map_or(0, |file| file.len());
    match path.read_dir() {
        Ok(entries) => entries.flatten().map(|entry| size(&entry.path())).sum(),
        Err(_) => size(path),
    }
}
