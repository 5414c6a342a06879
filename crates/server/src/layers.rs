//! What happens to every request: it gets an id, and a line in the log when its answer begins.

use std::time::Instant;

use axum::{
    extract::{MatchedPath, Request, State},
    http::{HeaderName, HeaderValue},
    middleware::Next,
    response::Response,
};
use tracing::Instrument;

use crate::{AppState, dialect::Dialect, ids};

/// The header that names a request, in both directions.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Names the request, in its answer and in every line of the log that comes from it.
pub async fn log(State(state): State<AppState>, request: Request, next: Next) -> Response {
    let started = Instant::now();
    let id = request.headers().get(REQUEST_ID).filter(|id| is_sane(id)).cloned();
    let id = id.unwrap_or_else(|| HeaderValue::try_from(ids::new("req_")).expect("hexadecimal digits"));
    let span = tracing::info_span!(
        "request",
        id = id.to_str().unwrap_or_default(),
        method = %request.method(),
        path = request.uri().path(),
        "http.response.status_code" = tracing::field::Empty,
    );
    let route = request.extensions().get::<MatchedPath>().cloned();
    let dialect = Dialect::of_path(request.uri().path());
    let method = request.method().to_string();
    async {
        let mut response = next.run(request).await;
        if dialect == Dialect::Anthropic {
            response.headers_mut().insert("request-id", id.clone());
        }
        response.headers_mut().insert(REQUEST_ID, id.clone());
        let status = response.status().as_u16();
        let path = route.as_ref().map_or("other", MatchedPath::as_str);
        state.metrics.http(path, status);
        if state.settings.ui {
            state.requests.record(id.to_str().unwrap_or_default(), &method, path, status, started.elapsed());
        }
        tracing::info!(status, milliseconds = started.elapsed().as_millis() as u64, "answered");
        tracing::Span::current().record("http.response.status_code", status);
        response
    }
    .instrument(span)
    .await
}

/// Ids of callers are taken over if they fit into a line of the log.
fn is_sane(id: &HeaderValue) -> bool {
    let fine = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.:".contains(byte);
    (1..=128).contains(&id.len()) && id.as_bytes().iter().all(fine)
}
