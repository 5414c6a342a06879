//! Requests, their validation, and their events.

use std::{sync::Arc, time::Instant};

use paguro_backend::{SamplingParams, Score};
use paguro_model::{Pooling, tokenizer::Tokenizer};

use crate::{
    Adapter, Constraint, DraftOptions, MOST_DRAFTED, Picture, RequestError, SubmitError, ThoughtLimit,
};

/// A prompt with the options of its answers.
#[derive(Clone, Debug)]
pub struct Request {
    /// Tokens of the prompt, at least one.
    pub prompt: Vec<u32>,
    /// Pictures in the prompt, in order. The tokens in whose place their rows are have no other effect than penalties.
    pub pictures: Vec<Picture>,
    /// Number of answers. The prompt is computed once and its pages are shared. Branch `i` samples with the seed
    /// `sampling.seed + i` (wrapping), so it equals the answer of a single request with this seed.
    pub branches: usize,
    /// Maximum tokens of each answer; `None` for the rest of the context. `Some(0)` only computes the prompt, for its
    /// scores or for the prefix cache.
    pub max_tokens: Option<usize>,
    /// Minimum tokens of an answer, before which no stop token is sampled and stop strings are ignored. The end of a
    /// [`constraint`](Request::constraint) takes precedence.
    pub min_tokens: usize,
    /// Tokens that end an answer, besides the model's own. They are not part of the answer.
    pub stop_tokens: Vec<u32>,
    /// Control tokens whose names appear in the answer's text; all others write nothing. Parsers of tool calls need
    /// them.
    pub shown_tokens: Vec<u32>,
    /// Treats the model's own stop tokens as ordinary tokens.
    pub ignore_stop_tokens: bool,
    /// Texts that end an answer, wherever the borders of tokens fall.
    pub stop_strings: Vec<String>,
    /// True if the stop string is part of the answer.
    pub include_stop_string: bool,
    /// Grammar that every branch follows from its first token. Stop tokens and stop strings end an answer anywhere, the
    /// model's own stop tokens only where the grammar may end.
    pub constraint: Option<Constraint>,
    /// Bounds the reasoning of each answer; `None` leaves it to the model.
    pub thought: Option<ThoughtLimit>,
    /// Sampling parameters.
    pub sampling: SamplingParams,
    /// Reports log-probabilities of the sampled token and of this many most probable tokens.
    pub logprobs: Option<usize>,
    /// Reports, for each prompt position from this one on, the log-probability of the following prompt token, and of as
    /// many most probable tokens as in [`logprobs`](Request::logprobs). Blocks from this position on are computed even
    /// if the prefix cache contains them, because logits cannot be computed from K and V alone. They are then cached
    /// for other requests.
    pub score_prompt_from: Option<usize>,
    /// Reports the embedding of the prompt: the hidden states before the head, pooled over these tokens. Combined with
    /// `max_tokens: Some(0)` for embeddings only. [`Model::pooling`](paguro_model::Model::pooling) is the model's
    /// trained pooling.
    pub embedding: Option<Pooling>,
    /// Number of tokens at the beginning of the prompt that prompts of later turns probably share: those before the
    /// opening of an answer in a chat template; `None` for all. For sequences with states, the prefix cache stores a
    /// copy at the last end of a block among these tokens. Results do not depend on it.
    pub lasting_tokens: Option<usize>,
    /// Adapters with their scales, all of which apply.
    pub adapters: Vec<(Adapter, f32)>,
    /// Tokenizer of the answer's text; `None` for the model's own. Adapters may have tokens of their own.
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// Prefixes are shared only among requests with equal adapters, and with equal salts. The empty salt is a salt like any other.
    pub prefix_salt: Vec<u8>,
    /// Drafts of the answers. Tokens do not depend on them.
    pub drafts: DraftOptions,
    /// Reports [`Event::Prefilled`] after each step that computes a part of the prompt.
    pub report_prefill: bool,
    /// Higher ones go first. A lower one that has waited for
    /// [`max_wait_steps`](crate::EngineOptions::max_wait_steps) counts as one of the highest that wait.
    pub priority: i32,
    /// Client of the request. Among equal priorities, tenants get equal shares, and so do the requests of each tenant.
    pub tenant: Option<Arc<str>>,
    /// Deadline, checked between steps. A running answer then ends with [`FinishReason::DeadlineExceeded`]; a waiting
    /// request fails with [`RequestError::DeadlineExceeded`].
    pub deadline: Option<Instant>,
}

impl Default for Request {
    fn default() -> Self {
        Self {
            prompt: Vec::new(),
            pictures: Vec::new(),
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
            adapters: Vec::new(),
            tokenizer: None,
            prefix_salt: Vec::new(),
            drafts: DraftOptions::default(),
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

/// Events of a request, in order. On the engine thread their texts are empty; [`Generation`](crate::Generation) decodes
/// tokens.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The request left the queue.
    Started {
        /// Prompt tokens found in the prefix cache.
        cached_tokens: usize,
        /// Time at which its first step was planned, on the clock of [`Event::Token::at`].
        at: Instant,
    },
    /// A part of the prompt was computed. Only with [`Request::report_prefill`].
    Prefilled {
        /// Tokens of the prompt whose K and V exist, including those from the prefix cache. The number falls when the request is
        /// preempted.
        tokens: usize,
        /// Time at which the device had computed them.
        at: Instant,
    },
    /// Scores for [`Request::score_prompt_from`].
    PromptScores {
        /// Position of the first one.
        from: usize,
        /// Scores of `prompt[from + 1..]`, each conditioned on all tokens before it.
        scores: Vec<Score>,
    },
    /// The embedding for [`Request::embedding`], not normalized.
    Embedding {
        /// `[hidden]`, or `[tokens, hidden]` of [`Pooling::All`].
        values: Vec<f32>,
    },
    /// A branch has a new token.
    Token {
        /// Index of the branch.
        branch: usize,
        /// The token.
        token: u32,
        /// Text that is certain: without incomplete characters and beginnings of stop strings. It may be empty, and may
        /// contain text of earlier tokens. Invalid bytes write nothing.
        text: String,
        /// Natural logarithm of its probability under the model, if requested.
        logprob: Option<f32>,
        /// The most probable tokens with their log-probabilities, in descending order, if requested.
        top: Vec<(u32, f32)>,
        /// Time at which the device had sampled it.
        at: Instant,
    },
    /// A branch has ended. The last branch's end is the last event of a request.
    Finished {
        /// Index of the branch.
        branch: usize,
        /// The text that was held back: the beginning of a stop string that was not completed. An incomplete character
        /// is not part of the answer.
        text: String,
        /// Reason of the end.
        reason: FinishReason,
        /// Score of the stop token that ended the branch, if log-probabilities were requested. It is not part of the
        /// answer, so it has no [`Event::Token`].
        stop_score: Option<Score>,
        /// Tokens and times.
        usage: Usage,
    },
    /// The request failed, with all its branches; the last event.
    Failed(RequestError),
}

/// Reason for the end of a branch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model sampled this stop token.
    Stop(u32),
    /// This stop string was generated.
    StopString(String),
    /// The grammar of [`Request::constraint`] allows no further token.
    Complete,
    /// [`Request::max_tokens`] were generated.
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
    /// Prompt tokens found in the prefix cache at the start.
    pub cached_tokens: usize,
    /// Cached tokens whose K and V were read from memory of the host.
    pub host_tokens: usize,
    /// Cached tokens whose K and V were read from the disk.
    pub disk_tokens: usize,
    /// Tokens sampled, a stop token included.
    pub generated_tokens: usize,
    /// Drafted tokens that were checked.
    pub drafted_tokens: usize,
    /// Drafted tokens that were accepted: those that the answer has because of a draft.
    pub accepted_tokens: usize,
}

/// Limits that requests are checked against.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestLimits {
    /// Pictures that requests may have.
    pub pictures: PictureLimits,
    pub vocab: usize,
    /// See [`Program::token_ids`](paguro_backend::Program::token_ids).
    pub token_ids: usize,
    pub max_context: usize,
    pub max_sequences: usize,
    /// True if the model's rows attend in both directions, so that it cannot go on from a text.
    pub is_encoder: bool,
}

/// Pictures that requests may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PictureLimits {
    /// None: the model reads text only.
    TextOnly,
    /// None: the device does not run the vision tower.
    Device,
    /// Ranges of at most this many rows.
    Rows(usize),
}

impl Request {
    /// Refuses pictures that cannot be read, or that are not in the prompt.
    fn check_pictures(&self, limits: PictureLimits) -> Result<(), SubmitError> {
        let most = match limits {
            _ if self.pictures.is_empty() => return Ok(()),
            PictureLimits::Rows(most) => most,
            PictureLimits::TextOnly => {
                return refuse("pictures", "cannot be read: the model reads text only");
            }
            PictureLimits::Device => {
                return refuse("pictures", "cannot be read on this device; --device cpu reads them");
            }
        };
        let mut next = 0;
        for (index, picture) in self.pictures.iter().enumerate() {
            for rows in &picture.rows {
                if rows.start < next || rows.end <= rows.start || rows.end > self.prompt.len() {
                    let tokens = self.prompt.len();
                    let problem =
                        format!("has picture {index} at {rows:?} of {tokens} tokens, after token {next}");
                    return refuse("pictures", problem);
                }
                if rows.len() > most {
                    let problem = format!(
                        "has picture {index} of {} rows, but a step has {most}; send a smaller picture or raise --max-batch-tokens",
                        rows.len()
                    );
                    return refuse("pictures", problem);
                }
                next = rows.end;
            }
            let (all, [rows, columns]) =
                (picture.rows.iter().map(ExactSizeIterator::len).sum::<usize>(), picture.grid);
            if all == 0 || picture.rows.len() == 1 && all != rows as usize * columns as usize {
                let problem =
                    format!("has picture {index} of {rows}×{columns} rows in {all} places of the prompt");
                return refuse("pictures", problem);
            }
        }
        Ok(())
    }

    /// Refuses, by name, every field that cannot be honoured.
    pub(crate) fn check(&self, limits: RequestLimits) -> Result<(), SubmitError> {
        let RequestLimits { pictures, vocab, token_ids, max_context, max_sequences, is_encoder } = limits;
        self.check_pictures(pictures)?;
        let tokens = self.prompt.len();
        if tokens == 0 {
            return Err(SubmitError::EmptyPrompt);
        }
        if is_encoder && self.max_tokens != Some(0) {
            return refuse(
                "max_tokens",
                "must be 0: this model is an encoder, which embeds texts and writes none",
            );
        }
        if is_encoder && (self.embedding.is_none() || self.score_prompt_from.is_some()) {
            return refuse("embedding", "is all that an encoder computes");
        }
        // An answer needs room for at least one token.
        if tokens + usize::from(self.max_tokens != Some(0)) > max_context {
            return Err(SubmitError::ContextTooLong { tokens, limit: max_context });
        }
        if let Some((index, &token)) =
            self.prompt.iter().enumerate().find(|(_, token)| **token as usize >= token_ids)
        {
            return Err(SubmitError::TokenOutOfRange { token, index, vocab });
        }
        if !(1..=max_sequences).contains(&self.branches) {
            return refuse(
                "branches",
                format!("is {}; it must be between 1 and {max_sequences}", self.branches),
            );
        }
        if let Some((adapter, scale)) = self.adapters.iter().find(|(_, scale)| !scale.is_finite()) {
            return refuse("adapters", format!("has `{}` with the scale {scale}", adapter.name()));
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
        if self.drafts.most > MOST_DRAFTED {
            return refuse(
                "drafts",
                format!("are {} tokens long; at most {MOST_DRAFTED} are checked", self.drafts.most),
            );
        }
        if let Some(token) = self.drafts.prediction.iter().find(|&&token| token as usize >= vocab) {
            return refuse(
                "drafts",
                format!("have {token}, which is not in the vocabulary of {vocab} tokens"),
            );
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
        refusal_by(false, change, expected);
    }

    #[track_caller]
    fn refusal_by(is_encoder: bool, change: impl FnOnce(&mut Request), expected: Expect) {
        let mut request = Request::new(vec![1, 2, 3]);
        change(&mut request);
        let (vocab, token_ids) = (10, 10);
        let pictures = PictureLimits::TextOnly;
        let limits =
            RequestLimits { pictures, vocab, token_ids, max_context: 8, max_sequences: 4, is_encoder };
        let answer = request.check(limits).map_or_else(|error| error.to_string(), |()| "accepted".into());
        expected.assert_eq(&answer);
    }

    #[test]
    fn encoders_only_embed() {
        let embeds = |request: &mut Request| {
            (request.max_tokens, request.embedding) = (Some(0), Some(Pooling::Mean));
        };
        refusal_by(true, embeds, expect!["accepted"]);
        refusal_by(
            true,
            |r| r.embedding = Some(Pooling::Mean),
            expect!["`max_tokens` must be 0: this model is an encoder, which embeds texts and writes none"],
        );
        let scores = |r: &mut Request| {
            embeds(r);
            r.score_prompt_from = Some(0);
        };
        refusal_by(true, scores, expect!["`embedding` is all that an encoder computes"]);
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
