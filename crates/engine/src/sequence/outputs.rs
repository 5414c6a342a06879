//! Outputs of a sequence's rows: scores of the prompt, its embedding, rows that a head continues, sampled tokens.
//!
//! [`SequenceOutputs`] alone defines their order. A plan stores those of its sequences. The step requests outputs in this
//! order, and its results are checked and applied in it.

use std::ops::Range;

use paguro_backend::{Output, OutputKind, SampleRequest, Score};

use super::Sequence;

/// Outputs of the rows of one sequence in a step, in order: scores, embeddings and rows by position, then tokens by position
/// and branch.
#[derive(Clone, Debug)]
pub(crate) struct SequenceOutputs {
    /// Positions to score.
    scores: Range<usize>,
    /// Positions with requested embeddings.
    embeddings: Range<usize>,
    /// True if their mean is requested instead.
    is_mean: bool,
    /// Positions whose rows a head for multi-token prediction continues.
    hidden: Range<usize>,
    /// Positions after which tokens are sampled.
    samples: Range<usize>,
    /// Branches that sample a token after each of these positions.
    branches: Range<usize>,
}

/// One output of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SequenceOutput {
    Score { position: usize },
    Embedding { position: usize },
    Mean { position: usize },
    Hidden { position: usize },
    Sample { position: usize, branch: usize },
}

impl SequenceOutput {
    /// Returns the position of its row.
    pub fn position(self) -> usize {
        match self {
            Self::Score { position }
            | Self::Embedding { position }
            | Self::Mean { position }
            | Self::Hidden { position }
            | Self::Sample { position, .. } => position,
        }
    }
}

impl SequenceOutputs {
    /// Returns the tokens of these branches after each of these positions.
    pub fn samples(samples: Range<usize>, branches: Range<usize>) -> Self {
        Self { scores: 0..0, embeddings: 0..0, is_mean: false, hidden: 0..0, samples, branches }
    }

    pub fn iter(&self) -> impl Iterator<Item = SequenceOutput> + use<> {
        let Self { scores, embeddings, is_mean, hidden, samples, branches } = self.clone();
        let (mean, embeddings) = match is_mean && !embeddings.is_empty() {
            true => (Some(SequenceOutput::Mean { position: embeddings.start }), 0..0),
            false => (None, embeddings),
        };
        let scores = scores.map(|position| SequenceOutput::Score { position });
        let embeddings = embeddings.map(|position| SequenceOutput::Embedding { position });
        let hidden = hidden.map(|position| SequenceOutput::Hidden { position });
        let samples = samples.flat_map(move |position| {
            branches.clone().map(move |branch| SequenceOutput::Sample { position, branch })
        });
        scores.chain(embeddings).chain(mean).chain(hidden).chain(samples)
    }

    pub fn len(&self) -> usize {
        let tokens = self.samples.len() * self.branches.len();
        let embeddings = if self.is_mean { self.embeddings.len().min(1) } else { self.embeddings.len() };
        self.scores.len() + embeddings + self.hidden.len() + tokens
    }
}

/// Outputs of a prompt that were requested: those that exist, until they are delivered.
#[derive(Debug, Default)]
pub(crate) struct PromptOutputs {
    /// Scores so far; empty after delivery.
    scores: Vec<Score>,
    scores_delivered: bool,
    /// Embeddings so far; `None` after delivery, or if none are requested.
    pool: Option<Pool>,
}

/// Embeddings of a sequence so far, in order of position so that the result does not depend on chunks.
#[derive(Debug, Default)]
struct Pool {
    /// Their sum.
    sum: Vec<f64>,
    /// All of them, one after another, if the request keeps them; or their mean, if the device has computed it.
    rows: Vec<f32>,
    /// Their number.
    count: usize,
}

impl PromptOutputs {
    /// Returns the outputs before the first step, with or without embeddings.
    pub fn new(embeds: bool) -> Self {
        Self { pool: embeds.then(Pool::default), ..Self::default() }
    }

    /// Returns the outputs of a sequence whose prompt another one computes.
    pub fn delivered() -> Self {
        Self { scores_delivered: true, ..Self::default() }
    }

    /// Adds the score of the next position with a requested score.
    pub fn add_score(&mut self, score: Score) {
        self.scores.push(score);
    }

    /// Adds the embedding of the next position with a requested embedding. `keeps_rows` is that of the request.
    pub fn add_embedding(&mut self, embedding: &[f32], keeps_rows: bool) {
        let Some(pool) = &mut self.pool else { return };
        pool.count += 1;
        if keeps_rows {
            pool.rows.extend_from_slice(embedding);
        } else {
            pool.sum.resize(embedding.len(), 0.0);
            pool.sum.iter_mut().zip(embedding).for_each(|(sum, &x)| *sum += f64::from(x));
        }
    }

    /// Sets the mean of all requested embeddings, of which there are `count`.
    pub fn set_mean(&mut self, mean: Vec<f32>, count: usize) {
        let Some(pool) = &mut self.pool else { return };
        (pool.rows, pool.count) = (mean, count);
    }
}

impl Sequence {
    /// Returns the outputs of the planned rows. If they are in several steps, only the last one has some.
    pub fn outputs(&self) -> SequenceOutputs {
        let end = self.kv.computed + self.planned.rows;
        let samples = if self.samples() { end - 1 - self.planned.drafted..end } else { 0..0 };
        SequenceOutputs {
            scores: self.scored_in(self.planned.rows),
            embeddings: self.embedded_in(self.planned.rows),
            is_mean: self.request.is_mean,
            hidden: self.hidden_in(self.planned.rows),
            ..SequenceOutputs::samples(samples, self.branches.clone())
        }
    }

    /// Appends the outputs `planned` of rows of a step. Row `first_row` of the step is that of position `start`.
    pub fn write_outputs<'a>(
        &'a self,
        (first_row, start): (usize, usize),
        planned: &SequenceOutputs,
        outputs: &mut Vec<Output<'a>>,
    ) {
        outputs.extend(planned.iter().map(|output| {
            let kind = match output {
                SequenceOutput::Score { position } => {
                    let (token, top) = (self.tokens[position + 1], self.request.logprobs.unwrap_or(0));
                    OutputKind::Score { token, top }
                }
                SequenceOutput::Embedding { .. } | SequenceOutput::Hidden { .. } => OutputKind::Embedding,
                SequenceOutput::Mean { .. } => OutputKind::Mean,
                SequenceOutput::Sample { position, branch } => {
                    OutputKind::Sample(self.sample_request(branch, position))
                }
            };
            Output { row: first_row + output.position() - start, kind }
        }));
    }

    /// Returns the sampling request of a branch for the token after `position`, which may be that of a drafted token. If the
    /// token at `position` is not known to the host, the history ends before it.
    pub fn sample_request(&self, branch: usize, position: usize) -> SampleRequest<'_> {
        let generated = position + 1 - self.tokens.prompt();
        let tokens = self.tokens.with_draft();
        let drafted = (position + 1).saturating_sub(self.tokens.len()).min(self.planned.drafted);
        let mask = match drafted.checked_sub(1) {
            Some(index) => self.drafts.mask(index, &self.sampler),
            None => self.sampler.mask(&self.request, self.tokens.generated()),
        };
        SampleRequest {
            params: &self.request.sampling[branch],
            draw: generated as u64,
            history: &tokens[..tokens.len().min(position + 1)],
            prompt_tokens: self.tokens.prompt(),
            mask,
            logprobs: self.request.logprobs,
        }
    }

    /// Returns true if the planned rows are certainly the last.
    pub fn ends(&self) -> bool {
        self.samples() && self.tokens.generated() + 1 == self.request.max_tokens
    }

    /// Returns true if the planned rows have exactly one output, a token.
    pub fn has_one_output(&self) -> bool {
        self.samples() && self.outputs().len() == 1
    }

    /// Returns true if the planned rows are the last missing ones, perhaps with drafted ones, and are followed by a sampled
    /// token.
    pub fn samples(&self) -> bool {
        self.planned.rows > 0
            && self.planned.rows - self.planned.drafted == self.remaining()
            && self.may_sample()
    }

    /// Returns true if the answer may have another token.
    pub fn may_sample(&self) -> bool {
        self.tokens.generated() < self.request.max_tokens
    }

    /// Returns the prompt positions whose scores are still missing.
    pub fn unscored(&self) -> Range<usize> {
        match self.request.score_from {
            Some(from) if !self.prompt_outputs.scores_delivered => {
                from + self.prompt_outputs.scores.len()..self.tokens.prompt() - 1
            }
            _ => 0..0,
        }
    }

    /// Returns all scores and the position of the first one, once, after the last one was computed.
    pub fn take_scores(&mut self) -> Option<(usize, Vec<Score>)> {
        let from = self.request.score_from?;
        if self.prompt_outputs.scores_delivered || !self.unscored().is_empty() {
            return None;
        }
        self.prompt_outputs.scores_delivered = true;
        Some((from, std::mem::take(&mut self.prompt_outputs.scores)))
    }

    /// Returns the positions to score among the next `rows` positions.
    fn scored_in(&self, rows: usize) -> Range<usize> {
        let unscored = self.unscored();
        let end = unscored.end.min(self.kv.computed + rows);
        unscored.start.min(end)..end
    }

    /// Returns the prompt positions whose embeddings are still missing.
    pub fn unembedded(&self) -> Range<usize> {
        match (&self.request.embedded, &self.prompt_outputs.pool) {
            (Some(all), Some(pool)) => all.start + pool.count..all.end,
            _ => 0..0,
        }
    }

    /// Returns the positions with requested embeddings among the next `rows` positions.
    fn embedded_in(&self, rows: usize) -> Range<usize> {
        let missing = self.unembedded();
        let end = missing.end.min(self.kv.computed + rows);
        missing.start.min(end)..end
    }

    /// Returns the mean of the embeddings or all of them, once, after the last one was computed.
    pub fn take_embedding(&mut self) -> Option<Vec<f32>> {
        if !self.unembedded().is_empty() {
            return None;
        }
        let Pool { sum, rows, count } = self.prompt_outputs.pool.take()?;
        if self.request.keeps_rows || self.request.is_mean {
            return Some(rows);
        }
        Some(sum.into_iter().map(|sum| (sum / count as f64) as f32).collect())
    }

    /// Returns the number of scores and embeddings of the next `rows` rows.
    pub fn outputs_in(&self, rows: usize) -> usize {
        self.scored_in(rows).len() + self.embedded_in(rows).len()
    }
}
