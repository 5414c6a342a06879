//! Collection of a generation's events and statistics.

use std::time::{Duration, Instant};

use paguro_engine::{Event, FinishReason, Generation, Usage};
use paguro_model::{Model, tokenizer::Tokenizer};
use paguro_server::stage_times;
use serde_json::{Map, Value, json};

use crate::{
    failure::{Failure, Outcome},
    units,
};

/// Result of a request.
#[derive(Debug)]
pub struct Answer {
    /// Result of each branch.
    pub branches: Vec<Branch>,
    cached_tokens: usize,
    submitted: Instant,
    /// Time of the first token.
    first: Option<Instant>,
    /// Time of the last token.
    last: Option<Instant>,
}

/// Answer of one branch.
#[derive(Debug, Default)]
pub struct Branch {
    /// All of its text.
    pub text: String,
    /// Its tokens with log-probabilities, if requested.
    tokens: Vec<Scored>,
    /// Reason of the end; `None` while it runs.
    pub reason: Option<FinishReason>,
    usage: Usage,
}

/// A token with its log-probability and the most probable alternatives.
#[derive(Debug)]
struct Scored {
    id: u32,
    logprob: f32,
    top: Vec<(u32, f32)>,
}

/// A new part of a branch, for display.
#[derive(Debug)]
pub struct Piece<'a> {
    /// Index of the branch.
    pub branch: usize,
    /// The token; `None` at the end.
    pub token: Option<u32>,
    /// The text that is certain; may be empty.
    pub text: &'a str,
}

/// Follows `generation`, submitted at `submitted`, and calls `show` with each piece. If `show` fails, the generation is
/// dropped, which ends it.
///
/// # Errors
/// The error of the engine or of `show`.
pub fn follow(
    mut generation: Generation,
    branches: usize,
    submitted: Instant,
    mut show: impl FnMut(Piece<'_>) -> Outcome<()>,
) -> Outcome<Answer> {
    let branches = (0..branches).map(|_| Branch::default()).collect();
    let mut answer = Answer { branches, cached_tokens: 0, submitted, first: None, last: None };
    while let Some(event) = generation.next_blocking() {
        match event {
            Event::Started { cached_tokens, .. } => answer.cached_tokens = cached_tokens,
            Event::Token { branch, token, text, logprob, top, at } => {
                answer.first.get_or_insert(at);
                answer.last = Some(at);
                let state = &mut answer.branches[branch];
                state.text += &text;
                if let Some(logprob) = logprob {
                    state.tokens.push(Scored { id: token, logprob, top });
                }
                show(Piece { branch, token: Some(token), text: &text })?;
            }
            Event::Finished { branch, text, reason, usage, .. } => {
                let state = &mut answer.branches[branch];
                state.text += &text;
                state.reason = Some(reason);
                state.usage = usage;
                show(Piece { branch, token: None, text: &text })?;
            }
            Event::Failed(error) => return Err(Failure::from_error(&error)),
            // Requests of `run` never enable these events.
            Event::Prefilled { .. } | Event::PromptScores { .. } | Event::Embedding { .. } => {}
        }
    }
    if answer.branches.iter().any(|branch| branch.reason.is_none()) {
        return Err(Failure::new("the engine stopped before the answer was complete"));
    }
    Ok(answer)
}

impl Answer {
    /// Returns true if Ctrl-C ended the answer.
    pub fn cancelled(&self) -> bool {
        self.branches.iter().any(|branch| branch.reason == Some(FinishReason::Cancelled))
    }

    /// Returns the number of tokens of the prompt.
    fn prompt_tokens(&self) -> usize {
        self.branches[0].usage.prompt_tokens
    }

    fn generated_tokens(&self) -> usize {
        self.branches.iter().map(|branch| branch.usage.generated_tokens).sum()
    }

    /// Returns the times of the prompt and of the answer's tokens, neither of which is 0.
    fn times(&self) -> Option<(Duration, Duration)> {
        let (first, last) = (self.first?, self.last?);
        let prompt = first.duration_since(self.submitted);
        Some(stage_times(prompt, last.duration_since(first), self.prompt_tokens() - self.cached_tokens))
    }

    fn prompt_time(&self) -> Option<Duration> {
        self.times().map(|times| times.0)
    }

    /// Returns the computed prompt tokens per second, up to the first token of the answer.
    fn prompt_rate(&self) -> Option<f64> {
        units::tokens_per_second(self.prompt_tokens() - self.cached_tokens, self.prompt_time()?)
    }

    fn decode_time(&self) -> Option<Duration> {
        self.times().map(|times| times.1)
    }

    /// Returns the tokens per second after the first one of each branch, which belongs to the prefill.
    fn decode_rate(&self) -> Option<f64> {
        units::tokens_per_second(
            self.generated_tokens().saturating_sub(self.branches.len()).max(1),
            self.decode_time()?,
        )
    }

    /// Returns the status line: model, counts, speeds and remarks.
    pub fn status(&self, model: &str, seed: Option<u64>) -> String {
        let speed =
            |rate: Option<f64>| rate.map(|rate| format!(", {} tok/s", units::rate(rate))).unwrap_or_default();
        let mut prompt = format!("prompt {}", units::plural(self.prompt_tokens(), "token"));
        if self.cached_tokens > 0 {
            prompt += &format!(" ({} cached)", self.cached_tokens);
        }
        let mut parts = vec![
            model.to_owned(),
            prompt + &speed(self.prompt_rate()),
            format!(
                "answer {}{}",
                units::plural(self.generated_tokens(), "token"),
                speed(self.decode_rate())
            ),
        ];
        let sum =
            |of: fn(&Usage) -> usize| self.branches.iter().map(|branch| of(&branch.usage)).sum::<usize>();
        let (drafted, accepted) = (sum(|usage| usage.drafted_tokens), sum(|usage| usage.accepted_tokens));
        if drafted > 0 {
            parts.push(format!("{accepted} of {drafted} drafted tokens accepted"));
        }
        parts.extend(seed.map(|seed| format!("seed {seed}")));
        parts.extend(self.remarks());
        parts.join(" · ")
    }

    /// Returns the reason of the end, unless the model ended the answer.
    pub fn remarks(&self) -> Option<String> {
        let mut ends: Vec<_> =
            self.branches.iter().filter_map(|branch| remark(branch.reason.as_ref()?)).collect();
        ends.dedup();
        (!ends.is_empty()).then(|| ends.join(" · "))
    }

    /// Returns the result as a JSON object; `seed` is `None` for greedy decoding.
    pub fn json(&self, model: &Model, seed: u64, load_time: Duration) -> Map<String, Value> {
        let milliseconds = |time: Duration| units::rounded(time.as_secs_f64() * 1e3);
        let mut object = Map::new();
        object.insert("model".into(), json!(model.name));
        object.extend(self.branches[0].json(&model.tokenizer));
        object.insert("prompt_tokens".into(), json!(self.prompt_tokens()));
        object.insert("cached_tokens".into(), json!(self.cached_tokens));
        object.insert("seed".into(), json!(seed));
        if self.branches.len() > 1 {
            object.insert(
                "branches".into(),
                self.branches.iter().map(|branch| Value::Object(branch.json(&model.tokenizer))).collect(),
            );
        }
        object.insert(
            "timings".into(),
            json!({
                "load_ms": milliseconds(load_time),
                "prompt_ms": self.prompt_time().map(milliseconds),
                "prompt_tokens_per_second": self.prompt_rate().map(units::rounded),
                "answer_ms": self.decode_time().map(milliseconds),
                "answer_tokens_per_second": self.decode_rate().map(units::rounded),
            }),
        );
        object
    }
}

impl Branch {
    fn json(&self, tokenizer: &Tokenizer) -> Map<String, Value> {
        let mut object = Map::new();
        object.insert("text".into(), json!(self.text));
        if let Some(reason) = &self.reason {
            object.insert("finish_reason".into(), json!(reason_name(reason)));
        }
        if let Some(FinishReason::StopString(text)) = &self.reason {
            object.insert("stop".into(), json!(text));
        }
        object.insert("answer_tokens".into(), json!(self.usage.generated_tokens));
        object.insert("drafted_tokens".into(), json!(self.usage.drafted_tokens));
        object.insert("accepted_tokens".into(), json!(self.usage.accepted_tokens));
        if !self.tokens.is_empty() {
            // A token may be a part of a character; `tokenize` prints its bytes.
            let token = |id: u32, logprob: f32| json!({"id": id, "text": String::from_utf8_lossy(tokenizer.token_bytes(id)), "logprob": logprob});
            let scored = self.tokens.iter().map(|Scored { id, logprob, top }| {
                let mut value = token(*id, *logprob);
                value["top"] = top.iter().map(|(id, logprob)| token(*id, *logprob)).collect();
                value
            });
            object.insert("logprobs".into(), scored.collect());
        }
        object
    }
}

/// Returns the value of `finish_reason`.
fn reason_name(reason: &FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop(_) | FinishReason::StopString(_) | FinishReason::Complete => "stop",
        FinishReason::Length => "length",
        FinishReason::ContextFull => "context_full",
        FinishReason::Cancelled => "cancelled",
        FinishReason::DeadlineExceeded => "deadline_exceeded",
    }
}

/// Returns a remark on an end that the model did not choose.
fn remark(reason: &FinishReason) -> Option<&'static str> {
    match reason {
        FinishReason::Length => Some("stopped by --max-tokens"),
        FinishReason::ContextFull => Some("stopped: the context is full (-c makes it larger)"),
        FinishReason::Cancelled => Some("stopped"),
        FinishReason::DeadlineExceeded => Some("stopped: its time is over"),
        FinishReason::Stop(_) | FinishReason::StopString(_) | FinishReason::Complete => None,
    }
}
