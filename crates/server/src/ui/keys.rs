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
    made_from::made_from,
    wire,
};

/// All keys.
#[derive(Debug, Serialize, ToSchema)]
pub struct KeyList {
    keys: Vec<KeyInfo>,
}

made_from! {
    /// A key without its secret.
    #[derive(Debug, Serialize, ToSchema)]
    pub struct KeyInfo from key: ApiKey {
        /// Id of the key; a part of the key itself.
        id: String = key.id,
        /// Description of the key.
        name: String = key.name,
        #[schema(value_type = Vec<String>)]
        scopes: Vec<Scope> = key.scopes,
        /// Seconds since 1970.
        created: u64 = key.created,
    }
}

/// A request for a new key.
#[derive(Debug, Deserialize, ToSchema)]
pub struct NewKey {
    /// Description of the key.
    name: String,
    /// Its scopes: `inference`, `models`, `admin`.
    #[schema(value_type = Vec<String>)]
    scopes: Vec<Scope>,
}

impl wire::Body for NewKey {}

/// A new key.
#[derive(Debug, Serialize, ToSchema)]
pub struct MadeKey {
    /// The secret key. It is shown once and not stored.
    key: String,
    info: KeyInfo,
}

/// Lists all keys without their secrets.
///
/// # Errors
/// The file cannot be read.
#[utoipa::path(get, path = "/ui/v1/keys", tag = "Page", responses((status = 200, body = KeyList)))]
pub async fn list(State(state): State<AppState>) -> Result<Json<KeyList>, ApiError> {
    let keys = with_file(&state, KeyFile::read).await?;
    Ok(Json(KeyList { keys: keys.into_iter().map(KeyInfo::from).collect() }))
}

/// Creates a key.
///
/// # Errors
/// The name or the scopes are missing, or the file cannot be written.
#[utoipa::path(
    post, path = "/ui/v1/keys", tag = "Page", request_body = NewKey,
    responses((status = 200, body = MadeKey)),
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
        return Err(ApiError::invalid("scopes", "`scopes` is empty; name at least one scope"));
    }
    let (info, key) = with_file(&state, move |file| file.add(&name, &scopes)).await?;
    Ok(Json(MadeKey { key, info: info.into() }))
}

/// Revokes a key.
///
/// # Errors
/// No key has this id, or the file cannot be written.
#[utoipa::path(
    delete, path = "/ui/v1/keys/{id}", tag = "Page",
    params(("id" = String, Path, description = "The key's id")), responses((status = 200, body = KeyInfo)),
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
