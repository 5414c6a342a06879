//! Presets of single models: in the library's catalogue, and in the file with settings.

use std::{fs, path::Path};

use serde_json::{Value, json};

use super::http::{Server, paguro};

const TALES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tales/tales-Q8_0.gguf");

/// Runs a command that must succeed; returns what it writes.
fn run(home: &Path, args: &[&str]) -> String {
    let output = paguro(home, args).output().unwrap();
    assert!(output.status.success(), "{args:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Runs a command that must fail; returns the error.
fn refused(home: &Path, args: &[&str]) -> String {
    let output = paguro(home, args).stderr(std::process::Stdio::piped()).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{args:?}: {output:?}");
    String::from_utf8(output.stderr).unwrap()
}

fn generate(server: &Server, model: &str, more: Value) -> Value {
    let mut body = json!({"model": model, "prompt": "Tell me a story", "stream": false});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    server.post("/api/generate", &body).ok()
}

fn listed(server: &Server, model: &str) -> Value {
    let models = server.get("/v1/models").ok()["data"].as_array().unwrap().clone();
    models.into_iter().find(|it| it["id"] == model).unwrap_or_default()["max_model_len"].clone()
}

#[test]
fn a_models_preset_is_kept_in_the_library() {
    let home = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| run(home.path(), args);
    run(&["import", TALES, "--name", "stories"]);
    let template = home.path().join("short.jinja");
    fs::write(&template, "{% for m in messages %}{{ m.content }}{% endfor %}:").unwrap();
    run(&[
        "preset",
        "stories",
        "--ctx",
        "512",
        "--kv-dtype",
        "q8",
        "--set",
        "num_predict=3",
        "--alias",
        "Teller",
    ]);
    let shown: Value = serde_json::from_str(&run(&["preset", "teller", "--json"])).unwrap();
    let expected =
        json!({"ctx": 512, "kv-dtype": "q8", "options": {"num_predict": 3}, "aliases": ["Teller"]});
    assert_eq!(shown["preset"], expected);
    let refusals: [(&[&str], &str); 5] = [
        (&["rm", "teller"], "stories"),
        (&["preset", "stories", "--set", "temprature=1"], "did you mean `temperature`"),
        (&["preset", "stories", "--set", "temperature"], "has no value"),
        (&["preset", "stories", "--alias", "tales"], "is the model inside this binary"),
        (&["preset", "nothing", "--ctx", "1"], "nothing"),
    ];
    for (args, message) in refusals {
        let error = refused(home.path(), args);
        assert!(error.contains(message), "{args:?}: {error}");
    }
    // It outlives the files.
    run(&["import", TALES, "--name", "stories", "--replace"]);

    let server = Server::start_in(home, &[]);
    assert_eq!((listed(&server, "stories"), listed(&server, "Teller")), (json!(512), json!(512)));
    let answer = generate(&server, "teller:latest", json!({}));
    assert_eq!(answer["eval_count"], 3, "{answer}");
    assert_eq!(generate(&server, "stories", json!({"options": {"num_predict": 5}}))["eval_count"], 5);
    // Two names, one model.
    assert_eq!(server.metric("paguro_model_loads_total"), Some(1.0));

    // A change of the context or of the K/V type reloads the model at the next request.
    let long = answer["prompt_eval_count"].as_u64().unwrap();
    let change =
        ["preset", "stories", "--chat-template", template.to_str().unwrap(), "--set", "num_predict=2"];
    self::run(server.home(), &change);
    let answer = generate(&server, "stories", json!({}));
    assert_eq!((&answer["eval_count"], server.metric("paguro_model_loads_total")), (&json!(2), Some(2.0)));
    assert!(answer["prompt_eval_count"].as_u64().unwrap() < long, "{answer}");
    let shown = server.post("/api/show", &json!({"model": "stories"})).ok();
    assert!(shown["template"].as_str().unwrap().ends_with("{% endfor %}:"), "{shown}");
    self::run(server.home(), &["preset", "stories", "--clear"]);
    assert_eq!(listed(&server, "stories"), listed(&server, "tales"));
}

#[test]
fn the_file_with_settings_has_presets_that_are_stronger() {
    let home = tempfile::tempdir().unwrap();
    run(home.path(), &["import", TALES, "--name", "stories"]);
    run(home.path(), &["preset", "stories", "--ctx", "512", "--set", "num_predict=3"]);
    let config = home.path().join("serve.toml");
    fs::write(home.path().join("short.jinja"), "{{ messages[0].content }}:").unwrap();
    let text = r#"
        [preset.stories]
        ctx = 256
        [preset.tales]
        chat-template = "short.jinja"
        options = { num_predict = 4 }
        aliases = ["gpt-5"]
    "#;
    fs::write(&config, text).unwrap();
    let server = Server::start_in(home, &["--config", config.to_str().unwrap()]);
    assert_eq!(listed(&server, "stories"), 256);
    assert_eq!(generate(&server, "stories", json!({}))["eval_count"], 3);
    let answer = generate(&server, "gpt-5", json!({}));
    assert_eq!(answer["eval_count"], 4);
    assert!(answer["prompt_eval_count"].as_u64().unwrap() < 8, "{answer}");

    let broken = server.home().join("broken.toml");
    for (text, message) in [
        ("[preset.tales]\nctxx = 1", "did you mean `ctx`?"),
        ("[preset.tales]\noptions = { temprature = 1 }", "preset tales"),
        ("[preset.tales]\nchat-template = \"nothing.jinja\"", "cannot read"),
    ] {
        fs::write(&broken, text).unwrap();
        let error = refused(server.home(), &["serve", "--port", "0", "--config", broken.to_str().unwrap()]);
        assert!(error.contains(message), "{text}: {error}");
    }
}
