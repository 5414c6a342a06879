//! How much memory the engines had resident, without what the bandwidth probe takes for itself.

use std::fs;

/// The most that has been seen; `None` where the system does not tell.
#[derive(Clone, Copy, Debug)]
pub struct PeakMemory(Option<u64>);

impl PeakMemory {
    /// The peak of the process so far: loading is over, and no probe has run.
    pub fn new() -> Self {
        Self(field("VmHWM:"))
    }

    /// Looks again. The system's own peak would count a probe's buffer, which is gone by now; engines allocate at
    /// load and keep what they have touched.
    pub fn look(&mut self) {
        self.0 = self.0.max(field("VmRSS:"));
    }

    /// In bytes.
    pub fn bytes(self) -> Option<u64> {
        self.0
    }
}

/// A field of Linux' `/proc/self/status`, in bytes.
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
