//! A file mapped into memory.

use std::{fs::File, io, ops::Range, path::Path, sync::Arc};

use memmap2::Mmap;
use paguro_backend::ByteOwner;

/// A read-only mapping of a whole file.
pub(crate) struct MappedFile {
    map: Mmap,
}

impl MappedFile {
    /// Maps the file. Nothing is read yet.
    pub(crate) fn open(path: &Path) -> io::Result<Arc<dyn ByteOwner>> {
        let file = File::open(path)?;
        if file.metadata()?.len() == 0 {
            // Mapping nothing is an error on some systems; an empty file is a truncated one for every reader.
            return Ok(Arc::new(Vec::new()));
        }
        // SAFETY: the mapping is read-only and private to this type. What cannot be ruled out is another process
        // that changes or truncates the file meanwhile; model files are written once and replaced by renaming, and
        // every reader of mapped weights relies on that.
        let map = unsafe { Mmap::map(&file)? };
        Ok(Arc::new(Self { map }))
    }
}

impl ByteOwner for MappedFile {
    fn bytes(&self) -> &[u8] {
        &self.map
    }

    #[cfg(unix)]
    fn discard(&self, range: Range<usize>) {
        // Only pages that lie wholly inside: their neighbours may still be in use. 64 KiB is a multiple of every
        // page size of the supported systems, and the mapping itself begins at a page.
        const PAGE: usize = 64 << 10;
        let (start, end) = (range.start.next_multiple_of(PAGE), range.end.min(self.map.len()) / PAGE * PAGE);
        if start >= end {
            return;
        }
        // SAFETY: the range is inside the mapping. It is a shared read-only mapping of a file, so the bytes stay
        // the same for whoever still borrows them: a later access reads them from the file again.
        let advised = unsafe {
            self.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, end - start)
        };
        // It is advice: where the system declines, the pages stay in memory and nothing else changes.
        let _ = advised;
    }
}
