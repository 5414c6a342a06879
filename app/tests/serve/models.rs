//! Lists of models, their memory, and changes of their files.

use std::{
    fs::{self, OpenOptions},
    path::{Path, PathBuf},
};

use serde_json::{Value, json};

use super::{ask, http::Server};

const TALES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tales/tales-Q8_0.gguf");

/// A copy of the embedded model under another name.
fn copy(folder: &Path, name: &str) -> PathBuf {
    let path = folder.join(name);
    fs::copy(TALES, &path).unwrap();
    path
}

fn names(list: &Value, key: &str) -> Vec<String> {
    list.as_array().unwrap().iter().map(|model| model[key].as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_lost_file_is_marked_in_lists_and_breaks_none() {
    let folder = tempfile::tempdir().unwrap();
    let (lost, whole) = (copy(folder.path(), "lost.gguf"), copy(folder.path(), "whole.gguf"));
    let server = Server::start(&[lost.to_str().unwrap(), whole.to_str().unwrap()]);
    server.post("/v1/chat/completions", &ask(json!({"model": "lost"}))).ok();
    fs::remove_file(&lost).unwrap();

    let models = server.get("/v1/models").ok()["data"].clone();
    assert_eq!(names(&models, "id"), ["tales", "lost", "whole"]);
    assert!(models[1]["problem"].as_str().unwrap().contains("lost.gguf: No such file"), "{models}");
    assert_eq!((&models[0]["problem"], &models[2]["problem"]), (&Value::Null, &Value::Null));
    let tags = server.get("/api/tags").ok()["models"].clone();
    assert_eq!(names(&tags, "name"), ["tales:latest", "lost:latest", "whole:latest"]);
    assert_eq!(names(&server.get("/api/ps").ok()["models"], "name"), ["lost:latest"]);
    assert_eq!(server.get("/ready").status, 200);
    assert_eq!(server.post("/v1/chat/completions", &ask(json!({"model": "lost"}))).status, 503);
    server.post("/v1/chat/completions", &ask(json!({"model": "whole"}))).ok();

    // A damaged file is one, too, and a whole one in its place is a model again.
    fs::write(&lost, "GGUF").unwrap();
    let models = server.get("/v1/models").ok()["data"].clone();
    assert!(models[1]["problem"].as_str().unwrap().contains("truncated"), "{models}");
    copy(folder.path(), "lost.gguf");
    assert_eq!(server.get("/v1/models").ok()["data"][1]["problem"], Value::Null);
    server.post("/v1/chat/completions", &ask(json!({"model": "lost"}))).ok();
}

#[test]
fn a_file_that_is_truncated_stops_no_server() {
    let folder = tempfile::tempdir().unwrap();
    let path = copy(folder.path(), "victim.gguf");
    let server = Server::start(&[path.to_str().unwrap()]);
    let question = ask(json!({"model": "victim"}));
    // At any point of a load, and after it.
    for delay in [0, 1, 3, 10, 30, 100, 300, 1000] {
        copy(folder.path(), "victim.gguf");
        std::thread::scope(|scope| {
            let asked = scope.spawn(|| server.post("/v1/chat/completions", &question).status);
            std::thread::sleep(std::time::Duration::from_millis(delay));
            OpenOptions::new().write(true).open(&path).unwrap().set_len(200_000).unwrap();
            assert!([200, 503].contains(&asked.join().unwrap()), "after {delay} ms");
        });
        assert_eq!(server.get("/health").status, 200);
    }
    copy(folder.path(), "victim.gguf");
    server.post("/v1/chat/completions", &question).ok();
}

#[test]
fn models_together_stay_below_the_limit() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (copy(folder.path(), "a.gguf"), copy(folder.path(), "b.gguf"));
    let server = Server::start(&[a.to_str().unwrap(), b.to_str().unwrap(), "--memory", "150MiB"]);
    for model in ["tales", "a", "b", "tales"] {
        server.post("/v1/chat/completions", &ask(json!({"model": model}))).ok();
        let status = server.get("/status").ok();
        let loaded = status["models"].as_array().unwrap();
        let part = |key: &str| loaded.iter().map(|model| model[key].as_u64().unwrap()).sum::<u64>();
        assert_eq!(part("bytes"), part("weights") + part("kv") + part("buffers"));
        assert_eq!(status["memory"]["models"], part("bytes"));
        assert!(part("bytes") <= 150 << 20, "{status}");
        assert!(loaded.iter().any(|loaded| loaded["name"] == model), "{status}");
    }
    let small = Server::start(&["--memory", "10MiB"]);
    let refused = small.post("/v1/chat/completions", &ask(json!({})));
    assert_eq!(refused.status, 507);
    assert!(refused.error().contains("raise --memory"), "{}", refused.error());
}

#[test]
fn a_longer_context_loads_a_model_again_that_nobody_uses() {
    let server = Server::start(&["--ctx", "256"]);
    let context = || server.get("/v1/models").ok()["data"][0]["max_model_len"].clone();
    assert_eq!(context(), 256);
    let props = server.get("/props").ok();
    assert_eq!(props["default_generation_settings"]["n_ctx"], 256);
    assert!(props["chat_template"].as_str().unwrap().contains("<|assistant|>"), "{props}");
    let chat = |tokens: usize| {
        let messages = json!([{"role": "user", "content": "Tell me a tale"}]);
        let options = json!({"num_ctx": tokens, "num_predict": 4});
        let body = json!({"model": "tales", "messages": messages, "options": options, "stream": false});
        let answer = server.post("/api/chat", &body);
        answer.ok();
        answer.header("x-paguro-ignored").map(str::to_owned)
    };
    assert_eq!(chat(100), None);
    assert_eq!(context(), 256);
    assert_eq!(chat(512), None);
    assert_eq!((context(), server.metric("paguro_model_loads_total")), (json!(512), Some(2.0)));
    // More than the model was trained for is not to be had, but no error.
    assert_eq!(chat(1_000_000).as_deref(), Some("options.num_ctx"));
    let trained = context();
    assert!(trained.as_u64().unwrap() > 512);
    let body = json!({"model": "tales", "input": "Hi", "options": {"num_ctx": 1_000_000}});
    let answer = server.post("/api/embed", &body);
    answer.ok();
    assert_eq!(answer.header("x-paguro-ignored"), Some("options.num_ctx"));
    let strict = server.request("POST", "/api/embed", &[("x-paguro-strict", "1")], &body.to_string());
    let refusal = format!(
        "1000000 exceeds the loaded context of {trained} tokens; the model was trained for {trained}"
    );
    assert!(strict.status == 400 && strict.body.contains(&refusal), "{strict:?}");
    assert_eq!((context(), server.metric("paguro_model_loads_total")), (trained, Some(3.0)));
}

#[test]
fn every_listed_name_works_everywhere() {
    let folder = tempfile::tempdir().unwrap();
    let stories = copy(folder.path(), "Stories.gguf");
    let server = Server::start(&[stories.to_str().unwrap(), "--alias", "gpt-4o=tales", "--ctx", "256"]);
    assert_eq!(
        server.post("/api/create", &json!({"model": "mine", "from": "tales", "system": "Short."})).status,
        200
    );
    let tags = server.get("/api/tags").ok()["models"].clone();
    let mut all = names(&tags, "name");
    all.extend(names(&server.get("/v1/models").ok()["data"], "id"));
    for tag in tags.as_array().unwrap() {
        let (name, digest) = (tag["name"].as_str().unwrap(), tag["digest"].as_str().unwrap());
        let short = name.strip_suffix(":latest").unwrap();
        all.extend([
            format!("library/{name}"),
            format!("registry.ollama.ai/library/{name}"),
            short.to_uppercase(),
        ]);
        all.extend([format!("sha256:{digest}"), digest[..12].to_owned(), format!("{short}@sha256:{digest}")]);
    }
    assert!(all.len() > 25, "{all:?}");
    let chat = json!([{"role": "user", "content": "Hi"}]);
    let few = json!({"num_predict": 1});
    for name in &all {
        for (path, mut body) in [
            ("/v1/chat/completions", json!({"messages": chat, "max_tokens": 1})),
            ("/v1/completions", json!({"prompt": "Hi", "max_tokens": 1})),
            ("/v1/responses", json!({"input": "Hi", "max_output_tokens": 1})),
            ("/v1/messages", json!({"messages": chat, "max_tokens": 1})),
            ("/v1/messages/count_tokens", json!({"messages": chat})),
            ("/v1/embeddings", json!({"input": "Hi"})),
            (
                "/v2/embed",
                json!({"texts": ["Hi"], "input_type": "search_query", "embedding_types": ["float"]}),
            ),
            ("/tokenize", json!({"prompt": "Hi"})),
            ("/api/chat", json!({"messages": chat, "stream": false, "options": few})),
            ("/api/generate", json!({"prompt": "Hi", "stream": false, "options": few})),
            ("/api/embed", json!({"input": "Hi"})),
            ("/api/show", json!({})),
        ] {
            body["model"] = json!(name);
            let answer = server.post(path, &body);
            assert_eq!(answer.status, 200, "{path} {name}: {}", answer.body);
        }
        assert_eq!(server.get(&format!("/v1/models/{name}")).status, 200, "{name}");
        assert_eq!(server.get(&format!("/props?model={name}")).status, 200, "{name}");
    }
    for unknown in
        ["tale", "tales:q4", "other/tales", "sha256:000000000000", "tales@sha256:000000000000", "library/"]
    {
        let answer = server.post("/v1/chat/completions", &ask(json!({"model": unknown})));
        assert_eq!(answer.status, 404, "{unknown}: {}", answer.body);
    }
}

#[test]
fn a_request_without_a_model_is_answered_by_the_only_one() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(&["--alias", "gpt-4o", "--ctx", "256"]);
    let mut body = ask(json!({"max_tokens": 1}));
    body.as_object_mut().unwrap().remove("model");
    assert_eq!(server.post("/v1/chat/completions", &body).ok()["model"], "tales");
    assert_eq!(server.post("/v1/messages", &body).ok()["model"], "tales");
    assert!(server.post("/tokenize", &json!({"prompt": "Hi", "model": null})).status == 200);
    assert!(server.post("/tokenize", &json!({"prompt": "Hi", "model": ""})).status == 200);
    // One of two, if it is the only one that is loaded.
    let stories = copy(folder.path(), "stories.gguf");
    let server = Server::start(&[stories.to_str().unwrap(), "--ctx", "256"]);
    let refused = server.post("/v1/chat/completions", &body);
    assert!(refused.status == 400 && refused.body.contains("/v1/models lists them"), "{refused:?}");
    server.post("/v1/chat/completions", &ask(json!({"model": "stories", "max_tokens": 1}))).ok();
    assert_eq!(server.post("/v1/chat/completions", &body).ok()["model"], "stories");
}
