//! Pages with several kinds of content: clearing, copies of shared pages, and copies of states.
//!
//! K and V of each layer slot are in a buffer of their own, so that an arena can be larger than a binding. If the heads
//! of K/V groups differ in shape, several smaller layer slots share a buffer. A page that held another layout or a state
//! is cleared before K and V are stored there, because kernels read whole pages and old bytes may be NaN.

use std::iter;

use paguro_backend::{PageId, PageMove, Step, StepError};

use super::{GpuRunner, page_kernels::Change};

/// Content of a page. Attention reads whole pages, so bytes of another content could be NaN as K or V.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// Zeros.
    Nothing,
    /// A part of a state.
    State,
    /// K and V, arranged as those of this K/V group.
    Group(usize),
}

impl GpuRunner {
    /// Clears pages of the step that held something else than K and V of their group until now.
    pub(super) fn clear_pages(&mut self, step: &Step<'_>) -> Result<(), StepError> {
        let Some(kernels) = &mut self.page_kernels else { return Ok(()) };
        let (groups, mut changed) = (self.of_groups.len(), Vec::new());
        for (sequence, (group, &own)) in step
            .sequences
            .iter()
            .flat_map(|sequence| iter::repeat(sequence).zip(self.of_groups.iter().enumerate()))
        {
            // Page 0 is never written.
            for &page in sequence.table(step.pages, group, groups).iter().filter(|page| page.0 > 0) {
                let content = &mut self.contents[page.0 as usize];
                if ![Content::Nothing, own].contains(content) {
                    changed.push(page);
                }
                *content = own;
            }
        }
        if changed.is_empty() {
            return Ok(());
        }
        let mut encoder = self.device.encoder();
        kernels.change(&mut encoder, &changed, Change::Clear);
        kernels.finish(&self.device);
        self.canaries.submit(&self.device, self.submitted, encoder).map(|_| ())
    }

    /// Encodes copies of pages and states in order.
    pub(super) fn encode_moves(&mut self, moves: &[PageMove]) -> Result<wgpu::CommandEncoder, StepError> {
        let size = 4 * self.page_words as u64;
        let page_bytes = size * self.model.pages.len() as u64 * 2;
        let state_bytes = self.program.state.bytes() as u64;
        let parts = state_bytes.div_ceil(page_bytes.max(1)) as usize;
        let mut encoder = self.device.encoder();
        let mut rest = moves;
        while let Some(first) = rest.first() {
            let run = self.page_kernels.as_ref().map_or(0, |kernels| kernels.run(rest)).max(1);
            let (own, later) = rest.split_at(run);
            rest = later;
            own.iter().try_for_each(|page_move| page_move.check(&self.limits, parts))?;
            match (*first, &mut self.page_kernels) {
                (PageMove::Copy { from, to }, _) if from == to => {}
                (PageMove::Copy { from: PageId(from), to: PageId(to) }, _) => {
                    for buffer in self.model.pages.iter().flatten() {
                        let at = |page: u32| u64::from(page) * size;
                        encoder.copy_buffer_to_buffer(buffer, at(from), &self.copied, 0, size);
                        encoder.copy_buffer_to_buffer(&self.copied, 0, buffer, at(to), size);
                    }
                    if let Some(&content) = self.contents.get(from as usize) {
                        self.contents[to as usize] = content;
                    }
                }
                (PageMove::SaveState { state, part, to: _ }, Some(kernels)) => {
                    let pages: Vec<_> = own.iter().filter_map(page_of_part).collect();
                    kernels.copy_state(&mut encoder, &self.model.states, (state, part), &pages, true);
                    pages.iter().for_each(|page| self.contents[page.0 as usize] = Content::State);
                }
                (PageMove::RestoreState { from: _, state, part }, Some(kernels)) => {
                    let pages: Vec<_> = own.iter().filter_map(page_of_part).collect();
                    kernels.copy_state(&mut encoder, &self.model.states, (state, part), &pages, false);
                }
                (PageMove::SaveState { .. } | PageMove::RestoreState { .. }, None) => {
                    return Err(StepError::Invalid(format!("{first:?} of a model without states")));
                }
            }
        }
        if let Some(kernels) = &mut self.page_kernels {
            kernels.finish(&self.device);
        }
        Ok(encoder)
    }
}

/// Returns the page of a part of a state.
fn page_of_part(page_move: &PageMove) -> Option<PageId> {
    match *page_move {
        PageMove::SaveState { state: _, part: _, to: page }
        | PageMove::RestoreState { from: page, part: _, state: _ } => Some(page),
        PageMove::Copy { from: _, to: _ } => None,
    }
}
