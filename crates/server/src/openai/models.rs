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
    /// The name to ask for it.
    id: String,
    /// Always `model`.
    object: &'static str,
    /// When it came here, in seconds since 1970.
    created: u64,
    /// Always `paguro`.
    owned_by: &'static str,
}

impl From<ModelEntry> for ModelObject {
    fn from(entry: ModelEntry) -> Self {
        Self { id: entry.name, object: "model", created: entry.created, owned_by: "paguro" }
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
    Ok(Json(ModelList { object: "list", data: models.into_iter().map(ModelObject::from).collect() }))
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
    Ok(Json(state.models.find(&model).await?.into()))
}
