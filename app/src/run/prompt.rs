//! Prompts: a conversation through its chat template, or plain text.

use paguro_engine::Picture;
use paguro_model::{
    Model,
    chat::{ChatInput, ChatPrompt},
    tokenizer::SpecialTokens,
};
use serde_json::{Value, json};

use super::images::{self, Attachment, Images};
use crate::failure::{Failure, Outcome};

/// Hint for problems of a template.
const WITHOUT_TEMPLATE: &str = "--raw uses the prompt without the chat template";

/// Style of prompts.
#[derive(Clone, Copy, Debug)]
pub enum Style {
    /// Messages through the model's template, with its switch for thinking if one is set.
    Chat(Option<bool>),
    /// Plain text, with or without special tokens.
    Raw(SpecialTokens),
}

/// Names that templates have for the switch.
const THINKING: [&str; 2] = ["enable_thinking", "thinking"];

/// Returns true if a template has a switch for thinking.
pub fn has_switch(model: &Model) -> bool {
    // `message.thinking` is a field of messages.
    let source =
        model.chat_template.as_ref().map(|template| template.source().replace("message.thinking", ""));
    source.is_some_and(|source| THINKING.iter().any(|name| source.contains(name)))
}

impl Style {
    /// Selects the template if there is one and `raw` is false. With `raw`, special tokens in the text are recognised,
    /// because such prompts are written by hand; for a model without a template they are text.
    ///
    /// # Errors
    /// The template cannot be used, or a system message cannot be expressed.
    pub fn new(model: &Model, raw: bool, system: Option<&str>, think: Option<bool>) -> Outcome<Self> {
        match (&model.chat_template, &model.template_problem) {
            _ if raw => Ok(Self::Raw(SpecialTokens::Parse)),
            (Some(_), _) => Ok(Self::Chat(think)),
            (None, Some(problem)) => Err(Failure::from_error(problem).hint(WITHOUT_TEMPLATE)),
            (None, None) if system.is_some() => {
                Err(Failure::usage("the model has no chat template, so it cannot take a system message")
                    .hint("put the instructions at the start of the prompt"))
            }
            (None, None) => Ok(Self::Raw(SpecialTokens::AsText)),
        }
    }
}

/// Author of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The user.
    User,
    /// The model.
    Assistant,
}

impl Role {
    /// Returns its name in templates and APIs.
    pub fn name(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Assistant => "assistant",
        }
    }
}

/// A conversation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Conversation {
    system: Option<String>,
    turns: Vec<Turn>,
    /// Images for the next message of the user.
    attached: Vec<Attachment>,
}

/// A message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Its author.
    pub role: Role,
    /// Its text.
    pub text: String,
    /// Images before the text.
    pub images: Vec<Attachment>,
}

impl Conversation {
    /// Creates an empty conversation.
    pub fn new(system: Option<String>) -> Self {
        Self { system, ..Self::default() }
    }

    /// Adds a message.
    pub fn push(&mut self, role: Role, text: String) {
        self.turns.push(Turn { role, text, images: Vec::new() });
    }

    /// Adds an image to the next message of the user.
    pub fn attach(&mut self, image: Attachment) {
        self.attached.push(image);
    }

    /// Returns the number of images of the next message.
    pub fn attached(&self) -> usize {
        self.attached.len()
    }

    /// Adds the user's message with the attached images.
    pub fn ask(&mut self, text: String) {
        let images = std::mem::take(&mut self.attached);
        self.turns.push(Turn { role: Role::User, text, images });
    }

    /// Adds the model's answer.
    pub fn answer(&mut self, text: String) {
        self.push(Role::Assistant, text);
    }

    /// Removes the last message if it has this role, and returns its text.
    pub fn take_back(&mut self, role: Role) -> Option<String> {
        self.turns.pop_if(|last| last.role == role).map(|turn| turn.text)
    }

    /// Drops the oldest question and its answer. Returns false if only the current question is left.
    pub fn forget_oldest(&mut self) -> bool {
        let more = self.turns.len() > 2;
        if more {
            self.turns.drain(..2);
        }
        more
    }

    /// Returns the number of messages without the system message.
    pub fn len(&self) -> usize {
        self.turns.len()
    }

    /// Replaces the system message.
    pub fn set_system(&mut self, text: String) {
        self.system = Some(text);
    }

    /// Returns the messages in order, without the system message.
    pub fn turns(&self) -> impl Iterator<Item = &Turn> {
        self.turns.iter()
    }

    /// Returns the system message.
    pub fn system(&self) -> Option<&str> {
        self.system.as_deref()
    }

    fn input(&self, think: Option<bool>) -> ChatInput {
        let message = |role: &str, content: Value| json!({"role": role, "content": content});
        let system = self.system.iter().map(|text| message("system", text.as_str().into()));
        let turns = self.turns.iter();
        let turns = turns.map(|turn| message(turn.role.name(), images::content(&turn.text, &turn.images)));
        let mut input = ChatInput::new(system.chain(turns).collect());
        input.extra =
            think.iter().flat_map(|&think| THINKING.map(|name| (name.to_owned(), think.into()))).collect();
        input
    }

    fn images(&self, model: &Model) -> Outcome<Option<Images<'_>>> {
        Images::new(model, self.turns.iter().flat_map(|turn| &turn.images))
    }

    /// Returns how many of the conversation's `tokens` tokens stay a prefix of its next turns, if the model has states;
    /// see [`Request::lasting_tokens`](paguro_engine::Request::lasting_tokens).
    pub fn lasting_tokens(&self, model: &Model, style: Style, tokens: usize) -> Option<usize> {
        let Style::Chat(think) = style else { return None };
        let template = model.chat_template.as_ref().filter(|_| !model.program.state.is_empty())?;
        let prompt = self.render(model, think, |input| {
            template.prompt(input, &model.tokenizer).map_err(|error| Failure::from_error(&error))
        });
        let (input, prompt) = prompt.ok()?;
        Some(template.lasting_tokens(&input, &prompt, tokens, &model.tokenizer))
    }

    /// Returns the images of a prompt of these tokens.
    ///
    /// # Errors
    /// An image is damaged.
    pub fn pictures(&self, model: &Model, tokens: &[u32]) -> Outcome<Vec<Picture>> {
        self.images(model)?.map_or(Ok(Vec::new()), |images| images.pictures(tokens))
    }

    /// Renders the conversation, and returns the form that the template supports.
    fn render(
        &self,
        model: &Model,
        think: Option<bool>,
        render: impl Fn(&ChatInput) -> Outcome<ChatPrompt>,
    ) -> Outcome<(ChatInput, ChatPrompt)> {
        let input = self.input(think);
        match self.images(model)? {
            Some(images) => images.render(&input, render),
            None => {
                let prompt = render(&input)?;
                Ok((input, prompt))
            }
        }
    }

    /// Returns the tokens of the prompt.
    ///
    /// # Errors
    /// The template refuses the conversation, with its message.
    pub fn tokens(&self, model: &Model, style: Style) -> Outcome<Vec<u32>> {
        match (style, &model.chat_template) {
            (Style::Chat(think), Some(template)) => {
                let (_, prompt) = self.render(model, think, |input| {
                    let prompt = template.prompt(input, &model.tokenizer);
                    prompt.map_err(|error| Failure::from_error(&error).hint(WITHOUT_TEMPLATE))
                })?;
                let images = self.images(model)?;
                let prompt = images.map_or_else(|| prompt.clone(), |images| images.expand(&prompt));
                Ok(model.tokenizer.encode_chat(&prompt))
            }
            _ if self.turns.last().is_some_and(|turn| !turn.images.is_empty()) => {
                Err(Failure::usage("a prompt without a chat template has no place for images")
                    .hint("leave out --raw"))
            }
            (style, _) => {
                let special = if let Style::Raw(special) = style { special } else { SpecialTokens::AsText };
                // Without a template there are no turns; only the last text is used.
                let text = self.turns.last().map_or("", |turn| &turn.text);
                Ok(model.tokenizer.encode_prompt(text, special))
            }
        }
    }
}
