//! What a model's requests begin with, whatever API they come from.

use super::{ChatRequest, Message, Options, Role};

/// What a model's requests begin with, unless they say otherwise.
#[derive(Debug, Default)]
pub struct Defaults {
    /// How to sample and when to end.
    pub options: Options,
    /// What the model is told first.
    pub system: Option<String>,
    /// What was said before every chat.
    pub messages: Vec<Message>,
}

impl Defaults {
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
