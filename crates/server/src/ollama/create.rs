//! `/api/create`: a model of the library from another model or from files, with defaults of its own.
//!
//! With an adapter (LoRA), the model is its base with the adapter, which are computed together: the base is loaded once.
//!
//! A model has the defaults of its base, except for those that the request sets, as in Ollama. All values are checked
//! before they are stored, by the code that reads them for a request.

use std::{collections::BTreeMap, error::Error, path::Path};

use axum::{extract::State, response::Response};
use paguro_library::{Details, Digest, Library, LibraryError, ModelName};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::{
    chat::MessageParam,
    library::{Status, canonical, given, refuse_outside, work},
    modelfile::Modelfile,
};
use crate::{
    AppState,
    error::ApiError,
    extract::Json,
    stored,
    wire::{self, OneOrMany, Other, Tolerance, refused},
};

/// A request to create a model from another one or from files.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = OllamaCreateRequest)]
pub struct CreateParams {
    /// Its name.
    model: Option<String>,
    /// The older name of `model`.
    name: Option<String>,
    /// Base model.
    from: Option<String>,
    /// Digests of its files by name. The blobs must have been uploaded before.
    files: Option<BTreeMap<String, String>>,
    /// Digests of an adapter's files by name: one GGUF file, or those of a folder of PEFT. The blobs must have been uploaded
    /// before. `from` is the model that it changes.
    adapters: Option<BTreeMap<String, String>>,
    /// Chat template in jinja, in place of that of the files.
    template: Option<String>,
    /// Default options of its requests. Options that are not set are those of the base model.
    #[schema(value_type = Option<Object>)]
    parameters: Option<Map<String, Value>>,
    /// Default system prompt.
    system: Option<String>,
    /// Messages before every chat.
    #[schema(value_type = Option<Vec<MessageParam>>)]
    messages: Option<Vec<Value>>,
    /// Its licenses, for display; they are added to those of the base model.
    license: Option<OneOrMany<String>>,
    /// A Modelfile, for `from` and the other fields. These take precedence.
    modelfile: Option<String>,
    /// Streams the progress line by line; true if absent.
    stream: Option<bool>,
}

impl wire::Body for CreateParams {
    const OTHERS: &'static [&'static [Other]] = &[&[
        refused("quantize", &[], "weights stay as they are; `paguro quantize` writes them in another format"),
        refused(
            "quantization",
            &[],
            "weights stay as they are; `paguro quantize` writes them in another format",
        ),
        refused("path", &[], "upload the files to /api/blobs, and give their digests as `files`"),
    ]];
}

/// Creates a model from another one or from blobs. Only the embedded model is copied.
///
/// # Errors
/// A field that is not supported, by name, or files that are not a model.
#[utoipa::path(
    post, path = "/api/create", tag = "Ollama", request_body = CreateParams,
    responses((status = 200, content((Status = "application/json"), (Status = "application/x-ndjson")))),
)]
pub async fn create(
    State(state): State<AppState>,
    tolerance: Tolerance,
    Json(mut body): Json<CreateParams>,
) -> Result<Response, ApiError> {
    let service = state.library()?.clone();
    let named_adapter = body.read_modelfile()?;
    let name: ModelName = given(body.model.take(), body.name.take())?.parse()?;
    refuse_outside(&state, &name.short())?;
    let parsed = |files: Option<BTreeMap<String, String>>| {
        let files = files.into_iter().flatten().map(|(file, digest)| Ok((file, digest.parse()?)));
        files.collect::<Result<Vec<(String, Digest)>, LibraryError>>()
    };
    let files = parsed(body.files.take())?;
    let mut adapter = parsed(body.adapters.take())?;
    if let Some(named) = named_adapter.filter(|_| adapter.is_empty()) {
        adapter = service.run(move |service| adapter_files(&service.library, &named)).await?;
    }
    let from = match body.from.take().filter(|from| !from.is_empty()) {
        Some(from) => Some(canonical(&state, &from).await?),
        None => None,
    };
    let mut defaults = Map::new();
    let mut outside = None;
    match &from {
        Some(_) if !files.is_empty() => {
            return Err(ApiError::invalid("files", "give either `from` or `files`"));
        }
        None if !adapter.is_empty() => {
            let message = "`from` is missing: the name of the model that the adapter changes";
            return Err(ApiError::invalid("from", message));
        }
        None if files.is_empty() => {
            return Err(ApiError::invalid("from", "`from` and `files` are missing; give one of them"));
        }
        None => {}
        Some(from) => {
            outside = state.models.outside(from);
            if !adapter.is_empty() {
                if state.models.find(from).await?.adapter.is_some() {
                    let message = format!("`{from}` is an adapter itself; `from` is a model");
                    return Err(ApiError::invalid("from", message));
                }
                // The defaults of the base apply to the requests of its adapters.
            } else if outside.is_none() {
                let base = from.clone();
                defaults = service.run(move |service| Ok(service.library.find(&base)?.defaults)).await?;
            }
            body.drop_own_template(&state, from).await?;
        }
    }
    let is_plain = defaults.is_empty();
    let stream = body.stream;
    body.complete(&mut defaults);
    // Checked now, so that later requests do not fail. Values of an older version may be among those of the base.
    stored::read(&defaults, &tolerance)?;
    if let Some(from) = from.as_ref().filter(|_| !adapter.is_empty() || !is_plain || !defaults.is_empty()) {
        defaults.insert("from".into(), json!(from));
    }
    let models = state.models.clone();
    work(stream, move |reports, _| async move {
        let _ = reports.send(Status::new("writing manifest"));
        let made = service.run_long(move |service| match (from, outside) {
            (Some(base), _) if !adapter.is_empty() => {
                let inspect = |path: &Path| -> Result<Details, Box<dyn Error + Send + Sync>> {
                    let details = (service.inspect)(path)?;
                    if details.adapter.is_none() {
                        return Err("it is a model and no adapter".into());
                    }
                    if details.problem.is_none() {
                        models.check_adapter(path, &base)?;
                    }
                    Ok(details)
                };
                service.library.create_adapter(&name, &adapter, defaults, &base, &inspect)
            }
            (_, Some(outside)) => service.import(&outside, &name, defaults),
            (Some(from), None) => service.library.create_from_model(&name, &from, defaults),
            (None, None) => service.library.create_from_blobs(&name, &files, defaults, &service.inspect),
        });
        made.await.map(drop)
    })
    .await
}

/// Returns the files of an adapter that a Modelfile names: by the digest of a blob, or by its name in the library.
fn adapter_files(library: &Library, named: &str) -> Result<Vec<(String, Digest)>, LibraryError> {
    if let Ok(digest) = named.strip_prefix('@').unwrap_or(named).parse::<Digest>() {
        return Ok(vec![("adapter.gguf".to_owned(), digest)]);
    }
    let record = library.find(named)?;
    let problem = match record.files.iter().find_map(|file| file.location.as_ref()) {
        _ if !record.is_adapter() => "is a model and no adapter".to_owned(),
        Some(path) => format!("is outside of the library, at `{}`; import it with --copy", path.display()),
        None => return Ok(record.files.into_iter().map(|file| (file.name, file.digest)).collect()),
    };
    Err(LibraryError::NotAModel { path: named.into(), problem: format!("it {problem}") })
}

impl CreateParams {
    /// Fills in the fields that only the Modelfile has, and returns the adapter that it names.
    fn read_modelfile(&mut self) -> Result<Option<String>, ApiError> {
        let Some(text) = self.modelfile.take() else { return Ok(None) };
        let file = Modelfile::parse(&text)?;
        if self.files.is_none() {
            self.from = self.from.take().or(file.from);
        }
        self.template = self.template.take().or(file.template);
        self.system = self.system.take().or(file.system);
        let mut parameters = file.parameters;
        parameters.extend(self.parameters.take().unwrap_or_default());
        self.parameters = Some(parameters);
        if self.messages.is_none() && !file.messages.is_empty() {
            let message = |(role, content)| json!({"role": role, "content": content});
            self.messages = Some(file.messages.into_iter().map(message).collect());
        }
        if self.license.is_none() && !file.licenses.is_empty() {
            self.license = Some(OneOrMany::Many(file.licenses));
        }
        Ok(file.adapter)
    }

    /// Drops a template that equals the base model's, which `/api/show` reports.
    async fn drop_own_template(&mut self, state: &AppState, from: &str) -> Result<(), ApiError> {
        let Some(template) = &self.template else { return Ok(()) };
        let entry = state.models.find(from).await?;
        let own = match entry.chat_template.as_deref() {
            Some(template) => Some(template.to_owned()),
            None => {
                let templates = state.models.open(&entry).await?.chat_templates()?;
                templates.into_iter().find(|(name, _)| name == "default").map(|(_, source)| source)
            }
        };
        if own.as_ref().is_some_and(|own| own.trim() == template.trim()) {
            self.template = None;
        }
        Ok(())
    }

    /// Adds the fields to the defaults of the base model, in the library's format, which [`stored`] reads.
    fn complete(self, defaults: &mut Map<String, Value>) {
        if let Some(new) = self.parameters.filter(|parameters| !parameters.is_empty()) {
            let options = defaults.entry("options").or_insert_with(|| json!({}));
            match options.as_object_mut() {
                Some(options) => options.extend(new),
                None => *options = new.into(),
            }
        }
        let text = |text: Option<String>| text.filter(|text| !text.is_empty());
        let messages = self.messages.filter(|messages| !messages.is_empty());
        let new = [
            ("system", text(self.system).map(Value::from)),
            ("template", text(self.template).map(Value::from)),
            ("messages", messages.map(Value::from)),
        ];
        for (name, value) in new {
            defaults.extend(value.map(|value| (name.to_owned(), value)));
        }
        let mut licenses = licenses(defaults);
        for license in self.license.into_iter().flat_map(OneOrMany::into_vec) {
            if !license.is_empty() && !licenses.contains(&license) {
                licenses.push(license);
            }
        }
        match licenses.is_empty() {
            true => drop(defaults.remove("license")),
            false => drop(defaults.insert("license".into(), json!(licenses))),
        }
    }
}

/// Returns the stored licenses.
pub fn licenses(defaults: &Map<String, Value>) -> Vec<String> {
    match defaults.get("license") {
        Some(Value::String(one)) => vec![one.clone()],
        Some(Value::Array(many)) => many.iter().filter_map(Value::as_str).map(str::to_owned).collect(),
        _ => Vec::new(),
    }
}
