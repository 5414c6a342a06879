//! `paguro eval`: perplexity by llama.cpp's definition.

mod windows;

use std::{
    borrow::Cow,
    collections::VecDeque,
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use paguro_engine::{EngineOptions, Event, Generation, Handle, PageBudget, Request};
use paguro_model::tokenizer::{SpecialTokens, Tokenizer};
use serde_json::json;

use crate::{
    cli::{EvalArgs, TextArgs},
    devices::Devices,
    failure::{Failure, Outcome},
    load,
    models::{Found, Source},
    output::Output,
    settings::{LibrarySettings, Terminal},
    tokenize::without_mark,
    units,
};
use windows::Likelihood;
pub use windows::{Window, Windows};

/// Maximum tokens of concurrent windows: enough rows for full steps, few pages.
pub const TOKENS_AT_ONCE: usize = 2048;

/// Maximum memory of the logits of one step's scored rows.
const LOGIT_BYTES: usize = 64 << 20;

/// Runs the command.
///
/// # Errors
/// The text cannot be read or is too short, or the engine fails.
pub fn eval(
    args: &EvalArgs,
    library: &LibrarySettings,
    devices: &Devices,
    terminal: Terminal,
) -> Outcome<()> {
    let (model, file) = model_and_file(&args.text, library)?;
    let source = Source::find(model.as_deref(), library)?;
    let text = read(file)?;
    let arrangement =
        args.stride.map_or(Windows::adjacent(args.ctx), |stride| Windows::strided(args.ctx, stride));
    let model = load::writer(&source, load::Context::Tokens(arrangement.window))?;
    let tokens = model.tokenizer.encode_prompt(&text, SpecialTokens::AsText);
    let windows = arrangement
        .cut(&tokens, first_of_every_text(&model.tokenizer), args.chunks)
        .map_err(|short| Failure::new(short).hint("take a longer text, or a smaller context with -c"))?;
    if arrangement.window > model.context_length {
        let trained = model.context_length;
        terminal.note(&format!(
            "the model was trained for {trained} tokens, less than a window of {}",
            arrangement.window
        ));
    }

    let at_once = (TOKENS_AT_ONCE / arrangement.window).max(1);
    let defaults = EngineOptions::default();
    let options = EngineOptions {
        pages: PageBudget::Tokens(at_once * arrangement.window.next_multiple_of(defaults.block_size)),
        max_context: Some(arrangement.window),
        max_sequences: at_once,
        max_scores: max_scores(model.program.vocab),
        prefix_cache: false,
        // No reader waits for steps.
        step_time: Duration::MAX,
        kv_dtype: args.kv.kv_dtype.into(),
        attention: args.attention.attention.into(),
        // Without answers, nothing is drafted.
        speculate: false,
        ..defaults
    };
    let loaded =
        load::start(model.clone(), options, false, args.threads.threads, (devices, &args.on), terminal)?;
    let started = Instant::now();
    let count = windows.len();
    let scoring = Scoring { at_once, label: "scoring", scored: arrangement.scored() };
    let request = |window: Window| Request {
        // The window's last token is scored and predicts no other.
        max_tokens: Some(0),
        score_prompt_from: Some(window.score_from),
        ..Request::new(window.tokens)
    };
    let likelihood = score(&loaded.handle, windows, &scoring, request, terminal)?;
    let seconds = started.elapsed().as_secs_f64();

    let mut out = Output::new();
    if args.json {
        return out.json(&json!({
            "model": model.name,
            "format": model.description.quantization,
            "kv_dtype": paguro_backend::KvDtype::from(args.kv.kv_dtype).name(),
            "file": file,
            "tokens": tokens.len(),
            "window": arrangement.window,
            "stride": args.stride,
            "windows": count,
            "scored_tokens": likelihood.count(),
            "nats_per_token": likelihood.mean(),
            "perplexity": likelihood.perplexity(),
            "error": likelihood.error(),
            "seconds": seconds,
        }));
    }
    out.line(format_args!("PPL = {:.4} +/- {:.5}", likelihood.perplexity(), likelihood.error()))?;
    terminal.status(&format!(
        "{} of {} tokens, {} tokens scored, {} tok/s",
        units::plural(count, "window"),
        arrangement.window,
        likelihood.count(),
        units::rate((count * arrangement.window) as f64 / seconds)
    ));
    Ok(())
}

/// Returns the model, if named, and the file with the text: `MODEL FILE`, `FILE`, or flags.
///
/// # Errors
/// There is no text, or two.
pub fn model_and_file<'a>(
    args: &'a TextArgs,
    library: &LibrarySettings,
) -> Outcome<(Option<Cow<'a, str>>, &'a Path)> {
    let word = |path: &'_ PathBuf| path.to_string_lossy().into_owned();
    let flag = args.model.as_deref().map(Cow::Borrowed);
    match (&args.words[..], args.file.as_deref()) {
        ([], Some(file)) => Ok((flag, file)),
        ([model], Some(file)) => Ok((Some(word(model).into()), file)),
        ([model], None) if flag.is_none() && is_only_a_model(model, library) => {
            let model = model.display();
            Err(Failure::usage(format!("`{model}` is the model; the file with the text is missing"))
                .hint(format!("name it after the model: {model} text.txt")))
        }
        ([file], None) => Ok((flag, file)),
        ([model, file], None) => Ok((Some(word(model).into()), file)),
        ([], None) => {
            Err(Failure::usage("there is no text").hint("name the model, then the file with the text"))
        }
        _ => Err(Failure::usage("the text is given twice").hint("MODEL FILE, or -m MODEL -f FILE")),
    }
}

/// Returns true for a word that is no text: the name of a model, a model's file or folder.
fn is_only_a_model(word: &Path, library: &LibrarySettings) -> bool {
    let is_gguf = word.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
    if word.is_file() && !is_gguf {
        return false;
    }
    let found = word.to_str().map(|name| Source::look_up(name, library));
    matches!(found, Some(Ok(Found::Here(_))))
}

/// Reads the file. One line end at its end is dropped, as in llama.cpp.
///
/// # Errors
/// The file cannot be read or is not UTF-8.
pub fn read(path: &Path) -> Outcome<String> {
    let bytes =
        fs::read(path).map_err(|error| Failure::new(format!("cannot read `{}`: {error}", path.display())))?;
    let mut text = String::from_utf8(bytes).map_err(|error| {
        Failure::new(format!(
            "`{}` is not UTF-8 text (at byte {})",
            path.display(),
            error.utf8_error().valid_up_to()
        ))
    })?;
    text = without_mark(text);
    if text.ends_with('\n') {
        text.pop();
    }
    Ok(text)
}

/// Returns BOS, if prompts begin with it.
pub fn first_of_every_text(tokenizer: &Tokenizer) -> Option<u32> {
    tokenizer.bos().filter(|bos| tokenizer.encode_prompt("", SpecialTokens::AsText).first() == Some(bos))
}

/// Returns the tokens that are scored in a step, of a vocabulary of this size.
pub fn max_scores(vocab: usize) -> usize {
    (LOGIT_BYTES / (4 * vocab)).clamp(16, 512)
}

/// Arrangement of the requests of windows.
#[derive(Clone, Copy, Debug)]
pub struct Scoring {
    /// Maximum number of concurrent windows.
    pub at_once: usize,
    /// Word at the progress bar.
    pub label: &'static str,
    /// Tokens at the end of each window that are tallied.
    pub scored: usize,
}

/// Submits the request of each window, and tallies the scores of its last tokens.
///
/// # Errors
/// The engine fails.
pub fn score(
    handle: &Handle,
    mut windows: impl ExactSizeIterator<Item = Window>,
    &Scoring { at_once, label, scored }: &Scoring,
    request: impl Fn(Window) -> Request,
    terminal: Terminal,
) -> Outcome<Likelihood> {
    let bar = terminal.bar(windows.len(), label);
    let mut likelihood = Likelihood::default();
    let mut running = VecDeque::new();
    loop {
        while running.len() < at_once
            && let Some(window) = windows.next()
        {
            let request = request(window);
            let expected = request.score_prompt_from.map_or(0, |from| request.prompt.len() - 1 - from);
            let generation = handle.generate(request).map_err(|error| Failure::from_error(&error))?;
            running.push_back((generation, expected));
        }
        let Some((generation, expected)) = running.pop_front() else { break };
        let logprobs = scores(generation)?;
        if logprobs.len() != expected {
            return Err(Failure::new(format!(
                "the engine scored {} tokens of a window, not {expected}",
                logprobs.len()
            )));
        }
        likelihood.add(&logprobs[expected.saturating_sub(scored)..]);
        if scored > 0 {
            bar.set_message(format!("PPL {:.4}", likelihood.perplexity()));
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(likelihood)
}

/// Returns the log-probabilities of a window's tokens.
fn scores(mut generation: Generation) -> Outcome<Vec<f32>> {
    let mut all = Vec::new();
    while let Some(event) = generation.next_blocking() {
        match event {
            Event::PromptScores { scores, .. } => all.extend(scores.iter().map(|score| score.logprob)),
            Event::Failed(error) => return Err(Failure::from_error(&error)),
            _ => {}
        }
    }
    Ok(all)
}
