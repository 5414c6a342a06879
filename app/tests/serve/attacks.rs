//! Hostile clients: each is refused by name or disconnected soon, and the server continues for all others.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    thread,
    time::Duration,
};

use serde_json::{Map, Value, json};

use super::{
    ask,
    http::{Answer, Server},
};

fn with(mut body: Value, more: Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// A chat in the words of every API.
fn chats() -> [(&'static str, Value); 5] {
    let messages = json!([{"role": "user", "content": "Hi"}]);
    [
        ("/v1/chat/completions", json!({"model": "tales", "messages": messages, "max_tokens": 2})),
        ("/v1/completions", json!({"model": "tales", "prompt": "Hi", "max_tokens": 2})),
        ("/v1/responses", json!({"model": "tales", "input": "Hi", "max_output_tokens": 2})),
        ("/v1/messages", json!({"model": "tales", "messages": messages, "max_tokens": 2})),
        (
            "/api/chat",
            json!({"model": "tales", "messages": messages, "stream": false, "options": {"num_predict": 2}}),
        ),
    ]
}

#[test]
fn numbers_names_and_schemas_that_ask_for_too_much_are_refused() {
    let server = Server::start(&[]);
    let refused = |path: &str, body: &Value, word: &str| {
        let answer = server.post(path, body);
        assert_eq!(answer.status, 400, "{path} {:.200}: {answer:?}", body.to_string());
        assert!(answer.body.contains(word), "{path}: {word} in {answer:?}");
    };
    let [chat, text, responses, anthropic, ollama] = chats();
    for count in [json!(0), json!(65), json!(1_000_000_000), json!(10_000_000_000u64), json!(u64::MAX)] {
        refused(chat.0, &with(chat.1.clone(), json!({"n": count})), "`n`");
        refused(text.0, &with(text.1.clone(), json!({"n": count})), "`n`");
        refused(text.0, &with(text.1.clone(), json!({"n": count, "best_of": count})), "`n`");
    }
    let huge = json!(u64::MAX);
    let variables: Map<_, _> = (0..300_000).map(|i| (format!("k{i}"), json!(i))).collect();
    for (path, body, word) in [
        (text.0, with(text.1.clone(), json!({"logprobs": huge})), "logprobs"),
        (text.0, with(text.1.clone(), json!({"prompt": vec!["a"; 1000], "n": 64})), "prompt"),
        (chat.0, with(chat.1.clone(), json!({"logprobs": true, "top_logprobs": huge})), "top_logprobs"),
        (chat.0, with(chat.1.clone(), json!({"stop": vec!["x"; 2000]})), "stop"),
        (chat.0, with(chat.1.clone(), json!({"stop": ["x".repeat(100_000)]})), "stop"),
        (chat.0, with(chat.1.clone(), json!({"stop_token_ids": vec![1; 100_000]})), "stop_token_ids"),
        (ollama.0, with(ollama.1.clone(), json!({"keep_alive": huge})), "keep_alive"),
        ("/v1/embeddings", json!({"model": "tales", "input": "a", "dimensions": huge}), "dimensions"),
        ("/api/embed", json!({"model": "tales", "input": vec!["a"; 10_001]}), "`input` has 10001 elements"),
        (
            "/similarity",
            json!({"inputs": {"source_sentence": "a", "sentences": vec!["a"; 50_000]}}),
            "50000 elements",
        ),
        (
            "/detokenize",
            json!({"model": "tales", "tokens": vec![1; 100_000]}),
            "`tokens` has 100000 elements",
        ),
        (chat.0, with(chat.1.clone(), json!({"chat_template_kwargs": variables})), "chat_template_kwargs"),
        (
            chat.0,
            with(chat.1.clone(), json!({"messages": [{"role": "user", "content": "a ".repeat(2_000_000)}]})),
            "maximum context length",
        ),
        ("/tokenize", json!({"model": "tales", "prompt": " ".repeat(4_000_000)}), "maximum context length"),
        ("/api/create", json!({"model": "TALES", "from": "tales"}), "TALES"),
        ("/api/copy", json!({"source": "tales", "destination": "Tales:Latest"}), "ales"),
    ] {
        refused(path, &body, word);
    }

    let chain: Map<_, _> =
        (0..2000).map(|i| (format!("a{i}"), json!({"$ref": format!("#/$defs/a{}", i + 1)}))).collect();
    let names: Vec<_> = (0..10_000).map(|i| format!("property_{i}")).collect();
    let properties: Map<_, _> = names.iter().map(|name| (name.clone(), json!({}))).collect();
    let deep = (0..110).fold(json!({}), |inner, _| json!({"items": inner}));
    let schemas = [
        json!({"$defs": chain, "$ref": "#/$defs/a0"}),
        json!({"type": "object", "properties": properties}),
        json!({"type": "object", "required": names}),
        json!({"type": "object", "properties": {"x": {"enum": (0..100_000).collect::<Vec<_>>()}}}),
        json!({"type": "object", "properties": {"x": deep}}),
    ];
    for schema in &schemas {
        let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
        let tool = |parameters: &str| json!({"name": "f", "description": "x", parameters: schema});
        let function =
            json!({"type": "function", "function": with(tool("parameters"), json!({"strict": true}))});
        for (path, body) in [
            (chat.0, with(chat.1.clone(), json!({"response_format": format}))),
            (text.0, with(text.1.clone(), json!({"response_format": format}))),
            (
                responses.0,
                with(
                    responses.1.clone(),
                    json!({"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}),
                ),
            ),
            (
                anthropic.0,
                with(
                    anthropic.1.clone(),
                    json!({"output_config": {"format": {"type": "json_schema", "schema": schema}}}),
                ),
            ),
            (ollama.0, with(ollama.1.clone(), json!({"format": schema}))),
        ] {
            refused(path, &body, "at most");
        }
        // The schema of a tool is part of the prompt.
        let fits = schema.to_string().len() < 2000;
        let strict = with(chat.1.clone(), json!({"tools": [function], "tool_choice": "required"}));
        refused(chat.0, &strict, if fits { "at most" } else { "maximum context length" });
        // A tool that is not strict gives way, and its calls are any objects.
        if fits {
            let lenient = json!({"tools": [tool("input_schema")], "tool_choice": {"type": "any"}});
            server.post(anthropic.0, &with(anthropic.1.clone(), lenient)).ok();
        }
    }

    // A quote in a comment hides nothing of a grammar.
    let links: String =
        (0..20_000).map(|i| format!("\"a{i}\":{{\"$ref\":\"#/$defs/a{}\"}},", i + 1)).collect();
    let chain =
        format!("%json {{\"$comment\":\"//\",\"$defs\":{{{links}\"z\":true}},\"$ref\":\"#/$defs/a0\"}}");
    for (grammar, word) in [
        (format!("# \"\nstart: {chain}"), "names in one object"),
        (format!("x: \"y\" # it's 5\" long\nstart: {chain}"), "names in one object"),
        (format!("start: %lark {{ start: <\"> // \"\n | {chain} }}"), "names in one object"),
        ("# \"\nstart[temperature=0.0]: \"a\"".into(), "temperature"),
        (format!("start: {}\"b\"", "\"a\"|".repeat(40_000)), "alternatives in rules"),
        (format!("root ::= {}\nx ::= \"a\"", "x? ".repeat(5_000)), "at most"),
    ] {
        for (path, body) in [text.clone(), chat.clone()] {
            for field in ["grammar", "guided_grammar"] {
                refused(path, &with(body.clone(), json!({field: grammar})), word);
            }
        }
    }

    // A context beyond the model's is the model's.
    server.post(ollama.0, &with(ollama.1.clone(), json!({"options": {"num_ctx": huge}}))).ok();
    // Longest times are no shorter ones, and break no list.
    server.post(ollama.0, &with(ollama.1.clone(), json!({"keep_alive": 3_153_600_000u64}))).ok();
    server.get("/api/ps").ok();
    let timeout = |value: &str| {
        server.request("POST", chat.0, &[("x-request-timeout", value)], &chat.1.to_string()).status
    };
    assert_eq!(["1e18", "1e300", "NaN", "-1", "inf"].map(timeout), [200, 400, 400, 400, 400]);
}

#[test]
fn errors_have_the_shape_of_their_api_and_foreign_pages_are_refused() {
    let server = Server::start(&[]);
    for path in ["/v1/models/%ff", "/v1/responses/%ff"] {
        let answer = server.get(path);
        assert!(answer.error().starts_with("400 invalid_request_error/"), "{answer:?}");
    }
    let answer = server.post("/api/blobs/%ff", &json!({}));
    assert!(answer.status == 400 && answer.json()["error"].is_string(), "{answer:?}");
    let origin = |headers: &[(&str, &str)]| server.request("GET", "/v1/models", headers, "").status;
    assert_eq!(origin(&[("Origin", "app://obsidian.md")]), 200);
    for foreign in
        ["HTTP://evil.example", "NULL", "ws://evil.example", "chrome-extension://abc", "http://\u{e9}"]
    {
        assert_eq!(origin(&[("Origin", foreign)]), 403, "{foreign}");
    }
    let same = format!("http://{}", server.address);
    assert_eq!(origin(&[("Origin", &same)]), 200);
    assert_eq!(origin(&[("Origin", &same), ("Origin", "http://evil.example")]), 403);
}

/// Sends the head of a request and the beginning of its body.
fn begin(server: &Server, path: &str, length: usize, body: &[u8]) -> TcpStream {
    let mut stream = server.connect();
    let host = &server.address;
    write!(stream, "POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\n\r\n").unwrap();
    // It may have been refused already.
    let _ = stream.write_all(body);
    stream
}

fn status(stream: TcpStream) -> u16 {
    Answer::read(&mut BufReader::new(stream)).status
}

#[test]
fn uploads_that_stop_hold_up_nobody() {
    // An upload that held up others would do so for longer than the limit of a test.
    let server = Server::start(&["--max-connections", "700", "--read-timeout", "1h", "--min-body-rate", "0"]);
    let digest = format!("/api/blobs/sha256:{}", "0".repeat(64));
    let _stalled: Vec<_> = (0..560).map(|_| begin(&server, &digest, 1000, b"x")).collect();
    server.post("/v1/chat/completions", &ask(json!({"max_tokens": 1}))).ok();
    // The library is free for others.
    let removed =
        server.request("DELETE", "/api/delete", &[], &json!({"model": "no-such-model"}).to_string());
    assert_eq!(removed.status, 404);
}

#[test]
fn slow_bodies_unread_answers_and_idle_connections_end() {
    let limits =
        ["--read-timeout", "2s", "--write-timeout", "1s", "--body-memory", "1MiB", "--max-connections", "24"];
    let server = Server::start(&[&limits[..], &["--shutdown-timeout", "60s"]].concat());

    // A body that drips.
    let mut slow = begin(&server, "/v1/completions", 1000, b"{");
    let drip = slow.try_clone().unwrap();
    let writer = thread::spawn(move || {
        let mut drip = drip;
        for _ in 0..100 {
            thread::sleep(Duration::from_millis(100));
            if drip.write_all(b" ").is_err() {
                break;
            }
        }
    });
    let mut answer = String::new();
    let _ = BufReader::new(&mut slow).read_line(&mut answer);
    assert!(answer.contains("408"), "{answer}");
    drop(slow);

    // All bodies together have a bound; small ones need none of it.
    let large = format!("{{\"model\": \"tales\", \"prompt\": \"{}", "a".repeat(900 << 10));
    let _reading = begin(&server, "/v1/completions", 2 << 20, large.as_bytes());
    thread::sleep(Duration::from_millis(300));
    let other = thread::scope(|scope| {
        let other = scope.spawn(|| status(begin(&server, "/v1/completions", large.len(), large.as_bytes())));
        server.post("/v1/completions", &json!({"model": "tales", "prompt": "Hi", "max_tokens": 1})).ok();
        other.join().unwrap()
    });
    assert!([400, 408, 503].contains(&other), "{other}");
    let values = format!("{{\"model\": \"tales\", \"metadata\": [{}1]}}", "1,".repeat(100_000));
    assert_eq!(server.request("POST", "/v1/chat/completions", &[], &values).status, 400);

    // An answer that nobody reads lets its model go when it is complete, and is cut.
    let long = ask(
        json!({"stream": true, "n": 24, "logprobs": true, "top_logprobs": 20, "max_tokens": 400, "ignore_eos": true}),
    );
    let unread: Vec<_> = (0..2).map(|_| server.send("/v1/chat/completions", &long)).collect();
    server.wait_for("paguro_requests_running", 48.0);
    server.wait_for("paguro_requests_running", 0.0);
    let users = || server.get("/status").ok()["models"][0]["users"].as_u64();
    while users() != Some(0) {
        thread::sleep(Duration::from_millis(50));
    }
    for mut stream in unread {
        // Reads what lies in buffers; the end comes early.
        let mut all = Vec::new();
        let _ = stream.read_to_end(&mut all);
        assert!(!all.ends_with(b"data: [DONE]\n\n\r\n0\r\n\r\n"), "nothing was cut");
    }

    writer.join().unwrap();
    ends_at_the_second_signal(server);
}

#[test]
fn idle_connections_make_room_for_new_ones() {
    // Without room, a new connection waits for a timeout that is far longer than the limit of a test.
    let server = Server::start(&["--read-timeout", "1h", "--max-connections", "24"]);
    let idle: Vec<_> = (0..24)
        .map(|_| {
            let mut stream = server.connect();
            write!(stream, "GET /health HTTP/1.1\r\nHost: {}\r\n\r\n", server.address).unwrap();
            let mut reader = BufReader::new(stream);
            assert_eq!(Answer::read(&mut reader).status, 200);
            reader
        })
        .collect();
    assert_eq!(server.get("/health").status, 200);
    drop(idle);
}

#[cfg(unix)]
fn ends_at_the_second_signal(mut server: Server) {
    let long = ask(json!({"stream": true, "max_tokens": null, "ignore_eos": true, "n": 16}));
    let mut stream = server.send("/v1/chat/completions", &long);
    let reader = thread::spawn(move || drop(stream.read_to_end(&mut Vec::new())));
    server.wait_for("paguro_requests_running", 16.0);
    let interrupt = |server: &Server| {
        let kill = std::process::Command::new("kill").args(["-INT", &server.pid().to_string()]).status();
        assert!(kill.unwrap().success());
    };
    interrupt(&server);
    thread::sleep(Duration::from_millis(200));
    interrupt(&server);
    assert!(server.wait().success());
    reader.join().unwrap();
}

#[cfg(not(unix))]
fn ends_at_the_second_signal(_: Server) {}
