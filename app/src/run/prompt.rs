//! Prompts: a conversation through its chat template, or plain text.

use paguro_model::{Model, chat::ChatInput, tokenizer::SpecialTokens};

use crate::failure::{Failure, Outcome};

/// Hint for problems of a template.
const WITHOUT_TEMPLATE: &str = "--raw uses the prompt without the chat template";

/// Style of prompts.
#[derive(Clone, Copy, Debug)]
pub enum Style {
    /// Messages through the model's template.
    Chat,
    /// Plain text, with or without special tokens.
    Raw(SpecialTokens),
}

impl Style {
    /// Selects the template if there is one and `raw` is false. With `raw`, special tokens in the text are recognised,
    /// because such prompts are written by hand; for a model without a template they are text.
    ///
    /// # Errors
    /// The template cannot be used, or a system message cannot be expressed.
    pub fn new(model: &Model, raw: bool, system: Option<&str>) -> Outcome<Self> {
        match (&model.chat_template, &model.template_problem) {
            _ if raw => Ok(Self::Raw(SpecialTokens::Parse)),
            (Some(_), _) => Ok(Self::Chat),
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
    turns: Vec<(Role, String)>,
}

impl Conversation {
    /// Creates an empty conversation.
    pub fn new(system: Option<String>) -> Self {
        Self { system, turns: Vec::new() }
    }

    /// Adds a message.
    pub fn push(&mut self, role: Role, text: String) {
        self.turns.push((role, text));
    }

    /// Adds the user's message.
    pub fn ask(&mut self, text: String) {
        self.push(Role::User, text);
    }

    /// Adds the model's answer.
    pub fn answer(&mut self, text: String) {
        self.push(Role::Assistant, text);
    }

    /// Removes the last message if it has this role, and returns its text.
    pub fn take_back(&mut self, role: Role) -> Option<String> {
        self.turns.pop_if(|(last, _)| *last == role).map(|(_, text)| text)
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
    pub fn turns(&self) -> impl Iterator<Item = (Role, &str)> {
        self.turns.iter().map(|(role, text)| (*role, text.as_str()))
    }

    /// Returns the system message.
    pub fn system(&self) -> Option<&str> {
        self.system.as_deref()
    }

    fn input(&self) -> ChatInput {
        let system = self.system.iter().map(|text| ("system", text.as_str()));
        let turns = self.turns().map(|(role, text)| (role.name(), text));
        ChatInput::from_turns(system.chain(turns))
    }

    /// Returns how many of the conversation's `tokens` tokens stay a prefix of its next turns, if the model has states;
    /// see [`Request::lasting_tokens`](paguro_engine::Request::lasting_tokens).
    pub fn lasting_tokens(&self, model: &Model, style: Style, tokens: usize) -> Option<usize> {
        let template = model.chat_template.as_ref();
        let template =
            template.filter(|_| matches!(style, Style::Chat) && !model.program.state.is_empty())?;
        let input = self.input();
        let prompt = template.prompt(&input, &model.tokenizer).ok()?;
        Some(template.lasting_tokens(&input, &prompt, tokens, &model.tokenizer))
    }

    /// Returns the tokens of the prompt.
    ///
    /// # Errors
    /// The template refuses the conversation, with its message.
    pub fn tokens(&self, model: &Model, style: Style) -> Outcome<Vec<u32>> {
        match (style, &model.chat_template) {
            (Style::Chat, Some(template)) => {
                let prompt = template.prompt(&self.input(), &model.tokenizer);
                let prompt = prompt.map_err(|error| Failure::from_error(&error).hint(WITHOUT_TEMPLATE))?;
                Ok(model.tokenizer.encode_chat(&prompt))
            }
            (style, _) => {
                let special = if let Style::Raw(special) = style { special } else { SpecialTokens::AsText };
                // Without a template there are no turns; only the last text is used.
                let text = self.turns.last().map_or("", |(_, text)| text);
                Ok(model.tokenizer.encode_prompt(text, special))
            }
        }
    }
}
