//! Unknown fields of requests and their treatment. The cases are data: `tolerated/` has fields by kind, `recorded/` has
//! requests of real clients.

use std::{fs, path::Path};

use serde_json::{Value, json};

use super::http::{Answer, Server};

/// The JSON files of a folder beside this file, with their names.
fn cases(folder: &str) -> Vec<(String, Value)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/serve").join(folder);
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let read = |path: &std::path::PathBuf| {
        let text = fs::read_to_string(path).unwrap();
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        (name.clone(), serde_json::from_str(&text).unwrap_or_else(|error| panic!("{name}: {error}")))
    };
    files.iter().map(read).collect()
}

/// Smallest valid request of a path.
fn base(path: &str) -> Value {
    let chat = json!([{"role": "user", "content": "Tell me a story"}]);
    match path {
        "/v1/chat/completions" => json!({"messages": chat, "max_tokens": 2, "temperature": 0}),
        "/v1/completions" => json!({"prompt": "The fox", "max_tokens": 2, "temperature": 0}),
        "/v1/responses" => json!({"input": "Hi", "max_output_tokens": 2, "temperature": 0}),
        "/v1/messages" => json!({"messages": chat, "max_tokens": 2, "temperature": 0}),
        "/api/chat" => json!({"messages": chat, "stream": false, "options": {"num_predict": 2}}),
        "/api/generate" => json!({"prompt": "Hi", "stream": false, "options": {"num_predict": 2}}),
        "/v1/embeddings" | "/api/embed" => json!({"input": "Hi"}),
        other => panic!("{other}"),
    }
}

fn send(server: &Server, path: &str, more: &Value, headers: &[(&str, &str)]) -> Answer {
    let mut body = base(path);
    body["model"] = json!("tales");
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    server.request("POST", path, headers, &body.to_string())
}

fn ignored(answer: &Answer) -> &str {
    answer.header("x-paguro-ignored").unwrap_or_default()
}

#[test]
fn fields_are_honoured_ignored_or_refused_by_kind() {
    let server = Server::start(&["--ctx", "512"]);
    let mut failures = Vec::new();
    for (file, list) in cases("tolerated") {
        for case in list.as_array().unwrap() {
            let path = case["path"].as_str().unwrap();
            let answer = send(&server, path, &case["body"], &[]);
            let name = format!("{file}: {path} {}", case["body"]);
            if let Some(refused) = case["refused"].as_str() {
                if answer.status != 400 || !answer.body.contains(refused) {
                    failures.push(format!("{name}\n  is not refused: {} {}", answer.status, answer.body));
                }
                continue;
            }
            let expected = case["ignored"].as_str().unwrap_or_default();
            if answer.status != 200 || ignored(&answer) != expected {
                let (status, ignored, body) = (answer.status, ignored(&answer), &answer.body);
                failures.push(format!("{name}\n  {status}, ignored `{ignored}`, not `{expected}`: {body}"));
            }
            // Strict clients learn of everything that is left out.
            if !expected.is_empty() {
                let strict = send(&server, path, &case["body"], &[("x-paguro-strict", "1")]);
                if strict.status != 400 {
                    failures.push(format!("{name}\n  passes a strict server"));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn requests_of_real_clients_are_answered() {
    let server = Server::start(&["--ctx", "2048", "--alias", "claude-*=tales,gpt-5"]);
    for (client, requests) in cases("recorded") {
        for request in requests.as_array().unwrap() {
            let headers = request["headers"].as_object().cloned().unwrap_or_default();
            let headers: Vec<_> =
                headers.iter().map(|(name, value)| (name.as_str(), value.as_str().unwrap())).collect();
            let (path, body) = (request["path"].as_str().unwrap(), request["body"].to_string());
            let answer = server.request("POST", path, &headers, &body);
            assert_eq!(answer.status, 200, "{client}: {}", answer.body);
            assert_eq!(ignored(&answer), request["ignored"].as_str().unwrap_or_default(), "{client}");
            for part in request["contains"].as_array().into_iter().flatten() {
                let part = part.as_str().unwrap();
                assert!(answer.body.contains(part), "{client}: no `{part}` in {}", answer.body);
            }
        }
    }
}

#[test]
fn names_of_what_is_ignored_are_escaped_and_bounded() {
    let server = Server::start(&[]);
    let mut many = json!({"farbe,\r\nx-evil: 1": "rot", "käse": 1});
    let answer = send(&server, "/v1/chat/completions", &many, &[("origin", "app://obsidian.md")]);
    assert_eq!(ignored(&answer), r"farbe\u{2c}\u{d}\u{a}x-evil: 1, k\u{e4}se");
    assert_eq!(answer.header("x-evil"), None);
    assert!(answer.header("access-control-expose-headers").unwrap().contains("x-paguro-ignored"));
    for number in 0..2000 {
        many[format!("{number} {}", "long ".repeat(30))] = json!(1);
    }
    let answer = send(&server, "/v1/chat/completions", &many, &[]);
    let ignored = ignored(&answer);
    assert!(answer.status == 200 && ignored.len() < 2200 && ignored.ends_with(" more"), "{ignored}");
}

#[test]
fn a_strict_server_refuses_what_others_ignore() {
    let server = Server::start(&["--strict"]);
    let answer = send(&server, "/v1/chat/completions", &json!({"colour": "red"}), &[]);
    assert!(
        answer.status == 400 && answer.body.contains("unknown field `colour`: expected one of"),
        "{answer:?}"
    );
}

#[test]
fn an_unfinished_answer_goes_on_in_every_dialect() {
    let server = Server::start(&[]);
    let start = "Once upon a time, there was a purple";
    let messages =
        json!([{"role": "user", "content": "Tell me a story"}, {"role": "assistant", "content": start}]);
    let text = |path: &str, more: Value| {
        let mut body = json!({"messages": messages});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let answer = send(&server, path, &body, &[]).ok();
        let content = match path {
            "/v1/messages" => &answer["content"][0]["text"],
            _ => &answer["choices"][0]["message"]["content"],
        };
        content.as_str().unwrap().to_owned()
    };
    let expected = text("/v1/messages", json!({}));
    let chat = "/v1/chat/completions";
    assert_eq!(text(chat, json!({})), expected);
    let both = json!({"continue_final_message": true, "add_generation_prompt": false});
    assert_eq!(text(chat, both), expected);
    assert_ne!(text(chat, json!({"continue_final_message": false})), expected);
}

#[test]
fn a_claude_codes_bill_does_not_keep_it_from_its_prefix() {
    let server = Server::start(&[]);
    let cached = |number: &str| {
        let bill = format!("x-anthropic-billing-header: cc_version=2.1.99; cc_entrypoint=cli; cch={number};");
        let rules = "Read the file before you change it. ".repeat(30);
        let system = json!([{"type": "text", "text": bill}, {"type": "text", "text": rules}]);
        let usage = send(&server, "/v1/messages", &json!({"system": system}), &[]).ok()["usage"].clone();
        usage["cache_read_input_tokens"].as_u64().unwrap()
    };
    assert_eq!(cached("aa111"), 0);
    assert!(cached("bb222") >= 192);
}

#[test]
fn random_seeds_are_random() {
    let server = Server::start(&[]);
    let text = |seed: i64| {
        // The model is nearly sure of an answer to the body's greeting: a story's start is open.
        let options = json!({"seed": seed, "temperature": 2, "num_predict": 48});
        let body = json!({"prompt": "Once upon a time", "raw": true, "options": options});
        send(&server, "/api/generate", &body, &[]).ok()["response"].to_string()
    };
    assert_ne!(text(-1), text(-1));
    assert_eq!(text(7), text(7));
}

#[test]
fn ollamas_penalties_look_at_sixty_four_tokens() {
    let server = Server::start(&[]);
    let prompt = "The fox saw a hen, and the hen saw a dog, and the dog ran to the river. ".repeat(12);
    let text = |last: Option<i64>| {
        let options =
            json!({"repeat_penalty": 1.4, "repeat_last_n": last, "temperature": 0, "num_predict": 12});
        let body = json!({"prompt": prompt, "raw": true, "options": options});
        send(&server, "/api/generate", &body, &[]).ok()["response"].to_string()
    };
    assert_eq!(text(None), text(Some(64)));
}

#[test]
fn metrics_and_tokenizers_are_told_in_the_words_that_are_asked_for() {
    let server = Server::start(&[]);
    let old = server.request("GET", "/metrics", &[("accept", "text/plain;version=0.0.4")], "");
    assert!(old.header("content-type").unwrap().starts_with("text/plain; version=0.0.4"));
    assert!(old.body.contains("# TYPE paguro_model_loads_total counter\n"), "{}", old.body);
    assert!(!old.body.contains("# EOF"));
    let new = server.get("/metrics");
    assert!(new.header("content-type").unwrap().starts_with("application/openmetrics-text"));
    let info = server.get("/tokenizer_info?model=tales").ok();
    assert!(
        info["eos_token"].is_string() && info["chat_template"].as_str().unwrap().contains("assistant"),
        "{info}"
    );
    assert!(server.get("/version").ok()["version"].is_string());
}

#[test]
fn the_document_tells_which_fields_have_no_effect() {
    let server = Server::start(&[]);
    let document = server.get("/openapi.json").ok();
    let schemas = &document["components"]["schemas"];
    let fields = |name: &str| schemas[name].to_string();
    assert!(fields("ChatCompletionRequest").contains("mirostat"));
    assert!(fields("Output_ContentPart").contains("cache_control"));
    assert!(fields("OllamaOptions").contains("num_gpu"));
    for path in ["/v1/chat/completions", "/api/blobs/{digest}", "/tokenizer_info", "/metrics"] {
        assert!(document["paths"][path].is_object(), "{path}");
    }
}

#[test]
fn byte_order_marks_and_slashes_of_base_urls_are_no_errors() {
    let server = Server::start(&["--ctx", "256"]);
    let mut body = base("/v1/chat/completions");
    body["model"] = json!("tales");
    let marked = format!("\u{feff}{body}\r\n");
    for path in ["/v1/chat/completions", "//v1/chat/completions", "/v1//chat/completions/", "/v1/messages"] {
        let answer = server.request("POST", path, &[], &marked);
        assert_eq!(answer.status, 200, "{path}: {}", answer.body);
    }
    assert_eq!(server.get("/api/tags/").status, 200);
    let missing = server.request("POST", "/chat/completions", &[], &body.to_string());
    assert!(
        missing.status == 404 && missing.body.contains("did you mean /v1/chat/completions?"),
        "{missing:?}"
    );
}
