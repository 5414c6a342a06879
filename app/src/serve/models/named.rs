//! Models outside of the library: files of the command line and of folders, by name.

use std::path::Path;

use paguro_library::{
    found::{self, FoundModel, Listing, OllamaSettings, Program},
    plain_name,
};

use crate::{
    failure::{Failure, Outcome},
    library, load,
    models::{EMBEDDED, Source},
    settings::LibrarySettings,
};

/// Architecture of files that encode images for other models.
const PROJECTOR: &str = "clip";

/// Models by name.
pub(super) struct Named {
    /// The embedded model, and those of the settings.
    pub(super) models: Vec<(String, Source)>,
    /// Name of the first model of the settings.
    pub(super) first: Option<String>,
}

impl Named {
    /// Creates a list of the embedded model.
    pub(super) fn new() -> Self {
        Self { models: vec![(EMBEDDED.to_owned(), Source::Embedded)], first: None }
    }

    /// Adds a file or a folder of a model. A model of the library is not added, because all of them are served.
    ///
    /// # Errors
    /// The model is missing or invalid, or another one has its name.
    pub(super) fn add(&mut self, name: &str, settings: &LibrarySettings) -> Outcome<()> {
        let source = Source::find(Some(name), settings)?;
        let Source::Path(path) = &source else {
            self.first.get_or_insert_with(|| name.to_owned());
            return Ok(());
        };
        // Errors of the model are reported at the start instead of at the first request.
        load::file(&source)?;
        let name = served_name(path);
        if let Some(other) = self.find(&name) {
            let failure = Failure::usage(format!("two models would be served as `{name}`"));
            return Err(failure.hint(format!("{} and {}: rename one of them", other.name(), source.name())));
        }
        self.first.get_or_insert_with(|| name.clone());
        self.models.push((name, source));
        Ok(())
    }

    /// Adds the models of a folder. Models that cannot be opened are logged and left out.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub(super) fn add_folder(&mut self, folder: &Path) -> Outcome<()> {
        let Listing { models, problems } = found::in_folder(folder).map_err(library::failure)?;
        problems.iter().for_each(|problem| tracing::warn!("{problem}"));
        let before = self.models.len();
        for model in &models {
            self.add_found(model);
        }
        let count = self.models.len() - before;
        match count {
            0 => tracing::warn!(folder = %folder.display(), "the folder has no models to serve"),
            _ => tracing::info!(folder = %folder.display(), models = count, "serving the models of a folder"),
        }
        if models.iter().any(|model| model.settings != OllamaSettings::default()) {
            tracing::info!(
                "models of Ollama in a folder are served without its parameters and system prompts; `paguro import {}` keeps them",
                Program::Ollama.prefix()
            );
        }
        Ok(())
    }

    fn add_found(&mut self, model: &FoundModel) {
        let warn = |problem: &str| tracing::warn!(model = model.name, "not served: {problem}");
        let path = match (model.path(), model.problem()) {
            (Some(path), _) => path.to_owned(),
            (None, problem) => return warn(problem.unwrap_or_default()),
        };
        let source = Source::Path(path);
        match load::file(&source) {
            // Its model is served.
            Ok(file) if file.architecture() == Some(PROJECTOR) || file.is_assistant() => return,
            Ok(_) => {}
            Err(failure) => return warn(failure.message()),
        }
        let short = model.name.rsplit('/').next().unwrap_or(&model.name);
        let names = [short, &model.name];
        if let Some(other) = self.find(short) {
            if self.models.iter().any(|(_, other)| *other == source) {
                return;
            }
            let one = match other {
                Source::Embedded => "the model inside this program".to_owned(),
                other => other.name(),
            };
            let two = source.name();
            if self.find(&model.name).is_some() {
                return warn(&format!("{one} has the name of {two}; rename one of them"));
            }
            tracing::warn!("{one} is served as `{short}`, so {two} is served as `{}`", model.name);
        }
        let Some(name) = names.into_iter().find(|name| self.find(name).is_none()) else { return };
        self.first.get_or_insert_with(|| name.to_owned());
        self.models.push((name.to_owned(), source));
    }

    fn find(&self, name: &str) -> Option<&Source> {
        let plain = plain_name(name);
        let same = |(other, _): &&(String, Source)| plain_name(other).eq_ignore_ascii_case(plain);
        self.models.iter().find(same).map(|(_, source)| source)
    }
}

/// Returns the name under which a file is served: its own without folder and extension.
fn served_name(path: &Path) -> String {
    // `.` and `..` have no name of their own. Names of links are often better than those of their targets.
    let full = match path.file_name() {
        Some(_) => path.to_owned(),
        None => path.canonicalize().unwrap_or_else(|_| path.to_owned()),
    };
    let is_gguf = full.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
    let name = if full.is_dir() || !is_gguf { full.file_name() } else { full.file_stem() };
    name.map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned())
}
