//! Refusals of a strict server: every field is honoured or named. (`tolerance.rs` has the fields that other servers
//! ignore.)

use expect_test::{Expect, expect};
use serde_json::{Value, json};

use super::{ask, http::Server};

#[test]
fn every_field_is_honoured_or_refused_by_name() {
    let server = Server::start(&["--ctx", "256", "--strict"]);
    let refused = |more: Value, expected: Expect| {
        expected.assert_eq(&server.post("/v1/chat/completions", &ask(more)).error());
    };
    let messages = |messages: Value| json!({"messages": messages});
    refused(
        json!({"messages": []}),
        expect![
            "400 invalid_request_error/invalid_value messages: `messages` is empty: there is nothing to answer"
        ],
    );
    refused(
        messages(json!([{"role": "king", "content": "Hi"}])),
        expect![[
            r#"400 invalid_request_error/invalid_value messages[0].role: `messages[0].role` must be one of `system`, `developer`, `user`, `assistant`, `tool`, not "king""#
        ]],
    );
    refused(
        messages(json!([{"role": "user"}])),
        expect![
            "400 invalid_request_error/invalid_value messages[0].content: `messages[0].content` is missing"
        ],
    );
    refused(
        messages(json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])),
        expect![[
            r#"400 invalid_request_error/invalid_value messages[0].content[0].image_url: `messages[0].content[0].image_url` is an image, but the model `tales` reads text only: it has no vision tower, and no projector (mmproj) was loaded with it. Use a model that sees, or add the projector of this one: put its mmproj file beside the model's file, or start the server with --mmproj FILE"#
        ]],
    );
    refused(
        messages(json!([{"role": "user", "content": 7}])),
        expect![
            "400 invalid_request_error/invalid_value messages[0].content: `messages[0].content` must be a string or an array or an object, not 7"
        ],
    );
    refused(
        json!({"temperature": -1}),
        expect![
            "400 invalid_request_error/invalid_value temperature: temperature must be finite, 0 or more, not -1"
        ],
    );
    refused(
        json!({"temperature": "hot"}),
        expect![[
            r#"400 invalid_request_error/invalid_value temperature: `temperature` must be a number, not "hot""#
        ]],
    );
    refused(
        json!({"top_p": 2}),
        expect!["400 invalid_request_error/invalid_value top_p: top_p must be between 0 and 1, not 2"],
    );
    refused(
        json!({"n": 0}),
        expect!["400 invalid_request_error/invalid_value n: `n` is 0; it must be between 1 and 64"],
    );
    refused(
        json!({"n": 1000}),
        expect!["400 invalid_request_error/invalid_value n: `n` is 1000; it must be between 1 and 64"],
    );
    refused(
        json!({"max_tokens": 0}),
        expect!["400 invalid_request_error/invalid_value max_tokens: `max_tokens` must be at least 1"],
    );
    refused(
        json!({"top_logprobs": 2}),
        expect![
            "400 invalid_request_error/invalid_value top_logprobs: `top_logprobs` needs `logprobs`: true"
        ],
    );
    refused(
        json!({"logprobs": true, "top_logprobs": 21}),
        expect!["400 invalid_request_error/invalid_value top_logprobs: `top_logprobs` must be at most 20"],
    );
    refused(
        json!({"logit_bias": {"fox": 1}}),
        expect![
            "400 invalid_request_error/invalid_value logit_bias.fox: `fox` in `logit_bias` is not a token's number"
        ],
    );
    refused(
        json!({"logit_bias": {"5": 101}}),
        expect![
            "400 invalid_request_error/invalid_value logit_bias.5: the bias of a token is between -100 and 100, not 101"
        ],
    );
    refused(
        json!({"logit_bias": {"4000000000": 1}}),
        expect![
            "400 invalid_request_error/invalid_value logit_bias: logit_bias must be of tokens in the vocabulary, not token 4000000000"
        ],
    );
    refused(
        json!({"response_format": {"type": "yaml"}}),
        expect![[
            r#"400 invalid_request_error/invalid_value response_format.type: `response_format.type` must be one of `text`, `json_object`, `json_schema`, not "yaml""#
        ]],
    );
    refused(
        json!({"response_format": {"type": "json_schema"}}),
        expect![
            "400 invalid_request_error/invalid_value response_format.json_schema.schema: `response_format.json_schema.schema` is missing"
        ],
    );
    refused(
        json!({"tool_choice": "required"}),
        expect![
            "400 invalid_request_error/invalid_value tool_choice: `tool_choice` is `required`, but there are no `tools`"
        ],
    );
    refused(
        json!({"tool_choice": {"type": "function", "function": {"name": "f"}}}),
        expect![
            "400 invalid_request_error/invalid_value tool_choice: `tool_choice` names `f`, which is not in `tools`"
        ],
    );
    refused(
        json!({"reasoning_effort": "high"}),
        expect![[
            r#"400 invalid_request_error/invalid_value reasoning_effort: `reasoning_effort` is not supported: the model does not reason: its chat template knows no reasoning"#
        ]],
    );
    refused(
        json!({"reasoning_effort": "heroic"}),
        expect![[
            r#"400 invalid_request_error/invalid_value reasoning_effort: `reasoning_effort` is none, minimal, low, medium, high, xhigh or max, not `heroic`"#
        ]],
    );
    refused(
        json!({"store": true}),
        expect![
            "400 invalid_request_error/invalid_value store: `store` is not supported: chat completions are not stored; /v1/responses stores"
        ],
    );
    refused(
        json!({"service_tier": "flex"}),
        expect![
            "400 invalid_request_error/invalid_value service_tier: `service_tier` is not supported: there is one tier, `default`"
        ],
    );
    refused(
        json!({"modalities": ["audio"]}),
        expect![
            r#"400 invalid_request_error/invalid_value modalities: `modalities` is not supported: answers are text; omit it, or set it to ["text"]"#
        ],
    );
    refused(
        json!({"verbosity": "low"}),
        expect![
            "400 invalid_request_error/invalid_value verbosity: `verbosity` is not supported: the models do not support it; ask for the length in a message"
        ],
    );
    refused(
        json!({"audio": {"voice": "ash"}}),
        expect!["400 invalid_request_error/invalid_value audio: `audio` is not supported: answers are text"],
    );
    refused(
        json!({"functions": [{"name": "f"}]}),
        expect![
            "400 invalid_request_error/invalid_value functions: `functions` is not supported: `tools` has replaced it"
        ],
    );
    refused(
        json!({"function_call": {"name": "f"}}),
        expect![
            r#"400 invalid_request_error/invalid_value function_call: `function_call` is not supported: `tool_choice` has replaced it; omit it, or set it to "none" or "auto""#
        ],
    );
    refused(
        json!({"web_search_options": {"search_context_size": "low"}}),
        expect![
            "400 invalid_request_error/invalid_value web_search_options: `web_search_options` is not supported: this server does not search the web"
        ],
    );
    refused(
        messages(json!([{"role": "user", "content": "word ".repeat(400)}])),
        expect![
            "400 invalid_request_error/context_length_exceeded -: This model's maximum context length is 256 tokens. However, your prompt has 410 tokens, which leaves no room for an answer. Shorten the prompt, or start the server with a larger --ctx."
        ],
    );
    // Fields without effect, or with the default value.
    let fine = json!({
        "user": "u", "metadata": {"a": "b"}, "store": false, "service_tier": "auto", "modalities": ["text"],
        "verbosity": "medium", "safety_identifier": "s", "prompt_cache_key": "k", "logprobs": false,
        "tools": null, "response_format": {"type": "text"}, "parallel_tool_calls": true, "reasoning_effort": "none",
    });
    server.post("/v1/chat/completions", &ask(fine)).ok();
}

#[test]
fn what_is_not_json_or_not_there_is_refused() {
    let server = Server::start(&["--max-body", "1KiB"]);
    let refused = |body: &str, expected: Expect| {
        expected.assert_eq(&server.request("POST", "/v1/chat/completions", &[], body).error());
    };
    refused(
        "",
        expect![
            "400 invalid_request_error/invalid_value -: the body is not JSON: EOF while parsing a value at line 1 column 0"
        ],
    );
    refused(
        "{",
        expect![
            "400 invalid_request_error/invalid_value -: the body is not JSON: EOF while parsing an object at line 1 column 1"
        ],
    );
    // Valid JSON beyond the limits of its parser.
    refused(
        &format!("{{\"metadata\": {}{}}}", "[".repeat(127), "]".repeat(127)),
        expect![
            "400 invalid_request_error/invalid_value -: the body is nested too deeply at line 1 column 140: at most 127 levels of lists and objects are read"
        ],
    );
    refused(
        "{\"temperature\": 1e400}",
        expect![
            "400 invalid_request_error/invalid_value -: the body has a number out of range at line 1 column 21: at most 1.8e308 can be read"
        ],
    );
    refused(
        "[]",
        expect!["400 invalid_request_error/invalid_value -: the body is a JSON array; it must be an object"],
    );
    refused(
        "{} {}",
        expect![
            "400 invalid_request_error/invalid_value -: the body is not JSON: trailing characters at line 1 column 4"
        ],
    );
    refused(
        r#"{"messages": []}"#,
        expect![
            "400 invalid_request_error/invalid_value messages: `messages` is empty: there is nothing to answer"
        ],
    );
    refused(
        r#"{"model": "tales", "model": "tales"}"#,
        expect!["400 invalid_request_error/invalid_value -: duplicate field `model`"],
    );
    refused(
        &format!(r#"{{"model": "{}"}}"#, "x".repeat(2000)),
        expect![
            "413 invalid_request_error/request_too_large -: the request's body is larger than 1.0 kB; --max-body of the server sets the limit"
        ],
    );
    // Most clients read the answer only after they have sent everything: so much of it is read before it comes.
    let huge = server.request("POST", "/v1/chat/completions", &[], &"x".repeat(40 << 20));
    assert_eq!(huge.status, 413);
    let packed = server.request("POST", "/v1/chat/completions", &[("content-encoding", "gzip")], "x");
    expect![[r#"400 invalid_request_error/invalid_value content-encoding: the encoding "gzip" of the body is not supported; send the body without an encoding"#]].assert_eq(&packed.error());
    expect!["404 invalid_request_error/not_found -: there is nothing at /nowhere; /openapi.json lists what there is"].assert_eq(&server.get("/nowhere").error());
    expect![
        "405 invalid_request_error/method_not_allowed -: /v1/chat/completions does not take GET requests"
    ]
    .assert_eq(&server.get("/v1/chat/completions").error());
}
