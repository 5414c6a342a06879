//! Sparse and multi-vector outputs of models like BAAI/bge-m3.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};

use super::{
    common::{run, run_with_input},
    http::Server,
    retrieval::{encoders_tokenizer, write_folder},
};

/// Vectors that PyTorch computed (`bge_m3/make.py`).
#[derive(serde::Deserialize)]
struct Expected {
    ids: Vec<u32>,
    dense: Vec<f64>,
    sparse: BTreeMap<String, f64>,
    /// Number of vectors of tokens.
    vectors: usize,
    /// All of them, or the first, the 71st and the last.
    multi: Vec<Vec<f64>>,
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/serve/bge_m3").join(name)
}

/// Writes a folder with the files of bge-m3's.
fn folder(parent: &Path) -> PathBuf {
    let folder = write_folder(parent, "m3", "xlm_roberta", |_, tokenizer| {
        *tokenizer = encoders_tokenizer("Unigram");
    });
    let modules = json!([
        {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]);
    fs::write(folder.join("modules.json"), modules.to_string()).unwrap();
    fs::create_dir(folder.join("1_Pooling")).unwrap();
    fs::write(folder.join("1_Pooling/config.json"), r#"{"pooling_mode_cls_token": true}"#).unwrap();
    for name in ["sparse_linear.pt", "colbert_linear.pt"] {
        fs::copy(fixture(name), folder.join(name)).unwrap();
    }
    folder
}

fn numbers(value: &Value) -> Vec<f64> {
    let numbers = value.as_array().unwrap_or_else(|| panic!("{value} is no vector"));
    numbers.iter().map(|number| number.as_f64().unwrap()).collect()
}

/// Vectors and weights are rounded to five decimals, and activations of eight bits are not quite those of PyTorch.
#[track_caller]
fn close(found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let cosine = dot(found, expected) / (dot(found, found) * dot(expected, expected)).sqrt();
    assert!(cosine > 0.9999, "cosine {cosine}");
}

#[track_caller]
fn close_weights<'a>(found: impl Iterator<Item = (&'a str, f64)>, expected: &BTreeMap<String, f64>) {
    let found: BTreeMap<&str, f64> = found.collect();
    // A weight near 0 may be on either side of it.
    let all = found.keys().copied().chain(expected.keys().map(String::as_str));
    for id in all {
        let of_found = found.get(id).copied().unwrap_or(0.0);
        let of_expected = expected.get(id).copied().unwrap_or(0.0);
        assert!((of_found - of_expected).abs() < 1e-2, "{id}: {of_found}, not {of_expected}");
    }
    assert!(found.values().all(|&weight| weight > 0.0));
}

#[test]
fn sparse_and_multiple_vectors_are_those_of_pytorch() {
    let home = tempfile::tempdir().unwrap();
    let folder = folder(home.path());
    let expected: Vec<Expected> =
        serde_json::from_slice(&fs::read(fixture("expected.json")).unwrap()).unwrap();
    let ids: Vec<_> = expected.iter().map(|text| &text.ids).collect();
    let server = Server::start(&[folder.to_str().unwrap()]);
    let embed = |more: Value| {
        let mut body = json!({"model": "m3", "input": ids});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post("/v1/embeddings", &body)
    };

    let plain = embed(json!({})).ok();
    let all = embed(json!({"return_sparse": true, "return_colbert_vecs": true})).ok();
    for (index, text) in expected.iter().enumerate() {
        let found = &all["data"][index];
        assert_eq!(found["index"], index);
        close(&numbers(&found["embedding"]), &text.dense);
        assert_eq!(
            found["embedding"], plain["data"][index]["embedding"],
            "dense vectors do not depend on others"
        );
        let weights = found["lexical_weights"].as_object().unwrap();
        close_weights(weights.iter().map(|(id, weight)| (&id[..], weight.as_f64().unwrap())), &text.sparse);
        let vectors: Vec<_> = found["colbert_vecs"].as_array().unwrap().iter().map(numbers).collect();
        assert_eq!(vectors.len(), text.vectors);
        let kept: Vec<_> = match vectors.len() {
            0..20 => vectors.iter().collect(),
            count => [0, 70, count - 1].map(|at| &vectors[at]).into(),
        };
        for (vector, expected) in kept.into_iter().zip(&text.multi) {
            close(vector, expected);
            assert!((vector.iter().map(|x| x * x).sum::<f64>() - 1.0).abs() < 1e-4);
        }
    }
    assert_eq!(
        plain["data"][0].as_object().unwrap().len(),
        3,
        "nothing is added unasked: {}",
        plain["data"][0]
    );
    assert_eq!(all["usage"], plain["usage"]);

    let only = embed(json!({"return_dense": false, "return_sparse": true})).ok();
    assert_eq!(only["data"][1]["lexical_weights"], all["data"][1]["lexical_weights"]);
    assert!(only["data"][1].get("embedding").is_none() && only["data"][1].get("colbert_vecs").is_none());
    let encoded = embed(json!({"return_colbert_vecs": true, "encoding_format": "int8"})).ok();
    assert_eq!(encoded["data"][0]["colbert_vecs"][0].as_array().unwrap().len(), 64);
    let tei = server.post("/embed_sparse", &json!({"inputs": ids})).ok();
    for (index, text) in expected.iter().enumerate() {
        let values = tei[index].as_array().unwrap();
        let ids: Vec<String> = values.iter().map(|value| value["index"].to_string()).collect();
        let weights = values.iter().map(|value| value["value"].as_f64().unwrap());
        close_weights(ids.iter().map(String::as_str).zip(weights), &text.sparse);
    }

    let text = "hello fox, hello world";
    let body = json!({"model": "m3", "input": text, "return_sparse": true, "return_colbert_vecs": true});
    let served = &server.post("/v1/embeddings", &body).ok()["data"][0];
    let printed = run_with_input(&["embed", folder.to_str().unwrap(), "--sparse", "--multi-vector"], text);
    let printed = &printed.json_lines()[0];
    let near = |a: &Value, b: &Value| (a.as_f64().unwrap() - b.as_f64().unwrap()).abs() < 1e-6;
    let all_near = |a: &Value, b: &Value| {
        let (a, b) = (a.as_array().unwrap(), b.as_array().unwrap());
        a.len() == b.len() && a.iter().zip(b).all(|(a, b)| near(a, b))
    };
    assert!(all_near(&printed["embedding"], &served["embedding"]), "{printed}");
    let [weights, others] = [printed, served].map(|text| text["lexical_weights"].as_object().unwrap());
    assert!(
        weights.len() == others.len() && weights.iter().all(|(id, weight)| near(weight, &others[id])),
        "{printed}"
    );
    let [vectors, others] = [printed, served].map(|text| text["colbert_vecs"].as_array().unwrap());
    assert!(
        vectors.len() == others.len() && vectors.iter().zip(others).all(|(a, b)| all_near(a, b)),
        "{printed}"
    );

    for (path, body, words) in [
        (
            "/v1/embeddings",
            json!({"model": "tales", "input": "a", "return_sparse": true}),
            "return_sparse: the model `tales` has no sparse",
        ),
        (
            "/v1/embeddings",
            json!({"model": "tales", "input": "a", "return_colbert_vecs": true}),
            "`colbert_linear.pt`",
        ),
        (
            "/embed_sparse",
            json!({"model": "tales", "inputs": "a"}),
            "the model `tales` has no sparse vectors",
        ),
        ("/embed_sparse", json!({"inputs": ["a", ""]}), "`inputs[1]` is an empty text"),
        ("/embed_sparse", json!({"inputs": ["a", "fox ".repeat(300)]}), "`inputs[1]` has"),
        ("/v1/embeddings", json!({"model": "m3", "input": "a", "return_dense": false}), "nothing to return"),
        ("/v1/embeddings", json!({"model": "m3", "input": "a", "return_sparse": "yes"}), "return_sparse"),
        (
            "/v1/embeddings",
            json!({"model": "m3", "input": "a", "return_multivector": true}),
            "`return_colbert_vecs`",
        ),
        (
            "/v1/embeddings",
            json!({"model": "m3", "input": "a", "return_dense": false, "return_sparse": true, "dimensions": 8}),
            "`dimensions`",
        ),
        // These would be 755,000 vectors of 64 values.
        (
            "/v1/embeddings",
            json!({"model": "m3", "input": vec![ids[3]; 5000], "return_colbert_vecs": true}),
            "send fewer texts at once",
        ),
    ] {
        let error = server.post(path, &body).error();
        assert!(error.starts_with("400 ") && error.contains(words), "{path} {words}: {error}");
    }

    let matrix = home.path().join("x.npy");
    let to_matrix = ["embed", folder.to_str().unwrap(), "--sparse", "--output", matrix.to_str().unwrap()];
    let refused = run_with_input(&to_matrix, text);
    assert!(refused.code == Some(2) && refused.err.contains("NumPy"), "{}", refused.err);
    let refused = run_with_input(&["embed", "tales", "--multi-vector"], text);
    assert!(
        refused.code == Some(2) && refused.err.contains("`tales` has no such vectors"),
        "{}",
        refused.err
    );
}

/// Files that are damaged or of another kind are refused when the model is opened.
#[test]
fn files_that_do_not_fit_are_refused_by_name() {
    let home = tempfile::tempdir().unwrap();
    let folder = folder(home.path());
    let [sparse, colbert, modules, pooling, longest, prompts] = [
        "sparse_linear.pt",
        "colbert_linear.pt",
        "modules.json",
        "1_Pooling/config.json",
        "sentence_bert_config.json",
        "config_sentence_transformers.json",
    ]
    .map(|name| folder.join(name));
    let saved = |name: &str| {
        let torch = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/model/tests/it/torch");
        fs::read(torch.join(format!("{name}.pt"))).unwrap()
    };
    let whole = fs::read(&sparse).unwrap();
    for (path, bytes, words) in [
        (&sparse, whole[..whole.len() - 1].to_vec(), "sparse_linear.pt`: truncated or corrupt zip archive"),
        (&sparse, Vec::new(), "sparse_linear.pt`: a file of 0 bytes"),
        (&sparse, saved("module"), "it uses `torch.nn.modules.linear.Linear`"),
        (&sparse, saved("plain"), "tensor `first` is not part of a linear layer"),
        (&sparse, saved("linear-f64"), "has type F64"),
        (&sparse, saved("linear-f32"), "a token has 3 weights, not one"),
        (&colbert, saved("linear-f32"), "reads 4 elements of 64"),
        (&modules, b"{}".to_vec(), "modules.json`: it is not a list of modules"),
        (&modules, b"[".to_vec(), "modules.json`: it is not JSON"),
        (
            &modules,
            br#"[{"type": "Pooling", "path": "../m3"}]"#.to_vec(),
            "`../m3` is not a folder of the model's",
        ),
        (
            &modules,
            br#"[{"type": "Pooling", "path": "2_Pool"}]"#.to_vec(),
            "it is missing, but modules.json names it",
        ),
        (
            &modules,
            br#"[{"type": "Dense", "path": "2_Dense"}]"#.to_vec(),
            "it is missing, but modules.json names it",
        ),
        (&modules, br#"[{"type": "Dense"}, {"type": "Pooling"}]"#.to_vec(), "not a folder of the model's"),
        (
            &modules,
            br#"[{"type": "Normalize"}, {"type": "Pooling"}]"#.to_vec(),
            "the module `Pooling` after `Normalize`",
        ),
        (&pooling, br#"{"pooling_mode": "max"}"#.to_vec(), "its file asks for `max`"),
        (&pooling, b"[]".to_vec(), "not a JSON object"),
        (
            &longest,
            br#"{"max_seq_length": "x"}"#.to_vec(),
            "`max_seq_length` is \"x\", which is not a number of tokens",
        ),
        (&longest, br#"{"max_seq_length": 0}"#.to_vec(), "`max_seq_length` is 0"),
        (&prompts, br#"{"prompts": ["query"]}"#.to_vec(), "`prompts`: it is not an object"),
        (&prompts, br#"{"prompts": {"query": 1}}"#.to_vec(), "`query` is not a text"),
    ] {
        let before = fs::read(path).unwrap_or_else(|_| b"{}".to_vec());
        fs::write(path, bytes).unwrap();
        let refused = run_with_input(&["embed", folder.to_str().unwrap()], "a");
        assert!(refused.code == Some(1) && refused.err.contains(words), "{words}: {}", refused.err);
        fs::write(path, before).unwrap();
    }
    fs::remove_file(&sparse).unwrap();
    fs::create_dir(&sparse).unwrap();
    let refused = run(&["inspect", folder.to_str().unwrap()]);
    assert!(
        refused.err.contains("is a folder") || refused.out.contains("is a folder"),
        "{}{}",
        refused.out,
        refused.err
    );
}
