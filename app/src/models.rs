//! Lookup of models by name: the embedded model, a file, a folder, or a model of the library; and errors for unknown
//! names.

use std::{
    fs,
    path::{Path, PathBuf},
};

use paguro_library::{
    LibraryError, ModelName, ModelRecord, Source as Origin,
    found::Program,
    hub::{Choice, Reference},
    known::{self, Short},
    plain_name,
};
use paguro_model::AdapterFile;

use crate::{
    failure::{Failure, Outcome},
    library,
    settings::LibrarySettings,
    units,
};

/// Name of the embedded model.
pub const EMBEDDED: &str = "tales";

/// File of [`EMBEDDED`], aligned as GGUF requires for its tensors.
pub static EMBEDDED_FILE: &[u8] = &ALIGNED.bytes;

/// GGUF aligns tensors to 32 bytes from the file's start; 64 is a cache line and an AVX-512 load.
#[repr(C, align(64))]
struct Aligned<Bytes: ?Sized> {
    bytes: Bytes,
}

static ALIGNED: &Aligned<[u8]> = &Aligned { bytes: *include_bytes!("../../models/tales/tales-Q8_0.gguf") };

/// A model by its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// The embedded model.
    Embedded,
    /// A GGUF file or a Hugging Face folder that exists.
    Path(PathBuf),
    /// A model of the library.
    Library {
        /// Name in the library.
        name: String,
        /// Path of the file or folder.
        path: PathBuf,
    },
}

impl Source {
    /// Finds the model of `-m NAME`; without a name, the embedded model. A file or folder takes precedence over a model
    /// of the library.
    ///
    /// # Errors
    /// A usage error with suggestions.
    pub fn find(name: Option<&str>, library: &LibrarySettings) -> Outcome<Self> {
        let Some(name) = name else { return Ok(Self::Embedded) };
        match Self::look_up(name, library)? {
            Found::Here(source) => Ok(source),
            Found::Missing(missing) => Err(missing.failure()),
        }
    }

    /// Looks up a model: the embedded one, on the disk, in the library.
    ///
    /// # Errors
    /// The file is not a model, the library cannot be read, or the name is ambiguous.
    pub fn look_up(name: &str, library: &LibrarySettings) -> Outcome<Found> {
        if is_embedded(name) {
            return Ok(Found::Here(Self::Embedded));
        }
        let path = Path::new(name);
        let problem = match path.try_exists() {
            Ok(true) => match existing(path) {
                Ok(source) => return Ok(Found::Here(source)),
                Err(failure) => Some(failure),
            },
            Ok(false) => None,
            // The file may exist in a folder that cannot be read.
            Err(error) if is_path(name) => Some(Failure::new(format!("cannot read `{name}`: {error}"))),
            Err(_) => None,
        };
        let found = in_library(name, library)?;
        match (found, problem) {
            // A folder may have the name of a model by chance.
            (Found::Missing(_), Some(failure)) => Err(failure),
            (found, _) => Ok(found),
        }
    }

    /// Returns the model's name for messages.
    pub fn name(&self) -> String {
        match self {
            Self::Embedded => EMBEDDED.into(),
            Self::Path(path) => path.display().to_string(),
            Self::Library { name, .. } => name.clone(),
        }
    }

    /// Returns a name that leads to the model from any folder.
    pub fn reference(&self) -> String {
        match self {
            Self::Path(path) => path.canonicalize().unwrap_or_else(|_| path.clone()).display().to_string(),
            _ => self.name(),
        }
    }

    /// Returns the path of its file or folder; `None` for the embedded model.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Path(path) | Self::Library { path, .. } => Some(path),
            Self::Embedded => None,
        }
    }

    /// Returns the model's name for status lines: for a file, its name without folders and extension.
    pub fn short_name(&self) -> String {
        match self {
            Self::Path(path) => {
                let name = if path.is_dir() { path.file_name() } else { path.file_stem() };
                name.map_or_else(|| self.name(), |name| name.to_string_lossy().into_owned())
            }
            _ => self.name(),
        }
    }
}

/// Returns true for names of the embedded model. Case and the parts that may be omitted are ignored, as in the library.
pub fn is_embedded(name: &str) -> bool {
    plain_name(name).eq_ignore_ascii_case(EMBEDDED)
}

/// Result of a lookup on this machine.
#[derive(Debug)]
pub enum Found {
    /// The model exists.
    Here(Source),
    /// The model does not exist.
    Missing(Missing),
}

/// A name without a model on this machine.
#[derive(Debug)]
pub struct Missing {
    /// The name.
    pub name: String,
    /// Similar names in the library.
    similar: Vec<String>,
    /// The argument of `paguro import` for a model of this name of another program.
    pub elsewhere: Option<String>,
}

impl Missing {
    /// Returns the download for this name: a well-known model, or a repository on a hub.
    pub fn download(&self) -> Option<(Reference, Option<ModelName>)> {
        if is_file_name(&self.name) {
            return None;
        }
        known::wanted(&self.name).ok()
    }

    /// Returns the title of the download, as `Qwen3 0.6B`, and its bytes, if they are known.
    pub fn offer(&self) -> Option<(String, Option<u64>)> {
        match Short::find(&self.name) {
            Some(Short { model, quantization: None }) => Some((model.title.clone(), Some(model.bytes()))),
            Some(Short { model, quantization: Some(name) }) => {
                Some((format!("{} in {name}", model.title), None))
            }
            None => self.download().map(|(reference, _)| (reference.repo, None)),
        }
    }

    /// Returns the error with a hint.
    pub fn failure(&self) -> Failure {
        if let Some(reference) = &self.elsewhere {
            let failure = Failure::usage(format!("there is no model `{}` in the library", self.name));
            return failure.hint(format!(
                "it is on this machine; to use its file, without a copy: paguro import {reference}"
            ));
        }
        missing(&self.name, &self.similar)
    }
}

/// Looks up a name in the library, if there is one.
fn in_library(name: &str, settings: &LibrarySettings) -> Outcome<Found> {
    let missing = |similar| {
        let elsewhere = elsewhere(name, settings);
        Ok(Found::Missing(Missing { name: name.to_owned(), similar, elsewhere }))
    };
    let Some(library) = settings.open_existing()? else { return missing(Vec::new()) };
    let found = |record: &ModelRecord| {
        let path = library.path(record).map_err(library::failure)?;
        Ok(Found::Here(Source::Library { name: record.name.short(), path }))
    };
    match library.find(name) {
        Ok(record) => found(&record),
        Err(LibraryError::NotFound { similar, .. }) => {
            // The model of a short name may be stored under its repository's name.
            let records = library.list().map_err(library::failure)?;
            let same = |short: Short| records.iter().find(|record| is_of(record, &short));
            match (Short::find(name).and_then(same), Some(plain_name(name)).filter(|plain| *plain != name)) {
                (Some(record), _) => found(record),
                // A name without a tag matches if the library has only one model of it.
                (None, Some(plain)) => in_library(plain, settings),
                (None, None) => missing(similar),
            }
        }
        Err(LibraryError::BadName { .. }) => missing(Vec::new()),
        Err(error) => Err(library::failure(error)),
    }
}

/// Returns the argument of `paguro import` for a usable model of another program with this name.
pub fn elsewhere(name: &str, settings: &LibrarySettings) -> Option<String> {
    if let Some((program, name)) = Program::split(name) {
        let found = settings.stores.find(program, name).ok()?;
        return found.problem().is_none().then(|| found.reference());
    }
    let of = |program: Program| settings.stores.find(program, name).ok().filter(|it| it.problem().is_none());
    Program::ALL.into_iter().find_map(of).map(|found| found.reference())
}

/// Returns true if a model of the library is the one of a short name.
fn is_of(record: &ModelRecord, short: &Short) -> bool {
    let Origin::Hub { repo, .. } = &record.source else { return false };
    let same_file = match &short.quantization {
        None => record.files.iter().any(|file| file.name == short.model.file),
        Some(quantization) => record.details.quantization.eq_ignore_ascii_case(quantization),
    };
    repo.eq_ignore_ascii_case(&short.model.repository) && same_file
}

/// Returns true for a word that could be a model's name: letters, digits and `. _ - : / @`, or a path. Prompts such as
/// "Compare and/or with either/or" and "Is 3/4 of 8 six?" have spaces or other characters.
pub fn is_name(word: &str) -> bool {
    let fine = |c: char| c.is_ascii_alphanumeric() || "._-:/@\\~".contains(c);
    let plain = word.chars().all(fine) && word.chars().any(|c| c.is_ascii_alphanumeric());
    plain || is_path(word)
}

/// Returns true for a model file's name or a path, which may have spaces.
pub fn is_path(word: &str) -> bool {
    let rooted = Path::new(word).is_absolute()
        || ["./", "../", "~/", ".\\", "..\\"].iter().any(|start| word.starts_with(start));
    (rooted || is_file_name(word)) && !word.contains('\n')
}

/// Returns true for the extension of a model's file.
fn is_file_name(word: &str) -> bool {
    let extension = Path::new(word).extension();
    extension.is_some_and(|e| e.eq_ignore_ascii_case("gguf") || e.eq_ignore_ascii_case("safetensors"))
}

/// Returns the source of an existing path. Refuses folders without a model, with a list of the models in them. The
/// content of files is not checked.
fn existing(path: &Path) -> Outcome<Source> {
    if !path.is_dir() || path.join("config.json").is_file() {
        return Ok(Source::Path(path.to_owned()));
    }
    if AdapterFile::is_at(path) {
        let path = path.display();
        let failure = Failure::usage(format!("`{path}` is an adapter (LoRA) and no model"));
        return Err(failure.hint(format!("with its model: paguro run MODEL --lora {path}")));
    }
    let failure =
        Failure::usage(format!("`{}` is a folder without a model: it has no config.json", path.display()));
    let inside = models_in(path);
    Err(if inside.is_empty() { failure } else { failure.hint(format!("models in it: {}", list(&inside))) })
}

/// Returns the error for an unknown name, with similar names of the library.
fn missing(name: &str, similar: &[String]) -> Failure {
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
    candidates.extend(similar.iter().map(PathBuf::from));
    let failure = match candidates.is_empty() {
        true => failure,
        false => failure.hint(format!("did you mean {}?", list(&candidates))),
    };
    if let Some(short) = Short::find(name).filter(|_| !is_file_name(name)) {
        let (name, title) = (short.name(), &short.model.title);
        let size = match short.quantization {
            None => format!(" ({})", units::bytes(short.model.bytes())),
            Some(_) => String::new(),
        };
        return failure.hint(format!("`paguro pull {name}` downloads {title}{size}"));
    }
    if let Some(reference) = on_hub(name) {
        return failure.or_hint(format!("to get it from Hugging Face: paguro pull {reference}"));
    }
    if is_path(name) {
        let kinds =
            format!("give a GGUF file, a Hugging Face folder, or `{EMBEDDED}`, the model inside this binary");
        return match folder.is_dir() {
            true => failure.or_hint(kinds),
            false => failure.or_hint(format!("there is no folder `{}`; {kinds}", folder.display())),
        };
    }
    if !candidates.is_empty() {
        return failure;
    }
    match known::advice(name) {
        Some(advice) => failure.hint(format!("{advice} `paguro pull` downloads them")).hint(SEARCH),
        None => failure
            .hint(format!(
                "a model is `{EMBEDDED}`, a GGUF file, a Hugging Face folder, or one of the library; `paguro pull` gets more"
            ))
            .hint(SEARCH),
    }
}

/// Hint for finding models.
const SEARCH: &str = "`paguro search` lists well-known models, `paguro list` those that are here";

/// Returns the argument for `paguro pull` if the name has the form of a repository on a hub and not of a file.
fn on_hub(name: &str) -> Option<String> {
    if is_file_name(name) {
        return None;
    }
    let reference = name.parse::<Reference>().ok()?;
    let tag = match reference.choice {
        Some(Choice::Tag(tag)) => format!(":{tag}"),
        _ => String::new(),
    };
    Some(format!("hf:{}{tag}", reference.repo))
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
        // The path that a user would type.
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
    fn prompts_and_names_are_told_apart() {
        for prompt in [
            "Tell me a story about a shy fox",
            "What is 3/4 of 8?",
            "Why?",
            "Hello,",
            "...and then",
            "...",
            "~ is a tilde",
            "2+2",
            "你好",
            "",
        ] {
            assert!(!is_name(prompt), "{prompt}");
        }
        for name in [
            "hello",
            "llama3.2",
            "qwen3:0.6b",
            "smollm2",
            "a.b",
            "model.gguf",
            "my model.GGUF",
            "./x",
            "../x y",
            "/opt/models",
            "some/folder",
            "~/m",
            "x.safetensors",
            "org/name",
            "hf:org/name@main",
        ] {
            assert!(is_name(name), "{name}");
        }
        assert!(["tales", "Tales", "TALES:latest"].into_iter().all(is_embedded) && !is_embedded("tales:q8"));
    }

    #[test]
    fn a_missing_model_suggests_a_near_one() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("llama-7b-Q4_K_M.gguf"), "").unwrap();
        fs::create_dir(folder.path().join("qwen")).unwrap();
        fs::write(folder.path().join("qwen/config.json"), "{}").unwrap();
        let none =
            LibrarySettings { root: None, hf_endpoint: None, hf_token: None, stores: Default::default() };
        let report = |name: &str| {
            let name = folder.path().join(name).display().to_string();
            Source::find(Some(&name), &none).unwrap_err().report(false).unwrap()
        };
        assert!(report("llama-7b-Q4_K.gguf").contains("llama-7b-Q4_K_M.gguf`?"));
        assert!(report("qwem").contains("qwen`?"));
        assert!(report("nothing-like-it").contains("give a GGUF file"));
        let missing = |name: &str| Source::find(Some(name), &none).unwrap_err().report(false).unwrap();
        for (name, hint) in [
            ("llama3.2", "`paguro pull llama3.2:3b` downloads Llama 3.2 3B Instruct (2.0 GB)"),
            ("qwen3:4b-q8_0", "`paguro pull qwen3:4b-q8_0` downloads Qwen3 4B\n"),
            ("llama3.2:70b", "among the short names: 1b, 3b"),
            ("lama3.2", "did you mean llama3.2:1b, llama3.2:3b"),
            ("hf.co/Qwen/X:Q8_0", "paguro pull hf:Qwen/X:Q8_0\n"),
            ("frobnicate", "`paguro search` lists"),
        ] {
            assert!(missing(name).contains(hint), "{}", missing(name));
        }
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
