//! Hand-made stores of other programs, whole and broken.

use std::fs;

use expect_test::expect;
use serde_json::json;
use tempfile::TempDir;

use super::*;
use crate::digest::Digest;

/// A folder for stores.
struct Place(TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }

    /// Writes a file below the folder.
    fn write(&self, path: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, bytes).unwrap();
        path
    }

    /// Stores a blob of Ollama and returns its layer.
    fn layer(&self, kind: &str, bytes: impl AsRef<[u8]>) -> serde_json::Value {
        let digest = Digest::of(bytes.as_ref());
        self.write(&format!("ollama/blobs/sha256-{}", digest.hex()), bytes.as_ref());
        json!({"mediaType": format!("{}{kind}", "application/vnd.ollama.image."), "digest": digest.to_string(), "size": bytes.as_ref().len()})
    }

    /// Writes a manifest of Ollama.
    fn manifest(&self, path: &str, layers: &[serde_json::Value]) {
        let manifest = json!({"schemaVersion": 2, "layers": layers});
        self.write(&format!("ollama/manifests/{path}"), manifest.to_string());
    }

    fn stores(&self) -> Stores {
        Stores {
            ollama: vec![self.path("ollama"), self.path("none")],
            lm_studio: vec![self.path("lm")],
            hf_cache: vec![self.path("hub")],
        }
    }

    /// Lists a program's models, one per line, with the problem of each.
    fn lines(&self, listing: Listing) -> String {
        let line = |model: &FoundModel| {
            let name = model.library_name(&details()).map_or_else(|_| "-".into(), |name| name.to_string());
            let files = model.found.as_ref().map_or(0, |found| found.files.len());
            match model.problem() {
                None => format!("{} = {name} ({files} files, {} bytes)\n", model.name, model.bytes),
                Some(problem) => format!("{}: {problem}\n", model.name),
            }
        };
        let models: String = listing.models.iter().map(line).collect();
        let problems: String = listing.problems.iter().map(|problem| format!("! {problem}\n")).collect();
        let text = format!("{models}{problems}");
        text.replace(&self.0.path().display().to_string(), "")
    }
}

fn details() -> Details {
    Details { quantization: "Q4_K_M".into(), ..Details::default() }
}

const GGUF: &[u8] = b"GGUF and more";

#[test]
fn models_of_ollama_are_named_and_broken_ones_have_their_reason() {
    let place = Place::new();
    let (model, projector) = (place.layer("model", GGUF), place.layer("projector", b"GGUF projector"));
    let own = "registry.ollama.ai/library";
    place.manifest(&format!("{own}/qwen3/4b"), &[model.clone(), place.layer("license", "MIT")]);
    place.manifest(&format!("{own}/qwen3/latest"), std::slice::from_ref(&model));
    place.manifest(
        &format!("{own}/llava/7b"),
        &[
            model.clone(),
            projector,
            place.layer("params", r#"{"temperature": 0.5, "stop": ["</s>"]}"#),
            place.layer("system", "Be brief."),
            place.layer("template", "{{ .Prompt }}"),
            place.layer("messages", r#"[{"role": "user", "content": "Hi"}]"#),
        ],
    );
    place.manifest("registry.ollama.ai/somebody/mine/v1", std::slice::from_ref(&model));
    place.manifest("hf.co/owner/Some-GGUF/Q8_0", std::slice::from_ref(&model));
    place.manifest("example.com:5000/team/model/latest", std::slice::from_ref(&model));
    let adapter = place.layer("adapter", b"GGUF adapter");
    place.manifest(&format!("{own}/tuned/v1"), &[model.clone(), adapter]);
    // Broken ones.
    let with = |field: &str, value: serde_json::Value| {
        let mut layer = model.clone();
        layer[field] = value;
        layer
    };
    let missing = format!("sha256:{}", "0".repeat(64));
    for (name, layers) in [
        ("traversal", vec![with("digest", json!("sha256:../../../../etc/passwd"))]),
        ("missing", vec![with("digest", json!(missing))]),
        ("half", vec![with("size", json!(99))]),
        ("cloud", vec![]),
        ("lora", vec![model.clone(), place.layer("adapter", b"ggla of old versions")]),
        ("loras", vec![model.clone(), place.layer("adapter", GGUF), place.layer("adapter", b"GGUF other")]),
        ("tensors", vec![place.layer("tensor", "x")]),
        ("two", vec![model.clone(), place.layer("model", b"GGUF second")]),
        ("text", vec![place.layer("model", "not a model")]),
        ("params", vec![model.clone(), place.layer("params", "[1]")]),
    ] {
        place.manifest(&format!("{own}/{name}/bad"), &layers);
    }
    let damaged = place.layer("system", "Be good.");
    let digest: Digest = damaged["digest"].as_str().unwrap().parse().unwrap();
    place.write(&format!("ollama/blobs/sha256-{}", digest.hex()), "Be evil.");
    place.manifest(&format!("{own}/damaged/bad"), &[model.clone(), damaged]);
    place.write(&format!("ollama/manifests/{own}/json/bad"), "{\"layers\": 3");
    place.write(&format!("ollama/manifests/{own}/huge/bad"), vec![b' '; 5 << 20]);
    place.write(&format!("ollama/manifests/{own}/.DS_Store"), "x");
    place.write("ollama/manifests/stray", "x");
    let listing = place.stores().models(Program::Ollama);
    let of = |listing: &Listing, name: &str| {
        listing.models.iter().find(|model| model.name == name).unwrap().settings.clone()
    };
    let settings = of(&listing, "llava:7b");
    assert_eq!(json!(settings.parameters), json!({"temperature": 0.5, "stop": ["</s>"]}));
    assert_eq!(
        (settings.system.as_deref(), settings.template.as_deref()),
        (Some("Be brief."), Some("{{ .Prompt }}"))
    );
    assert_eq!(settings.messages, [json!({"role": "user", "content": "Hi"})]);
    assert_eq!(of(&listing, "qwen3:4b").licenses, ["MIT"]);
    let tuned = listing.models.iter().find(|model| model.name == "tuned:v1").unwrap();
    let base = tuned.base.as_ref().unwrap();
    assert_eq!(base.library_name(&details()).unwrap().short(), "tuned-base:v1");
    assert_eq!((base.bytes, base.found.as_ref().unwrap().files[0].name.as_str()), (13, "tuned-v1.gguf"));
    assert_eq!(tuned.found.as_ref().unwrap().files[0].name, "tuned-v1-lora.gguf");
    let text = place.lines(listing);
    let line = |name: &str| {
        text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name} in {text}"))
    };
    for (name, expected) in [
        ("qwen3:4b", "qwen3:4b = qwen3:4b (1 files, 13 bytes)"),
        ("qwen3:latest", "qwen3:latest = qwen3:latest (1 files, 13 bytes)"),
        ("tuned:v1", "tuned:v1 = tuned:v1 (1 files, 25 bytes)"),
        ("llava:7b", "llava:7b = llava:7b (2 files, 27 bytes)"),
        ("somebody", "somebody/mine:v1 = somebody/mine:v1 (1 files, 13 bytes)"),
        ("hf.co", "hf.co/owner/Some-GGUF:Q8_0 = owner/Some-GGUF:Q8_0 (1 files, 13 bytes)"),
        (
            "example",
            "example.com:5000/team/model:latest = example.com-5000/team/model:latest (1 files, 13 bytes)",
        ),
        ("traversal", "traversal:bad: `sha256:../../../../etc/passwd` is not a digest"),
        ("missing", "missing:bad: the blob `/ollama/blobs/sha256-0000"),
        ("half", "half:bad: the blob `/ollama/blobs/sha256-"),
        ("cloud", "cloud:bad: it has no weights on this machine"),
        ("lora", "lora:bad: the blob `/ollama/blobs/sha256-"),
        ("loras", "loras:bad: it has several adapters (LoRA)"),
        ("tensors", "tensors:bad: its weights are single tensors"),
        ("two", "two:bad: its weights are several files"),
        ("text", "text:bad: the blob `/ollama/blobs/sha256-"),
        ("params", "params:bad: its params layer is not valid"),
        ("damaged", "damaged:bad: the blob `/ollama/blobs/sha256-"),
        (
            "json",
            "json:bad: its manifest `/ollama/manifests/registry.ollama.ai/library/json/bad` is not a manifest of Ollama",
        ),
        (
            "huge",
            "huge:bad: its manifest `/ollama/manifests/registry.ollama.ai/library/huge/bad` cannot be read: it has 5242880 bytes",
        ),
    ] {
        assert!(line(name).starts_with(expected), "{}\n{expected}", line(name));
    }
    assert!(line("missing").ends_with("of its model layer is missing"), "{}", line("missing"));
    assert!(line("half").contains("has 13 bytes instead of 99"), "{}", line("half"));
    assert!(line("text").ends_with("is not a GGUF file"), "{}", line("text"));
    assert!(
        line("damaged").ends_with("is damaged: its content does not match its name"),
        "{}",
        line("damaged")
    );
    assert_eq!(text.lines().count(), 20, "{text}");
}

#[test]
fn a_name_may_be_shortened_as_in_the_library() {
    let place = Place::new();
    let model = place.layer("model", GGUF);
    for path in ["library/qwen3/4b", "library/qwen3/8b", "library/llama3.2/latest", "somebody/mine/v1"] {
        place.manifest(&format!("registry.ollama.ai/{path}"), std::slice::from_ref(&model));
    }
    place.manifest("hf.co/owner/Some-GGUF/Q8_0", &[model]);
    place.write("lm/pub/Repo-GGUF/file-Q4_K_M.gguf", GGUF);
    let find = |program, name: &str| match place.stores().find(program, name) {
        Ok(model) => model.name,
        Err(error) => error.to_string().replace(&place.0.path().display().to_string(), ""),
    };
    use Program::{LmStudio, Ollama};
    for (program, name, expected) in [
        (Ollama, "qwen3:4b", "qwen3:4b"),
        (Ollama, "Qwen3:8B", "qwen3:8b"),
        (Ollama, "library/qwen3:8b", "qwen3:8b"),
        (Ollama, "llama3.2", "llama3.2:latest"),
        (Ollama, "mine", "somebody/mine:v1"),
        (Ollama, "hf.co/owner/some-gguf:q8_0", "hf.co/owner/Some-GGUF:Q8_0"),
        (
            Ollama,
            "qwen3",
            "`ollama:qwen3` could be `ollama:qwen3:4b` or `ollama:qwen3:8b`; give the whole name",
        ),
        (
            Ollama,
            "quen3",
            "Ollama has no model `quen3` on this machine (did you mean `qwen3:4b` or `qwen3:8b`?); its folders are `/ollama`, `/none`",
        ),
        (Ollama, "../x", "Ollama has no model `../x` on this machine; its folders are `/ollama`, `/none`"),
        (LmStudio, "pub/Repo-GGUF", "pub/Repo-GGUF/file-Q4_K_M"),
        (LmStudio, "file-q4_k_m.gguf", "pub/Repo-GGUF/file-Q4_K_M"),
    ] {
        assert_eq!(find(program, name), expected);
    }
    assert_eq!(Program::split("OLLAMA:qwen3:4b"), Some((Ollama, "qwen3:4b")));
    assert_eq!(Program::split("hf:o/m"), None);
}

#[test]
fn folders_of_other_programs_are_read() {
    let place = Place::new();
    place.write("lm/pub/Qwen-GGUF/qwen-Q4_K_M.gguf", GGUF);
    place.write("lm/pub/Qwen-GGUF/mmproj-qwen.gguf", GGUF);
    place.write("lm/pub/Big-GGUF/big-Q4_K_M-00001-of-00002.gguf", GGUF);
    place.write("lm/pub/Big-GGUF/big-Q4_K_M-00002-of-00002.gguf", GGUF);
    place.write("lm/pub/Cut-GGUF/cut-00002-of-00002.gguf", GGUF);
    place.write("lm/pub/Empty-GGUF/empty.gguf", "");
    place.write("lm/pub/MLX/config.json", "{}");
    place.write("lm/pub/MLX/model.safetensors", "x");
    place.write("lm/pub/.hidden/x.gguf", GGUF);
    place.write("lm/pub/blob", GGUF);
    place.write("lm/pub/notes.txt", "no model");
    expect![[r#"
        pub/Big-GGUF/big-Q4_K_M = pub/Big-GGUF:Q4_K_M (2 files, 26 bytes)
        pub/Cut-GGUF/cut: cannot open `/lm/pub/Cut-GGUF/cut-00001-of-00002.gguf`: No such file or directory (os error 2)
        pub/Empty-GGUF/empty: /lm/pub/Empty-GGUF/empty.gguf: it is empty
        pub/MLX = pub/MLX:latest (2 files, 3 bytes)
        pub/Qwen-GGUF/qwen-Q4_K_M = pub/Qwen-GGUF:Q4_K_M (2 files, 26 bytes)
        pub/blob = pub/blob:blob (1 files, 13 bytes)
    "#]]
    .assert_eq(&place.lines(place.stores().models(Program::LmStudio)));
    // The cache has links to blobs, several revisions, and repositories that are no models.
    let bert = "hub/models--owner--bert";
    place.write(&format!("{bert}/refs/main"), "c1\n");
    for (commit, weights) in [("c0", "old"), ("c1", "new!")] {
        place.write(&format!("{bert}/snapshots/{commit}/config.json"), "{}");
        place.write(&format!("{bert}/snapshots/{commit}/model.safetensors"), weights);
        place.write(&format!("{bert}/snapshots/{commit}/1_Pooling/config.json"), "{}");
    }
    place.write("hub/models--o--two-GGUF/snapshots/c/a-Q4_K_M.gguf", GGUF);
    place.write("hub/models--o--two-GGUF/snapshots/c/a-Q8_0.gguf", GGUF);
    place.write("hub/models--gpt2/snapshots/c/config.json", "{}");
    place.write("hub/models--gpt2/snapshots/c/model.safetensors", "x");
    place.write("hub/models--o--tokenizer/snapshots/c/tokenizer.json", "{}");
    place.write("hub/datasets--o--d/snapshots/c/x.gguf", GGUF);
    place.write("hub/models--o--nothing/refs/main", "../../../../../etc");
    expect![[r#"
        gpt2 = gpt2:latest (2 files, 3 bytes)
        o/two-GGUF/a-Q4_K_M = o/two-GGUF:Q4_K_M (1 files, 13 bytes)
        o/two-GGUF/a-Q8_0 = o/two-GGUF:a-Q8_0 (1 files, 13 bytes)
        owner/bert = owner/bert:latest (3 files, 8 bytes)
    "#]]
    .assert_eq(&place.lines(place.stores().models(Program::HfCache)));
    // A folder may be any of them.
    let count = |folder: &str| in_folder(&place.path(folder)).unwrap().models.len();
    assert_eq!((count("lm"), count("lm/pub"), count("hub"), count("lm/pub/Big-GGUF")), (6, 6, 4, 1));
    let error = in_folder(&place.path("nowhere")).unwrap_err().to_string();
    assert!(error.contains("cannot read the folder"), "{error}");
}

#[cfg(unix)]
#[test]
fn links_pipes_and_circles_do_no_harm() {
    let place = Place::new();
    place.write("real/model", GGUF);
    fs::create_dir_all(place.path("d/inner")).unwrap();
    let link = |to: &Path, from: &str| std::os::unix::fs::symlink(to, place.path(from)).unwrap();
    link(&place.path("real/model"), "d/linked.gguf");
    link(&place.path("d"), "d/inner/circle");
    link(&place.path("gone"), "d/broken.gguf");
    // A name that would clear the screen.
    place.write("d/\u{1b}[2Jclear.gguf", GGUF);
    link(Path::new("/dev/zero"), "d/zero.gguf");
    assert!(std::process::Command::new("mkfifo").arg(place.path("d/pipe.gguf")).status().unwrap().success());
    expect![[r#"
        [2Jclear = 2Jclear:latest (1 files, 13 bytes)
        broken: cannot open `/d/broken.gguf`: No such file or directory (os error 2)
        linked = linked:latest (1 files, 13 bytes)
        pipe: /d/pipe.gguf: it is a pipe, not a regular file
        zero: /d/zero.gguf: it is a device, not a regular file
    "#]]
    .assert_eq(&place.lines(in_folder(&place.path("d")).unwrap()));
}
