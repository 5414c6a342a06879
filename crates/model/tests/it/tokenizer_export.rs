//! Tokenizers of folders as those of GGUF files: the same tokens, or a refusal that names the part.

use std::{fs, sync::Arc};

use paguro_model::{
    LoadOptions, ModelFile,
    gguf::{Gguf, Metadata, Value as Key},
    tokenizer::{SpecialTokens, Tokenizer},
};
use serde_json::{Value, json};

use crate::{
    shared,
    tiny::models::{self, VOCAB},
};

/// Texts on which normalization has an effect, or nearly one.
const TEXTS: &[&str] = &[
    "plain text, with 12 numbers",
    "e\u{301}a\u{308}o\u{302}\u{323} cafe\u{301}",
    "\u{212b}ngstr\u{f6}m A\u{30a} \u{c5} \u{2126} \u{37e}",
    "\u{1112}\u{1161}\u{11ab}\u{1100}\u{1173}\u{11af} 한글 \u{1100}\u{ac00}\u{11a8}",
    "q\u{307}\u{323} q\u{323}\u{307} \u{958} \u{915}\u{93c} \u{fb1d} \u{1d15e}",
    "\u{301}starts with a mark",
    "<think>\u{338} <|mark|>e\u{301}<|mark|>\u{338} <|end|>\u{301}",
    "  \u{301}  \u{2000}  \u{3000}\n\u{301}\n",
    "\u{fb01}ne \u{ff21}\u{ff22} \u{2460} \u{33ce} \u{1e9b}\u{323} \u{bd}",
    "Cafe\u{301} Caf\u{e9}x caf\u{e9}",
];

/// A tokenizer of bytes with some tokens that are added.
fn bytes(normalizer: Value) -> Value {
    let printable = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut others = 256..;
    let letters = (0..256).map(|byte| if printable(byte) { byte } else { others.next().unwrap() });
    let names = ["<unk>", "<s>", "</s>", "<|end|>"].map(str::to_owned).into_iter();
    let names = names.chain(letters.map(|char| char::from_u32(char).unwrap().to_string()));
    let mut names: Vec<String> =
        names.chain(["<think>", "<|mark|>", "Cafe\u{301}", "Ã©", "Cafe"].map(str::to_owned)).collect();
    names.extend((names.len()..VOCAB).map(|id| format!("piece {id}")));
    let id = |name: &str| names.iter().position(|it| it == name).unwrap();
    let added = |name: &str, special: bool, normalized: bool| {
        json!({"id": id(name), "content": name, "special": special, "single_word": false, "lstrip": false,
               "rstrip": false, "normalized": normalized})
    };
    let added = [
        added("<unk>", true, false),
        added("<s>", true, false),
        added("</s>", true, false),
        added("<|end|>", true, false),
        added("<think>", false, false),
        added("<|mark|>", false, true),
        added("Cafe\u{301}", false, true),
    ];
    let vocab: serde_json::Map<_, _> =
        names.iter().enumerate().map(|(id, name)| (name.clone(), json!(id))).collect();
    let level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    json!({
        "version": "1.0", "added_tokens": added, "normalizer": normalizer, "pre_tokenizer": level, "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": [["Ã", "©"]]},
    })
}

/// Puts tokens around each text.
fn around(tokenizer: &mut Value, before: &[&str], after: &[&str]) {
    let special = |name: &&str| json!({"SpecialToken": {"id": name, "type_id": 0}});
    let text = json!({"Sequence": {"id": "A", "type_id": 0}});
    let single: Vec<Value> =
        before.iter().map(special).chain([text]).chain(after.iter().map(special)).collect();
    let ids = tokenizer["model"]["vocab"].clone();
    let tokens: serde_json::Map<_, _> = before
        .iter()
        .chain(after)
        .map(|name| ((*name).to_owned(), json!({"id": name, "ids": [ids[*name]], "tokens": [name]})))
        .collect();
    tokenizer["post_processor"] = json!({"type": "TemplateProcessing", "single": single, "pair": [{"Sequence": {"id": "A", "type_id": 0}},
               {"Sequence": {"id": "B", "type_id": 1}}], "special_tokens": tokens});
}

/// Returns the tokenizers of a folder and of its file, the notes, and the keys of the file.
fn convert(
    tokenizer: &Value,
    config: &Value,
) -> Result<(Tokenizer, Tokenizer, Vec<String>, Metadata), String> {
    let folder = tempfile::tempdir().unwrap();
    let model = models::all().into_iter().find(|model| model.name == "qwen3").unwrap();
    model.write_hf(folder.path());
    fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    let file = ModelFile::open(folder.path()).unwrap();
    let contents = file.contents().map_err(|error| error.to_string())?;
    let notes = file.differences_in_llama_cpp(&contents).unwrap();
    let written = ModelFile::from_bytes("converted", Arc::new(contents.write(Vec::new()).unwrap())).unwrap();
    let stops = |file: &ModelFile| file.load(&LoadOptions::default()).unwrap().stop_tokens;
    assert_eq!(stops(&file), stops(&written));
    Ok((file.tokenizer().unwrap(), written.tokenizer().unwrap(), notes, contents.metadata))
}

#[track_caller]
fn check_same(folder: &Tokenizer, file: &Tokenizer, texts: impl Iterator<Item = String>) {
    for text in texts {
        for special in [SpecialTokens::AsText, SpecialTokens::Parse] {
            assert_eq!(
                folder.encode_prompt(&text, special),
                file.encode_prompt(&text, special),
                "{text:?}, {special:?}"
            );
        }
    }
}

fn texts() -> impl Iterator<Item = String> {
    TEXTS.iter().map(|text| (*text).to_owned())
}

/// Random texts of characters that compose, are composed, or stand beside such.
fn random_texts(count: u64) -> impl Iterator<Item = String> {
    let ranges: [(u32, u32); 14] = [
        (0x20, 0x7e),
        (0xc0, 0x17f),
        (0x300, 0x36f),
        (0x300, 0x345),
        (0x370, 0x3ff),
        (0x591, 0x5f4),
        (0x900, 0x97f),
        (0x9be, 0x9dc),
        (0x1100, 0x11ff),
        (0xac00, 0xd7a3),
        (0x1e00, 0x1fff),
        (0x2000, 0x212b),
        (0x3040, 0x30ff),
        (0xf900, 0xfb4f),
    ];
    let mut state = 1u64;
    let mut random = move |below: u64| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) % below
    };
    (0..count).map(move |_| {
        let length = 1 + random(40);
        let mut character = || {
            let (first, last) = ranges[random(ranges.len() as u64) as usize];
            char::from_u32(first + random(u64::from(last - first + 1)) as u32).unwrap_or('x')
        };
        (0..length).map(|_| character()).collect()
    })
}

#[test]
fn a_file_normalizes_texts_as_its_folder_does() {
    let sequence = |inner: Value| json!({"type": "Sequence", "normalizers": inner});
    let cases = [
        (Value::Null, None),
        (sequence(json!([])), None),
        (json!({"type": "NFC"}), Some("NFC")),
        (json!({"type": "NFD"}), Some("NFD")),
        (json!({"type": "NFKC"}), Some("NFKC")),
        (sequence(json!([{"type": "NFKD"}])), Some("NFKD")),
    ];
    for (normalizer, form) in cases {
        let (folder, file, notes, _) = convert(&bytes(normalizer), &json!({"eos_token": "</s>"})).unwrap();
        check_same(&folder, &file, texts().chain(random_texts(100)));
        match form {
            None => assert!(notes.is_empty(), "{notes:?}"),
            Some(form) => assert!(notes.len() == 1 && notes[0].ends_with(form), "{notes:?}"),
        }
    }
}

/// The vocabulary of Qwen with the normalizer of its `tokenizer.json`, and files that do and do not say so.
#[test]
fn files_of_qwen_compose_characters() {
    let Some(folder) = shared::folder("vocabs") else { return };
    let gguf = Gguf::open(&folder.join("ggml-vocab-qwen2.gguf")).unwrap();
    let mut metadata = gguf.metadata.clone();
    let composed = Tokenizer::from_gguf(&metadata).unwrap();
    metadata.set("paguro.tokenizer.normalizer", Key::String("none".to_owned()));
    let plain = Tokenizer::from_gguf(&metadata).unwrap();
    let encode = |of: &Tokenizer, text: &str| of.encode(text, SpecialTokens::Parse);
    for (text, normal) in [
        ("cafe\u{301} \u{212b} \u{1112}\u{1161}\u{11ab}", "caf\u{e9} \u{c5} \u{d55c}"),
        ("<|im_start|>e\u{301}<|im_end|>\u{338}", "<|im_start|>\u{e9}<|im_end|>\u{338}"),
    ] {
        assert_ne!(encode(&plain, text), encode(&plain, normal));
        assert_eq!(encode(&composed, text), encode(&plain, normal));
        assert_eq!(encode(&composed, normal), encode(&plain, normal));
    }
}

#[test]
fn tokens_around_a_text_survive() {
    let cases: [(&[&str], &[&str], Value); 6] = [
        // Qwen3-Embedding: the last token is not EOS.
        (&[], &["<|end|>"], json!({"eos_token": "</s>"})),
        (&["<s>"], &[], json!({"bos_token": "<s>", "eos_token": "</s>"})),
        (&["<|end|>"], &[], json!({"bos_token": "<s>", "eos_token": "</s>"})),
        (&["<|end|>", "<s>"], &[], json!({"bos_token": "<s>", "eos_token": "</s>"})),
        (&["<s>"], &["<|end|>", "</s>"], json!({"bos_token": "<s>", "eos_token": "</s>"})),
        (&["<s>"], &["</s>"], json!({})),
    ];
    for (before, after, config) in cases {
        let mut json = bytes(json!({"type": "NFC"}));
        around(&mut json, before, after);
        let (folder, file, notes, written) = convert(&json, &config).unwrap();
        check_same(&folder, &file, texts());
        assert_eq!(folder.encode_prompt("a", SpecialTokens::AsText).len(), 1 + before.len() + after.len());
        for (own, read) in [(folder.bos(), file.bos()), (folder.eos(), file.eos())] {
            assert!(own.is_none() || own == read, "{own:?}, {read:?}");
        }
        let has_list = before.len().max(after.len()) > 1;
        assert_eq!(notes.len(), 1 + usize::from(has_list), "{notes:?}");
        // llama.cpp reads these.
        if let Some(last) = after.last() {
            assert_eq!(written.u32("tokenizer.ggml.eos_token_id"), folder.token_id(last));
        }
    }
}

#[test]
fn normalizers_without_a_key_are_refused_by_name() {
    let replace = json!({"type": "Replace", "pattern": {"String": "colour"}, "content": "color"});
    let sequence = |inner: Value| json!({"type": "Sequence", "normalizers": inner});
    for (normalizer, name) in [
        (json!({"type": "Lowercase"}), "Lowercase"),
        (replace.clone(), "colour"),
        (sequence(json!([{"type": "NFC"}, replace])), "colour"),
        (sequence(json!([{"type": "NFD"}, {"type": "StripAccents"}])), "StripAccents"),
        (sequence(json!([{"type": "NFD"}, {"type": "NFC"}])), "NFC"),
    ] {
        let error = convert(&bytes(normalizer), &json!({})).err().unwrap();
        assert!(error.contains(name) && error.contains("normalizer"), "{error}");
    }
}

/// A Unigram tokenizer with these steps, as transformers converts those of SentencePiece.
fn unigram(normalizers: Value, pre: Value) -> Value {
    let added = ["<s>", "<pad>", "</s>", "<unk>"].iter().enumerate().map(|(id, name)| {
        json!({"id": id, "content": name, "special": true, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false})
    });
    let mut pieces: Vec<Value> = ["<s>", "<pad>", "</s>", "<unk>"].map(|name| json!([name, 0.0])).to_vec();
    pieces.extend(
        ["\u{2581}", "\u{2581}a", "bb", "Hello", "llo", "\u{2581}\u{2581}"].map(|name| json!([name, -2.0])),
    );
    pieces.extend(('a'..='z').map(|c| json!([c.to_string(), -9.0])));
    let special = |name: &str| json!({"SpecialToken": {"id": name, "type_id": 0}});
    let text = |name: &str| json!({"Sequence": {"id": name, "type_id": 0}});
    let token = |name: &str, id: u32| json!({"id": name, "ids": [id], "tokens": [name]});
    json!({
        "version": "1.0", "added_tokens": added.collect::<Vec<_>>(),
        "normalizer": {"type": "Sequence", "normalizers": normalizers}, "pre_tokenizer": pre,
        "post_processor": {"type": "TemplateProcessing", "single": [special("<s>"), text("A"), special("</s>")],
            "pair": [special("<s>"), text("A"), special("</s>"), special("</s>"), text("B"), special("</s>")],
            "special_tokens": {"<s>": token("<s>", 0), "</s>": token("</s>", 2)}},
        "decoder": {"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": true},
        "model": {"type": "Unigram", "unk_id": 3, "vocab": pieces, "byte_fallback": false},
    })
}

#[test]
fn unigrams_treat_spaces_as_their_folders_do() {
    let metaspace =
        json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": true});
    let splits = json!({"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]});
    let collapse = json!({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "});
    for (normalizers, pre, notes) in [
        (json!([collapse]), metaspace.clone(), 1),
        (json!([]), metaspace.clone(), 0),
        (json!([collapse]), splits.clone(), 0),
        (json!([]), splits, 0),
    ] {
        let (folder, file, found, _) =
            convert(&unigram(normalizers, pre), &json!({"unk_token": "<unk>"})).unwrap();
        let texts = ["a  b", "  a b  ", "ab ", " ", "", "Hello  \n a\t\tb", "a b c"].map(str::to_owned);
        check_same(&folder, &file, texts.into_iter().chain(random_texts(50)));
        assert_eq!(found.len(), notes, "{found:?}");
    }
    let lower = json!([{"type": "Lowercase"}]);
    let error = convert(&unigram(lower, metaspace), &json!({})).err().unwrap();
    assert!(error.contains("Lowercase"), "{error}");
}
