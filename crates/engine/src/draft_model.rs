//! Models that draft the answers of another one: what an engine needs of them, and their memory.

use std::sync::Arc;

use paguro_backend::{Backend, Limits, LoadError, MatrixId, MemoryPlan, Program, Runner, Weights};
use paguro_model::{Model, MtpHead};

use crate::{layout::BlockLayout, speculation::kept_rows, states::States};

/// A model that drafts the answers of another one, see [`EngineOptions::draft`](crate::EngineOptions::draft).
#[derive(Clone, Debug)]
pub struct DraftModel {
    /// The lowered model.
    pub program: Program,
    /// Its weights.
    pub weights: Weights,
    /// Most tokens that it reads at once.
    pub max_context: usize,
    /// For a head of the model, or an assistant: the matrices that it shares, by number in the head and in the model. `None` for a model
    /// of its own, whose tokens must be those of the other one.
    pub shared: Option<Vec<(MatrixId, MatrixId)>>,
}

impl DraftModel {
    /// Returns a model's head for multi-token prediction or its assistant; `max_context` is that of the model.
    pub fn head(head: &MtpHead, max_context: usize) -> Arc<Self> {
        let MtpHead { program, weights, shared } = head.clone();
        Arc::new(Self { program, weights, max_context, shared: Some(shared) })
    }

    /// Returns another model. [`Tokenizer::difference`](paguro_model::tokenizer::Tokenizer::difference) tells if it has the same
    /// tokens.
    pub fn model(model: &Model) -> Arc<Self> {
        let Model { program, weights, max_context, .. } = model;
        let (program, weights) = (program.clone(), weights.clone());
        Arc::new(Self { program, weights, max_context: *max_context, shared: None })
    }

    /// Returns its pages for each page of the model's, rounded up together with the number of the model's pages.
    fn pages(&self, pages: usize, layout: &BlockLayout) -> usize {
        // As many blocks as the model has, and one for each group that a sequence fills in part.
        pages.div_ceil(layout.groups()).saturating_mul(self.program.kv.groups.len())
    }

    /// Returns the bytes of its pages for each page of the model's.
    pub(crate) fn bytes_per_page(&self, backend: &dyn Backend, limits: &Limits, groups: usize) -> u64 {
        if self.program.shares_pages {
            return 0;
        }
        let page = backend.page_bytes(&self.program, limits.block_size, limits.kv_dtype);
        (page.saturating_mul(self.program.kv.groups.len()) as u64).div_ceil(groups.max(1) as u64)
    }

    /// Returns its limits beside a model with these.
    pub(crate) fn limits(&self, model: &Limits, layout: &BlockLayout) -> Limits {
        let states = if self.program.state.is_empty() { 0 } else { States::slots_for(model.max_sequences) };
        // A step of an assistant has a row of each sequence.
        let (pages, max_rows) = match self.program.shares_pages {
            true => (model.pages, model.max_sequences),
            false => (self.pages(model.pages - 1, layout) + 1, model.max_rows),
        };
        Limits {
            pages,
            max_rows,
            // A token, and the row behind it.
            max_outputs: 2 * model.max_sequences,
            max_context: model.max_context.min(self.max_context),
            states,
            ..*model
        }
    }

    /// Returns its memory beside a model with these limits.
    pub(crate) fn plan(&self, backend: &dyn Backend, model: &Limits, layout: &BlockLayout) -> MemoryPlan {
        let mut plan = backend.plan(&self.program, &self.weights, &self.limits(model, layout));
        if let Some(shared) = &self.shared {
            let bytes =
                shared.iter().map(|(own, _)| backend.device_layout(self.weights.matrix(*own)).bytes as u64);
            plan.weights = plan.weights.saturating_sub(bytes.sum());
            let row = self.program.given_width() * size_of::<f32>();
            let rows = kept_rows(self.program.shares_pages);
            plan.buffers = plan.buffers.saturating_add((model.max_sequences * rows * row) as u64);
        }
        plan
    }

    /// Loads it beside the model that `runner` runs.
    ///
    /// # Errors
    /// [`LoadError`]
    pub(crate) fn load(
        &self,
        backend: &dyn Backend,
        runner: &mut dyn Runner,
        limits: Limits,
    ) -> Result<Box<dyn Runner>, LoadError> {
        match &self.shared {
            Some(shared) => runner.load_head(&self.program, self.weights.clone(), shared, limits),
            None => backend.load(&self.program, self.weights.clone(), limits),
        }
    }
}
