//! Ollama's models: manifests that name blobs by their SHA-256.
//!
//! `manifests/HOST/NAMESPACE/MODEL/TAG` is JSON with a list of layers: the weights in GGUF, a projector for images, an
//! adapter (LoRA), a template, parameters, a system prompt, messages and licenses.

use std::{
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

use serde::Deserialize;
use serde_json::{Map, Value};

use super::{FoundModel, Listing, Naming, Program, plain};
use crate::{
    digest::Digest,
    error::LibraryError,
    files::{entries, name_of, regular},
    import::{Found, FoundFile, is_gguf},
    name::{LATEST, ModelName},
    record::Format,
};

/// Maximum bytes of a manifest, and of a layer other than weights.
const MOST_BYTES: u64 = 4 << 20;

/// Maximum number of manifests.
const MOST_MODELS: usize = 10_000;

/// Host of Ollama's own models.
const HOST: &str = "registry.ollama.ai";

/// Namespace of Ollama's own models.
const NAMESPACE: &str = "library";

/// Beginning of the types of layers.
const TYPE: &str = "application/vnd.ollama.image.";

/// Settings that Ollama has stored with a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OllamaSettings {
    /// Options of requests.
    pub parameters: Map<String, Value>,
    /// System prompt.
    pub system: Option<String>,
    /// Prompt template in Go's language.
    pub template: Option<String>,
    /// Messages before every chat.
    pub messages: Vec<Value>,
    /// Licenses.
    pub licenses: Vec<String>,
}

#[derive(Deserialize)]
struct Manifest {
    layers: Option<Vec<Layer>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Layer {
    media_type: String,
    digest: String,
    size: u64,
}

/// Adds the models of a folder.
///
/// # Errors
/// The folder of manifests cannot be read.
pub(super) fn add(root: &Path, listing: &mut Listing) -> Result<(), LibraryError> {
    let mut level = vec![(root.join("manifests"), Vec::new())];
    // Hosts, namespaces, models and tags.
    for depth in 0..4 {
        let mut next = Vec::new();
        for (folder, parts) in level {
            let found = match entries(&folder) {
                Ok(found) => found,
                Err(error) if depth == 0 => return Err(error),
                Err(error) => {
                    listing.problems.push(error.to_string());
                    continue;
                }
            };
            // Files of file managers begin with a dot, and lie at any level.
            let shown = found.into_iter().filter(|path| !name_of(path).starts_with('.'));
            for path in shown.filter(|path| path.is_dir() == (depth < 3)) {
                let mut parts: Vec<String> = parts.clone();
                parts.push(name_of(&path));
                next.push((path, parts));
            }
        }
        level = next;
    }
    if level.len() > MOST_MODELS {
        let problem =
            format!("`{}` has more than {MOST_MODELS} models; the others are not read", root.display());
        listing.problems.push(problem);
        level.truncate(MOST_MODELS);
    }
    for (path, parts) in level {
        let (host, namespace, model, tag) = (&*parts[0], &*parts[1], &*parts[2], &*parts[3]);
        let name = match (host, namespace) {
            (HOST, NAMESPACE) => format!("{model}:{tag}"),
            (HOST, _) => format!("{namespace}/{model}:{tag}"),
            _ => format!("{host}/{namespace}/{model}:{tag}"),
        };
        listing.models.push(read(root, &path, name, &parts));
    }
    Ok(())
}

/// Reads a manifest.
fn read(root: &Path, manifest: &Path, name: String, parts: &[String]) -> FoundModel {
    let mut settings = OllamaSettings::default();
    let (mut bytes, mut base_bytes) = (0, 0);
    let mut base = None;
    let found = layers(manifest).and_then(|layers| {
        let size = |kinds: &[&str]| {
            let weights = layers.iter().filter(|layer| kinds.contains(&layer.kind()));
            weights.map(|layer| layer.size).fold(0, u64::saturating_add)
        };
        bytes = size(&["model", "projector", "adapter"]);
        base_bytes = size(&["model", "projector"]);
        let weights = weights_of(root, &layers, &name)?;
        let adapter = adapter_of(root, &layers, &name)?;
        settings = settings_of(root, &layers)?;
        Ok(match adapter {
            None => weights,
            Some(adapter) => {
                base = Some(weights);
                adapter
            }
        })
    });
    let (name, found) = (plain(&name), found.map_err(|problem: String| plain(&problem)));
    let library_name = naming(parts);
    let base = base.map(|found| {
        let library_name = match &library_name {
            Naming::Name(name) => {
                ModelName::new(&format!("{}-base", name.base()), name.tag()).map(Naming::Name)
            }
            other => Ok(other.clone()),
        };
        Box::new(FoundModel {
            program: Program::Ollama,
            name: name.clone(),
            bytes: base_bytes,
            settings: OllamaSettings::default(),
            found: Ok(found),
            library_name: library_name.unwrap_or(Naming::File),
            base: None,
        })
    });
    FoundModel { program: Program::Ollama, bytes, settings, found, library_name, base, name }
}

/// Returns the name in the library: Ollama's own without host and namespace, those of Hugging Face without the host, as
/// a pull names them.
fn naming(parts: &[String]) -> Naming {
    let first = match (&*parts[0], &*parts[1]) {
        (HOST, NAMESPACE) => 2,
        (HOST | "hf.co" | "huggingface.co", _) => 1,
        _ => 0,
    };
    let base: Vec<_> = parts[first..3].iter().map(|part| ModelName::part_from(part)).collect();
    match ModelName::new(&base.join("/"), &ModelName::part_from(&parts[3])) {
        Ok(name) => Naming::Name(name),
        Err(_) => Naming::File,
    }
}

/// Returns the layers of a manifest.
fn layers(path: &Path) -> Result<Vec<Layer>, String> {
    let wrong = |problem: String| format!("its manifest `{}` {problem}", path.display());
    let bytes = read_small(path).map_err(|problem| wrong(format!("cannot be read: {problem}")))?;
    let manifest: Manifest = serde_json::from_slice(&bytes)
        .map_err(|error| wrong(format!("is not a manifest of Ollama: {error}")))?;
    Ok(manifest.layers.unwrap_or_default())
}

impl Layer {
    /// Returns the type without its beginning: `model`, `params`. Other types are returned whole.
    fn kind(&self) -> &str {
        self.media_type.strip_prefix(TYPE).unwrap_or(&self.media_type)
    }

    /// Returns the digest, and the path of the blob, which has the right size.
    fn blob(&self, root: &Path) -> Result<(Digest, PathBuf), String> {
        // The digest becomes a part of a path.
        let digest: Digest = self.digest.parse().map_err(|error: LibraryError| error.to_string())?;
        let names = [digest.file_name(), digest.to_string()];
        let paths = names.map(|name| root.join("blobs").join(name));
        let path = paths.iter().find(|path| path.symlink_metadata().is_ok()).unwrap_or(&paths[0]);
        let of_layer = |problem: &dyn std::fmt::Display| {
            format!("the blob `{}` of its {} layer {problem}", path.display(), self.kind())
        };
        let found = match regular(path) {
            Ok(found) => found,
            Err(LibraryError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
                return Err(of_layer(&"is missing"));
            }
            Err(error) => return Err(of_layer(&format_args!("cannot be read: {error}"))),
        };
        if found.len() != self.size {
            let problem =
                format!("has {} bytes instead of {}; is its download complete?", found.len(), self.size);
            return Err(of_layer(&problem));
        }
        Ok((digest, path.clone()))
    }

    /// Returns the blob of a layer with weights, under this name.
    fn gguf(&self, root: &Path, name: String) -> Result<FoundFile, String> {
        let (digest, path) = self.blob(root)?;
        if !is_gguf(&path) {
            let kind = self.kind();
            return Err(format!("the blob `{}` of its {kind} layer is not a GGUF file", path.display()));
        }
        Ok(FoundFile { name, path, digest: Some(digest) })
    }

    /// Returns the content of a small layer.
    fn content(&self, root: &Path) -> Result<Vec<u8>, String> {
        let (digest, path) = self.blob(root)?;
        let wrong =
            |problem: &str| format!("the blob `{}` of its {} layer {problem}", path.display(), self.kind());
        let bytes = read_small(&path).map_err(|problem| wrong(&format!("cannot be read: {problem}")))?;
        if Digest::of(&bytes) != digest {
            return Err(wrong("is damaged: its content does not match its name"));
        }
        Ok(bytes)
    }

    fn text(&self, root: &Path) -> Result<String, String> {
        let text = String::from_utf8(self.content(root)?);
        text.map_err(|_| format!("its {} layer is not UTF-8 text", self.kind()))
    }

    fn json<T: for<'a> Deserialize<'a>>(&self, root: &Path) -> Result<T, String> {
        let parsed = serde_json::from_slice(&self.content(root)?);
        parsed.map_err(|error| format!("its {} layer is not valid: {error}", self.kind()))
    }
}

/// Returns the files with weights: the model and its projector.
fn weights_of(root: &Path, layers: &[Layer], name: &str) -> Result<Found, String> {
    let of = |kind: &'static str| layers.iter().filter(move |layer| layer.kind() == kind);
    if of("tensor").next().is_some() {
        return Err("its weights are single tensors and not a GGUF file".to_owned());
    }
    let model = match of("model").collect::<Vec<_>>()[..] {
        [model] => model,
        [] => return Err("it has no weights on this machine; does it run in the cloud?".to_owned()),
        _ => return Err("its weights are several files, of which no one says their order".to_owned()),
    };
    let plain = file_name(name);
    let mut files = vec![model.gguf(root, format!("{plain}.gguf"))?];
    if let Some(projector) = of("projector").next() {
        files.push(projector.gguf(root, format!("mmproj-{plain}.gguf"))?);
    }
    Ok(Found { open: files[0].path.clone(), format: Format::Gguf, files })
}

/// Returns the adapter, if there is one.
fn adapter_of(root: &Path, layers: &[Layer], name: &str) -> Result<Option<Found>, String> {
    match layers.iter().filter(|layer| layer.kind() == "adapter").collect::<Vec<_>>()[..] {
        [] => Ok(None),
        [adapter] => {
            let file = adapter.gguf(root, format!("{}-lora.gguf", file_name(name)))?;
            Ok(Some(Found { open: file.path.clone(), format: Format::Gguf, files: vec![file] }))
        }
        _ => Err("it has several adapters (LoRA)".to_owned()),
    }
}

/// Returns the name of a model's file without its extension.
fn file_name(name: &str) -> String {
    ModelName::part_from(name.strip_suffix(&format!(":{LATEST}")).unwrap_or(name))
}

/// Returns the other layers.
fn settings_of(root: &Path, layers: &[Layer]) -> Result<OllamaSettings, String> {
    let mut settings = OllamaSettings::default();
    for layer in layers {
        match layer.kind() {
            "params" => settings.parameters = layer.json(root)?,
            "system" => settings.system = Some(layer.text(root)?),
            // Before layers of templates there were layers of prompts.
            "template" | "prompt" => settings.template = Some(layer.text(root)?),
            "messages" => settings.messages = layer.json(root)?,
            "license" => settings.licenses.push(layer.text(root)?),
            _ => {}
        }
    }
    Ok(settings)
}

/// Reads a small regular file.
fn read_small(path: &Path) -> Result<Vec<u8>, String> {
    let metadata = regular(path).map_err(|error| error.to_string())?;
    if metadata.len() > MOST_BYTES {
        return Err(format!("it has {} bytes, more than {MOST_BYTES}", metadata.len()));
    }
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(|error| error.to_string())?;
    file.take(MOST_BYTES).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    Ok(bytes)
}
