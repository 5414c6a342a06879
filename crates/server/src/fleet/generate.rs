//! `/inference/v1/generate` of vLLM: tokens in, tokens out.

use axum::{
    extract::State,
    response::{IntoResponse, Response},
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    AppState,
    count::check_length,
    error::ApiError,
    extract::Json,
    generate::{self, Caller, Generating, Options, Piece, Prompt, TextRequest, TokenLogprob},
    ids,
    openai::{
        logprobs::finite,
        messages::FormatParams,
        sampling::SamplingParams,
        types::{FinishReason, StreamOptions, Usage, UsageChunks},
    },
    stream::{comments, events},
    wire::{Body, Limit, Other, left_out, no_effect, refused},
};

/// A request for an answer to tokens, as `/v1/chat/completions/render` returns it.
#[derive(Debug, Deserialize, ToSchema)]
pub struct GenerateRequest {
    /// The model's name.
    pub model: String,
    /// Tokens of the prompt.
    pub token_ids: Vec<u32>,
    /// Sampling parameters and limits.
    pub sampling_params: Option<TokenParams>,
    /// Streams the answer as server-sent events.
    pub stream: Option<bool>,
    /// Options of the stream.
    pub stream_options: Option<StreamOptions>,
    /// Id of the request, which the answer repeats.
    pub request_id: Option<String>,
    /// Prefixes are shared only among requests with the same salt.
    pub cache_salt: Option<String>,
    /// Priority; requests with higher values run first.
    pub priority: Option<i32>,
}

/// Sampling parameters of an answer in tokens.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub struct TokenParams {
    /// Number of answers.
    n: Option<usize>,
    /// Maximum tokens of an answer; no limit if absent.
    max_tokens: Option<Limit>,
    /// Reports log-probabilities of the tokens, and of this many most probable tokens at each position, at most 20.
    logprobs: Option<usize>,
    #[serde(flatten)]
    sampling: SamplingParams,
    #[serde(flatten)]
    format: FormatParams,
}

const OTHERS: &[Other] = &[
    refused("features", &["null"], "prompts are text"),
    left_out("kv_transfer_params", &[], "servers do not exchange pages"),
    no_effect("data_parallel_rank", "a server is one replica"),
    no_effect("sampling_params.detokenize", "answers are tokens"),
    no_effect("sampling_params.skip_special_tokens", "answers are tokens"),
    no_effect("sampling_params.spaces_between_special_tokens", "answers are tokens"),
    no_effect("sampling_params.output_kind", "`stream` decides"),
    no_effect("sampling_params.flat_logprobs", "log-probabilities have one form"),
    no_effect("sampling_params.skip_clone", "it is a detail of another program"),
    refused("sampling_params.bad_words", &[], "`logit_bias` can keep tokens out of an answer"),
    refused("sampling_params.allowed_token_ids", &[], "use `structured_outputs`"),
    refused("sampling_params.logits_processors", &[], "there are none"),
    refused(
        "sampling_params.prompt_logprobs",
        &["0"],
        "`echo` with `logprobs` of /v1/completions reports them",
    ),
    refused(
        "sampling_params.truncate_prompt_tokens",
        &["-1"],
        "a prompt that does not fit is refused and not cut",
    ),
    left_out("sampling_params.extra_args", &[], "there are none"),
];

impl Body for GenerateRequest {
    const OTHERS: &'static [&'static [Other]] = &[OTHERS];
}

/// An answer in tokens, or a part of it.
#[derive(Debug, Serialize, ToSchema)]
pub struct Generated {
    request_id: String,
    choices: Vec<GeneratedChoice>,
    /// Always `null`.
    prompt_logprobs: Option<()>,
    /// Always `null`.
    kv_transfer_params: Option<()>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Usage>,
}

/// One answer, or a part of it.
#[derive(Debug, Default, Serialize, ToSchema)]
pub struct GeneratedChoice {
    index: usize,
    /// The tokens, with the one that ended the answer.
    token_ids: Vec<u32>,
    logprobs: Option<TokenIdLogprobs>,
    finish_reason: Option<FinishReason>,
}

/// Log-probabilities of tokens.
#[derive(Debug, Default, Serialize, ToSchema)]
pub struct TokenIdLogprobs {
    content: Vec<TokenIdLogprob>,
}

/// A token with its alternatives.
#[derive(Debug, Serialize, ToSchema)]
pub struct TokenIdLogprob {
    #[serde(flatten)]
    token: TokenIdProbability,
    /// The most probable tokens at its position.
    top_logprobs: Vec<TokenIdProbability>,
}

/// A token with its log-probability.
#[derive(Debug, Serialize, ToSchema)]
pub struct TokenIdProbability {
    /// `token_id:` and its number.
    token: String,
    /// Natural logarithm of its probability.
    logprob: f32,
}

impl TokenIdProbability {
    fn new(token: u32, logprob: f32) -> Self {
        Self { token: format!("token_id:{token}"), logprob: finite(logprob) }
    }
}

/// Answers tokens with tokens.
///
/// # Errors
/// A field that is not supported, by name.
#[utoipa::path(
    post, path = "/inference/v1/generate", tag = "Routers", request_body = GenerateRequest,
    responses((status = 200, content((Generated = "application/json"), (String = "text/event-stream")))),
)]
pub async fn create(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<GenerateRequest>,
) -> Result<Response, ApiError> {
    let GenerateRequest { model, token_ids, sampling_params, stream_options, request_id, .. } = body;
    let TokenParams { n, max_tokens, logprobs, sampling, format } = sampling_params.unwrap_or_default();
    if logprobs > Some(20) {
        let message = "`sampling_params.logprobs` must be at most 20";
        return Err(ApiError::invalid("sampling_params.logprobs", message));
    }
    if let Some(id) = &request_id {
        check_length(id.len(), MOST_ID, "request_id")?;
    }
    let options = sampling.into_options()?;
    let options = Options {
        max_tokens: Limit::at_least_one(max_tokens, "sampling_params.max_tokens")?.map(Into::into),
        n: n.map(Into::into),
        logprobs: logprobs.map(Into::into),
        report_tokens: true,
        priority: body.priority.unwrap_or(options.priority),
        cache_salt: body.cache_salt.unwrap_or_else(|| options.cache_salt.clone()),
        ..options
    };
    let request = TextRequest {
        prompt: Prompt::Tokens(token_ids),
        format: format.format()?,
        default_max_tokens: None,
        options,
    };
    let generating = generate::text(&state, caller, &model, request).await?;
    let answer = Answer {
        generating,
        id: request_id.unwrap_or_else(|| ids::new("gen-")),
        wants_logprobs: logprobs.is_some(),
        usage: generate::Usage::default(),
    };
    let chunks = StreamOptions::usage(stream_options);
    if body.stream == Some(true) { Ok(answer.stream(chunks)) } else { answer.collect().await }
}

/// Longest id of a request, in bytes.
const MOST_ID: usize = 512;

/// A running answer.
struct Answer {
    generating: Generating,
    id: String,
    wants_logprobs: bool,
    /// Usage of choices that have ended.
    usage: generate::Usage,
}

impl Answer {
    /// Returns the next part of a choice; `None` after the last one.
    async fn next(&mut self) -> Option<Result<GeneratedChoice, ApiError>> {
        loop {
            let (index, tokens, finish_reason) = match self.generating.next().await? {
                Ok(Piece::Delta { choice, logprobs, .. }) => (choice, logprobs, None),
                Ok(Piece::Prefilled(_)) => continue,
                Ok(Piece::Finished { choice, reason, mut logprobs, stop_token, usage }) => {
                    self.usage.add_choice(usage);
                    logprobs.extend(stop_token);
                    (choice, logprobs, Some(FinishReason::from(&reason)))
                }
                Err(error) => return Some(Err(error)),
            };
            if tokens.is_empty() && finish_reason.is_none() {
                continue;
            }
            let token_ids = tokens.iter().map(|token| token.token).collect();
            let logprobs = self.wants_logprobs.then(|| TokenIdLogprobs::new(&tokens));
            return Some(Ok(GeneratedChoice { index, token_ids, logprobs, finish_reason }));
        }
    }

    fn chunk(&self, choices: Vec<GeneratedChoice>, usage: Option<Usage>) -> Generated {
        let request_id = self.id.clone();
        Generated { request_id, choices, prompt_logprobs: None, kv_transfer_params: None, usage }
    }

    async fn collect(mut self) -> Result<Response, ApiError> {
        let choice = |index| GeneratedChoice { index, ..GeneratedChoice::default() };
        let mut choices: Vec<_> = (0..self.generating.choices()).map(choice).collect();
        while let Some(part) = self.next().await {
            let part = part?;
            let choice = &mut choices[part.index];
            choice.token_ids.extend(part.token_ids);
            choice.finish_reason = part.finish_reason.or(choice.finish_reason);
            if let Some(logprobs) = part.logprobs {
                choice.logprobs.get_or_insert_default().content.extend(logprobs.content);
            }
        }
        let usage = Some(self.usage.into());
        Ok(Json(self.chunk(choices, usage)).into_response())
    }

    fn stream(mut self, chunks: UsageChunks) -> Response {
        events(comments(), |events| async move {
            while let Some(part) = self.next().await {
                match part {
                    Ok(choice) => {
                        let usage = chunks.every.then(|| self.generating.usage_so_far().into());
                        events.data(&self.chunk(vec![choice], usage)).await;
                    }
                    // The status has already been sent: the stream ends with the error, without `[DONE]`.
                    Err(error) => return events.data(&crate::openai::error::body(&error)).await,
                }
            }
            if chunks.last {
                events.data(&self.chunk(Vec::new(), Some(self.usage.into()))).await;
            }
            events.done().await;
        })
    }
}

impl TokenIdLogprobs {
    fn new(tokens: &[TokenLogprob]) -> Self {
        let content = tokens.iter().map(|token| TokenIdLogprob {
            token: TokenIdProbability::new(token.token, token.logprob),
            top_logprobs: token
                .top
                .iter()
                .map(|&(token, logprob)| TokenIdProbability::new(token, logprob))
                .collect(),
        });
        Self { content: content.collect() }
    }
}
