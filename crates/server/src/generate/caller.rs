//! The client of a request and the deadline of its answer.

use std::{sync::Arc, time::Duration};

use axum::{
    extract::FromRequestParts,
    http::{HeaderMap, HeaderName, request::Parts},
};
use tokio::time::{Instant, timeout_at};

use crate::{
    AppState,
    access::{MayChange, Tenant},
    body::BodyShare,
    connections::Connection,
    error::ApiError,
    layers::RequestLog,
    prepare::{Client, Size},
    settings::ServerSettings,
    wire::Tolerance,
};

/// Seconds that the client waits for its answer, at most the server's own limit.
const TIMEOUT: HeaderName = HeaderName::from_static("x-request-timeout");

/// The client of a request and the deadline of its answer.
#[derive(Clone, Debug, Default)]
pub struct Caller {
    /// Id of the key. Requests without a key belong to one tenant.
    pub tenant: Option<Arc<str>>,
    /// Client for the fair queue of preparation.
    pub client: Client,
    /// Deadline of the answer.
    pub deadline: Option<Instant>,
    /// Memory reserved for the request's body, until it is prepared.
    pub body: BodyShare,
    /// Collector of ignored fields.
    pub tolerance: Tolerance,
    /// Statistics for the access log.
    pub log: RequestLog,
    /// True for a page that may generate, and change nothing else.
    pub only_generates: bool,
}

/// Minimum time for which pages that only generate can keep a model.
const MIN_KEEP_ALIVE: Duration = Duration::from_secs(60);

impl Caller {
    /// Checks a `keep_alive`, which is `None` for ever.
    ///
    /// # Errors
    /// It would unload the model soon, and the caller may not do this.
    pub fn check_keep_alive(&self, time: Option<Duration>) -> Result<(), ApiError> {
        if !self.only_generates || time.is_none_or(|time| time >= MIN_KEEP_ALIVE) {
            return Ok(());
        }
        let message = "`keep_alive` is less than 60 seconds, which unloads the model; only the server's own page, and \
                       pages that --cors-origin names, may do this without an API key";
        Err(ApiError::Forbidden(message.into()))
    }

    /// Awaits `work` until the deadline.
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

/// Size in bytes from which preparing a request may take seconds.
const LARGE: usize = 16 << 10;

impl Caller {
    /// Returns the salt of the request's cached prefixes: the key's, unless keys share prefixes, and the request's own.
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

    /// Returns the cost class of preparing the request.
    pub fn size(&self) -> Size {
        if self.body.length() < LARGE { Size::Small } else { Size::Large }
    }
}

/// Splits a salt of [`Caller::prefix_salt`] into the id of a key and the request's own salt.
pub fn salt_parts(mut salt: &[u8]) -> (Option<&[u8]>, Option<&[u8]>) {
    let (mut key, mut own) = (None, None);
    while let Some((&kind, rest)) = salt.split_first() {
        let part = || {
            let (length, rest) = rest.split_first_chunk()?;
            rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)
        };
        let Some((text, rest)) = part() else { break };
        *(if kind == 1 { &mut key } else { &mut own }) = Some(text);
        salt = rest;
    }
    (key, own)
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
        let only_generates = parts.extensions.get() == Some(&MayChange(false));
        let client = Client::of(&parts.extensions);
        Ok(Self { tenant, client, deadline, body, tolerance, log, only_generates })
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
