//! Unsupported fields of a request: named in the answer and in the log, or refused if the client or the server is
//! strict.

use std::{
    collections::HashSet,
    convert::Infallible,
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use axum::{
    extract::{FromRequestParts, Request, State},
    http::{HeaderName, HeaderValue, request::Parts},
    middleware::Next,
    response::Response,
};

use crate::{AppState, error::ApiError};

/// Header of an answer that names the ignored fields of its request.
pub const LEFT_OUT: HeaderName = HeaderName::from_static("x-paguro-ignored");

/// Header of a request that is to be refused if it has unsupported fields.
pub const STRICT: HeaderName = HeaderName::from_static("x-paguro-strict");

/// Maximum number of fields that an answer names. Of further ones it has the number.
const MOST_NAMED: usize = 32;

/// Maximum bytes of the header. Some clients read at most 8 kB of all headers.
const MOST_BYTES: usize = 2048;

/// Maximum characters of a field's path.
const MOST_CHARACTERS: usize = 80;

/// Maximum number of different fields in the log.
const MOST_LOGGED: usize = 512;

/// Ignored fields of one request.
#[derive(Clone, Debug, Default)]
pub struct Tolerance {
    strict: bool,
    left_out: Arc<Mutex<LeftOut>>,
}

#[derive(Debug, Default)]
struct LeftOut {
    /// Paths with their reasons, in the order of the request.
    named: Vec<(String, String)>,
    more: usize,
}

/// Ignored fields that were logged.
#[derive(Debug, Default)]
pub struct Logged(Mutex<HashSet<String>>);

impl Logged {
    /// Returns true the first time that something is to be logged. The number of different texts is bounded.
    pub fn is_first(&self, text: &str) -> bool {
        let mut logged = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        logged.len() < MOST_LOGGED && logged.insert(text.to_owned())
    }
}

impl Tolerance {
    /// Returns the strict policy.
    pub fn strict() -> Self {
        Self { strict: true, ..Self::default() }
    }

    /// Returns true if unsupported fields are refused.
    pub fn is_strict(&self) -> bool {
        self.strict
    }

    /// Ignores the field `param`.
    ///
    /// # Errors
    /// The request is strict.
    pub fn leave_out(&self, param: &str, why: impl fmt::Display) -> Result<(), ApiError> {
        if self.strict {
            return Err(ApiError::invalid(param, format!("`{param}` is not supported: {why}")));
        }
        self.note(param, why);
        Ok(())
    }

    /// Records an ignored field.
    pub fn note(&self, param: &str, why: impl fmt::Display) {
        let mut left_out = self.left_out.lock().unwrap_or_else(PoisonError::into_inner);
        if left_out.named.iter().any(|(named, _)| named == param) {
            return;
        }
        if left_out.named.len() < MOST_NAMED {
            left_out.named.push((param.to_owned(), why.to_string()));
        } else {
            left_out.more += 1;
        }
    }

    /// Returns the value of the header; `None` if no field was ignored.
    fn header(&self) -> Option<HeaderValue> {
        let left_out = self.left_out.lock().unwrap_or_else(PoisonError::into_inner);
        let mut names = Vec::new();
        let mut bytes = 0;
        for (path, _) in &left_out.named {
            let name = escaped(path);
            bytes += name.len() + 2;
            if bytes > MOST_BYTES {
                break;
            }
            names.push(name);
        }
        let more = left_out.named.len() - names.len() + left_out.more;
        if more > 0 {
            names.push(format!("... and {more} more"));
        }
        (!names.is_empty()).then(|| HeaderValue::try_from(names.join(", ")).ok()).flatten()
    }

    /// Logs ignored fields, each once.
    fn log(&self, logged: &Logged, path: &str) {
        let left_out = self.left_out.lock().unwrap_or_else(PoisonError::into_inner);
        for (field, why) in &left_out.named {
            let field = escaped(&without_indices(field));
            if logged.is_first(&format!("{path} {field}")) {
                tracing::info!("`{field}` is ignored, now and in later requests: {}", escaped_text(why));
            }
        }
    }
}

impl FromRequestParts<AppState> for Tolerance {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &AppState) -> Result<Self, Infallible> {
        Ok(parts.extensions.get::<Self>().cloned().unwrap_or_default())
    }
}

/// Adds the [`Tolerance`] to a request, and the header with the ignored fields to its answer.
pub async fn tolerate(State(state): State<AppState>, mut request: Request, next: Next) -> Response {
    let asks = request.headers().get(STRICT).is_some_and(|value| value == "1" || value == "true");
    let tolerance = Tolerance { strict: asks || state.settings.strict, ..Tolerance::default() };
    request.extensions_mut().insert(tolerance.clone());
    let path = request.uri().path().to_owned();
    let mut response = next.run(request).await;
    if let Some(header) = tolerance.header() {
        tolerance.log(&state.logged, &path);
        response.headers_mut().insert(LEFT_OUT, header);
    }
    response
}

/// Escapes a path for the header: short, printable ASCII without the header's separators.
fn escaped(path: &str) -> String {
    let mut characters = path.chars();
    let mut escaped = String::new();
    for character in characters.by_ref().take(MOST_CHARACTERS) {
        match character {
            ',' | '\\' => escaped.extend(character.escape_unicode()),
            ' '..='~' => escaped.push(character),
            other => escaped.extend(other.escape_unicode()),
        }
    }
    if characters.next().is_some() {
        escaped.push_str("...");
    }
    escaped
}

/// Escapes a sentence, which may be longer and contain commas.
fn escaped_text(text: &str) -> String {
    let escape = |character: char| match character {
        ' '..='~' => character.to_string(),
        other => other.escape_unicode().to_string(),
    };
    text.chars().take(400).map(escape).collect()
}

/// Removes the indices of a path: `messages[3].id` becomes `messages[].id`.
pub fn without_indices(path: &str) -> String {
    let mut short = String::with_capacity(path.len());
    let mut inside = false;
    for character in path.chars() {
        match character {
            '[' => inside = true,
            ']' => inside = false,
            digit if inside && digit.is_ascii_digit() => continue,
            _ => {}
        }
        short.push(character);
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_escaped_and_bounded() {
        let tolerance = Tolerance::default();
        assert_eq!(tolerance.header(), None);
        tolerance.note("a,b\r\nx-evil: 1", "");
        tolerance.note("farbe_ö", "");
        tolerance.note("farbe_ö", "");
        let header = |tolerance: &Tolerance| tolerance.header().unwrap().to_str().unwrap().to_owned();
        assert_eq!(header(&tolerance), r"a\u{2c}b\u{d}\u{a}x-evil: 1, farbe_\u{f6}");
        for number in 0..1000 {
            tolerance.note(&format!("{number}{}", "€".repeat(1000)), "");
        }
        let long = header(&tolerance);
        assert!(long.ends_with(" more") && long.len() < 2200, "{}", long.len());
    }

    #[test]
    fn paths_have_no_indices_in_the_log() {
        assert_eq!(without_indices("messages[12].tool_calls[0].x1"), "messages[].tool_calls[].x1");
    }
}
