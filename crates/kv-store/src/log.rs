//! Segments: appending, reading, evicting, compacting, and rebuilding the index from them. `shared.rs` has what several processes need.

mod shared;

use std::{
    collections::BTreeSet,
    fmt,
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use crate::{
    Id, StoreError,
    files::{self, Access, FaultyDisk, Lease},
    index::{Index, Segment},
    record::{HEADER, Header, Key, Kind, MOST_PAYLOAD, Place},
};

/// Ids in one record of uses, at most.
const MOST_USES: usize = 4096;

/// Files of a store and their index. Any thread reads; one appends.
pub(crate) struct Log {
    dir: PathBuf,
    key: Key,
    /// Bytes of all segments, at most.
    bound: u64,
    /// Bytes of a segment, at most, unless a single record is larger.
    segment_bytes: u64,
    index: Mutex<Index>,
    /// True if other processes may have the store open.
    is_shared: bool,
    /// True if this process removes segments.
    leads: AtomicBool,
    /// Segments that are to be compacted as soon as no other process appends to them.
    pending: Mutex<BTreeSet<u64>>,
    /// Errors and delays, for tests.
    pub faults: Option<FaultyDisk>,
}

impl fmt::Debug for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Log").field("dir", &self.dir).finish_non_exhaustive()
    }
}

/// The segment that records are appended to.
#[derive(Debug, Default)]
pub(crate) struct Appender {
    active: Option<Active>,
    next_segment: u64,
}

#[derive(Debug)]
struct Active {
    number: u64,
    file: File,
    bytes: u64,
    /// Held while records are appended, if other processes may have the store open.
    _lease: Option<Lease>,
}

/// Findings of a scan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scan {
    /// Records of items whose headers are valid.
    pub items: u64,
    /// Places at which a segment is damaged: all records behind are lost.
    pub damaged: u64,
    /// Bytes behind these places.
    pub lost_bytes: u64,
}

/// An item that cannot be read.
#[derive(Debug)]
pub(crate) enum ReadError {
    /// It is not in the index, or not any more.
    Missing,
    /// Its record is not the one that was written.
    Damaged,
    /// The system's error.
    Io(io::Error),
}

impl Log {
    /// Reads the headers of all segments of a folder.
    pub fn open(
        dir: &Path,
        key: Key,
        bound: u64,
        is_shared: bool,
    ) -> Result<(Self, Appender, Scan), StoreError> {
        let segment_bytes = (bound / 16).clamp(64 << 10, 64 << 20);
        let log = Self {
            dir: dir.to_owned(),
            key,
            bound,
            segment_bytes,
            index: Mutex::default(),
            is_shared,
            leads: AtomicBool::new(!is_shared),
            pending: Mutex::default(),
            faults: None,
        };
        let failed = |source| StoreError::Io { action: "read", path: dir.to_owned(), source };
        let numbers = files::segments(dir).map_err(failed)?;
        let mut scan = Scan::default();
        for &number in &numbers {
            log.scan(number, &mut scan, true);
        }
        // A segment is never appended to again: what was torn at its end stays where it is until the segment is compacted.
        let next_segment = numbers.last().map_or(0, |last| last.saturating_add(1));
        Ok((log, Appender { active: None, next_segment }, scan))
    }

    /// Returns true if this process removes segments.
    pub fn leads(&self) -> bool {
        self.leads.load(Ordering::Relaxed)
    }

    pub fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the records of a segment to the index, up to the first one that is not valid. `in_order` is true for a scan of all
    /// segments, in the order of the uses of their items.
    fn scan(&self, number: u64, scan: &mut Scan, in_order: bool) {
        let opened = files::regular(&files::segment(&self.dir, number));
        let Ok((file, metadata)) = opened.and_then(|file| file.metadata().map(|it| (file, it))) else {
            // The leader may have removed it.
            scan.damaged += u64::from(!self.is_shared);
            return;
        };
        let (file, bytes) = (Arc::new(file), metadata.len());
        let mut index = self.index();
        let segment = index.segments.entry(number).or_insert_with(|| Segment {
            file: file.clone(),
            bytes: 0,
            live: 0,
            scanned: 0,
            identity: files::identity(&metadata),
        });
        segment.bytes = bytes;
        let mut offset = segment.scanned;
        while offset < bytes {
            let place = Place { segment: number, offset };
            let Some(header) = self.header(&file, place, bytes) else {
                // Another process may be writing the record.
                if !self.is_shared || !files::is_leased(&self.dir, number) {
                    scan.damaged += 1;
                    scan.lost_bytes += bytes - offset;
                }
                break;
            };
            match header.kind {
                Kind::Item => {
                    scan.items += 1;
                    // A later record of the same item is the same item.
                    if in_order {
                        index.forget(&header.id);
                    }
                    index.put(header.id, header.space, place, header.record_bytes());
                }
                Kind::Uses => {
                    let mut ids = vec![0; header.len as usize];
                    let read = files::read_at(&file, &mut ids, offset + HEADER as u64);
                    if read.is_ok() && header.is_of(&ids, &self.key) {
                        ids.as_chunks::<32>().0.iter().for_each(|id| index.touch(id));
                    }
                }
            }
            offset += header.record_bytes();
        }
        if let Some(segment) = index.segments.get_mut(&number) {
            segment.scanned = offset;
        }
    }

    /// Reads the header of the record at a place. `None` if it is not valid or ends behind the file.
    fn header(&self, file: &File, place: Place, file_bytes: u64) -> Option<Header> {
        let mut bytes = [0; HEADER];
        files::read_at(file, &mut bytes, place.offset).ok()?;
        let header = Header::decode(&bytes, place, &self.key)?;
        let is_uses_too_long = header.kind == Kind::Uses && header.len > 32 * MOST_USES as u64;
        (place.offset + header.record_bytes() <= file_bytes && !is_uses_too_long).then_some(header)
    }

    /// Reads an item and checks that it is what was written. A record that is not is forgotten.
    pub fn read(&self, id: &Id) -> Result<Vec<u8>, ReadError> {
        let (entry, file) = {
            let index = self.index();
            let entry = index.get(id).ok_or(ReadError::Missing)?;
            let segment = index.segments.get(&entry.place.segment).ok_or(ReadError::Missing)?;
            (entry, segment.file.clone())
        };
        let mut record = vec![0; entry.bytes as usize];
        let allowed = self.faults.as_ref().map_or(Ok(0), |disk| disk(Access::Read, record.len()));
        let read = allowed.and_then(|_| files::read_at(&file, &mut record, entry.place.offset));
        let result = read.map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => ReadError::Damaged,
            // Another machine has removed the segment.
            io::ErrorKind::StaleNetworkFileHandle => ReadError::Missing,
            _ => ReadError::Io(error),
        });
        let result = result.and_then(|()| {
            let (header, payload) = record.split_first_chunk::<HEADER>().ok_or(ReadError::Damaged)?;
            let header = Header::decode(header, entry.place, &self.key).ok_or(ReadError::Damaged)?;
            let is_it = header.id == *id && header.kind == Kind::Item && header.is_of(payload, &self.key);
            if is_it { Ok(()) } else { Err(ReadError::Damaged) }
        });
        if result.is_err() {
            let mut index = self.index();
            if index.get(id).is_some_and(|now| now.place == entry.place) {
                index.remove(id);
            }
        }
        result.map(|()| {
            record.drain(..HEADER);
            record
        })
    }

    /// Appends an item. One that is there already only becomes the last one that was used.
    ///
    /// # Errors
    /// The system's error; the store has no part of the item then.
    pub fn append(&self, to: &mut Appender, space: Id, id: Id, payload: &[u8]) -> io::Result<()> {
        let bytes = HEADER as u64 + payload.len() as u64;
        {
            let mut index = self.index();
            if index.get(&id).is_some() {
                index.touch(&id);
                return Ok(());
            }
            // An item that would push out most of the others is not worth it.
            if bytes > self.bound / 4 || payload.len() as u64 > MOST_PAYLOAD {
                index.refuse(&space, id);
                return Ok(());
            }
        }
        if !self.make_room(to, bytes)? {
            self.index().refuse(&space, id);
            return Ok(());
        }
        let header = Header::new(Kind::Item, space, id, payload, &self.key);
        let place = self.write(to, &header, payload)?;
        self.index().put(id, space, place, bytes);
        Ok(())
    }

    /// Appends the ids of items that were read since the last call, so that their use is known after a restart.
    pub fn append_uses(&self, to: &mut Appender) -> io::Result<()> {
        let read = std::mem::take(&mut self.index().read);
        for ids in read.chunks(MOST_USES) {
            let payload = ids.concat();
            if !self.make_room(to, HEADER as u64 + payload.len() as u64)? {
                return Ok(());
            }
            let header = Header::new(Kind::Uses, [0; 32], [0; 32], &payload, &self.key);
            self.write(to, &header, &payload)?;
        }
        Ok(())
    }

    /// Forgets all items of a space, and removes their bytes.
    pub fn remove_space(&self, to: &mut Appender, space: &Id) -> io::Result<()> {
        let segments = self.index().forget_space(space);
        if !self.leads() {
            // The leader compacts what no process appends to.
            to.active.take_if(|active| segments.contains(&active.number));
            return Ok(());
        }
        segments.into_iter().try_for_each(|segment| match self.compact(to, segment) {
            // The items of other spaces go with it: a full disk must not keep what is to be deleted.
            Err(error) if error.kind() == io::ErrorKind::StorageFull => self.drop_segment(segment),
            result => result,
        })
    }

    /// Removes a segment with all of its items.
    fn drop_segment(&self, number: u64) -> io::Result<()> {
        let items = self.index().of_segment(number);
        for (id, _) in &items {
            self.index().remove(id);
        }
        self.remove(number)
    }

    /// Removes all segments.
    pub fn clear(&self, to: &mut Appender) -> io::Result<()> {
        to.active = None;
        let numbers: Vec<u64> = self.index().segments.keys().copied().collect();
        for number in numbers {
            self.drop_segment(number)?;
        }
        Ok(())
    }

    /// Evicts items and compacts segments until `bytes` more bytes fit. Only the leader does so: for others it returns false if they
    /// do not fit.
    fn make_room(&self, to: &mut Appender, bytes: u64) -> io::Result<bool> {
        if !self.leads() {
            return self.has_room(bytes);
        }
        // A fifth of the space is for dead records, so that a segment with many of them can always be found.
        let most_live = self.bound / 5 * 4;
        while self.index().live() + bytes > most_live && self.index().evict() {}
        // Compaction itself writes up to one segment before it removes another one.
        while self.index().total() + bytes + self.segment_bytes > self.bound {
            let most_dead = {
                let index = self.index();
                let dead = |segment: &Segment| segment.bytes.saturating_sub(segment.live);
                let free = index.segments.iter().filter(|(number, _)| !self.is_of_another(to, **number));
                let most = free.max_by_key(|(_, segment)| dead(segment));
                most.filter(|(_, segment)| dead(segment) > 0).map(|(number, _)| *number)
            };
            match most_dead {
                Some(number) => self.compact(to, number)?,
                None if self.index().evict() => {}
                None => break,
            }
        }
        Ok(true)
    }

    /// Moves the items of a segment to the end of the log, and removes the segment.
    fn compact(&self, to: &mut Appender, number: u64) -> io::Result<()> {
        if self.is_of_another(to, number) {
            self.pending().insert(number);
            return Ok(());
        }
        if self.is_shared && to.active.as_ref().is_none_or(|active| active.number != number) {
            // Its writer may have appended records since it was last read.
            self.scan(number, &mut Scan::default(), false);
        }
        if to.active.as_ref().is_some_and(|active| active.number == number) {
            to.active = None;
        }
        let items = self.index().of_segment(number);
        for (id, entry) in items {
            match self.read(&id) {
                Ok(payload) => {
                    let header = Header::new(Kind::Item, entry.space, id, &payload, &self.key);
                    let place = self.write(to, &header, &payload)?;
                    self.index().put(id, entry.space, place, entry.bytes);
                }
                Err(ReadError::Io(error)) => return Err(error),
                Err(ReadError::Missing | ReadError::Damaged) => {}
            }
        }
        self.remove(number)
    }

    fn remove(&self, number: u64) -> io::Result<()> {
        self.index().segments.remove(&number);
        match fs::remove_file(files::segment(&self.dir, number)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Writes a record to the end of the active segment, or of a new one.
    fn write(&self, to: &mut Appender, header: &Header, payload: &[u8]) -> io::Result<Place> {
        let bytes = header.record_bytes();
        let is_full = |active: &Active| active.bytes > 0 && active.bytes + bytes > self.segment_bytes;
        if to.active.as_ref().is_none_or(is_full) {
            to.active = Some(self.new_segment(to)?);
        }
        let active = to.active.as_mut().ok_or(io::ErrorKind::NotFound)?;
        let place = Place { segment: active.number, offset: active.bytes };
        let head = header.encode(place, &self.key);
        let written = match &self.faults {
            None => active.file.write_all(&head).and_then(|()| active.file.write_all(payload)),
            Some(disk) => write_through(disk, &mut active.file, &[&head, payload].concat()),
        };
        if let Err(error) = written {
            // The torn record would hide all that follow.
            let (number, bytes) = (active.number, active.bytes);
            let _ = active.file.set_len(bytes);
            to.active = None;
            if bytes == 0 {
                self.remove(number)?;
            }
            return Err(error);
        }
        active.bytes += bytes;
        if let Some(segment) = self.index().segments.get_mut(&active.number) {
            (segment.bytes, segment.scanned) = (active.bytes, active.bytes);
        }
        Ok(place)
    }

    fn new_segment(&self, to: &mut Appender) -> io::Result<Active> {
        loop {
            let number = to.next_segment;
            to.next_segment = number.checked_add(1).ok_or(io::ErrorKind::StorageFull)?;
            let lease = if self.is_shared { Lease::take(&self.dir, number)? } else { None };
            if self.is_shared && lease.is_none() {
                continue;
            }
            let path = files::segment(&self.dir, number);
            let file = match files::private().create_new(true).read(true).write(true).open(path) {
                Ok(file) => file,
                // Another process has created it.
                Err(error) if self.is_shared && error.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(error),
            };
            let (reader, identity) = (Arc::new(file.try_clone()?), files::identity(&file.metadata()?));
            let segment = Segment { file: reader, bytes: 0, live: 0, scanned: 0, identity };
            self.index().segments.insert(number, segment);
            return Ok(Active { number, file, bytes: 0, _lease: lease });
        }
    }

    /// Returns the ids of all items.
    pub fn ids(&self) -> Vec<Id> {
        let index = self.index();
        let numbers: Vec<u64> = index.segments.keys().copied().collect();
        numbers.iter().flat_map(|&number| index.of_segment(number)).map(|(id, _)| id).collect()
    }

    /// Reads all items and returns how many are damaged.
    pub fn verify(&self) -> io::Result<u64> {
        let mut damaged = 0;
        for id in self.ids() {
            match self.read(&id) {
                Ok(_) | Err(ReadError::Missing) => {}
                Err(ReadError::Damaged) => damaged += 1,
                Err(ReadError::Io(error)) => return Err(error),
            }
        }
        Ok(damaged)
    }
}

/// Writes as much as a faulty disk allows.
fn write_through(disk: &FaultyDisk, file: &mut File, bytes: &[u8]) -> io::Result<()> {
    let allowed = disk(Access::Write, bytes.len())?.min(bytes.len());
    file.write_all(&bytes[..allowed])?;
    if allowed < bytes.len() { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
}
