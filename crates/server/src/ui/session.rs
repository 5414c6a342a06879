//! `/ui/v1/session` and `/ui/v1/settings`: what the page may do here, and how the server is set up.

use axum::{Extension, extract::State, http::HeaderMap};
use serde::Serialize;
use utoipa::ToSchema;

use crate::{AppState, access, error::ApiError, extract::Json, keys::Scope, listen::Arrival};

/// A setting in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct Setting {
    /// Its name, as the flag and the file have it.
    pub name: String,
    /// Its value.
    pub value: String,
    /// Where it was set: `flag`, `file`, `environment`, or `default`.
    pub origin: &'static str,
}

/// Rights of the page here.
#[derive(Debug, Serialize, ToSchema)]
pub struct Session {
    /// Paguro's version.
    version: &'static str,
    /// True if this client needs a key.
    needs_key: bool,
    /// True if a key was shown and the server knows it.
    key_known: bool,
    /// Scopes of the key that was shown; all of them where none is needed.
    #[schema(value_type = Vec<String>)]
    scopes: Vec<Scope>,
    /// True if there is a model library, so that models can be pulled and deleted.
    library: bool,
}

/// How the server is set up.
#[derive(Debug, Serialize, ToSchema)]
pub struct SettingsInForce {
    /// Paguro's version.
    version: &'static str,
    /// The operating system.
    system: &'static str,
    /// The processor's architecture.
    architecture: &'static str,
    /// Devices that models can run on.
    devices: Vec<String>,
    /// All settings.
    settings: Vec<Setting>,
}

/// Says what this client may do. Open to all, so that the page knows whether to ask for a key.
///
/// # Errors
/// The file with the keys cannot be read.
#[utoipa::path(get, path = "/ui/v1/session", tag = "Page", responses((status = 200, body = Session)))]
pub async fn session(
    State(state): State<AppState>,
    Extension(arrival): Extension<Arrival>,
    headers: HeaderMap,
) -> Result<Json<Session>, ApiError> {
    let needs_key = access::needs_key(&state, arrival)?;
    let key = access::find_key(&state, &headers)?;
    let key_known = key.is_some();
    let scopes = access::scopes(needs_key, key);
    let version = env!("CARGO_PKG_VERSION");
    Ok(Json(Session { version, needs_key, key_known, scopes, library: state.library.is_some() }))
}

/// Lists the settings in force, and where each was set.
#[utoipa::path(get, path = "/ui/v1/settings", tag = "Page", responses((status = 200, body = SettingsInForce)))]
pub async fn settings(State(state): State<AppState>) -> Json<SettingsInForce> {
    Json(SettingsInForce {
        version: env!("CARGO_PKG_VERSION"),
        system: std::env::consts::OS,
        architecture: std::env::consts::ARCH,
        devices: state.settings.devices.clone(),
        settings: state.settings.shown.clone(),
    })
}
