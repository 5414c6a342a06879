//! Kernel statistics, which make the selected kernels observable: an existing kernel that never runs is a defect.

/// Number of launches of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelCount {
    /// The kernel's name, with the format and the instruction set it was chosen for: `matmul_q4_k/avx512vnni`.
    pub name: String,
    /// Launches since load: one for each time the program reached it, whatever the number of rows or threads.
    pub launches: u64,
    /// Time spent in it since load, in nanoseconds, on the leading thread of the pool; zero where the device does
    /// not measure.
    pub nanoseconds: u64,
}
