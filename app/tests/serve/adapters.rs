//! Adapters: several in one batch, their names, and changes while the server runs.

use std::{fs, path::Path, thread};

use serde_json::{Map, Value, json};

use super::{
    ask,
    http::{Server, paguro},
};

/// Writes an adapter of PEFT for the embedded model, with random values.
fn write(folder: &Path, seed: u64, hidden: usize) {
    let mut state = seed;
    let mut random = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    let (mut header, mut data) = (Map::new(), Vec::new());
    for layer in 0..6 {
        for (part, out) in [("self_attn.q_proj", 512), ("self_attn.v_proj", 256), ("mlp.gate_proj", 1536)] {
            for (side, shape, spread) in [("A", [8, hidden], 0.2), ("B", [out, 8], 1.0)] {
                let begin = data.len();
                let values = (0..shape[0] * shape[1]).map(|_| spread * random());
                data.extend(values.flat_map(f32::to_le_bytes));
                let name = format!("base_model.model.model.layers.{layer}.{part}.lora_{side}.weight");
                let entry = json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, data.len()]});
                header.insert(name, entry);
            }
        }
    }
    let header = Value::Object(header).to_string();
    let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat();
    let config = json!({"peft_type": "LORA", "r": 8, "lora_alpha": 8, "bias": "none",
        "base_model_name_or_path": "our/tales"});
    fs::create_dir_all(folder).unwrap();
    fs::write(folder.join("adapter_model.safetensors"), bytes).unwrap();
    fs::write(folder.join("adapter_config.json"), config.to_string()).unwrap();
}

/// Text of an answer, with log-probabilities.
fn answer(server: &Server, more: Value) -> String {
    let answer = server.post("/v1/chat/completions", &ask(more));
    assert_eq!(answer.status, 200, "{}", answer.body);
    answer.json()["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
}

#[test]
fn requests_with_different_adapters_share_a_batch() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let flags: Vec<String> = (0..5)
        .flat_map(|index| {
            write(&path(&format!("a{index}")), index + 1, 512);
            ["--lora".to_owned(), format!("n{index}={}", path(&format!("a{index}")).display())]
        })
        .collect();
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let server = Server::start(&flags);
    let base = answer(&server, json!({}));
    let alone: Vec<String> =
        (0..5).map(|index| answer(&server, json!({"model": format!("n{index}")}))).collect();
    for (index, text) in alone.iter().enumerate() {
        assert!(*text != base && !alone[..index].contains(text), "{index}: {text}");
    }
    thread::scope(|scope| {
        for request in 0..16 {
            let (server, base, alone) = (&server, &base, &alone);
            scope.spawn(move || match request % 6 {
                5 => assert_eq!(answer(server, json!({})), *base),
                index => {
                    assert_eq!(answer(server, json!({"model": format!("n{index}")})), alone[index]);
                }
            });
        }
    });
    let of = |lora: Value| answer(&server, json!({"lora": lora}));
    assert_eq!(answer(&server, json!({"model": "tales::n1"})), alone[1]);
    assert_eq!(of(json!([{"id": 2, "scale": 1.0}])), alone[2]);
    assert_eq!(of(json!([{"id": 2, "scale": 0.0}])), base);
    assert_eq!(answer(&server, json!({"model": "n3", "lora": []})), base);
    let both = of(json!([{"id": 0, "scale": 0.5}, {"id": 1, "scale": -1.0}]));
    assert!(both != base && !alone.contains(&both));

    for (body, status) in [
        (json!({"model": "n9"}), 404),
        (json!({"model": "tales::n9"}), 404),
        (json!({"model": "other::n1"}), 404),
        (json!({"lora": [{"id": 5, "scale": 1.0}]}), 404),
        (json!({"lora": [{"id": 1, "scale": 1.0}, {"id": 1, "scale": 1.0}]}), 400),
    ] {
        assert_eq!(server.post("/v1/chat/completions", &ask(body.clone())).status, status, "{body}");
    }
    let models = server.get("/v1/models").json();
    let find = |name: &str| models["data"].as_array().unwrap().iter().find(|it| it["id"] == name).unwrap();
    assert_eq!((&find("n4")["parent"], &find("tales")["parent"]), (&json!("tales"), &Value::Null));
    assert_eq!(find("n4")["root"], json!(path("a4").display().to_string()));
    let echoed = server.post("/v1/chat/completions", &ask(json!({"model": "n4"}))).json();
    assert_eq!(echoed["model"], "n4");

    // llama.cpp's scales of all requests.
    let scale = |list: Value| server.post("/lora-adapters", &list).status;
    assert_eq!(scale(json!([{"id": 3, "scale": 1.0}])), 200);
    assert_eq!(answer(&server, json!({})), alone[3]);
    assert_eq!(answer(&server, json!({"model": "n0"})), alone[0]);
    assert_eq!(server.get("/lora-adapters").json()[3]["scale"], json!(1.0));
    assert_eq!((scale(json!([{"id": 9, "scale": 1.0}])), scale(json!({}))), (404, 400));
    assert_eq!(scale(json!([])), 200);
    assert_eq!(answer(&server, json!({})), base);
    let metrics = server.get("/metrics").body;
    assert!(metrics.contains("vllm:lora_requests_info{") && metrics.contains("max_lora=\"32\""), "{metrics}");
}

#[test]
fn adapters_change_while_the_server_runs() {
    let folder = tempfile::tempdir().unwrap();
    let (given, other) = (folder.path().join("given"), folder.path().join("other"));
    write(&given, 1, 512);
    write(&other, 2, 512);
    let flag = format!("one={}", given.display());
    let server = Server::start(&["--lora", &flag]);
    let inside = server.home().join(".local/share/paguro");
    let post = |path: &str, body: Value| server.post(path, &body);
    let load = |name: &str, path: &Path, more: Value| {
        let mut body = json!({"lora_name": name, "lora_path": path.display().to_string()});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        post("/v1/load_lora_adapter", body)
    };
    let base = answer(&server, json!({}));
    let one = answer(&server, json!({"model": "one"}));

    // Only the library, and what was given at the start.
    for path in [&other, Path::new("/etc/passwd"), &given.join("../other"), Path::new("nothing")] {
        assert_eq!(load("two", path, json!({})).status, 403, "{}", path.display());
    }
    assert_eq!(load("two", &given, json!({})).body, "Success: LoRA adapter 'two' added successfully.");
    assert_eq!(answer(&server, json!({"model": "two"})), one);
    assert_eq!(load("two", &given, json!({})).status, 400);
    assert_eq!(load("tales", &given, json!({})).status, 400);
    assert_eq!(load("a::b", &given, json!({})).status, 400);
    assert_eq!(load("three", &given, json!({"base_model_name": "nothing"})).status, 404);
    if inside.is_dir() {
        write(&inside.join("mine"), 2, 512);
        assert_eq!(load("mine", &inside.join("mine"), json!({})).status, 200);
        assert_ne!(answer(&server, json!({"model": "mine"})), one);
    }

    // The file changes, and a running request ends with the adapter that it began with.
    let long = json!({"model": "two", "max_tokens": 200, "stream": true});
    let expected = answer(&server, json!({"model": "two", "max_tokens": 200}));
    let running = thread::scope(|scope| {
        let running = scope.spawn(|| server.post("/v1/chat/completions", &ask(long)).body);
        write(&given, 7, 512);
        assert_eq!(load("two", &given, json!({"load_inplace": true})).status, 200);
        running.join().unwrap()
    });
    let pieces = running.lines().filter_map(|line| line.strip_prefix("data: {"));
    let pieces = pieces.map(|line| serde_json::from_str::<Value>(&format!("{{{line}")).unwrap());
    let text: String = pieces
        .filter_map(|piece| piece["choices"][0]["delta"]["content"].as_str().map(str::to_owned))
        .collect();
    assert_eq!(text, expected);
    let two = answer(&server, json!({"model": "two"}));
    assert!(two != one && two != base);

    let unload = |name: &str| post("/v1/unload_lora_adapter", json!({"lora_name": name}));
    assert_eq!(unload("two").body, "Success: LoRA adapter 'two' removed successfully.");
    assert_eq!((unload("two").status, unload("tales").status), (404, 404));
    assert_eq!(server.post("/v1/chat/completions", &ask(json!({"model": "two"}))).status, 404);
    assert_eq!(answer(&server, json!({})), base);
}

#[test]
fn an_adapter_that_does_not_fit_is_refused_with_both_shapes() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), 1, 510);
    let flag = format!("one={}", folder.path().display());
    let mut command = paguro(folder.path(), &["serve", "--port", "0", "--lora", &flag]);
    let output = command.stderr(std::process::Stdio::piped()).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success());
    for part in ["lora_A.weight` [8, 510]", ", 512]", "`Tales 21M`", "our/tales"] {
        assert!(error.contains(part), "{part} is not in {error}");
    }
    let run = paguro(folder.path(), &["run", "--lora", &folder.path().display().to_string(), "Hello there"])
        .stderr(std::process::Stdio::piped())
        .output()
        .unwrap();
    assert!(!run.status.success() && String::from_utf8_lossy(&run.stderr).contains("[8, 510]"));
}
