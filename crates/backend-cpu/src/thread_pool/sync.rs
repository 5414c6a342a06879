//! Types that threads share: of the standard library, or of loom, which runs a test with every order of accesses.

#[cfg(loom)]
pub use loom::{
    cell::UnsafeCell,
    sync::{
        Arc, Condvar, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
};
#[cfg(not(loom))]
pub use std::{
    sync::{
        Arc, Condvar, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
};

/// A cell with the interface of loom's, which checks that accesses do not overlap.
#[cfg(not(loom))]
#[derive(Debug)]
pub struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    /// Returns a cell with this value.
    pub fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    /// Calls `access` with a pointer to read.
    pub fn with<R>(&self, access: impl FnOnce(*const T) -> R) -> R {
        access(self.0.get())
    }

    /// Calls `access` with a pointer to write.
    pub fn with_mut<R>(&self, access: impl FnOnce(*mut T) -> R) -> R {
        access(self.0.get())
    }
}

/// Orders a sequentially consistent write before the next sequentially consistent read, as the language does. Loom takes such accesses
/// for acquiring and releasing ones only, so in a model this is a fence.
#[inline]
pub fn sequential() {
    #[cfg(loom)]
    loom::sync::atomic::fence(Ordering::SeqCst);
}
