//! Adapters (LoRA) of the command line and of the library.

use std::{
    cell::RefCell,
    error::Error,
    path::{Path, PathBuf},
};

use paguro_engine::{Adapter, AdapterWeights, Handle};
use paguro_library::{Base, Details, Library, LibraryError, ModelRecord};
use paguro_model::{AdapterFile, LoadOptions, Model};
use paguro_server::AdapterSetting;

use crate::{
    failure::{Failure, Outcome},
    library, load,
    models::Source,
    settings::LibrarySettings,
};

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

/// Returns the place of an adapter with its scale, from `FILE[:SCALE]` or `NAME[:SCALE]`, a name of the library.
///
/// # Errors
/// The library cannot be read.
pub fn place(text: &str, settings: &LibrarySettings) -> Outcome<(PathBuf, f32)> {
    let (whole, (path, scale)) = (PathBuf::from(text), scaled(text));
    if path.exists() || whole.exists() {
        return Ok(if path.exists() { (path, scale) } else { (whole, 1.0) });
    }
    let Some(library) = settings.open_existing()? else { return Ok((path, scale)) };
    // A tag may look like a scale.
    for (name, scale) in [(text, 1.0), (path.to_str().unwrap_or(text), scale)] {
        match library.find(name) {
            Ok(record) if record.is_adapter() => {
                return Ok((library.path(&record).map_err(library::failure)?, scale));
            }
            _ => {}
        }
    }
    Ok((path, scale))
}

/// Returns the name of the model that an adapter of the library changes.
///
/// # Errors
/// The reason for which there is none.
pub fn base_name(adapter: &ModelRecord, records: &[ModelRecord]) -> Result<String, String> {
    let name = adapter.name.short();
    let hint = format!("`paguro preset {name} --base MODEL` names one");
    match adapter.find_base(records) {
        Base::Found(base) => Ok(base),
        Base::Several(names) => {
            Err(format!("the library has several models that it may change: {}; {hint}", names.join(", ")))
        }
        Base::Missing => {
            let trained_for = adapter.details.adapter.as_ref().and_then(|it| it.trained_for.as_deref());
            let problem = match trained_for {
                Some(model) => format!("its base `{model}` is not in the library"),
                None => "its files name no base".to_owned(),
            };
            Err(format!("{problem}; {hint}"))
        }
    }
}

/// Returns the model that a source stands for, and the path of the adapter if the source is one of the library.
///
/// # Errors
/// An adapter has no base, or the library cannot be read.
pub fn split(source: &Source, settings: &LibrarySettings) -> Outcome<(Source, Option<PathBuf>)> {
    let Source::Library { name, path } = source else { return Ok((source.clone(), None)) };
    let Some(library) = settings.open_existing()? else { return Ok((source.clone(), None)) };
    let record = library.find(name).map_err(library::failure)?;
    if !record.is_adapter() {
        return Ok((source.clone(), None));
    }
    let records = library.list().map_err(library::failure)?;
    let base = base_name(&record, &records);
    let base = base.map_err(|problem| Failure::new(format!("`{name}` is an adapter, and {problem}")))?;
    match Source::find(Some(&base), settings)? {
        Source::Library { name: base, .. } if is_adapter(&library, &base) => {
            Err(Failure::new(format!("`{name}` is an adapter, and its base `{base}` is one too")))
        }
        base => Ok((base, Some(path.clone()))),
    }
}

/// Returns true if this model of the library is an adapter.
fn is_adapter(library: &Library, name: &str) -> bool {
    library.find(name).is_ok_and(|record| record.is_adapter())
}

/// Returns the model with the tokens and the chat template of an adapter's folder, if it has some.
///
/// # Errors
/// The adapter cannot be read, or does not fit the model.
pub fn dialect(path: &Path, model: &Model) -> Outcome<Option<Model>> {
    let dialect = AdapterFile::open(path).and_then(|file| file.dialect(model, None));
    dialect.map_err(|error| Failure::from_error(&error))
}

/// Checks adapters that enter the library, and finds their bases.
pub struct BaseCheck<'a> {
    settings: &'a LibrarySettings,
    /// The base that a flag names.
    wanted: Option<&'a str>,
    /// The base that was found.
    found: RefCell<Option<String>>,
}

impl<'a> BaseCheck<'a> {
    /// Creates a check with the base that a flag names.
    pub fn new(settings: &'a LibrarySettings, wanted: Option<&'a str>) -> Self {
        Self { settings, wanted, found: RefCell::default() }
    }

    /// Checks that the adapter at `path` fits its base, if that is known, and returns its details. Other models are not
    /// checked.
    ///
    /// # Errors
    /// It does not fit; the base is missing; a flag names a base of a model.
    pub fn check(&self, path: &Path, details: Details) -> Result<Details, Box<dyn Error + Send + Sync>> {
        let found = self.find(path, &details).map_err(|failure| failure.message().to_owned())?;
        self.found.replace(found);
        Ok(details)
    }

    /// Returns the base of an adapter, which fits it; `None` if no base is known, and for models.
    ///
    /// # Errors
    /// As for [`Self::check`].
    pub fn find(&self, path: &Path, details: &Details) -> Outcome<Option<String>> {
        let Some(adapter) = &details.adapter else {
            return match self.wanted {
                Some(_) => Err(Failure::usage("it is a model, but --base is for adapters")),
                None => Ok(None),
            };
        };
        if details.problem.is_some() {
            return Ok(None);
        }
        let records = match self.settings.open_existing()? {
            Some(library) => library.list().map_err(library::failure)?,
            None => Vec::new(),
        };
        let name = match (self.wanted, adapter.find_base(&records)) {
            (Some(name), _) => name.to_owned(),
            (None, Base::Found(name)) => name,
            (None, Base::Several(_) | Base::Missing) => return Ok(None),
        };
        let source = Source::find(Some(&name), self.settings)?;
        if let Source::Path(path) = &source {
            let failure = Failure::usage(format!("the base `{}` is not in the library", path.display()));
            return Err(failure.hint(format!("paguro import {}", path.display())));
        }
        let is_own = |record: &ModelRecord| record.is_adapter() && record.name.short() == source.name();
        if records.iter().any(is_own) {
            return Err(Failure::usage(format!("the base `{name}` is an adapter itself")));
        }
        check_fit(path, &source)?;
        Ok(Some(source.name()))
    }

    /// Records the base that was found.
    ///
    /// # Errors
    /// The library cannot be written.
    pub fn record(&self, library: &Library, record: ModelRecord) -> Result<ModelRecord, LibraryError> {
        let found = self.found.borrow();
        let Some(base) = found.as_deref().filter(|base| record.is_adapter() && record.base() != Some(base))
        else {
            return Ok(record);
        };
        // The base that a flag named before stays.
        if self.wanted.is_none() && record.base().is_some() {
            return Ok(record);
        }
        let mut extra = record.extra.clone();
        extra.insert("base".to_owned(), base.into());
        library.set_extra(&record.name.to_string(), extra)
    }
}

/// Checks that an adapter fits a model.
///
/// # Errors
/// It does not, with the names and shapes of both.
pub fn check_fit(path: &Path, base: &Source) -> Outcome<()> {
    let model = load::file(base)?.load(&LoadOptions::default());
    let model = model.map_err(|error| Failure::from_error(&error))?;
    let fit = AdapterFile::open(path).and_then(|file| file.fit(&model));
    fit.map(drop).map_err(|error| Failure::from_error(&error))
}

/// Splits `FILE[:SCALE]`.
fn scaled(text: &str) -> (PathBuf, f32) {
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
