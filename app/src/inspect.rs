//! `paguro inspect`: content and memory of a model.

use std::collections::BTreeMap;

use paguro_backend::{
    DeltaRule, DeltaShape, Experts, FeedForward, KvDtype, KvGroup, KvLayout, LatentShape, Linear, MemoryPlan,
    Mixer, Program,
};
use paguro_engine::{Engine, EngineOptions, EnginePlan, PageBudget};
use paguro_model::{Conversion, LoadOptions, Model, ModelFile, tensor::Tensor};
use serde_json::{Value, json};

use crate::{
    cli::{InspectArgs, RunOnArgs},
    devices,
    failure::{Failure, Outcome},
    load,
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
pub fn inspect(args: &InspectArgs, library: &LibrarySettings, terminal: Terminal) -> Outcome<()> {
    let source = Source::find(args.model.name.as_deref(), library)?;
    let file = load::file(&source)?;
    let model = file.load(&LoadOptions { max_context: args.ctx });
    let model = model.as_ref().map_err(ToString::to_string);
    let memory = match &model {
        Ok(model) => {
            let context = args.ctx.unwrap_or(model.context_length);
            Some(Memory::new(model, context, args.kv.kv_dtype.into(), &args.on)?)
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

/// Memory of a model with one sequence.
#[derive(Debug)]
struct Memory {
    context: usize,
    /// Name of the device.
    device: String,
    weights: u64,
    /// Buffers between operations.
    buffers: u64,
    /// Conversions of formats that the device does not support: from, to, and the number of matrices.
    converted: BTreeMap<(String, String), usize>,
    pages: u64,
    page_bytes: u64,
    /// State of a sequence besides its pages.
    states: u64,
    /// Copy of a state in the prefix cache, and the tokens between two copies.
    checkpoint: u64,
    checkpoint_interval: usize,
    block_size: usize,
    kv_dtype: KvDtype,
}

impl Memory {
    fn new(model: &Model, context: usize, kv_dtype: KvDtype, on: &RunOnArgs) -> Outcome<Self> {
        let options = EngineOptions { max_sequences: 1, kv_dtype, ..EngineOptions::default() };
        let backend = devices::open(on, None, &|_| ())?.backend;
        let mut converted = BTreeMap::new();
        for matrix in &model.weights.matrices {
            if let Some(format) = backend.held(matrix).converted_to {
                *converted.entry((matrix.format.to_string(), format.to_string())).or_default() += 1;
            }
        }
        let pages = pages(&model.program.kv, context, options.block_size, options.max_batch_tokens);
        let block_size = options.block_size;
        let options = EngineOptions { pages: PageBudget::Pages(pages as usize), ..options };
        let plan =
            Engine::plan(backend.as_ref(), &model.program, &model.weights, model.max_context, &options);
        let plan = plan.map_err(|error| Failure::from_error(&error))?;
        let EnginePlan { page_bytes, checkpoint_bytes: checkpoint, checkpoint_interval, .. } = plan;
        let MemoryPlan { weights, states, buffers, .. } = plan.memory;
        let device = backend.name().to_owned();
        Ok(Self {
            context,
            device,
            weights,
            buffers,
            converted,
            pages,
            page_bytes,
            states,
            checkpoint,
            checkpoint_interval,
            block_size,
            kv_dtype,
        })
    }

    fn kv(&self) -> u64 {
        self.pages.saturating_mul(self.page_bytes)
    }

    fn total(&self) -> u64 {
        self.weights.saturating_add(self.kv()).saturating_add(self.states).saturating_add(self.buffers)
    }
}

/// Returns the maximum number of pages of a sequence with `context` tokens. A layer with a window holds the tokens that
/// the rows of one step attend to, which may begin and end inside of a page.
fn pages(kv: &KvLayout, context: usize, block_size: usize, step: usize) -> u64 {
    let group = |window: Option<u32>| {
        let all = context.div_ceil(block_size);
        window.map_or(all, |window| all.min((window as usize + step).div_ceil(block_size) + 1)) as u64
    };
    kv.groups.iter().map(|g| group(g.window)).sum()
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
            if let Some(skipped) = skipped(file.tensors()) {
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
    if let Some(memory) = memory {
        let Memory {
            context,
            device,
            weights,
            buffers,
            converted,
            pages,
            page_bytes,
            states,
            checkpoint,
            checkpoint_interval,
            block_size,
            kv_dtype,
        } = &memory;
        row("memory", format!("{} for a context of {context} tokens:", units::bytes(memory.total())))?;
        row("", format!("{} weights", units::bytes(*weights)))?;
        for ((from, to), count) in converted {
            let tensors = units::plural(*count, "tensor");
            row("", format!("{tensors} of {from} held as {to}: the {device} has no kernels for {from}"))?;
        }
        row(
            "",
            format!(
                "{} KV cache in {}, {pages} pages of {} for {block_size} tokens",
                units::bytes(memory.kv()),
                kv_dtype.name(),
                units::bytes(*page_bytes)
            ),
        )?;
        if *states > 0 {
            row("", format!("{} state of a sequence", units::bytes(*states)))?;
            let copies = match checkpoint {
                0 => format!("the {device} keeps no copies of states, so the prefix cache is off"),
                bytes => format!(
                    "{} of the KV cache for a copy of a state, one every {checkpoint_interval} tokens",
                    units::bytes(*bytes)
                ),
            };
            row("", copies)?;
        }
        row("", format!("{} buffers", units::bytes(*buffers)))?;
    }
    Ok(())
}

fn chat_template(model: &Model) -> String {
    match (&model.chat_template, model.chat_problem()) {
        (_, Some(problem)) => format!("not usable: {problem}"),
        (Some(_), None) => "yes".into(),
        (None, None) => "no: prompts are continued as they stand".into(),
    }
}

/// Formats heads and widths of the layers, each kind once.
fn layers(program: &Program) -> String {
    let mut attentions: Vec<String> = Vec::new();
    let mut networks: Vec<String> = Vec::new();
    for layer in &program.layers {
        let of_mixer = |mixer: &Mixer| match mixer {
            Mixer::Attention(attention) => {
                let KvGroup { kv_heads, head_dim, .. } = program.kv_group(attention);
                let shared = if attention.k.is_none() { " of an earlier layer" } else { "" };
                format!("{} heads, {kv_heads} KV heads of {head_dim}{shared}", attention.heads)
            }
            Mixer::Latent(latent) => {
                let LatentShape { heads, latent, rotated, .. } = latent.shape;
                format!("latent attention of {heads} heads over {latent} + {rotated} elements")
            }
            Mixer::Conv(conv) => format!("short convolutions over {} tokens", conv.convolution.taps),
            Mixer::DeltaRule(DeltaRule { shape, .. }) => {
                let DeltaShape { key_heads, value_heads, key_dim, value_dim } = shape;
                format!(
                    "gated delta rules of {value_heads} value heads of {value_dim}, {key_heads} key heads of {key_dim}"
                )
            }
            Mixer::Ssd(op) => {
                let DeltaShape { key_heads, value_heads, key_dim, value_dim } = op.shape;
                format!(
                    "Mamba-2 scans of {value_heads} heads of {value_dim}, {key_heads} groups of {key_dim}"
                )
            }
            other => format!("{other:?}"),
        };
        let attention = layer.mixer.parts().map(of_mixer).collect::<Vec<_>>().join(" beside ");
        let network = match &layer.ffn {
            FeedForward::None => String::new(),
            FeedForward::Dense(dense) => format!("FFN {}", dense.width),
            FeedForward::Experts(experts) => {
                let shared =
                    experts.shared.as_ref().map(|shared| format!(" and a shared one of {}", shared.width));
                let beside = experts.beside.as_ref().map(|beside| format!(" and FFN {}", beside.dense.width));
                let (used, count, width) = (experts.router.used, experts.count, experts.width);
                format!("{used} of {count} experts of {width}{}", shared.or(beside).unwrap_or_default())
            }
            other => format!("{other:?}"),
        };
        for (all, one) in [(&mut attentions, attention), (&mut networks, network)] {
            if !one.is_empty() && !all.contains(&one) {
                all.push(one);
            }
        }
    }
    let kinds = [attentions, networks].map(|kinds| kinds.join(" or "));
    kinds.into_iter().filter(|kinds| !kinds.is_empty()).collect::<Vec<_>>().join(", ")
}

/// Returns the names of blocks for multi-token prediction, which are not supported, if the file has some.
fn skipped(tensors: &[Tensor]) -> Option<String> {
    let block = |tensor: &Tensor| match tensor.name.split_once(".nextn.") {
        Some((block, _)) => Some(block.to_owned()),
        None => tensor.name.starts_with("mtp.").then(|| "mtp".to_owned()),
    };
    let blocks: std::collections::BTreeSet<String> = tensors.iter().filter_map(block).collect();
    let names = blocks.into_iter().map(|block| format!("`{block}`")).collect::<Vec<_>>().join(", ");
    (!names.is_empty()).then(|| format!("{names}: multi-token prediction"))
}

/// Returns the number of parameters in one token's forward pass, for a model with experts.
fn active_parameters(model: &Model) -> Option<u64> {
    let unused = model.program.layers.iter().filter_map(|layer| match &layer.ffn {
        FeedForward::Experts(experts) => {
            let elements = |linear: &Linear| {
                let matrix = model.weights.matrix(linear.matrix);
                (matrix.parts * matrix.rows * matrix.cols) as u64
            };
            let linears = [&experts.up, &experts.down].into_iter().chain(&experts.gate);
            let all: u64 = linears.map(elements).sum();
            let count = experts.count as u64;
            Some(all / count * (count - experts.router.used as u64))
        }
        _ => None,
    });
    let unused: u64 = unused.sum();
    (unused > 0).then(|| model.description.parameters.saturating_sub(unused))
}

/// Returns the first layer's shape, for programs that expect one number; [`layers`] has all of them. The width is that
/// of the first feed-forward network.
fn first_layer(program: &Program) -> (usize, usize, usize, usize) {
    let (heads, kv_heads, head_dim) = match program.attentions().next() {
        Some(attention) => {
            let group = program.kv_group(attention);
            (attention.heads, group.kv_heads, group.head_dim)
        }
        None => (0, 0, 0),
    };
    let width = program.layers.iter().find_map(|layer| match &layer.ffn {
        FeedForward::Dense(dense) => Some(dense.width),
        FeedForward::Experts(experts) => Some(experts.width),
        _ => None,
    });
    (heads, kv_heads, head_dim, width.unwrap_or(0))
}

fn experts(program: &Program) -> Option<&Experts> {
    program.layers.iter().find_map(|layer| match &layer.ffn {
        FeedForward::Experts(experts) => Some(experts),
        _ => None,
    })
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
            shape(&tensor.shape)
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
fn shape(dims: &[usize]) -> String {
    let dims: Vec<_> = dims.iter().map(usize::to_string).collect();
    format!("[{}]", dims.join(" × "))
}

fn as_json(
    file: &ModelFile,
    model: Result<&Model, String>,
    memory: Option<Memory>,
    with_tensors: bool,
) -> Value {
    let description = file.description();
    let metadata = file.metadata().into_iter();
    let mut value = json!({
        "name": file.name(),
        "file": file.format(),
        "files": file.files(),
        "file_bytes": description.file_bytes,
        "architecture": file.architecture(),
        "parameters": description.parameters,
        "format": description.quantization,
        "read_as": file.conversions().iter().map(|it| {
            json!({"from": it.from, "to": it.to.name(), "matrices": it.matrices, "exact": it.exact})
        }).collect::<Vec<_>>(),
        "supported": model.is_ok(),
        "metadata": metadata.map(|entry| (entry.key, json!({"type": entry.kind, "value": entry.value}))).collect::<serde_json::Map<_, _>>(),
        "tensor_count": file.tensors().len(),
    });
    match model {
        Ok(model) => {
            let program = &model.program;
            value["context_length"] = json!(model.context_length);
            value["chat_template"] = json!(model.chat_template.is_some());
            value["chat_template_problem"] = json!(model.chat_problem());
            let (heads, kv_heads, head_dim, ffn) = first_layer(program);
            value["shape"] = json!({
                "layers": program.layers.len(),
                "hidden": program.hidden,
                "heads": heads,
                "kv_heads": kv_heads,
                "head_dim": head_dim,
                "ffn": ffn,
                "vocab": program.vocab,
            });
            if let Some(experts) = experts(program) {
                value["shape"]["experts"] = json!(experts.count);
                value["shape"]["experts_used"] = json!(experts.router.used);
                value["shape"]["expert_ffn"] = json!(experts.width);
            }
            if let Some(skipped) = skipped(file.tensors()) {
                value["not_run"] = json!(skipped);
            }
            if let Some(active) = active_parameters(model) {
                value["active_parameters"] = json!(active);
            }
        }
        Err(problem) => value["problem"] = json!(problem),
    }
    if let Some(memory) = memory {
        value["memory"] = json!({
            "context": memory.context,
            "weight_bytes": memory.weights,
            "buffer_bytes": memory.buffers,
            "state_bytes": memory.states,
            "checkpoint_bytes": memory.checkpoint,
            "checkpoint_interval": memory.checkpoint_interval,
            "converted": memory.converted.iter().map(|((from, to), count)| {
                json!({"from": from, "to": to, "matrices": count})
            }).collect::<Vec<_>>(),
            "kv_bytes": memory.kv(),
            "pages": memory.pages,
            "page_bytes": memory.page_bytes,
            "page_tokens": memory.block_size,
            "kv_dtype": memory.kv_dtype.name(),
        });
    }
    if with_tensors {
        value["tensors"] = file
            .tensors()
            .iter()
            .map(|tensor| {
                json!({
                    "name": tensor.name,
                    "type": tensor.dtype.to_string(),
                    "shape": tensor.shape,
                    "bytes": tensor.bytes.len(),
                    "file": tensor.file,
                    "offset": tensor.offset,
                })
            })
            .collect();
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_bound_the_pages() {
        let group = |window| KvGroup { window, slots: 1, kv_heads: 1, head_dim: 1 };
        let mut kv = KvLayout { groups: vec![group(None)] };
        assert_eq!(pages(&kv, 100, 32, 512), 4);
        kv.groups.push(group(Some(64)));
        assert_eq!(pages(&kv, 100, 32, 512), 8);
        // 64 + 512 tokens and a page that both ends share.
        assert_eq!(pages(&kv, 32_000, 32, 512), 1000 + 19);
    }

    #[test]
    fn long_values_are_cut_between_characters() {
        assert_eq!(shortened("a\nb"), "a\\nb");
        let long = "é".repeat(150);
        assert_eq!(shortened(&long), format!("{}… (150 characters)", "é".repeat(100)));
    }
}
