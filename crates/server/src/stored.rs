//! Stored defaults of a model's requests, with the names of Ollama's Modelfiles. `/api/create` writes them; requests of
//! all APIs use them.

use serde::Deserialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::{
    error::ApiError,
    generate::Defaults,
    ollama::{self, MessageParam, OptionsParam},
    source::ModelEntry,
    wire::{self, Schema, Tolerance},
};

#[derive(Default, Deserialize, ToSchema)]
struct Stored {
    #[serde(default)]
    options: OptionsParam,
    system: Option<String>,
    #[serde(default)]
    messages: Vec<MessageParam>,
    /// For display only.
    #[serde(rename = "license")]
    #[schema(value_type = Option<Object>)]
    _license: Option<Value>,
}

/// Reads the format of the library.
///
/// # Errors
/// The name of an unsupported parameter.
pub fn read(stored: &Map<String, Value>, tolerance: &Tolerance) -> Result<Defaults, ApiError> {
    if stored.is_empty() {
        return Ok(Defaults::default());
    }
    let stored = Value::from(stored.clone());
    let stored = wire::read_value(stored, &Schema::of::<Stored>(), &[ollama::OTHER_OPTIONS], tolerance)?;
    let Stored { options, system, messages, .. } = stored;
    let messages = ollama::messages(messages, tolerance)?;
    Ok(Defaults { options: options.into_options()?, system, messages })
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
    /// Returns the defaults of requests to this model.
    ///
    /// # Errors
    /// The library contains a parameter that this version does not support.
    pub fn read_defaults(&self) -> Result<Defaults, ApiError> {
        read(&self.defaults, &Tolerance::default())
    }
}
