//! `/v1/models`.

use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;

use crate::{
    AppState,
    error::ApiError,
    extract::{Json, Path},
    source::ModelEntry,
};

/// All models.
#[derive(Debug, Serialize, ToSchema)]
pub struct ModelList {
    /// Always `list`.
    object: &'static str,
    data: Vec<ModelObject>,
}

/// A model.
#[derive(Debug, Serialize, ToSchema)]
pub struct ModelObject {
    /// Name of the model.
    id: String,
    /// Always `model`.
    object: &'static str,
    /// Time at which it was added, in seconds since 1970.
    created: u64,
    /// `paguro`, or the name that `--owned-by` sets.
    owned_by: String,
    /// The model's name; of an adapter, its path. (vLLM's name.)
    root: String,
    /// Name of the model that an adapter changes; `null` for models.
    parent: Option<String>,
    /// Maximum tokens of prompt and answer, as it is loaded or would be; `null` if unknown. (vLLM's name.)
    max_model_len: Option<usize>,
    /// As `max_model_len`.
    context_length: Option<usize>,
    /// `completion`, and `multimodal` for a model that reads images. For an encoder, `embedding` or `rerank`. (llama.cpp's
    /// name.)
    capabilities: Vec<&'static str>,
    architecture: ModelModalities,
    /// Reason for which the model cannot be used.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

/// Input and output of a model. (llama.cpp's names.)
#[derive(Debug, Serialize, ToSchema)]
pub struct ModelModalities {
    /// `text`, and `image` for a model that reads images.
    input_modalities: Vec<&'static str>,
    /// Always `text`.
    output_modalities: Vec<&'static str>,
}

impl ModelObject {
    fn new(state: &AppState, entry: ModelEntry) -> Self {
        let context = state.models.context(&entry);
        let sees = entry.details.projector.is_some();
        let with = |always: &'static str, if_sees: &'static str| {
            std::iter::once(always).chain(sees.then_some(if_sees)).collect()
        };
        Self {
            root: entry
                .adapter
                .as_ref()
                .map_or_else(|| entry.name.clone(), |it| it.path.display().to_string()),
            parent: entry.adapter.as_ref().map(|adapter| adapter.base.clone()),
            id: entry.name,
            object: "model",
            created: entry.created,
            owned_by: state.settings.owned_by.clone(),
            max_model_len: context,
            context_length: context,
            capabilities: with(entry.details.encodes_for.unwrap_or("completion"), "multimodal"),
            architecture: ModelModalities {
                input_modalities: with("text", "image"),
                output_modalities: vec!["text"],
            },
            problem: entry.details.problem,
        }
    }
}

/// Lists all models, loaded or not.
///
/// # Errors
/// The library cannot be read.
#[utoipa::path(get, path = "/v1/models", tag = "OpenAI", responses((status = 200, body = ModelList)))]
pub async fn list(State(state): State<AppState>) -> Result<Json<ModelList>, ApiError> {
    let models = state.models.list().await?;
    let data = models.into_iter().map(|entry| ModelObject::new(&state, entry)).collect();
    Ok(Json(ModelList { object: "list", data }))
}

/// Returns one model.
///
/// # Errors
/// No model has this name.
#[utoipa::path(
    get, path = "/v1/models/{model}", tag = "OpenAI",
    params(("model" = String, Path, description = "The model's name; it may have slashes")),
    responses((status = 200, body = ModelObject)),
)]
pub async fn get(
    State(state): State<AppState>,
    Path(model): Path<String>,
) -> Result<Json<ModelObject>, ApiError> {
    let entry = state.models.find(&model).await?;
    Ok(Json(ModelObject::new(&state, entry)))
}
