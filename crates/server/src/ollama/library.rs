//! `/api/pull`, `/api/create`, `/api/copy`, `/api/delete` and `/api/blobs`: what changes the library.

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
use paguro_registry::{Cancel, Digest, ModelName, Progress, PullOptions, RegistryError, Transfer, known};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use utoipa::ToSchema;

use super::{chat::MessageParam, error::ErrorBody, models::without_latest, options::OptionsParam};
use crate::{
    AppState,
    body::Pace,
    error::ApiError,
    extract::{Json, Path},
    library::{CancelOnDrop, Library},
    source::Outside,
    stored,
    stream::lines,
    wire::{self, OneOrMany, Other, Tolerance, no_effect, refused},
};

/// A model that is to be pulled.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = OllamaPullRequest)]
pub struct PullParams {
    /// A short name such as `qwen3:4b`, or `hf.co/owner/repository`, with a tag after it where wanted: `:Q4_K_M`.
    model: Option<String>,
    /// The older name of `model`.
    name: Option<String>,
    /// Tells how far it is, line by line; true if absent.
    stream: Option<bool>,
}

impl wire::Body for PullParams {
    const OTHERS: &'static [&'static [Other]] = &[&[
        refused("insecure", &["false"], "HF_ENDPOINT says where the hub is and how it is reached"),
        no_effect("username", "HF_TOKEN says who asks"),
        no_effect("password", "HF_TOKEN says who asks"),
    ]];
}

/// How far something is.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = OllamaStatus)]
pub struct Status {
    /// What is being done; `success` at the end.
    status: String,
    /// The file that is being fetched.
    #[serde(skip_serializing_if = "Option::is_none")]
    digest: Option<String>,
    /// Its bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    total: Option<u64>,
    /// Of these, those that are here.
    #[serde(skip_serializing_if = "Option::is_none")]
    completed: Option<u64>,
}

impl Status {
    fn new(status: impl Into<String>) -> Self {
        Self { status: status.into(), digest: None, total: None, completed: None }
    }
}

fn library(state: &AppState) -> Result<Library, ApiError> {
    state.library.clone().ok_or_else(|| {
        ApiError::Unavailable(
            "this server has no model library, or it cannot be used; the server's log says why".into(),
        )
    })
}

/// Where a model lies that is served and is not the library's.
fn outside(state: &AppState, name: &str) -> Option<Outside> {
    state.models.outside(without_latest(name).unwrap_or(name))
}

/// The library could have a model of such a name, but nobody would reach it.
fn refuse_outside(state: &AppState, name: &str) -> Result<(), ApiError> {
    match outside(state, name) {
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

fn given(model: Option<String>, name: Option<String>) -> Result<String, ApiError> {
    model.or(name).ok_or_else(|| ApiError::invalid("model", "`model` is missing"))
}

/// Gets a model from the hub. If the client goes away, the pull stops; what is here already serves the next one.
///
/// # Errors
/// What cannot be honoured, by name; what the hub says.
#[utoipa::path(
    post, path = "/api/pull", tag = "Ollama",
    request_body = PullParams,
    responses(
        (status = 200, content((Status = "application/json"), (Status = "application/x-ndjson"))),
        (status = "4XX", body = ErrorBody),
        (status = "5XX", body = ErrorBody),
    ),
)]
pub async fn pull(State(state): State<AppState>, Json(body): Json<PullParams>) -> Result<Response, ApiError> {
    let library = library(&state)?;
    let (reference, name) = known::wanted(&given(body.model, body.name)?)?;
    work(body.stream, move |reports, cancel| async move {
        let _ = reports.send(Status::new("pulling manifest"));
        let options = PullOptions { name, cancel };
        library
            .run_long(move |library| {
                let reporter = Reporter { reports, files: Mutex::default() };
                let progress = |progress: Progress<'_>| reporter.report(progress);
                library.registry.pull(&library.hub, &reference, &options, &library.inspect, &progress)
            })
            .await
            .map(drop)
    })
    .await
}

/// Runs something that takes long, and tells how far it is, or waits for its end.
async fn work<F>(
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

/// Makes lines of a pull's progress; from several threads.
struct Reporter {
    reports: UnboundedSender<Status>,
    files: Mutex<Vec<(Transfer, Instant)>>,
}

impl Reporter {
    /// Between two lines about a file.
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
        // Nobody listens if only the end is wanted.
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

/// A model that is to be made of another one, or of files.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = OllamaCreateRequest)]
pub struct CreateParams {
    /// Its name.
    model: Option<String>,
    /// The older name of `model`.
    name: Option<String>,
    /// The model that it is made of.
    from: Option<String>,
    /// The files that it is made of, by their names: digests of blobs that were sent before.
    files: Option<std::collections::BTreeMap<String, String>>,
    /// What its requests begin with: the same as `options` of a request.
    #[schema(value_type = Option<OptionsParam>)]
    parameters: Option<Map<String, Value>>,
    /// What it is told before everything else, unless a request says something.
    system: Option<String>,
    /// What was said before every chat.
    #[schema(value_type = Option<Vec<MessageParam>>)]
    messages: Option<Vec<Value>>,
    /// Its license or licenses, to be shown.
    license: Option<OneOrMany<String>>,
    /// Tells how far it is, line by line; true if absent.
    stream: Option<bool>,
}

impl wire::Body for CreateParams {
    const OTHERS: &'static [&'static [Other]] = &[&[
        refused("template", &[], "models have their own"),
        refused("adapters", &[], "adapters are not applied here"),
        refused("quantize", &[], "weights stay as they are"),
        refused("modelfile", &[], "`from`, `files` and `parameters` say it"),
    ]];
}

impl wire::Body for CopyParams {}

impl wire::Body for DeleteParams {}

/// Makes a model of another one or of blobs. Nothing is copied but the model in the program.
///
/// # Errors
/// What cannot be honoured, by name; files that are no model.
#[utoipa::path(
    post, path = "/api/create", tag = "Ollama",
    request_body = CreateParams,
    responses(
        (status = 200, content((Status = "application/json"), (Status = "application/x-ndjson"))),
        (status = "4XX", body = ErrorBody),
        (status = "5XX", body = ErrorBody),
    ),
)]
pub async fn create(
    State(state): State<AppState>,
    tolerance: Tolerance,
    Json(body): Json<CreateParams>,
) -> Result<Response, ApiError> {
    let library = library(&state)?;
    let parameters = body.defaults(&tolerance)?;
    let name: ModelName = given(body.model, body.name)?.parse()?;
    refuse_outside(&state, &name.short())?;
    let files = body.files.into_iter().flatten().map(|(file, digest)| Ok((file, digest.parse()?)));
    let files: Vec<(String, Digest)> = files.collect::<Result<_, RegistryError>>()?;
    let from = body.from.filter(|from| !from.is_empty());
    let outside = from.as_ref().and_then(|from| outside(&state, from));
    match (&from, files.is_empty()) {
        (Some(_), false) => return Err(ApiError::invalid("files", "give either `from` or `files`")),
        (None, true) => {
            return Err(ApiError::invalid("from", "neither `from` nor `files` say of what to make it"));
        }
        _ => {}
    }
    work(body.stream, move |reports, _| async move {
        let _ = reports.send(Status::new("writing manifest"));
        let made = library.run_long(move |library| match (from, outside) {
            (_, Some(outside)) => library.take_in(&outside, &name, parameters),
            (Some(from), None) => library.registry.create_from_model(&name, &from, parameters),
            (None, None) => library.registry.create_from_blobs(&name, &files, parameters, &library.inspect),
        });
        made.await.map(drop)
    })
    .await
}

impl CreateParams {
    /// Defaults of the model's requests, as the library keeps them ([`stored`] reads them).
    fn defaults(&self, tolerance: &Tolerance) -> Result<Map<String, Value>, ApiError> {
        let mut defaults = Map::new();
        let options = self.parameters.as_ref().filter(|parameters| !parameters.is_empty());
        if let Some(options) = options {
            defaults.insert("options".into(), options.clone().into());
        }
        if let Some(system) = self.system.as_ref().filter(|system| !system.is_empty()) {
            defaults.insert("system".into(), json!(system));
        }
        if let Some(messages) = self.messages.as_ref().filter(|messages| !messages.is_empty()) {
            defaults.insert("messages".into(), json!(messages));
        }
        // Refused here and now rather than with every request.
        stored::read(&defaults, tolerance)?;
        if let Some(license) = &self.license {
            defaults.insert("license".into(), json!(license));
        }
        Ok(defaults)
    }
}

/// A model that is to have another name as well.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = OllamaCopyRequest)]
pub struct CopyParams {
    /// Its name.
    source: String,
    /// The other name; a model of that name is replaced.
    destination: String,
}

/// Gives a model another name as well.
///
/// # Errors
/// There is no such model; a name that no model can have.
#[utoipa::path(
    post, path = "/api/copy", tag = "Ollama",
    request_body = CopyParams,
    responses(
        (status = 200, description = "It has."),
        (status = "4XX", body = ErrorBody),
        (status = "5XX", body = ErrorBody),
    ),
)]
pub async fn copy(State(state): State<AppState>, Json(body): Json<CopyParams>) -> Result<(), ApiError> {
    let to: ModelName = body.destination.parse()?;
    refuse_outside(&state, &to.short())?;
    let outside = outside(&state, &body.source);
    let copy = move |library: &Library| match outside {
        Some(outside) => library.take_in(&outside, &to, Map::new()),
        None => library.registry.copy(&body.source, &to, true),
    };
    library(&state)?.run_long(copy).await.map(drop)
}

/// A model that is to be deleted.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = OllamaDeleteRequest)]
pub struct DeleteParams {
    /// Its name.
    model: Option<String>,
    /// The older name of `model`.
    name: Option<String>,
}

/// Deletes a model. Requests that run on it go on to their end.
///
/// # Errors
/// There is no such model.
#[utoipa::path(
    delete, path = "/api/delete", tag = "Ollama",
    request_body = DeleteParams,
    responses(
        (status = 200, description = "It is gone."),
        (status = "4XX", body = ErrorBody),
        (status = "5XX", body = ErrorBody),
    ),
)]
pub async fn delete(State(state): State<AppState>, Json(body): Json<DeleteParams>) -> Result<(), ApiError> {
    let name = given(body.model, body.name)?;
    refuse_outside(&state, &name)?;
    let removed = library(&state)?.run(move |library| library.registry.remove(&name)).await?;
    state.models.forget(removed.record.name.short());
    Ok(())
}

/// Tells whether a blob is here.
///
/// # Errors
/// It is not; a digest that is none.
#[utoipa::path(
    head, path = "/api/blobs/{digest}", tag = "Ollama",
    params(("digest" = String, Path, description = "`sha256:` and 64 hexadecimal digits")),
    responses(
        (status = 200, description = "It is."),
        (status = "4XX", body = ErrorBody),
        (status = "5XX", body = ErrorBody),
    ),
)]
pub async fn has_blob(State(state): State<AppState>, Path(digest): Path<String>) -> Result<(), ApiError> {
    let digest: Digest = digest.parse()?;
    let has = library(&state)?.run(move |library| Ok(library.registry.has_blob(&digest))).await?;
    if has { Ok(()) } else { Err(RegistryError::NoBlob(digest).into()) }
}

/// Takes in a file, to make a model of. What is not what its digest says is refused.
///
/// # Errors
/// A wrong digest; a body that does not arrive.
#[utoipa::path(
    post, path = "/api/blobs/{digest}", tag = "Ollama",
    params(("digest" = String, Path, description = "`sha256:` and 64 hexadecimal digits")),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"),
    responses(
        (status = 201, description = "It is here."),
        (status = "4XX", body = ErrorBody),
        (status = "5XX", body = ErrorBody),
    ),
)]
pub async fn put_blob(
    State(state): State<AppState>,
    Path(digest): Path<String>,
    body: Body,
) -> Result<StatusCode, ApiError> {
    let digest: Digest = digest.parse()?;
    let library = library(&state)?;
    // A model has gigabytes, so its size is not limited as that of other bodies; but it must keep coming. Nothing blocks and
    // no lock is held while bytes are waited for.
    let mut upload = library.run(|library| library.registry.begin_upload()).await?;
    let mut pace = Pace::new(&state.settings.limits);
    let mut stream = body.into_data_stream();
    while let Some(chunk) = pace.wait(stream.next()).await? {
        let chunk = chunk.map_err(|error| ApiError::Invalid {
            param: None,
            message: format!("the body cannot be read: {error}"),
        })?;
        pace.arrived(chunk.len());
        upload = library.run(move |_| upload.write(&chunk).map(|()| upload)).await?;
    }
    library.run_long(move |library| library.registry.finish_upload(upload, digest)).await?;
    Ok(StatusCode::CREATED)
}
