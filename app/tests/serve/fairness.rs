//! Time limits of requests, and fair shares among keys.

use std::{
    fs,
    path::Path,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::Duration,
};

use expect_test::expect;
use serde_json::{Value, json};

use super::{
    ask,
    http::{Server, paguro},
};

/// The header of a new key.
fn key(home: &Path, name: &str) -> String {
    let output = paguro(home, &["keys", "add", name, "--scope", "inference,admin"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    format!("Bearer {}", String::from_utf8(output.stdout).unwrap().trim())
}

/// A request that would go on for long.
fn long(more: Value) -> Value {
    let mut body = ask(json!({"max_tokens": 600, "n": 16, "ignore_eos": true}));
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

#[test]
fn answers_that_take_too_long_are_ended() {
    let server = Server::start(&[]);
    server.post("/v1/chat/completions", &ask(json!({}))).ok();
    let post = |path: &str, seconds: &str, body: &Value| {
        server.request("POST", path, &[("X-Request-Timeout", seconds)], &body.to_string())
    };
    let late = "the answer was not finished in time; the header `x-request-timeout` and --request-timeout of the server set the limit";
    let answer = post("/v1/chat/completions", "0.1", &long(json!({})));
    assert_eq!((answer.status, &answer.json()["error"]["message"]), (504, &json!(late)));
    // A stream has begun; its last event says so.
    let answer = post("/v1/chat/completions", "0.1", &long(json!({"stream": true})));
    let last = answer.body.lines().rfind(|line| line.starts_with("data: ")).unwrap();
    assert!(answer.status == 200 && last.contains(late), "{last}");
    // One that is done in time is as it always is.
    let plain = server.post("/v1/chat/completions", &ask(json!({}))).ok();
    let timed = post("/v1/chat/completions", "60", &ask(json!({}))).ok();
    assert_eq!(timed["choices"], plain["choices"]);
    for wrong in ["soon", "-1", "0", "NaN", "inf"] {
        assert_eq!(post("/v1/chat/completions", wrong, &ask(json!({}))).status, 400, "{wrong}");
    }
    expect!["400 invalid_request_error/invalid_value x-request-timeout: the header `x-request-timeout` must be a number of seconds, more than 0"]
        .assert_eq(&post("/v1/chat/completions", "soon", &ask(json!({}))).error());
    let messages = json!({"model": "tales", "max_tokens": 900, "messages": [{"role": "user", "content": "Hi"}], "temperature": 1});
    let answer = post("/v1/messages", "0.001", &messages);
    assert_eq!((answer.status, &answer.json()["error"]["type"]), (504, &json!("timeout_error")));
    server.wait_for("paguro_kv_pages_used", 0.0);
}

#[test]
fn the_server_has_a_limit_of_its_own() {
    let server = Server::start(&["--request-timeout", "200ms"]);
    let mut status = 0;
    // Loading the model counts, too.
    for _ in 0..50 {
        status = server.post("/v1/chat/completions", &ask(json!({"max_tokens": 1}))).status;
        if status == 200 {
            break;
        }
    }
    assert_eq!(status, 200);
    assert_eq!(server.post("/v1/chat/completions", &long(json!({}))).status, 504);
}

#[test]
fn one_keys_flood_does_not_starve_another_key() {
    let home = tempfile::tempdir().unwrap();
    let (flood, other) = (key(home.path(), "flood"), key(home.path(), "other"));
    let server = Server::start_in(home, &["--parallel", "1"]);
    let post = |key: &str, body: &Value| {
        let headers = [("Authorization", key)];
        server.request("POST", "/v1/chat/completions", &headers, &body.to_string()).ok()
    };
    let waiting = || {
        let text = server.request("GET", "/metrics", &[("Authorization", other.as_str())], "").body;
        let line = text.lines().find(|line| line.starts_with("paguro_requests_waiting{"));
        line.map_or(0.0, |line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap())
    };
    let body = ask(json!({"max_tokens": 200, "ignore_eos": true}));
    post(&other, &ask(json!({"max_tokens": 1})));
    thread::scope(|scope| {
        for _ in 0..40 {
            scope.spawn(|| post(&flood, &body));
        }
        while waiting() < 35.0 {
            thread::sleep(Duration::from_millis(5));
        }
        // It came last, and is answered long before those that came first.
        post(&other, &body);
        let left = waiting();
        assert!(left >= 20.0, "{left} of the flood still waited");
    });
}

#[test]
fn a_request_for_many_answers_leaves_other_keys_their_share() {
    let home = tempfile::tempdir().unwrap();
    let (flood, other) = (key(home.path(), "flood"), key(home.path(), "other"));
    let server = Server::start_in(home, &["--parallel", "8"]);
    let post = |key: &str, body: &Value| {
        let headers = [("Authorization", key)];
        server.request("POST", "/v1/chat/completions", &headers, &body.to_string()).ok()
    };
    post(&other, &ask(json!({"max_tokens": 1})));
    let (flooded, answered) = (AtomicUsize::new(0), AtomicUsize::new(0));
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                post(&flood, &ask(json!({"max_tokens": 300, "n": 8, "ignore_eos": true})));
                flooded.fetch_add(1, Ordering::Relaxed);
            });
        }
        // Answered one after the other, while the flood goes on: it would have to end first if it were not interrupted.
        while flooded.load(Ordering::Relaxed) == 0 && answered.load(Ordering::Relaxed) < 5 {
            post(&other, &ask(json!({"max_tokens": 3})));
            answered.fetch_add(1, Ordering::Relaxed);
        }
    });
    let answered = answered.into_inner();
    assert!(answered >= 5, "{answered} answers before the first of the flood");
}

#[test]
fn a_name_that_could_be_two_models_is_refused() {
    let home = tempfile::tempdir().unwrap();
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tales/tales-Q8_0.gguf");
    for owner in ["a", "b"] {
        let copy = home.path().join(format!("{owner}.gguf"));
        fs::copy(file, &copy).unwrap();
        let name = format!("{owner}/story");
        let args = ["import", copy.to_str().unwrap(), "--name", &name];
        let output = paguro(home.path(), &args).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    }
    let server = Server::start_in(home, &[]);
    let error = server.post("/v1/chat/completions", &ask(json!({"model": "story"}))).error();
    assert!(error.starts_with("400 invalid_request_error/invalid_value model: `story` could be"), "{error}");
    server.post("/v1/chat/completions", &ask(json!({"model": "a/story"}))).ok();
    // Defaults of a model in the library apply to every API.
    let create =
        json!({"model": "short", "from": "a/story", "parameters": {"num_predict": 3, "temperature": 0}});
    assert_eq!(server.post("/api/create", &create).status, 200);
    let question = json!({"model": "short", "messages": [{"role": "user", "content": "Tell me a story"}]});
    let answer = server.post("/v1/chat/completions", &question).ok();
    assert_eq!(answer["usage"]["completion_tokens"], 3);
    let mut messages = question.clone();
    messages["max_tokens"] = 9.into();
    assert_eq!(server.post("/v1/messages", &messages).ok()["usage"]["output_tokens"], 9);
    let text = json!({"model": "short", "prompt": "Once upon a time"});
    let answer = server.post("/v1/completions", &text).ok();
    assert_eq!(answer["usage"]["completion_tokens"], 3);
    let response = server.post("/v1/responses", &json!({"model": "short", "input": "Tell me a story"})).ok();
    assert_eq!(response["usage"]["output_tokens"], 3);
}
