//! `/v1/chat/completions`.

use axum::{
    extract::State,
    response::{IntoResponse, Response},
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::{
    logprobs::ChatLogprobs,
    messages::{ChatMessage, ResponseFormat, RoleParam, ToolChoiceParam, ToolParam},
    types::{self, FinishReason, LogitBias, OneOrMany, StreamOptions, Usage, refuse},
};
use crate::{
    AppState,
    error::ApiError,
    extract::Json,
    generate::{self, Caller, ChatRequest, Delta, Generating, Options, Piece, Reasoning},
    ids, stream,
};

/// A chat that is to be answered.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ChatCompletionRequest {
    /// The model's name, as `/v1/models` lists it.
    pub model: String,
    /// What was said so far.
    pub messages: Vec<ChatMessage>,
    /// Sends the answer in parts, as server-sent events.
    pub stream: Option<bool>,
    /// How the stream is written.
    pub stream_options: Option<StreamOptions>,
    /// Number of answers.
    pub n: Option<usize>,
    /// Most tokens of an answer, those that the model thinks with included.
    pub max_completion_tokens: Option<usize>,
    /// The older name of `max_completion_tokens`.
    pub max_tokens: Option<usize>,
    /// Divides the logits; 0 takes the best token. If absent, what the model recommends, or 0.8.
    pub temperature: Option<f32>,
    /// Keeps the smallest set of best tokens whose probability reaches this.
    pub top_p: Option<f32>,
    /// Keeps this many best tokens; 0 keeps all. (Not of OpenAI's API.)
    pub top_k: Option<u32>,
    /// Keeps tokens with at least this fraction of the best one's probability. (Not of OpenAI's API.)
    pub min_p: Option<f32>,
    /// Subtracted for each occurrence of a token.
    pub frequency_penalty: Option<f32>,
    /// Subtracted if a token occurs.
    pub presence_penalty: Option<f32>,
    /// Divides positive and multiplies negative logits of tokens that occur. (Not of OpenAI's API.)
    pub repetition_penalty: Option<f32>,
    /// Added to the logits of tokens.
    pub logit_bias: Option<LogitBias>,
    /// The same seed gives the same answer; answer `i` of several has the seed `seed + i`.
    pub seed: Option<i64>,
    /// Texts that end the answer.
    pub stop: Option<OneOrMany<String>>,
    /// Tokens that end the answer. (Not of OpenAI's API.)
    pub stop_token_ids: Option<Vec<u32>>,
    /// Goes on after the model's own stop tokens. (Not of OpenAI's API.)
    pub ignore_eos: Option<bool>,
    /// Reports log-probabilities.
    pub logprobs: Option<bool>,
    /// And those of this many best tokens, at most 20.
    pub top_logprobs: Option<usize>,
    /// What the answer must be.
    pub response_format: Option<ResponseFormat>,
    /// What the model may call.
    pub tools: Option<Vec<ToolParam>>,
    /// Whether it may, or must.
    pub tool_choice: Option<ToolChoiceParam>,
    /// Whether it may call several tools at once.
    pub parallel_tool_calls: Option<bool>,
    /// How much a model that thinks should think: `none`, `minimal`, `low`, `medium`, `high`, `xhigh`. A model that
    /// can only think or not thinks for all but `none`.
    pub reasoning_effort: Option<String>,
    /// Variables for the model's chat template. (Not of OpenAI's API.)
    #[schema(value_type = Option<Object>)]
    pub chat_template_kwargs: Option<Map<String, Value>>,
    /// Continues the last message, which must be the assistant's, instead of beginning a new one. (Not of OpenAI's
    /// API; as vLLM has it.)
    pub continue_final_message: Option<bool>,
    /// Higher ones go first. (Not of OpenAI's API.)
    pub priority: Option<i32>,
    /// Must be false or absent: answers are not stored.
    pub store: Option<bool>,
    /// Must be `auto`, `default` or absent: there is one tier.
    pub service_tier: Option<String>,
    /// Must be `["text"]` or absent.
    pub modalities: Option<Vec<String>>,
    /// Must be `medium` or absent.
    pub verbosity: Option<String>,
    /// Has no effect: nothing is stored that it could label.
    #[expect(dead_code, reason = "it has no effect; see above")]
    #[schema(value_type = Option<Object>)]
    pub metadata: Option<Map<String, Value>>,
    /// Has no effect: nobody is told about users.
    #[expect(dead_code, reason = "it has no effect; see above")]
    pub user: Option<String>,
    /// Has no effect: nobody is told about users.
    #[expect(dead_code, reason = "it has no effect; see above")]
    pub safety_identifier: Option<String>,
    /// Has no effect: prefixes are found by their content.
    #[expect(dead_code, reason = "it has no effect; see above")]
    pub prompt_cache_key: Option<String>,
    /// Has no effect: prefixes stay as long as there is room.
    #[expect(dead_code, reason = "it has no effect; see above")]
    pub prompt_cache_retention: Option<String>,
    /// Not supported.
    #[schema(value_type = Option<Object>)]
    pub audio: Option<Value>,
    /// Not supported: `tool_choice` has replaced it.
    #[schema(value_type = Option<Object>)]
    pub function_call: Option<Value>,
    /// Not supported: `tools` has replaced it.
    #[schema(value_type = Option<Object>)]
    pub functions: Option<Value>,
    /// Not supported.
    #[schema(value_type = Option<Object>)]
    pub prediction: Option<Value>,
    /// Not supported.
    #[schema(value_type = Option<Object>)]
    pub web_search_options: Option<Value>,
}

/// An answer.
#[derive(Debug, Serialize, ToSchema)]
pub struct ChatCompletion {
    id: String,
    /// Always `chat.completion`.
    object: &'static str,
    /// Seconds since 1970.
    created: u64,
    model: String,
    choices: Vec<ChatChoice>,
    usage: Usage,
}

/// One of the answers.
#[derive(Debug, Serialize, ToSchema)]
pub struct ChatChoice {
    index: usize,
    message: AnswerMessage,
    logprobs: Option<ChatLogprobs>,
    finish_reason: FinishReason,
}

/// What the model says.
#[derive(Debug, Default, Serialize, ToSchema)]
pub struct AnswerMessage {
    /// Always `assistant`.
    role: &'static str,
    /// The answer's text; `null` if there are only calls.
    content: Option<String>,
    /// Always `null`: a refusal is text like any other.
    refusal: Option<String>,
    /// What the model thought before it answered.
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    /// What it calls.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<AnswerToolCall>,
}

/// A call.
#[derive(Debug, Serialize, ToSchema)]
pub struct AnswerToolCall {
    id: String,
    /// Always `function`.
    r#type: &'static str,
    function: AnswerFunction,
}

/// What is called.
#[derive(Debug, Serialize, ToSchema)]
pub struct AnswerFunction {
    name: String,
    /// An object, as JSON text.
    arguments: String,
}

/// A part of an answer.
#[derive(Debug, Serialize, ToSchema)]
pub struct ChatCompletionChunk<'c> {
    id: &'c str,
    /// Always `chat.completion.chunk`.
    object: &'static str,
    created: u64,
    model: &'c str,
    /// Empty in the last chunk, if usage was asked for.
    choices: Vec<ChunkChoice<'c>>,
    /// In the last chunk, if it was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Usage>,
}

/// What comes new.
#[derive(Debug, Serialize, ToSchema)]
pub struct ChunkChoice<'c> {
    index: usize,
    delta: ChunkDelta<'c>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<FinishReason>,
}

/// What is added to the message.
#[derive(Debug, Default, Serialize, ToSchema)]
pub struct ChunkDelta<'c> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'c str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'c str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<[ChunkToolCall<'c>; 1]>,
}

/// What is added to a call.
#[derive(Debug, Serialize, ToSchema)]
pub struct ChunkToolCall<'c> {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'c str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    r#type: Option<&'static str>,
    function: ChunkFunction<'c>,
}

/// What is added to what is called.
#[derive(Debug, Serialize, ToSchema)]
pub struct ChunkFunction<'c> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'c str>,
    arguments: &'c str,
}

/// Answers a chat, at once or as a stream.
///
/// # Errors
/// What cannot be honoured, by name.
#[utoipa::path(
    post, path = "/v1/chat/completions", tag = "OpenAI",
    request_body = ChatCompletionRequest,
    responses(
        (status = 200, content(
            (ChatCompletion = "application/json"),
            (ChatCompletionChunk<'static> = "text/event-stream"),
        )),
        (status = "4XX", body = super::error::ErrorBody<'static>),
        (status = "5XX", body = super::error::ErrorBody<'static>),
    ),
)]
pub async fn create(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<ChatCompletionRequest>,
) -> Result<Response, ApiError> {
    let stream = body.stream == Some(true);
    let include_usage = StreamOptions::check(body.stream_options, stream)?;
    let wants_logprobs = body.logprobs == Some(true);
    let model = body.model.clone();
    let generating = generate::chat(&state, caller, &model, body.into_request()?).await?;
    if stream {
        return Ok(ChunkWriter::new(generating, include_usage, wants_logprobs).into_response());
    }
    Ok(Json(collect(generating, wants_logprobs).await?).into_response())
}

impl ChatCompletionRequest {
    /// Every field has its place, or is refused here.
    fn into_request(self) -> Result<ChatRequest, ApiError> {
        self.refuse_unsupported()?;
        let max_tokens = match (self.max_completion_tokens, self.max_tokens) {
            (Some(new), Some(old)) if new != old => {
                let message = "`max_tokens` is the older name of `max_completion_tokens`: give one of them";
                return Err(ApiError::invalid("max_tokens", message));
            }
            (Some(tokens), _) => types::at_least_one(Some(tokens), "max_completion_tokens")?,
            (None, tokens) => types::at_least_one(tokens, "max_tokens")?,
        };
        let logprobs = match (self.logprobs, self.top_logprobs) {
            (Some(true), top) => Some(top.unwrap_or(0)),
            (_, Some(_)) => {
                return Err(ApiError::invalid("top_logprobs", "`top_logprobs` needs `logprobs`: true"));
            }
            _ => None,
        };
        if logprobs > Some(20) {
            return Err(ApiError::invalid("top_logprobs", "`top_logprobs` must be at most 20"));
        }
        let options = Options {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            frequency_penalty: self.frequency_penalty,
            presence_penalty: self.presence_penalty,
            penalty_window: None,
            logit_bias: types::logit_bias(self.logit_bias)?,
            seed: self.seed.map(i64::cast_unsigned),
            stop: types::stop(self.stop)?,
            stop_tokens: self.stop_token_ids.unwrap_or_default(),
            ignore_stop_tokens: self.ignore_eos == Some(true),
            max_tokens: max_tokens.map(Into::into),
            n: self.n.map(Into::into),
            logprobs: logprobs.map(Into::into),
            priority: self.priority.unwrap_or(0),
            ..Options::default()
        };
        if self.messages.is_empty() {
            return Err(ApiError::invalid("messages", "`messages` is empty: there is nothing to answer"));
        }
        let continue_last = self.continue_final_message == Some(true);
        if continue_last && self.messages.last().is_none_or(|last| last.role != RoleParam::Assistant) {
            let message = "`continue_final_message` needs a last message of role `assistant`";
            return Err(ApiError::invalid("continue_final_message", message));
        }
        let messages = self.messages.into_iter().enumerate();
        let messages = messages.map(|(i, message)| message.into_message(&format!("messages[{i}]")));
        let tools: Vec<_> = self.tools.into_iter().flatten().map(ToolParam::into_tool).collect();
        Ok(ChatRequest {
            messages: messages.collect::<Result<_, _>>()?,
            continue_last,
            tool_choice: ToolChoiceParam::check(self.tool_choice, &tools)?,
            tools,
            parallel_tool_calls: self.parallel_tool_calls.unwrap_or(true),
            format: ResponseFormat::format(self.response_format)?,
            reasoning: Reasoning::from_effort(self.reasoning_effort, "reasoning_effort")?,
            template_variables: self.chat_template_kwargs.unwrap_or_default(),
            // Without streaming nobody needs half a call.
            whole_calls: self.stream != Some(true),
            options,
        })
    }

    fn refuse_unsupported(&self) -> Result<(), ApiError> {
        refuse(&self.audio, "audio", "answers are text")?;
        refuse(&self.function_call, "function_call", "`tool_choice` has replaced it")?;
        refuse(&self.functions, "functions", "`tools` has replaced it")?;
        refuse(&self.prediction, "prediction", "answers are not predicted")?;
        refuse(&self.web_search_options, "web_search_options", "this server does not search the web")?;
        let store = self.store.filter(|store| *store);
        refuse(&store, "store", "chat completions are not stored; /v1/responses stores")?;
        let tier = self.service_tier.as_ref().filter(|tier| !matches!(tier.as_str(), "auto" | "default"));
        refuse(&tier, "service_tier", "there is one tier, `default`")?;
        let modalities = self.modalities.as_ref().filter(|list| list.as_slice() != ["text"]);
        refuse(&modalities, "modalities", "answers are text")?;
        let verbosity = self.verbosity.as_ref().filter(|verbosity| *verbosity != "medium");
        refuse(&verbosity, "verbosity", "models here do not know it; say in a message how long to answer")
    }
}

/// The whole answer.
async fn collect(mut generating: Generating, wants_logprobs: bool) -> Result<ChatCompletion, ApiError> {
    #[derive(Default)]
    struct Answer {
        message: AnswerMessage,
        logprobs: ChatLogprobs,
        finish: Option<FinishReason>,
    }
    let mut answers: Vec<Answer> = Vec::new();
    let mut usage = generate::Usage::default();
    answers.resize_with(generating.choices(), Answer::default);
    while let Some(piece) = generating.next().await {
        match piece? {
            Piece::Delta { choice, delta, logprobs } => {
                answers[choice].logprobs.extend(generating.tokenizer(), &logprobs);
                answers[choice].message.add(delta);
            }
            Piece::Finished { choice, reason, logprobs, usage: of_choice, .. } => {
                answers[choice].logprobs.extend(generating.tokenizer(), &logprobs);
                answers[choice].finish = Some(FinishReason::from(&reason));
                usage.add_choice(of_choice);
            }
        }
    }
    let choice = |(index, answer): (usize, Answer)| {
        let mut message = answer.message;
        message.role = "assistant";
        if message.content.is_none() && message.tool_calls.is_empty() {
            message.content = Some(String::new());
        }
        let finish_reason = answer.finish.unwrap_or(FinishReason::Stop);
        ChatChoice { index, message, logprobs: wants_logprobs.then_some(answer.logprobs), finish_reason }
    };
    Ok(ChatCompletion {
        id: ids::new("chatcmpl-"),
        object: "chat.completion",
        created: ids::now(),
        model: generating.model().to_owned(),
        choices: answers.into_iter().enumerate().map(choice).collect(),
        usage: usage.into(),
    })
}

impl AnswerMessage {
    fn add(&mut self, delta: Delta) {
        match delta {
            Delta::Text(text) => self.content.get_or_insert_default().push_str(&text),
            Delta::Reasoning(text) => self.reasoning_content.get_or_insert_default().push_str(&text),
            Delta::ToolCall { id, name, .. } => {
                let function = AnswerFunction { name, arguments: String::new() };
                self.tool_calls.push(AnswerToolCall { id, r#type: "function", function });
            }
            Delta::ToolArguments { index, text } => {
                if let Some(call) = self.tool_calls.get_mut(index) {
                    call.function.arguments.push_str(&text);
                }
            }
        }
    }
}

/// Writes the answer as a stream of chunks.
struct ChunkWriter {
    generating: Generating,
    include_usage: bool,
    wants_logprobs: bool,
    id: String,
    created: u64,
    model: String,
    usage: generate::Usage,
}

impl ChunkWriter {
    fn new(generating: Generating, include_usage: bool, wants_logprobs: bool) -> Self {
        let model = generating.model().to_owned();
        let (id, created) = (ids::new("chatcmpl-"), ids::now());
        let usage = generate::Usage::default();
        Self { generating, include_usage, wants_logprobs, id, created, model, usage }
    }
}

impl IntoResponse for ChunkWriter {
    fn into_response(mut self) -> Response {
        stream::events(|events| async move {
            for index in 0..self.generating.choices() {
                let delta =
                    ChunkDelta { role: Some("assistant"), content: Some(""), ..ChunkDelta::default() };
                let choice = ChunkChoice { index, delta, logprobs: None, finish_reason: None };
                events.data(&self.chunk(vec![choice])).await;
            }
            while let Some(piece) = self.generating.next().await {
                let piece = match piece {
                    Ok(piece) => piece,
                    // Too late for a status: the stream ends with the error, and without `[DONE]`.
                    Err(error) => return events.data(&super::error::body(&error)).await,
                };
                if let Piece::Finished { usage, .. } = &piece {
                    self.usage.add_choice(*usage);
                }
                let choice = self.choice(&piece);
                events.data(&self.chunk(vec![choice])).await;
            }
            if self.include_usage {
                let usage = Some(self.usage.into());
                events.data(&ChatCompletionChunk { usage, ..self.chunk(Vec::new()) }).await;
            }
            events.done().await;
        })
    }
}

impl ChunkWriter {
    fn chunk<'c>(&'c self, choices: Vec<ChunkChoice<'c>>) -> ChatCompletionChunk<'c> {
        ChatCompletionChunk {
            id: &self.id,
            object: "chat.completion.chunk",
            created: self.created,
            model: &self.model,
            choices,
            usage: None,
        }
    }

    fn choice<'c>(&self, piece: &'c Piece) -> ChunkChoice<'c> {
        let (index, delta, logprobs, finish_reason) = match piece {
            Piece::Delta { choice, delta, logprobs } => (*choice, ChunkDelta::of(delta), logprobs, None),
            Piece::Finished { choice, reason, logprobs, .. } => {
                (*choice, ChunkDelta::default(), logprobs, Some(reason.into()))
            }
        };
        let logprobs = (self.wants_logprobs && !logprobs.is_empty()).then(|| {
            let mut written = ChatLogprobs::default();
            written.extend(self.generating.tokenizer(), logprobs);
            written
        });
        ChunkChoice { index, delta, logprobs, finish_reason }
    }
}

impl<'c> ChunkDelta<'c> {
    fn of(delta: &'c Delta) -> Self {
        let none = Self::default();
        let call = |index, id: Option<&'c str>, name, arguments| {
            let r#type = if id.is_some() { Some("function") } else { None };
            Some([ChunkToolCall { index, id, r#type, function: ChunkFunction { name, arguments } }])
        };
        match delta {
            Delta::Text(text) => Self { content: Some(text), ..none },
            Delta::Reasoning(text) => Self { reasoning_content: Some(text), ..none },
            Delta::ToolCall { index, id, name } => {
                Self { tool_calls: call(*index, Some(id.as_str()), Some(name.as_str()), ""), ..none }
            }
            Delta::ToolArguments { index, text } => {
                Self { tool_calls: call(*index, None, None, text), ..none }
            }
        }
    }
}
