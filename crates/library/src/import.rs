//! Import of models from this machine: detection of their files, copies and references.

use std::{
    fs::{self, File},
    io::Read,
    path::{MAIN_SEPARATOR, Path, PathBuf},
};

use serde_json::{Map, Value};

use crate::{
    adapter::{belongs_to_adapter, is_adapter},
    cancel::Cancel,
    digest::Digest,
    error::LibraryError,
    files::{hash_file, is_same, kind, regular},
    name::{LATEST, ModelName},
    record::{Details, FileRecord, Format, ModelRecord, OnProgress, Progress, Transfer},
    store::Store,
};

/// Choices of an import.
#[derive(Clone, Debug, Default)]
pub struct ImportOptions {
    /// The model's name in the library; without it, its file's.
    pub name: Option<ModelName>,
    /// Copy the files into the library; otherwise they stay where they are, and must.
    pub copy: bool,
    /// Without `copy`: make hard links to the files in the library, where the file system and permissions allow it, so
    /// that the model stays if its other names are removed.
    pub link: bool,
    /// Defaults of the model's requests.
    pub defaults: Map<String, Value>,
    /// Settings of the model, unless it replaces one that has its own.
    pub extra: Map<String, Value>,
    /// Take the place of a model of that name.
    pub replace: bool,
    /// Take in a model that the program cannot run.
    pub force: bool,
    /// Names that the program gives to other models.
    pub reserved: Vec<String>,
    /// Stops the import.
    pub cancel: Cancel,
}

/// A model on the disk.
#[derive(Debug)]
pub(crate) struct Found {
    /// The path to open: a GGUF file (the first of a split model), or a folder. Absolute.
    pub(crate) open: PathBuf,
    pub(crate) format: Format,
    /// Its files, in order.
    pub(crate) files: Vec<FoundFile>,
}

/// A file of a model on the disk.
#[derive(Debug)]
pub(crate) struct FoundFile {
    /// Its name in the library.
    pub(crate) name: String,
    /// Its place.
    pub(crate) path: PathBuf,
    /// Its digest, if another program has stored it.
    pub(crate) digest: Option<Digest>,
}

/// Files of a folder with the tokenizer and the chat template.
pub(crate) const TOKENIZER_FILES: [&str; 8] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
];

/// True for files of a Hugging Face folder that are needed to run the model.
pub(crate) fn belongs_to_folder(name: &str) -> bool {
    const FILES: [&str; 11] = [
        "config.json",
        "generation_config.json",
        "preprocessor_config.json",
        "processor_config.json",
        "model.safetensors.index.json",
        "chat_template.json",
        "modules.json",
        "config_sentence_transformers.json",
        "sentence_bert_config.json",
        "sparse_linear.pt",
        "colbert_linear.pt",
    ];
    FILES.contains(&name)
        || TOKENIZER_FILES.contains(&name)
        || is_weights(name)
        || module_file(name).is_some()
}

/// Files of a module of sentence-transformers: `1_Pooling/config.json`.
const MODULE_FILES: [&str; 3] = ["config.json", "model.safetensors", TORCH_WEIGHTS];

/// Returns the plain name under which the library has a file of a module: `1_Pooling.config.json` for `1_Pooling/config.json`. `None`
/// for other files.
pub(crate) fn module_file(path: &str) -> Option<String> {
    let at = path.find(['/', '.'])?;
    let (folder, file) = (&path[..at], &path[at + 1..]);
    (is_module(folder) && MODULE_FILES.contains(&file)).then(|| format!("{folder}.{file}"))
}

/// True for the name of a module's folder: `2_Dense`.
fn is_module(folder: &str) -> bool {
    folder.split_once('_').is_some_and(|(number, kind)| {
        (1..=2).contains(&number.len())
            && (1..=32).contains(&kind.len())
            && number.bytes().all(|byte| byte.is_ascii_digit())
            && kind.bytes().all(|byte| byte.is_ascii_alphabetic())
    })
}

/// Returns true for a file that begins as a GGUF file does. Only regular files are opened.
pub(crate) fn is_gguf(path: &Path) -> bool {
    let mut magic = [0; 4];
    let mut read = || File::open(path)?.read_exact(&mut magic);
    regular(path).is_ok_and(|file| file.len() >= 4) && read().is_ok() && &magic == b"GGUF"
}

/// Returns true for the name of a file that belongs to the model beside it: a projector for images, or an assistant, which drafts.
pub(crate) fn is_companion(name: &str) -> bool {
    is_projector(name) || is_assistant(name)
}

/// Returns true for the name of a projector for images.
pub(crate) fn is_projector(name: &str) -> bool {
    name.to_ascii_lowercase().contains("mmproj")
}

/// Returns true for the name of an assistant (Gemma 4): `mtp-gemma-4-E2B-it-Q8_0.gguf` as llama.cpp has them, or with the word itself.
pub(crate) fn is_assistant(name: &str) -> bool {
    let lower = name.to_ascii_lowercase();
    lower.contains("gemma") && (lower.starts_with("mtp-") || lower.contains("assistant"))
}

/// Returns the library's name of a file in a folder, or of the file itself.
fn name_in(folder: &Path, file: &Path) -> Option<String> {
    let nested = file.strip_prefix(folder).ok().and_then(Path::to_str);
    let nested = nested.map(|nested| nested.replace(MAIN_SEPARATOR, "/"));
    nested.and_then(|nested| module_file(&nested)).or_else(|| Some(file.file_name()?.to_str()?.to_owned()))
}

/// The weights of folders without safetensors.
pub(crate) const TORCH_WEIGHTS: &str = "pytorch_model.bin";

/// True for files with weights.
pub(crate) fn is_weights(name: &str) -> bool {
    name == TORCH_WEIGHTS || is_safetensors(name)
}

/// `model.safetensors` or `model-00001-of-00002.safetensors`; other safetensors are other versions of the same, or
/// adapters.
pub(crate) fn is_safetensors(name: &str) -> bool {
    let Some(stem) = name.strip_suffix(".safetensors") else { return false };
    stem == "model" || split(stem).is_some_and(|(prefix, ..)| prefix == "model")
}

/// Returns true if files of these names are those of a model's folder.
pub(crate) fn is_model<'a>(names: impl Iterator<Item = &'a str> + Clone) -> bool {
    names.clone().any(|name| name == "config.json") && names.clone().any(is_weights)
}

/// Takes `NAME-00002-of-00003` apart.
pub(crate) fn split(stem: &str) -> Option<(&str, u32, u32)> {
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (name, number) = rest.rsplit_once('-')?;
    let five_digits = |text: &str| {
        (text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit())).then(|| text.parse().ok()).flatten()
    };
    let (number, count) = (five_digits(number)?, five_digits(count)?);
    (1..=count).contains(&number).then_some((name, number, count))
}

/// Returns the name without `.gguf`, in any case.
pub(crate) fn gguf_stem(name: &str) -> Option<&str> {
    let at = name.len().checked_sub(".gguf".len())?;
    name.get(at..)?.eq_ignore_ascii_case(".gguf").then(|| &name[..at])
}

/// Returns a name that is one file in one folder, on every system.
pub(crate) fn is_file_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= 255
        && name != "."
        && name != ".."
        && !name.contains(['/', '\\', ':', '\0'])
        && !name.chars().any(char::is_control)
}

/// Returns the format that files of these names form together.
pub(crate) fn format_of(path: &Path, names: &[&str]) -> Result<Format, LibraryError> {
    let bad = |problem: String| LibraryError::NotAModel { path: path.to_owned(), problem };
    if let Some(name) = names.iter().find(|name| !is_file_name(name)) {
        return Err(bad(format!("{name:?} is not a file name")));
    }
    let mut sorted = names.to_vec();
    sorted.sort_unstable();
    if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(bad(format!("two files are named `{}`", pair[0])));
    }
    if is_adapter(names.iter().copied()) && !is_model(names.iter().copied()) {
        return match names.iter().find(|name| !belongs_to_adapter(name)) {
            None => Ok(Format::Safetensors),
            Some(name) => Err(bad(format!("`{name}` is not a file of an adapter's folder"))),
        };
    }
    if names.contains(&"config.json") {
        return match names.iter().find(|name| !belongs_to_folder(name)) {
            None if names.iter().any(|name| is_weights(name)) => Ok(Format::Safetensors),
            None => Err(bad(
                "there is no model.safetensors, nothing like model-00001-of-00002.safetensors, and no pytorch_model.bin"
                    .into(),
            )),
            Some(name) => {
                Err(bad(format!("`{name}` is not a file of a Hugging Face folder with safetensors")))
            }
        };
    }
    if sorted.iter().any(|name| !is_companion(name)) {
        sorted.retain(|name| !is_companion(name) || gguf_stem(name).is_none());
    }
    match sorted[..] {
        [] => Err(bad("there are no files".into())),
        [name] if gguf_stem(name).is_some() => Ok(Format::Gguf),
        [first, ..] => {
            let parts: Option<Vec<_>> = sorted.iter().map(|name| split(gguf_stem(name)?)).collect();
            let prefix = parts.as_ref().map_or("", |parts| parts[0].0);
            match parts {
                Some(parts)
                    if parts.iter().enumerate().all(|(i, &(name, number, count))| {
                        (name, number as usize, count as usize) == (prefix, i + 1, sorted.len())
                    }) =>
                {
                    Ok(Format::Gguf)
                }
                _ => Err(bad(format!(
                    "`{first}` and the rest are neither a GGUF model nor a Hugging Face folder"
                ))),
            }
        }
    }
}

/// Refuses everything except regular files with content. Files that the system generates on reading, which may be
/// endless, have size 0.
fn with_content(path: &Path) -> Result<(), LibraryError> {
    match regular(path)?.len() {
        0 => Err(LibraryError::NotAModel { path: path.to_owned(), problem: "it is empty".into() }),
        _ => Ok(()),
    }
}

/// Returns the model at a path.
pub(crate) fn find(path: &Path) -> Result<Found, LibraryError> {
    let bad = |problem: String| LibraryError::NotAModel { path: path.to_owned(), problem };
    let open = path.canonicalize().map_err(LibraryError::io("open", path))?;
    if open.is_dir() {
        let entries = fs::read_dir(&open).map_err(LibraryError::io("read the folder", path))?;
        let name = |path: &PathBuf| name_in(&open, path);
        let all: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
        let all_names: Vec<String> = all.iter().filter_map(name).collect();
        let all_names = || all_names.iter().map(String::as_str);
        if is_adapter(all_names()) && !is_model(all_names()) {
            let named = all.iter().filter_map(|path| Some((path.clone(), name(path)?)));
            let mut files: Vec<_> = named.filter(|(_, name)| belongs_to_adapter(name)).collect();
            files.sort();
            files.iter().try_for_each(|(path, _)| with_content(path))?;
            let file = |(path, name)| FoundFile { name, path, digest: None };
            let files = files.into_iter().map(file).collect();
            return Ok(Found { open, format: Format::Safetensors, files });
        }
        let (folders, mut files): (Vec<PathBuf>, Vec<PathBuf>) = all
            .into_iter()
            .filter(|path| name(path).is_some_and(|name| belongs_to_folder(&name) || is_module(&name)))
            .partition(|path| name(path).is_some_and(|name| is_module(&name)));
        let in_module = |folder: &PathBuf| MODULE_FILES.map(|file| folder.join(file));
        files.extend(folders.iter().flat_map(in_module).filter(|file| file.is_file()));
        if files.iter().filter_map(name).any(|name| is_safetensors(&name)) {
            files.retain(|file| !file.ends_with(TORCH_WEIGHTS));
        }
        files.sort();
        files.iter().try_for_each(|file| with_content(file))?;
        let names: Vec<String> = files.iter().filter_map(name).collect();
        if !names.iter().any(|name| name == "config.json") {
            return Err(bad(
                "the folder has no config.json; to import a GGUF file in it, name the file".into()
            ));
        }
        let format = format_of(path, &names.iter().map(String::as_str).collect::<Vec<_>>())?;
        let named = files.into_iter().zip(names);
        let files = named.map(|(path, name)| FoundFile { name, path, digest: None }).collect();
        return Ok(Found { open, format, files });
    }
    let metadata = fs::metadata(&open).map_err(LibraryError::io("open", path))?;
    if let Some(kind) = kind(&metadata) {
        return Err(bad(format!("it is {kind}, not a regular file")));
    }
    // The given name, because names of links are often better than those of their targets.
    let given = std::path::absolute(path).map_err(LibraryError::io("open", path))?;
    let name = given.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let stem = match gguf_stem(name) {
        Some(stem) => stem,
        None if is_gguf(&open) => name,
        None => {
            with_content(path)?;
            return Err(bad("it is neither a folder nor a GGUF file, which begins with `GGUF`".into()));
        }
    };
    let files = match split(stem) {
        None => vec![given.clone()],
        Some((prefix, _, count)) => {
            let extension = &name[stem.len()..];
            let part = |i| given.with_file_name(format!("{prefix}-{i:05}-of-{count:05}{extension}"));
            (1..=count).map(part).collect()
        }
    };
    if let Some(missing) = files.iter().find(|file| !file.exists()) {
        return Err(bad(format!("`{}` is missing", missing.display())));
    }
    files.iter().try_for_each(|file| with_content(file))?;
    let open = files[0].clone();
    let named = |path: PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let name = if gguf_stem(&name).is_some() { name } else { format!("{name}.gguf") };
        FoundFile { name, path, digest: None }
    };
    Ok(Found { open, format: Format::Gguf, files: files.into_iter().map(named).collect() })
}

/// Derives a model's name: `tiny-llama-Q4_0.gguf` becomes `tiny-llama:Q4_0`.
pub(crate) fn name(found: &Found, details: &Details) -> Result<ModelName, LibraryError> {
    let full = found.open.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let stem = match found.format {
        Format::Safetensors => &full[..],
        Format::Gguf => {
            let stem = gguf_stem(&full).unwrap_or(&full);
            let stem = split(stem).map_or(stem, |(prefix, ..)| prefix);
            // Blobs of other programs are named by their digests.
            stem.parse::<Digest>().map_or(stem, |_| &stem[..stem.len() - 52])
        }
    };
    let quantization = &details.quantization;
    let at = stem.len().saturating_sub(quantization.len());
    let (base, tag) = match stem.get(at..) {
        Some(end) if found.format == Format::Gguf && end.eq_ignore_ascii_case(quantization) => {
            (stem[..at].trim_end_matches(['-', '.', '_']), quantization.as_str())
        }
        _ => (stem, LATEST),
    };
    // A file may be called `Q4_0.gguf`.
    let (base, tag) = if base.is_empty() { (stem, LATEST) } else { (base, tag) };
    ModelName::new(&ModelName::part_from(base), tag)
}

fn transfers(found: &Found) -> Result<Vec<Transfer>, LibraryError> {
    let transfer = |FoundFile { name, path, digest }: &FoundFile| {
        let size = fs::metadata(path).map_err(LibraryError::io("read", path))?.len();
        Ok(Transfer { name: name.clone(), size, digest: *digest })
    };
    found.files.iter().map(transfer).collect()
}

/// Copies or links the files into the library, or only computes their digests.
pub(crate) fn store_files(
    store: &Store,
    found: &Found,
    options: &ImportOptions,
    progress: &OnProgress<'_>,
) -> Result<Vec<FileRecord>, LibraryError> {
    progress(Progress::Files(&transfers(found)?));
    // All files of a model are in the library, or none.
    let links = !options.copy && options.link && found.files.iter().all(|file| store.can_link(&file.path));
    let mut records = Vec::with_capacity(found.files.len());
    for (i, FoundFile { name, path, digest: expected }) in found.files.iter().enumerate() {
        let advance = |done| progress(Progress::Bytes { file: i, done });
        let what = path.display().to_string();
        let (digest, size) = if options.copy {
            let file = File::open(path).map_err(LibraryError::io("read", path))?;
            store.put(&what, file, *expected, &options.cancel, advance)?
        } else if links {
            store.put_link(path, *expected, &options.cancel, advance)?
        } else {
            let (digest, size) = hash_file(path, &options.cancel, advance)?;
            if let Some(expected) = expected.filter(|expected| *expected != digest) {
                return Err(LibraryError::DigestMismatch { what, expected, found: digest });
            }
            (digest, size)
        };
        progress(Progress::Finished { file: i });
        let stays = !options.copy && !links;
        // A damaged copy of the same content in the library is repaired.
        if stays
            && store.has(&digest)
            && !store
                .is_sound(&digest, &options.cancel, |done| progress(Progress::Checking { file: i, done }))?
        {
            let file = File::open(path).map_err(LibraryError::io("read", path))?;
            store.put(&what, file, Some(digest), &options.cancel, |_| {})?;
        }
        let location = stays.then(|| path.clone());
        records.push(FileRecord { name: name.clone(), size, digest, location });
    }
    Ok(records)
}

/// Returns true if a model of the library consists of these files, as far as can be known without reading them.
pub(crate) fn is_same_model(store: &Store, record: &ModelRecord, found: &Found) -> bool {
    let same = |(file, found): (&FileRecord, &FoundFile)| {
        let has_size = fs::metadata(&found.path).is_ok_and(|on_disk| on_disk.len() == file.size);
        let in_library = file.location.clone().unwrap_or_else(|| store.blob(&file.digest));
        has_size && (found.digest == Some(file.digest) || is_same(&in_library, &found.path))
    };
    record.files.len() == found.files.len() && record.files.iter().zip(&found.files).all(same)
}

/// Returns true if a model of the library has as many files as this one, of the same sizes.
pub(crate) fn has_sizes_of(record: &ModelRecord, found: &Found) -> bool {
    let same = |(file, found): (&FileRecord, &FoundFile)| {
        fs::metadata(&found.path).is_ok_and(|on_disk| on_disk.len() == file.size)
    };
    record.files.len() == found.files.len() && record.files.iter().zip(&found.files).all(same)
}

/// Returns true if a model of the library has the content of these files, which are read.
///
/// # Errors
/// A file cannot be read, or [`LibraryError::Cancelled`].
pub(crate) fn has_content_of(
    record: &ModelRecord,
    found: &Found,
    options: &ImportOptions,
    progress: &OnProgress<'_>,
) -> Result<bool, LibraryError> {
    if !has_sizes_of(record, found) {
        return Ok(false);
    }
    progress(Progress::Files(&transfers(found)?));
    for (i, (file, found)) in record.files.iter().zip(&found.files).enumerate() {
        let read =
            || hash_file(&found.path, &options.cancel, |done| progress(Progress::Bytes { file: i, done }));
        let digest = found.digest.map_or_else(|| read().map(|(digest, _)| digest), Ok)?;
        if digest != file.digest {
            return Ok(false);
        }
        progress(Progress::Finished { file: i });
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};

    use super::*;

    #[test]
    fn split_names_are_taken_apart() {
        assert_eq!(split("m-00002-of-00003"), Some(("m", 2, 3)));
        for not in [
            "m",
            "m-00000-of-00003",
            "m-00004-of-00003",
            "m-2-of-3",
            "m-00001-of-00",
            "-of-",
            "m-+0001-of-00002",
        ] {
            assert_eq!(split(not), None, "{not}");
        }
    }

    #[test]
    fn files_of_a_model_are_told_by_their_names() {
        let check = |names: &[&str], expected: Expect| {
            let found = format_of(Path::new("x"), names);
            expected
                .assert_eq(&found.map_or_else(|error| error.to_string(), |format| format.name().to_owned()));
        };
        check(&["a.gguf"], expect!["gguf"]);
        check(&["a-00002-of-00002.gguf", "a-00001-of-00002.gguf"], expect!["gguf"]);
        check(&["a.gguf", "mmproj-a.gguf"], expect!["gguf"]);
        check(&["config.json", "model.safetensors", "tokenizer.json"], expect!["safetensors"]);
        check(&["config.json", "model.safetensors", "1_Pooling.config.json"], expect!["safetensors"]);
        check(
            &["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"],
            expect!["safetensors"],
        );
        check(
            &["adapter_config.json", "adapters.safetensors", "x.py"],
            expect!["cannot import `x`: `x.py` is not a file of an adapter's folder"],
        );
        check(&[], expect!["cannot import `x`: there are no files"]);
        check(
            &["a-00001-of-00002.gguf", "b-00002-of-00002.gguf"],
            expect![
                "cannot import `x`: `a-00001-of-00002.gguf` and the rest are neither a GGUF model nor a Hugging Face folder"
            ],
        );
        check(&["a.gguf", "a.gguf"], expect!["cannot import `x`: two files are named `a.gguf`"]);
        check(&["../a.gguf"], expect![[r#"cannot import `x`: "../a.gguf" is not a file name"#]]);
        check(
            &["config.json"],
            expect![
                "cannot import `x`: there is no model.safetensors, nothing like model-00001-of-00002.safetensors, and no pytorch_model.bin"
            ],
        );
    }

    #[test]
    fn files_of_modules_get_plain_names() {
        for (path, name) in [
            ("1_Pooling/config.json", Some("1_Pooling.config.json")),
            ("12_Dense/model.safetensors", Some("12_Dense.model.safetensors")),
            ("1_Pooling.config.json", Some("1_Pooling.config.json")),
            ("Pooling/config.json", None),
            ("1_/config.json", None),
            ("1_Pooling/../config.json", None),
            ("../1_Pooling/config.json", None),
            ("onnx/model.safetensors", None),
        ] {
            assert_eq!(module_file(path).as_deref(), name, "{path}");
        }
        let folder = tempfile::tempdir().unwrap();
        for name in [
            "config.json",
            "model.safetensors",
            "modules.json",
            "1_Pooling/config.json",
            "onnx/model.onnx",
            "sparse_linear.pt",
            "pytorch_model.bin",
        ] {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "{}").unwrap();
        }
        let found = find(folder.path()).unwrap();
        let names: Vec<_> = found.files.iter().map(|file| file.name.as_str()).collect();
        assert_eq!(
            names,
            ["1_Pooling.config.json", "config.json", "model.safetensors", "modules.json", "sparse_linear.pt"]
        );
        fs::remove_file(folder.path().join("model.safetensors")).unwrap();
        let found = find(folder.path()).unwrap();
        assert!(found.files.iter().any(|file| file.path.ends_with("pytorch_model.bin")), "{:?}", found.files);
    }

    #[test]
    fn names_come_from_files() {
        let check = |file: &str, format, name: &str| {
            let found = Found { open: file.into(), format, files: Vec::new() };
            let details = Details { quantization: "Q4_0".into(), ..Details::default() };
            assert_eq!(super::name(&found, &details).unwrap().short(), name, "{file}");
        };
        check("/m/tiny-llama-Q4_0.gguf", Format::Gguf, "tiny-llama:Q4_0");
        check("/m/tiny.q4_0.gguf", Format::Gguf, "tiny:Q4_0");
        check("/m/tiny-Q8_0.gguf", Format::Gguf, "tiny-Q8_0");
        check("/m/Q4_0.gguf", Format::Gguf, "Q4_0");
        check("/m/big-Q4_0-00001-of-00002.gguf", Format::Gguf, "big:Q4_0");
        check("/m/my model (1).GGUF", Format::Gguf, "my-model--1-");
        check("/m/Qwen3", Format::Safetensors, "Qwen3");
        check("/m/.gguf", Format::Gguf, "model");
        let digest = Digest::of(b"x").file_name();
        check(&format!("/m/blobs/{digest}"), Format::Gguf, "sha256-2d711642b726");
    }
}
