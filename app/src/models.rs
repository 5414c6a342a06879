//! Which model is meant: the one in the binary, a file, a folder, or one of the library; and what to say when there is none.

use std::{
    fs,
    path::{Path, PathBuf},
};

use paguro_registry::{RegistryError, hub::Reference};

use crate::{
    failure::{Failure, Outcome},
    library,
    settings::LibrarySettings,
};

/// The name of the model in the binary.
pub const EMBEDDED: &str = "tales";

/// The file of [`EMBEDDED`]. Its tensors count on the alignment that a mapped file would have.
pub static EMBEDDED_FILE: &[u8] = &ALIGNED.bytes;

/// GGUF aligns tensors to 32 bytes from the file's start; 64 is a cache line and an AVX-512 load.
#[repr(C, align(64))]
struct Aligned<Bytes: ?Sized> {
    bytes: Bytes,
}

static ALIGNED: &Aligned<[u8]> = &Aligned { bytes: *include_bytes!("../../models/tales/tales-Q8_0.gguf") };

/// A model that can be opened, as far as its name tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// The one in the binary.
    Embedded,
    /// A GGUF file or a Hugging Face folder that exists.
    Path(PathBuf),
    /// One of the library.
    Library {
        /// Its name there.
        name: String,
        /// Where it lies.
        path: PathBuf,
        /// What is recorded with it for requests to a server: `system`, `options` ...
        parameters: Vec<String>,
    },
}

impl Source {
    /// What `-m NAME` means; nothing given is the model in the binary. A file or a folder goes before a model of the
    /// library.
    ///
    /// # Errors
    /// A usage error that suggests what might have been meant.
    pub fn find(name: Option<&str>, library: &LibrarySettings) -> Outcome<Self> {
        let Some(name) = name else { return Ok(Self::Embedded) };
        if name == EMBEDDED {
            return Ok(Self::Embedded);
        }
        let path = Path::new(name);
        if path.exists() {
            return existing(path);
        }
        match in_library(name, library)? {
            Found::Yes(source) => Ok(source),
            Found::No { similar } => Err(missing(name, similar)),
        }
    }

    /// What the first word of `run` is: a model, or `None` when it begins the prompt.
    ///
    /// # Errors
    /// A usage error for a word that looks like a path and leads nowhere: nobody wants a tale about it.
    pub fn from_first_word(word: &str, library: &LibrarySettings) -> Outcome<Option<Self>> {
        let as_prompt = |failure: Failure| {
            failure.or_hint(format!("to use it as the prompt, write: paguro run {EMBEDDED} {word:?}"))
        };
        if word == EMBEDDED || Path::new(word).exists() || looks_like_path(word) {
            return Self::find(Some(word), library).map(Some).map_err(as_prompt);
        }
        match in_library(word, library).map_err(as_prompt)? {
            Found::Yes(source) => Ok(Some(source)),
            Found::No { .. } => Ok(None),
        }
    }

    /// The model's name in messages.
    pub fn name(&self) -> String {
        match self {
            Self::Embedded => EMBEDDED.into(),
            Self::Path(path) => path.display().to_string(),
            Self::Library { name, .. } => name.clone(),
        }
    }
}

/// Whether the library has a model.
enum Found {
    Yes(Source),
    No {
        /// What it has instead.
        similar: Vec<String>,
    },
}

/// Looks a name up in the library, if there is one.
fn in_library(name: &str, library: &LibrarySettings) -> Outcome<Found> {
    let Some(registry) = library.open_existing()? else { return Ok(Found::No { similar: Vec::new() }) };
    match registry.find(name) {
        Ok(record) => {
            let path = registry.path(&record).map_err(library::failure)?;
            let parameters = record.parameters.keys().cloned().collect();
            Ok(Found::Yes(Source::Library { name: record.name.short(), path, parameters }))
        }
        Err(RegistryError::NotFound { similar, .. }) => Ok(Found::No { similar }),
        Err(error) => Err(library::failure(error)),
    }
}

/// A word no sentence begins with: a model file's name, or a path. Text with spaces is never one, so that
/// "Compare and/or with either/or" remains a prompt.
fn looks_like_path(word: &str) -> bool {
    let path = Path::new(word);
    let model_file = path
        .extension()
        .is_some_and(|e| e.eq_ignore_ascii_case("gguf") || e.eq_ignore_ascii_case("safetensors"));
    let rooted =
        path.is_absolute() || ["./", "../", "~/", ".\\", "..\\"].iter().any(|start| word.starts_with(start));
    let separated = word.contains(['/', '\\']) && !word.contains(char::is_whitespace);
    let on_hub = word.starts_with("hf:") && !word.contains(char::is_whitespace);
    (model_file && !word.contains('\n')) || (rooted && !word.contains('\n')) || separated || on_hub
}

/// Something is there; folders that cannot be a model are refused here, where what is inside can be listed. What is
/// in a file, its reader says.
fn existing(path: &Path) -> Outcome<Source> {
    if !path.is_dir() || path.join("config.json").is_file() {
        return Ok(Source::Path(path.to_owned()));
    }
    let failure =
        Failure::usage(format!("`{}` is a folder without a model: it has no config.json", path.display()));
    let inside = models_in(path);
    Err(if inside.is_empty() { failure } else { failure.hint(format!("models in it: {}", list(&inside))) })
}

/// Nothing is there; in the library there may be models of similar names.
fn missing(name: &str, similar: Vec<String>) -> Failure {
    let failure = Failure::usage(format!("there is no model `{name}`"));
    let path = Path::new(name);
    let folder = match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => Path::new("."),
    };
    let mut candidates = models_in(folder);
    candidates.push(PathBuf::from(EMBEDDED));
    let likeness = |candidate: &Path| {
        let end =
            |path: &Path| path.file_name().map(|n| n.to_string_lossy().to_lowercase()).unwrap_or_default();
        strsim::jaro_winkler(&end(candidate), &end(path))
    };
    candidates.retain(|candidate| likeness(candidate) > 0.75);
    candidates.sort_by(|a, b| likeness(b).total_cmp(&likeness(a)));
    candidates.truncate(3);
    candidates.extend(similar.into_iter().map(PathBuf::from));
    if !candidates.is_empty() {
        failure.hint(format!("did you mean {}?", list(&candidates)))
    } else if let Some(reference) = on_hub(name) {
        failure.hint(format!("to get it from Hugging Face: paguro pull {reference}"))
    } else if !folder.is_dir() {
        failure.hint(format!(
            "there is no folder `{}`; give a GGUF file, a Hugging Face folder, or `{EMBEDDED}`",
            folder.display()
        ))
    } else {
        failure.hint(format!(
            "give a GGUF file, a Hugging Face folder, or `{EMBEDDED}`, the model inside this binary"
        ))
    }
}

/// What to pull, if the name could be a model's on the hub: a file's name could not.
fn on_hub(name: &str) -> Option<String> {
    let is_file = Path::new(name).extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"));
    (!is_file && name.parse::<Reference>().is_ok()).then(|| match name.split_once(':') {
        Some(("hf" | "https", _)) => name.to_owned(),
        _ => format!("hf:{name}"),
    })
}

/// GGUF files and Hugging Face folders in a folder, by name.
fn models_in(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut found: Vec<_> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| {
            path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"))
                || path.join("config.json").is_file()
        })
        // What the person would type.
        .map(|path| path.strip_prefix("./").map(Path::to_owned).unwrap_or(path))
        .collect();
    found.sort();
    found
}

fn list(paths: &[PathBuf]) -> String {
    const MOST: usize = 5;
    let mut names: Vec<_> = paths.iter().take(MOST).map(|path| format!("`{}`", path.display())).collect();
    if paths.len() > MOST {
        names.push(format!("and {} more", paths.len() - MOST));
    }
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_and_paths_are_told_apart() {
        for prompt in [
            "hello",
            "Tell me a story about a shy fox",
            "What is 3/4 of 8?",
            "Why?",
            "...and then",
            "a.b",
            "~ is a tilde",
        ] {
            assert!(!looks_like_path(prompt), "{prompt}");
        }
        for path in [
            "model.gguf",
            "my model.GGUF",
            "./x",
            "../x y",
            "/opt/models",
            "some/folder",
            "~/m",
            "x.safetensors",
            "org/name",
            "hf:org/name",
        ] {
            assert!(looks_like_path(path), "{path}");
        }
    }

    #[test]
    fn a_missing_model_suggests_a_near_one() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("llama-7b-Q4_K_M.gguf"), "").unwrap();
        fs::create_dir(folder.path().join("qwen")).unwrap();
        fs::write(folder.path().join("qwen/config.json"), "{}").unwrap();
        let none = LibrarySettings { root: None, hf_endpoint: None, hf_token: None };
        let report = |name: &str| {
            let name = folder.path().join(name).display().to_string();
            Source::find(Some(&name), &none).unwrap_err().report(false).unwrap()
        };
        assert!(report("llama-7b-Q4_K.gguf").contains("llama-7b-Q4_K_M.gguf`?"));
        assert!(report("qwem").contains("qwen`?"));
        assert!(report("nothing-like-it").contains("give a GGUF file"));
        assert!(report("no-folder/x.gguf").contains("there is no folder"));
        assert!(report("").contains("models in it"));
        assert!(Source::find(Some("tale"), &none).unwrap_err().report(false).unwrap().contains("`tales`"));
    }

    #[test]
    fn the_embedded_file_is_aligned() {
        assert!(EMBEDDED_FILE.starts_with(b"GGUF"));
        assert_eq!(EMBEDDED_FILE.as_ptr() as usize % 64, 0);
    }
}
