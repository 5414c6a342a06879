//! Access control: the `Host` and the sender of a request, and its API key. `routes.rs` has a rule for each route.

pub mod routes;
mod sender;

use axum::{
    Extension,
    extract::{MatchedPath, Request, State},
    http::{HeaderMap, Method, header},
    middleware::Next,
    response::Response,
};

use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use self::sender::{Name, PAGE_TOKEN, Sender};
use crate::{
    AppState,
    body::BodyShare,
    error::ApiError,
    keys::{ApiKey, Scope},
    layers::REQUEST_ID,
    listen::Arrival,
    prepare::Client,
    wire,
};

/// Id of the API key of a request, where keys are required.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tenant(pub String);

/// True if the sender of a request may also change something, and not only generate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MayChange(pub bool);

/// Returns the CORS layer. It permits these origins, pages on loopback addresses and applications with an embedded
/// browser. [`check`] decides what each may do.
pub fn cors(origins: &[String]) -> CorsLayer {
    let origin = if origins.iter().any(|origin| origin == "*") {
        AllowOrigin::any()
    } else {
        let origins = origins.to_vec();
        AllowOrigin::predicate(move |origin, _| {
            let Ok(origin) = origin.to_str() else { return false };
            sender::is_local(origin) || origins.iter().any(|other| other.eq_ignore_ascii_case(origin))
        })
    };
    CorsLayer::new()
        .allow_origin(origin)
        .allow_methods([Method::GET, Method::POST, Method::DELETE, Method::HEAD])
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([REQUEST_ID, header::RETRY_AFTER, wire::LEFT_OUT])
}

/// Rejects requests with a wrong host or sender, and requests without the required key.
///
/// # Errors
/// 401 or 403.
pub async fn check(
    State(state): State<AppState>,
    Extension(arrival): Extension<Arrival>,
    mut request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let headers = request.headers();
    if headers.get_all(header::HOST).iter().count() > 1 {
        let message = "the request has more than one `Host` header".into();
        return Err(ApiError::Invalid { param: None, message });
    }
    let host = sender::host(headers, request.uri());
    let name = if arrival.loopback { sender::name(host.as_deref(), &state.settings)? } else { Name::Certain };
    let sender = Sender::of(headers, host.as_deref(), &state.settings.origins)?;
    let path = request.extensions().get::<MatchedPath>();
    let rule = routes::rule(request.method(), path.map(MatchedPath::as_str))?;
    let needs_key = needs_key(&state, arrival)?;
    let tenant = match rule.scope {
        Some(_) if needs_key && state.settings.public_metrics && is_report(request.method(), path) => None,
        Some(scope) if needs_key => Some(check_key(&state, headers, scope)?),
        _ => None,
    };
    // Pages of other sites do not know the key, so it proves as much as the page's token.
    let is_proven = tenant.is_some() && !matches!(sender, Sender::Foreign { .. });
    let has_token = headers.get(PAGE_TOKEN).is_some_and(|token| is_same(token.as_bytes(), &state.page_token));
    // Without a key, rebound names are worthless where keys are needed.
    let name = if needs_key { Name::Certain } else { name };
    let may_change = is_proven || sender.check(rule.effect, request.method(), name, has_token)?;
    let extensions = request.extensions_mut();
    extensions.insert(MayChange(may_change));
    if let Some(tenant) = tenant {
        extensions.insert(tenant);
    }
    let client = Client::of(extensions);
    extensions.insert(BodyShare::of(client.clone()));
    let response = next.run(request).await;
    state.body_memory.hold_answer(client, response).await
}

/// Reports that `--public-metrics` shows to clients without a key. They contain no texts of requests.
const REPORTS: [&str; 8] = [
    "/metrics",
    "/load",
    "/get_load",
    "/loads",
    "/v1/loads",
    "/server_info",
    "/get_server_info",
    "/v1/models",
];

fn is_report(method: &Method, path: Option<&MatchedPath>) -> bool {
    let reads = [Method::GET, Method::HEAD].contains(method);
    reads && path.is_some_and(|path| REPORTS.contains(&path.as_str()))
}

/// Compares a token in constant time.
fn is_same(shown: &[u8], token: &str) -> bool {
    let differences = shown.iter().zip(token.as_bytes()).fold(0, |all, (a, b)| all | (a ^ b));
    shown.len() == token.len() && differences == 0
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
