//! The model library from the command line: the built binary, a hub on loopback, real files.

mod imports;
#[cfg(unix)]
mod kills;
#[path = "../../../crates/library/tests/common/mod.rs"]
mod library_common;
#[cfg(target_os = "linux")]
mod limits;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use crate::{
    architectures,
    common::{self, Ran},
};
use expect_test::expect;
use library_common::{Fixture, check, count_files, hub::Fault};
use paguro_library::{Library, Pruned};
use serde_json::Value;

impl Fixture {
    fn command(&self, args: &[&str]) -> Command {
        let mut command = common::paguro(args);
        command.env("PAGURO_HOME", self.root()).env("HF_ENDPOINT", self.hub.endpoint());
        // Keys lie there.
        command.env("HOME", self.folder.path());
        for name in ["XDG_DATA_HOME", "XDG_CACHE_HOME", "OLLAMA_MODELS"] {
            command.env_remove(name);
        }
        command.current_dir(self.folder.path());
        command
    }

    fn run(&self, args: &[&str]) -> Ran {
        self.command(args).output().unwrap().into()
    }

    /// Its words, without what differs from run to run.
    fn words(&self, args: &[&str]) -> String {
        let Ran { code, out, err } = self.run(args);
        let text = format!("{out}{err}exit {}", code.unwrap());
        text.replace(&self.folder.path().display().to_string(), "").replace(&self.hub.port.to_string(), "HUB")
    }
}

/// Returns the smallest valid GGUF model: an architecture, and a tensor of `weights` weights.
fn model(seed: u32, weights: u32) -> Vec<u8> {
    let mut file = b"GGUF".to_vec();
    let text = |file: &mut Vec<u8>, text: &str| {
        file.extend((text.len() as u64).to_le_bytes());
        file.extend(text.as_bytes());
    };
    file.extend(3u32.to_le_bytes());
    file.extend(1u64.to_le_bytes());
    file.extend(1u64.to_le_bytes());
    text(&mut file, "general.architecture");
    file.extend(8u32.to_le_bytes());
    text(&mut file, "llama");
    text(&mut file, "output.weight");
    file.extend(1u32.to_le_bytes());
    file.extend(u64::from(weights).to_le_bytes());
    file.extend(0u32.to_le_bytes());
    file.extend(0u64.to_le_bytes());
    file.resize(file.len().next_multiple_of(32), 0);
    file.extend((0..weights).flat_map(|i| (i.wrapping_mul(seed) as f32).to_le_bytes()));
    file
}

/// The model in the binary, as a file.
fn tales() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tales/tales-Q8_0.gguf")
}

#[test]
fn a_model_is_pulled_listed_renamed_and_removed() {
    let f = Fixture::new();
    f.hub.add("o/Tiny-GGUF", &[("tiny-F32.gguf", &model(3, 5000)), ("tiny-Q9_9.gguf", &model(5, 5000))]);
    expect![[r#"
        the library is empty; add models with `paguro pull` or `paguro import`
        exit 0"#]]
    .assert_eq(&f.words(&["list"]));
    assert!(!f.root().exists(), "looking makes nothing");
    expect![[r#"
        o/Tiny-GGUF:F32 (20.1 kB, F32)
        getting 1 file, 20.1 kB
        this version of Paguro cannot run `o/Tiny-GGUF:F32`: the metadata has no `llama.block_count`
        exit 0"#]]
    .assert_eq(&f.words(&["pull", "--force", "hf:o/Tiny-GGUF"]));
    expect![[r#"
        mine
        exit 0"#]]
    .assert_eq(&f.words(&["cp", "tiny-gguf", "mine"]));
    expect![[r#"
        name                size  parameters  quantization  changed
        mine             20.1 kB       5.0 k  F32           just now  cannot run: the metadata has no `llama.block_count`
        o/Tiny-GGUF:F32  20.1 kB       5.0 k  F32           just now  cannot run: the metadata has no `llama.block_count`
        exit 0"#]]
    .assert_eq(&f.words(&["list"]));
    let list = f.run(&["ls", "--json"]).json_lines();
    let names: Vec<_> = list.iter().map(|model| model["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["mine:latest", "o/Tiny-GGUF:F32"]);
    let shown = f.run(&["show", "mine", "--json"]).json();
    assert_eq!((&shown["architecture"], &shown["parameters"]), (&"llama".into(), &5000.into()));
    assert_eq!(shown["source"]["repo"], "o/Tiny-GGUF");
    assert_eq!(shown["digest"], list[1]["digest"]);
    assert!(Path::new(shown["path"].as_str().unwrap()).is_file());
    let text = f.run(&["show", "o/Tiny-GGUF"]).ok();
    assert!(text.contains("architecture  llama\n  parameters    5.0 k (F32)\n"), "{text}");
    expect![[r#"
        removed o/Tiny-GGUF:F32 (0 B freed)
        removed mine (20.1 kB freed)
        exit 0"#]]
    .assert_eq(&f.words(&["rm", "tiny-gguf", "mine"]));
    expect![[r#"
        0 files removed (0 B freed)
        exit 0"#]]
    .assert_eq(&f.words(&["prune"]));
    fs::write(f.folder.path().join("own.gguf"), model(3, 50)).unwrap();
    expect![[r#"
        error: this version of Paguro cannot run `own.gguf`: the metadata has no `llama.block_count`
        hint: `paguro search` lists other models; --force imports this one anyway, for a later version
        exit 1"#]]
    .assert_eq(&f.words(&["import", "own.gguf"]));
    expect![[r#"
        own (328 B, F32)
        reading 1 file, 328 B
        this version of Paguro cannot run `own`: the metadata has no `llama.block_count`
        exit 0"#]]
    .assert_eq(&f.words(&["import", "--force", "own.gguf"]));
}

#[test]
fn a_model_of_the_library_runs_by_its_name() {
    let f = Fixture::new();
    let tales = tales();
    let tales = tales.to_str().unwrap();
    assert!(f.run(&["import", tales, "--name", "stories:v1"]).ok().starts_with("stories:v1 ("));
    let answer =
        f.run(&["run", "--json", "--seed", "1", "--max-tokens", "5", "stories", "Once upon a time"]).json();
    let own =
        f.run(&["run", "--json", "--seed", "1", "--max-tokens", "5", "tales", "Once upon a time"]).json();
    assert_eq!(answer["text"], own["text"]);
    assert_eq!(f.run(&["inspect", "--json", "stories:V1"]).json()["architecture"], "llama");
    let tokens = f.run(&["tokenize", "--json", "-m", "stories", "Hello"]).json();
    assert_eq!(tokens["model"], "stories:v1");
    let measured = f.run(&["bench", "-m", "stories", "-p", "8", "-n", "2", "-r", "1", "--json"]).ok();
    assert!(measured.contains("decode"), "{measured}");
    let text = f.folder.path().join("text.txt");
    fs::write(&text, "Once upon a time there was a little fox. ".repeat(20)).unwrap();
    let perplexity = |model: &str| {
        let args = ["eval", "-m", model, "-f", text.to_str().unwrap(), "-c", "64", "--json"];
        f.run(&args).json()["perplexity"].as_f64().unwrap()
    };
    assert_eq!(perplexity("stories"), perplexity("tales"));
    // Words or flags name the model in all commands.
    let args = ["eval", "stories", text.to_str().unwrap(), "-c", "64", "--json"];
    assert_eq!(f.run(&args).json()["perplexity"], perplexity("tales"));
    assert_eq!(f.run(&["tokenize", "--json", "stories", "Hello"]).json(), tokens);
    assert_eq!(f.run(&["inspect", "--json", "-m", "stories"]).json()["architecture"], "llama");
    let mut command = f.command(&["run", "--json", "--max-tokens", "1", "Hello there"]);
    let answer: Ran = command.env("PAGURO_MODEL", "stories").output().unwrap().into();
    assert_eq!(answer.json()["finish_reason"], "length");
    expect![[r#"
        error: there is no model `storiez`
        hint: did you mean `stories:v1`?
        exit 2"#]]
    .assert_eq(&f.words(&["bench", "-m", "storiez"]));
    expect![[r#"
        error: `tales` is the model inside this binary
        hint: choose another name
        exit 2"#]]
    .assert_eq(&f.words(&["import", tales, "--name", "tales"]));
    for command in ["show", "rm", "preset", "verify"] {
        let ran = f.run(&[command, "tales"]);
        assert!(
            ran.code == Some(2) && ran.err.contains("is the model inside this binary"),
            "{command}: {}",
            ran.err
        );
    }
    // The template fails on every chat.
    let mut failing = fs::read(tales).unwrap();
    let variable = b"{{ bos_token }}";
    let at = failing.windows(variable.len()).position(|bytes| bytes == variable).unwrap();
    failing[at..at + variable.len()].copy_from_slice(b"{{ 1 + 'abc' }}");
    fs::write(f.folder.path().join("failing.gguf"), failing).unwrap();
    expect![[r#"
        failing (22.4 MB, Q8_0)
        reading 1 file, 22.4 MB
        run it: paguro run failing
        failing cannot chat: the chat template failed: tried to use + operator on unsupported types number and string
        to continue a prompt without the chat template: paguro run failing --raw
        exit 0"#]]
    .assert_eq(&f.words(&["import", "failing.gguf"]));
    assert!(
        f.run(&["inspect", "failing"]).ok().contains("chat template not usable: the chat template failed")
    );
    f.run(&["rm", "failing"]).ok();
    f.run(&["cp", "stories", "stories:v2"]).ok();
    expect![[r#"
        error: `stories` could be `stories:v1` or `stories:v2`; give the whole name
        hint: to ask the built-in model: paguro run tales "stories"
        exit 2"#]]
    .assert_eq(&f.words(&["run", "stories"]));
}

/// The hub has a repository of the table, with the table's file.
#[test]
fn a_short_name_is_pulled_searched_and_run() {
    let f = Fixture::new();
    let tales = fs::read(tales()).unwrap();
    f.hub.add("Qwen/Qwen3-0.6B-GGUF", &[("Qwen3-0.6B-Q8_0.gguf", &tales)]);
    f.hub.add("o/Qwen3-fox-GGUF", &[("x-Q8_0.gguf", &tales)]);
    let found = f.run(&["search", "qwen3", "0.6b"]).ok();
    assert!(found.starts_with("name ") && found.contains("hf:o/Qwen3-fox-GGUF"), "{found}");
    let pulled = f.run(&["pull", "Qwen3:0.6B"]);
    assert!(pulled.err.ends_with("run it: paguro run qwen3:0.6b\n"), "{pulled:?}");
    let run = |name: &str| f.run(&["run", name, "hi", "--max-tokens", "2"]);
    for name in ["qwen3:0.6b", "qwen3", "Qwen3:latest", "qwen3-0.6b", "library/qwen3:0.6b"] {
        let ran = run(name);
        assert!(ran.err.starts_with("qwen3:0.6b · prompt"), "{name}: {ran:?}");
    }
    // The same model under the repository's name.
    f.run(&["rm", "qwen3"]).ok();
    f.run(&["rm", "-f", "qwen3"]).ok();
    assert_eq!(run("qwen3:0.6b").code, Some(2));
    f.run(&["pull", "hf:Qwen/Qwen3-0.6B-GGUF"]).ok();
    assert!(run("qwen3:0.6b").err.starts_with("Qwen/Qwen3-0.6B-GGUF:"), "{:?}", run("qwen3:0.6b"));
    // The script that checks the table finds the one that is right, and says what is wrong with the others.
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/library/src/known/check.py");
    match Command::new("python3").arg(script).env("HF_ENDPOINT", f.hub.endpoint()).output() {
        Err(error) => println!("skipped: no python3: {error}"),
        Ok(output) => {
            let Ran { code, out, err } = output.into();
            let line = |name: &str| out.lines().find(|line| line.contains(name)).unwrap_or(&err).to_owned();
            assert_eq!(code, Some(1));
            assert!(line("qwen3:0.6b").contains("has 22 MB, not 639"), "{out}{err}");
            assert!(line("llama3.2:1b").contains("404"), "{out}{err}");
        }
    }
}

/// The hub has a repository of the table, with an assistant in a folder of its own.
#[test]
fn a_model_is_pulled_shown_planned_and_removed_with_its_assistant() {
    let f = Fixture::new();
    let [model, assistant] = ["gemma4-e2b", "gemma4-e2b-assistant"].map(architectures::gguf);
    let repository = "unsloth/gemma-4-E2B-it-GGUF";
    let name = "MTP/mtp-gemma-4-E2B-it-Q8_0.gguf";
    f.hub.add(repository, &[("gemma-4-E2B-it-Q4_K_M.gguf", &model), (name, &assistant)]);
    let pulled = f.run(&["pull", "gemma4:e2b"]).ok();
    assert!(pulled.starts_with("gemma4:e2b (") && pulled.contains(", with its assistant)"), "{pulled}");
    assert!(f.run(&["list"]).ok().trim_end().ends_with("with its assistant"));
    let shown = f.run(&["show", "gemma4:e2b"]).ok();
    assert!(shown.contains("drafts        with its assistant random weights"), "{shown}");
    assert!(shown.contains("file          mtp-gemma-4-E2B-it-Q8_0.gguf"), "{shown}");
    let shown = f.run(&["show", "gemma4:e2b", "--json"]).json();
    assert_eq!(shown["assistant"], "mtp-gemma-4-E2B-it-Q8_0.gguf");

    // The plan has the memory of both.
    fs::write(f.folder.path().join("alone.gguf"), &model).unwrap();
    let plan = |name: &str| f.run(&["devices", "--plan", name, "--device", "cpu", "--json"]).json();
    let [alone, both] = ["alone.gguf", "gemma4:e2b"].map(plan);
    assert_eq!((&alone["assistant"], &both["assistant"]), (&Value::Null, &"random weights".into()));
    let weights = |plan: &Value| plan["stages"][0]["weights"].as_u64().unwrap();
    assert!(weights(&both) > weights(&alone), "{both} {alone}");

    let blobs = || count_files(&f.root().join("blobs"));
    assert_eq!(blobs(), 2);
    f.run(&["rm", "gemma4:e2b"]).ok();
    assert_eq!(blobs(), 0);
}

#[test]
fn what_goes_wrong_is_one_clear_line() {
    let f = Fixture::new();
    f.hub.add("o/m", &[("a-Q2_K.gguf", &model(1, 10)), ("b-Q8_0.gguf", b"no model")]);
    for (args, expected) in [
        (
            &["pull", "o/m:Q4_0"][..],
            expect![[r#"
                error: o/m: nothing in it is `Q4_0`; there is Q2_K, Q8_0
                exit 2"#]],
        ),
        (
            &["pull", "hf:o/nothing"][..],
            expect![[r#"
                error: http://127.0.0.1:HUB has no `o/nothing` (HTTP 404)
                exit 1"#]],
        ),
        (
            &["pull", "nothing"][..],
            expect![[r#"
                error: `nothing` is neither a short name nor a Hugging Face reference: write `hf:owner/repository` or `hf:owner/repository:Q4_K_M`
                hint: `paguro search` lists well-known models and those on the hub
                exit 2"#]],
        ),
        (
            &["-q", "pull", "o/m"][..],
            expect![[r#"
                error: `o/m:Q8_0` cannot be opened: `/library/models/9579c67f9231a4c4bef1e5f8bb60f35f05d6fb987d1ecca553df5a9d0a26d751/b-Q8_0.gguf`: not a GGUF file: it begins with "no model"
                exit 1"#]],
        ),
        (
            &["show", "nothing"][..],
            expect![[r#"
                error: there is no model `nothing` in the library
                exit 2"#]],
        ),
        (
            &["rm", "nothing"][..],
            expect![[r#"
                error: there is no model `nothing` in the library
                exit 2"#]],
        ),
        (
            &["import", "nothing.gguf"][..],
            expect![[r#"
                error: there is no file or folder `nothing.gguf`
                exit 2"#]],
        ),
        (
            &["run", "hf:o/m", "Hello"][..],
            expect![[r#"
                error: there is no model `hf:o/m`
                hint: to get it from Hugging Face: paguro pull hf:o/m
                hint: to ask the built-in model: paguro run tales "hf:o/m Hello"
                exit 2"#]],
        ),
    ] {
        expected.assert_eq(&f.words(args));
    }
    let ran: Ran = f.command(&["pull", "o/m"]).env("HF_ENDPOINT", "somewhere").output().unwrap().into();
    expect!["error: `somewhere` is not the address of a hub: it must begin with https:// or http://\n"]
        .assert_eq(&ran.err);
    f.hub.state().token = Some("hf_right".to_owned());
    let ran: Ran =
        f.command(&["pull", "--force", "o/m:Q2_K"]).env("HF_TOKEN", "hf_right").output().unwrap().into();
    ran.ok();
}

#[test]
fn the_token_that_other_programs_have_stored_is_used() {
    let f = Fixture::new();
    f.hub.add("o/m", &[("a-Q2_K.gguf", &model(1, 10))]);
    f.hub.state().token = Some("hf_stored".to_owned());
    let pull = |environment: &[(&str, &Path)]| -> Ran {
        let mut command = f.command(&["pull", "--force", "o/m"]);
        command.env_remove("HF_TOKEN_PATH").env_remove("XDG_CACHE_HOME").env("HOME", f.folder.path());
        command.envs(environment.iter().copied()).output().unwrap().into()
    };
    assert_eq!(pull(&[]).code, Some(1));
    let cache = f.folder.path().join(".cache/huggingface");
    fs::create_dir_all(&cache).unwrap();
    fs::write(cache.join("token"), "hf_stored\n").unwrap();
    pull(&[]).ok();
    // A token that is set more specifically takes precedence, even if it is wrong.
    assert_eq!(pull(&[("HF_TOKEN", Path::new("hf_wrong"))]).code, Some(1));
    assert_eq!(pull(&[("HF_HOME", f.folder.path())]).code, Some(1));
    pull(&[("HF_HOME", &cache)]).ok();
    pull(&[("HF_HOME", f.folder.path()), ("HF_TOKEN_PATH", &cache.join("token"))]).ok();
}

/// Numbers without a pattern, the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        // Knuth's MMIX generator; its upper bits.
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

/// Runs a command repeatedly, and kills it at random times after `prepare`, until enough runs were killed before their
/// end. After each, the library opens, and its listed models are complete.
fn kill(f: &Fixture, args: &[&str], wanted: usize, prepare: impl Fn()) {
    prepare();
    let started = Instant::now();
    f.run(args).ok();
    // The first is the slowest as a rule: what a command outran was too long.
    let mut within = started.elapsed();
    let (mut random, mut killed) = (Random(args.len() as u64), 0);
    while killed < wanted {
        prepare();
        let mut child = f.command(args).spawn().unwrap();
        let after = Duration::from_micros(random.below(1 + within.as_micros() as u64));
        let started = Instant::now();
        while started.elapsed() < after && child.try_wait().unwrap().is_none() {
            thread::sleep(Duration::from_micros(200));
        }
        // SIGKILL; it may be done already.
        child.kill().unwrap();
        if child.wait().unwrap().success() {
            within = within.min(started.elapsed());
        } else {
            killed += 1;
            within = within * 17 / 16;
        }
        check(&f.root());
    }
}

/// Checks that only files of models are left, and that everything works.
fn settle(f: &Fixture) {
    let library = Library::open(&f.root()).unwrap();
    library.prune(false).unwrap();
    let models = check(&f.root());
    let mut digests: Vec<_> = models.iter().flat_map(|model| &model.files).map(|file| file.digest).collect();
    digests.sort();
    digests.dedup();
    assert_eq!(count_files(&f.root().join("blobs")), digests.len());
    for folder in ["partial", "tmp", "locks"] {
        assert_eq!(count_files(&f.root().join(folder)), 0, "{folder}");
    }
    assert_eq!(library.prune(false).unwrap(), Pruned::default());
}

#[test]
fn a_killed_pull_leaves_a_sound_library() {
    let f = Fixture::new();
    let files = [model(3, 40_000), model(5, 50_000), model(7, 60_000)];
    f.hub.add(
        "o/m",
        &[
            ("m-F32-00001-of-00003.gguf", &files[0]),
            ("m-F32-00002-of-00003.gguf", &files[1]),
            ("m-F32-00003-of-00003.gguf", &files[2]),
        ],
    );
    f.hub.add("o/one", &[("one.gguf", &model(11, 80_000))]);
    f.hub.state().delay = 1;
    let remove = || {
        let library = Library::open(&f.root()).unwrap();
        if library.find("o/one").is_ok() {
            library.remove("o/one").unwrap();
        }
        // Downloads go on with what was left, so these must not be the same pull again and again.
        library.prune(false).unwrap();
    };
    kill(&f, &["pull", "--force", "o/one"], 20, remove);
    // And with what was left; dropped connections besides.
    for _ in 0..3 {
        f.hub.state().faults = vec![Fault::Drop(100_000); 2];
        kill(&f, &["pull", "--force", "o/one", "--name", "again"], 5, || {
            let library = Library::open(&f.root()).unwrap();
            let _ = library.remove("again");
        });
    }
    f.run(&["pull", "--force", "o/one"]).ok();
    settle(&f);
}

#[test]
fn a_killed_import_or_removal_leaves_a_sound_library() {
    let f = Fixture::new();
    let path = f.folder.path().join("big-F32.gguf");
    fs::write(&path, model(3, 2_000_000)).unwrap();
    let remove = || {
        let _ = Library::open(&f.root()).unwrap().remove("big");
    };
    kill(&f, &["import", "--force", "big-F32.gguf", "--copy"], 20, remove);
    settle(&f);
    let import = || {
        if Library::open(&f.root()).unwrap().find("big").is_err() {
            f.run(&["import", "--force", "big-F32.gguf", "--copy"]).ok();
        }
    };
    kill(&f, &["rm", "big"], 20, import);
    settle(&f);
}

#[test]
fn many_processes_at_once_are_no_trouble() {
    let f = Fixture::new();
    f.hub.add("o/m", &[("m.gguf", &model(3, 50_000))]);
    f.hub.state().delay = 2;
    let path = f.folder.path().join("x.gguf");
    fs::write(&path, model(5, 50_000)).unwrap();
    let mut children = Vec::new();
    for i in 0..4 {
        let name = format!("n{i}");
        children.push(f.command(&["pull", "--force", "o/m"]).spawn().unwrap());
        children
            .push(f.command(&["import", "--force", "x.gguf", "--copy", "--name", &name]).spawn().unwrap());
        children.push(f.command(&["list"]).spawn().unwrap());
    }
    for child in children {
        Ran::from(child.wait_with_output().unwrap()).ok();
    }
    let sent = f.hub.state().sent;
    assert_eq!(sent, model(3, 50_000).len() as u64, "one download for all");
    assert_eq!(check(&f.root()).len(), 5);
    settle(&f);
}
