//! `/tokenize` and `/detokenize`, as vLLM has them.

use axum::extract::State;
use paguro_model::tokenizer::{SpecialText, SpecialTokens};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::messages::{ChatMessage, ToolParam};
use crate::{
    AppState,
    error::ApiError,
    extract::Json,
    generate::{self, Caller, ChatRequest},
};

/// A text, or a chat, whose tokens are wanted.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TokenizeRequest {
    /// The model's name.
    pub model: String,
    /// The text.
    pub prompt: Option<String>,
    /// In place of the text: a chat, which the model's template makes a text of.
    pub messages: Option<Vec<ChatMessage>>,
    /// With messages: what the model may call.
    pub tools: Option<Vec<ToolParam>>,
    /// With a text: whether what the model puts around every text is added; true if absent.
    pub add_special_tokens: Option<bool>,
    /// Whether the tokens' names are wanted, too.
    pub return_token_strs: Option<bool>,
}

/// Tokens.
#[derive(Debug, Serialize, ToSchema)]
pub struct TokenizeResponse {
    /// Their number.
    count: usize,
    /// Most tokens of a prompt with its answer.
    max_model_len: usize,
    /// The tokens.
    tokens: Vec<u32>,
    /// Their names.
    #[serde(skip_serializing_if = "Option::is_none")]
    token_strs: Option<Vec<String>>,
}

/// Tokens whose text is wanted.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
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

/// Makes tokens of a text or a chat.
///
/// # Errors
/// There is no such model; neither or both of `prompt` and `messages`.
#[utoipa::path(
    post, path = "/tokenize", tag = "Tokens",
    request_body = TokenizeRequest,
    responses(
        (status = 200, body = TokenizeResponse),
        (status = "4XX", body = super::error::ErrorBody<'static>),
        (status = "5XX", body = super::error::ErrorBody<'static>),
    ),
)]
pub async fn tokenize(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<TokenizeRequest>,
) -> Result<Json<TokenizeResponse>, ApiError> {
    let TokenizeRequest { model, prompt, messages, tools, add_special_tokens, return_token_strs } = body;
    let lease = state.models.lease(&model).await?;
    let max_context = lease.handle.max_context();
    let tokens = match (prompt, messages) {
        (Some(text), None) => {
            super::types::refuse(&tools, "tools", "a text has none; `messages` do")?;
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
            super::types::refuse(&add_special_tokens, "add_special_tokens", "the template decides")?;
            let messages = messages.into_iter().enumerate();
            let messages = messages.map(|(i, message)| message.into_message(&format!("messages[{i}]")));
            let request = ChatRequest {
                messages: messages.collect::<Result<_, _>>()?,
                tools: tools.into_iter().flatten().map(ToolParam::into_tool).collect(),
                ..ChatRequest::default()
            };
            generate::off_thread(&state, &caller, &lease, move |model, _| request.prompt(model, max_context))
                .await?
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

/// Makes text of tokens.
///
/// # Errors
/// There is no such model, or it has no such token.
#[utoipa::path(
    post, path = "/detokenize", tag = "Tokens",
    request_body = DetokenizeRequest,
    responses(
        (status = 200, body = DetokenizeResponse),
        (status = "4XX", body = super::error::ErrorBody<'static>),
        (status = "5XX", body = super::error::ErrorBody<'static>),
    ),
)]
pub async fn detokenize(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<DetokenizeRequest>,
) -> Result<Json<DetokenizeResponse>, ApiError> {
    let lease = state.models.lease(&body.model).await?;
    let vocab = lease.model.tokenizer.vocab_size();
    if let Some(i) = body.tokens.iter().position(|&token| token as usize >= vocab) {
        let message = format!("`tokens[{i}]` is {}, but the model has {vocab} tokens", body.tokens[i]);
        return Err(ApiError::invalid(format!("tokens[{i}]"), message));
    }
    let prompt = generate::off_thread(&state, &caller, &lease, move |model, _| {
        Ok(model.tokenizer.decode(&body.tokens, SpecialText::Show))
    });
    Ok(Json(DetokenizeResponse { prompt: prompt.await? }))
}
