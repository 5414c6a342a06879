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

/// The log-probabilities of an echoed prompt, and where they stand.
#[test]
fn an_echoed_prompt_has_its_log_probabilities() {
    let server = Server::start(&[]);
    let complete = |more: Value| server.post("/v1/completions", &body(more)).ok();
    let choice = |answer: &Value, choice: usize| answer["choices"][choice].clone();
    let list = |logprobs: &Value, field: &str| logprobs[field].as_array().unwrap().clone();
    let tokenize = |text: &str| {
        let answer = server.post("/tokenize", &json!({"model": "tales", "prompt": text})).ok();
        answer["tokens"].as_array().unwrap().clone()
    };
    let plain = complete(json!({"logprobs": 2}));
    let (story, answered) = (plain["choices"][0]["text"].as_str().unwrap(), &plain["choices"][0]["logprobs"]);
    let story = format!("Once upon a time{story}");
    let prompt = tokenize("Once upon a time");
    let tokens = tokenize(&story);
    assert_eq!(tokens.len(), prompt.len() + 12, "the story is read as it was written");

    // The model assigns the same log-probabilities to its own answer as a prompt.
    let read = complete(json!({"prompt": story, "echo": true, "logprobs": 2, "max_tokens": 0}));
    let reading = choice(&read, 0);
    assert_eq!((&reading["text"], &reading["finish_reason"]), (&json!(story), &json!("length")));
    assert_eq!(read["usage"]["completion_tokens"], 0);
    let read = &reading["logprobs"];
    for field in ["tokens", "token_logprobs", "top_logprobs"] {
        let (all, own) = (list(read, field), list(answered, field));
        assert_eq!(all.len(), tokens.len());
        assert_eq!(all[prompt.len()..], own, "{field}");
    }
    for field in ["token_logprobs", "top_logprobs"] {
        let all = list(read, field);
        assert!(all[0].is_null() && !all[1..].iter().any(Value::is_null), "{field}: {all:?}");
    }
    let offsets = list(read, "text_offset");
    let begin = |i: usize| offsets[i].as_u64().unwrap() as usize;
    for (i, token) in list(read, "tokens").iter().enumerate().filter(|(i, _)| begin(*i) > 0) {
        let rest: String = story.chars().skip(begin(i)).collect();
        assert!(rest.starts_with(token.as_str().unwrap()), "{token} at {rest:?}");
    }
    // Of a token that is none of the best, there is also its own.
    let own = |top: &Value, own: &Value| top.as_object().unwrap().values().any(|logprob| logprob == own);
    let (tops, all) = (list(read, "top_logprobs"), list(read, "token_logprobs"));
    assert!(tops.iter().zip(&all).skip(1).all(|(top, logprob)| own(top, logprob)), "{tops:?}");
    assert!(tops[1..].iter().any(|top| top.as_object().unwrap().len() == 3), "{tops:?}");

    // Tokens are the same prompt; it may go on, and `n` answers and other prompts stand beside it.
    let more = json!({
        "prompt": [tokens, prompt], "echo": true, "logprobs": 2, "max_tokens": 3, "n": 2, "temperature": 1, "seed": 5,
    });
    let several = complete(more.clone());
    for (index, prompt) in [&tokens, &tokens, &prompt, &prompt].into_iter().enumerate() {
        let logprobs = choice(&several, index)["logprobs"].clone();
        for field in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
            let own = list(&logprobs, field);
            assert_eq!(own.len(), prompt.len() + 3, "{field} of choice {index}");
            assert_eq!(own[..prompt.len()], list(read, field)[..prompt.len()], "{field} of choice {index}");
        }
        let text = choice(&several, index)["text"].as_str().unwrap().to_owned();
        let begin = logprobs["text_offset"][prompt.len()].as_u64().unwrap() as usize;
        let answer: String =
            list(&logprobs, "tokens")[prompt.len()..].iter().filter_map(Value::as_str).collect();
        assert_eq!(text.chars().skip(begin).collect::<String>(), answer);
    }

    // The same in parts: the prompt comes first.
    let mut streamed = more;
    streamed["stream"] = true.into();
    let events = server.post("/v1/completions", &body(streamed)).events();
    for index in 0..4 {
        let parts = events.iter().map(|event| &event["choices"][0]).filter(|part| part["index"] == index);
        let parts: Vec<_> = parts.collect();
        let whole = choice(&several, index);
        let text: String = parts.iter().filter_map(|part| part["text"].as_str()).collect();
        assert_eq!(text, whole["text"]);
        assert_eq!(parts[0]["text"], if index < 2 { story.as_str() } else { "Once upon a time" });
        for field in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
            let all: Vec<_> = parts.iter().flat_map(|part| list(&part["logprobs"], field)).collect();
            assert_eq!(all, list(&whole["logprobs"], field), "{field} of choice {index}");
        }
    }
}

#[test]
fn a_scored_prompt_is_computed_whole_and_then_cached_for_others() {
    let server = Server::start(&[]);
    let text = "Once upon a time there was a shy fox who lived beside the sea. ".repeat(6);
    let complete = |more: Value| {
        let mut body = body(more);
        body["prompt"] = text.clone().into();
        let answer = server.post("/v1/completions", &body).ok();
        let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        (cached, answer["choices"][0]["logprobs"].clone())
    };
    let echo = json!({"echo": true, "logprobs": 1, "max_tokens": 1});
    let (cached, alone) = complete(echo.clone());
    assert_eq!(cached, 0);
    assert!(complete(json!({"max_tokens": 1})).0 > 0);
    // Beside others, and with the cache full of it.
    std::thread::scope(|scope| {
        let others: Vec<_> = (0..8)
            .map(|i| {
                let scored = i % 2 == 0;
                let plain = json!({"max_tokens": 20, "temperature": 1, "seed": i});
                let (complete, body) = (&complete, if scored { echo.clone() } else { plain });
                scope.spawn(move || (scored, complete(body)))
            })
            .collect();
        for other in others {
            let (scored, (cached, logprobs)) = other.join().unwrap();
            assert!(!scored || (cached, &logprobs) == (0, &alone), "{cached} cached: {logprobs}");
        }
    });
}

/// One entry for each token that was sampled: who sums up a prompt's leaves off the last one, whatever it is.
#[test]
fn the_stop_token_has_a_log_probability() {
    let server = Server::start(&[]);
    let complete = |more: Value| server.post("/v1/completions", &body(more)).ok();
    let whole = complete(json!({"logprobs": 1, "echo": true, "max_tokens": 1}));
    let text = whole["choices"][0]["text"].as_str().unwrap();
    let tokens = server.post("/tokenize", &json!({"model": "tales", "prompt": text})).ok();
    let stop = tokens["tokens"].as_array().unwrap().last().unwrap().clone();
    let stopped = complete(json!({"logprobs": 1, "echo": true, "max_tokens": 1, "stop_token_ids": [stop]}));
    let (stopped, whole) = (&stopped["choices"][0], &whole["choices"][0]);
    assert_eq!((&stopped["text"], &stopped["finish_reason"]), (&json!("Once upon a time"), &json!("stop")));
    assert_eq!(stopped["logprobs"], whole["logprobs"]);
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
    let server = Server::start(&["--strict"]);
    let refused = |more: Value, expected: Expect| {
        expected.assert_eq(&server.post("/v1/completions", &body(more)).error());
    };
    refused(
        json!({"suffix": "the end"}),
        expect![
            "400 invalid_request_error/invalid_value suffix: `suffix`: the model does not support fill-in-the-middle: its tokenizer has no tokens for it"
        ],
    );
    refused(
        json!({"best_of": 3}),
        expect![
            "400 invalid_request_error/invalid_value best_of: `best_of` is not supported: answers are not ranked; `n` asks for several"
        ],
    );
    refused(
        json!({"prompt": []}),
        expect!["400 invalid_request_error/invalid_value prompt: `prompt` is an empty list"],
    );
    refused(
        json!({"prompt": ["a", 1]}),
        expect![
            "400 invalid_request_error/invalid_value prompt: `prompt`: texts, tokens and lists of tokens are mixed: element 1 is of another kind than those before"
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
        expect![[
            r#"400 invalid_request_error/invalid_value prompt.prompt_string: `prompt.prompt_string` is missing"#
        ]],
    );
    refused(
        json!({"max_tokens": 0}),
        expect!["400 invalid_request_error/invalid_value max_tokens: `max_tokens` must be at least 1"],
    );
    refused(
        json!({"logprobs": 21}),
        expect!["400 invalid_request_error/invalid_value logprobs: `logprobs` must be at most 20"],
    );
    let tokenize =
        |body: Value, expected: Expect| expected.assert_eq(&server.post("/tokenize", &body).error());
    tokenize(
        json!({"model": "tales"}),
        expect!["400 invalid_request_error/invalid_value prompt: give either `prompt` or `messages`"],
    );
    expect!["400 invalid_request_error/invalid_value tokens[0]: `tokens[0]` is 9999999, but the model has 4096 tokens"]
        .assert_eq(&server.post("/detokenize", &json!({"model": "tales", "tokens": [9_999_999]})).error());
}
