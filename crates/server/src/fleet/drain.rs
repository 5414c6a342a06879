//! The end of a server behind a router: running requests end, and new ones are refused, so that the router sends them elsewhere.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{
    extract::{Request, State},
    http::{HeaderValue, Method, header},
    middleware::Next,
    response::Response,
};
use tokio::sync::Notify;

use crate::{AppState, error::ApiError, held};

/// Requests that must end before the server does.
#[derive(Debug, Default)]
pub struct Drain {
    draining: AtomicBool,
    running: AtomicUsize,
    ended: Notify,
}

/// A running request, until its answer has been written.
#[derive(Debug)]
struct Running(Arc<Drain>);

impl Drop for Running {
    fn drop(&mut self) {
        if self.0.running.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.ended.notify_waiters();
        }
    }
}

impl Drain {
    /// Refuses requests from now on.
    pub fn begin(&self) {
        self.draining.store(true, Ordering::SeqCst);
    }

    /// Returns true if requests are refused.
    pub fn has_begun(&self) -> bool {
        self.draining.load(Ordering::SeqCst)
    }

    /// Waits until no request runs, and at least for `least`.
    pub async fn wait(&self, least: Duration) {
        tokio::time::sleep(least).await;
        loop {
            let ended = self.ended.notified();
            tokio::pin!(ended);
            ended.as_mut().enable();
            if self.running.load(Ordering::Acquire) == 0 {
                return;
            }
            ended.await;
        }
    }

    /// Admits a request, unless requests are refused.
    fn enter(self: &Arc<Self>) -> Option<Running> {
        // It is counted before the flag is read, so that no admitted request is missed.
        self.running.fetch_add(1, Ordering::SeqCst);
        let running = Running(self.clone());
        (!self.has_begun()).then_some(running)
    }
}

/// Paths by which routers and supervisors find out whether a server takes requests.
const PROBES: [&str; 4] = ["/health", "/ready", "/v1/models", "/api/tags"];

/// Refuses new requests of a server that stops. Reports stay readable for operators: metrics and the status.
///
/// # Errors
/// 503.
pub async fn refuse(
    State(state): State<AppState>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let reads = [Method::GET, Method::HEAD, Method::OPTIONS].contains(request.method());
    let path = request.uri().path();
    let running = match reads {
        true if state.drain.has_begun() && PROBES.contains(&path) => return Err(stopping()),
        true => None,
        false => Some(state.drain.enter().ok_or_else(stopping)?),
    };
    let response = next.run(request).await;
    let mut response = match running {
        Some(running) => response.map(|body| held::until_end_of(body, running)),
        None => response,
    };
    if state.drain.has_begun() {
        // The next request of this client needs another server.
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    Ok(response)
}

fn stopping() -> ApiError {
    ApiError::Unavailable("the server is stopping: running requests end, and new ones are refused".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_end_waits_for_admitted_requests_alone() {
        let drain = Arc::new(Drain::default());
        let running = drain.enter().unwrap();
        drain.begin();
        assert!(drain.enter().is_none());
        let wait = drain.wait(Duration::ZERO);
        tokio::pin!(wait);
        assert!(futures_util::poll!(wait.as_mut()).is_pending());
        let end = async {
            tokio::task::yield_now().await;
            drop(running);
        };
        tokio::join!(wait, end);
        drain.wait(Duration::ZERO).await;
    }
}
