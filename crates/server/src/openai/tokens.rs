//! `/tokenize` and `/detokenize` of vLLM.

use axum::extract::{RawQuery, State};
use paguro_model::tokenizer::{SpecialText, SpecialTokens};
use percent_encoding::percent_decode_str;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{
    chat,
    messages::{self, ChatMessage},
    tools::{Offer, ToolParam},
};
use crate::{
    AppState,
    count::check_length,
    error::ApiError,
    extract::Json,
    generate::{self, Caller, ChatRequest},
    thinking::ReasoningParams,
    wire::{Body, Other, refuse},
};

/// A request for the tokens of a text or a chat.
#[derive(Debug, Deserialize, ToSchema)]
pub struct TokenizeRequest {
    /// The model's name.
    pub model: String,
    /// The text.
    pub prompt: Option<String>,
    /// A chat instead of the text; the model's template is applied.
    pub messages: Option<Vec<ChatMessage>>,
    /// With messages: tools that the model may call.
    pub tools: Option<Vec<ToolParam>>,
    #[serde(flatten)]
    pub reasoning: ReasoningParams,
    /// With messages: false for a prompt without the opening of an answer, if the last message is continued.
    pub add_generation_prompt: Option<bool>,
    /// With messages: true if the last message is continued; as in `/v1/chat/completions`.
    pub continue_final_message: Option<bool>,
    /// With a text: adds the model's initial and final tokens; true if absent.
    pub add_special_tokens: Option<bool>,
    /// True to also return the names of the tokens.
    pub return_token_strs: Option<bool>,
}

impl Body for TokenizeRequest {
    const OTHERS: &'static [&'static [Other]] = &[messages::OTHERS];
}

impl Body for DetokenizeRequest {}

/// Tokens.
#[derive(Debug, Serialize, ToSchema)]
pub struct TokenizeResponse {
    /// Their number.
    count: usize,
    /// Maximum tokens of prompt and answer.
    max_model_len: usize,
    /// The tokens.
    tokens: Vec<u32>,
    /// Their names.
    #[serde(skip_serializing_if = "Option::is_none")]
    token_strs: Option<Vec<String>>,
}

/// A request for the text of tokens.
#[derive(Debug, Deserialize, ToSchema)]
pub struct DetokenizeRequest {
    /// The model's name.
    pub model: String,
    /// The tokens.
    pub tokens: Vec<u32>,
}

/// A text.
#[derive(Debug, Serialize, ToSchema)]
pub struct DetokenizeResponse {
    /// The text, special tokens included.
    prompt: String,
}

/// Tokenizes a text or a chat.
///
/// # Errors
/// No model has this name, or the request has neither or both of `prompt` and `messages`.
#[utoipa::path(
    post, path = "/tokenize", tag = "Tokens", request_body = TokenizeRequest,
    responses((status = 200, body = TokenizeResponse)),
)]
pub async fn tokenize(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<TokenizeRequest>,
) -> Result<Json<TokenizeResponse>, ApiError> {
    let TokenizeRequest { model, prompt, messages, tools, add_special_tokens, return_token_strs, .. } = body;
    let (continues, prompts) = (body.continue_final_message, body.add_generation_prompt);
    let reasoning = body.reasoning;
    let lease = state.models.lease(&model).await?;
    let max_context = lease.handle.max_context();
    let tokens = match (prompt, messages) {
        (Some(text), None) => {
            refuse(&tools, "tools", "only `messages` can have tools")?;
            let around = add_special_tokens != Some(false);
            generate::off_thread(&state, &caller, &lease, move |model, _| {
                generate::check_text(&text, model, max_context)?;
                let (tokenizer, special) = (&model.tokenizer, SpecialTokens::Parse);
                Ok(if around {
                    tokenizer.encode_prompt(&text, special)
                } else {
                    tokenizer.encode(&text, special)
                })
            })
            .await?
        }
        (None, Some(messages)) => {
            refuse(&add_special_tokens, "add_special_tokens", "the template decides")?;
            let messages = messages::messages(messages, &caller.tolerance)?;
            let reasoning = reasoning.combine("reasoning_effort", &caller.tolerance)?;
            let request = ChatRequest {
                continue_last: chat::continues(&messages, continues, prompts)?,
                messages,
                reasoning: reasoning.reasoning,
                template_variables: reasoning.template_variables,
                tools: Offer::of(tools.unwrap_or_default(), "tools", &caller.tolerance)?.tools,
                tolerance: caller.tolerance.clone(),
                ..ChatRequest::default()
            };
            generate::prompt(&state, &caller, &lease, request).await?
        }
        _ => return Err(ApiError::invalid("prompt", "give either `prompt` or `messages`")),
    };
    let tokenizer = &lease.model.tokenizer;
    let names = || tokens.iter().map(|&token| tokenizer.token_name(token).into_owned()).collect();
    Ok(Json(TokenizeResponse {
        count: tokens.len(),
        max_model_len: max_context,
        token_strs: (return_token_strs == Some(true)).then(names),
        tokens,
    }))
}

/// Converts tokens to text.
///
/// # Errors
/// No model has this name, or a token is out of range.
#[utoipa::path(
    post, path = "/detokenize", tag = "Tokens", request_body = DetokenizeRequest,
    responses((status = 200, body = DetokenizeResponse)),
)]
pub async fn detokenize(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<DetokenizeRequest>,
) -> Result<Json<DetokenizeResponse>, ApiError> {
    let lease = state.models.lease(&body.model).await?;
    let vocab = lease.model.tokenizer.vocab_size();
    check_length(body.tokens.len(), lease.handle.max_context(), "tokens")?;
    if let Some(i) = body.tokens.iter().position(|&token| token as usize >= vocab) {
        let message = format!("`tokens[{i}]` is {}, but the model has {vocab} tokens", body.tokens[i]);
        return Err(ApiError::invalid(format!("tokens[{i}]"), message));
    }
    let prompt = generate::off_thread(&state, &caller, &lease, move |model, _| {
        Ok(model.tokenizer.decode(&body.tokens, SpecialText::Show))
    });
    Ok(Json(DetokenizeResponse { prompt: prompt.await? }))
}

/// Description of a tokenizer.
#[derive(Debug, Serialize, ToSchema)]
pub struct TokenizerInfo {
    /// Always `paguro`.
    tokenizer_class: &'static str,
    /// Tokens of the vocabulary.
    vocab_size: usize,
    /// Maximum tokens of prompt and answer.
    model_max_length: usize,
    /// The token that begins a text; `null` if there is none.
    bos_token: Option<String>,
    /// The token that ends an answer; `null` if there is none.
    eos_token: Option<String>,
    /// The chat template, in jinja; `null` if there is none.
    chat_template: Option<String>,
}

/// Describes a model's tokenizer, as in vLLM. Without `model` it is that of the first model.
///
/// # Errors
/// No model has this name.
#[utoipa::path(
    get, path = "/tokenizer_info", tag = "Tokens",
    params(("model" = Option<String>, Query, description = "The model's name")),
    responses((status = 200, body = TokenizerInfo)),
)]
pub async fn tokenizer_info(
    State(state): State<AppState>,
    RawQuery(query): RawQuery,
) -> Result<Json<TokenizerInfo>, ApiError> {
    let asked = query.as_deref().unwrap_or_default().split('&').find_map(|pair| pair.strip_prefix("model="));
    let name = match asked {
        Some(name) => percent_decode_str(name).decode_utf8_lossy().into_owned(),
        None => match state.models.list().await?.into_iter().next() {
            Some(first) => first.name,
            None => return Err(ApiError::invalid("model", "there are no models")),
        },
    };
    let lease = state.models.lease(&name).await?;
    let tokenizer = &lease.model.tokenizer;
    let token = |id: Option<u32>| id.map(|id| tokenizer.token_name(id).into_owned());
    Ok(Json(TokenizerInfo {
        tokenizer_class: "paguro",
        vocab_size: tokenizer.vocab_size(),
        model_max_length: lease.handle.max_context(),
        bos_token: token(tokenizer.bos()),
        eos_token: token(tokenizer.eos()),
        chat_template: lease.model.chat_template.as_ref().map(|template| template.source().to_owned()),
    }))
}
