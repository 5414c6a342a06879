//! The page for people: its files, and the endpoints that only it needs.

use std::{
    io::{BufRead, BufReader, Write},
    path::Path,
};

use serde_json::{Value, json};

use super::{ask, http::Server};

/// Status, headers and bytes of an answer whose connection ends with it.
fn fetch(server: &Server, path: &str, headers: &str) -> (String, Vec<u8>) {
    let request =
        format!("GET {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n{headers}\r\n", server.address);
    let answer = server.raw(request.as_bytes());
    let end = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n").expect("a head ends");
    (String::from_utf8(answer[..end].to_vec()).unwrap().to_ascii_lowercase(), answer[end + 4..].to_vec())
}

const HTML: &str = "Accept: text/html,*/*\r\nAccept-Encoding: gzip\r\n";

#[test]
fn browsers_get_the_page_and_clients_their_line() {
    let server = Server::start(&[]);
    let (head, body) = fetch(&server, "/", HTML);
    assert!(head.starts_with("http/1.1 200") && head.contains("content-encoding: gzip"), "{head}");
    assert!(head.contains("content-security-policy: default-src 'none'; script-src 'self';"), "{head}");
    assert!(body.starts_with(&[0x1f, 0x8b]));
    let tag = head.lines().find_map(|line| line.strip_prefix("etag: ")).expect("it has a tag");
    let (again, body) = fetch(&server, "/", &format!("{HTML}If-None-Match: {tag}\r\n"));
    assert!(again.starts_with("http/1.1 304") && body.is_empty(), "{again}");
    assert_eq!(server.get("/").body, "Paguro is running");
    // Some proxies drop the header.
    for encoding in ["", "Accept-Encoding: identity\r\n"] {
        let (head, body) = fetch(&server, "/", &format!("Accept: text/html\r\n{encoding}"));
        assert!(!head.contains("content-encoding"), "{head}");
        let page = String::from_utf8(body).unwrap();
        let script = page.split('"').find(|part| part.ends_with(".js")).expect("the page has a script");
        let (head, script) = fetch(&server, script, encoding);
        assert!(head.starts_with("http/1.1 200") && !script.starts_with(&[0x1f, 0x8b]), "{head}");
    }

    let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/server/src/ui/dist/assets");
    for file in std::fs::read_dir(assets).unwrap() {
        let (name, bytes) =
            (file.as_ref().unwrap().file_name(), std::fs::read(file.unwrap().path()).unwrap());
        let name = name.to_str().unwrap();
        let path = format!("/ui/assets/{}", name.strip_suffix(".gz").unwrap_or(name));
        let (head, body) = fetch(&server, &path, HTML);
        assert!(head.contains("max-age=31536000, immutable"), "{path}: {head}");
        assert!(body == bytes, "{path} is not the committed file");
    }
    assert_eq!(server.get("/ui/assets/nothing.js").status, 404);

    let without = Server::start(&["--no-ui"]);
    let (head, body) = fetch(&without, "/", HTML);
    assert!(head.starts_with("http/1.1 200") && body == b"Paguro is running", "{head}");
    assert_eq!(without.get("/ui/v1/session").status, 404);
}

#[test]
fn the_stream_shows_a_request_while_it_runs_and_ends_with_the_server() {
    let mut server = Server::start(&[]);
    let mut stream = server.connect();
    write!(stream, "GET /ui/v1/live HTTP/1.1\r\nHost: {}\r\n\r\n", server.address).unwrap();
    let mut lines = BufReader::new(stream).lines();
    let mut tick = || loop {
        let line = lines.next()?.ok()?;
        if let Some(data) = line.strip_prefix("data: ") {
            return Some(serde_json::from_str::<Value>(data).unwrap());
        }
    };
    assert_eq!(tick().unwrap()["models"], json!([]));
    let answer = server.send("/v1/chat/completions", &ask(json!({"max_tokens": 1500, "ignore_eos": true})));
    let model = loop {
        let tick = tick().unwrap();
        if tick["models"][0]["sequences"][0]["generated"].as_u64() > Some(0) {
            break tick["models"][0].clone();
        }
    };
    let sequence = &model["sequences"][0];
    assert_eq!((&model["name"], &sequence["state"]), (&json!("tales"), &json!("running")));
    assert!(sequence["computed"].as_u64() >= sequence["prompt"].as_u64(), "{sequence}");
    assert!(model["stats"]["pages_used"].as_u64() > Some(0), "{model}");
    drop(answer);
    loop {
        let tick = tick().unwrap();
        if tick["models"][0]["sequences"] == json!([]) {
            break;
        }
    }
    // A server that is asked to stop does not wait for whoever looks on.
    #[cfg(unix)]
    {
        let pid = server.pid().to_string();
        assert!(std::process::Command::new("kill").arg(pid).status().unwrap().success());
        while tick().is_some() {}
        assert!(server.wait().success());
    }
}

#[test]
fn keys_are_made_and_revoked() {
    let server = Server::start(&[]);
    let with = |key: &str, method: &str, path: &str, body: &str| {
        server.request(method, path, &[("Authorization", &format!("Bearer {key}"))], body)
    };
    let session = server.get("/ui/v1/session").ok();
    assert_eq!(
        (&session["needs_key"], &session["scopes"]),
        (&json!(false), &json!(["inference", "models", "admin"]))
    );
    for (body, problem) in [
        (json!({"name": " ", "scopes": ["admin"]}), "`name` must have 1 to 100 bytes"),
        (json!({"name": "a", "scopes": []}), "`scopes` is empty"),
        (json!({"name": "a", "scopes": ["root"]}), "unknown variant `root`"),
    ] {
        let answer = server.post("/ui/v1/keys", &body);
        assert_eq!(answer.status, 400);
        assert!(answer.body.contains(problem), "{}", answer.body);
    }
    let made = server.post("/ui/v1/keys", &json!({"name": "laptop", "scopes": ["admin"]})).ok();
    let key = made["key"].as_str().unwrap();
    // Running servers look twice a second.
    std::thread::sleep(std::time::Duration::from_millis(1100));
    let session = with("pg-nonsense", "GET", "/ui/v1/session", "").ok();
    assert_eq!(
        (&session["needs_key"], &session["key_known"], &session["scopes"]),
        (&json!(true), &json!(false), &json!([]))
    );
    assert_eq!(with(key, "GET", "/ui/v1/session", "").ok()["scopes"], json!(["admin"]));
    let paths = ["keys", "settings", "requests", "live", "models", "tools", "catalogue", "preset", "remote"];
    assert_eq!(paths.map(|path| server.get(&format!("/ui/v1/{path}")).status), [401; 9]);
    assert_eq!(with(key, "GET", "/ui/v1/models", "").status, 403);
    let list = with(key, "GET", "/ui/v1/keys", "");
    assert!(!list.body.contains(key) && list.body.contains("laptop"));
    let settings = with(key, "GET", "/ui/v1/settings", "").ok();
    let port = settings["settings"].as_array().unwrap().iter().find(|one| one["name"] == "log").unwrap();
    assert_eq!((&port["value"], &port["origin"]), (&json!("warn"), &json!("flag")));
    let path = format!("/ui/v1/keys/{}", made["info"]["id"].as_str().unwrap());
    assert_eq!(with(key, "DELETE", &path, "").status, 200);
    assert_eq!(with(key, "DELETE", &path, "").status, 404);
}

#[test]
fn the_last_message_is_continued() {
    let server = Server::start(&[]);
    let messages = |last: Value| json!({"messages": [{"role": "user", "content": "Tell me a story"}, last]});
    let answer = |last: Value| {
        let mut body = ask(messages(last));
        body["continue_final_message"] = json!(true);
        server.post("/v1/chat/completions", &body)
    };
    let begun = json!({"role": "assistant", "content": "Once upon a time there was a"});
    let text = answer(begun).ok()["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    assert!(text.starts_with(' ') && !text.contains("Once upon a time"), "{text}");
    let refused = answer(json!({"role": "user", "content": "And then?"}));
    assert!(refused.error().contains("needs a last message of role `assistant`"), "{}", refused.body);
}

#[test]
fn examples_of_the_documentation_are_answered() {
    let server = Server::start(&[]);
    let document = server.get("/openapi.json").ok();
    let mut operations = Vec::new();
    for (path, methods) in document["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            let example = &operation["requestBody"]["content"]["application/json"]["example"];
            if let Some(position) = operation["x-position"].as_u64() {
                operations.push((position, method.to_uppercase(), path, example));
            }
        }
    }
    operations.sort_by_key(|operation| operation.0);
    assert_eq!(operations[0].2, "/v1/chat/completions");
    // Models of some examples are not here. Fields are checked before the model, so 404 means that they are right.
    for (_, method, path, example) in operations.iter().filter(|operation| operation.3.is_object()) {
        if *path == "/api/pull" {
            continue;
        }
        let answer = server.request(method, path, &[], &example.to_string());
        let names_another =
            example["model"].as_str().is_some_and(|model| !["tales", "bedtime"].contains(&model));
        let expected = match (names_another, path.as_str()) {
            (true, _) => 404,
            // The only model here ranks and classifies nothing.
            (_, "/rerank" | "/predict" | "/embed_sparse") => 400,
            _ => 200,
        };
        assert_eq!(answer.status, expected, "{method} {path}: {}", answer.body);
        assert!(expected != 400 || answer.body.contains("the model `tales`"), "{path}: {}", answer.body);
    }
}
