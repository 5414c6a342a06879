//! [`Generation`]: the events of one request, read blocking or asynchronously. Tokens are decoded to text here, on the
//! reader's thread.

use std::{
    collections::VecDeque,
    future::poll_fn,
    sync::{Arc, mpsc::Sender},
    task::{Context, Poll, ready},
    time::Instant,
};

use paguro_backend::Score;
use tokio::sync::{mpsc::UnboundedReceiver, oneshot};

use crate::{
    Event, FinishReason, RequestError, Usage,
    handle::{Command, Shared},
    text::Writer,
};

/// Cancels one request, from any thread.
#[derive(Clone, Debug)]
pub struct Canceller {
    pub(crate) request: u64,
    pub(crate) commands: Sender<Command>,
}

impl Canceller {
    /// Ends all branches with [`FinishReason::Cancelled`] before the next step; their pages are free then. Does
    /// nothing if the request has ended.
    pub fn cancel(&self) {
        self.send(None);
    }

    fn send(&self, branch: Option<usize>) {
        // If the engine has ended, so has the request.
        let _ = self.commands.send(Command::Cancel { request: self.request, branch });
    }
}

/// The events of one request. Dropping it cancels the request.
#[derive(Debug)]
pub struct Generation {
    pub(crate) canceller: Canceller,
    pub(crate) events: UnboundedReceiver<Event>,
    /// Ready when the engine has dropped its end.
    pub(crate) engine_ended: Option<oneshot::Receiver<()>>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) stops: Arc<[String]>,
    /// Number of tokens in which stop strings are not searched.
    pub(crate) min_tokens: usize,
    /// Writers by branch; `None` after the branch has ended.
    pub(crate) writers: Vec<Option<Writer>>,
    /// Usage by branch, up to the last event read.
    pub(crate) usage: Vec<Usage>,
    /// Time of the last token by branch. A further token of the same step was drafted.
    pub(crate) last: Vec<Option<Instant>>,
    /// Events to return, with their texts.
    pub(crate) ready: VecDeque<Event>,
    /// True after the last event was received.
    pub(crate) ended: bool,
}

impl Generation {
    /// Returns the next event; `None` after the last one. Cancel-safe.
    pub async fn next(&mut self) -> Option<Event> {
        poll_fn(|context| self.poll_next(context)).await
    }

    /// Returns the next event for code that polls; `None` after the last one.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Event>> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Poll::Ready(Some(event));
            }
            if self.ended {
                return Poll::Ready(None);
            }
            let event = ready!(self.events.poll_recv(context));
            self.receive(event);
        }
    }

    /// Returns the next event, for threads that may block; `None` after the last one.
    ///
    /// # Panics
    /// In async code, which must use [`Generation::next`].
    pub fn next_blocking(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            if self.ended {
                return None;
            }
            let event = self.events.blocking_recv();
            self.receive(event);
        }
    }

    /// Waits until the engine has nothing more to do for this request, whether or not its events have been read: they
    /// ended, failed or were cancelled. Only the first call waits.
    pub fn engine_ended(&mut self) -> impl Future<Output = ()> + Send + 'static {
        let ended = self.engine_ended.take();
        async move {
            if let Some(ended) = ended {
                // The channel has no messages.
                let _ = ended.await;
            }
        }
    }

    /// Ends a branch with [`FinishReason::StopString`], for a reader that has found `stop` itself, in a part of the
    /// text that the engine does not distinguish. Unread events of the branch are dropped, and [`Event::Finished`] is
    /// its next one. No effect if the branch has ended.
    pub fn stop(&mut self, branch: usize, stop: String) {
        if self.writers[branch].is_none() {
            return;
        }
        self.canceller.send(Some(branch));
        self.end(branch, String::new(), FinishReason::StopString(stop), None, self.usage[branch]);
    }

    /// Returns an object that can cancel this request while another task awaits its events.
    pub fn canceller(&self) -> Canceller {
        self.canceller.clone()
    }

    /// Adds the text to an event of the engine thread; `None` if the thread has ended.
    fn receive(&mut self, event: Option<Event>) {
        let event =
            event.unwrap_or_else(|| Event::Failed(RequestError::EngineStopped(self.shared.why_stopped())));
        match event {
            Event::Token { branch, token, logprob, top, at, .. } => {
                // Tokens may still arrive after a stop string.
                let Some(writer) = &mut self.writers[branch] else { return };
                self.usage[branch].generated_tokens += 1;
                if self.last[branch].replace(at) == Some(at) {
                    // The engine reports rejected ones with the end of an answer, which a stop string precedes.
                    self.usage[branch].drafted_tokens += 1;
                    self.usage[branch].accepted_tokens += 1;
                }
                let may_stop = self.usage[branch].generated_tokens > self.min_tokens;
                let (text, stop) = writer.push(token, may_stop);
                self.ready.push_back(Event::Token { branch, token, text, logprob, top, at });
                if let Some(stop) = stop {
                    self.canceller.send(Some(branch));
                    let reason = FinishReason::StopString(self.stops[stop].clone());
                    self.end(branch, String::new(), reason, None, self.usage[branch]);
                }
            }
            Event::Finished { branch, reason, stop_score, usage, .. } => {
                let Some(writer) = self.writers[branch].take() else { return };
                self.end(branch, writer.finish(), reason, stop_score, usage);
            }
            Event::Failed(_) => {
                self.ended = true;
                self.ready.push_back(event);
            }
            Event::Started { cached_tokens, .. } => {
                self.usage.iter_mut().for_each(|usage| usage.cached_tokens = cached_tokens);
                self.ready.push_back(event);
            }
            Event::Prefilled { .. } | Event::PromptScores { .. } | Event::Embedding { .. } => {
                self.ready.push_back(event);
            }
        }
    }

    /// Ends a branch.
    fn end(
        &mut self,
        branch: usize,
        text: String,
        reason: FinishReason,
        stop_score: Option<Score>,
        usage: Usage,
    ) {
        self.writers[branch] = None;
        self.ended = self.writers.iter().all(Option::is_none);
        self.ready.push_back(Event::Finished { branch, text, reason, stop_score, usage });
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        if !self.ended {
            self.canceller.cancel();
        }
    }
}
