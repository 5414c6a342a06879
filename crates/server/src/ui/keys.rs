//! `/ui/v1/keys`: API keys, as `paguro keys` manages them.

use axum::extract::{Path, State};
use serde::{Deserialize, Serialize};
use tokio::task::spawn_blocking;
use utoipa::ToSchema;

use crate::{
    AppState,
    error::ApiError,
    extract::Json,
    keys::{ApiKey, KeyError, KeyFile, Scope},
    wire,
};

/// All keys.
#[derive(Debug, Serialize, ToSchema)]
pub struct KeyList {
    keys: Vec<KeyInfo>,
}

/// A key, without the key itself.
#[derive(Debug, Serialize, ToSchema)]
pub struct KeyInfo {
    /// Names it; part of the key itself.
    id: String,
    /// Its purpose.
    name: String,
    #[schema(value_type = Vec<String>)]
    scopes: Vec<Scope>,
    /// Seconds since 1970.
    created: u64,
}

/// A key that is to be made.
#[derive(Debug, Deserialize, ToSchema)]
pub struct NewKey {
    /// Its purpose.
    name: String,
    /// Its scopes: `inference`, `models`, `admin`.
    #[schema(value_type = Vec<String>)]
    scopes: Vec<Scope>,
}

impl wire::Body for NewKey {}

/// A new key.
#[derive(Debug, Serialize, ToSchema)]
pub struct MadeKey {
    /// The key itself. It is shown this once and kept nowhere.
    key: String,
    info: KeyInfo,
}

impl From<ApiKey> for KeyInfo {
    fn from(key: ApiKey) -> Self {
        Self { id: key.id, name: key.name, scopes: key.scopes, created: key.created }
    }
}

/// Lists all keys, without the keys themselves.
///
/// # Errors
/// The file cannot be read.
#[utoipa::path(get, path = "/ui/v1/keys", tag = "Page", responses((status = 200, body = KeyList)))]
pub async fn list(State(state): State<AppState>) -> Result<Json<KeyList>, ApiError> {
    let keys = with_file(&state, KeyFile::read).await?;
    Ok(Json(KeyList { keys: keys.into_iter().map(KeyInfo::from).collect() }))
}

/// Makes a key.
///
/// # Errors
/// No name, no scopes; the file cannot be written.
#[utoipa::path(
    post, path = "/ui/v1/keys", tag = "Page",
    request_body = NewKey,
    responses(
        (status = 200, body = MadeKey),
        (status = "4XX", body = crate::openai::error::ErrorBody<'static>),
    ),
)]
pub async fn create(
    State(state): State<AppState>,
    Json(NewKey { name, scopes }): Json<NewKey>,
) -> Result<Json<MadeKey>, ApiError> {
    let name = name.trim().to_owned();
    if name.is_empty() || name.len() > 100 || name.chars().any(char::is_control) {
        let message = "`name` must have 1 to 100 bytes, without control characters";
        return Err(ApiError::invalid("name", message));
    }
    if scopes.is_empty() {
        return Err(ApiError::invalid("scopes", "`scopes` is empty: such a key would open nothing"));
    }
    let (info, key) = with_file(&state, move |file| file.add(&name, &scopes)).await?;
    Ok(Json(MadeKey { key, info: info.into() }))
}

/// Revokes a key.
///
/// # Errors
/// There is none with this id; the file cannot be written.
#[utoipa::path(
    delete, path = "/ui/v1/keys/{id}", tag = "Page",
    params(("id" = String, Path, description = "The key's id")),
    responses(
        (status = 200, body = KeyInfo),
        (status = "4XX", body = crate::openai::error::ErrorBody<'static>),
    ),
)]
pub async fn remove(
    State(state): State<AppState>,
    Path(id): Path<String>,
) -> Result<Json<KeyInfo>, ApiError> {
    Ok(Json(with_file(&state, move |file| file.remove(&id)).await?.into()))
}

async fn with_file<T: Send + 'static>(
    state: &AppState,
    work: impl FnOnce(&KeyFile) -> Result<T, KeyError> + Send + 'static,
) -> Result<T, ApiError> {
    let file = state.keys.file().clone();
    let done = spawn_blocking(move || work(&file)).await;
    done.map_err(|error| ApiError::Internal(error.to_string()))?.map_err(|error| match error {
        KeyError::NotFound(_) => ApiError::NotFound(error.to_string()),
        other => ApiError::Internal(other.to_string()),
    })
}
