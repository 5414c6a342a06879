//! `/v1/responses`.

use expect_test::{Expect, expect};
use serde_json::{Value, json};

use super::http::Server;

fn body(more: Value) -> Value {
    let mut body = json!({
        "model": "tales", "input": "Tell me a story about a shy fox", "max_output_tokens": 16, "temperature": 0,
    });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn text(response: &Value) -> &str {
    response["output"][0]["content"][0]["text"].as_str().unwrap()
}

#[test]
fn responses_are_kept_and_gone_on_from() {
    let server = Server::start(&[]);
    let first = server.post("/v1/responses", &body(json!({"metadata": {"a": "b"}}))).ok();
    assert_eq!((&first["object"], &first["status"]), (&json!("response"), &json!("incomplete")));
    assert_eq!(first["incomplete_details"]["reason"], "max_output_tokens");
    assert_eq!(first["usage"]["output_tokens"], 16);
    assert_eq!(first["metadata"], json!({"a": "b"}));
    let path = format!("/v1/responses/{}", first["id"].as_str().unwrap());
    assert_eq!(server.get(&path).ok(), first);

    // Going on from it is the same as saying everything again.
    let second = server
        .post("/v1/responses", &body(json!({"previous_response_id": first["id"], "input": "Go on"})))
        .ok();
    let items = json!([
        {"role": "user", "content": "Tell me a story about a shy fox"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text(&first), "annotations": []}]},
        {"role": "user", "content": [{"type": "input_text", "text": "Go on"}]},
    ]);
    let said_again = server.post("/v1/responses", &body(json!({"input": items, "store": false}))).ok();
    assert_eq!(text(&second), text(&said_again));
    assert_eq!(second["usage"]["input_tokens"], said_again["usage"]["input_tokens"]);
    // Responses with `store: false` are not stored.
    assert_eq!(server.get(&format!("/v1/responses/{}", said_again["id"].as_str().unwrap())).status, 404);

    let deleted = server.request("DELETE", &path, &[], "");
    assert_eq!(deleted.ok()["deleted"], true);
    assert_eq!(server.get(&path).status, 404);
    assert_eq!(server.request("DELETE", &path, &[], "").status, 404);
    // Later responses remain after their predecessor is deleted.
    server.post("/v1/responses", &body(json!({"previous_response_id": second["id"], "input": "And?"}))).ok();
}

#[test]
fn a_stream_tells_the_same_step_by_step() {
    let server = Server::start(&[]);
    let whole = server.post("/v1/responses", &body(json!({}))).ok();
    let answer = server.post("/v1/responses", &body(json!({"stream": true})));
    assert_eq!(answer.header("content-type"), Some("text/event-stream"));
    let body = answer.body.strip_suffix("data: [DONE]\n\n").expect("the end of the stream");
    let events: Vec<Value> = body
        .lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .map(|data| serde_json::from_str(data).unwrap())
        .collect();
    let mut kinds: Vec<_> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    kinds.dedup();
    expect![[r#"
        response.created
        response.in_progress
        response.output_item.added
        response.content_part.added
        response.output_text.delta
        response.output_text.done
        response.content_part.done
        response.output_item.done
        response.incomplete"#]]
    .assert_eq(&kinds.join("\n"));
    let numbers: Vec<_> = events.iter().map(|event| event["sequence_number"].as_u64().unwrap()).collect();
    assert!(numbers.iter().copied().eq(0..events.len() as u64));
    let deltas = events.iter().filter(|event| event["type"] == "response.output_text.delta");
    let streamed: String = deltas.map(|event| event["delta"].as_str().unwrap()).collect();
    assert_eq!(streamed, text(&whole));
    let last = &events.last().unwrap()["response"];
    assert_eq!((text(last), &last["usage"]["output_tokens"]), (text(&whole), &json!(16)));
    let path = format!("/v1/responses/{}", last["id"].as_str().unwrap());
    assert_eq!(server.get(&path).ok(), *last);
    assert_eq!(server.get(&format!("{path}?include[]=reasoning.encrypted_content&stream=false")).ok(), *last);
    expect!["400 invalid_request_error/invalid_value stream: `stream` is not supported: a stored response is returned as a whole"]
        .assert_eq(&server.get(&format!("{path}?stream=true")).error());
}

#[test]
fn every_field_is_honoured_or_refused_by_name() {
    let server = Server::start(&["--strict"]);
    let refused = |more: Value, expected: Expect| {
        expected.assert_eq(&server.post("/v1/responses", &body(more)).error());
    };
    refused(
        json!({"input": null}),
        expect!["400 invalid_request_error/invalid_value input: `input` is missing"],
    );
    refused(
        json!({"input": []}),
        expect![
            "400 invalid_request_error/invalid_value input: `input` has no messages: there is nothing to answer"
        ],
    );
    refused(
        json!({"input": [{"type": "item_reference", "id": "x"}]}),
        expect![
            "404 invalid_request_error/not_found -: there is no item `x`: its response was deleted, evicted or not stored; send the item itself"
        ],
    );
    refused(
        json!({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
        expect![[
            r#"400 invalid_request_error/invalid_value input[0].content[0].image_url: `input[0].content[0].image_url` is missing"#
        ]],
    );
    refused(
        json!({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}),
        expect!["400 invalid_request_error/invalid_value input[0].call_id: `input[0].call_id` is missing"],
    );
    refused(
        json!({"previous_response_id": "resp_0"}),
        expect![
            "404 invalid_request_error/not_found -: there is no response `resp_0`: it was deleted, evicted or not stored"
        ],
    );
    refused(
        json!({"background": true}),
        expect![
            "400 invalid_request_error/invalid_value background: `background` is not supported: a response is cancelled with its connection; omit it, or set it to false"
        ],
    );
    refused(
        json!({"conversation": "c"}),
        expect![
            "400 invalid_request_error/invalid_value conversation: `conversation` is not supported: use `previous_response_id` to continue a response"
        ],
    );
    refused(
        json!({"prompt": {"id": "p"}}),
        expect![
            "400 invalid_request_error/invalid_value prompt: `prompt` is not supported: there are no stored prompts"
        ],
    );
    refused(
        json!({"include": ["file_search_call.results"]}),
        expect![[
            r#"400 invalid_request_error/invalid_value include[0]: `include[0]` is not supported: there is no `file_search_call.results` here; there is message.output_text.logprobs"#
        ]],
    );
    refused(
        json!({"top_logprobs": 2}),
        expect![[
            r#"400 invalid_request_error/invalid_value top_logprobs: `top_logprobs` needs `include`: ["message.output_text.logprobs"]"#
        ]],
    );
    refused(
        json!({"reasoning": {"effort": "high"}}),
        expect![[
            r#"400 invalid_request_error/invalid_value reasoning.effort: `reasoning.effort` is not supported: the model does not reason: its chat template knows no reasoning"#
        ]],
    );
    refused(
        json!({"reasoning": {"summary": "detailed"}}),
        expect![
            "400 invalid_request_error/invalid_value reasoning.summary: `reasoning.summary` is not supported: reasoning is not summed up"
        ],
    );
    refused(
        json!({"text": {"format": {"type": "xml"}}}),
        expect![
            "400 invalid_request_error/invalid_value text.format.type: `text.format.type` is text, json_object or json_schema, not `xml`"
        ],
    );
    refused(
        json!({"text": {"verbosity": "low"}}),
        expect![
            "400 invalid_request_error/invalid_value text.verbosity: `text.verbosity` is not supported: the models do not support it; ask for the length in a message"
        ],
    );
    refused(
        json!({"tools": [{"type": "web_search"}]}),
        expect![[
            r#"400 invalid_request_error/invalid_value tools[0]: `tools[0]` is not supported: this server runs no tools, so a `web_search` is not offered"#
        ]],
    );
    refused(
        json!({"max_output_tokens": 0}),
        expect![
            "400 invalid_request_error/invalid_value max_output_tokens: `max_output_tokens` must be at least 1"
        ],
    );
}

#[test]
fn items_of_stored_responses_are_referred_to() {
    let server = Server::start(&[]);
    let question = json!({"type": "message", "id": "msg_own", "role": "user", "content": "Tell me a story about a shy fox"});
    let first = server.post("/v1/responses", &body(json!({"input": [question]}))).ok();
    let answer = json!({"type": "item_reference", "id": first["output"][0]["id"]});
    let asked = json!({"type": "item_reference", "id": "msg_own"});
    let more = json!({"role": "user", "content": "Go on"});
    let whole = json!([question, {"role": "assistant", "content": text(&first)}, more]);
    let expected = server.post("/v1/responses", &body(json!({"input": whole, "store": false}))).ok();
    let previous = first["id"].clone();
    for (name, request) in [
        ("output", json!({"input": [question, answer, more]})),
        ("input and output", json!({"input": [asked, answer, more]})),
        ("without a type", json!({"input": [{"id": "msg_own"}, answer, more]})),
        // Items that the conversation has are not repeated.
        ("after a response", json!({"previous_response_id": previous, "input": [answer, more]})),
    ] {
        let response = server.post("/v1/responses", &body(request)).ok();
        assert_eq!(text(&response), text(&expected), "{name}");
        assert_eq!(response["usage"]["input_tokens"], expected["usage"]["input_tokens"], "{name}");
    }
    let unknown = json!({"input": [{"type": "item_reference", "id": "msg_x"}, more]});
    let refused = server.post("/v1/responses", &body(unknown));
    assert!(refused.status == 404 && refused.body.contains("there is no item `msg_x`"), "{refused:?}");
    let twice = server.post("/v1/responses", &body(json!({"input": [answer, answer, more]})));
    assert!(twice.status == 400 && twice.body.contains("the same item"), "{twice:?}");
    server.request("DELETE", &format!("/v1/responses/{}", previous.as_str().unwrap()), &[], "").ok();
    assert_eq!(server.post("/v1/responses", &body(json!({"input": [answer, more]}))).status, 404);
}

#[test]
fn calls_and_results_are_read_in_every_form() {
    let server = Server::start(&[]);
    let tokens = |arguments: Value, output: Value| {
        let input = json!([
            {"role": "user", "content": "Weather?"},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": arguments},
            {"type": "function_call_output", "call_id": "c1", "output": output},
        ]);
        server.post("/v1/responses", &body(json!({"input": input, "max_output_tokens": 1}))).ok()["usage"]["input_tokens"].clone()
    };
    let text = tokens(json!("{\"q\":1}"), json!("{\"a\":\"sun\"}"));
    assert_eq!(tokens(json!({"q": 1}), json!({"a": "sun"})), text);
    assert_eq!(tokens(json!({"q": 1}), json!([{"type": "input_text", "text": "{\"a\":\"sun\"}"}])), text);
    assert_eq!(tokens(json!({"q": 1}), json!({"type": "text", "text": "{\"a\":\"sun\"}"})), text);
    assert_eq!(tokens(json!(""), json!("")), tokens(json!(null), json!(null)));
    assert_eq!(tokens(json!({}), json!([])), tokens(json!("{}"), json!("")));
}
