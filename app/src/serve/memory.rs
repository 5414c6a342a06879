//! Memory of the allocator. glibc keeps freed memory beside blocks that are in use, which is tens of megabytes after
//! thousands of connections.

/// Sets the allocator such that little memory stays between blocks in use.
///
/// Few arenas, because glibc makes eight for each processor, each with a megabyte or two in partly used pages, and
/// `malloc_trim` returns the free end of the first one alone. Threads allocate small blocks from caches of their own; those that
/// tokenize many texts also free more than these hold, and eight of them in one arena took 1.45 s for 1,000 texts instead of 0.25.
/// Large blocks outside of the arena, because glibc otherwise raises the size of those with each that is freed, and
/// small blocks then lie between large ones.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub fn configure() {
    use std::ffi::c_int;

    /// `M_ARENA_MAX` of glibc's `malloc.h`.
    const ARENA_MAX: c_int = -8;
    /// `M_MMAP_THRESHOLD` of glibc's `malloc.h`.
    const MMAP_THRESHOLD: c_int = -3;
    unsafe extern "C" {
        fn mallopt(parameter: c_int, value: c_int) -> c_int;
    }
    let tokenizing = paguro_model::most_text_threads();
    let arenas = if tokenizing > 1 { 1 + tokenizing as c_int } else { 1 };
    for (parameter, value) in [(ARENA_MAX, arenas), (MMAP_THRESHOLD, 256 << 10)] {
        // SAFETY: it takes numbers, and may be called from any thread at any time.
        unsafe { mallopt(parameter, value) };
    }
}

/// Allocators of other systems are left as they are.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub fn configure() {}

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
