//! `paguro tokenize`, `embed`, `inspect` and `devices`.

use crate::common::{run, run_with_input, shared};
use serde_json::{Value, json};

fn tokenized(args: &[&str]) -> Value {
    run(&[&["tokenize", "--json"], args].concat()).json()
}

#[test]
fn tokens_put_together_are_the_text() {
    for text in ["Hello world", "  two  spaces\n\ttabs\r\n", "naïve 🐚 日本語", "<|user|>", "-", "x"] {
        let result = tokenized(&["--", text]);
        let tokens = result["tokens"].as_array().unwrap();
        // A lone dash reads standard input, which is empty here.
        let expected = if text == "-" { "" } else { text };
        let bytes: Vec<u8> = tokens
            .iter()
            .flat_map(|token| token["bytes"].as_array().unwrap())
            .map(|byte| byte.as_u64().unwrap() as u8)
            .collect();
        assert_eq!(String::from_utf8(bytes).unwrap(), expected);
        assert_eq!(result["count"], tokens.len());
    }
}

#[test]
fn special_tokens_are_recognised_only_where_asked_for() {
    assert!(tokenized(&["<|user|>"])["count"].as_u64().unwrap() > 1);
    let special = tokenized(&["--special", "<|user|>"]);
    assert_eq!(
        special["tokens"],
        json!([{"id": 3, "name": "<|user|>", "text": "<|user|>", "bytes": b"<|user|>", "special": true}])
    );
    let around = tokenized(&["--around", "Hello"]);
    assert_eq!(around["tokens"][0]["name"], "<|begin|>");
}

#[test]
fn ids_come_from_standard_input_too() {
    let ids = run(&["tokenize", "--ids", "Hello world"]).ok();
    assert_eq!(run_with_input(&["tokenize", "--ids", "-"], "Hello world").ok(), ids);
    assert_eq!(run_with_input(&["tokenize", "--ids"], "Hello world").ok(), ids);
    let lines = run(&["tokenize", "Hello world"]).ok();
    let first: Vec<_> = lines.lines().map(|line| line.split_whitespace().next().unwrap()).collect();
    assert_eq!(first.join(" "), ids.trim());
    assert!(lines.contains("\"Hello\""), "{lines}");
}

#[test]
fn inspect_shows_a_model_and_what_it_needs() {
    let value = run(&["inspect", "--json", "--tensors", "-c", "1000"]).json();
    assert_eq!(
        (&value["name"], &value["architecture"], &value["format"]),
        (&json!("Tales 21M"), &json!("llama"), &json!("Q8_0"))
    );
    assert_eq!(value["parameters"], 20_978_176);
    assert_eq!(value["supported"], true);
    assert_eq!(value["metadata"]["llama.block_count"]["value"], "6");
    let tensors = value["tensors"].as_array().unwrap();
    assert_eq!(value["tensor_count"], tensors.len());
    let embedding = tensors.iter().find(|tensor| tensor["name"] == "token_embd.weight").unwrap();
    assert_eq!((&embedding["shape"], &embedding["type"]), (&json!([4096, 512]), &json!("Q8_0")));
    // 1000 tokens are 32 pages of 32 tokens; K and V of 6 layers with 4 heads of 64 as halfs, and 4 KiB between pages
    // so that they do not share cache sets.
    let memory = &value["memory"];
    assert_eq!((&memory["context"], &memory["pages"]), (&json!(1000), &json!(32)));
    assert_eq!(memory["kv_bytes"], 32 * (32 * 6 * 2 * 4 * 64 * 2 + 4096));
    assert_eq!(memory["kv_dtype"], "f16");
    // A byte for each element, and 64 bytes of scales for each head's 16 tokens.
    let memory = &run(&["inspect", "--json", "-c", "1000", "--kv-dtype", "q8"]).json()["memory"];
    assert_eq!((&memory["kv_dtype"], &memory["pages"]), (&json!("q8"), &json!(32)));
    assert_eq!(memory["kv_bytes"], 32 * (6 * 2 * 4 * 2 * (16 * 64 + 64)));
    let memory = &run(&["inspect", "--json", "-c", "1000", "--kv-dtype", "q4"]).json()["memory"];
    assert_eq!(memory["kv_bytes"], 32 * (6 * 2 * 4 * 2 * (16 * 64 / 2 + 64)));

    let text = run(&["inspect", "tales"]).ok();
    for part in ["Tales 21M\n", "GGUF v3", "6 layers", "2048 tokens", "llama.block_count = 6"] {
        assert!(text.contains(part), "{part:?} in {text}");
    }
    assert!(!text.contains("blk.0.attn_q.weight"));
    assert!(run(&["inspect", "--tensors"]).ok().contains("blk.0.attn_q.weight"));
}

#[test]
fn inspect_shows_what_cannot_run() {
    let Some(file) = shared("vocabs/ggml-vocab-gpt-2.gguf") else { return };
    let file = file.to_str().unwrap();
    let value = run(&["inspect", "--json", file]).json();
    assert_eq!(value["supported"], false);
    assert!(value["problem"].as_str().unwrap().contains("no tensors"), "{}", value["problem"]);
    let text = run(&["inspect", file]).ok();
    assert!(text.contains("runs          no: ") && text.contains("the file has no tensors"), "{text}");
    // Its tokenizer is of use all the same.
    assert_eq!(run(&["tokenize", "--ids", "-m", file, "Hello world"]).ok(), "15496 995\n");
}

#[test]
fn devices_are_listed() {
    // Binaries with GPU kernels list GPUs after it.
    let value = &run(&["devices", "--json"]).json_lines()[0];
    assert_eq!(value["device"], "cpu");
    assert!(value["threads"].as_u64().unwrap() > 0 && value["bytes_free"].as_u64().unwrap() > 1 << 20);
    assert!(value["features"].as_array().unwrap().contains(&json!("scalar")));
    assert!(run(&["devices"]).ok().starts_with("cpu "));
}

#[test]
fn embed_writes_vectors_in_the_order_of_the_input() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let texts = file("texts.txt", b"a fox\r\nThe fox lost a key in the wood.\nit rains");
    let all = run(&["embed", "tales", &texts]).json_lines();
    let places: Vec<_> =
        all.iter().map(|one| (one["file"].as_str(), one["line"].as_u64().unwrap())).collect();
    assert_eq!(places, [(Some(&*texts), 1), (Some(&*texts), 2), (Some(&*texts), 3)]);
    let values = |one: &Value| -> Vec<f64> {
        one["embedding"].as_array().unwrap().iter().map(|value| value.as_f64().unwrap()).collect()
    };
    let length = |vector: &[f64]| vector.iter().map(|value| value * value).sum::<f64>().sqrt();
    assert!(all.iter().all(|one| (length(&values(one)) - 1.0).abs() < 1e-5));
    // Standard input is the same, and a vector depends on no other text.
    let alone = run_with_input(&["embed", "tales"], "it rains\n").json_lines();
    assert_eq!((&alone[0]["embedding"], &alone[0]["file"]), (&all[2]["embedding"], &Value::Null));
    let short = run(&["embed", "tales", &texts, "--dimensions", "16"]).json_lines();
    assert!(values(&short[0]).len() == 16 && (length(&values(&short[0])) - 1.0).abs() < 1e-5);

    let output = folder.path().join("x.npy");
    let output = output.to_str().unwrap();
    let other = file("other.txt", b"one\ntwo\n");
    run(&["embed", "tales", "--whole-files", &texts, &other, "--output", output]).ok();
    let bytes = std::fs::read(output).unwrap();
    let width = values(&all[0]).len();
    assert_eq!(&bytes[..8], b"\x93NUMPY\x01\x00");
    let header = String::from_utf8_lossy(&bytes[10..128]).into_owned();
    assert!(header.contains(&format!("'<f4', 'fortran_order': False, 'shape': (2, {width})")), "{header}");
    assert_eq!(bytes.len(), 128 + 2 * width * 4);

    let long = file("long.txt", format!("a\n{}\n", "word ".repeat(3000)).as_bytes());
    // Blank lines have no vectors, and the others keep their numbers.
    let gap = run(&["embed", "tales", &file("gap.txt", b"a\n\n \r\nb\n")]);
    assert!(gap.err.starts_with("2 blank lines left out\n"), "{}", gap.err);
    let lines: Vec<_> = gap.json_lines().iter().map(|one| one["line"].clone()).collect();
    assert_eq!(lines, [1, 4]);
    let blank = file("blank.txt", b"\n\n");
    let binary = file("binary.txt", b"a\n\xff\n");
    for (args, words) in [
        (vec![&*long], "long.txt:2 has 3"),
        (vec![&*blank], "there are no texts, only 2 blank lines"),
        (vec![&*blank, "--whole-files"], "blank.txt is empty"),
        (vec![&*texts, "--output", "/dev/full"], "cannot write `/dev/full`"),
        (vec![&*binary], "binary.txt:2 is not UTF-8"),
        (vec![&*texts, "--prompt-name", "query"], "define no prompts"),
        (vec![&*texts, "--dimensions", "100000"], "--dimensions is 100000"),
        (vec!["/nowhere/x"], "cannot read `/nowhere/x`"),
    ] {
        let ran = run(&[&["embed", "tales"], &args[..]].concat());
        assert!(ran.code != Some(0) && ran.err.contains(words), "{args:?}: {}", ran.err);
    }
    assert_eq!(run(&["embed", "tales", &long, "--truncate"]).json_lines().len(), 2);
}
