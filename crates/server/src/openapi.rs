//! `/openapi.json`, generated from the types that are parsed and written, and `/docs`, a page that displays it.

use axum::{
    Router,
    body::Bytes,
    http::{HeaderValue, header},
    response::{Html, IntoResponse, Response},
    routing::get,
};
use serde_json::{Map, Value, json};
use utoipa::{
    Modify, OpenApi,
    openapi::security::{ApiKey, ApiKeyValue, HttpAuthScheme, HttpBuilder, SecurityScheme},
};
use utoipa_axum::router::OpenApiRouter;

use crate::{AppState, anthropic, examples, fleet, ollama, openai, retrieval, status, ui};

/// The OpenAPI document.
#[derive(Debug, OpenApi)]
#[openapi(
    info(
        title = "Paguro",
        description = "Language models on this machine. A field that would change the answer and cannot be honoured is \
            refused by name, and so is a near miss of a known name. Other fields without effect are ignored, and named in \
            the answer's header `X-Paguro-Ignored`; with `X-Paguro-Strict: 1` they are refused as well.",
    ),
    // Model names need a wildcard in their route, which the document cannot express. The page's paths may be disabled.
    paths(
        openai::models::get,
        ui::session::session,
        ui::session::settings,
        ui::models::list,
        ui::live::live,
        ui::requests::list,
        ui::keys::list,
        ui::keys::create,
        ui::keys::remove,
        ui::presets::get,
        ui::presets::set,
        ui::library::catalogue,
        ui::library::remote,
        ui::library::import,
        ui::tools::list,
        ui::tools::call,
        ui::tools::add,
        ui::tools::remove,
    ),
    components(schemas(openai::error::ErrorBody<'static>, anthropic::error::ErrorBody, ollama::error::ErrorBody)),
    modifiers(&Keys),
    security((), ("bearer" = []), ("x-api-key" = [])),
)]
struct Document;

/// The two headers for a key.
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

/// Returns the routes of all APIs. The document is generated from the same list.
pub fn routes() -> Router<AppState> {
    let (router, document) = paths();
    let text = Bytes::from(document.to_string());
    let json = HeaderValue::from_static("application/json");
    let document = move || std::future::ready(([(header::CONTENT_TYPE, json)], text));
    router.route("/openapi.json", get(document)).route("/docs", get(docs))
}

/// Returns the routes and the document that describes them.
fn paths() -> (Router<AppState>, Value) {
    let (router, document) = OpenApiRouter::with_openapi(Document::openapi())
        .merge(openai::routes())
        .merge(anthropic::routes())
        .merge(ollama::routes())
        .merge(retrieval::routes())
        .merge(fleet::routes())
        .merge(status::routes())
        .split_for_parts();
    // These types have string keys and no fallible parts.
    let mut document = serde_json::to_value(document).unwrap_or_default();
    openai::describe(&mut document);
    anthropic::describe(&mut document);
    ollama::describe(&mut document);
    retrieval::describe(&mut document);
    fleet::describe(&mut document);
    examples::describe(&mut document);
    (router, exact(document))
}

/// Returns the document.
#[cfg(test)]
pub fn document() -> Value {
    paths().1
}

/// Adds what the attributes of the types cannot express, and the errors, which all operations of an API have in common.
fn exact(mut document: Value) -> Value {
    let schemas = document.pointer_mut("/components/schemas").and_then(Value::as_object_mut);
    schemas.into_iter().flat_map(Map::values_mut).for_each(tighten);
    let paths = document.pointer_mut("/paths").and_then(Value::as_object_mut);
    let operations = paths.into_iter().flat_map(Map::values_mut).filter_map(Value::as_object_mut);
    for method in operations.flat_map(Map::values_mut) {
        let error = match method["tags"][0].as_str() {
            Some("Anthropic") => "AnthropicErrorBody",
            Some("Ollama") => "OllamaError",
            _ => "ErrorBody",
        };
        let content =
            json!({"application/json": {"schema": {"$ref": format!("#/components/schemas/{error}")}}});
        for status in ["4XX", "5XX"] {
            method["responses"][status] = json!({"description": "An error", "content": content});
        }
        let parameters = method.get_mut("parameters").and_then(Value::as_array_mut);
        for parameter in parameters.into_iter().flatten() {
            if parameter["name"] == "digest" {
                parameter["schema"]["pattern"] = json!("^(sha256[:-])?[0-9a-fA-F]{64}$");
            }
        }
        let responses = method.get_mut("responses").and_then(Value::as_object_mut);
        for response in responses.into_iter().flat_map(Map::values_mut) {
            if let Some(schema) = response.pointer_mut("/content/text~1event-stream/schema") {
                *schema = event(schema.take());
            }
        }
    }
    document
}

/// Returns the schema of a server-sent event whose data has this JSON schema. Strings stand for data of several types.
fn event(data: Value) -> Value {
    let data = match data["type"] == "string" {
        true => data,
        false => json!({"type": "string", "contentMediaType": "application/json", "contentSchema": data}),
    };
    let properties = json!({"event": {"type": "string"}, "data": data});
    json!({"type": "object", "required": ["data"], "properties": properties})
}

/// Marks fields that are always refused, adds maxima, and states that a model is given by one of two names.
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

/// Serves the page. Its content security policy permits no other origin.
async fn docs() -> Response {
    let policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; \
        img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
    let policy = HeaderValue::from_static(policy);
    ([(header::CONTENT_SECURITY_POLICY, policy)], Html(include_str!("docs.html"))).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_says_what_is_refused() {
        let (_, document) = paths();
        let schema = |name: &str| document["components"]["schemas"][name].clone();
        assert!(schema("SamplingParams")["properties"]["stop_token_ids"].is_object());
        assert_eq!(schema("OllamaDeleteRequest")["anyOf"][0]["required"][0], "model");
        assert_eq!(schema("OllamaPullRequest")["anyOf"][1]["required"][0], "name");
        let parameter = &document["paths"]["/api/blobs/{digest}"]["post"]["parameters"][0];
        assert!(parameter["schema"]["pattern"].as_str().is_some_and(|pattern| pattern.contains("{64}")));
        let live = &document["paths"]["/ui/v1/live"]["get"]["responses"]["200"]["content"];
        let data = &live["text/event-stream"]["schema"]["properties"]["data"];
        assert_eq!(data["contentSchema"]["$ref"], "#/components/schemas/Tick");
    }
}
