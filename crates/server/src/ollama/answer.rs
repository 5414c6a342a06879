//! What `/api/chat` and `/api/generate` answer, at once or line by line.

use axum::response::{IntoResponse, Response};
use paguro_model::tokenizer::Tokenizer;
use serde::Serialize;
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::{
    error::ErrorBody,
    types::{End, now, rename},
};
use crate::{
    error::ApiError,
    extract::Json,
    generate::{Delta, Generating, Piece, TokenLogprob},
    output::one_line,
    stream::{line, lines},
};

/// An answer, or a line of one.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OllamaAnswer)]
pub struct Answer {
    /// The model's name, as it was asked for.
    model: String,
    /// When this was written.
    created_at: String,
    /// Of `/api/chat`: the message, or what comes next in it.
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<AnswerMessage>,
    /// Of `/api/generate`: the text, or what comes next in it.
    #[serde(skip_serializing_if = "Option::is_none")]
    response: Option<String>,
    /// Of `/api/generate`: what the model thought.
    #[serde(skip_serializing_if = "Option::is_none")]
    thinking: Option<String>,
    /// Log-probabilities of the tokens, if asked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    logprobs: Vec<Logprob>,
    /// Whether this is the end.
    done: bool,
    #[serde(flatten)]
    end: Option<End>,
}

/// What the model says.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OllamaAnswerMessage)]
pub struct AnswerMessage {
    /// Always `assistant`.
    role: &'static str,
    /// The text.
    content: String,
    /// What the model thought.
    #[serde(skip_serializing_if = "Option::is_none")]
    thinking: Option<String>,
    /// What it calls.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<AnswerToolCall>,
}

/// A call.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OllamaAnswerToolCall)]
pub struct AnswerToolCall {
    /// Names the call.
    id: String,
    /// What is called.
    function: AnswerFunction,
}

/// What is called.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OllamaAnswerFunction)]
pub struct AnswerFunction {
    /// Counts the calls of an answer from 0.
    index: usize,
    /// The tool's name.
    name: String,
    /// Its arguments.
    #[schema(value_type = Object)]
    arguments: Box<RawValue>,
}

/// A token with its log-probability.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OllamaLogprob)]
pub struct Logprob {
    #[serde(flatten)]
    token: BareLogprob,
    /// The best tokens in its place, best first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    top_logprobs: Vec<BareLogprob>,
}

/// A token with its log-probability, and nothing else.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OllamaBareLogprob)]
pub struct BareLogprob {
    /// Its text.
    token: String,
    /// Natural logarithm of its probability.
    logprob: f32,
    /// Its bytes, which may be no whole characters.
    bytes: Vec<u8>,
}

impl BareLogprob {
    fn of(tokenizer: &Tokenizer, token: u32, logprob: f32) -> Self {
        let bytes = tokenizer.token_bytes(token).to_vec();
        Self { token: String::from_utf8_lossy(&bytes).into_owned(), logprob, bytes }
    }
}

/// Which of the two endpoints answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    Chat,
    Generate,
}

/// What has come since the last line.
#[derive(Default)]
struct Part {
    text: String,
    thinking: String,
    calls: Vec<AnswerToolCall>,
    logprobs: Vec<Logprob>,
}

/// An answer that is being written.
pub struct AnswerWriter {
    pub endpoint: Endpoint,
    /// The model's name, as it was asked for.
    pub model: String,
}

impl AnswerWriter {
    /// The answer as a whole, or line by line.
    ///
    /// # Errors
    /// The request failed.
    pub async fn write(self, mut generating: Generating, stream: bool) -> Result<Response, ApiError> {
        if stream {
            let silence = line(&self.line(Part::default(), None));
            return Ok(lines(Some(Box::new(move || silence.clone())), move |lines| async move {
                loop {
                    let mut part = Part::default();
                    match part.next(&mut generating).await {
                        Ok(None) => lines.line(&self.line(part, None)).await,
                        Ok(Some(end)) => return lines.line(&self.line(part, Some(end))).await,
                        // Too late for a status.
                        Err(error) => return lines.line(&ErrorBody::new(&rename(error))).await,
                    }
                }
            }));
        }
        let mut part = Part::default();
        loop {
            if let Some(end) = part.next(&mut generating).await.map_err(rename)? {
                return Ok(Json(self.line(part, Some(end))).into_response());
            }
        }
    }

    /// The answer to a request that has only loaded a model, or let it go.
    pub fn without_text(&self, done_reason: &'static str) -> Response {
        Json(self.line(Part::default(), Some(End::without_answer(done_reason)))).into_response()
    }

    fn line(&self, part: Part, end: Option<End>) -> Answer {
        let Part { text, thinking, calls, logprobs } = part;
        let thinking = Some(thinking).filter(|thinking| !thinking.is_empty());
        let (message, response, thinking) = match self.endpoint {
            Endpoint::Chat => {
                let message = AnswerMessage { role: "assistant", content: text, thinking, tool_calls: calls };
                (Some(message), None, None)
            }
            Endpoint::Generate => (None, Some(text), thinking),
        };
        let (model, created_at) = (self.model.clone(), now());
        Answer { model, created_at, message, response, thinking, logprobs, done: end.is_some(), end }
    }
}

impl Part {
    /// Waits for the next piece and adds it, and of a call also its arguments. Returns the end, if it is that.
    async fn next(&mut self, generating: &mut Generating) -> Result<Option<End>, ApiError> {
        while let Some(piece) = generating.next().await {
            match piece? {
                Piece::Delta { delta, logprobs, .. } => {
                    self.add_logprobs(generating.tokenizer(), logprobs);
                    let begins_call = matches!(delta, Delta::ToolCall { .. });
                    self.add(delta)?;
                    if !begins_call {
                        return Ok(None);
                    }
                }
                Piece::Prefilled(_) => {}
                Piece::Finished { reason, logprobs, usage, .. } => {
                    self.add_logprobs(generating.tokenizer(), logprobs);
                    return Ok(Some(End::of(&reason, usage, generating.timing())));
                }
            }
        }
        Err(ApiError::Internal("the answer has no end".into()))
    }

    fn add(&mut self, delta: Delta) -> Result<(), ApiError> {
        match delta {
            Delta::Text(text) => self.text += &text,
            Delta::Reasoning(text) => self.thinking += &text,
            Delta::ToolCall { index, id, name } => {
                let function = AnswerFunction { index, name, arguments: RawValue::NULL.to_owned() };
                self.calls.push(AnswerToolCall { id, function });
            }
            // Calls were asked for as a whole: this is all of it, and an object.
            Delta::ToolArguments { text, .. } => {
                let arguments = one_line(&text);
                let arguments = arguments.map_err(|error| {
                    ApiError::Internal(format!("a call's arguments are no object: {error}"))
                })?;
                if let Some(call) = self.calls.last_mut() {
                    call.function.arguments = arguments;
                }
            }
        }
        Ok(())
    }

    fn add_logprobs(&mut self, tokenizer: &Tokenizer, logprobs: Vec<TokenLogprob>) {
        self.logprobs.extend(logprobs.into_iter().map(|of| Logprob {
            token: BareLogprob::of(tokenizer, of.token, of.logprob),
            top_logprobs:
                of.top.iter().map(|&(token, logprob)| BareLogprob::of(tokenizer, token, logprob)).collect(),
        }));
    }
}
