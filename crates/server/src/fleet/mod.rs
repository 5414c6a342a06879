//! Endpoints for routers of several servers: vLLM's for tokens, and reports of load and settings.
//!
//! A server that is stopped refuses new requests while running ones end ([`drain`]), and closes its ports afterwards.

pub mod drain;
mod generate;
mod info;
mod load;
mod render;

pub use render::{Parameters, set_fields};

use utoipa_axum::{router::OpenApiRouter, routes};

use crate::{AppState, wire};

/// Returns the routes.
pub fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(render::chat))
        .routes(routes!(render::completion))
        .routes(routes!(render::response))
        .routes(routes!(generate::create))
        .routes(routes!(info::server_info))
        .routes(routes!(info::get_server_info))
        .routes(routes!(load::load))
        .routes(routes!(load::get_load))
        .routes(routes!(load::loads))
        .routes(routes!(load::v1_loads))
}

/// Adds the known fields of requests to the OpenAPI document.
pub fn describe(document: &mut serde_json::Value) {
    wire::describe::<generate::GenerateRequest>(document);
}
