//! Assistants: small models that draft for a certain model (Gemma 4), in files of their own. The one beside a model's file or folder is
//! used, or else one of the library.

use std::{
    fs,
    path::{Path, PathBuf},
};

use paguro_library::{Library, ModelRecord};
use paguro_model::ModelFile;

use crate::{
    failure::{Failure, Outcome},
    load,
    models::Source,
    settings::LibrarySettings,
    words::words,
};

/// Adds its assistant to a model's file: the one that `draft` names, if it is one, or else the first that fits of those beside the
/// file and those of `library`. One that was found and does not fit is left out, with a note if it is beside the file.
///
/// # Errors
/// The file that `draft` names is invalid, or an assistant of another model.
pub fn add(
    file: &mut ModelFile,
    source: &Source,
    draft: Option<&Source>,
    library: impl FnOnce() -> Vec<PathBuf>,
    note: impl Fn(&str),
) -> Outcome<()> {
    if let Some(draft) = draft {
        return match draft.path() {
            Some(path) if load::file(draft)?.is_assistant() => {
                file.set_assistant(path).map_err(|error| Failure::from_error(&error))
            }
            _ => Ok(()),
        };
    }
    if !file.may_have_assistant() {
        return Ok(());
    }
    for path in source.path().map(beside).unwrap_or_default() {
        match file.set_assistant(&path) {
            Ok(()) => return Ok(()),
            Err(error) => {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                note(&format!("the assistant `{name}` beside the model is not used: {error}"));
            }
        }
    }
    // Those of other models are no mistake.
    let _ = library().iter().any(|path| file.set_assistant(path).is_ok());
    Ok(())
}

/// Returns true for a record of an assistant.
pub fn is_record(record: &ModelRecord) -> bool {
    record.details.architecture.as_deref().is_some_and(paguro_model::is_assistant)
}

/// Returns the paths of all assistants of the library that settings name; none if it cannot be read.
pub fn of_settings(settings: &LibrarySettings) -> Vec<PathBuf> {
    settings.open_existing().ok().flatten().map(|library| of_library(&library)).unwrap_or_default()
}

/// Returns the paths of all assistants of a library; none if it cannot be read.
pub fn of_library(library: &Library) -> Vec<PathBuf> {
    let records = library.list().unwrap_or_default();
    records.iter().filter(|record| is_record(record)).filter_map(|record| library.path(record).ok()).collect()
}

/// Finds assistants beside a model: GGUF files in its folder whose names say so, those first that have the most words of its
/// name; or folders beside and in a folder.
fn beside(model: &Path) -> Vec<PathBuf> {
    let name_of = |path: &Path| path.file_name().and_then(|name| name.to_str()).map(str::to_owned);
    let Some(name) = name_of(model) else { return Vec::new() };
    let folder = model.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."));
    let entries = |folder: &Path| -> Vec<PathBuf> {
        fs::read_dir(folder).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path())).collect()
    };
    let is_folder = model.is_dir();
    let is_like = |path: &PathBuf| {
        let own = name_of(path).unwrap_or_default();
        match is_folder {
            true => is_named(&own) && path.join("config.json").is_file(),
            false => is_named(&own) && own != name && own.to_ascii_lowercase().ends_with(".gguf"),
        }
    };
    let own = words(&name);
    let shared = |path: &PathBuf| words(&name_of(path).unwrap_or_default()).intersection(&own).count();
    let mut found: Vec<PathBuf> = entries(folder).into_iter().filter(is_like).collect();
    if is_folder {
        found.retain(|path| shared(path) == own.len());
        found.extend(entries(model).into_iter().filter(is_like));
    }
    found.sort_by_key(|path| (std::cmp::Reverse(shared(path)), path.clone()));
    found
}

/// Returns true for the name of an assistant: `mtp-gemma-4-E2B-it.gguf` as llama.cpp has them, or with the word itself.
fn is_named(name: &str) -> bool {
    let lower = name.to_ascii_lowercase();
    lower.starts_with("mtp-") || lower.contains("assistant")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn assistants_beside_a_model_are_found() {
        for (files, model, expected) in [
            (&["gemma-4-E2B-it-Q4_K_M.gguf", "mtp-gemma-4-E2B-it.gguf"][..], 0, &[1][..]),
            (&["mtp-gemma-4-E4B-it.gguf", "gemma-4-E2B-it.gguf", "mtp-gemma-4-E2B-it-Q8_0.gguf"], 1, &[2, 0]),
            (&["gemma-4-12b.gguf", "gemma-4-12b-assistant.gguf", "gemma-4-12b.txt", "other.gguf"], 0, &[1]),
            (&["mtp-gemma-4-E2B-it.gguf"], 0, &[]),
            (&["gemma-4-E2B-it.gguf", "mtp.gguf"], 0, &[]),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let path = |index: usize| folder.path().join(files[index]);
            (0..files.len()).for_each(|index| fs::write(path(index), "").unwrap());
            let expected: Vec<_> = expected.iter().map(|&index| path(index)).collect();
            assert_eq!(beside(&path(model)), expected, "{files:?}");
        }
    }

    #[test]
    fn folders_of_assistants_are_found() {
        let folder = tempfile::tempdir().unwrap();
        let names = [
            "gemma-4-E2B-it",
            "gemma-4-E2B-it-assistant",
            "gemma-4-E4B-it-assistant",
            "gemma-4-E2B-it/assistant",
        ];
        let paths = names.map(|name| folder.path().join(name));
        for path in &paths {
            fs::create_dir_all(path).unwrap();
            fs::write(path.join("config.json"), "{}").unwrap();
        }
        assert_eq!(beside(&paths[0]), [paths[1].clone(), paths[3].clone()]);
    }
}
