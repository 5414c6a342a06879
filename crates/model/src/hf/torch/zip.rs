//! Zip archives whose entries are not compressed.

use std::collections::HashMap;

use paguro_backend::ByteSource;

/// Maximum bytes of a directory: 50,000 entries.
const MAX_DIRECTORY: u64 = 4 << 20;

const END: [u8; 4] = *b"PK\x05\x06";
const END_64: [u8; 4] = *b"PK\x06\x06";
const LOCATOR_64: [u8; 4] = *b"PK\x06\x07";
const ENTRY: [u8; 4] = *b"PK\x01\x02";
const LOCAL: [u8; 4] = *b"PK\x03\x04";

/// Bytes of the fixed parts of these records.
const END_LEN: u64 = 22;
const END_64_LEN: usize = 56;
const LOCATOR_64_LEN: u64 = 20;
const ENTRY_LEN: usize = 46;
const LOCAL_LEN: usize = 30;

/// The number of the extra field with sizes of 64 bits.
const EXTRA_64: u16 = 1;

/// An archive, whose directory has been read.
pub(super) struct Archive<'a> {
    source: &'a dyn ByteSource,
    entries: HashMap<String, Entry>,
}

/// An entry of the directory.
#[derive(Clone, Copy)]
struct Entry {
    /// Offset of its local header.
    header: u64,
    /// Bytes of its content.
    len: u64,
}

/// The content of an entry: bytes of the file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Data {
    pub(super) offset: u64,
    pub(super) len: u64,
}

impl<'a> Archive<'a> {
    /// Reads the directory, which stands at the end of the file.
    pub(super) fn open(source: &'a dyn ByteSource) -> Result<Self, String> {
        let size = source.size();
        let Some(end_at) = size.checked_sub(END_LEN) else { return Err(no_archive(source)) };
        let end = read(source, end_at, END_LEN as usize)?;
        if !end.starts_with(&END) {
            return Err(no_archive(source));
        }
        let mut record = Fields(&end[4..]);
        let disks = [record.u16()?, record.u16()?];
        let counts = [record.u16()?, record.u16()?];
        let (mut len, mut offset) = (u64::from(record.u32()?), u64::from(record.u32()?));
        let mut count = u64::from(counts[1]);
        let locator = match end_at.checked_sub(LOCATOR_64_LEN) {
            Some(at) => read(source, at, LOCATOR_64_LEN as usize)?,
            None => Vec::new(),
        };
        if locator.starts_with(&LOCATOR_64) {
            let at = Fields(&locator[8..]).u64()?;
            let record = read(source, at, END_64_LEN)?;
            if !record.starts_with(&END_64) {
                return Err(damaged("its locator names no directory"));
            }
            let mut record = Fields(&record[32..]);
            (count, len, offset) = (record.u64()?, record.u64()?, record.u64()?);
        } else if disks != [0, 0] || counts[0] != counts[1] {
            return Err("it is one part of a divided zip archive".to_owned());
        }
        if offset.checked_add(len).is_none_or(|end| end > size) {
            return Err(damaged("its directory is outside of the file"));
        }
        if len > MAX_DIRECTORY {
            return Err(format!(
                "its directory has {len} bytes, but that of a model has at most {MAX_DIRECTORY}"
            ));
        }
        let directory = read(source, offset, len as usize)?;
        let mut entries = HashMap::new();
        let mut rest = Fields(&directory);
        while !rest.0.is_empty() {
            let (name, entry) = rest.entry()?;
            if entries.contains_key(&name) {
                return Err(damaged(&format!("it has two entries `{name}`")));
            }
            entries.insert(name, entry);
        }
        if entries.len() as u64 != count {
            return Err(damaged(&format!("its directory has {} entries, not {count}", entries.len())));
        }
        Ok(Self { source, entries })
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.entries.contains_key(name)
    }

    /// Returns the position of an entry's content.
    pub(super) fn data(&self, name: &str) -> Result<Data, String> {
        let Some(&Entry { header, len }) = self.entries.get(name) else {
            return Err(format!("the archive has no entry `{name}`"));
        };
        let bad = || damaged(&format!("entry `{name}` is not where the directory says"));
        let local = read(self.source, header, LOCAL_LEN).map_err(|_| bad())?;
        if !local.starts_with(&LOCAL) {
            return Err(bad());
        }
        let mut lengths = Fields(&local[26..]);
        let (name_len, extra_len) = (lengths.u16()?, lengths.u16()?);
        // `header` is inside of the file, so this does not overflow.
        let offset = header + LOCAL_LEN as u64 + u64::from(name_len) + u64::from(extra_len);
        match offset.checked_add(len) {
            Some(end) if end <= self.source.size() => Ok(Data { offset, len }),
            _ => Err(bad()),
        }
    }

    /// Returns the content of an entry of at most `most` bytes.
    pub(super) fn read(&self, name: &str, most: u64) -> Result<Vec<u8>, String> {
        let Data { offset, len } = self.data(name)?;
        if len > most {
            return Err(format!("entry `{name}` has {len} bytes, more than the maximum of {most}"));
        }
        read(self.source, offset, len as usize)
    }
}

/// Little-endian fields of a record.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], String> {
        let (field, rest) =
            self.0.split_at_checked(len).ok_or_else(|| damaged("a record of its directory is incomplete"))?;
        self.0 = rest;
        Ok(field)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    fn u16(&mut self) -> Result<u16, String> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, String> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, String> {
        self.array().map(u64::from_le_bytes)
    }

    /// The next entry of a directory, with its name.
    fn entry(&mut self) -> Result<(String, Entry), String> {
        let record = self.take(ENTRY_LEN)?;
        if !record.starts_with(&ENTRY) {
            return Err(damaged("its directory has something other than entries"));
        }
        let (flags, method) = (Fields(&record[8..]).u16()?, Fields(&record[10..]).u16()?);
        let mut sizes = Fields(&record[20..]);
        let (stored, size) = (sizes.u32()?, sizes.u32()?);
        let lengths = [sizes.u16()?, sizes.u16()?, sizes.u16()?].map(usize::from);
        let header = Fields(&record[42..]).u32()?;
        let name = self.take(lengths[0])?;
        let extra = self.take(lengths[1])?;
        self.take(lengths[2])?;
        let name = str::from_utf8(name).map_err(|_| damaged("the name of an entry is not UTF-8"))?.to_owned();
        let [size, stored, header] = wide([size, stored, header], extra)?;
        if method != 0 || flags & 1 != 0 || size != stored {
            return Err(format!("entry `{name}` is compressed or encrypted, which `torch.save` does not do"));
        }
        Ok((name, Entry { header, len: size }))
    }
}

/// Replaces values of 32 bits that are all ones by those of the extra field with values of 64 bits.
fn wide(values: [u32; 3], extra: &[u8]) -> Result<[u64; 3], String> {
    let mut fields = Fields(extra);
    let mut wide = Fields(&[]);
    // Fillers of fewer bytes than a field has may follow the last field.
    while fields.0.len() >= 4 {
        let (id, len) = (fields.u16()?, fields.u16()?);
        let field = fields.take(usize::from(len))?;
        if id == EXTRA_64 {
            wide = Fields(field);
        }
    }
    let mut all = [0; 3];
    for (all, value) in all.iter_mut().zip(values) {
        *all = if value == u32::MAX { wide.u64()? } else { u64::from(value) };
    }
    Ok(all)
}

fn read(source: &dyn ByteSource, offset: u64, len: usize) -> Result<Vec<u8>, String> {
    if offset.checked_add(len as u64).is_none_or(|end| end > source.size()) {
        return Err(damaged("a record is outside of the file"));
    }
    let mut bytes = vec![0; len];
    source.read_at(offset, &mut bytes).map_err(|error| error.to_string())?;
    Ok(bytes)
}

fn damaged(problem: &str) -> String {
    format!("truncated or corrupt zip archive: {problem}; is the download complete?")
}

/// Describes a file that does not end as a zip archive.
fn no_archive(source: &dyn ByteSource) -> String {
    let mut start = vec![0; source.size().min(16) as usize];
    if let Err(error) = source.read_at(0, &mut start) {
        return error.to_string();
    }
    match &start[..] {
        [b'P', b'K', 3, 4, ..] => damaged("it does not end with a directory"),
        [0x80, 2, ..] => {
            "this file has the format of PyTorch before 1.6; write it again with a current version: \
                          torch.save(torch.load(path), path)"
                .to_owned()
        }
        [b'v', b'e', b'r', b's', b'i', b'o', b'n', b' ', ..] => {
            "this is a Git LFS pointer; run `git lfs pull` to get the file itself".to_owned()
        }
        _ => format!("a file of {} bytes that is no zip archive of `torch.save`", source.size()),
    }
}
