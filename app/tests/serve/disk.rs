//! The cache on disk: servers that are killed, files that change, who may share, and `paguro cache`.

use std::{
    fs,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use super::http::{Server, paguro};

/// A prompt of about 380 tokens.
fn prompt() -> String {
    "The fox ran to the river and looked for the key under a big stone. It was cold and dark. ".repeat(17)
}

fn start(dir: &Path, args: &[&str]) -> Server {
    let dir = dir.to_str().unwrap();
    Server::start(&[&["--kv-disk-dir", dir, "--kv-disk", "64MB", "--parallel", "2"], args].concat())
}

/// Text, and tokens of the prompt that memory and disk had.
fn complete(server: &Server, more: Value) -> (String, [u64; 2]) {
    let mut body =
        json!({"model": "tales", "prompt": prompt(), "max_tokens": 24, "temperature": 0, "logprobs": 1});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let answer = server.post("/v1/completions", &body).ok();
    let details = &answer["usage"]["prompt_tokens_details"];
    let tokens = |name: &str| details[name].as_u64().unwrap_or(0);
    let choice = &answer["choices"][0];
    let bits = format!("{} {}", choice["text"], choice["logprobs"]["token_logprobs"]);
    (bits, [tokens("cached_tokens"), tokens("cached_tokens_disk")])
}

fn wait_until_written(server: &Server) {
    wait_with_key(server, None);
}

/// The same with a key.
fn wait_with_key(server: &Server, key: Option<&str>) {
    let begin = Instant::now();
    let bearer = key.map(|key| format!("Bearer {key}"));
    let headers: Vec<_> = bearer.iter().map(|bearer| ("Authorization", bearer.as_str())).collect();
    while begin.elapsed() < Duration::from_secs(60) {
        let disk = &server.request("GET", "/status", &headers, "").ok()["models"][0]["disk"];
        if disk["caught_up"] == true && disk["saved"].as_u64() > Some(0) {
            return;
        }
        thread::sleep(Duration::from_millis(10));
    }
    panic!("the cache was never written");
}

#[test]
fn a_killed_server_goes_on_where_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let (first, cached) = {
        let server = start(dir.path(), &[]);
        let answer = complete(&server, json!({}));
        wait_until_written(&server);
        // Another process reads what the first one has computed, with the same bits, and adds to it.
        let other = start(dir.path(), &[]);
        let (bits, [cached, from_disk]) = complete(&other, json!({}));
        assert_eq!(bits, answer.0);
        assert!(from_disk >= 320 && cached == from_disk, "{cached} tokens, {from_disk} from the disk");
        let mut salts = 0..100;
        wait_for(|| {
            let salt = salts.next().unwrap();
            assert_eq!(complete(&other, json!({"cache_salt": salt.to_string()})).1, [0, 0]);
            wait_until_written(&other);
            // The other servers look for new files every second.
            thread::sleep(Duration::from_millis(1500));
            complete(&server, json!({"cache_salt": salt.to_string()})).1[1] > 0
        });
        answer
        // Both are killed here, without a chance to write anything.
    };
    assert_eq!(cached, [0, 0]);
    let server = start(dir.path(), &[]);
    let (again, [cached, from_disk]) = complete(&server, json!({}));
    assert_eq!(again, first);
    assert!(from_disk >= 320 && cached == from_disk, "{cached} tokens, {from_disk} from the disk");
    assert_eq!(complete(&server, json!({})).1, [cached, 0], "now memory has them");
    assert_eq!(server.metric("paguro_disk_hit_tokens_total"), Some(from_disk as f64));
    // A request with another salt finds nothing of it.
    for cached_tokens in [0, cached] {
        assert_eq!(complete(&server, json!({"cache_salt": "b"})), (first.clone(), [cached_tokens, 0]));
    }
}

#[test]
fn another_file_under_the_same_name_shares_nothing() {
    let shared = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared/model/tales-f16.gguf"));
    if !shared.exists() {
        println!("skipped: {} is not there", shared.display());
        return;
    }
    let own = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tales/tales-Q8_0.gguf");
    let (dir, models) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let file = models.path().join("fox.gguf");
    let run = |source: &Path| {
        let _ = fs::remove_file(&file);
        fs::copy(source, &file).unwrap();
        let server = start(dir.path(), &[file.to_str().unwrap()]);
        // Which prefixes are the file's is known once it was read.
        server.post("/v1/completions", &json!({"model": "fox", "prompt": "a", "max_tokens": 1})).ok();
        wait_for(|| server.get("/status").ok()["models"][0]["disk"]["opening"] == false);
        let answer = complete(&server, json!({"model": "fox"}));
        if answer.1[1] == 0 {
            wait_until_written(&server);
        }
        answer
    };
    let first = run(Path::new(own));
    let other = run(shared);
    assert_eq!((first.1, other.1), ([0, 0], [0, 0]));
    assert_ne!(first.0, other.0);
    let again = run(Path::new(own));
    assert_eq!(again.0, first.0);
    assert!(again.1[1] >= 320, "{:?}", again.1);
}

#[test]
fn the_cache_is_shown_checked_and_cleared() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("kv");
    let server = start(&dir, &[]);
    complete(&server, json!({}));
    wait_until_written(&server);
    let cache = |args: &[&str]| {
        let args = [&["cache", "--dir", dir.to_str().unwrap()], args].concat();
        let output = paguro(home.path(), &args).stderr(std::process::Stdio::piped()).output().unwrap();
        let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        (output.status.code(), text)
    };
    let (code, text) = cache(&["info", "--json"]);
    let info: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((code, &info["models"][0]["model"], &info["damaged"]), (Some(0), &json!("tales"), &json!(0)));
    let (code, text) = cache(&["clear"]);
    assert_eq!(code, Some(1));
    assert!(
        text.contains("is in use by another process") && text.contains("hint: stop `paguro serve`"),
        "{text}"
    );
    drop(server);
    assert_eq!(cache(&["verify", "--json"]).0, Some(0));
    let segment = dir.join("segment-0000000000000000.kv");
    let mut bytes = fs::read(&segment).unwrap();
    // In the payload of the first item.
    bytes[1000] ^= 1;
    fs::write(&segment, bytes).unwrap();
    let (code, text) = cache(&["verify"]);
    assert!(code == Some(1) && text.contains("1 items are damaged"), "{text}");
    assert!(cache(&["clear", "nobody"]).1.contains("nothing is stored for a model named `nobody`"));
    assert_eq!(cache(&["clear", "tales"]).0, Some(0));
    let info: Value = serde_json::from_str(&cache(&["info", "--json"]).1).unwrap();
    assert_eq!((&info["bytes"], &info["models"]), (&json!(0), &json!([])));
}

#[test]
fn keys_share_prefixes_only_if_the_server_says_so() {
    for share in ["keys", "all"] {
        let (home, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let key = |args: &[&str]| {
            let output = paguro(home.path(), &[&["keys", "add"], args].concat()).output().unwrap();
            String::from_utf8(output.stdout).unwrap().trim().to_owned()
        };
        let [one, two, three] = ["one", "two", "three"].map(|name| key(&[name]));
        let start = || {
            let dir = dir.path().to_str().unwrap();
            let args = ["serve", "--port", "0", "--log", "warn", "--kv-disk", "64MB", "--kv-disk-dir", dir];
            let command = paguro(home.path(), &[&args[..], &["--share-prefixes", share]].concat());
            Server::of(command, tempfile::tempdir().unwrap())
        };
        let cached = |server: &Server, key: &str, salt: &str| {
            let body = json!({"model": "tales", "prompt": prompt(), "max_tokens": 2, "cache_salt": salt});
            let headers = [("Authorization", &*format!("Bearer {key}"))];
            let answer = server.request("POST", "/v1/completions", &headers, &body.to_string()).ok();
            let details = &answer["usage"]["prompt_tokens_details"];
            ["cached_tokens", "cached_tokens_disk"].map(|name| details[name].as_u64().unwrap_or(0) > 0)
        };
        let shared = share == "all";
        let server = start();
        assert_eq!(cached(&server, &one, ""), [false, false], "{share}");
        assert_eq!(cached(&server, &one, ""), [true, false], "{share}");
        assert_eq!(cached(&server, &two, ""), [shared, false], "{share}");
        assert_eq!(cached(&server, &one, "salt"), [false, false], "{share}");
        assert_eq!(cached(&server, &two, "salt"), [shared, false], "{share}");
        wait_with_key(&server, Some(&one));
        drop(server);
        let server = start();
        assert_eq!(cached(&server, &three, ""), [shared, shared], "{share}");
        assert_eq!(cached(&server, &one, ""), [true, !shared], "{share}");
        assert_eq!(cached(&server, &three, "salt"), [shared, shared], "{share}");
    }
}

#[test]
fn the_cache_of_a_model_is_deleted_with_it() {
    let home = tempfile::tempdir().unwrap();
    let folder = home.path().join("fox.gguf");
    fs::copy(concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tales/tales-Q8_0.gguf"), &folder).unwrap();
    let run = |args: &[&str]| {
        let output = paguro(home.path(), args).output().unwrap();
        assert!(output.status.success(), "{args:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let import = || run(&["import", "--copy", folder.to_str().unwrap()]);
    let start = || {
        let command = paguro(home.path(), &["serve", "--port", "0", "--log", "warn", "--kv-disk", "64MB"]);
        let server = Server::of(command, tempfile::tempdir().unwrap());
        complete(&server, json!({"model": "fox"}));
        wait_until_written(&server);
        server
    };
    let stored = || {
        let info: Value = serde_json::from_str(&run(&["cache", "info", "--json"])).unwrap();
        info["models"].as_array().unwrap().len()
    };
    // By the server that has the cache open.
    import();
    let server = start();
    assert_eq!(stored(), 1);
    let deleted = server.request("DELETE", "/api/delete", &[], "{\"model\": \"fox\"}");
    assert_eq!(deleted.status, 200, "{}", deleted.body);
    wait_for(|| stored() == 0);
    // By the command while a server has the cache open, which deletes it a little later.
    import();
    complete(&server, json!({"model": "fox"}));
    wait_for(|| stored() == 1);
    assert!(run(&["rm", "fox"]).starts_with("removed fox"));
    wait_for(|| stored() == 0);
    drop(server);
    // By the command while no server runs.
    import();
    drop(start());
    assert_eq!(stored(), 1);
    run(&["rm", "fox"]);
    assert_eq!(stored(), 0);
}

fn wait_for(mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < end, "it never happens");
        thread::sleep(Duration::from_millis(50));
    }
}
