//! Unicode normalization of a text, before it is cut into words.
//!
//! llama.cpp does not normalize texts for byte-pair encoding, and its files do not say that a model's own tokenizer does. So the name
//! of the pre-tokenizer decides, and files of this program have a key. The tables are those of the tokenizers crate, so that a file
//! gives the tokens of its folder; they are of Unicode 9.

use std::borrow::Cow;

use serde_json::Value as Json;
use unicode_normalization_alignments::{IsNormalized, UnicodeNormalization, is_nfc_quick};

use super::{
    SpecialTokens, TokenizerError,
    special::{AddedTokens, Fragment},
};

/// Key of the form's name, `none` for texts as they are.
pub(super) const FORM: &str = "paguro.tokenizer.normalizer";
/// Key of the added tokens that are found in the normalized text.
pub(super) const FOUND_AFTER: &str = "paguro.tokenizer.normalized_tokens";

/// Names of pre-tokenizers of models whose tokenizers compose characters: the vocabularies of Qwen, Cohere and GPT-NeoX, and a few
/// others.
const COMPOSED: [&str; 12] = [
    "qwen2",
    "qwen35",
    "deepseek-r1-qwen",
    "f2llmv2",
    "hunyuan",
    "stablelm2",
    "command-r",
    "tiny_aya",
    "cohere2moe",
    "olmo",
    "mpt",
    "modern-bert",
];

/// A form of Unicode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    Nfc,
    Nfd,
    Nfkc,
    Nfkd,
}

const FORMS: [(&str, Form); 4] =
    [("NFC", Form::Nfc), ("NFD", Form::Nfd), ("NFKC", Form::Nfkc), ("NFKD", Form::Nfkd)];

impl Form {
    pub(super) fn name(self) -> &'static str {
        FORMS.iter().find(|form| form.1 == self).map_or("none", |form| form.0)
    }

    fn from_name(name: &str) -> Option<Self> {
        FORMS.iter().find(|form| form.0 == name).map(|form| form.1)
    }

    /// Returns the form of a file: by its key, else by the name of its pre-tokenizer, and for the first files of GPT-NeoX, which have
    /// no such name, by the architecture.
    pub(super) fn of_file(
        key: Option<&str>,
        pre: Option<&str>,
        architecture: &str,
    ) -> Result<Option<Self>, TokenizerError> {
        match (key, pre) {
            (Some("none"), _) => Ok(None),
            (Some(name), _) => match Self::from_name(name) {
                Some(form) => Ok(Some(form)),
                None => Err(TokenizerError::Invalid {
                    what: FORM.to_owned(),
                    problem: format!("`{name}` is not NFC, NFD, NFKC, NFKD or none"),
                }),
            },
            (None, None | Some("default")) if architecture == "gptneox" => Ok(Some(Self::Nfc)),
            (None, pre) => Ok(pre.filter(|pre| COMPOSED.contains(pre)).map(|_| Self::Nfc)),
        }
    }

    /// Returns the form to which a `tokenizer.json` brings texts.
    ///
    /// # Errors
    /// A step that has no counterpart in a GGUF file.
    pub(super) fn of_json(normalizer: &Json) -> Result<Option<Self>, TokenizerError> {
        let mut form = None;
        for step in steps(normalizer) {
            let kind = step["type"].as_str().unwrap_or_default();
            let is_space = step["pattern"]["String"] == " " && step["content"] == super::spm::SPACE;
            match (Self::from_name(kind), kind) {
                (Some(_), _) if form.is_some() => return Err(unknown_step(step)),
                (Some(found), _) => form = Some(found),
                // SentencePiece's, which reading compares; and bytes, which pre-tokenizers have as well.
                (_, "Prepend") if step["prepend"] == super::spm::SPACE => {}
                (_, "Replace") if is_space => {}
                (_, "ByteLevel") => {}
                _ => return Err(unknown_step(step)),
            }
        }
        Ok(form)
    }

    /// Returns the text in this form, in linear time.
    pub(super) fn apply(self, text: &str) -> Cow<'_, str> {
        let is_normal = |text: &str| is_nfc_quick(text.chars()) == IsNormalized::Yes;
        if text.is_ascii() || self == Self::Nfc && is_normal(text) {
            return Cow::Borrowed(text);
        }
        let mut normal = String::with_capacity(text.len());
        match self {
            Self::Nfc => normal.extend(text.nfc().map(|(c, _)| c)),
            Self::Nfd => normal.extend(text.nfd().map(|(c, _)| c)),
            Self::Nfkc => normal.extend(text.nfkc().map(|(c, _)| c)),
            Self::Nfkd => normal.extend(text.nfkd().map(|(c, _)| c)),
        }
        Cow::Owned(normal)
    }
}

/// Returns the steps of a normalizer in order.
pub(super) fn steps(normalizer: &Json) -> Vec<&Json> {
    match normalizer["normalizers"].as_array() {
        Some(inner) => inner.iter().flat_map(steps).collect(),
        None if normalizer.is_object() && normalizer["type"] != "Sequence" => vec![normalizer],
        None => Vec::new(),
    }
}

/// Returns the error of a step that a GGUF file cannot express.
pub(super) fn unknown_step(step: &Json) -> TokenizerError {
    let kind = step["type"].as_str().unwrap_or("unknown");
    let shown = match kind {
        "Replace" => format!("{kind} of {} by {}", step["pattern"], step["content"]),
        _ => kind.to_owned(),
    };
    TokenizerError::Invalid {
        what: "tokenizer.json".to_owned(),
        problem: format!("its normalizer has the step `{shown}`, which a GGUF file has no key for"),
    }
}

/// Normalization of the texts between control tokens.
#[derive(Debug, Default)]
pub(super) struct Normalizer {
    pub(super) form: Option<Form>,
    /// Tokens that are found in the normalized text.
    pub(super) after: Option<AddedTokens>,
}

impl Normalizer {
    /// Calls `found` with the fragments of a text after normalization.
    pub(super) fn fragments(&self, text: &str, mut found: impl FnMut(Fragment<'_>)) {
        let Some(form) = self.form else { return found(Fragment::Text(text)) };
        let normal = form.apply(text);
        match &self.after {
            Some(after) => after.split(&normal, SpecialTokens::AsText).into_iter().for_each(found),
            None => found(Fragment::Text(&normal)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_equal_those_of_unicode() {
        let text =
            "A\u{30a} \u{212b} \u{1112}\u{1161}\u{11ab} e\u{323}\u{302} q\u{307}\u{323} \u{fb01} \u{ff21}";
        let forms = FORMS.map(|(_, form)| form.apply(text).into_owned());
        assert_eq!(
            forms,
            [
                "\u{c5} \u{c5} \u{d55c} \u{1ec7} q\u{323}\u{307} \u{fb01} \u{ff21}",
                "A\u{30a} A\u{30a} \u{1112}\u{1161}\u{11ab} e\u{323}\u{302} q\u{323}\u{307} \u{fb01} \u{ff21}",
                "\u{c5} \u{c5} \u{d55c} \u{1ec7} q\u{323}\u{307} fi A",
                "A\u{30a} A\u{30a} \u{1112}\u{1161}\u{11ab} e\u{323}\u{302} q\u{323}\u{307} fi A",
            ]
        );
        assert!(matches!(Form::Nfc.apply("\u{c5}b\u{d55c}"), Cow::Borrowed(_)));
        // Marks without end, which are sorted and not compared with each other.
        let marks = "\u{301}\u{323}".repeat(200_000);
        assert_eq!(Form::Nfc.apply(&marks).chars().count(), 400_000);
    }

    #[test]
    fn names_of_pre_tokenizers_imply_a_form_unless_a_key_has_one() {
        let of = |key, pre, architecture| Form::of_file(key, pre, architecture).unwrap();
        assert_eq!(of(None, Some("qwen2"), "qwen2"), Some(Form::Nfc));
        assert_eq!(of(None, Some("llama-bpe"), "llama"), None);
        assert_eq!(of(None, None, "gptneox"), Some(Form::Nfc));
        assert_eq!(of(Some("none"), Some("qwen2"), "qwen2"), None);
        assert_eq!(of(Some("NFKC"), Some("llama-bpe"), "llama"), Some(Form::Nfkc));
        assert!(Form::of_file(Some("NFX"), None, "llama").is_err());
    }
}
