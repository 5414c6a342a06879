//! Release of freed memory to the system. glibc keeps freed memory below blocks that are in use, which is tens of
//! megabytes after thousands of connections.

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
