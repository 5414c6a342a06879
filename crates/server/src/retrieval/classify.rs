//! `/v1/classify` and `/classify`, as vLLM has them, and `/predict`, as TEI has it.

use axum::{extract::State, response::Response};
use serde::{Deserialize, Deserializer, Serialize, de::Error};
use serde_untagged::UntaggedEnumVisitor;
use utoipa::ToSchema;

use super::{
    params::{self, TruncationParams, model_or_default},
    rerank::{self, best},
};
use crate::{
    AppState,
    error::ApiError,
    extract::{Json, written},
    generate::{self, Caller, ClassifyInput, ClassifyRequest, Field, Prompt},
    ids,
    openai::{completions::PromptParam, embeddings::EmbeddingUsage},
    wire::{Body, OneOrMany, Other, refused},
};

/// Texts to classify.
#[derive(Debug, Deserialize, ToSchema)]
pub struct ClassifyParams {
    /// The model's name, as `/v1/models` lists it; the first model that the server was started with if absent.
    pub model: Option<String>,
    /// A text, its tokens, or a list of these.
    pub input: PromptParam,
    /// False for logits. Otherwise scores are between 0 and 1. (vLLM's.)
    pub use_activation: Option<bool>,
    #[serde(flatten)]
    pub truncation: TruncationParams,
}

impl Body for ClassifyParams {
    const OTHERS: &'static [&'static [Other]] = &[
        &rerank::COMMON,
        &[
            refused("softmax", &["true"], "`use_activation` turns it off"),
            refused("activation", &["true"], "its name is `use_activation`"),
            refused(
                "add_special_tokens",
                &["true"],
                "the model's tokenizer defines the tokens around a text",
            ),
        ],
    ];
}

/// Scores of labels for texts.
#[derive(Debug, Serialize, ToSchema)]
pub struct ClassifyList {
    id: String,
    /// Always `list`.
    object: &'static str,
    /// Seconds since 1970.
    created: u64,
    model: String,
    /// In the order of the texts.
    data: Vec<ClassifyResult>,
    usage: EmbeddingUsage,
}

/// Scores of the labels for one text.
#[derive(Debug, Serialize, ToSchema)]
pub struct ClassifyResult {
    /// Index of the text.
    index: usize,
    /// The label with the highest score.
    label: String,
    /// Scores of all labels, in the model's order.
    probs: Vec<f32>,
    /// Number of labels.
    num_classes: usize,
}

/// Classifies texts.
///
/// # Errors
/// Fields with values that are not supported, by name.
#[utoipa::path(
    post, path = "/v1/classify", tag = "Retrieval", request_body = ClassifyParams,
    responses((status = 200, body = ClassifyList)),
)]
pub async fn v1(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<ClassifyParams>,
) -> Result<Response, ApiError> {
    let (inputs, field) = params::read_inputs(body.input, "input", &state.settings)?;
    let request = ClassifyRequest {
        inputs: inputs.into_iter().map(ClassifyInput::One).collect(),
        field,
        truncation: body.truncation.read()?,
        raw: body.use_activation == Some(false),
    };
    let model = model_or_default(&state, body.model).await?;
    let client = caller.client.clone();
    let classified = generate::classify(&state, caller, &model, request).await?;
    let answer = move || {
        let result = |(index, probs): (usize, &Vec<f32>)| ClassifyResult {
            index,
            label: classified.labels()[best(probs, 1)[0].0].clone(),
            num_classes: probs.len(),
            probs: probs.clone(),
        };
        ClassifyList {
            id: ids::new("classify-"),
            object: "list",
            created: ids::now(),
            data: classified.scores.iter().enumerate().map(result).collect(),
            usage: EmbeddingUsage { prompt_tokens: classified.tokens, total_tokens: classified.tokens },
            model: classified.model,
        }
    };
    written(&state, &client, answer).await
}

/// Classifies texts: another path of `/v1/classify`.
///
/// # Errors
/// Fields with values that are not supported, by name.
#[utoipa::path(
    post, path = "/classify", tag = "Retrieval", request_body = ClassifyParams,
    responses((status = 200, body = ClassifyList)),
)]
pub async fn short(
    state: State<AppState>,
    caller: Caller,
    body: Json<ClassifyParams>,
) -> Result<Response, ApiError> {
    v1(state, caller, body).await
}

/// Texts to classify, in TEI's words.
#[derive(Debug, Deserialize, ToSchema)]
pub struct PredictParams {
    /// The model's name; the first model that the server was started with if absent.
    pub model: Option<String>,
    /// A text; a pair of texts, which the model reads together, as a list of two; or a list of lists of one or two texts.
    pub inputs: PredictInput,
    /// Whether scores are logits. Otherwise they are between 0 and 1.
    pub raw_scores: Option<bool>,
    #[serde(flatten)]
    pub truncation: TruncationParams,
}

impl Body for PredictParams {
    const OTHERS: &'static [&'static [Other]] = &[&rerank::COMMON];
}

/// One input, or several.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub enum PredictInput {
    /// A text.
    Text(String),
    /// A list of one text, or a pair of texts.
    Texts(Vec<String>),
    /// Several of these lists.
    Lists(Vec<Vec<String>>),
}

impl<'de> Deserialize<'de> for PredictInput {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        UntaggedEnumVisitor::new()
            .expecting("a text, a pair of texts, or a list of lists of one or two texts")
            .string(|text| Ok(Self::Text(text.to_owned())))
            .seq(|list| {
                let elements: Vec<OneOrMany<String>> = list.deserialize()?;
                let lists = elements.iter().filter(|element| matches!(element, OneOrMany::Many(_))).count();
                if lists == 0 {
                    return Ok(Self::Texts(elements.into_iter().flat_map(OneOrMany::into_vec).collect()));
                }
                if lists < elements.len() {
                    return Err(Error::custom("a list has either texts, or lists of one or two texts"));
                }
                Ok(Self::Lists(elements.into_iter().map(OneOrMany::into_vec).collect()))
            })
            .deserialize(deserializer)
    }
}

impl PredictInput {
    /// Returns the inputs of the classifier.
    ///
    /// # Errors
    /// A list that has not one or two texts, or an empty text, by index.
    fn read(self, field: Field) -> Result<Vec<ClassifyInput>, ApiError> {
        let input = |(index, texts): (usize, Vec<String>)| {
            let param = field.at(index);
            if texts.iter().any(String::is_empty) {
                return Err(ApiError::invalid(&param, format!("`{param}` has an empty text; leave it out")));
            }
            let count = texts.len();
            let mut texts = texts.into_iter();
            match (texts.next(), texts.next(), texts.next()) {
                (Some(text), None, _) => Ok(ClassifyInput::One(Prompt::Text(text))),
                (Some(first), Some(second), None) => Ok(ClassifyInput::Pair(first, second)),
                _ => {
                    let message = format!(
                        "`{param}` is a list of {count} texts, but an input is one text or a pair; several inputs are a list of \
                         lists: [[\"first\"], [\"second\"]]"
                    );
                    Err(ApiError::invalid(&param, message))
                }
            }
        };
        let lists = match self {
            Self::Text(text) => vec![vec![text]],
            Self::Texts(texts) => vec![texts],
            Self::Lists(lists) => lists,
        };
        lists.into_iter().enumerate().map(input).collect()
    }
}

/// Predictions of one input, or a list of them for each of several.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub enum PredictAnswer {
    /// Of one input.
    One(Vec<Prediction>),
    /// Of several inputs, in order.
    Many(Vec<Vec<Prediction>>),
}

/// A label's score.
#[derive(Debug, Serialize, ToSchema)]
pub struct Prediction {
    score: f32,
    label: String,
}

/// Classifies texts: the answer is a list of labels with scores, the best one first.
///
/// # Errors
/// Fields with values that are not supported, by name.
#[utoipa::path(
    post, path = "/predict", tag = "Retrieval", request_body = PredictParams,
    responses((status = 200, body = PredictAnswer)),
)]
pub async fn predict(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<PredictParams>,
) -> Result<Response, ApiError> {
    let is_list = matches!(body.inputs, PredictInput::Lists(_));
    let field = Field { name: "inputs", is_list };
    let request = ClassifyRequest {
        inputs: body.inputs.read(field)?,
        field,
        truncation: body.truncation.read()?,
        raw: body.raw_scores == Some(true),
    };
    let model = model_or_default(&state, body.model).await?;
    let client = caller.client.clone();
    let classified = generate::classify(&state, caller, &model, request).await?;
    let answer = move || {
        let predictions = |scores: &Vec<f32>| {
            let labels = classified.labels();
            let best = best(scores, scores.len()).into_iter();
            best.map(|(at, score)| Prediction { score, label: labels[at].clone() }).collect()
        };
        let mut all = classified.scores.iter().map(predictions);
        if is_list {
            return PredictAnswer::Many(all.collect());
        }
        PredictAnswer::One(all.next().unwrap_or_default())
    };
    written(&state, &client, answer).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_are_texts_pairs_or_lists_of_them() {
        let read = |json: &str| {
            let input: PredictInput = serde_json::from_str(json).map_err(|error| error.to_string())?;
            let is_list = matches!(input, PredictInput::Lists(_));
            let read = input.read(Field { name: "inputs", is_list }).map_err(|error| error.to_string())?;
            let shape = |input: &ClassifyInput| match input {
                ClassifyInput::One(_) => 1,
                ClassifyInput::Pair(..) => 2,
            };
            Ok::<Vec<usize>, String>(read.iter().map(shape).collect())
        };
        for (json, expected) in [
            (r#""a""#, &[1][..]),
            (r#"["a"]"#, &[1]),
            (r#"["a", "b"]"#, &[2]),
            (r#"[["a"], ["b", "c"], ["d"]]"#, &[1, 2, 1]),
        ] {
            assert_eq!(read(json).as_deref(), Ok(expected), "{json}");
        }
        for (json, words) in [
            ("[]", "`inputs` is a list of 0 texts"),
            (r#"["a", "b", "c"]"#, "`inputs` is a list of 3 texts"),
            (r#"[["a"], []]"#, "`inputs[1]` is a list of 0 texts"),
            (r#"[["a"], ["b", ""]]"#, "`inputs[1]` has an empty text"),
            (r#"["a", ["b"]]"#, "either texts, or lists"),
            ("[1]", "a string or a list of strings"),
            ("7", "a text, a pair of texts"),
        ] {
            let problem = read(json).unwrap_err();
            assert!(problem.contains(words), "{json}: {problem}");
        }
    }
}
