//! The page for people: static files from `ui/`, embedded compressed, and the endpoints that only it needs, under
//! `/ui/v1/`. Everything else it asks of the same paths as other clients.
//!
//! **Architecture invariant:** the page has no way into the server that a client with the same key does not have.

mod diff;
pub mod files;
pub mod keys;
pub mod live;
pub mod models;
mod recent;
pub mod requests;
mod sample;
pub mod session;

use axum::{
    Router,
    extract::{Request, State},
    http::{HeaderValue, header},
    response::{IntoResponse, Response},
    routing::{delete, get},
};

use crate::AppState;

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
}

/// `/`: the page for browsers, one line for everybody else. Ollama's clients ask for it to see whether a server runs.
pub async fn root(State(state): State<AppState>, request: Request) -> Response {
    let accepts_html = request
        .headers()
        .get_all(header::ACCEPT)
        .iter()
        .any(|value| value.to_str().is_ok_and(|accept| accept.contains("text/html")));
    let mut response = if state.settings.ui && accepts_html && files::accepts_gzip(request.headers()) {
        files::index(request.headers())
    } else {
        "Paguro is running".into_response()
    };
    response.headers_mut().insert(header::VARY, HeaderValue::from_static("accept, accept-encoding"));
    response
}
