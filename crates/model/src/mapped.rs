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
        // Opening a pipe would wait for somebody who writes to it.
        if !std::fs::metadata(path)?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
        }
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

#[cfg(test)]
mod tests {
    use paguro_backend::Bytes;

    use super::*;

    #[test]
    fn discarded_bytes_are_read_again() {
        let bytes: Vec<u8> = (0..300_000u32).map(|i| (i ^ (i >> 8)) as u8).collect();
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), &bytes).unwrap();
        let owner = MappedFile::open(file.path()).unwrap();
        for range in [0..300_000, 1..299_999, 65_535..131_073, 70_000..71_000, 5..5] {
            let part = Bytes::new(owner.clone(), range.clone());
            assert_eq!(part.as_slice(), &bytes[range.clone()]);
            part.discard();
            assert_eq!(part.as_slice(), &bytes[range]);
            assert_eq!(owner.bytes(), bytes);
        }
    }

    /// The memory is given back at once: backends that repack weights need not have room for both.
    #[cfg(target_os = "linux")]
    #[test]
    fn discarded_bytes_take_no_memory() {
        /// Resident bytes of this mapping, by its entry in `/proc/self/smaps`.
        fn resident(address: usize) -> usize {
            let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
            let mut lines = smaps.lines().skip_while(|line| !line.starts_with(&format!("{address:x}-")));
            let rss = lines.find_map(|line| line.strip_prefix("Rss:")).expect("the mapping");
            rss.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), vec![1; 8 << 20]).unwrap();
        let owner = MappedFile::open(file.path()).unwrap();
        let address = owner.bytes().as_ptr() as usize;
        assert_eq!(owner.bytes().iter().map(|&byte| usize::from(byte)).sum::<usize>(), 8 << 20);
        assert!(resident(address) >= 7 << 20, "{}", resident(address));
        owner.discard(100..(8 << 20) - 100);
        assert!(resident(address) <= 1 << 20, "{}", resident(address));
    }
}
