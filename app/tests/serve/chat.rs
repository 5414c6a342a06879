//! `/v1/chat/completions`.

use std::thread;

use serde_json::{Value, json};

use super::{
    ask,
    http::{Answer, Server},
};

fn content(answer: &Value, choice: usize) -> &str {
    answer["choices"][choice]["message"]["content"].as_str().unwrap()
}

/// All text of a stream's choice.
fn streamed(events: &[Value], choice: usize) -> String {
    let choices = events.iter().flat_map(|event| event["choices"].as_array().unwrap());
    let of_choice = choices.filter(|part| part["index"] == choice);
    of_choice.filter_map(|part| part["delta"]["content"].as_str()).collect()
}

#[test]
fn an_answer_has_text_a_reason_and_usage() {
    let server = Server::start(&[]);
    let answer = server.post("/v1/chat/completions", &ask(json!({})));
    assert!(answer.header("x-request-id").unwrap().starts_with("req_"));
    let answer = answer.ok();
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(answer["model"], "tales");
    assert!(answer["id"].as_str().unwrap().starts_with("chatcmpl-"));
    let choice = &answer["choices"][0];
    assert_eq!(
        (&choice["message"]["role"], &choice["finish_reason"]),
        (&json!("assistant"), &json!("length"))
    );
    assert!(content(&answer, 0).len() > 20, "{answer}");
    let usage = &answer["usage"];
    assert_eq!(usage["completion_tokens"], 24);
    let sum = usage["prompt_tokens"].as_u64().unwrap() + 24;
    assert_eq!(usage["total_tokens"], sum);

    // The same question again finds its prompt in the cache and has the same answer.
    let again = server.post("/v1/chat/completions", &ask(json!({}))).ok();
    assert_eq!(content(&again, 0), content(&answer, 0));

    // Content in parts is the same content.
    let parts = json!([{"type": "text", "text": "Tell me a story about a shy fox"}, {"type": "text", "text": " who lost a key"}]);
    let messages = json!({"messages": [{"role": "user", "content": parts}]});
    assert_eq!(content(&server.post("/v1/chat/completions", &ask(messages)).ok(), 0), content(&answer, 0));
}

#[test]
fn a_stream_is_the_same_answer_in_parts() {
    let server = Server::start(&[]);
    let whole = server.post("/v1/chat/completions", &ask(json!({"n": 2, "seed": 7, "temperature": 1}))).ok();
    let body = ask(json!({
        "n": 2, "seed": 7, "temperature": 1, "stream": true, "stream_options": {"include_usage": true},
    }));
    let events = server.post("/v1/chat/completions", &body).events();
    assert_ne!(content(&whole, 0), content(&whole, 1));
    for choice in 0..2 {
        assert_eq!(streamed(&events, choice), content(&whole, choice));
    }
    assert_eq!(events[0]["object"], "chat.completion.chunk");
    assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    let last = events.last().unwrap();
    assert_eq!((&last["choices"], &last["usage"]["completion_tokens"]), (&json!([]), &json!(48)));
    let reasons = events.iter().flat_map(|event| event["choices"].as_array().unwrap());
    let reasons: Vec<_> =
        reasons.map(|choice| &choice["finish_reason"]).filter(|reason| !reason.is_null()).collect();
    assert_eq!(reasons, ["length", "length"]);
    // Without being asked for, usage is not sent.
    let plain = server.post("/v1/chat/completions", &ask(json!({"stream": true}))).events();
    assert!(plain.iter().all(|event| event.get("usage").is_none()));
}

#[test]
fn seeds_stops_penalties_and_biases_work() {
    let server = Server::start(&[]);
    let answer = |more: Value| server.post("/v1/chat/completions", &ask(more)).ok();
    let text = |more: Value| content(&answer(more), 0).to_owned();
    let drawn = json!({"temperature": 1.2, "seed": 42});
    assert_eq!(text(drawn.clone()), text(drawn));
    assert_ne!(text(json!({"temperature": 1.2, "seed": 42})), text(json!({"temperature": 1.2, "seed": 43})));

    let plain = text(json!({}));
    let word = plain.split_whitespace().nth(4).unwrap();
    let stopped = answer(json!({"stop": word}));
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    assert_eq!(content(&stopped, 0), &plain[..plain.find(word).unwrap()]);

    // A token that is pushed to the front is all there is.
    let token = server
        .post("/tokenize", &json!({"model": "tales", "prompt": "fox", "add_special_tokens": false}))
        .ok();
    let token = token["tokens"][0].as_u64().unwrap().to_string();
    let biased = text(json!({"logit_bias": {token.as_str(): 100}, "max_tokens": 4}));
    let piece = server
        .post("/detokenize", &json!({"model": "tales", "tokens": [token.parse::<u32>().unwrap()]}))
        .ok();
    let piece = piece["prompt"].as_str().unwrap().trim().to_owned();
    assert_eq!(biased.matches(&piece).count(), 4, "{biased:?}");
    let penalized =
        text(json!({"logit_bias": {token.as_str(): 100}, "frequency_penalty": 200, "max_tokens": 4}));
    assert_ne!(penalized, biased);
}

#[test]
fn logprobs_belong_to_their_tokens() {
    let server = Server::start(&[]);
    let answer = server.post("/v1/chat/completions", &ask(json!({"logprobs": true, "top_logprobs": 3}))).ok();
    let tokens = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(tokens.len(), 24);
    let bytes: Vec<u8> = tokens
        .iter()
        .flat_map(|token| token["bytes"].as_array().unwrap())
        .map(|b| b.as_u64().unwrap() as u8)
        .collect();
    assert_eq!(String::from_utf8(bytes).unwrap().trim_start(), content(&answer, 0).trim_start());
    for token in tokens {
        let top = token["top_logprobs"].as_array().unwrap();
        assert_eq!(top.len(), 3);
        // Greedy: the sampled token is the best one.
        assert_eq!((&top[0]["token"], &top[0]["logprob"]), (&token["token"], &token["logprob"]));
    }
    let events = server
        .post("/v1/chat/completions", &ask(json!({"logprobs": true, "top_logprobs": 3, "stream": true})))
        .events();
    let streamed: Vec<_> = events
        .iter()
        .filter_map(|event| event["choices"][0]["logprobs"]["content"].as_array())
        .flatten()
        .collect();
    assert_eq!(streamed, tokens.iter().collect::<Vec<_>>());
}

#[test]
fn sixty_four_clients_get_what_each_gets_alone() {
    let server = Server::start(&[]);
    let body = |i: usize| {
        let length = 8 + i % 40;
        ask(json!({
            "stream": true, "max_tokens": length, "seed": i, "temperature": 1,
            "messages": [{"role": "user", "content": format!("Tell me story number {i} about a fox")}],
        }))
    };
    let alone: Vec<_> =
        (0..64).map(|i| streamed(&server.post("/v1/chat/completions", &body(i)).events(), 0)).collect();
    let together: Vec<_> = thread::scope(|scope| {
        let ask = |i| streamed(&server.post("/v1/chat/completions", &body(i)).events(), 0);
        let clients: Vec<_> = (0..64).map(|i| scope.spawn(move || ask(i))).collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    });
    assert_eq!(together, alone);
    server.wait_for("paguro_kv_pages_used", 0.0);
}

#[test]
fn models_are_listed_and_shown() {
    let server = Server::start(&[]);
    let list = server.get("/v1/models").ok();
    assert_eq!(list["data"][0]["id"], "tales");
    assert_eq!(server.get("/v1/models/tales").ok(), list["data"][0]);
    let missing = server.get("/v1/models/no/such");
    assert_eq!(
        missing.error(),
        "404 invalid_request_error/model_not_found model: there is no model `no/such`; /v1/models lists the models"
    );
    let missing: Answer = server.post("/v1/chat/completions", &ask(json!({"model": "gpt-5"})));
    assert_eq!(missing.status, 404);
}

#[test]
fn progress_of_a_long_prompt_comes_before_the_answer() {
    let server = Server::start(&["--batch-tokens", "64", "--step-time", "1s"]);
    let long = "Tell me a story about a shy fox who lost a key. ".repeat(30);
    let check = |path: &str, body: Value, expected_cache: u64| {
        let events = server.post(path, &body).events();
        let progress: Vec<_> = events.iter().map(|event| &event["prompt_progress"]).collect();
        let first_text = progress.iter().rposition(|it| it.is_object()).unwrap() + 1;
        let reports: Vec<_> = progress.iter().filter(|it| it.is_object()).collect();
        let number = |report: &Value, name: &str| report[name].as_u64().unwrap();
        let total = number(reports[0], "total");
        assert!(total > 300 && number(reports[0], "cache") == expected_cache, "{path}: {reports:?}");
        assert_eq!(number(reports[0], "processed"), expected_cache);
        assert_eq!(number(reports.last().unwrap(), "processed"), total, "{path}: {reports:?}");
        for pair in reports.windows(2) {
            assert!(number(pair[0], "processed") < number(pair[1], "processed"), "{path}: {reports:?}");
            assert!(number(pair[0], "time_ms") <= number(pair[1], "time_ms"), "{path}: {reports:?}");
        }
        assert!(first_text < events.len(), "{path}");
        reports.len()
    };
    let chat = ask(
        json!({"messages": [{"role": "user", "content": long}], "stream": true, "return_progress": true}),
    );
    assert!(check("/v1/chat/completions", chat.clone(), 0) >= 5);
    let text = json!({
        "model": "tales", "prompt": format!("Once: {long}"), "max_tokens": 2, "stream": true, "return_progress": true
    });
    assert!(check("/v1/completions", text, 0) >= 5);
    // Nobody gets what was not asked for.
    let mut silent = chat;
    silent["return_progress"] = json!(false);
    let answer = server.post("/v1/chat/completions", &silent);
    assert!(answer.status == 200 && !answer.body.contains("prompt_progress"));
}

#[test]
fn a_prompt_ends_with_the_beginning_of_its_answer_in_every_api() {
    let server = Server::start(&["--ctx", "512"]);
    let messages = |prefill: &str| json!([{"role": "user", "content": "Say end"}, {"role": "assistant", "content": prefill}]);
    let text = |prefill: &str| {
        let body = json!({"model": "tales", "messages": messages(prefill), "continue_final_message": true});
        let tokens = server.post("/tokenize", &body).ok()["tokens"].clone();
        let count = tokens.as_array().unwrap().len();
        let body = json!({"model": "tales", "tokens": tokens});
        (server.post("/detokenize", &body).ok()["prompt"].as_str().unwrap().to_owned(), count as u64)
    };
    let (base, _) = text("qqq");
    let base = base.strip_suffix("qqq").unwrap();
    for prefill in ["e", "en", "end", "<", "|", "<|end", "<|end|>", "  x ", "ü🦊", ""] {
        let (prompt, count) = text(prefill);
        assert_eq!(prompt.strip_suffix(prefill), Some(base), "{prefill:?}");
        let body = json!({"model": "tales", "messages": messages(prefill), "max_tokens": 1});
        let counted = server.post("/v1/messages/count_tokens", &body).ok()["input_tokens"].clone();
        let chat = server.post("/v1/chat/completions", &body).ok()["usage"]["prompt_tokens"].clone();
        let usage = server.post("/v1/messages", &body).ok()["usage"].clone();
        let anthropic =
            usage["input_tokens"].as_u64().unwrap() + usage["cache_read_input_tokens"].as_u64().unwrap();
        let body = json!({"model": "tales", "messages": messages(prefill), "stream": false, "options": {"num_predict": 1}});
        let ollama = server.post("/api/chat", &body).ok()["prompt_eval_count"].clone();
        assert_eq!(
            (counted, chat, anthropic, ollama),
            (json!(count), json!(count), count, json!(count)),
            "{prefill:?}"
        );
    }
}
