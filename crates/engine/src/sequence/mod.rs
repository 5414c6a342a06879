//! One sequence: its tokens, and the block tables with the pages of their K and V.
//!
//! [`outputs`] has the outputs of its rows, [`reuse`] the blocks that it finds in the prefix cache, [`pages`] the pages that it
//! reserves and releases, and [`checkpoint`] the copies of its state.

mod checkpoint;
mod outputs;
mod pages;
mod reuse;

pub(crate) use self::outputs::{SequenceOutput, SequenceOutputs};

use std::{cmp::Reverse, ops::Range, sync::Arc};

use paguro_backend::{PageId, Score, StateUse, TokenMask};

use self::outputs::Pool;
use crate::{
    checked_request::CheckedRequest,
    constraint::{Guide, MaskWorkers},
    encoder::Encoded,
    layout::BlockLayout,
    pages::Pages,
    prefix::BlockKey,
    request::{FinishReason, Usage},
    states::States,
    thought::Thought,
    tiers::Load,
};

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
    pub request: Arc<CheckedRequest>,
    /// Priority of its request, or a higher one if it has waited long.
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
    /// Time of masks that its tenant was not charged for yet, in rows.
    pub mask_rows: f64,
    /// Position in the reasoning, if that has a limit.
    pub thought: Option<Thought>,
    /// Rows of pictures that are not computed yet, by picture, as far as they are encoded.
    pub encoded: Vec<Option<Arc<Encoded>>>,
    /// Number of tokens whose K and V are in the pages.
    pub computed: usize,
    /// The largest value that `computed` has had.
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
    /// Scores of the prompt so far; empty after delivery.
    pub scores: Vec<Score>,
    scores_delivered: bool,
    /// Embeddings so far; `None` after delivery.
    pool: Option<Pool>,
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
    /// Creates a sequence that holds no pages.
    pub fn new(mut request: CheckedRequest, prompt: Vec<u32>, layout: &BlockLayout, pages: &Pages) -> Self {
        let root = pages.root(&request.prefix_salt);
        let mut keys = Vec::new();
        for (index, block) in prompt.chunks_exact(layout.block_size).enumerate() {
            let first = index * layout.block_size;
            let pictures = request.pictures.extras(first..first + block.len());
            let Some(key) = pages.key(keys.last().or(root.as_ref()), block, &pictures) else { break };
            keys.push(key);
        }
        Self {
            priority: request.priority,
            seniority: 0,
            waits_since: 0,
            runs_since: 0,
            restoring_steps: 0,
            last_step: 0,
            branches: 0..request.sampling.len(),
            guide: request.constraint.take().map(Guide::new),
            mask_rows: 0.0,
            thought: request.thought.take(),
            pool: request.embedded.is_some().then(Default::default),
            encoded: vec![None; request.pictures.len()],
            request: Arc::new(request),
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
            request: self.request.id,
            branch: self.branches.start,
        }
    }

    /// Returns its request and first branch, which no other sequence has.
    pub fn owner(&self) -> (u64, usize) {
        (self.request.id, self.branches.start)
    }

    /// True while its blocks are loaded from another tier.
    pub fn is_loading(&self) -> bool {
        matches!(self.load, Load::Loading(_))
    }

    /// Returns the number of tokens whose K and V are missing.
    pub fn remaining(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Returns the number of rows that can be computed now. A row that samples waits for the mask of the grammar.
    /// A row of a picture waits for the encoder.
    pub fn computable(&self) -> usize {
        let rows = self.remaining() - usize::from(self.awaits_mask());
        self.first_picture().map_or(rows, |(_, at)| rows.min(at - self.computed))
    }

    /// Returns the first picture whose rows are needed and not encoded, and the position of the first of these rows.
    pub fn first_picture(&self) -> Option<(usize, usize)> {
        let pictures = &self.request.pictures;
        let mut missing = pictures.places_in(self.computed..self.tokens.len());
        let place = missing.find(|place| self.encoded[place.picture].is_none())?;
        Some((place.picture, place.rows.start.max(self.computed)))
    }

    /// Returns true if the sequence has no rows because its next one is that of a picture that is not encoded.
    pub fn awaits_picture(&self) -> bool {
        self.first_picture().is_some_and(|(_, at)| at == self.computed)
    }

    /// Lets go of the rows of pictures that are computed.
    pub fn drop_computed_pictures(&mut self) {
        if self.encoded.iter().all(Option::is_none) {
            return;
        }
        let mut needed = vec![false; self.encoded.len()];
        let places = self.request.pictures.places_in(self.computed..self.tokens.len());
        places.for_each(|place| needed[place.picture] = true);
        self.encoded.iter_mut().zip(needed).filter(|(_, needed)| !needed).for_each(|(rows, _)| *rows = None);
    }

    /// Returns the number of rows, of `rows` that may be computed and `most` at all, with which no span is cut: rows of a picture that
    /// see each other. A span that is first is complete or not there.
    pub fn uncut(&self, rows: usize, most: usize) -> usize {
        let end = self.computed + rows;
        let pictures = &self.request.pictures;
        let first = pictures.places_in(self.computed..self.computed + 1).next();
        match (first, pictures.across(end)) {
            // Also if it would take longer than a step should.
            (Some(place), _) if end < place.rows.end => {
                let all = place.rows.end - self.computed;
                if all <= most { all } else { 0 }
            }
            (_, Some(place)) => place.rows.start - self.computed,
            (_, None) => rows,
        }
    }

    /// Returns true during the prefill, or its repetition. The last row of a prompt with a requested embedding belongs
    /// to the prefill.
    pub fn prefills(&self) -> bool {
        self.remaining() > 1 || !self.unembedded().is_empty()
    }

    pub fn generated(&self) -> usize {
        self.tokens.len() - self.request.prompt_tokens
    }

    pub fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: self.request.prompt_tokens,
            cached_tokens: self.cached_tokens.unwrap_or(0),
            host_tokens: self.host_tokens,
            disk_tokens: self.disk_tokens,
            generated_tokens: self.generated(),
        }
    }

    /// Appends a sampled token. Returns the reason of the end if the sequence ends with it. A stop token is not part of the
    /// answer. Any other end of an answer with a grammar is known after a [computation](Sequence::compute_mask).
    pub fn push(&mut self, token: u32) -> Option<FinishReason> {
        self.tokens.push(token);
        if let Some(thought) = &mut self.thought {
            thought.push(token);
        }
        if self.request.stop_tokens.contains(&token) {
            return Some(FinishReason::Stop(token));
        }
        let ends = self.generated() == self.request.max_tokens && self.guide.is_none();
        ends.then(|| self.request.at_max_tokens.clone())
    }

    /// Returns the mask of the next token.
    pub fn mask(&self) -> Option<&TokenMask> {
        match &self.guide {
            Some(guide) => guide.mask(),
            None => self.allowed().map(Arc::as_ref),
        }
    }

    /// Returns the mask of the next token without the grammar: the end of reasoning at its limit.
    fn allowed(&self) -> Option<&Arc<TokenMask>> {
        self.thought.as_ref().and_then(Thought::mask).or_else(|| self.no_stop_tokens())
    }

    /// Returns the mask without stop tokens, while the answer must not end.
    fn no_stop_tokens(&self) -> Option<&Arc<TokenMask>> {
        self.request.no_stop_tokens.as_ref().filter(|_| self.generated() < self.request.min_tokens)
    }

    /// Starts computing the grammar's mask of the next token after `token`, the last one of the answer so far, if there is
    /// a grammar.
    pub fn compute_mask(&mut self, token: Option<u32>, workers: &mut MaskWorkers) {
        let (within, is_last) = (self.allowed().cloned(), self.generated() == self.request.max_tokens);
        if let Some(guide) = &mut self.guide
            && self.request.max_tokens > 0
        {
            guide.compute(token, is_last, within, &self.request, workers);
        }
    }

    /// Returns true if the sequence cannot sample because its grammar's mask is not known yet.
    pub fn awaits_mask(&self) -> bool {
        self.guide.as_ref().is_some_and(Guide::is_computing)
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
            request: self.request.clone(),
            priority: self.priority,
            seniority: self.seniority,
            waits_since: self.waits_since,
            runs_since: self.runs_since,
            restoring_steps: 0,
            last_step: self.last_step,
            branches,
            tokens: self.tokens.clone(),
            guide: self.guide.as_ref().map(Guide::fork),
            mask_rows: 0.0,
            thought: self.thought.clone(),
            encoded: vec![None; self.encoded.len()],
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
}
