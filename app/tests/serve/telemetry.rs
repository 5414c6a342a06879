//! Spans for a collector: a small one that listens on loopback.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpListener,
    process::Command,
    sync::mpsc::{Sender, channel},
    thread,
    time::Duration,
};

use serde_json::json;

use super::{ask, http::Server};

/// Takes requests, tells their heads and bodies, and answers that all is well.
fn collect(listener: &TcpListener, told: &Sender<(String, Vec<u8>)>) {
    for stream in listener.incoming() {
        let mut reader = BufReader::new(stream.unwrap());
        loop {
            let (mut head, mut length) = (String::new(), 0);
            loop {
                let mut line = String::new();
                if reader.read_line(&mut line).unwrap_or(0) == 0 || line == "\r\n" {
                    break;
                }
                let lower = line.to_ascii_lowercase();
                if let Some(value) = lower.strip_prefix("content-length: ") {
                    length = value.trim().parse().unwrap();
                }
                head += &lower;
            }
            if head.is_empty() {
                break;
            }
            let mut body = vec![0; length];
            reader.read_exact(&mut body).unwrap();
            // The test may have seen enough.
            let _ = told.send((head, body));
            reader.get_mut().write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").unwrap();
        }
    }
}

#[cfg(unix)]
#[test]
fn spans_of_requests_are_sent() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let (told, heard) = channel();
    thread::spawn(move || collect(&listener, &told));
    let mut server = Server::start(&["--otlp-endpoint", &endpoint]);
    server.post("/v1/chat/completions", &ask(json!({}))).ok();
    assert_eq!(server.get("/v1/models/nothing").status, 404);
    // Pending spans are sent at the end.
    assert!(Command::new("kill").arg(server.pid().to_string()).status().unwrap().success());
    assert!(server.wait().success());
    let mut bytes = Vec::new();
    while let Ok((head, body)) = heard.recv_timeout(Duration::from_secs(1)) {
        assert!(head.starts_with("post /v1/traces http/1.1"), "{head}");
        assert!(head.contains("content-type: application/x-protobuf"), "{head}");
        bytes.extend(body);
    }
    let has = |text: &str| bytes.windows(text.len()).any(|window| window == text.as_bytes());
    for text in [
        "service.name",
        "paguro",
        "request",
        "/v1/chat/completions",
        "/v1/models/nothing",
        "http.response.status_code",
        "generate",
        "gen_ai.request.model",
        "tales",
        "gen_ai.usage.output_tokens",
    ] {
        assert!(has(text), "{text}");
    }
    assert!(!has("shy fox"), "no text of prompts");
}

#[test]
fn an_endpoint_that_is_none_is_refused() {
    let home = tempfile::tempdir().unwrap();
    let mut command =
        super::http::paguro(home.path(), &["serve", "--port", "0", "--otlp-endpoint", "no address"]);
    let output = command.stderr(std::process::Stdio::piped()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(2) && text.contains("`no address`"), "{output:?}");
}
