//! Reasoning: what ends it, what it is bounded by, and what does not look into it. The model is Tales with a chat template
//! that begins a thought, or leaves it to the model.

use std::{fs, path::Path};

use serde_json::{Value, json};

use super::{
    http::{Answer, Server},
    scripted::{self, Gguf},
};

/// Tales with another chat template.
fn with_template(template: &str) -> Vec<u8> {
    let file =
        fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tales/tales-Q8_0.gguf")).unwrap();
    let mut gguf = Gguf::read(&file);
    gguf.set("tokenizer.chat_template", scripted::string(template));
    gguf.write()
}

/// A server of `thinks`, whose prompts end with `<think>`, and of `may`, whose template knows reasoning.
fn server() -> (tempfile::TempDir, Server) {
    let folder = tempfile::tempdir().unwrap();
    let turns =
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}<|assistant|>\n";
    let paths = [("thinks", "<think>\n{# </think> #}"), ("may", "{# </think> #}")].map(|(name, end)| {
        let path = folder.path().join(name).with_extension("gguf");
        fs::write(&path, with_template(&format!("{turns}{end}"))).unwrap();
        path.display().to_string()
    });
    let server = Server::start(&[&paths[0], &paths[1], "--ctx", "512"]);
    (folder, server)
}

fn ask(server: &Server, model: &str, more: Value) -> Answer {
    let messages = json!([{"role": "user", "content": "Tell me a story about a shy fox who lost a key"}]);
    let mut body = json!({"model": model, "messages": messages, "max_tokens": 40, "temperature": 0});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    server.post("/v1/chat/completions", &body)
}

#[test]
fn reasoning_is_bounded_and_is_no_content() {
    let (_folder, server) = server();
    let answer = |model, more| ask(&server, model, more).ok();
    let text = |answer: &Value, field: &str| {
        answer["choices"][0]["message"][field].as_str().unwrap_or_default().to_owned()
    };
    let free = answer("thinks", json!({}));
    let thought = text(&free, "reasoning_content");
    assert!(thought.len() > 40 && text(&free, "content").is_empty(), "{free}");

    // A stop string within the thought ends nothing.
    let word = thought.split_whitespace().nth(3).unwrap();
    let stopped = answer("thinks", json!({"stop": [word]}));
    assert_eq!(text(&stopped, "reasoning_content"), thought, "{stopped}");
    assert_eq!(stopped["choices"][0]["finish_reason"], "length");

    // A budget closes it, and the answer follows.
    let budgets = [
        json!({"reasoning": {"max_tokens": 8}}),
        json!({"thinking_budget_tokens": 8}),
        json!({"reasoning_budget": 8}),
    ];
    for budget in budgets {
        let bounded = answer("thinks", budget);
        let part = text(&bounded, "reasoning_content");
        assert!(!part.is_empty() && thought.starts_with(part.trim_end()), "{bounded}");
        assert!(!text(&bounded, "content").is_empty(), "{bounded}");
        let tokens = bounded["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap();
        assert!((8..20).contains(&tokens), "{bounded}");
    }
    let content = text(&answer("thinks", json!({"reasoning_budget": 8})), "content");
    let word = content.split_whitespace().nth(2).unwrap();
    let stopped = answer("thinks", json!({"reasoning_budget": 8, "stop": word}));
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop", "{stopped}");
    assert_eq!(text(&stopped, "content"), content[..content.find(word).unwrap()], "{stopped}");
    // Switched off where the template has no switch, it is closed at once.
    let off = answer("thinks", json!({"enable_thinking": false}));
    assert!(text(&off, "reasoning_content").is_empty() && !text(&off, "content").is_empty(), "{off}");

    // A schema holds for the content, after a thought or without one.
    let schema = json!({"type": "object", "properties": {"n": {"enum": [1]}}, "required": ["n"]});
    let format = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}});
    for model in ["thinks", "may"] {
        let fits = answer(model, json!({"max_tokens": 80, "reasoning_budget": 8, "response_format": format}));
        let content: Value =
            serde_json::from_str(&text(&fits, "content")).unwrap_or_else(|_| panic!("{fits}"));
        assert_eq!(content, json!({"n": 1}));
        assert_eq!(text(&fits, "reasoning_content").is_empty(), model == "may", "{fits}");
    }
    // The answer goes on from a thought that the model itself begins, even under a schema.
    let begin: serde_json::Map<_, _> =
        ["<think>"].iter().map(|text| (token(&server, text), json!(30))).collect();
    let biased = answer(
        "may",
        json!({"max_tokens": 120, "reasoning_budget": 8, "response_format": format, "logit_bias": begin}),
    );
    assert!(text(&biased, "content").contains("\"n\""), "{biased}");
}

/// The first token of a text, as a key of `logit_bias`.
fn token(server: &Server, text: &str) -> String {
    let prompt = json!({"model": "may", "prompt": text, "add_special_tokens": false});
    server.post("/tokenize", &prompt).ok()["tokens"][0].to_string()
}

#[test]
fn penalties_of_what_was_generated_spare_the_prompt() {
    let server = Server::start(&["--ctx", "512"]);
    let prompt = "The fox saw a hen. The fox saw a hen. The fox saw a";
    let tokens = |text: &str| {
        let body = json!({"model": "tales", "prompt": text});
        server.post("/tokenize", &body).ok()["tokens"].as_array().unwrap().clone()
    };
    // The token that would repeat the prompt is made the best one.
    let again = tokens(&format!("{prompt} hen"))[tokens(prompt).len()].to_string();
    let next = |more: Value| {
        let mut body = json!({"model": "tales", "prompt": prompt, "max_tokens": 1, "temperature": 0});
        body["logit_bias"] = json!({again.as_str(): 20});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post("/v1/completions", &body).ok()["choices"][0]["text"].clone()
    };
    let plain = next(json!({}));
    assert_eq!(next(json!({"frequency_penalty": 2})), plain);
    assert_eq!(next(json!({"presence_penalty": 2})), plain);
    assert_ne!(next(json!({"repetition_penalty": 50})), plain);
    assert_ne!(next(json!({"dry_multiplier": 90, "dry_allowed_length": 3})), plain);
}

/// The fields that switch reasoning off, in every API and spelling.
#[test]
fn every_spelling_switches_reasoning_off() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("switch.gguf");
    let template = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}<|assistant|>\n\
        {% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{# </think> #}";
    fs::write(&path, with_template(template)).unwrap();
    let server = Server::start(&[path.to_str().unwrap(), "--ctx", "512"]);
    let messages = json!([{"role": "user", "content": "Tell me a story"}]);
    let prompt = |path: &str, more: &Value| {
        let mut body = json!({"model": "switch", "max_tokens": 1, "stream": false});
        match path {
            "/api/generate" => body["prompt"] = json!("Tell me a story"),
            "/v1/responses" => body["input"] = messages.clone(),
            _ => body["messages"] = messages.clone(),
        }
        if path.starts_with("/api") {
            body["options"] = json!({"num_predict": 1});
            body.as_object_mut().unwrap().remove("max_tokens");
        }
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let answer = server.post(path, &body);
        let ignored = answer.header("x-paguro-ignored").unwrap_or_default().to_owned();
        let answer = answer.ok();
        let usage = &answer["usage"];
        let count = [
            &answer["count"],
            &answer["input_tokens"],
            &answer["prompt_eval_count"],
            &usage["prompt_tokens"],
        ];
        let count = count.into_iter().find_map(Value::as_u64).unwrap_or_else(|| {
            let cached = usage["cache_read_input_tokens"].as_u64().unwrap_or(0);
            usage["input_tokens"].as_u64().unwrap() + cached
        });
        (count, ignored.replace("max_tokens", "").replace("stream", "").replace([',', ' '], ""))
    };
    for path in [
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/api/chat",
        "/api/generate",
        "/tokenize",
    ] {
        let (on, _) = prompt(path, &json!({}));
        let (off, _) = prompt(path, &json!({"enable_thinking": false}));
        assert!(off > on, "{path}: {on} {off}");
        for field in [
            json!({"reasoning_effort": "none"}),
            json!({"reasoning": {"enabled": false}}),
            json!({"reasoning": {"effort": "none"}}),
            json!({"reasoning": {"max_tokens": 0}}),
            json!({"reasoning_budget": 0}),
            json!({"thinking_budget": 0}),
            json!({"thinking_budget_tokens": 0}),
            json!({"thinking": {"type": "disabled"}}),
            json!({"thinking": false}),
            json!({"think": false}),
            json!({"chat_template_kwargs": {"enable_thinking": false}}),
            json!({"chat_template_kwargs": {"thinking": false}}),
        ] {
            assert_eq!(prompt(path, &field), (off, String::new()), "{path} {field}");
        }
        for field in [
            json!({"think": true}),
            json!({"think": "low"}),
            json!({"reasoning_effort": "low"}),
            json!({"thinking": {"type": "adaptive"}}),
            json!({"reasoning_budget": -1}),
            json!({"include_reasoning": false}),
            json!({"reasoning": {"exclude": true}}),
        ] {
            assert_eq!(prompt(path, &field), (on, String::new()), "{path} {field}");
        }
    }
}

#[test]
fn reasoning_is_left_out_of_an_answer() {
    let (_folder, server) = server();
    for hidden in [
        json!({"include_reasoning": false}),
        json!({"reasoning": {"exclude": true}}),
        json!({"reasoning_format": "hidden"}),
    ] {
        let mut more = json!({"reasoning_budget": 8});
        more.as_object_mut().unwrap().extend(hidden.as_object().unwrap().clone());
        let answer = ask(&server, "thinks", more.clone()).ok();
        let message = &answer["choices"][0]["message"];
        assert!(message.get("reasoning_content").is_none(), "{answer}");
        assert!(!message["content"].as_str().unwrap().is_empty(), "{answer}");
        assert!(
            answer["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64() >= Some(8),
            "{answer}"
        );
        more["stream"] = json!(true);
        let stream = ask(&server, "thinks", more);
        assert!(!stream.body.contains("reasoning_content"), "{}", stream.body);
    }
}
