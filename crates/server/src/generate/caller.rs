//! Who asks, and until when the answer is wanted.

use std::{sync::Arc, time::Duration};

use axum::{
    extract::FromRequestParts,
    http::{HeaderMap, HeaderName, request::Parts},
};
use tokio::time::{Instant, timeout_at};

use crate::{
    AppState,
    access::Tenant,
    body::BodyShare,
    connections::Connection,
    error::ApiError,
    layers::RequestLog,
    prepare::{Client, Size},
    settings::ServerSettings,
    wire::Tolerance,
};

/// How many seconds the client waits for its answer; the server's own limit bounds it.
const TIMEOUT: HeaderName = HeaderName::from_static("x-request-timeout");

/// Who asks, and until when the answer is wanted.
#[derive(Clone, Debug, Default)]
pub struct Caller {
    /// The key's id; requests without a key are of one tenant.
    pub tenant: Option<Arc<str>>,
    /// Whose turn it is when requests are prepared.
    pub client: Client,
    /// When the answer is of no use any more.
    pub deadline: Option<Instant>,
    /// The memory of the request's body, until it is prepared.
    pub body: BodyShare,
    /// Ignored fields of the request, or the refusal of them.
    pub tolerance: Tolerance,
    /// Numbers for the request's line in the log.
    pub log: RequestLog,
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

/// Size in bytes from which a request may take seconds to prepare.
const LARGE: usize = 16 << 10;

impl Caller {
    /// Salt of the prefixes that the request shares: its key's, unless keys share, and its own.
    pub fn prefix_salt(&self, settings: &ServerSettings, own: &str) -> Vec<u8> {
        let key = self.tenant.as_deref().filter(|_| !settings.share_prefixes);
        let mut salt = Vec::new();
        for (kind, text) in [(1, key.unwrap_or_default()), (2, own)] {
            if !text.is_empty() {
                salt.push(kind);
                salt.extend_from_slice(&(text.len() as u64).to_le_bytes());
                salt.extend_from_slice(text.as_bytes());
            }
        }
        salt
    }

    /// How much preparing the request asks for.
    pub fn size(&self) -> Size {
        if self.body.length() < LARGE { Size::Small } else { Size::Large }
    }
}

impl FromRequestParts<AppState> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        // Held until the request is prepared.
        let body = parts.extensions.get().cloned().unwrap_or_default();
        let limits = [state.settings.limits.request_time, asked_for(&parts.headers)?];
        let limit = limits.into_iter().flatten().min();
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        if let (Some(deadline), Some(connection)) = (deadline, parts.extensions.get::<Arc<Connection>>()) {
            connection.set_deadline(deadline);
        }
        let tenant = parts.extensions.get().map(|Tenant(id)| id.as_str().into());
        let tolerance = parts.extensions.get().cloned().unwrap_or_default();
        let log = parts.extensions.get().cloned().unwrap_or_default();
        Ok(Self { tenant, client: Client::of(&parts.extensions), deadline, body, tolerance, log })
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
