//! Destination of a matmul, which several threads may write.

use std::marker::PhantomData;

use crate::simd::LANES;

/// Destination of a matmul: output `o` of row `r` is element `r * stride + o`.
#[derive(Debug)]
pub struct Destination<'a> {
    start: *mut f32,
    len: usize,
    stride: usize,
    life: PhantomData<&'a mut [f32]>,
}

// SAFETY: a `Destination` is a mutable slice of floats; threads that share one write different columns, see `from_raw`.
unsafe impl Send for Destination<'_> {}

impl<'a> Destination<'a> {
    /// Creates a destination in `out`, which has no other user.
    pub fn new(out: &'a mut [f32], stride: usize) -> Self {
        Self { start: out.as_mut_ptr(), len: out.len(), stride, life: PhantomData }
    }

    /// Creates a destination in memory that other threads write concurrently.
    ///
    /// # Safety
    /// `start` is valid for writes of `len` floats for `'a`, and while this value is used no other thread reads or
    /// writes the columns of the groups that are computed.
    pub unsafe fn from_raw(start: *mut f32, len: usize, stride: usize) -> Self {
        Self { start, len, stride, life: PhantomData }
    }

    /// Panics unless `rows` rows of `outputs` outputs fit.
    pub(super) fn check(&self, rows: usize, outputs: usize) {
        assert!(
            rows == 0 || (outputs <= self.stride && (rows - 1) * self.stride + outputs <= self.len),
            "{rows} rows of {outputs} outputs do not fit {} floats, {} a row",
            self.len,
            self.stride
        );
    }

    /// Returns the results that [`Destination::put`] wrote.
    ///
    /// # Safety
    /// As for [`Destination::put`], which has been called for this group, or another matmul has written it.
    #[inline(always)]
    pub(super) unsafe fn get(&self, row: usize, group: usize, outputs: usize) -> [f32; LANES] {
        let first = group * LANES;
        // SAFETY: as for `put`.
        unsafe {
            let from = self.start.add(row * self.stride + first);
            if first + LANES <= outputs {
                return from.cast::<[f32; LANES]>().read_unaligned();
            }
            let mut lanes = [0.0; LANES];
            std::ptr::copy_nonoverlapping(from, lanes.as_mut_ptr(), outputs - first);
            lanes
        }
    }

    /// Writes outputs `16 * group ..` of `row`, as many as exist below `outputs`.
    ///
    /// # Safety
    /// [`Destination::check`] has passed for `outputs` and more rows than `row`, and `16 * group < outputs`.
    #[inline(always)]
    pub(super) unsafe fn put(&self, row: usize, group: usize, outputs: usize, lanes: &[f32; LANES]) {
        let first = group * LANES;
        // SAFETY: `check` compared the end of the last row with the length of the memory, which the constructors'
        // callers gave us to write.
        unsafe {
            let to = self.start.add(row * self.stride + first);
            if first + LANES <= outputs {
                // Stores of a known size, where the other is a call.
                to.cast::<[f32; LANES]>().write_unaligned(*lanes);
            } else {
                std::ptr::copy_nonoverlapping(lanes.as_ptr(), to, outputs - first);
            }
        }
    }
}
