//! Pooling of a text's token embeddings, from a model's files.

use paguro_backend::mean_of_rows;
use serde_json::{Map, Value};

use crate::{arch::Definition, gguf::Metadata};

/// Tokens whose embeddings represent a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// The last token, which attends to all others: the usual training of decoders, and the default.
    Last,
    /// All of them: their mean.
    Mean,
    /// The first one.
    First,
    /// All of them, without pooling: one row after another.
    All,
}

/// Number of the pooling of classifiers and rerankers.
pub(crate) const RANK: u32 = 4;

impl Pooling {
    /// The number of `{architecture}.pooling_type`.
    pub(crate) fn number(self) -> u32 {
        match self {
            Self::Mean => 1,
            Self::First => 2,
            Self::Last => 3,
            Self::All => 0,
        }
    }

    /// Pools the rows of a text, `[tokens, hidden]`.
    pub fn pool(self, rows: &[f32], hidden: usize) -> Vec<f32> {
        match self {
            Self::All => rows.to_vec(),
            Self::First => rows[..hidden.min(rows.len())].to_vec(),
            Self::Last => rows[rows.len().saturating_sub(hidden)..].to_vec(),
            Self::Mean => mean_of_rows(rows.chunks_exact(hidden), hidden),
        }
    }
}

/// Reason for which a model has no embeddings.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "this model's embeddings are not supported: its file asks for {what} (supported: pooling by last token, mean and first token)"
)]
pub struct PoolingError {
    /// Name of the unsupported pooling.
    pub what: String,
}

/// `{architecture}.pooling_type`, numbered as llama.cpp does.
pub(crate) fn from_gguf(metadata: &Metadata, architecture: &str) -> Result<Pooling, PoolingError> {
    match metadata.u32(&format!("{architecture}.pooling_type")) {
        // 0 means no pooling, which files of models without trained embeddings state.
        None | Some(0) if is_encoder(architecture) => Ok(Pooling::Mean),
        None | Some(0 | 3) => Ok(Pooling::Last),
        Some(1) => Ok(Pooling::Mean),
        Some(2) => Ok(Pooling::First),
        // A rank: what the classifier reads.
        Some(RANK) if is_encoder(architecture) => Ok(Pooling::First),
        Some(RANK) => Ok(Pooling::Last),
        Some(other) => Err(PoolingError { what: format!("pooling type {other}") }),
    }
}

/// Reads the files of sentence-transformers: `modules.json` lists the modules after the model, and
/// `1_Pooling/config.json` has a flag for each kind of pooling. A final normalization is the caller's choice.
///
/// A classifier reads the first token, unless `config` specifies otherwise. Encoders without any of these settings use the mean.
pub(crate) fn from_hf(
    modules: &Value,
    pooling: &Map<String, Value>,
    class: &str,
    config: &Map<String, Value>,
) -> Result<Pooling, PoolingError> {
    let architecture = Definition::from_hf(class).map_or("", |definition| definition.gguf);
    if class.ends_with("ForSequenceClassification") && is_encoder(architecture) {
        let mean = config.get("classifier_pooling").and_then(Value::as_str) == Some("mean");
        return Ok(if mean { Pooling::Mean } else { Pooling::First });
    }
    let mut last = 0;
    for module in modules.as_array().into_iter().flatten() {
        let name = module.get("type").and_then(Value::as_str).unwrap_or("a module without a type");
        let kind = name.rsplit('.').next().unwrap_or(name);
        let Some(place) = MODULES.iter().position(|known| *known == kind) else {
            return Err(PoolingError { what: format!("the module `{name}`") });
        };
        if place < last {
            return Err(PoolingError { what: format!("the module `{kind}` after `{}`", MODULES[last]) });
        }
        last = place;
    }
    let found = match modes(pooling)?[..] {
        [] if is_encoder(architecture) => Pooling::Mean,
        [] | ["lasttoken"] => Pooling::Last,
        ["mean"] => Pooling::Mean,
        ["cls"] => Pooling::First,
        ref several => return Err(PoolingError { what: format!("`{}`", several.join("` and `")) }),
    };
    if found == Pooling::Mean && pooling.get("include_prompt") == Some(&Value::Bool(false)) {
        return Err(PoolingError {
            what: "the mean without the tokens of a prompt (`include_prompt`: false)".into(),
        });
    }
    Ok(found)
}

/// Modules of sentence-transformers, in the order in which they are supported.
const MODULES: [&str; 4] = ["Transformer", "Pooling", "Dense", "Normalize"];

/// Keys of a configuration with a flag for each mode, and the modes.
const FLAGS: [(&str, &str); 6] = [
    ("pooling_mode_cls_token", "cls"),
    ("pooling_mode_max_tokens", "max"),
    ("pooling_mode_mean_tokens", "mean"),
    ("pooling_mode_mean_sqrt_len_tokens", "mean_sqrt_len_tokens"),
    ("pooling_mode_weightedmean_tokens", "weightedmean"),
    ("pooling_mode_lasttoken", "lasttoken"),
];

/// Returns the modes of a configuration: those of `pooling_mode`, which newer versions of sentence-transformers write, or
/// else those whose flag is set.
fn modes(config: &Map<String, Value>) -> Result<Vec<&str>, PoolingError> {
    let strange = |key: &str, value: &Value| PoolingError { what: format!("`{key}`: {value}") };
    if let Some(mode) = config.get("pooling_mode") {
        let modes = match mode {
            Value::Array(modes) => modes.iter().map(Value::as_str).collect(),
            mode => mode.as_str().map(|mode| vec![mode]),
        };
        return modes.ok_or_else(|| strange("pooling_mode", mode));
    }
    let mut modes = Vec::new();
    for (key, value) in config.iter().filter(|(key, _)| key.starts_with("pooling_mode_")) {
        let known = FLAGS.iter().find(|(flag, _)| flag == key);
        match (value, known) {
            (Value::Bool(false), _) => {}
            (Value::Bool(true), Some((_, mode))) => modes.push(*mode),
            _ => return Err(strange(key, value)),
        }
    }
    Ok(modes)
}

/// True for architectures whose rows attend in both directions.
fn is_encoder(architecture: &str) -> bool {
    Definition::from_gguf(architecture).is_ok_and(Definition::is_encoder)
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};
    use serde_json::json;

    use super::*;
    use crate::gguf;

    fn show(pooling: Result<Pooling, PoolingError>) -> String {
        pooling.map_or_else(|error| error.to_string(), |pooling| format!("{pooling:?}"))
    }

    #[test]
    fn gguf_files_number_the_kinds() {
        let check = |kind: Option<u32>, expected: Expect| {
            let mut metadata = Metadata::default();
            if let Some(kind) = kind {
                metadata.insert("qwen3.pooling_type".into(), gguf::Value::U32(kind));
            }
            expected.assert_eq(&show(from_gguf(&metadata, "qwen3")));
        };
        check(None, expect!["Last"]);
        check(Some(0), expect!["Last"]);
        check(Some(1), expect!["Mean"]);
        check(Some(2), expect!["First"]);
        check(Some(3), expect!["Last"]);
        check(Some(4), expect!["Last"]);
        check(
            Some(5),
            expect![[
                r#"this model's embeddings are not supported: its file asks for pooling type 5 (supported: pooling by last token, mean and first token)"#
            ]],
        );
    }

    #[test]
    fn encoders_have_the_mean_and_classifiers_the_first_token() {
        let gguf = |architecture: &str, kind: Option<u32>| {
            let mut metadata = Metadata::default();
            if let Some(kind) = kind {
                metadata.insert(format!("{architecture}.pooling_type"), gguf::Value::U32(kind));
            }
            show(from_gguf(&metadata, architecture))
        };
        assert_eq!((gguf("bert", None), gguf("bert", Some(0))), ("Mean".into(), "Mean".into()));
        assert_eq!((gguf("bert", Some(2)), gguf("bert", Some(4))), ("First".into(), "First".into()));
        let folder = |class: &str, config: Value| {
            let config = config.as_object().cloned().unwrap_or_default();
            show(from_hf(&Value::Null, &Map::new(), class, &config))
        };
        assert_eq!(folder("BertModel", json!({})), "Mean");
        assert_eq!(folder("BertForSequenceClassification", json!({})), "First");
        let mean = json!({"classifier_pooling": "mean"});
        assert_eq!(folder("ModernBertForSequenceClassification", mean), "Mean");
    }

    #[test]
    fn folders_have_flags_and_modules() {
        let check = |modules: Value, pooling: Value, expected: Expect| {
            let pooling = pooling.as_object().cloned().unwrap_or_default();
            expected.assert_eq(&show(from_hf(&modules, &pooling, "Qwen3ForCausalLM", &Map::new())));
        };
        let qwen = json!([
            {"idx": 0, "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "type": "sentence_transformers.models.Pooling"},
            {"idx": 2, "type": "sentence_transformers.models.Normalize"},
        ]);
        check(json!(null), json!({}), expect!["Last"]);
        check(
            qwen,
            json!({"word_embedding_dimension": 1024, "pooling_mode_cls_token": false, "pooling_mode_lasttoken": true, "include_prompt": true}),
            expect!["Last"],
        );
        check(json!([]), json!({"pooling_mode_mean_tokens": true}), expect!["Mean"]);
        check(json!([]), json!({"pooling_mode_cls_token": true}), expect!["First"]);
        check(
            json!([]),
            json!({"pooling_mode_cls_token": true, "pooling_mode_max_tokens": true}),
            expect![[
                r#"this model's embeddings are not supported: its file asks for `cls` and `max` (supported: pooling by last token, mean and first token)"#
            ]],
        );
        check(json!([]), json!({"pooling_mode": "cls"}), expect!["First"]);
        check(json!([]), json!({"pooling_mode": ["mean"], "pooling_mode_cls_token": true}), expect!["Mean"]);
        check(
            json!([]),
            json!({"pooling_mode": "max"}),
            expect![
                "this model's embeddings are not supported: its file asks for `max` (supported: pooling by last token, mean and first token)"
            ],
        );
        check(
            json!([]),
            json!({"pooling_mode": 3}),
            expect![
                "this model's embeddings are not supported: its file asks for `pooling_mode`: 3 (supported: pooling by last token, mean and first token)"
            ],
        );
        check(
            json!([]),
            json!({"pooling_mode_cls_token": "yes"}),
            expect![[
                r#"this model's embeddings are not supported: its file asks for `pooling_mode_cls_token`: "yes" (supported: pooling by last token, mean and first token)"#
            ]],
        );
        check(
            json!([]),
            json!({"pooling_mode_new": true}),
            expect![
                "this model's embeddings are not supported: its file asks for `pooling_mode_new`: true (supported: pooling by last token, mean and first token)"
            ],
        );
        check(
            json!([]),
            json!({"pooling_mode": "mean", "include_prompt": false}),
            expect![
                "this model's embeddings are not supported: its file asks for the mean without the tokens of a prompt (`include_prompt`: false) (supported: pooling by last token, mean and first token)"
            ],
        );
        check(
            json!([{"type": "Dense"}, {"type": "Pooling"}]),
            json!({}),
            expect![
                "this model's embeddings are not supported: its file asks for the module `Pooling` after `Dense` (supported: pooling by last token, mean and first token)"
            ],
        );
        check(
            json!([{"idx": 0}]),
            json!({}),
            expect![
                "this model's embeddings are not supported: its file asks for the module `a module without a type` (supported: pooling by last token, mean and first token)"
            ],
        );
        check(
            json!([{"type": "sentence_transformers.models.LSTM"}]),
            json!({}),
            expect![[
                r#"this model's embeddings are not supported: its file asks for the module `sentence_transformers.models.LSTM` (supported: pooling by last token, mean and first token)"#
            ]],
        );
    }
}
