//! `--otlp-endpoint`: spans of requests for a collector that speaks OTLP over HTTP.

use std::time::Duration;

use async_trait::async_trait;
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::{Resource, trace::SdkTracerProvider};

use crate::failure::{Failure, Outcome};

/// Timeout of requests to the collector.
const PATIENCE: Duration = Duration::from_secs(10);

/// Returns an exporter that sends spans to this address in batches, from its own thread. It must be shut down to send
/// the last ones.
///
/// # Errors
/// The address is invalid.
pub fn provider(endpoint: &str) -> Outcome<SdkTracerProvider> {
    let agent = ureq::Agent::config_builder().timeout_global(Some(PATIENCE)).http_status_as_error(false);
    let exporter = SpanExporter::builder()
        .with_http()
        .with_http_client(Sender(agent.build().into()))
        .with_endpoint(format!("{}/v1/traces", endpoint.trim_end_matches('/')))
        .build()
        .map_err(|error| {
            Failure::usage(format!("spans cannot be sent to `{endpoint}`: {error}"))
                .hint("for example: --otlp-endpoint http://localhost:4318")
        })?;
    let resource = Resource::builder().with_service_name(env!("CARGO_PKG_NAME")).build();
    Ok(SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource).build())
}

/// HTTP client of the exporter. It runs on a thread that may block.
#[derive(Debug)]
struct Sender(ureq::Agent);

#[async_trait]
impl HttpClient for Sender {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let (head, mut body) = self.0.run(request.map(|bytes| bytes.to_vec()))?.into_parts();
        Ok(Response::from_parts(head, body.read_to_vec()?.into()))
    }
}
