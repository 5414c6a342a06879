//! The page's endpoints about models: what they need, their defaults, imports, well-known models.

use std::fs;

use serde_json::{Value, json};

use super::{
    ask,
    http::{Server, paguro},
};

const TALES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tales/tales-Q8_0.gguf");

fn card(server: &Server, name: &str) -> Value {
    let models = server.get("/ui/v1/models").ok()["models"].as_array().unwrap().clone();
    models.into_iter().find(|card| card["name"] == name).unwrap_or_default()
}

#[test]
fn models_are_imported_by_their_paths() {
    let server = Server::start(&[]);
    let copy = server.home().join("my tales.gguf");
    fs::copy(TALES, &copy).unwrap();
    let copy = copy.to_str().unwrap();
    for (body, status, problem) in [
        (json!({"path": "tales.gguf"}), 400, "must be a whole path"),
        (json!({"path": ""}), 400, "must be a whole path"),
        (json!({"path": "ollama:qwen3:4b"}), 400, "`paguro import ollama:qwen3:4b`"),
        (json!({"path": "/no/such/file.gguf"}), 400, "No such file"),
        (json!({"path": "/dev/null"}), 400, "/dev/null"),
        (json!({"path": copy, "name": "tales"}), 400, "`tales` is served from elsewhere"),
        (json!({"path": copy, "name": "a b"}), 400, "a b"),
    ] {
        let answer = server.post("/ui/v1/import", &body);
        assert_eq!(answer.status, status, "{body}: {}", answer.body);
        assert!(answer.body.contains(problem), "{body}: {}", answer.body);
    }
    let imported = server.post("/ui/v1/import", &json!({"path": copy, "name": "mine"})).ok();
    assert_eq!((&imported["name"], imported["bytes"].as_u64() > Some(0)), (&json!("mine"), true));
    let again = server.post("/ui/v1/import", &json!({"path": copy, "name": "mine"}));
    assert_eq!(again.status, 400, "{}", again.body);
    server.post("/v1/chat/completions", &ask(json!({"model": "mine", "max_tokens": 2}))).ok();
    // A copy outlives the file.
    server.post("/ui/v1/import", &json!({"path": copy, "name": "kept", "copy": true})).ok();
    fs::remove_file(copy).unwrap();
    server.post("/v1/chat/completions", &ask(json!({"model": "kept", "max_tokens": 2}))).ok();
}

#[test]
fn cards_tell_what_a_model_needs_before_it_is_loaded() {
    let server = Server::start(&["--ctx", "1024"]);
    let before = card(&server, "tales");
    assert_eq!((&before["loaded"], &before["needs"]["context"]), (&Value::Null, &json!(1024)));
    let number = |card: &Value, name: &str| card["needs"][name].as_u64().unwrap();
    let parts = ["weights", "buffers", "kv"].map(|name| number(&before, name));
    assert_eq!(parts.iter().sum::<u64>(), number(&before, "total"));
    assert!(number(&before, "least") <= number(&before, "total"));
    server.post("/v1/chat/completions", &ask(json!({"max_tokens": 2}))).ok();
    let loaded = card(&server, "tales")["loaded"]["bytes"].as_u64().unwrap();
    // Where there is room a model gets pages for several conversations.
    assert!(loaded >= number(&before, "total"), "{loaded} {before}");
}

#[test]
fn defaults_of_models_are_kept_by_the_server() {
    let home = tempfile::tempdir().unwrap();
    let imported = paguro(home.path(), &["import", TALES, "--name", "stories"]).output().unwrap();
    assert!(imported.status.success(), "{imported:?}");
    let config = home.path().join("serve.toml");
    fs::write(&config, "[preset.stories]\noptions = { top_k = 7 }\n").unwrap();
    let server = Server::start_in(home, &["--config", config.to_str().unwrap()]);
    let get = |model: &str| server.get(&format!("/ui/v1/preset?model={model}"));
    let set =
        |model: &str, preset: Value| server.post("/ui/v1/preset", &json!({"model": model, "preset": preset}));
    let fresh = get("stories").ok();
    assert_eq!((&fresh["can_change"], &fresh["preset"]["context"]), (&json!(true), &Value::Null));
    assert_eq!(fresh["settings"]["options"], json!({"top_k": 7}));
    assert_eq!(get("tales").ok()["can_change"], json!(false));
    assert_eq!((get("nothing").status, server.get("/ui/v1/preset").status), (404, 400));
    for (model, preset, status, problem) in [
        ("tales", json!({}), 400, "is not in the library"),
        ("nothing", json!({}), 404, "nothing"),
        ("stories", json!({"kv_dtype": "q3"}), 400, "can be \\\"f16\\\", \\\"q8\\\" or \\\"q4\\\""),
        ("stories", json!({"options": {"temprature": 1}}), 400, "did you mean `temperature`?"),
        ("stories", json!({"chat_template": "{% for %}"}), 400, ""),
        ("stories", json!({"contxt": 1}), 400, "did you mean"),
        ("stories", json!({"context": -1}), 400, "context"),
    ] {
        let answer = set(model, preset.clone());
        assert_eq!(answer.status, status, "{preset}: {}", answer.body);
        assert!(answer.body.contains(problem), "{preset}: {}", answer.body);
    }
    let preset =
        json!({"context": 512, "kv_dtype": "q8", "system": "Be brief.", "options": {"num_predict": 3}});
    assert_eq!(set("stories", preset).status, 204);
    let kept = get("stories").ok()["preset"].clone();
    assert_eq!(
        (&kept["context"], &kept["kv_dtype"], &kept["system"]),
        (&json!(512), &json!("q8"), &json!("Be brief."))
    );
    assert_eq!(card(&server, "stories")["needs"]["context"], 512);
    let mut question = ask(json!({"model": "stories"}));
    question.as_object_mut().unwrap().remove("max_tokens");
    assert_eq!(server.post("/v1/chat/completions", &question).ok()["usage"]["completion_tokens"], 3);
    assert_eq!(set("stories", json!({"context": null, "system": " "})).status, 204);
    assert_eq!(get("stories").ok()["preset"]["system"], Value::Null);
    assert_ne!(card(&server, "stories")["needs"]["context"], 512);
}

#[test]
fn well_known_models_are_listed_with_what_they_need() {
    let server = Server::start(&["--memory", "4GiB"]);
    let catalogue = server.get("/ui/v1/catalogue").ok();
    assert_eq!(catalogue["memory_limit"], 4u64 << 30);
    let models = catalogue["models"].as_array().unwrap();
    assert!(models.len() > 10);
    let bytes: Vec<_> = models.iter().map(|model| model["bytes"].as_u64().unwrap()).collect();
    assert!(bytes.is_sorted_by(|a, b| a >= b));
    assert!(
        models
            .iter()
            .all(|model| model["needs"].as_u64() > model["bytes"].as_u64() && model["here"] == false)
    );
    let bad = server.get("/ui/v1/remote?model=not%20a%20name");
    assert_eq!(bad.status, 400, "{}", bad.body);
}
