//! The interface of the engine: [`Handle`] submits requests from any thread, and [`Generation`] reads one answer,
//! blocking or asynchronously. Tokens are decoded to text on the reader's side, so the engine thread handles only
//! numbers.

use std::{
    collections::VecDeque,
    future::poll_fn,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc::{Sender, SyncSender, sync_channel},
    },
    task::{Context, Poll, ready},
};

use paguro_backend::{KernelCount, Score};
use paguro_kv_store::Space;
use paguro_model::tokenizer::Tokenizer;
use tokio::sync::{
    mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    oneshot,
};

use crate::{
    Constraint, Event, FinishReason, Grammar, GrammarError, Request, RequestError, Stats, SubmitError, Usage,
    constraint::Vocabulary,
    request::{RequestLimits, Signal},
    sequence::Job,
    snapshot::Snapshot,
    text::{StopMatcher, Writer},
    thought::{Thought, Watch},
};

/// Commands for the engine thread.
#[derive(Debug)]
pub(crate) enum Command {
    Submit { job: Box<Job>, prompt: Vec<u32>, signals: Signals },
    Cancel { request: u64, branch: Option<usize> },
    ClearCache,
    OpenDisk(Option<Vec<u8>>),
    KernelCounts(SyncSender<Vec<KernelCount>>),
    CheckPages(SyncSender<Result<(), String>>),
    Snapshot { kernels: bool, reply: oneshot::Sender<Snapshot> },
    Stop { finish: bool },
}

/// The engine thread's end of a [`Generation`], dropped when the request has ended.
#[derive(Debug)]
pub(crate) struct Signals {
    sender: UnboundedSender<Signal>,
    /// Notifies its receiver on drop.
    _ended: oneshot::Sender<()>,
}

impl Signals {
    /// Sends a signal. A reader that is gone has sent a cancellation.
    pub fn send(&self, signal: Signal) {
        let _ = self.sender.send(signal);
    }
}

/// Number of requests that were submitted and have not started.
#[derive(Debug)]
pub(crate) struct Queue {
    /// [`EngineOptions::queue_capacity`](crate::EngineOptions::queue_capacity).
    pub capacity: usize,
    /// [`EngineOptions::queue_tokens`](crate::EngineOptions::queue_tokens).
    pub max_tokens: Option<usize>,
    waiting: Mutex<Waiting>,
}

#[derive(Debug, Default)]
struct Waiting {
    requests: usize,
    /// Number of tokens of their prompts.
    tokens: usize,
}

impl Queue {
    pub fn new(capacity: usize, max_tokens: Option<usize>) -> Self {
        Self { capacity, max_tokens, waiting: Mutex::default() }
    }

    /// Adds a request with a prompt of `tokens` tokens.
    fn enter(&self, tokens: usize) -> Result<(), SubmitError> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.requests >= self.capacity {
            return Err(SubmitError::QueueFull { capacity: self.capacity });
        }
        if let Some(capacity) = self.max_tokens
            && waiting.requests > 0
            && waiting.tokens + tokens > capacity
        {
            return Err(SubmitError::QueueTokensFull { tokens, waiting: waiting.tokens, capacity });
        }
        waiting.requests += 1;
        waiting.tokens += tokens;
        Ok(())
    }

    /// Removes a request with `tokens` tokens, which has started or ended.
    pub fn leave(&self, tokens: usize) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.requests -= 1;
        waiting.tokens -= tokens;
    }
}

/// State that the engine thread and all handles share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub limits: RequestLimits,
    pub queue: Queue,
    next_request: AtomicU64,
    tokenizer: Option<Arc<Tokenizer>>,
    /// Stop tokens of all answers that do not ignore them.
    model_stop_tokens: Vec<u32>,
    /// Created for the first grammar.
    vocabulary: OnceLock<Result<Arc<Vocabulary>, GrammarError>>,
    pub stats: Mutex<Stats>,
    /// The store of pages on disk, if there is one.
    pub disk: OnceLock<Space>,
    /// Reason for which requests are no longer accepted.
    pub stopped: OnceLock<String>,
}

impl Shared {
    pub fn new(
        limits: RequestLimits,
        queue: Queue,
        tokenizer: Option<Arc<Tokenizer>>,
        model_stop_tokens: Vec<u32>,
        stats: Stats,
    ) -> Self {
        Self {
            limits,
            queue,
            next_request: AtomicU64::new(0),
            tokenizer,
            model_stop_tokens,
            vocabulary: OnceLock::new(),
            stats: Mutex::new(stats),
            disk: OnceLock::new(),
            stopped: OnceLock::new(),
        }
    }

    fn vocabulary(&self) -> Result<&Arc<Vocabulary>, GrammarError> {
        let vocabulary = self.vocabulary.get_or_init(|| {
            let tokenizer = self.tokenizer.as_ref().ok_or(GrammarError::NoTokenizer)?;
            Vocabulary::new(tokenizer, self.limits.vocab, &self.model_stop_tokens).map(Arc::new)
        });
        vocabulary.as_ref().map_err(Clone::clone)
    }

    fn why_stopped(&self) -> String {
        self.stopped.get().cloned().unwrap_or_else(|| "it was dropped".into())
    }
}

/// Submits requests to an [`Engine`](crate::Engine). Clones are cheap; it can be used from any thread and in async
/// code.
#[derive(Clone, Debug)]
pub struct Handle {
    pub(crate) shared: Arc<Shared>,
    pub(crate) commands: Sender<Command>,
}

impl Handle {
    /// Queues a request without blocking. Dropping the [`Generation`] cancels it.
    ///
    /// # Errors
    /// [`SubmitError`]: the request is invalid or does not fit, or the queue is full.
    pub fn generate(&self, request: Request) -> Result<Generation, SubmitError> {
        let shared = &self.shared;
        if shared.stopped.get().is_some() {
            return Err(self.stopped());
        }
        request.check(shared.limits)?;
        if !request.stop_strings.is_empty() && shared.tokenizer.is_none() {
            let problem = "cannot be found: the engine has no tokenizer".into();
            return Err(SubmitError::Invalid { field: "stop_strings", problem });
        }
        let vocabulary = shared.vocabulary.get().and_then(|vocabulary| vocabulary.as_ref().ok());
        if request.constraint.as_ref().is_some_and(|constraint| !constraint.is_of(vocabulary)) {
            let problem = "was made for another engine; make it with this one's handle".into();
            return Err(SubmitError::Invalid { field: "constraint", problem });
        }
        let id = shared.next_request.fetch_add(1, Ordering::Relaxed);
        let mut job = Job::new(id, &request, &shared.model_stop_tokens, shared.limits)?;
        if let Some(limit) = request.thought {
            let Some(tokenizer) = shared.tokenizer.clone() else {
                let problem = "cannot be bounded: the engine has no tokenizer".into();
                return Err(SubmitError::Invalid { field: "thought", problem });
            };
            let watch = Watch::new(limit, tokenizer, shared.limits.vocab);
            job.thought = Some(Thought::new(Arc::new(watch)));
        }
        shared.queue.enter(request.prompt.len())?;
        // The answer continues the prompt, so its first space is kept. Without an answer there is no text.
        let has_answer = request.max_tokens != Some(0);
        let stream = shared.tokenizer.as_ref().filter(|_| has_answer).map(|tokenizer| {
            let mut stream = tokenizer.stream();
            stream.skip_invalid();
            stream.show(request.shown_tokens.as_slice());
            request.prompt.iter().for_each(|&token| drop(stream.push(token)));
            stream
        });
        let stops: Arc<[String]> = request.stop_strings.into();
        let matcher = StopMatcher::new(stops.clone(), request.include_stop_string);
        let writers =
            (0..request.branches).map(|_| Some(Writer::new(stream.clone(), matcher.clone()))).collect();
        let usage = Usage { prompt_tokens: request.prompt.len(), ..Usage::default() };
        // Unbounded, so that a slow reader blocks no other; it holds at most the answer's tokens.
        let (sender, receiver) = unbounded_channel();
        let (end, ended) = oneshot::channel();
        let signals = Signals { sender, _ended: end };
        let submit = Command::Submit { job: job.into(), prompt: request.prompt, signals };
        self.commands.send(submit).map_err(|_| self.stopped())?;
        Ok(Generation {
            canceller: Canceller { request: id, commands: self.commands.clone() },
            signals: receiver,
            engine_ended: Some(ended),
            shared: shared.clone(),
            stops,
            min_tokens: request.min_tokens,
            writers,
            usage: vec![usage; request.branches],
            ready: VecDeque::new(),
            ended: false,
        })
    }

    /// Compiles a grammar for [`Request::constraint`] on another thread, and blocks until it is compiled: milliseconds
    /// for most grammars, and up to a second more the first time. Recently compiled grammars are cached.
    ///
    /// # Errors
    /// [`GrammarError`]: the grammar is invalid or not supported.
    pub fn compile(&self, grammar: &Grammar) -> Result<Constraint, GrammarError> {
        self.shared.vocabulary()?.compile(grammar)
    }

    /// Opens the disk tier of an engine that was started without the digest of the model's files
    /// ([`DiskCache::weights`](crate::DiskCache::weights)). `None` ends the tier: there will be no digest.
    pub fn set_weights_digest(&self, digest: Option<&[u8]>) {
        // An engine that has stopped needs none.
        let _ = self.commands.send(Command::OpenDisk(digest.map(<[u8]>::to_vec)));
    }

    /// True if the engine takes no more requests.
    pub fn has_stopped(&self) -> bool {
        self.shared.stopped.get().is_some()
    }

    /// Returns the engine's statistics. After an event was read, its step is counted.
    pub fn stats(&self) -> Stats {
        let mut stats = *self.shared.stats.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(disk) = self.shared.disk.get() {
            // The writer continues while the engine sleeps.
            stats.disk.pending_bytes = disk.pending_bytes() as u64;
        }
        stats
    }

    /// Returns the maximum tokens of a sequence, prompt and answer together: the setting, or the capacity of the pages.
    pub fn max_context(&self) -> usize {
        self.shared.limits.max_context
    }

    /// Most branches of a request.
    pub fn max_branches(&self) -> usize {
        self.shared.limits.max_sequences
    }

    /// Number of tokens in the model's vocabulary.
    pub fn vocab(&self) -> usize {
        self.shared.limits.vocab
    }

    /// Removes all cached blocks that no sequence uses. Later prompts have no hits, and pages are allocated in their
    /// order again, so that measurements can be repeated.
    pub fn clear_prefix_cache(&self) {
        // If the engine is gone, so is its cache.
        let _ = self.commands.send(Command::ClearCache);
    }

    /// Returns the kernel statistics by name. Waits for the running step of the engine thread.
    ///
    /// # Errors
    /// [`SubmitError::Stopped`].
    pub fn kernel_counts(&self) -> Result<Vec<KernelCount>, SubmitError> {
        self.ask(Command::KernelCounts)
    }

    /// Returns the state of every page and sequence, and the kernel statistics if `kernels` is true. The engine answers
    /// between two steps. It has no cost while it is not called.
    ///
    /// # Errors
    /// [`SubmitError::Stopped`].
    /// [`SubmitError::Stopped`].
    pub async fn snapshot(&self, kernels: bool) -> Result<Snapshot, SubmitError> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(Command::Snapshot { kernels, reply }).map_err(|_| self.stopped())?;
        answer.await.map_err(|_| self.stopped())
    }

    /// Recounts all pages: each must be free, cached, or in as many block tables as its reference count. For tests;
    /// waits for the running step.
    ///
    /// # Errors
    /// [`SubmitError::Stopped`]; the inner error describes the difference.
    /// [`SubmitError::Stopped`]; the inner error says what does not agree.
    pub fn check_pages(&self) -> Result<Result<(), String>, SubmitError> {
        self.ask(Command::CheckPages)
    }

    fn ask<T>(&self, command: impl FnOnce(SyncSender<T>) -> Command) -> Result<T, SubmitError> {
        let (reply, answer) = sync_channel(1);
        self.commands.send(command(reply)).map_err(|_| self.stopped())?;
        answer.recv().map_err(|_| self.stopped())
    }

    fn stopped(&self) -> SubmitError {
        SubmitError::Stopped { reason: self.shared.why_stopped() }
    }
}

/// Cancels one request from anywhere.
#[derive(Clone, Debug)]
pub struct Canceller {
    request: u64,
    commands: Sender<Command>,
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
    canceller: Canceller,
    signals: UnboundedReceiver<Signal>,
    /// Ready when the engine has dropped its end.
    engine_ended: Option<oneshot::Receiver<()>>,
    shared: Arc<Shared>,
    stops: Arc<[String]>,
    /// Tokens of which the stop strings are not looked for.
    min_tokens: usize,
    /// Writers by branch; `None` after the branch has ended.
    writers: Vec<Option<Writer>>,
    /// Usage by branch, up to the last event read.
    usage: Vec<Usage>,
    /// Further events of the last signal.
    ready: VecDeque<Event>,
    /// No more signals are waited for.
    ended: bool,
}

impl Generation {
    /// Returns the next event; `None` after the last one. Cancel-safe.
    pub async fn next(&mut self) -> Option<Event> {
        poll_fn(|context| self.poll_next(context)).await
    }

    /// The next event for code that polls; `None` after the last one.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Event>> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Poll::Ready(Some(event));
            }
            if self.ended {
                return Poll::Ready(None);
            }
            let signal = ready!(self.signals.poll_recv(context));
            self.receive(signal);
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
            let signal = self.signals.blocking_recv();
            self.receive(signal);
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

    /// Makes events of a signal.
    fn receive(&mut self, signal: Option<Signal>) {
        let signal =
            signal.unwrap_or_else(|| Signal::Failed(RequestError::EngineStopped(self.shared.why_stopped())));
        match signal {
            Signal::Started { cached_tokens, at } => {
                self.usage.iter_mut().for_each(|usage| usage.cached_tokens = cached_tokens);
                self.ready.push_back(Event::Started { cached_tokens, at });
            }
            Signal::Prefilled { tokens, at } => self.ready.push_back(Event::Prefilled { tokens, at }),
            Signal::PromptScores { from, scores } => {
                self.ready.push_back(Event::PromptScores { from, scores })
            }
            Signal::Embedding { values } => self.ready.push_back(Event::Embedding { values }),
            Signal::Token { branch, token, logprob, top, at } => {
                // After a stop string, more tokens may be on their way.
                let Some(writer) = &mut self.writers[branch] else { return };
                self.usage[branch].generated_tokens += 1;
                let may_stop = self.usage[branch].generated_tokens > self.min_tokens;
                let (text, stop) = writer.push(token, may_stop);
                self.ready.push_back(Event::Token { branch, token, text, logprob, top, at });
                if let Some(stop) = stop {
                    self.canceller.send(Some(branch));
                    let reason = FinishReason::StopString(self.stops[stop].clone());
                    self.end(branch, String::new(), reason, None, self.usage[branch]);
                }
            }
            Signal::Finished { branch, reason, stop_score, usage } => {
                let Some(writer) = self.writers[branch].take() else { return };
                self.end(branch, writer.finish(), reason, stop_score, usage);
            }
            Signal::Failed(error) => {
                self.ended = true;
                self.ready.push_back(Event::Failed(error));
            }
        }
    }

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
