//! The table of all routes: their scope, and the pages that may call them.
//!
//! **Architecture invariant:** a route that is not in this table answers every request with an error.

use axum::http::Method;

use crate::{error::ApiError, keys::Scope};

/// Effect of a route. It decides which web pages may call it; see `sender.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Reads what clients of the APIs need. Links of other sites may lead to it.
    Reads,
    /// Generates, or computes something from the body.
    Generates,
    /// Reads the server's state for its own page.
    Shows,
    /// Changes something, or starts something besides generation. `GET` routes that start programs or use the network
    /// are among them.
    Changes,
}

use Effect::{Changes, Generates, Reads, Shows};

/// Rule of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Scope that a key needs; `None` for public routes.
    pub scope: Option<Scope>,
    /// Effect of the route.
    pub effect: Effect,
}

const PUBLIC: Option<Scope> = None;
const INFERENCE: Option<Scope> = Some(Scope::Inference);
const MODELS: Option<Scope> = Some(Scope::Models);
const ADMIN: Option<Scope> = Some(Scope::Admin);

/// Method, path, scope and effect of each route. `HEAD` has the rule of `GET` unless it is listed.
const ROUTES: &[(&str, &str, Option<Scope>, Effect)] = &[
    ("GET", "/", PUBLIC, Reads),
    ("GET", "/ui/{*path}", PUBLIC, Reads),
    ("GET", "/docs", PUBLIC, Reads),
    ("GET", "/openapi.json", PUBLIC, Reads),
    ("GET", "/health", PUBLIC, Reads),
    ("GET", "/ready", PUBLIC, Reads),
    ("GET", "/status", INFERENCE, Reads),
    ("GET", "/version", INFERENCE, Reads),
    ("GET", "/metrics", ADMIN, Reads),
    // OpenAI, vLLM and llama.cpp.
    ("GET", "/v1/models", INFERENCE, Reads),
    ("GET", "/v1/models/{*model}", INFERENCE, Reads),
    ("GET", "/props", INFERENCE, Reads),
    ("GET", "/tokenizer_info", INFERENCE, Reads),
    ("POST", "/v1/chat/completions", INFERENCE, Generates),
    ("POST", "/v1/completions", INFERENCE, Generates),
    ("POST", "/infill", INFERENCE, Generates),
    ("POST", "/v1/embeddings", INFERENCE, Generates),
    ("POST", "/v1/responses", INFERENCE, Generates),
    // Only the client that created a response knows its id.
    ("GET", "/v1/responses/{id}", INFERENCE, Generates),
    ("DELETE", "/v1/responses/{id}", INFERENCE, Generates),
    ("POST", "/tokenize", INFERENCE, Generates),
    ("POST", "/detokenize", INFERENCE, Generates),
    ("GET", "/lora-adapters", INFERENCE, Reads),
    ("POST", "/lora-adapters", MODELS, Changes),
    ("POST", "/v1/load_lora_adapter", MODELS, Changes),
    ("POST", "/v1/unload_lora_adapter", MODELS, Changes),
    // Anthropic.
    ("POST", "/v1/messages", INFERENCE, Generates),
    ("POST", "/v1/messages/count_tokens", INFERENCE, Generates),
    // Ollama.
    ("GET", "/api/version", INFERENCE, Reads),
    ("GET", "/api/tags", INFERENCE, Reads),
    ("GET", "/api/ps", INFERENCE, Reads),
    ("POST", "/api/show", INFERENCE, Generates),
    ("POST", "/api/generate", INFERENCE, Generates),
    ("POST", "/api/chat", INFERENCE, Generates),
    ("POST", "/api/embed", INFERENCE, Generates),
    ("POST", "/api/embeddings", INFERENCE, Generates),
    ("POST", "/api/pull", MODELS, Changes),
    ("POST", "/api/create", MODELS, Changes),
    ("POST", "/api/copy", MODELS, Changes),
    ("DELETE", "/api/delete", MODELS, Changes),
    ("HEAD", "/api/blobs/{digest}", INFERENCE, Reads),
    ("POST", "/api/blobs/{digest}", MODELS, Changes),
    // Embeddings, scores and labels.
    ("POST", "/v1/rerank", INFERENCE, Generates),
    ("POST", "/v2/rerank", INFERENCE, Generates),
    ("POST", "/rerank", INFERENCE, Generates),
    ("POST", "/v1/score", INFERENCE, Generates),
    ("POST", "/score", INFERENCE, Generates),
    ("POST", "/v1/classify", INFERENCE, Generates),
    ("POST", "/classify", INFERENCE, Generates),
    ("POST", "/predict", INFERENCE, Generates),
    ("POST", "/v1/embed", INFERENCE, Generates),
    ("POST", "/v2/embed", INFERENCE, Generates),
    ("POST", "/embed", INFERENCE, Generates),
    ("POST", "/embed_sparse", INFERENCE, Generates),
    ("POST", "/similarity", INFERENCE, Generates),
    ("GET", "/info", INFERENCE, Reads),
    // Routers of several servers.
    ("POST", "/v1/chat/completions/render", INFERENCE, Generates),
    ("POST", "/v1/completions/render", INFERENCE, Generates),
    ("POST", "/v1/responses/render", INFERENCE, Generates),
    ("POST", "/inference/v1/generate", INFERENCE, Generates),
    ("GET", "/server_info", INFERENCE, Reads),
    ("GET", "/get_server_info", INFERENCE, Reads),
    ("GET", "/load", INFERENCE, Reads),
    ("GET", "/get_load", INFERENCE, Reads),
    ("GET", "/loads", INFERENCE, Reads),
    ("GET", "/v1/loads", INFERENCE, Reads),
    // The page. It is loaded before the user enters a key, and contains no data.
    ("GET", "/ui/v1/session", PUBLIC, Shows),
    ("GET", "/ui/v1/models", INFERENCE, Shows),
    ("GET", "/ui/v1/catalogue", INFERENCE, Shows),
    ("GET", "/ui/v1/preset", INFERENCE, Shows),
    ("POST", "/ui/v1/preset", MODELS, Changes),
    ("GET", "/ui/v1/remote", MODELS, Changes),
    ("POST", "/ui/v1/import", ADMIN, Changes),
    ("GET", "/ui/v1/settings", ADMIN, Shows),
    ("GET", "/ui/v1/live", ADMIN, Shows),
    ("GET", "/ui/v1/requests", ADMIN, Shows),
    ("GET", "/ui/v1/keys", ADMIN, Changes),
    ("POST", "/ui/v1/keys", ADMIN, Changes),
    ("DELETE", "/ui/v1/keys/{id}", ADMIN, Changes),
    // Each tool server's settings decide which scopes may see and call its tools. Listing them starts their programs.
    ("GET", "/ui/v1/tools", INFERENCE, Changes),
    ("POST", "/ui/v1/tools/call", INFERENCE, Changes),
    ("POST", "/ui/v1/tools/servers", ADMIN, Changes),
    ("DELETE", "/ui/v1/tools/servers/{name}", ADMIN, Changes),
];

/// Returns the rule of a request. `path` is the path of its route; `None` if no route matches.
///
/// # Errors
/// The route is not in the table.
pub fn rule(method: &Method, path: Option<&str>) -> Result<Rule, ApiError> {
    // The answer is 404 or 405.
    let nothing = Rule { scope: INFERENCE, effect: Reads };
    let Some(path) = path else { return Ok(nothing) };
    let mut known = false;
    let mut of = |method: &str| {
        let mut rows = ROUTES.iter().filter(|row| row.1 == path).inspect(|_| known = true);
        rows.find(|row| row.0 == method).map(|&(_, _, scope, effect)| Rule { scope, effect })
    };
    let found = of(method.as_str()).or_else(|| if method == Method::HEAD { of("GET") } else { None });
    match found {
        Some(rule) => Ok(rule),
        None if known => Ok(nothing),
        None => Err(ApiError::Internal(format!("the route {path} has no rule of access"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn methods_of_a_route_have_their_own_rules_and_head_is_get() {
        let rule = |method: Method, path: &str| rule(&method, Some(path)).unwrap();
        for (method, path, scope, effect) in [
            (Method::GET, "/health", None, Reads),
            (Method::POST, "/v1/chat/completions", INFERENCE, Generates),
            (Method::POST, "/api/blobs/{digest}", MODELS, Changes),
            (Method::HEAD, "/api/blobs/{digest}", INFERENCE, Reads),
            (Method::GET, "/ui/v1/preset", INFERENCE, Shows),
            (Method::HEAD, "/ui/v1/preset", INFERENCE, Shows),
            (Method::POST, "/ui/v1/preset", MODELS, Changes),
            (Method::HEAD, "/ui/v1/tools", INFERENCE, Changes),
            (Method::HEAD, "/metrics", ADMIN, Reads),
            (Method::PUT, "/metrics", INFERENCE, Reads),
        ] {
            assert_eq!(rule(method.clone(), path), Rule { scope, effect }, "{method} {path}");
        }
    }

    #[test]
    fn a_route_without_a_rule_is_an_error() {
        assert!(rule(&Method::GET, Some("/new")).is_err());
        assert!(rule(&Method::GET, None).is_ok(), "the fallback answers");
    }

    #[test]
    fn every_documented_route_has_a_rule() {
        let document = crate::openapi::document();
        let mut seen = 0;
        for (path, methods) in document["paths"].as_object().unwrap() {
            for method in methods.as_object().unwrap().keys() {
                let method = method.to_uppercase();
                let found = ROUTES.iter().any(|row| row.0 == method && row.1.replace("{*", "{") == *path);
                assert!(found, "{method} {path}");
                seen += 1;
            }
        }
        // The document lacks the page, its files and itself.
        assert_eq!(seen + 4, ROUTES.len());
    }
}
