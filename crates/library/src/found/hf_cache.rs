//! Models of the Hugging Face cache: `models--OWNER--REPOSITORY/snapshots/REVISION/`, a folder of links to blobs.

use std::{
    fs,
    path::{Path, PathBuf},
    time::SystemTime,
};

use super::{Listing, Naming, Program, folder};
use crate::{
    error::LibraryError,
    files::{entries, name_of},
    name::ModelName,
};

/// Beginning of the folders of models. There are also data sets and spaces.
const PREFIX: &str = "models--";

/// Returns true for a folder with repositories of a cache.
///
/// # Errors
/// The folder cannot be read.
pub(super) fn is_cache(root: &Path) -> Result<bool, LibraryError> {
    Ok(entries(root)?.iter().any(|path| name_of(path).starts_with(PREFIX) && path.join("snapshots").is_dir()))
}

/// Adds the models of a cache. Repositories without models, such as those of tokenizers alone, are left out.
///
/// # Errors
/// The folder cannot be read.
pub(super) fn add(root: &Path, listing: &mut Listing) -> Result<(), LibraryError> {
    let mut repositories = entries(root)?;
    repositories.sort();
    for repository in repositories {
        let folder = name_of(&repository);
        let Some(name) = folder.strip_prefix(PREFIX) else { continue };
        let parts: Vec<_> = name.splitn(2, "--").map(str::to_owned).collect();
        let repo = parts.join("/");
        let Some(snapshot) = snapshot(&repository) else { continue };
        let models = match folder::scan(&snapshot, &mut listing.problems) {
            Ok(models) => models,
            Err(error) => {
                listing.problems.push(error.to_string());
                continue;
            }
        };
        let base: Vec<_> = parts.iter().map(|part| ModelName::part_from(part)).collect();
        let is_one = models.len() == 1;
        for model in models {
            // The folder's own name is that of a commit.
            let is_folder = snapshot.join(&model.name).is_dir() || model.name == name_of(&snapshot);
            let name = if is_one || is_folder && !model.name.contains('/') {
                repo.clone()
            } else {
                format!("{repo}/{}", model.name)
            };
            listing.add(Program::HfCache, name, Naming::Repository(base.join("/")), model.found);
        }
    }
    Ok(())
}

/// Returns the folder of the revision `main`, or else of the newest one.
fn snapshot(repository: &Path) -> Option<PathBuf> {
    let snapshots = repository.join("snapshots");
    let main = fs::read_to_string(repository.join("refs/main")).ok();
    let main = main.map(|commit| commit.trim().to_owned());
    let is_commit = |commit: &String| !commit.is_empty() && commit.bytes().all(|b| b.is_ascii_alphanumeric());
    let of_main = main.filter(is_commit).map(|commit| snapshots.join(commit)).filter(|path| path.is_dir());
    of_main.or_else(|| {
        let time = |path: &PathBuf| {
            fs::metadata(path).and_then(|file| file.modified()).unwrap_or(SystemTime::UNIX_EPOCH)
        };
        entries(&snapshots).ok()?.into_iter().filter(|path| path.is_dir()).max_by_key(time)
    })
}
