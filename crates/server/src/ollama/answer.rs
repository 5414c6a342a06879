//! Answers of `/api/chat` and `/api/generate`, as a whole or line by line.

use axum::response::{IntoResponse, Response};
use paguro_model::tokenizer::Tokenizer;
use paguro_model_output::one_line;
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
    stream::{line, lines},
};

/// An answer or one line of it.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OllamaAnswer)]
pub struct Answer {
    /// The model's name in the request.
    model: String,
    /// Time of the line.
    created_at: String,
    /// In `/api/chat`: the message, or its next part.
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<AnswerMessage>,
    /// In `/api/generate`: the text, or its next part.
    #[serde(skip_serializing_if = "Option::is_none")]
    response: Option<String>,
    /// In `/api/generate`: reasoning of the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    thinking: Option<String>,
    /// Log-probabilities of the tokens, if requested.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    logprobs: Vec<Logprob>,
    /// True in the last line.
    done: bool,
    #[serde(flatten)]
    end: Option<End>,
}

/// Message of the model.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OllamaAnswerMessage)]
pub struct AnswerMessage {
    /// Always `assistant`.
    role: &'static str,
    /// The text.
    content: String,
    /// Reasoning of the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    thinking: Option<String>,
    /// Tool calls.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<AnswerToolCall>,
}

/// A call.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OllamaAnswerToolCall)]
pub struct AnswerToolCall {
    /// Id of the call.
    id: String,
    /// The called function.
    function: AnswerFunction,
}

/// The called function.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OllamaAnswerFunction)]
pub struct AnswerFunction {
    /// Index of the call in the answer.
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
    /// The most probable tokens at its position, in descending order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    top_logprobs: Vec<BareLogprob>,
}

/// A token with its log-probability.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OllamaBareLogprob)]
pub struct BareLogprob {
    /// Its text.
    token: String,
    /// Natural logarithm of its probability.
    logprob: f32,
    /// Its bytes, which may be incomplete characters.
    bytes: Vec<u8>,
}

impl BareLogprob {
    fn of(tokenizer: &Tokenizer, token: u32, logprob: f32) -> Self {
        let bytes = tokenizer.token_bytes(token).to_vec();
        Self { token: String::from_utf8_lossy(&bytes).into_owned(), logprob, bytes }
    }
}

/// Endpoint of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    Chat,
    Generate,
}

/// Parts since the last line.
#[derive(Default)]
struct Part {
    text: String,
    thinking: String,
    calls: Vec<AnswerToolCall>,
    logprobs: Vec<Logprob>,
}

/// Writer of an answer.
pub struct AnswerWriter {
    pub endpoint: Endpoint,
    /// The model's name in the request.
    pub model: String,
}

impl AnswerWriter {
    /// Writes the answer as a whole or line by line.
    ///
    /// # Errors
    /// The request failed.
    pub async fn write(self, mut generating: Generating, stream: bool) -> Result<Response, ApiError> {
        if stream {
            let keep_alive = line(&self.line(Part::default(), None));
            return Ok(lines(Some(Box::new(move || keep_alive.clone())), move |lines| async move {
                loop {
                    let mut part = Part::default();
                    match part.next(&mut generating).await {
                        Ok(None) => lines.line(&self.line(part, None)).await,
                        Ok(Some(end)) => return lines.line(&self.line(part, Some(end))).await,
                        // The status has already been sent.
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

    /// Answers a request that only loads or unloads a model.
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
    /// Waits for the next piece and adds it, with the arguments of a call. Returns the end of the answer, if reached.
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
            // Calls are not streamed, so the arguments are a whole object.
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
