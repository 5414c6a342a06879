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

/// Use of the slots of a layer whose experts are in the host's memory ([`Limits::expert_slots`](crate::Limits::expert_slots)),
/// since load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertCount {
    /// Index of the layer.
    pub layer: usize,
    /// Number of slots.
    pub slots: usize,
    /// Chosen experts that had a slot, in steps of few rows. An expert that several rows of a step choose counts once.
    pub hits: u64,
    /// Chosen experts that were copied into a slot.
    pub misses: u64,
    /// Experts that steps of many rows copied for themselves.
    pub streamed: u64,
    /// Bytes of an expert.
    pub bytes: u64,
}
