//! Clients that go away, that are slow, or that do not speak HTTP.

use std::{
    io::{BufRead, Write},
    thread,
    time::Duration,
};

use serde_json::json;

use super::{
    ask,
    http::{Server, read_chunk},
};

#[test]
fn a_client_that_goes_away_frees_its_pages() {
    let server = Server::start(&[]);
    // Longer than the test: only leaving ends it.
    let long = ask(json!({"stream": true, "ignore_eos": true, "max_tokens": null}));
    let mut clients: Vec<_> = (0..8).map(|_| server.send("/v1/chat/completions", &long)).collect();
    for client in &mut clients {
        let mut line = String::new();
        while line != "\r\n" {
            line.clear();
            client.read_line(&mut line).unwrap();
        }
        read_chunk(client).unwrap();
    }
    drop(clients);
    server.wait_for("paguro_kv_pages_used", 0.0);
    server.wait_for("paguro_requests_running", 0.0);

    // The same before anything was sent, and for answers that do not stream.
    let silent = server.send("/v1/chat/completions", &ask(json!({"ignore_eos": true, "max_tokens": null})));
    thread::sleep(Duration::from_millis(50));
    drop(silent);
    server.wait_for("paguro_kv_pages_used", 0.0);
    assert!(server.metric("paguro_requests_total").unwrap() >= 9.0);
}

#[test]
fn a_slow_reader_holds_up_nobody() {
    let server = Server::start(&[]);
    let long = ask(json!({"stream": true, "n": 8, "logprobs": true, "top_logprobs": 20, "max_tokens": 400}));
    let unread: Vec<_> = (0..4).map(|_| server.send("/v1/chat/completions", &long)).collect();
    for _ in 0..4 {
        server.post("/v1/chat/completions", &ask(json!({}))).ok();
    }
    drop(unread);
    server.wait_for("paguro_kv_pages_used", 0.0);
}

#[test]
fn malformed_requests_leave_the_server_well() {
    let server = Server::start(&["--max-body", "64KiB", "--read-timeout", "2s"]);
    let cases: &[&[u8]] = &[
        b"\r\n\r\n",
        b"\0\0\0\0",
        b"HELLO\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\nConnection: close\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\nzz\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\nConnection: close\r\n\r\n{}",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\nConnection: close\r\n\r\n{",
        b"GET /v1/models HTTP/1.1\r\nHost: \xff\xfe\r\nConnection: close\r\n\r\n",
    ];
    for case in cases {
        let answer = server.raw(case);
        let line = answer.split(|&byte| byte == b'\r').next().unwrap();
        let refused = line.is_empty() || line.starts_with(b"HTTP/1.1 4") || line.starts_with(b"HTTP/1.0 4");
        assert!(refused, "{}: {}", String::from_utf8_lossy(case), String::from_utf8_lossy(&answer));
    }
    let mut huge = b"GET / HTTP/1.1\r\nHost: localhost\r\n".to_vec();
    for i in 0..20_000 {
        write!(huge, "x-{i}: {i}\r\n").unwrap();
    }
    server.raw(&huge);
    server.post("/v1/chat/completions", &ask(json!({}))).ok();
}

#[test]
fn ten_thousand_connections_come_and_go() {
    let server = Server::start(&[]);
    server.post("/v1/chat/completions", &ask(json!({}))).ok();
    let before = server.metric("process_resident_memory_bytes");
    for _ in 0..20 {
        let open: Vec<_> = (0..500).map(|_| server.connect()).collect();
        drop(open);
    }
    server.post("/v1/chat/completions", &ask(json!({}))).ok();
    // Freed memory is released shortly after the last connections have closed.
    let resident = || server.metric("process_resident_memory_bytes").unwrap_or_default();
    let Some(before) = before else { return };
    while resident() > before + 8e6 {
        thread::sleep(Duration::from_millis(100));
    }
}
