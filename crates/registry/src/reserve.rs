//! A file that takes a mebibyte, so that a full disk can be cleaned: forgetting a model needs some space of its own.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
};

use crate::files::shared_builder;

/// Bytes of the file, or of a smaller one where these do not fit: what the catalogue writes to forget a model, several
/// times.
const SIZES: [usize; 2] = [1 << 20, 1 << 19];

#[derive(Debug)]
pub(crate) struct Reserve {
    path: PathBuf,
    /// For the file while it grows.
    temporary: PathBuf,
}

impl Reserve {
    pub(crate) fn new(root: &Path) -> Self {
        Self { path: root.join("reserve"), temporary: root.join("tmp") }
    }

    /// Makes the file if it is not there and there is room. The library works without it, so errors are no matter.
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
