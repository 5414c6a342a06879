//! Memory of the allocator. glibc keeps freed memory beside blocks that are in use, which is tens of megabytes after
//! thousands of connections.

/// Limits the arenas of the allocator to one for each processor. glibc makes eight, and each keeps a megabyte or two of
/// partly used pages that no release returns.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub fn limit_arenas() {
    use std::ffi::c_int;

    /// `M_ARENA_MAX` of glibc's `malloc.h`.
    const ARENA_MAX: c_int = -8;
    unsafe extern "C" {
        fn mallopt(parameter: c_int, value: c_int) -> c_int;
    }
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    // SAFETY: it takes numbers, and may be called from any thread at any time.
    unsafe { mallopt(ARENA_MAX, c_int::try_from(processors).unwrap_or(c_int::MAX)) };
}

/// Allocators of other systems are left as they are.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub fn limit_arenas() {}

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
