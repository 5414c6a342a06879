//! `paguro devices --plan MODEL`: places of a model's weights, and the time of a token, without loading all of it.

mod trial;

use std::ops::Range;

use paguro_backend::{Capacity, MemoryPlan};
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
    placement::{Placing, Reads},
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
    let link = rows.iter().find_map(|row| row.link);
    let reading: f64 = rows.iter().map(Row::reading).sum();
    let copying = |hit: f64| rows.iter().map(|row| row.copying(hit)).sum::<f64>();
    let trial = match problem.is_none() && !args.no_trial {
        true => {
            let _spinner = terminal.spinner_with(|| "running a part of the model".to_owned());
            trial::trial(&placing, &placement, &options, link)?
        }
        false => None,
    };
    let mut out = Output::new();
    if args.json {
        let times = |seconds: f64| -> Vec<_> {
            hits.iter().map(|&hit| json!({"hit": hit, "seconds": seconds + copying(hit)})).collect()
        };
        out.json(&json!({
            "model": model.name,
            "fits": problem.is_none(),
            "assistant": file.assistant().map(ModelFile::name),
            "expert_slots": options.expert_slots,
            "context": plan.max_context,
            "stages": rows.iter().map(Row::json).collect::<Vec<_>>(),
            "least_seconds_per_token": times(reading),
            "seconds_per_token": trial.map(|trial| times(trial.seconds)),
        }))?;
    } else {
        let with = file.assistant().map(|assistant| format!(", with its assistant {}", assistant.name()));
        out.line(format_args!("{}{}", terminal.bold(&model.name), with.unwrap_or_default()))?;
        for row in &rows {
            row.print(&mut out, (plan.max_context, options.expert_slots), terminal)?;
        }
        for &hit in hits {
            let found = match link {
                Some(link) => {
                    format!(", {:.0} % of experts in slots, {:.1} GB/s over the bus", 100.0 * hit, link / 1e9)
                }
                None => String::new(),
            };
            let rate = |seconds: f64| format!("{:.2} ms ({:.0} tok/s)", 1e3 * seconds, 1.0 / seconds);
            let least = rate(reading + copying(hit));
            let line = match &trial {
                Some(trial) => {
                    format!("a token takes about {}, at least {least}", rate(trial.seconds + copying(hit)))
                }
                None => format!("a token takes at least {least}"),
            };
            out.line(format_args!("     {line}{found}"))?;
        }
        if let Some(trial) = trial {
            let all = placing.program.layers.len();
            let line =
                format!("measured with at most {} of {all} layers, without earlier tokens", trial.layers);
            out.line(format_args!("     {}", terminal.dim(&line)))?;
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
    /// Bytes that a token reads on the device.
    reads: Reads,
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
        let device = opened.device;
        Ok(Self {
            device,
            capacity: opened.backend.capacity(),
            layers: layers.clone(),
            memory: plan.memory,
            reads: placing.reads(device, layers),
            bandwidth: devices.read_bandwidth(on, &[(device, 1)], None)?,
            link: plan.expert_slots.map_or(Ok(None), |_| devices.link(device))?,
        })
    }

    /// Returns the time in which a token's weights are read, in seconds.
    fn reading(&self) -> f64 {
        self.reads.total() as f64 / self.bandwidth
    }

    /// Returns the time of copies with this share of chosen experts in slots, in seconds.
    fn copying(&self, hit: f64) -> f64 {
        self.link.map_or(0.0, |link| (1.0 - hit) * self.reads.experts as f64 / link)
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
            "bytes_per_token": self.reads.total(),
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
        line("reads of a token", self.reads.total(), &format!("at {:.1} GB/s", self.bandwidth / 1e9))
    }
}
