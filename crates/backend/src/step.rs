//! One forward pass: a ragged batch of rows over pages.

use std::ops::Range;

use crate::{AdapterUse, SamplingParams, StateUse};

/// A page of K and V in the runner's arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct PageId(pub u32);

impl PageId {
    /// Page 0 is scratch: padded rows write it, and no row reads it. It also replaces pages before a sliding window in
    /// block tables.
    pub const SCRATCH: PageId = PageId(0);
}

/// One ragged batch of prefill chunks, decodes and drafts: a decoding sequence has one row, a prefilling one as many as
/// its chunk.
#[derive(Clone, Copy, Debug, Default)]
pub struct Step<'a> {
    /// Token of each row, `[rows]`; rows of a sequence are consecutive, in order of position. With
    /// [`TokenTypes`](crate::TokenTypes), an id is `type * vocab + token`.
    pub tokens: &'a [u32],
    /// Rows whose tokens only the device knows, in order; their entries in `tokens` are arbitrary. Empty for runners
    /// that do not [carry](crate::Runner::carries) tokens from step to step.
    pub carried: &'a [Carried],
    /// Rows whose residual stream is given instead of embedded, in order and disjoint: all rows of a program without
    /// [tokens](crate::Input::Tokens) or of one that [joins](crate::Joined) both, except for [carried](Carried::given) rows; some rows of
    /// another one with [`given_parts`](crate::Program::given_parts). None of them is carried. Their entries in `tokens` are ids all the same, and choose rows of
    /// [`LayerEmbeds::table`](crate::LayerEmbeds::table) only; they are 0 in a program without tokens.
    pub given: &'a [GivenRows<'a>],
    /// Coordinates of each row for [rotations](crate::Rope::axes), `[rows]`; empty if the coordinates of each row are its position.
    /// Positions still determine pages, order and masks.
    pub coordinates: &'a [Coordinates],
    /// Rows that see each other in layers whose group has [`KvGroup::spans`](crate::KvGroup::spans): consecutive rows of one
    /// sequence. In order and disjoint. A span is complete in its step, because its first row needs the K and V of its last one.
    pub spans: &'a [Range<usize>],
    /// Adapters of sequences, in order of the sequences. Those of one sequence are added in this order.
    pub adapters: &'a [AdapterUse],
    /// The sequences, covering all rows in order.
    pub sequences: &'a [StepSequence],
    /// All block tables, one after the other; [`StepSequence::tables`] points into it.
    pub pages: &'a [PageId],
    /// Outputs of rows.
    pub outputs: &'a [Output<'a>],
}

/// Coordinates of a row, an axis each: of images, the time, the row and the column.
pub type Coordinates = [u32; AXES];

/// Number of axes of [`Coordinates`].
pub const AXES: usize = 3;

/// Consecutive rows whose residual stream is given.
#[derive(Clone, Debug, PartialEq)]
pub struct GivenRows<'a> {
    /// Rows of [`Step::tokens`].
    pub rows: Range<usize>,
    /// `[rows, parts, hidden]`, see [`Program::given_parts`](crate::Program::given_parts); `[rows, width]` of [`Joined`](crate::Joined)
    /// rows; or rows of
    /// [`Patches`](crate::Patches) with what is added to them.
    pub values: &'a [f32],
}

/// Part of one sequence in a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepSequence {
    /// Its rows in [`Step::tokens`].
    pub rows: Range<usize>,
    /// Position of its first row; everything before it is already in the pages.
    pub start: usize,
    /// Range of its block tables in [`Step::pages`]: for each KV group, `ceil((start + rows) / block_size)` pages, or those of the
    /// `start` tokens in a program that [shares pages](crate::Program::shares_pages). Pages that no row of this step attends to may be [`PageId::SCRATCH`].
    pub tables: Range<usize>,
    /// Its states; present if the program has some, and only then.
    pub state: Option<StateUse>,
}

impl<'a> Step<'a> {
    /// Returns the given values of a row, `[parts, hidden]`; nothing if it is not given. `width` is their number.
    pub fn given_row(&self, row: usize, width: usize) -> Option<&'a [f32]> {
        let next = self.given.partition_point(|given| given.rows.end <= row);
        let given = self.given.get(next).filter(|given| given.rows.start <= row)?;
        Some(&given.values[(row - given.rows.start) * width..][..width])
    }

    /// Returns the coordinates of a row at `position`.
    pub fn coordinates_of(&self, row: usize, position: usize) -> [usize; AXES] {
        self.coordinates.get(row).map_or([position; AXES], |coordinates| coordinates.map(|at| at as usize))
    }

    /// Returns the rows that an output is computed from; none of a mean whose sequence does not exist.
    pub fn rows_of(&self, output: &Output<'_>) -> Range<usize> {
        let row = output.row;
        match output.kind {
            OutputKind::Mean => {
                let next = self.sequences.partition_point(|sequence| sequence.rows.end <= row);
                self.sequences.get(next).map_or(row..row, |sequence| sequence.rows.clone())
            }
            _ => row..row.saturating_add(1),
        }
    }

    /// Returns the adapters of a sequence.
    pub fn adapters_of(&self, sequence: usize) -> &'a [AdapterUse] {
        let first = self.adapters.partition_point(|used| used.sequence < sequence);
        let end = self.adapters.partition_point(|used| used.sequence <= sequence);
        &self.adapters[first..end]
    }

    /// Returns the spans of a sequence, as positions.
    pub fn spans_of(&self, sequence: &StepSequence) -> impl Iterator<Item = Range<usize>> + use<'a> {
        let StepSequence { rows, start, tables: _, state: _ } = sequence;
        let (first, start) = (rows.start, *start);
        let begin = self.spans.partition_point(|span| span.start < rows.start);
        let end = self.spans.partition_point(|span| span.start < rows.end);
        let position = move |row: usize| start + row - first;
        self.spans[begin..end].iter().map(move |span| position(span.start)..position(span.end))
    }
}

/// Returns the mean of rows of `width` elements, of which there is at least one. They are added in order, in double precision.
pub fn mean_of_rows<'a>(rows: impl IntoIterator<Item = &'a [f32]>, width: usize) -> Vec<f32> {
    let (mut sum, mut count) = (vec![0.0; width], 0.0);
    for row in rows {
        sum.iter_mut().zip(row).for_each(|(sum, &x)| *sum += f64::from(x));
        count += 1.0;
    }
    sum.into_iter().map(|sum| (sum / count) as f32).collect()
}

impl StepSequence {
    /// Returns the number of tokens in the pages after this step.
    pub fn len(&self) -> usize {
        self.start + self.rows.len()
    }

    /// Returns true without tokens, which is never the case in a valid step.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the block table of KV group `group` of `groups`, `[blocks]`.
    pub fn table<'a>(&self, pages: &'a [PageId], group: usize, groups: usize) -> &'a [PageId] {
        let tables = &pages[self.tables.clone()];
        let blocks = tables.len() / groups;
        &tables[group * blocks..][..blocks]
    }
}

/// A row that begins with a token of a step that was not collected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Carried {
    /// Row of [`Step::tokens`].
    pub row: usize,
    /// Index into the [`Step::outputs`] of the oldest step in flight: one that the runner [carries](crate::Runner::carries).
    pub output: usize,
    /// For a program that [joins](crate::Joined) tokens with given rows, and only then: index of the output of that step which is
    /// the row's given row, an [embedding](OutputKind::Embedding) that the runner carries.
    pub given: Option<usize>,
}

/// Inputs of a step that come after it was [prepared](crate::Runner::prepare).
#[derive(Clone, Debug, PartialEq)]
pub enum StepInputs {
    /// All of [`Step::tokens`].
    Tokens(Vec<u32>),
    /// Values of all rows of [`Step::given`], one after the other.
    Rows(Vec<f32>),
}

impl StepInputs {
    /// Calls `use_step` with a step that has these inputs, and returns its result.
    pub fn complete<T>(&self, step: &Step<'_>, use_step: impl FnOnce(&Step<'_>) -> T) -> T {
        let mut rest = match self {
            Self::Tokens(tokens) => return use_step(&Step { tokens, ..*step }),
            Self::Rows(rows) => rows.as_slice(),
        };
        let given = step.given.iter().map(|GivenRows { rows, values }| {
            let own;
            (own, rest) = rest.split_at(values.len().min(rest.len()));
            GivenRows { rows: rows.clone(), values: own }
        });
        use_step(&Step { given: &Vec::from_iter(given), ..*step })
    }
}

/// Something to compute from the end of one row.
#[derive(Clone, Copy, Debug)]
pub struct Output<'a> {
    /// Row of [`Step::tokens`]. A row may have several outputs (branches of a fork).
    pub row: usize,
    /// The requested output.
    pub kind: OutputKind<'a>,
}

/// Kind of an output.
#[derive(Clone, Copy, Debug)]
pub enum OutputKind<'a> {
    /// Samples the next token.
    Sample(SampleRequest<'a>),
    /// The log-probability of a given next token.
    Score {
        /// The token.
        token: u32,
        /// Number of most probable tokens to report as well.
        top: usize,
    },
    /// The whole row of logits, `[vocab]`.
    Logits,
    /// The input of the head: the row of the residual stream after the last norm, `[hidden]`; or the head's
    /// [projection](crate::Head::projection) of it. It needs no matmul with the head.
    Embedding,
    /// The mean of the [embeddings](OutputKind::Embedding) of all rows of the sequence that begins with this row. Only programs that
    /// are [bidirectional](crate::Program::bidirectional) have it, because their sequences are complete in a step.
    Mean,
    /// The row of the residual stream after the last layer, `[hidden]`: the input of another program that continues this one. Of a
    /// program that [merges](crate::Merged) rows, the merged row that begins with this one.
    Residual,
}

impl OutputKind<'_> {
    /// Returns true if the output needs the row's logits.
    pub fn needs_logits(&self) -> bool {
        match self {
            Self::Sample(_) | Self::Score { token: _, top: _ } | Self::Logits => true,
            Self::Embedding | Self::Mean | Self::Residual => false,
        }
    }

    /// Returns true if the output needs a program that ends in logits.
    pub fn needs_head(&self) -> bool {
        !matches!(self, Self::Residual)
    }
}

/// Sampling of one token. [`crate::sampling`] defines the parameters.
#[derive(Clone, Copy, Debug)]
pub struct SampleRequest<'a> {
    /// Temperature, truncation, penalties, bias, seed.
    pub params: &'a SamplingParams,
    /// Index of the draw in the seed's stream: the number of generated tokens.
    pub draw: u64,
    /// Tokens so far, prompt and answer, for penalties. Without the token of a [carried](Carried) row.
    pub history: &'a [u32],
    /// Number of tokens at the beginning of `history` that are the prompt. Frequency and presence penalties count only
    /// the tokens after them.
    pub prompt_tokens: usize,
    /// Allowed tokens; `None` allows all.
    pub mask: Option<&'a TokenMask>,
    /// Reports log-probabilities of the sampled token and of this many most probable tokens.
    pub logprobs: Option<usize>,
}

/// Allowed tokens of one draw, as a bit set.
#[derive(Debug)]
pub struct TokenMask {
    bits: Box<[u32]>, // [ceil(vocab / 32)]
}

impl TokenMask {
    /// Creates a mask: bit `t % 32` of word `t / 32` allows token `t`; `[ceil(vocab / 32)]` words.
    pub fn new(bits: impl Into<Box<[u32]>>) -> Self {
        Self { bits: bits.into() }
    }

    /// Returns true if the set has `token`.
    pub fn allows(&self, token: u32) -> bool {
        self.bits.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
    }

    /// Returns the words of the set.
    pub fn bits(&self) -> &[u32] {
        &self.bits
    }
}

/// Outputs of a step, in the order of [`Step::outputs`]. Reused between steps.
#[derive(Clone, Debug, Default)]
pub struct StepOutput {
    /// Results by output.
    pub outcomes: Vec<OutputValue>,
}

/// The answer to one [`OutputKind`].
#[derive(Clone, Debug, PartialEq)]
pub enum OutputValue {
    /// To [`OutputKind::Sample`].
    Sampled(Sampled),
    /// To [`OutputKind::Score`].
    Score(Score),
    /// To [`OutputKind::Logits`].
    Logits(Vec<f32>),
    /// To [`OutputKind::Embedding`] and [`OutputKind::Mean`].
    Embedding(Vec<f32>),
    /// To [`OutputKind::Residual`].
    Residual(Vec<f32>),
}

/// Probability of a token.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Score {
    /// Natural logarithm of its probability under the model: softmax of the logits before penalties, bias,
    /// temperature and truncation.
    pub logprob: f32,
    /// The most probable tokens at its position with their log-probabilities, in descending order, if requested.
    pub top: Vec<(u32, f32)>,
}

/// A sampled token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// The token, or [`NO_TOKEN`](Sampled::NO_TOKEN).
    pub token: u32,
    /// Natural logarithm of its probability under the model: softmax of the logits before penalties, bias, temperature
    /// and truncation. `None` without [`SampleRequest::logprobs`].
    pub logprob: Option<f32>,
    /// The best tokens with their log-probabilities, best first.
    pub top: Vec<(u32, f32)>,
}

impl Sampled {
    /// Replaces the token if none can be sampled: all logits that the mask allows are NaN or `-inf`.
    pub const NO_TOKEN: u32 = u32::MAX;
}
