//! The answer of a sequence: its tokens, and the restrictions of the next one: the grammar, the limit of reasoning, the
//! minimum length.

use std::{ops::Deref, sync::Arc};

use paguro_backend::TokenMask;
use paguro_grammar::{Drafted, Guide};

use crate::{checked_request::CheckedRequest, mask_workers::MaskWorkers, thought::Thought};

/// Tokens of a prompt and its answer, by position. All of them are final: a token is appended after its step.
///
/// During a step that checks a draft, its tokens follow them. They are in no length and in no slice of the final ones.
#[derive(Clone, Debug)]
pub(crate) struct Tokens {
    ids: Vec<u32>,
    /// Number of tokens of the prompt.
    prompt: usize,
    /// Number of drafted tokens at the end.
    drafted: usize,
}

impl Tokens {
    /// Returns the tokens of a prompt, before its answer.
    pub fn new(prompt: Vec<u32>) -> Self {
        Self { prompt: prompt.len(), ids: prompt, drafted: 0 }
    }

    /// Returns the number of tokens of the prompt.
    pub fn prompt(&self) -> usize {
        self.prompt
    }

    /// Returns the number of tokens of the answer.
    pub fn generated(&self) -> usize {
        self.len() - self.prompt
    }

    /// Appends a token of the answer.
    pub fn push(&mut self, token: u32) {
        debug_assert!(self.drafted == 0, "a draft is removed before its tokens are accepted");
        self.ids.push(token);
    }

    /// Adds a draft of the tokens that follow.
    pub fn set_draft(&mut self, draft: &[u32]) {
        self.clear_draft();
        self.ids.extend_from_slice(draft);
        self.drafted = draft.len();
    }

    /// Removes the draft.
    pub fn clear_draft(&mut self) {
        self.ids.truncate(self.len());
        self.drafted = 0;
    }

    /// Returns all tokens with those of the draft.
    pub fn with_draft(&self) -> &[u32] {
        &self.ids
    }
}

impl Deref for Tokens {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        &self.ids[..self.ids.len() - self.drafted]
    }
}

/// State of the restrictions of one branch. It is kept during preemption, like the tokens.
#[derive(Debug)]
pub(crate) struct Sampler {
    /// Position in the grammar, if there is one.
    pub guide: Option<Guide>,
    /// Position in the reasoning, if that has a limit.
    pub thought: Option<Thought>,
    /// Time of masks that the tenant was not charged for yet, in rows.
    pub mask_rows: f64,
}

impl Sampler {
    /// Returns the state before the first token. The grammar and the limit of reasoning move out of the request.
    pub fn new(request: &mut CheckedRequest) -> Self {
        Self {
            guide: request.constraint.take().map(Guide::new),
            thought: request.thought.take(),
            mask_rows: 0.0,
        }
    }

    /// Returns the same state for another branch. The mask of the next token must be known.
    pub fn fork(&self) -> Self {
        Self { guide: self.guide.as_ref().map(Guide::fork), thought: self.thought.clone(), mask_rows: 0.0 }
    }

    /// Continues after a token of the answer. The grammar continues in [`Sampler::compute_mask`].
    pub fn push(&mut self, token: u32) {
        if let Some(thought) = &mut self.thought {
            thought.push(token);
        }
    }

    /// Returns the mask of the next token, which is the answer's token number `generated`.
    pub fn mask<'a>(&'a self, request: &'a CheckedRequest, generated: usize) -> Option<&'a TokenMask> {
        match &self.guide {
            Some(guide) => guide.mask(),
            None => self.allowed(request, generated).map(Arc::as_ref),
        }
    }

    /// Starts computing the grammar's mask of the next token after `new`, the last ones of the answer so far, and the masks
    /// after the tokens of `draft`, if there is a grammar.
    pub fn compute_mask(
        &mut self,
        new: Vec<u32>,
        draft: Vec<Drafted>,
        request: &Arc<CheckedRequest>,
        tokens: &Tokens,
        workers: &mut MaskWorkers,
    ) {
        let generated = tokens.generated();
        let (within, is_last) = (self.allowed(request, generated).cloned(), generated == request.max_tokens);
        if let Some(guide) = &mut self.guide
            && request.max_tokens > 0
        {
            workers.run(guide.compute(new, is_last, within, draft), request);
        }
    }

    /// Returns the first tokens of a draft that may follow, each with the mask after it without the grammar. The draft ends
    /// before a stop token. Without a grammar, it also ends before a token that is not allowed.
    pub fn restrict(&self, draft: &[u32], request: &CheckedRequest, generated: usize) -> Vec<Drafted> {
        let mut state = Self { guide: None, thought: self.thought.clone(), mask_rows: 0.0 };
        let mut restricted = Vec::new();
        for (index, &token) in draft.iter().enumerate() {
            let mask = state.allowed(request, generated + index);
            let is_allowed = self.guide.is_some() || mask.is_none_or(|mask| mask.allows(token));
            if !is_allowed || request.stop_tokens.contains(&token) {
                break;
            }
            state.push(token);
            let within = state.allowed(request, generated + index + 1).cloned();
            restricted.push(Drafted { token, within });
        }
        restricted
    }

    /// Returns true if no token can be sampled because the grammar's mask is not known yet.
    pub fn awaits_mask(&self) -> bool {
        self.guide.as_ref().is_some_and(Guide::is_computing)
    }

    /// Returns true if the mask of the token after the next one may depend on the next one.
    pub fn depends_on_next(&self) -> bool {
        self.guide.is_some() || self.thought.as_ref().is_some_and(Thought::may_close)
    }

    /// Returns the mask without the grammar: the end of reasoning at its limit, or all but the stop tokens while the
    /// answer must not end, or where they are ignored.
    fn allowed<'a>(&'a self, request: &'a CheckedRequest, generated: usize) -> Option<&'a Arc<TokenMask>> {
        let no_stop_tokens = request.no_stop_tokens.as_ref().filter(|_| generated < request.min_tokens);
        let forced = self.thought.as_ref().and_then(Thought::mask);
        forced.or(no_stop_tokens).or(request.no_model_stop_tokens.as_ref())
    }
}
