//! The HTTP server: the APIs of OpenAI, Anthropic and Ollama over engines.
//!
//! A request passes through `listen` (connections), `layers` (id, log), `access` (host, origin, key) and a dialect's
//! handler (`openai`, ...), whose body [`wire`] reads. [`generate`] renders the template, tokenizes, runs the engine
//! and returns pieces. The dialect writes them (`stream`). [`models`] loads and unloads models.
//!
//! This crate names no device and opens no model file, except for imports by administrators. Dialects only translate at
//! both ends of [`generate`].
//!
//! | module | subject |
//! |-|-|
//! | `listen`, `connections` | sockets and the end of the server; idle and slow connections |
//! | `layers`, `access` | request ids and the log; host, sender, key and scope |
//! | `body`, `wire` | rate and memory of bodies and large answers; parsing, unknown fields |
//! | `openai`, `anthropic`, `ollama`, `retrieval` | APIs: translation at both ends |
//! | `generate` | common to all: templates, tokens, grammars, stop strings, embeddings, scores |
//! | `images` | places of images in prompts, fetching, decoding |
//! | `prepare`, `count` | threads that parse, render, tokenize and compile, with fair queueing; numbers of clients, read only with a bound |
//! | `models`, `source` | loading and unloading; the application opens models |
//! | `stream`, `metrics`, `status` | bodies of answers; reports |
//! | `fleet`, `kv_events` | routers of several servers |
//! | `ui`, `mcp` | the web page, and tool servers for its chat |

mod access;
mod aliases;
mod anthropic;
mod body;
mod connections;
mod count;
mod dialect;
mod error;
mod examples;
mod extract;
mod fleet;
mod generate;
mod held;
mod ids;
mod images;
mod keys;
mod kv_events;
mod layers;
mod library;
mod listen;
mod made_from;
mod metrics;
mod models;
mod ollama;
mod openai;
mod openapi;
mod paths;
mod prepare;
mod release;
mod retrieval;
mod settings;
mod shares;
mod source;
mod status;
mod stored;
mod stream;
mod thinking;
mod ui;
pub mod units;
mod wire;

use std::sync::Arc;

use axum::{Router, middleware, routing::get};
use paguro_mcp::McpServers;

pub use extract::Json;
pub use generate::stage_times;
pub use images::{HostPattern, ImageSettings, Sight};
pub use keys::{ApiKey, KeyError, KeyFile, Scope};
pub use kv_events::{KvEncoding, KvEvents, KvEventsPlaces, KvEventsSettings, KvPublisher, KvReceiver};
pub use library::LibraryService;
pub use listen::{Arrival, BindError, Bound, Listening};
pub use models::{AdapterSetting, AdapterSettings, Residency};
pub use settings::{Alias, HttpLimits, Listen, McpSetting, ServerSettings};
pub use source::{
    AdapterPlace, Details, Grant, LoadError, LoadPlan, Loaded, ModelEntry, ModelPreset, ModelSource, Outside,
    Presets,
};
pub use stored::check_defaults;
pub use ui::Setting;

use crate::{
    aliases::Aliased,
    body::BodyMemory,
    error::ApiError,
    images::{ImageDecoder, ImageFetcher},
    keys::Keys,
    metrics::Metrics,
    models::Models,
    prepare::Preparation,
    release::MemoryRelease,
    shares::ClientShares,
};

/// State that all requests share.
#[derive(Debug)]
pub(crate) struct State {
    /// Settings of the server.
    pub settings: ServerSettings,
    /// All models.
    pub models: Arc<Models>,
    /// Changes of the model library; `None` without a library.
    library: Option<LibraryService>,
    /// API keys.
    pub keys: Keys,
    /// Stored responses that later requests continue.
    pub responses: openai::ResponseStore,
    /// Schemas of request bodies.
    pub schemas: wire::Schemas,
    /// Ignored fields that the log has already named.
    pub logged: wire::Logged,
    /// Metrics.
    pub metrics: Arc<Metrics>,
    /// Threads that prepare requests.
    preparation: Preparation,
    /// Memory of all request bodies.
    body_memory: BodyMemory,
    /// Threads that decode images.
    image_decoder: ImageDecoder,
    /// Client for images at URLs.
    image_fetcher: ImageFetcher,
    /// Pending release of memory to the system.
    release: Arc<MemoryRelease>,
    /// Samples of the engines, for the page.
    pub live: ui::Live,
    /// Contents of model files, for the page.
    pub file_cards: ui::models::FileCards,
    /// The last requests, for the page.
    pub requests: ui::RequestLog,
    /// Servers of tools, for the page.
    pub mcp: McpServers,
    /// Concurrent calls of these tools, by client.
    pub tool_calls: ClientShares,
    /// Requests that must end before the server does.
    pub drain: Arc<fleet::drain::Drain>,
    /// Token of the page. It proves that a browser's request was sent by the page, and changes with each start.
    pub page_token: String,
}

impl State {
    /// Returns the model library.
    ///
    /// # Errors
    /// There is none.
    pub fn library(&self) -> Result<&LibraryService, ApiError> {
        self.library.as_ref().ok_or_else(|| {
            let problem = "this server has no model library: neither PAGURO_HOME nor HOME is set, or the library \
                           cannot be opened, and the server's log has the reason";
            ApiError::Unavailable(problem.into())
        })
    }
}

/// State of handlers.
pub(crate) type AppState = Arc<State>;

/// A server that does not listen yet.
#[derive(Debug)]
pub struct Server {
    state: AppState,
}

impl Server {
    /// Creates a server of these models. No model is loaded yet.
    pub fn new(
        settings: ServerSettings,
        source: Arc<dyn ModelSource>,
        library: Option<LibraryService>,
    ) -> Self {
        let source = Aliased::wrap(source, settings.aliases.clone());
        let adapters = settings.adapters.clone();
        let models = Models::new(source, settings.residency, adapters, settings.release_memory);
        let metrics = Metrics::new(models.clone());
        let keys = Keys::new(KeyFile::new(settings.keys.clone()), &settings.api_keys);
        let release = Arc::new(MemoryRelease::new(settings.release_memory));
        let body_memory = BodyMemory::new(settings.limits.body_memory, BodyMemory::PATIENCE, release.clone());
        let images = &settings.images;
        let image_decoder = ImageDecoder::new(images.limits, images.memory, metrics.decoded_images.clone());
        let image_fetcher = ImageFetcher::new(images.hosts.clone(), images.limits.bytes);
        let mcp = McpServers::new(settings.mcp.iter().map(|setting| setting.server.clone()).collect());
        Self {
            state: Arc::new(State {
                mcp,
                tool_calls: ClientShares::new(paguro_mcp::MOST_CALLS_OF_CLIENT),
                page_token: ids::new(&ids::new("")),
                settings,
                models,
                library,
                keys,
                metrics,
                responses: Default::default(),
                preparation: Preparation::new(),
                body_memory,
                image_decoder,
                image_fetcher,
                release,
                live: Default::default(),
                drain: Default::default(),
                file_cards: Default::default(),
                requests: Default::default(),
                schemas: Default::default(),
                logged: Default::default(),
            }),
        }
    }

    /// Returns all routes with their layers. Requests need an [`Arrival`] among their extensions; [`Bound::serve`] adds
    /// it.
    pub fn router(&self) -> Router {
        let state = self.state.clone();
        let page = if state.settings.ui { ui::routes() } else { Router::new() };
        openapi::routes()
            .route("/", get(ui::root))
            .merge(page)
            .fallback(status::no_such_path)
            .method_not_allowed_fallback(status::no_such_method)
            .layer(middleware::from_fn_with_state(state.clone(), access::check))
            .layer(middleware::from_fn_with_state(state.clone(), fleet::drain::refuse))
            .layer(middleware::from_fn(dialect::shape_errors))
            .layer(middleware::from_fn_with_state(state.clone(), wire::tolerate))
            .layer(access::cors(&state.settings.origins))
            .layer(middleware::from_fn_with_state(state.clone(), layers::log))
            .with_state(state)
    }
}
