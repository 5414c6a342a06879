//! Which model each space is of: a small file beside the segments, for people and for deletion by name. No answer depends on it.

use std::{
    fs,
    io::Read,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{Id, files};

/// Largest file that is read.
const MOST_BYTES: u64 = 64 << 10;

/// The model of a space.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ModelInfo {
    /// Name of the model.
    pub model: String,
    /// Format of its pages.
    pub format: String,
    /// Tokens in a block.
    pub block_size: usize,
}

fn path(dir: &Path, space: &Id) -> PathBuf {
    dir.join(format!("model-{}.json", blake3::Hash::from_bytes(*space).to_hex()))
}

/// Writes the model of a space.
pub(crate) fn write(dir: &Path, space: &Id, info: &ModelInfo) -> std::io::Result<()> {
    let bytes = serde_json::to_vec(info).map_err(std::io::Error::other)?;
    files::replace(&path(dir, space), &bytes)
}

/// Reads the model of a space. `None` if its file is missing or damaged.
pub(crate) fn read(dir: &Path, space: &Id) -> Option<ModelInfo> {
    let mut bytes = Vec::new();
    files::regular(&path(dir, space)).ok()?.take(MOST_BYTES).read_to_end(&mut bytes).ok()?;
    serde_json::from_slice(&bytes).ok()
}

/// Removes the file of a space.
pub(crate) fn remove(dir: &Path, space: &Id) {
    let _ = fs::remove_file(path(dir, space));
}

/// Returns all spaces that have a file.
pub(crate) fn spaces(dir: &Path) -> Vec<Id> {
    let names = fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let space = |name: std::ffi::OsString| {
        let hex = name.to_str()?.strip_prefix("model-")?.strip_suffix(".json")?;
        blake3::Hash::from_hex(hex).ok().map(|hash| *hash.as_bytes())
    };
    names.filter_map(space).collect()
}

/// File of a name that is to be removed by the owner of the store.
fn removal(dir: &Path, model: &str) -> PathBuf {
    dir.join(format!("remove-{}", blake3::hash(model.as_bytes()).to_hex()))
}

/// Leaves a note to the owner of a store: the items of all models with this name are to be removed.
pub(crate) fn request_removal(dir: &Path, model: &str) -> std::io::Result<()> {
    files::replace(&removal(dir, model), model.as_bytes())
}

/// Returns the names that are to be removed. Their notes are deleted when that is done.
pub(crate) fn removals(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let notes = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("remove-"));
    let name = |entry: fs::DirEntry| {
        let mut name = String::new();
        files::regular(&entry.path()).ok()?.take(MOST_BYTES).read_to_string(&mut name).ok()?;
        (removal(dir, &name) == entry.path()).then_some(name)
    };
    notes.filter_map(name).collect()
}

/// Deletes the note to remove a name.
pub(crate) fn forget_removal(dir: &Path, model: &str) {
    let _ = fs::remove_file(removal(dir, model));
}
