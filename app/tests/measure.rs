//! `paguro bench`, `paguro eval` and `paguro quantize`.

use std::{fs, path::Path};

use crate::common::{run, shared};
use serde_json::{Value, json};

#[test]
fn bench_prints_a_row_for_each_test() {
    let rows =
        run(&["bench", "--json", "-p", "40", "-n", "6", "-d", "0,64", "-b", "1,2", "-r", "2", "-t", "1"])
            .json_lines();
    let key = |row: &Value| json!([row["test"], row["tokens"], row["depth"], row["batch"]]);
    let expected: Vec<_> = [("prefill", 40), ("decode", 6)]
        .into_iter()
        .flat_map(|(test, n)| {
            [(0, 1), (0, 2), (64, 1), (64, 2)].map(|(depth, batch)| json!([test, n, depth, batch]))
        })
        .collect();
    assert_eq!(rows.iter().map(key).collect::<Vec<_>>(), expected);
    for row in &rows {
        let strings =
            ["model", "format", "device", "attention", "pages"].map(|key| row[key].as_str().unwrap());
        assert_eq!(strings, ["Tales 21M", "Q8_0", "cpu", "paged", "ordered"]);
        assert_eq!(row["threads"], 1);
        let samples = row["tokens_per_second"].as_array().unwrap();
        assert_eq!(samples.len(), 2);
        assert!(samples.iter().all(|sample| sample.as_f64().unwrap() > 0.0));
        // This model fits the caches, so it may read faster than memory does.
        assert!(row["ceiling_fraction"].as_f64().unwrap() > 0.0, "{row}");
        assert!(
            row["peak_resident_bytes"].is_null() || row["peak_resident_bytes"].as_u64().unwrap() < 200 << 20,
            "{row}"
        );
        assert!(row.get("kernels").is_none());
    }
    // All matrices of the model are read for each token (19.9 M weights at 34 bytes for 32), and the K and V of 6
    // layers (4 heads of 64 as halfs) of the 65 to 70 tokens seen.
    let deep = rows.iter().find(|row| key(row) == json!(["decode", 6, 64, 1])).unwrap();
    let weights = 6 * (2 * 512 * 512 + 2 * 256 * 512 + 3 * 1536 * 512) + 4096 * 512;
    let kv = 6 * 2 * 4 * 64 * 2;
    assert_eq!(deep["bytes_per_token"], json!((weights * 34 / 32) as f64 + (kv * 135 / 2) as f64));
}

#[test]
fn bench_compares_ways_in_turn_and_counts_kernels() {
    let args = ["bench", "--json", "--kernels", "-p", "0", "-n", "4", "-d", "96", "-r", "1"];
    let rows = run(&[&args[..], &["--attention", "paged,gather", "--pages", "ordered,scattered"]].concat())
        .json_lines();
    let ways: Vec<_> =
        rows.iter().map(|row| (row["attention"].as_str().unwrap(), row["pages"].as_str().unwrap())).collect();
    assert_eq!(
        ways,
        [("paged", "ordered"), ("paged", "scattered"), ("gather", "ordered"), ("gather", "scattered")]
    );
    for row in &rows {
        let kernels = row["kernels"].as_array().unwrap();
        let launches = |part: &str| -> u64 {
            let named = kernels.iter().filter(|kernel| kernel["name"].as_str().unwrap().contains(part));
            named.map(|kernel| kernel["launches"].as_u64().unwrap()).sum()
        };
        assert!(launches("matmul_q8_0") > 0, "{kernels:?}");
        assert_eq!(launches("gather") > 0, row["attention"] == "gather", "{kernels:?}");
    }
}

#[test]
fn prompts_are_computed_so_many_tokens_at_a_time() {
    let embeds = |tokens: &str| {
        let args =
            ["bench", "--json", "--kernels", "-p", "96", "-n", "0", "-r", "1", "--batch-tokens", tokens];
        let rows = run(&args).json_lines();
        let kernels = rows[0]["kernels"].as_array().unwrap();
        let embeds = kernels.iter().filter(|kernel| kernel["name"].as_str().unwrap().starts_with("embed"));
        embeds.map(|kernel| kernel["launches"].as_u64().unwrap()).sum::<u64>()
    };
    assert_eq!(embeds("32"), 3 * embeds("96"));
    assert_eq!(run(&["bench", "--batch-tokens", "0"]).code, Some(2));
}

#[test]
fn bench_decodes_with_drafts_of_a_quality() {
    let drafts = "off,auto,1x3,0x3,0.5";
    let rows =
        run(&["bench", "--json", "-p", "0", "-n", "24", "-b", "1,2", "-r", "1", "--speculate", drafts])
            .json_lines();
    let count = |row: &Value, field: &str| row[field].as_u64().unwrap();
    for batch in rows.chunks(5) {
        let names: Vec<_> = batch.iter().map(|row| row["speculate"].as_str().unwrap()).collect();
        assert_eq!(names, ["off", "auto", "1x3", "0x3", "0.5"]);
        let counts = |row: usize| ["drafted_tokens", "accepted_tokens"].map(|name| count(&batch[row], name));
        let [drafted, accepted] = counts(2);
        assert!(drafted > 12 && accepted == drafted, "{}", batch[2]);
        let [drafted, accepted] = counts(3);
        assert!(drafted > 60 && accepted == 0, "{}", batch[3]);
        assert_eq!(counts(0), [0, 0]);
    }
    for wrong in ["1.5", "0.7x0", "0.7x99", "model:9", "some"] {
        assert!(run(&["bench", "--speculate", wrong]).err.contains("must be off, auto"), "{wrong}");
    }
}

#[test]
fn bench_compares_what_the_kv_cache_stores() {
    let rows = run(&[
        "bench",
        "--json",
        "--kernels",
        "-p",
        "0",
        "-n",
        "1",
        "-d",
        "95",
        "-r",
        "1",
        "--kv-dtype",
        "f16,q8",
    ])
    .json_lines();
    // K and V of 96 tokens in 6 layers, 4 heads of 64: two bytes an element; one, and a scale for 32.
    let kv = |bytes| f64::from(96 * 6 * 2 * 4 * bytes);
    let bytes = |row: &Value| row["bytes_per_token"].as_f64().unwrap();
    assert_eq!(bytes(&rows[0]) - bytes(&rows[1]), kv(128) - kv(64 + 4));
    for (row, (dtype, kernel)) in rows.iter().zip([("f16", "attend/"), ("q8", "attend_q8/")]) {
        assert_eq!(row["kv_dtype"], dtype);
        let names = row["kernels"].as_array().unwrap().iter().map(|kernel| kernel["name"].as_str().unwrap());
        let attend: Vec<_> = names.filter(|name| name.starts_with("attend")).collect();
        assert!(attend.len() == 1 && attend[0].starts_with(kernel), "{attend:?}");
    }
}

#[test]
fn bench_shows_a_table_to_people() {
    let table = run(&["bench", "-p", "16", "-n", "3", "-r", "1", "--kernels"]).ok();
    for part in ["Tales 21M Q8_0, cpu, ", "\nprefill ", "\ndecode ", "%", "GB/s", "\nkernel", "matmul_q8_0"] {
        assert!(table.contains(part), "{part:?} in {table}");
    }
}

/// Text that the model knows: what it says itself.
fn story() -> String {
    let raw =
        ["run", "--raw", "--quiet", "--ignore-eos", "--seed", "3", "--max-tokens", "700", "Once upon a time"];
    format!("Once upon a time{}", run(&raw).ok())
}

#[test]
fn eval_scores_the_second_half_of_each_window() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("story.txt");
    fs::write(&file, story()).unwrap();
    let file = file.to_str().unwrap();
    let result = run(&["eval", "-f", file, "-c", "128", "--json"]).json();
    let windows = result["tokens"].as_u64().unwrap() / 128;
    assert_eq!((&result["windows"], &result["scored_tokens"]), (&json!(windows), &json!(windows * 63)));
    let perplexity = result["perplexity"].as_f64().unwrap();
    assert!((1.0..8.0).contains(&perplexity), "{result}");
    assert!(result["error"].as_f64().unwrap() > 0.0);
    assert!((result["nats_per_token"].as_f64().unwrap().exp() - perplexity).abs() < 1e-9);

    let text = run(&["eval", "-f", file, "-c", "128", "--quiet"]).ok();
    assert!(text.starts_with(&format!("PPL = {perplexity:.4} +/- ")), "{text}");

    let fewer = run(&["eval", "-f", file, "-c", "128", "--chunks", "2", "--json"]).json();
    assert_eq!(fewer["windows"], 2);

    let strided = run(&["eval", "-f", file, "-c", "128", "--stride", "64", "--json"]).json();
    assert_eq!(strided["window"], 256);
    assert_eq!(strided["scored_tokens"].as_u64(), strided["windows"].as_u64().map(|n| n * 64));
}

/// Results of llama.cpp's `llama-perplexity -c 512 --chunks 16` for the held-out text, with our tolerance: F16 differs
/// in rounding only, the others quantize activations differently.
const LLAMA_CPP: [(&str, f64, f64); 3] = [
    ("tales-f16.gguf", 1.4385, 0.001),
    ("tales-Q8_0.gguf", 1.4388, 0.005),
    ("tales-Q4_K_M.gguf", 1.4387, 0.005),
];

#[test]
fn eval_agrees_with_llama_cpp() {
    let Some(text) = shared("model/heldout.txt") else { return };
    for (file, theirs, tolerance) in LLAMA_CPP {
        let Some(model) = shared(&format!("model/{file}")) else { continue };
        let ours = perplexity(&model, &text, &["--chunks", "16"]);
        assert!((ours / theirs - 1.0).abs() < tolerance, "{file}: {ours}, llama.cpp has {theirs}");
    }
}

/// And `llama-perplexity -c 512 -b 512 --ppl-stride 256 --chunks 6`.
#[test]
fn eval_with_a_stride_agrees_with_llama_cpp() {
    let Some((text, model)) = shared("model/heldout.txt").zip(shared("model/tales-f16.gguf")) else { return };
    let ours = perplexity(&model, &text, &["--stride", "256", "--chunks", "6"]);
    assert!((ours / 1.4368 - 1.0).abs() < 0.001, "{ours}");
}

/// Eight bits of K and V cost less than 0.3 % of perplexity, four bits less than 1 %.
#[test]
fn eval_is_hardly_worse_with_a_quantized_kv_cache() {
    let Some((text, model)) = shared("model/heldout.txt").zip(shared("model/tales-f16.gguf")) else { return };
    let [f16, q8, q4] =
        ["f16", "q8", "q4"].map(|dtype| perplexity(&model, &text, &["--chunks", "6", "--kv-dtype", dtype]));
    assert!(f16 != q8 && q8 != q4);
    assert!((q8 / f16 - 1.0).abs() < 0.003, "{q8} with q8, {f16} with f16");
    assert!((q4 / f16 - 1.0).abs() < 0.01, "{q4} with q4, {f16} with f16");
}

fn perplexity(model: &Path, text: &Path, flags: &[&str]) -> f64 {
    let args = ["eval", "--json", "-m", model.to_str().unwrap(), "-f", text.to_str().unwrap()];
    run(&[&args[..], flags].concat()).json()["perplexity"].as_f64().unwrap()
}

#[test]
fn quantize_writes_a_file_that_runs() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("tales-Q4_0.gguf");
    let out = out.to_str().unwrap();
    let written = run(&["quantize", "tales", out, "--format", "q4_0", "--json"]);
    assert!(written.err.contains("were quantized before"), "{}", written.err);
    let report = &written.json_lines()[0];
    assert_eq!(report["format"], "Q4_0");
    // The head is a matrix of its own, with more bits.
    assert_eq!(report["formats"]["Q6_K"], 1, "{report}");
    let inspected = &run(&["inspect", out, "--json"]).json_lines()[0];
    assert_eq!((&inspected["format"], &inspected["supported"]), (&json!("Q4_0"), &json!(true)));
    let again = run(&["quantize", "tales", out, "--format", "Q4_0"]);
    assert!(again.code == Some(2) && again.err.contains("exists already"), "{}", again.err);
    let unknown = run(&["quantize", "tales", out, "--format", "NVFP4"]);
    assert!(unknown.code == Some(2) && unknown.err.contains("Q4_K_M"), "{}", unknown.err);
}
