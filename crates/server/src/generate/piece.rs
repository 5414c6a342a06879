//! Pieces of an answer, common to all APIs.

use std::time::{Duration, Instant};

/// A part of an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Piece {
    /// More of a choice.
    Delta {
        /// Index of the choice, below `n`.
        choice: usize,
        /// The new part.
        delta: Delta,
        /// Tokens since the last piece of this choice, if requested.
        logprobs: Vec<TokenLogprob>,
    },
    /// Progress of the prefill, if requested.
    Prefilled(Progress),
    /// End of a choice. The end of the last choice is the last piece.
    Finished {
        /// Index of the choice.
        choice: usize,
        /// Reason of the end.
        reason: Finish,
        /// Tokens since the last piece of this choice, if requested.
        logprobs: Vec<TokenLogprob>,
        /// The stop token that ended it, if requested. It is not part of the answer.
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
    /// Prompt tokens found in the prefix cache.
    pub cached: usize,
    /// Tokens whose K and V exist, including those from the prefix cache.
    pub processed: usize,
    /// Time since the request left the queue.
    pub time: Duration,
}

/// A new part of a choice. Its text is never empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delta {
    /// Text of the answer.
    Text(String),
    /// Text of the reasoning before the answer.
    Reasoning(String),
    /// Beginning of a tool call.
    ToolCall {
        /// Index of the call in its choice, from 0.
        index: usize,
        /// Id of the call.
        id: String,
        /// Name of the tool.
        name: String,
    },
    /// More of a call's arguments.
    ToolArguments {
        /// Index of the call.
        index: usize,
        /// A part of the JSON text.
        text: String,
    },
}

/// Reason of the end of a choice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model ended its answer.
    Stop,
    /// This stop string occurred.
    StopString(String),
    /// The token limit is reached, or the context is full.
    Length,
    /// The model called tools.
    ToolCalls,
}

/// A token with its log-probability.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub token: u32,
    /// Natural logarithm of its probability; NaN if only tokens are requested.
    pub logprob: f32,
    /// The most probable tokens at its position, best first.
    pub top: Vec<(u32, f32)>,
}

/// Tokens of a prompt with their log-probabilities, each conditioned on the tokens before it.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptLogprobs {
    /// The first token, which has no probability.
    pub first: u32,
    /// All other tokens.
    pub rest: Vec<TokenLogprob>,
}

/// Tokens of a request, or of one choice of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Prompt tokens found in the prefix cache.
    pub cached: usize,
    /// Cached tokens that were read from memory of the host.
    pub from_host: usize,
    /// Cached tokens that were read from the disk.
    pub from_disk: usize,
    /// Tokens of the answer.
    pub completion: usize,
    /// Tokens of the answer that are reasoning.
    pub reasoning: usize,
    /// Drafted tokens that were checked.
    pub drafted: usize,
    /// Drafted tokens that are part of the answer.
    pub accepted: usize,
}

/// Effective sampling parameters of an answer: of the request, the library or the model.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)] // named as the fields of `SamplingParams`
pub struct Sampling {
    pub temperature: f32,
    pub top_p: f32,
    pub frequency_penalty: f32,
    pub presence_penalty: f32,
}

/// Times of a request's stages so far.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Arrival of the request.
    pub received: Instant,
    /// Start of waiting in the engine's queue.
    pub submitted: Instant,
    /// End of waiting in the queue.
    pub started: Option<Instant>,
    /// Time of the first token.
    pub first_token: Option<Instant>,
    /// Time of the newest token.
    pub last_token: Option<Instant>,
}

impl Usage {
    /// Adds the usage of one more choice. All choices share the prompt.
    pub fn add_choice(&mut self, choice: Self) {
        self.prompt = choice.prompt;
        self.cached = choice.cached;
        self.from_host = choice.from_host;
        self.from_disk = choice.from_disk;
        self.completion += choice.completion;
        self.reasoning += choice.reasoning;
        self.drafted += choice.drafted;
        self.accepted += choice.accepted;
    }

    /// Returns the sum of the usage of several prompts.
    pub fn of_prompts(prompts: &[Self]) -> Self {
        prompts.iter().fold(Self::default(), |sum, of| Self {
            prompt: sum.prompt + of.prompt,
            cached: sum.cached + of.cached,
            from_host: sum.from_host + of.from_host,
            from_disk: sum.from_disk + of.from_disk,
            completion: sum.completion + of.completion,
            reasoning: sum.reasoning + of.reasoning,
            drafted: sum.drafted + of.drafted,
            accepted: sum.accepted + of.accepted,
        })
    }
}

impl Timing {
    /// Returns the times of the prompt's prefill, of which `computed` tokens were not cached, and of the answer's tokens;
    /// see [`stage_times`].
    pub fn stages(&self, computed: usize) -> (Duration, Duration) {
        let Some((first, last)) = self.first_token.zip(self.last_token) else { return Default::default() };
        let prefill = self.started.map_or(Duration::ZERO, |started| first.saturating_duration_since(started));
        stage_times(prefill, last.saturating_duration_since(first), computed)
    }
}

/// Returns the times of a prompt's prefill, of which `computed` tokens were not cached, and of the answer's tokens. `prefill`
/// ends with the first token, and `decode` begins with it.
///
/// The step that computes the end of the prompt also samples the first token. So the time of an answer of one token is its
/// share of the prefill. Neither time is 0, because clients divide by it.
pub fn stage_times(prefill: Duration, decode: Duration, computed: usize) -> (Duration, Duration) {
    let least = Duration::from_nanos(1);
    if !decode.is_zero() {
        return (prefill.max(least), decode);
    }
    let steps = u32::try_from(computed).unwrap_or(u32::MAX).saturating_add(1);
    let decode = (prefill / steps).max(least);
    (prefill.saturating_sub(decode).max(least), decode)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_stage_takes_no_time() {
        let milliseconds = Duration::from_millis;
        let nanosecond = Duration::from_nanos(1);
        for (prefill, decode, computed, expected) in [
            (milliseconds(90), milliseconds(50), 8, (milliseconds(90), milliseconds(50))),
            (milliseconds(90), Duration::ZERO, 8, (milliseconds(80), milliseconds(10))),
            (Duration::ZERO, Duration::ZERO, 8, (nanosecond, nanosecond)),
            (nanosecond, Duration::ZERO, 0, (nanosecond, nanosecond)),
        ] {
            assert_eq!(stage_times(prefill, decode, computed), expected, "{prefill:?} {decode:?} {computed}");
        }
    }
}
