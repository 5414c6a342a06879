//! `paguro ps` and `paguro unload`: state of a running server.

use std::{
    thread::sleep,
    time::{Duration, Instant},
};

use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    cli::{Given, PsArgs, ServerArgs, UnloadArgs},
    failure::{Failure, Outcome},
    output::Output,
    serve::{self, address},
    settings::Settings,
    table::Table,
    units,
};

/// Timeout of requests to the server.
const PATIENCE: Duration = Duration::from_secs(10);

/// Time between two looks at the server while a model is unloaded.
const PAUSE: Duration = Duration::from_millis(20);

/// Displayed fields of `/status`.
#[derive(Deserialize)]
struct Status {
    models: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    name: String,
    device: String,
    weights: u64,
    kv: u64,
    context: usize,
    expires_in: Option<f64>,
    waiting: usize,
    running: usize,
    pages: usize,
    pages_used: usize,
    pages_cached: usize,
}

/// A running server.
struct Server<'a> {
    url: String,
    key: Option<&'a str>,
}

impl<'a> Server<'a> {
    /// Finds the server of the flags, the environment and the settings file, which take precedence in this order, as in `paguro serve`.
    ///
    /// # Errors
    /// The settings file is invalid, or the host cannot be resolved.
    fn find(args: &'a ServerArgs, settings: &Settings) -> Outcome<Self> {
        let key = args.key.as_deref();
        if let Some(url) = &args.url {
            let scheme = if url.contains("://") { "" } else { "http://" };
            return Ok(Self { url: format!("{scheme}{}", url.trim_end_matches('/')), key });
        }
        let file = serve::read_config(None, settings.serve_config.as_deref())?;
        let Given { flags, environment } = &args.place;
        let host = flags.host.clone().or(environment.host.clone()).or(file.host);
        let port = flags.port.or(environment.port).or(file.port).unwrap_or(serve::PORT);
        let address = address::resolve(host.as_deref(), port)?;
        Ok(Self { url: address::from_here(&format!("http://{address}")), key })
    }

    /// Sends a request and returns the answer. With a body, the method is POST.
    fn request(&self, path: &str, body: Option<&Value>) -> Outcome<Value> {
        let url = format!("{}{path}", self.url);
        let agent: ureq::Agent = ureq::Agent::config_builder()
            .timeout_global(Some(PATIENCE))
            .http_status_as_error(false)
            .build()
            .into();
        let key = self.key.map(|key| format!("Bearer {key}"));
        let unreachable = |error: ureq::Error| {
            Failure::new(format!("no server answers at {}: {error}", self.url))
                .hint("start one with `paguro serve`, or set its address with --url or --port")
        };
        let answer = match body {
            Some(body) => {
                let mut request = agent.post(&url).header("Content-Type", "application/json");
                if let Some(key) = key {
                    request = request.header("Authorization", key);
                }
                request.send(body.to_string())
            }
            None => {
                let mut request = agent.get(&url);
                if let Some(key) = key {
                    request = request.header("Authorization", key);
                }
                request.call()
            }
        };
        let mut answer = answer.map_err(unreachable)?;
        let text = answer.body_mut().read_to_string().map_err(unreachable)?;
        let json: Value = serde_json::from_str(&text).map_err(|_| self.strange())?;
        if !answer.status().is_success() {
            let error = &json["error"];
            let message = error["message"].as_str().or_else(|| error.as_str());
            let message = message.ok_or_else(|| self.strange())?;
            return Err(Failure::new(format!("the server refuses: {message}")));
        }
        Ok(json)
    }

    /// Returns the state of the loaded models, and the whole answer.
    fn status(&self) -> Outcome<(Status, Value)> {
        let json = self.request("/status", None)?;
        let status = Status::deserialize(&json).map_err(|_| self.strange())?;
        Ok((status, json))
    }

    /// Unloads a model, and returns the result for the user.
    fn unload(&self, name: &str) -> Outcome<String> {
        // The name may be an alias, or a part of the model's name.
        let model = self.request(&format!("/v1/models/{}", encoded(name)), None)?;
        let id = model["id"].as_str().ok_or_else(|| self.strange())?;
        let loaded = || -> Outcome<Option<Model>> {
            Ok(self.status()?.0.models.into_iter().find(|model| model.name == id))
        };
        if loaded()?.is_none() {
            return Ok(format!("{id} is not loaded"));
        }
        let body = json!({"model": id, "keep_alive": 0, "stream": false});
        self.request("/api/generate", Some(&body))?;
        let start = Instant::now();
        loop {
            match loaded()? {
                None => return Ok(format!("{id} is unloaded")),
                Some(model) if model.running + model.waiting > 0 => {
                    let requests = units::plural(model.running + model.waiting, "request");
                    return Ok(format!("{id} is unloaded after {requests}"));
                }
                Some(_) if start.elapsed() > PATIENCE => {
                    return Err(Failure::new(format!("{id} is still loaded")));
                }
                Some(_) => sleep(PAUSE),
            }
        }
    }

    /// Returns the error for a server that is another program.
    fn strange(&self) -> Failure {
        Failure::new(format!("the server at {} is not `paguro serve`", self.url))
    }
}

/// Returns a model's name as a part of a path.
fn encoded(name: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._~-:/@".contains(&byte);
    let encode =
        |byte: u8| if is_plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    name.bytes().map(encode).collect()
}

/// Runs `paguro unload`.
///
/// # Errors
/// No server answers, or it has no model of a name. The models of the other names are unloaded.
pub fn unload(args: &UnloadArgs, settings: &Settings) -> Outcome<()> {
    let server = Server::find(&args.server, settings)?;
    let mut failed = None;
    for name in &args.names {
        match server.unload(name) {
            Ok(note) => settings.terminal.status(&note),
            Err(failure) if failed.is_none() => failed = Some(failure),
            Err(failure) => settings.terminal.note(failure.message()),
        }
    }
    failed.map_or(Ok(()), Err)
}

/// Runs `paguro ps`.
///
/// # Errors
/// No server answers, or the answer is not that of `paguro serve`.
pub fn ps(args: &PsArgs, settings: &Settings) -> Outcome<()> {
    let (status, json) = Server::find(&args.server, settings)?.status()?;
    let mut out = Output::new();
    if args.json {
        return out.json(&json);
    }
    if status.models.is_empty() {
        return out.line("no model is loaded");
    }
    let titles = ["name", "device", "memory", "context", "requests", "pages", "unloads"];
    let mut table = Table::new(titles, &[3], &[5, 1, 4, 3]);
    status.models.iter().for_each(|model| table.push(model.cells(), ""));
    table.write(&mut out, settings.terminal)
}

impl Model {
    fn cells(&self) -> [String; 7] {
        let expires = match self.expires_in {
            Some(seconds) => format!("in {} s", seconds.round()),
            None => "never".into(),
        };
        [
            self.name.clone(),
            self.device.clone(),
            // K and V fill with use. On a CPU, the system allocates their memory then.
            format!("{} + up to {} KV", units::bytes(self.weights), units::bytes(self.kv)),
            self.context.to_string(),
            format!("{} running, {} waiting", self.running, self.waiting),
            format!("{} of {} ({} cached)", self.pages_used, self.pages, self.pages_cached),
            expires,
        ]
    }
}
