//! Chunks of a streamed answer.

use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

use super::super::{
    error,
    logprobs::ChatLogprobs,
    types::{FinishReason, PromptProgress, Usage, UsageChunks},
};
use crate::{
    generate::{self, Delta, Generating, Piece},
    ids, stream,
};

/// A chunk of an answer.
#[derive(Debug, Serialize, ToSchema)]
pub struct ChatCompletionChunk<'c> {
    id: &'c str,
    /// Always `chat.completion.chunk`.
    object: &'static str,
    created: u64,
    model: &'c str,
    /// Empty in the last chunk, if usage is requested.
    choices: Vec<ChunkChoice<'c>>,
    /// Present in the last chunk, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Usage>,
    /// Present in chunks before the answer, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_progress: Option<PromptProgress>,
}

/// Delta of a choice.
#[derive(Debug, Serialize, ToSchema)]
pub struct ChunkChoice<'c> {
    index: usize,
    delta: ChunkDelta<'c>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<FinishReason>,
}

/// Delta of the message.
#[derive(Debug, Default, Serialize, ToSchema)]
pub struct ChunkDelta<'c> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'c str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'c str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<[ChunkToolCall<'c>; 1]>,
}

/// Delta of a call.
#[derive(Debug, Serialize, ToSchema)]
pub struct ChunkToolCall<'c> {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'c str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    r#type: Option<&'static str>,
    function: ChunkFunction<'c>,
}

/// Delta of the called function.
#[derive(Debug, Serialize, ToSchema)]
pub struct ChunkFunction<'c> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'c str>,
    arguments: &'c str,
}

/// Writes the answer as a stream of chunks.
pub(super) struct ChunkWriter {
    generating: Generating,
    chunks: UsageChunks,
    wants_logprobs: bool,
    id: String,
    created: u64,
    model: String,
    usage: generate::Usage,
}

impl ChunkWriter {
    pub(super) fn new(generating: Generating, chunks: UsageChunks, wants_logprobs: bool) -> Self {
        let model = generating.model().to_owned();
        let (id, created) = (ids::new("chatcmpl-"), ids::now());
        let usage = generate::Usage::default();
        Self { generating, chunks, wants_logprobs, id, created, model, usage }
    }
}

impl IntoResponse for ChunkWriter {
    fn into_response(mut self) -> Response {
        let nothing =
            ChunkChoice { index: 0, delta: ChunkDelta::default(), logprobs: None, finish_reason: None };
        let keep_alive = stream::data(&self.chunk(vec![nothing]));
        stream::events(Box::new(move || keep_alive.clone()), |events| async move {
            for index in 0..self.generating.choices() {
                let delta =
                    ChunkDelta { role: Some("assistant"), content: Some(""), ..ChunkDelta::default() };
                let choice = ChunkChoice { index, delta, logprobs: None, finish_reason: None };
                events.data(&self.chunk(vec![choice])).await;
            }
            while let Some(piece) = self.generating.next().await {
                let piece = match piece {
                    Ok(piece) => piece,
                    // The status has already been sent: the stream ends with the error, without `[DONE]`.
                    Err(error) => return events.data(&error::body(&error)).await,
                };
                if let Piece::Finished { usage, .. } = &piece {
                    self.usage.add_choice(*usage);
                }
                let choice = self.choice(&piece);
                let usage = self.chunks.every.then(|| self.generating.usage_so_far().into());
                let prompt_progress = PromptProgress::of(&piece);
                let chunk = self.chunk(vec![choice]);
                events.data(&ChatCompletionChunk { usage, prompt_progress, ..chunk }).await;
            }
            if self.chunks.last {
                let usage = Some(self.usage.into());
                events.data(&ChatCompletionChunk { usage, ..self.chunk(Vec::new()) }).await;
            }
            events.done().await;
        })
    }
}

impl ChunkWriter {
    fn chunk<'c>(&'c self, choices: Vec<ChunkChoice<'c>>) -> ChatCompletionChunk<'c> {
        ChatCompletionChunk {
            id: &self.id,
            object: "chat.completion.chunk",
            created: self.created,
            model: &self.model,
            choices,
            usage: None,
            prompt_progress: None,
        }
    }

    fn choice<'c>(&self, piece: &'c Piece) -> ChunkChoice<'c> {
        let none: &[_] = &[];
        let (index, delta, logprobs, finish_reason) = match piece {
            Piece::Prefilled(_) => (0, ChunkDelta::default(), none, None),
            Piece::Delta { choice, delta, logprobs } => {
                (*choice, ChunkDelta::of(delta), logprobs.as_slice(), None)
            }
            Piece::Finished { choice, reason, logprobs, .. } => {
                (*choice, ChunkDelta::default(), logprobs.as_slice(), Some(reason.into()))
            }
        };
        let logprobs = (self.wants_logprobs && !logprobs.is_empty()).then(|| {
            let mut written = ChatLogprobs::default();
            written.extend(self.generating.tokenizer(), logprobs);
            written
        });
        ChunkChoice { index, delta, logprobs, finish_reason }
    }
}

impl<'c> ChunkDelta<'c> {
    fn of(delta: &'c Delta) -> Self {
        let none = Self::default();
        let call = |index, id: Option<&'c str>, name, arguments| {
            let r#type = if id.is_some() { Some("function") } else { None };
            Some([ChunkToolCall { index, id, r#type, function: ChunkFunction { name, arguments } }])
        };
        match delta {
            Delta::Text(text) => Self { content: Some(text), ..none },
            Delta::Reasoning(text) => Self { reasoning_content: Some(text), ..none },
            Delta::ToolCall { index, id, name } => {
                Self { tool_calls: call(*index, Some(id.as_str()), Some(name.as_str()), ""), ..none }
            }
            Delta::ToolArguments { index, text } => {
                Self { tool_calls: call(*index, None, None, text), ..none }
            }
        }
    }
}
