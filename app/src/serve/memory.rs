//! Memory that nobody uses any more goes back to the system. glibc keeps what was freed below something that is still in
//! use: after thousands of connections that is tens of megabytes, until somebody asks.

/// Gives back what the allocator keeps and nobody uses.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub fn release() {
    unsafe extern "C" {
        fn malloc_trim(pad: usize) -> std::ffi::c_int;
    }
    // SAFETY: it takes a number, may be called from any thread at any time, and touches only memory that is free.
    unsafe { malloc_trim(0) };
}

/// Other systems' allocators do it of themselves.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub fn release() {}
