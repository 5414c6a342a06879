//! JSON bodies and paths. Reading a body is bounded in size, time and memory, and knows every field.

use axum::{
    body::{Body, Bytes},
    extract::{FromRequest, FromRequestParts, Request},
    http::{HeaderMap, HeaderValue, header, request::Parts},
    response::{IntoResponse, Response},
};
use http_body_util::BodyExt;
use hyper::body::Body as _;
use serde::{Serialize, de::DeserializeOwned};

use crate::{
    AppState,
    body::{BodyShare, Pace, ValueCounter},
    error::ApiError,
    prepare::{Client, Size},
};

/// A JSON body. Its content type is not looked at: `curl -d` sends a wrong one, and every example of every API uses
/// that. (Against requests forged by web pages there is [`crate::access`].)
#[derive(Debug)]
pub struct Json<T>(pub T);

impl<T: DeserializeOwned + Send + 'static> FromRequest<AppState> for Json<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &AppState) -> Result<Self, ApiError> {
        refuse_encoding(request.headers())?;
        let waits = request.headers().contains_key(header::EXPECT);
        let extensions = request.extensions();
        let share: BodyShare = extensions.get().cloned().unwrap_or_default();
        let client = Client::of(extensions);
        let bytes = read(request.into_body(), waits, &share, state).await?;
        if bytes.len() < LARGE {
            return parse(&bytes).map(Self);
        }
        state.preparation.run(&client, Size::Large, move |_| parse(&bytes)).await.map(Self)
    }
}

/// Bodies from this size on are parsed elsewhere: the threads that serve others must not wait for it.
const LARGE: usize = 256 << 10;

/// Parameters in a path. What is no text is refused in the API's own shape.
#[derive(Debug)]
pub struct Path<T>(pub T);

impl<T: DeserializeOwned + Send> FromRequestParts<AppState> for Path<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        let path = axum::extract::Path::from_request_parts(parts, state).await;
        let axum::extract::Path(value) = path.map_err(|rejection| {
            let message =
                format!("the path `{}` cannot be read: {}", parts.uri.path(), rejection.body_text());
            ApiError::Invalid { param: None, message }
        })?;
        Ok(Self(value))
    }
}

impl<T: Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        match serde_json::to_vec(&self.0) {
            Ok(bytes) => {
                let json = HeaderValue::from_static("application/json");
                ([(header::CONTENT_TYPE, json)], bytes).into_response()
            }
            Err(error) => {
                ApiError::Internal(format!("the answer could not be written: {error}")).into_response()
            }
        }
    }
}

/// Bodies are read as they are.
fn refuse_encoding(headers: &HeaderMap) -> Result<(), ApiError> {
    let encoding = headers.get(header::CONTENT_ENCODING).filter(|encoding| *encoding != "identity");
    encoding.map_or(Ok(()), |encoding| {
        let message = format!("the body is sent as {encoding:?}, which is not read here; send it as it is");
        Err(ApiError::invalid("content-encoding", message))
    })
}

/// Bytes of a body that is too large which are read and thrown away. Most clients look at the answer only when they have
/// sent everything, and lose it if the connection is closed before.
const MOST_DISCARDED: usize = 256 << 20;

/// Bytes by which the memory of a body grows, at least.
const MIN_GROWTH: usize = 4 << 10;

/// Reads a body into memory that `share` has reserved; whether the client `waits` for a sign before it sends one.
async fn read(mut body: Body, waits: bool, share: &BodyShare, state: &AppState) -> Result<Bytes, ApiError> {
    let limits = &state.settings.limits;
    let too_large = || ApiError::BodyTooLarge { limit: limits.body_bytes };
    if waits && body.size_hint().lower() > limits.body_bytes as u64 {
        return Err(too_large());
    }
    let (mut bytes, mut length) = (Vec::new(), 0usize);
    let mut no_memory = None;
    let (mut pace, mut counter) = (Pace::new(limits), ValueCounter::default());
    let reading = async {
        while let Some(frame) = pace.wait(body.frame()).await? {
            let frame = frame.map_err(|error| {
                let message = format!("the body cannot be read: {error}");
                ApiError::Invalid { param: None, message }
            })?;
            let Some(data) = frame.data_ref() else { continue };
            length += data.len();
            pace.arrived(data.len());
            if length <= limits.body_bytes && no_memory.is_none() {
                counter.push(data);
                no_memory = share.grow(&state.body_memory, length, counter.values).await.err();
                if bytes.capacity() < length {
                    // A vector that doubles would take up to twice the memory that is reserved.
                    bytes.reserve_exact(data.len().max(length / 8).max(MIN_GROWTH));
                }
                bytes.extend_from_slice(data);
            } else if length > limits.body_bytes.saturating_add(MOST_DISCARDED) {
                break;
            } else {
                bytes = Vec::new();
                share.clear();
            }
        }
        Ok(())
    };
    let read = tokio::time::timeout(limits.body_time, reading).await;
    if length > limits.body_bytes {
        return Err(too_large());
    }
    match no_memory {
        Some(error) => Err(error),
        None => read.unwrap_or(Err(ApiError::BodyTimeout(limits.body_time))).map(|()| bytes.into()),
    }
}

/// Parses JSON into something that knows all of its fields.
///
/// # Errors
/// With the path of what is wrong.
pub fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    // serde would take an array for an object's fields in their order.
    if bytes.trim_ascii_start().first() == Some(&b'[') {
        let message = "the body is a JSON array; it must be an object".into();
        return Err(ApiError::Invalid { param: None, message });
    }
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        refusal((path != ".").then_some(path), error.inner())
    })?;
    json.end().map_err(|error| refusal(None, &error))?;
    Ok(value)
}

fn refusal(path: Option<String>, error: &serde_json::Error) -> ApiError {
    let message = error.to_string();
    if !error.is_data() {
        return ApiError::Invalid { param: None, message: format!("the body is not JSON: {message}") };
    }
    // serde's own words; positions mean little in a body that a library wrote.
    let message = message.rsplit_once(" at line ").map_or(message.as_str(), |(words, _)| words);
    if let Some((name, expected)) = quoted(message, "unknown field `") {
        // The path ends with the field where it is known, and with what contains it elsewhere.
        let param = match path {
            Some(path) if path == name || path.ends_with(&format!(".{name}")) => path,
            Some(path) => format!("{path}.{name}"),
            None => name.to_owned(),
        };
        let expected = expected.strip_prefix(", expected ").unwrap_or_default().to_owned();
        return ApiError::UnknownField { param, expected };
    }
    if let Some((name, _)) = quoted(message, "missing field `") {
        let param = path.map_or_else(|| name.to_owned(), |path| format!("{path}.{name}"));
        let message = format!("`{param}` is missing");
        return ApiError::Invalid { param: Some(param), message };
    }
    match path {
        Some(path) => ApiError::Invalid { message: format!("`{path}`: {message}"), param: Some(path) },
        None => ApiError::Invalid { param: None, message: message.to_owned() },
    }
}

/// The name in backticks after `start`, and what follows.
fn quoted<'m>(message: &'m str, start: &str) -> Option<(&'m str, &'m str)> {
    message.strip_prefix(start)?.split_once('`')
}
