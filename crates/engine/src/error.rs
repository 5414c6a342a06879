//! Errors of starting an engine, of submitting a request, and of a running request.

use paguro_backend::{InvalidParam, LoadError, StepError};
use paguro_grammar::MaskError;

/// Reason for which an engine did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// An option that makes no sense.
    #[error("engine option `{option}` {problem}")]
    InvalidOption {
        /// The field of [`EngineOptions`](crate::EngineOptions).
        option: &'static str,
        /// The problem.
        problem: String,
    },
    /// The budget does not hold even one block.
    #[error(
        "the page budget holds {pages} pages of {page_bytes} bytes, but one sequence needs at least {needed}; give more memory to the pages"
    )]
    TooFewPages {
        /// Pages in the budget.
        pages: usize,
        /// Least number of pages.
        needed: usize,
        /// Bytes of a page.
        page_bytes: u64,
    },
    /// The backend refused the model.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The model computes NaN for its first tokens.
    #[error(
        "the model computes NaN: its weights are damaged; download the file again (`paguro verify` checks what is in the library)"
    )]
    NotANumber,
    /// The device failed in the first step, before there were requests.
    #[error("the model does not run: {0}")]
    Step(#[from] StepError),
    /// No thread.
    #[error("cannot start the engine thread: {0}")]
    Thread(#[from] std::io::Error),
}

/// Reason for which a request was refused. No part of it has run.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SubmitError {
    /// The queue is full. Retry later.
    #[error("{capacity} requests are waiting already; try again later")]
    QueueFull {
        /// [`EngineOptions::queue_capacity`](crate::EngineOptions::queue_capacity).
        capacity: usize,
    },
    /// Prompts of as many tokens wait as may wait. Try again later.
    #[error("prompts of {waiting} tokens are waiting already, and this one has {tokens}; try again later")]
    QueueTokensFull {
        /// Tokens of the prompt.
        tokens: usize,
        /// Tokens of the prompts that wait.
        waiting: usize,
        /// [`EngineOptions::queue_tokens`](crate::EngineOptions::queue_tokens).
        capacity: usize,
    },
    /// The prompt does not fit, or leaves no room for an answer.
    #[error(
        "the prompt has {tokens} tokens, but prompt and answer together can have {limit}; shorten it or give the engine a larger context and more pages"
    )]
    ContextTooLong {
        /// Tokens of the prompt.
        tokens: usize,
        /// Most tokens of a sequence.
        limit: usize,
    },
    /// No prompt tokens.
    #[error("the prompt is empty; a model needs at least one token to begin with")]
    EmptyPrompt,
    /// A prompt token that the model does not have.
    #[error("prompt token {token} at index {index} is not in the vocabulary of {vocab} tokens")]
    TokenOutOfRange {
        /// The token.
        token: u32,
        /// Position in the prompt.
        index: usize,
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// A field whose value makes no sense.
    #[error("`{field}` {problem}")]
    Invalid {
        /// The field of [`Request`](crate::Request).
        field: &'static str,
        /// The problem.
        problem: String,
    },
    /// A sampling value that makes no sense.
    #[error(transparent)]
    Sampling(#[from] InvalidParam),
    /// The engine is gone or going.
    #[error("the engine accepts no more requests: {reason}")]
    Stopped {
        /// The reason.
        reason: String,
    },
}

/// Reason for which a running request failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// The step that it was part of failed.
    #[error("the device failed: {0}")]
    Step(String),
    /// The grammar of [`Request::constraint`](crate::Request::constraint) allows no further token, or is too slow.
    #[error(transparent)]
    Constraint(#[from] MaskError),
    /// No token can be sampled: all logits are NaN or `-inf`.
    #[error(
        "the model computed no finite logit for the next token: its weights or those of an adapter are damaged (`paguro verify` checks what is in the library), the scale of an adapter is too large, or `logit_bias` rules every token out"
    )]
    NotFinite,
    /// A picture of [`Request::pictures`](crate::Request::pictures) cannot be read.
    #[error("a picture cannot be read: {0}")]
    Picture(String),
    /// [`Request::deadline`](crate::Request::deadline) passed before the request could start.
    #[error("the deadline passed before the request could start")]
    DeadlineExceeded,
    /// The engine ended before the request did.
    #[error("the engine stopped: {0}")]
    EngineStopped(String),
}
