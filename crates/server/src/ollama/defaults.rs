//! What a model's requests begin with: `/api/create` writes it into the library, and requests of all APIs read it.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::{chat, options::OptionsParam};
use crate::{
    error::ApiError,
    extract,
    generate::{ChatRequest, Message, Options, Role},
};

/// What a model's requests begin with, unless they say otherwise.
#[derive(Debug, Default)]
pub struct Defaults {
    options: Options,
    system: Option<String>,
    messages: Vec<Message>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stored {
    #[serde(default)]
    options: OptionsParam,
    system: Option<String>,
    #[serde(default)]
    messages: Vec<chat::MessageParam>,
    /// Only shown.
    #[serde(rename = "license")]
    _license: Option<Value>,
}

impl Defaults {
    /// As the library keeps it.
    ///
    /// # Errors
    /// What cannot be honoured, by name.
    pub fn read(stored: &Map<String, Value>) -> Result<Self, ApiError> {
        if stored.is_empty() {
            return Ok(Self::default());
        }
        let text = Value::from(stored.clone()).to_string();
        let Stored { options, system, messages, .. } = extract::parse(text.as_bytes())?;
        Ok(Self { options: options.into_options()?, system, messages: chat::messages(messages)? })
    }

    /// Fills in what a request does not say.
    pub fn complete(self, request: &mut ChatRequest) {
        let options = std::mem::take(&mut request.options);
        request.options = options.or(self.options);
        let has_system = request.messages.first().is_some_and(|first| first.role == Role::System);
        let system = self.system.filter(|_| !has_system);
        let system = system.map(|content| Message { role: Role::System, content, ..Message::default() });
        let at = usize::from(has_system);
        request.messages.splice(at..at, system.into_iter().chain(self.messages));
    }

    /// Fills in what a request does not say; a text has options only.
    pub fn complete_options(self, options: Options) -> Options {
        options.or(self.options)
    }
}
