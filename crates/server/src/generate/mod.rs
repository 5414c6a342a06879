//! The layer that all APIs share: a request in our own words becomes tokens, an engine's request, and a stream of
//! [`Piece`]s. Dialects only translate at both ends.

mod caller;
mod constraint;
mod defaults;
mod dry;
mod embed;
mod reading;
mod request;

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use paguro_engine::{Constraint, Event, FinishReason, Generation, Score, StopMatcher};
use paguro_model::{Model, tokenizer::Tokenizer};

use crate::{
    AppState,
    count::ClientCount,
    error::ApiError,
    layers::RequestLog,
    metrics::RequestMetrics,
    models::{KeepAliveSetter, Lease},
    prepare::Size,
};

pub use caller::Caller;
use constraint::Compiler;
pub use defaults::Defaults;
pub use dry::DryOptions;
pub use embed::{EmbedRequest, Embedded, embed};
use reading::{Reader, Reading};
use request::Counts;
pub(crate) use request::check_text;
pub use request::{
    ChatRequest, Format, Message, Options, Prompt, Reasoning, Role, TextRequest, Tool, ToolCall, ToolChoice,
};

/// Largest context that a request can ask for, in tokens. Memory bounds it further when a model is loaded.
const MAX_CONTEXT: usize = 1 << 30;

/// A part of an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Piece {
    /// A choice goes on.
    Delta {
        /// Which one, below `n`.
        choice: usize,
        /// With what.
        delta: Delta,
        /// The tokens that have come since the last piece of this choice, if asked for.
        logprobs: Vec<TokenLogprob>,
    },
    /// A part of the prompt is computed, if asked for.
    Prefilled(Progress),
    /// A choice has ended. The last choice's end is the last piece.
    Finished {
        /// Which one.
        choice: usize,
        /// Why.
        reason: Finish,
        /// The tokens that have come since the last piece of this choice, if asked for.
        logprobs: Vec<TokenLogprob>,
        /// The stop token that ended it, if asked for and one did. It is not part of the answer.
        stop_token: Option<TokenLogprob>,
        /// Tokens of the prompt, and of this choice's answer.
        usage: Usage,
    },
}

/// Progress of a prompt's prefill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Tokens of the prompt.
    pub total: usize,
    /// Of these, tokens that the prefix cache had.
    pub cached: usize,
    /// Tokens whose K and V exist, those from the prefix cache included.
    pub processed: usize,
    /// Time since the request left the queue.
    pub time: Duration,
}

/// What an answer goes on with. Text is never empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delta {
    /// Text of the answer.
    Text(String),
    /// What the model thinks before it answers.
    Reasoning(String),
    /// The model begins a call.
    ToolCall {
        /// Counts the calls of a choice from 0.
        index: usize,
        /// Names the call.
        id: String,
        /// Names the tool.
        name: String,
    },
    /// The call's arguments go on.
    ToolArguments {
        /// Which call.
        index: usize,
        /// JSON text, in parts.
        text: String,
    },
}

/// Why a choice has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model has said all.
    Stop,
    /// This stop string came up.
    StopString(String),
    /// The limit is reached, or the context is full.
    Length,
    /// The model has called tools.
    ToolCalls,
}

/// A token with its log-probability.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub token: u32,
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// The best tokens in its place, best first.
    pub top: Vec<(u32, f32)>,
}

/// A prompt's tokens with their log-probabilities, each given those before it.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptLogprobs {
    /// The first one, which nothing stands before.
    pub first: u32,
    /// The others.
    pub rest: Vec<TokenLogprob>,
}

/// Tokens of a request, or of one choice of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Of these, tokens that did not have to be computed.
    pub cached: usize,
    /// Tokens of the answer.
    pub completion: usize,
    /// Of these, tokens that the model thought with.
    pub reasoning: usize,
}

/// Effective sampling parameters of an answer: the request's, the library's, or the model's.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)] // named as the fields of `SamplingParams`
pub struct Sampling {
    pub temperature: f32,
    pub top_p: f32,
    pub frequency_penalty: f32,
    pub presence_penalty: f32,
}

/// When what happened, as far as it has.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// The request came.
    pub received: Instant,
    /// Its model was there and it was queued.
    pub submitted: Instant,
    /// It left the queue.
    pub started: Option<Instant>,
    /// The first token was sampled.
    pub first_token: Option<Instant>,
    /// The last token so far was sampled.
    pub last_token: Option<Instant>,
}

/// An answer that is being made. Dropping it cancels the request, and its pages are free before the next step.
#[derive(Debug)]
pub struct Generating {
    generation: Generation,
    /// The model's one name.
    name: String,
    tokenizer: Arc<Tokenizer>,
    keep_alive: KeepAliveSetter,
    prompt_tokens: usize,
    /// The prompt, if its log-probabilities are wanted, until they are there.
    unscored_prompt: Vec<u32>,
    prompt_logprobs: Option<PromptLogprobs>,
    choices: Vec<Choice>,
    /// Texts that end an answer when they come up in its content.
    stop_strings: Arc<[String]>,
    /// Tokens of an answer in which stop strings are not looked for.
    min_tokens: usize,
    /// True if [`Piece::Prefilled`] is wanted.
    report_prefill: bool,
    ready: VecDeque<Piece>,
    timing: Timing,
    metrics: RequestMetrics,
    log: RequestLog,
    /// Of all choices that have ended.
    completion_tokens: usize,
    /// Tokens used so far.
    used: Usage,
    sampling: Sampling,
    /// From the queue to the last piece, for whoever traces requests.
    span: tracing::Span,
    _lease: SharedLease,
}

/// A request's lease of its model, which the first of its two holders to be dropped ends: the answer that is read, or
/// the work in the engine. When an answer is complete, the model is free for whoever reads its end.
#[derive(Clone, Debug)]
struct SharedLease(Arc<Mutex<Option<Lease>>>);

impl Drop for SharedLease {
    fn drop(&mut self) {
        drop(self.0.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

/// One choice's state between engine and pieces.
#[derive(Debug, Default)]
struct Choice {
    logprobs: Vec<TokenLogprob>,
    /// `None` where the text is all there is, and after the end.
    reader: Option<Reader>,
    /// Finds stop strings in the content of a chat's answer; `None` where the engine finds them in the whole text.
    stops: Option<StopMatcher>,
    /// Tokens so far.
    tokens: usize,
    /// Tokens that the model thought with.
    reasoning_tokens: usize,
}

/// Starts to answer a chat.
///
/// # Errors
/// The model is not there or cannot chat, or the request asks for what cannot be.
pub async fn chat(
    state: &AppState,
    caller: Caller,
    model: &str,
    mut request: ChatRequest,
) -> Result<Generating, ApiError> {
    let received = Instant::now();
    let entry = state.models.find(model).await?;
    let asked = request.options.context;
    entry.defaults()?.complete(&mut request);
    let lease = lease(state, &caller, model, asked, request.options.context).await?;
    request.tolerance = caller.tolerance.clone();
    let handle = lease.handle.clone();
    let counts = request.options.check(&handle)?;
    let work = off_thread(state, &caller, &lease, move |model, is_wanted| {
        request.options.dry.find_breakers(&model.tokenizer);
        let (prompt, reading) = request.prepare(model, handle.max_context())?;
        let compiler = Compiler { handle: &handle, is_wanted };
        let constraint = request.constraint(&reading, &model.tokenizer, &compiler)?;
        let options = request.options;
        Ok(Prepared { prompt, constraint, reading: Some(reading), options, counts })
    });
    let prepared = caller.in_time(work).await?;
    Generating::start(state, lease, caller, prepared, received)
}

/// Starts to continue a text.
///
/// # Errors
/// The model is not there, or the request asks for what cannot be.
pub async fn text(
    state: &AppState,
    caller: Caller,
    model: &str,
    request: TextRequest,
) -> Result<Generating, ApiError> {
    let received = Instant::now();
    let TextRequest { prompt, format, default_max_tokens, options } = request;
    let entry = state.models.find(model).await?;
    let asked = options.context;
    let mut options = entry.defaults()?.complete_options(options);
    let lease = lease(state, &caller, model, asked, options.context).await?;
    options.max_tokens = options.max_tokens.or(default_max_tokens.map(ClientCount::from));
    let handle = lease.handle.clone();
    let counts = options.check(&handle)?;
    let work = off_thread(state, &caller, &lease, move |model, is_wanted| {
        options.dry.find_breakers(&model.tokenizer);
        if let Prompt::Gap { .. } = prompt {
            options.stop_tokens.extend(model.tokenizer.fill_ends());
        }
        let prompt = prompt.tokens(model, handle.max_context())?;
        let constraint = format.constraint(&Compiler { handle: &handle, is_wanted })?;
        Ok(Prepared { prompt, constraint, reading: None, options, counts })
    });
    let prepared = caller.in_time(work).await?;
    Generating::start(state, lease, caller, prepared, received)
}

/// Leases a model, for sequences of `context` tokens where it can have them. A context that the client has `asked` for and
/// does not get is named in the answer.
async fn lease(
    state: &AppState,
    caller: &Caller,
    model: &str,
    asked: Option<ClientCount>,
    context: Option<ClientCount>,
) -> Result<Lease, ApiError> {
    let tokens = context.map(|context| context.at_most(MAX_CONTEXT));
    let lease = caller.in_time(state.models.lease_for(model, tokens)).await?;
    let (loaded, trained) = (lease.handle.max_context(), lease.model.context_length);
    if let Some(asked) = asked.filter(|asked| *asked > ClientCount::from(loaded)) {
        let reason = if loaded < trained {
            "memory has no room for more, or others use the model".to_owned()
        } else {
            format!("the model was trained for {trained}")
        };
        let message = format!("{asked} exceeds the loaded context of {loaded} tokens; {reason}");
        caller.tolerance.leave_out("options.num_ctx", message)?;
    }
    Ok(lease)
}

/// What is made of a request before its turn comes.
struct Prepared {
    prompt: Vec<u32>,
    /// What the answer must be.
    constraint: Option<Constraint>,
    /// How to read it; `None` where the text is all there is.
    reading: Option<Reading>,
    options: Options,
    counts: Counts,
}

/// Prepares a request when it is its client's turn. `work` can ask whether the client still waits.
pub(crate) async fn off_thread<T: Send + 'static>(
    state: &AppState,
    caller: &Caller,
    lease: &Lease,
    work: impl FnOnce(&Model, &dyn Fn() -> bool) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let (model, size) = (lease.model.clone(), caller.size());
    let release = state.release.clone();
    let work = move |is_wanted: &dyn Fn() -> bool| {
        let outcome = work(&model, is_wanted);
        if size == Size::Large {
            release.later();
        }
        outcome
    };
    state.preparation.run(&caller.client, size, work).await
}

impl Generating {
    fn start(
        state: &AppState,
        lease: Lease,
        caller: Caller,
        prepared: Prepared,
        received: Instant,
    ) -> Result<Self, ApiError> {
        let Prepared { prompt, constraint, reading, options, mut counts } = prepared;
        let prompt_tokens = prompt.len();
        counts.bound(prompt_tokens)?;
        let unscored_prompt = if options.score_prompt { prompt.clone() } else { Vec::new() };
        let mut request = options.request(prompt, &counts, &lease.model.defaults);
        request.constraint = constraint;
        request.tenant = caller.tenant;
        request.deadline = caller.deadline.map(Into::into);
        let mut stop_strings: Arc<[String]> = Arc::default();
        let mut matcher = None;
        if let Some(reading) = &reading {
            request.shown_tokens = reading.shown_tokens(&lease.model.tokenizer);
            request.thought = reading.thought_limit(&lease.model.tokenizer);
            // Reasoning and calls are text to the engine, and must not be stopped.
            stop_strings = std::mem::take(&mut request.stop_strings).into();
            let stops = StopMatcher::new(stop_strings.clone(), request.include_stop_string);
            matcher = (!stop_strings.is_empty()).then_some(stops);
        }
        let choice = |_| Choice {
            reader: reading.as_ref().map(Reading::reader),
            stops: matcher.clone(),
            ..Choice::default()
        };
        let choices = (0..counts.branches).map(choice).collect();
        let (min_tokens, report_prefill) = (request.min_tokens, request.report_prefill);
        let submitted = Instant::now();
        let sampling = Sampling {
            temperature: request.sampling.temperature,
            top_p: request.sampling.top_p,
            frequency_penalty: request.sampling.frequency_penalty,
            presence_penalty: request.sampling.presence_penalty,
        };
        let mut generation = lease.handle.generate(request)?;
        let (name, tokenizer) = (lease.entry.name.clone(), lease.model.tokenizer.clone());
        let keep_alive = lease.keep_alive_setter();
        let ended = generation.engine_ended();
        let lease = SharedLease(Arc::new(Mutex::new(Some(lease))));
        let in_engine = lease.clone();
        tokio::spawn(async move {
            // A client that does not read its answer keeps no model.
            ended.await;
            drop(in_engine);
        });
        let metrics = state.metrics.request(&name, received);
        let log = caller.log;
        log.update(|numbers| {
            numbers.model = Some(name.clone());
            numbers.prompt += prompt_tokens;
        });
        let timing = Timing { received, submitted, started: None, first_token: None, last_token: None };
        let span = tracing::info_span!(
            "generate",
            "gen_ai.request.model" = name,
            "gen_ai.usage.input_tokens" = prompt_tokens,
            "gen_ai.usage.output_tokens" = tracing::field::Empty,
        );
        let ready = VecDeque::new();
        Ok(Self {
            generation,
            name,
            tokenizer,
            keep_alive,
            prompt_tokens,
            unscored_prompt,
            prompt_logprobs: None,
            choices,
            stop_strings,
            min_tokens,
            report_prefill,
            ready,
            timing,
            metrics,
            log,
            completion_tokens: 0,
            used: Usage { prompt: prompt_tokens, ..Usage::default() },
            sampling,
            span,
            _lease: lease,
        })
    }

    /// The next piece; `None` after the last one.
    ///
    /// # Errors
    /// The request failed; nothing comes after that.
    pub async fn next(&mut self) -> Option<Result<Piece, ApiError>> {
        loop {
            if let Some(piece) = self.ready.pop_front() {
                return Some(Ok(piece));
            }
            let event = self.generation.next().await?;
            if let Err(error) = self.receive(event) {
                self.log.fail(&error);
                return Some(Err(error));
            }
        }
    }

    /// The model's one name.
    pub fn model(&self) -> &str {
        &self.name
    }

    /// Tokens of the prompt.
    pub fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }

    /// Returns the effective sampling parameters.
    pub fn sampling(&self) -> Sampling {
        self.sampling
    }

    /// Tokens that were used so far, of all choices.
    pub fn usage_so_far(&self) -> Usage {
        self.used
    }

    /// The prompt's log-probabilities, if asked for: once, and from the first piece on.
    pub fn take_prompt_logprobs(&mut self) -> Option<PromptLogprobs> {
        self.prompt_logprobs.take()
    }

    /// Number of answers.
    pub fn choices(&self) -> usize {
        self.choices.len()
    }

    /// How long the model stays after its last use; `None` is for ever.
    pub fn keep_alive(&self, time: Option<Duration>) {
        self.keep_alive.set(time);
    }

    /// Makes text of tokens.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// When what happened so far.
    pub fn timing(&self) -> Timing {
        self.timing
    }

    fn receive(&mut self, event: Event) -> Result<(), ApiError> {
        match event {
            Event::Started { at, cached_tokens } => {
                self.used.cached = cached_tokens;
                self.timing.started = Some(at);
                let queue = at.saturating_duration_since(self.timing.submitted);
                self.metrics.started(queue);
                self.log.update(|numbers| {
                    numbers.cached += cached_tokens;
                    numbers.queue = numbers.queue.max(Some(queue));
                });
                if self.report_prefill {
                    self.report_prefilled(cached_tokens, at);
                }
            }
            Event::Prefilled { tokens, at } => self.report_prefilled(tokens, at),
            Event::PromptScores { scores, .. } => {
                let mut tokens = std::mem::take(&mut self.unscored_prompt).into_iter();
                self.prompt_logprobs = tokens.next().map(|first| {
                    let rest = tokens.zip(scores);
                    let rest =
                        rest.map(|(token, Score { logprob, top })| TokenLogprob { token, logprob, top });
                    PromptLogprobs { first, rest: rest.collect() }
                });
            }
            Event::Token { branch, token, text, logprob, top, at } => {
                self.time_token(at);
                self.used.completion += 1;
                let choice = &mut self.choices[branch];
                choice.logprobs.extend(logprob.map(|logprob| TokenLogprob { token, logprob, top }));
                choice.tokens += 1;
                if let Some(stop) = self.write_token(branch, text) {
                    self.generation.stop(branch, self.stop_strings[stop].clone());
                }
            }
            Event::Finished { branch, text, reason, stop_score, usage } => {
                let cut = !matches!(reason, FinishReason::Stop(_) | FinishReason::Complete);
                let (calls, stop) = self.write_end(branch, text, cut);
                let reason =
                    stop.map_or(reason, |stop| FinishReason::StopString(self.stop_strings[stop].clone()));
                let stop_token = match (&reason, stop_score) {
                    (&FinishReason::Stop(token), Some(Score { logprob, top })) => {
                        Some(TokenLogprob { token, logprob, top })
                    }
                    _ => None,
                };
                let reason = match reason {
                    FinishReason::StopString(text) => Finish::StopString(text),
                    FinishReason::Length | FinishReason::ContextFull => Finish::Length,
                    FinishReason::Stop(_) | FinishReason::Complete if calls > 0 => Finish::ToolCalls,
                    FinishReason::Stop(_) | FinishReason::Complete => Finish::Stop,
                    FinishReason::DeadlineExceeded => {
                        self.metrics.failed();
                        return Err(ApiError::timeout());
                    }
                    FinishReason::Cancelled => {
                        return Err(ApiError::Unavailable("the server is shutting down".into()));
                    }
                    other => return Err(ApiError::Internal(format!("the answer ended: {other:?}"))),
                };
                let usage = Usage {
                    prompt: usage.prompt_tokens,
                    cached: usage.cached_tokens,
                    completion: usage.generated_tokens,
                    reasoning: self.choices[branch].reasoning_tokens,
                };
                self.metrics.finished(usage);
                self.completion_tokens += usage.completion;
                self.span.record("gen_ai.usage.output_tokens", self.completion_tokens);
                let logprobs = std::mem::take(&mut self.choices[branch].logprobs);
                let finished = Piece::Finished { choice: branch, reason, logprobs, stop_token, usage };
                self.ready.push_back(finished);
            }
            Event::Failed(error) => {
                self.metrics.failed();
                return Err(error.into());
            }
            // What nobody here asks for.
            _ => {}
        }
        Ok(())
    }

    fn report_prefilled(&mut self, processed: usize, at: Instant) {
        let time =
            self.timing.started.map_or(Duration::ZERO, |started| at.saturating_duration_since(started));
        let (total, cached) = (self.prompt_tokens, self.used.cached);
        self.ready.push_back(Piece::Prefilled(Progress { total, cached, processed, time }));
    }

    /// Writes a token's text. Returns the stop string that it completes.
    fn write_token(&mut self, branch: usize, text: String) -> Option<usize> {
        let choice = &mut self.choices[branch];
        let Some(reader) = &mut choice.reader else {
            self.write(branch, vec![Delta::Text(text)]);
            return None;
        };
        let before = reader.in_reasoning();
        let mut deltas = reader.push(&text);
        choice.reasoning_tokens += usize::from(before || reader.in_reasoning());
        let may_stop = choice.tokens > self.min_tokens;
        let stop = choice.stops.as_mut().filter(|_| may_stop).and_then(|stops| stop_in(&mut deltas, stops));
        if stop.is_some() {
            choice.reader = None;
        }
        self.write(branch, deltas);
        stop
    }

    /// Writes what was held back. Returns how many calls there were, and the stop string that came up.
    fn write_end(&mut self, branch: usize, text: String, cut: bool) -> (usize, Option<usize>) {
        let choice = &mut self.choices[branch];
        let Some(mut reader) = choice.reader.take() else {
            self.write(branch, vec![Delta::Text(text)]);
            return (0, None);
        };
        let mut deltas = reader.push(&text);
        let (rest, calls) = reader.finish(cut);
        deltas.extend(rest);
        let mut stop = None;
        if let Some(mut stops) = choice.stops.take() {
            stop = stop_in(&mut deltas, &mut stops);
            deltas.push(Delta::Text(stops.take_held()));
        }
        self.write(branch, deltas);
        (calls, stop)
    }

    /// The log-probabilities go with the first of the parts that the last tokens have made certain.
    fn write(&mut self, branch: usize, deltas: Vec<Delta>) {
        for delta in deltas {
            if matches!(&delta, Delta::Text(text) if text.is_empty()) {
                continue;
            }
            let logprobs = std::mem::take(&mut self.choices[branch].logprobs);
            self.ready.push_back(Piece::Delta { choice: branch, delta, logprobs });
        }
    }

    fn time_token(&mut self, at: Instant) {
        match self.timing.last_token {
            None => self.metrics.first_token(at.saturating_duration_since(self.timing.received)),
            // Choices share steps: several tokens have one time, and are no gap.
            Some(last) if last != at => self.metrics.token_gap(at.saturating_duration_since(last)),
            Some(_) => {}
        }
        let first = *self.timing.first_token.get_or_insert(at);
        self.timing.last_token = Some(at);
        self.log.update(|numbers| {
            numbers.answer += 1;
            numbers.tokens = Some((numbers.tokens.map_or(first, |(first, _)| first), at));
        });
    }
}

/// Cuts the content among `deltas` where a stop string ends it, and holds back what may become one. Returns which one.
fn stop_in(deltas: &mut Vec<Delta>, stops: &mut StopMatcher) -> Option<usize> {
    let mut certain = Vec::new();
    let mut found = None;
    for delta in deltas.drain(..) {
        match delta {
            Delta::Text(text) => {
                let (text, stop) = stops.push(&text);
                certain.push(Delta::Text(text));
                found = stop;
            }
            // What was held back before it ends here.
            other => certain.extend([Delta::Text(stops.take_held()), other]),
        }
        if found.is_some() {
            break;
        }
    }
    *deltas = certain;
    found
}

impl Usage {
    /// The sum over all choices: they share the prompt.
    pub fn add_choice(&mut self, choice: Self) {
        self.prompt = choice.prompt;
        self.cached = choice.cached;
        self.completion += choice.completion;
        self.reasoning += choice.reasoning;
    }
}

impl Timing {
    /// From the first token to the last one.
    pub fn decode(&self) -> Option<Duration> {
        Some(self.last_token? - self.first_token?)
    }
}
