//! Types that several endpoints of OpenAI's API share.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    generate::{self, Finish, Piece},
    made_from::made_from,
};

made_from! {
    /// Token counts.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
    pub struct Usage from usage: generate::Usage {
        /// Tokens of the prompt.
        pub prompt_tokens: usize = usage.prompt,
        /// Tokens of all answers.
        pub completion_tokens: usize = usage.completion,
        /// Sum of both.
        pub total_tokens: usize = usage.prompt + usage.completion,
        /// Details of `prompt_tokens`.
        pub prompt_tokens_details: PromptTokensDetails =
            PromptTokensDetails { cached_tokens: usage.cached, tiers: usage.into() },
        /// Details of `completion_tokens`.
        pub completion_tokens_details: CompletionTokensDetails = usage.into(),
    }
}

/// Details of the prompt's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct PromptTokensDetails {
    /// Tokens found in the prefix cache.
    pub cached_tokens: usize,
    /// Cached tokens by tier.
    #[serde(flatten)]
    pub tiers: TierTokens,
}

/// Cached tokens that the device had lost. All others of the cached ones were in its pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct TierTokens {
    /// Tokens that memory of the host had; absent if there are none.
    #[serde(rename = "cached_tokens_host", skip_serializing_if = "is_zero")]
    host: usize,
    /// Tokens that the cache on disk had; absent if there are none.
    #[serde(rename = "cached_tokens_disk", skip_serializing_if = "is_zero")]
    disk: usize,
}

fn is_zero(number: &usize) -> bool {
    *number == 0
}

impl From<generate::Usage> for TierTokens {
    fn from(usage: generate::Usage) -> Self {
        Self { host: usage.from_host, disk: usage.from_disk }
    }
}

made_from! {
    /// Details of the answers' tokens.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
    pub struct CompletionTokensDetails from usage: generate::Usage {
        /// Reasoning tokens.
        pub reasoning_tokens: usize = usage.reasoning,
        /// Drafted tokens that are part of the answer, from a `prediction` or from earlier text.
        pub accepted_prediction_tokens: usize = usage.accepted,
        /// Drafted tokens that were checked and are not part of the answer. They count as no other tokens.
        pub rejected_prediction_tokens: usize = usage.drafted - usage.accepted,
    }
}

/// Progress of a prompt's prefill, in llama.cpp's format.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, ToSchema)]
pub struct PromptProgress {
    /// Tokens of the prompt.
    total: usize,
    /// Tokens found in the prefix cache.
    cache: usize,
    /// Tokens that are computed, including those of the prefix cache.
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

/// Reason for the end of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model ended its answer, or a stop string was generated.
    Stop,
    /// The token limit was reached, or the context is full.
    Length,
    /// The model called tools.
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

/// Options of a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ToSchema)]
pub struct StreamOptions {
    /// Sends a chunk with the token counts at the end.
    pub include_usage: Option<bool>,
    /// Adds the token counts so far to every chunk, as in vLLM.
    pub continuous_usage_stats: Option<bool>,
    /// Has no effect: chunks are not padded.
    pub include_obfuscation: Option<bool>,
}

/// Chunks of a stream that report usage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UsageChunks {
    /// One further chunk at the end.
    pub last: bool,
    /// Every chunk.
    pub every: bool,
}

impl StreamOptions {
    /// Returns the chunks that report usage. Without options there are none.
    pub fn usage(options: Option<Self>) -> UsageChunks {
        let options = options.unwrap_or_default();
        let every = options.continuous_usage_stats == Some(true);
        UsageChunks { last: every || options.include_usage == Some(true), every }
    }
}
