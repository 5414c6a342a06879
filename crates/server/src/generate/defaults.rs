//! Defaults of a model's requests, for all APIs.

use super::{ChatRequest, Message, Options, Role};

/// Defaults of a model's requests.
#[derive(Debug, Default)]
pub struct Defaults {
    /// Sampling parameters and stop conditions.
    pub options: Options,
    /// System message.
    pub system: Option<String>,
    /// Messages that precede every chat.
    pub messages: Vec<Message>,
}

impl Defaults {
    /// Fills in fields that the request does not set.
    pub fn complete(self, request: &mut ChatRequest) {
        let options = std::mem::take(&mut request.options);
        request.options = options.or(self.options);
        let has_system = request.messages.first().is_some_and(|first| first.role == Role::System);
        let system = self.system.filter(|_| !has_system);
        let system = system.map(|content| Message { role: Role::System, content, ..Message::default() });
        let at = usize::from(has_system);
        request.messages.splice(at..at, system.into_iter().chain(self.messages));
    }

    /// Fills in options that the request does not set; a text request has only options.
    pub fn complete_options(self, options: Options) -> Options {
        options.or(self.options)
    }
}
