//! Streams of events, in the order that Anthropic's clients require: `message_start`; for each block
//! `content_block_start`, deltas, `content_block_stop`; `message_delta` with reason and usage; `message_stop`.

use axum::{body::Bytes, response::Response};
use serde::Serialize;
use sha2::{Digest, Sha256};

use super::{
    answer::{ContentBlock, Message, StopReason, Usage, signature},
    error::ErrorBody,
};
use crate::{
    generate::{Delta, Generating, Piece},
    stream::{Writer, events},
};

/// Data of an event.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Event<'e> {
    MessageStart { message: &'e Message },
    Ping,
    ContentBlockStart { index: usize, content_block: ContentBlock },
    ContentBlockDelta { index: usize, delta: BlockDelta<'e> },
    ContentBlockStop { index: usize },
    MessageDelta { delta: MessageDelta, usage: Usage },
    MessageStop,
}

/// Keep-alive event. Claude Code ignores `ping`, and the type of the next block may be unknown; an empty delta of the
/// message is valid anywhere.
const KEEP_ALIVE: &[u8] = b"event: message_delta
data: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":null,\"stop_sequence\":null},\"usage\":{\"output_tokens\":0}}

";

/// Delta of a block.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[expect(clippy::enum_variant_names, reason = "the API's names")]
enum BlockDelta<'e> {
    TextDelta { text: &'e str },
    ThinkingDelta { thinking: &'e str },
    SignatureDelta { signature: String },
    InputJsonDelta { partial_json: &'e str },
}

/// Delta of the message.
#[derive(Debug, Serialize)]
struct MessageDelta {
    stop_reason: StopReason,
    stop_sequence: Option<String>,
}

impl Event<'_> {
    fn name(&self) -> &'static str {
        match self {
            Self::MessageStart { .. } => "message_start",
            Self::Ping => "ping",
            Self::ContentBlockStart { .. } => "content_block_start",
            Self::ContentBlockDelta { .. } => "content_block_delta",
            Self::ContentBlockStop { .. } => "content_block_stop",
            Self::MessageDelta { .. } => "message_delta",
            Self::MessageStop => "message_stop",
        }
    }
}

/// The open block.
enum Open {
    Nothing,
    Text,
    /// Reasoning, with the digest of its text so far.
    Thinking(Sha256),
    Call,
}

struct Blocks {
    events: Writer,
    open: Open,
    /// Index of the open block, or else of the next one.
    index: usize,
    omit_thinking: bool,
}

/// Streams the answer.
pub fn write(mut generating: Generating, omit_thinking: bool) -> Response {
    events(Box::new(|| Bytes::from_static(KEEP_ALIVE)), move |events| async move {
        let mut blocks = Blocks { events, open: Open::Nothing, index: 0, omit_thinking };
        blocks.send(&Event::MessageStart { message: &Message::begin(&generating) }).await;
        blocks.send(&Event::Ping).await;
        while let Some(piece) = generating.next().await {
            match piece {
                Ok(Piece::Delta { delta, .. }) => blocks.delta(delta).await,
                Ok(Piece::Prefilled(_)) => {}
                Ok(Piece::Finished { reason, usage, .. }) => {
                    blocks.close().await;
                    let (stop_reason, stop_sequence) = StopReason::of(reason);
                    let delta = MessageDelta { stop_reason, stop_sequence };
                    blocks.send(&Event::MessageDelta { delta, usage: usage.into() }).await;
                }
                // The status has already been sent.
                Err(error) => {
                    return blocks.events.event("error", &ErrorBody::new(&super::rename(error))).await;
                }
            }
        }
        blocks.send(&Event::MessageStop).await;
    })
}

impl Blocks {
    async fn send(&self, event: &Event<'_>) {
        self.events.event(event.name(), event).await;
    }

    async fn delta(&mut self, delta: Delta) {
        match delta {
            Delta::Text(text) => {
                if !matches!(self.open, Open::Text) {
                    self.begin(Open::Text, ContentBlock::Text { text: String::new() }).await;
                }
                self.add(BlockDelta::TextDelta { text: &text }).await;
            }
            Delta::Reasoning(thinking) => {
                if !matches!(self.open, Open::Thinking(_)) {
                    let block = ContentBlock::Thinking { thinking: String::new(), signature: String::new() };
                    self.begin(Open::Thinking(Sha256::new()), block).await;
                }
                if let Open::Thinking(digest) = &mut self.open {
                    digest.update(&thinking);
                }
                if !self.omit_thinking {
                    self.add(BlockDelta::ThinkingDelta { thinking: &thinking }).await;
                }
            }
            Delta::ToolCall { id, name, .. } => {
                self.begin(Open::Call, ContentBlock::call(id, name)).await;
                self.add(BlockDelta::InputJsonDelta { partial_json: "" }).await;
            }
            Delta::ToolArguments { text, .. } => {
                self.add(BlockDelta::InputJsonDelta { partial_json: &text }).await;
            }
        }
    }

    async fn add(&self, delta: BlockDelta<'_>) {
        self.send(&Event::ContentBlockDelta { index: self.index, delta }).await;
    }

    async fn begin(&mut self, open: Open, content_block: ContentBlock) {
        self.close().await;
        self.open = open;
        self.send(&Event::ContentBlockStart { index: self.index, content_block }).await;
    }

    async fn close(&mut self) {
        match std::mem::replace(&mut self.open, Open::Nothing) {
            Open::Nothing => return,
            Open::Thinking(digest) => {
                self.add(BlockDelta::SignatureDelta { signature: signature(digest) }).await;
            }
            Open::Text | Open::Call => {}
        }
        self.send(&Event::ContentBlockStop { index: self.index }).await;
        self.index += 1;
    }
}
