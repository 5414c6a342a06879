//! Processes that are killed at random times, a hundred times each: the library, the keys and a restart must be sound
//! after each kill. It takes minutes, so it runs only on request: `cargo test -p paguro --test library -- --ignored
//! --nocapture`.

use std::{
    collections::BTreeSet,
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    path::Path,
    process::Child,
    thread,
    time::{Duration, Instant},
};

use paguro_library::Digest;

use super::{Fixture, Random, check, model, settle, tales};

/// Kills of each kind; `PAGURO_KILLS` overrides it.
fn kills() -> usize {
    std::env::var("PAGURO_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(100)
}

impl Fixture {
    fn file(&self, name: &str, bytes: &[u8]) {
        fs::write(self.folder.path().join(name), bytes).unwrap();
    }

    /// Kills a command at random times until enough runs were killed before their end. `prepare` runs before each,
    /// `sound` after.
    fn kill_often(&self, args: &[&str], prepare: impl Fn(), sound: impl Fn(bool)) {
        prepare();
        let started = Instant::now();
        self.run(args).ok();
        let (mut within, mut random) = (started.elapsed(), Random(args.len() as u64));
        let (mut killed, mut done) = (0, 0);
        while killed < kills() {
            prepare();
            let mut child = self.command(args).spawn().unwrap();
            let after = Duration::from_micros(random.below(within.as_micros() as u64 + 1));
            thread::sleep(after);
            // SIGKILL; it may be done already.
            child.kill().unwrap();
            let success = child.wait().unwrap().success();
            sound(success);
            if success {
                done += 1;
                within = (within * 7 / 8).max(after / 2);
            } else {
                killed += 1;
                within = within * 17 / 16;
            }
        }
        println!("{args:?}: {killed} killed, {done} done before");
    }
}

#[test]
#[ignore = "takes minutes"]
fn killed_changes_leave_a_sound_library() {
    let f = Fixture::new();
    f.hub.add("o/m", &[("m.gguf", &model(3, 100_000))]);
    f.hub.state().delay = 1;
    f.file("x.gguf", &model(5, 500_000));
    let remove = |name: &str| drop(f.library().remove(name));
    let sound = |_: bool| drop(check(&f.root()));
    let pull = ["pull", "--force", "o/m", "--name", "pulled"];
    f.kill_often(
        &pull,
        || {
            remove("pulled");
            f.library().prune(false).unwrap();
        },
        sound,
    );
    settle(&f);
    let import = ["import", "--force", "--copy", "x.gguf"];
    f.kill_often(&import, || remove("x"), sound);
    settle(&f);
    let ensure = |name: &str, args: &[&str]| {
        if f.library().find(name).is_err() {
            f.run(args).ok();
        }
    };
    f.kill_often(&["rm", "x"], || ensure("x", &import), sound);
    f.kill_often(&["cp", "pulled", "again", "--replace"], || ensure("pulled", &pull), sound);
    settle(&f);
}

#[test]
#[ignore = "takes minutes"]
fn killed_repairs_and_rebuilds_lose_nothing() {
    let f = Fixture::new();
    let (pulled, copied) = (model(3, 100_000), model(5, 250_000));
    f.hub.add("o/m", &[("m.gguf", &pulled)]);
    f.file("x.gguf", &copied);
    f.run(&["pull", "--force", "o/m"]).ok();
    f.run(&["import", "--force", "--copy", "x.gguf"]).ok();
    let blob = |bytes: &[u8]| f.root().join("blobs").join(format!("sha256-{}", Digest::of(bytes).hex()));
    let flip = |path: &Path| {
        let mut bytes = fs::read(path).unwrap_or_else(|_| vec![0; 1000]);
        bytes[500] ^= 1;
        let _ = fs::remove_file(path);
        fs::write(path, bytes).unwrap();
    };
    let whole = |done: bool| {
        for bytes in [&pulled, &copied] {
            let found = fs::read(blob(bytes)).expect("a blob is never lost");
            assert!(!done || found == *bytes, "a repair that ends has repaired");
        }
    };
    let damage = || [&pulled, &copied].iter().for_each(|bytes| flip(&blob(bytes)));
    f.kill_often(&["verify", "--repair"], damage, whole);
    f.run(&["verify", "--repair"]).ok();
    settle(&f);
    let lose = || drop(fs::write(f.root().join("library.db"), ""));
    let rebuilt = |done: bool| {
        if done {
            assert_eq!(check(&f.root()).len(), 2);
        }
    };
    f.kill_often(&["rebuild"], lose, rebuilt);
    f.run(&["rebuild"]).ok();
    assert_eq!(check(&f.root()).len(), 2);
    settle(&f);
}

#[test]
#[ignore = "takes minutes"]
fn killed_changes_of_keys_lose_and_revive_none() {
    let f = Fixture::new();
    let names = || -> BTreeSet<String> {
        let keys = f.run(&["keys", "list", "--json"]).json_lines();
        keys.iter().map(|key| key["name"].as_str().unwrap().to_owned()).collect()
    };
    let (mut added, mut random, mut killed) = (BTreeSet::new(), Random(5), 0);
    let mut round = 0;
    while killed < kills() {
        round += 1;
        // Three at once, of which some are killed.
        let spawn = |i| {
            let name = format!("{round}-{i}");
            (f.command(&["keys", "add", &name]).spawn().unwrap(), name)
        };
        let children: Vec<(Child, String)> = (0..3).map(spawn).collect();
        thread::sleep(Duration::from_micros(random.below(6000)));
        for (mut child, name) in children {
            if random.below(2) == 0 {
                child.kill().unwrap();
            }
            if child.wait().unwrap().success() {
                added.insert(name);
            } else {
                killed += 1;
            }
        }
        let names = names();
        assert!(names.is_superset(&added), "lost: {:?}", added.difference(&names).collect::<Vec<_>>());
        // Those of killed processes may have been written.
        for name in &names {
            f.run(&["keys", "rm", name]).ok();
        }
        added.clear();
    }
    let left = fs::read_dir(f.folder.path().join(".local/share/paguro")).unwrap().count();
    assert_eq!(left, 2, "the keys and the lock");
    println!("keys add: {killed} killed in {round} rounds");
}

/// A server that runs, and where.
fn serve(f: &Fixture) -> (Child, String) {
    let mut child = f.command(&["serve", "--port", "0", "--log", "off", "--threads", "2"]).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let address =
        line.trim().strip_prefix("listening at http://").expect("it says where it listens").to_owned();
    (child, address)
}

/// Sends a request and reads what comes until the server ends; the status, if there is one.
fn request(address: &str, key: &str, method: &str, path: &str, body: &str) -> Option<String> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(20))).ok()?;
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n\
         Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
    )
    .ok()?;
    let mut answer = Vec::new();
    // A reset is what a killed server leaves.
    let _ = stream.read_to_end(&mut answer);
    let text = String::from_utf8_lossy(&answer);
    text.split(' ').nth(1).map(str::to_owned)
}

#[test]
#[ignore = "takes minutes"]
fn a_killed_server_under_load_starts_again_and_has_lost_nothing() {
    let f = Fixture::new();
    f.run(&["import", "--copy", tales().to_str().unwrap(), "--name", "stories"]).ok();
    f.hub.add("o/m", &[("m.gguf", &model(3, 75_000))]);
    f.hub.state().delay = 2;
    let key = f.run(&["keys", "add", "test", "--scope", "inference,models"]).ok().trim().to_owned();
    let mut random = Random(9);
    let mut slowest = Duration::ZERO;
    for round in 0..kills() {
        let started = Instant::now();
        let (mut child, address) = serve(&f);
        slowest = slowest.max(started.elapsed());
        let live = Duration::from_millis(20 + random.below(600));
        let ask = |model: &str, path: &str, more: &str| {
            let body = format!(r#"{{"model":"{model}","stream":true{more}}}"#);
            request(&address, &key, "POST", path, &body)
        };
        let write = |model: &str| {
            let more = r#","prompt":"Once upon a time","max_tokens":400"#;
            while ask(model, "/v1/completions", more).is_some() {}
        };
        let change = || {
            while ask("o/m", "/api/pull", "").is_some() {
                request(&address, &key, "DELETE", "/api/delete", r#"{"model":"o/m"}"#);
                let body = format!(r#"{{"model":"made-{round}","from":"stories","system":"x"}}"#);
                request(&address, &key, "POST", "/api/create", &body);
            }
        };
        thread::scope(|scope| {
            for model in ["stories", "tales", "tales"] {
                let write = &write;
                scope.spawn(move || write(model));
            }
            scope.spawn(change);
            thread::sleep(live);
            child.kill().unwrap();
            child.wait().unwrap();
        });
        let models = check(&f.root());
        assert!(models.iter().any(|model| model.name.short() == "stories"), "round {round}");
        assert_eq!(f.run(&["keys", "list", "--json"]).json_lines().len(), 1);
    }
    let (mut child, address) = serve(&f);
    let body = r#"{"model":"stories","prompt":"Once","max_tokens":4}"#;
    assert_eq!(request(&address, &key, "POST", "/v1/completions", body).as_deref(), Some("200"));
    assert_eq!(request(&address, "wrong", "POST", "/v1/completions", body).as_deref(), Some("401"));
    child.kill().unwrap();
    child.wait().unwrap();
    f.run(&["verify"]).ok();
    settle(&f);
    println!("serve: {} killed, the slowest start took {slowest:?}", kills());
}
