//! Grammar of the answer, from the flags.

use std::{fs, path::Path};

use paguro_engine::{Constraint, Grammar};

use crate::{
    cli::GrammarArgs,
    failure::{Failure, Outcome},
    load::Loaded,
    tokenize::without_mark,
};

/// Reads the grammar of the flags, if there is one.
///
/// # Errors
/// The file cannot be read, or the schema is not JSON.
pub fn read(args: &GrammarArgs) -> Outcome<Option<Grammar>> {
    Ok(match args {
        GrammarArgs { json_schema: Some(schema), .. } => Some(Grammar::JsonSchema(read_schema(schema)?)),
        GrammarArgs { grammar: Some(grammar), .. } => Some(read_grammar(grammar)?),
        GrammarArgs { regex: Some(regex), .. } => Some(Grammar::Regex(regex.clone())),
        _ => None,
    })
}

/// Compiles the grammar for the model.
///
/// # Errors
/// The grammar is not supported.
pub fn compile(grammar: Option<&Grammar>, loaded: &Loaded) -> Outcome<Option<Constraint>> {
    grammar.map(|grammar| loaded.handle.compile(grammar)).transpose().map_err(Failure::usage)
}

/// Reads a schema or its file. Schemas begin with a brace, names of files do not.
fn read_schema(schema: &str) -> Outcome<serde_json::Value> {
    let (name, text) = match schema.trim_start().starts_with('{') {
        true => ("--json-schema".to_owned(), schema.to_owned()),
        false => (format!("`{schema}`"), read_file("--json-schema", Path::new(schema))?),
    };
    serde_json::from_str(&text).map_err(|error| Failure::usage(format!("{name} is not JSON: {error}")))
}

/// Reads a grammar or its file. Names of files do not contain the text after the name of a grammar's first rule.
fn read_grammar(grammar: &str) -> Outcome<Grammar> {
    let is_text = grammar.contains("::=") || grammar.contains('\n') || grammar.starts_with("start:");
    let text = if is_text { grammar.to_owned() } else { read_file("--grammar", Path::new(grammar))? };
    Ok(Grammar::of_text(text))
}

fn read_file(flag: &str, file: &Path) -> Outcome<String> {
    fs::read_to_string(file)
        .map(without_mark)
        .map_err(|error| Failure::usage(format!("{flag}: cannot read `{}`: {error}", file.display())))
}
