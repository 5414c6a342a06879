//! `--otlp-endpoint`: spans of requests for a collector that speaks OTLP over HTTP.

use std::time::Duration;

use async_trait::async_trait;
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::{Resource, trace::SdkTracerProvider};

use crate::failure::{Failure, Outcome};

/// How long a collector may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// What sends spans to this address, in batches and from a thread of its own. It is to be shut down in the end, so that
/// the last ones are sent.
///
/// # Errors
/// An address that is none.
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

/// The exporter's way to the network: it asks from a thread that may block.
#[derive(Debug)]
struct Sender(ureq::Agent);

#[async_trait]
impl HttpClient for Sender {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let (head, mut body) = self.0.run(request.map(|bytes| bytes.to_vec()))?.into_parts();
        Ok(Response::from_parts(head, body.read_to_vec()?.into()))
    }
}
