//! `paguro search`: models that can be pulled.

use paguro_library::{
    Cancel,
    hub::Found,
    known::{self, KnownModel},
};
use serde_json::json;

use super::failure;
use crate::{
    cli::SearchArgs,
    failure::{Failure, Outcome},
    output::Output,
    settings::{LibrarySettings, Terminal},
    table::Table,
    units,
};

/// Maximum number of listed repositories of the hub.
const MOST: usize = 20;

/// Runs the command.
///
/// # Errors
/// Nothing was found, or the hub cannot be reached and the table has no match.
pub fn search(args: &SearchArgs, settings: &LibrarySettings, terminal: Terminal) -> Outcome<()> {
    let text = args.words.join(" ");
    let models = known::search(&text);
    let mut out = Output::new();
    if args.json {
        models.iter().try_for_each(|model| out.json(&known_json(model)))?;
    } else if !models.is_empty() {
        table(&mut out, &models, terminal)?;
    }
    let found = match args.offline || text.is_empty() {
        true => Ok(Vec::new()),
        false => settings.impatient_hub()?.search(&text, MOST, &Cancel::default()).map_err(failure),
    };
    match found {
        Ok(found) if models.is_empty() && found.is_empty() => {
            Err(Failure::new(format!("no model is found for `{text}`"))
                .hint("`paguro search` lists the well-known ones; `paguro pull hf:OWNER/REPOSITORY` downloads any GGUF file"))
        }
        Ok(found) if args.json => found.iter().try_for_each(|found| out.json(&found_json(found))),
        Ok(found) => hub(&mut out, &found, terminal),
        // The table had matches.
        Err(failure) if !models.is_empty() => {
            terminal.status(&format!("{}; only well-known models are listed", failure.message()));
            Ok(())
        }
        Err(failure) => Err(failure.hint(format!("no well-known model has `{text}` in its name or use"))),
    }
}

fn table(out: &mut Output, models: &[&KnownModel], terminal: Terminal) -> Outcome<()> {
    let mut table = Table::new(["name", "parameters", "size"], &[1, 2], &[1]);
    table.text = "good for";
    for model in models {
        let cells = [model.name.clone(), model.parameters.clone(), units::bytes(model.bytes())];
        table.push(cells, &*model.good_for);
    }
    table.write(out, terminal)
}

fn hub(out: &mut Output, found: &[Found], terminal: Terminal) -> Outcome<()> {
    if found.is_empty() {
        return Ok(());
    }
    let mut table = Table::new(["on the hub", "downloads"], &[1], &[]);
    for Found { repo, downloads, gated } in found {
        let gated = if *gated { "gated: HF_TOKEN opens it" } else { "" };
        table.push([format!("hf:{repo}"), units::count(*downloads)], gated);
    }
    table.write(out, terminal)
}

fn known_json(model: &KnownModel) -> serde_json::Value {
    json!({
        "name": model.name,
        "title": model.title,
        "parameters": model.parameters,
        "bytes": model.bytes(),
        "good_for": model.good_for,
        "repository": model.repository,
        "file": model.file,
    })
}

fn found_json(found: &Found) -> serde_json::Value {
    json!({"name": format!("hf:{}", found.repo), "downloads": found.downloads, "gated": found.gated})
}
