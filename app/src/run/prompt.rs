//! What the model reads: a conversation through its chat template, or the text as it stands.

use paguro_model::{Model, chat::ChatInput, tokenizer::SpecialTokens};

use crate::failure::{Failure, Outcome};

/// What helps against a template.
const WITHOUT_TEMPLATE: &str = "--raw puts the prompt to the model without the chat template";

/// How a prompt is put to the model.
#[derive(Clone, Copy, Debug)]
pub enum Style {
    /// As messages, through the model's template.
    Chat,
    /// As it stands; special tokens in it are recognised or are text.
    Raw(SpecialTokens),
}

impl Style {
    /// Through the template where there is one, unless `raw` is asked for. Who writes `--raw` writes templates by
    /// hand, special tokens and all; a text for a model without template is only a text.
    ///
    /// # Errors
    /// A template that is there but cannot be used; a system message that nothing would carry to the model.
    pub fn new(model: &Model, raw: bool, system: Option<&str>) -> Outcome<Self> {
        match (&model.chat_template, &model.template_problem) {
            _ if raw => Ok(Self::Raw(SpecialTokens::Parse)),
            (Some(_), _) => Ok(Self::Chat),
            (None, Some(problem)) => Err(Failure::from_error(problem).hint(WITHOUT_TEMPLATE)),
            (None, None) if system.is_some() => {
                Err(Failure::usage("the model has no chat template, so it cannot take a system message")
                    .hint("put what it should know at the start of the prompt"))
            }
            (None, None) => Ok(Self::Raw(SpecialTokens::AsText)),
        }
    }
}

/// Author of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The person.
    User,
    /// The model.
    Assistant,
}

impl Role {
    /// Its name in templates and APIs.
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
    /// One that has not begun.
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

    /// Takes back the last message, if it has this role.
    pub fn take_back(&mut self, role: Role) -> Option<String> {
        self.turns.pop_if(|(last, _)| *last == role).map(|(_, text)| text)
    }

    /// Drops the oldest question and its answer. Returns false if there is only the question that waits.
    pub fn forget_oldest(&mut self) -> bool {
        let more = self.turns.len() > 2;
        if more {
            self.turns.drain(..2);
        }
        more
    }

    /// Number of messages, the system's not counted.
    pub fn len(&self) -> usize {
        self.turns.len()
    }

    /// The messages in order, the system's not among them.
    pub fn turns(&self) -> impl Iterator<Item = (Role, &str)> {
        self.turns.iter().map(|(role, text)| (*role, text.as_str()))
    }

    /// The system message.
    pub fn system(&self) -> Option<&str> {
        self.system.as_deref()
    }

    fn input(&self) -> ChatInput {
        let system = self.system.iter().map(|text| ("system", text.as_str()));
        let turns = self.turns().map(|(role, text)| (role.name(), text));
        ChatInput::from_turns(system.chain(turns))
    }

    /// Returns how many of the conversation's `tokens` tokens its next turns begin with, where that matters to the model; see
    /// [`Request::lasting_tokens`](paguro_engine::Request::lasting_tokens).
    pub fn lasting_tokens(&self, model: &Model, style: Style, tokens: usize) -> Option<usize> {
        let template = model.chat_template.as_ref();
        let template =
            template.filter(|_| matches!(style, Style::Chat) && !model.program.state.is_empty())?;
        let input = self.input();
        let prompt = template.prompt(&input, &model.tokenizer).ok()?;
        Some(template.lasting_tokens(&input, &prompt, tokens, &model.tokenizer))
    }

    /// The tokens that the model reads before it answers.
    ///
    /// # Errors
    /// A template that refuses the conversation, with its own words.
    pub fn tokens(&self, model: &Model, style: Style) -> Outcome<Vec<u32>> {
        match (style, &model.chat_template) {
            (Style::Chat, Some(template)) => {
                let prompt = template.prompt(&self.input(), &model.tokenizer);
                let prompt = prompt.map_err(|error| Failure::from_error(&error).hint(WITHOUT_TEMPLATE))?;
                Ok(model.tokenizer.encode_chat(&prompt))
            }
            (style, _) => {
                let special = if let Style::Raw(special) = style { special } else { SpecialTokens::AsText };
                // Without a template there are no turns; only the last text counts.
                let text = self.turns.last().map_or("", |(_, text)| text);
                Ok(model.tokenizer.encode_prompt(text, special))
            }
        }
    }
}
