//! `/props` of llama-server: properties that clients use to size their requests.

use axum::extract::{RawQuery, State};
use percent_encoding::percent_decode_str;
use serde::Serialize;
use utoipa::ToSchema;

use super::multimodal::MARKER;
use crate::{
    AppState,
    error::ApiError,
    extract::Json,
    source::{ModelEntry, Outside},
};

/// Properties of a served model.
#[derive(Debug, Serialize, ToSchema)]
pub struct Props {
    default_generation_settings: GenerationSettings,
    /// Maximum number of running sequences.
    total_slots: usize,
    /// The model's name.
    model_alias: String,
    /// Path of the model, or its name in the library.
    model_path: String,
    /// The chat template, in jinja; empty if there is none.
    chat_template: String,
    modalities: Modalities,
    /// Place of an image in `prompt_string` of /v1/completions.
    media_marker: &'static str,
    /// The program and its version.
    build_info: String,
}

/// Defaults of a request.
#[derive(Debug, Serialize, ToSchema)]
pub struct GenerationSettings {
    /// Maximum tokens of prompt and answer, as the model is loaded or would be.
    pub n_ctx: Option<usize>,
}

/// Modalities besides text.
#[derive(Debug, Serialize, ToSchema)]
pub struct Modalities {
    vision: bool,
    audio: bool,
}

/// Returns the properties of a model without loading it.
///
/// # Errors
/// No model has this name, or its file cannot be opened.
#[utoipa::path(
    get, path = "/props", tag = "OpenAI",
    params(("model" = Option<String>, Query, description = "The model's name; if absent, a model that is loaded, or the first there is")),
    responses((status = 200, body = Props)),
)]
pub async fn props(
    State(state): State<AppState>,
    RawQuery(query): RawQuery,
) -> Result<Json<Props>, ApiError> {
    let query = query.unwrap_or_default();
    let name = query.split('&').find_map(|pair| pair.strip_prefix("model="));
    let name = name.map(|name| percent_decode_str(name).decode_utf8_lossy().into_owned());
    let entry = find(&state, name).await?;
    let templates = state.models.open(&entry).await?.chat_templates()?;
    let chat_template = templates.into_iter().find(|template| template.0 == "default");
    let model_path = match state.models.outside(&entry.name) {
        Some(Outside::Disk(path)) => path.display().to_string(),
        Some(Outside::Program { .. }) | None => entry.name.clone(),
    };
    Ok(Json(Props {
        default_generation_settings: GenerationSettings { n_ctx: state.models.context(&entry) },
        total_slots: entry.details.sequences,
        model_alias: entry.name.clone(),
        model_path,
        chat_template: chat_template.map(|template| template.1).unwrap_or_default(),
        modalities: Modalities { vision: entry.details.projector.is_some(), audio: false },
        media_marker: MARKER,
        build_info: concat!("paguro ", env!("CARGO_PKG_VERSION")).to_owned(),
    }))
}

/// Returns the model with this name, or else a loaded model, or the first one.
pub(crate) async fn find(state: &AppState, name: Option<String>) -> Result<ModelEntry, ApiError> {
    if let Some(name) = name {
        return state.models.find(&name).await;
    }
    if let Some(resident) = state.models.resident().into_iter().next() {
        return Ok(resident.entry);
    }
    let first = state.models.list().await?.into_iter().find(|entry| entry.details.problem.is_none());
    first.ok_or_else(|| ApiError::NotFound("there is no model that can be used".into()))
}
