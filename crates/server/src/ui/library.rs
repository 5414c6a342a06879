//! `/ui/v1/catalogue`, `/ui/v1/remote` and `/ui/v1/import`: models that can be downloaded, and imports of local files.

use std::path::PathBuf;

use axum::extract::{RawQuery, State};
use paguro_library::{Cancel, ImportOptions, ModelName, PullOptions, found::Program, known};
use serde::{Deserialize, Serialize};
use tokio::task::spawn_blocking;
use utoipa::ToSchema;

use super::named;
use crate::{
    AppState,
    error::ApiError,
    extract::Json,
    library::{CancelOnDrop, LibraryService},
    wire,
};

/// Well-known models.
#[derive(Debug, Serialize, ToSchema)]
pub struct Catalogue {
    models: Vec<KnownCard>,
    /// Memory limit of all loaded models, in bytes.
    memory_limit: u64,
}

/// A well-known model.
#[derive(Debug, Serialize, ToSchema)]
pub struct KnownCard {
    /// Name for pulling it.
    name: String,
    /// Title for display.
    title: String,
    /// Number of weights for display: `4B`.
    parameters: String,
    /// Short description of its use.
    good_for: String,
    /// Approximate bytes of its file.
    bytes: u64,
    /// Approximate bytes of memory that it needs.
    needs: u64,
    /// True if the library has it.
    here: bool,
}

/// A model on the hub.
#[derive(Debug, Serialize, ToSchema)]
pub struct RemoteModel {
    /// Name that it would have in the library.
    name: String,
    /// Bytes of its files.
    bytes: u64,
    /// Approximate bytes of memory that it needs.
    needs: u64,
    /// True if the library has a model of that name.
    here: bool,
}

/// A request for an import.
#[derive(Debug, Deserialize, ToSchema)]
pub struct NewImport {
    /// The path of a GGUF file or a Hugging Face folder on the server's machine.
    path: String,
    /// Name in the library; the file's name if absent.
    name: Option<String>,
    /// True to copy the files into the library; otherwise they must stay at their place.
    #[serde(default)]
    copy: bool,
}

impl wire::Body for NewImport {}

/// A model that was imported.
#[derive(Debug, Serialize, ToSchema)]
pub struct Imported {
    /// Name of the model.
    name: String,
    bytes: u64,
}

/// Estimates the memory of a model of `bytes` without its header: its weights, and an eighth for K, V and buffers.
fn about(bytes: u64) -> u64 {
    bytes.saturating_add(bytes / 8)
}

/// Lists well-known models, largest first.
///
/// # Errors
/// The library's error.
#[utoipa::path(get, path = "/ui/v1/catalogue", tag = "Page", responses((status = 200, body = Catalogue)))]
pub async fn catalogue(State(state): State<AppState>) -> Result<Json<Catalogue>, ApiError> {
    let here = state.models.list().await?;
    let is_here = |name: &str| here.iter().any(|entry| entry.name.eq_ignore_ascii_case(name));
    let card = |model: &known::KnownModel| KnownCard {
        name: model.name.clone(),
        title: model.title.clone(),
        parameters: model.parameters.clone(),
        good_for: model.good_for.clone(),
        bytes: model.bytes(),
        needs: about(model.bytes()),
        here: is_here(&model.name),
    };
    let mut models: Vec<_> = known::models().iter().map(card).collect();
    models.sort_by_key(|model| std::cmp::Reverse(model.bytes));
    Ok(Json(Catalogue { models, memory_limit: state.models.memory() }))
}

/// Returns the size of a model on the hub.
///
/// # Errors
/// The name is invalid, or the hub's error.
#[utoipa::path(
    get, path = "/ui/v1/remote", tag = "Page",
    params(("model" = String, Query, description = "A name as in `/api/pull`")),
    responses((status = 200, body = RemoteModel)),
)]
pub async fn remote(
    State(state): State<AppState>,
    RawQuery(query): RawQuery,
) -> Result<Json<RemoteModel>, ApiError> {
    let (reference, name) = known::wanted(&named(query.as_deref())?)?;
    let cancel = Cancel::default();
    let _guard = CancelOnDrop(cancel.clone());
    let options = PullOptions { name, cancel };
    let look_up = move |service: &LibraryService| service.library.look_up(&service.hub, &reference, &options);
    let (name, bytes) = state.library()?.run_long(look_up).await?;
    let here = state.models.find(&name.short()).await.is_ok();
    Ok(Json(RemoteModel { name: name.short(), bytes, needs: about(bytes), here }))
}

/// Imports a model from this machine.
///
/// # Errors
/// The file is not a model, or the name is taken.
#[utoipa::path(
    post, path = "/ui/v1/import", tag = "Page", request_body = NewImport,
    responses((status = 200, body = Imported)),
)]
pub async fn import(
    State(state): State<AppState>,
    Json(NewImport { path, name, copy }): Json<NewImport>,
) -> Result<Json<Imported>, ApiError> {
    let service = state.library()?;
    if let Some((program, _)) = Program::split(path.trim()) {
        let message = format!(
            "models of {program} are imported in a terminal of the server's machine: `paguro import {}`",
            path.trim()
        );
        return Err(ApiError::invalid("path", message));
    }
    let path = PathBuf::from(path.trim());
    if !path.is_absolute() {
        let message = format!(
            "`path` is {:?}, and must be a whole path on the server's machine",
            path.display().to_string()
        );
        return Err(ApiError::invalid("path", message));
    }
    let name = name.map(|name| name.trim().to_owned()).filter(|name| !name.is_empty());
    let name = name.map(|name| name.parse::<ModelName>()).transpose()?;
    if let Some(name) = &name
        && state.models.outside(&name.short()).is_some()
    {
        let message = format!("`{}` is served from elsewhere; choose another name", name.short());
        return Err(ApiError::invalid("name", message));
    }
    let looked_at = path.clone();
    let found = spawn_blocking(move || std::fs::metadata(looked_at)).await;
    let found = found.map_err(|error| ApiError::Internal(error.to_string()))?;
    found.map_err(|error| ApiError::invalid("path", format!("cannot read {}: {error}", path.display())))?;
    let cancel = Cancel::default();
    // The copy is cancelled when the client disconnects.
    let _guard = CancelOnDrop(cancel.clone());
    let options = ImportOptions { name, copy, cancel, ..ImportOptions::default() };
    let work =
        move |service: &LibraryService| service.library.import(&path, &options, &service.inspect, &|_| {});
    let record = service.run_long(work).await?;
    Ok(Json(Imported { name: record.name.short(), bytes: record.size() }))
}
