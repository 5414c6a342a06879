//! Time that a device waits for the host. The device is a clock: a step takes a constant time and a time for each row, and its
//! tokens are arbitrary. So all that is measured is the engine's own work, and its overlap with the device. A device of stages
//! divides the time of a step among as many clocks.
//!
//! ```sh
//! cargo run --release -p paguro-engine --example gap
//! ```

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use paguro_backend::{
    AdapterId, Backend, Capacity, DeviceLayout, Embed, Exit, ExpertCount, Head, Input, KernelCount, KvDtype,
    KvGroup, KvLayout, Limits, Linear, LoadError, LowRank, Matrix, MatrixId, Norm, NormKind, OutputKind,
    OutputValue, PacedRunner, PageContent, PageFormat, PageId, PageMove, Program, Runner, Sampled,
    SamplingParams, StateLayout, Step, StepError, StepOutput, Ticket, VectorId, Weights,
};
use paguro_engine::{Engine, EngineOptions, Event, Grammar, ModelParts, PageBudget, Request};
use paguro_model::{
    gguf::{Array, Metadata, Value},
    tokenizer::Tokenizer,
};

const VOCAB: usize = 32_000;
/// Time of a step, without rows and for each row.
const STEP: Duration = Duration::from_millis(5);
const ROW: Duration = Duration::from_micros(20);

/// Sequences that run at the same time.
const PLACES: usize = 64;

fn main() {
    println!("{:40} {:>9} {:>10} {:>9}", "load", "tokens/s", "idle", "ahead");
    for load in [
        Load { name: "one answer", clients: 1, prompt: 4, answer: 800, grammars: 0 },
        Load { name: "64 answers", clients: 64, prompt: 4, answer: 400, grammars: 0 },
        Load { name: "64 answers, 4 with a grammar", clients: 64, prompt: 4, answer: 400, grammars: 4 },
        Load { name: "8 answers, one with a grammar", clients: 8, prompt: 4, answer: 400, grammars: 1 },
        Load { name: "256 answers, 64 at a time", clients: 256, prompt: 4, answer: 100, grammars: 0 },
        Load {
            name: "256 prompts of 256, 64 at a time",
            clients: 256,
            prompt: 256,
            answer: 100,
            grammars: 0,
        },
    ] {
        for (carries, stages, device) in
            [(true, 1, ""), (false, 1, ", one step at a time"), (false, 2, ", two stages")]
        {
            let name = load.name;
            let (tokens, idle, ahead) = measure((carries, stages), &load);
            println!(
                "{:40} {tokens:9.0} {:9.2} % {:7.1} %",
                format!("{name}{device}"),
                100.0 * idle,
                100.0 * ahead
            );
        }
    }
}

/// Requests that arrive at once.
struct Load {
    name: &'static str,
    clients: usize,
    /// Tokens of a prompt.
    prompt: usize,
    /// Tokens of an answer, on average.
    answer: usize,
    /// Requests with a grammar that only words fit.
    grammars: usize,
}

/// Returns the tokens in a second, the share of the time in which the device has nothing to do, and the share of steps that were
/// planned ahead.
fn measure((carries, stages): (bool, usize), load: &Load) -> (f64, f64, f64) {
    let &Load { clients, prompt, answer, grammars, .. } = load;
    let backend = Clock { carries, stages, idle: Arc::default() };
    let parts = ModelParts {
        program: program(),
        weights: Weights::default(),
        tokenizer: Some(tokenizer()),
        stop_tokens: Vec::new(),
        max_context: 4096,
        vision: None,
    };
    let options = EngineOptions {
        pages: PageBudget::Pages(4096),
        max_sequences: PLACES,
        queue_capacity: clients,
        ..EngineOptions::default()
    };
    let engine = Engine::start(&backend, parts, options).expect("the engine starts");
    let handle = engine.handle();
    let words = Grammar::Regex("( w[0-9]+)*".into());
    let words = handle.compile(&words).expect("a grammar");
    backend.idle.store(0, Ordering::Relaxed);
    let begin = Instant::now();
    let readers: Vec<_> = (0..clients)
        .map(|client| {
            let tokens = (0..prompt).map(|at| ((client * 7919 + at) % VOCAB) as u32).collect();
            // Answers of different lengths, so that they do not end together.
            let max_tokens = Some(answer / 2 + client * 31 % answer);
            let sampling = SamplingParams { temperature: 0.8, ..SamplingParams::default() };
            let constraint = (client < grammars).then(|| words.clone());
            let mut generation = handle
                .generate(Request { max_tokens, sampling, constraint, ..Request::new(tokens) })
                .expect("a free place");
            thread::spawn(move || {
                let mut tokens = 0;
                while let Some(event) = generation.next_blocking() {
                    tokens += usize::from(matches!(event, Event::Token { .. }));
                }
                tokens
            })
        })
        .collect();
    let tokens: usize = readers.into_iter().map(|reader| reader.join().expect("a reader")).sum();
    let time = begin.elapsed().as_secs_f64();
    let stats = handle.stats();
    let idle = backend.idle.load(Ordering::Relaxed) as f64 / 1e9 / stages as f64;
    (tokens as f64 / time, idle / time, stats.steps_ahead as f64 / stats.steps as f64)
}

/// A device that is a clock.
struct Clock {
    carries: bool,
    stages: usize,
    /// Nanoseconds without a step, of all stages.
    idle: Arc<AtomicU64>,
}

struct ClockRunner {
    carries: bool,
    idle: Arc<AtomicU64>,
    /// End of the last step on each stage.
    ends: Vec<Instant>,
    /// Ends and tokens of the steps that were not collected.
    in_flight: VecDeque<(Instant, Vec<OutputValue>)>,
    steps: u64,
}

impl Backend for Clock {
    fn name(&self) -> &str {
        "clock"
    }

    fn capacity(&self) -> Capacity {
        Capacity {
            description: "a clock".into(),
            bytes_free: 1 << 30,
            host_free: 0,
            step_rows: 1,
            features: Vec::new(),
        }
    }

    fn page_bytes(&self, _: &Program, block_size: usize, _: KvDtype) -> usize {
        block_size
    }

    fn state_bytes(&self, _: &Program) -> usize {
        0
    }

    fn device_layout(&self, matrix: &Matrix) -> DeviceLayout {
        DeviceLayout { bytes: matrix.bytes.len(), converted_to: None }
    }

    fn weight_bytes(&self, _: &Program, _: &Weights) -> u64 {
        0
    }

    fn buffer_bytes(&self, _: &Program, _: &Limits) -> u64 {
        0
    }

    fn load(&self, _: &Program, _: Weights, _: Limits) -> Result<Box<dyn Runner>, LoadError> {
        Ok(Box::new(ClockRunner {
            carries: self.carries,
            idle: self.idle.clone(),
            ends: vec![Instant::now(); self.stages],
            in_flight: VecDeque::new(),
            steps: 0,
        }))
    }

    fn runs_tower(&self, _: &Program) -> bool {
        false
    }

    fn load_tower(&self, _: &Program, _: Weights, _: Limits) -> Result<PacedRunner, LoadError> {
        Err(LoadError::Unsupported {
            device: "a clock".into(),
            what: "towers for images".into(),
            supported: "--device cpu does".into(),
        })
    }
}

impl Runner for ClockRunner {
    fn submit(&mut self, step: &Step<'_>) -> Result<Ticket, StepError> {
        let time = (STEP + ROW * step.tokens.len() as u32) / self.ends.len() as u32;
        let mut begin = Instant::now();
        for end in &mut self.ends {
            let idle = begin.saturating_duration_since(*end);
            self.idle.fetch_add(idle.as_nanos() as u64, Ordering::Relaxed);
            *end = begin.max(*end) + time;
            begin = *end;
        }
        let answer = |output: &paguro_backend::Output<'_>| match output.kind {
            OutputKind::Sample(request) => {
                let drawn = (request.draw * 31 + output.row as u64) as usize % VOCAB;
                let allowed = |token: &u32| request.mask.is_none_or(|mask| mask.allows(*token));
                let token = (0..VOCAB).map(|step| ((drawn + step) % VOCAB) as u32).find(allowed).unwrap_or(0);
                OutputValue::Sampled(Sampled { token, logprob: None, top: Vec::new() })
            }
            _ => OutputValue::Logits(vec![0.0; VOCAB]),
        };
        self.in_flight.push_back((begin, step.outputs.iter().map(answer).collect()));
        self.steps += 1;
        Ok(Ticket(self.steps))
    }

    fn collect(&mut self, _: Ticket, out: &mut StepOutput) -> Result<(), StepError> {
        let (end, mut answers) = self.in_flight.pop_front().ok_or(StepError::Invalid("no step".into()))?;
        thread::sleep(end.saturating_duration_since(Instant::now()));
        out.outcomes.clear();
        out.outcomes.append(&mut answers);
        Ok(())
    }

    fn lanes(&self) -> usize {
        self.ends.len()
    }

    fn carries(&self, kind: &OutputKind<'_>) -> bool {
        self.carries && matches!(kind, OutputKind::Sample(_))
    }

    fn load_head(
        &mut self,
        program: &Program,
        _: Weights,
        _: &[(MatrixId, MatrixId)],
        _: Limits,
    ) -> Result<Box<dyn Runner>, LoadError> {
        Err(LoadError::no_heads("clock", program))
    }

    fn move_pages(&mut self, _: &[PageMove]) -> Result<(), StepError> {
        Ok(())
    }

    fn page_format(&self) -> Option<PageFormat> {
        None
    }

    fn read_pages(&mut self, _: &[PageId], _: &mut [u8]) -> Result<(), StepError> {
        Err(StepError::Invalid("there are no bytes".into()))
    }

    fn write_pages(&mut self, _: &[PageId], _: &[u8], _: PageContent) -> Result<(), StepError> {
        Err(StepError::Invalid("there are no bytes".into()))
    }

    fn load_adapter(&mut self, _: AdapterId, _: &[LowRank]) -> Result<(), LoadError> {
        let [device, what, supported] = ["clock", "adapters", "others do"].map(str::to_owned);
        Err(LoadError::Unsupported { device, what, supported })
    }

    fn unload_adapter(&mut self, _: AdapterId) {}

    fn expert_counts(&mut self) -> Result<Vec<ExpertCount>, StepError> {
        Ok(Vec::new())
    }

    fn kernel_counts(&self) -> Vec<KernelCount> {
        Vec::new()
    }
}

/// Returns a tokenizer whose tokens are numbered words.
fn tokenizer() -> Arc<Tokenizer> {
    let pieces =
        ["<unk>", "<s>", "</s>"].map(str::to_owned).into_iter().chain((3..VOCAB).map(|i| format!("▁w{i}")));
    let types = (0..VOCAB as i32).map(|token| if token < 3 { 3 } else { 1 }).collect();
    let scores = (0..VOCAB).map(|token| -(token as f32)).collect();
    let mut metadata = Metadata::default();
    for (key, value) in [
        ("model", Value::String("llama".into())),
        ("tokens", Value::Array(Array::Strings(pieces.collect()))),
        ("token_type", Value::Array(Array::I32(types))),
        ("scores", Value::Array(Array::F32(scores))),
    ] {
        metadata.insert(format!("tokenizer.ggml.{key}"), value);
    }
    Arc::new(Tokenizer::from_gguf(&metadata).expect("a tokenizer"))
}

fn program() -> Program {
    let group = KvGroup { window: None, spans: false, layer_slots: 1, kv_heads: 1, head_dim: 1 };
    Program {
        hidden: 1,
        vocab: VOCAB,
        bidirectional: false,
        shares_pages: false,
        kv: KvLayout { groups: vec![group] },
        state: StateLayout { layers: Vec::new() },
        ropes: Vec::new(),
        input: Input::Tokens(Embed {
            table: MatrixId(0),
            scale: 1.0,
            positions: None,
            types: None,
            norm: None,
            layers: None,
            joined: None,
        }),
        given_parts: 0,
        layers: Vec::new(),
        exit: Exit::Logits(Head {
            norm: Norm { kind: NormKind::Rms, weight: VectorId(0), bias: None, eps: 1.0 },
            linear: Linear { matrix: MatrixId(0), bias: None, bounds: None },
            scale: 1.0,
            soft_cap: None,
            projection: None,
        }),
    }
}
