//! `/v1/models`.

use axum::extract::{Path, State};
use serde::Serialize;
use utoipa::ToSchema;

use crate::{AppState, error::ApiError, extract::Json, source::ModelEntry};

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
    /// The name to ask for it.
    id: String,
    /// Always `model`.
    object: &'static str,
    /// When it came here, in seconds since 1970.
    created: u64,
    /// Always `paguro`.
    owned_by: &'static str,
    /// Most tokens of a prompt with its answer, as it is loaded or would be; `null` if that is not known. vLLM's name for it.
    max_model_len: Option<usize>,
    /// As `max_model_len`.
    context_length: Option<usize>,
    /// Why the model cannot be used, if it cannot.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

impl ModelObject {
    fn new(state: &AppState, entry: ModelEntry) -> Self {
        let context = state.models.context(&entry);
        Self {
            id: entry.name,
            object: "model",
            created: entry.created,
            owned_by: "paguro",
            max_model_len: context,
            context_length: context,
            problem: entry.details.problem,
        }
    }
}

/// Lists all models, loaded or not.
///
/// # Errors
/// What is wrong with the library.
#[utoipa::path(
    get, path = "/v1/models", tag = "OpenAI",
    responses((status = 200, body = ModelList), (status = "5XX", body = super::error::ErrorBody<'static>)),
)]
pub async fn list(State(state): State<AppState>) -> Result<Json<ModelList>, ApiError> {
    let models = state.models.list().await?;
    let data = models.into_iter().map(|entry| ModelObject::new(&state, entry)).collect();
    Ok(Json(ModelList { object: "list", data }))
}

/// Shows one model.
///
/// # Errors
/// There is none of this name.
#[utoipa::path(
    get, path = "/v1/models/{model}", tag = "OpenAI",
    params(("model" = String, Path, description = "The model's name; it may have slashes")),
    responses((status = 200, body = ModelObject), (status = "4XX", body = super::error::ErrorBody<'static>)),
)]
pub async fn get(
    State(state): State<AppState>,
    Path(model): Path<String>,
) -> Result<Json<ModelObject>, ApiError> {
    let entry = state.models.find(&model).await?;
    Ok(Json(ModelObject::new(&state, entry)))
}
