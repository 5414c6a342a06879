//! Which kernel ran is observable: a kernel that exists but never runs is the defect this project was born from.

/// How often one kernel ran.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelCount {
    /// The kernel's name, with the format and the instruction set it was chosen for: `matmul_q4_k/avx512vnni`.
    pub name: String,
    /// Launches since load: one for each time the program reached it, whatever the number of rows or threads.
    pub launches: u64,
    /// Time spent in it since load, in nanoseconds, on the thread that leads the team; zero where the device does
    /// not measure.
    pub nanoseconds: u64,
}
