//! `/api/create`: a model of the library from another model or from files, with defaults of its own.
//!
//! A model has the defaults of its base, except for those that the request sets, as in Ollama. All values are checked
//! before they are stored, by the code that reads them for a request.

use std::collections::BTreeMap;

use axum::{extract::State, response::Response};
use paguro_library::{Digest, LibraryError, ModelName};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::{
    chat::MessageParam,
    error::ErrorBody,
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
        refused("adapters", &[], "adapters are not applied here"),
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
    post, path = "/api/create", tag = "Ollama",
    request_body = CreateParams,
    responses(
        (status = 200, content((Status = "application/json"), (Status = "application/x-ndjson"))),
        (status = "4XX", body = ErrorBody),
        (status = "5XX", body = ErrorBody),
    ),
)]
pub async fn create(
    State(state): State<AppState>,
    tolerance: Tolerance,
    Json(mut body): Json<CreateParams>,
) -> Result<Response, ApiError> {
    let service = state.library()?.clone();
    body.read_modelfile()?;
    let name: ModelName = given(body.model.take(), body.name.take())?.parse()?;
    refuse_outside(&state, &name.short())?;
    let files = body.files.take().into_iter().flatten().map(|(file, digest)| Ok((file, digest.parse()?)));
    let files: Vec<(String, Digest)> = files.collect::<Result<_, LibraryError>>()?;
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
        None if files.is_empty() => {
            return Err(ApiError::invalid("from", "`from` and `files` are missing; give one of them"));
        }
        None => {}
        Some(from) => {
            outside = state.models.outside(from);
            if outside.is_none() {
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
    if let Some(from) = from.as_ref().filter(|_| !(is_plain && defaults.is_empty())) {
        defaults.insert("from".into(), json!(from));
    }
    work(stream, move |reports, _| async move {
        let _ = reports.send(Status::new("writing manifest"));
        let made = service.run_long(move |service| match (from, outside) {
            (_, Some(outside)) => service.import(&outside, &name, defaults),
            (Some(from), None) => service.library.create_from_model(&name, &from, defaults),
            (None, None) => service.library.create_from_blobs(&name, &files, defaults, &service.inspect),
        });
        made.await.map(drop)
    })
    .await
}

impl CreateParams {
    /// Fills in the fields that only the Modelfile has.
    fn read_modelfile(&mut self) -> Result<(), ApiError> {
        let Some(text) = self.modelfile.take() else { return Ok(()) };
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
        Ok(())
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
