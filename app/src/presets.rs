//! Presets of single models: load settings, default options of requests, aliases. The library stores them in its
//! catalogue (`paguro preset`); those of a server's settings file take precedence.
//!
//! A preset outlives the files of its model. The library reads only its aliases. `paguro serve` merges it with that of
//! the settings file; if it changes an option of the load, the model is loaded again.

use std::path::Path;

use paguro_library::{Digest, ModelRecord};
use paguro_model::chat::{ChatTemplate, TemplateTokens};
use paguro_server::ModelPreset;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{
    cli::KvDtype,
    failure::{Failure, Outcome},
    tokenize::without_mark,
};

/// A preset of one model. For absent fields, the server's settings or the model's defaults apply.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Preset {
    /// Maximum tokens of prompt and answer; 0 for the model's trained context.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ctx: Option<usize>,
    /// Encoding of keys and values in the cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_dtype: Option<KvDtype>,
    /// Chat template that replaces the model's own: its text, or in a settings file the path of its file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chat_template: Option<String>,
    /// System message of chats that have none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system: Option<String>,
    /// Options of requests that do not set them, with the names of Ollama's API.
    #[serde(skip_serializing_if = "Map::is_empty")]
    pub options: Map<String, Value>,
    /// The model that an adapter changes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
    /// Aliases by which the library finds the model.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<String>,
}

impl Preset {
    /// Reads the preset of a model of the library.
    ///
    /// # Errors
    /// Another version of the program has written an incompatible preset.
    pub fn of(record: &ModelRecord) -> Result<Self, String> {
        let value = Value::Object(record.extra.clone());
        let problem = |error| format!("the preset of `{}` cannot be read: {error}", record.name.short());
        serde_json::from_value(value).map_err(problem)
    }

    /// Returns the preset of a model of the library, with the chat template with which `/api/create` made it.
    ///
    /// # Errors
    /// As for [`Preset::of`].
    pub fn with_recorded(record: &ModelRecord) -> Result<Self, String> {
        let preset = Self::of(record)?;
        let template = record.defaults.get("template").and_then(Value::as_str).map(str::to_owned);
        Ok(Self { chat_template: preset.chat_template.or(template), ..preset })
    }

    /// Returns the preset in the library's format.
    pub fn to_record(&self) -> Map<String, Value> {
        match serde_json::to_value(self) {
            Ok(Value::Object(fields)) => fields,
            // All fields can be represented in JSON.
            _ => Map::new(),
        }
    }

    /// Returns this preset, completed by `weaker`.
    pub fn or(self, weaker: Self) -> Self {
        let mut options = weaker.options;
        options.extend(self.options);
        Self {
            ctx: self.ctx.or(weaker.ctx),
            kv_dtype: self.kv_dtype.or(weaker.kv_dtype),
            chat_template: self.chat_template.or(weaker.chat_template),
            system: self.system.or(weaker.system),
            options,
            base: self.base.or(weaker.base),
            aliases: self.aliases.into_iter().chain(weaker.aliases).collect(),
        }
    }

    /// Validates the preset without the model.
    ///
    /// # Errors
    /// An unknown option, or a template that does not compile.
    pub fn check(&self) -> Outcome<()> {
        paguro_server::check_defaults(&self.defaults(Map::new())).map_err(Failure::usage)?;
        if let Some(source) = &self.chat_template {
            ChatTemplate::new(source, TemplateTokens::default()).map_err(Failure::usage)?;
        }
        Ok(())
    }

    /// Reads the file that `chat_template` names, relative to `folder`.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read_template(&mut self, folder: &Path) -> Outcome<()> {
        let Some(path) = &self.chat_template else { return Ok(()) };
        let path = folder.join(path);
        let text = std::fs::read_to_string(&path);
        let failure = |error| Failure::usage(format!("cannot read {}: {error}", path.display()));
        self.chat_template = Some(without_mark(text.map_err(failure)?));
        Ok(())
    }

    /// Returns the defaults of a model's requests, with those of the library in `recorded`.
    pub fn defaults(&self, mut recorded: Map<String, Value>) -> Map<String, Value> {
        if !self.options.is_empty() {
            let options = recorded.entry("options").or_insert_with(|| Map::new().into());
            if let Some(options) = options.as_object_mut() {
                options.extend(self.options.clone());
            }
        }
        if let Some(system) = &self.system {
            recorded.insert("system".into(), system.as_str().into());
        }
        recorded
    }

    /// Returns a model's version with this preset, so that a preset that changes the load reloads the model.
    pub fn version(&self, version: String) -> String {
        let loads =
            Self { system: None, options: Map::new(), base: None, aliases: Vec::new(), ..self.clone() };
        if loads == Self::default() {
            return version;
        }
        let text = format!("{version} {}", Value::Object(loads.to_record()));
        Digest::of(text.as_bytes()).hex()
    }

    /// Returns the fields as rows for display.
    pub fn rows(&self) -> Vec<(String, String)> {
        let mut rows = Vec::new();
        let mut row = |name: &str, value: Option<String>| {
            rows.extend(value.map(|value| (name.to_owned(), value)));
        };
        row("ctx", self.ctx.map(|tokens| tokens.to_string()));
        row("kv-dtype", self.kv_dtype.map(|dtype| dtype.to_string()));
        let template = self.chat_template.as_ref();
        row("chat-template", template.map(|text| format!("{} characters", text.chars().count())));
        row("system", self.system.clone());
        row("base", self.base.clone());
        for (name, value) in &self.options {
            row(name, Some(value.to_string()));
        }
        self.aliases.iter().for_each(|alias| row("alias", Some(alias.clone())));
        rows
    }
}

impl From<Preset> for ModelPreset {
    fn from(preset: Preset) -> Self {
        Self {
            context: preset.ctx,
            kv_dtype: preset.kv_dtype.map(|dtype| dtype.to_string()),
            chat_template: preset.chat_template,
            system: preset.system,
            options: preset.options,
        }
    }
}

impl TryFrom<ModelPreset> for Preset {
    type Error = String;

    /// Converts the API's preset; empty texts are absent.
    fn try_from(preset: ModelPreset) -> Result<Self, String> {
        let text = |text: Option<String>| text.filter(|text| !text.trim().is_empty());
        let kv_dtype = text(preset.kv_dtype).map(|name| {
            serde_json::from_value(Value::from(name.as_str()))
                .map_err(|_| format!("`kv_dtype` is {name:?}, and can be \"f16\", \"q8\" or \"q4\""))
        });
        Ok(Self {
            ctx: preset.context,
            kv_dtype: kv_dtype.transpose()?,
            chat_template: text(preset.chat_template),
            system: text(preset.system),
            options: preset.options,
            base: None,
            aliases: Vec::new(),
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_stronger_preset_wins_field_by_field() {
        let preset = |value: Value| serde_json::from_value::<Preset>(value).unwrap();
        let strong = preset(json!({"ctx": 512, "options": {"temperature": 0.5}, "aliases": ["a"]}));
        let weak = preset(
            json!({"ctx": 99, "kv-dtype": "q8", "options": {"temperature": 1, "top_k": 3}, "aliases": ["b"]}),
        );
        let both = strong.clone().or(weak);
        let expected = json!({
            "ctx": 512, "kv-dtype": "q8", "options": {"temperature": 0.5, "top_k": 3}, "aliases": ["a", "b"],
        });
        assert_eq!(Value::Object(both.to_record()), expected);
        let recorded = json!({"system": "Old", "options": {"temperature": 2, "seed": 1}});
        let defaults = both.defaults(recorded.as_object().unwrap().clone());
        assert_eq!(
            Value::Object(defaults),
            json!({"system": "Old", "options": {"temperature": 0.5, "top_k": 3, "seed": 1}})
        );
    }

    #[test]
    fn only_what_concerns_loading_makes_another_version() {
        let mut preset = Preset { system: Some("Hi".into()), aliases: vec!["a".into()], ..Preset::default() };
        assert_eq!(preset.version("1".into()), "1");
        preset.ctx = Some(4096);
        let longer = preset.version("1".into());
        assert_ne!(longer, "1");
        preset.ctx = Some(8192);
        assert_ne!(preset.version("1".into()), longer);
    }

    #[test]
    fn unknown_options_are_refused() {
        let preset =
            Preset { options: json!({"temprature": 1}).as_object().unwrap().clone(), ..Preset::default() };
        let message = preset.check().unwrap_err().message().to_owned();
        assert!(message.contains("did you mean `temperature`?"), "{message}");
    }
}
