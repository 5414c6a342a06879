//! Buffers that a team works on together.

use std::{cell::UnsafeCell, ops::Range};

use paguro_backend::LoadError;

/// A fixed buffer whose parts are written by different members of a team in one phase and read by all of them in a
/// later one. Who may touch what in which phase is decided where the phases are written down, in `forward.rs`.
pub struct Shared<T>(Box<[UnsafeCell<T>]>);

// SAFETY: the only ways in are `get` and `get_mut`, whose callers promise not to race.
unsafe impl<T: Send + Sync> Sync for Shared<T> {}

impl<T: Copy> Shared<T> {
    /// `len` times `value`, for `what`.
    ///
    /// # Errors
    /// [`LoadError::OutOfMemory`]
    pub fn new(len: usize, value: T, what: &str) -> Result<Self, LoadError> {
        let mut cells = Vec::new();
        cells.try_reserve_exact(len).map_err(|_| LoadError::OutOfMemory {
            device: "cpu".into(),
            what: what.into(),
            needed: (len as u64).saturating_mul(size_of::<T>() as u64),
        })?;
        cells.resize_with(len, || UnsafeCell::new(value));
        Ok(Self(cells.into_boxed_slice()))
    }
}

impl<T> Shared<T> {
    /// Elements.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Start of the buffer, for those who check bounds themselves.
    pub fn as_ptr(&self) -> *mut T {
        // `UnsafeCell<T>` has the layout of `T`.
        self.0.as_ptr().cast_mut().cast()
    }

    /// Elements to read.
    ///
    /// # Safety
    /// Nobody writes them while the slice lives.
    pub unsafe fn get(&self, range: Range<usize>) -> &[T] {
        let cells = &self.0[range];
        // SAFETY: same layout, bounds checked; the caller keeps writers away.
        unsafe { std::slice::from_raw_parts(cells.as_ptr().cast(), cells.len()) }
    }

    /// Elements to write.
    ///
    /// # Safety
    /// Nobody else reads or writes them while the slice lives.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn get_mut(&self, range: Range<usize>) -> &mut [T] {
        let cells = &self.0[range];
        // SAFETY: same layout, bounds checked, interior mutability; the caller keeps all others away.
        unsafe { std::slice::from_raw_parts_mut(cells.as_ptr().cast_mut().cast(), cells.len()) }
    }
}
