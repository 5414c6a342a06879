//! `paguro ps` and `paguro unload`: state of a running server.

use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    cli::{PsArgs, ServerArgs, UnloadArgs},
    failure::{Failure, Outcome},
    output::Output,
    settings::Terminal,
    units,
};

/// Timeout of requests to the server.
const PATIENCE: Duration = Duration::from_secs(10);

/// Displayed fields of `/status`.
#[derive(Deserialize)]
struct Status {
    models: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    name: String,
    device: String,
    bytes: u64,
    /// Absent in older versions.
    weight_bytes: Option<u64>,
    kv_bytes: Option<u64>,
    context: usize,
    expires_in: Option<f64>,
    waiting: usize,
    running: usize,
    pages: usize,
    pages_used: usize,
    pages_cached: usize,
}

/// Sends a request to the server and returns its answer. With a body, the method is POST.
fn request(server: &ServerArgs, path: &str, body: Option<&Value>) -> Outcome<Value> {
    let url = format!("{}{path}", server.url.trim_end_matches('/'));
    let agent: ureq::Agent = ureq::Agent::config_builder()
        .timeout_global(Some(PATIENCE))
        .http_status_as_error(false)
        .build()
        .into();
    let key = server.key.as_ref().map(|key| format!("Bearer {key}"));
    let unreachable = |error: ureq::Error| {
        Failure::new(format!("no server answers at {}: {error}", server.url))
            .hint("start one with `paguro serve`, or set its address with --url")
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
    let json: Value = serde_json::from_str(&text).map_err(|_| strange(server))?;
    if !answer.status().is_success() {
        let error = &json["error"];
        let message = error["message"].as_str().or_else(|| error.as_str()).ok_or_else(|| strange(server))?;
        return Err(Failure::new(format!("the server refuses: {message}")));
    }
    Ok(json)
}

/// Returns the error for a server that is another program.
fn strange(server: &ServerArgs) -> Failure {
    Failure::new(format!("the server at {} is not `paguro serve`", server.url))
}

/// Runs `paguro unload`.
///
/// # Errors
/// No server answers, or it has no model of a name. The models before it are unloaded then.
pub fn unload(args: &UnloadArgs, terminal: Terminal) -> Outcome<()> {
    for name in &args.names {
        let body = json!({"model": name, "keep_alive": 0, "stream": false});
        request(&args.server, "/api/generate", Some(&body))?;
    }
    // A model in use is unloaded when its requests have ended.
    let json = request(&args.server, "/status", None)?;
    let status = Status::deserialize(json).map_err(|_| strange(&args.server))?;
    for name in &args.names {
        let in_use = status.models.iter().find(|model| model.name == *name).map(|model| model.running);
        terminal.status(&match in_use {
            Some(running @ 1..) => {
                format!("{name} is unloaded after {}", units::plural(running, "running request"))
            }
            _ => format!("{name} is not loaded"),
        });
    }
    Ok(())
}

/// Runs `paguro ps`.
///
/// # Errors
/// No server answers, or the answer is not that of `paguro serve`.
pub fn ps(args: &PsArgs, terminal: Terminal) -> Outcome<()> {
    let json = request(&args.server, "/status", None)?;
    let mut out = Output::new();
    if args.json {
        return out.json(&json);
    }
    let status = Status::deserialize(json).map_err(|_| strange(&args.server))?;
    if status.models.is_empty() {
        return out.line("no model is loaded");
    }
    let rows = status.models.iter().map(Model::cells);
    let rows: Vec<[String; 7]> = std::iter::once(HEADINGS.map(str::to_owned)).chain(rows).collect();
    let widths: [usize; 7] =
        std::array::from_fn(|i| rows.iter().map(|row| row[i].chars().count()).max().unwrap_or(0));
    for (index, row) in rows.iter().enumerate() {
        let cells: Vec<_> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        let line = cells.join("  ");
        out.line(if index == 0 { terminal.bold(line.trim_end()) } else { line.trim_end().to_owned() })?;
    }
    Ok(())
}

/// Headings of the table, one for each of a model's cells.
const HEADINGS: [&str; 7] = ["name", "device", "memory", "context", "requests", "pages", "unloads"];

impl Model {
    fn cells(&self) -> [String; 7] {
        let expires = match self.expires_in {
            Some(seconds) => format!("in {} s", seconds.round()),
            None => "never".into(),
        };
        let memory = match (self.weight_bytes, self.kv_bytes) {
            // K and V fill with use. On a CPU, the system allocates their memory then.
            (Some(weights), Some(kv)) => {
                format!("{} + up to {} KV", units::bytes(weights), units::bytes(kv))
            }
            _ => units::bytes(self.bytes),
        };
        [
            self.name.clone(),
            self.device.clone(),
            memory,
            self.context.to_string(),
            format!("{} running, {} waiting", self.running, self.waiting),
            format!("{} of {} ({} cached)", self.pages_used, self.pages, self.pages_cached),
            expires,
        ]
    }
}
