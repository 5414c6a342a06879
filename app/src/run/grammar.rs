//! What the answer must be, from the flags.

use std::{fs, path::Path};

use paguro_engine::{Constraint, Grammar};

use crate::{
    cli::GrammarArgs,
    failure::{Failure, Outcome},
    load::Loaded,
};

/// Reads what the flags ask for, if they do.
///
/// # Errors
/// A file that cannot be read, a schema that is not JSON.
pub fn read(args: &GrammarArgs) -> Outcome<Option<Grammar>> {
    Ok(match args {
        GrammarArgs { json_schema: Some(schema), .. } => Some(Grammar::JsonSchema(read_schema(schema)?)),
        GrammarArgs { grammar: Some(grammar), .. } => Some(read_grammar(grammar)?),
        GrammarArgs { regex: Some(regex), .. } => Some(Grammar::Regex(regex.clone())),
        _ => None,
    })
}

/// Makes it the model's.
///
/// # Errors
/// What the grammar asks for and cannot have.
pub fn compile(grammar: Option<&Grammar>, loaded: &Loaded) -> Outcome<Option<Constraint>> {
    grammar.map(|grammar| loaded.handle.compile(grammar)).transpose().map_err(Failure::usage)
}

/// No name of a file begins with a brace, and every schema that says something does.
fn read_schema(schema: &str) -> Outcome<serde_json::Value> {
    let (name, text) = match schema.trim_start().starts_with('{') {
        true => ("--json-schema".to_owned(), schema.to_owned()),
        false => (format!("`{schema}`"), read_file("--json-schema", Path::new(schema))?),
    };
    serde_json::from_str(&text).map_err(|error| Failure::usage(format!("{name} is not JSON: {error}")))
}

/// No name of a file has what follows the name of a grammar's first rule.
fn read_grammar(grammar: &str) -> Outcome<Grammar> {
    let is_text = grammar.contains("::=") || grammar.contains('\n') || grammar.starts_with("start:");
    let text = if is_text { grammar.to_owned() } else { read_file("--grammar", Path::new(grammar))? };
    Ok(Grammar::of_text(text))
}

fn read_file(flag: &str, file: &Path) -> Outcome<String> {
    fs::read_to_string(file)
        .map_err(|error| Failure::usage(format!("{flag}: cannot read `{}`: {error}", file.display())))
}
