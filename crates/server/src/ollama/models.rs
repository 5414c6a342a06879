//! Lists of all and of loaded models, and details of one.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::{extract::State, response::Response};
use paguro_model::ModelFile;
use paguro_model_output::Format;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::{
    answer::AnswerWriter,
    chat::MessageParam,
    create,
    duration::{KeepAlive, LONGEST},
    modelfile::{Modelfile, parameter_lines},
    types::rfc3339,
};
use crate::{
    AppState,
    error::ApiError,
    extract::Json,
    source::ModelEntry,
    wire::{Body, Other, left_out},
};

/// Tag of names without one.
const LATEST: &str = ":latest";

/// Answers a request that only loads or unloads a model.
///
/// # Errors
/// The model cannot be loaded.
pub async fn load_or_unload(
    state: &AppState,
    name: &str,
    keep_alive: Option<KeepAlive>,
    writer: &AnswerWriter,
) -> Result<Response, ApiError> {
    let unloads = keep_alive.is_some_and(KeepAlive::unloads);
    let is_resident = || state.models.resident().iter().any(|resident| resident.entry.name == name);
    if !unloads || is_resident() {
        let lease = state.models.lease(name).await?;
        if let Some(KeepAlive(time)) = keep_alive {
            lease.keep_alive(time);
        }
    }
    Ok(writer.without_text(if unloads { "unload" } else { "load" }))
}

/// All models.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OllamaTags)]
pub struct Tags {
    models: Vec<Tag>,
}

/// A model.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OllamaTag)]
pub struct Tag {
    /// Its name with its tag.
    name: String,
    /// Equal to `name`.
    model: String,
    /// Time at which it was added.
    modified_at: String,
    /// Bytes of its weights.
    size: u64,
    /// Digest of its content.
    digest: String,
    details: TagDetails,
}

/// Properties of a model.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OllamaDetails)]
pub struct TagDetails {
    /// In `/api/show`: the model from which it was made; empty in lists.
    parent_model: String,
    /// `gguf` or `safetensors`.
    format: String,
    /// Its architecture.
    family: String,
    /// A list with `family` alone.
    families: Vec<String>,
    /// Number of weights: `7.2B`.
    parameter_size: String,
    /// Encoding of most weights: `Q4_K_M`.
    quantization_level: String,
    /// Reason for which the model cannot be used.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

/// Models that are loaded.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OllamaProcesses)]
pub struct Processes {
    models: Vec<Process>,
}

/// A model that is loaded.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OllamaProcess)]
pub struct Process {
    /// Its name with its tag.
    name: String,
    /// Equal to `name`.
    model: String,
    /// Bytes of its weights, K and V, and buffers.
    size: u64,
    /// Bytes of them on a GPU.
    size_vram: u64,
    /// Digest of its content.
    digest: String,
    details: TagDetails,
    /// Time at which it is unloaded without further requests.
    expires_at: String,
    /// Maximum tokens of prompt and answer.
    context_length: usize,
}

/// A request for the details of a model.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = OllamaShowRequest)]
pub struct ShowParams {
    /// Its name.
    model: Option<String>,
    /// The older name of `model`.
    name: Option<String>,
}

impl Body for ShowParams {
    const OTHERS: &'static [&'static [Other]] = &[&[
        left_out("verbose", &["false"], "lists of tokens are not shown"),
        left_out("template", &[], "models have their own"),
        left_out("system", &[], "it is a field of requests that generate text"),
        left_out("options", &[], "they are fields of requests that generate text"),
    ]];
}

/// Details of a model.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OllamaShow)]
pub struct Show {
    /// A Modelfile from which `/api/create` makes the same model.
    modelfile: String,
    /// Default options of its requests, a line for each value.
    #[serde(skip_serializing_if = "String::is_empty")]
    parameters: String,
    /// The chat template, in jinja.
    template: String,
    /// Default system prompt.
    #[serde(skip_serializing_if = "String::is_empty")]
    system: String,
    /// Its licenses.
    #[serde(skip_serializing_if = "String::is_empty")]
    license: String,
    /// Messages before every chat.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<MessageParam>)]
    messages: Vec<Value>,
    details: TagDetails,
    /// Metadata of its file; lists are `null`. Those of a Hugging Face folder have the keys of GGUF.
    #[schema(value_type = Object)]
    model_info: Map<String, Value>,
    /// Capabilities: `completion`, `vision`, `tools`, `thinking`, `embedding`, `rerank`.
    capabilities: Vec<&'static str>,
    /// Properties of the vision tower: its kind as `clip.projector_type`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    projector_info: Option<Map<String, Value>>,
    /// Time at which it was added.
    modified_at: String,
}

/// The version of the API.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OllamaVersion)]
pub struct Version {
    version: &'static str,
}

/// Version of Ollama with this API. Clients derive the supported features from it.
const VERSION: &str = "0.12.6";

/// Lists all models.
///
/// # Errors
/// The library cannot be read.
#[utoipa::path(get, path = "/api/tags", tag = "Ollama", responses((status = 200, body = Tags)))]
pub async fn tags(State(state): State<AppState>) -> Result<Json<Tags>, ApiError> {
    let mut models = Vec::new();
    for entry in state.models.list().await? {
        let name = with_tag(&entry.name);
        models.push(Tag {
            model: name.clone(),
            name,
            modified_at: rfc3339(created(&entry)),
            size: entry.bytes,
            digest: entry.digest(),
            details: TagDetails::of(&entry),
        });
    }
    Ok(Json(Tags { models }))
}

/// Lists the models that are loaded.
///
/// # Errors
/// The library cannot be read.
#[utoipa::path(get, path = "/api/ps", tag = "Ollama", responses((status = 200, body = Processes)))]
pub async fn ps(State(state): State<AppState>) -> Result<Json<Processes>, ApiError> {
    let mut models = Vec::new();
    for resident in state.models.resident() {
        let name = with_tag(&resident.entry.name);
        let details = TagDetails::of(&resident.entry);
        // The API has no value for a model that stays for ever.
        let expires_in = resident.expires_in.unwrap_or(LONGEST).min(LONGEST);
        models.push(Process {
            model: name.clone(),
            name,
            size: resident.bytes,
            size_vram: if resident.device == "cpu" { 0 } else { resident.bytes },
            digest: resident.entry.digest(),
            details,
            expires_at: rfc3339(SystemTime::now() + expires_in),
            context_length: resident.handle.max_context(),
        });
    }
    Ok(Json(Processes { models }))
}

/// Returns the details of a model.
///
/// # Errors
/// No model has this name.
#[utoipa::path(
    post, path = "/api/show", tag = "Ollama", request_body = ShowParams,
    responses((status = 200, body = Show)),
)]
pub async fn show(
    State(state): State<AppState>,
    Json(body): Json<ShowParams>,
) -> Result<Json<Show>, ApiError> {
    let Some(name) = body.model.or(body.name) else {
        return Err(ApiError::invalid("model", "`model` is missing"));
    };
    let entry = state.models.find(&name).await?;
    let file = state.models.open(&entry).await?;
    let templates = file.chat_templates()?;
    let source = |name: &str| templates.iter().find(|template| template.0 == name).map(|it| it.1.clone());
    let own = || source("default").unwrap_or_default();
    let template = entry.chat_template.as_deref().map_or_else(own, str::to_owned);
    let mut model_info = model_info(&file);
    model_info.insert("general.parameter_count".into(), file.description().parameters.into());
    let capabilities = state.file_cards.capabilities(&state, &entry).await?;
    let base = match (&entry.adapter, entry.stored_text("from")) {
        (Some(adapter), _) => Some(adapter.base.clone()),
        (None, Some(from)) => state.models.find(from).await.ok().map(|base| base.name),
        (None, None) => None,
    };
    let messages = entry.defaults.get("messages").and_then(Value::as_array).cloned().unwrap_or_default();
    let system = entry.stored_text("system").unwrap_or_default().to_owned();
    let parameters = entry.defaults.get("options").and_then(Value::as_object).cloned().unwrap_or_default();
    let licenses = create::licenses(&entry.defaults);
    let text = |message: &Value, name: &str| message[name].as_str().unwrap_or_default().to_owned();
    let modelfile = Modelfile {
        from: Some(base.clone().unwrap_or_else(|| entry.name.clone())),
        adapter: entry.adapter.as_ref().filter(|_| base.is_some()).map(|_| entry.name.clone()),
        template: Some(template.clone()).filter(|template| !template.is_empty()),
        system: Some(system.clone()).filter(|system| !system.is_empty()),
        messages: messages.iter().map(|it| (text(it, "role"), text(it, "content"))).collect(),
        parameters: parameters.clone(),
        licenses: licenses.clone(),
    };
    let projector_info = entry.details.projector.as_ref().map(|kind| {
        Map::from_iter([
            ("clip.has_vision_encoder".to_owned(), true.into()),
            ("clip.projector_type".to_owned(), kind.as_str().into()),
        ])
    });
    let details = TagDetails { parent_model: base.unwrap_or_default(), ..TagDetails::of(&entry) };
    Ok(Json(Show {
        modelfile: modelfile.write(&with_tag(&entry.name)),
        parameters: parameter_lines(&parameters),
        template,
        system,
        license: licenses.join("\n\n"),
        messages,
        details,
        model_info,
        capabilities,
        projector_info,
        modified_at: rfc3339(created(&entry)),
    }))
}

/// Returns the version of the API.
#[utoipa::path(get, path = "/api/version", tag = "Ollama", responses((status = 200, body = Version)))]
pub async fn version() -> Json<Version> {
    Json(Version { version: VERSION })
}

/// Returns the capabilities of the server with a model.
pub fn capabilities(
    file: &ModelFile,
    entry: &ModelEntry,
    template: &str,
    tool_template: &str,
) -> Vec<&'static str> {
    let name = &entry.name;
    let reranks = matches!(file.is_judge(name), Ok(true)) || matches!(file.has_scores(), Ok(true));
    // Templates without support for tools get them as text, so only the call format matters.
    let takes_tools = !template.is_empty() && Format::detect(tool_template).calls().is_ok();
    let embeds = !reranks && matches!(file.pooling(), Ok(Ok(_)));
    let all = [
        ("completion", !file.is_encoder()),
        ("vision", entry.details.projector.is_some()),
        ("tools", takes_tools),
        ("thinking", Format::detect(template).reasons()),
        ("embedding", embeds),
        ("rerank", reranks),
        ("insert", file.tokenizer().is_ok_and(|tokenizer| tokenizer.fills_in())),
    ];
    all.into_iter().filter(|(_, can)| *can).map(|(name, _)| name).collect()
}

/// Returns a model's metadata under GGUF's keys.
fn model_info(file: &ModelFile) -> Map<String, Value> {
    const TEMPLATE: &str = "tokenizer.chat_template";
    file.gguf_metadata()
        .into_iter()
        .filter(|entry| entry.key != TEMPLATE)
        .map(|entry| {
            let value: Value = match entry.kind {
                "string" => entry.value.into(),
                _ => serde_json::from_str(&entry.value).unwrap_or_default(),
            };
            // Only the beginning of lists is read.
            (entry.key, if value.is_array() { Value::Null } else { value })
        })
        .collect()
}

impl TagDetails {
    fn of(entry: &ModelEntry) -> Self {
        let details = &entry.details;
        let family = details.architecture.clone().unwrap_or_else(|| "unknown".to_owned());
        Self {
            parent_model: String::new(),
            format: details.format.to_owned(),
            families: vec![family.clone()],
            family,
            parameter_size: size(details.parameters),
            quantization_level: details.quantization.clone(),
            problem: details.problem.clone(),
        }
    }
}

/// Formats a number of weights for display.
fn size(parameters: u64) -> String {
    match parameters as f64 {
        n if n >= 1e9 => format!("{:.1}B", n / 1e9),
        n if n >= 1e6 => format!("{:.2}M", n / 1e6),
        n => format!("{:.0}K", n / 1e3),
    }
}

/// Returns a name with a tag, as Ollama's clients expect it.
fn with_tag(name: &str) -> String {
    if name.contains(':') { name.to_owned() } else { format!("{name}{LATEST}") }
}

fn created(entry: &ModelEntry) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(entry.created)
}
