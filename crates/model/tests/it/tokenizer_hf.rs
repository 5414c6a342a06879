//! Tokenizers from `tokenizer.json`.

use std::{fs, sync::Arc};

use paguro_model::{
    gguf::Gguf,
    tokenizer::{SpecialText, SpecialTokens, Tokenizer},
};
use serde_json::json;

use SpecialTokens::{AsText, Parse};

use crate::{
    shared,
    tokenizer::{check, check_stream},
};

fn hf(
    normalizer: serde_json::Value,
    pre: serde_json::Value,
    decoder: serde_json::Value,
) -> serde_json::Value {
    let added = |id: u32, content: &str, special: bool| json!({"id": id, "content": content, "special": special, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false});
    json!({
        "version": "1.0", "truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}, "padding": null,
        "added_tokens": [added(0, "<s>", true), added(1, "</s>", true), added(13, "<tool>", false)],
        "normalizer": normalizer, "pre_tokenizer": pre, "decoder": decoder,
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": false, "byte_fallback": true, "ignore_merges": false,
            "vocab": {"<s>": 0, "</s>": 1, "▁": 2, "a": 3, "b": 4, "▁a": 5, "<0xC3>": 6, "<0xA9>": 7, "<": 8, "s": 10, ">": 11, "/": 12, "ab": 9},
            "merges": [["▁", "a"], ["a", "b"]]}
    })
}

fn spm_like() -> serde_json::Value {
    hf(
        json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]}),
        json!(null),
        json!({"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}),
    )
}

#[test]
fn hugging_face_files_encode_and_decode() {
    let json = spm_like().to_string();
    let config = json!({"bos_token": {"content": "<s>"}, "eos_token": "</s>"}).to_string();
    let tokenizer = Arc::new(Tokenizer::from_hf(json.as_bytes(), Some(config.as_bytes())).unwrap());
    assert_eq!((tokenizer.bos(), tokenizer.eos(), tokenizer.vocab_size()), (Some(0), Some(1), 14));
    assert_eq!(tokenizer.stop_tokens(), [1]);
    // Longer than the file's own limit, which is for training.
    check(&tokenizer, "ab a é", AsText, "▁a b ▁a ▁ <0xC3> <0xA9>");
    check(&tokenizer, "<s>a<tool>", Parse, "<s> ▁a <tool>");
    check(&tokenizer, "</s><tool>", AsText, "▁ < / s > <tool>");
    let ids = tokenizer.encode_prompt("<s>ab é", Parse);
    assert_eq!(ids, tokenizer.encode_prompt("ab é", Parse));
    assert_eq!(tokenizer.decode(&ids, SpecialText::Hide), "ab é");
    assert_eq!(tokenizer.decode(&ids, SpecialText::Show), "<s> ab é");
    check_stream(&tokenizer, &ids);
    assert!(tokenizer.is_special(1) && !tokenizer.is_special(13));
}

#[test]
fn tokenizer_config_decides_what_is_added() {
    let json = spm_like().to_string();
    let prompt = |config: serde_json::Value| {
        let tokenizer = Tokenizer::from_hf(json.as_bytes(), Some(config.to_string().as_bytes())).unwrap();
        tokenizer.encode_prompt("a", Parse)
    };
    let tokens = |bos: bool, eos: bool| json!({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": bos, "add_eos_token": eos});
    assert_eq!(prompt(json!({})), [0, 5]);
    assert_eq!(prompt(tokens(true, false)), [0, 5]);
    assert_eq!(prompt(tokens(false, false)), [5]);
    assert_eq!(prompt(tokens(true, true)), [0, 5, 1]);
}

#[test]
fn hugging_face_files_that_cannot_be_read_say_why() {
    let error = |json: &str, config: Option<&[u8]>| {
        Tokenizer::from_hf(json.as_bytes(), config).unwrap_err().to_string()
    };
    assert!(error("{", None).starts_with("tokenizer.json: "));
    assert!(error(&spm_like().to_string(), Some(b"[")).starts_with("tokenizer_config.json: "));
    let ctc = json!({"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": true});
    assert!(
        error(&hf(json!(null), json!(null), ctc).to_string(), None)
            .starts_with("tokenizer.json: decoder `CTC` is not supported (supported: ByteLevel")
    );
    assert!(error(&hf(json!(null), json!(null), json!(null)).to_string(), None).contains("decoder `none`"));
}

#[test]
fn long_inputs_do_not_hang_hugging_face_files() {
    let pattern =
        r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    let split =
        json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
    let bytes =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let mut json = hf(json!(null), json!({"type": "Sequence", "pretokenizers": [split, bytes]}), bytes);
    json["model"]["vocab"] = json!({"<s>": 0, "</s>": 1, "a": 2, "Ġ": 3, "aa": 4, "ĠĠ": 5, ".": 6, "1": 7, "Ċ": 8, "'": 9, "<": 10});
    json["model"]["merges"] = json!([["a", "a"], ["Ġ", "Ġ"]]);
    json["added_tokens"].as_array_mut().unwrap().truncate(2);
    let tokenizer = Tokenizer::from_hf(json.to_string().as_bytes(), None).unwrap();
    for unit in ["a", " ", ".", "1", "\n", " \n", "'", "<", "a "] {
        let text = unit.repeat((1 << 20) / unit.len());
        for special in [Parse, AsText] {
            let ids = tokenizer.encode(&text, special);
            assert!(tokenizer.decode(&ids, SpecialText::Hide) == text, "{unit:?}, {special:?}");
        }
    }
}

/// The same vocabulary as GGUF and as `tokenizer.json`.
#[test]
fn both_files_of_one_model_agree() {
    let Some(folder) = shared::folder("model") else { return };
    let gguf = Gguf::open(&folder.join("tales-f16.gguf")).unwrap();
    let from_gguf = Tokenizer::from_gguf(&gguf.metadata).unwrap();
    let read = |name: &str| fs::read(folder.join(name)).unwrap();
    let from_hf =
        Tokenizer::from_hf(&read("hf/tokenizer.json"), Some(&read("hf/tokenizer_config.json"))).unwrap();
    assert_eq!(from_gguf.vocab_size(), from_hf.vocab_size());
    assert_eq!((from_gguf.bos(), from_gguf.eos()), (from_hf.bos(), from_hf.eos()));
    assert_eq!(from_gguf.stop_tokens(), from_hf.stop_tokens());
    for id in 0..from_gguf.vocab_size() as u32 {
        assert_eq!(from_gguf.token_bytes(id), from_hf.token_bytes(id), "token {id}");
        assert_eq!(from_gguf.is_special(id), from_hf.is_special(id), "token {id}");
    }
    let text = String::from_utf8(read("heldout.txt")).unwrap();
    for line in text.lines().chain([text.as_str(), "é 你好 🙂\n\n  x\t<|end|>1234 it's"]) {
        for special in [Parse, AsText] {
            let ids = from_gguf.encode(line, special);
            assert_eq!(ids, from_hf.encode(line, special), "{line:?}");
            assert_eq!(from_gguf.decode(&ids, SpecialText::Show), line);
        }
    }
    let reference: serde_json::Value = serde_json::from_slice(&read("reference.json")).unwrap();
    for run in reference["runs"].as_array().unwrap() {
        let expected: Vec<u32> =
            run["prompt_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
        for tokenizer in [&from_gguf, &from_hf] {
            assert_eq!(tokenizer.encode_prompt(run["prompt"].as_str().unwrap(), Parse), expected);
        }
    }
}
