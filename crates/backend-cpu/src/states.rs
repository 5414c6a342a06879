//! Slots for the states of sequences: memory layout of each layer's state.

use std::ops::Range;

use paguro_backend::{DeltaShape, LoadError, STATE_CHUNK, StateId, StateLayout, StateShape};
use paguro_cpu_kernels::simd::LANES;

use crate::buffers::Shared;

/// Offsets of the parts of a layer's state, in floats from the beginning of the slot.
#[derive(Clone, Copy, Debug)]
pub struct LayerPlace {
    /// Inputs of the convolution, `[rows, channels]`: position `p` is in row `p % rows`.
    inputs: usize,
    rows: usize,
    channels: usize,
    /// Matrices of the delta rule, `[value_heads, blocks, key_dim, LANES]`: 16 columns are a block.
    matrices: usize,
    /// Updates of the rows of the chunk, `[value_heads, blocks, STATE_CHUNK, LANES]`.
    updates: usize,
    /// Keys of the rows of the chunk, `[STATE_CHUNK, key_heads * key_dim]`.
    keys: usize,
    /// Summed decays of the rows of the chunk, `[value_heads, STATE_CHUNK]`.
    decays: usize,
    delta: DeltaShape,
}

/// Returns the number of blocks of 16 columns of a value head.
pub fn blocks(shape: &DeltaShape) -> usize {
    shape.value_dim.div_ceil(LANES)
}

const NO_DELTA: DeltaShape = DeltaShape { key_heads: 0, value_heads: 0, key_dim: 0, value_dim: 0 };

impl LayerPlace {
    /// Returns the offsets of a layer whose state begins at `start`, and its end.
    fn new(shape: &StateShape, start: usize) -> (Self, usize) {
        let StateShape { rows, channels, delta } = *shape;
        let delta = delta.unwrap_or(NO_DELTA);
        let columns = delta.value_heads * blocks(&delta) * LANES;
        // Tiles begin at whole vectors.
        let matrices = start.next_multiple_of(LANES);
        let updates = matrices + columns * delta.key_dim;
        let keys = updates + columns * STATE_CHUNK;
        let decays = keys + STATE_CHUNK * delta.key_width();
        let inputs = decays + STATE_CHUNK * delta.value_heads;
        let end = inputs + rows * channels;
        (Self { inputs, rows, channels, matrices, updates, keys, decays, delta }, end)
    }

    /// Returns the number of stored inputs of the convolution.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the number of elements of each.
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// Returns the input of the convolution at a position.
    pub fn input(&self, position: usize) -> Range<usize> {
        let start = self.inputs + position % self.rows * self.channels;
        start..start + self.channels
    }

    /// Matrices of some blocks of a value head.
    pub fn matrices(&self, head: usize, columns: &Range<usize>) -> Range<usize> {
        self.tiles(self.matrices, self.delta.key_dim, head, columns)
    }

    /// Updates of some blocks of a value head.
    pub fn updates(&self, head: usize, columns: &Range<usize>) -> Range<usize> {
        self.tiles(self.updates, STATE_CHUNK, head, columns)
    }

    fn tiles(&self, start: usize, rows: usize, head: usize, columns: &Range<usize>) -> Range<usize> {
        let tile = |block: usize| start + (head * blocks(&self.delta) + block) * rows * LANES;
        tile(columns.start)..tile(columns.end)
    }

    /// Keys of a row of the chunk.
    pub fn keys(&self, row: usize) -> Range<usize> {
        let start = self.keys + row * self.delta.key_width();
        start..start + self.delta.key_width()
    }

    /// Decays of the first rows of the chunk for a value head.
    pub fn decays(&self, head: usize, rows: Range<usize>) -> Range<usize> {
        let start = self.decays + head * STATE_CHUNK;
        start + rows.start..start + rows.end
    }
}

/// All slots.
pub struct States {
    numbers: Shared<f32>,
    slot: usize,
    layers: Vec<LayerPlace>,
}

impl States {
    /// # Errors
    /// [`LoadError::OutOfMemory`]
    pub fn new(layout: &StateLayout, slots: usize) -> Result<Self, LoadError> {
        let (layers, slot) = places(layout);
        let numbers = Shared::new(slot.saturating_mul(slots), "the states of sequences")?;
        Ok(Self { numbers, slot, layers })
    }

    /// Returns the number of bytes of a slot.
    pub fn slot_bytes(layout: &StateLayout) -> usize {
        places(layout).1 * size_of::<f32>()
    }

    /// Fills all slots with large finite noise, so that reads of unwritten data are detected.
    pub fn poison(&mut self) {
        let mut state = 0x2545_f491_4f6c_dd1d_u64;
        // SAFETY: nobody else has the states.
        for number in unsafe { self.numbers.get_mut(0..self.numbers.len()) } {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let sign = if state >> 63 == 0 { 1.0 } else { -1.0 };
            *number = sign * (20_000.0 + (state >> 50) as f32);
        }
    }

    /// Returns the number of bytes of a slot of these states.
    pub fn bytes_of_slot(&self) -> usize {
        self.slot * size_of::<f32>()
    }

    /// Returns all bytes of a slot.
    pub fn bytes(&mut self, slot: StateId) -> &[u8] {
        self.bytes_mut(slot)
    }

    /// Returns all bytes of a slot, to write.
    pub fn bytes_mut(&mut self, slot: StateId) -> &mut [u8] {
        let range = self.range(slot, 0..self.slot);
        // SAFETY: nobody else has the states.
        let numbers = unsafe { self.numbers.get_mut(range) };
        // SAFETY: these are the bytes of the numbers, borrowed like them, and any bytes are numbers.
        unsafe { std::slice::from_raw_parts_mut(numbers.as_mut_ptr().cast(), size_of_val(numbers)) }
    }

    /// Returns the offsets of a layer's state.
    pub fn place(&self, layer: usize) -> &LayerPlace {
        &self.layers[layer]
    }

    fn range(&self, StateId(slot): StateId, part: Range<usize>) -> Range<usize> {
        assert!(part.end <= self.slot, "{part:?} of a state of {}", self.slot);
        let start = slot as usize * self.slot;
        start + part.start..start + part.end
    }

    /// Returns a part of a slot.
    ///
    /// # Safety
    /// Nobody writes it while the slice lives.
    pub unsafe fn get(&self, slot: StateId, part: Range<usize>) -> &[f32] {
        // SAFETY: the caller keeps writers away.
        unsafe { self.numbers.get(self.range(slot, part)) }
    }

    /// Returns a part of a slot, to write.
    ///
    /// # Safety
    /// Nobody else reads or writes it while the slice lives.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn get_mut(&self, slot: StateId, part: Range<usize>) -> &mut [f32] {
        // SAFETY: the caller keeps all others away.
        unsafe { self.numbers.get_mut(self.range(slot, part)) }
    }
}

/// Places of all layers, and floats of a slot: whole cache lines.
fn places(layout: &StateLayout) -> (Vec<LayerPlace>, usize) {
    let mut end = 0;
    let layers = layout.layers.iter().map(|shape| {
        let (place, next) = LayerPlace::new(shape, end);
        end = next;
        place
    });
    let layers = layers.collect();
    (layers, end.next_multiple_of(LANES))
}
