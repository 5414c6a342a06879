//! One forward pass: a ragged batch of rows over pages.

use std::{ops::Range, sync::OnceLock};

use crate::{SamplingParams, StateUse};

/// A page of K and V in the runner's arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct PageId(pub u32);

impl PageId {
    /// Page 0 is scratch: padded rows write it, nobody reads it. It also stands in block tables for pages that a
    /// sliding window has left behind.
    pub const SCRATCH: PageId = PageId(0);
}

/// One ragged batch. Prefill chunks, decodes and drafts mix freely: a sequence that decodes has one row, one that
/// prefills has as many as its chunk.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// Token of each row, `[rows]`; rows of a sequence are consecutive, in order of position.
    pub tokens: &'a [u32],
    /// Rows whose tokens only the device knows yet, in order; for these, `tokens` has any. Empty for runners that do
    /// not [carry](crate::Runner::carries) tokens from step to step.
    pub carried: &'a [Carried],
    /// The sequences, covering all rows in order.
    pub sequences: &'a [StepSequence],
    /// All block tables, one after the other; [`StepSequence::tables`] points into it.
    pub pages: &'a [PageId],
    /// What to compute at which rows.
    pub outputs: &'a [Output<'a>],
}

/// One sequence's part of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepSequence {
    /// Its rows in [`Step::tokens`].
    pub rows: Range<usize>,
    /// Position of its first row; everything before it is already in the pages.
    pub start: usize,
    /// Its block tables in [`Step::pages`]: for each KV group in turn,
    /// `ceil((start + rows) / block_size)` pages. Pages that no row of this step can see may be
    /// [`PageId::SCRATCH`].
    pub tables: Range<usize>,
    /// Its states; present if the program has some, and only then.
    pub state: Option<StateUse>,
}

impl StepSequence {
    /// Number of tokens in the pages after this step.
    pub fn len(&self) -> usize {
        self.start + self.rows.len()
    }

    /// Whether the sequence has no tokens; never the case in a valid step.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The block table of KV group `group` of `groups`, `[blocks]`.
    pub fn table<'a>(&self, pages: &'a [PageId], group: usize, groups: usize) -> &'a [PageId] {
        let tables = &pages[self.tables.clone()];
        let blocks = tables.len() / groups;
        &tables[group * blocks..][..blocks]
    }
}

/// A row that begins with what the step before has sampled, which nobody has collected yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Carried {
    /// Row of [`Step::tokens`].
    pub row: usize,
    /// Index into the [`Step::outputs`] of the step that was submitted last: one that the runner
    /// [carries](crate::Runner::carries).
    pub output: usize,
}

/// Something to compute from the end of one row.
#[derive(Clone, Copy, Debug)]
pub struct Output<'a> {
    /// Row of [`Step::tokens`]. A row may have several outputs (branches of a fork).
    pub row: usize,
    /// What.
    pub want: Want<'a>,
}

/// What an output asks for.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Want<'a> {
    /// Samples the next token.
    Sample(SampleRequest<'a>),
    /// The log-probability of a given next token.
    Score {
        /// The token.
        token: u32,
        /// How many of the best tokens to report besides.
        top: usize,
    },
    /// The whole row of logits, `[vocab]`.
    Logits,
    /// What the logits are made of: the row of the residual stream after the last norm, `[hidden]`. Costs no product
    /// with the head.
    Embedding,
}

impl Want<'_> {
    /// Whether the row's logits are needed for it.
    pub fn needs_logits(&self) -> bool {
        !matches!(self, Self::Embedding)
    }
}

/// How to sample one token. What each value means is defined by [`crate::sampling`].
#[derive(Clone, Copy, Debug)]
pub struct SampleRequest<'a> {
    /// Temperature, truncation, penalties, bias, seed.
    pub params: &'a SamplingParams,
    /// Which draw of the seed's stream this is: the number of tokens already generated.
    pub draw: u64,
    /// Tokens so far, prompt and output; penalties look at its end. Without the token of a [carried](Carried) row.
    pub history: &'a [u32],
    /// Number of tokens at the beginning of `history` that are the prompt. Frequency and presence penalties count only
    /// the tokens after them.
    pub prompt_tokens: usize,
    /// Allowed tokens; `None` allows all.
    pub mask: Option<&'a TokenMask>,
    /// Whether to report log-probabilities, and of how many of the best tokens besides the sampled one.
    pub logprobs: Option<usize>,
}

/// The tokens that one draw may choose, as a bit set.
///
/// A grammar's mask takes a while to compute and is only needed when the logits are there. So a mask may be given
/// before it is known: somebody else [fills](TokenMask::fill) it while the step runs, and whoever samples
/// [waits](TokenMask::bits) for it.
#[derive(Debug, Default)]
pub struct TokenMask {
    bits: OnceLock<Box<[u32]>>, // [ceil(vocab / 32)]
}

impl TokenMask {
    /// A mask that is known: bit `t % 32` of word `t / 32` allows token `t`; `[ceil(vocab / 32)]` words.
    pub fn new(bits: impl Into<Box<[u32]>>) -> Self {
        Self { bits: OnceLock::from(bits.into()) }
    }

    /// Makes a mask known that was not, and wakes those who wait for it; a mask that is known stays as it is.
    ///
    /// It must allow something: where [`Step::validate`] cannot look yet, a mask that allows nothing gives
    /// [`Sampled::NO_TOKEN`].
    pub fn fill(&self, bits: impl Into<Box<[u32]>>) {
        // The first one counts.
        let _ = self.bits.set(bits.into());
    }

    /// The words of the set, if they are known.
    pub fn known(&self) -> Option<&[u32]> {
        self.bits.get().map(|bits| &**bits)
    }

    /// The words of the set; waits until they are known.
    pub fn bits(&self) -> &[u32] {
        self.bits.wait()
    }
}

/// What a step computed, in the order of [`Step::outputs`]. Reused between steps.
#[derive(Clone, Debug, Default)]
pub struct StepOutput {
    /// One for each output.
    pub outcomes: Vec<Outcome>,
}

/// The answer to one [`Want`].
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// To [`Want::Sample`].
    Sampled(Sampled),
    /// To [`Want::Score`].
    Score(Score),
    /// To [`Want::Logits`].
    Logits(Vec<f32>),
    /// To [`Want::Embedding`].
    Embedding(Vec<f32>),
}

/// How likely a token is.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Score {
    /// Natural logarithm of its probability under the model: softmax of the logits before penalties, bias,
    /// temperature and truncation.
    pub logprob: f32,
    /// The best tokens in its place with their log-probabilities, best first, if asked for.
    pub top: Vec<(u32, f32)>,
}

/// A sampled token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// The token, or [`NO_TOKEN`](Sampled::NO_TOKEN).
    pub token: u32,
    /// Natural logarithm of its probability under the model: softmax of the logits before penalties, bias,
    /// temperature and truncation. `None` unless [`SampleRequest::logprobs`] asked.
    pub logprob: Option<f32>,
    /// The best tokens with their log-probabilities, best first.
    pub top: Vec<(u32, f32)>,
}

impl Sampled {
    /// Stands for the token where there is none: all logits that the mask allows are NaN or `-inf`.
    pub const NO_TOKEN: u32 = u32::MAX;
}
