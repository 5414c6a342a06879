//! Adapters: several in one batch, their names, and changes while the server runs.

use std::{fs, path::Path, thread};

use paguro_library::Digest;
use serde_json::{Value, json};

use super::{
    ask,
    common::adapters::{gguf, write},
    http::{Answer, Server, paguro},
};

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

#[test]
fn adapters_of_the_library_are_served_with_their_base() {
    let home = tempfile::tempdir().unwrap();
    let path = |name: &str| home.path().join(name).display().to_string();
    for (seed, name, hidden) in [(1, "one", 512), (2, "other", 512), (3, "wide", 510), (4, "far", 512)] {
        write(home.path().join(name).as_ref(), seed, hidden);
    }
    fs::write(home.path().join("other/chat_template.jinja"), "{{ messages[0].content }}").unwrap();
    let far = json!({"added_tokens_decoder": {"99999": {"content": "<|far|>"}}});
    fs::write(home.path().join("far/tokenizer_config.json"), far.to_string()).unwrap();
    let import = |args: &[&str]| {
        let mut command = paguro(home.path(), &[&["import"], args].concat());
        let output = command.stderr(std::process::Stdio::piped()).output().unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    };
    assert!(import(&[&path("one"), "--base", "tales"]).0);
    assert!(import(&[&path("other"), "--base", "tales", "--copy"]).0);
    let (imported, status) = import(&[&path("one"), "--name", "lost"]);
    assert!(imported && status.contains("its base `our/tales` is not in the library"), "{status}");
    let (imported, status) = import(&[&path("wide"), "--base", "tales"]);
    assert!(!imported && status.contains("[8, 510]") && status.contains("`Tales 21M`"), "{status}");
    let (imported, status) = import(&[&path("far"), "--base", "tales"]);
    assert!(!imported && status.contains("`<|far|>`") && status.contains("99999"), "{status}");

    let server = Server::start_in(home, &[]);
    let base = answer(&server, json!({}));
    let one = answer(&server, json!({"model": "one"}));
    let chat = |model: &str| server.post("/v1/chat/completions", &ask(json!({"model": model})));
    let other = chat("other").ok();
    assert!(one != base && other["choices"][0]["message"]["content"] != json!(base));
    let tokens = |answer: &Value| answer["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(tokens(&other) < tokens(&chat("one").ok()), "its own template");
    assert_eq!(answer(&server, json!({"model": "tales::one"})), one);
    let lost = chat("lost");
    assert!(lost.status == 400 && lost.body.contains("our/tales"), "{lost:?}");
    let listed = server.get("/v1/models").json();
    let find = |name: &str| listed["data"].as_array().unwrap().iter().find(|it| it["id"] == name).cloned();
    assert_eq!(find("one").unwrap()["parent"], "tales");
    let adapters = server.get("/lora-adapters").json();
    let id = adapters.as_array().unwrap().iter().position(|it| it["name"] == "one").unwrap();
    assert_eq!(answer(&server, json!({"lora": [{"id": id, "scale": 1.0}]})), one);
    let load = json!({"lora_name": "mine", "lora_path": "one"});
    assert_eq!(server.post("/v1/load_lora_adapter", &load).status, 200);
    assert_eq!(answer(&server, json!({"model": "mine"})), one);

    // Ollama's way: uploaded files, and Modelfiles.
    let upload = |bytes: &[u8]| {
        let digest = Digest::of(bytes).to_string();
        let head = format!(
            "POST /api/blobs/{digest} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
            server.address,
            bytes.len()
        );
        let answer = server.raw(&[head.as_bytes(), bytes].concat());
        assert_eq!(Answer::read(&mut &answer[..]).status, 201);
        digest
    };
    let file = |name: &str| upload(&fs::read(server.home().join("one").join(name)).unwrap());
    let files = json!({
        "adapter_config.json": file("adapter_config.json"),
        "adapter_model.safetensors": file("adapter_model.safetensors"),
        "trainer_state.json": upload(b"{}"),
    });
    let create = |body: Value| server.post("/api/create", &body);
    create(json!({"model": "made", "from": "tales", "adapters": files, "stream": false})).ok();
    assert_eq!(answer(&server, json!({"model": "made"})), one);
    let shown = server.post("/api/show", &json!({"model": "made"})).ok();
    assert_eq!(shown["details"]["parent_model"], "tales");
    let modelfile = shown["modelfile"].as_str().unwrap();
    assert!(modelfile.contains("\nFROM tales\nADAPTER made\n"), "{modelfile}");
    create(json!({"model": "again", "modelfile": modelfile, "stream": false})).ok();
    assert_eq!(answer(&server, json!({"model": "again"})), one);
    let blob = upload(&gguf(5, 512));
    let modelfile = format!("FROM tales\nADAPTER @{blob}\nSYSTEM Be brief.");
    create(json!({"model": "file", "modelfile": modelfile, "stream": false})).ok();
    assert_ne!(answer(&server, json!({"model": "file"})), base);
    let narrow = upload(&gguf(5, 256));
    for (body, problem) in [
        (json!({"from": "tales", "adapters": {"a.gguf": narrow}}), "256]"),
        (json!({"from": "one", "adapters": {"a.gguf": blob}}), "is an adapter itself"),
        (json!({"adapters": {"a.gguf": blob}}), "`from` is missing"),
    ] {
        let mut body = body;
        body["model"] = json!("wrong");
        body["stream"] = json!(false);
        let answer = create(body);
        assert!(answer.status == 400 && answer.body.contains(problem), "{answer:?}");
    }
    // One that leaves the library is unknown.
    assert_eq!(server.request("DELETE", "/api/delete", &[], r#"{"model": "made"}"#).status, 200);
    assert_eq!(chat("made").status, 404);
    assert_eq!(answer(&server, json!({"model": "again"})), one);
}

#[test]
fn memory_of_adapters_is_planned() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("one");
    write(&path, 1, 512);
    let path = path.display().to_string();
    let imported = paguro(home.path(), &["import", &path, "--base", "tales"]).output().unwrap();
    assert!(imported.status.success(), "{imported:?}");
    // K and V take all that is left, except for the adapters of the command line and those that were named before.
    let memory = ["--memory", "55MB"];
    let server = Server::start_in(home, &[&memory[..], &["--lora", &format!("given={path}")]].concat());
    let base = answer(&server, json!({}));
    assert_ne!(answer(&server, json!({"model": "given"})), base);
    let refused = server.post("/v1/chat/completions", &ask(json!({"model": "one"})));
    assert!(refused.status == 507 && refused.body.contains("the adapter `one` needs"), "{refused:?}");
    let unload = json!({"lora_name": "given"});
    assert_eq!(server.post("/v1/unload_lora_adapter", &unload).status, 200);
    assert_ne!(answer(&server, json!({"model": "one"})), base);
}
