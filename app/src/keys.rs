//! `paguro keys`.

use paguro_server::{KeyFile, Scope};
use serde_json::json;

use crate::{
    cli::{KeysArgs, KeysCommand},
    failure::{Failure, Outcome},
    output::Output,
};

/// Manages the keys in `file`.
///
/// # Errors
/// A file that cannot be read or written, a key that is not there.
pub fn keys(args: &KeysArgs, file: &KeyFile) -> Outcome<()> {
    let mut out = Output::new();
    let failed = |error| Failure::from_error(&error);
    match &args.command {
        KeysCommand::Add { name, scopes } => {
            let scopes: Vec<_> = scopes.iter().map(|&scope| Scope::from(scope)).collect();
            let (_, secret) = file.add(name, &scopes).map_err(failed)?;
            out.line(secret)
        }
        KeysCommand::List { json } => {
            for key in file.read().map_err(failed)? {
                if *json {
                    out.json(&json!({
                        "id": key.id, "name": key.name, "scopes": key.scopes, "created": key.created,
                    }))?;
                } else {
                    let scopes: Vec<_> = key.scopes.iter().map(Scope::name).collect();
                    out.line(format_args!("{}  {}  {}", key.id, scopes.join(","), key.name))?;
                }
            }
            Ok(())
        }
        KeysCommand::Rm { id } => {
            let key = file.remove(id).map_err(failed)?;
            out.line(format_args!("removed {}  {}", key.id, key.name))
        }
    }
}
