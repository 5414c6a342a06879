//! A running answer: converts the engine's events into [`Piece`]s, and finds stop strings in the content of a chat.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use paguro_engine::{Event, FinishReason, Generation, Picture, Score, StopMatcher};
use paguro_model::tokenizer::Tokenizer;

use super::{
    Caller, ReadyRequest,
    piece::{Delta, Finish, Piece, Progress, PromptLogprobs, Sampling, Timing, TokenLogprob, Usage},
    reading::{Reader, Reading},
};
use crate::{
    AppState,
    error::ApiError,
    layers::RequestLog,
    metrics::RequestMetrics,
    models::{KeepAliveSetter, Lease},
};

/// A running answer. Dropping it cancels the request and frees its pages before the next step.
#[derive(Debug)]
pub struct Generating {
    generation: Generation,
    /// Canonical name of the model.
    name: String,
    tokenizer: Arc<Tokenizer>,
    keep_alive: KeepAliveSetter,
    prompt_tokens: usize,
    /// The prompt, until its requested log-probabilities arrive.
    unscored_prompt: Vec<u32>,
    prompt_logprobs: Option<PromptLogprobs>,
    choices: Vec<Choice>,
    /// Texts that end an answer when they occur in its content.
    stop_strings: Arc<[String]>,
    /// Number of first tokens of an answer that are not searched for stop strings.
    min_tokens: usize,
    /// True if [`Piece::Prefilled`] is requested.
    report_prefill: bool,
    /// True if all tokens are reported.
    report_tokens: bool,
    /// True if reasoning is not part of the answer.
    hides_reasoning: bool,
    ready: VecDeque<Piece>,
    timing: Timing,
    metrics: RequestMetrics,
    log: RequestLog,
    /// Tokens of all choices that have ended.
    completion_tokens: usize,
    /// Tokens used so far.
    used: Usage,
    sampling: Sampling,
    /// Trace span from the queue to the last piece.
    span: tracing::Span,
    _lease: SharedLease,
}

/// A request's lease of its model. It has two holders, the answer and a task that waits for the engine, and ends when the
/// first of them is dropped. So a model is free as soon as a complete answer has been read, and also when a client does not
/// read its answer.
#[derive(Clone, Debug)]
struct SharedLease(Arc<Mutex<Option<Lease>>>);

impl Drop for SharedLease {
    fn drop(&mut self) {
        drop(self.0.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

/// State of one choice.
#[derive(Debug, Default)]
struct Choice {
    logprobs: Vec<TokenLogprob>,
    /// Reader of the text; `None` for plain continuations and after the end.
    reader: Option<Reader>,
    /// Matcher of stop strings in the content of a chat's answer; `None` if the engine matches them in the whole text.
    stops: Option<StopMatcher>,
    /// Tokens so far.
    tokens: usize,
    /// Tokens of reasoning.
    reasoning_tokens: usize,
}

impl Generating {
    /// Submits a request to the engine.
    pub(super) fn start(
        state: &AppState,
        lease: Lease,
        caller: Caller,
        ready: ReadyRequest,
        pictures: Vec<Picture>,
        received: Instant,
    ) -> Result<Self, ApiError> {
        let ReadyRequest { mut request, reading, hides_reasoning, report_tokens, cache_salt } = ready;
        let prompt_tokens = request.prompt.len();
        let scored = request.score_prompt_from.map(|_| request.prompt.clone());
        let unscored_prompt = scored.unwrap_or_default();
        request.pictures = pictures;
        request.prefix_salt = caller.prefix_salt(&state.settings, &cache_salt);
        request.adapters.clone_from(&lease.adapters);
        if let Some(base) = lease.base_of_dialect() {
            // The engine knows the stop tokens and the tokenizer of the base only.
            let model = &lease.model;
            let own = model.stop_tokens.iter().filter(|token| !base.stop_tokens.contains(token));
            request.stop_tokens.extend(own.filter(|_| !request.ignore_stop_tokens));
            request.tokenizer = Some(model.tokenizer.clone());
        }
        request.tenant = caller.tenant;
        request.deadline = caller.deadline.map(Into::into);
        let mut stop_strings: Arc<[String]> = Arc::default();
        let mut matcher = None;
        if let Some(reading) = &reading {
            request.shown_tokens = reading.shown_tokens(&lease.model.tokenizer);
            request.thought = reading.thought_limit(&lease.model.tokenizer);
            // Stop strings apply to the content alone; for the engine, reasoning and calls are text.
            stop_strings = std::mem::take(&mut request.stop_strings).into();
            let stops = StopMatcher::new(stop_strings.clone(), request.include_stop_string);
            matcher = (!stop_strings.is_empty()).then_some(stops);
        }
        let choice = |_| Choice {
            reader: reading.as_ref().map(Reading::reader),
            stops: matcher.clone(),
            ..Choice::default()
        };
        let choices = (0..request.branches).map(choice).collect();
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
            // A client that does not read its answer does not keep the model loaded.
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
            report_tokens,
            hides_reasoning,
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

    /// Returns the next piece; `None` after the last one.
    ///
    /// # Errors
    /// The request failed; no piece follows.
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

    /// Returns the canonical name of the model.
    pub fn model(&self) -> &str {
        &self.name
    }

    /// Returns the number of tokens of the prompt.
    pub fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }

    /// Returns the effective sampling parameters.
    pub fn sampling(&self) -> Sampling {
        self.sampling
    }

    /// Returns the tokens used so far by all choices.
    pub fn usage_so_far(&self) -> Usage {
        self.used
    }

    /// Takes the prompt's log-probabilities, if requested. They are available from the first piece on.
    pub fn take_prompt_logprobs(&mut self) -> Option<PromptLogprobs> {
        self.prompt_logprobs.take()
    }

    /// Returns the number of choices.
    pub fn choices(&self) -> usize {
        self.choices.len()
    }

    /// Sets how long the model stays loaded after its last use; `None` is for ever.
    pub fn keep_alive(&self, time: Option<Duration>) {
        self.keep_alive.set(time);
    }

    /// Returns the model's tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// Returns the times of the request's stages.
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
                let logprob = logprob.or(self.report_tokens.then_some(f32::NAN));
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
                    (&FinishReason::Stop(token), None) if self.report_tokens => {
                        Some(TokenLogprob { token, logprob: f32::NAN, top: Vec::new() })
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
                };
                let usage = Usage {
                    prompt: usage.prompt_tokens,
                    cached: usage.cached_tokens,
                    from_host: usage.host_tokens,
                    from_disk: usage.disk_tokens,
                    completion: usage.generated_tokens,
                    reasoning: self.choices[branch].reasoning_tokens,
                    drafted: usage.drafted_tokens,
                    accepted: usage.accepted_tokens,
                };
                self.metrics.finished(usage, if reason == Finish::Length { "length" } else { "stop" });
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
            // Requests of this module never enable these events.
            Event::Embedding { .. } => {}
        }
        Ok(())
    }

    fn report_prefilled(&mut self, processed: usize, at: Instant) {
        let time =
            self.timing.started.map_or(Duration::ZERO, |started| at.saturating_duration_since(started));
        let (total, cached) = (self.prompt_tokens, self.used.cached);
        self.ready.push_back(Piece::Prefilled(Progress { total, cached, processed, time }));
    }

    /// Writes a token's text. Returns the index of the stop string that it completes.
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

    /// Writes the text that was held back. Returns the number of calls, and the index of the stop string found.
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

    /// Queues deltas. The first one carries the log-probabilities of the tokens since the last piece.
    fn write(&mut self, branch: usize, deltas: Vec<Delta>) {
        for delta in deltas {
            if self.hides_reasoning && matches!(delta, Delta::Reasoning(_)) {
                self.choices[branch].logprobs.clear();
                continue;
            }
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
            // Choices share steps: tokens with one time are not a gap.
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

/// Cuts the content of `deltas` at a stop string and returns its index. Text that may become a stop string is held
/// back.
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
            // No stop string continues past a delta that is not text.
            other => certain.extend([Delta::Text(stops.take_held()), other]),
        }
        if found.is_some() {
            break;
        }
    }
    *deltas = certain;
    found
}
