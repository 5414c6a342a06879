//! Clients of an engine with the fake device: requests, and the events that they receive.

use paguro_backend::Weights;
use paguro_model::tokenizer::SpecialText;

use super::{
    fake::{Control, FakeBackend, VOCAB, program, tokenizer},
    oracle::{Expected, oracle},
};
use crate::{
    Engine, EngineError, EngineOptions, Event, FinishReason, Generation, ModelParts, PageBudget, Request,
    RequestError, Usage,
};

pub const MAX_CONTEXT: usize = 200;

pub fn options() -> EngineOptions {
    EngineOptions {
        block_size: 4,
        pages: PageBudget::Pages(60),
        max_batch_tokens: 32,
        max_sequences: 16,
        ..EngineOptions::default()
    }
}

pub fn start(windows: &[Option<u32>], options: EngineOptions) -> (Engine, Control) {
    start_with(windows, options, Vec::new()).unwrap()
}

/// Devices by the steps that they have in flight.
#[derive(Clone, Copy, Debug)]
pub enum Flow {
    /// One at a time.
    Single,
    /// A second one, with tokens of the first.
    Carries,
    /// A step for each of several stages.
    Lanes(usize),
    /// The same, and one with tokens of the oldest.
    CarryingLanes(usize),
}

/// One of each flow.
pub const FLOWS: [Flow; 4] = [Flow::Single, Flow::Carries, Flow::Lanes(2), Flow::CarryingLanes(2)];

/// Starts an engine on a device with this flow.
pub fn start_with_flow(flow: Flow, windows: &[Option<u32>], options: EngineOptions) -> (Engine, Control) {
    let backend = FakeBackend::default();
    match flow {
        Flow::Single => {}
        Flow::Carries => backend.control.carry(),
        Flow::Lanes(lanes) => backend.control.divide(lanes),
        Flow::CarryingLanes(lanes) => {
            backend.control.carry();
            backend.control.divide(lanes);
        }
    }
    start_on(backend, windows, options, Vec::new()).unwrap()
}

pub fn start_with(
    windows: &[Option<u32>],
    options: EngineOptions,
    stop_tokens: Vec<u32>,
) -> Result<(Engine, Control), EngineError> {
    start_on(FakeBackend::default(), windows, options, stop_tokens)
}

fn start_on(
    backend: FakeBackend,
    windows: &[Option<u32>],
    options: EngineOptions,
    stop_tokens: Vec<u32>,
) -> Result<(Engine, Control), EngineError> {
    let parts = ModelParts {
        vision: None,
        program: program(windows, false, false),
        weights: Weights::default(),
        tokenizer: Some(tokenizer()),
        stop_tokens,
        max_context: MAX_CONTEXT,
    };
    Ok((Engine::start(&backend, parts, options)?, backend.control))
}

pub fn request(i: usize) -> Request {
    Request {
        max_tokens: Some(10 + i % 17),
        ..Request::new((0..4 + i % 23).map(|at| ((i * 5 + at * 3) % VOCAB) as u32).collect())
    }
}

/// All received events.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Heard {
    pub branches: Vec<Branch>,
    pub failed: Option<RequestError>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Branch {
    pub tokens: Vec<u32>,
    pub text: String,
    pub end: Option<(FinishReason, Usage)>,
}

impl Heard {
    pub fn add(&mut self, event: Event) {
        let mut of = |branch: usize| {
            self.branches.resize(self.branches.len().max(branch + 1), Branch::default());
            self.branches.swap_remove(branch)
        };
        match event {
            Event::Token { branch, token, text, .. } => {
                let mut state = of(branch);
                state.tokens.push(token);
                state.text += &text;
                self.put(branch, state);
            }
            Event::Finished { branch, text, reason, usage, .. } => {
                let mut state = of(branch);
                state.text += &text;
                state.end = Some((reason, usage));
                self.put(branch, state);
            }
            Event::Failed(error) => self.failed = Some(error),
            Event::Started { .. }
            | Event::Prefilled { .. }
            | Event::PromptScores { .. }
            | Event::Embedding { .. } => {}
        }
    }

    /// Undoes the `swap_remove` of `branch`.
    fn put(&mut self, branch: usize, state: Branch) {
        self.branches.push(state);
        let last = self.branches.len() - 1;
        self.branches.swap(branch, last);
    }

    pub fn reason(&self) -> &FinishReason {
        &self.branches[0].end.as_ref().expect("an end").0
    }
}

pub fn read(mut generation: Generation) -> Heard {
    let mut heard = Heard::default();
    while let Some(event) = generation.next_blocking() {
        heard.add(event);
    }
    heard
}

pub fn assert_starts(generation: &mut Generation) {
    let event = generation.next_blocking();
    assert!(matches!(event, Some(Event::Started { cached_tokens: 0, .. })), "{event:?}");
}

pub fn assert_answers(heard: &Heard, windows: &[Option<u32>], request: &Request) {
    for (branch, answer) in heard.branches.iter().enumerate() {
        let Expected { tokens, reason, .. } = oracle(windows, false, MAX_CONTEXT, request, branch);
        assert_eq!(answer.tokens, tokens);
        assert_eq!(answer.end.as_ref().map(|(reason, _)| reason), reason.as_ref());
        let mut all = request.prompt.clone();
        all.extend(&tokens);
        let text = |tokens: &[u32]| tokenizer().decode(tokens, SpecialText::Hide);
        // A character that the prompt has begun and the answer completes belongs to the answer.
        let whole = text(&all);
        // Bytes that are no character do not.
        let valid = whole.replace('\u{fffd}', "");
        assert!(valid.ends_with(&answer.text), "{whole:?} does not end with {:?}", answer.text);
        assert!(!answer.text.contains('\u{fffd}'), "{:?}", answer.text);
    }
    assert_eq!(heard.branches.len(), request.branches);
}

pub fn assert_clean(engine: &Engine) {
    let handle = engine.handle();
    assert_eq!(handle.check_pages().unwrap(), Ok(()));
    let stats = handle.stats();
    assert_eq!((stats.running, stats.waiting, stats.pages_used), (0, 0, 0), "{stats:?}");
}
