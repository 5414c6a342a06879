//! `/ui/v1/preset`: stored defaults of single models.

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
    /// Defaults in the library.
    preset: ModelPreset,
    /// False for models outside of the library.
    can_change: bool,
    /// Defaults of the server's settings file. They take precedence.
    settings: ModelPreset,
}

/// New defaults of a model.
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
/// No model has this name.
#[utoipa::path(
    get, path = "/ui/v1/preset", tag = "Page",
    params(("model" = String, Query, description = "The model's name")),
    responses((status = 200, body = PresetCard)),
)]
pub async fn get(
    State(state): State<AppState>,
    RawQuery(query): RawQuery,
) -> Result<Json<PresetCard>, ApiError> {
    let Presets { stored, settings } = state.models.preset(&named(query.as_deref())?).await?;
    let can_change = stored.is_some();
    Ok(Json(PresetCard { preset: stored.unwrap_or_default(), can_change, settings }))
}

/// Replaces the defaults of a model of the library. They apply to later requests; a change that affects loading reloads
/// the model at the next request.
///
/// # Errors
/// A value is refused, or the model is outside of the library.
#[utoipa::path(
    post, path = "/ui/v1/preset", tag = "Page", request_body = NewPreset, responses((status = 204)),
)]
pub async fn set(
    State(state): State<AppState>,
    Json(NewPreset { model, preset }): Json<NewPreset>,
) -> Result<StatusCode, ApiError> {
    state.models.set_preset(&model, preset).await?;
    Ok(StatusCode::NO_CONTENT)
}
