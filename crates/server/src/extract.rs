//! JSON bodies and paths. Reading a body is bounded in size, time and memory; [`crate::wire`] compares its fields with
//! the known ones.

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
    prepare::{Client, IsWanted, Size},
    wire::{self, Tolerance},
};

/// A JSON body. Its content type is ignored, because `curl -d`, as in the examples of every API, sends a wrong one.
/// [`crate::access`] protects against requests forged by web pages.
#[derive(Debug)]
pub struct Json<T>(pub T);

impl<T: wire::Body + Send> FromRequest<AppState> for Json<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &AppState) -> Result<Self, ApiError> {
        refuse_encoding(request.headers())?;
        let waits = request.headers().contains_key(header::EXPECT);
        let of_page = request.uri().path().starts_with("/ui/");
        let extensions = request.extensions();
        let share: BodyShare = extensions.get().cloned().unwrap_or_default();
        let client = Client::of(extensions);
        let tolerance: Tolerance = extensions.get().cloned().unwrap_or_default();
        let schema = state.schemas.of::<T>();
        let bytes = read(request.into_body(), waits, &share, state).await?;
        let parse = async |model: Option<String>| {
            if bytes.len() < LARGE {
                return wire::read(&bytes, &schema, model, &tolerance);
            }
            let (bytes, schema, tolerance) = (bytes.clone(), schema.clone(), tolerance.clone());
            let work = move |_: &IsWanted<'_>| wire::read(&bytes, &schema, model, &tolerance);
            state.preparation.run(&client, Size::Large, work).await
        };
        match parse(None).await {
            // The page's requests always name a model: some of them change it.
            Err(error) if error.is_missing("model") && !of_page => {
                let only = state.models.only().await?;
                parse(Some(only)).await.map(Self)
            }
            read => read.map(Self),
        }
    }
}

/// Size from which bodies are parsed on a preparation thread, so that they do not block other requests.
const LARGE: usize = 256 << 10;

/// Parameters in a path. A path that is not text is refused in the API's own format.
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

/// Writes an answer that may be large, on a thread of preparation: those that serve others must not wait for it.
///
/// # Errors
/// The answer cannot be written.
pub async fn written<T: Serialize + 'static>(
    state: &AppState,
    client: &Client,
    answer: impl FnOnce() -> T + Send + 'static,
) -> Result<Response, ApiError> {
    let write = move |_: &IsWanted<'_>| {
        let failed = |error| ApiError::Internal(format!("the answer could not be written: {error}"));
        serde_json::to_vec(&answer()).map_err(failed)
    };
    let bytes = state.preparation.run(client, Size::Small, write).await?;
    let json = HeaderValue::from_static("application/json");
    Ok(([(header::CONTENT_TYPE, json)], bytes).into_response())
}

/// Refuses compressed bodies.
fn refuse_encoding(headers: &HeaderMap) -> Result<(), ApiError> {
    let encoding = headers.get(header::CONTENT_ENCODING).filter(|encoding| *encoding != "identity");
    encoding.map_or(Ok(()), |encoding| {
        let message = format!(
            "the encoding {encoding:?} of the body is not supported; send the body without an encoding"
        );
        Err(ApiError::invalid("content-encoding", message))
    })
}

/// Bytes of an oversized body that are read and discarded. Most clients read the answer only after they have sent
/// everything, and lose it if the connection is closed before.
const MOST_DISCARDED: usize = 256 << 20;

/// Bytes of a body that are read before other tasks run.
const YIELD: usize = 256 << 10;

/// Minimum growth of a body's memory, in bytes.
const MIN_GROWTH: usize = 4 << 10;

/// Reads a body into memory that `share` has reserved. `waits` is true if the client waits for `100 Continue`.
async fn read(mut body: Body, waits: bool, share: &BodyShare, state: &AppState) -> Result<Bytes, ApiError> {
    let limits = &state.settings.limits;
    let too_large = || ApiError::BodyTooLarge { limit: limits.body_bytes };
    if waits && body.size_hint().lower() > limits.body_bytes as u64 {
        return Err(too_large());
    }
    let (mut bytes, mut length) = (Vec::new(), 0usize);
    let mut no_memory = None;
    let (mut pace, mut counter) = (Pace::new(limits), ValueCounter::default());
    let mut since_yield = 0;
    let reading = async {
        while let Some(frame) = pace.wait(body.frame()).await? {
            let frame = frame.map_err(|error| {
                let message = format!("the body cannot be read: {error}");
                ApiError::Invalid { param: None, message }
            })?;
            let Some(data) = frame.data_ref() else { continue };
            // A fast sender always has more: streams of others are written meanwhile.
            since_yield += data.len();
            if since_yield >= YIELD {
                since_yield = 0;
                tokio::task::yield_now().await;
            }
            length += data.len();
            pace.arrived(data.len());
            if length <= limits.body_bytes && no_memory.is_none() {
                counter.push(data);
                no_memory = share.grow(&state.body_memory, length, counter.values).await.err();
                if bytes.capacity() < length {
                    // Doubling the vector would take up to twice the reserved memory.
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
