//! Prompts that embedding models expect before a text, by name: `query: `, `search_document: `.

use serde_json::{Map, Value};

/// Prompts of an embedding model, by name. They are added where a request names one, and never otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompts {
    /// Names with texts, in the file's order.
    pub named: Vec<(String, String)>,
    /// The prompt that sentence-transformers adds unless another one is named.
    pub default: Option<String>,
}

/// Most prompts of a file, and most bytes of each; real files have a dozen of a few words.
const MAX_PROMPTS: usize = 256;
const MAX_BYTES: usize = 16 << 10;

/// Purpose of a text in retrieval.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextRole {
    /// It asks for documents.
    Query,
    /// It is a document.
    Document,
}

impl TextRole {
    /// Returns the role that a request names, in the words of several APIs; `None` for types that are neither.
    pub fn of_input_type(name: &str) -> Option<Self> {
        [Self::Query, Self::Document].into_iter().find(|role| role.names().contains(&name))
    }

    /// Returns the names that files use for its prompt, the usual ones first.
    fn names(self) -> &'static [&'static str] {
        match self {
            Self::Query => {
                &["query", "search_query", "retrieval.query", "retrieval_query", "Retrieval-query"]
            }
            Self::Document => &[
                "document",
                "passage",
                "search_document",
                "retrieval.passage",
                "retrieval_document",
                "corpus",
                "Retrieval-document",
            ],
        }
    }
}

impl Prompts {
    /// Returns the prompt of this name.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.named.iter().find(|(other, _)| other == name).map(|(_, text)| text.as_str())
    }

    /// Returns the prompt of texts of a role; `None` if the model's files define none for it.
    pub fn of_role(&self, role: TextRole) -> Option<&str> {
        role.names().iter().find_map(|name| self.get(name))
    }

    /// Returns all names, separated by commas, for errors.
    pub fn names(&self) -> String {
        self.named.iter().map(|(name, _)| format!("`{name}`")).collect::<Vec<_>>().join(", ")
    }
}

/// `prompts` and `default_prompt_name` of sentence-transformers' `config_sentence_transformers.json`.
///
/// # Errors
/// The first prompt that is not a text of bounded length.
pub(crate) fn from_hf(config: &Map<String, Value>) -> Result<Prompts, String> {
    let refuse = |problem: String| Err(format!("`prompts`: {problem}"));
    let mut prompts = Prompts::default();
    let Some(named) = config.get("prompts").filter(|value| !value.is_null()) else { return Ok(prompts) };
    let Some(named) = named.as_object() else { return refuse("it is not an object".into()) };
    if named.len() > MAX_PROMPTS {
        return refuse(format!("it has {} prompts; at most {MAX_PROMPTS} are read", named.len()));
    }
    for (name, text) in named {
        let Some(text) = text.as_str() else { return refuse(format!("`{name}` is not a text")) };
        if text.len() > MAX_BYTES {
            return refuse(format!("`{name}` has {} bytes; a prompt may have {MAX_BYTES}", text.len()));
        }
        prompts.named.push((name.clone(), text.to_owned()));
    }
    prompts.default = config.get("default_prompt_name").and_then(Value::as_str).map(str::to_owned);
    Ok(prompts)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(config: Value) -> Result<Prompts, String> {
        from_hf(config.as_object().unwrap())
    }

    #[test]
    fn prompts_are_found_by_name_and_role() {
        let prompts = read(json!({
            "prompts": {"search_query": "search_query: ", "passage": "passage: ", "STS": ""},
            "default_prompt_name": "passage",
        }))
        .unwrap();
        assert_eq!(prompts.get("STS"), Some(""));
        assert_eq!(prompts.get("query"), None);
        assert_eq!(prompts.of_role(TextRole::Query), Some("search_query: "));
        assert_eq!(prompts.of_role(TextRole::Document), Some("passage: "));
        assert_eq!(prompts.names(), "`search_query`, `passage`, `STS`");
        assert_eq!(prompts.default.as_deref(), Some("passage"));
    }

    #[test]
    fn prompts_that_are_no_texts_are_refused() {
        for config in [json!({}), json!({"prompts": null})] {
            assert_eq!(read(config), Ok(Prompts::default()));
        }
        let many: Map<String, Value> = (0..=MAX_PROMPTS).map(|i| (i.to_string(), "".into())).collect();
        for (prompts, words) in [
            (json!([]), "not an object"),
            (json!({"query": 1}), "`query` is not a text"),
            (json!({"query": "x".repeat(MAX_BYTES + 1)}), "16385 bytes"),
            (many.into(), "257 prompts"),
        ] {
            let problem = read(json!({"prompts": prompts})).unwrap_err();
            assert!(problem.contains(words), "{problem}");
        }
    }
}
