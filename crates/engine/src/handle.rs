//! The interface of the engine: [`Handle`] checks requests and submits them from any thread. The engine thread handles only
//! numbers.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{Sender, SyncSender, sync_channel},
    },
    time::Instant,
};

use paguro_backend::{AdapterId, ExpertCount, KernelCount, LowRank, StepError};
use paguro_grammar::{TokenText, Vocabulary};
use paguro_kv_store::Space;
use paguro_model::tokenizer::Tokenizer;
use tokio::sync::{
    mpsc::{UnboundedSender, unbounded_channel},
    oneshot,
};

use crate::{
    AdapterLimits, Canceller, Constraint, EngineOptions, Event, Generation, Grammar, GrammarError, Request,
    Stats, SubmitError, Usage,
    adapters::{HeldAdapters, LoadReply},
    checked_request::CheckedRequest,
    prefix::BlockKey,
    replicas::BlockIndex,
    request::RequestLimits,
    snapshot::Snapshot,
    text::{StopMatcher, Writer},
    thought::{Thought, Watch},
};

/// Commands for the engine thread.
#[derive(Debug)]
pub(crate) enum Command {
    Submit { checked: Box<CheckedRequest>, prompt: Vec<u32>, events: EventSender },
    Cancel { request: u64, branch: Option<usize> },
    ClearCache,
    OpenDisk(Option<Vec<u8>>),
    KernelCounts(SyncSender<Vec<KernelCount>>),
    ExpertCounts(SyncSender<Result<Vec<ExpertCount>, StepError>>),
    LoadAdapter { id: AdapterId, pairs: Vec<LowRank>, reply: LoadReply },
    UnloadAdapter(AdapterId),
    CheckPages(SyncSender<Result<(), String>>),
    Snapshot { kernels: bool, reply: oneshot::Sender<Snapshot> },
    Stop { finish: bool },
}

/// The engine thread's end of a [`Generation`], dropped when the request has ended.
#[derive(Debug)]
pub(crate) struct EventSender {
    sender: UnboundedSender<Event>,
    /// Notifies its receiver on drop.
    _ended: oneshot::Sender<()>,
}

impl EventSender {
    /// Sends an event. A reader that is gone has sent a cancellation.
    pub fn send(&self, event: Event) {
        let _ = self.sender.send(event);
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

    /// Returns the number of requests and that of the tokens of their prompts.
    pub fn waiting(&self) -> (usize, usize) {
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        (waiting.requests, waiting.tokens)
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
    /// See [`Handle::max_image_tokens`].
    pub max_image_tokens: Option<usize>,
    /// See [`Handle::step_tokens`].
    pub step_tokens: usize,
    /// Steps that may be in flight.
    pub lanes: usize,
    pub queue: Queue,
    next_request: AtomicU64,
    tokenizer: Option<Arc<Tokenizer>>,
    /// Stop tokens of all answers that do not ignore them.
    model_stop_tokens: Vec<u32>,
    /// Created for the first grammar.
    vocabulary: OnceLock<Result<Arc<Vocabulary>, GrammarError>>,
    pub stats: Mutex<Stats>,
    pub adapter_limits: AdapterLimits,
    /// See [`Handle::device`].
    pub device: String,
    /// Parent of first blocks without a salt, and tokens in a block; `None` without a prefix cache.
    pub blocks: Option<(BlockKey, usize)>,
    /// True if the last step failed.
    pub is_failing: AtomicBool,
    /// See [`Handle::draft_problem`].
    pub draft_problem: Option<String>,
    /// See [`EngineOptions::draft_depth`].
    pub draft_depth: Option<usize>,
    adapters: Mutex<HeldAdapters>,
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
            max_image_tokens: None,
            step_tokens: EngineOptions::default().max_batch_tokens,
            lanes: 1,
            queue,
            next_request: AtomicU64::new(0),
            tokenizer,
            model_stop_tokens,
            vocabulary: OnceLock::new(),
            stats: Mutex::new(stats),
            adapter_limits: AdapterLimits::default(),
            device: String::new(),
            blocks: None,
            is_failing: AtomicBool::new(false),
            draft_problem: None,
            draft_depth: None,
            adapters: Mutex::default(),
            disk: OnceLock::new(),
            stopped: OnceLock::new(),
        }
    }

    fn vocabulary(&self) -> Result<&Arc<Vocabulary>, GrammarError> {
        let vocabulary = self.vocabulary.get_or_init(|| {
            let tokenizer = self.tokenizer.as_ref().ok_or(GrammarError::NoTokenizer)?;
            let tokens = (0..self.limits.vocab as u32).map(|token| TokenText {
                bytes: tokenizer.token_bytes(token),
                is_control: tokenizer.is_special(token),
            });
            Vocabulary::new(tokens, &self.model_stop_tokens).map(Arc::new)
        });
        vocabulary.as_ref().map_err(Clone::clone)
    }

    pub fn adapters(&self) -> MutexGuard<'_, HeldAdapters> {
        self.adapters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn why_stopped(&self) -> String {
        self.stopped.get().cloned().unwrap_or_else(|| "it was dropped".into())
    }
}

/// Thread of an engine, as handles see it.
#[derive(Clone, Debug)]
pub(crate) struct Port {
    /// Number of the engine among [several](crate::Replicas).
    pub number: usize,
    pub shared: Arc<Shared>,
    pub commands: Sender<Command>,
}

impl Port {
    pub fn stats(&self) -> Stats {
        let mut stats = *self.shared.stats.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(disk) = self.shared.disk.get() {
            // The writer continues while the engine sleeps.
            stats.disk.pending_bytes = disk.pending_bytes() as u64;
        }
        stats
    }

    pub fn has_stopped(&self) -> bool {
        self.shared.stopped.get().is_some()
    }

    pub fn is_failing(&self) -> bool {
        self.has_stopped() || self.shared.is_failing.load(Ordering::Relaxed)
    }

    fn request<T>(&self, command: impl FnOnce(SyncSender<T>) -> Command) -> Result<T, SubmitError> {
        let (reply, answer) = sync_channel(1);
        self.commands.send(command(reply)).map_err(|_| self.stopped())?;
        answer.recv().map_err(|_| self.stopped())
    }

    pub fn stopped(&self) -> SubmitError {
        SubmitError::Stopped { reason: self.shared.why_stopped() }
    }
}

/// Submits requests to an [`Engine`](crate::Engine). Clones are cheap; it can be used from any thread and in async
/// code.
#[derive(Clone, Debug)]
pub struct Handle {
    /// The engine, or [several](crate::Replicas) with the same limits.
    pub(crate) ports: Arc<[Port]>,
    /// Blocks of several engines.
    pub(crate) index: Option<Arc<BlockIndex>>,
}

impl Handle {
    pub(crate) fn new(port: Port) -> Self {
        Self { ports: Arc::new([port]), index: None }
    }

    /// Returns what all engines have in common, and the adapters.
    pub(crate) fn shared(&self) -> &Shared {
        &self.ports[0].shared
    }

    /// Returns a handle of each engine alone, for its statistics.
    pub fn engines(&self) -> impl ExactSizeIterator<Item = Self> {
        self.ports.iter().cloned().map(Self::new)
    }

    /// Returns the number of the engine among [several](crate::Replicas); of these, that of the first one.
    pub fn number(&self) -> usize {
        self.ports[0].number
    }

    /// Returns the name of the engine's device; of several engines, that of the first one.
    pub fn device(&self) -> &str {
        &self.shared().device
    }

    /// Returns true if the last step failed or the engine has stopped; of several engines, if it is so for all.
    pub fn is_failing(&self) -> bool {
        self.ports.iter().all(Port::is_failing)
    }

    /// Queues a request without blocking. Dropping the [`Generation`] cancels it.
    ///
    /// # Errors
    /// [`SubmitError`]: the request is invalid or does not fit, or the queue is full.
    pub fn generate(&self, request: Request) -> Result<Generation, SubmitError> {
        let shared = self.shared();
        if self.has_stopped() {
            return Err(self.stopped());
        }
        request.check(shared.limits)?;
        let tokenizer = request.tokenizer.clone().or_else(|| shared.tokenizer.clone());
        if !request.stop_strings.is_empty() && tokenizer.is_none() {
            let problem = "cannot be found: the engine has no tokenizer".into();
            return Err(SubmitError::Invalid { field: "stop_strings", problem });
        }
        let vocabulary = shared.vocabulary.get().and_then(|vocabulary| vocabulary.as_ref().ok());
        if request.constraint.as_ref().is_some_and(|constraint| !constraint.is_of(vocabulary)) {
            let problem = "was made for another engine; make it with this one's handle".into();
            return Err(SubmitError::Invalid { field: "constraint", problem });
        }
        if let Some((adapter, _)) = request.adapters.iter().find(|(adapter, _)| !adapter.is_of(self)) {
            let problem = format!("has `{}` of another engine", adapter.name());
            return Err(SubmitError::Invalid { field: "adapters", problem });
        }
        let id = shared.next_request.fetch_add(1, Ordering::Relaxed);
        let mut checked = CheckedRequest::new(id, &request, &shared.model_stop_tokens, shared.limits)?;
        if let Some(depth) = shared.draft_depth {
            checked.drafts = checked.drafts.of_model(depth);
        }
        if let Some(limit) = request.thought {
            let Some(tokenizer) = tokenizer.clone() else {
                let problem = "cannot be bounded: the engine has no tokenizer".into();
                return Err(SubmitError::Invalid { field: "thought", problem });
            };
            let watch = Watch::new(limit, tokenizer, shared.limits.vocab);
            checked.thought = Some(Thought::new(Arc::new(watch)));
        }
        let port = self.enter(&checked, &request.prompt)?;
        // The answer continues the prompt, so its first space is kept. Without an answer there is no text.
        let has_answer = request.max_tokens != Some(0);
        let stream = tokenizer.filter(|_| has_answer).map(|tokenizer| {
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
        let events = EventSender { sender, _ended: end };
        let submit = Command::Submit { checked: checked.into(), prompt: request.prompt, events };
        port.commands.send(submit).map_err(|_| port.stopped())?;
        Ok(Generation {
            canceller: Canceller { request: id, commands: port.commands.clone() },
            events: receiver,
            engine_ended: Some(ended),
            shared: port.shared.clone(),
            stops,
            min_tokens: request.min_tokens,
            writers,
            usage: vec![usage; request.branches],
            last: vec![None; request.branches],
            ready: Default::default(),
            ended: false,
        })
    }

    /// Adds a request to the queue of an engine: the first one in [order](BlockIndex::order) whose queue has room.
    fn enter(&self, checked: &CheckedRequest, prompt: &[u32]) -> Result<&Port, SubmitError> {
        let ports: Vec<&Port> = match &self.index {
            None => self.ports.iter().collect(),
            Some(index) => index.order(&self.ports, checked, prompt),
        };
        let mut refusal = None;
        for port in ports {
            match port.shared.queue.enter(prompt.len()) {
                Ok(()) => return Ok(port),
                Err(error) => refusal = refusal.or(Some(error)),
            }
        }
        Err(refusal.unwrap_or_else(|| self.stopped()))
    }

    /// Compiles a grammar for [`Request::constraint`] on another thread, and blocks until it is compiled: milliseconds
    /// for most grammars, up to a second more the first time, and at most [`COMPILE_TIME`](crate::COMPILE_TIME). Recently compiled grammars are
    /// cached.
    ///
    /// # Errors
    /// [`GrammarError`]: the grammar is invalid, not supported, or too slow to compile.
    pub fn compile(&self, grammar: &Grammar) -> Result<Constraint, GrammarError> {
        self.shared().vocabulary()?.compile(grammar)
    }

    /// Compiles a grammar like [`Self::compile`], but blocks at the latest until `until`, and only while `is_wanted`
    /// returns true.
    ///
    /// # Errors
    /// As those of [`Self::compile`]; [`GrammarError::NotWanted`] if `is_wanted` has returned false.
    pub fn compile_while(
        &self,
        grammar: &Grammar,
        until: Instant,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<Constraint, GrammarError> {
        self.shared().vocabulary()?.compile_while(grammar, until, is_wanted)
    }

    /// Opens the disk tier of an engine that was started without the digest of the model's files
    /// ([`DiskCache::weights`](crate::DiskCache::weights)). `None` ends the tier: there will be no digest.
    pub fn set_weights_digest(&self, digest: Option<&[u8]>) {
        for port in &*self.ports {
            // An engine that has stopped needs none.
            let _ = port.commands.send(Command::OpenDisk(digest.map(<[u8]>::to_vec)));
        }
    }

    /// Returns true if the engine accepts no more requests; of several engines, if none does.
    pub fn has_stopped(&self) -> bool {
        self.ports.iter().all(Port::has_stopped)
    }

    /// Returns the engine's statistics, or the sums of several engines. After an event was read, its step is counted.
    pub fn stats(&self) -> Stats {
        let mut stats = self.ports.iter().map(Port::stats).reduce(Stats::and).unwrap_or_default();
        if let Some(index) = &self.index {
            stats.blocks = index.blocks();
        }
        stats
    }

    /// Returns the maximum tokens of a sequence, prompt and answer together: the setting, or the capacity of the pages.
    pub fn max_context(&self) -> usize {
        self.shared().limits.max_context
    }

    /// Returns the reason for which the model's head for multi-token prediction does not draft on this device, if it has one.
    pub fn draft_problem(&self) -> Option<&str> {
        self.shared().draft_problem.as_deref()
    }

    /// Returns the most rows of one part of a picture, for which memory was planned; `None` if the engine reads no pictures.
    pub fn max_image_tokens(&self) -> Option<usize> {
        self.shared().max_image_tokens
    }

    /// Returns the maximum number of tokens of prompts in a step, unless a single text of an encoder has more.
    pub fn step_tokens(&self) -> usize {
        self.shared().step_tokens
    }

    /// Returns the number of steps that the engine has in flight.
    pub(crate) fn lanes(&self) -> usize {
        self.shared().lanes
    }

    /// Returns the maximum number of waiting requests.
    pub fn queue_capacity(&self) -> usize {
        self.shared().queue.capacity
    }

    /// Returns the maximum number of branches of a request.
    pub fn max_branches(&self) -> usize {
        self.shared().limits.max_sequences
    }

    /// Returns the maximum number of adapters.
    pub fn max_adapters(&self) -> usize {
        self.shared().adapter_limits.count
    }

    /// Returns the number of tokens in the model's vocabulary.
    pub fn vocab(&self) -> usize {
        self.shared().limits.vocab
    }

    /// Removes all cached blocks that no sequence uses. Later prompts have no hits, and pages are allocated in their
    /// order again, so that measurements can be repeated.
    pub fn clear_prefix_cache(&self) {
        for port in &*self.ports {
            // If the engine is gone, so is its cache.
            let _ = port.commands.send(Command::ClearCache);
        }
    }

    /// Returns the kernel statistics by name; of several engines, those of the first one. Waits for the running step of the engine thread.
    ///
    /// # Errors
    /// [`SubmitError::Stopped`].
    pub fn kernel_counts(&self) -> Result<Vec<KernelCount>, SubmitError> {
        self.ports[0].request(Command::KernelCounts)
    }

    /// Returns the use of slots by experts since load, by layer; of several engines, that of the first one. Waits for the running step of
    /// the engine thread.
    ///
    /// # Errors
    /// [`SubmitError::Stopped`], also if the device fails.
    pub fn expert_counts(&self) -> Result<Vec<ExpertCount>, SubmitError> {
        self.ports[0].request(Command::ExpertCounts)?.map_err(|_| self.stopped())
    }

    /// Returns the state of every page and sequence, and the kernel statistics if `kernels` is true; of several engines, that of the
    /// first one. The engine thread replies between two steps.
    ///
    /// # Errors
    /// [`SubmitError::Stopped`].
    pub async fn snapshot(&self, kernels: bool) -> Result<Snapshot, SubmitError> {
        let (reply, answer) = oneshot::channel();
        let command = Command::Snapshot { kernels, reply };
        self.ports[0].commands.send(command).map_err(|_| self.stopped())?;
        answer.await.map_err(|_| self.stopped())
    }

    /// Recounts all pages: each must be free, cached, or in as many block tables as its reference count. For tests;
    /// waits for the running step.
    ///
    /// # Errors
    /// [`SubmitError::Stopped`]; the inner error describes the difference.
    pub fn check_pages(&self) -> Result<Result<(), String>, SubmitError> {
        let checked = self.ports.iter().map(|port| port.request(Command::CheckPages));
        checked.collect::<Result<Vec<_>, _>>().map(|all| all.into_iter().collect())
    }

    pub(crate) fn stopped(&self) -> SubmitError {
        self.ports[0].stopped()
    }
}
