//! Streamed bodies of responses: server-sent events and JSON lines.

use std::{
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    body::{Body, Bytes},
    http::{HeaderValue, header},
    response::{IntoResponse, Response},
};
use hyper::body::Frame;
use serde::Serialize;
use tokio::time::{Instant, Sleep, sleep};

use crate::error::ApiError;

/// Number of buffered bytes at which a writer waits until they are sent.
const BUFFER_LIMIT: usize = 32 << 10;

/// Time without output after which a stream sends a keep-alive event or line, so that clients do not assume a dead
/// connection. A comment is not enough for clients that abort a stream after five minutes without events. The prefill
/// of a long prompt can take that long.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(15);

/// Writer of a streamed body.
#[derive(Clone, Debug, Default)]
pub struct Writer {
    buffer: Arc<Mutex<Vec<u8>>>,
}

impl Writer {
    /// Writes an event: `data: {...}`.
    pub async fn data(&self, value: &impl Serialize) {
        self.write(|buffer| buffer.extend_from_slice(&data(value))).await;
    }

    /// Writes an event with a name: `event: ...` and `data: {...}`.
    pub async fn event(&self, name: &str, value: &impl Serialize) {
        self.write(|buffer| buffer.extend_from_slice(&event(name, value))).await;
    }

    /// Writes a line of JSON.
    pub async fn line(&self, value: &impl Serialize) {
        self.write(|buffer| buffer.extend_from_slice(&line(value))).await;
    }

    /// Writes the last event of OpenAI's streams: `data: [DONE]`.
    pub async fn done(&self) {
        self.write(|buffer| buffer.extend_from_slice(b"data: [DONE]\n\n")).await;
    }

    async fn write(&self, write: impl FnOnce(&mut Vec<u8>)) {
        write(&mut self.lock());
        // The sender empties the buffer and then polls the writer again, so no waker is needed.
        std::future::poll_fn(
            |_| if self.lock().len() < BUFFER_LIMIT { Poll::Ready(()) } else { Poll::Pending },
        )
        .await;
    }

    fn lock(&self) -> MutexGuard<'_, Vec<u8>> {
        self.buffer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Appends `value` as JSON. This cannot fail for the types of answers: all keys of their maps are strings.
fn json(buffer: &mut Vec<u8>, value: &impl Serialize) {
    if let Err(error) = serde_json::to_writer(buffer, value) {
        tracing::error!(%error, "a part of an answer could not be written");
    }
}

/// Generator of keep-alive events.
pub type KeepAlive = Box<dyn FnMut() -> Bytes + Send>;

/// Returns a generator of comments, for clients that do not abort streams without events.
pub fn comments() -> KeepAlive {
    Box::new(|| Bytes::from_static(b": keep-alive\n\n"))
}

/// Returns an event: `data: {...}`.
pub fn data(value: &impl Serialize) -> Bytes {
    let mut buffer = b"data: ".to_vec();
    json(&mut buffer, value);
    buffer.extend_from_slice(b"\n\n");
    buffer.into()
}

/// Returns a line of JSON.
pub fn line(value: &impl Serialize) -> Bytes {
    let mut buffer = Vec::new();
    json(&mut buffer, value);
    buffer.push(b'\n');
    buffer.into()
}

/// Returns an event with a name: `event: ...` and `data: {...}`.
pub fn event(name: &str, value: &impl Serialize) -> Bytes {
    let mut buffer = format!("event: {name}\n").into_bytes();
    buffer.extend_from_slice(&data(value));
    buffer.into()
}

/// Returns a response that streams the server-sent events of `write`. The future of `write` is dropped when the client
/// disconnects.
pub fn events<F>(keep_alive: KeepAlive, write: impl FnOnce(Writer) -> F) -> Response
where
    F: Future<Output = ()> + Send + 'static,
{
    let mut response = body(write, Some(keep_alive)).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Disables buffering in nginx.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// Returns a response that streams the JSON lines of `write`. If `keep_alive` is set, it generates the lines that are
/// sent after each [`KEEP_ALIVE_INTERVAL`] without output.
pub fn lines<F>(keep_alive: Option<KeepAlive>, write: impl FnOnce(Writer) -> F) -> Response
where
    F: Future<Output = ()> + Send + 'static,
{
    let mut response = body(write, keep_alive).into_response();
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson"));
    response
}

fn body<F>(write: impl FnOnce(Writer) -> F, keep_alive: Option<KeepAlive>) -> Body
where
    F: Future<Output = ()> + Send + 'static,
{
    let writer = Writer::default();
    let work = Box::pin(write(writer.clone()));
    Body::new(StreamBody {
        work: Some(work),
        writer,
        keep_alive,
        timer: Box::pin(sleep(KEEP_ALIVE_INTERVAL)),
    })
}

/// Body that polls the future of its writer. All bytes written since the last frame form the next one, so a client that
/// reads slowly gets fewer and larger frames.
struct StreamBody<F> {
    /// Future that writes the body; `None` after it has finished.
    work: Option<Pin<Box<F>>>,
    writer: Writer,
    keep_alive: Option<KeepAlive>,
    /// Expires [`KEEP_ALIVE_INTERVAL`] after the last frame.
    timer: Pin<Box<Sleep>>,
}

impl<F: Future<Output = ()>> hyper::body::Body for StreamBody<F> {
    type Data = Bytes;
    type Error = ApiError;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, ApiError>>> {
        let this = self.get_mut();
        if let Some(work) = &mut this.work
            && work.as_mut().poll(context).is_ready()
        {
            this.work = None;
        }
        let written = std::mem::take(&mut *this.writer.lock());
        let frame = if !written.is_empty() {
            Bytes::from(written)
        } else if this.work.is_none() {
            return Poll::Ready(None);
        } else {
            match (&mut this.keep_alive, this.timer.as_mut().poll(context)) {
                (Some(keep_alive), Poll::Ready(())) => keep_alive(),
                _ => return Poll::Pending,
            }
        };
        this.timer.as_mut().reset(Instant::now() + KEEP_ALIVE_INTERVAL);
        Poll::Ready(Some(Ok(Frame::data(frame))))
    }
}
