//! Translation of the settings that Ollama stores with a model to a preset and to defaults of requests.

use paguro_library::found::OllamaSettings;
use serde_json::{Map, Value, json};

use crate::presets::Preset;

/// A preset, defaults, and notes about values that are not used.
#[derive(Debug, Default)]
pub struct Translated {
    /// Options and the system prompt.
    pub preset: Preset,
    /// First messages, and licenses.
    pub defaults: Map<String, Value>,
    /// Names of values that are not used, with the reason.
    pub notes: Vec<String>,
}

/// Translates settings. A value that this version refuses is left out, with a note.
pub fn translate(settings: &OllamaSettings) -> Translated {
    let mut out = Translated::default();
    for (name, value) in &settings.parameters {
        if name == "num_ctx"
            && let Some(tokens) = value.as_u64().and_then(|tokens| usize::try_from(tokens).ok())
        {
            out.preset.ctx = Some(tokens).filter(|&tokens| tokens > 0);
            continue;
        }
        let mut with = out.preset.clone();
        with.options.insert(name.clone(), value.clone());
        match with.check() {
            Ok(()) => out.preset = with,
            Err(failure) => {
                out.notes.push(format!("its parameter `{name}` is not used: {}", failure.message()));
            }
        }
    }
    out.preset.system = settings.system.clone().filter(|text| !text.trim().is_empty());
    let others = [("messages", json!(settings.messages)), ("license", json!(settings.licenses))];
    for (name, value) in others {
        if value.as_array().is_none_or(Vec::is_empty) {
            continue;
        }
        let mut with = out.defaults.clone();
        with.insert(name.to_owned(), value);
        match paguro_server::check_defaults(&with) {
            Ok(()) => out.defaults = with,
            Err(problem) => out.notes.push(format!("its {name} are not used: {problem}")),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_become_a_preset_and_refused_ones_are_named() {
        let settings = OllamaSettings {
            parameters: json!({
                "temperature": 0.2, "stop": ["<|end|>"], "num_ctx": 4096, "mirostat": 2, "top_p": "much"
            })
            .as_object()
            .unwrap()
            .clone(),
            system: Some("Be brief.".into()),
            messages: vec![json!({"role": "user", "content": "Hi"}), json!({"role": "nobody"})],
            licenses: vec!["MIT".into()],
            template: Some("{{ .Prompt }}".into()),
        };
        let Translated { preset, defaults, notes } = translate(&settings);
        assert_eq!(
            Value::Object(preset.to_record()),
            json!({"ctx": 4096, "system": "Be brief.", "options": {"temperature": 0.2, "stop": ["<|end|>"]}})
        );
        assert_eq!(Value::Object(defaults), json!({"license": ["MIT"]}));
        let named = |name: &str| notes.iter().any(|note| note.contains(name));
        assert!(notes.len() == 3 && ["mirostat", "top_p", "messages"].into_iter().all(named), "{notes:?}");
    }
}
