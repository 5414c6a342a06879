//! `paguro devices --plan MODEL`: places of a model's weights, and the least time of a token, without loading it.

use std::ops::Range;

use paguro_backend::{Capacity, MemoryPlan, Role, stage_program};
use paguro_engine::{EngineOptions, EnginePlan, PageBudget};
use paguro_model::ModelFile;
use serde_json::json;

use crate::{
    assistant,
    cli::{Device, DevicesArgs, RunOnArgs},
    devices::{Devices, Opened},
    failure::Outcome,
    load,
    models::Source,
    output::Output,
    placement::Placing,
    settings::{LibrarySettings, Terminal},
    units,
};

/// Shares of chosen experts that have a slot, for which the time of a token is shown.
const HITS: [f64; 3] = [0.95, 0.8, 0.5];

/// Prints the plan. The memory of a head or an assistant that drafts is a part of it.
///
/// # Errors
/// The model cannot be read, or fits with no placement.
pub fn plan(
    name: &str,
    args: &DevicesArgs,
    library: &LibrarySettings,
    (devices, terminal): (&Devices, Terminal),
) -> Outcome<()> {
    let on = RunOnArgs {
        device: args.device.clone().unwrap_or_default(),
        gpu_layers: args.gpu_layers,
        split: args.split.clone(),
        numerics: args.numerics,
        memory: args.memory,
        expert_slots: args.expert_slots,
        replicas: false,
        isa: None,
        timed: false,
    };
    let context = args.ctx.map_or(load::Context::Default, load::Context::Tokens);
    let source = Source::find(Some(name), library)?;
    let mut file = load::file(&source)?;
    let assistants = || assistant::of_settings(library);
    assistant::add(&mut file, &source, None, assistants, |line| terminal.note(line))?;
    let model = load::writer_of(&file, &source, context)?;
    let opened = devices.open(&on, None, &|line| terminal.note(line))?;
    let options = EngineOptions {
        pages: PageBudget::Tokens(model.max_context),
        max_context: Some(model.max_context),
        max_sequences: 1,
        step_time: std::time::Duration::MAX,
        ..EngineOptions::default()
    };
    let options = load::with_head(&model, options);
    let placing = Placing::of(&opened, &model);
    let (slots, may_shrink) = (on.expert_slots.unwrap_or_default(), args.ctx.is_none());
    let placed = placing.place(slots, &options, may_shrink);
    // A model that does not fit is shown as a whole.
    let (placement, options, problem) = match placed {
        Ok((placement, options)) => (placement, options, None),
        Err(problem) => (placing.whole(), placing.with_slots(slots, options, may_shrink)?, Some(problem)),
    };
    let plan = placing.plan(placement.on(&opened).backend(), &options)?;
    let parts = placing.parts(&placement, &options, plan.pages)?;
    let mut rows = Vec::new();
    for (part, (device, layers)) in parts.iter().zip(&placement.stages) {
        let device = opened.find(*device).unwrap_or(opened.main());
        rows.push(Row::new(&placing, device, layers, part, (devices, &on))?);
    }
    let hits: &[f64] = if rows.iter().any(|row| row.link.is_some()) { &HITS } else { &[1.0] };
    let time = |hit: f64| rows.iter().map(|row| row.time(hit)).sum::<f64>();
    let mut out = Output::new();
    if args.json {
        let times: Vec<_> = hits.iter().map(|&hit| json!({"hit": hit, "seconds": time(hit)})).collect();
        out.json(&json!({
            "model": model.name,
            "fits": problem.is_none(),
            "assistant": file.assistant().map(ModelFile::name),
            "expert_slots": options.expert_slots,
            "context": plan.max_context,
            "stages": rows.iter().map(Row::json).collect::<Vec<_>>(),
            "least_seconds_per_token": times,
        }))?;
    } else {
        let with = file.assistant().map(|assistant| format!(", with its assistant {}", assistant.name()));
        out.line(format_args!("{}{}", terminal.bold(&model.name), with.unwrap_or_default()))?;
        for row in &rows {
            row.print(&mut out, (plan.max_context, options.expert_slots), terminal)?;
        }
        let link = rows.iter().find_map(|row| row.link);
        for &hit in hits {
            let ms = 1e3 * time(hit);
            let found = match link {
                Some(link) => {
                    format!(", {:.0} % of experts in slots, {:.1} GB/s over the bus", 100.0 * hit, link / 1e9)
                }
                None => String::new(),
            };
            out.line(format_args!("     a token takes at least {ms:.2} ms ({:.0} tok/s){found}", 1e3 / ms))?;
        }
    }
    problem.map_or(Ok(()), Err)
}

/// A device, and the layers of the model that it runs.
struct Row {
    device: Device,
    capacity: Capacity,
    layers: Range<usize>,
    memory: MemoryPlan,
    /// Bytes that a token reads on the device, and those of its experts.
    reads: [u64; 2],
    bandwidth: f64,
    /// Bandwidth of copies of experts from the host's memory, if they have slots.
    link: Option<f64>,
}

impl Row {
    /// Measures a device for its layers.
    fn new(
        placing: &Placing<'_>,
        opened: &Opened,
        layers: &Range<usize>,
        plan: &EnginePlan,
        (devices, on): (&Devices, &RunOnArgs),
    ) -> Outcome<Self> {
        let stage = stage_program(placing.program, layers.clone());
        let (mut always, mut experts) = (0, 0);
        for (id, role) in stage.matrices() {
            let bytes = opened.backend.device_layout(placing.weights.matrix(id)).bytes as u64;
            match role {
                Role::Lookup => {}
                Role::Layer | Role::Head => always += bytes,
                Role::Experts { used, count } => experts += bytes / count as u64 * used as u64,
            }
        }
        let device = opened.device;
        Ok(Self {
            device,
            capacity: opened.backend.capacity(),
            layers: layers.clone(),
            memory: plan.memory,
            reads: [always, experts],
            bandwidth: devices.read_bandwidth(on, &[(device, 1)], None)?,
            link: plan.expert_slots.map_or(Ok(None), |_| devices.link(device))?,
        })
    }

    /// Returns the least time of a token with this share of chosen experts in slots, in seconds.
    fn time(&self, hit: f64) -> f64 {
        let [always, experts] = self.reads;
        let copied = self.link.map_or(0.0, |link| (1.0 - hit) * experts as f64 / link);
        (always + experts) as f64 / self.bandwidth + copied
    }

    fn json(&self) -> serde_json::Value {
        let MemoryPlan { weights, host, kv, states, buffers } = self.memory;
        json!({
            "device": self.device.to_string(),
            "description": self.capacity.description,
            "bytes_free": self.capacity.bytes_free,
            "host_free": self.capacity.host_free,
            "layers": [self.layers.start, self.layers.end],
            "weights": weights,
            "host": host,
            "kv": kv,
            "states": states,
            "buffers": buffers,
            "bytes_per_token": self.reads.iter().sum::<u64>(),
            "read_bandwidth": self.bandwidth.round(),
            "link": self.link.map(f64::round),
        })
    }

    /// Prints the device with `context` tokens of K and V.
    fn print(
        &self,
        out: &mut Output,
        (context, slots): (usize, Option<usize>),
        terminal: Terminal,
    ) -> Outcome<()> {
        let Capacity { description, bytes_free, .. } = &self.capacity;
        let MemoryPlan { weights, host, kv, states, buffers } = self.memory;
        let (count, free) = (self.layers.len(), units::bytes(*bytes_free));
        out.line(format_args!("{}  {description}, {free} free: {count} layers", self.device))?;
        let mut line = |what: &str, bytes: u64, more: &str| {
            out.line(format_args!("     {what:18} {:>10}  {}", units::bytes(bytes), terminal.dim(more)))
        };
        line("weights", weights, "on the device")?;
        if let Some(slots) = slots.filter(|_| host > 0) {
            let places = format!("in the host's memory; {slots} of each layer have slots on the device");
            line("experts", host, &places)?;
        }
        line("K and V", kv, &format!("{context} tokens"))?;
        line("states and buffers", states.saturating_add(buffers), "")?;
        let total = self.memory.total();
        line("sum", total, if total <= *bytes_free { "fits" } else { "exceeds the free memory" })?;
        let reads = self.reads.iter().sum();
        line("reads of a token", reads, &format!("at {:.1} GB/s", self.bandwidth / 1e9))
    }
}
