//! Stored defaults of a model's requests, with the names of Ollama's Modelfiles. `/api/create` writes them; requests of
//! all APIs use them.

use std::fmt::Display;

use paguro_model::chat::{ChatTemplate, TemplateTokens};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::{
    error::ApiError,
    generate::Defaults,
    ollama::{self, MessageParam, OptionsParam},
    source::ModelEntry,
    wire::{self, OneOrMany, Schema, Tolerance},
};

#[derive(Default, Deserialize, ToSchema)]
struct Stored {
    #[serde(default)]
    options: OptionsParam,
    system: Option<String>,
    #[serde(default)]
    messages: Vec<MessageParam>,
    /// Chat template, which the load of the model uses.
    template: Option<String>,
    /// For display only.
    #[serde(rename = "license")]
    _license: Option<OneOrMany<String>>,
    /// Base model, for display only.
    #[serde(rename = "from")]
    _from: Option<String>,
}

/// Reads the format of the library, and checks all values as a request would.
///
/// # Errors
/// The name of an unsupported parameter, or a value out of range.
pub fn read(stored: &Map<String, Value>, tolerance: &Tolerance) -> Result<Defaults, ApiError> {
    if stored.is_empty() {
        return Ok(Defaults::default());
    }
    let stored = Value::from(stored.clone());
    let stored = wire::read_value(stored, &Schema::of::<Stored>(), &[ollama::OTHER_OPTIONS], tolerance)?;
    let Stored { options, system, messages, template, .. } = stored;
    let messages = ollama::messages(messages)?;
    if let Some(template) = &template {
        let compiled = ChatTemplate::new(template, TemplateTokens::default());
        compiled.map_err(|error| {
            ApiError::invalid("template", format!("`template` must be a template in jinja: {error}"))
        })?;
    }
    let options = options.into_options()?;
    options.check_stored()?;
    Ok(Defaults { options, system, messages })
}

/// Reads the format of the library. Values that this version refuses are left out: an older version or another
/// program has stored them, and every request of the model would fail.
fn read_usable(stored: &Map<String, Value>, mut left_out: impl FnMut(&str, &dyn Display)) -> Defaults {
    let tolerance = Tolerance::default();
    if let Ok(defaults) = read(stored, &tolerance) {
        return defaults;
    }
    let mut usable = Map::new();
    let mut add =
        |usable: &mut Map<String, Value>, with: Map<String, Value>, name: &str| match read(&with, &tolerance)
        {
            Ok(_) => *usable = with,
            Err(error) => left_out(name, &error),
        };
    for (name, value) in stored {
        let mut with = usable.clone();
        match value {
            Value::Object(options) if name == "options" => {
                for (option, value) in options {
                    let mut with = usable.clone();
                    let options = with.entry(name).or_insert_with(|| json!({}));
                    options[option] = value.clone();
                    add(&mut usable, with, option);
                }
            }
            _ => {
                with.insert(name.clone(), value.clone());
                add(&mut usable, with, name);
            }
        }
    }
    read(&usable, &tolerance).unwrap_or_default()
}

/// Checks the defaults of a model's requests.
///
/// # Errors
/// The name of an unsupported parameter.
pub fn check_defaults(defaults: &Map<String, Value>) -> Result<(), String> {
    // The first error names the best suggestion.
    let read = |tolerance| read(defaults, &tolerance).map(drop);
    read(Tolerance::default()).and_then(|()| read(Tolerance::strict())).map_err(|error| error.to_string())
}

impl ModelEntry {
    /// Returns the defaults of requests to this model. Stored values that this version does not support are logged
    /// once, and left out.
    pub fn read_defaults(&self, logged: &wire::Logged) -> Defaults {
        read_usable(&self.defaults, |name, error| {
            if logged.is_first(&format!("{} {name}", self.version)) {
                tracing::warn!(model = self.name, "the stored default `{name}` is left out: {error}");
            }
        })
    }

    /// Returns a stored default that is a text.
    pub fn stored_text(&self, name: &str) -> Option<&str> {
        self.defaults.get(name).and_then(Value::as_str).filter(|text| !text.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stored_values_that_are_refused_are_left_out() {
        let stored = json!({
            "options": {"temperature": -3, "top_k": 7, "mirostat": 2, "stop": ["x"]},
            "license": {"text": "MIT"},
            "messages": [{"role": "nobody"}],
            "system": "Short answers.",
            "other": 1,
        });
        let stored = stored.as_object().unwrap();
        assert!(read(stored, &Tolerance::default()).is_err());
        let mut names = Vec::new();
        let defaults = read_usable(stored, |name, _| names.push(name.to_owned()));
        names.sort_unstable();
        assert_eq!(names, ["license", "messages", "mirostat", "temperature"]);
        assert_eq!(defaults.system.as_deref(), Some("Short answers."));
        let options = &defaults.options;
        assert_eq!(
            (options.sampling.temperature, options.sampling.top_k, &options.stop[..]),
            (None, Some(7), &["x".to_owned()][..])
        );
    }

    #[test]
    fn values_are_checked_when_they_are_stored() {
        for (stored, problem) in [
            (json!({"options": {"temperature": -1}}), "temperature must"),
            (json!({"options": {"top_p": 3}}), "top_p must"),
            (json!({"template": "{% if %}"}), "`template` must be a template in jinja: "),
            (json!({"license": 3}), "`license` must be a string or an array"),
            (json!({"license": ["MIT", "Apache"], "from": "tales"}), ""),
        ] {
            let error = read(stored.as_object().unwrap(), &Tolerance::default()).err();
            let error = error.map(|error| error.to_string()).unwrap_or_default();
            assert!(error.contains(problem) && error.is_empty() == problem.is_empty(), "{stored}: {error}");
        }
    }
}
