//! `paguro keys`.

use paguro_server::{ApiKey, KeyFile, Scope};
use serde_json::json;

use crate::{
    cli::{KeysArgs, KeysCommand},
    failure::{Failure, Outcome},
    output::Output,
    settings::Terminal,
    table::Table,
};

/// Manages the keys in `file`.
///
/// # Errors
/// The file cannot be read or written, or the key does not exist.
pub fn keys(args: &KeysArgs, file: &KeyFile, terminal: Terminal) -> Outcome<()> {
    let mut out = Output::new();
    let failed = |error| Failure::from_error(&error);
    match &args.command {
        KeysCommand::Add { name, scopes } => {
            let scopes: Vec<_> = scopes.iter().map(|&scope| Scope::from(scope)).collect();
            let (_, secret) = file.add(name, &scopes).map_err(failed)?;
            out.line(secret)?;
            terminal.status("Shown only once. From now on every request needs a key.");
            Ok(())
        }
        KeysCommand::List { json } => {
            let keys = file.read().map_err(failed)?;
            if *json {
                return keys.iter().try_for_each(|key| {
                    out.json(&json!({
                        "id": key.id, "name": key.name, "scopes": key.scopes, "created": key.created,
                    }))
                });
            }
            if keys.is_empty() {
                terminal.status("there are no keys; `paguro keys add NAME` makes one");
                return Ok(());
            }
            let scopes = |key: &ApiKey| key.scopes.iter().map(Scope::name).collect::<Vec<_>>().join(",");
            let mut table = Table::new(["id", "scope", "name"], &[], &[]);
            keys.iter().for_each(|key| table.push([key.id.clone(), scopes(key), key.name.clone()], ""));
            table.write(&mut out, terminal)
        }
        KeysCommand::Rm { id } => {
            let key = file.remove(id).map_err(failed)?;
            out.line(format_args!("removed {}  {}", key.id, key.name))
        }
    }
}
