//! Names of models on a hub, as people write them.

use std::str::FromStr;

use crate::{
    error::LibraryError,
    name::{HUB_PREFIXES, split_tag},
};

/// A model on a hub: `hf:owner/repo`, `owner/repo:Q4_K_M`, or an address pasted from a browser.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reference {
    /// `owner/repository`.
    pub repo: String,
    /// A branch, tag or commit; `main` unless given.
    pub revision: String,
    /// Choice among the models in it; `None` for the best one.
    pub choice: Option<Choice>,
}

/// Choice of a model in a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Choice {
    /// A quantization (`Q4_K_M`), `safetensors`, or a file's name.
    Tag(String),
    /// A file, by its path.
    File(String),
}

impl FromStr for Reference {
    type Err = LibraryError;

    /// Parses `hf:owner/repo`, `hf.co/owner/repo`, `owner/repo`, each with optional `@revision` and `:tag`, and
    /// addresses: `https://huggingface.co/owner/repo`, `.../tree/main`, `.../blob/main/model.gguf`,
    /// `.../resolve/main/model.gguf?download=true`.
    fn from_str(text: &str) -> Result<Self, LibraryError> {
        let text = text.trim();
        let bad = |problem: &str| LibraryError::BadReference {
            text: text.chars().take(200).collect(),
            problem: problem.to_owned(),
        };
        let without_prefix =
            |text| HUB_PREFIXES.iter().find_map(|prefix| strip_prefix_ignoring_case(text, prefix));
        // `hf:` may also precede an address.
        let rest = without_prefix(text).map(|rest| without_prefix(rest).unwrap_or(rest));
        if rest.is_none() && text.contains("://") {
            return Err(bad(
                "only addresses on huggingface.co are understood; for another hub set HF_ENDPOINT and write `hf:owner/repo`",
            ));
        }
        let rest = rest.unwrap_or(text);
        if without_prefix(rest).is_some() {
            return Err(bad("write `hf:owner/repository` or `hf:owner/repository:Q4_K_M`"));
        }
        let rest = rest.split(['?', '#']).next().unwrap_or_default().trim_end_matches('/');
        let parts: Vec<&str> = rest.split('/').collect();
        let reference = match parts[..] {
            [owner, last] => {
                let (last, tag) = split_tag(last);
                let (repo, revision) = last.split_once('@').map_or((last, "main"), |(r, v)| (r, v));
                let choice = tag.map(|tag| Choice::Tag(tag.to_owned()));
                Self { repo: format!("{owner}/{repo}"), revision: revision.to_owned(), choice }
            }
            [owner, repo, "tree", revision] => {
                Self { repo: format!("{owner}/{repo}"), revision: decoded(revision), choice: None }
            }
            [owner, repo, "blob" | "resolve", revision, ref path @ ..] if !path.is_empty() => Self {
                repo: format!("{owner}/{repo}"),
                revision: decoded(revision),
                choice: Some(Choice::File(decoded(&path.join("/")))),
            },
            _ => return Err(bad("write `hf:owner/repository` or `hf:owner/repository:Q4_K_M`")),
        };
        reference.check().map_err(bad)?;
        Ok(reference)
    }
}

impl Reference {
    /// Checks that each part of an address is a plain name.
    fn check(&self) -> Result<(), &'static str> {
        for part in self.repo.split('/') {
            let fine = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
            if part.is_empty() || part.len() > 96 || !part.chars().all(fine) {
                return Err(
                    "an owner and a repository have letters, digits, `.`, `_` and `-` in their names",
                );
            }
            if part.starts_with(['.', '-']) || part.contains("..") {
                return Err("neither an owner nor a repository begins with `.` or `-`, or has `..` in it");
            }
        }
        let plain = |text: &str| !text.is_empty() && text.len() <= 255 && !text.chars().any(char::is_control);
        if !plain(&self.revision) || self.revision.contains("..") {
            return Err("the revision must be a branch, a tag or a commit");
        }
        match &self.choice {
            Some(Choice::Tag(tag)) if !plain(tag) => Err("nothing stands after the colon"),
            Some(Choice::File(path)) if !path.chars().all(|c| !c.is_control()) => {
                Err("the file's name is not one")
            }
            _ => Ok(()),
        }
    }
}

fn strip_prefix_ignoring_case<'a>(text: &'a str, prefix: &str) -> Option<&'a str> {
    let head = text.get(..prefix.len())?;
    head.eq_ignore_ascii_case(prefix).then(|| &text[prefix.len()..])
}

/// Decodes percent-encoding; invalid codes are unchanged.
fn decoded(text: &str) -> String {
    let bytes = text.as_bytes();
    let (mut out, mut i) = (Vec::with_capacity(bytes.len()), 0);
    while i < bytes.len() {
        let code = bytes
            .get(i + 1..i + 3)
            .filter(|digits| bytes[i] == b'%' && digits.iter().all(u8::is_ascii_hexdigit))
            .and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok());
        out.push(code.unwrap_or(bytes[i]));
        i += if code.is_some() { 3 } else { 1 };
    }
    String::from_utf8(out).unwrap_or_else(|_| text.to_owned())
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};
    use proptest::prelude::*;

    use super::*;

    fn check(text: &str, expected: Expect) {
        let found = match text.parse::<Reference>() {
            Ok(Reference { repo, revision, choice }) => format!("{repo} @ {revision} {choice:?}"),
            Err(error) => error.to_string(),
        };
        expected.assert_eq(&found);
    }

    #[test]
    fn references_are_understood_as_people_write_them() {
        check("hf:a/b", expect!["a/b @ main None"]);
        check("a/b", expect!["a/b @ main None"]);
        check("hf:hf.co/a/b:Q8_0", expect![[r#"a/b @ main Some(Tag("Q8_0"))"#]]);
        check("hf:https://huggingface.co/a/b", expect!["a/b @ main None"]);
        check(" hf.co/a/b:Q4_K_M ", expect![[r#"a/b @ main Some(Tag("Q4_K_M"))"#]]);
        check("hf:a/b@v1.0:Q8_0", expect![[r#"a/b @ v1.0 Some(Tag("Q8_0"))"#]]);
        check("hf:a/b:m.Q4_0.gguf", expect![[r#"a/b @ main Some(Tag("m.Q4_0.gguf"))"#]]);
        check("https://huggingface.co/a/b", expect!["a/b @ main None"]);
        check("HTTPS://HuggingFace.co/a/b/", expect!["a/b @ main None"]);
        check("https://huggingface.co/a/b/tree/refs%2Fpr%2F1", expect!["a/b @ refs/pr/1 None"]);
        check(
            "https://huggingface.co/a/b/blob/main/Q4/m%20x.gguf",
            expect![[r#"a/b @ main Some(File("Q4/m x.gguf"))"#]],
        );
        check(
            "https://huggingface.co/a/b/resolve/main/m.gguf?download=true",
            expect![[r#"a/b @ main Some(File("m.gguf"))"#]],
        );
    }

    #[test]
    fn what_is_no_reference_is_refused() {
        check(
            "https://evil.example/a/b",
            expect![
                "`https://evil.example/a/b` is neither a short name nor a Hugging Face reference: only addresses on huggingface.co are understood; for another hub set HF_ENDPOINT and write `hf:owner/repo`"
            ],
        );
        check(
            "gpt2",
            expect![
                "`gpt2` is neither a short name nor a Hugging Face reference: write `hf:owner/repository` or `hf:owner/repository:Q4_K_M`"
            ],
        );
        check(
            "hf:a/b:",
            expect![
                "`hf:a/b:` is neither a short name nor a Hugging Face reference: nothing stands after the colon"
            ],
        );
        check(
            "hf:a/b@",
            expect![
                "`hf:a/b@` is neither a short name nor a Hugging Face reference: the revision must be a branch, a tag or a commit"
            ],
        );
        for bad in [
            "",
            "hf:",
            "/",
            "a/",
            "/b",
            "a/b/c",
            "../b",
            "a/..",
            "a/b/../c",
            "a b/c",
            "hf:a/b/blob/main",
            "ä/b",
            "hf:hf:hf.co/owner",
        ] {
            assert!(bad.parse::<Reference>().is_err(), "{bad:?}");
        }
    }

    /// Addresses with mistakes in them.
    fn texts() -> impl Strategy<Value = String> {
        let piece = prop_oneof![
            Just("hf:"),
            Just("hf.co/"),
            Just("https://huggingface.co/"),
            Just("https://"),
            Just("owner"),
            Just("repo"),
            Just("/"),
            Just(":"),
            Just("@"),
            Just(".."),
            Just("."),
            Just("%2e%2E%2f"),
            Just("%"),
            Just("tree"),
            Just("blob"),
            Just("resolve"),
            Just("main"),
            Just("x.gguf"),
            Just("Q4_K_M"),
            Just("?"),
            Just("#"),
            Just("\\"),
            Just("\0"),
            Just("é"),
            Just(" ")
        ];
        proptest::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]
        #[test]
        fn no_text_makes_a_strange_repository(text in prop_oneof![texts(), any::<String>()]) {
            if let Ok(found) = text.parse::<Reference>() {
                let (owner, repo) = found.repo.split_once('/').unwrap();
                for part in [owner, repo] {
                    prop_assert!(!part.is_empty() && !part.contains("..") && !part.starts_with('.'));
                    prop_assert!(part.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b)));
                }
                prop_assert!(!found.revision.contains(".."));
                // The formatted reference parses to the same one.
                let again = format!("hf:{}", found.repo).parse::<Reference>().unwrap();
                prop_assert_eq!(again.repo, found.repo);
            }
        }
    }
}
