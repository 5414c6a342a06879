//! `/v1/completions`, `/tokenize`, `/detokenize`.

use expect_test::{Expect, expect};
use serde_json::{Value, json};

use super::http::Server;

fn body(more: Value) -> Value {
    let mut body =
        json!({"model": "tales", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

#[test]
fn text_goes_on() {
    let server = Server::start(&[]);
    let complete = |more: Value| server.post("/v1/completions", &body(more)).ok();
    let text = |answer: &Value, choice: usize| answer["choices"][choice]["text"].as_str().unwrap().to_owned();
    let plain = complete(json!({}));
    assert_eq!(
        (&plain["object"], &plain["choices"][0]["finish_reason"]),
        (&json!("text_completion"), &json!("length"))
    );
    let plain = text(&plain, 0);
    assert_eq!(text(&complete(json!({"echo": true})), 0), format!("Once upon a time{plain}"));

    // Tokens are the same prompt, and prompts in a list have their own answers.
    let tokens = server.post("/tokenize", &json!({"model": "tales", "prompt": "Once upon a time"})).ok();
    let list = complete(json!({"prompt": [tokens["tokens"]]}));
    assert_eq!(text(&list, 0), plain);
    let two = complete(json!({"prompt": ["Once upon a time", "The fox"], "n": 2}));
    assert_eq!(two["choices"].as_array().unwrap().len(), 4);
    assert_eq!((text(&two, 0), text(&two, 1)), (plain.clone(), plain.clone()));
    assert_eq!(text(&two, 2), text(&complete(json!({"prompt": "The fox"})), 0));
    assert_eq!(two["usage"]["completion_tokens"], 48);

    let events = server.post("/v1/completions", &body(json!({"stream": true, "echo": true}))).events();
    let streamed: String = events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect();
    assert_eq!(streamed, format!("Once upon a time{plain}"));

    let logprobs = &complete(json!({"logprobs": 2}))["choices"][0]["logprobs"];
    assert_eq!(logprobs["tokens"].as_array().unwrap().len(), 12);
    assert_eq!(logprobs["top_logprobs"][0].as_object().unwrap().len(), 2);
    assert_eq!(logprobs["text_offset"][0], 0);
}

#[test]
fn text_becomes_tokens_and_back() {
    let server = Server::start(&[]);
    let tokens = |more: Value| {
        let mut body = json!({"model": "tales"});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post("/tokenize", &body).ok()
    };
    let bare = tokens(json!({"prompt": "A shy fox", "add_special_tokens": false, "return_token_strs": true}));
    assert_eq!(bare["count"].as_u64().unwrap() as usize, bare["token_strs"].as_array().unwrap().len());
    let text = server.post("/detokenize", &json!({"model": "tales", "tokens": bare["tokens"]})).ok();
    assert_eq!(text["prompt"].as_str().unwrap().trim(), "A shy fox");
    // A chat is tokenized as it is answered.
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let count = tokens(json!({"messages": messages}))["count"].clone();
    let chat = json!({"model": "tales", "messages": messages, "max_tokens": 1});
    assert_eq!(server.post("/v1/chat/completions", &chat).ok()["usage"]["prompt_tokens"], count);
}

#[test]
fn every_field_is_honoured_or_refused_by_name() {
    let server = Server::start(&[]);
    let refused = |more: Value, expected: Expect| {
        expected.assert_eq(&server.post("/v1/completions", &body(more)).error());
    };
    refused(
        json!({"suffix": "the end"}),
        expect![
            "400 invalid_request_error/invalid_value suffix: `suffix` is not supported: models here do not fill in"
        ],
    );
    refused(
        json!({"best_of": 3}),
        expect![
            "400 invalid_request_error/invalid_value best_of: `best_of` is not supported: answers are not ranked; `n` asks for several"
        ],
    );
    refused(
        json!({"echo": true, "logprobs": 1}),
        expect![
            "400 invalid_request_error/invalid_value echo: `echo` together with `logprobs` is not supported"
        ],
    );
    refused(
        json!({"prompt": []}),
        expect!["400 invalid_request_error/invalid_value prompt: `prompt` is an empty list"],
    );
    refused(
        json!({"prompt": ["a", 1]}),
        expect![
            "400 invalid_request_error/invalid_value prompt: `prompt`: texts, tokens and lists of tokens are mixed"
        ],
    );
    refused(
        json!({"prompt": [1, -1]}),
        expect![
            "400 invalid_request_error/invalid_value prompt[1]: `prompt[1]`: invalid type: integer `-1`, expected a text, a token, or a list of tokens"
        ],
    );
    refused(
        json!({"prompt": [4_000_000]}),
        expect![
            "400 invalid_request_error/invalid_value prompt: prompt token 4000000 at index 0 is not in the vocabulary of 4096 tokens"
        ],
    );
    refused(
        json!({"prompt": [[]]}),
        expect![
            "400 invalid_request_error/invalid_value prompt: the prompt is empty; a model needs at least one token to begin with"
        ],
    );
    refused(
        json!({"prompt": {}}),
        expect![
            "400 invalid_request_error/invalid_value prompt: `prompt`: invalid type: map, expected a text, a list of texts, a list of tokens, or a list of lists of tokens"
        ],
    );
    refused(
        json!({"max_tokens": 0}),
        expect!["400 invalid_request_error/invalid_value max_tokens: `max_tokens` must be at least 1"],
    );
    refused(
        json!({"logprobs": 21}),
        expect!["400 invalid_request_error/invalid_value logprobs: `logprobs` must be at most 20"],
    );
    refused(
        json!({"messages": []}),
        expect![
            "400 invalid_request_error/unknown_parameter messages: unknown field `messages`: expected one of `model`, `prompt`, `stream`, `stream_options`, `n`, `best_of`, `echo`, `max_tokens`, `temperature`, `top_p`, `top_k`, `min_p`, `frequency_penalty`, `presence_penalty`, `repetition_penalty`, `logit_bias`, `seed`, `stop`, `stop_token_ids`, `ignore_eos`, `logprobs`, `response_format`, `priority`, `suffix`, `user`"
        ],
    );
    let tokenize =
        |body: Value, expected: Expect| expected.assert_eq(&server.post("/tokenize", &body).error());
    tokenize(
        json!({"model": "tales"}),
        expect!["400 invalid_request_error/invalid_value prompt: give either `prompt` or `messages`"],
    );
    tokenize(
        json!({"model": "tales", "prompt": "a", "tools": []}),
        expect![
            "400 invalid_request_error/invalid_value tools: `tools` is not supported: a text has none; `messages` do"
        ],
    );
    expect!["400 invalid_request_error/invalid_value tokens[0]: `tokens[0]` is 9999999, but the model has 4096 tokens"]
        .assert_eq(&server.post("/detokenize", &json!({"model": "tales", "tokens": [9_999_999]})).error());
}
