//! Runs sequences through a runner as an engine would, with the simplest of page allocators.

mod moves;

use std::{collections::BTreeMap, ops::Range};

use paguro_backend::{
    AXES, AdapterId, AdapterUse, AttentionMode, Backend, Coordinates, GivenRows, KvDtype, Limits, MatrixId,
    Output, OutputKind, OutputValue, PageId, Program, Runner, StateId, StateUse, Step, StepOutput,
    StepSequence,
};

use crate::{RandomModel, Rng};

/// Options of a [`Driver`].
#[derive(Clone, Copy, Debug)]
pub struct DriveOptions {
    /// Tokens in a page.
    pub block_size: usize,
    /// Pages in the arena.
    pub pages: usize,
    /// Longest sequence.
    pub max_context: usize,
    /// Seed of a random order of pages; `None` for ascending order.
    pub scatter: Option<u64>,
    /// Writes every page before the first sequence starts, so that fresh pages contain other data.
    pub stale: bool,
    /// See [`Limits::kv_dtype`].
    pub kv_dtype: KvDtype,
    /// See [`Limits::attention`].
    pub attention: AttentionMode,
    /// Output of every row: logits, embeddings, or rows of the residual stream; or means, of the first row of each sequence.
    pub output: OutputKind<'static>,
    /// Requests the outputs of some rows only; those of the others are empty.
    pub sparse: bool,
    /// Adds unused rows to steps with fewer rows.
    pub least_rows: usize,
    /// Every step writes states to other slots than it reads them from.
    pub moves_states: bool,
    /// See [`Limits::expert_slots`].
    pub expert_slots: Option<usize>,
}

impl Default for DriveOptions {
    fn default() -> Self {
        Self {
            block_size: 16,
            pages: 144,
            max_context: 160,
            scatter: Some(1),
            stale: false,
            kv_dtype: KvDtype::F16,
            attention: AttentionMode::Paged,
            output: OutputKind::Logits,
            sparse: false,
            least_rows: 0,
            moves_states: false,
            expert_slots: None,
        }
    }
}

/// Sequences in a step.
const MAX_SEQUENCES: usize = 24;
/// Slots for states: one per sequence, one per sequence whose state moves, and one for unused rows.
const STATES: usize = 2 * MAX_SEQUENCES + 1;

/// Names a sequence of a [`Driver`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceId(usize);

/// A runner with its sequences and pages. Errors are messages for people: they end a test.
pub struct Driver {
    runner: Box<dyn Runner>,
    program: Program,
    limits: Limits,
    /// See [`DriveOptions::output`].
    output: OutputKind<'static>,
    /// See [`DriveOptions::sparse`].
    sparse: bool,
    /// See [`DriveOptions::least_rows`].
    least_rows: usize,
    /// Pages of unused rows.
    spare: Vec<PageId>,
    /// Free pages; the last one is allocated first.
    free: Vec<PageId>,
    /// Users of each page.
    users: Vec<usize>,
    /// Free states.
    free_states: Vec<StateId>,
    state_users: Vec<usize>,
    /// See [`DriveOptions::moves_states`].
    moves_states: bool,
    /// Pages of a checkpoint.
    checkpoint_pages: usize,
    sequences: Vec<Sequence>,
    out: StepOutput,
}

/// Content of rows beside tokens.
#[derive(Clone, Debug, Default)]
pub(crate) struct RowContent {
    /// Given rows by position, `[parts, hidden]` each.
    pub given: BTreeMap<usize, Vec<f32>>,
    /// Coordinates by position; empty if they are the position.
    pub coordinates: Vec<Coordinates>,
    /// Spans, as positions.
    pub spans: Vec<Range<usize>>,
}

/// Content of the rows of a step.
#[derive(Default)]
struct StepContent {
    /// Values of consecutive rows.
    given: Vec<(Range<usize>, Vec<f32>)>,
    coordinates: Vec<Coordinates>,
    /// True if a sequence has coordinates.
    has_coordinates: bool,
    spans: Vec<Range<usize>>,
}

impl StepContent {
    /// Adds the content of a sequence's rows from `row` on, at these positions.
    fn add(&mut self, content: &RowContent, row: usize, positions: Range<usize>) {
        let row_of = |position: usize| row + position - positions.start;
        for (&position, values) in content.given.range(positions.clone()) {
            let own = row_of(position)..row_of(position) + 1;
            match self.given.last_mut() {
                Some((rows, all)) if rows.end == own.start => {
                    rows.end = own.end;
                    all.extend(values);
                }
                _ => self.given.push((own, values.clone())),
            }
        }
        self.has_coordinates |= !content.coordinates.is_empty();
        let place =
            |position: usize| content.coordinates.get(position).copied().unwrap_or([position as u32; AXES]);
        self.coordinates.extend(positions.clone().map(place));
        let own =
            content.spans.iter().filter(|span| span.start < positions.end && span.end > positions.start);
        self.spans.extend(own.map(|span| row_of(span.start)..row_of(span.end)));
    }
}

struct Sequence {
    tokens: Vec<u32>,
    content: RowContent,
    adapters: Vec<(AdapterId, f32)>,
    /// Number of tokens whose K and V are in the pages.
    done: usize,
    /// Block tables by KV group, with [`PageId::SCRATCH`] before the window.
    tables: Vec<Vec<PageId>>,
    /// State, perhaps shared with forks that have not run yet.
    state: Option<StateId>,
    /// Pages in which its state is saved while it has none.
    checkpoint: Vec<PageId>,
    /// `[positions][vocab]` (of embeddings, `[positions][hidden]`), from position `logits_from` on.
    logits: Vec<Vec<f32>>,
    logits_from: usize,
}

impl Driver {
    /// Loads a model.
    ///
    /// # Errors
    /// The backend's error.
    pub fn new(backend: &dyn Backend, model: &RandomModel, options: &DriveOptions) -> Result<Self, String> {
        let limits = Self::limits(model, options);
        let runner = backend
            .load(&model.program, model.weights.clone(), limits)
            .map_err(|error| format!("{} cannot load the model: {error}", backend.name()))?;
        Self::with_runner(runner, backend, model, options, limits)
    }

    /// Loads a head of this driver's model, which shares these matrices.
    ///
    /// # Errors
    /// The backend's error.
    pub(crate) fn head(
        &mut self,
        backend: &dyn Backend,
        head: &RandomModel,
        shared: &[(MatrixId, MatrixId)],
        options: &DriveOptions,
    ) -> Result<Self, String> {
        let limits = Self::limits(head, options);
        let runner = self
            .runner
            .load_head(&head.program, head.weights.clone(), shared, limits)
            .map_err(|error| format!("{} cannot load the head: {error}", backend.name()))?;
        Self::with_runner(runner, backend, head, options, limits)
    }

    pub(crate) fn limits(model: &RandomModel, options: &DriveOptions) -> Limits {
        let spare = options.least_rows.div_ceil(options.block_size) * model.program.kv.groups.len();
        let longest = options.max_context.max(options.least_rows);
        Limits {
            block_size: options.block_size,
            pages: options.pages + spare,
            max_rows: longest,
            max_sequences: MAX_SEQUENCES,
            max_outputs: longest,
            max_context: longest,
            states: if model.program.state.is_empty() { 0 } else { STATES },
            kv_dtype: options.kv_dtype,
            attention: options.attention,
            expert_slots: options.expert_slots,
        }
    }

    fn with_runner(
        runner: Box<dyn Runner>,
        backend: &dyn Backend,
        model: &RandomModel,
        options: &DriveOptions,
        limits: Limits,
    ) -> Result<Self, String> {
        // Page 0 is scratch.
        let mut free: Vec<PageId> = (1..options.pages as u32).rev().map(PageId).collect();
        let mut free_states: Vec<StateId> = (1..limits.states as u32).rev().map(StateId).collect();
        if let Some(seed) = options.scatter {
            Rng::new(seed).shuffle(&mut free);
            Rng::new(seed).shuffle(&mut free_states);
        }
        let mut driver = Self {
            runner,
            program: model.program.clone(),
            limits,
            output: options.output,
            sparse: options.sparse,
            least_rows: options.least_rows,
            spare: (options.pages..limits.pages).map(|page| PageId(page as u32)).collect(),
            users: vec![0; limits.pages],
            free_states,
            state_users: vec![0; limits.states],
            moves_states: options.moves_states,
            checkpoint_pages: backend.checkpoint_pages(&model.program, options.block_size, options.kv_dtype),
            sequences: Vec::new(),
            out: StepOutput::default(),
            free,
        };
        if options.stale {
            driver.write_every_page()?;
        }
        Ok(driver)
    }

    /// Writes all pages, and leaves them free.
    fn write_every_page(&mut self) -> Result<(), String> {
        let free = self.free.clone();
        let groups = self.program.kv.groups.len();
        let mut rng = Rng::new(0xdead);
        while self.free.len() >= groups {
            let tokens = (self.free.len() / groups * self.limits.block_size).min(self.limits.max_context);
            let junk = self.start(&rng.tokens(tokens, self.program.vocab));
            self.step(&[(junk, tokens)])?;
            self.sequences[junk.0].logits.clear();
            self.release_state(junk);
        }
        self.users.fill(0);
        self.sequences.clear();
        self.free = free;
        Ok(())
    }

    /// Adds a sequence; none of its tokens have run yet.
    pub fn start(&mut self, tokens: &[u32]) -> SequenceId {
        self.start_with(tokens, RowContent::default())
    }

    /// Adds a sequence with content beside its tokens.
    pub(crate) fn start_with(&mut self, tokens: &[u32], content: RowContent) -> SequenceId {
        let tables = vec![Vec::new(); self.program.kv.groups.len()];
        self.sequences.push(Sequence {
            tokens: tokens.to_vec(),
            content,
            adapters: Vec::new(),
            done: 0,
            tables,
            state: None,
            checkpoint: Vec::new(),
            logits: Vec::new(),
            logits_from: 0,
        });
        SequenceId(self.sequences.len() - 1)
    }

    /// Adds a sequence with adapters and their scales.
    pub fn start_adapted(&mut self, tokens: &[u32], adapters: Vec<(AdapterId, f32)>) -> SequenceId {
        let id = self.start(tokens);
        self.sequences[id.0].adapters = adapters;
        id
    }

    /// Adds tokens to a sequence, as if they had been sampled.
    pub fn push(&mut self, sequence: SequenceId, tokens: &[u32]) {
        self.sequences[sequence.0].tokens.extend(tokens);
    }

    /// Runs the next tokens of some sequences in one step, in this order.
    ///
    /// # Errors
    /// The runner's error, or outputs that are not logits.
    pub fn step(&mut self, parts: &[(SequenceId, usize)]) -> Result<(), String> {
        let (mut tokens, mut sequences, mut pages) = (Vec::new(), Vec::new(), Vec::new());
        let (mut content, mut adapters) = (StepContent::default(), Vec::new());
        for &(id, count) in parts {
            let state = self.use_state(id)?;
            let sequence = &mut self.sequences[id.0];
            let end = sequence.done + count;
            assert!(count > 0 && end <= sequence.tokens.len(), "{count} tokens of {:?} are not there", id);
            for (table, group) in sequence.tables.iter_mut().zip(&self.program.kv.groups) {
                // Pages before the first row's window are freed before new pages are taken, as in an engine with few
                // pages.
                if let Some(window) = group.window {
                    let passed = (sequence.done + 1).saturating_sub(window as usize) / self.limits.block_size;
                    for page in table.iter_mut().take(passed) {
                        release(std::mem::take(page), &mut self.free, &mut self.users);
                    }
                }
                while table.len() * self.limits.block_size < end {
                    table.push(take(&mut self.free, &mut self.users)?);
                }
            }
            let (first_row, first_page) = (tokens.len(), pages.len());
            tokens.extend(&sequence.tokens[sequence.done..end]);
            content.add(&sequence.content, first_row, sequence.done..end);
            pages.extend(sequence.tables.iter().flatten());
            let index = sequences.len();
            adapters.extend(sequence.adapters.iter().map(|&(adapter, scale)| AdapterUse {
                sequence: index,
                adapter,
                scale,
            }));
            sequences.push(StepSequence {
                rows: first_row..tokens.len(),
                start: sequence.done,
                tables: first_page..pages.len(),
                state,
            });
        }
        let missing = self.least_rows.saturating_sub(tokens.len());
        if missing > 0 {
            let (first_row, first_page) = (tokens.len(), pages.len());
            tokens.resize(self.least_rows, 0);
            let given = self.program.needs_given_rows().then(|| vec![0.0; self.program.given_width()]);
            let given = given.map(|row| (0..missing).map(|position| (position, row.clone())).collect());
            let padding = RowContent { given: given.unwrap_or_default(), ..RowContent::default() };
            content.add(&padding, first_row, 0..missing);
            let blocks = missing.div_ceil(self.limits.block_size) * self.program.kv.groups.len();
            pages.extend(&self.spare[..blocks]);
            sequences.push(StepSequence {
                rows: first_row..tokens.len(),
                start: 0,
                tables: first_page..pages.len(),
                state: self.program.state.in_place(StateId(0)),
            });
        }
        let kind = self.output;
        let width = match kind {
            OutputKind::Embedding | OutputKind::Mean => self.program.hidden,
            OutputKind::Residual => self.program.residual_width(),
            OutputKind::Logits | OutputKind::Sample(_) | OutputKind::Score { .. } => self.program.vocab,
        };
        let given = content.given.iter().map(|(rows, values)| GivenRows { rows: rows.clone(), values });
        let given: Vec<_> = given.collect();
        let sparse = self.sparse;
        let merged = self.program.merged().map_or(1, |merged| merged.rows);
        let is_first = |row: usize| sequences.iter().any(|sequence| sequence.rows.start == row);
        let has_output = |row: &usize| match kind {
            OutputKind::Mean => is_first(*row),
            _ => row.is_multiple_of(merged) && (!sparse || (row / merged) % 5 == 2),
        };
        let rows = (0..tokens.len()).filter(has_output);
        let outputs: Vec<Output<'_>> = rows.map(|row| Output { row, kind }).collect();
        let step = Step {
            tokens: &tokens,
            carried: &[],
            given: &given,
            coordinates: if content.has_coordinates { &content.coordinates } else { &[] },
            spans: &content.spans,
            adapters: &adapters,
            sequences: &sequences,
            pages: &pages,
            outputs: &outputs,
        };
        submit(&mut *self.runner, &step, &mut self.out)?;
        for StateUse { read, write } in sequences.iter().filter_map(|sequence| sequence.state) {
            if read != write {
                self.let_go(read);
            }
        }
        let mut outcomes = self.out.outcomes.drain(..);
        let mut rows = 0..tokens.len();
        for &(id, count) in parts {
            let sequence = &mut self.sequences[id.0];
            sequence.done += count;
            for row in rows.by_ref().take(count) {
                if !has_output(&row) {
                    sequence.logits.push(Vec::new());
                    continue;
                }
                let outcome = outcomes.next().ok_or("too few outcomes")?;
                let row = match (kind, outcome) {
                    (OutputKind::Logits, OutputValue::Logits(row))
                    | (OutputKind::Embedding | OutputKind::Mean, OutputValue::Embedding(row))
                    | (OutputKind::Residual, OutputValue::Residual(row)) => row,
                    (kind, other) => return Err(format!("{kind:?} was asked for, not {other:?}")),
                };
                if row.len() != width {
                    return Err(format!("{kind:?} of {} numbers, not {width}", row.len()));
                }
                sequence.logits.push(row);
            }
        }
        Ok(())
    }

    /// Runs the rest of a sequence, alone, in chunks of at most this many tokens.
    ///
    /// # Errors
    /// As [`Driver::step`].
    pub fn run(&mut self, id: SequenceId, chunk: usize) -> Result<(), String> {
        loop {
            let sequence = &self.sequences[id.0];
            match (sequence.tokens.len() - sequence.done).min(chunk) {
                0 => return Ok(()),
                count => self.step(&[(id, count)])?,
            }
        }
    }

    /// Drops the last `rows` computed rows of a sequence, which continues with `tokens` from there. Pages behind them are freed.
    pub fn drop_rows(&mut self, id: SequenceId, rows: usize, tokens: &[u32]) {
        let Self { sequences, free, users, limits, .. } = self;
        let sequence = &mut sequences[id.0];
        sequence.done -= rows;
        sequence.tokens.truncate(sequence.done);
        sequence.tokens.extend(tokens);
        sequence.logits.truncate(sequence.done - sequence.logits_from);
        for table in &mut sequence.tables {
            let unused = table.split_off(sequence.done.div_ceil(limits.block_size).min(table.len()));
            unused.into_iter().for_each(|page| release(page, free, users));
        }
    }

    /// Returns the logits of a sequence, `[positions][vocab]`, or its embeddings, and the position of the first ones.
    pub fn logits(&self, sequence: SequenceId) -> (usize, &[Vec<f32>]) {
        let sequence = &self.sequences[sequence.0];
        (sequence.logits_from, &sequence.logits)
    }

    /// Returns the tokens of a sequence.
    pub fn tokens(&self, sequence: SequenceId) -> &[u32] {
        &self.sequences[sequence.0].tokens
    }

    /// Returns the block table of a sequence in a KV group.
    pub fn table(&self, sequence: SequenceId, group: usize) -> &[PageId] {
        &self.sequences[sequence.0].tables[group]
    }

    /// Returns the runner, for operations that a driver does not have.
    pub fn runner(&mut self) -> &mut dyn Runner {
        &mut *self.runner
    }
}

/// Submits a step and collects it.
///
/// # Errors
/// The runner's error, or missing outputs.
pub fn submit(runner: &mut dyn Runner, step: &Step<'_>, out: &mut StepOutput) -> Result<(), String> {
    let ticket = runner.submit(step).map_err(|error| error.to_string())?;
    runner.collect(ticket, out).map_err(|error| error.to_string())?;
    match out.outcomes.len() == step.outputs.len() {
        true => Ok(()),
        false => Err(format!("{} outcomes for {} outputs", out.outcomes.len(), step.outputs.len())),
    }
}

/// Allocates a page.
fn take(free: &mut Vec<PageId>, users: &mut [usize]) -> Result<PageId, String> {
    let page = free.pop().ok_or("the test needs more pages than its options give")?;
    users[page.0 as usize] += 1;
    Ok(page)
}

/// Counts one user of a page less, and frees it after the last one.
fn release(page: PageId, free: &mut Vec<PageId>, users: &mut [usize]) {
    if page == PageId::SCRATCH {
        return;
    }
    users[page.0 as usize] -= 1;
    if users[page.0 as usize] == 0 {
        free.push(page);
    }
}
