//! Short names of well-known models: `qwen3:4b` is a file of a repository that this version can run.
//!
//! The table is data (`models.json`); `check.py` beside it compares it with the hub.

use std::sync::LazyLock;

use serde::Deserialize;

use crate::{
    error::LibraryError,
    hub::{Choice, Reference},
    name::{LATEST, ModelName, split_tag},
};

/// Maximum number of similar names.
const MOST_SIMILAR: usize = 4;

/// Least likeness (Jaro-Winkler) of a name that is suggested.
const LIKE: f64 = 0.88;

/// Addresses of Ollama's library: the names behind them are those of this table.
const OLLAMA_PREFIXES: [&str; 5] = [
    "https://ollama.com/library/",
    "ollama.com/library/",
    "registry.ollama.ai/library/",
    "registry.ollama.ai/",
    "library/",
];

/// Parts of a tag that apply to all models of the table.
const IDLE_PARTS: [&str; 5] = ["instruct", "it", "chat", "text", "gguf"];

/// A well-known model.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KnownModel {
    /// Its short name, `family:size`.
    pub name: String,
    /// Its name for people: `Qwen3 4B`.
    pub title: String,
    /// `owner/repository` on Hugging Face.
    pub repository: String,
    /// The GGUF file in it.
    pub file: String,
    /// Number of parameters, as people write it: `4B`.
    pub parameters: String,
    /// Size of the file in megabytes (10⁶ bytes).
    pub megabytes: u64,
    /// Short description of its use.
    pub good_for: String,
    /// True for the model that the family's name alone means.
    #[serde(default)]
    pub default: bool,
}

/// Model and quantization of a short name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Short {
    /// The model of the table.
    pub model: &'static KnownModel,
    /// Quantization other than the table's, as in `qwen3:4b-q8_0`.
    pub quantization: Option<String>,
}

static MODELS: LazyLock<Vec<KnownModel>> =
    LazyLock::new(|| serde_json::from_str(include_str!("models.json")).expect("models.json is the table"));

/// Returns the table, family by family.
pub fn models() -> &'static [KnownModel] {
    &MODELS
}

impl KnownModel {
    /// Returns the name's part before the colon.
    pub fn family(&self) -> &str {
        split_tag(&self.name).0
    }

    /// Returns the name's part behind the colon.
    fn size(&self) -> &str {
        split_tag(&self.name).1.unwrap_or_default()
    }

    /// Returns the size of the file in bytes, rounded to megabytes.
    pub fn bytes(&self) -> u64 {
        self.megabytes * 1_000_000
    }
}

impl Short {
    /// Finds the model that a short name means: `qwen3:4b`, `qwen3`, `Qwen3:latest`, `qwen3:4b-q8_0`,
    /// `llama3.2:1b-instruct-q4_K_M`, `library/qwen3`, `qwen3-4b`, `Llama-3.2-1B-Instruct`.
    pub fn find(text: &str) -> Option<Self> {
        let text = without_prefix(text.trim()).to_lowercase();
        if text.is_empty() || text.contains(char::is_whitespace) {
            return None;
        }
        let (family, tag) = split_tag(&text);
        let of_family = || models().iter().filter(|model| model.family() == family);
        let of_table = |model| Some(Self { model, quantization: None });
        match tag {
            None | Some(LATEST) => {
                if let Some(model) = of_family().find(|model| model.default) {
                    return of_table(model);
                }
            }
            Some(tag) => {
                if let Some(model) = of_family().find(|model| model.size() == tag) {
                    return of_table(model);
                }
                if let Some(found) = Self::tagged(of_family().collect(), tag) {
                    return Some(found);
                }
            }
        }
        // Written as in a file's name.
        let plain = folded(&text);
        models()
            .iter()
            .find(|model| [&model.name, &model.title].iter().any(|name| folded(name) == plain))
            .and_then(of_table)
    }

    /// Returns a tag with more than the size: `4b-q8_0`, `1b-instruct-q4_K_M`, `q8_0`.
    fn tagged(family: Vec<&'static KnownModel>, tag: &str) -> Option<Self> {
        let size = |model: &&'static KnownModel| {
            let rest = tag.strip_prefix(model.size())?;
            rest.starts_with('-').then(|| (*model, &rest[1..]))
        };
        // The longest matching size is selected: `4b-instruct` before `4b`.
        let sized = family.iter().filter_map(size).max_by_key(|(model, _)| model.size().len());
        let (model, rest) = match sized {
            Some(found) => found,
            None => (*family.iter().find(|model| model.default)?, tag),
        };
        let parts: Vec<_> = rest.split('-').filter(|part| !IDLE_PARTS.contains(part)).collect();
        match parts[..] {
            [] => Some(Self { model, quantization: None }),
            [one] if is_quantization(one) => Some(Self { model, quantization: Some(one.to_uppercase()) }),
            _ => None,
        }
    }

    /// Returns the reference to pull.
    pub fn reference(&self) -> Reference {
        let choice = match &self.quantization {
            Some(quantization) => Choice::Tag(quantization.clone()),
            None => Choice::File(self.model.file.clone()),
        };
        Reference { repo: self.model.repository.clone(), revision: "main".to_owned(), choice: Some(choice) }
    }

    /// Returns the whole short name, which is also the model's name in the library.
    pub fn name(&self) -> String {
        match &self.quantization {
            Some(quantization) => format!("{}-{}", self.model.name, quantization.to_lowercase()),
            None => self.model.name.clone(),
        }
    }
}

/// Resolves a short name or a model on a hub. Returns the library's name of a short name.
///
/// # Errors
/// [`LibraryError::BadReference`], with similar short names.
pub fn wanted(text: &str) -> Result<(Reference, Option<ModelName>), LibraryError> {
    if let Some(short) = Short::find(text) {
        let name = short.name().parse().expect("short names are names");
        return Ok((short.reference(), Some(name)));
    }
    text.parse().map(|reference| (reference, None)).map_err(|error| match error {
        LibraryError::BadReference { text, problem } if !text.contains('/') => {
            LibraryError::BadReference { problem: advice(&text).unwrap_or(problem), text }
        }
        other => other,
    })
}

/// Returns a hint with similar short names; `None` if there are none.
pub fn advice(text: &str) -> Option<String> {
    let (family, tag) = split_tag(without_prefix(text));
    let sizes: Vec<_> =
        models().iter().filter(|m| m.family().eq_ignore_ascii_case(family)).map(KnownModel::size).collect();
    if let Some(tag) = tag.filter(|_| !sizes.is_empty()) {
        return Some(format!(
            "there is no size `{tag}` of `{family}` among the short names: {}",
            sizes.join(", ")
        ));
    }
    match &similar(text)[..] {
        [] => None,
        names => Some(format!("did you mean {}?", names.join(", "))),
    }
}

/// Returns short names similar to `text`, best first.
pub fn similar(text: &str) -> Vec<&'static str> {
    let text = without_prefix(text).to_lowercase();
    let likeness = |model: &KnownModel| {
        let whole = strsim::jaro_winkler(&model.name, &text);
        whole.max(strsim::jaro_winkler(model.family(), split_tag(&text).0))
    };
    let mut found: Vec<_> =
        models().iter().map(|model| (likeness(model), model)).filter(|(like, _)| *like > LIKE).collect();
    found.sort_by(|a, b| b.0.total_cmp(&a.0));
    found.into_iter().take(MOST_SIMILAR).map(|(_, model)| &*model.name).collect()
}

/// Returns the models that have all words of `text` in their name, title, repository or use.
pub fn search(text: &str) -> Vec<&'static KnownModel> {
    let words: Vec<_> = text.split_whitespace().map(str::to_lowercase).collect();
    let has_all = |model: &&KnownModel| {
        let all = [&model.name, &model.title, &model.repository, &model.good_for].map(|s| s.to_lowercase());
        let plain: Vec<_> = all.iter().map(|text| folded(text)).collect();
        words.iter().all(|word| {
            let word_folded = folded(word);
            all.iter().any(|text| text.contains(word))
                || (!word_folded.is_empty() && plain.iter().any(|text| text.contains(&word_folded)))
        })
    };
    models().iter().filter(has_all).collect()
}

fn without_prefix(text: &str) -> &str {
    let prefix = |prefix: &&str| {
        text.get(..prefix.len())
            .filter(|head| head.eq_ignore_ascii_case(prefix))
            .map(|_| &text[prefix.len()..])
    };
    OLLAMA_PREFIXES.iter().find_map(prefix).unwrap_or(text)
}

/// Returns the letters and digits without words that all names may have.
fn folded(text: &str) -> String {
    let text = text.to_lowercase();
    let parts = text.split(|c: char| !c.is_ascii_alphanumeric()).filter(|part| !IDLE_PARTS.contains(part));
    parts.collect()
}

/// True for `q4_k_m`, `iq4_xs`, `f16`, `bf16`, `mxfp4`.
fn is_quantization(text: &str) -> bool {
    let digit_after = |prefix: &str| {
        text.strip_prefix(prefix).is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    ["q", "iq", "f", "bf", "fp", "mxfp"].iter().any(|prefix| digit_after(prefix))
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use super::*;

    #[test]
    fn the_table_is_consistent() {
        let mut names = HashSet::new();
        let mut defaults = HashMap::<&str, usize>::new();
        for model in models() {
            assert!(names.insert(&model.name), "{} is there twice", model.name);
            let name: ModelName = model.name.parse().unwrap();
            assert_eq!(name.to_string(), model.name, "a short name has a size");
            assert_eq!(model.name, model.name.to_lowercase());
            let reference: Reference = format!("hf:{}", model.repository).parse().unwrap();
            assert_eq!(reference.repo, model.repository);
            assert!(model.file.ends_with(".gguf") && model.megabytes > 50, "{}", model.name);
            assert!(!model.title.is_empty() && !model.good_for.is_empty() && !model.parameters.is_empty());
            *defaults.entry(model.family()).or_default() += usize::from(model.default);
        }
        let families = |count: usize| defaults.iter().filter(move |(_, n)| **n != count).collect::<Vec<_>>();
        assert!(families(1).is_empty(), "one default for each family: {:?}", families(1));
        assert!(names.len() >= 30);
    }

    /// docs/library.md shows the table.
    #[test]
    fn the_documentation_has_the_table() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/library.md");
        let text = std::fs::read_to_string(path).unwrap();
        for model in models() {
            let size = match model.megabytes {
                large @ 1000.. => format!("{:.1} GB", large as f64 / 1000.0),
                small => format!("{small} MB"),
            };
            let star = if model.default { " *" } else { "" };
            let KnownModel { name, parameters, good_for, .. } = model;
            let row = format!("| `{name}`{star} | {parameters} | {size} | {good_for} |");
            assert!(text.contains(&row), "docs/library.md lacks: {row}");
        }
    }

    #[test]
    fn short_names_are_found_as_people_write_them() {
        let table = [
            ("qwen3:4b", "qwen3:4b"),
            ("qwen3", "qwen3:4b"),
            ("QWEN3:latest", "qwen3:4b"),
            ("qwen3:0.6b", "qwen3:0.6b"),
            ("qwen3:4b-instruct", "qwen3:4b-instruct"),
            ("qwen3:4b-q8_0", "qwen3:4b-q8_0"),
            ("qwen3:4b-instruct-q8_0", "qwen3:4b-instruct-q8_0"),
            ("qwen3:q8_0", "qwen3:4b-q8_0"),
            ("llama3.2:1b-instruct-q4_K_M", "llama3.2:1b-q4_k_m"),
            ("llama3.2", "llama3.2:3b"),
            ("library/llama3.2:1b", "llama3.2:1b"),
            ("https://ollama.com/library/gemma3", "gemma3:4b"),
            ("qwen3-0.6b", "qwen3:0.6b"),
            ("Llama-3.2-1B-Instruct", "llama3.2:1b"),
            ("gemma-3-4b-it", "gemma3:4b"),
            ("gemma4", "gemma4:e4b"),
            ("gemma-4-E2B-it", "gemma4:e2b"),
            ("gemma4:12b-it-q8_0", "gemma4:12b-q8_0"),
            ("phi4-mini", "phi4-mini:3.8b"),
            ("llama3.2:70b", ""),
            ("qwen3:4b-frob", ""),
            ("qwen", ""),
            ("hf:Qwen/Qwen3-4B-GGUF", ""),
            ("some/folder", ""),
            ("", ""),
            ("a story", ""),
        ];
        for (text, name) in table {
            assert_eq!(Short::find(text).map(|short| short.name()).unwrap_or_default(), name, "{text}");
        }
        for model in models() {
            assert_eq!(Short::find(&model.name).unwrap().model, model);
        }
    }

    #[test]
    fn wrong_names_get_near_ones() {
        assert!(advice("llama3.2:70b").unwrap().contains("1b, 3b"));
        assert!(advice("lama3.2").unwrap().contains("llama3.2"));
        assert!(advice("qwen3.0:0.6b").unwrap().contains("qwen3:0.6b"));
        assert_eq!(advice("Hello"), None);
        let error = |text: &str| wanted(text).unwrap_err().to_string();
        assert!(error("lama3.2:1b").contains("llama3.2:1b"), "{}", error("lama3.2:1b"));
        assert!(error("frobnicate").contains("hf:owner/repository"));
        assert_eq!(wanted("hf:a/b:Q8_0").unwrap().0.repo, "a/b");
    }

    #[test]
    fn words_find_models() {
        let names = |text: &str| search(text).iter().map(|model| &*model.name).collect::<Vec<_>>();
        assert_eq!(names("coder 1.5b"), ["qwen2.5-coder:1.5b"]);
        assert!(names("llama-3.2").contains(&"llama3.2:1b"));
        assert!(names("code").len() >= 4);
        assert_eq!(names("").len(), models().len());
        assert!(names("frobnicate").is_empty());
    }
}
