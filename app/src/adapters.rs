//! Adapters (LoRA) of the command line.

use std::path::{Path, PathBuf};

use paguro_engine::{Adapter, AdapterWeights, Handle};
use paguro_model::{AdapterFile, Model};
use paguro_server::AdapterSetting;

use crate::failure::{Failure, Outcome};

/// Opens an adapter and loads it into the engine of a model.
///
/// # Errors
/// It cannot be read, or does not fit the model.
pub fn load(path: &Path, model: &Model, handle: &Handle) -> Outcome<Adapter> {
    let file = AdapterFile::open(path).map_err(|error| Failure::from_error(&error))?;
    let name = file.name().into();
    handle.check_adapter(&name, file.rank(), file.bytes()).map_err(|error| Failure::from_error(&error))?;
    let pairs = file.fit(model).map_err(|error| Failure::from_error(&error))?;
    handle.load_adapter(AdapterWeights { name, pairs }).map_err(|error| Failure::from_error(&error))
}

/// Splits `FILE[:SCALE]`.
pub fn scaled(text: &str) -> (PathBuf, f32) {
    // A path may have colons.
    match text.rsplit_once(':').and_then(|(path, scale)| Some((path, scale.parse::<f32>().ok()?))) {
        Some((path, scale)) if !path.is_empty() && scale.is_finite() => (path.into(), scale),
        _ => (text.into(), 1.0),
    }
}

/// Reads `[[MODEL::]NAME=]PATH`; `first` is the model of adapters that name none.
///
/// # Errors
/// It is no adapter, or its name cannot be used.
pub fn named(text: &str, first: &str) -> Outcome<AdapterSetting> {
    let (name, path) = match text.split_once('=') {
        Some((name, path)) => (Some(name), PathBuf::from(path)),
        None => (None, PathBuf::from(text)),
    };
    let file = AdapterFile::open(&path).map_err(|error| {
        Failure::from_error(&error).hint("--lora NAME=PATH: a folder of PEFT or mlx-lm, or a GGUF file")
    })?;
    let name = name.unwrap_or(file.name());
    let (base, name) = name.split_once("::").unwrap_or((first, name));
    if name.is_empty() || base.is_empty() {
        return Err(Failure::usage(format!("--lora {text}: the adapter has no name"))
            .hint("--lora NAME=PATH, or --lora MODEL::NAME=PATH"));
    }
    Ok(AdapterSetting { name: name.to_owned(), base: base.to_owned(), path })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_follow_the_last_colon() {
        for (text, path, scale) in [
            ("a.gguf", "a.gguf", 1.0),
            ("a.gguf:0.5", "a.gguf", 0.5),
            ("a:b/c", "a:b/c", 1.0),
            ("a:b/c:-2", "a:b/c", -2.0),
            ("C:\\a", "C:\\a", 1.0),
            (":1", ":1", 1.0),
            ("a:inf", "a:inf", 1.0),
        ] {
            assert_eq!(scaled(text), (path.into(), scale), "{text}");
        }
    }
}
