//! `/ui/v1/models`: all models with their state and properties in one list.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use axum::extract::State;
use paguro_model::{GenerationDefaults, ModelFile};
use serde::Serialize;
use tokio::task::spawn_blocking;
use utoipa::ToSchema;

use crate::{
    AppState,
    error::ApiError,
    extract::Json,
    made_from::made_from,
    models::ResidentInfo,
    ollama::models::capabilities,
    source::{LoadPlan, ModelEntry, Outside},
};

/// All models.
#[derive(Debug, Serialize, ToSchema)]
pub struct ModelCards {
    models: Vec<ModelCard>,
    /// Memory limit of all loaded models, in bytes.
    memory_limit: u64,
    /// Bytes in use by loaded models.
    memory_used: u64,
}

/// A model.
#[derive(Debug, Serialize, ToSchema)]
pub struct ModelCard {
    /// Name of the model.
    name: String,
    /// Bytes of its weights.
    bytes: u64,
    /// Time at which it was added, in seconds since 1970; 0 for the embedded model.
    created: u64,
    /// False for models that the library cannot delete.
    in_library: bool,
    /// True for the model inside the program.
    built_in: bool,
    /// True if its files are outside of the library, and stay when it is deleted.
    in_place: bool,
    /// True if it came from a hub, and can be pulled again.
    pulled: bool,
    /// Other names of the model.
    aliases: Vec<String>,
    /// The model that it changes; absent for models.
    adapter: Option<AdapterCard>,
    /// Contents of its file, or of that of its model; absent if the file cannot be read.
    file: Option<FileCard>,
    /// Reason for which its file cannot be read.
    problem: Option<String>,
    /// Memory of a load; absent if it cannot be loaded.
    needs: Option<NeedsCard>,
    /// State of the loaded model; absent while it is not loaded.
    loaded: Option<LoadedCard>,
}

/// An adapter (LoRA).
#[derive(Debug, Serialize, ToSchema)]
pub struct AdapterCard {
    /// Name of the model that it changes; empty if there is none.
    base: String,
    /// True while it is loaded with its model.
    loaded: bool,
}

made_from! {
    /// Memory of a load, in bytes.
    #[derive(Debug, Serialize, ToSchema)]
    pub struct NeedsCard from plan: LoadPlan {
        weights: u64 = plan.weights,
        /// Buffers between operations.
        buffers: u64 = plan.buffers,
        /// K and V of one sequence of `context` tokens.
        kv: u64 = plan.kv_enough,
        /// Sum of weights, buffers, and K and V.
        total: u64 = plan.with(plan.kv_enough),
        /// Minimum, with K and V for a short conversation.
        least: u64 = plan.with(plan.kv_least.min(plan.kv_enough)),
        /// Maximum tokens of prompt and answer.
        context: usize = plan.context,
    }
}

/// Contents of a model's file.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct FileCard {
    /// Its architecture.
    family: String,
    /// `GGUF` or `safetensors`.
    format: String,
    /// Number of weights.
    parameters: u64,
    /// Encoding of most weights: `Q4_K_M`.
    quantization: String,
    /// Trained context in tokens.
    context: Option<u64>,
    /// `completion`, `tools`, `thinking`.
    capabilities: Vec<&'static str>,
    /// Purposes of the model, for display: `chat`, `text` (it continues texts), `embeddings`, `rerank`, `tools`, `thinking`,
    /// `images`.
    /// Narrower than `capabilities`: a chat model also has embeddings, but is rarely used for them.
    uses: Vec<&'static str>,
    /// The chat template, in jinja; empty if there is none.
    template: String,
}

made_from! {
    /// A model that is loaded.
    #[derive(Debug, Serialize, ToSchema)]
    pub struct LoadedCard from model: ResidentInfo where groups = &model.model.program.kv.groups; {
        device: String = model.device,
        /// Bytes of weights and pages.
        bytes: u64 = model.bytes,
        /// Maximum tokens of prompt and answer.
        context: usize = model.handle.max_context(),
        /// Tokens in a page.
        block_size: usize = model.block_size,
        /// True if every layer attends to all tokens, so that an answer's pages follow from its length.
        one_kv_group: bool = matches!(groups.as_slice(), [group] if group.window.is_none()),
        /// Number of requests that hold it.
        users: usize = model.users,
        /// Seconds until it is unloaded without further requests; `null` for never.
        expires_in: Option<f64> = model.expires_in.map(|time| time.as_secs_f64()),
        /// True if it computes embeddings.
        embeds: bool = model.model.pooling.is_ok(),
        /// Its default sampling values.
        sampling: SamplingCard = SamplingCard::from(&model.model.defaults),
    }
}

made_from! {
    /// Default sampling values of a model.
    #[derive(Debug, Serialize, ToSchema)]
    pub struct SamplingCard from defaults: &GenerationDefaults where values = defaults.sampling(); {
        temperature: f32 = values.temperature,
        top_k: u32 = values.top_k,
        top_p: f32 = values.top_p,
        min_p: f32 = values.min_p,
        repetition_penalty: f32 = values.repetition_penalty,
        frequency_penalty: f32 = values.frequency_penalty,
        presence_penalty: f32 = values.presence_penalty,
    }
}

/// Cards of files by name and version. They are cached because opening a file reads all of its metadata.
#[derive(Debug, Default)]
pub struct FileCards {
    known: Mutex<HashMap<(String, String), Arc<FileCard>>>,
}

impl FileCards {
    /// Returns the capabilities of the server with a model.
    ///
    /// # Errors
    /// The file cannot be read.
    pub async fn capabilities(
        &self,
        state: &AppState,
        entry: &ModelEntry,
    ) -> Result<Vec<&'static str>, ApiError> {
        Ok(self.of(state, entry).await?.capabilities.clone())
    }

    async fn of(&self, state: &AppState, entry: &ModelEntry) -> Result<Arc<FileCard>, ApiError> {
        let key = (entry.name.clone(), entry.version.clone());
        let known = || self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(card) = known().get(&key) {
            return Ok(card.clone());
        }
        let file = state.models.open(entry).await?;
        // Opening creates a tokenizer, which takes long.
        let of = entry.clone();
        let card = spawn_blocking(move || FileCard::of(&file, &of)).await;
        let card = Arc::new(card.map_err(|error| ApiError::Internal(format!("opening ended: {error}")))?);
        let mut known = known();
        // A name has one version at a time.
        known.retain(|(name, _), _| *name != entry.name);
        known.insert(key, card.clone());
        Ok(card)
    }

    /// Drops the cards of models that are not listed any more.
    fn keep(&self, entries: &[ModelEntry]) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|(name, version), _| {
            entries.iter().any(|entry| entry.name == *name && entry.version == *version)
        });
    }
}

impl FileCard {
    fn of(file: &ModelFile, entry: &ModelEntry) -> Self {
        let (description, metadata) = (file.description(), file.metadata());
        let templates = file.chat_templates().unwrap_or_default();
        let named = |name: &str| templates.iter().find(|template| template.0 == name).map(|it| it.1.clone());
        let own = || named("default").unwrap_or_default();
        let (template, tool_template) = match entry.chat_template.as_deref() {
            Some(other) => (other.to_owned(), other.to_owned()),
            None => (own(), named("tool_use").unwrap_or_else(own)),
        };
        let value = |wanted: &dyn Fn(&str) -> bool| {
            metadata.iter().find(|entry| wanted(&entry.key)).map(|entry| entry.value.clone())
        };
        let context = value(&|key| key.ends_with(".context_length"))
            .or_else(|| value(&|key| key.ends_with("max_position_embeddings")));
        let capabilities = capabilities(file, entry, &template, &tool_template);
        let uses = uses(file, &capabilities, &template, &tool_template);
        Self {
            family: file.architecture().unwrap_or("unknown").to_owned(),
            format: if file.format().starts_with("GGUF") { "GGUF" } else { "safetensors" }.to_owned(),
            parameters: description.parameters,
            quantization: description.quantization,
            context: context.and_then(|tokens| tokens.parse().ok()),
            capabilities,
            uses,
            template,
        }
    }
}

/// Returns the purposes of a model, for [`FileCard::uses`].
fn uses(file: &ModelFile, capabilities: &[&str], template: &str, tool_template: &str) -> Vec<&'static str> {
    let can = |name: &str| capabilities.contains(&name);
    let reranks = can("rerank");
    let embeds = can("embedding") && (file.is_encoder() || file.states_pooling().unwrap_or(false));
    let generates = can("completion") && !reranks && !embeds;
    let chats = generates && !template.is_empty();
    let all = [
        ("chat", chats),
        ("text", generates && template.is_empty()),
        ("embeddings", embeds),
        ("rerank", reranks),
        // A template without a place for tools gets them as text, which few such models understand.
        ("tools", chats && can("tools") && tool_template.contains("tools")),
        ("thinking", chats && can("thinking")),
        ("images", chats && can("vision")),
    ];
    all.into_iter().filter(|(_, has)| *has).map(|(name, _)| name).collect()
}

/// Lists all models.
///
/// # Errors
/// The library's error.
#[utoipa::path(get, path = "/ui/v1/models", tag = "Page", responses((status = 200, body = ModelCards)))]
pub async fn list(State(state): State<AppState>) -> Result<Json<ModelCards>, ApiError> {
    let entries = state.models.list().await?;
    state.file_cards.keep(&entries);
    let mut loaded: HashMap<String, ResidentInfo> =
        state.models.resident().into_iter().map(|model| (model.entry.name.clone(), model)).collect();
    let with_adapters: Vec<(String, String)> = loaded
        .values()
        .flat_map(|it| it.adapters.iter().map(|adapter| (it.entry.name.clone(), adapter.name().to_string())))
        .collect();
    let memory_used = loaded.values().map(|model| model.bytes).sum();
    let mut models: Vec<ModelCard> = Vec::new();
    let mut aliases: HashMap<String, Vec<String>> = HashMap::new();
    for entry in entries {
        // An alias is listed as an entry of its own, with the content of its model.
        let canonical =
            state.models.find(&entry.name).await.map_or_else(|_| entry.name.clone(), |it| it.name);
        if canonical != entry.name {
            aliases.entry(canonical).or_default().push(entry.name);
            continue;
        }
        let (file, problem) = match (&entry.adapter, &entry.details.problem) {
            // Its file is that of its model, which is missing.
            (Some(_), Some(problem)) => (None, Some(problem.clone())),
            _ => match state.file_cards.of(&state, &entry).await {
                Ok(card) => (Some(FileCard::clone(&card)), None),
                Err(problem) => (None, Some(problem.to_string())),
            },
        };
        let adapter = entry.adapter.as_ref().map(|place| AdapterCard {
            base: place.base.clone(),
            loaded: with_adapters.iter().any(|(base, name)| (base, name) == (&place.base, &place.name)),
        });
        let outside = state.models.outside(&entry.name);
        models.push(ModelCard {
            in_library: entry.adapter.as_ref().map_or(outside.is_none(), |place| place.in_library),
            built_in: matches!(outside, Some(Outside::Program { .. })),
            in_place: entry.details.in_place,
            pulled: entry.details.pulled,
            aliases: Vec::new(),
            adapter,
            loaded: loaded.remove(&entry.name).map(LoadedCard::from),
            name: entry.name,
            bytes: entry.bytes,
            created: entry.created,
            needs: entry.details.plan.map(NeedsCard::from),
            file,
            problem: problem.or(entry.details.problem),
        });
    }
    for model in &mut models {
        model.aliases = aliases.remove(&model.name).unwrap_or_default();
    }
    Ok(Json(ModelCards { models, memory_limit: state.settings.residency.memory, memory_used }))
}
