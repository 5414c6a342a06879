//! Any text as a chat template: compiled, and rendered with a chat that has everything.

#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use paguro_model::chat::{ChatInput, ChatTemplate, TemplateTokens};
use serde_json::json;

static CHAT: LazyLock<ChatInput> = LazyLock::new(|| {
    let messages = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "<|im_end|>"}]},
        {"role": "assistant", "content": null, "reasoning_content": "Hm.", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"q": [1, 2.5, "é"]}}}
        ]},
        {"role": "tool", "tool_call_id": "1", "name": "look", "content": "red"},
        {"role": "user", "content": "And?"},
    ]);
    let tools = json!([{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]);
    ChatInput { tools: Some(tools), ..ChatInput::new(messages) }
});

fuzz_target!(|source: &str| {
    let tokens = TemplateTokens { bos: Some("<s>".into()), eos: Some("</s>".into()), pad: None, unk: None };
    if let Ok(template) = ChatTemplate::new(source, tokens) {
        let _ = std::hint::black_box(template.render(&CHAT));
    }
});
