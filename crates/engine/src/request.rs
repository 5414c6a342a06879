//! What is asked, what is answered, and what is refused at the door.

use std::{sync::Arc, time::Instant};

use paguro_backend::{SamplingParams, Score};
use paguro_model::Pooling;

use crate::{Constraint, RequestError, SubmitError, ThoughtLimit};

/// One prompt and how to go on from it.
#[derive(Clone, Debug)]
pub struct Request {
    /// The tokens to go on from, at least one.
    pub prompt: Vec<u32>,
    /// How many answers. The prompt is computed once and its pages are shared; branch `i` samples with the seed
    /// `sampling.seed + i` (wrapping), so that each branch is the answer that this seed gives alone.
    pub branches: usize,
    /// Most tokens of each answer; `None` goes on to the end of the context. `Some(0)` computes the prompt only,
    /// for its scores or to have it in the prefix cache.
    pub max_tokens: Option<usize>,
    /// Before an answer has this many tokens, no stop token is sampled and no stop string is looked for. The end of a
    /// [`constraint`](Request::constraint) comes first, if it comes earlier.
    pub min_tokens: usize,
    /// Tokens that end an answer, besides the model's own. They are not part of the answer.
    pub stop_tokens: Vec<u32>,
    /// Control tokens that show in the answer's text by their names; the others write nothing. For those who read
    /// out of the text what a model does with them, as in calling tools.
    pub shown_tokens: Vec<u32>,
    /// Treats the model's own stop tokens as ordinary tokens.
    pub ignore_stop_tokens: bool,
    /// Texts that end an answer, wherever the borders of tokens fall.
    pub stop_strings: Vec<String>,
    /// Whether the stop string that was found is part of the answer.
    pub include_stop_string: bool,
    /// What the answer must be: every branch follows it from its first token. Stop tokens and stop strings end an
    /// answer wherever they come up, the model's own stop tokens only where the grammar may end.
    pub constraint: Option<Constraint>,
    /// Bounds the reasoning of each answer; `None` leaves it to the model.
    pub thought: Option<ThoughtLimit>,
    /// How to sample.
    pub sampling: SamplingParams,
    /// Whether to report log-probabilities, and of how many of the best tokens besides the sampled one.
    pub logprobs: Option<usize>,
    /// Reports, for each prompt position from this one on, the log-probability of the prompt token that follows, and of
    /// as many of the best tokens in its place as [`logprobs`](Request::logprobs) says. Blocks from there on are computed
    /// even if the prefix cache has them: what it keeps is K and V, and of those alone there are no logits. Once
    /// computed, the cache has them for others.
    pub score_prompt_from: Option<usize>,
    /// Reports the prompt's embedding: the hidden state that the logits are made of, of the tokens that this says. Goes
    /// with `max_tokens: Some(0)` if nothing else is wanted. [`Model::pooling`](paguro_model::Model::pooling) is what
    /// the model was trained for.
    pub embedding: Option<Pooling>,
    /// Tokens at the beginning of the prompt that prompts of later turns probably share: those before the opening of an
    /// answer that a chat template writes. `None` is all of them. Where sequences have states, the prefix cache keeps a copy
    /// at the last end of a block among these tokens. No result depends on it.
    pub lasting_tokens: Option<usize>,
    /// Prefixes are shared among requests with equal salts, and with no others. Empty is a salt like any other.
    pub prefix_salt: Vec<u8>,
    /// Reports [`Event::Prefilled`] after each step that computes a part of the prompt.
    pub report_prefill: bool,
    /// Higher ones go first. A lower one that has waited for
    /// [`max_wait_steps`](crate::EngineOptions::max_wait_steps) counts as one of the highest that wait.
    pub priority: i32,
    /// The client that the request counts for. Among equal priorities, tenants get equal shares of what runs, and so do
    /// the requests of one tenant, or of none.
    pub tenant: Option<Arc<str>>,
    /// When the answer is of no use any more. Looked at between steps: what there is by then ends with
    /// [`FinishReason::DeadlineExceeded`]; a request that has not started fails with
    /// [`RequestError::DeadlineExceeded`].
    pub deadline: Option<Instant>,
}

impl Default for Request {
    fn default() -> Self {
        Self {
            prompt: Vec::new(),
            branches: 1,
            max_tokens: None,
            min_tokens: 0,
            stop_tokens: Vec::new(),
            shown_tokens: Vec::new(),
            ignore_stop_tokens: false,
            stop_strings: Vec::new(),
            include_stop_string: false,
            constraint: None,
            thought: None,
            sampling: SamplingParams::default(),
            logprobs: None,
            score_prompt_from: None,
            embedding: None,
            lasting_tokens: None,
            prefix_salt: Vec::new(),
            report_prefill: false,
            priority: 0,
            tenant: None,
            deadline: None,
        }
    }
}

impl Request {
    /// Greedy decoding after this prompt, to a stop token or to the end of the context.
    pub fn new(prompt: Vec<u32>) -> Self {
        Self { prompt, ..Self::default() }
    }
}

/// What happens to a request, in order.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Event {
    /// It left the queue.
    Started {
        /// Prompt tokens whose K and V came from the prefix cache.
        cached_tokens: usize,
        /// When its first step was planned: on the clock of [`Event::Token::at`], however late it is read.
        at: Instant,
    },
    /// A part of the prompt is computed. Comes only where [`Request::report_prefill`] asks for it.
    Prefilled {
        /// Tokens of the prompt whose K and V exist, those from the prefix cache included. Less than before where a request
        /// has lost its pages to another one.
        tokens: usize,
        /// When the device had computed them.
        at: Instant,
    },
    /// The scores that [`Request::score_prompt_from`] asked for.
    PromptScores {
        /// Position of the first one.
        from: usize,
        /// Of `prompt[from + 1..]`, each given all tokens before it.
        scores: Vec<Score>,
    },
    /// The embedding that [`Request::embedding`] asked for, as the model gives it: its length is not made one.
    Embedding {
        /// `[hidden]`
        values: Vec<f32>,
    },
    /// A branch has a new token.
    Token {
        /// Which branch.
        branch: usize,
        /// The token.
        token: u32,
        /// Text that is now certain: never half a character and never the beginning of a stop string; so it may be
        /// empty, and may contain what earlier tokens began. Bytes that are no character write nothing.
        text: String,
        /// Natural logarithm of its probability under the model, if asked for.
        logprob: Option<f32>,
        /// The best tokens with their log-probabilities, best first, if asked for.
        top: Vec<(u32, f32)>,
        /// When the device had sampled it.
        at: Instant,
    },
    /// A branch has ended. The last branch's end is the last event of a request.
    Finished {
        /// Which branch.
        branch: usize,
        /// The text that was held back so far: the beginning of a stop string that did not come. A character that was
        /// never completed is not part of the answer.
        text: String,
        /// Why.
        reason: FinishReason,
        /// How likely the stop token was that ended it, if log-probabilities were asked for and one did: it is not part
        /// of the answer, so it is no [`Event::Token`].
        stop_score: Option<Score>,
        /// What it took.
        usage: Usage,
    },
    /// The request failed, with all its branches; the last event.
    Failed(RequestError),
}

/// Why a branch ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FinishReason {
    /// The model sampled this stop token.
    Stop(u32),
    /// This stop string came up.
    StopString(String),
    /// Nothing may follow: [`Request::constraint`] is at its end.
    Complete,
    /// [`Request::max_tokens`] are there.
    Length,
    /// The context is full before [`Request::max_tokens`] was reached.
    ContextFull,
    /// [`Request::deadline`] has passed.
    DeadlineExceeded,
    /// The caller or the engine's shutdown ended it.
    Cancelled,
}

/// Tokens of a branch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of these, tokens that came from the prefix cache when the request started.
    pub cached_tokens: usize,
    /// Of these, tokens whose K and V came from the disk.
    pub disk_tokens: usize,
    /// Tokens sampled, a stop token included.
    pub generated_tokens: usize,
}

/// What the engine thread tells a [`Generation`](crate::Generation): an [`Event`] without text.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Signal {
    Started { cached_tokens: usize, at: Instant },
    Prefilled { tokens: usize, at: Instant },
    PromptScores { from: usize, scores: Vec<Score> },
    Embedding { values: Vec<f32> },
    Token { branch: usize, token: u32, logprob: Option<f32>, top: Vec<(u32, f32)>, at: Instant },
    Finished { branch: usize, reason: FinishReason, stop_score: Option<Score>, usage: Usage },
    Failed(RequestError),
}

/// What a request is checked against.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestLimits {
    pub vocab: usize,
    pub max_context: usize,
    pub max_sequences: usize,
}

impl Request {
    /// Refuses, by name, whatever cannot be honoured.
    pub(crate) fn check(&self, limits: RequestLimits) -> Result<(), SubmitError> {
        let RequestLimits { vocab, max_context, max_sequences } = limits;
        let tokens = self.prompt.len();
        if tokens == 0 {
            return Err(SubmitError::EmptyPrompt);
        }
        // An answer needs room for at least one token.
        if tokens + usize::from(self.max_tokens != Some(0)) > max_context {
            return Err(SubmitError::ContextTooLong { tokens, limit: max_context });
        }
        if let Some((index, &token)) =
            self.prompt.iter().enumerate().find(|(_, token)| **token as usize >= vocab)
        {
            return Err(SubmitError::TokenOutOfRange { token, index, vocab });
        }
        if !(1..=max_sequences).contains(&self.branches) {
            return refuse(
                "branches",
                format!("is {}; it must be between 1 and {max_sequences}", self.branches),
            );
        }
        if self.max_tokens.is_some_and(|most| most < self.min_tokens) {
            return refuse("min_tokens", format!("is {}, which is more than `max_tokens`", self.min_tokens));
        }
        if let Some(token) = self.stop_tokens.iter().find(|&&token| token as usize >= vocab) {
            return refuse(
                "stop_tokens",
                format!("has {token}, which is not in the vocabulary of {vocab} tokens"),
            );
        }
        let closing = self.thought.iter().flat_map(|thought| &thought.closing);
        if let Some(token) = closing.into_iter().find(|&&token| token as usize >= vocab) {
            return refuse(
                "thought",
                format!("is closed with {token}, which is not in the vocabulary of {vocab} tokens"),
            );
        }
        if self.stop_strings.iter().any(String::is_empty) {
            return refuse("stop_strings", "has an empty string, which would end every answer at once");
        }
        if self.logprobs.is_some_and(|count| count > vocab) {
            return refuse("logprobs", format!("asks for more tokens than the vocabulary has ({vocab})"));
        }
        if self.score_prompt_from.is_some_and(|from| from >= tokens) {
            return refuse("score_prompt_from", format!("is outside of the prompt of {tokens} tokens"));
        }
        Ok(self.sampling.check(vocab)?)
    }
}

fn refuse<T>(field: &'static str, problem: impl Into<String>) -> Result<T, SubmitError> {
    Err(SubmitError::Invalid { field, problem: problem.into() })
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};

    use super::*;

    fn refusal(change: impl FnOnce(&mut Request), expected: Expect) {
        let mut request = Request::new(vec![1, 2, 3]);
        change(&mut request);
        let limits = RequestLimits { vocab: 10, max_context: 8, max_sequences: 4 };
        let answer = request.check(limits).map_or_else(|error| error.to_string(), |()| "accepted".into());
        expected.assert_eq(&answer);
    }

    #[test]
    fn every_field_is_honoured_or_refused_by_name() {
        refusal(|_| {}, expect!["accepted"]);
        refusal(
            |r| r.prompt.clear(),
            expect!["the prompt is empty; a model needs at least one token to begin with"],
        );
        refusal(|r| r.prompt = vec![1; 7], expect!["accepted"]);
        refusal(
            |r| r.prompt = vec![1; 8],
            expect![
                "the prompt has 8 tokens, but prompt and answer together can have 8; shorten it or give the engine a larger context and more pages"
            ],
        );
        refusal(
            |r| {
                r.prompt = vec![1; 8];
                r.max_tokens = Some(0);
            },
            expect!["accepted"],
        );
        refusal(
            |r| r.prompt[1] = 10,
            expect!["prompt token 10 at index 1 is not in the vocabulary of 10 tokens"],
        );
        refusal(|r| r.branches = 0, expect!["`branches` is 0; it must be between 1 and 4"]);
        refusal(|r| r.branches = 5, expect!["`branches` is 5; it must be between 1 and 4"]);
        refusal(
            |r| (r.min_tokens, r.max_tokens) = (3, Some(2)),
            expect!["`min_tokens` is 3, which is more than `max_tokens`"],
        );
        refusal(
            |r| r.stop_tokens = vec![9, 10],
            expect!["`stop_tokens` has 10, which is not in the vocabulary of 10 tokens"],
        );
        refusal(
            |r| r.stop_strings = vec!["a".into(), String::new()],
            expect!["`stop_strings` has an empty string, which would end every answer at once"],
        );
        refusal(
            |r| r.logprobs = Some(11),
            expect!["`logprobs` asks for more tokens than the vocabulary has (10)"],
        );
        refusal(
            |r| r.score_prompt_from = Some(3),
            expect!["`score_prompt_from` is outside of the prompt of 3 tokens"],
        );
        refusal(
            |r| r.sampling.temperature = -0.1,
            expect!["temperature must be finite, 0 or more, not -0.1"],
        );
        refusal(
            |r| r.sampling.temperature = f32::NAN,
            expect!["temperature must be finite, 0 or more, not NaN"],
        );
        refusal(|r| r.sampling.top_p = 1.5, expect!["top_p must be between 0 and 1, not 1.5"]);
        refusal(|r| r.sampling.top_p = f32::NAN, expect!["top_p must be between 0 and 1, not NaN"]);
        refusal(|r| r.sampling.min_p = -1.0, expect!["min_p must be between 0 and 1, not -1"]);
        refusal(
            |r| r.sampling.repetition_penalty = 0.0,
            expect!["repetition_penalty must be finite and more than 0, not 0"],
        );
        refusal(
            |r| r.sampling.frequency_penalty = f32::INFINITY,
            expect!["frequency_penalty must be finite, not inf"],
        );
        refusal(
            |r| r.sampling.presence_penalty = f32::NAN,
            expect!["presence_penalty must be finite, not NaN"],
        );
        refusal(
            |r| r.sampling.logit_bias = vec![(10, 1.0)],
            expect!["logit_bias must be of tokens in the vocabulary, not token 10"],
        );
        refusal(
            |r| r.sampling.logit_bias = vec![(1, f32::NAN)],
            expect!["logit_bias must be a number, not NaN"],
        );
    }
}
