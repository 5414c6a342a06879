//! Pages with several kinds of content: clearing, copies of shared pages, and copies of states.

use std::iter;

use paguro_backend::{PageId, PageMove, StateId, Step, StepError};

use super::GpuRunner;
use crate::lower::{LayerState, StateBuffer};

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

/// A run of bytes in a buffer of states, and its place in a buffer of pages.
struct Piece<'a> {
    state: &'a wgpu::Buffer,
    state_at: u64,
    page: &'a wgpu::Buffer,
    page_at: u64,
    bytes: u64,
}

impl GpuRunner {
    /// Clears pages of the step that held something else than K and V of their group until now.
    pub(super) fn clear_pages(&mut self, step: &Step<'_>) -> Result<(), StepError> {
        if self.contents.is_empty() {
            return Ok(());
        }
        let size = 4 * self.page_words as u64;
        let (groups, mut encoder) = (self.of_groups.len(), None);
        for (sequence, (group, &own)) in step
            .sequences
            .iter()
            .flat_map(|sequence| iter::repeat(sequence).zip(self.of_groups.iter().enumerate()))
        {
            // Page 0 is never written.
            for &PageId(page) in sequence.table(step.pages, group, groups).iter().filter(|page| page.0 > 0) {
                let content = &mut self.contents[page as usize];
                if ![Content::Nothing, own].contains(content) {
                    let encoder = encoder.get_or_insert_with(|| self.device.encoder());
                    for buffer in self.model.pages.iter().flatten() {
                        encoder.clear_buffer(buffer, u64::from(page) * size, Some(size));
                    }
                }
                *content = own;
            }
        }
        match encoder {
            Some(encoder) => self.canaries.submit(&self.device, self.submitted, encoder).map(|_| ()),
            None => Ok(()),
        }
    }

    /// Returns the places of a part of a state: in buffers of states, and in a page. The buffers of a state, one after the other, are
    /// cut into parts as large as a page.
    fn pieces(&self, state: StateId, part: usize, page: PageId) -> Vec<Piece<'_>> {
        let size = 4 * self.page_words as u64;
        let page_bytes = size * self.model.pages.len() as u64 * 2;
        let (begin, mut first) = (part as u64 * page_bytes, 0);
        let mut pieces = Vec::new();
        for StateBuffer { buffer, bytes: own } in self.model.states.iter().flat_map(LayerState::buffers) {
            let (mut at, end) = (first.max(begin), (first + own).min(begin + page_bytes));
            while at < end {
                let (index, within) = ((at - begin) / size, (at - begin) % size);
                let bytes = (end - at).min(size - within);
                pieces.push(Piece {
                    state: buffer,
                    state_at: u64::from(state.0) * own + (at - first),
                    page: &self.model.pages[index as usize / 2][index as usize % 2],
                    page_at: u64::from(page.0) * size + within,
                    bytes,
                });
                at += bytes;
            }
            first += own;
        }
        pieces
    }

    /// Encodes copies of pages and states in order.
    pub(super) fn encode_moves(&mut self, moves: &[PageMove]) -> Result<wgpu::CommandEncoder, StepError> {
        let size = 4 * self.page_words as u64;
        let page_bytes = size * self.model.pages.len() as u64 * 2;
        let state_bytes = self.program.state.bytes() as u64;
        let parts = state_bytes.div_ceil(page_bytes.max(1)) as usize;
        let mut encoder = self.device.encoder();
        for page_move in moves {
            page_move.check(&self.limits, parts)?;
            match *page_move {
                PageMove::Copy { from, to } if from == to => {}
                PageMove::Copy { from: PageId(from), to: PageId(to) } => {
                    for buffer in self.model.pages.iter().flatten() {
                        let at = |page: u32| u64::from(page) * size;
                        encoder.copy_buffer_to_buffer(buffer, at(from), &self.copied, 0, size);
                        encoder.copy_buffer_to_buffer(&self.copied, 0, buffer, at(to), size);
                    }
                    if let Some(&content) = self.contents.get(from as usize) {
                        self.contents[to as usize] = content;
                    }
                }
                PageMove::SaveState { state, part, to } => {
                    for piece in self.pieces(state, part, to) {
                        let Piece { state, state_at, page, page_at, bytes } = piece;
                        encoder.copy_buffer_to_buffer(state, state_at, page, page_at, bytes);
                    }
                    self.contents[to.0 as usize] = Content::State;
                }
                PageMove::RestoreState { from, part, state } => {
                    for piece in self.pieces(state, part, from) {
                        let Piece { state, state_at, page, page_at, bytes } = piece;
                        encoder.copy_buffer_to_buffer(page, page_at, state, state_at, bytes);
                    }
                }
                _ => return Err(StepError::Invalid(format!("no such move here: {page_move:?}"))),
            }
        }
        Ok(encoder)
    }
}
