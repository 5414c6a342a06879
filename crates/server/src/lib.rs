//! The HTTP server: OpenAI's API over engines.
//!
//! The way of a request: `listen` (connections) → `layers` (id, log) → `access` (host, origin, key) → a dialect's
//! handler (`openai`, ...: [`wire`] reads the body) → [`generate`] (template, tokens, engine, pieces) → the dialect again (`stream`).
//! [`models`] decides what is resident.
//!
//! What is absent: no device, no path from a request to a file but for imports by administrators, no second way to an answer: dialects translate at both
//! ends of [`generate`] and do nothing else.

mod access;
mod aliases;
mod anthropic;
mod body;
mod connections;
mod count;
pub mod dialect;
pub mod error;
mod extract;
pub mod generate;
mod held;
mod ids;
mod keys;
mod layers;
mod library;
mod listen;
pub mod mcp;
pub mod metrics;
pub mod models;
mod ollama;
mod openai;
mod openapi;
pub mod output;
mod prepare;
mod release;
mod settings;
mod source;
mod status;
mod stored;
pub mod stream;
pub mod ui;
pub mod units;
mod wire;

use std::sync::Arc;

use axum::{Router, middleware, routing::get};

pub use extract::Json;
pub use keys::{ApiKey, KeyError, KeyFile, Scope};
pub use library::Library;
pub use listen::{Arrival, BindError, Bound};
pub use mcp::{McpServer, McpTransport, Trust};
pub use models::Residency;
pub use settings::{Alias, HttpLimits, Listen, ServerSettings};
pub use source::{
    Details, Grant, LoadError, LoadPlan, Loaded, ModelEntry, ModelPreset, ModelSource, Outside, Presets,
};
pub use stored::check_parameters;
pub use ui::Setting;

use crate::{
    aliases::Aliased, body::BodyMemory, keys::Keys, metrics::Metrics, models::Models, prepare::Preparation,
    release::MemoryRelease,
};

/// What all requests share.
#[derive(Debug)]
pub struct State {
    /// How the server is set up.
    pub settings: ServerSettings,
    /// All models.
    pub models: Arc<Models>,
    /// What can be changed of them; `None` without a library.
    pub library: Option<Library>,
    /// Who may ask.
    pub keys: Keys,
    /// Responses that can be gone on from.
    pub responses: openai::ResponseStore,
    /// The fields that requests can have.
    pub schemas: wire::Schemas,
    /// Fields that the log has named as ignored.
    pub logged: wire::Logged,
    /// What is measured.
    pub metrics: Arc<Metrics>,
    /// Threads that prepare requests.
    preparation: Preparation,
    /// The memory of all requests' bodies.
    body_memory: BodyMemory,
    /// Memory that is to be given back to the system.
    release: Arc<MemoryRelease>,
    /// Samples of the engines, for the page.
    pub live: ui::Live,
    /// Contents of models' files, for the page.
    pub file_cards: ui::models::FileCards,
    /// The last requests, for the page.
    pub requests: ui::RequestLog,
    /// Servers of tools, for the page.
    pub mcp: mcp::McpServers,
}

/// What handlers get.
pub type AppState = Arc<State>;

/// A server that does not listen yet.
#[derive(Debug)]
pub struct Server {
    state: AppState,
}

impl Server {
    /// A server of these models. Nothing is loaded yet.
    pub fn new(settings: ServerSettings, source: Arc<dyn ModelSource>, library: Option<Library>) -> Self {
        let source = Aliased::wrap(source, settings.aliases.clone());
        let models = Models::new(source, settings.residency, settings.release_memory);
        let metrics = Metrics::new(models.clone());
        let keys = Keys::new(KeyFile::new(settings.keys.clone()), &settings.api_keys);
        let release = Arc::new(MemoryRelease::new(settings.release_memory));
        let body_memory = BodyMemory::new(settings.limits.body_memory, BodyMemory::PATIENCE, release.clone());
        let mcp = mcp::McpServers::new(settings.mcp.clone());
        Self {
            state: Arc::new(State {
                mcp,
                settings,
                models,
                library,
                keys,
                metrics,
                responses: Default::default(),
                preparation: Preparation::new(),
                body_memory,
                release,
                live: Default::default(),
                file_cards: Default::default(),
                requests: Default::default(),
                schemas: Default::default(),
                logged: Default::default(),
            }),
        }
    }

    /// All paths with their layers, for requests with an [`Arrival`] among their extensions. [`Bound::serve`] brings
    /// connections to it.
    pub fn router(&self) -> Router {
        let state = self.state.clone();
        let page = if state.settings.ui { ui::routes() } else { Router::new() };
        openapi::routes()
            .route("/", get(ui::root))
            .merge(page)
            .fallback(status::no_such_path)
            .method_not_allowed_fallback(status::no_such_method)
            .layer(middleware::from_fn_with_state(state.clone(), access::check))
            .layer(middleware::from_fn(dialect::shape_errors))
            .layer(middleware::from_fn_with_state(state.clone(), wire::tolerate))
            .layer(access::cors(&state.settings.origins))
            .layer(middleware::from_fn_with_state(state.clone(), layers::log))
            .with_state(state)
    }
}
