//! Drafts: the same texts with and without them, and their fields and counts.

use serde_json::{Value, json};

use super::http::Server;

const STORY: &str = "Tell me a story about a shy fox who lost a key";

fn ask(server: &Server, more: &Value) -> Value {
    let messages = json!([{"role": "user", "content": STORY}]);
    let mut body =
        json!({"model": "tales", "messages": messages, "max_tokens": 60, "seed": 7, "temperature": 0});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    server.post("/v1/chat/completions", &body).ok()
}

fn content(answer: &Value) -> &str {
    answer["choices"][0]["message"]["content"].as_str().unwrap()
}

#[test]
fn answers_are_the_same_with_and_without_drafts() {
    let server = Server::start(&["--ctx", "1024"]);
    let kinds = [
        json!({}),
        json!({"temperature": 0.9, "top_p": 0.9, "seed": 3}),
        json!({"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.4, "dry_multiplier": 0.8}),
        json!({"response_format": {"type": "json_schema", "json_schema": {"name": "fox", "schema": {
            "type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
            "required": ["name", "age"], "additionalProperties": false}}}}),
        json!({"logit_bias": {"100": 5}, "logprobs": true, "top_logprobs": 2, "min_tokens": 20, "stop": ["the end"]}),
    ];
    for kind in kinds {
        let with = |more: Value| {
            let mut body = kind.clone();
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            ask(&server, &body)
        };
        let plain = with(json!({"speculate": "off"}));
        let text = content(&plain);
        assert_eq!(plain["usage"]["completion_tokens_details"]["accepted_prediction_tokens"], 0);
        // A prediction that is right, one with an error, one that ends early, and one of another text.
        let wrong = text.replacen(' ', " quite ", 3);
        let half: String = text.chars().take(text.len() / 2).collect();
        for prediction in [text, &wrong, &half, "Nothing of that kind was ever said, I think."] {
            let parts = json!([{"type": "text", "text": prediction}]);
            for prediction in [json!(prediction), parts] {
                let drafted = with(json!({"prediction": {"type": "content", "content": prediction}}));
                assert_eq!(drafted["choices"], plain["choices"], "{kind}");
                let details = &drafted["usage"]["completion_tokens_details"];
                let counts = ["accepted_prediction_tokens", "rejected_prediction_tokens"]
                    .map(|name| details[name].as_u64());
                assert!(counts.iter().all(Option::is_some), "{details}");
                assert_eq!(drafted["usage"]["completion_tokens"], plain["usage"]["completion_tokens"]);
            }
        }
    }
    // Their counts are in the metrics under the names that vLLM uses.
    let metric = |name: &str| server.metric(&format!("vllm:spec_decode_num_{name}_total"));
    let [drafts, drafted, accepted] =
        ["drafts", "draft_tokens", "accepted_tokens"].map(|name| metric(name).expect(name));
    assert!(drafts <= drafted && accepted <= drafted, "{drafts} {drafted} {accepted}");
}

#[test]
fn fields_of_drafts_have_their_effect_or_are_named() {
    let server = Server::start(&["--ctx", "512"]);
    let rejected = |answer: &Value| {
        let details = &answer["usage"]["completion_tokens_details"];
        ["accepted_prediction_tokens", "rejected_prediction_tokens"]
            .map(|name| details[name].as_u64().unwrap())
    };
    let prediction = json!({"type": "content", "content": "Once upon a time there was a fox. ".repeat(9)});
    for off in [json!({"speculate": false}), json!({"speculate": "off"}), json!({"speculative.n_max": 0})] {
        let mut body = json!({"prediction": prediction});
        body.as_object_mut().unwrap().extend(off.as_object().unwrap().clone());
        assert_eq!(rejected(&ask(&server, &body)), [0, 0], "{off}");
    }
    // No chance is 1, and no draft has so many tokens.
    for none in [json!({"speculative.p_min": 1.0}), json!({"speculative.n_max": 4, "speculative.n_min": 5})] {
        let mut body = json!({"prediction": prediction});
        body.as_object_mut().unwrap().extend(none.as_object().unwrap().clone());
        assert_eq!(rejected(&ask(&server, &body)), [0, 0], "{none}");
    }
    let send = |more: Value| {
        let mut body =
            json!({"model": "tales", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post("/v1/chat/completions", &body)
    };
    let named = send(json!({"speculative.type": "ngram-mod"}));
    assert_eq!(named.status, 200);
    assert!(named.header("x-paguro-ignored").unwrap().contains("speculative.type"), "{:?}", named.body);
    assert_eq!(send(json!({"speculative.p_min": 2})).status, 400);
    assert_eq!(send(json!({"prediction": {"type": "content", "content": 5}})).status, 400);
    assert_eq!(send(json!({"speculate": "fast"})).status, 400);
}

/// Texts of all of OpenAI's APIs, in one piece and as streams, with the counts of their drafts.
#[test]
fn all_answers_of_openai_count_their_drafts() {
    let server = Server::start(&["--ctx", "1024"]);
    let prompt = "One fox, two foxes, three foxes. ".repeat(12);
    let counts = |details: &Value| {
        ["accepted_prediction_tokens", "rejected_prediction_tokens"]
            .map(|name| details[name].as_u64().unwrap())
    };
    let total = |name: &str| server.metric(&format!("vllm:spec_decode_num_{name}_total")).unwrap() as u64;
    let mut last = [0, 0];
    for (path, field, details, tokens) in [
        ("/v1/chat/completions", "messages", "/usage/completion_tokens_details", "max_tokens"),
        ("/v1/completions", "prompt", "/usage/completion_tokens_details", "max_tokens"),
        ("/v1/responses", "input", "/usage/output_tokens_details", "max_output_tokens"),
    ] {
        let input = match field {
            "messages" => json!([{"role": "user", "content": prompt}]),
            "prompt" => json!([prompt, prompt]),
            _ => json!(prompt),
        };
        let body = |stream: bool| {
            let mut body = json!({"model": "tales", "temperature": 0, "stream": stream});
            body[field] = input.clone();
            body[tokens] = json!(120);
            if stream && field != "input" {
                body["stream_options"] = json!({"include_usage": true});
            }
            body
        };
        for stream in [false, true] {
            let details = match stream {
                false => server.post(path, &body(false)).ok().pointer(details).unwrap().clone(),
                true => {
                    let events = server.post(path, &body(true)).events();
                    let all: Vec<_> = events.iter().filter(|event| event.is_object()).collect();
                    let end = all.last().unwrap();
                    end.get("response").unwrap_or(end).pointer(details).unwrap().clone()
                }
            };
            let [accepted, rejected] = counts(&details);
            // The usage of each answer is what the engine has counted meanwhile.
            let now = [total("accepted_tokens"), total("draft_tokens")];
            assert_eq!(
                [accepted, accepted + rejected],
                [now[0] - last[0], now[1] - last[1]],
                "{path} {stream}"
            );
            last = now;
        }
    }
}

/// A server without drafts counts none.
#[test]
fn speculation_can_be_off_for_all() {
    let server = Server::start(&["--ctx", "512", "--speculate", "off"]);
    let prediction =
        json!({"prediction": {"type": "content", "content": "Once upon a time there was a fox."}});
    ask(&server, &prediction);
    assert_eq!(server.metric("paguro_drafts_total"), Some(0.0));
}
