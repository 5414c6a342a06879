//! The effective settings, for the page.

use paguro_server::{Listen, ServerSettings, Setting};

use crate::{
    cli::{Given, ServeOptions},
    devices::{Chosen, Opened},
    units,
};

/// Describes a device in one line.
pub fn device(device: &Chosen) -> String {
    let (main, free) = (device.main(), units::bytes(device.free()));
    let (threads, numerics) = (main.threads, &main.numerics);
    let name = match device.replicas {
        true => format!("an engine on each of {}", names(device.all())),
        false => main.backend.name().to_owned(),
    };
    format!("{name}, {threads} threads, {free} of memory free at the start; numerics {numerics}")
}

/// Returns the names of devices.
fn names(devices: &[Opened]) -> String {
    devices.iter().map(|one| one.backend.name()).collect::<Vec<_>>().join(", ")
}

/// Name and value of a setting, and a function that returns true if options set it.
type Row = (&'static str, String, fn(&ServeOptions) -> bool);

/// Returns all settings with their origins. `options` combines `given` and `config`.
pub fn settings(
    given: &Given<ServeOptions>,
    config: &ServeOptions,
    options: &ServeOptions,
    settings: &ServerSettings,
) -> Vec<Setting> {
    let origin = |is_set: fn(&ServeOptions) -> bool| {
        let places = [(&given.flags, "flag"), (&given.environment, "environment"), (config, "file")];
        places.into_iter().find(|(options, _)| is_set(options)).map_or("default", |(_, place)| place)
    };
    let listen = settings.listen.iter().map(|place| match place {
        Listen::Tcp(address) => address.to_string(),
        Listen::Unix(path) => path.display().to_string(),
    });
    let time = |time: Option<std::time::Duration>, never: &str| {
        time.map_or_else(|| never.to_owned(), |time| humantime::format_duration(time).to_string())
    };
    let number = |number: Option<usize>, default: &str| {
        number.map_or_else(|| default.to_owned(), |number| number.to_string())
    };
    let list = |list: &[String]| if list.is_empty() { "none".to_owned() } else { list.join(", ") };
    let (limits, residency) = (&settings.limits, &settings.residency);
    let rows: [Row; 23] = [
        ("host, port, socket", listen.collect::<Vec<_>>().join(", "), |o| {
            o.host.is_some() || o.port.is_some() || o.socket.is_some()
        }),
        ("allow-host", list(&settings.hosts), |o| !o.allow_hosts.is_empty()),
        ("cors-origin", list(&settings.origins), |o| !o.cors_origins.is_empty()),
        ("max-body", units::bytes(limits.body_bytes as u64), |o| o.max_body.is_some()),
        ("max-connections", limits.connections.to_string(), |o| o.max_connections.is_some()),
        ("read-timeout", time(Some(limits.head_time), ""), |o| o.read_timeout.is_some()),
        ("request-timeout", time(limits.request_time, "no limit"), |o| o.request_timeout.is_some()),
        ("shutdown-timeout", time(Some(settings.shutdown_time), ""), |o| o.shutdown_timeout.is_some()),
        ("models", list(&options.models), |o| !o.models.is_empty()),
        ("memory", units::bytes(residency.memory), |o| o.memory.is_some()),
        ("keep-alive", time(residency.keep_alive, "forever"), |o| o.keep_alive.is_some()),
        ("ctx", number(options.ctx, "the model's own, at most 65536"), |o| o.ctx.is_some()),
        (
            "kv-memory",
            options.kv_memory.map_or_else(|| "by --parallel and --ctx".to_owned(), |b| units::bytes(b.0)),
            |o| o.kv_memory.is_some(),
        ),
        (
            "kv-host",
            match options.kv_host {
                None => "on GPUs, a quarter of the free memory, at most 16GB".to_owned(),
                Some(size) => size.0.map_or_else(|| "off".to_owned(), units::bytes),
            },
            |o| o.kv_host.is_some(),
        ),
        ("kv-events", options.kv_events.clone().unwrap_or_else(|| "off".to_owned()), |o| {
            o.kv_events.is_some()
        }),
        (
            "kv-disk",
            match options.kv_disk {
                None => "a tenth of the free space, at most 16GB".to_owned(),
                Some(size) => size.0.map_or_else(|| "off".to_owned(), units::bytes),
            },
            |o| o.kv_disk.is_some(),
        ),
        ("parallel", number(options.parallel, "64"), |o| o.parallel.is_some()),
        ("batch-tokens", number(options.batch_tokens, "512"), |o| o.batch_tokens.is_some()),
        ("max-queue", number(options.max_queue, "1024"), |o| o.max_queue.is_some()),
        ("max-queue-tokens", number(options.max_queue_tokens, "no limit"), |o| o.max_queue_tokens.is_some()),
        ("threads", number(options.threads, "all"), |o| o.threads.is_some()),
        (
            "mcp",
            list(&settings.mcp.iter().map(|setting| setting.server.name.clone()).collect::<Vec<_>>()),
            |o| !o.mcp.is_empty(),
        ),
        ("log", options.log.clone().unwrap_or_else(|| "info".to_owned()), |o| o.log.is_some()),
    ];
    let setting =
        |(name, value, is_set): Row| Setting { name: name.to_owned(), value, origin: origin(is_set) };
    rows.into_iter().map(setting).collect()
}
