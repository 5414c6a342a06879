//! Fill-in-the-middle: prompts of models that were trained to write the text between two texts.

use super::{SpecialTokens, Tokenizer};

/// The control tokens of one family.
#[derive(Clone, Copy, Debug)]
struct Family {
    prefix: &'static str,
    suffix: &'static str,
    middle: &'static str,
    /// True if the text after the gap comes first.
    suffix_first: bool,
    /// Tokens before a repository's name and before a file's name.
    repository: Option<(&'static str, &'static str)>,
}

const QWEN: Family = Family {
    prefix: "<|fim_prefix|>",
    suffix: "<|fim_suffix|>",
    middle: "<|fim_middle|>",
    suffix_first: false,
    repository: Some(("<|repo_name|>", "<|file_sep|>")),
};

/// Families in the order of the search in a vocabulary.
const FAMILIES: &[Family] = &[
    // Qwen2.5-Coder and CodeGemma.
    QWEN,
    // StarCoder, Granite, SmolLM.
    Family {
        prefix: "<fim_prefix>",
        suffix: "<fim_suffix>",
        middle: "<fim_middle>",
        repository: Some(("<repo_name>", "<file_sep>")),
        ..QWEN
    },
    Family {
        prefix: "<fim-prefix>",
        suffix: "<fim-suffix>",
        middle: "<fim-middle>",
        repository: None,
        ..QWEN
    },
    Family {
        prefix: "<｜fim▁begin｜>",
        suffix: "<｜fim▁hole｜>",
        middle: "<｜fim▁end｜>",
        repository: None,
        ..QWEN
    },
    // CodeLlama.
    Family { prefix: "▁<PRE>", suffix: "▁<SUF>", middle: "▁<MID>", repository: None, ..QWEN },
    Family { prefix: "<PRE>", suffix: "<SUF>", middle: "<MID>", repository: None, ..QWEN },
    // Codestral.
    Family {
        prefix: "[PREFIX]",
        suffix: "[SUFFIX]",
        middle: "[MIDDLE]",
        suffix_first: true,
        repository: None,
    },
];

/// Tokens after the text in a gap.
const ENDS: &[&str] = &[
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|fim_pad|>",
    "<|file_sep|>",
    "<|file_separator|>",
    "<|repo_name|>",
    "<|cursor|>",
    "<fim_pad>",
    "<file_sep>",
    "<repo_name>",
    "▁<EOT>",
    "<EOT>",
];

/// A gap in a text.
#[derive(Clone, Copy, Debug, Default)]
pub struct Gap<'t> {
    /// The text before it.
    pub prefix: &'t str,
    /// The text after it.
    pub suffix: &'t str,
    /// Beginning of the text in the gap.
    pub middle: &'t str,
    /// Other files, with their names.
    pub files: &'t [(String, String)],
}

/// The tokens that mark a gap, in a vocabulary that has them.
#[derive(Clone, Copy, Debug)]
struct Marks {
    family: Family,
    prefix: u32,
    suffix: u32,
    middle: u32,
}

impl Tokenizer {
    /// Returns the prompt whose continuation fills a gap; `None` if the vocabulary has no tokens for that.
    ///
    /// The order is that of llama.cpp's `/infill`: other files, prefix, suffix, and the middle's beginning.
    pub fn fill_in(&self, gap: &Gap<'_>) -> Option<Vec<u32>> {
        let Marks { family, prefix, suffix, middle } = self.marks()?;
        let mut ids = self.prefix.clone();
        let text = |ids: &mut Vec<u32>, text: &str| ids.extend(self.encode(text, SpecialTokens::AsText));
        if !gap.files.is_empty() {
            let marks = family
                .repository
                .and_then(|(repository, file)| Some((self.token_id(repository)?, self.token_id(file)?)));
            if let Some((repository, _)) = marks {
                ids.push(repository);
                text(&mut ids, "repository\n");
            }
            for (name, content) in gap.files {
                match marks {
                    Some((_, file)) => ids.push(file),
                    None => text(&mut ids, "\n\n--- "),
                }
                text(&mut ids, &format!("{name}\n{content}"));
            }
            if let Some((_, file)) = marks {
                ids.push(file);
                text(&mut ids, "filename\n");
            }
        }
        let mut parts = [(prefix, gap.prefix), (suffix, gap.suffix)];
        if family.suffix_first {
            parts.reverse();
        }
        for (mark, part) in parts {
            ids.push(mark);
            text(&mut ids, part);
        }
        // If the suffix comes first, the prefix continues directly.
        if !family.suffix_first {
            ids.push(middle);
        }
        text(&mut ids, gap.middle);
        Some(ids)
    }

    /// Returns true if the vocabulary has tokens for filling in.
    pub fn fills_in(&self) -> bool {
        self.marks().is_some()
    }

    /// Returns the tokens that end the text in a gap.
    pub fn fill_ends(&self) -> Vec<u32> {
        let ids = ENDS.iter().filter_map(|name| self.token_id(name));
        ids.filter(|&id| self.is_special(id)).collect()
    }

    fn marks(&self) -> Option<Marks> {
        FAMILIES.iter().find_map(|&family| {
            let [prefix, suffix, middle] =
                [family.prefix, family.suffix, family.middle].map(|name| self.token_id(name));
            // Codestral has no third token.
            let middle = if family.suffix_first { middle.or(prefix) } else { middle };
            Some(Marks { family, prefix: prefix?, suffix: suffix?, middle: middle? })
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::{Value, json};

    use super::*;

    /// Returns a tokenizer of bytes with these control tokens, whose ids begin at 100.
    fn tokenizer(names: &[&str]) -> Tokenizer {
        let bytes = (b'!'..=b'~').map(|byte| (char::from(byte).to_string(), byte - b'!'));
        let vocab: BTreeMap<_, _> = bytes.chain((94..100).map(|id| (format!("unused {id}"), id))).collect();
        let added: Vec<Value> = (100..)
            .zip(names)
            .map(|(id, name)| {
                json!({"id": id, "content": name, "special": true, "single_word": false, "lstrip": false,
                    "rstrip": false, "normalized": false})
            })
            .collect();
        let bytes =
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
        let json = json!({
            "version": "1.0", "added_tokens": added, "normalizer": null, "pre_tokenizer": bytes,
            "post_processor": null, "decoder": bytes,
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []},
        });
        Tokenizer::from_hf(json.to_string().as_bytes(), None).unwrap()
    }

    #[test]
    fn gaps_are_marked_with_the_tokens_that_a_vocabulary_has() {
        let files = [("n".to_owned(), "c".to_owned())];
        let gap = Gap { prefix: "ab", suffix: "yz", middle: "c", files: &[] };
        for (names, expected) in [
            (&["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"][..], "#100 ab #101 yz #102 c"),
            (&["<fim_suffix>", "<fim_middle>", "<fim_prefix>"], "#102 ab #100 yz #101 c"),
            (&["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"], "#100 ab #101 yz #102 c"),
            (&["[SUFFIX]", "[PREFIX]"], "#100 yz #101 ab c"),
            (&["<|fim_prefix|>", "<|fim_suffix|>"], "none"),
            (&[], "none"),
        ] {
            let tokenizer = tokenizer(names);
            let ids = tokenizer.fill_in(&gap);
            assert_eq!(ids.is_some(), tokenizer.fills_in());
            let word = |id: u32| match id {
                100.. => format!(" #{id} "),
                id => char::from(id as u8 + b'!').to_string(),
            };
            let shown = ids.map_or("none".to_owned(), |ids| ids.into_iter().map(word).collect());
            // If the middle follows the prefix, there is no mark between them.
            let solid = |text: &str| text.split_whitespace().collect::<String>();
            assert_eq!(solid(&shown), solid(expected), "{names:?}");
        }
        let names = [
            "<|fim_prefix|>",
            "<|fim_suffix|>",
            "<|fim_middle|>",
            "<|repo_name|>",
            "<|file_sep|>",
            "<|fim_pad|>",
        ];
        let tokenizer = tokenizer(&names);
        let ids = tokenizer.fill_in(&Gap { files: &files, ..gap }).unwrap();
        let marks: Vec<_> = ids.into_iter().filter(|&id| id >= 100).collect();
        assert_eq!(marks, [103, 104, 104, 100, 101, 102]);
        // A text that names a mark is text.
        let forged = tokenizer.fill_in(&Gap { prefix: "<|fim_suffix|>", ..gap }).unwrap();
        assert_eq!(forged.into_iter().filter(|&id| id == 101).count(), 1);
        assert_eq!(tokenizer.fill_ends(), [105, 104, 103]);
    }
}
