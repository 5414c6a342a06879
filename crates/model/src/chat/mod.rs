//! Chat templates: jinja2, rendered like Hugging Face's `apply_chat_template`.
//!
//! minijinja compiles and renders. `python` adds functions of Python that minijinja lacks, `json` `tojson`, and `clock`
//! `strftime_now`. [Decision 9](../../../../docs/decisions/0009-chat-templates.md) lists the remaining differences.
//!
//! Templates are untrusted parts of model files. `scan` bounds their depth before compilation, fuel bounds the steps
//! and the bytes of a rendering, and both run on a thread whose stack suffices for these bounds.

mod adapt;
mod clock;
mod json;
mod pictures;
mod prompt;
mod python;
mod scan;

use std::sync::OnceLock;

use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value, syntax::SyntaxConfig};
use serde_json::json;

use adapt::Abilities;
pub use clock::WallTime;
pub use pictures::{ImageTokenCount, PICTURE, PictureLayout, content_parts};
pub use prompt::ChatPrompt;
pub(crate) use prompt::{ControlNames, MARK};

use crate::tokenizer::{SpecialTokens, Tokenizer};

/// Fuel of one rendering: one unit per instruction and per 64 bytes of text, so about 64 MB. A hundred messages use
/// some ten thousand. A template that uses all of it takes some tenths of a second.
const FUEL: u64 = 1_000_000;

/// Maximum fuel of one rendering.
const MAX_FUEL: u64 = 32_000_000;

/// Bytes of the stack on which templates are compiled and rendered. The deepest templates that `scan` accepts need a
/// tenth of it. Memory that is not used is not allocated.
const STACK: usize = 64 << 20;

/// A compiled chat template.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    source: String,
    env: Environment<'static>,
    tokens: TemplateTokens,
    /// Determined at the first prompt.
    abilities: OnceLock<Abilities>,
    /// Names that messages must not produce, from the tokenizer of the first prompt.
    names: OnceLock<ControlNames>,
}

/// Special tokens for templates, by their names in `tokenizer_config.json`. A token that is `None` is undefined in the
/// template.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TemplateTokens {
    /// `bos_token`
    pub bos: Option<String>,
    /// `eos_token`
    pub eos: Option<String>,
    /// `pad_token`
    pub pad: Option<String>,
    /// `unk_token`
    pub unk: Option<String>,
}

/// Input of a template.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatInput {
    /// The messages: an array of objects with `role`, `content` and further fields for the template.
    pub messages: serde_json::Value,
    /// The tools that are offered, as JSON schemas; `none` in the template where absent.
    pub tools: Option<serde_json::Value>,
    /// True if the text ends with the opening of an answer.
    pub add_generation_prompt: bool,
    /// Other variables: `enable_thinking`, `documents`.
    pub extra: serde_json::Map<String, serde_json::Value>,
    /// Time for `strftime_now`; `None` for the system's clock in the local time zone.
    pub now: Option<WallTime>,
}

impl ChatInput {
    /// Returns a chat that the model answers next.
    pub fn new(messages: serde_json::Value) -> Self {
        Self { messages, tools: None, add_generation_prompt: true, extra: serde_json::Map::new(), now: None }
    }

    /// Creates an input from roles and texts.
    pub fn from_turns<'t>(turns: impl IntoIterator<Item = (&'t str, &'t str)>) -> Self {
        let message = |(role, content)| json!({"role": role, "content": content});
        Self::new(turns.into_iter().map(message).collect())
    }
}

/// Reason for which a template does not compile or render.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// The syntax is invalid in jinja2.
    #[error("the chat template is malformed: {0}")]
    Syntax(String),
    /// The template exceeds a bound that is far beyond ordinary templates.
    #[error("the chat template is too large: {0}")]
    TooLarge(String),
    /// The template refuses the chat with this message of `raise_exception`.
    #[error("{0}")]
    Raised(String),
    /// The template fails for this chat.
    #[error("the chat template failed: {0}")]
    Failed(String),
    /// The template uses more steps or text than any chat needs.
    #[error("the chat template takes too long or makes too much text")]
    TooExpensive,
}

const NAME: &str = "chat_template";

/// The mark that editors of Windows write at the beginning of a file. It would be text of every prompt.
pub(crate) const BYTE_ORDER_MARK: char = '\u{feff}';

impl ChatTemplate {
    /// Compiles a template.
    ///
    /// # Errors
    /// [`TemplateError::Syntax`].
    pub fn new(source: &str, tokens: TemplateTokens) -> Result<Self, TemplateError> {
        let source = source.strip_prefix(BYTE_ORDER_MARK).unwrap_or(source);
        let prepared = scan::prepare(source)?;
        let env = on_large_stack(|| {
            let mut env = environment()?;
            env.add_template_owned(NAME, prepared)?;
            Ok::<_, Error>(env)
        })?;
        let env = env.map_err(|error| TemplateError::Syntax(message(&error)))?;
        Ok(Self {
            source: source.to_owned(),
            env,
            tokens,
            abilities: OnceLock::new(),
            names: OnceLock::new(),
        })
    }

    /// Returns the template as it was given.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders a chat for a model. Messages that the template refuses or loses are converted to a supported form, and
    /// text of messages never becomes a control token or a marker of the template. `tokenizer` must be the same for all
    /// calls.
    ///
    /// # Errors
    /// [`TemplateError`], if no form is supported.
    pub fn prompt(&self, input: &ChatInput, tokenizer: &Tokenizer) -> Result<ChatPrompt, TemplateError> {
        Ok(ChatPrompt::from_marked(&self.marked(input, tokenizer)?.0))
    }

    /// Renders a chat whose last message the answer continues: the prompt ends with the content of that message, as it
    /// is. Returns `None` if the template leaves the end of the content out.
    ///
    /// # Errors
    /// As for [`prompt`](Self::prompt).
    pub fn continued_prompt(
        &self,
        input: &ChatInput,
        tokenizer: &Tokenizer,
    ) -> Result<Option<ChatPrompt>, TemplateError> {
        let mut messages = prompt::without_bounds(&input.messages);
        let last = messages.as_array_mut().and_then(|messages| messages.last_mut());
        let Some(Some(serde_json::Value::String(content))) = last.map(|last| last.get_mut("content")) else {
            return Ok(None);
        };
        let bounded = prompt::bounded(content);
        let content = std::mem::replace(content, bounded);
        let input = ChatInput { messages, add_generation_prompt: false, ..input.clone() };
        let (marked, names) = self.marked(&input, tokenizer)?;
        Ok(prompt::up_to_bound(&marked, &names.mark_own(&content)).map(|text| ChatPrompt::from_marked(&text)))
    }

    /// Renders a chat with marks before control tokens' names in messages.
    fn marked(
        &self,
        input: &ChatInput,
        tokenizer: &Tokenizer,
    ) -> Result<(String, &ControlNames), TemplateError> {
        let abilities = self.abilities.get_or_init(|| Abilities::of(self));
        let names = self.names.get_or_init(|| tokenizer.control_names(&self.source));
        let extra = input.extra.iter().map(|(name, value)| (name.clone(), names.mark(value)));
        let marked = ChatInput {
            messages: names.mark(&abilities.adapt(&input.messages)),
            tools: input.tools.as_ref().map(|tools| names.mark(tools)),
            extra: extra.collect(),
            ..*input
        };
        Ok((self.render(&marked)?, names))
    }

    /// Returns the number of prompt tokens that later turns of the chat share: those before the opening of the answer,
    /// which a template may render differently once the answer exists. `input` was rendered as `prompt`, of `tokens`
    /// tokens.
    pub fn lasting_tokens(
        &self,
        input: &ChatInput,
        prompt: &ChatPrompt,
        tokens: usize,
        tokenizer: &Tokenizer,
    ) -> usize {
        let input = ChatInput { add_generation_prompt: false, ..input.clone() };
        let Ok(history) = self.prompt(&input, tokenizer) else { return tokens };
        let mut pairs = prompt.text.char_indices().zip(history.text.chars());
        let parted = pairs.find(|((_, ours), theirs)| ours != theirs);
        let parted = parted.map_or(history.text.len().min(prompt.text.len()), |((at, _), _)| at);
        // The last shared characters may be a part of a token that continues after them.
        let rest = tokenizer.encode(&prompt.text[parted..], SpecialTokens::Parse).len();
        tokens.saturating_sub(rest + usize::from(rest > 0))
    }

    /// Renders a chat as it is.
    ///
    /// # Errors
    /// [`TemplateError`], where Python would raise.
    pub fn render(&self, input: &ChatInput) -> Result<String, TemplateError> {
        let optional =
            |value: &Option<serde_json::Value>| value.as_ref().map_or(Value::from(()), json::to_value);
        let now = input.now.unwrap_or_else(WallTime::now);
        let mut variables = vec![
            ("messages".to_owned(), json::to_value(&input.messages)),
            ("tools".to_owned(), optional(&input.tools)),
            ("documents".to_owned(), Value::from(())),
            ("add_generation_prompt".to_owned(), Value::from(input.add_generation_prompt)),
            ("strftime_now".to_owned(), Value::from_function(move |format: &str| now.format(format))),
        ];
        let tokens = &self.tokens;
        for (name, token) in [
            ("bos_token", &tokens.bos),
            ("eos_token", &tokens.eos),
            ("pad_token", &tokens.pad),
            ("unk_token", &tokens.unk),
        ] {
            variables.extend(token.as_deref().map(|token| (name.to_owned(), Value::from(token))));
        }
        variables.extend(input.extra.iter().map(|(name, value)| (name.clone(), json::to_value(value))));
        let mut env = self.env.clone();
        env.set_fuel(Some(fuel(&input.messages)));
        let rendered = on_large_stack(|| env.get_template(NAME)?.render(Value::from_pairs(variables)))?;
        rendered.map_err(|error| failure(&error))
    }
}

/// Runs `work` on a thread with a stack of [`STACK`] bytes. A panic, which minijinja has for some hostile templates,
/// is an error.
fn on_large_stack<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T, TemplateError> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("chat template".into()).stack_size(STACK);
        let thread = thread
            .spawn_scoped(scope, work)
            .map_err(|error| TemplateError::Failed(format!("no thread can be started: {error}")))?;
        thread.join().map_err(|_| TemplateError::Failed("minijinja panicked".into()))
    })
}

/// Returns the fuel for a chat. Honest templates append message after message to one string, or compare each message
/// with each other: both grow with the square of the chat. So does the fuel, up to a point.
fn fuel(messages: &serde_json::Value) -> u64 {
    fn text(value: &serde_json::Value) -> usize {
        match value {
            serde_json::Value::String(text) => text.len(),
            serde_json::Value::Array(items) => items.iter().map(text).sum(),
            serde_json::Value::Object(entries) => {
                entries.iter().map(|(key, value)| key.len() + text(value)).sum()
            }
            _ => 8,
        }
    }
    let count = messages.as_array().map_or(1, Vec::len) as u64;
    let steps = count.saturating_pow(2).saturating_mul(20);
    let bytes = (text(messages) as u64).saturating_mul(count).saturating_mul(2);
    FUEL.saturating_add(steps).saturating_add(bytes / 64).min(MAX_FUEL)
}

fn environment() -> Result<Environment<'static>, Error> {
    let mut env = Environment::new();
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    python::register(&mut env);
    Ok(env)
}

fn failure(error: &Error) -> TemplateError {
    let mut source: Option<&dyn std::error::Error> = Some(error);
    while let Some(current) = source {
        if let Some(python::Raised(message)) = current.downcast_ref() {
            return TemplateError::Raised(message.clone());
        }
        if current.downcast_ref::<Error>().is_some_and(|error| error.kind() == ErrorKind::OutOfFuel) {
            return TemplateError::TooExpensive;
        }
        source = current.source();
    }
    TemplateError::Failed(message(error))
}

fn message(error: &Error) -> String {
    error.detail().map_or_else(|| error.kind().to_string(), str::to_owned)
}
