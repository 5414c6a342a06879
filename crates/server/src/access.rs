//! Access control: the `Host` and `Origin` of a request, and its API key.

use axum::{
    Extension,
    extract::{Request, State},
    http::{HeaderMap, Method, Uri, header},
    middleware::Next,
    response::Response,
};

use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use crate::{
    AppState,
    body::BodyShare,
    error::ApiError,
    keys::{ApiKey, Scope},
    layers::REQUEST_ID,
    listen::Arrival,
    wire,
};

/// Id of the API key of a request, where keys are required.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tenant(pub String);

/// Schemes of applications with an embedded browser. No web site can use them.
const APPS: [&str; 5] = ["app", "capacitor", "tauri", "vscode-file", "vscode-webview"];

/// Returns the CORS layer. It permits these origins and applications with an embedded browser.
pub fn cors(origins: &[String]) -> CorsLayer {
    let origin = if origins.iter().any(|origin| origin == "*") {
        AllowOrigin::any()
    } else {
        let origins = origins.to_vec();
        AllowOrigin::predicate(move |origin, _| {
            let Ok(origin) = origin.to_str() else { return false };
            is_app(origin) || origins.iter().any(|other| other.eq_ignore_ascii_case(origin))
        })
    };
    CorsLayer::new()
        .allow_origin(origin)
        .allow_methods([Method::GET, Method::POST, Method::DELETE, Method::HEAD])
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([REQUEST_ID, header::RETRY_AFTER, wire::LEFT_OUT])
}

/// Returns true for the origin of an application with an embedded browser. Tauri on Windows has a host name instead of
/// a scheme.
fn is_app(origin: &str) -> bool {
    let scheme = origin.split_once("://").map(|(scheme, _)| scheme);
    scheme.is_some_and(|scheme| APPS.contains(&scheme))
        || matches!(origin, "http://tauri.localhost" | "https://tauri.localhost")
}

/// Rejects requests with a wrong host or origin, and requests without the required key.
///
/// # Errors
/// 401 or 403.
pub async fn check(
    State(state): State<AppState>,
    Extension(arrival): Extension<Arrival>,
    mut request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    request.extensions_mut().insert(BodyShare::default());
    let headers = request.headers();
    if headers.get_all(header::HOST).iter().count() > 1 {
        let message = "the request has more than one `Host` header".into();
        return Err(ApiError::Invalid { param: None, message });
    }
    let host = host(headers, request.uri());
    if arrival.loopback {
        check_host(host.as_deref(), &state.settings.hosts)?;
    }
    check_origin(headers, host.as_deref(), &state.settings.origins)?;
    if let Some(scope) = scope(request.method(), request.uri().path())
        && needs_key(&state, arrival)?
    {
        let tenant = check_key(&state, headers, scope)?;
        request.extensions_mut().insert(tenant);
    }
    Ok(next.run(request).await)
}

/// Returns the scope that a path requires; `None` if it is public.
fn scope(method: &Method, path: &str) -> Option<Scope> {
    match path {
        "/health" | "/ready" | "/openapi.json" | "/docs" => None,
        // The page is loaded before the user enters a key. It contains no data.
        "/" | "/ui/v1/session" => None,
        // Each tool server's settings decide which scopes may see and call its tools.
        "/ui/v1/models" | "/ui/v1/tools" | "/ui/v1/tools/call" | "/ui/v1/catalogue" => Some(Scope::Inference),
        "/ui/v1/preset" if method == Method::GET => Some(Scope::Inference),
        "/ui/v1/preset" | "/ui/v1/remote" => Some(Scope::Models),
        _ if path.starts_with("/ui/v1/") => Some(Scope::Admin),
        _ if path.starts_with("/ui/") => None,
        "/metrics" => Some(Scope::Admin),
        "/api/pull" | "/api/create" | "/api/copy" | "/api/delete" => Some(Scope::Models),
        _ if path.starts_with("/api/blobs/") && method != Method::HEAD => Some(Scope::Models),
        _ => Some(Scope::Inference),
    }
}

/// Returns true if a client with this `arrival` must present a key.
///
/// # Errors
/// The key file cannot be read.
pub fn needs_key(state: &AppState, arrival: Arrival) -> Result<bool, ApiError> {
    Ok(!arrival.private || state.keys.any().map_err(ApiError::Internal)?)
}

/// Returns the key in a request's headers.
pub fn shown_key(headers: &HeaderMap) -> Option<&str> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let bearer = text("authorization").and_then(|value| {
        let (scheme, key) = value.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then_some(key.trim())
    });
    // The headers of Anthropic and of Azure.
    bearer.or_else(|| text("x-api-key")).or_else(|| text("api-key"))
}

/// Returns the key of a request; `None` without a key and for an unknown one.
///
/// # Errors
/// The key file cannot be read.
pub fn find_key(state: &AppState, headers: &HeaderMap) -> Result<Option<ApiKey>, ApiError> {
    shown_key(headers).map_or(Ok(None), |shown| state.keys.find(shown).map_err(ApiError::Internal))
}

/// Returns the scopes of a client with `key`; all scopes if no key is required.
pub fn scopes(needs_key: bool, key: Option<ApiKey>) -> Vec<Scope> {
    match (needs_key, key) {
        (false, _) => vec![Scope::Inference, Scope::Models, Scope::Admin],
        (true, Some(key)) => key.scopes,
        (true, None) => Vec::new(),
    }
}

fn check_key(state: &AppState, headers: &HeaderMap, scope: Scope) -> Result<Tenant, ApiError> {
    let Some(shown) = shown_key(headers) else {
        return Err(ApiError::Unauthorized(
            "a key is needed: `Authorization: Bearer KEY`; `paguro keys add` makes one",
        ));
    };
    let key = state.keys.find(shown).map_err(ApiError::Internal)?;
    let Some(key) = key else {
        return Err(ApiError::Unauthorized("the key is not known; `paguro keys add` makes one"));
    };
    if !key.scopes.contains(&scope) {
        return Err(ApiError::Forbidden(format!("the key `{}` has no scope `{}`", key.id, scope.name())));
    }
    Ok(Tenant(key.id))
}

/// Returns the host that the request addresses.
fn host(headers: &HeaderMap, uri: &Uri) -> Option<String> {
    let header = headers.get(header::HOST).and_then(|host| host.to_str().ok());
    header.or_else(|| uri.authority().map(|authority| authority.as_str())).map(str::to_ascii_lowercase)
}

/// Checks the host. A web page that has rebound its DNS name to this address sends that name.
fn check_host(host: Option<&str>, allowed: &[String]) -> Result<(), ApiError> {
    let Some(host) = host else {
        return Err(ApiError::Forbidden("the request has no `Host` header".into()));
    };
    let name = without_port(host);
    // Names that no public site can have: this machine, containers, the local network.
    let own = [".localhost", ".internal", ".local"].iter().any(|end| name.ends_with(end));
    let local = ["localhost", "127.0.0.1", "[::1]"].contains(&name) || own;
    if local || allowed.iter().any(|other| other == name || other == host) {
        return Ok(());
    }
    Err(ApiError::Forbidden(format!(
        "this server is not `{host}`: it listens for this machine only; --allow-host {name} allows the name"
    )))
}

/// Checks the origin. Pages of other sites can send requests, although they cannot read the answers, and browsers name
/// their origin. Browser extensions and pages without a site are treated alike.
fn check_origin(headers: &HeaderMap, host: Option<&str>, allowed: &[String]) -> Result<(), ApiError> {
    let mut origins = headers.get_all(header::ORIGIN).iter();
    let Some(origin) = origins.next() else { return Ok(()) };
    if origins.next().is_some() {
        return Err(ApiError::Forbidden("the request has more than one `Origin` header".into()));
    }
    let Ok(origin) = origin.to_str() else {
        return Err(ApiError::Forbidden("the `Origin` header is not ASCII text".into()));
    };
    let origin = origin.to_ascii_lowercase();
    if allowed.iter().any(|other| other == "*" || other.eq_ignore_ascii_case(&origin)) {
        return Ok(());
    }
    match origin.split_once("://") {
        Some(("http" | "https", site)) if host.is_some_and(|host| host.eq_ignore_ascii_case(site)) => Ok(()),
        _ if is_app(&origin) => Ok(()),
        _ => refuse_origin(&origin),
    }
}

fn refuse_origin(origin: &str) -> Result<(), ApiError> {
    Err(ApiError::Forbidden(format!(
        "pages from `{origin}` may not use this server; --cors-origin {origin} allows them"
    )))
}

fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn names_of_this_machine_pass_and_others_do_not() {
        for (host, fine) in [
            ("localhost:11434", true),
            ("127.0.0.1", true),
            ("[::1]:80", true),
            ("paguro.localhost:1", true),
            ("host.docker.internal:11434", true),
            ("mybox.local", true),
            ("local", false),
            ("mybox.local.evil.example", false),
            ("box.lan:1", true),
            ("evil.example:11434", false),
            ("localhost.evil.example", false),
            ("127.0.0.1.evil.example", false),
            ("", false),
        ] {
            assert_eq!(check_host(Some(host), &["box.lan".into()]).is_ok(), fine, "{host}");
        }
        assert!(check_host(None, &[]).is_err());
    }

    #[test]
    fn pages_of_other_sites_are_refused() {
        for (origin, fine) in [
            ("http://localhost:11434", true),
            ("https://chat.example", true),
            ("vscode-webview://abc", true),
            ("app://obsidian.md", true),
            ("http://tauri.localhost", true),
            ("http://tauri.localhost.evil.example", false),
            ("http://localhost:3000", false),
            ("https://evil.example", false),
            ("HTTP://LOCALHOST:11434", true),
            ("HTTP://evil.example", false),
            ("ws://localhost:11434", false),
            ("chrome-extension://abc", false),
            ("moz-extension://abc", false),
            ("chrome-extension://allowed", true),
            ("file://", false),
            ("http://localhost:11434/", false),
            ("localhost:11434", false),
            ("", false),
            ("null", false),
            ("NULL", false),
        ] {
            let headers = HeaderMap::from_iter([(header::ORIGIN, origin.parse().unwrap())]);
            let allowed = ["https://chat.example".to_owned(), "chrome-extension://Allowed".to_owned()];
            assert_eq!(check_origin(&headers, Some("localhost:11434"), &allowed).is_ok(), fine, "{origin}");
        }
        let refused = |values: &[&[u8]]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(header::ORIGIN, HeaderValue::from_bytes(value).unwrap());
            }
            check_origin(&headers, Some("localhost"), &[]).is_err()
        };
        assert!(refused(&[b"http://localhost", b"https://evil.example"]));
        assert!(refused(&[b"http://localhost", b"http://localhost"]));
        assert!(refused(&["http://löcalhost".as_bytes()]));
        assert!(refused(&[b"http://localhost\xff"]));
    }

    #[test]
    fn every_path_needs_its_scope() {
        let scope = |method: Method, path| scope(&method, path);
        assert_eq!(scope(Method::GET, "/health"), None);
        assert_eq!(scope(Method::POST, "/v1/chat/completions"), Some(Scope::Inference));
        assert_eq!(scope(Method::POST, "/api/pull"), Some(Scope::Models));
        assert_eq!(scope(Method::POST, "/api/blobs/sha256:00"), Some(Scope::Models));
        assert_eq!(scope(Method::GET, "/metrics"), Some(Scope::Admin));
        assert_eq!(scope(Method::GET, "/ui/assets/index.js"), None);
        assert_eq!(scope(Method::GET, "/ui/v1/live"), Some(Scope::Admin));
        assert_eq!(scope(Method::GET, "/ui/v1/models"), Some(Scope::Inference));
        assert_eq!(scope(Method::DELETE, "/ui/v1/keys/1"), Some(Scope::Admin));
        assert_eq!(scope(Method::GET, "/ui/v1/preset"), Some(Scope::Inference));
        assert_eq!(scope(Method::POST, "/ui/v1/preset"), Some(Scope::Models));
        assert_eq!(scope(Method::POST, "/ui/v1/import"), Some(Scope::Admin));
        assert_eq!(scope(Method::POST, "/ui/v1/tools/call"), Some(Scope::Inference));
        assert_eq!(scope(Method::POST, "/ui/v1/tools/servers"), Some(Scope::Admin));
        assert_eq!(scope(Method::GET, "/anything"), Some(Scope::Inference));
    }
}
