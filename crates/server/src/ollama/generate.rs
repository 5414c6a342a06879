//! `/api/generate`: one prompt, with or without the model's chat template.

use axum::{extract::State, response::Response};
use serde::Deserialize;
use utoipa::ToSchema;

use super::{
    answer::{Answer, AnswerWriter, Endpoint},
    chat::with_images,
    duration::KeepAlive,
    models,
    options::{self, OptionsParam},
    types::{self, FormatParam, rename},
};
use crate::{
    AppState,
    error::ApiError,
    extract::Json,
    generate::{self, Caller, ChatRequest, Message, Options, Prompt, Role, TextRequest},
    images::Parts,
    thinking::{ReasoningParams, Think},
    wire::{Body, Other, left_out, refuse, refused},
};

/// A request to answer a prompt.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = OllamaGenerateRequest)]
pub struct GenerateParams {
    /// The model's name, as `/api/tags` lists it.
    model: String,
    /// The prompt. Without it, the model is loaded, or unloaded if `keep_alive` is 0.
    prompt: Option<String>,
    /// System prompt.
    system: Option<String>,
    /// Streams the answer line by line; true if absent.
    stream: Option<bool>,
    /// Uses the prompt without a chat template.
    raw: Option<bool>,
    /// Format of the answer.
    format: Option<FormatParam>,
    #[serde(flatten)]
    reasoning: ReasoningParams,
    /// Sampling parameters and limits.
    options: Option<OptionsParam>,
    /// Time that the model stays in memory after its last use.
    keep_alive: Option<KeepAlive>,
    /// True to report log-probabilities.
    logprobs: Option<bool>,
    /// Number of most probable tokens to report at each position, at most 20.
    top_logprobs: Option<usize>,
    /// Images before the prompt, in base64.
    images: Option<Vec<String>>,
    /// Text after the gap, for models that support fill-in-the-middle. The chat template is not used.
    suffix: Option<String>,
}

/// Known fields of this endpoint.
const OTHERS: &[Other] = &[
    refused("template", &[], "models have their own template; `raw` disables it"),
    refused("context", &[], "use /api/chat for a conversation"),
    left_out("truncate", &["true", "false"], "a prompt that does not fit is refused, not cut"),
    refused("width", &[], "answers are text"),
    refused("height", &[], "answers are text"),
    refused("steps", &[], "answers are text"),
];

impl Body for GenerateParams {
    const OTHERS: &'static [&'static [Other]] = &[OTHERS, types::OTHERS, options::OTHERS];
}

/// Answers a prompt, as a whole or line by line.
///
/// # Errors
/// A field that is not supported, by name.
#[utoipa::path(
    post, path = "/api/generate", tag = "Ollama", request_body = GenerateParams,
    responses((status = 200, content((Answer = "application/json"), (Answer = "application/x-ndjson")))),
)]
pub async fn generate(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<GenerateParams>,
) -> Result<Response, ApiError> {
    body.refuse_unsupported()?;
    let keep_alive = body.keep_alive;
    keep_alive.map_or(Ok(()), |KeepAlive(time)| caller.check_keep_alive(time))?;
    let stream = body.stream != Some(false);
    let writer = AnswerWriter { endpoint: Endpoint::Generate, model: body.model };
    let options = Options {
        logprobs: types::logprobs(body.logprobs, body.top_logprobs)?.map(Into::into),
        ..body.options.unwrap_or_default().into_options()?
    };
    let format = FormatParam::format(body.format)?;
    let reasoning = body.reasoning.combine("think", &caller.tolerance)?;
    let name = state.models.find(&writer.model).await?.name;
    let prompt = body.prompt.unwrap_or_default();
    if prompt.is_empty() {
        return models::load_or_unload(&state, &name, keep_alive, &writer).await;
    }
    let suffix = body.suffix.filter(|suffix| !suffix.is_empty());
    let generating = if let Some(suffix) = suffix {
        let prompt =
            Prompt::Gap { prefix: prompt, suffix, middle: String::new(), files: Vec::new(), param: "suffix" };
        let request = TextRequest { prompt, format, default_max_tokens: None, options };
        generate::text(&state, caller, &name, request).await
    } else if body.raw == Some(true) {
        let Parts { text, images } = with_images(body.images, "images", &prompt);
        let prompt = if images.is_empty() { Prompt::Text(prompt) } else { Prompt::Images { text, images } };
        let request = TextRequest { prompt, format, default_max_tokens: None, options };
        generate::text(&state, caller, &name, request).await
    } else {
        let system = body.system.filter(|system| !system.is_empty());
        let system = system.map(|system| Message::new(Role::System, system.into()));
        let content = with_images(body.images, "images", &prompt);
        let messages = system.into_iter().chain([Message::new(Role::User, content)]).collect();
        let request = ChatRequest {
            messages,
            format,
            reasoning: reasoning.reasoning,
            hides_reasoning: reasoning.is_hidden,
            template_variables: reasoning.template_variables,
            continues_text: true,
            options,
            ..ChatRequest::default()
        };
        generate::chat(&state, caller, &name, request).await
    };
    let generating = generating.map_err(rename)?;
    if let Some(KeepAlive(time)) = keep_alive {
        generating.keep_alive(time);
    }
    writer.write(generating, stream).await
}

impl GenerateParams {
    fn refuse_unsupported(&self) -> Result<(), ApiError> {
        if self.raw == Some(true) {
            refuse(&self.system, "system", "a `raw` prompt is used without a template")?;
            let think = self.reasoning.think.as_ref().filter(|think| **think != Think::Switch(false));
            refuse(&think, "think", "a `raw` prompt is used without a template")?;
        } else if self.suffix.is_some() {
            refuse(&self.images, "images", "a gap between two texts has no place for images")?;
            refuse(&self.system, "system", "a prompt with `suffix` is used without a template")?;
        }
        Ok(())
    }
}
