//! LM Studio's models: `PUBLISHER/REPOSITORY/FILE.gguf`, or a folder of safetensors.

use std::path::Path;

use super::{Listing, Naming, Program, folder};
use crate::{error::LibraryError, name::ModelName};

/// Adds the models of a folder.
///
/// # Errors
/// The folder cannot be read.
pub(super) fn add(root: &Path, listing: &mut Listing) -> Result<(), LibraryError> {
    for folder::Model { name, found } in folder::scan(root, &mut listing.problems)? {
        let naming = match name.split('/').collect::<Vec<_>>()[..] {
            [publisher, repository] | [publisher, repository, _] => {
                let [publisher, repository] = [publisher, repository].map(ModelName::part_from);
                Naming::Repository(format!("{publisher}/{repository}"))
            }
            _ => Naming::File,
        };
        listing.add(Program::LmStudio, name, naming, found);
    }
    Ok(())
}
