//! Tokenizers made for the purpose, from GGUF metadata.

use std::{fs, sync::Arc};

use paguro_model::{
    gguf::{Array, Gguf, Metadata, Value},
    tokenizer::{SpecialText, SpecialTokens, Tokenizer},
};
use proptest::prelude::*;

const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const BYTE: i32 = 6;

/// A vocabulary, token by token: name, type, score.
type Tokens = Vec<(String, i32, f32)>;

fn token(name: &str, kind: i32) -> (String, i32, f32) {
    (name.to_owned(), kind, 0.0)
}

fn metadata(model: &str, tokens: &Tokens, more: Vec<(&str, Value)>) -> Metadata {
    let mut metadata = Metadata::default();
    let mut insert =
        |key: &str, value| assert!(metadata.insert(format!("tokenizer.ggml.{key}"), value), "{key} twice");
    insert("model", Value::String(model.into()));
    insert("tokens", Value::Array(Array::Strings(tokens.iter().map(|(name, ..)| name.clone()).collect())));
    insert("token_type", Value::Array(Array::I32(tokens.iter().map(|&(_, kind, _)| kind).collect())));
    insert("scores", Value::Array(Array::F32(tokens.iter().map(|&(.., score)| score).collect())));
    more.into_iter().for_each(|(key, value)| insert(key, value));
    metadata
}

/// `<unk> <s> </s>`, all bytes, and some pieces; longer pieces have better scores.
fn spm_tokens() -> Tokens {
    let mut tokens = vec![token("<unk>", UNKNOWN), token("<s>", CONTROL), token("</s>", CONTROL)];
    tokens.extend((0..=255).map(|byte| token(&format!("<0x{byte:02X}>"), BYTE)));
    let pieces = ["▁", "a", "b", "c", "é", "▁a", "ab", "▁ab", "abc", "▁▁", "c▁", "<", "s", ">", "<s", "s>"];
    tokens.extend(
        pieces.iter().map(|piece| ((*piece).to_owned(), NORMAL, piece.chars().count() as f32 - 10.0)),
    );
    tokens.extend([token("<tool>", USER_DEFINED), token("<|im_end|>", NORMAL)]);
    tokens
}

fn spm(more: Vec<(&str, Value)>) -> Tokenizer {
    Tokenizer::from_gguf(&metadata("llama", &spm_tokens(), more)).unwrap()
}

/// All bytes, some merges, and a control token; pre-tokenized as GPT-2 does.
fn byte_level(more: Vec<(&str, Value)>) -> Tokenizer {
    // Printable bytes stand for themselves, the others for U+0100 and up, as in GPT-2's table.
    let printable = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut next = 0x100;
    let mut name = |byte: u32| {
        let code = if printable(byte) { byte } else { next };
        next += u32::from(!printable(byte));
        char::from_u32(code).unwrap().to_string()
    };
    let mut tokens: Tokens = (0..256).map(|byte| token(&name(byte), NORMAL)).collect();
    let merges = ["Ġ a", "a b", "Ġa b", "ab c", "Ã ©", "1 2"];
    tokens.extend(merges.iter().map(|merge| token(&merge.replace(' ', ""), NORMAL)));
    tokens.extend([token("<|end|>", CONTROL), token("<|begin|>", CONTROL), token("  ", USER_DEFINED)]);
    let merges = Value::Array(Array::Strings(merges.iter().map(|merge| (*merge).to_owned()).collect()));
    let mut all = vec![("merges", merges), ("pre", Value::String("gpt-2".into()))];
    all.extend(more);
    Tokenizer::from_gguf(&metadata("gpt2", &tokens, all)).unwrap()
}

fn names(tokenizer: &Tokenizer, ids: &[u32]) -> String {
    ids.iter().map(|&id| tokenizer.token_name(id).into_owned()).collect::<Vec<_>>().join(" ")
}

#[track_caller]
pub fn check(tokenizer: &Tokenizer, text: &str, special: SpecialTokens, expected: &str) {
    assert_eq!(names(tokenizer, &tokenizer.encode(text, special)), expected, "{text:?}, {special:?}");
}

use SpecialTokens::{AsText, Parse};

use crate::shared;

#[test]
fn sentencepiece_merges_the_best_score_first() {
    let tokenizer = spm(vec![]);
    check(&tokenizer, "ab", AsText, "▁ab");
    check(&tokenizer, "abc", AsText, "▁ab c");
    check(&tokenizer, "xabc", AsText, "▁ <0x78> abc");
    check(&tokenizer, "a  b", AsText, "▁a ▁▁ b");
    check(&tokenizer, "c a", AsText, "▁ c▁ a");
    check(&tokenizer, "é你", AsText, "▁ é <0xE4> <0xBD> <0xA0>");
    check(&tokenizer, "", AsText, "");
    assert_eq!(tokenizer.decode(&tokenizer.encode("abc é 你\n", AsText), SpecialText::Hide), "abc é 你\n");
}

#[test]
fn sentencepiece_prefixes_a_space_after_special_tokens() {
    let tokenizer = spm(vec![]);
    check(&tokenizer, "a<s>a", Parse, "▁a <s> ▁a");
    check(&tokenizer, "a<tool>a", AsText, "▁a <tool> ▁a");
    let tokenizer = spm(vec![("add_space_prefix", Value::Bool(false))]);
    check(&tokenizer, "a<s>a", Parse, "a <s> a");
    assert_eq!(tokenizer.decode(&tokenizer.encode(" a", AsText), SpecialText::Hide), " a");
}

#[test]
fn control_tokens_are_parsed_only_where_asked() {
    let tokenizer = spm(vec![]);
    // Not even merging makes one: `<s` and `s>` are pieces here.
    check(&tokenizer, "<s>", AsText, "▁ <s >");
    check(&tokenizer, "<s></s>", Parse, "<s> </s>");
    check(&tokenizer, "<0x41>", Parse, "▁ < <0x30> <0x78> <0x34> <0x31> >");
    // Known by its name, though the file calls it text.
    assert!(tokenizer.is_special(tokenizer.token_id("<|im_end|>").unwrap()));
    check(&tokenizer, "<|im_end|>", Parse, "<|im_end|>");
    let tokenizer = byte_level(vec![]);
    check(&tokenizer, "<|end|>", AsText, "< | e n d | >");
    check(&tokenizer, "ab<|end|> ab", Parse, "ab <|end|> Ġab");
    check(&tokenizer, "a   b", AsText, "a    Ġ b");
}

#[test]
fn prompts_begin_and_end_as_the_file_says() {
    let prompt = |tokenizer: &Tokenizer, text| names(tokenizer, &tokenizer.encode_prompt(text, Parse));
    let tokenizer = spm(vec![]);
    assert_eq!(prompt(&tokenizer, "a"), "<s> ▁a");
    assert_eq!(prompt(&tokenizer, "<s>a"), "<s> ▁a");
    assert_eq!(prompt(&tokenizer, ""), "<s>");
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (Some(1), Some(2)));
    let flags = vec![("add_bos_token", Value::Bool(false)), ("add_eos_token", Value::Bool(true))];
    let tokenizer = spm(flags);
    assert_eq!(prompt(&tokenizer, "a"), "▁a </s>");
    assert_eq!(prompt(&tokenizer, "a</s>"), "▁a </s>");
    let tokenizer = byte_level(vec![]);
    assert_eq!(prompt(&tokenizer, "a"), "a");
    let begin = tokenizer.token_id("<|begin|>").unwrap();
    let tokenizer =
        byte_level(vec![("bos_token_id", Value::U32(begin)), ("add_bos_token", Value::Bool(true))]);
    assert_eq!(prompt(&tokenizer, "a"), "<|begin|> a");
    assert_eq!(prompt(&tokenizer, "<|begin|>a"), "<|begin|> a");
    // As text, it is no begin token.
    assert_eq!(tokenizer.encode_prompt("<|begin|>", AsText)[0], begin);
    assert!(tokenizer.encode_prompt("<|begin|>", AsText).len() > 1);
}

#[test]
fn byte_level_merges_in_order() {
    let tokenizer = byte_level(vec![]);
    check(&tokenizer, "abc abc", AsText, "abc Ġab c");
    check(&tokenizer, "é12 12", AsText, "Ã© 12 Ġ 12");
    check(&tokenizer, "\n\t", AsText, "Ċ ĉ");
    assert_eq!(tokenizer.decode(&tokenizer.encode("abc é你 \n", AsText), SpecialText::Hide), "abc é你 \n");
    let id = tokenizer.token_id("Ã©").unwrap();
    assert_eq!(tokenizer.token_bytes(id), "é".as_bytes());
    assert_eq!(tokenizer.token_bytes(100_000), b"");
    assert!(!tokenizer.is_special(100_000));
}

#[test]
fn special_tokens_show_only_where_asked() {
    let tokenizer = spm(vec![]);
    let ids = tokenizer.encode("<s>a<tool>", Parse);
    assert_eq!(tokenizer.decode(&ids, SpecialText::Hide), "a<tool>");
    assert_eq!(tokenizer.decode(&ids, SpecialText::Show), "<s> a<tool>");
    let tokenizer = Arc::new(tokenizer);
    let mut stream = tokenizer.stream_with(SpecialText::Show);
    let pieces: Vec<String> = ids.iter().map(|&id| stream.push(id)).collect();
    assert_eq!(pieces, ["<s>", " a", "<tool>"]);
}

#[test]
fn streams_hold_back_half_characters() {
    let tokenizer = Arc::new(spm(vec![]));
    let byte = |byte: u8| 3 + u32::from(byte);
    let check = |bytes: &[u8], expected: &[&str], end: &str| {
        let mut stream = tokenizer.stream();
        let pieces: Vec<String> = bytes.iter().map(|&value| stream.push(byte(value))).collect();
        assert_eq!(pieces, expected);
        assert_eq!(stream.finish(), end);
    };
    check("é你🙂".as_bytes(), &["", "é", "", "", "你", "", "", "", "🙂"], "");
    check(b"a\xe4\xbd", &["a", "", ""], "\u{fffd}");
    // As soon as it is certain, and as many as `from_utf8_lossy` makes of it.
    check(b"\xe4\xbdx\xff\xf0\x9f\x99a", &["", "", "\u{fffd}x", "\u{fffd}", "", "", "", "\u{fffd}a"], "");
    check(b"\xe4\xe4\xbd\xa0", &["", "\u{fffd}", "", "你"], "");
}

pub fn check_stream(tokenizer: &Arc<Tokenizer>, ids: &[u32]) {
    for special in [SpecialText::Hide, SpecialText::Show] {
        let mut stream = tokenizer.stream_with(special);
        let mut text: String = ids.iter().map(|&id| stream.push(id)).collect();
        text.push_str(&stream.finish());
        assert_eq!(text, tokenizer.decode(ids, special), "{ids:?}");
    }
}

proptest! {
    #[test]
    fn streamed_pieces_are_the_decoded_text(ids in proptest::collection::vec(0..290_u32, 0..40)) {
        static TOKENIZERS: std::sync::OnceLock<[Arc<Tokenizer>; 2]> = std::sync::OnceLock::new();
        let tokenizers = TOKENIZERS.get_or_init(|| [spm(vec![]).into(), byte_level(vec![]).into()]);
        for tokenizer in tokenizers {
            check_stream(tokenizer, &ids);
        }
    }

    #[test]
    fn text_survives(text in any::<String>()) {
        for tokenizer in [spm(vec![]), byte_level(vec![])] {
            let ids = tokenizer.encode(&text, AsText);
            prop_assert_eq!(&tokenizer.decode(&ids, SpecialText::Hide), &text);
        }
    }
}

#[test]
fn real_vocabularies_stream_what_they_decode() {
    let Some(folder) = shared::folder("vocabs") else { return };
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "gguf") {
            let gguf = Gguf::open(&path).unwrap();
            let tokenizer = Arc::new(Tokenizer::from_gguf(&gguf.metadata).unwrap());
            let mut runner = proptest::test_runner::TestRunner::deterministic();
            let ids = proptest::collection::vec(0..tokenizer.vocab_size() as u32, 0..60);
            runner
                .run(&ids, |ids| {
                    check_stream(&tokenizer, &ids);
                    Ok(())
                })
                .unwrap();
            println!("{}", path.display());
        }
    }
}

#[test]
fn long_inputs_without_boundaries_do_not_hang() {
    for text in [
        "a".repeat(1 << 20),
        " ".repeat(1 << 20),
        "é".repeat(1 << 19),
        "<".repeat(1 << 20),
        "ab".repeat(1 << 19),
    ] {
        for tokenizer in [spm(vec![]), byte_level(vec![])] {
            for special in [Parse, AsText] {
                let ids = tokenizer.encode(&text, special);
                assert_eq!(tokenizer.decode(&ids, SpecialText::Hide).len(), text.len());
            }
        }
    }
}

/// A WordPiece vocabulary as GGUF files have it: `▁` before the first part of a word.
fn word_pieces(words: &[&str]) -> Tokenizer {
    let mut tokens: Tokens =
        ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"].map(|name| token(name, CONTROL)).to_vec();
    tokens.extend(words.iter().map(|word| token(word, NORMAL)));
    let ids = [("cls_token_id", 2), ("seperator_token_id", 3), ("unknown_token_id", 1)];
    let more = ids.map(|(key, id)| (key, Value::U32(id))).to_vec();
    Tokenizer::from_gguf(&metadata("bert", &tokens, more)).unwrap()
}

#[test]
fn word_pieces_are_those_of_bert() {
    let tokenizer = word_pieces(&["▁un", "aff", "able", "▁cafe", "▁,", "▁日", "▁本", "▁a", "a", "▁i"]);
    let words = |text: &str| {
        let ids = tokenizer.encode(text, AsText);
        ids.iter().map(|&id| tokenizer.token_name(id).into_owned()).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(words("Unaffable, CAFÉ 日本"), "un ##aff ##able , cafe 日 本");
    assert_eq!(words("xyz\u{0} a\tİ"), "[UNK] a i");
    assert_eq!(words(&"a".repeat(100)).split(' ').count(), 100);
    assert_eq!(words(&"a".repeat(101)), "[UNK]");
    assert_eq!(names(&tokenizer, &tokenizer.encode_prompt("a", AsText)), "[CLS] a [SEP]");
    let ids = tokenizer.encode_prompt("[CLS] a [SEP]", Parse);
    assert_eq!(names(&tokenizer, &ids), "[CLS] [CLS] a [SEP] [SEP]", "as transformers has it");
    assert_eq!(
        tokenizer.decode(&tokenizer.encode("unaffable cafe", AsText), SpecialText::Hide),
        "unaffable cafe"
    );
    assert_eq!(tokenizer.max_text_bytes(3), usize::MAX);
    // With capital letters in the vocabulary, they are kept.
    let cased = word_pieces(&["▁Cafe", "▁cafe", "▁Café"]);
    check(&cased, "Cafe Café cafe", AsText, "Cafe Café cafe");
}

#[test]
fn pairs_have_types_and_lose_the_end_of_the_longer_text() {
    let tokenizer = word_pieces(&["▁a", "▁b"]);
    let pair = |first: &str, second: &str, limit: usize| {
        let ids = tokenizer.encode_pair(first, second, limit)?;
        let name = |(id, kind): (u32, u32)| format!("{}{kind}", tokenizer.token_name(id));
        Some(ids.into_iter().map(name).collect::<Vec<_>>().join(" "))
    };
    assert_eq!(pair("a a", "b", 100).unwrap(), "[CLS]0 a0 a0 [SEP]0 b1 [SEP]1");
    assert_eq!(pair("a", "b b b b", 7).unwrap(), "[CLS]0 a0 [SEP]0 b1 b1 b1 [SEP]1");
    assert_eq!(pair("a a a a", "b b b b", 7).unwrap(), "[CLS]0 a0 a0 [SEP]0 b1 b1 [SEP]1");
    assert_eq!(pair("a", "b", 2), None);
}

#[test]
fn unigrams_have_the_best_sum_of_scores() {
    let mut tokens: Tokens = ["<s>", "<pad>", "</s>"].map(|name| token(name, CONTROL)).to_vec();
    tokens.push(token("<unk>", UNKNOWN));
    let scored = [("▁", -2.0), ("▁a", -3.0), ("b", -3.0), ("▁ab", -5.0), ("c", -4.0), ("bc", -4.5)];
    tokens.extend(scored.map(|(name, score)| (name.to_owned(), NORMAL, score)));
    let more = vec![
        ("bos_token_id", Value::U32(0)),
        ("eos_token_id", Value::U32(2)),
        ("unknown_token_id", Value::U32(3)),
        ("add_bos_token", Value::Bool(true)),
        ("add_eos_token", Value::Bool(true)),
    ];
    let tokenizer = Tokenizer::from_gguf(&metadata("t5", &tokens, more)).unwrap();
    check(&tokenizer, "ab  abc ", AsText, "▁ab ▁a bc");
    assert_eq!(names(&tokenizer, &tokenizer.encode_prompt("a", AsText)), "<s> ▁a </s>");
    let pair = tokenizer.encode_pair("a", "ab", 100).unwrap();
    assert!(pair.iter().all(|&(_, kind)| kind == 0));
    let ids: Vec<u32> = pair.into_iter().map(|(id, _)| id).collect();
    assert_eq!(names(&tokenizer, &ids), "<s> ▁a </s> </s> ▁ab </s>");
}

#[test]
fn what_is_not_supported_is_named() {
    let error = |metadata: Metadata| Tokenizer::from_gguf(&metadata).unwrap_err().to_string();
    for model in ["rwkv", "plamo2", "no_vocab"] {
        let message = error(metadata(model, &spm_tokens(), vec![]));
        assert!(
            message.starts_with(&format!("tokenizer model `{model}` is not supported (supported: llama")),
            "{message}"
        );
    }
    let pre = vec![("pre", Value::String("klingon".into()))];
    assert!(error(metadata("gpt2", &spm_tokens(), pre)).contains("pre-tokenizer `klingon` is not supported"));
    assert_eq!(error(metadata("gpt2", &spm_tokens(), vec![])), "the metadata has no `tokenizer.ggml.merges`");
    assert_eq!(error(Metadata::default()), "the metadata has no `tokenizer.ggml.model`");
    let mut short = Metadata::default();
    for (key, value) in metadata("llama", &spm_tokens(), vec![]).iter() {
        let value =
            if key.ends_with("scores") { Value::Array(Array::F32(vec![0.0; 3])) } else { value.clone() };
        short.insert(key.to_owned(), value);
    }
    assert_eq!(error(short), format!("tokenizer.ggml.scores: 3 scores for {} tokens", spm_tokens().len()));
    let merges = |line: &str| vec![("merges", Value::Array(Array::Strings(vec![line.into()])))];
    for line in ["", " ", "ab", "a ", " a"] {
        let message = error(metadata("gpt2", &spm_tokens(), merges(line)));
        assert_eq!(message, format!("tokenizer.ggml.merges: line 0, {line:?}, is not a pair"));
    }
}

#[test]
fn strange_vocabularies_are_no_danger() {
    let tokens: Tokens = vec![
        token("", NORMAL),
        token("a", NORMAL),
        token("a", CONTROL),
        token("<0xZZ>", BYTE),
        token("▁", 99),
    ];
    let tokenizer =
        Tokenizer::from_gguf(&metadata("llama", &tokens, vec![("bos_token_id", Value::U32(77))])).unwrap();
    assert_eq!((tokenizer.bos(), tokenizer.vocab_size()), (None, 5));
    // Nothing stands for these bytes but the unknown token, which is the first where the file does not say.
    assert_eq!(tokenizer.encode("é", AsText), [4, 0, 0]);
    assert_eq!(tokenizer.decode(&[0, 1, 2, 3, 4, 5], SpecialText::Show), "aa<0xZZ> ");
    let mut bytes = metadata("llama", &tokens, vec![]);
    assert!(!bytes.insert("tokenizer.ggml.tokens".into(), Value::Bool(true)));
    let mut raw = Metadata::default();
    for (key, value) in bytes.iter() {
        let names = Value::Array(Array::ByteStrings(vec![
            b"\xff\xfe".to_vec(),
            b"a".to_vec(),
            b"b".to_vec(),
            b"c".to_vec(),
            b"d".to_vec(),
        ]));
        raw.insert(key.to_owned(), if key.ends_with("tokens") { names } else { value.clone() });
    }
    let tokenizer = Tokenizer::from_gguf(&raw).unwrap();
    assert_eq!(tokenizer.token_bytes(0), b"\xff\xfe");
    assert_eq!(tokenizer.decode(&[0, 1], SpecialText::Show), "\u{fffd}\u{fffd}a");
}
