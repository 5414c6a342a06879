//! Drafts of a sequence: guesses at its next tokens, prepared after each step that has given tokens.

use std::ops::Range;

use paguro_backend::TokenMask;
use paguro_grammar::{Drafted, Guide};

use super::{Sampler, Sequence};
use crate::speculation::{Acceptance, Credit, Draft, HiddenRows, Speculator};

/// The drafter of a sequence, and its next draft.
#[derive(Debug, Default)]
pub(crate) struct Drafts {
    /// Reads the tokens. `None` before the sequence first runs, while it waits, and without drafts.
    pub speculator: Option<Speculator>,
    /// Guesses after the last token.
    pub next: Draft,
    /// Restriction of the mask after each of them. With a grammar, the computation of masks has them.
    pub within: Vec<Drafted>,
    /// Drafted tokens that were checked so far.
    pub drafted: usize,
    /// Drafted tokens that were accepted so far.
    pub accepted: usize,
    /// Time that drafts may cost.
    pub credit: Credit,
    /// Tokens of the answer whose time is counted in the credit.
    pub counted: usize,
    /// True if the credit has the part of the prompt's time.
    pub has_credit: bool,
    /// Rows that a head continues; `None` without a head.
    pub rows: Option<HiddenRows>,
}

impl Drafts {
    /// Returns the mask after the guess number `index`, which [`Drafts::length`] includes.
    pub fn mask<'a>(&'a self, index: usize, sampler: &'a Sampler) -> Option<&'a TokenMask> {
        match &sampler.guide {
            Some(guide) => guide.masks_ahead().get(index),
            None => self.within[index].within.as_deref(),
        }
    }

    /// Returns the number of guesses whose masks are known.
    pub fn length(&self, sampler: &Sampler) -> usize {
        let masks = sampler.guide.as_ref().map(Guide::masks_ahead);
        self.next.tokens.len().min(masks.map_or(usize::MAX, <[_]>::len))
    }

    /// Forgets the next draft and the drafter, which reads the tokens again later.
    pub fn release(&mut self) {
        self.speculator = None;
        self.rows = None;
        self.next = Draft::default();
        self.within.clear();
    }
}

impl Sequence {
    /// Returns true if its answer may be drafted.
    pub fn may_draft(&self) -> bool {
        self.request.drafts.most > 0
            && self.request.max_tokens > 1
            && (self.branches.len() == 1 || self.request.sampling.len() == 1)
    }

    /// Reads at most `most` tokens that were not read. Returns their number.
    pub fn read_for_drafts(&mut self, most: usize, all: &mut Acceptance) -> usize {
        let Some(speculator) = &mut self.drafts.speculator else { return 0 };
        speculator.read(&self.tokens, self.tokens.prompt(), most, all)
    }

    /// Guesses the tokens after the last one.
    pub fn prepare_draft(&mut self, all: &Acceptance) {
        let most = self.most_drafted();
        let (drafts, options) = (&self.drafts, &self.request.drafts);
        let draft = match &drafts.speculator {
            Some(speculator) => {
                speculator.draft(&self.tokens, most, options.least_chance, options.eager, all)
            }
            None => Draft::default(),
        };
        self.set_draft(draft);
    }

    /// Returns the most tokens of a draft.
    pub fn most_drafted(&self) -> usize {
        // The step samples one token more than the draft has.
        let room = self.request.max_tokens.saturating_sub(self.tokens.generated() + 1);
        self.request.drafts.most.min(room)
    }

    /// Returns the positions among the next `rows` whose rows a head may continue: of a prompt, the last ones.
    pub fn hidden_in(&self, rows: usize) -> Range<usize> {
        let end = self.kv.computed + rows;
        match &self.drafts.rows {
            Some(rows) => end.min(self.kv.computed.max(self.tokens.len().saturating_sub(rows.kept())))..end,
            None => 0..0,
        }
    }

    /// Sets the guesses after the last token, as far as they may follow.
    pub fn set_draft(&mut self, draft: Draft) {
        let Self { request, tokens, sampler, drafts, .. } = self;
        let options = &request.drafts;
        drafts.next = draft;
        drafts.within = sampler.restrict(&drafts.next.tokens, request, tokens.generated());
        drafts.next.truncate(drafts.within.len());
        if drafts.next.tokens.len() < options.least {
            drafts.next.truncate(0);
            drafts.within.clear();
        }
    }
}
