//! Chat templates: jinja2, rendered exactly as Hugging Face's `apply_chat_template` does.
//!
//! minijinja evaluates; what it evaluates is the template translated so that Python's semantics hold: `lexer` and
//! `translate` read jinja2's language (whitespace control included) and write minijinja's, with operators and
//! method calls as functions of `operators` and `methods`; `filters`, `sequences` and `checks` replace
//! minijinja's filters and tests. Templates come from model files, so they are not trusted: fuel bounds their steps,
//! a budget bounds what they make.

mod checks;
mod clock;
mod expression;
mod filters;
mod json;
mod lexer;
mod methods;
mod operators;
mod percent;
mod sequences;
mod text;
mod translate;
mod values;

use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State, Value, value::Rest};
use serde_json::json;

pub use clock::WallTime;

/// Steps that one rendering may take; a hundred messages take some ten thousand.
const FUEL: u64 = 10_000_000;

/// Bytes that one rendering may make.
const BUDGET: usize = 256 << 20;

/// The longest template; the largest known are 30 KB.
const MAX_SOURCE: usize = 4 << 20;

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    source: String,
    env: Environment<'static>,
    tokens: TemplateTokens,
}

/// The special tokens that templates write, by their names in `tokenizer_config.json`. Those that are `None` are
/// undefined in the template.
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

/// What a template renders.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatInput {
    /// The messages: an array of objects with `role`, `content` and whatever else the template knows.
    pub messages: serde_json::Value,
    /// The tools that are offered, as JSON schemas; `none` in the template where absent.
    pub tools: Option<serde_json::Value>,
    /// Whether the text ends with the beginning of an answer.
    pub add_generation_prompt: bool,
    /// Other variables: `enable_thinking`, `documents`.
    pub extra: serde_json::Map<String, serde_json::Value>,
    /// What `strftime_now` shows; the system's clock in UTC where absent.
    pub now: Option<WallTime>,
}

impl ChatInput {
    /// A chat that the model answers next.
    pub fn new(messages: serde_json::Value) -> Self {
        Self { messages, tools: None, add_generation_prompt: true, extra: serde_json::Map::new(), now: None }
    }

    /// The same from roles and texts.
    pub fn from_turns<'t>(turns: impl IntoIterator<Item = (&'t str, &'t str)>) -> Self {
        let message = |(role, content)| json!({"role": role, "content": content});
        Self::new(turns.into_iter().map(message).collect())
    }
}

/// Why a template does not compile or render.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// It is not a template that jinja2 would take.
    #[error("the chat template is malformed: {0}")]
    Syntax(String),
    /// It refuses the chat, by `raise_exception`: this is what it says.
    #[error("{0}")]
    Raised(String),
    /// It does something that is not possible, with this chat.
    #[error("the chat template failed: {0}")]
    Failed(String),
    /// It takes more steps, or makes more text, than any chat needs.
    #[error("the chat template takes too long or makes too much text")]
    TooExpensive,
}

const NAME: &str = "chat_template";

impl ChatTemplate {
    /// Compiles a template.
    ///
    /// # Errors
    /// [`TemplateError::Syntax`].
    pub fn new(source: &str, tokens: TemplateTokens) -> Result<Self, TemplateError> {
        if source.len() > MAX_SOURCE {
            return Err(TemplateError::Syntax(format!("it has {} bytes", source.len())));
        }
        let translated =
            lexer::tokenize(source).and_then(translate::translate).map_err(TemplateError::Syntax)?;
        let mut env = environment();
        env.add_template_owned(NAME, translated).map_err(|error| TemplateError::Syntax(message(&error)))?;
        Ok(Self { source: source.to_owned(), env, tokens })
    }

    /// The template as it was given.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders a chat.
    ///
    /// # Errors
    /// [`TemplateError`], where Python would raise.
    pub fn render(&self, input: &ChatInput) -> Result<String, TemplateError> {
        let optional =
            |value: &Option<serde_json::Value>| value.as_ref().map_or(Value::from(()), values::from_json);
        let now = input.now.unwrap_or_else(WallTime::now_utc);
        let mut variables = vec![
            ("messages".to_owned(), values::from_json(&input.messages)),
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
        variables.extend(input.extra.iter().map(|(name, value)| (name.clone(), values::from_json(value))));
        let (fuel, budget) = limits(&input.messages);
        variables.push((values::BUDGET.to_owned(), Value::from(budget)));
        let mut env = self.env.clone();
        env.set_fuel(Some(fuel));
        let template = env.get_template(NAME).map_err(|error| failure(&error))?;
        template.render(Value::from_pairs(variables)).map_err(|error| failure(&error))
    }
}

/// How many steps and bytes a chat may take. Honest templates append message after message to one string, or compare
/// each message with each other: both grow with the square of the chat. So do the limits, up to a point.
fn limits(messages: &serde_json::Value) -> (u64, usize) {
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
    let count = messages.as_array().map_or(1, Vec::len);
    let fuel = FUEL.saturating_add((count as u64).saturating_pow(2).saturating_mul(50)).min(20 * FUEL);
    let budget =
        BUDGET.saturating_add(text(messages).saturating_mul(count).saturating_mul(16)).min(16 * BUDGET);
    (fuel, budget)
}

fn environment() -> Environment<'static> {
    let mut env = Environment::new();
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_formatter(|out: &mut Output, state: &mut State, value: &Value| {
        values::with_text(state, value, |state, text| {
            values::charge(state, text.len())?;
            out.write_str(text).map_err(Error::from)
        })
    });
    operators::register(&mut env);
    filters::register(&mut env);
    checks::register(&mut env);
    env.add_function("range", |state: &mut State, arguments: Rest<Value>| {
        sequences::range(state, &arguments)
    });
    env.add_function("dict", |state: &mut State, arguments: Rest<minijinja::value::ValueOrKwargs>| {
        operators::dict(state, &arguments.into_values())
    });
    env.add_function("raise_exception", |state: &mut State, message: &Value| {
        let message = values::to_text(state, message)?;
        Err::<Value, Error>(Error::new(ErrorKind::InvalidOperation, "raised").with_source(Raised(message)))
    });
    env
}

/// What `raise_exception` raises.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn failure(error: &Error) -> TemplateError {
    let mut source: Option<&dyn std::error::Error> = Some(error);
    while let Some(current) = source {
        if let Some(Raised(message)) = current.downcast_ref() {
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
