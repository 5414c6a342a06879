//! Random requests of all APIs to a server in this process, generated from its own OpenAPI document. No request may
//! panic, hang, return an undocumented status, or an error in another format than its API's.
//!
//! `PAGURO_FUZZ_CASES` sets their number (100), `PAGURO_FUZZ_SEED` the seed (1); `PAGURO_FUZZ_CASE` runs one case
//! of a seed alone.

mod generator;
mod grammars;

use std::{
    env,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use axum::{
    Router,
    body::Body,
    http::{Request, Response, header},
};
use futures_util::StreamExt;
use generator::{Generator, Random};
use paguro_backend_cpu::{Cpu, CpuOptions};
use paguro_engine::{Engine, EngineOptions, PageBudget};
use paguro_library::{
    Details, Library,
    hub::{Hub, HubOptions},
};
use paguro_model::{LoadOptions, ModelFile};
use paguro_server::{
    AdapterSettings, Arrival, Details as ModelDetails, Grant, HttpLimits, ImageSettings, LibraryService,
    LoadError, LoadPlan, Loaded, ModelEntry, ModelPreset, ModelSource, Outside, Presets, Residency, Server,
    ServerSettings,
};
use serde_json::{Map, Value};
use tower::ServiceExt;

/// Time after which a request without a whole answer hangs.
const HANGS: Duration = Duration::from_secs(60);

/// The model in the repository, on the CPU.
#[derive(Debug)]
struct Tales;

impl Tales {
    fn file() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tales/tales-Q8_0.gguf")
    }

    fn entry() -> ModelEntry {
        let (name, version) = ("tales".to_owned(), "1".to_owned());
        ModelEntry {
            name,
            version,
            created: 0,
            bytes: 1,
            defaults: Map::new(),
            chat_template: None,
            details: ModelDetails::default(),
            adapter: None,
        }
    }
}

impl ModelSource for Tales {
    fn list(&self) -> Result<Vec<ModelEntry>, LoadError> {
        Ok(vec![Self::entry()])
    }

    fn find(&self, name: &str) -> Result<ModelEntry, LoadError> {
        match name.eq_ignore_ascii_case("tales") {
            true => Ok(Self::entry()),
            false => Err(LoadError::NotFound(name.to_owned())),
        }
    }

    fn open(&self, _: &ModelEntry) -> Result<ModelFile, LoadError> {
        ModelFile::open(&Self::file()).map_err(|error| LoadError::Failed(error.to_string()))
    }

    fn plan(&self, _: &ModelEntry, _: Option<usize>) -> Result<LoadPlan, LoadError> {
        let kv = 32 << 20;
        let (kv_least, kv_enough, kv_most) = (kv, kv, kv);
        Ok(LoadPlan { weights: 0, buffers: 0, adapters: 0, kv_least, kv_enough, kv_most, context: 256 })
    }

    fn load(&self, entry: &ModelEntry, grant: Grant) -> Result<Loaded, LoadError> {
        let failed = |error: &dyn std::fmt::Display| LoadError::Failed(error.to_string());
        let model = self.open(entry)?.load(&LoadOptions { max_context: Some(256) });
        let model = model.map_err(|error| failed(&error))?;
        let backend = Cpu::new(CpuOptions { threads: Some(2), ..CpuOptions::default() });
        let options = EngineOptions {
            pages: PageBudget::Bytes(grant.kv),
            max_context: Some(256),
            max_sequences: 4,
            max_batch_tokens: 64,
            queue_capacity: 64,
            ..EngineOptions::default()
        };
        let block_size = options.block_size;
        let plan = Engine::plan(&backend, &model.program, &model.weights, None, 256, &options);
        let memory = plan.map_err(|error| failed(&error))?.memory;
        let engine = Engine::start(&backend, &model, options).map_err(|error| failed(&error))?;
        Ok(Loaded { model: model.into(), engine, device: "cpu".into(), memory, block_size })
    }

    fn preset(&self, _: &str) -> Result<Presets, LoadError> {
        Ok(Presets::default())
    }

    fn set_preset(&self, _: &str, _: ModelPreset) -> Result<(), LoadError> {
        Err(LoadError::Invalid("it is fixed".into()))
    }

    fn outside(&self, name: &str) -> Option<Outside> {
        name.eq_ignore_ascii_case("tales").then(|| Outside::Disk(Self::file()))
    }
}

fn server(home: &Path) -> Router {
    let library = Library::open(&home.join("library")).unwrap();
    // Nothing listens there.
    let hub =
        Hub::new(HubOptions { endpoint: "http://127.0.0.1:9".into(), retries: 0, ..HubOptions::default() })
            .unwrap();
    let inspect = |_: &Path| Ok(Details::default());
    let settings = ServerSettings {
        api_keys: Vec::new(),
        listen: Vec::new(),
        adapters: AdapterSettings::default(),
        residency: Residency { memory: 1 << 30, keep_alive: None, patience: Duration::from_secs(1) },
        limits: HttpLimits { body_bytes: 4 << 20, body_memory: 32 << 20, ..HttpLimits::default() },
        keys: home.join("keys.json"),
        hosts: Vec::new(),
        own_names: Vec::new(),
        origins: Vec::new(),
        strict: false,
        refuse_token_ids: false,
        share_prefixes: false,
        aliases: Vec::new(),
        mcp: Vec::new(),
        release_memory: || {},
        shutdown_time: Duration::ZERO,
        drain_time: Duration::ZERO,
        ui: false,
        shown: Vec::new(),
        devices: Vec::new(),
        images: ImageSettings::default(),
        kv_events: None,
        public_metrics: false,
        owned_by: "paguro".to_owned(),
    };
    let library = LibraryService::new(library.into(), hub.into(), inspect);
    Server::new(settings, Arc::new(Tales), Some(library)).router()
}

/// An operation of the API document.
struct Operation {
    method: String,
    path: String,
    body: Option<Value>,
}

fn operations(document: &Value) -> Vec<Operation> {
    let mut operations = Vec::new();
    // Without the page's own paths: one of them creates keys, and one streams for ever.
    let paths = document["paths"].as_object().unwrap().iter();
    for (path, methods) in paths.filter(|(path, _)| !path.starts_with("/ui/")) {
        for (method, operation) in methods.as_object().unwrap() {
            let body = operation["requestBody"]["content"]["application/json"]["schema"].clone();
            let body = Some(body).filter(|schema| !schema.is_null());
            operations.push(Operation { method: method.to_uppercase(), path: path.clone(), body });
        }
    }
    assert!(operations.len() > 20, "the document has {} operations", operations.len());
    operations
}

/// A request, as text for the report and as it is sent.
struct Case {
    method: String,
    path: String,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
}

impl Case {
    fn new(operations: &[Operation], document: &Value, seed: u64) -> Self {
        let mut random = Random(seed);
        if random.once_in(3) {
            let (path, body) = Generator { document, random, hostile: 1_000_000 }.constrained();
            let headers =
                vec![("host", "localhost".to_owned()), ("content-type", "application/json".to_owned())];
            return Self { method: "POST".into(), path, headers, body: body.to_string().into_bytes() };
        }
        // Requests with a body are where the fields are.
        let with_body: Vec<_> = operations.iter().filter(|operation| operation.body.is_some()).collect();
        let operation = match random.once_in(5) {
            true => random.pick(operations),
            false => *random.pick(&with_body),
        };
        let segments =
            ["tales", "%ff", "%00", "..%2f..", "resp_1", "sha256:00", "x%20y", "TALES", "%F0%9F%A6%8A"];
        let digest = format!("sha256:{}", "0".repeat(64));
        let mut path = String::new();
        let mut rest = operation.path.as_str();
        while let Some((before, after)) = rest.split_once('{') {
            let segment = if random.once_in(4) { &digest } else { *random.pick(&segments) };
            path += before;
            path += segment;
            rest = after.split_once('}').map_or("", |(_, after)| after);
        }
        path += rest;
        let hostile = *random.pick(&[1_000_000, 200, 60, 12]);
        let mut generator = Generator { document, random, hostile };
        let mut body = Vec::new();
        if let Some(schema) = &operation.body {
            let mut value = generator.value(schema, "", 0);
            if let Value::Object(fields) = &mut value
                && !generator.random.once_in(20)
                && fields.contains_key("model")
            {
                fields.insert("model".into(), "tales".into());
            }
            body = value.to_string().into_bytes();
        } else if operation.method == "POST" {
            body = vec![7; generator.random.below(1000)];
        }
        let random = &mut generator.random;
        if random.once_in(25) {
            mutate(&mut body, random);
        }
        let mut headers =
            vec![("host", "localhost".to_owned()), ("content-type", "application/json".to_owned())];
        let odd = [
            ("x-request-timeout", "0.05"),
            ("x-request-timeout", "1e300"),
            ("x-request-timeout", "18446744073709551615"),
            ("x-request-timeout", "-1"),
            ("x-request-timeout", "NaN"),
            ("origin", "https://evil.example"),
            ("origin", "NULL"),
            ("anthropic-version", "2023-06-01"),
            ("anthropic-version", "x"),
            ("authorization", "Bearer x"),
            ("content-encoding", "gzip"),
            ("x-request-id", "a b"),
            ("expect", "100-continue"),
        ];
        if random.once_in(8) {
            let (name, value) = *random.pick(&odd);
            headers.push((name, value.to_owned()));
        }
        Self { method: operation.method.clone(), path, headers, body }
    }

    fn request(&self) -> Option<Request<Body>> {
        let mut request = Request::builder().method(self.method.as_str()).uri(&self.path);
        for (name, value) in &self.headers {
            request = request.header(*name, value);
        }
        let mut request = request.body(Body::from(self.body.clone())).ok()?;
        let peer = Some(Ipv4Addr::LOCALHOST.into());
        request.extensions_mut().insert(Arrival { loopback: true, private: true, peer });
        Some(request)
    }

    /// Returns the first fault of an answer.
    fn check(&self, status: u16, json: bool, body: &[u8]) -> Result<(), String> {
        let has_timeout = self.headers.iter().any(|(name, _)| *name == "x-request-timeout");
        match status {
            503 | 507 => {}
            504 if has_timeout => {}
            500.. => return Err(format!("status {status}")),
            _ => {}
        }
        if status < 400 || self.method == "HEAD" {
            return Ok(());
        }
        let value: Value =
            serde_json::from_slice(body).map_err(|error| format!("an error is no JSON: {error}"))?;
        let text = |value: &Value| value.as_str().is_some_and(|text| !text.is_empty());
        let error = &value["error"];
        let shaped = match &self.path {
            path if path.starts_with("/v1/messages") => {
                value["type"] == "error" && text(&error["type"]) && text(&error["message"])
            }
            path if path.starts_with("/api/") => text(error),
            _ => text(&error["message"]) && text(&error["type"]),
        };
        if json && shaped { Ok(()) } else { Err(format!("an error of another shape: {value}")) }
    }
}

/// Makes a body nobody's JSON.
fn mutate(body: &mut Vec<u8>, random: &mut Random) {
    match random.below(5) {
        0 => *body = b"[".repeat(100_000),
        1 => *body =
            br#"{"model":"tales","messages":"#.iter().copied().chain(*b"[").cycle().take(200_000).collect(),
        2 => body.truncate(random.below(body.len() + 1)),
        3 => body.extend_from_slice(b"\xff\xfe"),
        _ => {
            for _ in 0..1 + random.below(4) {
                let at = random.below(body.len());
                if let Some(byte) = body.get_mut(at) {
                    *byte = random.next() as u8;
                }
            }
        }
    }
}

async fn read(response: Response<Body>) -> (u16, bool, Vec<u8>) {
    let status = response.status().as_u16();
    let kind = response.headers().get(header::CONTENT_TYPE);
    let json = kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/json"));
    let mut bytes = Vec::new();
    let mut body = response.into_body().into_data_stream();
    // Streams are left in the middle, as clients do.
    while let Some(Ok(piece)) = body.next().await {
        bytes.extend_from_slice(&piece);
        if bytes.len() > 1 << 20 {
            break;
        }
    }
    (status, json, bytes)
}

fn number(name: &str) -> Option<u64> {
    env::var(name).ok()?.parse().ok()
}

#[test]
fn random_requests_are_answered_or_refused() {
    static PANICS: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let panics = || PANICS.lock().unwrap_or_else(PoisonError::into_inner);
    std::panic::set_hook(Box::new(move |panic| {
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        // Its panics are caught and become refusals.
        if !place.contains("llguidance") && !place.contains("derivre") {
            panics().push(panic.to_string());
        }
    }));
    let count = number("PAGURO_FUZZ_CASES").unwrap_or(100);
    let seed = number("PAGURO_FUZZ_SEED").unwrap_or(1);
    let only = number("PAGURO_FUZZ_CASE");
    println!("PAGURO_FUZZ_SEED={seed}");
    let home = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let router = server(home.path());
        let get = |path: &str| Case {
            method: "GET".into(),
            path: path.into(),
            headers: vec![("host", "localhost".into())],
            body: Vec::new(),
        };
        let document = router.clone().oneshot(get("/openapi.json").request().unwrap()).await.unwrap();
        let document: Value = serde_json::from_slice(&read(document).await.2).unwrap();
        let operations = operations(&document);
        // The model is loaded before the first case.
        let load = Case { method: "POST".into(), body: br#"{"model": "tales"}"#.into(), ..get("/api/generate") };
        assert_eq!(read(router.clone().oneshot(load.request().unwrap()).await.unwrap()).await.0, 200);
        let begin = Instant::now();
        let (mut cases, mut fine, mut slowest) = (0u64, 0u64, (Duration::ZERO, 0));
        let mut last_word = Instant::now();
        while cases < count {
            let index = only.unwrap_or(cases);
            let mut mixed = Random(seed ^ index.wrapping_mul(0x2545_f491_4f6c_dd1d));
            let case = Case::new(&operations, &document, mixed.next());
            cases += 1;
            let Some(request) = case.request() else { continue };
            let started = Instant::now();
            let answer = async { read(router.clone().oneshot(request).await.unwrap()).await };
            let answered = tokio::time::timeout(HANGS, answer).await;
            let took = started.elapsed();
            let outcome = match &answered {
                Err(_) => Err(format!("no answer within {HANGS:?}")),
                Ok((status, json, body)) => {
                    fine += u64::from(*status < 300);
                    case.check(*status, *json, body)
                }
            };
            let panicked = std::mem::take(&mut *panics());
            let outcome = outcome.and(if panicked.is_empty() { Ok(()) } else { Err(panicked.join("\n")) });
            if let Err(problem) = outcome {
                let body = String::from_utf8_lossy(&case.body[..case.body.len().min(4000)]).into_owned();
                let Case { method, path, headers, .. } = &case;
                // The hook would keep the message to itself.
                drop(std::panic::take_hook());
                panic!("PAGURO_FUZZ_SEED={seed} PAGURO_FUZZ_CASE={index}: {problem}\n{method} {path} {headers:?}\n{body}");
            }
            if took > slowest.0 {
                slowest = (took, index);
            }
            if only.is_some() {
                break;
            }
            if last_word.elapsed() > Duration::from_secs(60) {
                last_word = Instant::now();
                println!("{cases} requests, {fine} answered, slowest {slowest:?}");
            }
        }
        println!("{cases} requests in {:?}, {fine} answered, slowest {slowest:?}", begin.elapsed());
    });
    drop(std::panic::take_hook());
}
