//! Names of models: `model`, `model:tag`, `owner/model:tag`.

use std::{fmt, str::FromStr};

use crate::error::LibraryError;

/// The tag of a name that has none.
pub const LATEST: &str = "latest";

/// The full name of a model. Case is preserved and ignored in comparisons.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ModelName {
    base: String,
    tag: String,
}

impl ModelName {
    /// Creates a name from its two parts.
    ///
    /// # Errors
    /// [`LibraryError::BadName`].
    pub fn new(base: &str, tag: &str) -> Result<Self, LibraryError> {
        let bad = |problem| LibraryError::BadName { name: format!("{base}:{tag}"), problem };
        if base.split('/').count() > 4 {
            return Err(bad("it has more than four parts"));
        }
        for part in base.split('/').chain([tag]) {
            check_part(part).map_err(bad)?;
        }
        Ok(Self { base: base.to_owned(), tag: tag.to_owned() })
    }

    /// Returns the part before the tag: `owner/model`.
    pub fn base(&self) -> &str {
        &self.base
    }

    /// Returns the part after the colon, or [`LATEST`] without one.
    pub fn tag(&self) -> &str {
        &self.tag
    }

    /// Returns the name without a tag that needs no saying.
    pub fn short(&self) -> String {
        if self.tag == LATEST { self.base.clone() } else { self.to_string() }
    }

    /// Returns true if the library treats the two names as equal.
    pub fn is_same(&self, other: &Self) -> bool {
        self.base.eq_ignore_ascii_case(&other.base) && self.tag.eq_ignore_ascii_case(&other.tag)
    }

    /// Derives a valid name from any text, such as a file's name: invalid characters become `-`.
    pub(crate) fn part_from(text: &str) -> String {
        let mut part: String =
            text.chars().map(|c| if is_inner(c) { c } else { '-' }).take(MAX_PART).collect();
        while part.contains("..") {
            part = part.replace("..", ".");
        }
        let part = part.trim_start_matches(|c: char| !c.is_ascii_alphanumeric());
        if part.is_empty() { "model".to_owned() } else { part.to_owned() }
    }
}

impl FromStr for ModelName {
    type Err = LibraryError;

    fn from_str(text: &str) -> Result<Self, LibraryError> {
        let (base, tag) = split_tag(text);
        Self::new(base, tag.unwrap_or(LATEST)).map_err(|error| match error {
            LibraryError::BadName { problem, .. } => {
                LibraryError::BadName { name: text.chars().take(200).collect(), problem }
            }
            other => other,
        })
    }
}

impl fmt::Display for ModelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.base, self.tag)
    }
}

/// Longest part between slashes.
const MAX_PART: usize = 128;

/// Namespaces that Ollama writes before the names of its own models.
const DEFAULT_NAMESPACES: [&str; 2] = ["registry.ollama.ai/library/", "library/"];

/// Returns a name without the parts that may be omitted: the tag `latest`, and Ollama's default namespace `library/`.
pub fn plain_name(name: &str) -> &str {
    let begins = |prefix: &&str| {
        let start = name.get(..prefix.len());
        start.is_some_and(|start| start.eq_ignore_ascii_case(prefix)) && name.len() > prefix.len()
    };
    let prefix = DEFAULT_NAMESPACES.iter().find(|prefix| begins(prefix)).map_or(0, |prefix| prefix.len());
    let name = &name[prefix..];
    match split_tag(name) {
        (base, Some(tag)) if tag.eq_ignore_ascii_case(LATEST) && !base.is_empty() => base,
        _ => name,
    }
}

/// Parses a name by digest: `sha256:DIGITS`, `NAME@sha256:DIGITS`, or at least 12 hexadecimal digits alone, as Ollama
/// lists them. Returns the name, which may be empty, and the digits in lower case.
pub fn digest_name(name: &str) -> Option<(&str, String)> {
    let (base, digits) = match name.rsplit_once("sha256:").or_else(|| name.rsplit_once("sha256-")) {
        Some(("", digits)) => ("", digits),
        Some((base, digits)) => (base.strip_suffix('@')?, digits),
        None => ("", name),
    };
    let is_digest = (12..=64).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_digest.then(|| (base, digits.to_ascii_lowercase()))
}

/// Splits off the tag, if there is one.
pub(crate) fn split_tag(text: &str) -> (&str, Option<&str>) {
    match text.rsplit_once(':') {
        Some((base, tag)) if !tag.contains('/') => (base, Some(tag)),
        _ => (text, None),
    }
}

fn is_inner(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-')
}

fn check_part(part: &str) -> Result<(), &'static str> {
    match part.chars().next() {
        None => return Err("a part of it is empty"),
        Some(c) if !c.is_ascii_alphanumeric() => {
            return Err("a part of it begins with neither letter nor digit");
        }
        Some(_) => {}
    }
    if part.len() > MAX_PART {
        return Err("a part of it has more than 128 characters");
    }
    if !part.chars().all(is_inner) {
        return Err("it has other characters");
    }
    if part.contains("..") {
        return Err("it has two dots in a row");
    }
    Ok(())
}

/// Meaning of a name in a request among the existing names.
pub(crate) enum Meaning<'a> {
    One(&'a ModelName),
    Several(Vec<&'a ModelName>),
    None,
}

/// Finds the model of `query`: a full name; one without the tag, if that is `latest` or unique; one without the owner,
/// if unique. Prefixes of hub names (`hf:`, `hf.co/`) are accepted.
pub(crate) fn meaning<'a>(query: &str, names: impl Iterator<Item = &'a ModelName> + Clone) -> Meaning<'a> {
    match plain_meaning(query, names.clone()) {
        // There may be a model called `hf`, or an owner called `library`.
        Meaning::None => match HUB_PREFIXES.iter().find_map(|prefix| query.strip_prefix(prefix)) {
            Some(query) => plain_meaning(query, names),
            None if plain_name(query) != query => plain_meaning(plain_name(query), names),
            None => Meaning::None,
        },
        found => found,
    }
}

fn plain_meaning<'a>(query: &str, names: impl Iterator<Item = &'a ModelName> + Clone) -> Meaning<'a> {
    let (base, tag) = split_tag(query);
    let whole = |name: &&ModelName| name.base.eq_ignore_ascii_case(base);
    let last_part = |name: &&ModelName| {
        !base.contains('/')
            && name.base.rsplit('/').next().is_some_and(|last| last.eq_ignore_ascii_case(base))
    };
    let tagged = |name: &&ModelName| tag.is_none_or(|tag| name.tag.eq_ignore_ascii_case(tag));
    let mut found: Vec<_> = names.clone().filter(whole).filter(tagged).collect();
    if found.is_empty() {
        found = names.filter(last_part).filter(tagged).collect();
    }
    let latest: Vec<_> = found.iter().copied().filter(|name| name.tag == LATEST).collect();
    match (found[..].split_first(), &latest[..]) {
        (None, _) => Meaning::None,
        (Some((one, [])), _) | (_, [one]) => Meaning::One(one),
        _ => Meaning::Several(found),
    }
}

/// Prefixes that may precede the owner of a model on the hub.
pub(crate) const HUB_PREFIXES: [&str; 6] = [
    "hf:",
    "hf.co/",
    "huggingface.co/",
    "https://hf.co/",
    "https://huggingface.co/",
    "https://www.huggingface.co/",
];

/// Returns names similar to `query`, best first.
pub(crate) fn similar<'a>(query: &str, names: impl Iterator<Item = &'a ModelName>) -> Vec<String> {
    let query = query.to_lowercase();
    let likeness = |name: &ModelName| {
        let last = name.base.rsplit('/').next().unwrap_or_default().to_lowercase();
        let forms = [name.to_string().to_lowercase(), name.base.to_lowercase(), last];
        forms.iter().map(|form| strsim::jaro_winkler(form, &query)).fold(0.0, f64::max)
    };
    let mut found: Vec<_> = names.map(|name| (likeness(name), name)).filter(|(l, _)| *l > 0.75).collect();
    found.sort_by(|a, b| b.0.total_cmp(&a.0));
    found.into_iter().take(3).map(|(_, name)| name.short()).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn parts_of_a_name_may_be_omitted() {
        for (name, plain) in [
            ("tales", "tales"),
            ("tales:latest", "tales"),
            ("Tales:LATEST", "Tales"),
            ("library/tales:latest", "tales"),
            ("registry.ollama.ai/library/tales", "tales"),
            ("owner/tales:q8", "owner/tales:q8"),
            ("library/", "library/"),
            (":latest", ":latest"),
            ("ü", "ü"),
        ] {
            assert_eq!(plain_name(name), plain, "{name}");
        }
        for (name, digest) in [
            ("sha256:0123456789AB", Some(("", "0123456789ab"))),
            ("tales@sha256:0123456789ab", Some(("tales", "0123456789ab"))),
            ("0123456789ab", Some(("", "0123456789ab"))),
            ("0123456789a", None),
            ("sha256:xyz", None),
            ("tales", None),
        ] {
            let parsed = digest_name(name);
            assert_eq!(parsed.as_ref().map(|(base, digits)| (*base, digits.as_str())), digest, "{name}");
        }
    }

    #[test]
    fn names_are_read_and_written() {
        let name: ModelName = "Qwen/Qwen3-0.6B-GGUF:Q8_0".parse().unwrap();
        assert_eq!((name.base(), name.tag()), ("Qwen/Qwen3-0.6B-GGUF", "Q8_0"));
        assert_eq!("llama".parse::<ModelName>().unwrap().to_string(), "llama:latest");
        assert_eq!("llama:latest".parse::<ModelName>().unwrap().short(), "llama");
        for bad in [
            "",
            ":",
            "a:",
            ":a",
            "a/",
            "/a",
            "a//b",
            "../a",
            "a/..",
            "a/../b",
            "a b",
            "a\0",
            "ä",
            "-a",
            ".a",
            "a:b:c",
            "a/b/c/d/e",
            "a\\b",
            "C:/x",
            "a..b",
        ] {
            assert!(bad.parse::<ModelName>().is_err(), "{bad:?}");
        }
        assert!("x".repeat(129).parse::<ModelName>().is_err());
    }

    fn means(query: &str, names: &[&str]) -> String {
        let names: Vec<ModelName> = names.iter().map(|name| name.parse().unwrap()).collect();
        match meaning(query, names.iter()) {
            Meaning::One(name) => name.to_string(),
            Meaning::Several(names) => format!("{} models", names.len()),
            Meaning::None => "nothing".to_owned(),
        }
    }

    #[test]
    fn a_name_may_be_shortened_while_it_is_clear() {
        let names = [
            "Qwen/Qwen3:Q8_0",
            "Qwen/Qwen3:Q4_0",
            "b/tiny:Q4_0",
            "c/tiny:Q8_0",
            "mine",
            "mine:old",
            "d/one:x",
            "hf:one",
        ];
        for (query, meaning) in [
            ("Qwen/Qwen3:Q8_0", "Qwen/Qwen3:Q8_0"),
            ("qwen/qwen3:q8_0", "Qwen/Qwen3:Q8_0"),
            ("hf:Qwen/Qwen3:Q8_0", "Qwen/Qwen3:Q8_0"),
            ("hf.co/Qwen/Qwen3:Q8_0", "Qwen/Qwen3:Q8_0"),
            ("https://huggingface.co/Qwen/Qwen3:Q4_0", "Qwen/Qwen3:Q4_0"),
            ("Qwen3:Q4_0", "Qwen/Qwen3:Q4_0"),
            ("Qwen3", "2 models"),
            ("tiny", "2 models"),
            ("tiny:Q8_0", "c/tiny:Q8_0"),
            ("mine", "mine:latest"),
            ("mine:old", "mine:old"),
            ("one", "d/one:x"),
            ("d/one", "d/one:x"),
            ("e/one", "nothing"),
            ("one:y", "nothing"),
            ("hf:one", "hf:one"),
            ("hf:d/one", "d/one:x"),
            ("", "nothing"),
            (":", "nothing"),
        ] {
            assert_eq!(means(query, &names), meaning, "{query}");
        }
    }

    #[test]
    fn near_names_are_suggested() {
        let names: Vec<ModelName> =
            ["Qwen/Qwen3:Q8_0", "mine"].iter().map(|name| name.parse().unwrap()).collect();
        assert_eq!(similar("qwen2", names.iter()), ["Qwen/Qwen3:Q8_0"]);
        assert_eq!(similar("min", names.iter()), ["mine"]);
        assert!(similar("zzz", names.iter()).is_empty());
    }

    proptest! {
        #[test]
        fn any_text_becomes_a_name(text in any::<String>()) {
            ModelName::new(&ModelName::part_from(&text), LATEST).unwrap();
        }

        #[test]
        fn what_parses_prints_as_it_was(text in "[a-zA-Z0-9._/:-]{0,20}") {
            if let Ok(name) = text.parse::<ModelName>() {
                prop_assert!(name.to_string() == text || name.short() == text);
                prop_assert!(!text.contains("..") && !text.starts_with('/'));
            }
        }
    }
}
