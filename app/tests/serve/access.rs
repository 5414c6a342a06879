//! Hosts, origins and keys.

use expect_test::expect;
use serde_json::json;

use super::{
    ask,
    http::{Server, paguro},
};

#[test]
fn other_names_and_other_sites_are_refused() {
    let server = Server::start(&["--allow-host", "box.lan", "--cors-origin", "https://chat.example"]);
    let status = |headers: &[(&str, &str)]| server.request("GET", "/v1/models", headers, "").status;
    assert_eq!(status(&[]), 200);
    assert_eq!(status(&[("Host", "box.lan:1")]), 200);
    assert_eq!(status(&[("Host", "evil.example")]), 403);
    assert_eq!(status(&[("Origin", "https://evil.example")]), 403);
    let answer = server.request("GET", "/v1/models", &[("Origin", "https://chat.example")], "");
    assert_eq!(
        (answer.status, answer.header("access-control-allow-origin")),
        (200, Some("https://chat.example"))
    );
    let preflight = [
        ("Origin", "https://chat.example"),
        ("Access-Control-Request-Method", "POST"),
        ("Access-Control-Request-Headers", "authorization,content-type"),
    ];
    let answer = server.request("OPTIONS", "/v1/chat/completions", &preflight, "");
    assert_eq!(
        (answer.status, answer.header("access-control-allow-headers")),
        (200, Some("authorization,content-type"))
    );
}

#[test]
fn a_key_is_needed_as_soon_as_there_is_one() {
    let server = Server::start(&[]);
    let keys = |args: &[&str]| {
        let output = paguro(server.home(), &[&["keys"], args].concat()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    let get = |path: &str, key: &str| {
        let bearer = format!("Bearer {key}");
        server.request("GET", path, &[("Authorization", &bearer)], "").status
    };
    assert_eq!(server.get("/v1/models").status, 200);
    let key = keys(&["add", "laptop"]);
    let monitor = keys(&["add", "prometheus", "--scope", "admin"]);
    // Running servers look twice a second.
    std::thread::sleep(std::time::Duration::from_millis(1100));
    expect!["401 invalid_request_error/invalid_api_key -: a key is needed: `Authorization: Bearer KEY`; `paguro keys add` makes one"].assert_eq(&server.get("/v1/models").error());
    assert_eq!(server.get("/v1/models").header("www-authenticate"), Some("Bearer"));
    assert_eq!(server.get("/health").status, 200);
    assert_eq!((get("/v1/models", &key), get("/metrics", &key)), (200, 403));
    assert_eq!((get("/v1/models", &monitor), get("/metrics", &monitor)), (403, 200));
    assert_eq!(get("/v1/models", "pg-nonsense"), 401);
    for header in ["x-api-key", "api-key"] {
        let headers = [(header, key.as_str())];
        let answer = server.request("POST", "/v1/chat/completions", &headers, &ask(json!({})).to_string());
        assert_eq!(answer.status, 200, "{header}");
    }

    let file = std::fs::read_to_string(server.home().join(".local/share/paguro/keys.json")).unwrap();
    assert!(!file.contains(&key), "keys are not kept");
    let list = keys(&["list"]);
    let rows: Vec<_> = list.lines().map(|line| line.split_whitespace().skip(1).collect::<Vec<_>>()).collect();
    assert_eq!(rows, [["scope", "name"], ["inference", "laptop"], ["admin", "prometheus"]]);
    for line in list.lines().skip(1) {
        keys(&["rm", line.split_whitespace().next().unwrap()]);
    }
    std::thread::sleep(std::time::Duration::from_millis(1100));
    assert_eq!(server.get("/v1/models").status, 200);
}

#[test]
fn other_machines_need_a_key_even_if_there_is_none() {
    let server = Server::start(&["--host", "0.0.0.0"]);
    assert_eq!(server.get("/health").status, 200);
    assert_eq!(server.get("/v1/models").status, 401);
}
