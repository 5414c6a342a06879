//! Embeddings of whole texts.

mod reader;
mod request;

use std::time::Instant;

use paguro_engine::{Batch, BatchError, Request, RequestError, normalize};
use paguro_model::{Model, Pooling, map_texts};

pub use self::request::{EmbedRequest, Field, PromptChoice, Truncation, VectorKinds};

pub(super) use self::reader::TextReader;
use super::{Caller, Timing, Usage, off_thread};
use crate::{AppState, count::check_length, error::ApiError, metrics::RequestMetrics, models::Lease};

/// Embeddings.
#[derive(Debug)]
pub struct Embedded {
    /// Canonical name of the model.
    pub model: String,
    /// Vectors in the order of the texts; empty ones if none were requested.
    pub vectors: Vec<Vec<f32>>,
    /// Tokens of each text with their weights, if they were requested.
    pub sparse: Vec<Vec<(u32, f32)>>,
    /// Vectors of the tokens of each text, if they were requested.
    pub multi_vectors: Vec<Vec<Vec<f32>>>,
    /// Number of tokens of all texts.
    pub tokens: usize,
    /// Times of the request's stages.
    pub timing: Timing,
    /// The resident model.
    pub lease: Lease,
}

/// Most texts of one request. Their vectors are held until the last one is there.
pub const MAX_INPUTS: usize = 10_000;

/// Most tokens of all texts of one request.
pub const MAX_TOKENS: usize = 4 << 20;

/// Most bytes of the vectors of one request. As text they take three times as many. They count as memory of the
/// request's body.
const MAX_VECTOR_BYTES: usize = 128 << 20;

/// Number of vectors after which other tasks of the thread run.
const YIELD_EVERY: usize = 64;

/// Computes embeddings, pooled as the model's files specify.
///
/// # Errors
/// The model does not exist or has no embeddings, or a text does not fit.
pub async fn embed(
    state: &AppState,
    caller: Caller,
    model: &str,
    request: EmbedRequest,
) -> Result<Embedded, ApiError> {
    let received = Instant::now();
    check_length(request.inputs.len(), MAX_INPUTS, request.field.name)?;
    let lease = super::lease(state, &caller, model, request.context, request.context, None).await?;
    embed_with(state, &caller, lease, request, received).await
}

/// Computes embeddings with a model that is leased.
pub(super) async fn embed_with(
    state: &AppState,
    caller: &Caller,
    lease: Lease,
    request: EmbedRequest,
    received: Instant,
) -> Result<Embedded, ApiError> {
    let pooling = lease.model.pooling.clone();
    let pooling = pooling.map_err(|error| ApiError::invalid("model", error.to_string()))?;
    let EmbedRequest { inputs, field, prompt, dimensions, truncation, context, raw, kinds } = request;
    kinds.check(&lease)?;
    let head = &lease.model.head;
    let width = head.width(lease.model.program.hidden);
    let dimensions = dimensions.map_or(Ok(width), |count| count.within(1..=width, "dimensions"))?;
    check_length(inputs.len(), MAX_VECTOR_BYTES / (4 * dimensions.max(1)), field.name)?;
    let most = lease.handle.max_context();
    let most = context.map_or(most, |context| context.at_most(most));
    let (tolerance, bytes) = (caller.tolerance.clone(), caller.body.length());
    let work = off_thread(state, caller, &lease, move |model, is_wanted| {
        let before = prompt.text(&model.prompts, &tolerance)?;
        let reader = TextReader { model, most, truncation, field };
        let read = |(index, input)| reader.tokens(&before, input, index);
        map_texts(inputs.into_iter().enumerate().collect(), bytes, is_wanted, read)
    });
    let prompts = caller.in_time(work).await?;
    let submitted = Instant::now();
    let tokens = count_tokens(&prompts, field)?;
    let vector_bytes = prompts.len() * 4 * dimensions;
    caller.body.grow(&state.body_memory, caller.body.length().saturating_add(vector_bytes), 0).await?;
    let finish = move |vector: &mut Vec<f32>| {
        vector.truncate(dimensions);
        if !raw {
            normalize(vector);
        }
    };
    let (mut sparse, mut multi_vectors) = (Vec::new(), Vec::new());
    let vectors = if kinds == VectorKinds::default() {
        let template = Request { embedding: Some(pooling), ..template(state, caller, &lease) };
        run(state, &lease, template, prompts, field, received, |pooled| {
            let mut vector = head.embedding(pooled);
            finish(&mut vector);
            vector
        })
        .await?
    } else {
        check_tokens(&lease, kinds, tokens, field)?;
        let template = Request { embedding: Some(Pooling::All), ..template(state, caller, &lease) };
        let mut texts = Texts::new(state, &lease, template, prompts.clone(), field, received);
        let mut all: Vec<Option<TextVectors>> = prompts.iter().map(|_| None).collect();
        while let Some((index, rows)) = texts.next().await? {
            let tokens = prompts[index].clone();
            let work = off_thread(state, caller, &lease, move |model, _| {
                let mut vectors = TextVectors::of(model, pooling, kinds, &tokens, &rows);
                finish(&mut vectors.dense);
                if !raw {
                    vectors.multi.iter_mut().for_each(|vector| normalize(vector));
                }
                Ok(vectors)
            });
            all[index] = Some(caller.in_time(work).await?);
        }
        texts.finish();
        let all = complete(all)?;
        let mut vectors = Vec::with_capacity(all.len());
        for TextVectors { dense, sparse: weights, multi } in all {
            vectors.push(dense);
            sparse.push(weights);
            multi_vectors.push(multi);
        }
        vectors
    };
    let last_token = Some(Instant::now());
    let timing =
        Timing { received, submitted, started: Some(submitted), first_token: last_token, last_token };
    let model = lease.entry.name.clone();
    Ok(Embedded { model, vectors, sparse, multi_vectors, tokens, timing, lease })
}

/// All kinds of vectors of one text; those that are not requested are empty.
struct TextVectors {
    dense: Vec<f32>,
    sparse: Vec<(u32, f32)>,
    multi: Vec<Vec<f32>>,
}

impl TextVectors {
    /// Computes the vectors of a text from the hidden states of its tokens.
    fn of(model: &Model, pooling: Pooling, kinds: VectorKinds, tokens: &[u32], rows: &[f32]) -> Self {
        let head = &model.head;
        let dense =
            if kinds.dense { head.embedding(pooling.pool(rows, model.program.hidden)) } else { Vec::new() };
        let sparse = head.sparse.as_ref().filter(|_| kinds.sparse.is_some());
        let multi = head.multi_vector.as_ref().filter(|_| kinds.multi_vector.is_some());
        Self {
            dense,
            sparse: sparse.map(|head| head.weights(tokens, rows)).unwrap_or_default(),
            multi: multi.map(|head| head.vectors(rows)).unwrap_or_default(),
        }
    }
}

/// Returns the number of tokens of all texts.
///
/// # Errors
/// There are too many for one request.
pub(super) fn count_tokens(prompts: &[Vec<u32>], field: Field) -> Result<usize, ApiError> {
    let tokens = prompts.iter().map(Vec::len).sum();
    if tokens <= MAX_TOKENS {
        return Ok(tokens);
    }
    let message = format!(
        "`{}` has {tokens} tokens in {} elements; one request can have {MAX_TOKENS}; send fewer at once",
        field.name,
        prompts.len()
    );
    Err(ApiError::invalid(field.name, message))
}

/// Checks the memory of vectors and weights of single tokens.
fn check_tokens(lease: &Lease, kinds: VectorKinds, tokens: usize, field: Field) -> Result<(), ApiError> {
    let multi = lease.model.head.multi_vector.as_ref().filter(|_| kinds.multi_vector.is_some());
    let each = multi.map_or(0, |head| 4 * head.width()) + if kinds.sparse.is_some() { 8 } else { 0 };
    let most = MAX_VECTOR_BYTES / each.max(1);
    if tokens <= most {
        return Ok(());
    }
    let message = format!(
        "`{}` has {tokens} tokens; one request for vectors of tokens can have {most}; send fewer texts at once",
        field.name
    );
    Err(ApiError::invalid(field.name, message))
}

/// Returns the fields that all prompts of a request share.
pub(super) fn template(state: &AppState, caller: &Caller, lease: &Lease) -> Request {
    Request {
        max_tokens: Some(0),
        tenant: caller.tenant.clone(),
        prefix_salt: caller.prefix_salt(&state.settings, ""),
        deadline: caller.deadline.map(Into::into),
        adapters: lease.adapters.clone(),
        ..Request::default()
    }
}

/// Returns the results of `finish` for the vectors of all prompts, in their order.
pub(super) async fn run<T>(
    state: &AppState,
    lease: &Lease,
    template: Request,
    prompts: Vec<Vec<u32>>,
    field: Field,
    received: Instant,
    finish: impl Fn(Vec<f32>) -> T,
) -> Result<Vec<T>, ApiError> {
    let mut results: Vec<Option<T>> = prompts.iter().map(|_| None).collect();
    let mut texts = Texts::new(state, lease, template, prompts, field, received);
    let mut count = 0usize;
    while let Some((index, values)) = texts.next().await? {
        results[index] = Some(finish(values));
        count += 1;
        if count.is_multiple_of(YIELD_EVERY) {
            tokio::task::yield_now().await;
        }
    }
    texts.finish();
    complete(results)
}

/// Returns all results, of which none may be missing.
fn complete<T>(results: Vec<Option<T>>) -> Result<Vec<T>, ApiError> {
    let missing = || ApiError::Internal("the engine returned too few embeddings".into());
    results.into_iter().map(|result| result.ok_or_else(missing)).collect()
}

/// Prompts of one request in the engine.
struct Texts {
    batch: Batch,
    metrics: RequestMetrics,
    usage: Usage,
    field: Field,
}

impl Texts {
    fn new(
        state: &AppState,
        lease: &Lease,
        template: Request,
        prompts: Vec<Vec<u32>>,
        field: Field,
        received: Instant,
    ) -> Self {
        let metrics = state.metrics.request(&lease.entry.name, received);
        let batch = Batch::new(lease.handle.clone(), template, prompts);
        Self { batch, metrics, usage: Usage::default(), field }
    }

    /// Waits for the next vector in any order. Returns it with the index of its prompt; `None` after the last one.
    ///
    /// # Errors
    /// A prompt failed; the error names its field.
    async fn next(&mut self) -> Result<Option<(usize, Vec<f32>)>, ApiError> {
        match self.batch.next().await {
            None => Ok(None),
            Some(Ok(embedded)) if embedded.values.iter().any(|value| !value.is_finite()) => {
                self.metrics.failed();
                let param = self.field.at(embedded.index);
                Err(ApiError::Internal(format!(
                    "the model computed numbers that are not finite for `{param}`: its weights are damaged (`paguro verify` checks \
                     what is in the library)"
                )))
            }
            Some(Ok(embedded)) => {
                self.usage.prompt += embedded.usage.prompt_tokens;
                self.usage.cached += embedded.usage.cached_tokens;
                Ok(Some((embedded.index, embedded.values)))
            }
            Some(Err((index, error))) => {
                self.metrics.failed();
                Err(failure(error, &self.field.at(index)))
            }
        }
    }

    /// Counts the request as finished.
    fn finish(mut self) {
        self.metrics.finished(self.usage, "stop");
    }
}

/// Converts the error of a text in the field `param`.
fn failure(error: BatchError, param: &str) -> ApiError {
    match error {
        BatchError::Refused(error) => match ApiError::from(error) {
            ApiError::Invalid { message, .. } => ApiError::invalid(param, format!("`{param}`: {message}")),
            ApiError::ContextTooLong { tokens, limit } => {
                ApiError::InputTooLong { param: param.to_owned(), tokens, is_exact: true, limit }
            }
            other => other,
        },
        BatchError::Failed(RequestError::DeadlineExceeded) => ApiError::timeout(),
        BatchError::Failed(error) => error.into(),
        BatchError::Cancelled => ApiError::Unavailable("the server is shutting down".into()),
    }
}
