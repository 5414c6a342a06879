//! Adapters (LoRA) of the library, and the models that they change.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    import::TOKENIZER_FILES,
    name::plain_name,
    record::{ModelRecord, Source},
};

/// Files of an adapter's folder besides those that a model's folder may have.
const FILES: [&str; 3] = ["adapter_config.json", "adapter_model.safetensors", "adapters.safetensors"];

/// Name of an adapter's model in [`extra`](ModelRecord::extra).
pub(crate) const BASE: &str = "base";

/// Endings of repositories that have the weights of another one in another encoding.
const ENDINGS: [&str; 6] = ["-gguf", "-unsloth-bnb-4bit", "-bnb-4bit", "-4bit", "-8bit", "-bf16"];

/// Properties of an adapter that the library's caller reads from its files.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdapterDetails {
    /// The model that it was trained for, as its files name it: `owner/repository`, or a path.
    pub trained_for: Option<String>,
    /// Largest rank of its matrices.
    pub rank: usize,
}

/// Model that an adapter changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Base {
    /// The model that the adapter's settings name, or the only one of the library that it can have been trained for.
    Found(String),
    /// Models of the library that it can have been trained for.
    Several(Vec<String>),
    /// The library has no model that it can have been trained for.
    Missing,
}

impl ModelRecord {
    /// Returns true for an adapter (LoRA), which changes a model and is none.
    pub fn is_adapter(&self) -> bool {
        self.details.adapter.is_some()
    }

    /// Returns the model that the settings of an adapter name: the text `base` in [`extra`](ModelRecord::extra).
    pub fn base(&self) -> Option<&str> {
        self.extra.get(BASE).and_then(Value::as_str)
    }

    /// Returns the model that this adapter changes. `records` are those of the library.
    pub fn find_base(&self, records: &[Self]) -> Base {
        match (self.base(), &self.details.adapter) {
            (Some(base), _) => Base::Found(base.to_owned()),
            (None, Some(adapter)) => adapter.find_base(records),
            (None, None) => Base::Missing,
        }
    }

    /// Returns the adapters among `records` that change this model.
    pub fn adapters<'r>(&self, records: &'r [Self]) -> impl Iterator<Item = &'r Self> {
        let own = self.name.short();
        let is_own = move |adapter: &&Self| match adapter.find_base(records) {
            Base::Found(base) => plain_name(&base).eq_ignore_ascii_case(plain_name(&own)),
            Base::Several(_) | Base::Missing => false,
        };
        records.iter().filter(|record| record.is_adapter()).filter(is_own)
    }
}

impl AdapterDetails {
    /// Returns the model among `records` that the adapter was trained for.
    pub fn find_base(&self, records: &[ModelRecord]) -> Base {
        let Some(trained_for) = self.trained_for.as_deref() else { return Base::Missing };
        let models = || records.iter().filter(|record| !record.is_adapter());
        let is_it = |record: &&ModelRecord| names(record).any(|name| name.eq_ignore_ascii_case(trained_for));
        let stem = stem(trained_for);
        let is_like_it = |record: &&ModelRecord| names(record).any(|name| self::stem(name) == stem);
        let mut found: Vec<String> = models().filter(is_it).map(|record| record.name.short()).collect();
        if found.is_empty() && !stem.is_empty() {
            found = models().filter(is_like_it).map(|record| record.name.short()).collect();
        }
        match found.len() {
            0 => Base::Missing,
            1 => Base::Found(found.remove(0)),
            _ => Base::Several(found),
        }
    }
}

/// Returns the names of a model that files of an adapter may have: its repository, and its name without the tag.
fn names(record: &ModelRecord) -> impl Iterator<Item = &str> {
    let repository = match &record.source {
        Source::Hub { repo, .. } => Some(repo.as_str()),
        _ => None,
    };
    repository.into_iter().chain([record.name.base()])
}

/// Returns the last part of a model's name or path in lower case, without the ending for an encoding.
fn stem(name: &str) -> String {
    let last = name.trim_end_matches(['/', '\\']).rsplit(['/', '\\']).next().unwrap_or_default();
    let mut stem = last.to_lowercase().replace([' ', '_'], "-");
    while let Some(shorter) = ENDINGS.iter().find_map(|ending| stem.strip_suffix(ending)) {
        stem.truncate(shorter.len());
    }
    stem
}

/// Returns true for files of a folder with an adapter: its own, tokenizer and chat template.
pub(crate) fn belongs_to_adapter(name: &str) -> bool {
    FILES.contains(&name) || TOKENIZER_FILES.contains(&name)
}

/// Returns true if files of these names are those of an adapter's folder.
pub(crate) fn is_adapter<'a>(names: impl Iterator<Item = &'a str> + Clone) -> bool {
    names.clone().any(|name| name == FILES[0]) && names.clone().any(|name| FILES[1..].contains(&name))
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use serde_json::{Map, json};

    use super::*;
    use crate::record::{Details, Format};

    fn record(name: &str, repo: Option<&str>, adapter: Option<&str>, base: Option<&str>) -> ModelRecord {
        let trained_for = |name: &str| AdapterDetails { trained_for: Some(name.to_owned()), rank: 8 };
        ModelRecord {
            name: name.parse().unwrap(),
            source: match repo {
                Some(repo) => {
                    Source::Hub { endpoint: String::new(), repo: repo.to_owned(), commit: String::new() }
                }
                None => Source::Upload,
            },
            format: Format::Gguf,
            details: Details { adapter: adapter.map(trained_for), ..Details::default() },
            defaults: Map::new(),
            files: Vec::new(),
            created_at: SystemTime::UNIX_EPOCH,
            modified_at: SystemTime::UNIX_EPOCH,
            extra: base.map(|base| ("base".to_owned(), json!(base))).into_iter().collect(),
            stamp: String::new(),
        }
    }

    #[test]
    fn bases_are_found_by_name() {
        let models = [
            record("qwen3:0.6b", Some("unsloth/Qwen3-0.6B-GGUF"), None, None),
            record("bartowski/Llama-1B-GGUF:Q4_K_M", Some("bartowski/Llama-1B-GGUF"), None, None),
            record("meta/Llama-1B", Some("meta/Llama-1B"), None, None),
            record("a/Twice-GGUF:Q4_0", None, None, None),
            record("b/Twice-GGUF:Q8_0", None, None, None),
            record("Mine", None, None, None),
            record("Qwen3-0.6B", None, Some("Qwen/Qwen3-0.6B"), None),
        ];
        let check = |adapter: &ModelRecord, expected: &str| {
            let found = match adapter.find_base(&models) {
                Base::Found(name) => name,
                Base::Several(names) => names.join(" "),
                Base::Missing => "-".to_owned(),
            };
            assert_eq!(found, expected, "{adapter:?}");
        };
        let lora = |trained_for| record("lora", None, Some(trained_for), None);
        check(&lora("Qwen/Qwen3-0.6B"), "qwen3:0.6b");
        check(&lora("unsloth/qwen3-0.6b-unsloth-bnb-4bit"), "qwen3:0.6b");
        check(&lora("meta/llama-1b"), "meta/Llama-1B");
        check(&lora("other/Llama-1B"), "bartowski/Llama-1B-GGUF:Q4_K_M meta/Llama-1B");
        check(&lora("c/Twice"), "a/Twice-GGUF:Q4_0 b/Twice-GGUF:Q8_0");
        check(&lora("/srv/models/mine/"), "Mine");
        check(&lora("c/Another"), "-");
        check(&lora("/"), "-");
        check(&record("lora", None, Some("meta/Llama-1B"), Some("tales")), "tales");
        let all = [models[0].clone(), lora("Qwen/Qwen3-0.6B"), lora("c/Another")];
        assert_eq!(all[0].adapters(&all).count(), 1);
    }

    #[test]
    fn folders_of_adapters_are_told_by_their_files() {
        for (names, expected) in [
            (&["adapter_config.json", "adapter_model.safetensors"][..], true),
            (&["adapters.safetensors", "adapter_config.json", "README.md"], true),
            (&["adapter_config.json"], false),
            (&["adapter_model.safetensors"], false),
            (&["config.json", "model.safetensors"], false),
        ] {
            assert_eq!(is_adapter(names.iter().copied()), expected, "{names:?}");
        }
    }
}
