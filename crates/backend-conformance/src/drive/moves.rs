//! Pages and states that move: forks, preemption, checkpoints, and bytes that leave the device.

use paguro_backend::{PageContent, PageId, PageMove, StateId, StateUse};

use super::{Driver, Sequence, SequenceId, release, take};

impl Driver {
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

    /// Releases all pages of a sequence, so that it runs again from its first token.
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

    /// Returns true if the device copies states into pages.
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

    /// Releases the state of a sequence, if it has one.
    pub(super) fn release_state(&mut self, sequence: SequenceId) {
        if let Some(state) = self.sequences[sequence.0].state.take() {
            self.let_go(state);
        }
    }

    /// Counts one user of a state less.
    pub(super) fn let_go(&mut self, state: StateId) {
        let users = &mut self.state_users[state.0 as usize];
        *users -= 1;
        if *users == 0 {
            self.free_states.push(state);
        }
    }

    /// Returns the states that a sequence uses in its next step. A shared one is copied while it is read.
    pub(super) fn use_state(&mut self, sequence: SequenceId) -> Result<Option<StateUse>, String> {
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
}
