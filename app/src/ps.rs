//! `paguro ps`: what a running server is doing.

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

/// A server on this machine answers at once.
const PATIENCE: Duration = Duration::from_secs(10);

/// What is shown of `/status`.
#[derive(Deserialize)]
struct Status {
    models: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    name: String,
    device: String,
    bytes: u64,
    context: usize,
    expires_in: Option<f64>,
    waiting: usize,
    running: usize,
    pages: usize,
    pages_used: usize,
    pages_cached: usize,
}

/// Asks the server.
///
/// # Errors
/// Nobody answers there, or not as a server of this kind does.
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
            .hint("`paguro serve` starts one; --url says where it is")
    };
    let mut answer = request.call().map_err(unreachable)?;
    let text = answer.body_mut().read_to_string().map_err(unreachable)?;
    let strange = || Failure::new(format!("what answers at {} is not `paguro serve`", args.url));
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
    for model in status.models {
        let Model { name, device, bytes, context, expires_in, waiting, running, .. } = &model;
        let expires = match expires_in {
            Some(seconds) => format!("{} s", seconds.round()),
            None => "never".into(),
        };
        out.line(format_args!(
            "{}  {}, {device}, context {context}, {running} running, {waiting} waiting, pages {} of {} ({} cached), \
             unloads in {expires}",
            terminal.bold(name),
            units::bytes(*bytes),
            model.pages_used,
            model.pages,
            model.pages_cached,
        ))?;
    }
    Ok(())
}
