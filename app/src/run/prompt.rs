//! What the model reads: a conversation through its chat template, or the text as it stands.

use paguro_model::{
    Model,
    chat::{ChatInput, ChatTemplate},
    tokenizer::SpecialTokens,
};

use crate::failure::{Failure, Outcome};

/// What helps against a template.
const WITHOUT_TEMPLATE: &str = "--raw puts the prompt to the model without the chat template";

/// How a prompt is put to the model.
#[derive(Clone, Copy, Debug)]
pub enum Style<'a> {
    /// As messages.
    Chat(&'a ChatTemplate),
    /// As it stands; special tokens in it are recognised or are text.
    Raw(SpecialTokens),
}

impl<'a> Style<'a> {
    /// Through the template where there is one, unless `raw` is asked for. Who writes `--raw` writes templates by
    /// hand, special tokens and all; a text for a model without template is only a text.
    ///
    /// # Errors
    /// A template that is there but cannot be used; a system message that nothing would carry to the model.
    pub fn new(model: &'a Model, raw: bool, system: Option<&str>) -> Outcome<Self> {
        match (&model.chat_template, &model.template_problem) {
            _ if raw => Ok(Self::Raw(SpecialTokens::Parse)),
            (Some(template), _) => Ok(Self::Chat(template)),
            (None, Some(problem)) => Err(Failure::from_error(problem).hint(WITHOUT_TEMPLATE)),
            (None, None) if system.is_some() => {
                Err(Failure::usage("the model has no chat template, so it cannot take a system message")
                    .hint("put what it should know at the start of the prompt"))
            }
            (None, None) => Ok(Self::Raw(SpecialTokens::AsText)),
        }
    }
}

/// A conversation.
#[derive(Clone, Debug, Default)]
pub struct Conversation {
    system: Option<String>,
    /// User and assistant in turn.
    turns: Vec<(&'static str, String)>,
}

impl Conversation {
    /// One that has not begun.
    pub fn new(system: Option<String>) -> Self {
        Self { system, turns: Vec::new() }
    }

    /// Adds the user's message.
    pub fn ask(&mut self, text: String) {
        self.turns.push(("user", text));
    }

    /// Adds the model's answer.
    pub fn answer(&mut self, text: String) {
        self.turns.push(("assistant", text));
    }

    /// Takes back the last message, which got no answer.
    pub fn take_back(&mut self) {
        self.turns.pop();
    }

    /// Forgets the oldest question and its answer. `false` if there is only the question that waits.
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

    /// The system message.
    pub fn system(&self) -> Option<&str> {
        self.system.as_deref()
    }

    /// The tokens that the model reads before it answers.
    ///
    /// # Errors
    /// A template that refuses the conversation, with its own words.
    pub fn tokens(&self, model: &Model, style: Style<'_>) -> Outcome<Vec<u32>> {
        match style {
            Style::Chat(template) => {
                let system = self.system.iter().map(|text| ("system", text.as_str()));
                let turns = self.turns.iter().map(|(role, text)| (*role, text.as_str()));
                let input = ChatInput::from_turns(system.chain(turns));
                let prompt = template.prompt(&input, &model.tokenizer);
                let prompt = prompt.map_err(|error| Failure::from_error(&error).hint(WITHOUT_TEMPLATE))?;
                Ok(model.tokenizer.encode_chat(&prompt))
            }
            Style::Raw(special) => {
                // Without a template there are no turns; only the last text counts.
                let text = self.turns.last().map_or("", |(_, text)| text);
                Ok(model.tokenizer.encode_prompt(text, special))
            }
        }
    }
}
