//! `paguro run`: one answer, or a chat.

mod answer;
mod chat;
mod commands;
mod grammar;
mod once;
mod prompt;
mod sampling;

use std::{path::Path, sync::Arc};

use paguro_engine::{EngineOptions, PageBudget, SubmitError};
use paguro_model::Model;

use crate::{
    cli::RunArgs,
    failure::{Failure, Outcome},
    interrupt::Interrupt,
    load::{self, Loaded},
    models::{EMBEDDED, Source},
    settings::{LibrarySettings, Terminal},
    tokenize::read_text,
};
use chat::Chat;
use prompt::Style;

/// Context of `run` unless given, if the model was trained for as much and memory allows.
const DEFAULT_CONTEXT: usize = 65_536;

/// Runs the command.
///
/// # Errors
/// Whatever keeps the answer from being given, and Ctrl-C.
pub fn run(
    args: &RunArgs,
    library: &LibrarySettings,
    terminal: Terminal,
    history: Option<&Path>,
) -> Outcome<()> {
    let (source, prompt) = what_to_run(args, library)?;
    if let Source::Library { name, parameters, .. } = &source
        && !parameters.is_empty()
    {
        let parameters = parameters.join(", ");
        terminal.note(&format!("`run` does not use what is recorded with {name} for servers: {parameters}"));
    }
    let grammar = grammar::read(&args.grammar)?;
    // What is wrong with the model shows before anything is read or computed.
    let model = load::model(&source, Some(args.ctx.unwrap_or(DEFAULT_CONTEXT)).filter(|&ctx| ctx > 0))?;
    let style = Style::new(&model, args.raw, args.system.as_deref())?;
    let prompt = with_standard_input(prompt, terminal)?;
    if prompt.is_none() && (args.json || args.branches > 1) {
        let flag = if args.json { "--json" } else { "--branches" };
        let failure = Failure::usage(format!("{flag} needs a prompt; a chat has none"));
        return Err(failure.hint("give the prompt as an argument, or on standard input"));
    }
    let interrupt = Interrupt::install()?;
    let loaded = start(args, model.clone(), terminal)?;
    let constraint = grammar::compile(grammar.as_ref(), &loaded)?;
    match prompt {
        Some(prompt) => once::answer(args, &loaded, style, prompt, constraint, terminal, &interrupt),
        None => Chat::new(args, &loaded, style, constraint, terminal, &interrupt).run(history),
    }
}

/// Sorts the words into a model and a prompt.
fn what_to_run(args: &RunArgs, library: &LibrarySettings) -> Outcome<(Source, Option<String>)> {
    let (source, words) = match (&args.model, args.words.split_first()) {
        (Some(model), _) => (Source::find(Some(model), library)?, &args.words[..]),
        (None, Some((first, rest))) => match Source::from_first_word(first, library)? {
            Some(source) => (source, rest),
            None => (Source::Embedded, &args.words[..]),
        },
        (None, None) => (Source::Embedded, &[][..]),
    };
    if words.is_empty() {
        return Ok((source, None));
    }
    let prompt = words.join(" ");
    if prompt.trim().is_empty() {
        return Err(
            Failure::usage("the prompt is empty").hint(format!("paguro run {EMBEDDED} \"Tell me a story\""))
        );
    }
    Ok((source, Some(prompt)))
}

/// Piped text is the prompt, or follows the one on the command line.
fn with_standard_input(prompt: Option<String>, terminal: Terminal) -> Outcome<Option<String>> {
    if terminal.interactive {
        return Ok(prompt);
    }
    let text = read_text()?;
    // The last line's end is the file's, not the prompt's.
    let text = text.strip_suffix('\n').map_or(&text[..], |text| text.strip_suffix('\r').unwrap_or(text));
    match (prompt, text.trim().is_empty()) {
        (Some(prompt), true) => Ok(Some(prompt)),
        (Some(prompt), false) => Ok(Some(format!("{prompt}\n\n{text}"))),
        (None, false) => Ok(Some(text.to_owned())),
        (None, true) => {
            Err(Failure::usage("there is no prompt: none was given, and standard input is empty")
                .hint("give the prompt as an argument, or run on a terminal to chat"))
        }
    }
}

fn start(args: &RunArgs, model: Arc<Model>, terminal: Terminal) -> Outcome<Loaded> {
    let context = match args.ctx {
        Some(0) => model.context_length,
        Some(tokens) => tokens,
        None => model.context_length.min(DEFAULT_CONTEXT),
    };
    if context > model.context_length {
        let trained = model.context_length;
        terminal
            .note(&format!("the model was trained for {trained} tokens; past them its answers get worse"));
    }
    let defaults = EngineOptions::default();
    let options = EngineOptions {
        block_size: args.page_size.unwrap_or(defaults.block_size),
        pages: PageBudget::Tokens(context.saturating_mul(args.branches)),
        max_context: Some(context),
        max_sequences: args.branches,
        max_batch_tokens: args.batch.or_default(args.branches),
        kv_dtype: args.kv.kv_dtype.into(),
        attention: args.attention.attention.into(),
        ..defaults
    };
    load::start(model, options, args.ctx.is_none(), args.threads.threads, &args.on, terminal)
}

/// A refused request, with the flag that would help; values that mean nothing to this model are wrong usage.
fn refused(error: &SubmitError) -> Failure {
    match error {
        SubmitError::ContextTooLong { .. } => {
            Failure::from_error(error).hint("-c N makes the context larger")
        }
        SubmitError::Sampling(_) | SubmitError::Invalid { .. } => Failure::usage(error),
        _ => Failure::from_error(error),
    }
}
