//! `/ui/v1/preset`: defaults of single models, which the library keeps.

use axum::{
    extract::{RawQuery, State},
    http::StatusCode,
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::named;
use crate::{
    AppState,
    error::ApiError,
    extract::Json,
    source::{ModelPreset, Presets},
    wire,
};

/// Defaults of a model.
#[derive(Debug, Serialize, ToSchema)]
pub struct PresetCard {
    /// As the library keeps them.
    preset: ModelPreset,
    /// False for models that are not the library's.
    can_change: bool,
    /// Of the file with the server's settings. These are stronger.
    settings: ModelPreset,
}

/// Defaults that a model is to have.
#[derive(Debug, Deserialize, ToSchema)]
pub struct NewPreset {
    /// The model's name.
    model: String,
    preset: ModelPreset,
}

impl wire::Body for NewPreset {}

/// Returns the defaults of a model.
///
/// # Errors
/// There is no such model.
#[utoipa::path(
    get, path = "/ui/v1/preset", tag = "Page",
    params(("model" = String, Query, description = "The model's name")),
    responses(
        (status = 200, body = PresetCard),
        (status = "4XX", body = crate::openai::error::ErrorBody<'static>),
    ),
)]
pub async fn get(
    State(state): State<AppState>,
    RawQuery(query): RawQuery,
) -> Result<Json<PresetCard>, ApiError> {
    let Presets { stored, settings } = state.models.preset(&named(query.as_deref())?).await?;
    let can_change = stored.is_some();
    Ok(Json(PresetCard { preset: stored.unwrap_or_default(), can_change, settings }))
}

/// Replaces the defaults of a model of the library. Requests have them from now on; one that concerns loading loads the
/// model again at the next request.
///
/// # Errors
/// Values that are refused; models that are not the library's.
#[utoipa::path(
    post, path = "/ui/v1/preset", tag = "Page",
    request_body = NewPreset,
    responses(
        (status = 204),
        (status = "4XX", body = crate::openai::error::ErrorBody<'static>),
    ),
)]
pub async fn set(
    State(state): State<AppState>,
    Json(NewPreset { model, preset }): Json<NewPreset>,
) -> Result<StatusCode, ApiError> {
    state.models.set_preset(&model, preset).await?;
    Ok(StatusCode::NO_CONTENT)
}
