//! Beginning and end of sequences, and branches that separate.

use std::{ops::Range, sync::Arc};

use super::{
    Drafts, KvState, PlannedRows, PrefixState, PromptOutputs, Sampler, SchedState, Sequence, Tokens,
};
use crate::{
    checked_request::CheckedRequest, layout::BlockLayout, pages::Pages, states::States, tiers::Load,
};

impl Sequence {
    /// Creates a sequence that holds no pages.
    pub fn new(mut request: CheckedRequest, prompt: Vec<u32>, layout: &BlockLayout, pages: &Pages) -> Self {
        Self {
            branches: 0..request.sampling.len(),
            kv: KvState::new(
                &prompt,
                &request.pictures,
                (&request.prefix_salt, &request.adapters),
                layout,
                pages,
            ),
            tokens: Tokens::new(prompt),
            sampler: Sampler::new(&mut request),
            prompt_outputs: PromptOutputs::new(request.embedded.is_some()),
            prefix: PrefixState::default(),
            sched: SchedState { priority: request.priority, ..SchedState::default() },
            planned: PlannedRows::default(),
            drafts: Drafts::default(),
            encoded: vec![None; request.pictures.len()],
            finished: false,
            request: Arc::new(request),
        }
    }

    /// Releases its state and all pages; see [`KvState::release`]. Blocks that are worth it are saved later.
    pub fn release(&mut self, layout: &BlockLayout, pages: &mut Pages, states: &mut States) {
        self.save_later(layout, pages);
        self.kv.release(layout, pages, states);
        self.prefix.load = Load::Untried;
        self.planned = PlannedRows::default();
        self.encoded.iter_mut().for_each(|rows| *rows = None);
        self.tokens.clear_draft();
    }

    /// Creates branch `branch` as a separate sequence with the same pages and state.
    pub fn fork(&self, branch: usize, pages: &mut Pages, states: &mut States) -> Sequence {
        let kv = self.kv.share(self.tokens.len(), pages, states);
        self.branch_with(branch..branch + 1, kv)
    }

    /// Leaves the branches from `branch` on to a sequence without pages, which computes the prompt's end again.
    pub fn split_off(&mut self, branch: usize) -> Sequence {
        let kv = self.kv.without_pages(self.tokens.len());
        let rest = self.branch_with(branch..self.branches.end, kv);
        self.branches.end = branch;
        rest
    }

    /// Returns these branches with other pages. Requested outputs of the prompt stay with this sequence.
    fn branch_with(&self, branches: Range<usize>, kv: KvState) -> Sequence {
        Sequence {
            request: self.request.clone(),
            branches,
            tokens: self.tokens.clone(),
            kv,
            sampler: self.sampler.fork(),
            prompt_outputs: PromptOutputs::delivered(),
            prefix: PrefixState { load: Load::Untried, ..self.prefix },
            sched: self.sched.fork(),
            planned: PlannedRows::default(),
            drafts: Drafts::default(),
            encoded: vec![None; self.encoded.len()],
            finished: false,
        }
    }
}
