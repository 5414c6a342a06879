//! Parsing of an answer into text, reasoning and tool calls.

use std::sync::Arc;

use paguro_engine::ThoughtLimit;
use paguro_model::tokenizer::{SpecialTokens, Tokenizer};
use paguro_model_output::{
    AnswerRules, Format, OfferedTool, OutputParser, ParserOptions, Piece, ReadTool, Thought, instructions,
    write_calls,
};

use super::{ChatRequest, Delta, Message, Role, Tool, ToolChoice};
use crate::{error::ApiError, ids};

/// Parser settings of an answer.
#[derive(Clone, Debug)]
pub(super) struct Reading {
    format: Format,
    options: ParserOptions,
    /// Place of reasoning in the template.
    pub thought: Thought,
    /// Maximum tokens of reasoning.
    budget: Option<usize>,
}

impl Reading {
    /// Creates the settings for a model's output format and a prompt.
    ///
    /// # Errors
    /// Tools are offered, and the model's call format is not supported.
    pub fn new(
        request: &ChatRequest,
        format: Format,
        prompt: &str,
        budget: Option<usize>,
    ) -> Result<Self, ApiError> {
        let tools: Arc<[_]> =
            request.offered_tools().map(|tool| ReadTool::new(tool.name, tool.parameters)).collect();
        if !tools.is_empty() {
            format.calls().map_err(|error| ApiError::invalid("tools", error.to_string()))?;
        }
        let thought = match format.thought(prompt) {
            Thought::Optional if request.continue_last => Thought::None,
            // The template has switched reasoning off.
            Thought::Optional if request.reasoning.enabled == Some(false) && budget.is_none() => {
                Thought::None
            }
            thought => thought,
        };
        let options = ParserOptions {
            split_reasoning: true,
            in_reasoning: thought == Thought::Begun,
            in_answer: format.in_answer(prompt),
            tools,
            // A grammar allows the model's own call format, and JSON that is not a call.
            lenient: !request.is_bounded(),
            stream_arguments: !request.whole_calls,
        };
        Ok(Self { format, options, thought, budget })
    }

    /// Returns the control tokens that must appear in the text.
    pub fn shown_tokens(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let ids = self.format.markers().filter_map(|marker| tokenizer.token_id(marker));
        ids.filter(|&id| tokenizer.is_special(id)).collect()
    }

    /// Returns the limit of the reasoning, if there is one.
    pub fn thought_limit(&self, tokenizer: &Tokenizer) -> Option<ThoughtLimit> {
        let max_tokens = self.budget.filter(|_| self.thought != Thought::None)?;
        let (open, close) = self.format.tags()?;
        let closing = self.format.closing()?;
        Some(ThoughtLimit {
            max_tokens,
            begun: self.thought == Thought::Begun,
            open: open.to_owned(),
            close: close.to_owned(),
            closing: tokenizer.encode(&closing, SpecialTokens::Parse),
        })
    }

    /// Returns the grammar of an answer in the model's output format.
    ///
    /// # Errors
    /// Tools are offered, and the model's call format is not supported.
    pub fn grammar(&self, rules: &AnswerRules<'_>, tokenizer: &Tokenizer) -> Result<String, ApiError> {
        let control = |name: &str| tokenizer.token_id(name).filter(|&id| tokenizer.is_special(id));
        rules.grammar(&self.format, control).map_err(|error| ApiError::invalid("tools", error.to_string()))
    }

    /// Returns true if the prompt has begun the text of the answer.
    pub fn in_answer(&self) -> bool {
        self.options.in_answer
    }

    /// Creates a parser of one answer.
    pub fn reader(&self) -> Reader {
        Reader { parser: OutputParser::new(self.format, self.options.clone()), calls: 0 }
    }
}

/// Parser of one answer.
#[derive(Debug)]
pub(super) struct Reader {
    parser: OutputParser,
    /// Number of calls so far.
    pub calls: usize,
}

impl Reader {
    /// Parses more text, and returns the deltas that are certain.
    pub fn push(&mut self, text: &str) -> Vec<Delta> {
        let pieces = self.parser.push(text);
        deltas(pieces, &mut self.calls)
    }

    /// Returns the remaining deltas and the number of calls. `cut` is true if the answer did not end by itself.
    pub fn finish(mut self, cut: bool) -> (Vec<Delta>, usize) {
        let deltas = deltas(self.parser.finish(cut), &mut self.calls);
        (deltas, self.calls)
    }

    /// Returns true within reasoning.
    pub fn in_reasoning(&self) -> bool {
        self.parser.in_reasoning()
    }
}

fn deltas(pieces: Vec<Piece>, calls: &mut usize) -> Vec<Delta> {
    let delta = |piece| match piece {
        Piece::Reasoning(text) => Some(Delta::Reasoning(text)),
        Piece::Text(text) => Some(Delta::Text(text)),
        Piece::CallBegin { name } => {
            *calls += 1;
            Some(Delta::ToolCall { index: *calls - 1, id: ids::new("call_"), name })
        }
        Piece::Arguments(text) => Some(Delta::ToolArguments { index: *calls - 1, text }),
        Piece::CallEnd { .. } => None,
    };
    pieces.into_iter().filter_map(delta).collect()
}

/// Returns the messages for a chat template without support for tools: tools, calls and results become text.
pub(super) fn tools_as_text(request: &ChatRequest) -> Vec<Message> {
    let mut messages: Vec<_> = request.messages.iter().map(Message::without_calls).collect();
    let tools: Vec<_> = request.offered_tools().collect();
    if !tools.is_empty() {
        let text = instructions(&tools);
        match messages.first_mut().filter(|first| first.role == Role::System) {
            Some(system) => system.content = [&system.content, "\n\n", &text].concat(),
            None => messages.insert(0, Message { role: Role::System, content: text, ..Message::default() }),
        }
    }
    messages
}

impl ChatRequest {
    /// Returns the tools that the model may call.
    pub(super) fn offered_tools(&self) -> impl Iterator<Item = OfferedTool<'_>> {
        let may = |tool: &&Tool| match &self.tool_choice {
            ToolChoice::Auto | ToolChoice::Required => true,
            ToolChoice::None => false,
            ToolChoice::Named(name) => tool.name == *name,
        };
        self.tools.iter().filter(may).map(|tool| OfferedTool {
            name: &tool.name,
            description: tool.description.as_deref(),
            parameters: tool.parameters.as_ref(),
        })
    }
}

impl Message {
    /// Returns the message with calls and results as text.
    fn without_calls(&self) -> Self {
        let calls = self.tool_calls.iter().map(|call| (call.name.as_str(), call.arguments.as_str()));
        let content = match self.role {
            Role::Tool => {
                let name = self.name.as_deref().unwrap_or("the call");
                format!("Result of {name}:\n{}", self.content)
            }
            _ if self.tool_calls.is_empty() => self.content.clone(),
            _ => write_calls(&self.content, calls),
        };
        let role = if self.role == Role::Tool { Role::User } else { self.role };
        let (images, reasoning) = (self.images.clone(), self.reasoning.clone());
        Self { role, content, images, reasoning, ..Self::default() }
    }
}
