//! `/openapi.json`, made of the types that are parsed and written, and `/docs`, a page that shows it.

use axum::{
    Router,
    http::{HeaderValue, header},
    response::{Html, IntoResponse, Response},
    routing::get,
};
use serde_json::{Map, Value, json};
use utoipa::{
    Modify, OpenApi,
    openapi::security::{ApiKey, ApiKeyValue, HttpAuthScheme, HttpBuilder, SecurityScheme},
};

use crate::{AppState, anthropic, ollama, openai, status, ui};

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
        ui::session::session,
        ui::session::settings,
        ui::models::list,
        ui::live::live,
        ui::requests::list,
        ui::keys::list,
        ui::keys::create,
        ui::keys::remove,
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
    ([(header::CONTENT_TYPE, json)], exact_document().to_string()).into_response()
}

/// The document, with what the types' attributes do not say.
fn exact_document() -> Value {
    // Our own types: they have no keys that are not strings.
    let mut document = serde_json::to_value(Document::openapi()).unwrap_or_default();
    let schemas = document.pointer_mut("/components/schemas").and_then(Value::as_object_mut);
    schemas.into_iter().flat_map(Map::values_mut).for_each(tighten);
    let paths = document.pointer_mut("/paths").and_then(Value::as_object_mut);
    let operations = paths.into_iter().flat_map(Map::values_mut).filter_map(Value::as_object_mut);
    let parameters = operations.flat_map(Map::values_mut).filter_map(|method| method.get_mut("parameters"));
    for parameter in parameters.filter_map(Value::as_array_mut).flatten() {
        if parameter["name"] == "digest" {
            parameter["schema"]["pattern"] = json!("^(sha256[:-])?[0-9a-fA-F]{64}$");
        }
    }
    document
}

/// Marks what is never taken, states the largest numbers, and that a model has one of two names.
fn tighten(schema: &mut Value) {
    match schema {
        Value::Array(schemas) => return schemas.iter_mut().for_each(tighten),
        Value::Object(keys) => keys.values_mut().for_each(tighten),
        _ => return,
    }
    if schema["format"] == "int32" && schema["minimum"] == 0 {
        schema["maximum"] = json!(u32::MAX);
    }
    let Some(properties) = schema.get_mut("properties").and_then(Value::as_object_mut) else { return };
    for property in properties.values_mut() {
        let description = property["description"].as_str().unwrap_or_default();
        if description.starts_with("Not supported") {
            *property = json!({"type": "null", "deprecated": true, "description": description});
        }
    }
    let description = properties.get("name").and_then(|name| name["description"].as_str());
    if description == Some("The older name of `model`.") {
        schema["anyOf"] = json!([{"required": ["model"]}, {"required": ["name"]}]);
    }
}

/// Nothing on the page comes from anywhere else.
async fn docs() -> Response {
    let policy =
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'";
    let policy = HeaderValue::from_static(policy);
    ([(header::CONTENT_SECURITY_POLICY, policy)], Html(include_str!("docs.html"))).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_says_what_is_refused() {
        let document = exact_document();
        let schema = |name: &str| document["components"]["schemas"][name].clone();
        assert_eq!(schema("CompletionRequest")["properties"]["suffix"]["type"], "null");
        assert_eq!(schema("CompletionRequest")["properties"]["top_k"]["maximum"], json!(u32::MAX));
        assert_eq!(schema("OllamaDeleteRequest")["anyOf"][0]["required"][0], "model");
        assert_eq!(schema("OllamaPullRequest")["anyOf"][1]["required"][0], "name");
        let parameter = &document["paths"]["/api/blobs/{digest}"]["post"]["parameters"][0];
        assert!(parameter["schema"]["pattern"].as_str().is_some_and(|pattern| pattern.contains("{64}")));
    }
}
