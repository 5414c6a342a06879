//! Endpoints for routers of several servers.

use serde_json::{Value, json};

use super::{ask, http::Server};

#[test]
fn a_rendered_request_has_the_answer_of_the_request_itself() {
    let server = Server::start(&[]);
    let greedy = json!({"temperature": 0, "max_tokens": 12, "ignore_eos": true});
    let with = |more: Value| {
        let mut body = greedy.clone();
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let text_of = |tokens: &Value| {
        let body = json!({"model": "tales", "tokens": tokens});
        server.post("/detokenize", &body).ok()["prompt"].as_str().unwrap().to_owned()
    };
    let chat = ask(with(json!({"cache_salt": "blue", "priority": 2, "stop": ["zzz"]})));
    let text =
        with(json!({"model": "tales", "prompt": ["Once upon", "The sea"], "max_tokens": null, "n": 2}));
    for (path, body, max_tokens) in [("/v1/chat/completions", chat, 12), ("/v1/completions", text, 16)] {
        let rendered = server.post(&format!("{path}/render"), &body).ok();
        let answers = server.post(path, &body).ok()["choices"].clone();
        let many = rendered.as_array().cloned().unwrap_or_else(|| vec![rendered.clone()]);
        let mut index = 0;
        for request in many {
            assert_eq!(request["sampling_params"]["max_tokens"], max_tokens, "{request}");
            let generated = server.post("/inference/v1/generate", &request).ok();
            assert_eq!(generated["request_id"], request["request_id"]);
            let prompt_tokens = request["token_ids"].as_array().unwrap().len();
            assert_eq!(generated["usage"]["prompt_tokens"], prompt_tokens);
            let mut streamed = request.clone();
            streamed["stream"] = true.into();
            let events = server.post("/inference/v1/generate", &streamed).events();
            for choice in generated["choices"].as_array().unwrap() {
                let answer = &answers[index];
                let expected = answer["message"]["content"].as_str().or(answer["text"].as_str()).unwrap();
                assert_eq!(text_of(&choice["token_ids"]), expected, "{path}");
                let tokens: Vec<Value> = events
                    .iter()
                    .flat_map(|event| event["choices"].as_array().unwrap().clone())
                    .filter(|part| part["index"] == choice["index"])
                    .flat_map(|part| part["token_ids"].as_array().unwrap().clone())
                    .collect();
                assert_eq!(Value::from(tokens), choice["token_ids"], "{path}");
                index += 1;
            }
        }
    }
    // A rendered request is in no queue: nothing waits after the answers.
    let load = server.get("/load").ok()["server_load"].clone();
    assert_eq!(
        (load, server.get("/v1/loads").ok()["loads"][0]["num_total_reqs"].clone()),
        (json!(0), json!(0))
    );
}

#[test]
fn the_stop_token_is_a_token_of_the_answer() {
    let server = Server::start(&[]);
    let generate = |more: Value| {
        let mut params = json!({"temperature": 0, "max_tokens": 12, "logprobs": 1});
        params.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let body = json!({"model": "tales", "token_ids": [0, 1, 2], "sampling_params": params});
        server.post("/inference/v1/generate", &body).ok()["choices"][0].clone()
    };
    let whole = generate(json!({}));
    let stop = &whole["token_ids"][5];
    let choice = generate(json!({"stop_token_ids": [stop]}));
    let tokens = choice["token_ids"].as_array().unwrap();
    assert_eq!((tokens.last(), &choice["finish_reason"]), (Some(stop), &json!("stop")), "{choice}");
    assert!(tokens.len() <= 6 && whole["token_ids"].as_array().unwrap().starts_with(tokens), "{choice}");
    let logprobs = choice["logprobs"]["content"].as_array().unwrap();
    assert_eq!(logprobs.last().unwrap()["token"], format!("token_id:{stop}"));
    assert_eq!(logprobs.len(), tokens.len());
}

#[test]
fn reports_need_no_key_if_the_server_says_so() {
    for (arguments, status) in [(&["--public-metrics"][..], 200), (&[], 401)] {
        let server = Server::start(&[&["--api-key", "secret", "--owned-by", "vllm"], arguments].concat());
        for path in ["/metrics", "/load", "/get_load", "/loads", "/v1/loads", "/server_info", "/v1/models"] {
            assert_eq!(server.get(path).status, status, "{path}");
        }
        for path in ["/status", "/props", "/version"] {
            assert_eq!(server.get(path).status, 401, "{path}");
        }
        assert_eq!(server.post("/v1/chat/completions", &ask(json!({}))).status, 401);
        let models = server.request("GET", "/v1/models", &[("Authorization", "Bearer secret")], "").ok();
        let model = &models["data"][0];
        assert_eq!(
            (&model["owned_by"], &model["root"], &model["parent"]),
            (&json!("vllm"), &model["id"], &Value::Null)
        );
    }
}
