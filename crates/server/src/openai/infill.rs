//! `/infill` of llama.cpp: completion in editors.

use axum::{
    extract::State,
    response::{IntoResponse, Response},
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{
    messages::FormatParams,
    props,
    sampling::{self, SamplingParams},
};
use crate::{
    AppState,
    error::ApiError,
    extract::Json,
    generate::{self, Caller, Delta, Finish, Generating, Options, Piece, Prompt, TextRequest, Usage},
    stream,
    wire::{Body, Limit, Other, left_out, no_effect},
};

/// A request to fill a gap in a file.
#[derive(Debug, Deserialize, ToSchema)]
pub struct InfillRequest {
    /// The model's name; if absent, a loaded model, or the first one.
    pub model: Option<String>,
    /// The text before the gap.
    pub input_prefix: Option<String>,
    /// The text after the gap.
    pub input_suffix: Option<String>,
    /// Other files as context.
    pub input_extra: Option<Vec<ExtraFile>>,
    /// Beginning of the text in the gap.
    pub prompt: Option<String>,
    /// Streams the answer as server-sent events.
    pub stream: Option<bool>,
    /// Maximum tokens of the answer; -1 for no limit, 0 only computes the prompt.
    pub n_predict: Option<Limit>,
    /// As `n_predict`, which takes precedence.
    pub max_tokens: Option<Limit>,
    #[serde(flatten)]
    pub sampling: SamplingParams,
    #[serde(flatten)]
    pub format: FormatParams,
}

/// Another file.
#[derive(Debug, Deserialize, ToSchema)]
pub struct ExtraFile {
    /// Its name.
    pub filename: Option<String>,
    /// Its content.
    pub text: String,
}

/// Known fields of this endpoint.
const OTHERS: &[Other] = &[
    no_effect("id_slot", "there are no slots"),
    no_effect("response_fields", "all fields are sent"),
    no_effect("input_extra[].time", "files come in the order in which they are given"),
    left_out("n_indent", &["0"], "lines are returned as the model writes them"),
    left_out("t_max_prompt_ms", &["0"], "`X-Request-Timeout` bounds the time of a request"),
    left_out("t_max_predict_ms", &["0"], "`X-Request-Timeout` bounds the time of a request"),
];

impl Body for InfillRequest {
    // Takes precedence over the shared list: editors send the samplers in the order of this server.
    const OTHERS: &'static [&'static [Other]] =
        &[OTHERS, &[left_out("samplers", &[], "the order of samplers is fixed")], sampling::OTHERS];
}

/// Text in the gap, or a part of it.
#[derive(Debug, Serialize, ToSchema)]
pub struct Infill {
    /// Always 0.
    index: usize,
    content: String,
    /// True in the last part.
    stop: bool,
    model: String,
    /// Tokens of the answer so far.
    tokens_predicted: usize,
    /// Tokens of the prompt.
    tokens_evaluated: usize,
    #[serde(flatten)]
    end: Option<InfillEnd>,
}

/// Fields of the last part.
#[derive(Debug, Serialize, ToSchema)]
pub struct InfillEnd {
    generation_settings: props::GenerationSettings,
    /// `eos`, `word` or `limit`.
    stop_type: &'static str,
    stopping_word: String,
    /// Always false: prompts are not truncated.
    truncated: bool,
    /// Prompt tokens found in the prefix cache.
    tokens_cached: usize,
    timings: InfillTimings,
}

/// Durations and counts.
#[derive(Debug, Serialize, ToSchema)]
pub struct InfillTimings {
    /// Prompt tokens that were computed.
    prompt_n: usize,
    prompt_ms: f64,
    prompt_per_second: f64,
    predicted_n: usize,
    predicted_ms: f64,
    predicted_per_second: f64,
}

/// Fills a gap between two texts.
///
/// # Errors
/// A field that is not supported, by name, or a tokenizer without tokens for fill-in-the-middle.
#[utoipa::path(
    post, path = "/infill", tag = "OpenAI", request_body = InfillRequest,
    responses((status = 200, content((Infill = "application/json"), (String = "text/event-stream")))),
)]
pub async fn create(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<InfillRequest>,
) -> Result<Response, ApiError> {
    let entry = props::find(&state, body.model).await?;
    let max_tokens = body.n_predict.or(body.max_tokens).and_then(|most| most.0);
    let options = Options { max_tokens: max_tokens.map(Into::into), ..body.sampling.into_options()? };
    let extra = body.input_extra.unwrap_or_default().into_iter();
    let prompt = Prompt::Gap {
        prefix: body.input_prefix.unwrap_or_default(),
        suffix: body.input_suffix.unwrap_or_default(),
        middle: body.prompt.unwrap_or_default(),
        files: extra.map(|file| (file.filename.unwrap_or_else(|| "tmp".into()), file.text)).collect(),
        param: "input_suffix",
    };
    let request = TextRequest { prompt, format: body.format.format()?, default_max_tokens: None, options };
    let context = state.models.context(&entry);
    let generating = generate::text(&state, caller, &entry.name, request).await?;
    let filler = Filler { generating, context, used: Usage::default() };
    if body.stream == Some(true) { Ok(filler.stream()) } else { filler.collect().await }
}

struct Filler {
    generating: Generating,
    context: Option<usize>,
    used: Usage,
}

impl Filler {
    async fn collect(mut self) -> Result<Response, ApiError> {
        let mut content = String::new();
        let mut end = None;
        while let Some(piece) = self.generating.next().await {
            match piece? {
                Piece::Delta { delta: Delta::Text(text), .. } => content += &text,
                Piece::Delta { .. } | Piece::Prefilled(_) => {}
                Piece::Finished { reason, usage, .. } => end = Some(self.end(reason, usage)),
            }
        }
        Ok(Json(Infill { end, stop: true, ..self.part(content) }).into_response())
    }

    fn stream(mut self) -> Response {
        let keep_alive = stream::data(&self.part(String::new()));
        stream::events(Box::new(move || keep_alive.clone()), |events| async move {
            while let Some(piece) = self.generating.next().await {
                match piece {
                    Ok(Piece::Delta { delta: Delta::Text(text), .. }) => events.data(&self.part(text)).await,
                    Ok(Piece::Delta { .. } | Piece::Prefilled(_)) => {}
                    Ok(Piece::Finished { reason, usage, .. }) => {
                        let end = Some(self.end(reason, usage));
                        events.data(&Infill { end, stop: true, ..self.part(String::new()) }).await;
                    }
                    Err(error) => return events.data(&super::error::body(&error)).await,
                }
            }
        })
    }

    fn part(&self, content: String) -> Infill {
        let used = self.generating.usage_so_far();
        Infill {
            index: 0,
            content,
            stop: false,
            model: self.generating.model().to_owned(),
            tokens_predicted: used.completion.max(self.used.completion),
            tokens_evaluated: self.generating.prompt_tokens(),
            end: None,
        }
    }

    fn end(&mut self, reason: Finish, usage: Usage) -> InfillEnd {
        self.used = usage;
        let timing = self.generating.timing();
        let (prompt, decode) = timing.stages(usage.prompt - usage.cached);
        let (seconds, decode) = (prompt.as_secs_f64(), decode.as_secs_f64());
        let per_second = |tokens: usize, time: f64| if time > 0.0 { tokens as f64 / time } else { 0.0 };
        let prompt_n = usage.prompt - usage.cached;
        let (stop_type, stopping_word) = match reason {
            Finish::StopString(text) => ("word", text),
            Finish::Length => ("limit", String::new()),
            Finish::Stop | Finish::ToolCalls => ("eos", String::new()),
        };
        InfillEnd {
            generation_settings: props::GenerationSettings { n_ctx: self.context },
            stop_type,
            stopping_word,
            truncated: false,
            tokens_cached: usage.cached,
            timings: InfillTimings {
                prompt_n,
                prompt_ms: seconds * 1e3,
                prompt_per_second: per_second(prompt_n, seconds),
                predicted_n: usage.completion,
                predicted_ms: decode * 1e3,
                predicted_per_second: per_second(usage.completion.saturating_sub(1).max(1), decode),
            },
        }
    }
}
