//! Memory of the allocator. glibc keeps freed memory beside blocks that are in use, which is tens of megabytes after
//! thousands of connections.

/// Limits the allocator to one arena. glibc makes eight for each processor, each with a megabyte or two in partly used
/// pages, and `malloc_trim` returns the free end of the first one alone. Threads allocate small blocks from caches of
/// their own.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub fn use_one_arena() {
    use std::ffi::c_int;

    /// `M_ARENA_MAX` of glibc's `malloc.h`.
    const ARENA_MAX: c_int = -8;
    unsafe extern "C" {
        fn mallopt(parameter: c_int, value: c_int) -> c_int;
    }
    // SAFETY: it takes numbers, and may be called from any thread at any time.
    unsafe { mallopt(ARENA_MAX, 1) };
}

/// Allocators of other systems are left as they are.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub fn use_one_arena() {}

/// Returns free memory of the allocator to the system.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub fn release() {
    unsafe extern "C" {
        fn malloc_trim(pad: usize) -> std::ffi::c_int;
    }
    // SAFETY: it takes a number, may be called from any thread at any time, and touches only memory that is free.
    unsafe { malloc_trim(0) };
}

/// Allocators of other systems release memory themselves.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub fn release() {}
