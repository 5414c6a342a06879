//! Requests in the form that all APIs share, and their prompts.

use std::sync::Arc;

use paguro_engine::Grammar;
use paguro_model::{
    Model,
    chat::{ChatInput, ChatPrompt, PICTURE},
    tokenizer::{Gap, SpecialTokens, Tokenizer},
};
use paguro_model_output::Format as OutputFormat;
use serde_json::{Map, Value};

use super::{
    images::{PlacedImage, Placing, plan_images},
    message::{Message, Role, Tool, tool_for_template},
    options::Options,
    reading::{Reading, tools_as_text},
    reasoning::Reasoning,
};
use crate::{
    error::ApiError,
    images::{Image, ImageSettings},
    wire::Tolerance,
};

/// A chat for the model to answer.
#[derive(Clone, Debug, Default)]
pub struct ChatRequest {
    /// The conversation so far.
    pub messages: Vec<Message>,
    /// Tools that the model may call.
    pub tools: Vec<Tool>,
    /// Whether and which tools must be called.
    pub tool_choice: ToolChoice,
    /// True if one answer may have several calls.
    pub parallel_tool_calls: bool,
    /// Form of the answer.
    pub format: Format,
    /// Requested reasoning.
    pub reasoning: Reasoning,
    /// True if the text of reasoning is not part of the answer.
    pub hides_reasoning: bool,
    /// Other variables of the chat template.
    pub template_variables: Map<String, Value>,
    /// True if the answer continues the last message, which is the model's own.
    pub continue_last: bool,
    /// True if the oldest turns are dropped from a chat that exceeds the context.
    pub drops_turns: bool,
    /// True if a model without a chat template continues the text of the last message.
    pub continues_text: bool,
    /// True if arguments of calls are not streamed.
    pub whole_calls: bool,
    /// Sampling and limits.
    pub options: Options,
    /// Collector of ignored fields.
    pub tolerance: Tolerance,
}

/// A text for the model to continue.
#[derive(Clone, Debug)]
pub struct TextRequest {
    /// The text.
    pub prompt: Prompt,
    /// Form of the continuation.
    pub format: Format,
    /// Token limit if neither the request nor the library has one.
    pub default_max_tokens: Option<usize>,
    /// Sampling and limits.
    pub options: Options,
}

/// A prompt that is continued as it stands.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// Text. Special tokens in it are recognised, and the model's initial tokens are added.
    Text(String),
    /// Tokens.
    Tokens(Vec<u32>),
    /// Text with images, each at a [`PICTURE`].
    Images {
        /// The text.
        text: String,
        /// The images.
        images: Vec<Image>,
    },
    /// A gap between two texts. The text that fills it begins with `middle`.
    Gap {
        /// The text before it.
        prefix: String,
        /// The text after it.
        suffix: String,
        /// Beginning of the text in the gap.
        middle: String,
        /// Names and contents of other files.
        files: Vec<(String, String)>,
        /// Field of the request that contains the gap.
        param: &'static str,
    },
}

/// Whether and which tools must be called.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model decides.
    #[default]
    Auto,
    /// No calls.
    None,
    /// At least one call.
    Required,
    /// A call of this tool.
    Named(String),
}

/// Form of an answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Format {
    /// Any text.
    #[default]
    Text,
    /// A JSON object.
    JsonObject,
    /// JSON that fits this schema.
    JsonSchema(Value),
    /// Text that matches this grammar as a whole, without calls or reasoning.
    Whole {
        /// The grammar.
        grammar: Grammar,
        /// Field of the request that contains the grammar.
        param: &'static str,
    },
}

impl Format {
    /// Creates the format of a GBNF or Lark grammar from the field `param`.
    pub fn grammar(text: String, param: &'static str) -> Self {
        Self::Whole { grammar: Grammar::of_text(text), param }
    }
}

impl ChatRequest {
    /// Returns the tokens of the prompt. Headers of images must have been read.
    ///
    /// # Errors
    /// The model has no chat template, or the template refuses these messages.
    pub(super) fn prompt(&self, model: &Model, max_context: usize) -> Result<Vec<u32>, ApiError> {
        Ok(self.tokenize(model, max_context)?.tokens)
    }

    /// Reads the headers of all images.
    ///
    /// # Errors
    /// An image is not supported.
    pub(super) fn plan_images(&mut self, model: &Model, settings: &ImageSettings) -> Result<(), ApiError> {
        let images = self.messages.iter_mut().flat_map(|message| &mut message.images);
        plan_images(images, model, settings)
    }

    /// As [`tokenize`](Self::tokenize), but drops the oldest turns of a chat that leaves no room for an answer in `limit`
    /// tokens, if the request permits that. System messages and the last turn stay.
    pub(super) fn fit(
        &mut self,
        model: &Model,
        max_context: usize,
        limit: usize,
    ) -> Result<TokenizedChat, ApiError> {
        let tokens = match self.tokenize(model, max_context) {
            Err(ApiError::ContextTooLong { tokens, .. }) if self.drops_turns => tokens,
            Ok(chat) if self.drops_turns && chat.tokens.len() >= limit => chat.tokens.len(),
            other => return other,
        };
        let starts: Vec<usize> = (0..self.messages.len())
            .filter(|&at| self.messages[at].role == Role::User)
            .skip_while(|&at| self.messages[..at].iter().all(|message| message.role == Role::System))
            .collect();
        let since = |at: usize| {
            let messages = self.messages.iter().enumerate();
            let kept = messages.filter(|(i, message)| *i >= at || message.role == Role::System);
            Self { messages: kept.map(|(_, message)| message.clone()).collect(), ..self.clone() }
        };
        // The first start from which the rest fits: fewer turns are never longer.
        let fits = |at: usize| match since(at).tokenize(model, max_context) {
            Ok(chat) => Ok(Some(chat).filter(|chat| chat.tokens.len() < limit)),
            Err(ApiError::ContextTooLong { .. }) => Ok(None),
            Err(error) => Err(error),
        };
        let (mut low, mut high, mut best) = (0, starts.len(), None);
        while low < high {
            let middle = low.midpoint(high);
            match fits(starts[middle])? {
                Some(chat) => (high, best) = (middle, Some((starts[middle], chat))),
                None => low = middle + 1,
            }
        }
        let Some((start, chat)) = best else {
            return Err(ApiError::ContextTooLong { tokens, limit });
        };
        let dropped = self.messages[..start].iter().filter(|message| message.role != Role::System).count();
        let why = format_args!("the {dropped} oldest messages exceed the context of {limit} tokens");
        self.tolerance.leave_out("messages", why)?;
        self.messages = since(start).messages;
        Ok(chat)
    }

    /// Returns the tokens of the prompt, and the parser settings of its answer.
    pub(super) fn tokenize(&self, model: &Model, max_context: usize) -> Result<TokenizedChat, ApiError> {
        let offers_tools = self.offered_tools().next().is_some();
        let template = match (&model.tool_template, &model.chat_template, &model.template_problem) {
            (Some(template), ..) if offers_tools => template,
            (_, Some(template), _) => template,
            (_, None, Some(problem)) => {
                return Err(ApiError::invalid("model", format!("the model cannot chat: {problem}")));
            }
            (_, None, None) if self.continues_text && !model.is_encoder() => {
                return self.tokenize_text(model, max_context);
            }
            (_, None, None) => {
                let message = match model.is_encoder() {
                    true => {
                        "the model is an encoder, which reads texts and writes none; /v1/embeddings has its vectors"
                    }
                    false => {
                        "the model has no chat template, so it cannot chat; /v1/completions continues text"
                    }
                };
                return Err(ApiError::invalid("model", message));
            }
        };
        let source = template.source();
        let format = OutputFormat::detect(source);
        let mut extra = self.template_variables.clone();
        let budget = self.reasoning.write(&format, source, &mut extra, &self.tolerance)?;
        let has_place = source.contains("tools");
        let mut messages = if has_place { self.messages.clone() } else { tools_as_text(self) };
        // Templates without a field for reasoning look for it in the content.
        if source.contains("reasoning_content") || source.contains("message.thinking") {
            let answers = messages.len().saturating_sub(usize::from(self.continue_last));
            messages[..answers].iter_mut().for_each(Message::separate_reasoning);
        }
        // An empty message begins a turn as the opening of an answer does.
        let is_new_turn = self.continue_last
            && messages.pop_if(|last| last.content.is_empty() && last.reasoning.is_none()).is_some();
        let mut input =
            ChatInput::new(messages.iter().map(|message| message.for_template(&format, source)).collect());
        input.tools = (offers_tools && has_place)
            .then(|| self.offered_tools().map(|tool| tool_for_template(&tool)).collect());
        input.extra = extra;
        input.add_generation_prompt = !self.continue_last || is_new_turn;
        let render = |input: &ChatInput| -> Result<ChatPrompt, ApiError> {
            if input.add_generation_prompt {
                return Ok(template.prompt(input, &model.tokenizer)?);
            }
            template.continued_prompt(input, &model.tokenizer)?.ok_or_else(|| {
                let message = "the model's chat template changes the last message, so it cannot be continued";
                ApiError::invalid("messages", message)
            })
        };
        let mut images = messages.iter().flat_map(|message| &message.images).peekable();
        let (prompt, full, placing) = if images.peek().is_none() {
            let prompt = render(&input)?;
            check_text(&prompt.text, model, max_context)?;
            (prompt, None, None)
        } else {
            let placing = Placing::new(model, images)?;
            let (rendered, prompt) = placing.render(&input, render)?;
            input = rendered;
            let full = placing.layout.expand(&prompt);
            check_text(&full.text, model, max_context)?;
            (prompt, Some(full), Some(placing))
        };
        let reading = Reading::new(self, format, &prompt.text, budget)?;
        let tokens = model.tokenizer.encode_chat(full.as_ref().unwrap_or(&prompt));
        let images = placing.map_or(Ok(Vec::new()), |placing| placing.find(&tokens))?;
        // Only models with states need the hint: K and V can be shared up to any block.
        let has_states = !model.program.state.is_empty();
        let lasting_tokens = (has_states && input.add_generation_prompt)
            .then(|| template.lasting_tokens(&input, &prompt, tokens.len(), &model.tokenizer));
        Ok(TokenizedChat { tokens, lasting_tokens, reading, images })
    }

    /// Returns the tokens of the last message's text, for a model without a chat template.
    fn tokenize_text(&self, model: &Model, max_context: usize) -> Result<TokenizedChat, ApiError> {
        let Some(last) = self.messages.last() else {
            return Err(ApiError::invalid("messages", "there is no message"));
        };
        if self.messages.len() > 1 {
            self.tolerance.leave_out("system", "the model has no chat template, and so no place for it")?;
        }
        let format = OutputFormat::detect("");
        let budget = self.reasoning.write(&format, "", &mut Map::new(), &self.tolerance)?;
        let prompt = match last.images.is_empty() {
            true => Prompt::Text(last.content.clone()),
            false => Prompt::Images { text: last.content.clone(), images: last.images.clone() },
        };
        let (tokens, images) = prompt.tokens(model, max_context)?;
        let reading = Reading::new(self, format, "", budget)?;
        Ok(TokenizedChat { tokens, lasting_tokens: None, reading, images })
    }
}

/// The prompt of a chat.
pub(super) struct TokenizedChat {
    pub tokens: Vec<u32>,
    /// See [`paguro_engine::Request::lasting_tokens`].
    pub lasting_tokens: Option<usize>,
    pub reading: Reading,
    /// Images and their places among the tokens.
    pub images: Vec<PlacedImage>,
}

/// Refuses a text that cannot fit into the context before it is tokenized, because tokenizing takes time.
///
/// # Errors
/// The text is too long.
pub(crate) fn check_text(text: &str, model: &Model, max_context: usize) -> Result<(), ApiError> {
    // A token has at least one byte.
    if text.len() <= max_context {
        return Ok(());
    }
    let most = model.tokenizer.max_text_bytes(max_context);
    if text.len() <= most {
        return Ok(());
    }
    // Lower bound of the number of tokens.
    let tokens = text.len().div_ceil((most / max_context.max(1)).max(1));
    Err(ApiError::ContextTooLong { tokens, limit: max_context })
}

impl Prompt {
    /// Returns the tokens of the prompt.
    ///
    /// # Errors
    /// The text is too long.
    pub(super) fn tokens(
        self,
        model: &Model,
        max_context: usize,
    ) -> Result<(Vec<u32>, Vec<PlacedImage>), ApiError> {
        let tokens = match self {
            Self::Text(text) => {
                check_text(&text, model, max_context)?;
                model.tokenizer.encode_prompt(&text, SpecialTokens::Parse)
            }
            Self::Tokens(tokens) => tokens,
            Self::Images { text, images } => {
                let placing = Placing::new(model, images.iter())?;
                let text = placing.layout.expand_text(&text);
                check_text(&text, model, max_context)?;
                let tokens = model.tokenizer.encode_prompt(&text, SpecialTokens::Parse);
                let images = placing.find(&tokens)?;
                return Ok((tokens, images));
            }
            Self::Gap { prefix, suffix, middle, files, param } => {
                for text in [&prefix, &suffix, &middle].into_iter().chain(files.iter().map(|file| &file.1)) {
                    check_text(text, model, max_context)?;
                }
                let gap = Gap { prefix: &prefix, suffix: &suffix, middle: &middle, files: &files };
                model.tokenizer.fill_in(&gap).ok_or_else(|| {
                    let message =
                        "the model does not support fill-in-the-middle: its tokenizer has no tokens for it";
                    ApiError::invalid(param, format!("`{param}`: {message}"))
                })?
            }
        };
        Ok((tokens, Vec::new()))
    }

    /// Returns the text of the prompt. An incomplete character at its end is left out, because the answer's text has it.
    pub fn text(self, tokenizer: &Arc<Tokenizer>) -> String {
        match self {
            Self::Text(text) | Self::Gap { prefix: text, .. } => text,
            Self::Images { text, .. } => text.replace(PICTURE, ""),
            Self::Tokens(tokens) => {
                let mut stream = tokenizer.stream();
                tokens.into_iter().map(|token| stream.push(token)).collect()
            }
        }
    }
}

impl ToolChoice {
    /// Parses a mode by its name (`Ok`), or the name of the tool that must be called (`Err`).
    ///
    /// # Errors
    /// An unknown mode, or a tool that is not offered.
    pub fn check(choice: Result<&str, &str>, tools: &[Tool]) -> Result<Self, ApiError> {
        let refuse = |message: String| Err(ApiError::invalid("tool_choice", message));
        match choice {
            Ok("auto") => Ok(Self::Auto),
            Ok("none") => Ok(Self::None),
            Ok("required") if tools.is_empty() => {
                refuse("`tool_choice` is `required`, but there are no `tools`".into())
            }
            Ok("required") => Ok(Self::Required),
            Ok(other) => {
                refuse(format!("`tool_choice` is none, auto, required or a function, not `{other}`"))
            }
            Err(name) if tools.iter().any(|tool| tool.name == name) => Ok(Self::Named(name.to_owned())),
            Err(name) => refuse(format!("`tool_choice` names `{name}`, which is not in `tools`")),
        }
    }
}
