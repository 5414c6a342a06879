//! `/ui/v1/requests`: the last requests, without their content.

use std::{
    collections::VecDeque,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;

use crate::{AppState, extract::Json, ids};

/// Number of requests to keep.
const KEPT: usize = 200;

/// The last requests.
#[derive(Debug, Default)]
pub struct RequestLog {
    entries: Mutex<VecDeque<RequestEntry>>,
}

/// A request whose answer has begun or ended.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct RequestEntry {
    /// Its `x-request-id`.
    id: String,
    /// Time of the answer, in seconds since 1970.
    time: u64,
    method: String,
    /// Route of the request.
    path: String,
    status: u16,
    /// Time until the answer began.
    milliseconds: u64,
}

/// The last requests, newest first.
#[derive(Debug, Serialize, ToSchema)]
pub struct RequestList {
    requests: Vec<RequestEntry>,
}

impl RequestLog {
    /// Records a request. The page's own are left out, because they would be the majority.
    pub fn record(&self, id: &str, method: &str, path: &str, status: u16, took: Duration) {
        if path == "/" || path.starts_with("/ui/") {
            return;
        }
        let entry = RequestEntry {
            id: id.to_owned(),
            time: ids::now(),
            method: method.to_owned(),
            path: path.to_owned(),
            status,
            milliseconds: u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
        };
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.truncate(KEPT - 1);
        entries.push_front(entry);
    }
}

/// Lists the last requests without their content.
#[utoipa::path(get, path = "/ui/v1/requests", tag = "Page", responses((status = 200, body = RequestList)))]
pub async fn list(State(state): State<AppState>) -> Json<RequestList> {
    let entries = state.requests.entries.lock().unwrap_or_else(PoisonError::into_inner);
    Json(RequestList { requests: entries.iter().cloned().collect() })
}
