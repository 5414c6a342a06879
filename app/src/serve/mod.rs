//! `paguro serve`: creates a server from the settings.

pub mod address;
pub mod disk;
mod memory;
mod models;
mod shown;
mod telemetry;

use std::{
    fs,
    io::stderr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use opentelemetry::trace::TracerProvider;
use opentelemetry_sdk::trace::SdkTracerProvider;
use paguro_engine::HostMemory;
use paguro_server::{
    AdapterSettings, BindError, HttpLimits, ImageSettings, KeyFile, KvEvents, KvEventsPlaces,
    KvEventsSettings, KvPublisher, KvReceiver, LibraryService, Listen, Listening, ModelSource, Residency,
    Server, ServerSettings,
};
use tracing_subscriber::{Layer, filter::Targets, layer::SubscriberExt, util::SubscriberInitExt};

use crate::{
    cli::{Device, LogFormat, RunOnArgs, ServeArgs, ServeOptions, SharePrefixes},
    devices::Devices,
    failure::{Failure, Outcome},
    library, mcp,
    output::Output,
    settings::{LibrarySettings, Settings, Terminal},
    units,
};
use models::{ServedModels, Tiers};

/// Ollama's port, which its clients use by default.
pub const PORT: u16 = 11434;

/// Default memory of the host for K and V, at most.
const MOST_HOST_BYTES: u64 = 16_000_000_000;

/// Minimum memory limit. A smaller one holds no model.
const LEAST_MEMORY: u64 = 1 << 20;

/// Host memory for blocks evicted from a GPU. `None` if it is off, and on the CPU.
fn host_memory(options: &ServeOptions, on_gpu: bool) -> Option<Arc<HostMemory>> {
    if !on_gpu {
        if options.kv_host.is_some_and(|size| size.0.is_some()) {
            tracing::warn!(
                "--kv-host has no use on the CPU, where K and V are in memory of the host; --kv-memory says how much they get"
            );
        }
        return None;
    }
    let bytes = match options.kv_host {
        Some(size) => size.0?,
        None => (paguro_backend_cpu::memory_available() / 4).min(MOST_HOST_BYTES),
    };
    tracing::info!(bound = units::bytes(bytes), "memory of the host for K and V");
    Some(HostMemory::new(bytes))
}

/// Addresses of the publisher of prefix-cache events, if it is enabled.
///
/// # Errors
/// A replay, a topic or an encoding of events that are not published.
fn kv_events(options: &ServeOptions) -> Outcome<Option<KvEventsSettings>> {
    let (replay, topic) = (options.kv_events_replay.clone(), options.kv_events_topic.clone());
    let Some(endpoint) = options.kv_events.clone() else {
        let flags = [
            ("--kv-events-replay", replay.is_some()),
            ("--kv-events-topic", topic.is_some()),
            ("--kv-events-encoding", options.kv_events_encoding.is_some()),
        ];
        let Some((flag, _)) = flags.into_iter().find(|(_, is_set)| *is_set) else { return Ok(None) };
        let failure = Failure::usage(format!("{flag} needs --kv-events"));
        return Err(failure.hint("--kv-events tcp://127.0.0.1:5557 publishes events"));
    };
    let topic = topic.unwrap_or_else(|| KvEventsSettings::TOPIC.to_owned());
    let encoding = options.kv_events_encoding.map(Into::into).unwrap_or_default();
    Ok(Some(KvEventsSettings { endpoint, replay, topic, encoding }))
}

/// Binds the sockets of events, and warns about those that all can reach.
///
/// # Errors
/// An address that cannot be bound.
fn bind_kv_events(
    receiver: KvReceiver,
    settings: KvEventsSettings,
) -> Outcome<(KvPublisher, KvEventsPlaces)> {
    let (publisher, places) = receiver.bind(settings).map_err(|error| {
        Failure::new(error).hint("--kv-events names an address like tcp://127.0.0.1:5557")
    })?;
    tracing::info!(place = places.endpoint, replay = places.replay, topic = places.topic, "KV events");
    for address in publisher.open_to_all() {
        tracing::warn!(
            %address,
            "KV events need no key and contain tokens of prompts, and this socket accepts connections at every address of \
             this machine; bind an address that only routers reach, such as tcp://10.0.0.5:5557"
        );
    }
    Ok((publisher, places))
}

/// Serves until it is stopped.
///
/// # Errors
/// Invalid settings, missing models, or addresses in use.
pub fn serve(args: &ServeArgs, program: &Settings, devices: &Devices) -> Outcome<()> {
    memory::configure();
    let config = read_config(args.config.as_deref(), program.serve_config.as_deref())?;
    let options = args.given.flags.clone().or(args.given.environment.clone()).or(config.clone());
    let traces = start_log(&options, program.terminal)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    // An address in use is reported before devices and models are opened.
    let places = places(&options)?;
    let listening =
        runtime.block_on(Listening::bind(&places)).map_err(|error| not_bound(&error, &options))?;
    let on = RunOnArgs {
        device: options.device.clone().unwrap_or_default(),
        gpu_layers: options.gpu_layers,
        split: options.split.clone(),
        numerics: options.numerics,
        memory: None,
        expert_slots: options.expert_slots,
        replicas: options.replicas == Some(true),
        isa: None,
        timed: false,
    };
    let device = devices.open(&on, options.threads, &|notice| tracing::warn!("{notice}"))?;
    let main = device.main();
    for one in if device.replicas { device.all() } else { std::slice::from_ref(main) } {
        tracing::info!(device = one.backend.capacity().description, numerics = one.numerics, "running on");
    }
    let (shown_device, free, on_gpu) = (shown::device(&device), device.free(), main.device != Device::Cpu);
    let engines_on_one = device.engines_on_one();
    drop(device);
    if let Some(bytes) = options.memory.filter(|bytes| bytes.0 < LEAST_MEMORY) {
        let message = format!("--memory is {}, in which no model fits", units::bytes(bytes.0));
        return Err(Failure::usage(message).hint("sizes have a unit: --memory 10GiB"));
    }
    let memory = match (options.memory, on_gpu) {
        (None, _) => free / 10 * 8,
        // A GPU cannot use other memory.
        (Some(bytes), true) => (bytes.0 / engines_on_one).min(free),
        (Some(bytes), false) => bytes.0 / engines_on_one,
    };
    let service = open_library(&program.library)?;
    let library = service.as_ref().map(|service| service.library.clone());
    let store = disk::open(&options, &program.library);
    let host = host_memory(&options, on_gpu);
    let (events, publisher, event_places) = match kv_events(&options)? {
        Some(settings) => {
            let (events, receiver) = KvEvents::new();
            let (publisher, places) = bind_kv_events(receiver, settings)?;
            (Some(events), Some(publisher), Some(places))
        }
        None => (None, None, None),
    };
    let models = ServedModels::new(
        &options,
        (devices.clone(), on),
        memory,
        &program.library,
        library,
        Tiers { host, store, events },
    )?;
    let models = Arc::new(models);
    let mut settings = server_settings(&options, places, memory, program.keys_file()?);
    settings.adapters = models.adapters(&options.loras)?;
    settings.mcp = mcp::servers(&options.mcp, &program.tool_environment)?;
    warn_without_keys(&settings);
    settings.aliases = models.aliases(&options.aliases)?;
    settings.devices.push(shown_device);
    settings.kv_events = event_places;
    settings.shown = shown::settings(&args.given, &config, &options, &settings);
    let (opens_page, has_page) = (options.open.unwrap_or(false), settings.ui);
    let bound = Server::new(settings, models.clone(), service).at(listening);

    let served = runtime.block_on(async {
        let (stop, cut) = stop_signals()?;
        if let Some(publisher) = publisher {
            publisher.start()?;
        }
        let mut out = Output::new();
        // A closed standard output does not stop the server.
        for place in bound.places() {
            let _ = out.line(format_args!("listening at {place}"));
            if let Some(address) = address::from_outside(&place) {
                let _ = out.line(format_args!("from other machines {address}"));
            }
        }
        if let Some(place) = bound.places().iter().find(|place| place.starts_with("http://")) {
            let place = address::from_here(place);
            let page = if has_page { format!("   page {place}/") } else { String::new() };
            let _ = out.line(format_args!("OpenAI {place}/v1   Anthropic and Ollama {place}{page}"));
            let _ = out.line(format_args!("all requests and their fields {place}/docs"));
        }
        // Reading the headers of a large library takes long.
        tokio::task::spawn_blocking(move || say_models(&*models, memory));
        if opens_page {
            open_page(&bound.places());
        }
        bound.serve(stop, cut).await;
        Ok(())
    });
    // A pull that waits for the network must not delay the exit.
    runtime.shutdown_timeout(Duration::from_secs(1));
    if let Some(Err(error)) = traces.map(|traces| traces.shutdown_with_timeout(Duration::from_secs(1))) {
        tracing::warn!(%error, "the last spans could not be sent");
    }
    served
}

/// Logs the models that are served, and those that cannot be served with the reason.
fn say_models(models: &dyn ModelSource, memory: u64) {
    for model in models.list().unwrap_or_default() {
        let needed = models.plan(&model, None).map_or(0, |plan| plan.with(plan.kv_least));
        let (name, context, limit) = (model.name, model.details.context, units::bytes(memory));
        match model.details.problem {
            None if needed > memory => {
                let needed = units::bytes(needed);
                tracing::warn!(model = name, needed, memory = limit, "does not fit into --memory");
            }
            None => tracing::info!(model = name, context, memory = limit, "serving"),
            Some(problem) => tracing::warn!(model = name, problem, "cannot be served"),
        }
    }
}

/// Opens the library; `None` without a home folder or if it is unusable. The embedded model and named files do not need
/// it.
fn open_library(settings: &LibrarySettings) -> Outcome<Option<LibraryService>> {
    if settings.root.is_none() {
        return Ok(None);
    }
    let hub = settings.hub()?.into();
    match settings.open() {
        Ok(library) => {
            if let Some(problem) = library.not_writable() {
                tracing::warn!("{problem}");
            }
            Ok(Some(LibraryService::new(library.into(), hub, library::inspect)))
        }
        Err(failure) => {
            tracing::error!("the models of the library are not served: {}", failure.message());
            Ok(None)
        }
    }
}

/// Reads the settings file, if there is one.
///
/// # Errors
/// The file cannot be read, or is invalid.
pub fn read_config(given: Option<&Path>, default: Option<&Path>) -> Outcome<ServeOptions> {
    let Some(path) = given.or(default.filter(|path| path.is_file())) else {
        return Ok(ServeOptions::default());
    };
    let shown = path.display();
    let text =
        fs::read_to_string(path).map_err(|error| Failure::usage(format!("cannot read {shown}: {error}")))?;
    let parsed = toml::from_str(&text).map_err(|error| config_error(&shown, &error));
    let mut options: ServeOptions = parsed?;
    let folder = path.parent().unwrap_or(Path::new(""));
    for (name, preset) in &mut options.presets {
        preset.read_template(folder)?;
        let problem =
            |failure: Failure| Failure::usage(format!("{shown}: preset {name}: {}", failure.message()));
        preset.check().map_err(problem)?;
    }
    Ok(options)
}

/// Returns the error for a settings file that cannot be parsed. For an unknown key it suggests the nearest known one.
fn config_error(path: &dyn std::fmt::Display, error: &toml::de::Error) -> Failure {
    const KEYS: &str = "keys are the flags of `paguro serve --help` without the dashes before them";
    let unknown = error.message().strip_prefix("unknown field `").and_then(|rest| rest.split_once('`'));
    let Some((key, rest)) = unknown else {
        return Failure::usage(format!("{path}: {}", error.to_string().trim_end())).hint(KEYS);
    };
    // serde lists the known keys between backticks.
    let known = rest
        .split('`')
        .skip(1)
        .step_by(2)
        .map(|name| (strsim::jaro_winkler(name, &key.replace('_', "-")), name));
    let nearest = known.filter(|(like, _)| *like > 0.8).max_by(|a, b| a.0.total_cmp(&b.0));
    // The first lines show the place; the last one is the message with all keys.
    let text = error.to_string();
    let place = text.trim_end().rsplit_once('\n').map_or("", |(place, _)| place);
    let failure = Failure::usage(format!("{path}: unknown key `{key}`\n{place}"));
    match nearest {
        Some((_, name)) => failure.hint(format!("did you mean `{name}`?")),
        None => failure.hint(KEYS),
    }
}

/// Returns the host name, which containers and programs of this machine may use. On macOS it ends with `.local`.
fn own_name() -> Option<String> {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
    Some(name.trim().to_lowercase()).filter(|name| !name.is_empty())
}

/// Warns that all requests from other machines will be refused.
fn warn_without_keys(settings: &ServerSettings) {
    let from_outside = |place: &Listen| matches!(place, Listen::Tcp(address) if !address.ip().is_loopback());
    let no_keys = settings.api_keys.is_empty()
        && KeyFile::new(settings.keys.clone()).read().is_ok_and(|keys| keys.is_empty());
    if no_keys && settings.listen.iter().any(from_outside) {
        tracing::warn!(
            "there is no key, so requests from other machines are refused: `paguro keys add NAME` makes one"
        );
    }
}

/// Returns the addresses of the settings.
fn places(options: &ServeOptions) -> Outcome<Vec<Listen>> {
    let tcp = Listen::Tcp(address::resolve(options.host.as_deref(), options.port.unwrap_or(PORT))?);
    Ok([tcp].into_iter().chain(options.socket.clone().map(Listen::Unix)).collect())
}

/// Returns the error for an address that cannot be bound.
fn not_bound(error: &BindError, options: &ServeOptions) -> Failure {
    let failure = Failure::from_error(error);
    if error.source.kind() != std::io::ErrorKind::AddrInUse {
        return failure;
    }
    let port = options.port.unwrap_or(PORT);
    let other = port.checked_add(1).unwrap_or(PORT);
    let failure = match port {
        PORT => failure.hint("Ollama or another `paguro serve` may be running: the port is that of both"),
        _ => failure.hint("another program listens there"),
    };
    failure.hint(format!("to listen elsewhere: paguro serve --port {other}"))
}

fn server_settings(
    options: &ServeOptions,
    listen: Vec<Listen>,
    memory: u64,
    keys: PathBuf,
) -> ServerSettings {
    let defaults = HttpLimits::default();
    let connections = options.max_connections.unwrap_or(defaults.connections);
    ServerSettings {
        listen,
        adapters: AdapterSettings::default(),
        residency: Residency {
            memory,
            keep_alive: options.keep_alive.map_or(Some(Duration::from_secs(300)), |time| time.0),
            patience: Duration::from_secs(60),
        },
        limits: HttpLimits {
            body_bytes: options.max_body.map_or(defaults.body_bytes, |bytes| bytes.0 as usize),
            body_memory: options.body_memory.map_or(defaults.body_memory, |bytes| bytes.0 as usize),
            body_rate: options.min_body_rate.map_or(defaults.body_rate, |bytes| bytes.0),
            write_time: options.write_timeout.map_or(defaults.write_time, |time| time.0),
            body_time: options.read_timeout.map_or(defaults.body_time, |time| time.0),
            head_time: options.read_timeout.map_or(defaults.head_time, |time| time.0),
            request_time: options.request_timeout.map(|time| time.0),
            connections,
            connections_per_client: options.max_connections_per_client.unwrap_or((connections / 4).max(1)),
        },
        images: ImageSettings {
            hosts: options.image_urls.clone(),
            min_tokens: options.image_min_tokens,
            max_tokens: options.image_max_tokens,
            ..ImageSettings::default()
        },
        keys,
        api_keys: options.api_keys.clone(),
        hosts: options.allow_hosts.clone(),
        own_names: own_name().into_iter().collect(),
        origins: options.cors_origins.clone(),
        strict: options.strict == Some(true),
        refuse_token_ids: options.refuse_token_ids == Some(true),
        share_prefixes: options.share_prefixes == Some(SharePrefixes::All),
        aliases: Vec::new(),
        mcp: Vec::new(),
        release_memory: memory::release,
        ui: !options.no_ui.unwrap_or(false),
        shown: Vec::new(),
        devices: Vec::new(),
        kv_events: None,
        public_metrics: options.public_metrics == Some(true),
        owned_by: options.owned_by.clone().unwrap_or_else(|| "paguro".to_owned()),
        drain_time: options.drain_time.map_or(Duration::ZERO, |time| time.0),
        shutdown_time: options.shutdown_timeout.map_or(Duration::from_secs(10), |time| time.0),
    }
}

/// Opens the page in the user's browser.
fn open_page(places: &[String]) {
    let Some(place) = places.iter().find(|place| place.starts_with("http://")) else { return };
    let address = address::from_here(place);
    if let Err(error) = open::that_detached(&address) {
        tracing::warn!(%error, address, "no browser could be opened; open the address yourself");
    }
}

/// Configures logging: lines to standard error, and spans to a collector, if there is one.
fn start_log(options: &ServeOptions, terminal: Terminal) -> Outcome<Option<SdkTracerProvider>> {
    let filter: Targets = match &options.log {
        None if terminal.quiet => "warn",
        None if terminal.verbose => "debug",
        None => "info",
        Some(filter) => filter,
    }
    .parse()
    .map_err(|error| {
        Failure::usage(format!("the log filter is malformed: {error}"))
            .hint("for example: --log info,paguro_server=debug")
    })?;
    let traces = options.otlp_endpoint.as_deref().map(telemetry::provider).transpose()?;
    let spans = traces.as_ref().map(|traces| {
        let layer = tracing_opentelemetry::layer().with_tracer(traces.tracer(env!("CARGO_PKG_NAME")));
        let filter = Targets::new().with_target("paguro_server", tracing::Level::INFO);
        layer.with_location(false).with_threads(false).with_filter(filter)
    });
    let registry = tracing_subscriber::registry().with(spans);
    let lines = tracing_subscriber::fmt::layer().with_writer(stderr).with_ansi(terminal.color_errors);
    match options.log_format.unwrap_or(LogFormat::Text) {
        LogFormat::Text => registry.with(lines.with_target(false).with_filter(filter)).init(),
        LogFormat::Json => registry.with(lines.json().with_filter(filter)).init(),
    }
    Ok(traces)
}

/// Returns futures for the first and the second request to stop: Ctrl-C or SIGTERM.
#[cfg(unix)]
fn stop_signals() -> Outcome<(impl Future<Output = ()>, impl Future<Output = ()>)> {
    use tokio::signal::unix::{SignalKind, signal};
    let next = |interrupt: SignalKind, terminate: SignalKind| -> Outcome<_> {
        let (mut interrupt, mut terminate) = (signal(interrupt)?, signal(terminate)?);
        Ok(async move {
            tokio::select! { _ = interrupt.recv() => {}, _ = terminate.recv() => {} }
        })
    };
    let first = next(SignalKind::interrupt(), SignalKind::terminate())?;
    Ok((first, async move {
        // The second signal counts only after the first one.
        match next(SignalKind::interrupt(), SignalKind::terminate()) {
            Ok(second) => second.await,
            Err(_) => std::future::pending().await,
        }
    }))
}

/// Returns futures for the first and the second request to stop: Ctrl-C.
#[cfg(not(unix))]
fn stop_signals() -> Outcome<(impl Future<Output = ()>, impl Future<Output = ()>)> {
    let next = || async { drop(tokio::signal::ctrl_c().await) };
    Ok((next(), next()))
}
