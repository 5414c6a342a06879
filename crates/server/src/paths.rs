//! Paths of requests: base URLs of clients may end with a slash, or lack `/v1`.

use axum::http::{Request, Uri, uri::PathAndQuery};

/// Removes doubled and final slashes of a request's path, which come from base URLs that end with a slash.
pub fn normalize<B>(request: &mut Request<B>) {
    let Some(path) = plain(request.uri().path()) else { return };
    let query = request.uri().query().map_or(String::new(), |query| format!("?{query}"));
    let Ok(path) = PathAndQuery::try_from(path + &query) else { return };
    let mut parts = request.uri().clone().into_parts();
    parts.path_and_query = Some(path);
    if let Ok(uri) = Uri::from_parts(parts) {
        *request.uri_mut() = uri;
    }
}

/// Returns a path without doubled and final slashes; `None` if it has none.
fn plain(path: &str) -> Option<String> {
    if !path.contains("//") && (path.len() <= 1 || !path.ends_with('/')) {
        return None;
    }
    let parts: Vec<_> = path.split('/').filter(|part| !part.is_empty()).collect();
    Some(format!("/{}", parts.join("/")))
}

/// Returns the path that a client probably means by an unknown one: the same below `/v1` or `/api`, or with one `/v1`.
pub fn meant(path: &str) -> Option<String> {
    const BELOW_V1: [&str; 14] = [
        "/chat/completions",
        "/completions",
        "/responses",
        "/embeddings",
        "/models",
        "/messages",
        "/messages/count_tokens",
        "/rerank",
        "/score",
        "/classify",
        "/embed",
        "/chat",
        "/generate",
        "/tags",
    ];
    // LM Studio's own API is below `/api/v0` and `/api/v1`.
    let rest = path
        .strip_prefix("/api/v1")
        .or_else(|| path.strip_prefix("/api/v0"))
        .or_else(|| path.strip_prefix("/openai/v1"));
    let rest =
        rest.or_else(|| path.strip_prefix("/v1/v1")).or_else(|| path.strip_prefix("/v1")).unwrap_or(path);
    let known = BELOW_V1.iter().find(|known| **known == rest)?;
    let prefix = if ["/chat", "/generate", "/tags"].contains(known) { "/api" } else { "/v1" };
    let meant = format!("{prefix}{rest}");
    (meant != path).then_some(meant)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slashes_of_base_urls_are_removed() {
        for (path, expected) in [
            ("//v1/chat/completions?a=//b/", "/v1/chat/completions?a=//b/"),
            ("/v1//models", "/v1/models"),
            ("/api/tags/", "/api/tags"),
            ("/", "/"),
            ("//", "/"),
            ("/v1/models/a%2Fb", "/v1/models/a%2Fb"),
        ] {
            let mut request = Request::builder().uri(format!("http://localhost{path}")).body(()).unwrap();
            normalize(&mut request);
            assert_eq!(request.uri().to_string(), format!("http://localhost{expected}"), "{path}");
        }
    }

    #[test]
    fn the_nearest_path_is_named() {
        for (path, expected) in [
            ("/chat/completions", Some("/v1/chat/completions")),
            ("/api/v1/chat/completions", Some("/v1/chat/completions")),
            ("/api/v0/models", Some("/v1/models")),
            ("/v1/v1/models", Some("/v1/models")),
            ("/v1/chat", Some("/api/chat")),
            ("/tags", Some("/api/tags")),
            ("/nothing", None),
            ("/v1/nothing", None),
        ] {
            assert_eq!(meant(path).as_deref(), expected, "{path}");
        }
    }
}
