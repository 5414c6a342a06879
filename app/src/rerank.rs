//! `paguro rerank`: scores of texts for a query.

use paguro_engine::{Batch, EngineOptions, Request};
use paguro_model::{Model, Ranker, tokenizer::Cut};
use serde_json::json;

use crate::{
    cli::{CutAt, RerankArgs},
    devices::Devices,
    embed::{Text, read},
    failure::{Failure, Outcome},
    load,
    models::Source,
    output::Output,
    settings::{LibrarySettings, Terminal},
};

/// Runs the command.
///
/// # Errors
/// A text that cannot be read or is too long, by file and line; a model that is no reranker.
pub fn rerank(
    args: &RerankArgs,
    library: &LibrarySettings,
    devices: &Devices,
    terminal: Terminal,
) -> Outcome<()> {
    let source = Source::find(Some(&args.model), library)?;
    let texts = read(&args.texts.files, args.texts.whole_files, terminal)?;
    let model = load::reranker(&source)?;
    let missing = || {
        Failure::new(format!("the model `{}` is not a reranker", source.short_name()))
            .hint("name a reranker, such as Qwen3-Reranker; `paguro embed` computes vectors to compare")
    };
    let ranker = Ranker::of(&model).map_err(|error| Failure::from_error(&error))?.ok_or_else(missing)?;
    if args.instruction.is_some() && model.judge.is_none() {
        return Err(Failure::usage(
            "--instruction is for rerankers that read a task; this one reads only the two texts",
        ));
    }
    if args.texts.truncate == Some(CutAt::Start) && model.judge.is_none() {
        return Err(Failure::usage("--truncate=start: this reranker cuts the ends of pairs of texts only"));
    }
    let prompts = texts.iter().map(|text| tokens(&model, args, text)).collect::<Outcome<Vec<_>>>()?;
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(1);

    let defaults = EngineOptions::default();
    let options = EngineOptions {
        pages: load::pages_of_texts(&model, longest),
        max_context: Some(longest),
        // Nobody waits for the end of a step.
        step_time: std::time::Duration::MAX,
        ..defaults
    };
    let loaded = load::start(
        model.clone(),
        options,
        false,
        args.texts.threads.threads,
        (devices, &args.texts.on),
        terminal,
    )?;
    let bar = terminal.bar(texts.len(), "scoring");
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    let template = Request { embedding: Some(ranker.pooling()), max_tokens: Some(0), ..Request::default() };
    let mut batch = Batch::new(loaded.handle.clone(), template, prompts);
    let mut scores = Vec::with_capacity(texts.len());
    while let Some(outcome) = runtime.block_on(batch.next()) {
        let pooled =
            outcome.map_err(|(index, error)| Failure::new(format!("{}: {error}", texts[index].place())))?;
        scores.push((ranker.score(&pooled.values, args.raw_scores), pooled.index));
        bar.inc(1);
    }
    bar.finish_and_clear();
    // The best first; of equal ones the first in the input.
    scores.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    scores.truncate(args.top_n.unwrap_or(usize::MAX));
    let mut out = Output::new();
    for (score, index) in scores {
        let text = &texts[index];
        if args.json {
            let object = json!({"file": text.file, "line": text.line, "score": score, "text": text.text});
            out.json(&object)?;
        } else {
            // Whole files are named, lines are shown.
            let shown = text.line.map(|_| format!("  {}", text.text)).unwrap_or_default();
            out.line(format_args!("{score:.4}  {}{shown}", text.place()))?;
        }
    }
    Ok(())
}

/// The tokens of the query with a text.
fn tokens(model: &Model, args: &RerankArgs, text: &Text) -> Outcome<Vec<u32>> {
    let most = model.context_length;
    let cut = args.texts.truncate.map(|at| match at {
        CutAt::End => Cut::End,
        CutAt::Start => Cut::Start,
    });
    let pair = (args.query.as_str(), text.text.as_str());
    let ids = match &model.judge {
        Some(judge) => judge.prompt(&model.tokenizer, pair, args.instruction.as_deref(), most, cut),
        None => {
            let limit = if cut.is_some() { most } else { usize::MAX };
            let ids = model.encode_pair(pair.0, pair.1, limit).unwrap_or_default();
            if (1..=most).contains(&ids.len()) { Ok(ids) } else { Err(ids.len()) }
        }
    };
    ids.map_err(|tokens| {
        let place = text.place();
        match cut {
            Some(_) => Failure::new(format!(
                "the query leaves no room for {place}: the model reads at most {most} tokens"
            )),
            None => Failure::new(format!(
                "{place} has {tokens} tokens together with the query, but the model reads at most {most}"
            ))
            .hint("--truncate cuts texts that are too long"),
        }
    })
}
