//! Properties of a device that the lowering of programs depends on. The passes of `lower` know nothing else of a device.

/// A device, as the passes see it.
#[derive(Clone, Debug)]
pub struct Target {
    /// Its name, for people.
    pub name: String,
    /// True for a software driver.
    pub is_software: bool,
    /// True if kernels are compiled for inspection only.
    pub as_hardware: bool,
    /// True if cooperative matrices are emulated.
    pub emulated: bool,
    /// Side of the cooperative matrices that it multiplies, of halves with sums in single precision, if it has them and is to.
    pub cooperative: Option<u32>,
    /// Threads of the smallest subgroup that a kernel may run in.
    pub subgroup: u32,
    /// Threads of the largest workgroups that kernels are compiled with.
    pub most_threads: u32,
    /// Threads of the largest workgroups that the device runs.
    pub workgroup_threads: u32,
    /// Bytes of workgroup memory.
    pub workgroup_memory: u32,
    /// Workgroups of a launch in one direction.
    pub workgroups: u32,
    /// Maximum bytes of a binding.
    pub binding_limit: u64,
    /// True if kernels can read the host's memory, and the device has memory of its own.
    pub has_host_memory: bool,
    /// Number of processors that run workgroups, at least an estimate.
    pub processors: usize,
    /// True if launches may use handoff without barriers.
    pub handoff: bool,
    /// True if kernels are timed.
    pub timed: bool,
}

impl Target {
    /// Returns the bytes of workgroup memory that kernels with cooperative matrices may use.
    pub fn memory_beside_matrices(&self) -> u32 {
        match self.emulated {
            true => self.workgroup_memory.saturating_sub(crate::emulate::SHARED_BYTES),
            false => self.workgroup_memory,
        }
    }

    /// Returns the rows of a step with which matmuls occupy all processors several times over. Their widest results fit into a binding.
    pub fn step_rows(&self) -> usize {
        let rows = match self.is_software {
            true => 512,
            false => (64 * self.processors).next_power_of_two().clamp(1024, 8192),
        };
        rows.min((self.binding_limit >> 17) as usize)
    }

    /// Returns true if activations have copies in half precision.
    pub fn has_halves(&self) -> bool {
        self.cooperative.is_some() || self.as_hardware
    }
}
