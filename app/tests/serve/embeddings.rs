//! `/v1/embeddings`, `/api/embed`, `/api/embeddings`.

use std::path::Path;

use paguro_backend::reference::{KvRounding, Reference};
use paguro_engine::{Engine, EngineOptions, Event, Request};
use paguro_model::{LoadOptions, Model, Pooling, tokenizer::SpecialTokens};
use serde_json::{Value, json};

use super::http::Server;

const TEXTS: [&str; 3] = ["The fox lost a key.", "A fox has lost its key", "It rains on the sea"];

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap_or_else(|| panic!("{value}")).iter().map(|n| n.as_f64().unwrap()).collect()
}

fn cosine(a: &[f64], b: &[f64]) -> f64 {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    assert_eq!(a.len(), b.len());
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

fn length(vector: &[f64]) -> f64 {
    vector.iter().map(|value| value * value).sum::<f64>().sqrt()
}

/// Returns the naive reference's embedding of a text.
fn reference(model: &Model, engine: &Engine, text: &str) -> Vec<f64> {
    let request = Request {
        embedding: Some(Pooling::Last),
        max_tokens: Some(0),
        ..Request::new(model.tokenizer.encode_prompt(text, SpecialTokens::Parse))
    };
    let mut generation = engine.handle().generate(request).unwrap();
    while let Some(event) = generation.next_blocking() {
        if let Event::Embedding { values } = event {
            return values.into_iter().map(f64::from).collect();
        }
    }
    panic!("no embedding");
}

#[test]
fn embeddings_are_those_of_the_reference() {
    let server = Server::start(&[]);
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tales/tales-Q8_0.gguf");
    let model = Model::open(&file, &LoadOptions { max_context: Some(64) }).unwrap();
    let backend = Reference { kv: KvRounding::F32, poison: None };
    let engine = Engine::start(&backend, &model, EngineOptions::default()).unwrap();
    let answer = server.post("/v1/embeddings", &json!({"model": "tales", "input": TEXTS})).ok();
    let vectors: Vec<_> = (0..3).map(|i| numbers(&answer["data"][i]["embedding"])).collect();
    for (text, vector) in TEXTS.iter().zip(&vectors) {
        let expected = reference(&model, &engine, text);
        assert!((length(vector) - 1.0).abs() < 1e-5);
        // Activations of eight bits are not quite the reference's.
        let likeness = cosine(vector, &expected);
        assert!(likeness > 0.995, "{text}: {likeness}");
        // As the model gives it, it has the reference's length, too.
        let raw = server.post("/api/embeddings", &json!({"model": "tales", "prompt": text})).ok();
        let raw = numbers(&raw["embedding"]);
        assert!(cosine(&raw, vector) > 0.999_999);
        assert!((length(&raw) / length(&expected) - 1.0).abs() < 0.05);
    }
    assert!(cosine(&vectors[0], &vectors[2]) < 0.99, "other texts are elsewhere");
}

#[test]
fn every_form_has_the_same_vectors() {
    let server = Server::start(&[]);
    let embed = |more: Value| {
        let mut body = json!({"model": "tales"});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post("/v1/embeddings", &body)
    };
    let many = embed(json!({"input": TEXTS})).ok();
    assert_eq!(
        (&many["object"], &many["data"][2]["index"], &many["model"]),
        (&json!("list"), &json!(2), &json!("tales"))
    );
    let tokens: Vec<Value> = TEXTS
        .iter()
        .map(|text| {
            server.post("/tokenize", &json!({"model": "tales", "prompt": text})).ok()["tokens"].clone()
        })
        .collect();
    let count: usize = tokens.iter().map(|tokens| tokens.as_array().unwrap().len()).sum();
    assert_eq!(many["usage"], json!({"prompt_tokens": count, "total_tokens": count}));
    let first = numbers(&many["data"][0]["embedding"]);
    for input in [json!(TEXTS[0]), json!([TEXTS[0]]), tokens[0].clone(), json!([tokens[0]])] {
        assert_eq!(numbers(&embed(json!({"input": input})).ok()["data"][0]["embedding"]), first);
    }
    // base64 holds the same floats.
    let text = embed(json!({"input": TEXTS[0], "encoding_format": "base64"})).ok();
    let text = text["data"][0]["embedding"].as_str().unwrap();
    let digit = |c: u8| {
        b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/".iter().position(|&d| d == c)
    };
    let bits = text.bytes().filter_map(digit).flat_map(|digit| (0..6).rev().map(move |bit| digit >> bit & 1));
    let bits: Vec<usize> = bits.collect();
    let bytes: Vec<u8> =
        bits.chunks_exact(8).map(|bits| bits.iter().fold(0, |byte, &bit| byte << 1 | bit as u8)).collect();
    let floats: Vec<f64> =
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()).into()).collect();
    let close =
        |a: &[f64], b: &[f64]| a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-6);
    assert!(close(&floats, &first));
    // Fewer dimensions are the first ones, at length one.
    let short = numbers(&embed(json!({"input": TEXTS[0], "dimensions": 16})).ok()["data"][0]["embedding"]);
    let scale = length(&first[..16]);
    assert!(close(&short, &first[..16].iter().map(|value| value / scale).collect::<Vec<_>>()));
    // Ollama's are the same.
    let body = json!({"model": "tales:latest", "input": TEXTS, "keep_alive": "5m"});
    let answer = server.post("/api/embed", &body).ok();
    assert!(close(&numbers(&answer["embeddings"][0]), &first));
    assert_eq!((&answer["model"], &answer["prompt_eval_count"]), (&json!("tales:latest"), &json!(count)));
    assert!(answer["total_duration"].as_u64() >= answer["load_duration"].as_u64());
    let body = json!({"model": "tales", "input": TEXTS[0], "dimensions": 16});
    assert!(close(&numbers(&server.post("/api/embed", &body).ok()["embeddings"][0]), &short));
    // As in Ollama, nothing has no embedding and is no error.
    for body in [json!({}), json!({"input": ""}), json!({"input": []}), json!({"input": null})] {
        let mut body = body;
        body["model"] = "tales".into();
        assert_eq!(server.post("/api/embed", &body).ok()["embeddings"], json!([]), "{body}");
    }
    let older = server.post("/api/embeddings", &json!({"model": "tales", "prompt": ""})).ok();
    assert_eq!(older["embedding"], json!([]));
    // A long list is more than one batch, and leaves nothing behind.
    let long: Vec<_> = (0..200).map(|i| format!("{i} foxes")).collect();
    assert_eq!(embed(json!({"input": long})).ok()["data"].as_array().unwrap().len(), 200);
    server.wait_for("paguro_kv_pages_used", 0.0);
}

#[test]
fn what_cannot_be_embedded_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let encoder = folder.path().join("encoder.gguf");
    std::fs::write(&encoder, encoder_file()).unwrap();
    let server = Server::start(&["--ctx", "32", encoder.to_str().unwrap()]);
    let refused = |body: Value, start: &str, words: &str| {
        let error = server.post("/v1/embeddings", &body).error();
        assert!(error.starts_with(start) && error.contains(words), "{error}");
    };
    let invalid = "400 invalid_request_error/invalid_value ";
    for (input, words) in [
        (json!([]), "`input` is an empty list"),
        (json!(""), "`input` is an empty text"),
        (json!([""]), "`input[0]` is an empty text"),
        (json!(["a", "", ""]), "`input[1]` is an empty text"),
        (json!([[1], []]), "`input[1]` is an empty list of tokens"),
    ] {
        refused(json!({"model": "tales", "input": input}), invalid, words);
    }
    refused(json!({"model": "tales", "input": "a", "dimensions": 0}), invalid, "`dimensions` is 0");
    refused(json!({"model": "tales", "input": "a", "dimensions": 5000}), invalid, "`dimensions` is 5000");
    refused(json!({"model": "tales", "input": "a", "encoding_format": "hex"}), invalid, "`encoding_format`");
    refused(json!({"model": "tales", "input": ["a", 1]}), invalid, "`input`");
    refused(json!({"model": "tales", "input": [70000]}), invalid, "70000");
    refused(
        json!({"model": "tales", "input": "word ".repeat(60)}),
        "400 invalid_request_error/context_length_exceeded",
        "32",
    );
    refused(json!({"model": "encoder", "input": "a"}), invalid, "`t5encoder`");
    let texts_only = Server::start(&["--refuse-token-ids"]);
    for (path, field) in [("/v1/embeddings", "input"), ("/v1/completions", "prompt")] {
        let body = |value: Value| json!({"model": "tales", field: value, "max_tokens": 1});
        for tokens in [json!([791, 4062]), json!([[791], [4062]])] {
            let error = texts_only.post(path, &body(tokens)).error();
            assert!(error.starts_with(invalid) && error.contains("--refuse-token-ids"), "{error}");
        }
        assert_eq!(texts_only.post(path, &body(json!("a"))).status, 200);
    }
    // Ollama cuts what is too long unless told not to.
    let long = json!({"model": "tales", "input": "word ".repeat(60)});
    assert_eq!(server.post("/api/embed", &long).ok()["prompt_eval_count"], 32);
    let mut whole = long;
    whole["truncate"] = false.into();
    let refused = server.post("/api/embed", &whole);
    assert!(refused.status == 400 && refused.body.contains("32"), "{refused:?}");
}

/// A GGUF file that says it is BERT, and has nothing else.
fn encoder_file() -> Vec<u8> {
    let text = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    [
        b"GGUF".to_vec(),
        3u32.to_le_bytes().to_vec(),
        0u64.to_le_bytes().to_vec(),
        1u64.to_le_bytes().to_vec(),
        text("general.architecture"),
        8u32.to_le_bytes().to_vec(),
        text("t5encoder"),
    ]
    .concat()
}
