//! Models in the files and folders below a folder.

use std::{
    collections::{HashSet, VecDeque},
    fs, io,
    path::{Path, PathBuf},
};

use crate::{
    adapter::is_adapter,
    error::LibraryError,
    files::name_of,
    import::{self, Found, FoundFile, gguf_stem, is_gguf, is_projector, split},
};

/// Levels of folders below the first one that are read.
const DEPTH: usize = 4;

/// Maximum number of files and folders that are read, in case the folder is a whole disk.
const MOST: usize = 20_000;

/// A model below the folder.
pub(super) struct Model {
    /// Path from the folder, without the extension and the number of a part.
    pub(super) name: String,
    /// Its files.
    pub(super) found: Result<Found, LibraryError>,
}

/// Lists the models below a folder, by path. Hidden folders are left out. Folders that cannot be read are added to
/// `problems`.
///
/// # Errors
/// The folder itself cannot be read.
pub(super) fn scan(root: &Path, problems: &mut Vec<String>) -> Result<Vec<Model>, LibraryError> {
    let (mut models, mut seen, mut read) = (Vec::new(), HashSet::new(), 0);
    let mut folders = VecDeque::from([(root.to_owned(), 0)]);
    while let Some((folder, depth)) = folders.pop_front() {
        // Links may lead in circles.
        if folder.canonicalize().is_ok_and(|real| !seen.insert(real)) {
            continue;
        }
        let entries = match list(&folder) {
            Ok(entries) => entries,
            Err(error) if depth == 0 => {
                return Err(LibraryError::io("read the folder", &folder)(error));
            }
            Err(error) => {
                problems.push(format!("cannot read `{}`: {error}", folder.display()));
                continue;
            }
        };
        read += entries.len();
        if read > MOST {
            problems
                .push(format!("`{}` has more than {MOST} files; the others are not read", root.display()));
            break;
        }
        let inner = add(root, &folder, entries, &mut models);
        if depth < DEPTH {
            folders.extend(inner.into_iter().map(|inner| (inner, depth + 1)));
        }
    }
    models.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(models)
}

/// Returns the paths in a folder, in order, without hidden ones.
fn list(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>()?;
    let mut shown: Vec<_> = entries.into_iter().filter(|path| !name_of(path).starts_with('.')).collect();
    shown.sort();
    Ok(shown)
}

/// Adds the models directly in a folder, and returns its folders, unless it is a model itself.
fn add(root: &Path, folder: &Path, entries: Vec<PathBuf>, models: &mut Vec<Model>) -> Vec<PathBuf> {
    let (folders, files): (Vec<_>, Vec<_>) = entries.into_iter().partition(|path| path.is_dir());
    let names: Vec<String> = files.iter().map(|path| name_of(path)).collect();
    let names = || names.iter().map(String::as_str);
    let is_model = import::is_model(names());
    if is_model || is_adapter(names()) {
        models.push(Model { name: path_below(root, folder, None), found: import::find(folder) });
    }
    let ggufs: Vec<&PathBuf> = files.iter().filter(|path| looks_like_gguf(path)).collect();
    let projectors: Vec<_> = ggufs.iter().filter(|path| is_projector(&name_of(path))).collect();
    let mut splits = HashSet::new();
    for path in ggufs.iter().filter(|path| !is_projector(&name_of(path))) {
        let name = name_of(path);
        let stem = gguf_stem(&name).unwrap_or(&name);
        let (stem, first) = match split(stem) {
            // One model has many files. Each of them leads to all of them.
            Some((prefix, ..)) if !splits.insert(prefix.to_owned()) => continue,
            Some((prefix, _, count)) => {
                let extension = &name[stem.len()..];
                (prefix, folder.join(format!("{prefix}-{:05}-of-{count:05}{extension}", 1)))
            }
            None => (stem, (*path).clone()),
        };
        let mut found = import::find(&first);
        if let (Ok(found), [projector]) = (&mut found, &projectors[..]) {
            let path = (**projector).clone();
            found.files.push(FoundFile { name: name_of(&path), path, digest: None });
        }
        models.push(Model { name: path_below(root, folder, Some(stem)), found });
    }
    if is_model { Vec::new() } else { folders }
}

/// Returns true for a file that is, or claims to be, in GGUF: by its first bytes or its name.
fn looks_like_gguf(path: &Path) -> bool {
    let name = name_of(path);
    gguf_stem(&name).is_some() || is_gguf(path)
}

/// Returns the path of a folder, or of a file in it, from `root`, with slashes.
fn path_below(root: &Path, folder: &Path, file: Option<&str>) -> String {
    let below = folder.strip_prefix(root).unwrap_or(folder);
    let parts = below.iter().map(|part| part.to_string_lossy().into_owned());
    let name: Vec<_> = parts.chain(file.map(str::to_owned)).collect();
    // The folder itself may be a model.
    if name.is_empty() {
        let real = root.canonicalize().unwrap_or_else(|_| root.to_owned());
        return name_of(&real);
    }
    name.join("/")
}
