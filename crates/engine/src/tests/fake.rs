//! A runner that detects every error in page tables.
//!
//! Its "model" has two layers whose K and V are small numbers: those of the first layer are token and position, those
//! of the second a digest of the data that the row has read in the first. It stores them in real pages, finds them only
//! through the block tables, and samples a digest of the data that it has read. A page that is mixed up, stale, lost,
//! or written while another sequence uses it changes the tokens, or is reported because it has another position.
//!
//! [`oracle`](super::oracle::oracle) computes the same without pages.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Condvar, LazyLock, Mutex},
};

use paguro_backend::{
    AdapterId, Backend, Capacity, Convolution, DeviceLayout, Embed, Exit, ExpertCount, FeedForward, Head,
    Input, KernelCount, KvDtype, KvGroup, KvLayout, Layer, Limits, Linear, LoadError, LowRank, Matrix,
    MatrixId, Mixer, Norm, NormKind, OutputKind, OutputValue, PacedRunner, PageContent, PageFormat, PageId,
    PageMove, Program, Residual, Runner, STATE_CHUNK, SampleRequest, Sampled, Score, ShortConv, StateLayout,
    StateShape, StateUse, Step, StepError, StepOutput, Ticket, TokenMask, VectorId, WeightFormat, Weights,
    mean_of_rows,
};
use paguro_grammar::{Constraint, Grammar, TokenText, Vocabulary};
use paguro_model::{
    gguf::{Array, Metadata, Value},
    tokenizer::Tokenizer,
};

pub const VOCAB: usize = 97;

/// Rows that states can drop.
const DROPPABLE: usize = 7;

/// A program with nothing but KV groups of these windows, and perhaps a state.
pub fn program(windows: &[Option<u32>], states: bool, bidirectional: bool) -> Program {
    let state = StateShape { rows: 1 + DROPPABLE, channels: 1, delta: None };
    let linear = Linear { matrix: MatrixId(0), bias: None, bounds: None };
    let mixer = Mixer::Conv(ShortConv {
        norm: None,
        width: 1,
        input: linear,
        convolution: Convolution { taps: 2, weight: VectorId(0), bias: None },
        out: linear,
        post_norm: None,
        state: 0,
    });
    let layer = Layer {
        mixer,
        ffn: FeedForward::None,
        residual: Residual::Sequential,
        norm_after_mixer: None,
        norm_after_ffn: None,
        branch_scale: 1.0,
        input: None,
        output_scale: 1.0,
    };
    let group =
        |&window: &Option<u32>| KvGroup { window, spans: false, layer_slots: 1, kv_heads: 1, head_dim: 1 };
    Program {
        hidden: 1,
        vocab: VOCAB,
        bidirectional,
        shares_pages: false,
        kv: KvLayout { groups: windows.iter().map(group).collect() },
        state: StateLayout { layers: vec![state; usize::from(states)] },
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
        layers: if states { vec![layer] } else { Vec::new() },
        exit: Exit::Logits(Head {
            norm: Norm { kind: NormKind::Rms, weight: VectorId(0), bias: None, eps: 1.0 },
            linear: Linear { matrix: MatrixId(0), bias: None, bounds: None },
            scale: 1.0,
            soft_cap: None,
            projection: None,
        }),
    }
}

/// A tokenizer with single bytes of three- and four-byte characters among words.
pub fn tokenizer() -> Arc<Tokenizer> {
    let mut pieces = vec![("<unk>".to_owned(), 2), ("<s>".to_owned(), 3), ("</s>".to_owned(), 3)];
    pieces.extend("日本語🦀".bytes().map(|byte| (format!("<0x{byte:02X}>"), 6)));
    for syllable in ["pa", "gu", "ro", "é", "日", "ñ", "!", "▁"] {
        pieces.extend(["", "n", "▁", "s", "▁b", "日"].map(|other| (format!("{other}{syllable}"), 1)));
    }
    pieces.extend((pieces.len()..VOCAB).map(|i| (format!("▁w{i}"), 1)));
    let mut metadata = Metadata::default();
    let scores = (0..VOCAB).map(|i| -(i as f32)).collect();
    let (tokens, types) = pieces.into_iter().unzip();
    for (key, value) in [
        ("model", Value::String("llama".into())),
        ("tokens", Value::Array(Array::Strings(tokens))),
        ("token_type", Value::Array(Array::I32(types))),
        ("scores", Value::Array(Array::F32(scores))),
    ] {
        metadata.insert(format!("tokenizer.ggml.{key}"), value);
    }
    Arc::new(Tokenizer::from_gguf(&metadata).unwrap())
}

/// Constraints over these tokens: one without a necessary end, one with an end, one with a dead end (no token writes an
/// `x`).
pub static CONSTRAINTS: LazyLock<[Constraint; 3]> = LazyLock::new(|| {
    let tokenizer = tokenizer();
    let token = |id| TokenText { bytes: tokenizer.token_bytes(id), is_control: tokenizer.is_special(id) };
    let vocabulary = Arc::new(Vocabulary::new((0..VOCAB as u32).map(token), &[]).unwrap());
    ["( ?(pa|guro|日本?)!?)*", "(npa|sgu|bro|é){3,9}!!", "(pa|ro){4}x"]
        .map(|regex| vocabulary.compile(&Grammar::Regex(regex.into())).unwrap())
});

/// External control of a runner.
#[derive(Clone, Debug, Default)]
pub struct Control(Arc<(Mutex<ControlState>, Condvar)>);

#[derive(Debug, Default)]
struct ControlState {
    /// Faults of the next steps.
    faults: VecDeque<Fault>,
    /// Steps that may still run; `None` does not count them.
    permits: Option<usize>,
    /// True if tokens are carried from step to step.
    carries: bool,
    /// Steps without carried tokens that may be in flight beside one.
    more_lanes: usize,
}

/// Fault of a step.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    /// No fault.
    None,
    /// `submit` fails, and the pages that it would have written are garbage.
    Submit,
    /// `collect` fails, likewise.
    Collect,
    /// The wrong number of outputs, and garbage in the pages.
    Answer,
    /// A panic.
    Panic,
}

impl Control {
    pub fn then(&self, fault: Fault) {
        self.0.0.lock().unwrap().faults.push_back(fault);
    }

    /// Lets only `steps` more steps run; the next one waits.
    pub fn hold_after(&self, steps: usize) {
        self.0.0.lock().unwrap().permits = Some(steps);
        self.0.1.notify_all();
    }

    pub fn let_go(&self) {
        self.0.0.lock().unwrap().permits = None;
        self.0.1.notify_all();
    }

    /// Makes runners carry tokens from step to step.
    pub fn carry(&self) {
        self.0.0.lock().unwrap().carries = true;
    }

    /// Makes runners have this many lanes.
    pub fn divide(&self, lanes: usize) {
        self.0.0.lock().unwrap().more_lanes = lanes - 1;
    }

    fn enter(&self) -> Fault {
        let waits = |state: &mut ControlState| state.permits == Some(0);
        let mut state = self.0.1.wait_while(self.0.0.lock().unwrap(), waits).unwrap();
        if let Some(permits) = &mut state.permits {
            *permits -= 1;
        }
        state.faults.pop_front().unwrap_or(Fault::None)
    }
}

#[derive(Clone, Debug, Default)]
pub struct FakeBackend {
    pub control: Control,
}

impl Backend for FakeBackend {
    fn name(&self) -> &str {
        "fake"
    }

    fn capacity(&self) -> Capacity {
        Capacity {
            description: "fake".into(),
            bytes_free: 1 << 20,
            host_free: 0,
            step_rows: 1,
            features: Vec::new(),
        }
    }

    fn page_bytes(&self, _: &Program, block_size: usize, _: KvDtype) -> usize {
        block_size * 16
    }

    fn state_bytes(&self, program: &Program) -> usize {
        program.state.bytes()
    }

    fn device_layout(&self, matrix: &Matrix) -> DeviceLayout {
        DeviceLayout { bytes: matrix.bytes.len(), converted_to: None }
    }

    fn weight_bytes(&self, _: &Program, weights: &Weights) -> u64 {
        weights.bytes_on(self)
    }

    fn buffer_bytes(&self, _: &Program, _: &Limits) -> u64 {
        0
    }

    fn load(&self, program: &Program, _: Weights, limits: Limits) -> Result<Box<dyn Runner>, LoadError> {
        Ok(Box::new(FakeRunner::new(program, limits, self.control.clone())))
    }

    fn runs_tower(&self, _: &Program) -> bool {
        false
    }

    fn load_tower(
        &self,
        program: &Program,
        weights: Weights,
        limits: Limits,
    ) -> Result<PacedRunner, LoadError> {
        Ok(PacedRunner { runner: self.load(program, weights, limits)?, pace: Arc::default() })
    }
}

/// K and V of one token.
#[derive(Clone, Copy, Debug)]
struct Slot {
    position: usize,
    first: u64,
    second: u64,
}

const GARBAGE: Slot = Slot { position: usize::MAX, first: 0xdead, second: 0xbeef };

/// State of a sequence: number and digest of its tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
struct TokensState {
    tokens: usize,
    digest: u64,
    /// Digests before the last tokens of the chunk, the last one first, and their number.
    before: ([u64; DROPPABLE], usize),
}

const NO_STATE: TokensState = TokensState { tokens: usize::MAX, digest: 0xdead, before: ([0; DROPPABLE], 0) };

impl TokensState {
    /// Adds a token. The first one of a chunk makes the earlier ones final.
    fn push(&mut self, first: u64) {
        let (before, kept) = &mut self.before;
        before.rotate_right(1);
        before[0] = self.digest;
        *kept = if self.tokens.is_multiple_of(STATE_CHUNK) { 0 } else { DROPPABLE.min(*kept + 1) };
        self.digest = mix(self.digest, first);
        self.tokens += 1;
    }

    /// Drops the last tokens, if they can be dropped.
    fn drop_to(&mut self, tokens: usize) {
        let dropped = self.tokens.wrapping_sub(tokens);
        let (before, kept) = &mut self.before;
        if (1..=*kept).contains(&dropped) {
            self.digest = before[dropped - 1];
            before.rotate_left(dropped);
            *kept -= dropped;
            self.tokens = tokens;
        }
    }
}

/// A step that was not collected.
struct FakeStep {
    number: u64,
    /// Nothing if collecting it is to fail.
    answers: Option<Vec<OutputValue>>,
    /// Tokens by output.
    sampled: Vec<Option<u32>>,
}

pub struct FakeRunner {
    program: Program,
    limits: Limits,
    slots: Vec<Slot>, // [pages, block_size]
    states: Vec<TokensState>,
    /// The part of a state that a page has, by page.
    saved: Vec<Option<(usize, TokensState)>>,
    control: Control,
    /// Steps that were not collected.
    in_flight: VecDeque<FakeStep>,
    /// Numbers that adapters add to digests.
    adapters: BTreeMap<AdapterId, u64>,
    steps: u64,
}

impl FakeRunner {
    pub fn new(program: &Program, limits: Limits, control: Control) -> Self {
        Self {
            program: program.clone(),
            slots: vec![GARBAGE; limits.pages * limits.block_size],
            states: vec![NO_STATE; limits.states],
            saved: vec![None; limits.pages],
            limits,
            control,
            in_flight: VecDeque::new(),
            adapters: BTreeMap::new(),
            steps: 0,
        }
    }

    fn slot(&self, step: &Step<'_>, sequence: usize, group: usize, position: usize) -> usize {
        let table = step.sequences[sequence].table(step.pages, group, self.program.kv.groups.len());
        table[position / self.limits.block_size].0 as usize * self.limits.block_size
            + position % self.limits.block_size
    }

    /// Returns the digest of the data that a row reads in one layer.
    fn attend(
        &self,
        step: &Step<'_>,
        sequence: usize,
        position: usize,
        of: fn(&Slot) -> u64,
    ) -> Result<u64, StepError> {
        let mut digest = 0;
        for (group, KvGroup { window, .. }) in self.program.kv.groups.iter().enumerate() {
            for key in visible(*window, position) {
                let slot = self.slots[self.slot(step, sequence, group, key)];
                if slot.position != key {
                    let found = slot.position;
                    let message =
                        format!("sequence {sequence}, group {group}: position {found} where {key} should be");
                    return Err(StepError::Invalid(message));
                }
                digest = mix(digest, of(&slot));
            }
        }
        Ok(digest)
    }

    fn forward(&mut self, step: &Step<'_>) -> Result<Vec<u64>, StepError> {
        let groups = self.program.kv.groups.len();
        let mut digests = Vec::new();
        for (index, sequence) in step.sequences.iter().enumerate() {
            let mut state = match sequence.state {
                Some(StateUse { read, .. }) if sequence.start > 0 => self.states[read.0 as usize],
                _ => TokensState { tokens: 0, digest: 0, ..NO_STATE },
            };
            state.drop_to(sequence.start);
            if sequence.state.is_some() && state.tokens != sequence.start {
                let (found, start) = (state.tokens, sequence.start);
                let message = format!("sequence {index}: a state of {found} tokens where {start} should be");
                return Err(StepError::Invalid(message));
            }
            let uses = step.adapters_of(index).iter().map(|used| (self.adapters[&used.adapter], used.scale));
            let uses: Vec<_> = uses.collect();
            for (row, position) in sequence.rows.clone().zip(sequence.start..) {
                let first = adapted(mix(u64::from(step.tokens[row]), position as u64), &uses);
                let places: Vec<_> =
                    (0..groups).map(|group| self.slot(step, index, group, position)).collect();
                for &at in &places {
                    self.slots[at] = Slot { position, first, second: 0 };
                    self.saved[at / self.limits.block_size] = None;
                }
                let second = self.attend(step, index, position, |slot| slot.first)?;
                places.iter().for_each(|&at| self.slots[at].second = second);
                let digest = self.attend(step, index, position, |slot| slot.second)?;
                state.push(first);
                digests.push(if sequence.state.is_some() { mix(digest, state.digest) } else { digest });
            }
            if let Some(StateUse { write, .. }) = sequence.state {
                self.states[write.0 as usize] = state;
            }
        }
        Ok(digests)
    }

    fn spoil(&mut self, step: &Step<'_>) {
        for (index, sequence) in step.sequences.iter().enumerate() {
            if let Some(StateUse { write, .. }) = sequence.state {
                self.states[write.0 as usize] = NO_STATE;
            }
            for group in 0..self.program.kv.groups.len() {
                for position in sequence.start..sequence.len() {
                    let at = self.slot(step, index, group, position);
                    self.slots[at] = GARBAGE;
                }
            }
        }
    }
}

impl Runner for FakeRunner {
    fn submit(&mut self, step: &Step<'_>) -> Result<Ticket, StepError> {
        let fault = self.control.enter();
        step.validate(&self.program, &self.limits)?;
        step.has_adapters(|id| self.adapters.contains_key(&id))?;
        match step.carried {
            [] => assert!(self.in_flight.len() < self.lanes(), "a step for each lane"),
            _ => assert!(
                (1..=self.lanes()).contains(&self.in_flight.len()),
                "a step for each lane, and the next"
            ),
        }
        let mut tokens = step.tokens.to_vec();
        for carried in step.carried {
            tokens[carried.row] = self.in_flight[0].sampled[carried.output].expect("a token was sampled");
        }
        let step = &Step { tokens: &tokens, ..*step };
        let digests = self.forward(step)?;
        let mut answers = Vec::new();
        for output in step.outputs {
            let digest = digests[output.row];
            answers.push(match output.kind {
                OutputKind::Sample(request) => {
                    let sequence =
                        step.sequences.iter().find(|s| s.rows.contains(&output.row)).expect("a row");
                    let position = sequence.start + output.row - sequence.rows.start;
                    let mut history = request.history.to_vec();
                    if step.carried.iter().any(|carried| carried.row == output.row) {
                        history.push(tokens[output.row]);
                    }
                    if !history.is_empty() {
                        // A model that drafts has none.
                        assert_eq!(history.len(), position + 1, "history is all tokens so far");
                        assert_eq!(history.last(), Some(&tokens[output.row]));
                    }
                    OutputValue::Sampled(sample(digest, &SampleRequest { history: &history, ..request }))
                }
                OutputKind::Score { token, top } => {
                    OutputValue::Score(Score { logprob: score(digest, token), top: best(digest, top) })
                }
                OutputKind::Embedding => OutputValue::Embedding(embedding(digest)),
                OutputKind::Mean => {
                    let rows: Vec<_> =
                        digests[step.rows_of(output)].iter().map(|&of| embedding(of)).collect();
                    let rows = rows.iter().map(Vec::as_slice);
                    OutputValue::Embedding(mean_of_rows(rows, embedding(digest).len()))
                }
                OutputKind::Logits => OutputValue::Logits(logits(digest)),
                OutputKind::Residual => OutputValue::Residual(embedding(digest)),
            });
        }
        let token = |answer: &OutputValue| match answer {
            OutputValue::Sampled(sampled) => Some(sampled.token),
            _ => None,
        };
        let sampled = answers.iter().map(token).collect();
        let mut answers = Some(answers);
        match fault {
            Fault::None => {}
            Fault::Submit => {
                self.spoil(step);
                return Err(StepError::Device("submit was made to fail".into()));
            }
            Fault::Collect => {
                self.spoil(step);
                answers = None;
            }
            Fault::Answer => {
                self.spoil(step);
                if let Some(answers) = &mut answers
                    && answers.pop().is_none()
                {
                    answers.push(OutputValue::Score(Score::default()));
                }
            }
            Fault::Panic => panic!("the runner was made to panic"),
        }
        self.steps += 1;
        self.in_flight.push_back(FakeStep { number: self.steps, answers, sampled });
        Ok(Ticket(self.steps))
    }

    fn collect(&mut self, ticket: Ticket, out: &mut StepOutput) -> Result<(), StepError> {
        let FakeStep { number, answers, sampled: _ } = self.in_flight.pop_front().expect("a step in flight");
        assert_eq!(ticket, Ticket(number));
        let mut answers = answers.ok_or_else(|| StepError::Device("collect was made to fail".into()))?;
        out.outcomes.clear();
        out.outcomes.append(&mut answers);
        Ok(())
    }

    fn lanes(&self) -> usize {
        1 + self.control.0.0.lock().unwrap().more_lanes
    }

    fn carries(&self, kind: &OutputKind<'_>) -> bool {
        matches!(kind, OutputKind::Sample(_)) && self.control.0.0.lock().unwrap().carries
    }

    fn load_head(
        &mut self,
        program: &Program,
        _: Weights,
        _: &[(MatrixId, MatrixId)],
        limits: Limits,
    ) -> Result<Box<dyn Runner>, LoadError> {
        Ok(Box::new(FakeRunner::new(program, limits, Control::default())))
    }

    fn move_pages(&mut self, moves: &[PageMove]) -> Result<(), StepError> {
        let size = self.limits.block_size;
        for &page_move in moves {
            match page_move {
                PageMove::Copy { from, to } => {
                    let (from, to) = (from.0 as usize, to.0 as usize);
                    self.slots.copy_within(from * size..(from + 1) * size, to * size);
                    self.saved[to] = self.saved[from];
                }
                PageMove::SaveState { state, part, to } => {
                    let page = to.0 as usize;
                    self.slots[page * size..(page + 1) * size].fill(GARBAGE);
                    self.saved[page] = Some((part, self.states[state.0 as usize]));
                }
                PageMove::RestoreState { from, part, state } => {
                    let state = &mut self.states[state.0 as usize];
                    match self.saved[from.0 as usize] {
                        Some((found, saved)) if found == part && (part == 0 || saved == *state) => {
                            *state = saved
                        }
                        found => {
                            let message = format!("{found:?} where part {part} of {state:?} should be");
                            return Err(StepError::Invalid(message));
                        }
                    }
                }
            }
        }
        Ok(())
    }

    fn page_format(&self) -> Option<PageFormat> {
        None
    }

    fn read_pages(&mut self, _: &[PageId], _: &mut [u8]) -> Result<(), StepError> {
        Err(StepError::Invalid("pages of the fake stay where they are".into()))
    }

    fn write_pages(&mut self, _: &[PageId], _: &[u8], _: PageContent) -> Result<(), StepError> {
        Err(StepError::Invalid("pages of the fake stay where they are".into()))
    }

    fn load_adapter(&mut self, id: AdapterId, pairs: &[LowRank]) -> Result<(), LoadError> {
        let content = self.adapters.entry(id).or_default();
        for pair in pairs {
            *content = pair.a.read()?.iter().fold(*content, |digest, &byte| mix(digest, byte.into()));
        }
        Ok(())
    }

    fn unload_adapter(&mut self, id: AdapterId) {
        self.adapters.remove(&id);
    }

    fn expert_counts(&mut self) -> Result<Vec<ExpertCount>, StepError> {
        Ok(Vec::new())
    }

    fn kernel_counts(&self) -> Vec<KernelCount> {
        vec![KernelCount { name: "fake".into(), launches: self.steps, nanoseconds: 0 }]
    }
}

/// Returns a digest of a row of a sequence with adapters: their contents and scales.
pub fn adapted(digest: u64, uses: &[(u64, f32)]) -> u64 {
    uses.iter().fold(digest, |digest, (content, scale)| mix(digest, mix(*content, scale.to_bits().into())))
}

/// Returns an adapter with this content, and the pair that it is loaded from.
pub fn adapter(content: u8) -> (u64, LowRank) {
    let side = Matrix {
        name: "side".into(),
        format: WeightFormat::F32,
        parts: 1,
        rows: 1,
        cols: 1,
        bytes: vec![content; 4].into(),
    };
    let pair = LowRank { matrix: MatrixId(0), a: side.clone(), b: side, scale: 1.0 };
    ((0..4).fold(0, |digest, _| mix(digest, content.into())), pair)
}

pub fn visible(window: Option<u32>, position: usize) -> std::ops::RangeInclusive<usize> {
    window.map_or(0, |window| (position + 1).saturating_sub(window as usize))..=position
}

pub fn sample(digest: u64, request: &SampleRequest<'_>) -> Sampled {
    let history = request.history.iter().fold(0, |digest, &token| mix(digest, u64::from(token)));
    let chosen = mix(mix(digest, request.params.seed), mix(request.draw, history));
    let token = match request.mask.map(TokenMask::bits) {
        None => (chosen % VOCAB as u64) as u32,
        Some(bits) => {
            let allowed: Vec<_> = (0..VOCAB as u32)
                .filter(|token| bits[*token as usize / 32] >> (token % 32) & 1 == 1)
                .collect();
            allowed[(chosen % allowed.len() as u64) as usize]
        }
    };
    let top = (0..request.logprobs.unwrap_or(0) as u32)
        .map(|i| ((token + i) % VOCAB as u32, -(i as f32)))
        .collect();
    Sampled { token, logprob: request.logprobs.map(|_| score(digest, token)), top }
}

pub fn score(digest: u64, token: u32) -> f32 {
    -((mix(digest, u64::from(token)) % 1000) as f32)
}

pub fn best(digest: u64, count: usize) -> Vec<(u32, f32)> {
    let token = |i| (mix(digest, i) % VOCAB as u64) as u32;
    (0..count as u64).map(|i| (token(i), score(digest, token(i)))).collect()
}

pub fn logits(digest: u64) -> Vec<f32> {
    (0..VOCAB as u32).map(|token| score(digest, token)).collect()
}

pub fn embedding(digest: u64) -> Vec<f32> {
    (0..3).map(|i| (mix(digest, i) % 1000) as f32).collect()
}

pub fn mix(a: u64, b: u64) -> u64 {
    let mut z = (a ^ b.rotate_left(32)).wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
