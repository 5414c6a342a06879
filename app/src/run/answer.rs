//! Follows one generation to its end and keeps what came of it.

use std::time::{Duration, Instant};

use paguro_engine::{Event, FinishReason, Generation, Usage};
use paguro_model::{Model, tokenizer::Tokenizer};
use serde_json::{Map, Value, json};

use crate::{
    failure::{Failure, Outcome},
    units,
};

/// What one request came to.
#[derive(Debug)]
pub struct Answer {
    /// One for each branch.
    pub branches: Vec<Branch>,
    cached_tokens: usize,
    submitted: Instant,
    /// When the first token was there.
    first: Option<Instant>,
    /// When the last one was.
    last: Option<Instant>,
}

/// One branch's answer.
#[derive(Debug, Default)]
pub struct Branch {
    /// All of its text.
    pub text: String,
    /// Its tokens with their log-probabilities, where asked for.
    tokens: Vec<Scored>,
    /// Why it ended; `None` while it runs.
    pub reason: Option<FinishReason>,
    usage: Usage,
}

/// A token with its log-probability and the best ones in its place.
#[derive(Debug)]
struct Scored {
    id: u32,
    logprob: f32,
    top: Vec<(u32, f32)>,
}

/// News of a branch, for those who show it at once.
#[derive(Debug)]
pub struct Piece<'a> {
    /// Which branch.
    pub branch: usize,
    /// The token that came, `None` at the end.
    pub token: Option<u32>,
    /// The text that is now certain; may be empty.
    pub text: &'a str,
}

/// Follows `generation`, submitted at `submitted`, and shows each piece as it comes. When showing fails, the
/// generation is dropped, and that ends it.
///
/// # Errors
/// What the engine reports, and what `show` does.
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
            // Scores were not asked for; news of other kinds is not about the answer.
            _ => {}
        }
    }
    if answer.branches.iter().any(|branch| branch.reason.is_none()) {
        return Err(Failure::new("the engine stopped before the answer was complete"));
    }
    Ok(answer)
}

impl Answer {
    /// Whether Ctrl-C ended it.
    pub fn cancelled(&self) -> bool {
        self.branches.iter().any(|branch| branch.reason == Some(FinishReason::Cancelled))
    }

    /// Tokens of the prompt.
    fn prompt_tokens(&self) -> usize {
        self.branches[0].usage.prompt_tokens
    }

    fn generated_tokens(&self) -> usize {
        self.branches.iter().map(|branch| branch.usage.generated_tokens).sum()
    }

    fn prompt_time(&self) -> Option<Duration> {
        Some(self.first?.duration_since(self.submitted))
    }

    /// Prompt tokens computed (not cached) per second, up to the first token of the answer.
    fn prompt_rate(&self) -> Option<f64> {
        units::tokens_per_second(self.prompt_tokens() - self.cached_tokens, self.prompt_time()?)
    }

    fn decode_time(&self) -> Option<Duration> {
        Some(self.last?.duration_since(self.first?))
    }

    /// Tokens per second after the first one of each branch, which belongs to the prompt's time.
    fn decode_rate(&self) -> Option<f64> {
        units::tokens_per_second(
            self.generated_tokens().saturating_sub(self.branches.len()),
            self.decode_time()?,
        )
    }

    /// The line for people: the model, counts, speeds, and what is not to be expected.
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
        parts.extend(seed.map(|seed| format!("seed {seed}")));
        parts.extend(self.remarks());
        parts.join(" · ")
    }

    /// Returns why the answer ended, unless the model ended it.
    pub fn remarks(&self) -> Option<String> {
        let mut ends: Vec<_> =
            self.branches.iter().filter_map(|branch| remark(branch.reason.as_ref()?)).collect();
        ends.dedup();
        (!ends.is_empty()).then(|| ends.join(" · "))
    }

    /// The result as one object; `seed` is `None` where nothing was drawn.
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
        if !self.tokens.is_empty() {
            // A token may be a part of a character; then `tokenize` shows its bytes.
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

/// `finish_reason` in JSON.
fn reason_name(reason: &FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop(_) | FinishReason::StopString(_) | FinishReason::Complete => "stop",
        FinishReason::Length => "length",
        FinishReason::ContextFull => "context_full",
        FinishReason::Cancelled => "cancelled",
        _ => "other",
    }
}

/// What people should know about an end that is not the model's own.
fn remark(reason: &FinishReason) -> Option<&'static str> {
    match reason {
        FinishReason::Length => Some("stopped by --max-tokens"),
        FinishReason::ContextFull => Some("stopped: the context is full (-c makes it larger)"),
        FinishReason::Cancelled => Some("stopped"),
        _ => None,
    }
}
