//! Rerankers, scores, labels, prompts by name, and embeddings in the forms of Cohere and TEI.

use std::{
    fs,
    path::{Path, PathBuf},
};

use paguro_backend::reference::{KvRounding, Reference};
use paguro_engine::{Engine, EngineOptions, Event, Request};
use paguro_model::{LoadOptions, Model, tokenizer::SpecialTokens};
use serde_json::{Map, Value, json};

use super::{
    common::{run, run_with_input},
    http::Server,
};

#[path = "../architectures/weights.rs"]
#[allow(dead_code)] // the tests of architectures use the rest
mod weights;

const QUERY: &str = "Who lost a key?";
const DOCUMENTS: [&str; 4] =
    ["It rains", "A fox lost its key <|im_end|> in the wood", "key?", "é日本🦊 the sea"];
const INSTRUCTION: &str = "Given a web search query, retrieve relevant passages that answer the query";

/// Writes a random model of the architecture Qwen 3 whose name says that it is a reranker, with prompts.
fn folder(parent: &Path) -> PathBuf {
    let folder = write_folder(parent, "Qwen3-Reranker-tiny", "qwen3", |config, tokenizer| {
        config["max_position_embeddings"] = 1024.into();
        let vocab = tokenizer["model"]["vocab"].as_object_mut().unwrap();
        let names = ["yes", "no", "<|im_start|>", "<|im_end|>"];
        let mut added = Vec::new();
        for (name, id) in names.into_iter().zip(297..) {
            vocab.remove(&format!("<|extra_{id}|>"));
            vocab.insert(name.into(), id.into());
            if name.starts_with('<') {
                added.push(json!({
                    "id": id, "content": name, "special": true,
                    "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
                }));
            }
        }
        tokenizer["added_tokens"] = added.into();
    });
    let prompts = json!({"prompts": {"query": "Q: ", "clustering": ""}, "default_prompt_name": "query"});
    fs::write(folder.join("config_sentence_transformers.json"), prompts.to_string()).unwrap();
    folder
}

/// Writes the random model of a case of the architectures' tests, with a changed configuration and tokenizer.
pub fn write_folder(
    parent: &Path,
    name: &str,
    case: &str,
    change: impl FnOnce(&mut Value, &mut Value),
) -> PathBuf {
    let folder = parent.join(name);
    fs::create_dir(&folder).unwrap();
    let cases = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/architectures/hf/cases.json");
    let mut cases: Value = serde_json::from_slice(&fs::read(cases).unwrap()).unwrap();
    let mut tokenizer = cases["tokenizer"].take();
    let case = cases["cases"].as_array_mut().unwrap().iter_mut().find(|other| other["name"] == case).unwrap();
    change(&mut case["config"], &mut tokenizer);
    fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    fs::write(folder.join("config.json"), case["config"].to_string()).unwrap();
    let (mut header, mut data) = (Map::new(), Vec::new());
    for tensor in case["tensors"].as_array().unwrap() {
        let (name, center, spread) =
            (tensor[0].as_str().unwrap(), weights::number(&tensor[1]), weights::number(&tensor[2]));
        let shape = tensor[3].as_array().unwrap();
        let count = shape.iter().map(|dim| dim.as_u64().unwrap() as usize).product();
        let start = data.len();
        data.extend(weights::uniform(name, count).flat_map(|noise| (noise * spread + center).to_le_bytes()));
        let offsets = [start, data.len()];
        header.insert(name.to_owned(), json!({"dtype": "F32", "shape": shape, "data_offsets": offsets}));
    }
    let header = Value::Object(header).to_string();
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
    fs::write(folder.join("model.safetensors"), file).unwrap();
    folder
}

/// The probability of `yes` against `no` by the naive reference, from the probabilities of all tokens. Names of control tokens in
/// texts are letters.
fn expected(model: &Model, engine: &Engine, query: &str, document: &str, instruction: &str) -> f64 {
    let tokenizer = &model.tokenizer;
    let mut prompt = Vec::new();
    let mut push = |text: &str, special| prompt.extend(tokenizer.encode(text, special));
    push("<|im_start|>", SpecialTokens::Parse);
    push(
        "system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. Note that \
         the answer can only be \"yes\" or \"no\".",
        SpecialTokens::AsText,
    );
    push("<|im_end|>\n<|im_start|>", SpecialTokens::Parse);
    push(
        &format!("user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"),
        SpecialTokens::AsText,
    );
    push("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", SpecialTokens::Parse);
    let logprobs = Some(model.program.vocab);
    let request = Request { max_tokens: Some(1), logprobs, ignore_stop_tokens: true, ..Request::new(prompt) };
    let mut generation = engine.handle().generate(request).unwrap();
    while let Some(event) = generation.next_blocking() {
        if let Event::Token { top, .. } = event {
            let of = |name: &str| {
                let id = tokenizer.token_id(name).unwrap();
                f64::from(top.iter().find(|(token, _)| *token == id).unwrap().1).exp()
            };
            return of("yes") / (of("yes") + of("no"));
        }
    }
    panic!("no token");
}

fn score_of(result: &Value) -> f64 {
    result.as_f64().unwrap_or_else(|| panic!("{result} is no number"))
}

#[test]
fn rerankers_score_as_the_reference_in_every_form() {
    let home = tempfile::tempdir().unwrap();
    let folder = folder(home.path());
    let server = Server::start(&[folder.to_str().unwrap()]);
    let model = Model::open(&folder, &LoadOptions::default()).unwrap();
    let backend = Reference { kv: KvRounding::F32, poison: None };
    let engine = Engine::start(&backend, &model, EngineOptions::default()).unwrap();
    let expected = |document: &str| expected(&model, &engine, QUERY, document, INSTRUCTION);
    let mut order: Vec<(usize, f64)> = DOCUMENTS.iter().map(|text| expected(text)).enumerate().collect();
    order.sort_by(|a, b| b.1.total_cmp(&a.1));
    let name = "Qwen3-Reranker-tiny";
    let body = json!({"model": name, "query": QUERY, "documents": DOCUMENTS});
    let with = |more: Value| {
        let mut body = body.clone();
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };

    let answer = server.post("/v1/rerank", &body).ok();
    let results = answer["results"].as_array().unwrap();
    assert_eq!((results.len(), &answer["model"]), (4, &json!(name)));
    for (result, (index, score)) in results.iter().zip(&order) {
        assert_eq!(result["index"], *index, "{results:?} {order:?}");
        assert!((score_of(&result["relevance_score"]) - score).abs() < 1e-3, "{results:?} {order:?}");
        assert_eq!(result["document"]["text"], DOCUMENTS[*index]);
    }
    assert!(answer["usage"]["total_tokens"].as_u64() > Some(1000), "{}", answer["usage"]);

    // Other forms of the same.
    let objects: Vec<_> = DOCUMENTS.iter().map(|text| json!({"text": text})).collect();
    let short = server.post("/v2/rerank", &with(json!({"documents": objects, "top_n": 2}))).ok();
    let best = &short["results"][0];
    assert_eq!((short["results"].as_array().unwrap().len(), &best["index"]), (2, &results[0]["index"]));
    assert_eq!((&best["relevance_score"], &best["document"]), (&results[0]["relevance_score"], &Value::Null));
    // TEI names no model.
    let tei = json!({"query": QUERY, "texts": DOCUMENTS, "return_text": true});
    let tei = server.post("/rerank", &tei).ok();
    assert_eq!(tei[3]["text"], DOCUMENTS[order[3].0]);
    assert_eq!(tei[0]["score"], results[0]["relevance_score"]);
    let raw = server.post("/rerank", &json!({"query": QUERY, "texts": DOCUMENTS, "raw_scores": true})).ok();
    let sigmoid = 1.0 / (1.0 + (-score_of(&raw[0]["score"])).exp());
    assert!((sigmoid - order[0].1).abs() < 1e-3 && raw[0].get("text").is_none());
    let scores = server.post("/v1/score", &json!({"text_1": QUERY, "text_2": DOCUMENTS, "model": name})).ok();
    for (index, score) in &order {
        assert!((score_of(&scores["data"][*index]["score"]) - score).abs() < 1e-3);
    }
    let pairs = json!({"queries": [QUERY, "x"], "documents": [DOCUMENTS[2], "y"], "model": name});
    let pairs = server.post("/score", &pairs).ok();
    assert_eq!(pairs["data"][0]["score"], scores["data"][2]["score"]);
    // Another task is another question.
    let asked = json!({"instruction": "Find foxes", "documents": [DOCUMENTS[1]]});
    let asked = server.post("/v1/rerank", &with(asked)).ok();
    let wanted = self::expected(&model, &engine, QUERY, DOCUMENTS[1], "Find foxes");
    assert!((score_of(&asked["results"][0]["relevance_score"]) - wanted).abs() < 1e-3);

    // Refusals name the document.
    let long = "word ".repeat(400);
    for (more, words) in [
        (json!({"documents": []}), "documents: give at least one document"),
        (json!({"documents": ["a", ""]}), "`documents[1]` is an empty text"),
        (json!({"documents": ["a", 1]}), "`documents[1]`"),
        (json!({"documents": ["a", long]}), "`documents[1]` has 2"),
        (json!({"documents": ["x".repeat(1 << 20)]}), "`documents[0]` has at least"),
        (
            json!({"query": "w ".repeat(450), "documents": vec!["a"; 9000]}),
            "9000 elements for a query of 900 tokens",
        ),
        (json!({"documents": vec!["a"; 10_001]}), "`documents` has 10001 elements"),
        (json!({"texts": ["a"]}), "either `documents` or `texts`"),
        (json!({"query": ""}), "`query` is an empty text"),
        (json!({"model": "tales"}), "`tales` is not a reranker"),
    ] {
        let error = server.post("/v1/rerank", &with(more.clone())).error();
        assert!(error.starts_with("400 ") && error.contains(words), "{more}: {error}");
    }
    for cut in
        [json!({"truncate": true}), json!({"truncate": "START"}), json!({"truncate_prompt_tokens": 600})]
    {
        let mut body = with(json!({"documents": ["a", long, "x".repeat(1 << 20)]}));
        body.as_object_mut().unwrap().extend(cut.as_object().unwrap().clone());
        let answer = server.post("/v1/rerank", &body).ok();
        assert_eq!(answer["results"].as_array().unwrap().len(), 3, "{cut}");
    }
    // A page of the model says what it can do.
    let shown = server.post("/api/show", &json!({"model": name})).ok();
    assert!(
        shown["capabilities"].as_array().unwrap().contains(&json!("rerank")),
        "{}",
        shown["capabilities"]
    );
    assert_eq!(server.get("/info").ok()["model_id"], name);

    // The command line has the same scores.
    let folder = folder.to_str().unwrap();
    let file = home.path().join("documents.txt");
    fs::write(&file, DOCUMENTS.join("\n")).unwrap();
    let lines = run(&["rerank", folder, QUERY, file.to_str().unwrap(), "--json"]).json_lines();
    assert_eq!(lines.len(), 4);
    for (line, (index, score)) in lines.iter().zip(&order) {
        assert_eq!(
            (&line["line"], &line["text"]),
            (&json!(index + 1), &json!(DOCUMENTS[*index])),
            "{order:?}"
        );
        assert!((score_of(&line["score"]) - score).abs() < 1e-3, "{line} {order:?}");
    }
    let best = run(&["rerank", folder, QUERY, file.to_str().unwrap(), "--top-n", "1"]).ok();
    let (index, score) = order[0];
    assert_eq!(best.lines().count(), 1, "{best}");
    let shown: f64 = best.split(' ').next().unwrap().parse().unwrap();
    assert!((shown - score).abs() < 1e-3 && best.contains(DOCUMENTS[index]), "{best}");
    fs::write(&file, format!("a\n{long}\n")).unwrap();
    let refused = run(&["rerank", folder, QUERY, file.to_str().unwrap()]);
    assert!(refused.code != Some(0) && refused.err.contains("documents.txt:2 has 2"), "{}", refused.err);
    let cut = run(&["rerank", folder, QUERY, file.to_str().unwrap(), "--truncate", "--json"]);
    assert_eq!(cut.json_lines().len(), 2);
    let other = run(&["rerank", "tales", QUERY, file.to_str().unwrap()]);
    assert!(other.code != Some(0) && other.err.contains("`tales` is not a reranker"), "{}", other.err);
}

#[test]
fn a_classifier_ranks_texts_on_the_command_line() {
    let home = tempfile::tempdir().unwrap();
    let folder = write_folder(home.path(), "ranker", "xlm_roberta-rank", |_, _| ());
    let model = Model::open(&folder, &LoadOptions::default()).unwrap();
    let backend = Reference { kv: KvRounding::F32, poison: None };
    let engine = Engine::start(&backend, &model, EngineOptions::default()).unwrap();
    let of = |document: &str| {
        let prompt = model.encode_pair(QUERY, document, usize::MAX).unwrap();
        let pooling = model.pooling.clone().unwrap();
        let request = Request { max_tokens: Some(0), embedding: Some(pooling), ..Request::new(prompt) };
        let mut generation = engine.handle().generate(request).unwrap();
        while let Some(event) = generation.next_blocking() {
            if let Event::Embedding { values } = event {
                return f64::from(model.head.classifier.as_ref().unwrap().logits(&values)[0]);
            }
        }
        panic!("no embedding");
    };
    let folder = folder.to_str().unwrap();
    let input = DOCUMENTS.join("\n");
    let lines = run_with_input(&["rerank", folder, QUERY, "--json", "--raw-scores"], &input).json_lines();
    assert!(lines.len() == 4 && lines.iter().all(|line| line["file"] == Value::Null), "{lines:?}");
    for line in &lines {
        let expected = of(line["text"].as_str().unwrap());
        assert!((score_of(&line["score"]) - expected).abs() < 1e-2, "{expected}: {lines:?}");
    }
    assert!(lines.is_sorted_by(|a, b| score_of(&a["score"]) >= score_of(&b["score"])), "{lines:?}");
    let refused = run_with_input(&["rerank", folder, QUERY, "--instruction", "Find foxes"], "a\n");
    assert!(refused.code != Some(0) && refused.err.contains("--instruction"), "{}", refused.err);
}

/// A tokenizer with the tokens `around` each text, and letters and a few words, of the kind WordPiece or Unigram.
pub fn encoders_tokenizer(kind: &str) -> Value {
    const SIZE: usize = 301;
    let specials = match kind {
        "WordPiece" => ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
        _ => ["<pad>", "<unk>", "<s>", "</s>", "<mask>"],
    };
    let [_, unknown, first, last, mask] = specials;
    let mut names: Vec<String> = specials.map(str::to_owned).to_vec();
    let letters = ('a'..='z').chain('0'..='9').chain("éд你.,!?()'-".chars());
    for letter in letters {
        names.extend(match kind {
            "WordPiece" => [letter.to_string(), format!("##{letter}")],
            _ => [letter.to_string(), format!("▁{letter}")],
        });
    }
    let words: &[&str] = match kind {
        "WordPiece" => &["hello", "world", "##ing", "fox", "key"],
        _ => &["▁", "▁hello", "▁world", "ing", "▁fox", "▁key"],
    };
    names.extend(words.iter().map(|&word| word.to_owned()));
    let mut unused = 0..;
    names.resize_with(SIZE, || format!("unused{}", unused.next().unwrap()));
    let added = specials.iter().enumerate().map(|(id, name)| {
        json!({"id": id, "content": name, "special": true, "single_word": false, "lstrip": *name == "<mask>",
               "rstrip": false, "normalized": false})
    });
    let added: Vec<Value> = added.collect();
    let special = |name: &str, kind: u32| json!({"SpecialToken": {"id": name, "type_id": kind}});
    let text = |name: &str, kind: u32| json!({"Sequence": {"id": name, "type_id": kind}});
    let id_of = |name: &str| specials.iter().position(|other| *other == name);
    let tokens = [first, last]
        .map(|name| (name.to_owned(), json!({"id": name, "ids": [id_of(name)], "tokens": [name]})));
    let second = u32::from(kind == "WordPiece");
    let between = if second == 1 { vec![special(last, 0)] } else { vec![special(last, 0); 2] };
    let pair =
        [vec![special(first, 0), text("A", 0)], between, vec![text("B", second), special(last, second)]]
            .concat();
    let template = json!({
        "type": "TemplateProcessing", "single": [special(first, 0), text("A", 0), special(last, 0)], "pair": pair,
        "special_tokens": Map::from_iter(tokens),
    });
    if kind == "WordPiece" {
        let vocab: Map<_, _> = names.into_iter().enumerate().map(|(id, name)| (name, json!(id))).collect();
        return json!({
            "version": "1.0", "added_tokens": added, "post_processor": template,
            "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
                           "strip_accents": null, "lowercase": true},
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
            "model": {"type": "WordPiece", "unk_token": unknown, "continuing_subword_prefix": "##",
                      "max_input_chars_per_word": 100, "vocab": vocab},
        });
    }
    let score = |(id, name): (usize, String)| {
        json!([name, if id < 5 || name == mask { 0.0 } else { -1.0 - id as f64 / 64.0 }])
    };
    let vocab: Vec<Value> = names.into_iter().enumerate().map(score).collect();
    let metaspace =
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
    json!({
        "version": "1.0", "added_tokens": added, "normalizer": null, "post_processor": template, "decoder": metaspace,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]},
        "model": {"type": "Unigram", "unk_id": 1, "vocab": vocab, "byte_fallback": false},
    })
}

/// Tokens, limits, pooling and vectors of encoders are those of their folders after `paguro convert`.
#[test]
fn encoders_are_the_same_after_conversion() {
    let home = tempfile::tempdir().unwrap();
    for (case, kind) in [("bert", "WordPiece"), ("xlm_roberta", "Unigram")] {
        let folder =
            write_folder(home.path(), case, case, |_, tokenizer| *tokenizer = encoders_tokenizer(kind));
        fs::write(folder.join("sentence_bert_config.json"), r#"{"max_seq_length": 40}"#).unwrap();
        fs::write(folder.join("modules.json"), r#"[{"type": "sentence_transformers.models.Pooling"}]"#)
            .unwrap();
        fs::create_dir(folder.join("1_Pooling")).unwrap();
        fs::write(folder.join("1_Pooling/config.json"), r#"{"pooling_mode_cls_token": true}"#).unwrap();
        let file = home.path().join(format!("{case}.gguf"));
        let paths = [&folder, &file].map(|path| path.to_str().unwrap());
        run(&["convert", paths[0], paths[1]]).ok();
        let [model, converted] =
            [&folder, &file].map(|path| Model::open(path, &LoadOptions::default()).unwrap());
        assert_eq!((model.context_length, converted.context_length), (40, 40));
        assert_eq!(model.pooling, converted.pooling);
        for text in [
            "Hello World!",
            "  the  fox's KEY, é 你 \u{1F600} (walking)\n",
            "[CLS] <s> a",
            "hellohello дд",
            "",
        ] {
            for special in [SpecialTokens::AsText, SpecialTokens::Parse] {
                let encode = |model: &Model| model.tokenizer.encode_prompt(text, special);
                assert_eq!(encode(&model), encode(&converted), "{case}: {text:?}, {special:?}");
            }
            let pair = |model: &Model| model.encode_pair(text, "a key", 40);
            assert_eq!(pair(&model), pair(&converted), "{case}: {text:?}");
        }
        let input = "Hello World!\nthe fox\n";
        let vectors = paths.map(|path| {
            let lines = run_with_input(&["embed", path], input).json_lines();
            lines.into_iter().map(|line| line["embedding"].clone()).collect::<Vec<_>>()
        });
        assert_eq!(vectors[0], vectors[1], "{case}");
        let long = run_with_input(&["embed", paths[1]], &"fox ".repeat(60));
        assert!(long.code != Some(0) && long.err.contains("reads at most 40"), "{}", long.err);
    }
}

#[test]
fn prompts_and_formats_are_chosen_by_requests() {
    let home = tempfile::tempdir().unwrap();
    let folder = folder(home.path());
    let server = Server::start(&[folder.to_str().unwrap()]);
    let name = "Qwen3-Reranker-tiny";
    let embed = |input: &str, more: Value| {
        let mut body = json!({"model": name, "input": input});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post("/v1/embeddings", &body)
    };
    let vector = |input: &str, more: Value| embed(input, more).ok()["data"][0]["embedding"].clone();
    let (plain, prompted) = (vector("a fox", json!({})), vector("Q: a fox", json!({})));
    assert_ne!(plain, prompted);
    for (more, expected) in [
        (json!({"prompt_name": "query"}), &prompted),
        (json!({"input_type": "query"}), &prompted),
        (json!({"input_type": "search_query"}), &prompted),
        // Documents have no prompt in these files, and are embedded as they are.
        (json!({"input_type": "document"}), &plain),
        (json!({"prompt_name": "clustering"}), &plain),
    ] {
        assert_eq!(vector("a fox", more.clone()), *expected, "{more}");
    }
    let invalid = "400 invalid_request_error/invalid_value ";
    for (more, words) in [
        (json!({"prompt_name": "passage"}), "this model has `query`, `clustering`"),
        (json!({"prompt_name": "query", "input_type": "query"}), "both select a prompt"),
        (json!({"truncate": "middle"}), "`truncate`"),
        (json!({"truncate_prompt_tokens": 5000}), "`truncate_prompt_tokens` is 5000"),
        (json!({"truncate_prompt_tokens": 0}), "`truncate_prompt_tokens` is 0"),
        (json!({"encoding_format": "int8", "embedding_type": "binary"}), "differ"),
        (json!({"late_chunking": true}), "`late_chunking`"),
    ] {
        let error = embed("a fox", more.clone()).error();
        assert!(error.starts_with(invalid) && error.contains(words), "{more}: {error}");
    }
    let tales = json!({"model": "tales", "input": "a", "prompt_name": "query"});
    let error = server.post("/v1/embeddings", &tales).error();
    assert!(error.contains("the files of this model define no prompts"), "{error}");

    // Integers follow from the floats.
    let floats: Vec<f64> = plain.as_array().unwrap().iter().map(score_of).collect();
    let largest = floats.iter().fold(0f64, |largest, value| largest.max(value.abs()));
    let int8 = vector("a fox", json!({"encoding_format": "int8"}));
    for (value, float) in int8.as_array().unwrap().iter().zip(&floats) {
        assert!((score_of(value) - 127.0 * float / largest).abs() <= 0.501);
    }
    let bits = vector("a fox", json!({"embedding_type": "ubinary"}));
    let first = floats[..8].iter().fold(0, |byte, &value| byte << 1 | i64::from(value > 0.0));
    assert_eq!((bits.as_array().unwrap().len(), bits[0].as_i64()), (floats.len() / 8, Some(first)));

    // The forms of Cohere and TEI.
    let cohere = json!({"model": name, "texts": ["a fox"], "input_type": "search_query", "embedding_types": ["float", "binary"]});
    let cohere = server.post("/v2/embed", &cohere).ok();
    assert_eq!(cohere["embeddings"]["float"][0], prompted);
    assert_eq!(cohere["embeddings"]["binary"][0].as_array().unwrap().len(), floats.len() / 8);
    let cohere = server.post("/v1/embed", &json!({"model": name, "texts": ["a fox"]})).ok();
    assert_eq!(cohere["embeddings"][0], plain);
    let tei = server.post("/embed", &json!({"inputs": ["a fox"], "prompt_name": "query"})).ok();
    assert_eq!(tei[0], prompted);
    let compared = json!({"inputs": {"source_sentence": "a fox", "sentences": ["a fox", "Q: a fox"]}});
    let compared = server.post("/similarity", &compared).ok();
    assert!((score_of(&compared[0]) - 1.0).abs() < 1e-5 && score_of(&compared[1]) < 0.999);
    let cosines = json!({"model": "tales", "text_1": "a fox", "text_2": ["a fox", "the sea"]});
    let cosines = server.post("/v1/score", &cosines).ok();
    assert!((score_of(&cosines["data"][0]["score"]) - 1.0).abs() < 1e-5);

    // Errors name the text, and cutting is a choice.
    let long = "word ".repeat(400);
    let body = |more: Value| {
        let mut body = json!({"model": name, "input": ["a", long]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let error = server.post("/v1/embeddings", &body(json!({}))).error();
    assert!(
        error.starts_with("400 invalid_request_error/context_length_exceeded ")
            && error.contains("`input[1]` has 2000 tokens")
            && error.contains("1024"),
        "{error}"
    );
    let error = server.post("/v1/embeddings", &body(json!({"input": [[1], [1, 999]]}))).error();
    assert!(error.contains("`input[1]`") && error.contains("999"), "{error}");
    let cut = |more: Value| {
        let answer = server.post("/v1/embeddings", &body(more)).ok();
        (answer["data"][1]["embedding"].clone(), answer["usage"]["total_tokens"].as_u64().unwrap())
    };
    let (end, tokens) = cut(json!({"truncate_prompt_tokens": 8}));
    assert_eq!((&end, tokens), (&vector("word wor", json!({})), 9));
    let (start, _) = cut(json!({"truncate_prompt_tokens": 7, "truncation_side": "left"}));
    assert_eq!(start, vector("d word ", json!({})));
    assert_eq!(cut(json!({"truncate": true})).1, 1025);
    let error = server.post("/v1/embeddings", &json!({"model": name, "input": vec!["a"; 100_001]})).error();
    assert!(error.contains("`input` has 100001 elements"), "{error}");
}

/// The logits of a classifier by the naive reference.
fn logits(model: &Model, engine: &Engine, tokens: Vec<u32>) -> Vec<f64> {
    let pooling = model.pooling.clone().unwrap();
    let request = Request { embedding: Some(pooling), max_tokens: Some(0), ..Request::new(tokens) };
    let mut generation = engine.handle().generate(request).unwrap();
    while let Some(event) = generation.next_blocking() {
        if let Event::Embedding { values } = event {
            let logits = model.head.classifier.as_ref().unwrap().logits(&values);
            return logits.into_iter().map(f64::from).collect();
        }
    }
    panic!("no embedding");
}

#[test]
fn classifiers_score_labels_as_the_reference_in_every_form() {
    let home = tempfile::tempdir().unwrap();
    let labels = ["calm", "glad", "sad"];
    let folder = write_folder(home.path(), "moods", "bert-classes", |config, _| {
        config["id2label"] = json!({"0": labels[0], "1": labels[1], "2": labels[2]});
    });
    let server = Server::start(&[folder.to_str().unwrap()]);
    let model = Model::open(&folder, &LoadOptions::default()).unwrap();
    let backend = Reference { kv: KvRounding::F32, poison: None };
    let engine = Engine::start(&backend, &model, EngineOptions::default()).unwrap();
    let softmax = |logits: &[f64]| {
        let total: f64 = logits.iter().map(|logit| logit.exp()).sum();
        logits.iter().map(|logit| logit.exp() / total).collect::<Vec<_>>()
    };
    let close = |found: &Value, expected: &[f64]| {
        let found: Vec<f64> = found.as_array().unwrap().iter().map(score_of).collect();
        let near = found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-3);
        assert!(found.len() == expected.len() && near, "{found:?} {expected:?}");
    };
    let texts = ["A fox lost its key in the wood", "It rains", "é日本🦊 the sea"];
    let of = |text: &str| logits(&model, &engine, model.tokenizer.encode_prompt(text, SpecialTokens::Parse));
    let all: Vec<_> = texts.iter().map(|text| of(text)).collect();
    let best = |logits: &[f64]| {
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        order
    };

    let answer = server.post("/v1/classify", &json!({"model": "moods", "input": texts})).ok();
    assert_eq!((&answer["object"], &answer["model"]), (&json!("list"), &json!("moods")));
    for (index, logits) in all.iter().enumerate() {
        let result = &answer["data"][index];
        close(&result["probs"], &softmax(logits));
        assert_eq!((&result["index"], &result["num_classes"]), (&json!(index), &json!(3)));
        assert_eq!(result["label"], labels[best(logits)[0]]);
    }
    let raw = json!({"input": texts[1], "use_activation": false});
    close(&server.post("/classify", &raw).ok()["data"][0]["probs"], &all[1]);

    // TEI sorts labels by score, and reads two texts as a pair.
    let predictions = |found: &Value, scores: &[f64]| {
        let expected = best(scores);
        for (prediction, &label) in found.as_array().unwrap().iter().zip(&expected) {
            assert_eq!(prediction["label"], labels[label], "{found} {scores:?}");
            assert!((score_of(&prediction["score"]) - scores[label]).abs() < 1e-3, "{found} {scores:?}");
        }
        assert_eq!(found.as_array().unwrap().len(), 3);
    };
    let predict = |body: Value| server.post("/predict", &body).ok();
    predictions(&predict(json!({"inputs": texts[0]})), &softmax(&all[0]));
    let pair = logits(&model, &engine, model.encode_pair(texts[0], texts[1], usize::MAX).unwrap());
    predictions(&predict(json!({"inputs": [texts[0], texts[1]], "raw_scores": true})), &pair);
    let many = predict(json!({"inputs": [[texts[2]], [texts[0], texts[1]]]}));
    predictions(&many[0], &softmax(&all[2]));
    predictions(&many[1], &softmax(&pair));

    let long = "word ".repeat(400);
    for (path, body, words) in [
        ("/v1/classify", json!({"input": []}), "`input` is an empty list"),
        ("/v1/classify", json!({"input": ["a", ""]}), "`input[1]` is an empty text"),
        ("/v1/classify", json!({"input": ["a", long]}), "`input[1]` has"),
        ("/v1/classify", json!({"input": "a", "model": "tales"}), "`tales` has no classifier"),
        ("/predict", json!({"inputs": [["a"], ["a", "b", "c"]]}), "`inputs[1]` is a list of 3 texts"),
        ("/predict", json!({"inputs": [["a"], ["a", long]]}), "`inputs[1]` has"),
        ("/predict", json!({"inputs": ["a", long], "truncate": "START"}), "cuts the ends of pairs"),
        ("/v1/rerank", json!({"query": "a", "documents": ["b"]}), "`moods` is not a reranker"),
        (
            "/v1/chat/completions",
            json!({"model": "moods", "messages": [{"role": "user", "content": "a"}]}),
            "the model is an encoder",
        ),
    ] {
        let error = server.post(path, &body).error();
        assert!(error.starts_with("400 ") && error.contains(words), "{path} {words}: {error}");
    }
    for command in ["run", "bench"] {
        let ran = run(&[command, folder.to_str().unwrap()]);
        assert!(ran.code != Some(0) && ran.err.contains("`moods` is an encoder"), "{command}: {}", ran.err);
    }
    let cut = predict(json!({"inputs": ["a", long], "truncate": true}));
    assert!((0.0..=1.0).contains(&score_of(&cut[2]["score"])), "{cut}");
}
