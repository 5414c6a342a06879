//! `/api/pull`, `/api/create`, `/api/copy`, `/api/delete` and `/api/blobs`: changes of the library.

use std::{
    sync::Mutex,
    time::{Duration, Instant},
};

use axum::{
    body::Body,
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use futures_util::StreamExt;
use paguro_library::{Cancel, Digest, LibraryError, ModelName, Progress, PullOptions, Transfer, known};
use serde::{Deserialize, Serialize};
use serde_json::Map;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use utoipa::ToSchema;

use super::error::ErrorBody;
use crate::{
    AppState,
    body::Pace,
    error::ApiError,
    extract::{Json, Path},
    library::{CancelOnDrop, LibraryService},
    source::Outside,
    stream::lines,
    wire::{self, Other, no_effect, refused},
};

/// A request to pull a model.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = OllamaPullRequest)]
pub struct PullParams {
    /// A short name such as `qwen3:4b`, or `hf.co/owner/repository` with an optional tag such as `:Q4_K_M`.
    model: Option<String>,
    /// The older name of `model`.
    name: Option<String>,
    /// Streams the progress line by line; true if absent.
    stream: Option<bool>,
}

impl wire::Body for PullParams {
    const OTHERS: &'static [&'static [Other]] = &[&[
        refused("insecure", &["false"], "HF_ENDPOINT sets the address of the hub"),
        no_effect("username", "HF_TOKEN says who asks"),
        no_effect("password", "HF_TOKEN says who asks"),
    ]];
}

/// Progress of an operation.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = OllamaStatus)]
pub struct Status {
    /// Current action; `success` at the end.
    status: String,
    /// Digest of the file that is being downloaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    digest: Option<String>,
    /// Its bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    total: Option<u64>,
    /// Bytes of it that are present.
    #[serde(skip_serializing_if = "Option::is_none")]
    completed: Option<u64>,
}

impl Status {
    pub(super) fn new(status: impl Into<String>) -> Self {
        Self { status: status.into(), digest: None, total: None, completed: None }
    }
}

/// Refuses the name of a model outside of the library, which would hide a model of the library.
pub(super) fn refuse_outside(state: &AppState, name: &str) -> Result<(), ApiError> {
    match state.models.outside(name) {
        Some(Outside::Program { .. }) => Err(ApiError::invalid(
            "model",
            format!("`{name}` is the model in the program, which stays as it is"),
        )),
        Some(Outside::Disk(_)) => {
            let message =
                format!("`{name}` is a file that this server was started with, and not in the library");
            Err(ApiError::invalid("model", message))
        }
        None => Ok(()),
    }
}

pub(super) fn given(model: Option<String>, name: Option<String>) -> Result<String, ApiError> {
    model.or(name).ok_or_else(|| ApiError::invalid("model", "`model` is missing"))
}

/// Pulls a model from the hub. If the client disconnects, the pull stops; a later pull uses the files that are already
/// present.
///
/// # Errors
/// A field that is not supported, by name, or the hub's error.
#[utoipa::path(
    post, path = "/api/pull", tag = "Ollama", request_body = PullParams,
    responses((status = 200, content((Status = "application/json"), (Status = "application/x-ndjson")))),
)]
pub async fn pull(State(state): State<AppState>, Json(body): Json<PullParams>) -> Result<Response, ApiError> {
    let service = state.library()?.clone();
    let (reference, name) = known::wanted(&given(body.model, body.name)?)?;
    work(body.stream, move |reports, cancel| async move {
        let _ = reports.send(Status::new("pulling manifest"));
        let options = PullOptions { name, cancel };
        service
            .run_long(move |service| {
                let reporter = Reporter { reports, files: Mutex::default() };
                let progress = |progress: Progress<'_>| reporter.report(progress);
                service.library.pull(&service.hub, &reference, &options, &service.inspect, &progress)
            })
            .await
            .map(drop)
    })
    .await
}

/// Runs a long operation, and streams its progress or waits for its end.
pub(super) async fn work<F>(
    stream: Option<bool>,
    work: impl FnOnce(UnboundedSender<Status>, Cancel) -> F,
) -> Result<Response, ApiError>
where
    F: Future<Output = Result<(), ApiError>> + Send + 'static,
{
    let cancel = Cancel::default();
    let (sender, mut reports) = unbounded_channel();
    let work = work(sender, cancel.clone());
    let guard = CancelOnDrop(cancel);
    let success = Status::new("success");
    if stream == Some(false) {
        work.await?;
        drop(guard);
        return Ok(Json(success).into_response());
    }
    Ok(lines(None, move |lines| async move {
        let _guard = guard;
        let mut work = std::pin::pin!(work);
        let outcome = loop {
            tokio::select! {
                biased;
                Some(report) = reports.recv() => lines.line(&report).await,
                outcome = &mut work => break outcome,
            }
        };
        while let Ok(report) = reports.try_recv() {
            lines.line(&report).await;
        }
        match outcome {
            Ok(()) => lines.line(&success).await,
            Err(error) => lines.line(&ErrorBody::new(&error)).await,
        }
    }))
}

/// Reporter of a pull's progress, which several threads share.
struct Reporter {
    reports: UnboundedSender<Status>,
    files: Mutex<Vec<(Transfer, Instant)>>,
}

impl Reporter {
    /// Time between two lines about a file.
    const PAUSE: Duration = Duration::from_millis(100);

    fn report(&self, progress: Progress<'_>) {
        let mut files = self.files.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let status = match progress {
            Progress::Files(list) => {
                let long_ago = Instant::now();
                files.extend(list.iter().map(|file| (file.clone(), long_ago)));
                return;
            }
            Progress::Bytes { file, done } => {
                let (transfer, last) = &mut files[file];
                if last.elapsed() < Self::PAUSE {
                    return;
                }
                *last = Instant::now();
                Self::fetching(transfer, done)
            }
            Progress::Finished { file } => Self::fetching(&files[file].0, files[file].0.size),
            Progress::Waiting { file } => Status::new(format!("waiting for {}", files[file].0.name)),
            Progress::Checking { file, .. } => {
                let (transfer, last) = &mut files[file];
                if last.elapsed() < Self::PAUSE {
                    return;
                }
                *last = Instant::now();
                Status::new(format!("verifying {}", transfer.name))
            }
            Progress::Retrying { file, problem, attempt, attempts } => {
                let what = file.map_or("the list of files", |file| files[file].0.name.as_str());
                Status::new(format!("trying {what} again ({attempt} of {attempts}): {problem}"))
            }
            Progress::Recording => Status::new("writing manifest"),
            _ => return,
        };
        // The receiver is dropped if only the end is requested.
        let _ = self.reports.send(status);
    }

    fn fetching(file: &Transfer, done: u64) -> Status {
        Status {
            status: format!("pulling {}", file.name),
            digest: file.digest.map(|digest| digest.to_string()),
            total: Some(file.size),
            completed: Some(done),
        }
    }
}

/// A request for another name of a model.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = OllamaCopyRequest)]
pub struct CopyParams {
    /// Its name.
    source: String,
    /// The new name; a model of that name is replaced.
    destination: String,
}

impl wire::Body for CopyParams {}

/// Returns the canonical name of a model that any API lists: an alias of the settings is not in the library.
pub(super) async fn canonical(state: &AppState, name: &str) -> Result<String, ApiError> {
    match state.models.find(name).await {
        Ok(entry) => Ok(entry.name),
        // The library has the better error, with similar names.
        Err(ApiError::ModelNotFound(_)) => Ok(name.to_owned()),
        Err(error) => Err(error),
    }
}

/// Adds another name to a model.
///
/// # Errors
/// No model has this name, or the new name is invalid.
#[utoipa::path(
    post, path = "/api/copy", tag = "Ollama", request_body = CopyParams,
    responses((status = 200, description = "It has.")),
)]
pub async fn copy(State(state): State<AppState>, Json(body): Json<CopyParams>) -> Result<(), ApiError> {
    let to: ModelName = body.destination.parse()?;
    refuse_outside(&state, &to.short())?;
    let source = canonical(&state, &body.source).await?;
    let outside = state.models.outside(&source);
    let copy = move |service: &LibraryService| match outside {
        Some(outside) => service.import(&outside, &to, Map::new()),
        None => service.library.copy(&source, &to, true),
    };
    state.library()?.run_long(copy).await.map(drop)
}

impl wire::Body for DeleteParams {}

/// A request to delete a model.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = OllamaDeleteRequest)]
pub struct DeleteParams {
    /// Its name.
    model: Option<String>,
    /// The older name of `model`.
    name: Option<String>,
}

/// Deletes a model. Running requests continue.
///
/// # Errors
/// No model has this name.
#[utoipa::path(
    delete, path = "/api/delete", tag = "Ollama", request_body = DeleteParams,
    responses((status = 200, description = "It is gone.")),
)]
pub async fn delete(State(state): State<AppState>, Json(body): Json<DeleteParams>) -> Result<(), ApiError> {
    let name = given(body.model, body.name)?;
    refuse_outside(&state, &name)?;
    let removed = state.library()?.run(move |service| service.library.remove(&name)).await?;
    let name = removed.record.name.short();
    // Its engine has prefixes in memory, which must not be reused. An engine in use continues.
    state.models.unload(&name).await;
    state.models.forget(name);
    Ok(())
}

/// Reports whether a blob exists.
///
/// # Errors
/// The blob does not exist, or the digest is invalid.
#[utoipa::path(
    head, path = "/api/blobs/{digest}", tag = "Ollama",
    params(("digest" = String, Path, description = "`sha256:` and 64 hexadecimal digits")),
    responses((status = 200, description = "It is.")),
)]
pub async fn has_blob(State(state): State<AppState>, Path(digest): Path<String>) -> Result<(), ApiError> {
    let digest: Digest = digest.parse()?;
    let has = state.library()?.run(move |service| Ok(service.library.has_blob(&digest))).await?;
    if has { Ok(()) } else { Err(LibraryError::NoBlob(digest).into()) }
}

/// Uploads a file for a model. A file that does not match its digest is refused.
///
/// # Errors
/// The digest does not match, or the body is incomplete.
#[utoipa::path(
    post, path = "/api/blobs/{digest}", tag = "Ollama",
    params(("digest" = String, Path, description = "`sha256:` and 64 hexadecimal digits")),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"),
    responses((status = 201, description = "It is here.")),
)]
pub async fn put_blob(
    State(state): State<AppState>,
    Path(digest): Path<String>,
    body: Body,
) -> Result<StatusCode, ApiError> {
    let digest: Digest = digest.parse()?;
    let service = state.library()?.clone();
    // A model has gigabytes, so its size is not limited like that of other bodies, but its rate is. No thread is
    // blocked and no lock is held while the server waits for bytes.
    let mut upload = service.run(|service| service.library.begin_upload()).await?;
    let mut pace = Pace::new(&state.settings.limits);
    let mut stream = body.into_data_stream();
    while let Some(chunk) = pace.wait(stream.next()).await? {
        let chunk = chunk.map_err(|error| ApiError::Invalid {
            param: None,
            message: format!("the body cannot be read: {error}"),
        })?;
        pace.arrived(chunk.len());
        upload = service.run(move |_| upload.write(&chunk).map(|()| upload)).await?;
    }
    service.run_long(move |service| service.library.finish_upload(upload, digest)).await?;
    Ok(StatusCode::CREATED)
}
