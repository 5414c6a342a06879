//! What the library keeps of a model's requests, in the words of Ollama's Modelfiles: `/api/create` writes it, and
//! requests of all APIs begin with it.

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
    /// Only shown.
    #[serde(rename = "license")]
    #[schema(value_type = Option<Object>)]
    _license: Option<Value>,
}

/// As the library keeps it.
///
/// # Errors
/// The name of a parameter that cannot be honoured.
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

/// Checks what a model's requests are to begin with.
///
/// # Errors
/// The name of a parameter that cannot be honoured.
pub fn check_parameters(parameters: &Map<String, Value>) -> Result<(), String> {
    // The first one says what was meant.
    let read = |tolerance| read(parameters, &tolerance).map(drop);
    read(Tolerance::default()).and_then(|()| read(Tolerance::strict())).map_err(|error| error.to_string())
}

impl ModelEntry {
    /// Defaults of requests to this model.
    ///
    /// # Errors
    /// The library has what this version cannot honour.
    pub fn defaults(&self) -> Result<Defaults, ApiError> {
        read(&self.parameters, &Tolerance::default())
    }
}
