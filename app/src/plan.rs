//! `paguro devices --plan MODEL`: places of a model's weights, and the least time of a token, without loading it.

use paguro_backend::{MemoryPlan, Role};
use paguro_engine::{EngineOptions, PageBudget};
use serde_json::json;

use crate::{
    cli::{DevicesArgs, RunOnArgs},
    devices::Devices,
    failure::{Failure, Outcome},
    load,
    models::Source,
    output::Output,
    placement::Placing,
    settings::{LibrarySettings, Terminal},
    units,
};

/// Shares of chosen experts that have a slot, for which the time of a token is shown.
const HITS: [f64; 3] = [0.95, 0.8, 0.5];

/// Prints the plan.
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
        device: args.device.unwrap_or_default(),
        numerics: args.numerics,
        memory: args.memory,
        expert_slots: args.expert_slots,
        isa: None,
        timed: false,
    };
    let context = args.ctx.map_or(load::Context::Default, load::Context::Tokens);
    let model = load::writer(&Source::find(Some(name), library)?, context)?;
    let device = devices.open(&on, None, &|line| terminal.note(line))?;
    let backend = device.backend.as_ref();
    let capacity = backend.capacity();
    let options = EngineOptions {
        pages: PageBudget::Tokens(model.max_context),
        max_context: Some(model.max_context),
        max_sequences: 1,
        step_time: std::time::Duration::MAX,
        ..EngineOptions::default()
    };
    let placing = Placing::of(backend, &model, capacity.bytes_free);
    let options = placing.with_slots(on.expert_slots.unwrap_or_default(), options, args.ctx.is_none())?;
    let plan = placing.plan(&options)?;
    let memory = plan.memory;
    // Bytes that a token reads on the device, and those of its experts.
    let (mut always, mut experts) = (0, 0);
    for (id, role) in model.program.matrices() {
        let bytes = backend.device_layout(model.weights.matrix(id)).bytes as u64;
        match role {
            Role::Lookup => {}
            Role::Layer | Role::Head => always += bytes,
            Role::Experts { used, count } => experts += bytes / count as u64 * used as u64,
        }
    }
    let bandwidth = devices.read_bandwidth(&on, backend.name(), None)?;
    let link = match options.expert_slots {
        Some(_) => devices.link(&on, backend.name())?,
        None => None,
    };
    let time = |hit: f64| {
        let copied = link.map_or(0.0, |link| (1.0 - hit) * experts as f64 / link);
        (always + experts) as f64 / bandwidth + copied
    };
    let hits: &[f64] = if link.is_some() { &HITS } else { &[1.0] };
    let MemoryPlan { weights, host, kv, states, buffers } = memory;
    let fits = memory.total() <= capacity.bytes_free;
    let mut out = Output::new();
    if args.json {
        out.json(&json!({
            "model": model.name,
            "device": backend.name(),
            "description": capacity.description,
            "bytes_free": capacity.bytes_free,
            "host_free": capacity.host_free,
            "fits": fits,
            "weights": weights,
            "host": host,
            "expert_slots": options.expert_slots,
            "kv": kv,
            "states": states,
            "buffers": buffers,
            "context": plan.max_context,
            "bytes_per_token": always + experts,
            "read_bandwidth": bandwidth.round(),
            "link": link.map(f64::round),
            "least_seconds_per_token": hits.iter().map(|&hit| json!({"hit": hit, "seconds": time(hit)})).collect::<Vec<_>>(),
        }))?;
    } else {
        let free = units::bytes(capacity.bytes_free);
        out.line(format_args!("{}  {}, {free} free", terminal.bold(&model.name), capacity.description))?;
        let mut line = |what: &str, bytes: u64, more: &str| {
            out.line(format_args!("     {what:18} {:>10}  {}", units::bytes(bytes), terminal.dim(more)))
        };
        line("weights", weights, "on the device")?;
        if let Some(slots) = options.expert_slots {
            line(
                "experts",
                host,
                &format!("in the host's memory; {slots} of each layer have slots on the device"),
            )?;
        }
        line("K and V", kv, &format!("{} tokens", plan.max_context))?;
        line("states and buffers", states.saturating_add(buffers), "")?;
        line("sum", memory.total(), if fits { "fits" } else { "exceeds the free memory" })?;
        line("reads of a token", always + experts, &format!("at {:.1} GB/s", bandwidth / 1e9))?;
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
    match fits {
        true => Ok(()),
        false => Err(Failure::new(format!(
            "{} does not fit: {} are needed, and {} are free",
            model.name,
            units::bytes(memory.total()),
            units::bytes(capacity.bytes_free)
        ))),
    }
}
