//! Vision towers of GGUF models, which are in files of their own: projectors (mmproj).

use std::{
    fs,
    path::{Path, PathBuf},
};

use paguro_model::{LoadOptions, ModelFile};

use crate::{
    failure::{Failure, Outcome},
    load,
    models::Source,
    words::words,
};

/// Choice of a model's projector.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Projector {
    /// The one beside the model's file, if there is one.
    #[default]
    Beside,
    /// None: the model reads text only.
    Ignored,
    /// This file.
    File(PathBuf),
}

impl Projector {
    /// Creates the choice of the flags.
    pub fn new(file: Option<PathBuf>, ignored: bool) -> Self {
        match file {
            Some(file) => Self::File(file),
            None if ignored => Self::Ignored,
            None => Self::Beside,
        }
    }

    /// Opens a model's file with its projector. One that was found beside it and does not fit is left out, with a note.
    ///
    /// # Errors
    /// The model's file, or the projector that was named, is invalid.
    pub fn open(&self, source: &Source, note: impl FnOnce(&str)) -> Outcome<ModelFile> {
        let file = load::file(source)?;
        let projector = match self {
            Self::Ignored => return Ok(file.text_only()),
            Self::File(path) => {
                return file.with_projector(path).map_err(|error| Failure::from_error(&error));
            }
            Self::Beside => source.path().and_then(beside),
        };
        let Some(projector) = projector else { return Ok(file) };
        let seeing = file.with_projector(&projector);
        let seeing = seeing.and_then(|file| {
            file.shape(&LoadOptions { max_context: Some(1024) })?;
            Ok(file)
        });
        match seeing {
            Ok(file) => Ok(file),
            Err(error) => {
                let name = projector.file_name().unwrap_or_default().to_string_lossy();
                note(&format!("the projector `{name}` beside the model is not used: {error}"));
                load::file(source)
            }
        }
    }
}

/// Finds the projector beside a GGUF file: the only one, or the one whose name has the most words of the model's.
fn beside(model: &Path) -> Option<PathBuf> {
    let name = model.file_name()?.to_str()?;
    let is_gguf = |name: &str| name.to_ascii_lowercase().ends_with(".gguf");
    let is_projector = |name: &str| is_gguf(name) && name.to_ascii_lowercase().contains("mmproj");
    if !is_gguf(name) || is_projector(name) {
        return None;
    }
    let entries =
        fs::read_dir(model.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new(".")));
    let names = entries.ok()?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let (projectors, others): (Vec<_>, Vec<_>) =
        names.filter(|name| is_gguf(name)).partition(|name| is_projector(name));
    let own = words(name);
    let has_others = others.iter().any(|other| words(other) != own);
    let shared = |other: &str| words(other).intersection(&own).count();
    let is_whole =
        |name: &str| ["bf16", "f16"].iter().any(|format| name.to_ascii_lowercase().contains(format));
    let found = projectors.into_iter().max_by_key(|name| (shared(name), is_whole(name), name.clone()))?;
    // In a folder of several models, a projector without a word of this one's name is another one's.
    (!has_others || shared(&found) > 0).then(|| model.with_file_name(found))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_projector_beside_a_model_is_found() {
        for (files, model, found) in [
            (&["m-Q4_K_M.gguf", "mmproj-F16.gguf"][..], "m-Q4_K_M.gguf", Some("mmproj-F16.gguf")),
            (
                &["m-Q4_K_M.gguf", "mmproj-F32.gguf", "mmproj-BF16.gguf"],
                "m-Q4_K_M.gguf",
                Some("mmproj-BF16.gguf"),
            ),
            (&["model-f16.gguf", "mmproj-f16.gguf"], "model-f16.gguf", Some("mmproj-f16.gguf")),
            (
                &[
                    "gemma-3-4b-it-Q4_0.gguf",
                    "qwen3-vl-2b-Q8_0.gguf",
                    "mmproj-gemma-3-4b-it-f16.gguf",
                    "mmproj-qwen3-vl-2b-f16.gguf",
                ],
                "qwen3-vl-2b-Q8_0.gguf",
                Some("mmproj-qwen3-vl-2b-f16.gguf"),
            ),
            (&["llama.gguf", "gemma.gguf", "mmproj-gemma.gguf"], "llama.gguf", None),
            (&["a-Q4_0.gguf", "a-Q8_0.gguf", "mmproj.gguf"], "a-Q8_0.gguf", Some("mmproj.gguf")),
            (&["mmproj.gguf"], "mmproj.gguf", None),
            (&["a.gguf"], "a.gguf", None),
        ] {
            let folder = tempfile::tempdir().unwrap();
            for file in files {
                fs::write(folder.path().join(file), "").unwrap();
            }
            let expected = found.map(|found| folder.path().join(found));
            assert_eq!(beside(&folder.path().join(model)), expected, "{files:?}");
        }
    }
}
