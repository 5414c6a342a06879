//! Requests for the documentation of the APIs, in the order in which people look for them. A test sends those of the model
//! inside the program to a server.

use serde_json::{Value, json};

/// Operations in order of use: method, path, and the body of an example.
#[rustfmt::skip]
const OPERATIONS: [(&str, &str, &str); 59] = [
    ("post", "/v1/chat/completions", r#"{"model": "tales", "messages": [{"role": "user", "content": "Tell me a story about a shy fox"}], "max_tokens": 64}"#),
    ("post", "/v1/responses", r#"{"model": "tales", "input": "Tell me a story about a shy fox", "max_output_tokens": 64}"#),
    ("post", "/v1/completions", r#"{"model": "tales", "prompt": "Once upon a time there was a crab who", "max_tokens": 32}"#),
    ("post", "/v1/embeddings", r#"{"model": "tales", "input": ["A fox lost its key.", "The sea is deep and blue."]}"#),
    ("get", "/v1/models", ""),
    ("get", "/v1/models/{model}", ""),
    ("get", "/v1/responses/{id}", ""),
    ("delete", "/v1/responses/{id}", ""),
    ("post", "/infill", r#"{"model": "qwen2.5-coder:0.5b", "input_prefix": "def add(a, b):\n    return ", "input_suffix": "\n"}"#),
    ("get", "/props", ""),
    ("get", "/lora-adapters", ""),
    ("post", "/lora-adapters", ""),
    ("post", "/v1/load_lora_adapter", ""),
    ("post", "/v1/unload_lora_adapter", ""),
    ("post", "/v1/messages", r#"{"model": "tales", "max_tokens": 64, "messages": [{"role": "user", "content": "Tell me a story about a shy fox"}]}"#),
    ("post", "/v1/messages/count_tokens", r#"{"model": "tales", "messages": [{"role": "user", "content": "Tell me a story about a shy fox"}]}"#),
    ("post", "/api/chat", r#"{"model": "tales", "messages": [{"role": "user", "content": "Tell me a story about a shy fox"}], "stream": false, "options": {"num_predict": 64}}"#),
    ("post", "/api/generate", r#"{"model": "tales", "prompt": "Tell me a story about a shy fox", "stream": false, "options": {"num_predict": 64}}"#),
    ("post", "/api/embed", r#"{"model": "tales", "input": ["A fox lost its key.", "The sea is deep and blue."]}"#),
    ("get", "/api/tags", ""),
    ("get", "/api/ps", ""),
    ("post", "/api/show", r#"{"model": "tales"}"#),
    ("post", "/api/pull", r#"{"model": "qwen3:0.6b"}"#),
    ("post", "/api/create", r#"{"model": "bedtime", "from": "tales", "system": "Tell it to a child.", "stream": false}"#),
    ("post", "/api/copy", r#"{"source": "bedtime", "destination": "bedtime-too"}"#),
    ("delete", "/api/delete", r#"{"model": "bedtime"}"#),
    ("post", "/api/embeddings", r#"{"model": "tales", "prompt": "A fox lost its key."}"#),
    ("get", "/api/version", ""),
    ("post", "/v1/rerank", r#"{"model": "bge-reranker-v2-m3", "query": "Who lost a key?", "documents": ["A fox lost its key.", "The sea is deep and blue."]}"#),
    ("post", "/v1/score", r#"{"model": "bge-reranker-v2-m3", "text_1": "Who lost a key?", "text_2": ["A fox lost its key.", "The sea is deep and blue."]}"#),
    ("post", "/v1/classify", r#"{"model": "sentiment", "input": ["I like this story."]}"#),
    ("post", "/v2/rerank", r#"{"model": "bge-reranker-v2-m3", "query": "Who lost a key?", "documents": ["A fox lost its key.", "The sea is deep and blue."]}"#),
    ("post", "/v2/embed", r#"{"model": "tales", "texts": ["A fox lost its key."], "input_type": "search_document", "embedding_types": ["float"]}"#),
    ("post", "/v1/embed", r#"{"model": "tales", "texts": ["A fox lost its key."], "input_type": "search_document"}"#),
    ("post", "/embed", r#"{"inputs": ["A fox lost its key.", "The sea is deep and blue."]}"#),
    ("post", "/rerank", r#"{"query": "Who lost a key?", "texts": ["A fox lost its key.", "The sea is deep and blue."]}"#),
    ("post", "/similarity", r#"{"inputs": {"source_sentence": "A fox lost its key.", "sentences": ["The key of the fox is gone.", "The sea is deep."]}}"#),
    ("post", "/embed_sparse", r#"{"inputs": "A fox lost its key."}"#),
    ("post", "/predict", r#"{"inputs": "I like this story."}"#),
    ("post", "/score", r#"{"model": "bge-reranker-v2-m3", "text_1": "Who lost a key?", "text_2": "A fox lost its key."}"#),
    ("post", "/classify", r#"{"model": "sentiment", "input": "I like this story."}"#),
    ("post", "/tokenize", r#"{"model": "tales", "prompt": "The hermit crab moved into a larger shell."}"#),
    ("post", "/detokenize", r#"{"model": "tales", "tokens": [300, 301, 302]}"#),
    ("get", "/tokenizer_info", ""),
    ("post", "/v1/chat/completions/render", r#"{"model": "tales", "messages": [{"role": "user", "content": "Tell me a story about a shy fox"}]}"#),
    ("post", "/v1/completions/render", r#"{"model": "tales", "prompt": "Once upon a time there was a crab who"}"#),
    ("post", "/v1/responses/render", r#"{"model": "tales", "input": "Tell me a story about a shy fox"}"#),
    ("post", "/inference/v1/generate", r#"{"model": "tales", "token_ids": [300, 301, 302], "sampling_params": {"max_tokens": 16}}"#),
    ("get", "/server_info", ""),
    ("get", "/get_server_info", ""),
    ("get", "/load", ""),
    ("get", "/get_load", ""),
    ("get", "/v1/loads", ""),
    ("get", "/loads", ""),
    ("get", "/status", ""),
    ("get", "/health", ""),
    ("get", "/ready", ""),
    ("get", "/metrics", ""),
    ("get", "/version", ""),
];

/// Adds positions and examples to the operations of an OpenAPI document.
pub fn describe(document: &mut Value) {
    for (position, (method, path, example)) in OPERATIONS.iter().enumerate() {
        let Some(operation) = document["paths"].get_mut(path).and_then(|path| path.get_mut(method)) else {
            continue;
        };
        operation["x-position"] = json!(position);
        let content = operation.pointer_mut("/requestBody/content/application~1json");
        if let (Some(content), Ok(example)) = (content, serde_json::from_str::<Value>(example)) {
            content["example"] = example;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_exist_and_have_their_examples() {
        let document = crate::openapi::document();
        for (method, path, example) in OPERATIONS {
            let operation = &document["paths"][path][method];
            assert!(operation.is_object(), "{method} {path} is no operation");
            let shown = &operation["requestBody"]["content"]["application/json"]["example"];
            assert_eq!(shown.is_object(), !example.is_empty(), "{method} {path}: {shown}");
        }
    }
}
