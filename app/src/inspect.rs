//! `paguro inspect`: content and memory of a model.

mod adapter;
mod json;
mod memory;
mod shape;

use std::collections::BTreeMap;

use paguro_model::{Conversion, LoadOptions, Model, ModelFile, tensor::Tensor};

use self::{
    json::as_json,
    memory::Memory,
    shape::{active_parameters, layers, skipped},
};
use crate::{
    assistant,
    cli::InspectArgs,
    devices::Devices,
    failure::Outcome,
    models::Source,
    output::Output,
    settings::{LibrarySettings, Terminal},
    units,
};

/// Maximum characters of a displayed metadata value.
const VALUE_WIDTH: usize = 100;

/// Runs the command. Also shows a model that cannot run, with the reason.
///
/// # Errors
/// The file cannot be read.
pub fn inspect(
    args: &InspectArgs,
    library: &LibrarySettings,
    devices: &Devices,
    terminal: Terminal,
) -> Outcome<()> {
    if let Some(path) = adapter::find(args.model.name.as_deref(), library)? {
        return adapter::inspect(&path, args, terminal);
    }
    let source = Source::find(args.model.name.as_deref(), library)?;
    let mut file = args.projector.choice().open(&source, |line| terminal.note(line))?;
    let assistants = || assistant::of_settings(library);
    assistant::add(&mut file, &source, None, assistants, |line| terminal.note(line))?;
    let model = file.load(&LoadOptions { max_context: args.ctx });
    let model = model.as_ref().map_err(ToString::to_string);
    let memory = match &model {
        Ok(model) => {
            let context = args.ctx.unwrap_or(model.context_length);
            Some(Memory::new(model, context, args.kv.kv_dtype.into(), (devices, &args.on))?)
        }
        Err(_) => None,
    };
    if args.json {
        return Output::new().json(&as_json(&file, model, memory, args.tensors));
    }
    let mut out = Output::new();
    summary(&mut out, &file, model, memory, terminal)?;
    metadata(&mut out, &file, terminal)?;
    if args.tensors {
        tensors(&mut out, file.tensors(), terminal)
    } else {
        types(&mut out, file.tensors(), terminal)
    }
}

fn summary(
    out: &mut Output,
    file: &ModelFile,
    model: Result<&Model, String>,
    memory: Option<Memory>,
    terminal: Terminal,
) -> Outcome<()> {
    let description = file.description();
    out.line(terminal.bold(file.name()))?;
    let mut row = |name: &str, value: String| out.line(format_args!("  {name:<14}{value}"));
    row("file", format!("{}, {}", file.format(), units::bytes(description.file_bytes)))?;
    row("architecture", file.architecture().unwrap_or("(none)").to_owned())?;
    row("parameters", format!("{} ({})", units::count(description.parameters), description.quantization))?;
    match model.as_ref().ok().and_then(|model| model.vision.as_deref()) {
        Some(vision) => {
            let tower = &vision.tower.program;
            let layers = units::plural(tower.layers.len(), "layer");
            row("vision", format!("{}, {layers} of {} values", vision.projector_type(), tower.hidden))?;
        }
        None => {
            let problem = model.as_ref().ok().and_then(|model| model.vision_problem.clone());
            problem.map_or(Ok(()), |problem| row("vision", format!("not usable: {problem}")))?;
        }
    }
    for path in file.files().iter().filter(|_| file.projector().is_some()).skip(1) {
        row("projector", path.display().to_string())?;
    }
    for Conversion { from, to, matrices, exact } in file.conversions() {
        let tensors = units::plural(matrices, "tensor");
        let loss = match (exact, to.is_quantized()) {
            (true, _) => "without loss",
            (false, true) => "with scales rounded to f16",
            (false, false) => "products with scales are rounded",
        };
        row("read as", format!("{tensors} of {from} as {to}, {loss}"))?;
    }
    match model {
        Ok(model) => {
            let program = &model.program;
            row(
                "shape",
                format!(
                    "{} layers, hidden {}, {}, vocabulary {}",
                    program.layers.len(),
                    program.hidden,
                    layers(program),
                    program.vocab
                ),
            )?;
            let tables: u64 = model.weights.tables.iter().map(|table| table.bytes.len() as u64).sum();
            if tables > 0 {
                let what = "embeddings for layers, read from the file as tokens need them";
                row("on disk", format!("{} {what}", units::bytes(tables)))?;
            }
            if let Some(active) = active_parameters(model) {
                row("active", format!("{} parameters for a token", units::count(active)))?;
            }
            if let Some(assistant) = file.assistant() {
                row("drafts", format!("with its assistant {}", assistant.name()))?;
            } else if model.mtp.is_some() {
                row("drafts", "with a head for multi-token prediction".to_owned())?;
            } else if let Some(skipped) = skipped(file.tensors()) {
                row("not run", skipped)?;
            }
            row("context", format!("{} tokens", model.context_length))?;
            row("chat template", chat_template(model))?;
            if model.judge_template.is_some() {
                row("reranks", "by the probability of `yes` as the answer (Qwen3-Reranker)".to_owned())?;
            }
            if let Some(classifier) = &model.head.classifier {
                match &classifier.labels[..] {
                    [_] => row("reranks", "by its classifier".to_owned())?,
                    labels => row("classifies", labels.join(", "))?,
                }
            }
            for (name, text) in &model.prompts.named {
                row("prompt", format!("{name} = {text:?}"))?;
            }
        }
        Err(problem) => row("runs", format!("no: {problem}"))?,
    }
    match memory {
        Some(memory) => memory_rows(&memory, row),
        None => Ok(()),
    }
}

fn memory_rows(memory: &Memory, mut row: impl FnMut(&str, String) -> Outcome<()>) -> Outcome<()> {
    let device = &memory.device;
    row("memory", format!("{} for a context of {} tokens:", units::bytes(memory.total()), memory.context))?;
    row("", format!("{} weights", units::bytes(memory.weights)))?;
    for ((from, to), count) in &memory.converted {
        let tensors = units::plural(*count, "tensor");
        row("", format!("{tensors} of {from} held as {to}: the {device} has no kernels for {from}"))?;
    }
    row(
        "",
        format!(
            "{} KV cache in {}, {} pages of {} for {} tokens",
            units::bytes(memory.kv()),
            memory.kv_dtype.name(),
            memory.pages,
            units::bytes(memory.page_bytes),
            memory.block_size
        ),
    )?;
    if memory.states > 0 {
        row("", format!("{} state of a sequence", units::bytes(memory.states)))?;
        let copies = match memory.checkpoint {
            0 => format!("the {device} keeps no copies of states, so the prefix cache is off"),
            bytes => format!(
                "{} of the KV cache for a copy of a state, one every {} tokens",
                units::bytes(bytes),
                memory.checkpoint_interval
            ),
        };
        row("", copies)?;
    }
    row("", format!("{} buffers", units::bytes(memory.buffers)))?;
    Ok(())
}

fn chat_template(model: &Model) -> String {
    match (&model.chat_template, model.chat_problem()) {
        (_, Some(problem)) => format!("not usable: {problem}"),
        (Some(_), None) => "yes".into(),
        (None, None) => "no: prompts are continued as they stand".into(),
    }
}

fn metadata(out: &mut Output, file: &ModelFile, terminal: Terminal) -> Outcome<()> {
    out.line("")?;
    out.line(terminal.bold("metadata"))?;
    for entry in file.metadata() {
        out.line(format_args!("  {} {} {}", entry.key, terminal.dim("="), shortened(&entry.value)))?;
    }
    Ok(())
}

/// Shortens a value to one line.
fn shortened(value: &str) -> String {
    let line = value.replace('\n', "\\n");
    match line.char_indices().nth(VALUE_WIDTH) {
        Some((end, _)) => format!("{}… ({} characters)", &line[..end], value.chars().count()),
        None => line,
    }
}

fn tensors(out: &mut Output, tensors: &[Tensor], terminal: Terminal) -> Outcome<()> {
    out.line("")?;
    out.line(terminal.bold(&units::plural(tensors.len(), "tensor")))?;
    let width = tensors.iter().map(|tensor| tensor.name.len()).max().unwrap_or(0);
    for tensor in tensors {
        let size = units::bytes(tensor.bytes.len() as u64);
        out.line(format_args!(
            "  {:width$}  {:8}  {:>10}  {}",
            tensor.name,
            tensor.dtype.to_string(),
            size,
            dimensions(&tensor.shape)
        ))?;
    }
    Ok(())
}

/// Prints the tensors by type.
fn types(out: &mut Output, tensors: &[Tensor], terminal: Terminal) -> Outcome<()> {
    let mut types: BTreeMap<String, (usize, u64)> = BTreeMap::new();
    for tensor in tensors {
        let (count, bytes) = types.entry(tensor.dtype.to_string()).or_default();
        *count += 1;
        *bytes += tensor.bytes.len() as u64;
    }
    out.line("")?;
    out.line(format_args!(
        "{} {}",
        terminal.bold(&units::plural(tensors.len(), "tensor")),
        terminal.dim("(--tensors lists them)")
    ))?;
    for (name, (count, bytes)) in types {
        out.line(format_args!("  {name:8}  {count:>5}  {:>10}", units::bytes(bytes)))?;
    }
    Ok(())
}

/// Formats a shape as `[4096 × 512]`, outermost dimension first.
fn dimensions(dims: &[usize]) -> String {
    let dims: Vec<_> = dims.iter().map(usize::to_string).collect();
    format!("[{}]", dims.join(" × "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_values_are_cut_between_characters() {
        assert_eq!(shortened("a\nb"), "a\\nb");
        let long = "é".repeat(150);
        assert_eq!(shortened(&long), format!("{}… (150 characters)", "é".repeat(100)));
    }
}
