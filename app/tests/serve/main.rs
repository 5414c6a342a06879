//! `paguro serve` over real HTTP.

mod access;
mod adapters;
mod agents;
mod anthropic;
mod attacks;
mod bge_m3;
mod chat;
#[path = "../common/mod.rs"]
mod common;
mod completions;
mod connections;
mod disk;
mod embeddings;
mod fairness;
mod fleet;
mod http;
mod images;
mod kv_events;
mod mcp;
mod models;
mod ollama;
mod presets;
mod process;
mod reasoning;
mod refusals;
mod replicas;
mod responses;
mod retrieval;
mod schemas;
#[path = "../common/scripted.rs"]
mod scripted;
mod speculation;
mod structured;
mod telemetry;
mod tolerance;
mod ui;
mod ui_models;

use serde_json::{Value, json};

/// A question to the embedded model, with a small answer.
fn ask(more: Value) -> Value {
    let mut body = json!({
        "model": "tales",
        "messages": [{"role": "user", "content": "Tell me a story about a shy fox who lost a key"}],
        "max_tokens": 24,
        "temperature": 0,
    });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}
