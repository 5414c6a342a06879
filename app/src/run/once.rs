//! One prompt and its answers.

use std::time::Instant;

use paguro_engine::FinishReason;
use serde_json::json;

use super::{
    Invocation, Running,
    answer::{Answer, Piece, follow},
    images::Attachment,
    progress, refused, sampling,
};
use crate::{
    failure::{Failure, Outcome},
    output::Output,
    settings::Terminal,
};

/// Answers `prompt` within an optional constraint.
///
/// # Errors
/// The engine refuses the request, or Ctrl-C after all output has been printed.
pub fn answer(invocation: Invocation<'_>, running: &Running, prompt: String) -> Outcome<()> {
    let Invocation { args, terminal, interrupt, .. } = invocation;
    let Running { name, loaded, style, constraint, adapters, .. } = running;
    let model = &loaded.model;
    let mut conversation = invocation.conversation();
    for image in &args.images {
        conversation.attach(Attachment::read(image)?);
    }
    conversation.ask(prompt);
    let mut request = sampling::request(conversation.tokens(model, *style)?, &args.sampling, model);
    request.lasting_tokens = conversation.lasting_tokens(model, *style, request.prompt.len());
    request.pictures = conversation.pictures(model, &request.prompt)?;
    request.branches = args.branches;
    request.logprobs = args.logprobs;
    request.constraint = constraint.clone();
    request.adapters.clone_from(adapters);
    let seed = request.sampling.seed;
    let drawn = request.sampling.temperature > 0.0;

    let mut reading = progress::reading(&terminal, &loaded.handle, request.prompt.len());
    let submitted = Instant::now();
    let generation = loaded.handle.generate(request).map_err(|error| refused(&error))?;
    let canceller = generation.canceller();
    let _armed = interrupt.on_press(move || canceller.cancel());

    let mut out = Output::new();
    let answer = follow(generation, args.branches, submitted, |piece| {
        reading.take();
        match (args.json, args.stream) {
            (true, true) => stream(&mut out, &piece),
            (true, false) => Ok(()),
            // Several answers are not streamed as text, because they would mix.
            (false, _) if args.branches > 1 => Ok(()),
            (false, _) => out.piece(piece.text),
        }
    })?;

    if let Some(branch) = answer.branches.first() {
        // The text of a stopped answer belongs to the conversation.
        conversation.answer(branch.text.clone());
        invocation.keep(running, &conversation)?;
    }
    if args.json {
        let mut result = answer.json(model, seed, loaded.time);
        if args.stream {
            result.insert("event".into(), json!("result"));
        }
        out.json(&result.into())?;
    } else {
        finish_text(&mut out, &answer, terminal)?;
        terminal.status(&answer.status(name, drawn.then_some(seed)));
    }
    if answer.cancelled() { Err(Failure::interrupted()) } else { Ok(()) }
}

/// Writes a line of `--stream`.
fn stream(out: &mut Output, piece: &Piece<'_>) -> Outcome<()> {
    if piece.token.is_none() && piece.text.is_empty() {
        return Ok(());
    }
    out.json(&json!({"event": "text", "branch": piece.branch, "token": piece.token, "text": piece.text}))
}

/// Ends the text with a line break, or prints all of it if it was not streamed.
fn finish_text(out: &mut Output, answer: &Answer, terminal: Terminal) -> Outcome<()> {
    let several = answer.branches.len() > 1;
    for (i, branch) in answer.branches.iter().enumerate() {
        if several {
            let cancelled = branch.reason == Some(FinishReason::Cancelled);
            out.line(terminal.bold(&format!("── {}{}", i + 1, if cancelled { " (stopped)" } else { "" })))?;
            out.piece(&branch.text)?;
        }
        if !branch.text.ends_with('\n') {
            out.piece("\n")?;
        }
    }
    Ok(())
}
