//! Embeddings of texts.

use std::time::Instant;

use futures_util::{StreamExt, TryStreamExt, stream};
use paguro_engine::{Event, FinishReason, Request};
use paguro_model::{Model, Pooling};

use super::{Caller, Prompt, Timing, Usage, off_thread};
use crate::{
    AppState,
    count::{ClientCount, check_length},
    error::ApiError,
    models::Lease,
};

/// A request for embeddings.
#[derive(Clone, Debug, Default)]
pub struct EmbedRequest {
    /// The texts.
    pub inputs: Vec<Prompt>,
    /// Number of leading values to keep.
    pub dimensions: Option<ClientCount>,
    /// True if texts that are too long are truncated instead of refused.
    pub truncate: bool,
    /// Maximum tokens of a text, at most the model's own limit.
    pub context: Option<ClientCount>,
    /// True if vectors are not normalized.
    pub raw: bool,
}

/// Embeddings.
#[derive(Debug)]
pub struct Embedded {
    /// Canonical name of the model.
    pub model: String,
    /// Vectors in the order of the texts.
    pub vectors: Vec<Vec<f32>>,
    /// Number of tokens of all texts.
    pub tokens: usize,
    /// Times of the request's stages.
    pub timing: Timing,
    /// The resident model.
    pub lease: Lease,
}

/// Maximum number of texts of one request.
const MAX_INPUTS: usize = 2048;

/// Number of texts of one request that are computed concurrently, so that a long list does not fill the queue.
const AT_ONCE: usize = 32;

/// Computes embeddings, pooled as the model's files specify.
///
/// # Errors
/// The model is missing or computes no embeddings, or a text exceeds the limit.
pub async fn embed(
    state: &AppState,
    caller: Caller,
    model: &str,
    request: EmbedRequest,
) -> Result<Embedded, ApiError> {
    let received = Instant::now();
    let lease = super::lease(state, &caller, model, request.context, request.context).await?;
    let pooling = lease.model.pooling.clone();
    let pooling = pooling.map_err(|error| ApiError::invalid("model", error.to_string()))?;
    let EmbedRequest { inputs, dimensions, truncate, context, raw } = request;
    check_length(inputs.len(), MAX_INPUTS, "input")?;
    let hidden = lease.model.program.hidden;
    let dimensions = dimensions.map_or(Ok(hidden), |count| count.within(1..=hidden, "dimensions"))?;
    let most = lease.handle.max_context();
    let most = context.map_or(most, |context| context.at_most(most));
    let work = off_thread(state, &caller, &lease, move |model, is_wanted| {
        let inputs = inputs.into_iter().take_while(|_| is_wanted());
        inputs.map(|input| tokens(input, model, most, truncate)).collect::<Result<Vec<_>, _>>()
    });
    let prompts = caller.in_time(work).await?;
    let submitted = Instant::now();
    let count = prompts.iter().map(Vec::len).sum();
    let vectors = stream::iter(prompts)
        .map(|prompt| one(state, &caller, &lease, prompt, pooling))
        .buffered(AT_ONCE)
        .map_ok(|mut vector| {
            vector.truncate(dimensions);
            if !raw {
                normalize(&mut vector);
            }
            vector
        })
        .try_collect()
        .await?;
    let last_token = Some(Instant::now());
    let timing =
        Timing { received, submitted, started: Some(submitted), first_token: last_token, last_token };
    Ok(Embedded { model: lease.entry.name.clone(), vectors, tokens: count, timing, lease })
}

/// Tokenizes a text. If it is truncated, a final token that the model appends to every text is kept.
fn tokens(input: Prompt, model: &Model, most: usize, truncate: bool) -> Result<Vec<u32>, ApiError> {
    let input = match input {
        Prompt::Text(text) if truncate => Prompt::Text(beginning(text, model, most)),
        other => other,
    };
    let mut tokens = input.tokens(model, most.saturating_mul(2))?;
    if tokens.len() > most {
        if !truncate {
            return Err(ApiError::ContextTooLong { tokens: tokens.len(), limit: most });
        }
        let end = tokens.last().copied().filter(|last| model.tokenizer.eos() == Some(*last));
        tokens.truncate(most);
        if let (Some(end), Some(last)) = (end, tokens.last_mut()) {
            *last = end;
        }
    }
    Ok(tokens)
}

/// Returns a prefix of a text that is long enough for `most` tokens, with a margin, because tokens near a cut differ
/// from those of the whole text.
fn beginning(mut text: String, model: &Model, most: usize) -> String {
    if text.len() <= most {
        return text;
    }
    let bytes = model.tokenizer.max_text_bytes(most.saturating_add(64));
    text.truncate(text.floor_char_boundary(bytes));
    text
}

async fn one(
    state: &AppState,
    caller: &Caller,
    lease: &Lease,
    prompt: Vec<u32>,
    pooling: Pooling,
) -> Result<Vec<f32>, ApiError> {
    let received = Instant::now();
    let request = Request {
        embedding: Some(pooling),
        max_tokens: Some(0),
        tenant: caller.tenant.clone(),
        prefix_salt: caller.prefix_salt(&state.settings, ""),
        deadline: caller.deadline.map(Into::into),
        ..Request::new(prompt)
    };
    let mut generation = lease.handle.generate(request)?;
    let mut metrics = state.metrics.request(&lease.entry.name, received);
    let mut vector = None;
    while let Some(event) = generation.next().await {
        match event {
            Event::Started { at, .. } => metrics.started(at.saturating_duration_since(received)),
            Event::Embedding { values } => vector = Some(values),
            Event::Finished { reason: FinishReason::Length | FinishReason::ContextFull, usage, .. } => {
                let (prompt, cached) = (usage.prompt_tokens, usage.cached_tokens);
                metrics.finished(Usage { prompt, cached, ..Usage::default() });
            }
            Event::Finished { reason: FinishReason::Cancelled, .. } => {
                return Err(ApiError::Unavailable("the server is shutting down".into()));
            }
            Event::Finished { reason: FinishReason::DeadlineExceeded, .. } => {
                metrics.failed();
                return Err(ApiError::timeout());
            }
            Event::Failed(error) => {
                metrics.failed();
                return Err(error.into());
            }
            _ => {}
        }
    }
    vector.ok_or_else(|| ApiError::Internal("the engine gave no embedding".into()))
}

/// Normalizes a vector to length 1. A zero vector is unchanged.
fn normalize(vector: &mut [f32]) {
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
