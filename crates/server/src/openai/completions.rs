//! `/v1/completions`: continuation of a text without a chat template.

use std::{collections::VecDeque, ops::Range, pin::Pin};

use axum::{
    extract::State,
    response::{IntoResponse, Response},
};
use futures_util::{
    Stream, StreamExt,
    stream::{self, SelectAll},
};
use paguro_model::tokenizer::Tokenizer;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Map;
use serde_untagged::UntaggedEnumVisitor;
use utoipa::ToSchema;

use super::{
    logprobs::TextLogprobs,
    messages::FormatParams,
    multimodal::CompletionPrompt,
    sampling::{self, SamplingParams},
    types::{FinishReason, PromptProgress, StreamOptions, Usage, UsageChunks},
};
use crate::{
    AppState,
    count::check_length,
    error::ApiError,
    extract::Json,
    fleet::{Parameters, set_fields},
    generate::{self, Caller, Delta, Generating, Options, Piece, Prompt, PromptLogprobs, TextRequest},
    ids,
    settings::ServerSettings,
    stream::{data, events},
    wire::{Body, Limit, Other, left_out, no_effect, refuse},
};

/// Default maximum tokens of an answer, as in OpenAI's API.
const DEFAULT_MAX_TOKENS: usize = 16;

/// A request to continue a text.
#[derive(Debug, Deserialize, ToSchema)]
pub struct CompletionRequest {
    /// The model's name, as `/v1/models` lists it.
    pub model: String,
    /// A text or its tokens, or a list of them; or a text with images, in llama.cpp's format.
    pub prompt: CompletionPrompt,
    /// Streams the answer as server-sent events.
    pub stream: Option<bool>,
    /// Options of the stream.
    pub stream_options: Option<StreamOptions>,
    /// Sends chunks with the progress of the prompts' prefill before the answers. (From llama.cpp.)
    pub return_progress: Option<bool>,
    /// Number of answers to each prompt.
    pub n: Option<usize>,
    /// Must be equal to `n` or absent.
    pub best_of: Option<usize>,
    /// Begins each answer with its prompt. With `logprobs`, those of the prompt's tokens are included, and `max_tokens`
    /// may be 0.
    pub echo: Option<bool>,
    /// Maximum tokens of an answer, 16 if absent; 0 only with `echo`; -1 for no limit.
    pub max_tokens: Option<Limit>,
    /// The name of `max_tokens` in llama.cpp; `max_tokens` takes precedence.
    pub n_predict: Option<Limit>,
    #[serde(flatten)]
    pub sampling: SamplingParams,
    #[serde(flatten)]
    pub format: FormatParams,
    /// Reports log-probabilities of the tokens, and of this many most probable tokens at each position, at most 20.
    /// With `echo`, those of the prompt's tokens are included; the prefix cache is then not used for the prompt.
    pub logprobs: Option<usize>,
    /// Text after the gap, for models that support fill-in-the-middle; `prompt` is the text before it.
    pub suffix: Option<String>,
}

/// Known fields of this endpoint.
const OTHERS: &[Other] = &[
    left_out("stream_options.include_obfuscation", &["false"], "chunks are not padded"),
    no_effect("add_special_tokens", "the model's tokenizer defines them"),
];

impl Body for CompletionRequest {
    const OTHERS: &'static [&'static [Other]] = &[OTHERS, sampling::OTHERS];
}

/// Prompts.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub enum PromptParam {
    /// A text.
    Text(String),
    /// Texts.
    Texts(Vec<String>),
    /// Tokens.
    Tokens(Vec<u32>),
    /// Lists of tokens.
    TokenLists(Vec<Vec<u32>>),
}

/// An element of a list of prompts.
enum Element {
    Text(String),
    Token(u32),
    Tokens(Vec<u32>),
}

impl<'de> Deserialize<'de> for Element {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        UntaggedEnumVisitor::new()
            .expecting("a text, a token, or a list of tokens")
            .string(|text| Ok(Self::Text(text.to_owned())))
            .u32(|token| Ok(Self::Token(token)))
            .seq(|tokens| tokens.deserialize().map(Self::Tokens))
            .deserialize(deserializer)
    }
}

impl<'de> Deserialize<'de> for PromptParam {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        /// The elements, or the index of the first one of another kind.
        fn all<T>(elements: Vec<Element>, kind: fn(Element) -> Option<T>) -> Result<Vec<T>, usize> {
            elements.into_iter().enumerate().map(|(index, element)| kind(element).ok_or(index)).collect()
        }
        UntaggedEnumVisitor::new()
            .expecting("a text, a list of texts, a list of tokens, or a list of lists of tokens")
            .string(|text| Ok(Self::Text(text.to_owned())))
            .seq(|list| {
                let elements: Vec<Element> = list.deserialize()?;
                let of_one_kind = match elements.first() {
                    None => Ok(Self::Texts(Vec::new())),
                    Some(Element::Text(_)) => all(elements, |element| match element {
                        Element::Text(text) => Some(text),
                        _ => None,
                    })
                    .map(Self::Texts),
                    Some(Element::Token(_)) => all(elements, |element| match element {
                        Element::Token(token) => Some(token),
                        _ => None,
                    })
                    .map(Self::Tokens),
                    Some(Element::Tokens(_)) => all(elements, |element| match element {
                        Element::Tokens(tokens) => Some(tokens),
                        _ => None,
                    })
                    .map(Self::TokenLists),
                };
                of_one_kind.map_err(|index| {
                    serde::de::Error::custom(format!(
                        "texts, tokens and lists of tokens are mixed: element {index} is of another kind than those before"
                    ))
                })
            })
            .deserialize(deserializer)
    }
}

impl PromptParam {
    /// Returns the prompts; `param` is the field that they were in.
    ///
    /// # Errors
    /// There are no prompts or too many, or token ids are refused by the settings.
    pub fn into_prompts(
        self,
        param: &str,
        most: usize,
        settings: &ServerSettings,
    ) -> Result<Vec<Prompt>, ApiError> {
        if settings.refuse_token_ids && matches!(self, Self::Tokens(_) | Self::TokenLists(_)) {
            let message = format!(
                "`{param}` has token ids, which this server refuses (--refuse-token-ids): ids of another model's tokenizer, \
                 such as OpenAI's, are other text here; send text (in LangChain: check_embedding_ctx_length=False)"
            );
            return Err(ApiError::invalid(param, message));
        }
        let prompts = match self {
            Self::Text(text) => vec![Prompt::Text(text)],
            Self::Texts(texts) => texts.into_iter().map(Prompt::Text).collect(),
            Self::Tokens(tokens) => vec![Prompt::Tokens(tokens)],
            Self::TokenLists(lists) => lists.into_iter().map(Prompt::Tokens).collect(),
        };
        if prompts.is_empty() {
            return Err(ApiError::invalid(param, format!("`{param}` is an empty list")));
        }
        check_length(prompts.len(), most, param)?;
        Ok(prompts)
    }
}

/// Maximum number of prompts of one request.
const MOST_PROMPTS: usize = 2048;

/// Continuations of texts.
#[derive(Debug, Serialize, ToSchema)]
pub struct Completion<'c> {
    id: &'c str,
    /// Always `text_completion`, also in chunks.
    object: &'static str,
    /// Seconds since 1970.
    created: u64,
    model: &'c str,
    choices: Vec<CompletionChoice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Usage>,
    /// Present in chunks before the answer, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_progress: Option<PromptProgress>,
}

/// One continuation.
#[derive(Debug, Default, Serialize, ToSchema)]
pub struct CompletionChoice {
    /// Index of the answer; those of the first prompt precede those of the second.
    index: usize,
    text: String,
    logprobs: Option<TextLogprobs>,
    finish_reason: Option<FinishReason>,
    /// Prefill of its prompt, for the chunk that has this choice.
    #[serde(skip)]
    progress: Option<PromptProgress>,
}

/// Continues texts, as a whole or as a stream.
///
/// # Errors
/// A field that is not supported, by name.
#[utoipa::path(
    post, path = "/v1/completions", tag = "OpenAI", request_body = CompletionRequest,
    responses((status = 200, content((Completion<'static> = "application/json"), (String = "text/event-stream")))),
)]
pub async fn create(
    State(state): State<AppState>,
    caller: Caller,
    Json(body): Json<CompletionRequest>,
) -> Result<Response, ApiError> {
    let stream = body.stream == Some(true);
    let usage = StreamOptions::usage(body.stream_options);
    let answers = Answers::start(&state, caller, body).await?;
    if stream { Ok(answers.stream(usage)) } else { answers.collect().await }
}

impl CompletionRequest {
    /// Returns what the request has besides its prompts.
    pub(crate) fn parameters(&self) -> Parameters {
        let mut sampling = Map::new();
        set_fields(&self.sampling, &mut sampling);
        set_fields(&self.format, &mut sampling);
        let most = self.max_tokens.or(self.n_predict);
        let numbers =
            [("max_tokens", most.and_then(|most| most.0)), ("n", self.n), ("logprobs", self.logprobs)];
        for (name, number) in numbers {
            sampling.extend(number.map(|number| (name.to_owned(), number.into())));
        }
        let (model, stream) = (self.model.clone(), self.stream == Some(true));
        let default_max_tokens = most.is_none().then_some(DEFAULT_MAX_TOKENS);
        Parameters { prefix: "cmpl-", model, sampling, default_max_tokens, stream }
    }

    /// Returns the prompts.
    ///
    /// # Errors
    /// There are none or too many, or they do not go with `suffix`.
    pub(crate) fn prompts(self, settings: &ServerSettings) -> Result<Vec<Prompt>, ApiError> {
        let with_suffix = |prompt| match (prompt, &self.suffix) {
            (Prompt::Text(prefix), Some(suffix)) if !suffix.is_empty() => Ok(Prompt::Gap {
                prefix,
                suffix: suffix.clone(),
                middle: String::new(),
                files: Vec::new(),
                param: "suffix",
            }),
            (Prompt::Tokens(_) | Prompt::Images { .. }, Some(suffix)) if !suffix.is_empty() => {
                let message = "`suffix` goes with a `prompt` that is a text, not with tokens or images";
                Err(ApiError::invalid("suffix", message))
            }
            (prompt, _) => Ok(prompt),
        };
        let prompts = self.prompt.into_prompts(MOST_PROMPTS, settings)?;
        prompts.into_iter().map(with_suffix).collect()
    }

    fn options(&mut self) -> Result<Options, ApiError> {
        let best_of = self.best_of.filter(|&best| best != self.n.unwrap_or(1));
        refuse(&best_of, "best_of", "answers are not ranked; `n` asks for several")?;
        let echo = self.echo == Some(true);
        if self.logprobs > Some(20) {
            return Err(ApiError::invalid("logprobs", "`logprobs` must be at most 20"));
        }
        self.max_tokens = self.max_tokens.or(self.n_predict);
        let max_tokens = match self.max_tokens {
            Some(Limit(Some(0))) if echo => Some(0),
            most => Limit::at_least_one(most, "max_tokens")?,
        };
        Ok(Options {
            max_tokens: max_tokens.map(Into::into),
            n: self.n.map(Into::into),
            logprobs: self.logprobs.map(Into::into),
            score_prompt: echo && self.logprobs.is_some(),
            report_prefill: self.return_progress == Some(true) && self.stream == Some(true),
            ..std::mem::take(&mut self.sampling).into_options()?
        })
    }
}

type Parts = Pin<Box<dyn Stream<Item = Part> + Send>>;

/// Answers to one prompt.
struct Part {
    /// Index of the prompt.
    of: usize,
    /// Usage of its choices so far.
    used: generate::Usage,
    /// Indices of its choices.
    choices: Range<usize>,
    /// Log-probabilities of the prompt for its first choice, if requested.
    prompt: Option<PromptLogprobs>,
    piece: Result<Piece, ApiError>,
}

/// Answers to all prompts.
struct Answers {
    parts: SelectAll<Parts>,
    /// Parts to return before the next piece.
    ready: VecDeque<CompletionChoice>,
    /// Text at the beginning of each choice, until it was returned.
    beginnings: Vec<String>,
    tokenizer: std::sync::Arc<Tokenizer>,
    wants_logprobs: bool,
    id: String,
    created: u64,
    model: String,
    /// Usage of each prompt's choices that have ended.
    ended: Vec<generate::Usage>,
    /// Usage of each prompt's choices so far.
    used: Vec<generate::Usage>,
    /// Characters of each choice's tokens so far, for the offsets of the next ones.
    lengths: Vec<usize>,
}

impl Answers {
    async fn start(state: &AppState, caller: Caller, mut body: CompletionRequest) -> Result<Self, ApiError> {
        let options = body.options()?;
        let format = std::mem::take(&mut body.format).format()?;
        // -1 is no limit.
        let default_max_tokens = body.max_tokens.is_none().then_some(DEFAULT_MAX_TOKENS);
        let echo = body.echo == Some(true);
        let mut started: Vec<Generating> = Vec::new();
        let mut beginnings = Vec::new();
        let model = body.model.clone();
        let prompts = body.prompts(&state.settings)?;
        // Each choice stores its beginning, and all choices share one queue.
        let most = (MOST_PROMPTS / prompts.len()).max(1);
        if options.n.is_some_and(|n| n > most.into()) {
            let (count, n) = (prompts.len(), options.n.map(|n| n.to_string()).unwrap_or_default());
            let message = format!(
                "`prompt` has {count} elements, and `n` is {n}; at most {MOST_PROMPTS} answers are one request"
            );
            return Err(ApiError::invalid("n", message));
        }
        for prompt in prompts {
            let beginning = if echo { Some(prompt.clone()) } else { None };
            let request =
                TextRequest { prompt, format: format.clone(), default_max_tokens, options: options.clone() };
            let generating = generate::text(state, caller.clone(), &model, request).await?;
            let beginning = beginning.map(|prompt| prompt.text(generating.tokenizer())).unwrap_or_default();
            beginnings.extend(std::iter::repeat_n(beginning, generating.choices()));
            started.push(generating);
        }
        let (tokenizer, model) = (started[0].tokenizer().clone(), started[0].model().to_owned());
        let used: Vec<_> = started.iter().map(Generating::usage_so_far).collect();
        let mut first = 0;
        let parts = started.into_iter().enumerate().map(|(of, generating)| {
            let choices = first..first + generating.choices();
            first = choices.end;
            let parts = stream::unfold(generating, move |mut generating| {
                let choices = choices.clone();
                async move {
                    let piece = generating.next().await?;
                    let prompt = generating.take_prompt_logprobs();
                    let used = generating.usage_so_far();
                    Some((Part { of, used, choices, prompt, piece }, generating))
                }
            });
            Box::pin(parts) as Parts
        });
        let mut answers = Self {
            parts: parts.collect(),
            ready: VecDeque::new(),
            lengths: beginnings.iter().map(|text| text.chars().count()).collect(),
            beginnings,
            tokenizer,
            wants_logprobs: options.logprobs.is_some(),
            id: ids::new("cmpl-"),
            created: ids::now(),
            model,
            ended: vec![generate::Usage::default(); used.len()],
            used,
        };
        if !answers.wants_logprobs {
            answers.begin(0..answers.beginnings.len(), None);
        }
        Ok(answers)
    }

    /// Sets the beginnings of these choices.
    fn begin(&mut self, choices: Range<usize>, prompt: Option<&PromptLogprobs>) {
        for index in choices {
            let text = std::mem::take(&mut self.beginnings[index]);
            let logprobs = prompt.map(|prompt| TextLogprobs::of_prompt(&self.tokenizer, prompt, &text));
            if !text.is_empty() || logprobs.is_some() {
                let choice = CompletionChoice { index, text, logprobs, ..CompletionChoice::default() };
                self.ready.push_back(choice);
            }
        }
    }

    /// Returns the next part of a choice.
    async fn next(&mut self) -> Option<Result<CompletionChoice, ApiError>> {
        if let Some(choice) = self.ready.pop_front() {
            return Some(Ok(choice));
        }
        let Part { of, used, choices, prompt, piece } = self.parts.next().await?;
        self.used[of] = used;
        let (choice, text, logprobs, finish_reason) = match piece {
            Ok(piece @ Piece::Prefilled(_)) => {
                let (index, progress) = (choices.start, PromptProgress::of(&piece));
                return Some(Ok(CompletionChoice { index, progress, ..CompletionChoice::default() }));
            }
            Err(error) => return Some(Err(error)),
            Ok(Piece::Delta { choice, delta: Delta::Text(text), logprobs }) => (choice, text, logprobs, None),
            // Without tools and a template, an answer is only text.
            Ok(Piece::Delta { choice, logprobs, .. }) => (choice, String::new(), logprobs, None),
            Ok(Piece::Finished { choice, reason, mut logprobs, stop_token, usage }) => {
                self.ended[of].add_choice(usage);
                logprobs.extend(stop_token);
                (choice, String::new(), logprobs, Some(FinishReason::from(&reason)))
            }
        };
        let index = choices.start + choice;
        if let Some(prompt) = prompt {
            self.begin(choices, Some(&prompt));
        }
        let logprobs = self
            .wants_logprobs
            .then(|| TextLogprobs::new(&self.tokenizer, &logprobs, &mut self.lengths[index]));
        let choice = CompletionChoice { index, text, logprobs, finish_reason, progress: None };
        self.ready.push_back(choice);
        self.ready.pop_front().map(Ok)
    }

    async fn collect(mut self) -> Result<Response, ApiError> {
        let choice = |index| CompletionChoice { index, ..CompletionChoice::default() };
        let mut choices: Vec<_> = (0..self.beginnings.len()).map(choice).collect();
        while let Some(part) = self.next().await {
            let part = part?;
            let choice = &mut choices[part.index];
            choice.text += &part.text;
            choice.finish_reason = part.finish_reason.or(choice.finish_reason);
            if let Some(logprobs) = part.logprobs {
                choice.logprobs.get_or_insert_default().append(logprobs);
            }
        }
        let usage = Some(generate::Usage::of_prompts(&self.ended).into());
        Ok(Json(Completion { usage, ..self.chunk(choices) }).into_response())
    }

    fn stream(mut self, chunks: UsageChunks) -> Response {
        let keep_alive = data(&self.chunk(vec![CompletionChoice::default()]));
        events(Box::new(move || keep_alive.clone()), |events| async move {
            while let Some(part) = self.next().await {
                match part {
                    Ok(choice) => {
                        let usage = chunks.every.then(|| generate::Usage::of_prompts(&self.used).into());
                        let prompt_progress = choice.progress;
                        let chunk = self.chunk(vec![choice]);
                        events.data(&Completion { usage, prompt_progress, ..chunk }).await;
                    }
                    // The status has already been sent: the stream ends with the error, without `[DONE]`.
                    Err(error) => return events.data(&super::error::body(&error)).await,
                }
            }
            if chunks.last {
                let usage = Some(generate::Usage::of_prompts(&self.ended).into());
                events.data(&Completion { usage, ..self.chunk(Vec::new()) }).await;
            }
            events.done().await;
        })
    }

    fn chunk(&self, choices: Vec<CompletionChoice>) -> Completion<'_> {
        Completion {
            id: &self.id,
            object: "text_completion",
            created: self.created,
            model: &self.model,
            choices,
            usage: None,
            prompt_progress: None,
        }
    }
}
