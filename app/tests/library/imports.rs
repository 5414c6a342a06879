//! Imports of encoders and of models of other programs.

use std::{
    fs,
    path::{Path, PathBuf},
};

use expect_test::expect;
use paguro_library::Digest;
use serde_json::{Value, json};

use super::{Fixture, check, model, tales};
use crate::{
    architectures::{gguf, hf},
    common::{Ran, adapters},
};

impl Fixture {
    /// Stores a blob of Ollama and returns its layer.
    fn layer(&self, kind: &str, bytes: &[u8]) -> Value {
        let digest = Digest::of(bytes);
        let blobs = self.folder.path().join(".ollama/models/blobs");
        fs::create_dir_all(&blobs).unwrap();
        fs::write(blobs.join(format!("sha256-{}", digest.hex())), bytes).unwrap();
        let kind = format!("application/vnd.ollama.image.{kind}");
        json!({"mediaType": kind, "digest": digest.to_string(), "size": bytes.len()})
    }

    /// Writes a manifest of Ollama.
    fn manifest(&self, name: &str, layers: &[Value]) {
        let host = ".ollama/models/manifests/registry.ollama.ai";
        let path = self.folder.path().join(host).join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, json!({"schemaVersion": 2, "layers": layers}).to_string()).unwrap();
    }

    /// Returns the library's files of a model.
    fn files(&self, name: &str) -> Vec<Value> {
        self.run(&["show", name, "--json"]).json()["files"].as_array().unwrap().clone()
    }

    /// Writes the folder of an encoder with the files of sentence-transformers.
    fn encoder(&self, name: &str) -> PathBuf {
        let folder = self.folder.path().join(name);
        hf::write_case(name, &folder);
        fs::create_dir(folder.join("1_Pooling")).unwrap();
        let pooling = json!({"word_embedding_dimension": 64, "pooling_mode_mean_tokens": true});
        fs::write(folder.join("1_Pooling/config.json"), pooling.to_string()).unwrap();
        let module = |index: usize, path: &str, kind: &str| json!({"idx": index, "name": index.to_string(), "path": path, "type": format!("sentence_transformers.models.{kind}")});
        let modules = json!([module(0, "", "Transformer"), module(1, "1_Pooling", "Pooling")]);
        fs::write(folder.join("modules.json"), modules.to_string()).unwrap();
        folder
    }
}

/// Their tables of positions have fewer rows than the default context.
#[test]
fn encoders_and_gpt_2_are_imported_pulled_and_run() {
    let f = Fixture::new();
    let notes = f.folder.path().join("notes.txt");
    fs::write(&notes, "The fox lost a key.\n\nIt rains.\n").unwrap();
    let notes = notes.to_str().unwrap();
    let embed = |model: &str| f.run(&["embed", "-q", model, notes]).ok();
    for name in ["bert", "xlm_roberta", "mpnet"] {
        let folder = f.encoder(name);
        let path = folder.to_str().unwrap();
        let own = embed(path);
        assert_eq!(own.lines().count(), 2, "{own}");
        let imported = f.run(&["import", path]);
        let command = format!("compute vectors with it: paguro embed {name} FILE");
        assert!(imported.code == Some(0) && imported.err.contains(&command), "{imported:?}");
        assert_eq!(f.run(&["show", name, "--json"]).json()["path"], path);
        assert_eq!(embed(name), own, "{name}");
        f.run(&["import", path, "--copy", "--name", "copied", "--replace"]).ok();
        assert_eq!(embed("copied"), own, "{name}");
        f.run(&["import", path, "--link", "--name", "linked", "--replace"]).ok();
        assert_eq!(embed("linked"), own, "{name}");
    }
    let files =
        ["config.json", "model.safetensors", "tokenizer.json", "modules.json", "1_Pooling/config.json"];
    let bytes = files.map(|file| (file, fs::read(f.folder.path().join("bert").join(file)).unwrap()));
    let bytes: Vec<_> = bytes.iter().map(|(name, bytes)| (*name, &bytes[..])).collect();
    f.hub.add("o/encoder", &bytes);
    f.run(&["pull", "hf:o/encoder"]).ok();
    assert_eq!(embed("o/encoder"), embed("bert"));
    let converted = f.folder.path().join("converted.gguf");
    f.run(&["convert", "bert", converted.to_str().unwrap()]).ok();
    f.run(&["import", "converted.gguf", "--name", "file"]).ok();
    assert_eq!(embed("file").lines().count(), 2);
    fs::write(f.folder.path().join("gpt2.gguf"), gguf("gpt2")).unwrap();
    f.run(&["import", "gpt2.gguf"]).ok();
    hf::write_case("gpt2", &f.folder.path().join("gpt2-folder"));
    f.run(&["import", "gpt2-folder"]).ok();
    for name in ["gpt2", "gpt2-folder"] {
        let answer = f.run(&["run", "--json", "--raw", "--max-tokens", "2", name, "Once upon"]).json();
        assert_eq!(answer["finish_reason"], "length", "{answer}");
    }
    let problems = f.run(&["list", "--json"]).json_lines();
    assert!(problems.len() == 9 && problems.iter().all(|model| model["problem"].is_null()), "{problems:?}");
}

#[test]
fn adapters_are_imported_with_their_base() {
    let f = Fixture::new();
    let tales = tales();
    let tales = tales.to_str().unwrap();
    adapters::write(&f.folder.path().join("fox"), 1, 512);
    adapters::write(&f.folder.path().join("wide"), 1, 510);
    fs::write(f.folder.path().join("file.gguf"), adapters::gguf(2, 512)).unwrap();
    expect![[r#"
        fox (741.9 kB, F32, adapter)
        reading 2 files, 741.9 kB
        its base `our/tales` is not in the library; `paguro preset fox --base MODEL` names one
        exit 0"#]]
    .assert_eq(&f.words(&["import", "fox"]));
    f.run(&["import", tales, "--name", "our/tales"]).ok();
    let refused = f.words(&["import", "wide"]);
    for part in ["`wide` cannot be opened", "[8, 510]", "512]", "`Tales 21M`", "our/tales", "exit 1"] {
        assert!(refused.contains(part), "{refused}");
    }
    let summary = f.run(&["import", "file.gguf", "--base", "our/tales", "--copy"]);
    assert!(summary.out.contains("adapter of our/tales"), "{summary:?}");
    assert!(summary.err.contains("run it: paguro run file"), "{summary:?}");
    f.run(&["import", "file.gguf", "--name", "third"]).ok();
    let listed = f.run(&["list", "--json"]).json_lines();
    let of = |name: &str| listed.iter().find(|model| model["name"] == name).unwrap()["adapter"].clone();
    assert_eq!(of("fox:latest"), json!({"base": "our/tales", "trained_for": "our/tales", "rank": 8}));
    assert_eq!(of("file:latest"), json!({"base": "our/tales", "trained_for": null, "rank": 8}));
    assert_eq!((of("third:latest")["base"].clone(), of("our/tales:latest")), (Value::Null, Value::Null));
    let list = f.run(&["list"]).ok();
    assert!(list.contains("adapter of our/tales") && list.contains("its files name no base"), "{list}");
    f.run(&["preset", "third", "--base", "tales"]).ok();
    let shown = f.run(&["show", "third"]).ok();
    assert!(shown.contains("adapter of    tales\n") && shown.contains("rank          8\n"), "{shown}");
    assert!(f.run(&["show", "our/tales"]).ok().contains("adapters      file, fox\n"));
    for wrong in [
        &["preset", "our/tales", "--base", "tales"][..],
        &["preset", "third", "--base", "fox"],
        &["preset", "third", "--base", "nothing"],
        &["import", tales, "--name", "x", "--base", "tales"],
    ] {
        assert_ne!(f.run(wrong).code, Some(0), "{wrong:?}");
    }
    for path in ["fox", "file.gguf"] {
        let inspected = f.run(&["inspect", path, "--json"]).json();
        assert_eq!((&inspected["rank"], &inspected["adapter"]), (&json!(8), &json!(true)), "{path}");
    }
    assert!(f.run(&["inspect", "fox", "--tensors"]).ok().contains("layers.5.mlp.gate_proj"));

    // With its base, and beside it.
    let run = |args: &[&str]| {
        let flags = ["run", "--json", "--temperature", "0", "--max-tokens", "8", "-q"];
        f.run(&[&flags, args, &["Tell me a story"]].concat()).json()["text"].as_str().unwrap().to_owned()
    };
    let fox = run(&["fox"]);
    assert_ne!(fox, run(&["our/tales"]));
    assert_eq!(fox, run(&["our/tales", "--lora", "fox"]));
    assert_eq!(run(&["our/tales"]), run(&["our/tales", "--lora", "fox:0"]));

    // Ollama's model with an adapter comes with its base.
    let weights = f.layer("model", &fs::read(tales).unwrap());
    let adapter = f.layer("adapter", &adapters::gguf(2, 512));
    f.manifest("library/tuned/latest", &[weights, adapter]);
    f.run(&["import", "ollama:tuned"]).ok();
    assert_eq!(f.run(&["show", "tuned", "--json"]).json()["adapter"]["base"], "our/tales");
    assert_eq!(run(&["tuned"]), run(&["file"]));
    assert!(f.run(&["rm", "our/tales"]).ok().contains("its adapters have no base now: tuned, file, fox"));
    assert!(f.run(&["list"]).ok().contains("adapter of our/tales, which is not in the library"));
    assert_ne!(f.run(&["run", "fox", "Hi"]).code, Some(0));
    f.run(&["import", "ollama:tuned", "--replace"]).ok();
    assert_eq!(f.run(&["show", "tuned", "--json"]).json()["adapter"]["base"], "tuned-base");
    run(&["tuned"]);
}

#[test]
fn models_of_ollama_are_found_and_imported_without_a_copy() {
    let f = Fixture::new();
    let file = fs::read(tales()).unwrap();
    let (weights, projector) = (f.layer("model", &file), f.layer("projector", b"GGUF projector"));
    f.manifest(
        "library/fox/1b",
        &[
            weights.clone(),
            projector,
            f.layer("template", b"{{ .Prompt }}"),
            f.layer("params", br#"{"temperature": 0.25, "mirostat": 1, "num_ctx": 512}"#),
            f.layer("system", b"You are a fox."),
            f.layer("license", b"MIT"),
        ],
    );
    f.manifest("somebody/tale/latest", std::slice::from_ref(&weights));
    let mut half = weights.clone();
    half["size"] = json!(99);
    f.manifest("library/half/latest", &[half]);
    f.manifest("library/future/latest", &[f.layer("model", &model(1, 10))]);
    expect![[r#"
        the library is empty; add models with `paguro pull` or `paguro import`
        Ollama has 4; `paguro list --found` shows how to import them
        exit 0"#]]
    .assert_eq(&f.words(&["list"]));
    let found = f.run(&["list", "--found"]);
    let line = |name: &str| found.out.lines().find(|line| line.starts_with(name)).unwrap().to_owned();
    assert!(line("ollama:fox:1b ").ends_with("22.4 MB  paguro import ollama:fox:1b"), "{found:?}");
    assert!(line("ollama:half").contains("cannot: the blob"), "{found:?}");
    assert!(found.err.contains("all models of a program: paguro import ollama:"), "{found:?}");
    for (path, command) in [("ollama", "ollama:"), ("fox:1b", "ollama:fox:1b"), ("qwen3:4b", "qwen3:4b")] {
        let missing = f.words(&["import", path]);
        assert!(missing.contains(": paguro ") && missing.contains(command), "{missing}");
    }
    // A model that is here is not downloaded.
    expect![[r#"
        error: there is no model `fox:1b` in the library
        hint: it is on this machine; to use its file, without a copy: paguro import ollama:fox:1b
        exit 2"#]]
    .assert_eq(&f.words(&["run", "fox:1b", "hi"]));
    expect![[r#"
        fox:1b (22.4 MB, Q8_0)
        reading 2 files, 22.4 MB
        run it: paguro run fox:1b
        its files are shared with Ollama by hard links, which take no space
        its parameter `mirostat` is not used: `options.mirostat` is not supported: the samplers are `top_k`, `top_p` and `min_p`; omit it, or set it to 0
        its template in Go's language is not used; the file has a chat template
        its projector for images is beside it
        exit 0"#]]
    .assert_eq(&f.words(&["import", "ollama:fox:1b"]));
    let names = f.files("fox:1b").iter().map(|file| file["name"].clone()).collect::<Vec<_>>();
    assert_eq!(names, ["fox-1b.gguf", "mmproj-fox-1b.gguf"]);
    let preset = f.run(&["preset", "fox:1b", "--json"]).json()["preset"].clone();
    let expected = json!({"ctx": 512, "system": "You are a fox.", "options": {"temperature": 0.25}});
    assert_eq!(preset, expected);
    assert_eq!(f.run(&["show", "fox:1b", "--json"]).json()["defaults"], json!({"license": ["MIT"]}));
    // Runs have the system message and the context.
    let prompt = |model: &str| {
        f.run(&["run", "-q", "--json", "--max-tokens", "1", model, "Hello"]).json()["prompt_tokens"].clone()
    };
    assert!(prompt("fox:1b").as_u64() > prompt("tales").as_u64(), "{}", prompt("fox:1b"));
    let long = "word ".repeat(600);
    let ran = f.run(&["run", "-q", "fox:1b", &long]);
    assert!(ran.err.contains("512"), "{ran:?}");
    // The rest: what is here stays, and what is broken has its reason.
    let all = f.run(&["import", "ollama:"]);
    assert_eq!(all.code, Some(1), "{all:?}");
    assert!(f.run(&["list", "--found"]).ok().contains("  in the library as fox:1b\n"));
    for expected in [
        "fox:1b is in the library already",
        "not imported: ollama:half:latest: the blob",
        "not imported: ollama:future:latest: the metadata has no `llama.block_count`",
        "error: 2 of 4 models were not imported",
    ] {
        assert!(all.err.contains(expected), "{expected}: {}", all.err);
    }
    assert!(all.out.starts_with("somebody/tale (22.4 MB, Q8_0)"), "{all:?}");
    // Both names have one file, which stays when Ollama's is gone.
    let digest = f.files("fox:1b")[0]["digest"].as_str().unwrap().to_owned();
    let file_name = digest.replace(':', "-");
    let (own, other) =
        (f.root().join("blobs").join(&file_name), f.folder.path().join(".ollama/models/blobs"));
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let inode = |path: &Path| fs::metadata(path).unwrap().ino();
        assert_eq!(inode(&own), inode(&other.join(&file_name)));
    }
    assert!(own.is_file());
    // Nothing is freed by the removal of one of two names.
    expect![[r#"
        removed somebody/tale (0 B freed)
        exit 0"#]]
    .assert_eq(&f.words(&["rm", "tale"]));
    fs::remove_dir_all(other).unwrap();
    let answer = f.run(&["run", "-q", "--json", "--max-tokens", "3", "fox:1b", "Hello"]).json();
    assert_eq!(answer["answer_tokens"], 3);
    f.run(&["verify"]).ok();
    check(&f.root());
    let found = f.run(&["list", "--found", "--json"]).json_lines();
    assert!(found.iter().all(|model| !model["problem"].is_null()), "{found:?}");
}

/// A model of another program is not linked but referred to, or copied.
#[test]
fn files_stay_in_place_or_are_copied_as_told() {
    let f = Fixture::new();
    let weights = f.layer("model", &fs::read(tales()).unwrap());
    f.manifest("library/fox/1b", std::slice::from_ref(&weights));
    let location = |name: &str| f.files(name)[0]["location"].clone();
    let blob = f.folder.path().join(".ollama/models/blobs");
    let blob = blob.join(weights["digest"].as_str().unwrap().replace(':', "-"));
    f.run(&["import", "ollama:fox", "--in-place"]).ok();
    assert_eq!(location("fox"), json!(blob));
    assert!(f.run(&["run", "-q", "fox", "hi", "--max-tokens", "1"]).code == Some(0));
    f.run(&["import", "ollama:fox", "--copy", "--name", "copied"]).ok();
    assert_eq!(location("copied"), Value::Null);
    // The blob by its path, without an extension.
    let named = f.run(&["import", blob.to_str().unwrap()]).ok();
    assert!(named.starts_with("sha256-") && named.len() < 50, "{named}");
    // A blob that is not what its name says.
    let mut damaged = fs::read(&blob).unwrap();
    let last = damaged.len() - 1;
    damaged[last] ^= 1;
    fs::write(&blob, damaged).unwrap();
    f.run(&["rm", "fox", "copied"]).ok();
    for how in ["--link", "--copy", "--in-place"] {
        let ran = f.run(&["import", "ollama:fox", how]);
        assert!(ran.code == Some(1) && ran.err.contains(", expected sha256:"), "{ran:?}");
    }
    expect![[r#"
        error: Ollama has no model `wolf` on this machine; its folders are `/.ollama/models`, `/usr/share/ollama/.ollama/models`
        exit 2"#]]
    .assert_eq(&f.words(&["import", "ollama:wolf"]));
    // The name of the model inside the binary would hide the model.
    f.manifest("library/tales/latest", &[f.layer("model", &fs::read(tales()).unwrap())]);
    let refused = f.words(&["import", "ollama:tales"]);
    assert!(refused.contains("`tales` cannot be a model's name") && refused.contains("--name"), "{refused}");
    f.run(&["import", "ollama:tales", "--name", "mine"]).ok();
    expect![[r#"
        error: LM Studio has no models on this machine
        hint: to import another folder of models: paguro import FOLDER
        exit 2"#]]
    .assert_eq(&f.words(&["import", "lmstudio:"]));
}

#[test]
fn folders_of_models_are_imported_by_file() {
    let f = Fixture::new();
    let at = |path: &str| {
        let path = f.folder.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        path
    };
    fs::copy(tales(), at(".lmstudio/models/pub/Tale-GGUF/tale-Q8_0.gguf")).unwrap();
    fs::copy(tales(), at("models/one.gguf")).unwrap();
    fs::copy(tales(), at("models/inner/two")).unwrap();
    fs::write(at("models/broken.gguf"), "no model").unwrap();
    let cache = ".cache/huggingface/hub/models--o--bert";
    hf::write_case("bert", &at(&format!("{cache}/snapshots/c1")));
    #[cfg(unix)]
    {
        // As the hub's libraries have it: links to blobs.
        let (link, blob) =
            (at(&format!("{cache}/snapshots/c1/model.safetensors")), at(&format!("{cache}/blobs/b1")));
        fs::rename(&link, &blob).unwrap();
        std::os::unix::fs::symlink("../../blobs/b1", link).unwrap();
    }
    assert!(f.run(&["import", "lmstudio:"]).ok().starts_with("pub/Tale-GGUF:Q8_0 ("));
    assert!(f.run(&["import", "hf-cache:o/bert"]).ok().starts_with("o/bert ("));
    fs::remove_dir_all(f.folder.path().join(".cache")).unwrap();
    assert_eq!(f.run(&["inspect", "o/bert", "--json"]).json()["architecture"], "BertModel");
    let Ran { code, out, err } = f.run(&["import", "models"]);
    assert_eq!(code, Some(1), "{err}");
    assert!(out.contains("one (22.4 MB") && out.contains("two (22.4 MB"), "{out}");
    assert!(err.contains("broken.gguf") && err.contains("1 of 3 models were not imported"), "{err}");
    let again = f.run(&["import", "models"]);
    assert!(again.err.contains("one is in the library already"), "{again:?}");
    // The same content elsewhere, of which the library has no link.
    fs::copy(tales(), at("other/one.gguf")).unwrap();
    let again = f.run(&["import", "other/one.gguf"]);
    assert!(again.code == Some(0) && again.err.contains("one is in the library already"), "{again:?}");
    fs::write(at("other/one.gguf"), gguf("gpt2")).unwrap();
    assert_eq!(f.run(&["import", "other/one.gguf"]).code, Some(2));
    expect![[r#"
        error: --name x is for one model, and there are 3
        hint: `paguro list --found` lists them by name
        exit 2"#]]
    .assert_eq(&f.words(&["import", "models", "--name", "x"]));
}

#[test]
fn names_are_checked_before_anything_is_removed() {
    let f = Fixture::new();
    let tales = tales();
    let tales = tales.to_str().unwrap();
    for name in ["one", "two"] {
        f.run(&["import", tales, "--name", name]).ok();
    }
    f.run(&["preset", "one", "--alias", "coder"]).ok();
    expect![[r#"
        error: there is no model `missing` in the library
        hint: nothing was removed
        exit 2"#]]
    .assert_eq(&f.words(&["rm", "one", "missing", "two"]));
    expect![[r#"
        error: `coder` is an alias of the model one
        hint: to remove the alias: paguro preset one --remove-alias coder
        hint: to remove the model: paguro rm one
        exit 2"#]]
    .assert_eq(&f.words(&["rm", "coder"]));
    assert_eq!(f.run(&["list", "--json"]).json_lines().len(), 2);
    f.run(&["preset", "one", "--remove-alias", "coder"]).ok();
    assert_eq!(f.run(&["show", "coder"]).code, Some(2));
    // The name of the embedded model stands for no other one.
    f.run(&["import", tales, "--name", "me/tales"]).ok();
    for command in [
        &["rm", "tales"][..],
        &["show", "tales"],
        &["preset", "Tales:latest"],
        &["cp", "tales", "x"],
        &["verify", "tales"],
    ] {
        let ran = f.run(command);
        assert!(
            ran.code == Some(2) && ran.err.contains("is the model inside this binary"),
            "{command:?}: {ran:?}"
        );
    }
    f.run(&["rm", "me/tales"]).ok();
    expect![[r#"
        error: `tales` is the model inside this binary
        hint: choose another name
        exit 2"#]]
    .assert_eq(&f.words(&["cp", "one", "tales"]));
    expect![[r#"
        error: `one` is the model; the file with the text is missing
        hint: name it after the model: one text.txt
        exit 2"#]]
    .assert_eq(&f.words(&["eval", "one"]));
}

/// Another user's folder. Root may read every folder, so the test runs as another user where it can.
#[cfg(target_os = "linux")]
#[test]
fn a_library_that_cannot_be_read_is_not_an_empty_one() {
    use std::os::unix::fs::PermissionsExt;
    let f = Fixture::new();
    f.run(&["import", tales().to_str().unwrap(), "--name", "one"]).ok();
    let mode = |mode| fs::set_permissions(f.root(), fs::Permissions::from_mode(mode)).unwrap();
    fs::set_permissions(f.folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    mode(0o700);
    let run = |args: &[&str]| -> Option<Ran> {
        let command = f.command(args);
        let mut other = std::process::Command::new("setpriv");
        other.args(["--reuid", "65534", "--clear-groups"]).arg(command.get_program()).args(args);
        other.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        Some(other.current_dir("/").output().ok()?.into())
    };
    if run(&["--version"]).is_none_or(|ran| ran.code != Some(0)) {
        println!("skipped: no other user, or the binary is in a folder that others may not read");
        return;
    }
    for args in [&["list"][..], &["show", "one"], &["run", "one", "hi"], &["rm", "one"]] {
        let ran = run(args).unwrap();
        let expected = format!("cannot read the library `{}`: Permission denied", f.root().display());
        assert!(ran.code == Some(1) && ran.err.contains(&expected), "{args:?}: {ran:?}");
    }
}
