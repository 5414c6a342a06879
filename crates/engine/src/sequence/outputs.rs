//! Outputs of a sequence's rows: scores of the prompt, its embedding, sampled tokens.
//!
//! [`SequenceOutputs`] alone defines their order. A plan stores those of its sequences. The step requests outputs in this
//! order, and its results are checked and applied in it.

use std::ops::Range;

use paguro_backend::{Output, OutputKind, SampleRequest, Score};

use super::Sequence;

/// Outputs of the planned rows of one sequence, in order: scores and embeddings by position, then a token for each branch.
#[derive(Clone, Debug)]
pub(crate) struct SequenceOutputs {
    /// Positions to score.
    scores: Range<usize>,
    /// Positions with requested embeddings.
    embeddings: Range<usize>,
    /// Branches that sample after the last row.
    branches: Range<usize>,
}

/// Embeddings of a sequence so far, in order of position so that the result does not depend on chunks.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    /// Their sum.
    sum: Vec<f64>,
    /// All of them, one after another, if the request keeps them.
    rows: Vec<f32>,
    /// Their number.
    count: usize,
}

/// One output of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SequenceOutput {
    Score { position: usize },
    Embedding { position: usize },
    Sample { branch: usize },
}

impl SequenceOutputs {
    pub fn iter(&self) -> impl Iterator<Item = SequenceOutput> + use<> {
        let Self { scores, embeddings, branches } = self.clone();
        let scores = scores.map(|position| SequenceOutput::Score { position });
        let embeddings = embeddings.map(|position| SequenceOutput::Embedding { position });
        scores.chain(embeddings).chain(branches.map(|branch| SequenceOutput::Sample { branch }))
    }

    /// Returns one token of this branch.
    pub fn sample(branch: usize) -> Self {
        Self { scores: 0..0, embeddings: 0..0, branches: branch..branch + 1 }
    }

    pub fn len(&self) -> usize {
        self.scores.len() + self.embeddings.len() + self.branches.len()
    }
}

impl Sequence {
    /// Returns the outputs of the planned rows.
    pub fn outputs(&self) -> SequenceOutputs {
        SequenceOutputs {
            scores: self.scored_in(self.rows),
            embeddings: self.embedded_in(self.rows),
            branches: if self.samples() { self.branches.clone() } else { 0..0 },
        }
    }

    /// Appends the planned outputs `planned` of the planned rows, which are the rows from `first_row` on of the step.
    pub fn write_outputs<'a>(
        &'a self,
        first_row: usize,
        planned: &SequenceOutputs,
        outputs: &mut Vec<Output<'a>>,
    ) {
        let row_of = |position| first_row + position - self.computed;
        outputs.extend(planned.iter().map(|output| match output {
            SequenceOutput::Score { position } => {
                let (token, top) = (self.tokens[position + 1], self.request.logprobs.unwrap_or(0));
                Output { row: row_of(position), kind: OutputKind::Score { token, top } }
            }
            SequenceOutput::Embedding { position } => {
                Output { row: row_of(position), kind: OutputKind::Embedding }
            }
            SequenceOutput::Sample { branch } => {
                let kind = OutputKind::Sample(self.sample_request(branch, false));
                Output { row: first_row + self.rows - 1, kind }
            }
        }));
    }

    /// Returns the sampling request of a branch after the planned rows, or with `ahead` after the row that follows
    /// them.
    pub fn sample_request(&self, branch: usize, ahead: bool) -> SampleRequest<'_> {
        SampleRequest {
            params: &self.request.sampling[branch],
            draw: (self.generated() + usize::from(ahead)) as u64,
            history: &self.tokens,
            prompt_tokens: self.request.prompt_tokens,
            mask: self.mask(),
            logprobs: self.request.logprobs,
        }
    }

    /// Returns true if the planned rows are certainly the last.
    pub fn ends(&self) -> bool {
        self.samples() && self.generated() + 1 == self.request.max_tokens
    }

    /// Returns true if the planned rows have exactly one output, a token.
    pub fn has_one_output(&self) -> bool {
        self.samples() && self.outputs().len() == 1
    }

    /// Returns true if the planned rows are the last missing ones and are followed by a sampled token.
    pub fn samples(&self) -> bool {
        self.rows > 0 && self.rows == self.remaining() && self.generated() < self.request.max_tokens
    }

    /// Returns the prompt positions whose scores are still missing.
    pub(super) fn unscored(&self) -> Range<usize> {
        match self.request.score_from {
            Some(from) if !self.scores_delivered => from + self.scores.len()..self.request.prompt_tokens - 1,
            _ => 0..0,
        }
    }

    /// Returns all scores and the position of the first one, once, after the last one was computed.
    pub fn take_scores(&mut self) -> Option<(usize, Vec<Score>)> {
        let from = self.request.score_from?;
        if self.scores_delivered || !self.unscored().is_empty() {
            return None;
        }
        self.scores_delivered = true;
        Some((from, std::mem::take(&mut self.scores)))
    }

    /// Returns the positions to score among the next `rows` positions.
    fn scored_in(&self, rows: usize) -> Range<usize> {
        let unscored = self.unscored();
        let end = unscored.end.min(self.computed + rows);
        unscored.start.min(end)..end
    }

    /// Returns the prompt positions whose embeddings are still missing.
    pub(super) fn unembedded(&self) -> Range<usize> {
        match (&self.request.embedded, &self.pool) {
            (Some(all), Some(pool)) => all.start + pool.count..all.end,
            _ => 0..0,
        }
    }

    /// Returns the positions with requested embeddings among the next `rows` positions.
    fn embedded_in(&self, rows: usize) -> Range<usize> {
        let missing = self.unembedded();
        let end = missing.end.min(self.computed + rows);
        missing.start.min(end)..end
    }

    /// Adds the embedding of the next position with a requested embedding.
    pub fn pool(&mut self, embedding: &[f32]) {
        let Some(pool) = &mut self.pool else { return };
        pool.count += 1;
        if self.request.keeps_rows {
            pool.rows.extend_from_slice(embedding);
        } else {
            pool.sum.resize(embedding.len(), 0.0);
            pool.sum.iter_mut().zip(embedding).for_each(|(sum, &x)| *sum += f64::from(x));
        }
    }

    /// Returns the mean of the embeddings or all of them, once, after the last one was computed.
    pub fn take_embedding(&mut self) -> Option<Vec<f32>> {
        if !self.unembedded().is_empty() {
            return None;
        }
        let Pool { sum, rows, count } = self.pool.take()?;
        if self.request.keeps_rows {
            return Some(rows);
        }
        Some(sum.into_iter().map(|sum| (sum / count as f64) as f32).collect())
    }

    /// Returns the number of scores and embeddings of the next `rows` rows.
    pub fn outputs_in(&self, rows: usize) -> usize {
        self.scored_in(rows).len() + self.embedded_in(rows).len()
    }
}
