//! Embeddings of whole texts.

use std::time::Instant;

use paguro_engine::{Batch, BatchError, Request, RequestError, normalize};
use paguro_model::{
    Model, Pooling, Prompts, TextRole,
    tokenizer::{Cut, SpecialTokens},
};

use super::{Caller, Prompt, Timing, Usage, off_thread, request::check_text};
use crate::{
    AppState,
    count::{ClientCount, check_length},
    error::ApiError,
    metrics::RequestMetrics,
    models::Lease,
    wire::Tolerance,
};

/// Texts whose embeddings a request asks for.
#[derive(Clone, Debug)]
pub struct EmbedRequest {
    /// The texts.
    pub inputs: Vec<Prompt>,
    /// The field that they were in.
    pub field: Field,
    /// Text of the model that is put before each of them.
    pub prompt: PromptChoice,
    /// Number of leading values to keep.
    pub dimensions: Option<ClientCount>,
    /// Treatment of texts that are too long.
    pub truncation: Truncation,
    /// Most tokens of a text, at most the model's own bound.
    pub context: Option<ClientCount>,
    /// True if vectors are not normalized.
    pub raw: bool,
    /// Kinds of vectors.
    pub kinds: VectorKinds,
}

impl EmbedRequest {
    /// A request for vectors of length one. Texts that are too long are refused.
    pub fn new(inputs: Vec<Prompt>, field: Field) -> Self {
        Self {
            inputs,
            field,
            prompt: PromptChoice::None,
            dimensions: None,
            truncation: Truncation::Refuse,
            context: None,
            raw: false,
            kinds: VectorKinds::default(),
        }
    }
}

/// Kinds of vectors of a text. A kind beside the first has the field that requests it, for errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VectorKinds {
    /// One vector of the whole text.
    pub dense: bool,
    /// Weights of its tokens.
    pub sparse: Option<&'static str>,
    /// A vector for each token.
    pub multi_vector: Option<&'static str>,
}

impl Default for VectorKinds {
    fn default() -> Self {
        Self { dense: true, sparse: None, multi_vector: None }
    }
}

impl VectorKinds {
    /// Checks that the model computes these kinds.
    fn check(self, lease: &Lease) -> Result<(), ApiError> {
        let (head, name) = (&lease.model.head, &lease.entry.name);
        let missing = |param: &str, what: &str, file: &str| {
            let message = format!(
                "the model `{name}` has no {what}; name one like bge-m3, with a `{file}` in its folder"
            );
            Err(ApiError::invalid(param, message))
        };
        match self {
            Self { sparse: Some(param), .. } if head.sparse.is_none() => {
                missing(param, "sparse vectors", "sparse_linear.pt")
            }
            Self { multi_vector: Some(param), .. } if head.multi_vector.is_none() => {
                missing(param, "vectors of tokens", "colbert_linear.pt")
            }
            _ => Ok(()),
        }
    }
}

/// The field that texts of a request are in, for errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Its name.
    pub name: &'static str,
    /// True if it is a list.
    pub is_list: bool,
}

impl Field {
    /// A list of texts.
    pub fn list(name: &'static str) -> Self {
        Self { name, is_list: true }
    }

    /// One text.
    pub fn one(name: &'static str) -> Self {
        Self { name, is_list: false }
    }

    /// Returns the name of an element: `input[3]`, or `input` if the field is a single text.
    pub fn at(self, index: usize) -> String {
        if self.is_list { format!("{}[{index}]", self.name) } else { self.name.to_owned() }
    }
}

/// Treatment of texts that are too long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Truncation {
    /// The request is refused.
    #[default]
    Refuse,
    /// They lose tokens.
    Cut {
        /// The end that loses them.
        at: Cut,
        /// Most tokens of a text, and the field that says so; `None` is as many as the model reads.
        tokens: Option<(ClientCount, &'static str)>,
    },
}

impl Truncation {
    /// Cuts texts to what the model reads.
    pub fn to_context(at: Cut) -> Self {
        Self::Cut { at, tokens: None }
    }
}

/// A text of the model that is put before each text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum PromptChoice {
    /// None: texts are embedded as they are.
    #[default]
    None,
    /// The prompt of this name.
    Named {
        /// The name.
        name: String,
        /// The field that it was in.
        param: &'static str,
    },
    /// The prompt of texts of this type, if the model has one.
    InputType {
        /// The type as the request names it: `query`, `search_document`, `clustering`.
        name: String,
        /// The field that it was in.
        param: &'static str,
    },
}

impl PromptChoice {
    /// Returns the text. A type for which the model has no prompt is left out.
    ///
    /// # Errors
    /// The model has no prompt of this name, or the request is strict.
    fn text(&self, prompts: &Prompts, tolerance: &Tolerance) -> Result<String, ApiError> {
        let has_none =
            "the files of this model define no prompts; put the prompt of its card before each text";
        match self {
            Self::None => Ok(String::new()),
            Self::Named { name, param } => prompts.get(name).map(str::to_owned).ok_or_else(|| {
                let name: String = name.chars().take(40).collect();
                let message = match prompts.named.is_empty() {
                    true => format!("`{param}` is `{name}`, but {has_none}"),
                    false => format!("`{param}` is `{name}`; this model has {}", prompts.names()),
                };
                ApiError::invalid(*param, message)
            }),
            Self::InputType { name, param } => {
                let role = TextRole::of_input_type(name);
                let found = prompts.get(name).or_else(|| prompts.of_role(role?));
                if let Some(text) = found {
                    return Ok(text.to_owned());
                }
                if prompts.named.is_empty() {
                    tolerance.leave_out(param, has_none)?;
                } else if role != Some(TextRole::Document) {
                    // Documents without a prompt of their own are embedded as they are.
                    tolerance.leave_out(param, format!("this model has {}", prompts.names()))?;
                }
                Ok(String::new())
            }
        }
    }
}

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
pub const MAX_INPUTS: usize = 100_000;

/// Most bytes of the vectors of one request. As text they take three times as many.
const MAX_VECTOR_BYTES: usize = 128 << 20;

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
    let lease = super::lease(state, &caller, model, request.context, request.context).await?;
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
    let tolerance = caller.tolerance.clone();
    let work = off_thread(state, caller, &lease, move |model, is_wanted| {
        let before = prompt.text(&model.prompts, &tolerance)?;
        let reader = TextReader { model, most, truncation, field };
        let inputs = inputs.into_iter().enumerate().take_while(|_| is_wanted());
        inputs.map(|(index, input)| reader.tokens(&before, input, index)).collect::<Result<Vec<_>, _>>()
    });
    let prompts = caller.in_time(work).await?;
    let submitted = Instant::now();
    let tokens = prompts.iter().map(Vec::len).sum();
    let finish = move |vector: &mut Vec<f32>| {
        vector.truncate(dimensions);
        if !raw {
            normalize(vector);
        }
    };
    let (mut sparse, mut multi_vectors) = (Vec::new(), Vec::new());
    let vectors = if kinds == VectorKinds::default() {
        let template = Request { embedding: Some(pooling), ..template(state, caller) };
        run(state, &lease, template, prompts, field, received, |pooled| {
            let mut vector = head.embedding(pooled);
            finish(&mut vector);
            vector
        })
        .await?
    } else {
        check_tokens(&lease, kinds, tokens, field)?;
        let template = Request { embedding: Some(Pooling::All), ..template(state, caller) };
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

/// The fields that all prompts of a request share.
pub(super) fn template(state: &AppState, caller: &Caller) -> Request {
    Request {
        max_tokens: Some(0),
        tenant: caller.tenant.clone(),
        prefix_salt: caller.prefix_salt(&state.settings, ""),
        deadline: caller.deadline.map(Into::into),
        ..Request::default()
    }
}

/// Computes the vectors of all prompts, and `finish`es each. They are in the order of the prompts.
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
    while let Some((index, values)) = texts.next().await? {
        results[index] = Some(finish(values));
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

    /// Waits for the next vector in any order, with the index of its prompt; `None` after the last one.
    ///
    /// # Errors
    /// A prompt that failed, by its field.
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
        self.metrics.finished(self.usage);
    }
}

/// The error of a text, which is in the field `param`.
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

/// Makes tokens of texts.
pub(super) struct TextReader<'m> {
    pub model: &'m Model,
    /// Most tokens that the model reads.
    pub most: usize,
    pub truncation: Truncation,
    pub field: Field,
}

impl TextReader<'_> {
    /// Returns the tokens of the text at `index` with `before` before it.
    pub fn tokens(&self, before: &str, input: Prompt, index: usize) -> Result<Vec<u32>, ApiError> {
        let tokenizer = &self.model.tokenizer;
        match input {
            Prompt::Tokens(mut tokens) => {
                if let Truncation::Cut { at, tokens: limit } = self.truncation {
                    tokenizer.cut(&mut tokens, self.limit(limit)?, at);
                }
                if tokens.len() > self.most {
                    return Err(self.too_long(index, tokens.len(), true));
                }
                Ok(tokens)
            }
            Prompt::Text(text) | Prompt::Gap { prefix: text, .. } => {
                let text = if before.is_empty() { text } else { format!("{before}{text}") };
                self.encode(&text, index)
            }
        }
    }

    /// Returns the tokens of a whole text.
    pub fn encode(&self, text: &str, index: usize) -> Result<Vec<u32>, ApiError> {
        let tokenizer = &self.model.tokenizer;
        if let Truncation::Cut { at, tokens } = self.truncation {
            let tokens = tokenizer.encode_within(text, SpecialTokens::Parse, self.limit(tokens)?, at);
            return self.not_empty(tokens, index);
        }
        // A text that is certainly too long is not tokenized.
        if let Err(ApiError::ContextTooLong { tokens, .. }) =
            check_text(text, self.model, self.most.saturating_mul(2))
        {
            return Err(self.too_long(index, tokens, false));
        }
        let tokens = tokenizer.encode_prompt(text, SpecialTokens::Parse);
        if tokens.len() > self.most {
            return Err(self.too_long(index, tokens.len(), true));
        }
        self.not_empty(tokens, index)
    }

    /// Most tokens of a text that is cut.
    fn limit(&self, asked: Option<(ClientCount, &'static str)>) -> Result<usize, ApiError> {
        asked.map_or(Ok(self.most), |(count, param)| count.within(1..=self.most, param))
    }

    fn not_empty(&self, tokens: Vec<u32>, index: usize) -> Result<Vec<u32>, ApiError> {
        if tokens.is_empty() {
            let param = self.field.at(index);
            let message = format!("`{param}` has no tokens, so it has no embedding; leave it out");
            return Err(ApiError::invalid(param, message));
        }
        Ok(tokens)
    }

    fn too_long(&self, index: usize, tokens: usize, is_exact: bool) -> ApiError {
        ApiError::InputTooLong { param: self.field.at(index), tokens, is_exact, limit: self.most }
    }
}
