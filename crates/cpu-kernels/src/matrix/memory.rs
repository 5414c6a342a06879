//! Memory for packed weights.

use memmap2::MmapMut;
use paguro_backend::LoadError;

/// Page-aligned zeroed memory, in huge pages if the system provides them: weights are read from front to back many
/// times a second, and every 4 KiB page would be a TLB miss.
pub struct Memory(MmapMut);

impl Memory {
    /// Allocates `bytes` zero bytes for `what`.
    pub fn allocate(bytes: usize, what: &str) -> Result<Self, LoadError> {
        let map = MmapMut::map_anon(bytes).map_err(|_| LoadError::OutOfMemory {
            device: "cpu".into(),
            what: what.into(),
            needed: bytes as u64,
        })?;
        // The advice may fail: systems without huge pages refuse it.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        Ok(Self(map))
    }

    /// All of it.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// All of it.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}
