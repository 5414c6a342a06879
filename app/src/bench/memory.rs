//! Peak resident memory of the engines, without the buffer of the bandwidth probe.

use std::fs;

/// The peak; `None` where the system does not report it.
#[derive(Clone, Copy, Debug)]
pub struct PeakMemory(Option<u64>);

impl PeakMemory {
    /// Creates the value with the current peak of the process. No probe may have run.
    pub fn new() -> Self {
        Self(field("VmHWM:"))
    }

    /// Updates the peak with the current memory. The system's own peak would include the probe's buffer, which is freed
    /// by now; engines allocate at load and keep their memory.
    pub fn look(&mut self) {
        self.0 = self.0.max(field("VmRSS:"));
    }

    /// Returns the peak in bytes.
    pub fn bytes(self) -> Option<u64> {
        self.0
    }
}

/// Reads a field of Linux' `/proc/self/status`, in bytes.
fn field(name: &str) -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kilobytes * 1024)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_touched_is_seen() {
        let mut memory = PeakMemory::new();
        let before = field("VmRSS:").unwrap();
        let touched = vec![1_u8; 64 << 20];
        memory.look();
        assert!(memory.bytes().unwrap() >= before + (60 << 20), "{before} and then {memory:?}");
        drop(touched);
    }
}
