//! Answers.

use paguro_model_output::one_line;
use serde::Serialize;
use serde_json::value::RawValue;
use sha2::{Digest, Sha256};
use utoipa::ToSchema;

use crate::{
    error::ApiError,
    generate::{self, Delta, Finish, Generating, Piece},
    ids,
    made_from::made_from,
    openai::types::TierTokens,
};

/// An answer.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AnthropicMessage)]
pub struct Message {
    id: String,
    /// Always `message`.
    r#type: &'static str,
    /// Always `assistant`.
    role: &'static str,
    model: String,
    content: Vec<ContentBlock>,
    stop_reason: Option<StopReason>,
    /// The stop sequence that ended the answer.
    stop_sequence: Option<String>,
    usage: Usage,
}

/// A content block of an answer.
#[derive(Debug, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = AnthropicContentBlock)]
pub enum ContentBlock {
    /// Text.
    Text {
        /// The text.
        text: String,
    },
    /// Reasoning of the model.
    Thinking {
        /// Its text.
        thinking: String,
        /// A digest of it.
        signature: String,
    },
    /// A tool call.
    ToolUse {
        /// Id of the call.
        id: String,
        /// Name of the tool.
        name: String,
        /// The arguments.
        #[schema(value_type = Object)]
        input: Box<RawValue>,
    },
}

impl ContentBlock {
    /// Creates a call without arguments, for a stream.
    pub fn call(id: String, name: String) -> Self {
        let input = RawValue::from_string("{}".into()).expect("a JSON object");
        Self::ToolUse { id, name, input }
    }
}

/// Reason for the end of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = AnthropicStopReason)]
pub enum StopReason {
    /// The model ended its answer.
    EndTurn,
    /// The token limit was reached, or the context is full.
    MaxTokens,
    /// One of `stop_sequences` was generated.
    StopSequence,
    /// The model called tools.
    ToolUse,
}

impl StopReason {
    /// Returns the reason and the stop sequence, if one was generated.
    pub fn of(finish: Finish) -> (Self, Option<String>) {
        match finish {
            Finish::Stop => (Self::EndTurn, None),
            Finish::StopString(text) => (Self::StopSequence, Some(text)),
            Finish::Length => (Self::MaxTokens, None),
            Finish::ToolCalls => (Self::ToolUse, None),
        }
    }
}

made_from! {
    /// Token counts.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
    #[schema(as = AnthropicUsage)]
    pub struct Usage from usage: generate::Usage where details = OutputTokensDetails { thinking_tokens: usage.reasoning }; {
        /// Prompt tokens that were computed.
        pub input_tokens: usize = usage.prompt - usage.cached,
        /// Always 0: caching prefixes is free.
        pub cache_creation_input_tokens: usize = 0,
        /// Prompt tokens found in the prefix cache.
        pub cache_read_input_tokens: usize = usage.cached,
        /// Cached tokens by tier.
        #[serde(flatten)]
        pub tiers: TierTokens = usage.into(),
        /// Tokens of the answer.
        pub output_tokens: usize = usage.completion,
        /// Details of `output_tokens`.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub output_tokens_details: Option<OutputTokensDetails> = (usage.reasoning > 0).then_some(details),
    }
}

/// Details of the answer's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = AnthropicOutputTokensDetails)]
pub struct OutputTokensDetails {
    /// Reasoning tokens.
    thinking_tokens: usize,
}

/// Returns a signature of reasoning. Clients require one and send it back; it is not checked, because a prompt may
/// contain any reasoning.
pub fn signature(thinking: Sha256) -> String {
    thinking.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Message {
    /// Creates a message without content, for a stream.
    pub fn begin(generating: &Generating) -> Self {
        let usage = Usage { input_tokens: generating.prompt_tokens(), ..Usage::default() };
        Self {
            id: ids::new("msg_"),
            r#type: "message",
            role: "assistant",
            model: generating.model().to_owned(),
            content: Vec::new(),
            stop_reason: None,
            stop_sequence: None,
            usage,
        }
    }

    /// Collects the whole answer.
    ///
    /// # Errors
    /// The request failed.
    pub async fn collect(mut generating: Generating, omit_thinking: bool) -> Result<Self, ApiError> {
        let mut message = Self::begin(&generating);
        let mut thinking = String::new();
        let mut arguments: Vec<String> = Vec::new();
        while let Some(piece) = generating.next().await {
            match piece? {
                Piece::Delta { delta: Delta::Text(more), .. } => match message.content.last_mut() {
                    Some(ContentBlock::Text { text }) => text.push_str(&more),
                    _ => message.content.push(ContentBlock::Text { text: more }),
                },
                Piece::Delta { delta: Delta::Reasoning(more), .. } => thinking.push_str(&more),
                Piece::Delta { delta: Delta::ToolCall { id, name, .. }, .. } => {
                    arguments.push(String::new());
                    message.content.push(ContentBlock::call(id, name));
                }
                Piece::Delta { delta: Delta::ToolArguments { index, text }, .. } => arguments[index] += &text,
                Piece::Prefilled(_) => {}
                Piece::Finished { reason, usage, .. } => {
                    let (reason, sequence) = StopReason::of(reason);
                    message.stop_reason = Some(reason);
                    message.stop_sequence = sequence;
                    message.usage = usage.into();
                }
            }
        }
        let inputs = message.content.iter_mut().filter_map(|block| match block {
            ContentBlock::ToolUse { input, .. } => Some(input),
            _ => None,
        });
        for (input, arguments) in inputs.zip(arguments) {
            // Calls are not streamed, so their arguments are a whole object.
            *input = one_line(&arguments)
                .map_err(|error| ApiError::Internal(format!("a call's arguments are no object: {error}")))?;
        }
        if !thinking.is_empty() {
            let signature = signature(Sha256::new_with_prefix(&thinking));
            let thinking = if omit_thinking { String::new() } else { thinking };
            message.content.insert(0, ContentBlock::Thinking { thinking, signature });
        }
        Ok(message)
    }
}
