//! `paguro imatrix`: the importance matrix of a model over a text, by llama.cpp's definition (tools/imatrix/imatrix.cpp).

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use paguro_backend::{InputSquares, MatrixSquares};
use paguro_engine::{EngineOptions, PageBudget, Request};
use paguro_model::tokenizer::SpecialTokens;
use paguro_quantize::Importance;
use serde_json::json;

use crate::{
    cli::{ExpertSlots, ImatrixArgs},
    devices::Devices,
    eval::{self, Scoring, Window, Windows},
    failure::{Failure, Outcome},
    load,
    models::Source,
    output::Output,
    quantize::check_output,
    settings::{LibrarySettings, Terminal},
    units,
};

/// The head's tensor, which counts only on request: for models whose head is the embedding it has none.
const HEAD: &str = "output.weight";

/// Runs the command.
///
/// # Errors
/// The model is no GGUF file, the text cannot be read or is too short, the output exists or cannot be written, or the engine fails.
pub fn imatrix(
    args: &ImatrixArgs,
    library: &LibrarySettings,
    devices: &Devices,
    terminal: Terminal,
) -> Outcome<()> {
    check_output(&args.out, args.write.replace)?;
    let (model, file) = eval::model_and_file(&args.text, library)?;
    let mut importance = Importance::new(args.ctx as u32);
    for earlier in &args.in_file {
        let read = Importance::read(earlier).map_err(|error| Failure::from_error(&error))?;
        let other = |problem| Failure::new(format!("`{}` is of another model: {problem}", earlier.display()));
        importance.merge(&read).map_err(other)?;
    }
    let source = Source::find(model.as_deref(), library)?;
    if matches!(&source, Source::Path(path) | Source::Library { path, .. } if path.is_dir()) {
        return Err(Failure::usage(
            "an importance matrix has the names of a GGUF file, and this is a folder",
        )
        .hint("`paguro convert FOLDER MODEL.gguf` makes one"));
    }
    let text = eval::read(file)?;
    let arrangement = Windows::adjacent(args.ctx);
    let model = load::model(&source, Some(args.ctx + 1))?;
    let tokens = model.tokenizer.encode_prompt(&text, SpecialTokens::AsText);
    let rest = tokens.get(args.from_chunk.saturating_mul(args.ctx)..).unwrap_or_default();
    let windows = arrangement
        .cut(rest, eval::first_of_every_text(&model.tokenizer), args.chunks)
        .map_err(|short| Failure::new(short).hint("take a longer text, or a smaller context with -c"))?;

    let at_once = (eval::TOKENS_AT_ONCE / arrangement.window).max(1);
    let defaults = EngineOptions::default();
    let options = EngineOptions {
        // One token more, because the last one of a window is sampled from.
        pages: PageBudget::Tokens(at_once * (arrangement.window + 1).next_multiple_of(defaults.block_size)),
        max_context: Some(arrangement.window + 1),
        max_sequences: at_once,
        max_scores: eval::max_scores(model.program.vocab),
        // Rows that are cached would be missing.
        prefix_cache: false,
        step_time: Duration::MAX,
        // Answers have one token, before which nothing is drafted.
        speculate: false,
        ..defaults
    };
    let squares = Arc::new(InputSquares::default());
    let cpu = devices.cpu_with_squares(args.write.threads.threads, squares.clone());
    let loaded =
        load::start_on(model.clone(), options, (false, ExpertSlots::Auto), (devices, cpu), terminal)?;
    squares.clear();
    let started = Instant::now();
    let count = windows.len();
    let (no_ppl, whole) = (args.no_ppl, args.process_output);
    let likelihood = eval::score(
        &loaded.handle,
        windows,
        &Scoring { at_once, label: "reading", scored: if no_ppl { 0 } else { arrangement.scored() } },
        |Window { tokens, score_from }| Request {
            // The last row counts as well, so a token is sampled from it.
            max_tokens: Some(1),
            score_prompt_from: match (whole, no_ppl) {
                // The head multiplies only rows with outputs.
                (true, _) => Some(0),
                (false, true) => None,
                (false, false) => Some(score_from),
            },
            ..Request::new(tokens)
        },
        terminal,
    )?;
    let seconds = started.elapsed().as_secs_f64();
    drop(loaded);

    let mixed = add(&mut importance, &squares.get(), args.process_output)?;
    importance.chunks = (importance.most_rows() / args.ctx as f32) as u32;
    importance.datasets.push(file.display().to_string());
    importance.save(&args.out).map_err(|error| Failure::from_error(&error))?;
    let partial: Vec<_> = importance.partial().map(|(name, share)| (name.to_owned(), share)).collect();
    if let Some((name, share)) = partial.first() {
        let stacks = units::plural(partial.len(), "stack");
        terminal.note(&format!(
            "note: some experts of {stacks} were never chosen (`{name}`: {:.0} % were); a longer text would reach more",
            share * 100.0
        ));
    }
    if let Some(name) = mixed.first() {
        let tensors = units::plural(mixed.len(), "tensor");
        terminal.note(&format!("note: {tensors} are multiplied in parts with inputs of their own and have no entry, such as `{name}`"));
    }
    if args.write.json {
        return Output::new().json(&json!({
            "file": args.out,
            "model": model.name,
            "text": file,
            "tokens": tokens.len(),
            "chunk_size": args.ctx,
            "chunks": count,
            "all_chunks": importance.chunks,
            "matrices": importance.len(),
            "with_unused_experts": partial.iter().map(|(name, _)| name).collect::<Vec<_>>(),
            "left_out": mixed,
            "perplexity": (!no_ppl).then(|| likelihood.perplexity()),
            "error": (!no_ppl).then(|| likelihood.error()),
            "seconds": seconds,
        }));
    }
    if !no_ppl {
        Output::new().line(format_args!(
            "PPL = {:.4} +/- {:.5}",
            likelihood.perplexity(),
            likelihood.error()
        ))?;
    }
    terminal.status(&format!(
        "{}: {} over {} of {} tokens, {} tok/s",
        args.out.display(),
        match importance.len() {
            1 => "1 matrix".to_owned(),
            count => format!("{count} matrices"),
        },
        units::plural(count, "chunk"),
        arrangement.window,
        units::rate((count * arrangement.window) as f64 / seconds)
    ));
    Ok(())
}

/// Adds the sums of the layers' matrices, and of the head with `head`. Returns the tensors whose parts multiply different inputs.
fn add(importance: &mut Importance, squares: &[MatrixSquares], head: bool) -> Outcome<Vec<String>> {
    let mut tensors: BTreeMap<&str, Vec<&MatrixSquares>> = BTreeMap::new();
    for matrix in squares {
        // Parts of a tensor have a number in brackets.
        let name = matrix.name.split('[').next().unwrap_or_default();
        if name.starts_with("blk.") || head && name == HEAD {
            tensors.entry(name).or_default().push(matrix);
        }
    }
    let mut mixed = Vec::new();
    for (name, matrices) in tensors {
        let first = matrices[0];
        // A fused projection is one tensor and several matrices, which multiply the same rows.
        if matrices.iter().any(|matrix| (&matrix.sums, &matrix.rows) != (&first.sums, &first.rows)) {
            mixed.push(name.to_owned());
            continue;
        }
        if first.rows.iter().all(|&rows| rows == 0) {
            continue;
        }
        let sums: Vec<f32> = first.sums.iter().map(|&sum| sum as f32).collect();
        if !sums.iter().all(|sum| sum.is_finite()) {
            return Err(Failure::new(format!("inputs of `{name}` are not finite or too large")));
        }
        let mut rows: Vec<f32> = first.rows.iter().map(|&rows| rows as f32).collect();
        if !name.contains("_exps.") {
            // Heads of latent attention all have the same rows, and one count.
            if rows.iter().any(|&count| count != rows[0]) {
                mixed.push(name.to_owned());
                continue;
            }
            rows.truncate(1);
        }
        importance.add(name, &sums, &rows).map_err(|problem| {
            Failure::new(format!("the earlier importance matrices are of another model: {problem}"))
        })?;
    }
    Ok(mixed)
}
