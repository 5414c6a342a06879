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

/// Headers of a page that the server itself has served, and its token.
fn page(server: &Server) -> (String, String) {
    let session = server.get("/ui/v1/session").ok();
    (format!("http://{}", server.address), session["token"].as_str().unwrap().to_owned())
}

/// Every route of the router: its method, and its path with values for the parameters.
fn routes(server: &Server) -> Vec<(String, String, String)> {
    let document = server.get("/openapi.json").ok();
    let mut routes = Vec::new();
    for (path, methods) in document["paths"].as_object().unwrap() {
        let digest = format!("sha256:{}", "0".repeat(64));
        let filled = path.replace("{digest}", &digest).replace("{model}", "none");
        let filled = filled.replace("{id}", "none").replace("{name}", "none");
        for method in methods.as_object().unwrap().keys() {
            routes.push((method.to_uppercase(), path.clone(), filled.clone()));
        }
    }
    for path in ["/", "/docs", "/openapi.json", "/ui/nothing.js"] {
        routes.push(("GET".to_owned(), path.to_owned(), path.to_owned()));
    }
    routes
}

/// Groups all routes by the senders that are accepted: a letter for each one, `-` for a refusal.
fn matrix(server: &Server, senders: &[(char, &[(&str, &str)])]) -> String {
    let mut groups = std::collections::BTreeMap::<String, Vec<String>>::new();
    for (method, path, filled) in routes(server) {
        let accepted = |method: &str| -> String {
            let answer = |&(letter, headers): &(char, &[(&str, &str)])| {
                // Streams of events go on for ever; their heads are enough.
                let status = server.status(method, &filled, headers, "{}");
                assert_ne!(status, 500, "{method} {path}");
                if status == 403 || status == 401 { '-' } else { letter }
            };
            senders.iter().map(answer).collect()
        };
        let pattern = accepted(&method);
        if method == "GET" {
            assert_eq!(accepted("HEAD"), pattern, "HEAD {path}");
        }
        groups.entry(pattern).or_default().push(format!("{method} {path}"));
    }
    groups.into_iter().map(|(pattern, routes)| format!("{pattern}\n  {}\n", routes.join("\n  "))).collect()
}

#[test]
fn every_route_accepts_the_senders_of_its_effect() {
    let server = Server::start(&["--cors-origin", "https://chat.example"]);
    let (own, token) = page(&server);
    let port = server.address.rsplit_once(':').unwrap().1.to_owned();
    let rebound =
        [format!("evil.local:{port}"), format!("evil.internal:{port}"), format!(".localhost:{port}")];
    let origins = rebound.clone().map(|host| format!("http://{host}"));
    let docker = format!("host.docker.internal:{port}");
    let docker_origin = format!("http://{docker}");
    let site = "Sec-Fetch-Site";
    let senders: &[(char, &[(&str, &str)])] = &[
        // A program.
        ('P', &[]),
        // The page itself, with its token and without it, and its `GET` without `Origin`.
        ('T', &[("Origin", &own), (site, "same-origin"), ("x-paguro-page", &token)]),
        ('t', &[(site, "same-origin"), ("x-paguro-page", &token)]),
        ('o', &[("Origin", &own), (site, "same-origin")]),
        ('w', &[("Origin", &own), ("x-paguro-page", "wrong")]),
        // An origin that the settings name.
        ('A', &[("Origin", "https://chat.example"), (site, "cross-site")]),
        // Pages and applications on this machine; the token does not help them.
        ('L', &[("Origin", "http://localhost:1"), (site, "same-site"), ("x-paguro-page", &token)]),
        ('6', &[("Origin", "http://[::1]:1"), (site, "cross-site")]),
        ('a', &[("Origin", "app://obsidian.md"), ("x-paguro-page", &token)]),
        ('u', &[("Origin", "http://tauri.localhost")]),
        // A link of another site.
        ('n', &[(site, "cross-site"), ("Sec-Fetch-Mode", "navigate"), ("Sec-Fetch-Dest", "document")]),
        // Other sites, without an origin, with one, and rebound.
        ('i', &[(site, "cross-site"), ("Sec-Fetch-Mode", "no-cors"), ("Sec-Fetch-Dest", "image")]),
        ('s', &[(site, "same-site"), ("Sec-Fetch-Mode", "no-cors"), ("Sec-Fetch-Dest", "image")]),
        ('f', &[("Origin", "https://evil.example"), (site, "cross-site"), ("x-paguro-page", &token)]),
        ('0', &[("Origin", "null"), ("x-paguro-page", &token)]),
        ('d', &[("Origin", "file://")]),
        ('x', &[("Origin", "chrome-extension://abc")]),
        ('r', &[("Host", &rebound[0]), ("Origin", &origins[0]), ("x-paguro-page", &token)]),
        ('r', &[("Host", &rebound[1]), ("Origin", &origins[1]), ("x-paguro-page", &token)]),
        ('r', &[("Host", &rebound[2]), ("x-paguro-page", &token)]),
        // A name that others of the network may claim: a page there, and a program in a container.
        ('D', &[("Host", &docker), ("Origin", &docker_origin), ("x-paguro-page", &token)]),
        ('c', &[("Host", &docker)]),
    ];
    expect![[r#"
        PTt--A----------------
          GET /ui/v1/keys
          GET /ui/v1/remote
          GET /ui/v1/tools
        PTt--A---------------c
          POST /api/blobs/{digest}
          POST /api/copy
          POST /api/create
          DELETE /api/delete
          POST /api/pull
          POST /lora-adapters
          POST /ui/v1/import
          POST /ui/v1/keys
          DELETE /ui/v1/keys/{id}
          POST /ui/v1/preset
          POST /ui/v1/tools/call
          POST /ui/v1/tools/servers
          DELETE /ui/v1/tools/servers/{name}
          POST /v1/load_lora_adapter
          POST /v1/unload_lora_adapter
        PTtowA----------------
          GET /ui/v1/catalogue
          GET /ui/v1/live
          GET /ui/v1/models
          GET /ui/v1/preset
          GET /ui/v1/requests
          GET /ui/v1/session
          GET /ui/v1/settings
        PTtowAL6au----------Dc
          POST /api/chat
          POST /api/embed
          POST /api/embeddings
          POST /api/generate
          POST /api/show
          POST /classify
          POST /detokenize
          POST /embed
          POST /embed_sparse
          POST /inference/v1/generate
          POST /infill
          POST /predict
          POST /rerank
          POST /score
          POST /similarity
          POST /tokenize
          POST /v1/chat/completions
          POST /v1/chat/completions/render
          POST /v1/classify
          POST /v1/completions
          POST /v1/completions/render
          POST /v1/embed
          POST /v1/embeddings
          POST /v1/messages
          POST /v1/messages/count_tokens
          POST /v1/rerank
          POST /v1/responses
          POST /v1/responses/render
          GET /v1/responses/{id}
          DELETE /v1/responses/{id}
          POST /v1/score
          POST /v2/embed
          POST /v2/rerank
        PTtowAL6aun---------Dc
          HEAD /api/blobs/{digest}
          GET /api/ps
          GET /api/tags
          GET /api/version
          GET /get_load
          GET /get_server_info
          GET /health
          GET /info
          GET /load
          GET /loads
          GET /lora-adapters
          GET /metrics
          GET /props
          GET /ready
          GET /server_info
          GET /status
          GET /tokenizer_info
          GET /v1/loads
          GET /v1/models
          GET /v1/models/{model}
          GET /version
          GET /
          GET /docs
          GET /openapi.json
          GET /ui/nothing.js
    "#]]
    .assert_eq(&matrix(&server, senders));

    // A model is unloaded by those who may change something.
    let unload = |headers: &[(&str, &str)], time: serde_json::Value| {
        let body = json!({"model": "tales", "keep_alive": time}).to_string();
        server.request("POST", "/api/generate", headers, &body).status
    };
    let local: &[(&str, &str)] = &[("Origin", "http://localhost:1")];
    assert_eq!(["5m", "-1s", "0s", "1ms"].map(|time| unload(local, json!(time))), [200, 200, 403, 403]);
    assert_eq!(unload(&[("Origin", &own), ("x-paguro-page", &token)], json!(0)), 200);
    assert_eq!((unload(&[("Origin", &own)], json!(0)), unload(&[], json!(0))), (403, 200));
}

#[test]
fn a_key_proves_as_much_as_the_token_of_the_page() {
    let server = Server::start(&["--api-key", "secret"]);
    let own = format!("http://{}", server.address);
    let port = server.address.rsplit_once(':').unwrap().1.to_owned();
    let rebound = format!("evil.local:{port}");
    let key = ("Authorization", "Bearer secret");
    let site = "Sec-Fetch-Site";
    let senders: &[(char, &[(&str, &str)])] = &[
        ('p', &[]),
        ('P', &[key]),
        ('o', &[key, ("Origin", &own), (site, "same-origin")]),
        ('L', &[key, ("Origin", "http://localhost:1"), (site, "same-site")]),
        ('a', &[key, ("Origin", "app://obsidian.md")]),
        ('i', &[(site, "cross-site"), ("Sec-Fetch-Mode", "no-cors"), ("Sec-Fetch-Dest", "image")]),
        ('f', &[key, ("Origin", "https://evil.example")]),
        ('0', &[key, ("Origin", "null")]),
        ('r', &[key, ("Host", &rebound)]),
    ];
    expect![[r#"
        -PoLa----
          POST /api/blobs/{digest}
          HEAD /api/blobs/{digest}
          POST /api/chat
          POST /api/copy
          POST /api/create
          DELETE /api/delete
          POST /api/embed
          POST /api/embeddings
          POST /api/generate
          GET /api/ps
          POST /api/pull
          POST /api/show
          GET /api/tags
          GET /api/version
          POST /classify
          POST /detokenize
          POST /embed
          POST /embed_sparse
          GET /get_load
          GET /get_server_info
          POST /inference/v1/generate
          POST /infill
          GET /info
          GET /load
          GET /loads
          GET /lora-adapters
          POST /lora-adapters
          GET /metrics
          POST /predict
          GET /props
          POST /rerank
          POST /score
          GET /server_info
          POST /similarity
          GET /status
          POST /tokenize
          GET /tokenizer_info
          GET /ui/v1/catalogue
          POST /ui/v1/import
          GET /ui/v1/keys
          POST /ui/v1/keys
          DELETE /ui/v1/keys/{id}
          GET /ui/v1/live
          GET /ui/v1/models
          GET /ui/v1/preset
          POST /ui/v1/preset
          GET /ui/v1/remote
          GET /ui/v1/requests
          GET /ui/v1/settings
          GET /ui/v1/tools
          POST /ui/v1/tools/call
          POST /ui/v1/tools/servers
          DELETE /ui/v1/tools/servers/{name}
          POST /v1/chat/completions
          POST /v1/chat/completions/render
          POST /v1/classify
          POST /v1/completions
          POST /v1/completions/render
          POST /v1/embed
          POST /v1/embeddings
          POST /v1/load_lora_adapter
          GET /v1/loads
          POST /v1/messages
          POST /v1/messages/count_tokens
          GET /v1/models
          GET /v1/models/{model}
          POST /v1/rerank
          POST /v1/responses
          POST /v1/responses/render
          GET /v1/responses/{id}
          DELETE /v1/responses/{id}
          POST /v1/score
          POST /v1/unload_lora_adapter
          POST /v2/embed
          POST /v2/rerank
          GET /version
        pPo------
          GET /ui/v1/session
        pPoLa----
          GET /health
          GET /ready
          GET /
          GET /docs
          GET /openapi.json
          GET /ui/nothing.js
    "#]]
    .assert_eq(&matrix(&server, senders));
}

#[test]
fn pages_on_this_machine_pass_the_preflight_of_browsers() {
    let server = Server::start(&[]);
    let allowed = |origin: &str| {
        let preflight = [
            ("Origin", origin),
            ("Access-Control-Request-Method", "POST"),
            ("Access-Control-Request-Headers", "content-type"),
        ];
        let answer = server.request("OPTIONS", "/api/chat", &preflight, "");
        answer.header("access-control-allow-origin").map(str::to_owned)
    };
    for origin in ["http://localhost:3000", "http://127.0.0.1:5173", "https://[::1]:1", "app://obsidian.md"] {
        assert_eq!(allowed(origin).as_deref(), Some(origin));
        let answer = server.request(
            "POST",
            "/v1/chat/completions",
            &[("Origin", origin)],
            &ask(json!({})).to_string(),
        );
        assert_eq!((answer.status, answer.header("access-control-allow-origin")), (200, Some(origin)));
    }
    for origin in ["http://evil.example", "null", "http://evil.localhost", "http://localhost.evil.example"] {
        assert_eq!(allowed(origin), None, "{origin}");
    }
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
