//! Kernels that change the content of pages: zeros, and parts of states on their way to pages and back.
//!
//! A page is a short run of bytes in each buffer of pages, and a state is one in each buffer of states. With copies from one to the
//! other, a state of 28 MB would be 1,750 copies. With a buffer between them, it is one copy for each buffer of states and one
//! launch for each buffer of pages.

use std::ops::Range;

use bytemuck::cast_slice;
use paguro_backend::{Limits, LoadError, PageId, PageMove, StateId};

use crate::{
    device::Device,
    emit::{Kernel, LayerState, Model, StateBuffer, wgsl},
    hidden::Hazards,
    plan::Args,
    template::Value::U,
};

/// Most bytes of a state that are copied at once.
const MOST_BYTES: usize = 64 << 20;

/// A change of the content of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    Save,
    Restore,
    Clear,
}

/// The kernels and their buffers.
pub(super) struct PageKernels {
    /// Parts of a state, `[parts, buffers, page_words]`.
    parts: wgpu::Buffer,
    /// Maximum number of parts in it.
    most: usize,
    /// Bytes of a part, which are those of a page.
    part_bytes: usize,
    /// Numbers of the pages of all changes of a submission.
    places: wgpu::Buffer,
    /// Those of the submission that is being encoded.
    numbers: Vec<u32>,
    /// For each buffer of pages, one for each [`Change`].
    kernels: Vec<[Kernel; 3]>,
    /// Workgroups for each page.
    workgroups: u32,
}

/// Parts that are copied at once, of a state of `state_bytes` bytes and pages of `page_bytes` bytes.
fn most_parts(state_bytes: usize, page_bytes: usize) -> usize {
    let page_bytes = page_bytes.max(1);
    state_bytes.div_ceil(page_bytes).min((MOST_BYTES / page_bytes).max(1))
}

/// Words of the buffers.
pub fn words(state_bytes: usize, page_bytes: usize, limits: &Limits) -> usize {
    most_parts(state_bytes, page_bytes) * page_bytes / 4 + limits.pages
}

impl PageKernels {
    /// For states of `state_bytes` bytes.
    ///
    /// # Errors
    /// Not enough memory.
    pub(super) fn new(
        device: &Device,
        model: &Model,
        state_bytes: usize,
        page_words: usize,
        limits: &Limits,
    ) -> Result<Self, LoadError> {
        let part_bytes = 4 * page_words * 2 * model.pages.len();
        let most = most_parts(state_bytes, part_bytes);
        let parts = device.buffer(most * part_bytes / 4, "parts of a state")?;
        let places = device.buffer(limits.pages, "numbers of pages")?;
        let kernel = |pages: &wgpu::Buffer, change: Change| {
            let is = |other: Change| U(u32::from(change == other));
            let constants = vec![
                ("SAVES", is(Change::Save)),
                ("RESTORES", is(Change::Restore)),
                ("PAGE_WORDS", U(page_words as u32)),
                ("BUFFERS", U(2 * model.pages.len() as u32)),
            ];
            let name = match change {
                Change::Save => "save_state",
                Change::Restore => "restore_state",
                Change::Clear => "clear_pages",
            };
            let buffers = [("places", &places), ("parts", &parts), ("pages", pages)];
            let files = wgsl!("args", "change_pages");
            let pipeline = device.pipeline(name, files, &constants, &Hazards::DECLARED);
            Kernel::new(device, pipeline, &constants, &buffers, &Hazards::DECLARED)
        };
        let all = |pages| [Change::Save, Change::Restore, Change::Clear].map(|change| kernel(pages, change));
        let kernels = model.pages.iter().flatten().map(all).collect();
        let workgroups = page_words.div_ceil(256) as u32;
        Ok(Self { parts, most, part_bytes, places, numbers: Vec::new(), kernels, workgroups })
    }

    /// Uploads the numbers of the pages of a submission, which is complete.
    pub(super) fn finish(&mut self, device: &Device) {
        if !self.numbers.is_empty() {
            device.queue.write_buffer(&self.places, 0, cast_slice(&self.numbers));
            self.numbers.clear();
        }
    }

    /// Returns the number of moves at the beginning of `moves` that copy consecutive parts of one state in one direction.
    pub(super) fn run(&self, moves: &[PageMove]) -> usize {
        let part = |page_move: &PageMove| match *page_move {
            PageMove::SaveState { state, part, to: _ } => Some((true, state, part)),
            PageMove::RestoreState { from: _, part, state } => Some((false, state, part)),
            PageMove::Copy { from: _, to: _ } => None,
        };
        let Some((saves, state, first)) = moves.first().and_then(part) else { return 0 };
        let follows =
            |(index, page_move): &(usize, &PageMove)| part(page_move) == Some((saves, state, first + index));
        moves.iter().enumerate().take(self.most).take_while(follows).count()
    }

    /// Encodes copies of the parts of a state from `first_part` on, to pages or from them.
    pub(super) fn copy_state(
        &mut self,
        encoder: &mut wgpu::CommandEncoder,
        layers: &[LayerState],
        (state, first_part): (StateId, usize),
        pages: &[PageId],
        saves: bool,
    ) {
        let begin = (first_part * self.part_bytes) as u64;
        let bytes = begin..begin + (pages.len() * self.part_bytes) as u64;
        if saves {
            for (buffer, from, to, len) in pieces(layers, state, &bytes) {
                encoder.copy_buffer_to_buffer(buffer, from, &self.parts, to, len);
            }
            self.change(encoder, pages, Change::Save);
        } else {
            self.change(encoder, pages, Change::Restore);
            for (buffer, to, from, len) in pieces(layers, state, &bytes) {
                encoder.copy_buffer_to_buffer(&self.parts, from, buffer, to, len);
            }
        }
    }

    /// Encodes a change of pages. One submission has at most as many pages as there are.
    pub(super) fn change(&mut self, encoder: &mut wgpu::CommandEncoder, pages: &[PageId], change: Change) {
        let items = self.numbers.len() as u32;
        self.numbers.extend(pages.iter().map(|page| page.0));
        let mut pass = encoder.begin_compute_pass(&Default::default());
        for (index, kernels) in self.kernels.iter().enumerate() {
            let args = Args { items, first: index as u32, ..Args::default() };
            kernels[change as usize].encode(&mut pass, &args, [self.workgroups, pages.len() as u32]);
        }
    }
}

/// Returns the runs of a range of a state's bytes: a buffer of states, the place in it, the place in the range, and the length.
fn pieces<'a>(
    layers: &'a [LayerState],
    state: StateId,
    range: &'a Range<u64>,
) -> impl Iterator<Item = (&'a wgpu::Buffer, u64, u64, u64)> {
    let mut end = 0;
    layers.iter().flat_map(LayerState::buffers).filter_map(move |StateBuffer { buffer, bytes }| {
        let first = end;
        end += bytes;
        let (from, to) = (range.start.max(first), range.end.min(end));
        let at = u64::from(state.0) * bytes + from.saturating_sub(first);
        (from < to).then(|| (buffer, at, from - range.start, to - from))
    })
}
