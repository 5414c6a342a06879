//! Runs sequences through a runner as an engine would, with the simplest of page allocators.

use paguro_backend::{
    AttentionMode, Backend, KvDtype, Limits, Outcome, Output, PageContent, PageId, PageMove, Program, Runner,
    StateId, StateUse, Step, StepOutput, StepSequence, Want,
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
    /// Asks for every row's embedding instead of its logits.
    pub embeddings: bool,
    /// Asks for the outputs of some rows only; others have empty ones.
    pub sparse: bool,
    /// Adds unused rows to steps with fewer rows.
    pub least_rows: usize,
    /// Every step writes states to other slots than it reads them from.
    pub moves_states: bool,
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
            embeddings: false,
            sparse: false,
            least_rows: 0,
            moves_states: false,
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
    /// See [`DriveOptions::embeddings`].
    embeddings: bool,
    /// See [`DriveOptions::sparse`].
    sparse: bool,
    /// See [`DriveOptions::least_rows`].
    least_rows: usize,
    /// Pages of their K and V.
    spare: Vec<PageId>,
    /// Free pages; taken from the end.
    free: Vec<PageId>,
    /// Users of each page.
    users: Vec<usize>,
    /// Likewise of states.
    free_states: Vec<StateId>,
    state_users: Vec<usize>,
    /// See [`DriveOptions::moves_states`].
    moves_states: bool,
    /// See [`Backend::checkpoint_pages`].
    checkpoint_pages: usize,
    sequences: Vec<Sequence>,
    out: StepOutput,
}

struct Sequence {
    tokens: Vec<u32>,
    /// Number of tokens in the pages.
    done: usize,
    /// Block tables by KV group, with [`PageId::SCRATCH`] before the window.
    tables: Vec<Vec<PageId>>,
    /// Perhaps shared with forks that have not run yet.
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
        let spare = options.least_rows.div_ceil(options.block_size) * model.program.kv.groups.len();
        let longest = options.max_context.max(options.least_rows);
        let limits = Limits {
            block_size: options.block_size,
            pages: options.pages + spare,
            max_rows: longest,
            max_sequences: MAX_SEQUENCES,
            max_outputs: longest,
            max_context: longest,
            states: if model.program.state.is_empty() { 0 } else { STATES },
            kv_dtype: options.kv_dtype,
            attention: options.attention,
        };
        let runner = backend
            .load(&model.program, model.weights.clone(), limits)
            .map_err(|error| format!("{} cannot load the model: {error}", backend.name()))?;
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
            embeddings: options.embeddings,
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
        let tables = vec![Vec::new(); self.program.kv.groups.len()];
        self.sequences.push(Sequence {
            tokens: tokens.to_vec(),
            done: 0,
            tables,
            state: None,
            checkpoint: Vec::new(),
            logits: Vec::new(),
            logits_from: 0,
        });
        SequenceId(self.sequences.len() - 1)
    }

    /// Adds tokens to a sequence, as if they had been sampled.
    pub fn push(&mut self, sequence: SequenceId, tokens: &[u32]) {
        self.sequences[sequence.0].tokens.extend(tokens);
    }

    /// Starts a sequence whose first `shared` tokens are those of another one, in the same pages. Full pages are
    /// shared; a partially filled page is copied first.
    ///
    /// # Errors
    /// The runner's error of the copy.
    pub fn fork(&mut self, from: SequenceId, shared: usize, tokens: &[u32]) -> Result<SequenceId, String> {
        let fork = self.start(tokens);
        let source = &self.sequences[from.0];
        assert!(shared <= source.done && tokens[..shared] == source.tokens[..shared], "not a prefix");
        let state = source.state;
        if let Some(StateId(state)) = state {
            assert_eq!(shared, source.done, "a state is that of all tokens");
            self.state_users[state as usize] += 1;
        }
        let blocks = shared.div_ceil(self.limits.block_size);
        let mut tables: Vec<Vec<PageId>> =
            source.tables.iter().map(|table| table[..blocks].to_vec()).collect();
        for table in &mut tables {
            for (block, page) in table.iter_mut().enumerate() {
                let full = (block + 1) * self.limits.block_size <= shared;
                if *page == PageId::SCRATCH {
                    continue;
                }
                if full {
                    self.users[page.0 as usize] += 1;
                } else {
                    let copy = take(&mut self.free, &mut self.users)?;
                    let moves = [PageMove::Copy { from: *page, to: copy }];
                    self.runner.move_pages(&moves).map_err(|error| error.to_string())?;
                    *page = copy;
                }
            }
        }
        let sequence = &mut self.sequences[fork.0];
        (sequence.tables, sequence.done, sequence.logits_from) = (tables, shared, shared);
        sequence.state = state;
        Ok(fork)
    }

    /// Gives all pages of a sequence back, so that it would have to run again from its first token.
    pub fn preempt(&mut self, sequence: SequenceId) {
        self.release_state(sequence);
        let sequence = &mut self.sequences[sequence.0];
        for page in sequence.tables.iter_mut().flat_map(|table| table.drain(..)) {
            release(page, &mut self.free, &mut self.users);
        }
        sequence.done = 0;
        sequence.logits_from = 0;
        sequence.logits.clear();
    }

    /// True if the device copies states into pages.
    pub fn saves_states(&self) -> bool {
        self.checkpoint_pages > 0
    }

    /// Saves the state of a sequence in pages, and releases its slot.
    ///
    /// # Errors
    /// The runner fails, or there are too few free pages.
    pub fn save_state(&mut self, sequence: SequenceId) -> Result<(), String> {
        let state = self.sequences[sequence.0].state.ok_or("the sequence has no state")?;
        let Self { free, users, .. } = self;
        let pages: Vec<PageId> =
            (0..self.checkpoint_pages).map(|_| take(free, users)).collect::<Result<_, _>>()?;
        let moves = pages.iter().enumerate().map(|(part, &to)| PageMove::SaveState { state, part, to });
        self.runner.move_pages(&moves.collect::<Vec<_>>()).map_err(|error| error.to_string())?;
        self.sequences[sequence.0].checkpoint = pages;
        self.release_state(sequence);
        Ok(())
    }

    /// Restores the saved state of a sequence, and frees the pages.
    ///
    /// # Errors
    /// The runner fails, or there is no free state.
    pub fn restore_state(&mut self, sequence: SequenceId) -> Result<(), String> {
        let state = self.free_states.pop().ok_or("the test needs more states than there are")?;
        self.state_users[state.0 as usize] += 1;
        let pages = std::mem::take(&mut self.sequences[sequence.0].checkpoint);
        let moves =
            pages.iter().enumerate().map(|(part, &from)| PageMove::RestoreState { from, part, state });
        self.runner.move_pages(&moves.collect::<Vec<_>>()).map_err(|error| error.to_string())?;
        pages.into_iter().for_each(|page| release(page, &mut self.free, &mut self.users));
        self.sequences[sequence.0].state = Some(state);
        Ok(())
    }

    /// Returns the bytes of all pages of a sequence, and of those in which its state is saved. `None` if they cannot leave
    /// the device.
    ///
    /// # Errors
    /// The runner fails.
    pub fn export(&mut self, sequence: SequenceId) -> Result<Option<[Vec<u8>; 2]>, String> {
        let Some(format) = self.runner.page_format() else { return Ok(None) };
        let Sequence { tables, checkpoint, .. } = &self.sequences[sequence.0];
        let mut read = |pages: &[PageId]| {
            let mut bytes = vec![0x5a; pages.len() * format.page_bytes];
            self.runner.read_pages(pages, &mut bytes).map_err(|error| error.to_string())?;
            Ok::<_, String>(bytes)
        };
        Ok(Some([read(&tables.concat())?, read(checkpoint)?]))
    }

    /// Adds a sequence whose first `done` tokens, whole blocks, were computed by another driver that has exported these
    /// bytes.
    ///
    /// # Errors
    /// The runner fails, or there are too few free pages.
    pub fn import(
        &mut self,
        tokens: &[u32],
        done: usize,
        [kv, state]: &[Vec<u8>; 2],
    ) -> Result<SequenceId, String> {
        assert!(done.is_multiple_of(self.limits.block_size), "only whole blocks are exported");
        let id = self.start(tokens);
        let Self { free, users, runner, .. } = self;
        let mut write = |bytes: &[u8], count: usize, content| {
            let pages: Vec<PageId> = (0..count).map(|_| take(free, users)).collect::<Result<_, _>>()?;
            runner.write_pages(&pages, bytes, content).map_err(|error| error.to_string())?;
            Ok::<_, String>(pages)
        };
        let blocks = done / self.limits.block_size;
        let tables = self.program.kv.groups.len();
        let of_group = kv.len() / tables.max(1);
        let parts = kv.chunks(of_group.max(1)).enumerate();
        let pages: Vec<Vec<PageId>> = parts
            .map(|(group, bytes)| write(bytes, blocks, PageContent::Kv { group }))
            .collect::<Result<_, _>>()?;
        let checkpoint = if state.is_empty() { 0 } else { self.checkpoint_pages };
        let checkpoint = write(state, checkpoint, PageContent::State)?;
        let sequence = &mut self.sequences[id.0];
        sequence.tables = pages;
        (sequence.checkpoint, sequence.done, sequence.logits_from) = (checkpoint, done, done);
        if !state.is_empty() {
            self.restore_state(id)?;
        }
        Ok(id)
    }

    fn release_state(&mut self, sequence: SequenceId) {
        if let Some(state) = self.sequences[sequence.0].state.take() {
            self.let_go(state);
        }
    }

    fn let_go(&mut self, state: StateId) {
        let users = &mut self.state_users[state.0 as usize];
        *users -= 1;
        if *users == 0 {
            self.free_states.push(state);
        }
    }

    /// The states that a sequence uses in its next step: a shared one is copied while it is read.
    fn use_state(&mut self, sequence: SequenceId) -> Result<Option<StateUse>, String> {
        if self.limits.states == 0 {
            return Ok(None);
        }
        let old = self.sequences[sequence.0].state;
        if let Some(state) = old.filter(|state| self.state_users[state.0 as usize] == 1 && !self.moves_states)
        {
            return Ok(Some(StateUse::in_place(state)));
        }
        let write = self.free_states.pop().ok_or("the test needs more states than there are")?;
        self.state_users[write.0 as usize] += 1;
        self.sequences[sequence.0].state = Some(write);
        Ok(Some(StateUse { read: old.unwrap_or(write), write }))
    }

    /// Runs the next tokens of some sequences in one step, in this order.
    ///
    /// # Errors
    /// The runner's error, or outputs that are not logits.
    pub fn step(&mut self, parts: &[(SequenceId, usize)]) -> Result<(), String> {
        let (mut tokens, mut sequences, mut pages) = (Vec::new(), Vec::new(), Vec::new());
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
            pages.extend(sequence.tables.iter().flatten());
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
            let blocks = missing.div_ceil(self.limits.block_size) * self.program.kv.groups.len();
            pages.extend(&self.spare[..blocks]);
            sequences.push(StepSequence {
                rows: first_row..tokens.len(),
                start: 0,
                tables: first_page..pages.len(),
                state: self.program.state.in_place(StateId(0)),
            });
        }
        let (want, width) = match self.embeddings {
            true => (Want::Embedding, self.program.hidden),
            false => (Want::Logits, self.program.vocab),
        };
        let sparse = self.sparse;
        let has_output = |row: &usize| !sparse || row % 5 == 2;
        let rows = (0..tokens.len()).filter(has_output);
        let outputs: Vec<Output<'_>> = rows.map(|row| Output { row, want }).collect();
        let step =
            Step { tokens: &tokens, carried: &[], sequences: &sequences, pages: &pages, outputs: &outputs };
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
                let row = match outcome {
                    Outcome::Logits(logits) if !self.embeddings => logits,
                    Outcome::Embedding(embedding) if self.embeddings => embedding,
                    other => return Err(format!("{want:?} was asked for, not {other:?}")),
                };
                if row.len() != width {
                    return Err(format!("{want:?} of {} numbers, not {width}", row.len()));
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

    /// The logits of a sequence, `[positions][vocab]`, or its embeddings, and the position of the first ones.
    pub fn logits(&self, sequence: SequenceId) -> (usize, &[Vec<f32>]) {
        let sequence = &self.sequences[sequence.0];
        (sequence.logits_from, &sequence.logits)
    }

    /// The tokens of a sequence.
    pub fn tokens(&self, sequence: SequenceId) -> &[u32] {
        &self.sequences[sequence.0].tokens
    }

    /// The block table of a sequence in a KV group.
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

fn take(free: &mut Vec<PageId>, users: &mut [usize]) -> Result<PageId, String> {
    let page = free.pop().ok_or("the test needs more pages than its options give")?;
    users[page.0 as usize] += 1;
    Ok(page)
}

fn release(page: PageId, free: &mut Vec<PageId>, users: &mut [usize]) {
    if page == PageId::SCRATCH {
        return;
    }
    users[page.0 as usize] -= 1;
    if users[page.0 as usize] == 0 {
        free.push(page);
    }
}
