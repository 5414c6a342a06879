//! Request ids, and the access log: one line when an answer is complete.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use axum::{
    extract::{MatchedPath, Request, State},
    http::{HeaderName, HeaderValue},
    middleware::Next,
    response::Response,
};
use hyper::body::Body as HttpBody;
use tracing::{Instrument, Span};

use crate::{AppState, dialect::Dialect, error::ApiError, held, ids};

/// Header with the id of a request, in requests and in answers.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Maximum length of an error in the log, in characters.
const MAX_REASON: usize = 300;

/// Maximum length of a name between backticks in the log. Longer ones are text of a client.
const MAX_NAME: usize = 64;

/// Statistics of a request for the access log. Handlers that generate answers fill them in.
#[derive(Clone, Debug, Default)]
pub struct RequestLog(Arc<Mutex<Generated>>);

/// Statistics of one answer.
#[derive(Debug, Default)]
pub struct Generated {
    /// The model's name; `None` while nothing is generated.
    pub model: Option<String>,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Tokens of the prompt that the prefix cache had.
    pub cached: usize,
    /// Tokens of the answer, over all choices.
    pub answer: usize,
    /// Time in the queue.
    pub queue: Option<Duration>,
    /// Times of the first and the last token.
    pub tokens: Option<(Instant, Instant)>,
    /// Error after the answer had begun.
    pub error: Option<String>,
}

impl RequestLog {
    /// Updates the statistics.
    pub fn update(&self, change: impl FnOnce(&mut Generated)) {
        // Updates leave no partial state, so a poisoned lock is usable.
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Records the error of an answer.
    pub fn fail(&self, error: &ApiError) {
        self.update(|generated| generated.error = Some(reason(error)));
    }
}

/// Assigns an id to a request, and names it in its answer and in its lines of the log.
pub async fn log(State(state): State<AppState>, mut request: Request, next: Next) -> Response {
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
    let generated = RequestLog::default();
    request.extensions_mut().insert(generated.clone());
    let mut response = next.run(request).instrument(span.clone()).await;
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
    span.record("http.response.status_code", status);
    let error = response.extensions_mut().remove::<Arc<ApiError>>().map(|error| reason(&error));
    let is_poll = is_poll(&method, path);
    let line = Line { span, status, started, error, generated, is_poll };
    // The statistics of a stream are complete when its body is dropped.
    match HttpBody::size_hint(response.body()).exact() {
        Some(_) => drop(line),
        None => {
            let (head, body) = response.into_parts();
            return Response::from_parts(head, held::until_end_of(body, line));
        }
    }
    response
}

/// A request's line in the access log, written on drop.
struct Line {
    span: Span,
    status: u16,
    started: Instant,
    /// Error of the request.
    error: Option<String>,
    generated: RequestLog,
    /// True for a request that programs repeat every few seconds. It is logged only if it fails.
    is_poll: bool,
}

/// Returns true for reads of the page, its files and its data, and of the routes of monitoring, which programs request
/// every few seconds. Changes that the page makes are not among them.
fn is_poll(method: &str, route: &str) -> bool {
    const MONITORING: [&str; 9] =
        ["/", "/health", "/ready", "/status", "/metrics", "/load", "/get_load", "/loads", "/v1/loads"];
    matches!(method, "GET" | "HEAD") && (MONITORING.contains(&route) || route.starts_with("/ui/"))
}

impl Drop for Line {
    fn drop(&mut self) {
        let (status, milliseconds) = (self.status, self.started.elapsed().as_millis() as u64);
        let generated = self.generated.0.lock().unwrap_or_else(PoisonError::into_inner);
        let error = self.error.as_deref().or(generated.error.as_deref());
        self.span.in_scope(|| match &generated.model {
            Some(model) => {
                let Generated { prompt, cached, answer, queue, tokens, .. } = &*generated;
                let time = tokens.map(|(first, last)| last.saturating_duration_since(first).as_secs_f64());
                // The time of the first token belongs to the prefill.
                let speed =
                    time.filter(|time| *time > 0.0).map(|time| answer.saturating_sub(1) as f64 / time);
                let speed = speed.map(|speed| (speed * 10.0).round() / 10.0);
                let queue = queue.map(|queue| queue.as_millis() as u64);
                tracing::info!(
                    status,
                    milliseconds,
                    model,
                    prompt,
                    cached,
                    answer,
                    "tok/s" = speed,
                    queue_ms = queue,
                    error,
                    "answered"
                );
            }
            None if status >= 500 => tracing::warn!(status, milliseconds, error, "answered"),
            None if self.is_poll && status < 400 => tracing::debug!(status, milliseconds, "answered"),
            None => tracing::info!(status, milliseconds, error, "answered"),
        });
    }
}

/// Returns an error for the log without text of clients: texts between double quotes are left out, and texts between
/// backticks that cannot be a field's name.
fn reason(error: &ApiError) -> String {
    let message = error.to_string();
    let mut out = String::new();
    for (mark, keep) in [('"', false), ('`', true)] {
        let text = if out.is_empty() { message.clone() } else { std::mem::take(&mut out) };
        for (index, part) in text.split(mark).enumerate() {
            let is_name =
                part.len() <= MAX_NAME && !part.contains(|c: char| c.is_whitespace() || c.is_control());
            match index % 2 {
                0 => out += part,
                _ if keep && is_name => out += &format!("{mark}{part}{mark}"),
                _ => out += &format!("{mark}...{mark}"),
            }
        }
    }
    let plain = out.chars().map(|c| if c.is_control() { ' ' } else { c });
    plain.take(MAX_REASON).collect()
}

/// Returns true if an id of a client can be used in the log.
fn is_sane(id: &HeaderValue) -> bool {
    let fine = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.:".contains(byte);
    (1..=128).contains(&id.len()) && id.as_bytes().iter().all(fine)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_reads_of_the_page_and_of_monitoring_are_polls() {
        for (method, route, expected) in [
            ("GET", "/ui/v1/models", true),
            ("GET", "/ui/{*path}", true),
            ("GET", "/status", true),
            ("HEAD", "/", true),
            ("POST", "/ui/v1/keys", false),
            ("DELETE", "/ui/v1/keys/{id}", false),
            ("GET", "/v1/models", false),
            ("GET", "/uix", false),
            ("POST", "/api/chat", false),
        ] {
            assert_eq!(is_poll(method, route), expected, "{method} {route}");
        }
    }

    #[test]
    fn reasons_name_fields_and_quote_nobody() {
        let error = |message: &str| reason(&ApiError::invalid("x", message));
        assert_eq!(
            reason(&ApiError::UnknownField {
                param: "temprature".into(),
                hint: "did you mean `temperature`?".into()
            }),
            "unknown field `temprature`: did you mean `temperature`?"
        );
        assert_eq!(
            error("`temperature` must be a number, not \"a secret text\""),
            "`temperature` must be a number, not \"...\""
        );
        assert_eq!(error("there is no `my secret text`"), "there is no `...`");
        assert_eq!(error("an \"unclosed secret"), "an \"...\"");
        assert_eq!(error("two\nlines"), "two lines");
        assert!(error(&"x ".repeat(1000)).len() <= MAX_REASON);
    }
}
