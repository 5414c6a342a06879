//! One sequence: its tokens, and the block tables with the pages of their K and V.

use std::{cmp::Reverse, ops::Range, sync::Arc, time::Instant};

use paguro_backend::{PageId, PageMove, SampleRequest, SamplingParams, Score, StateUse, TokenMask};
use paguro_model::Pooling;

use crate::{
    Constraint, SubmitError,
    constraint::{Guide, MaskWorkers},
    fair::Tenant,
    layout::Layout,
    pages::Pages,
    prefix::BlockKey,
    request::{FinishReason, Request, RequestLimits, Usage},
    states::States,
    thought::Thought,
    tiers::{Load, Part, Unit},
};

/// The properties of a request that the scheduler needs; shared by its branches.
#[derive(Debug)]
pub(crate) struct Job {
    /// Number of arrival.
    pub id: u64,
    pub priority: i32,
    pub tenant: Tenant,
    pub deadline: Option<Instant>,
    pub prompt_tokens: usize,
    /// Sampling parameters of each branch, which differ in the seed.
    pub sampling: Vec<SamplingParams>,
    pub stop_tokens: Vec<u32>,
    /// Tokens before which no stop token is sampled, and a mask of all others, if there are both.
    pub min_tokens: usize,
    pub no_stop_tokens: Option<Arc<TokenMask>>,
    /// Most tokens to generate, and why it ends there.
    pub max_tokens: usize,
    pub at_max_tokens: FinishReason,
    pub logprobs: Option<usize>,
    /// Grammar, until its first sequence takes it.
    pub constraint: Option<Constraint>,
    /// Limit of reasoning, until its first sequence takes it.
    pub thought: Option<Thought>,
    /// First prompt position to score, if any.
    pub score_from: Option<usize>,
    /// Prompt positions with requested embeddings.
    pub embedded: Option<Range<usize>>,
    /// True if steps that compute a part of the prompt are reported.
    pub report_prefill: bool,
    /// Number of prompt tokens with which prompts of later turns probably begin.
    pub lasting_tokens: usize,
    /// See [`Request::prefix_salt`].
    pub prefix_salt: Vec<u8>,
}

impl Job {
    /// Creates a job from a request that was [checked](Request::check) against `limits`.
    ///
    /// # Errors
    /// All tokens of the vocabulary are stop tokens, but the answer must have some tokens.
    pub fn new(
        id: u64,
        request: &Request,
        model_stop_tokens: &[u32],
        limits: RequestLimits,
    ) -> Result<Self, SubmitError> {
        let RequestLimits { vocab, max_context, .. } = limits;
        let room = max_context - request.prompt.len();
        let (max_tokens, at_max_tokens) = match request.max_tokens {
            Some(tokens) if tokens <= room => (tokens, FinishReason::Length),
            _ => (room, FinishReason::ContextFull),
        };
        let mut stop_tokens = request.stop_tokens.clone();
        if !request.ignore_stop_tokens {
            stop_tokens.extend_from_slice(model_stop_tokens);
        }
        let forbids = request.min_tokens > 0 && !stop_tokens.is_empty();
        let no_stop_tokens = forbids.then(|| all_but(&stop_tokens, vocab)).transpose()?.map(Arc::new);
        let seed = request.sampling.seed;
        Ok(Self {
            id,
            priority: request.priority,
            tenant: request.tenant.clone(),
            deadline: request.deadline,
            prompt_tokens: request.prompt.len(),
            sampling: (0..request.branches as u64)
                .map(|branch| SamplingParams { seed: seed.wrapping_add(branch), ..request.sampling.clone() })
                .collect(),
            stop_tokens,
            min_tokens: request.min_tokens,
            no_stop_tokens,
            max_tokens,
            at_max_tokens,
            logprobs: request.logprobs,
            constraint: request.constraint.clone(),
            thought: None,
            score_from: request.score_prompt_from,
            report_prefill: request.report_prefill,
            lasting_tokens: request.lasting_tokens.unwrap_or(usize::MAX),
            prefix_salt: request.prefix_salt.clone(),
            embedded: request.embedding.map(|pooling| match pooling {
                Pooling::Last => request.prompt.len() - 1..request.prompt.len(),
                Pooling::Mean => 0..request.prompt.len(),
                Pooling::First => 0..1,
            }),
        })
    }
}

fn all_but(tokens: &[u32], vocab: usize) -> Result<TokenMask, SubmitError> {
    let mut bits = vec![u32::MAX; vocab.div_ceil(32)];
    if !vocab.is_multiple_of(32) {
        bits.iter_mut().last().into_iter().for_each(|last| *last >>= 32 - vocab % 32);
    }
    for &token in tokens.iter().filter(|&&token| (token as usize) < vocab) {
        bits[token as usize / 32] &= !(1 << (token % 32));
    }
    if bits.iter().all(|&word| word == 0) {
        let problem = "cannot be kept: every token of the vocabulary is a stop token".into();
        return Err(SubmitError::Invalid { field: "min_tokens", problem });
    }
    Ok(TokenMask::new(bits))
}

/// Order of the sequences of one tenant: priority, then waiting time, then age of the request, then branch. A sequence
/// keeps its rank while it runs and when it is preempted, so it is the first of its tenant to run again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    priority: Reverse<i32>,
    seniority: u64,
    request: u64,
    branch: usize,
}

/// Pages of one group, by block.
#[derive(Clone, Debug, Default)]
pub(crate) struct BlockTable {
    /// The first `released` entries are [`PageId::SCRATCH`]: the window has left them behind.
    pub pages: Vec<PageId>,
    pub released: usize,
}

impl BlockTable {
    fn held(&self) -> &[PageId] {
        &self.pages[self.released..]
    }
}

/// A prompt with its answer; or, until the prompt is computed, all branches of a request.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub job: Arc<Job>,
    /// Its request's, or a higher one if it has waited long.
    pub priority: i32,
    /// Number of the sequence in the order of its tenant's queue.
    pub seniority: u64,
    /// The step before which it began to wait.
    pub waits_since: u64,
    /// The step in which it left the queue.
    pub runs_since: u64,
    /// Steps since then that computed rows again which a preemption had lost.
    pub restoring_steps: u64,
    /// The last step in which it had rows.
    pub last_step: u64,
    /// Branches that this sequence represents.
    pub branches: Range<usize>,
    /// Prompt and answer.
    pub tokens: Vec<u32>,
    /// Position in the grammar, if there is one.
    pub guide: Option<Guide>,
    /// Position in the reasoning, if that has a limit.
    pub thought: Option<Thought>,
    /// Number of tokens whose K and V are in the pages.
    pub computed: usize,
    /// The largest number of tokens that ever had.
    pub reached: usize,
    /// Block tables of the KV groups; between steps each has `blocks(computed)` entries.
    pub tables: Vec<BlockTable>,
    /// State after the computed tokens, or in a planned step after the planned rows; it may be shared with other
    /// branches of the request. `None` before the first step, and for models without states.
    pub state: Option<StateUse>,
    /// Parent of its first block's key; `None` without a prefix cache, or for the empty salt.
    pub root: Option<BlockKey>,
    /// Keys of the first full blocks: at least those of the prompt and of computed blocks. Empty without a prefix
    /// cache.
    pub keys: Vec<BlockKey>,
    /// Checkpoints that it has made or begun with, by their numbers of tokens, in order.
    pub checkpoints: Vec<usize>,
    /// The last of these, if the next one replaces it.
    pub newest_checkpoint: Option<usize>,
    /// Rows that it may have in the step that is being planned.
    pub granted: usize,
    /// Rows in the step that is being planned or run.
    pub rows: usize,
    /// Rows of younger prompts of its tenant that were computed before its own.
    pub overtaken: usize,
    /// Number of the last step that computed rows of this sequence, counted as in
    /// [`Stats::steps`](crate::Stats::steps), and the number of these rows.
    pub last_rows: (u64, usize),
    /// True if the following step is also planned, with the next row.
    pub ahead: bool,
    /// Scores of the prompt so far, ...
    pub scores: Vec<Score>,
    /// ... until they are delivered.
    scores_delivered: bool,
    /// Sum of the embeddings so far, in order of position so that the result does not depend on chunks, and their
    /// number; `None` after delivery.
    pool: Option<(Vec<f64>, usize)>,
    /// Number of cached tokens when it first ran; `None` before.
    pub cached_tokens: Option<usize>,
    /// Number of cached tokens that were loaded from memory of the host.
    pub host_tokens: usize,
    /// Number of cached tokens that were loaded from the disk.
    pub disk_tokens: usize,
    /// State of its search in the other tiers since it began to wait.
    pub load: Load,
    /// True if its pages are not saved, because they led to values that are not finite.
    pub is_suspect: bool,
    pub finished: bool,
}

impl Sequence {
    /// Before it is queued.
    pub fn new(mut job: Job, prompt: Vec<u32>, layout: &Layout, pages: &Pages) -> Self {
        let root = pages.root(&job.prefix_salt);
        let mut keys = Vec::new();
        for block in prompt.chunks_exact(layout.block_size) {
            let Some(key) = pages.key(keys.last().or(root.as_ref()), block) else { break };
            keys.push(key);
        }
        Self {
            priority: job.priority,
            seniority: 0,
            waits_since: 0,
            runs_since: 0,
            restoring_steps: 0,
            last_step: 0,
            branches: 0..job.sampling.len(),
            guide: job.constraint.take().map(Guide::new),
            thought: job.thought.take(),
            pool: job.embedded.is_some().then(Default::default),
            job: Arc::new(job),
            tokens: prompt,
            computed: 0,
            reached: 0,
            tables: vec![BlockTable::default(); layout.groups()],
            state: None,
            root,
            keys,
            checkpoints: Vec::new(),
            newest_checkpoint: None,
            granted: 0,
            rows: 0,
            overtaken: 0,
            last_rows: (0, 0),
            ahead: false,
            scores: Vec::new(),
            scores_delivered: false,
            cached_tokens: None,
            host_tokens: 0,
            disk_tokens: 0,
            load: Load::Untried,
            is_suspect: false,
            finished: false,
        }
    }

    pub fn rank(&self) -> Rank {
        Rank {
            priority: Reverse(self.priority),
            seniority: self.seniority,
            request: self.job.id,
            branch: self.branches.start,
        }
    }

    /// True while its blocks are loaded from another tier.
    pub fn is_loading(&self) -> bool {
        matches!(self.load, Load::Loading(_))
    }

    /// Tokens whose K and V are missing.
    pub fn remaining(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Returns true during the prefill, or its repetition. The last row of a prompt with a requested embedding belongs
    /// to the prefill.
    pub fn prefills(&self) -> bool {
        self.remaining() > 1 || !self.unembedded().is_empty()
    }

    pub fn generated(&self) -> usize {
        self.tokens.len() - self.job.prompt_tokens
    }

    pub fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: self.job.prompt_tokens,
            cached_tokens: self.cached_tokens.unwrap_or(0),
            host_tokens: self.host_tokens,
            disk_tokens: self.disk_tokens,
            generated_tokens: self.generated(),
        }
    }

    /// Returns the sampling request of a branch after the planned rows, or with `ahead` after the row that follows
    /// them.
    pub fn sample_request(&self, branch: usize, ahead: bool) -> SampleRequest<'_> {
        SampleRequest {
            params: &self.job.sampling[branch],
            draw: (self.generated() + usize::from(ahead)) as u64,
            history: &self.tokens,
            prompt_tokens: self.job.prompt_tokens,
            mask: self.mask(),
            logprobs: self.job.logprobs,
        }
    }

    /// Returns true if the planned rows are certainly the last.
    pub fn ends(&self) -> bool {
        self.samples() && self.generated() + 1 == self.job.max_tokens
    }

    /// Returns true if the planned rows have exactly one output, a token.
    pub fn has_one_output(&self) -> bool {
        self.samples() && self.branches.len() == 1 && self.outputs_in(self.rows) == 0
    }

    /// Returns the number of pages to reserve before the row after the planned ones.
    pub fn pages_ahead(&self, layout: &Layout) -> usize {
        let blocks = layout.blocks(self.computed + self.rows + 1);
        self.tables.iter().map(|table| blocks - table.pages.len()).sum()
    }

    /// Reserves them. The page in which the planned rows end belongs to this sequence alone, because they write it.
    pub fn reserve_ahead(&mut self, layout: &Layout, pages: &mut Pages) {
        let blocks = layout.blocks(self.computed + self.rows + 1);
        for table in &mut self.tables {
            table.pages.extend((table.pages.len()..blocks).map(|_| pages.take()));
        }
        self.ahead = true;
    }

    /// Returns true if the planned rows are the last missing ones and are followed by a sampled token.
    pub fn samples(&self) -> bool {
        self.rows > 0 && self.rows == self.remaining() && self.generated() < self.job.max_tokens
    }

    /// Prompt positions that still have to be scored.
    fn unscored(&self) -> Range<usize> {
        match self.job.score_from {
            Some(from) if !self.scores_delivered => from + self.scores.len()..self.job.prompt_tokens - 1,
            _ => 0..0,
        }
    }

    /// Returns all scores and the position of the first one, once, after the last one was computed.
    pub fn take_scores(&mut self) -> Option<(usize, Vec<Score>)> {
        let from = self.job.score_from?;
        if self.scores_delivered || !self.unscored().is_empty() {
            return None;
        }
        self.scores_delivered = true;
        Some((from, std::mem::take(&mut self.scores)))
    }

    /// Positions to score among the next `rows` ones.
    pub fn scored_in(&self, rows: usize) -> Range<usize> {
        let unscored = self.unscored();
        let end = unscored.end.min(self.computed + rows);
        unscored.start.min(end)..end
    }

    /// Prompt positions whose embeddings are still missing.
    fn unembedded(&self) -> Range<usize> {
        match (&self.job.embedded, &self.pool) {
            (Some(all), Some((_, done))) => all.start + done..all.end,
            _ => 0..0,
        }
    }

    /// Returns the positions with requested embeddings among the next `rows` positions.
    pub fn embedded_in(&self, rows: usize) -> Range<usize> {
        let missing = self.unembedded();
        let end = missing.end.min(self.computed + rows);
        missing.start.min(end)..end
    }

    /// Adds the embedding of the next position with a requested embedding.
    pub fn pool(&mut self, embedding: &[f32]) {
        if let Some((sum, done)) = &mut self.pool {
            sum.resize(embedding.len(), 0.0);
            sum.iter_mut().zip(embedding).for_each(|(sum, &x)| *sum += f64::from(x));
            *done += 1;
        }
    }

    /// Returns the mean of the embeddings, once, after the last one was computed.
    pub fn take_embedding(&mut self) -> Option<Vec<f32>> {
        if !self.unembedded().is_empty() {
            return None;
        }
        let (sum, count) = self.pool.take()?;
        Some(sum.into_iter().map(|sum| (sum / count as f64) as f32).collect())
    }

    /// Rows of scores and embeddings among the next `rows` ones, which cost outputs.
    pub fn outputs_in(&self, rows: usize) -> usize {
        self.scored_in(rows).len() + self.embedded_in(rows).len()
    }

    /// Appends a sampled token. Says whether the sequence ends with it; a stop token is not part of the answer.
    ///
    /// # Errors
    /// Why the grammar cannot be followed.
    pub fn push(&mut self, token: u32) -> Result<Option<FinishReason>, String> {
        self.tokens.push(token);
        if let Some(guide) = &self.guide {
            guide.check()?;
        }
        if let Some(thought) = &mut self.thought {
            thought.push(token);
        }
        if self.job.stop_tokens.contains(&token) {
            return Ok(Some(FinishReason::Stop(token)));
        }
        if let Some(guide) = &mut self.guide
            && guide.advance(token)?
        {
            return Ok(Some(FinishReason::Complete));
        }
        Ok((self.generated() == self.job.max_tokens).then(|| self.job.at_max_tokens.clone()))
    }

    /// Returns the mask of the next token.
    pub fn mask(&self) -> Option<&TokenMask> {
        self.guide.as_ref().map(Guide::mask).or(self.allowed().map(Arc::as_ref))
    }

    /// Returns the mask of the next token without the grammar: the end of reasoning at its limit.
    fn allowed(&self) -> Option<&Arc<TokenMask>> {
        self.thought.as_ref().and_then(Thought::mask).or_else(|| self.no_stop_tokens())
    }

    /// Returns the mask without stop tokens, while the answer must not end.
    fn no_stop_tokens(&self) -> Option<&Arc<TokenMask>> {
        self.job.no_stop_tokens.as_ref().filter(|_| self.generated() < self.job.min_tokens)
    }

    /// Starts computing the grammar's mask of the next token, if there is a grammar.
    pub fn compute_mask(&mut self, workers: &mut MaskWorkers) {
        let within = self.allowed().cloned();
        if let Some(guide) = &mut self.guide {
            guide.compute(within, workers);
        }
    }

    /// Returns the number of first blocks that the cache can supply: all of them in groups without a window, the
    /// visible ones in groups with a window, and the state at their end. At least one token is left to compute, and all
    /// tokens that are to be scored.
    pub fn cached_blocks(&self, layout: &Layout, pages: &Pages) -> usize {
        self.blocks_in(layout, |unit| match unit.part {
            Part::Kv(group) => pages.find(group, &unit.key).is_some(),
            Part::Checkpoint => pages.has_checkpoint(&unit.key),
        })
    }

    /// Returns the number of first blocks that a cache with these parts of blocks can supply.
    pub fn blocks_in(&self, layout: &Layout, has: impl Fn(Unit) -> bool) -> usize {
        let keys = &self.keys[..self.reusable_blocks(layout).min(self.keys.len())];
        let has = |part, block: usize| has(Unit { key: keys[block], part });
        let (windowed, full): (Vec<_>, Vec<_>) =
            (0..layout.groups()).partition(|&g| layout.windows[g].is_some());
        let has_all = |block: &usize| full.iter().all(|&group| has(Part::Kv(group), *block));
        let mut blocks = (0..keys.len()).take_while(has_all).count();
        loop {
            if layout.checkpoints.is_some() {
                let has_state = |&blocks: &usize| has(Part::Checkpoint, blocks - 1);
                blocks = (1..=blocks).rev().find(has_state).unwrap_or(0);
            }
            // Every prefix that is longer than the last missing block, and at most as long as this one, would also need
            // that block.
            let Some(missing) = windowed.iter().find_map(|&group| {
                let visible = layout.first_visible(group, blocks * layout.block_size)..blocks;
                visible.rev().find(|&block| !has(Part::Kv(group), block))
            }) else {
                return blocks;
            };
            blocks = missing;
        }
    }

    fn reusable_blocks(&self, layout: &Layout) -> usize {
        let wanted =
            [self.unscored(), self.unembedded()].into_iter().filter(|positions| !positions.is_empty());
        let tokens = wanted.map(|positions| positions.start).fold(self.tokens.len() - 1, usize::min);
        tokens / layout.block_size
    }

    /// Returns true if `other`, which is running, will compute block `block`, which this sequence could then use. For
    /// sequences with states, the block must end with a checkpoint.
    pub fn could_wait_for(&self, other: &Sequence, block: usize, layout: &Layout) -> bool {
        let block = match (layout.checkpoints, other.next_checkpoint(layout)) {
            (None, _) => block,
            (Some(_), Some(tokens)) if tokens / layout.block_size > block => tokens / layout.block_size - 1,
            (Some(_), _) => return false,
        };
        block < self.reusable_blocks(layout)
            && other.prefills()
            && other.computed < (block + 1) * layout.block_size
            && self.keys.get(block).is_some_and(|key| other.keys.get(block) == Some(key))
    }

    /// Returns the number of available pages that [`Sequence::take_cached`] would use.
    pub fn evictable_in_cached(&self, blocks: usize, layout: &Layout, pages: &Pages) -> usize {
        self.cached_pages(blocks, layout, pages).filter(|&(_, _, page)| pages.is_evictable(page)).count()
    }

    /// Begins with the first `blocks` blocks from the cache.
    pub fn take_cached(&mut self, blocks: usize, layout: &Layout, pages: &mut Pages) {
        assert!(self.computed == 0 && self.tables.iter().all(|table| table.pages.is_empty()));
        let found: Vec<_> = self.cached_pages(blocks, layout, pages).collect();
        for table in &mut self.tables {
            table.pages.resize(blocks, PageId::SCRATCH);
            table.released = blocks;
        }
        for (group, block, page) in found {
            pages.share(page);
            self.tables[group].pages[block] = page;
            self.tables[group].released = self.tables[group].released.min(block);
        }
        self.computed = blocks * layout.block_size;
        self.reached = self.reached.max(self.computed);
        self.cached_tokens.get_or_insert(self.computed);
    }

    fn cached_pages(
        &self,
        blocks: usize,
        layout: &Layout,
        pages: &Pages,
    ) -> impl Iterator<Item = (usize, usize, PageId)> {
        (0..layout.groups()).flat_map(move |group| {
            (layout.first_visible(group, blocks * layout.block_size)..blocks).map(move |block| {
                (group, block, pages.find(group, &self.keys[block]).expect("the block was found"))
            })
        })
    }

    /// Returns the maximum number of pages to allocate until all tokens are computed, if the sequence begins with
    /// `cached` cached blocks.
    pub fn pages_to_come(&self, cached: usize, layout: &Layout) -> usize {
        let start = self.computed.max(cached * layout.block_size);
        (0..layout.groups())
            .map(|group| {
                let from_cache = cached - layout.first_visible(group, start).min(cached);
                let held = self.tables[group].held().len() + from_cache;
                layout.peak(group, start, self.tokens.len()).saturating_sub(held)
            })
            .sum()
    }

    /// Pages of its next block, if it can become that long: one of each group. Branches that leave also need a copy of
    /// the block that they share.
    pub fn headroom(&self, layout: &Layout) -> usize {
        // The last token is never computed.
        let longest = self.job.prompt_tokens + self.job.max_tokens.saturating_sub(1);
        let grows = layout.blocks(longest) > layout.blocks(self.tokens.len());
        if grows || self.branches.len() > 1 { layout.groups() } else { 0 }
    }

    /// Returns the number of pages to allocate for the next `rows` rows: new blocks, and copies of shared pages that
    /// would be written.
    pub fn pages_for(&self, rows: usize, layout: &Layout, pages: &Pages) -> usize {
        let blocks = layout.blocks(self.computed + rows);
        let tail = self.tail(layout);
        self.tables
            .iter()
            .map(|table| {
                let copies = tail.is_some_and(|block| pages.is_shared(table.pages[block]));
                blocks - table.pages.len() + usize::from(copies)
            })
            .sum()
    }

    /// Allocates them, and the state that the rows write; copies of pages must be made before the step runs. Returns
    /// false without allocating if no state is free for a branch that shares one.
    pub fn reserve(
        &mut self,
        rows: usize,
        layout: &Layout,
        pages: &mut Pages,
        states: &mut States,
        moves: &mut Vec<PageMove>,
    ) -> bool {
        let Some(state) = states.reserve(self.state) else { return false };
        self.state = state;
        let blocks = layout.blocks(self.computed + rows);
        let tail = self.tail(layout);
        for table in &mut self.tables {
            if let Some(block) = tail {
                let page = &mut table.pages[block];
                debug_assert!(!pages.is_published(*page), "a full block is never written again");
                if pages.is_shared(*page) {
                    let from = std::mem::replace(page, pages.take());
                    moves.push(PageMove::Copy { from, to: *page });
                    pages.release(from);
                }
            }
            table.pages.extend((table.pages.len()..blocks).map(|_| pages.take()));
        }
        self.rows = rows;
        true
    }

    /// The block that is partly filled, if one is: the next row writes it.
    fn tail(&self, layout: &Layout) -> Option<usize> {
        (!self.computed.is_multiple_of(layout.block_size)).then_some(self.computed / layout.block_size)
    }

    /// Marks the planned rows as computed: full blocks enter the cache, and pages that no later row attends to are
    /// released. Returns the number of rows that had not been computed before.
    pub fn advance(&mut self, layout: &Layout, pages: &mut Pages, states: &mut States) -> usize {
        self.state.iter_mut().for_each(|state| states.settle(state));
        self.restoring_steps += u64::from(self.computed < self.reached);
        let size = layout.block_size;
        let complete = self.computed / size..(self.computed + self.rows) / size;
        self.computed += std::mem::take(&mut self.rows);
        for block in complete {
            if self.keys.len() == block {
                let parent = self.keys.last().or(self.root.as_ref());
                self.keys.extend(pages.key(parent, &self.tokens[block * size..][..size]));
            }
            let Some(&key) = self.keys.get(block) else { break };
            for (group, table) in self.tables.iter().enumerate() {
                if pages.publish(group, key, table.pages[block]) {
                    self.tell_stored(block, group, size, pages);
                }
            }
        }
        for (group, table) in self.tables.iter_mut().enumerate() {
            let visible = layout.first_visible(group, self.computed).min(table.pages.len());
            for page in &mut table.pages[table.released.min(visible)..visible] {
                pages.release(std::mem::replace(page, PageId::SCRATCH));
            }
            table.released = table.released.max(visible);
        }
        let new = self.computed.saturating_sub(self.reached);
        self.reached += new;
        new
    }

    /// Block `block` has become findable in the pages of a group.
    pub fn tell_stored(&self, block: usize, group: usize, block_size: usize, pages: &mut Pages) {
        if let Some(events) = pages.events.as_mut().filter(|events| events.group == group) {
            let parent = block.checked_sub(1).map(|parent| &self.keys[parent]);
            events.stored(parent, &self.keys[block], &self.tokens[block * block_size..][..block_size]);
        }
    }

    /// Creates branch `branch` as a separate sequence with the same pages and state.
    pub fn fork(&self, branch: usize, pages: &mut Pages, states: &mut States) -> Sequence {
        self.state.iter().for_each(|&state| states.share(state));
        for table in &self.tables {
            for &page in table.held() {
                pages.share(page);
            }
        }
        Sequence {
            computed: self.computed,
            tables: self.tables.clone(),
            state: self.state,
            ..self.without_pages(branch..branch + 1)
        }
    }

    /// Leaves the branches from `branch` on to a sequence without pages, which computes the prompt's end again.
    pub fn split_off(&mut self, branch: usize) -> Sequence {
        let rest = self.without_pages(branch..self.branches.end);
        self.branches.end = branch;
        rest
    }

    /// Returns these branches without pages. Requested outputs of the prompt stay with this sequence.
    fn without_pages(&self, branches: Range<usize>) -> Sequence {
        Sequence {
            job: self.job.clone(),
            priority: self.priority,
            seniority: self.seniority,
            waits_since: self.waits_since,
            runs_since: self.runs_since,
            restoring_steps: 0,
            last_step: self.last_step,
            branches,
            tokens: self.tokens.clone(),
            guide: self.guide.as_ref().map(Guide::fork),
            thought: self.thought.clone(),
            computed: 0,
            reached: self.tokens.len(),
            tables: vec![BlockTable::default(); self.tables.len()],
            state: None,
            root: self.root,
            keys: self.keys.clone(),
            checkpoints: Vec::new(),
            newest_checkpoint: None,
            granted: 0,
            rows: 0,
            overtaken: 0,
            last_rows: (0, 0),
            ahead: false,
            scores: Vec::new(),
            scores_delivered: true,
            pool: None,
            cached_tokens: self.cached_tokens,
            host_tokens: self.host_tokens,
            disk_tokens: self.disk_tokens,
            load: Load::Untried,
            is_suspect: self.is_suspect,
            finished: false,
        }
    }

    /// Releases its state and all pages. The last blocks are released first, so that the cache evicts them first: a
    /// prefix without its end is more useful than an end without its prefix.
    pub fn release(&mut self, layout: &Layout, pages: &mut Pages, states: &mut States) {
        self.save_later(layout, pages);
        self.state.take().into_iter().for_each(|state| states.release(state));
        let blocks = self.tables.iter().map(|table| table.pages.len()).max().unwrap_or(0);
        for block in (0..blocks).rev() {
            for table in &self.tables {
                if (table.released..table.pages.len()).contains(&block) {
                    pages.release(table.pages[block]);
                }
            }
            self.touch_checkpoint(block, layout, pages);
        }
        self.load = Load::Untried;
        self.checkpoints.clear();
        self.newest_checkpoint = None;
        self.tables.iter_mut().for_each(|table| *table = BlockTable::default());
        self.computed = 0;
        self.granted = 0;
        self.rows = 0;
        self.ahead = false;
    }

    /// Returns the number of pages that it claims: its own, a fraction of shared ones, and those that its prompt still
    /// needs.
    pub fn claim(&self, layout: &Layout, pages: &Pages) -> f64 {
        let held: f64 = self.held_pages().map(|page| 1.0 / pages.references(page) as f64).sum();
        held + self.pages_to_come(0, layout) as f64
    }

    /// All pages that its block tables name.
    pub fn held_pages(&self) -> impl Iterator<Item = PageId> {
        self.tables.iter().flat_map(|table| table.held().iter().copied())
    }
}
