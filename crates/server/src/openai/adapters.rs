//! Adapters (LoRA) while the server runs: `/lora-adapters` of llama.cpp, and `/v1/load_lora_adapter` and
//! `/v1/unload_lora_adapter` of vLLM.

use axum::extract::State;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::sampling::LoraScale;
use crate::{
    AppState,
    error::ApiError,
    extract::Json,
    wire::{Body, Other, no_effect},
};

/// An adapter.
#[derive(Debug, Serialize, ToSchema)]
pub struct LoraAdapter {
    /// Its id in `lora` of requests.
    id: usize,
    /// Its name in `model` of requests.
    name: String,
    /// Name of the model that it changes.
    parent: String,
    /// Its file or folder.
    path: String,
    /// Scale with which it applies to requests that name its parent and no adapter.
    scale: f32,
}

/// Scales of adapters.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(transparent)]
pub struct LoraScales(Vec<LoraScale>);

impl Body for LoraScales {
    const IS_LIST: bool = true;
}

/// Confirmation of a change.
#[derive(Debug, Serialize, ToSchema)]
pub struct Success {
    /// Always true.
    success: bool,
}

/// A request to load an adapter.
#[derive(Debug, Deserialize, ToSchema)]
pub struct LoadLoraRequest {
    /// Its name in requests.
    pub lora_name: String,
    /// The name of an adapter of the library, or a file or folder: in the library's folder, or one that was given to
    /// `paguro serve --lora`.
    pub lora_path: String,
    /// Name of the model that it changes; if absent, the only model that is loaded or that there is. (From vLLM's
    /// `--lora-modules`.)
    pub base_model_name: Option<String>,
    /// True to replace an adapter of this name. Its running requests end with the old one.
    pub load_inplace: Option<bool>,
}

impl Body for LoadLoraRequest {
    const OTHERS: &'static [&'static [Other]] = &[&[
        no_effect("is_3d_lora_weight", "the file decides"),
        no_effect("lora_int_id", "adapters have names"),
    ]];
}

/// A request to remove an adapter.
#[derive(Debug, Deserialize, ToSchema)]
pub struct UnloadLoraRequest {
    /// Its name.
    pub lora_name: String,
}

impl Body for UnloadLoraRequest {
    const OTHERS: &'static [&'static [Other]] = &[&[no_effect("lora_int_id", "adapters have names")]];
}

/// Lists all adapters.
///
/// # Errors
/// The library cannot be read.
#[utoipa::path(
    get, path = "/lora-adapters", tag = "Adapters", responses((status = 200, body = Vec<LoraAdapter>)),
)]
pub async fn list(State(state): State<AppState>) -> Result<Json<Vec<LoraAdapter>>, ApiError> {
    let adapter = |(id, adapter): (usize, crate::models::NamedAdapter)| LoraAdapter {
        id,
        name: adapter.name,
        parent: adapter.base,
        path: adapter.path.display().to_string(),
        scale: adapter.scale,
    };
    Ok(Json(state.models.adapters().await?.into_iter().enumerate().map(adapter).collect()))
}

/// Sets the scales with which adapters apply to requests that name no adapter; those of absent ones become 0.
///
/// # Errors
/// An adapter does not exist.
#[utoipa::path(
    post, path = "/lora-adapters", tag = "Adapters", request_body = LoraScales,
    responses((status = 200, body = Success)),
)]
pub async fn scale(
    State(state): State<AppState>,
    Json(LoraScales(scales)): Json<LoraScales>,
) -> Result<Json<Success>, ApiError> {
    let scales: Vec<_> = scales.iter().map(|it| (it.id, it.scale)).collect();
    state.models.scale_adapters(&scales).await?;
    Ok(Json(Success { success: true }))
}

/// Loads an adapter beside running requests.
///
/// # Errors
/// The path is not allowed, the name is taken, or the adapter does not fit its model.
#[utoipa::path(
    post, path = "/v1/load_lora_adapter", tag = "Adapters", request_body = LoadLoraRequest,
    responses((status = 200, body = String)),
)]
pub async fn load(
    State(state): State<AppState>,
    Json(body): Json<LoadLoraRequest>,
) -> Result<String, ApiError> {
    let LoadLoraRequest { lora_name, lora_path, base_model_name, load_inplace } = body;
    let replace = load_inplace == Some(true);
    state.models.load_adapter(&lora_name, &lora_path, base_model_name.as_deref(), replace).await?;
    Ok(format!("Success: LoRA adapter '{lora_name}' added successfully."))
}

/// Removes an adapter. Its running requests end with it.
///
/// # Errors
/// No adapter has this name.
#[utoipa::path(
    post, path = "/v1/unload_lora_adapter", tag = "Adapters", request_body = UnloadLoraRequest,
    responses((status = 200, body = String)),
)]
pub async fn unload(
    State(state): State<AppState>,
    Json(UnloadLoraRequest { lora_name }): Json<UnloadLoraRequest>,
) -> Result<String, ApiError> {
    state.models.unload_adapter(&lora_name).await?;
    Ok(format!("Success: LoRA adapter '{lora_name}' removed successfully."))
}
