//! Who asks, and until when the answer is wanted.

use std::{sync::Arc, time::Duration};

use axum::{
    extract::FromRequestParts,
    http::{HeaderMap, HeaderName, request::Parts},
};
use tokio::time::{Instant, timeout_at};

use crate::{AppState, access::Tenant, error::ApiError};

/// How many seconds the client waits for its answer; the server's own limit bounds it.
const TIMEOUT: HeaderName = HeaderName::from_static("x-request-timeout");

/// Who asks, and until when the answer is wanted.
#[derive(Clone, Debug, Default)]
pub struct Caller {
    /// The key's id; requests without a key are of one tenant.
    pub tenant: Option<Arc<str>>,
    /// When the answer is of no use any more.
    pub deadline: Option<Instant>,
}

impl Caller {
    /// What `work` makes, if that is there in time.
    ///
    /// # Errors
    /// [`ApiError::Timeout`], or the work's own.
    pub async fn in_time<T>(&self, work: impl Future<Output = Result<T, ApiError>>) -> Result<T, ApiError> {
        match self.deadline {
            None => work.await,
            Some(deadline) => timeout_at(deadline, work).await.unwrap_or_else(|_| Err(ApiError::timeout())),
        }
    }
}

impl FromRequestParts<AppState> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        let limits = [state.settings.limits.request_time, asked_for(&parts.headers)?];
        let limit = limits.into_iter().flatten().min();
        Ok(Self {
            tenant: parts.extensions.get().map(|Tenant(id)| id.as_str().into()),
            deadline: limit.and_then(|limit| Instant::now().checked_add(limit)),
        })
    }
}

fn asked_for(headers: &HeaderMap) -> Result<Option<Duration>, ApiError> {
    let Some(value) = headers.get(TIMEOUT) else { return Ok(None) };
    let seconds = value.to_str().ok().and_then(|text| text.trim().parse().ok());
    let time = seconds.filter(|seconds| *seconds > 0.0).map(Duration::try_from_secs_f64);
    match time {
        Some(Ok(time)) => Ok(Some(time)),
        _ => {
            let message = format!("the header `{TIMEOUT}` must be a number of seconds, more than 0");
            Err(ApiError::invalid(TIMEOUT.as_str(), message))
        }
    }
}
