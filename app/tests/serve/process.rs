//! Settings, residency, and the end.

use std::{fs, io::BufRead, process::Command};

use paguro_library::Digest;
use serde_json::json;

use super::{
    ask,
    http::{Answer, Server, paguro, read_chunk},
    scripted,
};

fn stderr(args: &[&str], config: &str) -> String {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("serve.toml");
    fs::write(&file, config).unwrap();
    let mut command = paguro(home.path(), &["serve", "--port", "0", "--config", file.to_str().unwrap()]);
    let output = command.args(args).stderr(std::process::Stdio::piped()).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn settings_that_make_no_sense_are_named() {
    for (key, hint) in [
        ("prot = 80", "hint: did you mean `port`?"),
        ("max_que = 80", "hint: did you mean `max-queue`?"),
        ("frobnicate = 1", "hint: keys are the flags"),
    ] {
        let error = stderr(&[], key);
        assert!(error.contains(": unknown key `") && error.contains(hint), "{error}");
    }
    assert!(stderr(&[], "port = 80000").contains("invalid value"));
    assert!(stderr(&[], "keep-alive = \"soon\"").contains("must be a time"));
    assert!(stderr(&[], "kv-dtype = \"q3\"").contains("unknown variant `q3`"));
    assert!(stderr(&["--memory", "lots"], "").contains("must be a number of bytes"));
    assert!(stderr(&["no-such-model.gguf"], "").contains("there is no model"));
    assert!(stderr(&["--log", "what=ever=now"], "").contains("log filter"));
    assert!(stderr(&["--host", "localhost:80"], "").contains("--host takes an address or a name"));
    assert!(stderr(&["--alias", "tales"], "").contains("choose another name"));
    assert!(stderr(&["--device", "cpu"], "replicas = true").contains("--replicas needs several devices"));
}

#[test]
fn flags_are_stronger_than_the_environment_and_that_is_stronger_than_the_file() {
    let start = |file: &str, environment: Option<&str>, flags: &[&str]| {
        let home = tempfile::tempdir().unwrap();
        fs::create_dir_all(home.path().join(".config/paguro")).unwrap();
        fs::write(home.path().join(".config/paguro/serve.toml"), file).unwrap();
        let mut command = paguro(home.path(), &["serve", "--port", "0", "--log", "warn"]);
        command.args(flags);
        if let Some(ctx) = environment {
            command.env("PAGURO_CTX", ctx);
        }
        let server = Server::of(command, home);
        let tokens = server.post("/tokenize", &json!({"model": "tales", "prompt": "a"})).ok();
        tokens["max_model_len"].as_u64().unwrap()
    };
    assert_eq!(start("ctx = 64\n", None, &[]), 64);
    assert_eq!(start("ctx = 64\n", Some("128"), &[]), 128);
    assert_eq!(start("ctx = 64\n", Some("128"), &["--ctx", "96"]), 96);
}

/// Flags of llama-server, and the log lines of requests.
#[test]
fn one_model_has_an_alias_and_a_key_and_the_log_says_what_happened() {
    let home = tempfile::tempdir().unwrap();
    let log = home.path().join("log");
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tales/tales-Q8_0.gguf");
    let args =
        ["serve", "-m", file, "-a", "gpt-4o,fox", "--api-key", "s3cret", "--host", "localhost", "-np", "4"];
    let mut command = paguro(home.path(), &args);
    command.args(["--port", "0", "-fa", "on"]).stderr(fs::File::create(&log).unwrap());
    let server = Server::of(command, home);
    let post = |key: &str, body: &serde_json::Value| {
        let headers = [("Authorization", key)];
        server.request("POST", "/v1/chat/completions", &headers, &body.to_string())
    };
    let question = ask(json!({"model": "gpt-4o"}));
    assert_eq!(post("Bearer wrong", &question).status, 401);
    assert_eq!(post("Bearer s3cret", &json!({"model": "gpt-4o", "messages": "secret text"})).status, 400);
    assert_eq!(post("Bearer s3cret", &question).status, 200);
    let streamed = post("Bearer s3cret", &ask(json!({"model": "fox", "stream": true})));
    assert!(streamed.body.contains("[DONE]"), "{streamed:?}");
    // The stream's line is written when its connection has taken the last byte.
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
    let lines = loop {
        let text = fs::read_to_string(&log).unwrap();
        if text.matches("answered").count() >= 4 {
            break text;
        }
        assert!(std::time::Instant::now() < deadline, "{text}");
        std::thread::sleep(std::time::Duration::from_millis(20));
    };
    let line = |part: &str| {
        lines.lines().find(|line| line.contains(part)).unwrap_or_else(|| panic!("{part}: {lines}"))
    };
    assert!(line("status=401").contains("error=\""), "{lines}");
    assert!(line("status=400").contains("messages") && !lines.contains("secret text"), "{lines}");
    let answered: Vec<_> =
        lines.lines().filter(|line| line.contains("model=\"tales-Q8_0\" prompt=")).collect();
    assert_eq!(answered.len(), 2, "{lines}");
    for line in answered {
        for number in ["answered status=200", "cached=", "answer=24", "tok/s=", "queue_ms="] {
            assert!(line.contains(number), "{number}: {line}");
        }
    }
    assert!(!lines.contains("shy fox"), "no text of prompts: {lines}");
}

#[test]
fn models_are_loaded_when_asked_for_and_unloaded_when_idle() {
    let server = Server::start(&["--keep-alive", "300ms"]);
    assert_eq!(server.metric("paguro_model_loads_total"), Some(0.0));
    // Many at once load it once.
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| server.post("/v1/chat/completions", &ask(json!({}))).ok());
        }
    });
    assert_eq!(server.metric("paguro_model_loads_total"), Some(1.0));
    server.wait_for("paguro_model_unloads_total", 1.0);
    assert_eq!(server.metric("paguro_model_bytes"), None);
    server.post("/v1/chat/completions", &ask(json!({}))).ok();
    assert_eq!(server.metric("paguro_model_loads_total"), Some(2.0));
}

#[test]
fn a_model_makes_room_for_another_but_never_while_it_is_used() {
    let folder = tempfile::tempdir().unwrap();
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tales/tales-Q8_0.gguf");
    let other = folder.path().join("other.gguf");
    fs::copy(file, &other).unwrap();
    let args = [other.to_str().unwrap(), "--memory", "180MiB", "--kv-memory", "64MiB"];
    let server = Server::start(&args);
    let long = ask(json!({"stream": true, "ignore_eos": true, "max_tokens": null, "n": 4}));
    let mut running = server.send("/v1/chat/completions", &long);
    let mut line = String::new();
    while line != "\r\n" {
        line.clear();
        running.read_line(&mut line).unwrap();
    }
    read_chunk(&mut running).unwrap();
    std::thread::scope(|scope| {
        let second = scope.spawn(|| server.post("/v1/chat/completions", &ask(json!({"model": "other"}))));
        // It waits for the first one, and has its turn when that ends.
        std::thread::sleep(std::time::Duration::from_millis(200));
        assert_eq!(server.metric("paguro_model_unloads_total"), Some(0.0));
        assert_eq!(server.metric("paguro_requests_running"), Some(4.0), "the first one has ended");
        drop(running);
        second.join().unwrap().ok();
    });
    assert_eq!(server.metric("paguro_model_unloads_total"), Some(1.0));
}

#[test]
fn ps_shows_what_is_loaded() {
    let server = Server::start(&[]);
    let ps = |more: &[&str]| {
        let url = format!("http://{}", server.address);
        let output = paguro(server.home(), &[&["ps", "--url", &url], more].concat()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(ps(&[]), "no model is loaded\n");
    server.post("/v1/chat/completions", &ask(json!({}))).ok();
    let table = ps(&[]);
    assert!(table.starts_with("name ") && table.contains("\ntales  "), "{table}");
    assert!(table.contains(" MB + up to ") && table.contains(" KV  "), "{table}");
    let json: serde_json::Value = serde_json::from_str(&ps(&["--json"])).unwrap();
    assert_eq!((&json["models"][0]["name"], &json["models"][0]["running"]), (&json!("tales"), &json!(0)));
}

#[test]
fn a_model_is_unloaded_by_name() {
    let server = Server::start(&[]);
    server.post("/v1/chat/completions", &ask(json!({}))).ok();
    let (_, port) = server.address.rsplit_once(':').unwrap();
    let unload = |names: &[&str]| {
        // The address is that of the server's variables.
        let mut command = paguro(server.home(), &[&["unload"], names].concat());
        let output = command.env("PAGURO_PORT", port).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    assert_eq!(unload(&["Tales:latest"]), (Some(0), "tales is unloaded\n".to_owned()));
    assert_eq!(server.metric("paguro_model_unloads_total"), Some(1.0));
    assert_eq!(unload(&["tales"]), (Some(0), "tales is not loaded\n".to_owned()));
    // A wrong name does not keep the others loaded.
    server.post("/v1/chat/completions", &ask(json!({}))).ok();
    let (code, error) = unload(&["tails", "tales"]);
    assert!(code == Some(1) && error.starts_with("tales is unloaded\nerror: "), "{error}");
    assert!(error.contains("there is no model `tails`"), "{error}");
}

#[test]
fn the_models_of_folders_are_served_by_file_name() {
    let folder = tempfile::tempdir().unwrap();
    let at = |path: &str| {
        let path = folder.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        path
    };
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tales/tales-Q8_0.gguf");
    for path in ["a/one.gguf", "a/sub/two", "a/sub/one.gguf", "b/three.gguf"] {
        fs::copy(file, at(path)).unwrap();
    }
    fs::write(at("a/broken.gguf"), "no model").unwrap();
    fs::write(at("a/mmproj-one.gguf"), "GGUF, and a projector").unwrap();
    let config = at("serve.toml");
    fs::write(&config, format!("models = [{:?}]", at("b/three.gguf").to_str().unwrap())).unwrap();
    let (a, config) = (at("a"), config.to_str().unwrap().to_owned());
    // Models of the command line are served besides those of the file.
    let server =
        Server::start(&["--config", &config, "--models-dir", a.to_str().unwrap(), "--alias", "first"]);
    let list = server.get("/v1/models").ok();
    let mut names: Vec<_> =
        list["data"].as_array().unwrap().iter().map(|m| m["id"].as_str().unwrap()).collect();
    names.sort_unstable();
    assert_eq!(names, ["first", "one", "sub/one", "tales", "three", "two"]);
    for model in ["two", "sub/one", "first"] {
        server.post("/v1/chat/completions", &ask(json!({"model": model}))).ok();
    }
    let server = Server::start(&[a.to_str().unwrap()]);
    server.post("/v1/chat/completions", &ask(json!({"model": "one"}))).ok();
    // A store of Ollama, whose name `tales:latest` is that of the embedded model.
    let digest = Digest::of(&fs::read(file).unwrap());
    let size = fs::copy(file, at(&format!("o/blobs/sha256-{}", digest.hex()))).unwrap();
    let layer = json!({"mediaType": "application/vnd.ollama.image.model", "digest": digest.to_string(), "size": size});
    for name in ["library/tales", "me/tales"] {
        let manifest = at(&format!("o/manifests/registry.ollama.ai/{name}/latest"));
        fs::write(manifest, json!({"layers": [&layer]}).to_string()).unwrap();
    }
    let list = Server::start(&[at("o").to_str().unwrap()]).get("/v1/models").ok();
    let names: Vec<_> = list["data"].as_array().unwrap().iter().map(|model| &model["id"]).collect();
    assert_eq!(names, ["tales", "me/tales:latest"]);
}

#[test]
fn an_address_in_use_is_reported_before_models_are_opened() {
    let server = Server::start(&[]);
    let (_, port) = server.address.rsplit_once(':').unwrap();
    let home = tempfile::tempdir().unwrap();
    let mut command = paguro(home.path(), &["serve", "--port", port, "no-such-model.gguf"]);
    let output = command.stderr(std::process::Stdio::piped()).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.starts_with("error: cannot listen at 127.0.0.1:"), "{error}");
    assert!(error.contains("hint: another program listens there") && error.contains("--port "), "{error}");
}

#[test]
fn a_full_queue_says_when_to_come_back() {
    let server = Server::start(&["--parallel", "1", "--max-queue", "1"]);
    let long = ask(json!({"stream": true, "ignore_eos": true, "max_tokens": null}));
    let _running = server.send("/v1/chat/completions", &long);
    server.wait_for("paguro_requests_running", 1.0);
    let _waiting = server.send("/v1/chat/completions", &long);
    server.wait_for("paguro_requests_waiting", 1.0);
    let refused = server.post("/v1/chat/completions", &ask(json!({})));
    assert_eq!((refused.status, refused.header("retry-after")), (429, Some("1")), "{refused:?}");

    let server = Server::start(&["--parallel", "1", "--max-queue-tokens", "30"]);
    let _running = server.send("/v1/chat/completions", &long);
    server.wait_for("paguro_requests_running", 1.0);
    let _waiting = server.send("/v1/chat/completions", &long);
    server.wait_for("paguro_requests_waiting", 1.0);
    let refused = server.post("/v1/chat/completions", &ask(json!({})));
    assert_eq!(refused.status, 429, "{refused:?}");
}

#[cfg(unix)]
fn stop(server: &Server) {
    let killed = Command::new("kill").arg(server.pid().to_string()).status().unwrap();
    assert!(killed.success());
}

#[cfg(unix)]
#[test]
fn the_end_waits_for_streams_and_cuts_them_at_the_deadline() {
    // A stream that ends in time is complete.
    let mut server = Server::start(&[]);
    let body = ask(json!({"stream": true, "max_tokens": 1500, "ignore_eos": true}));
    let mut stream = server.send("/v1/chat/completions", &body);
    server.wait_for("paguro_requests_running", 1.0);
    stop(&server);
    // Routers see at once that it takes no more requests, and send them elsewhere.
    while server.get("/health").status == 200 {}
    for refused in [
        server.get("/ready"),
        server.get("/v1/models"),
        server.post("/v1/chat/completions", &ask(json!({}))),
        server.post("/v1/messages", &ask(json!({}))),
    ] {
        assert_eq!((refused.status, refused.header("retry-after")), (503, Some("5")), "{refused:?}");
    }
    assert_eq!(server.metric("paguro_requests_running"), Some(1.0), "the stream goes on");
    let answer = Answer::read(&mut stream);
    assert!(answer.events().len() > 1);
    assert!(server.wait().success());
    // One that does not is cut.
    let mut server = Server::start(&["--shutdown-timeout", "200ms", "--ctx", "0"]);
    let body = ask(json!({"stream": true, "max_tokens": null, "ignore_eos": true}));
    let _stream = server.send("/v1/chat/completions", &body);
    server.wait_for("paguro_requests_running", 1.0);
    stop(&server);
    assert!(server.wait().success());
}

#[cfg(unix)]
#[test]
fn a_unix_socket_serves_too() {
    use std::{io::Write, os::unix::net::UnixStream};
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("paguro.sock");
    let mut server = Server::start(&["--socket", path.to_str().unwrap()]);
    let mut stream = UnixStream::connect(&path).unwrap();
    stream.write_all(b"GET /v1/models HTTP/1.1\r\nHost: paguro\r\nConnection: close\r\n\r\n").unwrap();
    Answer::read(&mut std::io::BufReader::new(stream)).ok();
    stop(&server);
    assert!(server.wait().success() && !path.exists());
}

#[test]
fn chat_templates_have_the_local_time() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("clock.gguf");
    let file = fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tales/tales-Q8_0.gguf")).unwrap();
    let mut gguf = scripted::Gguf::read(&file);
    gguf.set("tokenizer.chat_template", scripted::string("{{ strftime_now('%Y-%m-%dT%H:%M') }}"));
    fs::write(&path, gguf.write()).unwrap();
    let home = tempfile::tempdir().unwrap();
    let mut command = paguro(home.path(), &["serve", "--port", "0", "--log", "warn", path.to_str().unwrap()]);
    // Fourteen hours before UTC, so that the date differs most of the day.
    command.env("TZ", "AAA-14");
    let server = Server::of(command, home);
    let expected = || {
        let now = std::time::SystemTime::now() + std::time::Duration::from_secs(14 * 3600);
        humantime::format_rfc3339_seconds(now).to_string()[..16].to_owned()
    };
    let before = expected();
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let tokens =
        server.post("/tokenize", &json!({"model": "clock", "messages": messages})).ok()["tokens"].clone();
    let prompt =
        server.post("/detokenize", &json!({"model": "clock", "tokens": tokens})).ok()["prompt"].clone();
    let prompt = prompt.as_str().unwrap();
    assert!([before, expected()].iter().any(|time| prompt.ends_with(time)), "{prompt}");
}
