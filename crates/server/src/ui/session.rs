//! `/ui/v1/session` and `/ui/v1/settings`: permissions of the page, and the settings of the server.
//!
//! The session has the identity of the server's build of the page, so a page that was open during an upgrade notices it.

use axum::{Extension, extract::State, http::HeaderMap};
use serde::Serialize;
use utoipa::ToSchema;

use super::files;
use crate::{AppState, access, error::ApiError, extract::Json, keys::Scope, listen::Arrival};

/// An effective setting.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct Setting {
    /// Name of the flag and of the key in the settings file.
    pub name: String,
    /// Its value.
    pub value: String,
    /// Origin: `flag`, `file`, `environment`, or `default`.
    pub origin: &'static str,
}

/// Permissions of the page.
#[derive(Debug, Serialize, ToSchema)]
pub struct Session {
    /// Paguro's version.
    version: &'static str,
    /// True if this client needs a key.
    needs_key: bool,
    /// True if the request has a key that the server knows.
    key_known: bool,
    /// Scopes of the key; all scopes if no key is required.
    #[schema(value_type = Vec<String>)]
    scopes: Vec<Scope>,
    /// True if there is a model library, so that models can be pulled and deleted.
    library: bool,
    /// Identifies the build of the page that this server has. An open page of another build asks to be loaded again.
    page: &'static str,
    /// Token of the page, for the header `x-paguro-page`. A browser's request that changes something needs it.
    token: String,
}

/// Settings of the server.
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

/// Returns the permissions of this client. Public, so that the page knows whether to prompt for a key.
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
    let (library, token) = (state.library.is_some(), state.page_token.clone());
    Ok(Json(Session { version, needs_key, key_known, scopes, library, page: files::PAGE, token }))
}

/// Lists the effective settings and their origins.
#[utoipa::path(
    get, path = "/ui/v1/settings", tag = "Page", responses((status = 200, body = SettingsInForce)),
)]
pub async fn settings(State(state): State<AppState>) -> Json<SettingsInForce> {
    Json(SettingsInForce {
        version: env!("CARGO_PKG_VERSION"),
        system: std::env::consts::OS,
        architecture: std::env::consts::ARCH,
        devices: state.settings.devices.clone(),
        settings: state.settings.shown.clone(),
    })
}
