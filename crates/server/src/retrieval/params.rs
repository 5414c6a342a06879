//! Fields that requests for embeddings and for scores share, in the words of several APIs.

use base64::{Engine, prelude::BASE64_STANDARD};
use paguro_model::tokenizer::Cut;
use serde::{Deserialize, Deserializer, Serialize};
use serde_untagged::UntaggedEnumVisitor;
use utoipa::{
    PartialSchema, ToSchema,
    openapi::{RefOr, Schema},
};

use crate::{
    AppState,
    count::ClientCount,
    error::ApiError,
    generate::{Field, MAX_INPUTS, Prompt, PromptChoice, Truncation},
    openai::completions::PromptParam,
    settings::ServerSettings,
    source::{ModelEntry, Outside},
    wire::{Limit, Other, left_out, no_effect, refused},
};

/// Fields about texts that are too long.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub struct TruncationParams {
    /// Cuts texts that are too long: a boolean, or `NONE`, `END` or `START` for the end that loses tokens. Without it, they are
    /// refused. (Jina's, TEI's and Cohere's.)
    pub truncate: Option<TruncateParam>,
    /// The end that loses tokens, the right one if absent. (TEI's.)
    pub truncation_direction: Option<Direction>,
    /// Cuts texts to this many tokens; -1 is as many as the model reads. (vLLM's.)
    pub truncate_prompt_tokens: Option<Limit>,
    /// The end that loses tokens, the right one if absent. (vLLM's.)
    pub truncation_side: Option<Side>,
}

/// Whether texts that are too long are cut.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(untagged)]
pub enum TruncateParam {
    /// Whether their ends are cut off.
    Flag(bool),
    /// `NONE`, `END` or `START`.
    End(String),
}

impl<'de> Deserialize<'de> for TruncateParam {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        UntaggedEnumVisitor::new()
            .expecting("a boolean, or `NONE`, `START` or `END`")
            .bool(|flag| Ok(Self::Flag(flag)))
            .string(|text| Ok(Self::End(text.to_owned())))
            .deserialize(deserializer)
    }
}

/// An end of a text, as TEI names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
pub enum Direction {
    /// The beginning.
    #[serde(alias = "left")]
    Left,
    /// The end.
    #[serde(alias = "right")]
    Right,
}

/// An end of a text, as vLLM names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Side {
    /// The beginning.
    Left,
    /// The end.
    Right,
}

impl TruncationParams {
    /// Returns what happens to texts that are too long.
    ///
    /// # Errors
    /// A value without a meaning, by name.
    pub fn read(&self) -> Result<Truncation, ApiError> {
        let of = |is_left: bool| if is_left { Cut::Start } else { Cut::End };
        let direction = self.truncation_direction.map(|direction| of(direction == Direction::Left));
        let side = self.truncation_side.map(|side| of(side == Side::Left));
        let at = side.or(direction);
        let truncate = match &self.truncate {
            None => None,
            Some(TruncateParam::Flag(false)) => Some(Truncation::Refuse),
            Some(TruncateParam::Flag(true)) => Some(Truncation::to_context(at.unwrap_or_default())),
            Some(TruncateParam::End(end)) => Some(match end.to_ascii_uppercase().as_str() {
                "NONE" => Truncation::Refuse,
                "END" | "RIGHT" => Truncation::to_context(Cut::End),
                "START" | "LEFT" => Truncation::to_context(Cut::Start),
                _ => {
                    let message = format!(
                        "`truncate` must be a boolean, `NONE`, `START` or `END`, not `{}`",
                        end.chars().take(40).collect::<String>()
                    );
                    return Err(ApiError::invalid("truncate", message));
                }
            }),
        };
        Ok(match (self.truncate_prompt_tokens, truncate) {
            (Some(Limit(tokens)), _) => {
                let tokens = tokens.map(|tokens| (ClientCount::from(tokens), "truncate_prompt_tokens"));
                Truncation::Cut { at: at.unwrap_or_default(), tokens }
            }
            (None, Some(truncation)) => truncation,
            (None, None) => Truncation::Refuse,
        })
    }
}

/// Fields that select a prompt of the model.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub struct PromptParams {
    /// Name of a prompt that the model's files define; its text is put before each text. Without it, none is.
    pub prompt_name: Option<String>,
    /// Purpose of the texts: `query` or `document` (also `search_query`, `passage`, ...), or the name of a prompt. If the
    /// model's files define a prompt for it, its text is put before each text.
    pub input_type: Option<String>,
}

impl PromptParams {
    /// Returns the choice.
    ///
    /// # Errors
    /// There are two.
    pub fn read(self) -> Result<PromptChoice, ApiError> {
        match (self.prompt_name, self.input_type) {
            (None, None) => Ok(PromptChoice::None),
            (Some(name), None) => Ok(PromptChoice::Named { name, param: "prompt_name" }),
            (None, Some(name)) => Ok(PromptChoice::InputType { name, param: "input_type" }),
            (Some(_), Some(_)) => {
                let message = "`prompt_name` and `input_type` both select a prompt; give one of them";
                Err(ApiError::invalid("prompt_name", message))
            }
        }
    }
}

/// Encoding of vectors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum EncodingFormat {
    /// Lists of numbers.
    #[default]
    Float,
    /// 32-bit floats, little-endian, as base64.
    Base64,
    /// Integers from -127 to 127. Each vector has its own scale: its largest element becomes 127 or -127.
    Int8,
    /// The same plus 128.
    Uint8,
    /// One bit per element, set if the element is positive; eight of them, the first one highest, less 128.
    Binary,
    /// The same without subtracting 128.
    Ubinary,
}

/// A vector.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub enum Vector {
    /// Its values; integers where the encoding has them.
    Numbers(Numbers),
    /// Its values as base64.
    Base64(String),
}

/// Values of a vector.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub enum Numbers {
    /// As they are.
    Floats(Vec<f32>),
    /// In eight bits, or eight bits in each.
    Integers(Vec<i16>),
}

impl PartialSchema for Numbers {
    fn schema() -> RefOr<Schema> {
        // Integers are numbers, too: as alternatives, both would fit a list of integers.
        Vec::<f32>::schema()
    }
}

impl ToSchema for Numbers {}

impl EncodingFormat {
    /// Encodes a vector.
    pub fn write(self, vector: Vec<f32>) -> Vector {
        let integers = |integers| Vector::Numbers(Numbers::Integers(integers));
        match self {
            Self::Float => Vector::Numbers(Numbers::Floats(vector)),
            Self::Base64 => {
                let bytes: Vec<u8> = vector.into_iter().flat_map(f32::to_le_bytes).collect();
                Vector::Base64(BASE64_STANDARD.encode(bytes))
            }
            Self::Int8 => integers(scaled(&vector, 0)),
            Self::Uint8 => integers(scaled(&vector, 128)),
            Self::Binary => integers(signs(&vector, 128)),
            Self::Ubinary => integers(signs(&vector, 0)),
        }
    }
}

fn scaled(vector: &[f32], offset: i16) -> Vec<i16> {
    let largest = vector.iter().fold(0f32, |largest, value| largest.max(value.abs()));
    let scale = if largest > 0.0 { 127.0 / largest } else { 0.0 };
    vector.iter().map(|value| (value * scale).round() as i16 + offset).collect()
}

fn signs(vector: &[f32], offset: i16) -> Vec<i16> {
    let byte = |eight: &[f32]| {
        let bits = eight.iter().enumerate().map(|(at, &value)| i16::from(value > 0.0) << (7 - at));
        bits.sum::<i16>() - offset
    };
    vector.chunks(8).map(byte).collect()
}

/// The model of a request: the one that it names, or else the first that the server was started with.
///
/// # Errors
/// There are no models.
pub async fn model_or_default(state: &AppState, model: Option<String>) -> Result<String, ApiError> {
    if let Some(model) = model {
        return Ok(model);
    }
    let models = state.models.list().await?;
    let is_named = |entry: &&ModelEntry| matches!(state.models.outside(&entry.name), Some(Outside::Disk(_)));
    let first = models.iter().find(is_named).or(models.first());
    first.map(|entry| entry.name.clone()).ok_or_else(|| ApiError::invalid("model", "there are no models"))
}

/// Returns the inputs of the field `name`. Texts and lists of tokens with nothing in them are refused, as in OpenAI's API: a model
/// without a token at the beginning of each text has no vector for them.
///
/// # Errors
/// The first empty input, no inputs or too many, or token ids that the settings refuse.
pub fn read_inputs(
    input: PromptParam,
    name: &'static str,
    settings: &ServerSettings,
) -> Result<(Vec<Prompt>, Field), ApiError> {
    let is_list = matches!(input, PromptParam::Texts(_) | PromptParam::TokenLists(_));
    let field = Field { name, is_list };
    let empty = match &input {
        PromptParam::Text(text) => text.is_empty().then_some((0, "an empty text")),
        PromptParam::Texts(texts) => {
            texts.iter().position(String::is_empty).map(|index| (index, "an empty text"))
        }
        PromptParam::TokenLists(lists) => {
            lists.iter().position(Vec::is_empty).map(|index| (index, "an empty list of tokens"))
        }
        PromptParam::Tokens(_) => None,
    };
    if let Some((index, kind)) = empty {
        let param = field.at(index);
        let message = format!("`{param}` is {kind}, of which there is no embedding; leave it out");
        return Err(ApiError::invalid(param, message));
    }
    Ok((input.into_prompts(name, MAX_INPUTS, settings)?, field))
}

/// Known fields of requests for embeddings that have no implementation.
pub const OTHERS: &[Other] = &[
    no_effect("user", "the server does not tell anybody about users"),
    left_out("priority", &["0"], "requests of a client are equal"),
    left_out("request_id", &[], "the server makes its own; the header `X-Request-Id` sets it"),
    refused("add_special_tokens", &["true"], "the model's tokenizer defines the tokens around a text"),
    refused("use_activation", &["true"], "vectors are normalized; `normalize` turns that off"),
    refused("normalized", &["true"], "vectors are normalized; `normalize` turns that off"),
    refused("embed_dtype", &["\"float32\""], "`encoding_format` has `int8` and `binary`"),
    refused("endianness", &["\"little\"", "\"native\""], "floats are little-endian"),
    refused("late_chunking", &["false"], "each text is embedded alone"),
    refused(
        "return_multivector",
        &["false"],
        "`return_colbert_vecs` of /v1/embeddings returns a vector of each token",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    fn integers(format: EncodingFormat, vector: &[f32]) -> Vec<i16> {
        match format.write(vector.to_vec()) {
            Vector::Numbers(Numbers::Integers(integers)) => integers,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn vectors_become_integers() {
        let vector = [0.5, -1.0, 0.0, 0.25, 1e-9, -0.1, 1.0, 0.3, 0.2];
        assert_eq!(integers(EncodingFormat::Int8, &vector), [64, -127, 0, 32, 0, -13, 127, 38, 25]);
        assert_eq!(integers(EncodingFormat::Uint8, &vector)[..3], [192, 1, 128]);
        assert_eq!(integers(EncodingFormat::Ubinary, &vector), [0b1001_1011, 0b1000_0000]);
        assert_eq!(integers(EncodingFormat::Binary, &vector), [0b1001_1011 - 128, 0]);
        assert_eq!(integers(EncodingFormat::Int8, &[0.0; 2]), [0, 0]);
        assert_eq!(integers(EncodingFormat::Binary, &[]), [0i16; 0]);
    }

    #[test]
    fn truncation_has_the_words_of_several_apis() {
        let read = |json: &str| {
            let params: TruncationParams = serde_json::from_str(json).unwrap();
            params.read().map_err(|error| error.to_string())
        };
        let limit = |tokens: usize| Some((ClientCount::from(tokens), "truncate_prompt_tokens"));
        for (json, expected) in [
            ("{}", Truncation::Refuse),
            (r#"{"truncate": false}"#, Truncation::Refuse),
            (r#"{"truncate": "NONE"}"#, Truncation::Refuse),
            (r#"{"truncate": true}"#, Truncation::to_context(Cut::End)),
            (r#"{"truncate": "START"}"#, Truncation::to_context(Cut::Start)),
            (r#"{"truncate": true, "truncation_direction": "Left"}"#, Truncation::to_context(Cut::Start)),
            (r#"{"truncation_side": "left"}"#, Truncation::Refuse),
            (r#"{"truncate_prompt_tokens": -1}"#, Truncation::to_context(Cut::End)),
            (
                r#"{"truncate_prompt_tokens": 7, "truncation_side": "left"}"#,
                Truncation::Cut { at: Cut::Start, tokens: limit(7) },
            ),
        ] {
            assert_eq!(read(json), Ok(expected), "{json}");
        }
        assert!(read(r#"{"truncate": "middle"}"#).unwrap_err().contains("`middle`"));
    }
}
