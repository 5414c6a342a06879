//! `/v1/messages` and its count of tokens.

use expect_test::{Expect, expect};
use serde_json::{Value, json};

use super::{ask, common::shared, http::Server};

const PATH: &str = "/v1/messages";

/// The named events of a stream.
fn events(server: &Server, more: Value) -> Vec<(String, Value)> {
    let answer = server.post(PATH, &ask(more));
    assert_eq!(
        (answer.status, answer.header("content-type")),
        (200, Some("text/event-stream")),
        "{answer:?}"
    );
    let events = answer.body.split("\n\n").filter(|event| event.starts_with("event: "));
    let parsed = events.map(|event| {
        let (name, data) = event.trim_start_matches("event: ").split_once("\ndata: ").unwrap();
        (name.to_owned(), serde_json::from_str(data).unwrap())
    });
    parsed.collect()
}

#[test]
fn an_answer_has_blocks_a_reason_and_usage() {
    let server = Server::start(&[]);
    let headers = [("anthropic-version", "2023-06-01"), ("x-api-key", "none is needed")];
    let answer = server.request("POST", PATH, &headers, &ask(json!({})).to_string()).ok();
    assert!(answer["id"].as_str().unwrap().starts_with("msg_"));
    assert_eq!(
        (
            &answer["type"],
            &answer["role"],
            &answer["model"],
            &answer["stop_reason"],
            &answer["stop_sequence"]
        ),
        (&json!("message"), &json!("assistant"), &json!("tales"), &json!("max_tokens"), &Value::Null)
    );
    let text = answer["content"][0]["text"].as_str().unwrap().to_owned();
    assert_eq!(answer["content"], json!([{"type": "text", "text": text}]));
    let chat = server.post("/v1/chat/completions", &ask(json!({}))).ok();
    assert_eq!(chat["choices"][0]["message"]["content"], text.as_str(), "one model, one answer");
    assert_eq!(answer["usage"]["output_tokens"], 24);
    let count = server.post(
        &format!("{PATH}/count_tokens"),
        &json!({"model": "tales", "messages": ask(json!({}))["messages"]}),
    );
    assert_eq!(count.ok(), json!({"input_tokens": answer["usage"]["input_tokens"]}));

    let word = text.split_whitespace().nth(4).unwrap();
    let stopped = server.post(PATH, &ask(json!({"stop_sequences": [word]}))).ok();
    assert_eq!((&stopped["stop_reason"], &stopped["stop_sequence"]), (&json!("stop_sequence"), &json!(word)));
    assert_eq!(stopped["content"][0]["text"], text[..text.find(word).unwrap()]);
}

#[test]
fn cached_tokens_are_reported() {
    // A hybrid has K and V in pages, and copies of states.
    let hybrid = shared("model/families/tales-qwen35-Q8_0.gguf");
    let models = hybrid.iter().map(|path| path.to_str().unwrap()).collect::<Vec<_>>();
    let server = Server::start(&models);
    let long = "The fox went to the river and looked for the key. ".repeat(8);
    for model in ["tales", "tales-qwen35-Q8_0"].into_iter().take(1 + models.len()) {
        let body = ask(json!({
            "model": model,
            "system": [{"type": "text", "text": long, "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
            "max_tokens": 2,
        }));
        let first = server.post(PATH, &body).ok()["usage"].clone();
        let second = server.post(PATH, &body).ok()["usage"].clone();
        let tokens = |usage: &Value, name: &str| usage[name].as_u64().unwrap();
        assert_eq!(tokens(&first, "cache_read_input_tokens"), 0, "{model}");
        assert!(tokens(&second, "cache_read_input_tokens") >= 64, "{model}: {second}");
        let all = |usage| tokens(usage, "input_tokens") + tokens(usage, "cache_read_input_tokens");
        assert_eq!(all(&second), all(&first), "{model}");
    }
}

#[test]
fn events_come_in_their_order() {
    let server = Server::start(&[]);
    let events = events(&server, json!({"stream": true}));
    let mut names: Vec<_> = events.iter().map(|(name, _)| name.as_str()).collect();
    names.dedup();
    assert_eq!(
        names,
        [
            "message_start",
            "ping",
            "content_block_start",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop"
        ]
    );
    assert!(events.iter().all(|(name, data)| data["type"] == name.as_str()));
    let message = &events[0].1["message"];
    assert_eq!((&message["content"], &message["stop_reason"]), (&json!([]), &Value::Null));
    let whole = server.post(PATH, &ask(json!({}))).ok();
    let text: String = events.iter().filter_map(|(_, data)| data["delta"]["text"].as_str()).collect();
    assert_eq!(whole["content"][0]["text"], text.as_str());
    let end = &events[events.len() - 2].1;
    assert_eq!(end["delta"], json!({"stop_reason": "max_tokens", "stop_sequence": null}));
    assert_eq!(end["usage"]["output_tokens"], 24);
}

#[test]
fn an_answer_goes_on_from_the_assistants_last_words() {
    let server = Server::start(&[]);
    let messages = |last: Value| json!({"messages": [{"role": "user", "content": "Tell me a story"}, {"role": "assistant", "content": last}]});
    let start = "Once upon a time, there was a purple";
    let answer = |last| server.post(PATH, &ask(messages(last))).ok()["content"][0]["text"].clone();
    let text = answer(json!(start));
    assert_eq!(text, answer(json!([{"type": "text", "text": start}])));
    // The same as continuing the text that the template makes.
    let raw = format!("<|user|>\nTell me a story<|end|>\n<|assistant|>\n{start}");
    let completion = server
        .post(
            "/v1/completions",
            &json!({"model": "tales", "prompt": raw, "max_tokens": 24, "temperature": 0}),
        )
        .ok();
    assert_eq!(completion["choices"][0]["text"], text);
}

#[test]
fn what_asks_for_nothing_is_accepted() {
    let server = Server::start(&[]);
    let keep = json!({"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]});
    server.post(PATH, &ask(json!({"context_management": keep, "mcp_servers": []}))).ok();
    server.post(&format!("{PATH}?beta=true"), &ask(json!({"context_management": {"edits": []}}))).ok();
}

#[test]
fn what_cannot_be_honoured_is_refused_in_anthropics_shape() {
    let server = Server::start(&["--ctx", "256", "--strict"]);
    let refused = |more: Value, expected: Expect| {
        let answer = server.post(PATH, &ask(more));
        let json = answer.json();
        assert_eq!(json["type"], "error");
        let error = &json["error"];
        expected.assert_eq(&format!(
            "{} {}: {}",
            answer.status,
            error["type"].as_str().unwrap(),
            error["message"].as_str().unwrap()
        ));
    };
    let content = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
    refused(
        json!({"model": "opus"}),
        expect!["404 not_found_error: there is no model `opus`; /v1/models lists the models"],
    );
    refused(
        json!({"messages": []}),
        expect!["400 invalid_request_error: `messages` is empty: there is nothing to answer"],
    );
    refused(
        json!({"messages": [{"role": "tool", "content": "4"}]}),
        expect![[
            r#"400 invalid_request_error: `messages[0].role` must be one of `user`, `assistant`, `system`, not "tool""#
        ]],
    );
    refused(
        content(json!([{"type": "image", "source": {"type": "url", "url": "x"}}])),
        expect![[
            r#"400 invalid_request_error: `messages[0].content[0].source.url` is an image, but the model `tales` reads text only: it has no vision tower, and no projector (mmproj) was loaded with it. Use a model that sees, or add the projector of this one: put its mmproj file beside the model's file, or start the server with --mmproj FILE"#
        ]],
    );
    refused(
        content(json!([{"type": "hologram"}])),
        expect![[
            r#"400 invalid_request_error: `messages[0].content[0]` is not supported: the type of the block is unknown"#
        ]],
    );
    refused(
        content(json!([{"type": "tool_use", "id": "1", "name": "f", "input": {}}])),
        expect![
            "400 invalid_request_error: `messages[0].content[0]` can only be in a message of the role `assistant`"
        ],
    );
    refused(
        content(json!([{"type": "tool_result", "tool_use_id": "1", "content": "4"}])),
        expect![
            "400 invalid_request_error: `messages[0].content[0].tool_use_id` is `1`, but no call before it has this id"
        ],
    );
    refused(
        content(json!("word ".repeat(400))),
        expect![
            "400 invalid_request_error: prompt is too long: 410 tokens > 256 maximum; shorten it, or start the server with a larger --ctx"
        ],
    );
    refused(
        json!({"thinking": {"type": "enabled", "budget_tokens": 2000}, "max_tokens": 100}),
        expect![
            "400 invalid_request_error: `thinking.budget_tokens` must be at least 1024 and below `max_tokens`"
        ],
    );
    refused(
        json!({"thinking": {"type": "enabled", "budget_tokens": 2000}, "max_tokens": 4000}),
        expect![[
            r#"400 invalid_request_error: `thinking` is not supported: the model does not reason: its chat template knows no reasoning"#
        ]],
    );
    refused(
        json!({"tool_choice": {"type": "any"}}),
        expect!["400 invalid_request_error: `tool_choice` is `any`, but there are no `tools`"],
    );
    refused(
        json!({"tool_choice": {"type": "tool", "name": "f"}}),
        expect!["400 invalid_request_error: `tool_choice` names `f`, which is not in `tools`"],
    );
    refused(
        json!({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        expect![[
            r#"400 invalid_request_error: `tools[0]` is not supported: this server runs no tools, so a `web_search_20250305` is not offered"#
        ]],
    );
    refused(
        json!({"tools": [{"name": "f"}]}),
        expect!["400 invalid_request_error: `tools[0].input_schema` is missing"],
    );
    refused(
        json!({"temperature": -1}),
        expect!["400 invalid_request_error: temperature must be finite, 0 or more, not -1"],
    );
    refused(
        json!({"speed": "fast"}),
        expect![
            "400 invalid_request_error: `speed` is not supported: all requests run at the same speed: `standard`"
        ],
    );
    refused(
        json!({"service_tier": "priority"}),
        expect!["400 invalid_request_error: `service_tier` is not supported: there is one tier, `auto`"],
    );
    refused(
        json!({"mcp_servers": [{"type": "url", "url": "https://x", "name": "x"}]}),
        expect!["400 invalid_request_error: `mcp_servers` is not supported: tools are called by the client"],
    );
    refused(
        json!({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}),
        expect![
            "400 invalid_request_error: `context_management` is not supported: all of `messages` is always used"
        ],
    );
    refused(
        json!({"container": "c"}),
        expect!["400 invalid_request_error: `container` is not supported: this server has no containers"],
    );
    let version =
        server.request("POST", PATH, &[("anthropic-version", "2030-01-01")], &ask(json!({})).to_string());
    expect!["`anthropic-version` is 2023-06-01 or 2026-10-21, not `2030-01-01`"]
        .assert_eq(version.json()["error"]["message"].as_str().unwrap());
    assert_eq!((version.status, server.get(PATH).status), (400, 405));
    // Fields without effect, or with the default value.
    let fine = json!({
        "metadata": {"user_id": "u"}, "service_tier": "auto", "speed": "standard", "thinking": {"type": "disabled"},
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": true}, "cache_control": {"type": "ephemeral"},
    });
    server.post(PATH, &ask(fine)).ok();
}
