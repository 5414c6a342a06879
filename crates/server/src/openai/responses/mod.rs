//! `/v1/responses`: a chat in turns, which the server can store.

mod output;
mod request;
mod store;

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use axum::{
    Extension,
    body::Bytes,
    extract::{RawQuery, State},
    http::{HeaderValue, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use self::{
    output::{Output, OutputItem},
    request::{Input, Item, TextParam, Truncation},
    store::{Stored, Turn},
};
use super::{
    tools::{Offer, ToolChoiceParam, ToolParam},
    types::{CompletionTokensDetails, TierTokens},
};
use crate::{
    AppState,
    access::Tenant,
    error::ApiError,
    extract::{Json, Path},
    generate::{self, Caller, Finish, Generating, Message, Piece, Role},
    ids,
    made_from::made_from,
    stream,
    thinking::ReasoningObject,
};

pub use request::ResponseRequest;
pub use store::ResponseStore;

/// A response.
#[derive(Debug, Serialize, ToSchema)]
pub struct ResponseObject {
    id: String,
    /// Always `response`.
    object: &'static str,
    /// Seconds since 1970.
    created_at: u64,
    /// Seconds since 1970 at its end; `null` before.
    completed_at: Option<u64>,
    /// `in_progress`, `completed`, `incomplete` or `failed`.
    status: &'static str,
    /// Reason of its failure.
    error: Option<ResponseError>,
    /// Reason for which it is incomplete.
    incomplete_details: Option<IncompleteDetails>,
    model: String,
    /// Messages, reasoning and calls of the model.
    output: Vec<OutputItem>,
    /// Token counts, after its end.
    usage: Option<ResponseUsage>,
    instructions: Option<String>,
    previous_response_id: Option<String>,
    max_output_tokens: Option<usize>,
    max_tool_calls: Option<usize>,
    /// Effective value, as in the following fields.
    temperature: f64,
    top_p: f64,
    frequency_penalty: f64,
    presence_penalty: f64,
    top_logprobs: usize,
    text: TextParam,
    reasoning: ReasoningObject,
    /// Tools of the request, including those that are not offered.
    tools: Vec<ToolParam>,
    tool_choice: ToolChoiceParam,
    parallel_tool_calls: bool,
    #[schema(value_type = Object)]
    metadata: Map<String, Value>,
    store: bool,
    /// Always false.
    background: bool,
    truncation: Truncation,
    /// Always `default`.
    service_tier: &'static str,
    safety_identifier: Option<String>,
    prompt_cache_key: Option<String>,
}

/// Reason of a failed response.
#[derive(Debug, Serialize, ToSchema)]
pub struct ResponseError {
    /// Code for programs.
    code: &'static str,
    /// Message for people.
    message: String,
}

/// Reason of an incomplete response.
#[derive(Debug, Serialize, ToSchema)]
pub struct IncompleteDetails {
    /// Always `max_output_tokens`: the limit was reached, or the context is full.
    reason: &'static str,
}

made_from! {
    /// Token counts.
    #[derive(Clone, Copy, Debug, Serialize, ToSchema)]
    pub struct ResponseUsage from usage: generate::Usage {
        /// Tokens of the prompt.
        input_tokens: usize = usage.prompt,
        input_tokens_details: InputTokensDetails = InputTokensDetails { cached_tokens: usage.cached, tiers: usage.into() },
        /// Tokens of the answer.
        output_tokens: usize = usage.completion,
        output_tokens_details: CompletionTokensDetails = usage.into(),
        /// Sum of both.
        total_tokens: usize = usage.prompt + usage.completion,
    }
}

/// Details of the prompt's tokens.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub struct InputTokensDetails {
    /// Tokens found in the prefix cache.
    cached_tokens: usize,
    /// Cached tokens by tier.
    #[serde(flatten)]
    tiers: TierTokens,
}

/// A deleted response.
#[derive(Debug, Serialize, ToSchema)]
pub struct DeletedResponse {
    id: String,
    /// Always `response`.
    object: &'static str,
    /// Always true.
    deleted: bool,
}

/// Answers a turn, as a whole or as a stream.
///
/// # Errors
/// A field that is not supported, by name.
#[utoipa::path(
    post, path = "/v1/responses", tag = "OpenAI", request_body = ResponseRequest,
    responses((status = 200, content((ResponseObject = "application/json"), (String = "text/event-stream")))),
)]
pub async fn create(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<ResponseRequest>,
) -> Result<Response, ApiError> {
    let tenant = caller.tenant.as_deref().map(str::to_owned);
    let (body, PreparedTurn { request, turn, items, namespaces }) = prepare(&state, &caller, body).await?;
    let stream = body.stream == Some(true);
    let model = body.model.clone();
    let generating = generate::chat(&state, caller, &model, request).await.map_err(rename)?;
    let answer = Answer {
        object: ResponseObject::new(body, &generating),
        generating,
        output: Output::new(namespaces),
        state,
        tenant,
        turn,
        items,
    };
    if stream { Ok(answer.stream()) } else { answer.collect().await }
}

/// A turn that is ready for the model.
#[derive(Debug)]
pub(crate) struct PreparedTurn {
    /// The chat up to this turn.
    pub request: generate::ChatRequest,
    turn: Turn,
    items: Vec<(String, Item)>,
    /// Functions with their namespaces.
    namespaces: Vec<(String, String)>,
}

/// Returns the chat that a request continues.
///
/// # Errors
/// A field that is not supported, by name.
pub(crate) async fn prepare(
    state: &AppState,
    caller: &Caller,
    mut body: ResponseRequest,
) -> Result<(ResponseRequest, PreparedTurn), ApiError> {
    let tenant = caller.tenant.as_deref().map(str::to_owned);
    let before = match &body.previous_response_id {
        Some(id) => Some(state.responses.get(id, tenant.as_deref())?.turn),
        None => None,
    };
    let tolerance = caller.tolerance.clone();
    let find = |id: &str| match &before {
        Some(turn) if turn.has(id) => Ok(None),
        _ => state.responses.item(id, tenant.as_deref()).map(Some),
    };
    let Input { messages: new, items } = body.messages(&find, &tolerance)?;
    let turn = Turn { before, messages: new, ids: Vec::new() };
    // Items that were referred to are copied as well.
    let length = caller.body.length().saturating_add(turn.all_bytes());
    caller.body.grow(&state.body_memory, length, 0).await?;
    let offer = Offer::of(body.tools.clone().unwrap_or_default(), "tools", &tolerance)?;
    let instructions = body.instructions.iter().map(|text| Message {
        role: Role::System,
        content: text.clone(),
        ..Message::default()
    });
    let messages: Vec<_> = instructions.chain(turn.all_messages()).collect();
    let request = body.chat(messages, offer.tools, &tolerance)?;
    Ok((body, PreparedTurn { request, turn, items, namespaces: offer.namespaces }))
}

/// Replaces the field names of chat completions in errors by those of this API.
fn rename(error: ApiError) -> ApiError {
    error.renamed(&[
        ("response_format", "text.format"),
        ("messages", "input"),
        ("reasoning_effort", "reasoning.effort"),
    ])
}

/// Returns a stored response.
///
/// # Errors
/// No response has this id, or a query parameter is not supported.
#[utoipa::path(
    get, path = "/v1/responses/{id}", tag = "OpenAI",
    params(
        ("id" = String, Path, description = "The response's id"),
        ("stream" = Option<bool>, Query, description = "Must be false or absent: it has ended"),
        ("include" = Option<Vec<String>>, Query, description = "Has no effect: it is shown as it was answered"),
    ),
    responses((status = 200, body = ResponseObject)),
)]
pub async fn get(
    State(state): State<AppState>,
    tenant: Option<Extension<Tenant>>,
    Path(id): Path<String>,
    RawQuery(query): RawQuery,
) -> Result<Response, ApiError> {
    refuse_query(query.as_deref().unwrap_or_default())?;
    let tenant = tenant.map(|tenant| tenant.0.0);
    Ok(json_response(state.responses.get(&id, tenant.as_deref())?.body))
}

fn refuse_query(query: &str) -> Result<(), ApiError> {
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let name = name.split(['[', '%']).next().unwrap_or_default();
        match (name, value) {
            ("include", _) | ("stream", "false") => {}
            _ => {
                let message = format!("`{name}` is not supported: a stored response is returned as a whole");
                return Err(ApiError::invalid(name, message));
            }
        }
    }
    Ok(())
}

/// Deletes a stored response.
///
/// # Errors
/// No response has this id.
#[utoipa::path(
    delete, path = "/v1/responses/{id}", tag = "OpenAI",
    params(("id" = String, Path, description = "The response's id")),
    responses((status = 200, body = DeletedResponse)),
)]
pub async fn delete(
    State(state): State<AppState>,
    tenant: Option<Extension<Tenant>>,
    Path(id): Path<String>,
) -> Result<Json<DeletedResponse>, ApiError> {
    let tenant = tenant.map(|tenant| tenant.0.0);
    state.responses.delete(&id, tenant.as_deref())?;
    Ok(Json(DeletedResponse { id, object: "response", deleted: true }))
}

fn json_response(body: Bytes) -> Response {
    ([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], body).into_response()
}

impl ResponseObject {
    fn new(request: ResponseRequest, generating: &Generating) -> Self {
        let sampling = generating.sampling();
        let effort = request.reasoning.reasoning_effort;
        let reasoning = request.reasoning.reasoning.unwrap_or_default();
        Self {
            id: ids::new("resp_"),
            object: "response",
            created_at: ids::now(),
            completed_at: None,
            status: "in_progress",
            error: None,
            incomplete_details: None,
            model: generating.model().to_owned(),
            output: Vec::new(),
            usage: None,
            instructions: request.instructions,
            previous_response_id: request.previous_response_id,
            max_output_tokens: request.max_output_tokens.and_then(|most| most.0),
            max_tool_calls: request.max_tool_calls,
            temperature: shortest(sampling.temperature),
            top_p: shortest(sampling.top_p),
            frequency_penalty: shortest(sampling.frequency_penalty),
            presence_penalty: shortest(sampling.presence_penalty),
            top_logprobs: request.top_logprobs.unwrap_or(0),
            text: request.text.unwrap_or_default().or_plain(),
            reasoning: ReasoningObject { effort: effort.or(reasoning.effort), ..reasoning },
            tools: request.tools.unwrap_or_default(),
            tool_choice: request.tool_choice.unwrap_or_else(|| ToolChoiceParam("auto".into())),
            parallel_tool_calls: request.parallel_tool_calls.unwrap_or(true),
            metadata: request.metadata.unwrap_or_default(),
            store: request.store.unwrap_or(true),
            background: false,
            truncation: request.truncation.unwrap_or_default(),
            service_tier: "default",
            safety_identifier: request.safety_identifier,
            prompt_cache_key: request.prompt_cache_key,
        }
    }
}

/// Converts to the `f64` with the shortest decimal form: 0.8 instead of 0.800000011920929.
fn shortest(number: f32) -> f64 {
    number.to_string().parse().unwrap_or_else(|_| number.into())
}

/// A response in progress.
struct Answer {
    object: ResponseObject,
    generating: Generating,
    output: Output,
    state: AppState,
    tenant: Option<String>,
    turn: Turn,
    /// Items of the input with their ids.
    items: Vec<(String, Item)>,
}

impl Answer {
    /// Adds the next piece. Returns false after the last one.
    async fn advance(&mut self) -> Result<bool, ApiError> {
        let Some(piece) = self.generating.next().await else { return Ok(false) };
        match piece? {
            Piece::Delta { delta, logprobs, .. } => {
                self.output.add(delta, self.generating.tokenizer(), &logprobs);
            }
            Piece::Prefilled(_) => {}
            Piece::Finished { reason, usage, .. } => {
                self.object.status = match reason {
                    Finish::Length => {
                        self.object.incomplete_details =
                            Some(IncompleteDetails { reason: "max_output_tokens" });
                        "incomplete"
                    }
                    _ => "completed",
                };
                self.object.completed_at = Some(ids::now());
                self.output.close(self.object.status);
                self.object.usage = Some(usage.into());
            }
        }
        Ok(true)
    }

    /// Ends the response, stores it if requested, and returns its JSON.
    fn finish(&mut self) -> Bytes {
        self.object.output = self.output.items().to_vec();
        // The types have string keys and no fallible parts.
        let body = Bytes::from(serde_json::to_vec(&self.object).unwrap_or_default());
        if self.object.store {
            let mut messages = std::mem::take(&mut self.turn.messages);
            messages.extend(self.output.messages());
            let mut items = std::mem::take(&mut self.items);
            items.extend(self.output.with_ids());
            let ids = items.iter().map(|(id, _)| id.clone()).collect();
            let turn = Arc::new(Turn { before: self.turn.before.take(), messages, ids });
            let (tenant, items) = (self.tenant.clone(), items.into());
            let stored = Stored { tenant, body: body.clone(), turn, items };
            self.state.responses.put(&self.object.id, stored);
        }
        body
    }

    async fn collect(mut self) -> Result<Response, ApiError> {
        while self.advance().await? {
            // Events are not needed without a stream.
            self.output.take_events();
        }
        Ok(json_response(self.finish()))
    }

    fn stream(mut self) -> Response {
        let number = Arc::new(AtomicU64::new(0));
        let event = move |name: &'static str, mut fields: Value| {
            if let Value::Object(fields) = &mut fields {
                fields.insert("type".into(), json!(name));
                fields.insert("sequence_number".into(), json!(number.fetch_add(1, Ordering::Relaxed)));
            }
            (name, fields)
        };
        // `response.in_progress` cannot keep the connection alive: OpenAI's library takes its response as complete.
        let silent = event.clone();
        let keep_alive = Box::new(move || {
            let (name, fields) = silent("keepalive", json!({}));
            stream::event(name, &fields)
        });
        stream::events(keep_alive, |writer| async move {
            for name in ["response.created", "response.in_progress"] {
                let (name, fields) = event(name, json!({"response": self.object}));
                writer.event(name, &fields).await;
            }
            loop {
                let advanced = self.advance().await;
                for (name, fields) in self.output.take_events() {
                    let (name, fields) = event(name, fields);
                    writer.event(name, &fields).await;
                }
                match advanced {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(error) => {
                        self.object.status = "failed";
                        let message = error.to_string();
                        self.object.error = Some(ResponseError { code: "server_error", message });
                        self.object.store = false;
                        break;
                    }
                }
            }
            self.finish();
            let name = match self.object.status {
                "completed" => "response.completed",
                "incomplete" => "response.incomplete",
                _ => "response.failed",
            };
            let (name, fields) = event(name, json!({"response": self.object}));
            writer.event(name, &fields).await;
            writer.done().await;
        })
    }
}
