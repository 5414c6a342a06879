//! One sequence, in parts: each borrower takes the part that it needs.
//!
//! | Part | Content |
//! |-|-|
//! | [`CheckedRequest`] | what the client requested, shared by all branches |
//! | [`Tokens`] | prompt and answer, by position |
//! | [`KvState`] | computed tokens: block tables, keys of blocks, state slot, [`checkpoint`]s |
//! | [`Sampler`] | restrictions of the next token: grammar, limit of reasoning |
//! | [`PromptOutputs`] | scores and embeddings of the prompt, until they are delivered; [`outputs`] has the outputs of a step |
//! | [`PrefixState`] | tokens of the prompt that were found in the prefix cache and its tiers; [`reuse`] has the search |
//! | [`SchedState`] | priority, place in the queue, service so far |
//! | [`PlannedRows`] | rows in the planned steps |
//! | [`Drafts`] | guesses at the next tokens |
//!
//! A sequence computes the tokens from [`KvState::computed`] to the end of [`Tokens`]. After the step with the last one, a
//! token is sampled and appended. Rows of a step may have several outputs, each with its position and branch
//! ([`SequenceOutputs`]).

mod answer;
mod branches;
mod checkpoint;
mod drafts;
mod kv;
mod needs;
mod outputs;
mod pictures;
mod reuse;
mod sched;

use std::{cmp::Reverse, ops::Range, sync::Arc};

use paguro_backend::PageMove;

pub(crate) use self::{
    answer::{Sampler, Tokens},
    drafts::Drafts,
    kv::{BlockTable, KvState},
    outputs::{PromptOutputs, SequenceOutput, SequenceOutputs},
    sched::{PlannedRows, Rank, SchedState},
};
use crate::{
    checked_request::CheckedRequest,
    encoder::Encoded,
    layout::BlockLayout,
    mask_workers::MaskWorkers,
    pages::Pages,
    request::{FinishReason, Usage},
    states::States,
    tiers::Load,
};

/// A prompt with its answer; or, until the prompt is computed, all branches of a request.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub request: Arc<CheckedRequest>,
    /// Branches that this sequence represents.
    pub branches: Range<usize>,
    pub tokens: Tokens,
    pub kv: KvState,
    pub sampler: Sampler,
    pub prompt_outputs: PromptOutputs,
    pub prefix: PrefixState,
    pub sched: SchedState,
    pub planned: PlannedRows,
    pub drafts: Drafts,
    /// Rows of pictures that are not computed yet, by picture, as far as they are encoded.
    pub encoded: Vec<Option<Arc<Encoded>>>,
    /// True after the end of all its branches.
    pub finished: bool,
}

/// Tokens that were not computed because the prefix cache or its tiers had them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PrefixState {
    /// Number of cached tokens when the sequence first ran; `None` before.
    pub cached_tokens: Option<usize>,
    /// Number of cached tokens that were loaded from memory of the host.
    pub host_tokens: usize,
    /// Number of cached tokens that were loaded from the disk.
    pub disk_tokens: usize,
    /// State of the search in the other tiers since the sequence began to wait.
    pub load: Load,
}

impl Sequence {
    pub fn rank(&self) -> Rank {
        Rank {
            priority: Reverse(self.sched.priority),
            seniority: self.sched.seniority,
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
        matches!(self.prefix.load, Load::Loading(_))
    }

    /// Returns the number of tokens whose K and V are missing.
    pub fn remaining(&self) -> usize {
        self.tokens.len() - self.kv.computed
    }

    /// Returns the number of rows that can be computed now. A row that samples waits for the mask of the grammar.
    /// A row of a picture waits for the encoder.
    pub fn computable(&self) -> usize {
        let rows = self.remaining() - usize::from(self.sampler.awaits_mask());
        self.first_picture().map_or(rows, |(_, at)| rows.min(at - self.kv.computed))
    }

    /// Returns the position after the computed and the planned tokens.
    pub fn next_position(&self) -> usize {
        self.kv.computed + self.planned.rows
    }

    /// Returns the number of known tokens without planned rows.
    pub fn unplanned(&self) -> usize {
        self.tokens.len() - self.next_position()
    }

    /// Returns the number of rows that can be planned now; see [`Sequence::computable`].
    pub fn plannable(&self) -> usize {
        let rows = self.unplanned().saturating_sub(usize::from(self.sampler.awaits_mask()));
        self.first_picture().map_or(rows, |(_, at)| rows.min(at.saturating_sub(self.next_position())))
    }

    /// Returns true if the next rows to plan belong to the [prefill](Sequence::prefills).
    pub fn prefills_next(&self) -> bool {
        self.unplanned() > 1 || !self.unembedded().is_empty()
    }

    /// Returns true during the prefill, or its repetition. The last row of a prompt with a requested embedding belongs
    /// to the prefill.
    pub fn prefills(&self) -> bool {
        self.remaining() > 1 || !self.unembedded().is_empty()
    }

    pub fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: self.tokens.prompt(),
            cached_tokens: self.prefix.cached_tokens.unwrap_or(0),
            host_tokens: self.prefix.host_tokens,
            disk_tokens: self.prefix.disk_tokens,
            generated_tokens: self.tokens.generated(),
            drafted_tokens: self.drafts.drafted,
            accepted_tokens: self.drafts.accepted,
        }
    }

    /// Appends a sampled token. Returns the reason of the end if the sequence ends with it. A stop token is not part of the
    /// answer. Any other end of an answer with a grammar is known after a [computation](Sequence::compute_mask).
    pub fn push(&mut self, token: u32) -> Option<FinishReason> {
        self.tokens.push(token);
        self.sampler.push(token);
        if self.request.stop_tokens.contains(&token) {
            return Some(FinishReason::Stop(token));
        }
        let ends = self.tokens.generated() == self.request.max_tokens && self.sampler.guide.is_none();
        ends.then(|| self.request.at_max_tokens.clone())
    }

    /// Starts computing the grammar's mask of the next token after `new`, the last tokens of the answer so far, and the
    /// masks after the tokens of the next draft; see [`Sampler::compute_mask`].
    pub fn compute_mask(&mut self, new: Vec<u32>, workers: &mut MaskWorkers) {
        let draft = match self.sampler.guide {
            Some(_) => std::mem::take(&mut self.drafts.within),
            None => Vec::new(),
        };
        self.sampler.compute_mask(new, draft, &self.request, &self.tokens, workers);
    }

    /// Returns the number of pages that [`Sequence::reserve`] allocates for the granted rows.
    pub fn pages_for_granted(&self, layout: &BlockLayout, pages: &Pages) -> usize {
        let PlannedRows { granted, rows, drafted: _ } = self.planned;
        match rows {
            0 => self.kv.pages_for(granted, layout, pages),
            _ => self.kv.pages_up_to(self.next_position() + granted, layout),
        }
    }

    /// Reserves the pages and the state of the `rows` rows after the planned ones; see [`KvState::reserve`].
    pub fn reserve(
        &mut self,
        rows: usize,
        layout: &BlockLayout,
        pages: &mut Pages,
        states: &mut States,
        moves: &mut Vec<PageMove>,
    ) -> bool {
        if self.planned.rows > 0 {
            self.kv.extend(self.next_position() + rows, layout, pages);
        } else if !self.kv.reserve(rows, layout, pages, states, moves) {
            return false;
        }
        self.planned.rows += rows;
        true
    }

    /// Marks the first `rows` planned rows as computed; see [`KvState::advance`]. Returns the number of rows that had not been
    /// computed before.
    pub fn advance(
        &mut self,
        rows: usize,
        layout: &BlockLayout,
        pages: &mut Pages,
        states: &mut States,
    ) -> usize {
        self.planned.rows -= rows;
        self.planned.drafted = 0;
        let new = self.kv.advance(rows, &self.tokens, &self.request.pictures, layout, pages, states);
        self.drop_computed_pictures();
        new
    }
}
