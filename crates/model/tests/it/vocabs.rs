//! Real vocabularies against the test vectors that come with them.

use std::{fs, path::Path};

use paguro_model::{
    gguf::Gguf,
    tokenizer::{SpecialText, SpecialTokens, Tokenizer},
};

use crate::shared;

fn tokenizer(path: &Path) -> Tokenizer {
    let gguf = Gguf::open(path).unwrap_or_else(|error| panic!("{error}"));
    Tokenizer::from_gguf(&gguf.metadata).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// All vocabularies of a folder that have test vectors: `X.gguf` with `X.gguf.inp` and `X.gguf.out`.
#[test]
fn test_vectors_match() {
    let Some(folder) = shared::folder("vocabs") else { return };
    let mut files = 0;
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let beside = |extension: &str| path.with_added_extension(extension);
        if path.extension().is_none_or(|extension| extension != "gguf") || !beside("inp").exists() {
            continue;
        }
        let tokenizer = tokenizer(&path);
        let inputs = fs::read_to_string(beside("inp")).unwrap();
        let outputs = fs::read_to_string(beside("out")).unwrap();
        let inputs: Vec<&str> = inputs.split("\n__ggml_vocab_test__\n").collect();
        let outputs: Vec<&str> = outputs.lines().collect();
        // A separator at the very end of the file ends the last text; nothing follows it.
        let inputs = &inputs[..outputs.len()];
        for (text, expected) in inputs.iter().zip(outputs) {
            let expected: Vec<u32> = expected.split_whitespace().map(|id| id.parse().unwrap()).collect();
            let actual = tokenizer.encode(text, SpecialTokens::AsText);
            assert_eq!(actual, expected, "{}: {text:?}", path.display());
            assert_eq!(tokenizer.decode(&actual, SpecialText::Hide), *text, "{}: decoded", path.display());
        }
        println!("{}: {} texts", path.display(), inputs.len());
        files += 1;
    }
    assert!(files > 0, "no vocabulary with test vectors");
}
