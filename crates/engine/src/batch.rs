//! Many prompts of one caller: a few are in the engine at any time, so that steps are full and others need not wait for long.

use std::{
    future::poll_fn,
    task::{Context, Poll},
};

use crate::{Event, FinishReason, Generation, Handle, Request, RequestError, SubmitError, Usage};

/// Steps of tokens of a batch that are in the engine at the same time, beyond those of its first prompt and those in flight: one, which
/// is full while results of another are read. Requests of others wait for no more than these.
const STEPS_READY: usize = 1;

/// Prompts of a batch that are in the engine in any case, if they have few tokens.
const MOST_WAITING: usize = 128;

/// Prompts whose embeddings are computed together, the longest first. Dropping it cancels those that are not finished.
#[derive(Debug)]
pub struct Batch {
    handle: Handle,
    /// Fields that all requests share.
    template: Request,
    /// Prompts that were not submitted yet, the longest last.
    waiting: Vec<(usize, Vec<u32>)>,
    running: Vec<Running>,
    /// Tokens of `running`.
    tokens: usize,
    /// Most requests that are submitted at the same time.
    most: usize,
    /// Most tokens that are submitted at the same time.
    most_tokens: usize,
}

#[derive(Debug)]
struct Running {
    index: usize,
    tokens: usize,
    generation: Generation,
    values: Option<Vec<f32>>,
}

/// The embedding of one prompt of a [`Batch`].
#[derive(Clone, Debug, PartialEq)]
pub struct Embedded {
    /// Position of the prompt in the batch.
    pub index: usize,
    /// The vector as the model computes it: its length is not made one. With [`paguro_model::Pooling::All`], the vectors of all
    /// tokens, one after another.
    pub values: Vec<f32>,
    /// Tokens of the prompt.
    pub usage: Usage,
}

/// Why a prompt of a [`Batch`] has no embedding.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum BatchError {
    /// It was not submitted.
    #[error(transparent)]
    Refused(#[from] SubmitError),
    /// It failed.
    #[error(transparent)]
    Failed(#[from] RequestError),
    /// The engine shut down.
    #[error("the engine is shutting down")]
    Cancelled,
}

impl Batch {
    /// Creates a batch of prompts with the other fields of `template`. Nothing is submitted before [`Batch::next`].
    pub fn new(handle: Handle, template: Request, prompts: Vec<Vec<u32>>) -> Self {
        let mut waiting: Vec<_> = prompts.into_iter().enumerate().collect();
        // Of equal lengths the first one comes first.
        waiting.sort_by_key(|(index, prompt)| (prompt.len(), usize::MAX - index));
        let engines = handle.engines().len();
        // As many again as can run: their turn comes while the results of others are read. Others find places in the queue.
        let most = handle
            .max_branches()
            .saturating_mul(2 * engines)
            .min(handle.queue_capacity().div_ceil(4).max(MOST_WAITING));
        let steps = handle.lanes() + STEPS_READY;
        let most_tokens = handle.step_tokens().saturating_mul(steps * engines);
        Self { handle, template, waiting, running: Vec::new(), tokens: 0, most, most_tokens }
    }

    /// Waits for the next embedding, in any order; `None` after the last one. An error names the prompt by its index and
    /// concerns no other. Nothing is lost if the future is dropped.
    pub async fn next(&mut self) -> Option<Result<Embedded, (usize, BatchError)>> {
        poll_fn(|context| self.poll_next(context)).await
    }

    fn poll_next(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Embedded, (usize, BatchError)>>> {
        if let Err(refused) = self.submit() {
            return Poll::Ready(Some(Err(refused)));
        }
        if self.running.is_empty() {
            return Poll::Ready(None);
        }
        for at in 0..self.running.len() {
            if let Poll::Ready(outcome) = self.running[at].poll(context) {
                let ended = self.running.swap_remove(at);
                self.tokens -= ended.tokens;
                return Poll::Ready(Some(outcome.map_err(|error| (ended.index, error))));
            }
        }
        Poll::Pending
    }

    /// Submits as many prompts as may be in the engine. A full queue is no error while others of this batch will leave it.
    fn submit(&mut self) -> Result<(), (usize, BatchError)> {
        while let Some((index, prompt)) = self.waiting.pop() {
            let tokens = prompt.len();
            let fits = self.running.len() < self.most && self.tokens + tokens <= self.most_tokens;
            if !fits && !self.running.is_empty() {
                self.waiting.push((index, prompt));
                break;
            }
            let request = Request { prompt, ..self.template.clone() };
            match self.handle.generate(request.clone()) {
                Ok(generation) => {
                    self.tokens += tokens;
                    self.running.push(Running { index, tokens, generation, values: None });
                }
                Err(SubmitError::QueueFull { .. } | SubmitError::QueueTokensFull { .. })
                    if !self.running.is_empty() =>
                {
                    self.waiting.push((index, request.prompt));
                    break;
                }
                Err(error) => return Err((index, error.into())),
            }
        }
        Ok(())
    }
}

impl Running {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<Embedded, BatchError>> {
        loop {
            let Poll::Ready(event) = self.generation.poll_next(context) else { return Poll::Pending };
            match event {
                Some(Event::Embedding { values }) => self.values = Some(values),
                Some(Event::Finished { reason, usage, .. }) => {
                    return Poll::Ready(match (reason, self.values.take()) {
                        (FinishReason::DeadlineExceeded, _) => Err(RequestError::DeadlineExceeded.into()),
                        (_, Some(values)) => Ok(Embedded { index: self.index, values, usage }),
                        (_, None) => Err(BatchError::Cancelled),
                    });
                }
                Some(Event::Failed(error)) => return Poll::Ready(Err(error.into())),
                Some(_) => {}
                None => return Poll::Ready(Err(BatchError::Cancelled)),
            }
        }
    }
}

/// Normalizes a vector to length 1. A zero vector is unchanged.
pub fn normalize(vector: &mut [f32]) {
    let length = vector.iter().map(|&value| f64::from(value).powi(2)).sum::<f64>().sqrt();
    if length > 0.0 {
        vector.iter_mut().for_each(|value| *value = (f64::from(*value) / length) as f32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_become_one() {
        let mut vector = [3.0, 0.0, -4.0];
        normalize(&mut vector);
        assert_eq!(vector, [0.6, 0.0, -0.8]);
        let mut zeros = [0.0; 2];
        normalize(&mut zeros);
        assert_eq!(zeros, [0.0; 2]);
    }
}
