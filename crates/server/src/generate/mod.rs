//! The layer that all APIs share: it turns a [`ChatRequest`] or [`TextRequest`] into tokens and an engine request, and the
//! engine's events into [`Piece`]s. The APIs only translate at both ends.

mod caller;
mod classify;
mod constraint;
mod defaults;
mod drafts;
mod embed;
mod generating;
mod images;
mod message;
mod options;
mod piece;
mod rank;
mod reading;
mod reasoning;
mod request;

use std::{sync::Arc, time::Instant};

use paguro_engine::{Constraint, Handle, Picture, PixelSource, Request};
use paguro_model::Model;
use paguro_vision::Pixels;

use self::images::PlacedImage;
use crate::{
    AppState,
    body::BodyShare,
    count::ClientCount,
    error::ApiError,
    images::{Sight, settle, text_only},
    models::Lease,
    prepare::{IsWanted, Size},
};

pub use caller::{Caller, salt_parts};
pub use classify::{ClassifyInput, ClassifyRequest, classify};
use constraint::Compiler;
pub use defaults::Defaults;
pub use drafts::DraftParams;
pub use embed::{EmbedRequest, Embedded, Field, MAX_INPUTS, PromptChoice, Truncation, VectorKinds, embed};
pub use generating::Generating;
pub use message::{Message, Role, Tool, ToolCall};
pub use options::Options;
pub use piece::{Delta, Finish, Piece, Progress, PromptLogprobs, Timing, TokenLogprob, Usage, stage_times};
pub use rank::{RankRequest, rank, score};
use reading::Reading;
pub use reasoning::Reasoning;
pub(crate) use request::check_text;
pub use request::{ChatRequest, Format, Prompt, TextRequest, ToolChoice};

/// Maximum context of a request, in tokens. Memory limits it further when a model is loaded.
const MAX_CONTEXT: usize = 1 << 30;

/// Starts the answer to a chat.
///
/// # Errors
/// The model is missing, cannot chat, or does not support the request.
pub async fn chat(
    state: &AppState,
    caller: Caller,
    model: &str,
    mut request: ChatRequest,
) -> Result<Generating, ApiError> {
    let received = Instant::now();
    let entry = state.models.find(model).await?;
    let asked = request.options.context;
    entry.read_defaults(&state.logged).complete(&mut request);
    let lora = request.options.lora.as_deref();
    let lease = lease(state, &caller, model, asked, request.options.context, lora).await?;
    request.tolerance = caller.tolerance.clone();
    let handle = lease.handle.clone();
    request.options.check(&handle)?;
    caller.in_time(fetch_images(state, &caller, &lease, &mut request)).await?;
    let limit = request.options.limit(&handle);
    let image_settings = state.settings.images.within(handle.max_image_tokens());
    let work = off_thread(state, &caller, &lease, move |model, is_wanted| {
        request.plan_images(model, &image_settings)?;
        let request::TokenizedChat { tokens, lasting_tokens, reading, images } =
            request.fit(model, handle.max_context(), limit)?;
        check_room(&tokens, &images, limit)?;
        let compiler = Compiler::new(&handle, is_wanted);
        let constraint = request.constraint(&reading, &model.tokenizer, &compiler)?;
        let hides_reasoning = request.hides_reasoning;
        let mut ready = ReadyRequest::new(request.options, model, &handle, tokens, constraint)?;
        ready.request.lasting_tokens = lasting_tokens;
        Ok((ReadyRequest { reading: Some(reading), hides_reasoning, ..ready }, images))
    });
    let (prepared, images) = caller.in_time(work).await?;
    let pictures = caller.in_time(decode_images(state, &caller, &lease, images)).await?;
    Generating::start(state, lease, caller, prepared, pictures, received)
}

/// Counts the tokens of a chat. Of images, only headers are read.
///
/// # Errors
/// The model is missing, cannot chat, or does not support the request.
pub async fn prompt(
    state: &AppState,
    caller: &Caller,
    lease: &Lease,
    mut request: ChatRequest,
) -> Result<Vec<u32>, ApiError> {
    fetch_images(state, caller, lease, &mut request).await?;
    let settings = state.settings.images.within(lease.handle.max_image_tokens());
    let max_context = lease.handle.max_context();
    let work = move |model: &Model, _: &IsWanted<'_>| {
        request.plan_images(model, &settings)?;
        request.prompt(model, max_context)
    };
    off_thread(state, caller, lease, work).await
}

/// Checks the images of a chat against the model, and fetches those at URLs.
async fn fetch_images(
    state: &AppState,
    caller: &Caller,
    lease: &Lease,
    request: &mut ChatRequest,
) -> Result<(), ApiError> {
    let settings = &state.settings.images;
    settle(&mut request.messages, &lease.entry.name, &lease.model, settings, &caller.tolerance)?;
    let images = request.messages.iter_mut().flat_map(|message| &mut message.images).collect();
    state.image_fetcher.fetch_all(&caller.client, images).await
}

/// Refuses a prompt with images that leaves no room for an answer, before they are decoded.
fn check_room(tokens: &[u32], images: &[PlacedImage], limit: usize) -> Result<(), ApiError> {
    if images.is_empty() || tokens.len() < limit {
        return Ok(());
    }
    Err(ApiError::ContextTooLong { tokens: tokens.len(), limit })
}

/// Decodes the images of a prompt. Their memory counts as that of the client's bodies until the engine has read them.
async fn decode_images(
    state: &AppState,
    caller: &Caller,
    lease: &Lease,
    images: Vec<PlacedImage>,
) -> Result<Vec<Picture>, ApiError> {
    let Some(sight) = Sight::of(&lease.model).filter(|_| !images.is_empty()) else { return Ok(Vec::new()) };
    let share = BodyShare::of(caller.client.clone());
    let mut decoded = Vec::with_capacity(images.len());
    let mut bytes = 0;
    for PlacedImage { image, rows } in images {
        bytes += image.plan.bytes();
        // More than the client's part takes all of it, as a large answer does.
        share.grow(&state.body_memory, bytes.min(state.body_memory.each()), 0).await?;
        let pixels = state.image_decoder.pixels(&caller.client, &image, &sight.processor).await?;
        let grid = pixels.parts.first().map_or([0; 2], |part| [part.rows, part.columns]);
        let pixels = Arc::new(HeldPixels { pixels, _share: share.clone() });
        decoded.push(Picture { key: image.key, rows, grid, pixels });
    }
    Ok(decoded)
}

/// Pixels that count as memory of their client until the engine has read them.
#[derive(Debug)]
struct HeldPixels {
    pixels: Arc<Pixels>,
    _share: BodyShare,
}

impl PixelSource for HeldPixels {
    fn pixels(&self) -> Result<Arc<Pixels>, String> {
        Ok(self.pixels.clone())
    }
}

/// The prompt of a request, for a server that answers it.
#[derive(Debug)]
pub struct Rendered {
    /// Canonical name of the model.
    pub model: String,
    /// Tokens of the prompt.
    pub tokens: Vec<u32>,
    /// Maximum tokens of prompt and answer.
    pub context: usize,
}

/// Returns the prompt of a chat as [`chat`] submits it, without queueing a request.
///
/// # Errors
/// As those of [`chat`]; the prompt leaves no room for an answer.
pub async fn render_chat(
    state: &AppState,
    caller: &Caller,
    model: &str,
    mut request: ChatRequest,
) -> Result<Rendered, ApiError> {
    let entry = state.models.find(model).await?;
    let asked = request.options.context;
    entry.read_defaults(&state.logged).complete(&mut request);
    let lora = request.options.lora.as_deref();
    let lease = lease(state, caller, model, asked, request.options.context, lora).await?;
    request.tolerance = caller.tolerance.clone();
    let context = lease.handle.max_context();
    let work = move |model: &Model, _: &IsWanted<'_>| Ok(request.fit(model, context, context)?.tokens);
    rendered(state, caller, &lease, work).await
}

/// Returns the prompt of a text as [`text`] submits it, without queueing a request.
///
/// # Errors
/// As those of [`text`]; the prompt leaves no room for an answer.
pub async fn render_text(
    state: &AppState,
    caller: &Caller,
    model: &str,
    prompt: Prompt,
) -> Result<Rendered, ApiError> {
    let lease = lease(state, caller, model, None, None, None).await?;
    let context = lease.handle.max_context();
    rendered(state, caller, &lease, move |model, _| Ok(prompt.tokens(model, context)?.0)).await
}

async fn rendered(
    state: &AppState,
    caller: &Caller,
    lease: &Lease,
    work: impl FnOnce(&Model, &IsWanted<'_>) -> Result<Vec<u32>, ApiError> + Send + 'static,
) -> Result<Rendered, ApiError> {
    let tokens = caller.in_time(off_thread(state, caller, lease, work)).await?;
    let (model, context) = (lease.entry.name.clone(), lease.handle.max_context());
    if tokens.len() >= context {
        return Err(ApiError::ContextTooLong { tokens: tokens.len(), limit: context });
    }
    Ok(Rendered { model, tokens, context })
}

/// Starts the continuation of a text.
///
/// # Errors
/// The model is missing, or does not support the request.
pub async fn text(
    state: &AppState,
    caller: Caller,
    model: &str,
    request: TextRequest,
) -> Result<Generating, ApiError> {
    let received = Instant::now();
    let TextRequest { mut prompt, format, default_max_tokens, options } = request;
    let entry = state.models.find(model).await?;
    let asked = options.context;
    let mut options = entry.read_defaults(&state.logged).complete_options(options);
    let lora = options.lora.as_deref();
    let lease = lease(state, &caller, model, asked, options.context, lora).await?;
    options.max_tokens = options.max_tokens.or(default_max_tokens.map(ClientCount::from));
    let handle = lease.handle.clone();
    options.check(&handle)?;
    if let Prompt::Images { images, .. } = &mut prompt {
        if let Some(image) = images.first().filter(|_| lease.model.vision.is_none()) {
            return Err(image.refuse(text_only(&lease.entry.name, &lease.model)));
        }
        let images = images.iter_mut().collect();
        caller.in_time(state.image_fetcher.fetch_all(&caller.client, images)).await?;
    }
    let image_settings = state.settings.images.within(handle.max_image_tokens());
    let work = off_thread(state, &caller, &lease, move |model, is_wanted| {
        if let Prompt::Gap { .. } = prompt {
            options.stop_tokens.extend(model.tokenizer.fill_ends());
        }
        if let Prompt::Images { images, .. } = &mut prompt {
            images::plan_images(images.iter_mut(), model, &image_settings)?;
        }
        let (prompt, images) = prompt.tokens(model, handle.max_context())?;
        check_room(&prompt, &images, options.limit(&handle))?;
        let constraint = format.constraint(&Compiler::new(&handle, is_wanted))?;
        Ok((ReadyRequest::new(options, model, &handle, prompt, constraint)?, images))
    });
    let (prepared, images) = caller.in_time(work).await?;
    let pictures = caller.in_time(decode_images(state, &caller, &lease, images)).await?;
    Generating::start(state, lease, caller, prepared, pictures, received)
}

/// Leases a model, loaded for sequences of `context` tokens where memory allows. If the client requested (`asked`) a
/// longer context than the loaded one, the answer names that.
async fn lease(
    state: &AppState,
    caller: &Caller,
    model: &str,
    asked: Option<ClientCount>,
    context: Option<ClientCount>,
    lora: Option<&[(usize, f32)]>,
) -> Result<Lease, ApiError> {
    let tokens = context.map(|context| context.at_most(MAX_CONTEXT));
    let lease = caller.in_time(state.models.lease_with(model, tokens, lora)).await?;
    let (loaded, trained) = (lease.handle.max_context(), lease.model.context_length);
    if let Some(asked) = asked.filter(|asked| *asked > ClientCount::from(loaded)) {
        let reason = if loaded < trained {
            "memory has no room for more, or others use the model".to_owned()
        } else {
            format!("the model was trained for {trained}")
        };
        let message = format!("{asked} exceeds the loaded context of {loaded} tokens; {reason}");
        caller.tolerance.leave_out("options.num_ctx", message)?;
    }
    Ok(lease)
}

/// A request of the engine, and what its answer is read by.
struct ReadyRequest {
    request: Request,
    /// Reader of the answer; `None` for plain continuations.
    reading: Option<Reading>,
    /// True if reasoning is not part of the answer.
    hides_reasoning: bool,
    /// True if all tokens are reported.
    report_tokens: bool,
    cache_salt: String,
}

impl ReadyRequest {
    /// Creates a plain continuation of the prompt.
    fn new(
        mut options: Options,
        model: &Model,
        handle: &Handle,
        prompt: Vec<u32>,
        constraint: Option<Constraint>,
    ) -> Result<Self, ApiError> {
        let (report_tokens, cache_salt) = (options.report_tokens, std::mem::take(&mut options.cache_salt));
        let request = Request { constraint, ..options.request(model, handle, prompt)? };
        Ok(Self { request, reading: None, hides_reasoning: false, report_tokens, cache_salt })
    }
}

/// Runs `work` on a preparation thread, in fair order among clients. `work` can check whether the client is still
/// connected.
pub(crate) async fn off_thread<T: Send + 'static>(
    state: &AppState,
    caller: &Caller,
    lease: &Lease,
    work: impl FnOnce(&Model, &IsWanted<'_>) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let (model, size) = (lease.model.clone(), caller.size());
    let release = state.release.clone();
    let work = move |is_wanted: &IsWanted<'_>| {
        let outcome = work(&model, is_wanted);
        if size == Size::Large {
            release.soon();
        }
        outcome
    };
    state.preparation.run(&caller.client, size, work).await
}
