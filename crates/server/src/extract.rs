//! JSON bodies. Reading them is bounded in size and time, and knows every field.

use axum::{
    body::{Body, Bytes},
    extract::{FromRequest, Request},
    http::{HeaderValue, header},
    response::{IntoResponse, Response},
};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::{Serialize, de::DeserializeOwned};

use crate::{AppState, error::ApiError};

/// A JSON body. Its content type is not looked at: `curl -d` sends a wrong one, and every example of every API uses
/// that. (Against requests forged by web pages there is [`crate::access`].)
#[derive(Debug)]
pub struct Json<T>(pub T);

impl<T: DeserializeOwned> FromRequest<AppState> for Json<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &AppState) -> Result<Self, ApiError> {
        let bytes = read(request.into_body(), state).await?;
        parse(&bytes).map(Self)
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

async fn read(body: Body, state: &AppState) -> Result<Bytes, ApiError> {
    let limits = state.settings.limits;
    let whole = Limited::new(body, limits.body_bytes).collect();
    match tokio::time::timeout(limits.body_time, whole).await {
        Err(_) => Err(ApiError::BodyTimeout(limits.body_time)),
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => {
            Err(ApiError::BodyTooLarge { limit: limits.body_bytes })
        }
        Ok(Err(error)) => {
            Err(ApiError::Invalid { param: None, message: format!("the body cannot be read: {error}") })
        }
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
