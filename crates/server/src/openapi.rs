//! `/openapi.json`, made of the types that are parsed and written, and `/docs`, a page that shows it.

use axum::{
    Router,
    http::{HeaderValue, header},
    response::{Html, IntoResponse, Response},
    routing::get,
};
use utoipa::{
    Modify, OpenApi,
    openapi::security::{ApiKey, ApiKeyValue, HttpAuthScheme, HttpBuilder, SecurityScheme},
};

use crate::{AppState, anthropic, ollama, openai, status};

/// The document.
#[derive(Debug, OpenApi)]
#[openapi(
    info(
        title = "Paguro",
        description = "Language models on this machine. Every field of a request is honoured, or refused by name.",
    ),
    paths(
        openai::chat::create,
        openai::completions::create,
        openai::embeddings::create,
        openai::responses::create,
        openai::responses::get,
        openai::responses::delete,
        openai::models::list,
        openai::models::get,
        openai::props::props,
        openai::tokens::tokenize,
        openai::tokens::detokenize,
        anthropic::messages::create,
        anthropic::count::count,
        ollama::chat::chat,
        ollama::generate::generate,
        ollama::embed::embed,
        ollama::embed::embeddings,
        ollama::models::tags,
        ollama::models::ps,
        ollama::models::show,
        ollama::models::version,
        ollama::library::pull,
        ollama::library::create,
        ollama::library::copy,
        ollama::library::delete,
        ollama::library::has_blob,
        ollama::library::put_blob,
        status::health,
        status::ready,
        status::status,
        status::prometheus,
    ),
    modifiers(&Keys),
    security((), ("bearer" = []), ("x-api-key" = [])),
)]
struct Document;

/// The two ways to show a key.
struct Keys;

impl Modify for Keys {
    fn modify(&self, document: &mut utoipa::openapi::OpenApi) {
        let components = document.components.get_or_insert_default();
        let bearer = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build();
        components.add_security_scheme("bearer", SecurityScheme::Http(bearer));
        let header = ApiKey::Header(ApiKeyValue::new("x-api-key"));
        components.add_security_scheme("x-api-key", SecurityScheme::ApiKey(header));
    }
}

/// The paths.
pub fn routes() -> Router<AppState> {
    Router::new().route("/openapi.json", get(document)).route("/docs", get(docs))
}

async fn document() -> Response {
    let json = HeaderValue::from_static("application/json");
    let text = Document::openapi().to_json().unwrap_or_default();
    ([(header::CONTENT_TYPE, json)], text).into_response()
}

/// Nothing on the page comes from anywhere else.
async fn docs() -> Response {
    let policy =
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'";
    let policy = HeaderValue::from_static(policy);
    ([(header::CONTENT_SECURITY_POLICY, policy)], Html(include_str!("docs.html"))).into_response()
}
