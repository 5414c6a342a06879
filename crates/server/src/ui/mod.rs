//! The web page: static files from `ui/`, embedded compressed, and endpoints for the page alone under `/ui/v1/`. For
//! everything else the page uses the same paths as other clients.
//!
//! **Architecture invariant:** the page has no access that a client with the same key does not have.

mod diff;
pub mod files;
pub mod keys;
pub mod library;
pub mod live;
pub mod models;
pub mod presets;
mod recent;
pub mod requests;
mod sample;
pub mod session;
pub mod tools;

use axum::{
    Router,
    extract::{Request, State},
    http::{HeaderValue, header},
    response::{IntoResponse, Response},
    routing::{delete, get, post},
};

use percent_encoding::percent_decode_str;

use crate::{AppState, error::ApiError};

pub use live::Live;
pub use recent::Recent;
pub use requests::RequestLog;
pub use session::Setting;

/// Paths of the page and its endpoints.
pub fn routes() -> Router<AppState> {
    Router::new()
        .route("/ui/{*path}", get(files::file))
        .route("/ui/v1/session", get(session::session))
        .route("/ui/v1/settings", get(session::settings))
        .route("/ui/v1/models", get(models::list))
        .route("/ui/v1/live", get(live::live))
        .route("/ui/v1/requests", get(requests::list))
        .route("/ui/v1/keys", get(keys::list).post(keys::create))
        .route("/ui/v1/keys/{id}", delete(keys::remove))
        .route("/ui/v1/preset", get(presets::get).post(presets::set))
        .route("/ui/v1/catalogue", get(library::catalogue))
        .route("/ui/v1/remote", get(library::remote))
        .route("/ui/v1/import", post(library::import))
        .route("/ui/v1/tools", get(tools::list))
        .route("/ui/v1/tools/call", post(tools::call))
        .route("/ui/v1/tools/servers", post(tools::add))
        .route("/ui/v1/tools/servers/{name}", delete(tools::remove))
}

/// Returns the model that a query names.
///
/// # Errors
/// The query names no model.
fn named(query: Option<&str>) -> Result<String, ApiError> {
    let mut pairs = query.unwrap_or_default().split('&');
    let name = pairs.find_map(|pair| pair.strip_prefix("model=")).filter(|name| !name.is_empty());
    let name = name.ok_or_else(|| ApiError::invalid("model", "the query has no `model`: ?model=NAME"))?;
    Ok(percent_decode_str(&name.replace('+', " ")).decode_utf8_lossy().into_owned())
}

/// Serves `/`: the page for browsers, one line of text for other clients. Ollama's clients check with it whether a
/// server runs.
pub async fn root(State(state): State<AppState>, request: Request) -> Response {
    let accepts_html = request
        .headers()
        .get_all(header::ACCEPT)
        .iter()
        .any(|value| value.to_str().is_ok_and(|accept| accept.contains("text/html")));
    let mut response = if state.settings.ui && accepts_html {
        files::index(request.headers())
    } else {
        "Paguro is running".into_response()
    };
    response.headers_mut().insert(header::VARY, HeaderValue::from_static("accept, accept-encoding"));
    response
}
