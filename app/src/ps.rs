//! `paguro ps`: state of a running server.

use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

use crate::{
    cli::PsArgs,
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

/// Runs the command.
///
/// # Errors
/// No server answers, or the answer is not that of `paguro serve`.
pub fn ps(args: &PsArgs, terminal: Terminal) -> Outcome<()> {
    let url = format!("{}/status", args.url.trim_end_matches('/'));
    let agent: ureq::Agent = ureq::Agent::config_builder()
        .timeout_global(Some(PATIENCE))
        .http_status_as_error(false)
        .build()
        .into();
    let mut request = agent.get(&url);
    if let Some(key) = &args.key {
        request = request.header("Authorization", format!("Bearer {key}"));
    }
    let unreachable = |error: ureq::Error| {
        Failure::new(format!("no server answers at {}: {error}", args.url))
            .hint("start one with `paguro serve`, or set its address with --url")
    };
    let mut answer = request.call().map_err(unreachable)?;
    let text = answer.body_mut().read_to_string().map_err(unreachable)?;
    let strange = || Failure::new(format!("the server at {} is not `paguro serve`", args.url));
    let json: Value = serde_json::from_str(&text).map_err(|_| strange())?;
    if !answer.status().is_success() {
        let message = json["error"]["message"].as_str().ok_or_else(strange)?;
        return Err(Failure::new(format!("the server refuses: {message}")));
    }
    let mut out = Output::new();
    if args.json {
        return out.json(&json);
    }
    let status = Status::deserialize(json).map_err(|_| strange())?;
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
            (Some(weights), Some(kv)) => {
                format!("{} weights + {} KV", units::bytes(weights), units::bytes(kv))
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
