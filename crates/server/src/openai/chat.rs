//! `/v1/chat/completions`.

mod chunks;

use axum::{
    extract::State,
    response::{IntoResponse, Response},
};
use serde::{Deserialize, Serialize};
use serde_json::Map;
use utoipa::ToSchema;

use self::chunks::{ChatCompletionChunk, ChunkWriter};
use super::{
    logprobs::ChatLogprobs,
    messages::{self, ChatMessage, FormatParams},
    sampling::{self, SamplingParams},
    tools::{Offer, ToolChoiceParam, ToolParam},
    types::{FinishReason, StreamOptions, Usage},
};
use crate::{
    AppState,
    error::ApiError,
    extract::Json,
    fleet::{Parameters, set_fields},
    generate::{self, Caller, ChatRequest, Delta, Generating, Message, Options, Piece},
    ids,
    thinking::ReasoningParams,
    wire::{Body, Content, Limit, Other, Tolerance, left_out, no_effect, refused},
};

/// A request to answer a chat.
#[derive(Debug, Deserialize, ToSchema)]
pub struct ChatCompletionRequest {
    /// The model's name, as `/v1/models` lists it.
    pub model: String,
    /// The conversation so far.
    pub messages: Vec<ChatMessage>,
    /// Streams the answer as server-sent events.
    pub stream: Option<bool>,
    /// Options of the stream.
    pub stream_options: Option<StreamOptions>,
    /// Sends chunks with the progress of the prompt's prefill before the answer. (From llama.cpp.)
    pub return_progress: Option<bool>,
    /// Number of answers.
    pub n: Option<usize>,
    /// Maximum tokens of an answer, including reasoning; -1 for no limit.
    pub max_completion_tokens: Option<Limit>,
    /// The older name of `max_completion_tokens`, which takes precedence.
    pub max_tokens: Option<Limit>,
    /// The name of `max_tokens` in llama.cpp; `max_tokens` takes precedence.
    pub n_predict: Option<Limit>,
    #[serde(flatten)]
    pub sampling: SamplingParams,
    #[serde(flatten)]
    pub format: FormatParams,
    /// True to report log-probabilities.
    pub logprobs: Option<bool>,
    /// Number of most probable tokens to report at each position, at most 20.
    pub top_logprobs: Option<usize>,
    /// Tools that the model may call.
    pub tools: Option<Vec<ToolParam>>,
    /// Permits, requires or forbids calls of tools, or requires a call of one tool.
    pub tool_choice: Option<ToolChoiceParam>,
    /// True if an answer may have several calls.
    pub parallel_tool_calls: Option<bool>,
    #[serde(flatten)]
    pub reasoning: ReasoningParams,
    /// True if the answer continues the last message, which must be the assistant's. If absent, it does if that message
    /// has no calls. (From vLLM.)
    pub continue_final_message: Option<bool>,
    /// False if `continue_final_message` is true. (From vLLM.)
    pub add_generation_prompt: Option<bool>,
    /// A text that the answer probably resembles, such as a file that it changes. Tokens that it has in common with the text
    /// are faster.
    pub prediction: Option<Prediction>,
}

/// A text that an answer probably resembles.
#[derive(Debug, Deserialize, ToSchema)]
pub struct Prediction {
    /// Always `content`.
    #[serde(rename = "type")]
    pub kind: PredictionKind,
    /// The text, or its parts.
    pub content: Content<PredictionPart>,
}

/// Kind of a prediction.
#[derive(Clone, Copy, Debug, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum PredictionKind {
    /// A text.
    Content,
}

/// A part of a prediction.
#[derive(Debug, Deserialize, ToSchema)]
pub struct PredictionPart {
    /// Always `text`.
    #[serde(rename = "type")]
    pub kind: PredictionPartKind,
    /// The text.
    pub text: String,
}

/// Kind of a part of a prediction.
#[derive(Clone, Copy, Debug, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum PredictionPartKind {
    /// A text.
    Text,
}

impl From<Prediction> for String {
    fn from(prediction: Prediction) -> Self {
        match prediction.content {
            Content::Text(text) => text,
            Content::Parts(parts) => parts.into_iter().map(|part| part.text).collect(),
        }
    }
}

/// Known fields of this endpoint.
const OTHERS: &[Other] = &[
    refused("audio", &[], "answers are text"),
    refused("modalities", &["[\"text\"]"], "answers are text"),
    refused("function_call", &["\"none\"", "\"auto\""], "`tool_choice` has replaced it"),
    refused("functions", &[], "`tools` has replaced it"),
    refused("chat_template", &[], "models have their own"),
    refused("documents", &[], "put them into a message"),
    refused("echo", &["false"], "/v1/completions has it"),
    left_out("store", &["false"], "chat completions are not stored; /v1/responses stores"),
    left_out("verbosity", &["\"medium\""], "the models do not support it; ask for the length in a message"),
    left_out("web_search_options", &[], "this server does not search the web"),
    no_effect("metadata", "nothing is stored that it could label"),
    no_effect("add_special_tokens", "the chat template defines them"),
];

impl Body for ChatCompletionRequest {
    const OTHERS: &'static [&'static [Other]] = &[OTHERS, sampling::OTHERS, messages::OTHERS];
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

/// Message of the model.
#[derive(Debug, Default, Serialize, ToSchema)]
pub struct AnswerMessage {
    /// Always `assistant`.
    role: &'static str,
    /// The answer's text; `null` if there are only calls.
    content: Option<String>,
    /// Always `null`: refusals are ordinary text.
    refusal: Option<String>,
    /// Reasoning before the answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    /// Tool calls.
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

/// The called function.
#[derive(Debug, Serialize, ToSchema)]
pub struct AnswerFunction {
    name: String,
    /// An object, as JSON text.
    arguments: String,
}

/// Answers a chat, as a whole or as a stream.
///
/// # Errors
/// A field that is not supported, by name.
#[utoipa::path(
    post, path = "/v1/chat/completions", tag = "OpenAI", request_body = ChatCompletionRequest,
    responses((status = 200, content(
        (ChatCompletion = "application/json"), (ChatCompletionChunk<'static> = "text/event-stream"),
    ))),
)]
pub async fn create(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<ChatCompletionRequest>,
) -> Result<Response, ApiError> {
    let stream = body.stream == Some(true);
    let usage = StreamOptions::usage(body.stream_options);
    let wants_logprobs = body.logprobs == Some(true);
    let model = body.model.clone();
    let request = body.into_request(&caller.tolerance)?;
    let generating = generate::chat(&state, caller, &model, request).await?;
    if stream {
        return Ok(ChunkWriter::new(generating, usage, wants_logprobs).into_response());
    }
    Ok(Json(collect(generating, wants_logprobs).await?).into_response())
}

impl ChatCompletionRequest {
    /// Returns what the request has besides its prompt.
    pub(crate) fn parameters(&self) -> Parameters {
        let mut sampling = Map::new();
        set_fields(&self.sampling, &mut sampling);
        set_fields(&self.format, &mut sampling);
        let most = self.max_completion_tokens.or(self.max_tokens).or(self.n_predict);
        let most = most.and_then(|most| most.0);
        let logprobs = (self.logprobs == Some(true)).then(|| self.top_logprobs.unwrap_or(0));
        for (name, number) in [("max_tokens", most), ("n", self.n), ("logprobs", logprobs)] {
            sampling.extend(number.map(|number| (name.to_owned(), number.into())));
        }
        let (model, stream) = (self.model.clone(), self.stream == Some(true));
        Parameters { prefix: "chatcmpl-", model, sampling, default_max_tokens: None, stream }
    }

    /// Converts the request. Unsupported fields are ignored or refused by name.
    pub(crate) fn into_request(self, tolerance: &Tolerance) -> Result<ChatRequest, ApiError> {
        let max_tokens = match self.max_completion_tokens {
            None if self.max_tokens.is_none() => Limit::at_least_one(self.n_predict, "n_predict")?,
            None => Limit::at_least_one(self.max_tokens, "max_tokens")?,
            tokens => Limit::at_least_one(tokens, "max_completion_tokens")?,
        };
        let logprobs = match (self.logprobs, self.top_logprobs) {
            (Some(true), top) => Some(top.unwrap_or(0)),
            (_, Some(1..)) => {
                return Err(ApiError::invalid("top_logprobs", "`top_logprobs` needs `logprobs`: true"));
            }
            _ => None,
        };
        if logprobs > Some(20) {
            return Err(ApiError::invalid("top_logprobs", "`top_logprobs` must be at most 20"));
        }
        let mut options = self.sampling.into_options()?;
        options.drafts.prediction = self.prediction.map(String::from);
        let options = Options {
            max_tokens: max_tokens.map(Into::into),
            n: self.n.map(Into::into),
            logprobs: logprobs.map(Into::into),
            report_prefill: self.return_progress == Some(true) && self.stream == Some(true),
            ..options
        };
        if self.messages.is_empty() {
            return Err(ApiError::invalid("messages", "`messages` is empty: there is nothing to answer"));
        }
        let messages = messages::messages(self.messages, tolerance)?;
        let mut tools = Offer::of(self.tools.unwrap_or_default(), "tools", tolerance)?.tools;
        let reasoning = self.reasoning.combine("reasoning_effort", tolerance)?;
        Ok(ChatRequest {
            continue_last: continues(&messages, self.continue_final_message, self.add_generation_prompt)?,
            messages,
            tool_choice: ToolChoiceParam::check(self.tool_choice, &mut tools)?,
            tools,
            parallel_tool_calls: self.parallel_tool_calls.unwrap_or(true),
            format: self.format.format()?,
            reasoning: reasoning.reasoning,
            hides_reasoning: reasoning.is_hidden,
            drops_turns: false,
            template_variables: reasoning.template_variables,
            continues_text: false,
            // Without streaming, calls are returned whole.
            whole_calls: self.stream != Some(true),
            options,
            tolerance: tolerance.clone(),
        })
    }
}

/// Returns true if the answer continues the last message.
pub(super) fn continues(
    messages: &[Message],
    wanted: Option<bool>,
    prompts: Option<bool>,
) -> Result<bool, ApiError> {
    let can = messages.last().is_some_and(Message::can_be_continued);
    let refuse = |param: &str, message: &str| Err(ApiError::invalid(param, message));
    match (wanted, prompts) {
        (Some(true), Some(true)) => {
            refuse("add_generation_prompt", "`continue_final_message` needs `add_generation_prompt`: false")
        }
        (Some(true), _) if !can => refuse(
            "continue_final_message",
            "`continue_final_message` needs a last message of role `assistant`, without calls",
        ),
        (None, Some(false)) if !can => refuse(
            "add_generation_prompt",
            "`add_generation_prompt`: false needs a last message of role `assistant`, without calls",
        ),
        (Some(wanted), _) => Ok(wanted),
        (None, _) => Ok(can && prompts != Some(true)),
    }
}

/// Collects the whole answer.
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
            Piece::Prefilled(_) => {}
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
