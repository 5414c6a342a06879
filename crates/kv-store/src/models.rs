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
