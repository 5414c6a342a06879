//! A reserve file of one mebibyte. Removing a model from a catalogue on a full disk needs some space.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
};

use crate::files::shared_builder;

/// Sizes of the file: the first one that fits. Both suffice to remove a model several times.
const SIZES: [usize; 2] = [1 << 20, 1 << 19];

#[derive(Debug)]
pub(crate) struct Reserve {
    path: PathBuf,
    /// Path of the file while it is written.
    temporary: PathBuf,
}

impl Reserve {
    pub(crate) fn new(root: &Path) -> Self {
        Self { path: root.join("reserve"), temporary: root.join("tmp") }
    }

    /// Creates the file if it is missing and there is space. Errors are ignored, because the library works without it.
    pub(crate) fn ensure(&self) {
        if !self.path.exists() {
            let _ = SIZES.iter().find(|&&size| self.make(size).is_ok());
        }
    }

    fn make(&self, size: usize) -> std::io::Result<()> {
        let mut file = shared_builder(0o666).tempfile_in(&self.temporary)?;
        // Some file systems store zeros, and all that repeats, in no space.
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let noise = (0..size / 8).flat_map(|_| {
            // xorshift64: https://doi.org/10.18637/jss.v008.i14
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()
        });
        file.write_all(&noise.collect::<Vec<u8>>())?;
        file.as_file().sync_all()?;
        file.persist(&self.path)?;
        Ok(())
    }

    /// Gives the space back; true if there was any.
    pub(crate) fn free(&self) -> bool {
        fs::remove_file(&self.path).is_ok()
    }
}
