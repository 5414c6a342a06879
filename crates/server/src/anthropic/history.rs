//! Conversion of Anthropic's messages to those of [`crate::generate`].

use std::collections::HashMap;

use paguro_model::chat::PICTURE;
use serde_json::{Map, Value};

use super::request::{Block, MessageParam, ResultBlock, RoleParam, SystemBlock};
use crate::{
    error::ApiError,
    generate::{Message, Role, ToolCall},
    images::Parts,
    wire::{Content, Tolerance, unreadable},
};

/// Converted messages. Results of calls are separate messages, and neighbours of one role are joined.
#[derive(Default)]
pub(super) struct History {
    pub messages: Vec<Message>,
    /// Names of called tools by the call's id.
    called: HashMap<String, String>,
}

impl History {
    /// Adds a message. `is_asked`: it is the last one of the user, whose documents are refused.
    pub fn add(
        &mut self,
        message: MessageParam,
        path: &str,
        is_asked: bool,
        tolerance: &Tolerance,
    ) -> Result<(), ApiError> {
        let role = match message.role {
            RoleParam::User => Role::User,
            RoleParam::Assistant => Role::Assistant,
            RoleParam::System => Role::System,
        };
        let blocks = match message.content {
            Content::Text(text) => {
                self.push(role, text);
                return Ok(());
            }
            Content::Parts(blocks) => blocks,
        };
        // A message without blocks is kept.
        if blocks.is_empty() {
            self.push(role, String::new());
        }
        for (i, block) in blocks.into_iter().enumerate() {
            self.add_block(role, block, &format!("{path}.content[{i}]"), is_asked, tolerance)?;
        }
        Ok(())
    }

    fn add_block(
        &mut self,
        role: Role,
        block: Block,
        path: &str,
        is_asked: bool,
        tolerance: &Tolerance,
    ) -> Result<(), ApiError> {
        let unreadable = |kind: &str| unreadable(kind, path, is_asked, tolerance);
        let wrong_role = |of: &str| {
            Err(ApiError::invalid(path, format!("`{path}` can only be in a message of the role `{of}`")))
        };
        match block {
            Block::Text { text, .. } => self.push(role, text),
            Block::Thinking { .. } | Block::ToolUse { .. } if role != Role::Assistant => {
                return wrong_role("assistant");
            }
            Block::ToolResult { .. } if role != Role::User => return wrong_role("user"),
            // Omitted reasoning has no text.
            Block::Thinking { thinking, .. } if thinking.is_empty() => {}
            Block::Thinking { thinking, .. } => {
                let reasoning = self.last(Role::Assistant).reasoning.get_or_insert_default();
                append(reasoning, &thinking);
            }
            Block::ToolUse { id, name, input, .. } => {
                self.called.insert(id.clone(), name.clone());
                let arguments = Value::from(input.unwrap_or_default()).to_string();
                self.last(Role::Assistant).tool_calls.push(ToolCall { id, name, arguments });
            }
            Block::ToolResult { tool_use_id, content, is_error, .. } => {
                let Some(name) = self.called.get(&tool_use_id).cloned() else {
                    let message =
                        format!("`{path}.tool_use_id` is `{tool_use_id}`, but no call before it has this id");
                    return Err(ApiError::invalid(format!("{path}.tool_use_id"), message));
                };
                let mut parts = content
                    .map_or(Ok(Parts::default()), |content| content.content().result(path, tolerance))?;
                if is_error == Some(true) {
                    parts.text.insert_str(0, "Error: ");
                }
                self.messages.push(Message {
                    name: Some(name),
                    tool_call_id: Some(tool_use_id),
                    ..Message::new(Role::Tool, parts)
                });
            }
            Block::Image { source } => {
                let message = self.last(role);
                message.content.push(PICTURE);
                message.images.push(source.image(path)?);
            }
            Block::Document(document) => match plain_text(&document) {
                Some(text) => self.push(role, text),
                None => self.push(role, unreadable("document")?),
            },
            Block::SearchResult(result) => match found_text(&result) {
                Some(text) => self.push(role, text),
                None => self.push(role, unreadable("search_result")?),
            },
            Block::RedactedThinking(_) => tolerance.leave_out(path, "redacted thinking is encrypted")?,
            Block::Other => tolerance.leave_out(path, "the type of the block is unknown")?,
        }
        Ok(())
    }

    /// Adds a text to the last message if it has this role, otherwise as a new message.
    pub fn push(&mut self, role: Role, text: String) {
        append(&mut self.last(role).content, &Parts::from(text).text);
    }

    fn last(&mut self, role: Role) -> &mut Message {
        if self.messages.last().is_none_or(|last| last.role != role) {
            self.messages.push(Message { role, ..Message::default() });
        }
        let at = self.messages.len() - 1;
        &mut self.messages[at]
    }
}

/// Appends a text as a paragraph. After an image, it follows directly.
fn append(text: &mut String, more: &str) {
    if !text.is_empty() && !text.ends_with(PICTURE) {
        text.push('\n');
    }
    text.push_str(more);
}

/// Returns the text of a document in plain text.
fn plain_text(document: &Map<String, Value>) -> Option<String> {
    let source = document.get("source")?;
    let is_text = source.get("type")?.as_str() == Some("text");
    is_text.then(|| source.get("data")?.as_str().map(str::to_owned)).flatten()
}

/// Returns title, source and text of a search result.
fn found_text(result: &Map<String, Value>) -> Option<String> {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let parts = result.get("content")?.as_array()?.iter().map(|part| text(part.get("text")?));
    let parts = parts.collect::<Option<Vec<_>>>()?;
    let heading = ["title", "source"].into_iter().filter_map(|name| text(result.get(name)?));
    Some(heading.chain(parts).collect::<Vec<_>>().join("\n"))
}

/// Beginning of Claude Code's line about billing. Its number `cch=` differs in each request, which would make the
/// prefix cache useless.
const BILLING: &str = "x-anthropic-billing-header:";

/// Replaces the number in the [`BILLING`] line of a system prompt by a constant.
fn without_nonce(system: String) -> String {
    let end = system.find('\n').unwrap_or(system.len());
    let Some(start) = system[..end].find("cch=").filter(|_| system.starts_with(BILLING)) else {
        return system;
    };
    let start = start + "cch=".len();
    let length = system[start..end].find([';', ' ']).unwrap_or(end - start);
    [&system[..start], "0", &system[start + length..]].concat()
}

impl Content<SystemBlock> {
    /// Returns the system prompt.
    pub(super) fn text(self) -> String {
        without_nonce(match self {
            Self::Text(text) => text,
            Self::Parts(blocks) => {
                let texts: Vec<_> = blocks.into_iter().map(|SystemBlock::Text { text, .. }| text).collect();
                texts.join("\n")
            }
        })
    }
}

impl Content<ResultBlock> {
    /// Returns text and images of a call's result. Other content is replaced by a note, because the client cannot remove it
    /// from its history.
    fn result(self, path: &str, tolerance: &Tolerance) -> Result<Parts, ApiError> {
        let blocks = match self {
            Self::Text(text) => return Ok(text.into()),
            Self::Parts(blocks) => blocks.into_iter().enumerate(),
        };
        let mut parts = Parts::default();
        for (i, block) in blocks {
            let path = format!("{path}.content[{i}]");
            let found = match block {
                ResultBlock::Image { source } => {
                    parts.push_image(source.image(&path)?);
                    continue;
                }
                ResultBlock::Text { text, .. } => Ok(text),
                ResultBlock::Document(document) => plain_text(&document).ok_or("document"),
                ResultBlock::SearchResult(result) => found_text(&result).ok_or("search_result"),
                ResultBlock::Other => Err("content"),
            };
            let text = found.or_else(|kind| unreadable(kind, &path, false, tolerance))?;
            append(&mut parts.text, &Parts::from(text).text);
        }
        Ok(parts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_a_bill_is_constant() {
        for (system, expected) in [
            (
                "x-anthropic-billing-header: cc_version=2; cch=aa111;\nRules with cch=1",
                "x-anthropic-billing-header: cc_version=2; cch=0;\nRules with cch=1",
            ),
            ("x-anthropic-billing-header: cch=bb222", "x-anthropic-billing-header: cch=0"),
            ("x-anthropic-billing-header: a=1\ncch=2;", "x-anthropic-billing-header: a=1\ncch=2;"),
            ("Say cch=1;", "Say cch=1;"),
        ] {
            assert_eq!(without_nonce(system.into()), expected);
        }
    }
}
