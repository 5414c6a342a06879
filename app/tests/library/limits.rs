//! Libraries on full disks, in folders that cannot be written, and damaged ones.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    process::{Child, Command},
};

use super::{Fixture, check, model, settle, tales};
use crate::common::Ran;

/// A limit on the size of files. Writes beyond it fail as on a full disk, with another error code.
#[test]
fn a_full_disk_is_said_and_leaves_a_sound_library() {
    let f = Fixture::new();
    f.hub.add("o/m", &[("m.gguf", &model(3, 2_000_000))]);
    fs::write(f.folder.path().join("x.gguf"), model(5, 2_000_000)).unwrap();
    f.run(&["list"]).ok();
    // In units of 1024 bytes; the signal would end the process before it could say anything.
    let limited = |args: &str| -> Ran {
        let script = format!("trap '' XFSZ; ulimit -f 6000; exec \"$0\" {args}");
        let paguro = f.command(&[]);
        let mut command = Command::new("bash");
        command.args(["-c", &script]).arg(paguro.get_program()).current_dir(f.folder.path());
        command.env("PAGURO_HOME", f.root()).env("HF_ENDPOINT", f.hub.endpoint());
        command.output().unwrap().into()
    };
    for args in ["-q pull --force o/m", "-q import --force --copy x.gguf"] {
        let ran = limited(args);
        assert_eq!(ran.code, Some(1), "{ran:?}");
        assert!(ran.err.starts_with("error: no space is left on the disk of `"), "{}", ran.err);
        assert!(
            ran.err.ends_with("free some (`paguro rm NAME`, `paguro prune`) and try again\n"),
            "{}",
            ran.err
        );
        assert!(check(&f.root()).is_empty());
    }
    // With space again, the pull goes on with what it has: six megabytes, less what it gave back.
    f.hub.state().sent = 0;
    f.run(&["pull", "--force", "o/m"]).ok();
    assert!(f.hub.state().sent < 7_000_000, "{}", f.hub.state().sent);
    settle(&f);
}

/// A disk of a megabyte.
#[test]
fn a_really_full_disk_is_said_too() {
    let f = Fixture::new();
    f.hub.add("o/m", &[("m.gguf", &model(3, 500_000))]);
    fs::create_dir(f.root()).unwrap();
    // A name space of its own, in which anybody may mount.
    let script = "mount -t tmpfs -o size=1m none \"$PAGURO_HOME\" && \"$0\" -q pull o/m; echo $?; ls \"$PAGURO_HOME/models\"; \"$0\" list";
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--mount", "bash", "-c", script]);
    command.arg(f.command(&[]).get_program()).current_dir(f.folder.path());
    command.env("PAGURO_HOME", f.root()).env("HF_ENDPOINT", f.hub.endpoint());
    let ran: Ran = match command.output() {
        Ok(output) => output.into(),
        Err(error) => return println!("skipped: no unshare: {error}"),
    };
    if ran.err.contains("unshare failed") || ran.err.contains("mount:") {
        return println!("skipped: no disk of its own may be mounted: {}", ran.err);
    }
    assert!(ran.err.starts_with("error: no space is left on the disk of `"), "{ran:?}");
    assert!(ran.err.ends_with("the library is empty; add models with `paguro pull` or `paguro import`\n"));
    assert_eq!(ran.out, "1\n");
}

/// Runs a script in a mount namespace of its own; prints a note and returns `None` where that is not possible.
fn mounted(f: &Fixture, script: &str) -> Option<Ran> {
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--mount", "bash", "-c", script]);
    command.arg(f.command(&[]).get_program()).current_dir(f.folder.path());
    command.env("PAGURO_HOME", f.root()).env("HF_ENDPOINT", f.hub.endpoint());
    match command.output() {
        Err(error) => println!("skipped: no unshare: {error}"),
        Ok(output) => {
            let ran = Ran::from(output);
            if !ran.err.contains("unshare failed") && !ran.err.contains("mount:") {
                return Some(ran);
            }
            println!("skipped: no disk of its own may be mounted: {}", ran.err);
        }
    }
    None
}

#[test]
fn a_disk_that_is_full_to_the_last_byte_can_be_listed_and_cleaned() {
    let f = Fixture::new();
    fs::create_dir(f.root()).unwrap();
    for name in ["a", "b"] {
        fs::write(f.folder.path().join(format!("{name}.gguf")), model(3, 100_000)).unwrap();
    }
    fs::write(f.folder.path().join("c.gguf"), model(5, 100_000)).unwrap();
    let script = r#"
        mount -t tmpfs -o size=4m none "$PAGURO_HOME"
        for m in a b c; do "$0" -q import --force --copy $m.gguf; done
        cat /dev/zero > "$PAGURO_HOME/filler" 2> /dev/null
        test $(stat -f -c %f "$PAGURO_HOME") = 0 && echo full
        "$0" -q list | cut -d ' ' -f 1
        "$0" -q show a | head -1
        "$0" -q import --force --copy a.gguf --name d; echo "import $?"
        "$0" rm a; echo "rm $?"
        test $(stat -f -c %f "$PAGURO_HOME") -gt 0 && echo "space"
        cat /dev/zero > "$PAGURO_HOME/filler2" 2> /dev/null
        touch "$PAGURO_HOME/partial/x"
        "$0" rm b c; echo "rm $?"
        "$0" prune; echo "prune $?"
        "$0" -q list
        rm "$PAGURO_HOME"/filler*
        "$0" -q import --force --copy c.gguf --name again; echo "import $?"
        stat -c %s "$PAGURO_HOME/reserve"
    "#;
    let Some(ran) = mounted(&f, script) else { return };
    let out = ran.out.replace(&f.folder.path().display().to_string(), "");
    expect_test::expect![[r#"
        a (400.1 kB, F32)
        b (400.1 kB, F32)
        c (400.1 kB, F32)
        full
        name
        c
        b
        a
        a
        import 1
        removed a (0 B freed)
        rm 0
        space
        removed b (400.1 kB freed)
        removed c (400.1 kB freed)
        rm 0
        1 file removed (0 B freed)
        prune 0
        again (400.1 kB, F32)
        import 0
        524288
    "#]]
    .assert_eq(&out);
    let err = ran.err.replace(&f.folder.path().display().to_string(), "");
    expect_test::expect![[r#"
        error: no space is left on the disk of `/library`; free some (`paguro rm NAME`, `paguro prune`) and try again
    "#]].assert_eq(&err);
}

#[test]
fn a_read_only_library_can_be_used_and_not_changed() {
    let f = Fixture::new();
    let name = tales();
    f.run(&["import", "--copy", name.to_str().unwrap(), "--name", "stories"]).ok();
    f.run(&["pull", "o/none"]);
    let script = r#"
        mount --bind "$PAGURO_HOME" "$PAGURO_HOME" && mount -o remount,bind,ro "$PAGURO_HOME"
        touch "$PAGURO_HOME/x" 2> /dev/null && echo "not read-only"
        find "$PAGURO_HOME" | sort > before
        "$0" -q list | cut -d ' ' -f 1
        "$0" -q show stories | head -1
        "$0" -q run stories "Once upon" --max-tokens 3 --json | grep -o '"finish_reason":"[a-z]*"'
        "$0" -q verify; echo "verify $?"
        for args in "rm stories" "prune" "cp stories b" "import --copy x.gguf" "pull o/m" "verify --repair"; do
            "$0" -q $args; echo "$args $?"
        done
        find "$PAGURO_HOME" | sort | cmp - before && echo "nothing written"
        rm -rf "$PAGURO_HOME/models" 2> /dev/null
        umount "$PAGURO_HOME"; rm -rf "$PAGURO_HOME/models"
        mount --bind "$PAGURO_HOME" "$PAGURO_HOME" && mount -o remount,bind,ro "$PAGURO_HOME"
        "$0" -q tokenize --ids -m stories fox > /dev/null; echo "without links $?"
    "#;
    fs::write(f.folder.path().join("x.gguf"), model(3, 100)).unwrap();
    let Some(ran) = mounted(&f, script) else { return };
    let text = format!("{}{}", ran.out, ran.err).replace(&f.folder.path().display().to_string(), "");
    expect_test::expect![[r#"
        name
        stories
        stories
        "finish_reason":"length"
        verify 0
        rm stories 1
        prune 1
        cp stories b 1
        import --copy x.gguf 1
        pull o/m 1
        verify --repair 1
        nothing written
        without links 0
        error: the library in `/library` is read-only (Read-only file system (os error 30)): its models can be used, but not changed
        error: the library in `/library` is read-only (Read-only file system (os error 30)): its models can be used, but not changed
        error: the library in `/library` is read-only (Read-only file system (os error 30)): its models can be used, but not changed
        error: the library in `/library` is read-only (Read-only file system (os error 30)): its models can be used, but not changed
        error: the library in `/library` is read-only (Read-only file system (os error 30)): its models can be used, but not changed
        error: the library in `/library` is read-only (Read-only file system (os error 30)): its models can be used, but not changed
    "#]].assert_eq(&text);
}

/// A running server, its address, and its log after its end.
struct Server {
    child: Child,
    address: String,
}

impl Server {
    fn start(f: &Fixture, args: &[&str]) -> Self {
        let args = [&["serve", "--port", "0", "--log", "warn"], args].concat();
        let mut child = f.command(&args).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening at http://").expect("it says where it listens");
        Self { address: address.to_owned(), child }
    }

    fn get(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(std::time::Duration::from_secs(60))).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    fn log(mut self) -> String {
        self.child.kill().unwrap();
        let mut log = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
        self.child.wait().unwrap();
        log
    }
}

#[test]
fn a_damaged_library_stops_no_server_and_is_said() {
    let f = Fixture::new();
    fs::copy(tales(), f.folder.path().join("named.gguf")).unwrap();
    f.run(&["import", "named.gguf", "--copy", "--name", "stories"]).ok();
    for (damage, said) in [
        ("".repeat(9), "is empty, but 1 files of models and 1 records of models are there; `paguro rebuild`"),
        ("no database".repeat(1000), "the library's catalogue is damaged (file is not a database)"),
    ] {
        fs::write(f.root().join("library.db"), damage).unwrap();
        let server = Server::start(&f, &["named.gguf"]);
        let tags = server.get("/api/tags");
        assert!(tags.contains("200 OK") && tags.contains("tales:latest") && tags.contains("named"), "{tags}");
        assert!(!tags.contains("stories"));
        assert!(server.get("/v1/models").contains("200 OK"));
        let log = server.log();
        assert!(log.contains("the models of the library are not served") && log.contains(said), "{log}");
        for args in
            [&["list"][..], &["prune"], &["rm", "stories"], &["pull", "o/m"], &["run", "-m", "stories", "x"]]
        {
            let ran = f.run(args);
            assert_eq!(ran.code, Some(1), "{args:?} {ran:?}");
            assert!(ran.err.contains("paguro rebuild"), "{args:?} {}", ran.err);
        }
        f.run(&["run", "named.gguf", "x", "--max-tokens", "1"]).ok();
    }
    assert!(f.run(&["rebuild"]).ok().starts_with("restored stories\n"));
    let server = Server::start(&f, &[]);
    assert!(server.get("/api/tags").contains("stories:latest"));
    drop(server.log());
    check(&f.root());
}

#[test]
fn damage_is_found_and_repaired_on_the_command_line() {
    let f = Fixture::new();
    f.hub.add("o/m", &[("m-F32.gguf", &model(3, 5000))]);
    f.run(&["-q", "pull", "--force", "o/m"]).ok();
    expect_test::expect![[r#"
        1 file read, 20.1 kB
        exit 0"#]]
    .assert_eq(&f.words(&["verify"]).replace("reading 1 file, 20.1 kB\n", ""));
    let blob = fs::read_dir(f.root().join("blobs")).unwrap().next().unwrap().unwrap().path();
    let mut bytes = fs::read(&blob).unwrap();
    bytes[10_000] ^= 1;
    fs::remove_file(&blob).unwrap();
    fs::write(&blob, bytes).unwrap();
    fs::remove_dir_all(f.root().join("models")).unwrap();
    let json = f.run(&["verify", "--json"]);
    assert_eq!(json.code, Some(1));
    let json: serde_json::Value = serde_json::from_str(&json.out).unwrap();
    assert_eq!((&json["damaged"], &json["repaired"]), (&1.into(), &0.into()));
    assert_eq!(json["findings"][0]["models"], serde_json::json!(["o/m:F32"]));
    let show = f.words(&["show", "m"]);
    assert!(show.contains("`paguro verify o/m:F32 --repair` downloads it again"), "{show}");
    let text = f.words(&["-q", "verify", "m", "--repair"]);
    assert!(text.contains("; repaired from http://127.0.0.1:HUB/o/m\nexit 0"), "{text}");
    assert_eq!(f.run(&["verify", "m"]).code, Some(0));
    assert_eq!(f.run(&["verify", "nothing"]).code, Some(2));
    check(&f.root());
    settle(&f);
}

#[test]
fn a_hub_that_cannot_be_reached_is_an_error_at_once() {
    let f = Fixture::new();
    let started = std::time::Instant::now();
    for (endpoint, said) in [
        ("http://127.0.0.1:9", "error: cannot reach 127.0.0.1:9: Connection refused"),
        (
            "http://no-such-host.invalid",
            "error: cannot reach no-such-host.invalid: its name cannot be resolved",
        ),
    ] {
        let ran: Ran = f.command(&["pull", "o/m"]).env("HF_ENDPOINT", endpoint).output().unwrap().into();
        assert_eq!(ran.code, Some(1));
        assert!(ran.err.starts_with(said), "{}", ran.err);
        assert!(ran.err.contains("hint: is this machine online? HTTPS_PROXY"), "{}", ran.err);
    }
    // One wait between two attempts would be a second.
    println!("{:?}", started.elapsed());
    // A hub that answers is given time, and it shows.
    f.hub.state().list_statuses = vec![(503, Some(0))];
    f.hub.add("o/m", &[("m.gguf", &model(3, 10))]);
    let ran = f.run(&["pull", "--force", "o/m"]);
    assert!(ran.err.contains("answers with HTTP 503; try 2 of 6"), "{}", ran.err);
}
