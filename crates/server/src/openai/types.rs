//! Parts that several endpoints of OpenAI's API share.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::generate::{self, Finish, Piece};

/// Tokens that were used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of all answers.
    pub completion_tokens: usize,
    /// Both.
    pub total_tokens: usize,
    /// Of the prompt's.
    pub prompt_tokens_details: PromptTokensDetails,
    /// Of the answers'.
    pub completion_tokens_details: CompletionTokensDetails,
}

/// What the prompt's tokens were.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct PromptTokensDetails {
    /// Tokens that did not have to be computed: the prefix cache had them.
    pub cached_tokens: usize,
    /// Of these, tokens that the cache on disk had.
    #[serde(skip_serializing_if = "is_zero")]
    pub cached_tokens_disk: usize,
}

fn is_zero(number: &usize) -> bool {
    *number == 0
}

/// What the answers' tokens were.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct CompletionTokensDetails {
    /// Tokens that the model thought with.
    pub reasoning_tokens: usize,
}

impl From<generate::Usage> for Usage {
    fn from(usage: generate::Usage) -> Self {
        Self {
            prompt_tokens: usage.prompt,
            completion_tokens: usage.completion,
            total_tokens: usage.prompt + usage.completion,
            prompt_tokens_details: PromptTokensDetails {
                cached_tokens: usage.cached,
                cached_tokens_disk: usage.from_disk,
            },
            completion_tokens_details: CompletionTokensDetails { reasoning_tokens: usage.reasoning },
        }
    }
}

/// Progress of a prompt's prefill, in llama.cpp's words.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, ToSchema)]
pub struct PromptProgress {
    /// Tokens of the prompt.
    total: usize,
    /// Tokens that the prefix cache had.
    cache: usize,
    /// Tokens that are computed, those of the prefix cache included.
    processed: usize,
    /// Milliseconds since the request left the queue.
    time_ms: u64,
}

impl PromptProgress {
    /// Returns the progress that a piece reports.
    pub fn of(piece: &Piece) -> Option<Self> {
        let &Piece::Prefilled(generate::Progress { total, cached, processed, time }) = piece else {
            return None;
        };
        let time_ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        Some(Self { total, cache: cached, processed, time_ms })
    }
}

/// Why an answer has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model has said all, or a stop string came up.
    Stop,
    /// The limit is reached, or the context is full.
    Length,
    /// The model has called tools.
    ToolCalls,
}

impl From<&Finish> for FinishReason {
    fn from(reason: &Finish) -> Self {
        match reason {
            Finish::Stop | Finish::StopString(_) => Self::Stop,
            Finish::Length => Self::Length,
            Finish::ToolCalls => Self::ToolCalls,
        }
    }
}

/// How a stream is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ToSchema)]
pub struct StreamOptions {
    /// Sends one more chunk at the end, with the tokens that were used.
    pub include_usage: Option<bool>,
    /// Sends the tokens that were used so far with every chunk, as vLLM does.
    pub continuous_usage_stats: Option<bool>,
    /// Has no effect: chunks are not padded.
    pub include_obfuscation: Option<bool>,
}

/// Chunks of a stream that report usage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UsageChunks {
    /// One more at the end.
    pub last: bool,
    /// All of them.
    pub every: bool,
}

impl StreamOptions {
    /// Returns the chunks that report usage; `None` without a stream, as the answer reports it.
    pub fn usage(options: Option<Self>) -> UsageChunks {
        let options = options.unwrap_or_default();
        let every = options.continuous_usage_stats == Some(true);
        UsageChunks { last: every || options.include_usage == Some(true), every }
    }
}
