//! A store with its two threads: one writes, one reads.

use std::{
    collections::{HashSet, VecDeque},
    fmt,
    fs::File,
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        mpsc::{Receiver, Sender, channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use crate::{
    Id, StoreError,
    files::{self, FaultyDisk},
    log::{Appender, Log, ReadError, Scan},
    models::{self, ModelInfo},
    space::{Chunk, Load, Space, space_id},
};

/// Bytes that wait to be written, at most: some of the largest checkpoints.
const QUEUE_BYTES: usize = 192 << 20;
/// Bytes of one [`Chunk`], unless a single item is larger.
const CHUNK_BYTES: usize = 8 << 20;
/// Bytes per second that a disk is taken to read before any were read.
const FIRST_SPEED: f64 = 500e6;
/// Growth of the estimated speed each time that a load is refused for it, so that a disk which was slow once is tried again.
const FORGIVENESS: f64 = 1.01;
/// Weight of the newest measurement of a speed.
const RATE: f64 = 0.3;
/// How often the owner of a store looks for notes of other processes.
const NOTES_EVERY: Duration = Duration::from_secs(3);
/// Items of more than this many bytes per second are not written.
const WRITE_SPEED: f64 = 400e6;

/// How a store is used.
#[derive(Clone)]
pub struct StoreOptions {
    /// Bytes of all segments, at most.
    pub bound: u64,
    /// Bytes per second that are written, at most.
    pub write_speed: f64,
    /// Bytes per second that are read, at most. For tests of slow disks.
    pub read_speed: f64,
    /// Errors and delays of the disk, for tests.
    pub faults: Option<FaultyDisk>,
    /// Called once with a line for people when the store is turned off.
    pub notice: fn(&str),
}

impl StoreOptions {
    /// A store of up to `bound` bytes.
    pub fn new(bound: u64) -> Self {
        Self { bound, write_speed: WRITE_SPEED, read_speed: f64::INFINITY, faults: None, notice: |_| () }
    }
}

impl fmt::Debug for StoreOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreOptions").field("bound", &self.bound).finish_non_exhaustive()
    }
}

/// Numbers of a store. Gauges say how it is now; counters count since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StoreStats {
    /// Items on disk.
    pub items: u64,
    /// Bytes of all segments.
    pub bytes: u64,
    /// Bytes that wait to be written.
    pub pending_bytes: u64,
    /// Items written, and their bytes.
    pub written: u64,
    /// Bytes of these.
    pub written_bytes: u64,
    /// Items read.
    pub read: u64,
    /// Bytes of these.
    pub read_bytes: u64,
    /// Items that could not be used because their records were damaged.
    pub damaged: u64,
    /// Bytes per second at which items are read, as measured.
    pub read_speed: f64,
    /// Bytes per second at which items are written, as measured.
    pub write_speed: f64,
    /// True if the store was turned off by an error.
    pub is_off: bool,
}

/// The content of a store, for people.
#[derive(Clone, Debug, Default)]
pub struct Info {
    /// Items, bytes of their records, and the model, by space.
    pub spaces: Vec<(Option<ModelInfo>, u64, u64)>,
    /// Bytes of all segments.
    pub bytes: u64,
    /// Findings of the scan.
    pub scan: Scan,
}

/// A folder of pages that this process has alone.
#[derive(Debug)]
pub struct Store {
    shared: Arc<Shared>,
    reader: Option<Sender<Load>>,
    threads: Vec<JoinHandle<()>>,
}

/// State of a store, for its threads and spaces.
pub(crate) struct Shared {
    pub dir: PathBuf,
    pub log: Log,
    options: StoreOptions,
    queue: Mutex<Queue>,
    /// The queue has changed.
    changed: Condvar,
    stats: Mutex<StoreStats>,
    /// Spaces whose models were removed: nothing more is saved there.
    removed: Mutex<HashSet<Id>>,
    /// Held as long as the store is open.
    _lock: File,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("dir", &self.dir).finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Queue {
    writes: VecDeque<Write>,
    /// Bytes of these and of the one that is being written.
    bytes: usize,
    is_busy: bool,
    closing: bool,
}

enum Write {
    Item {
        space: Id,
        id: Id,
        payload: Arc<Vec<u8>>,
    },
    Uses,
    Remove {
        space: Id,
    },
    /// A note of another process was obeyed.
    Obeyed {
        name: String,
    },
    Clear,
}

impl Store {
    /// Opens the store in a folder, which is created if there is none, and starts its threads.
    ///
    /// # Errors
    /// [`StoreError::InUse`] if another process has it; [`StoreError::Io`].
    pub fn open(dir: &Path, options: StoreOptions) -> Result<Self, StoreError> {
        files::folder(dir)?;
        let lock = files::lock(dir)?;
        let key = files::key(dir, true)?;
        let (mut log, appender, scan) = Log::open(dir, key, options.bound)?;
        log.faults.clone_from(&options.faults);
        let damaged = scan.damaged;
        let shared = Arc::new(Shared {
            dir: dir.to_owned(),
            log,
            options,
            queue: Mutex::default(),
            changed: Condvar::new(),
            removed: Mutex::default(),
            stats: Mutex::new(StoreStats {
                read_speed: FIRST_SPEED,
                write_speed: FIRST_SPEED,
                damaged,
                ..StoreStats::default()
            }),
            _lock: lock,
        });
        shared.obey_notes();
        shared.forget_empty_models();
        let failed = |source| StoreError::Io { action: "start the threads of", path: dir.to_owned(), source };
        let (reader, loads) = channel();
        let (for_writer, for_reader) = (shared.clone(), shared.clone());
        let threads = vec![
            thread::Builder::new()
                .name("paguro-kv-write".into())
                .spawn(move || for_writer.write_all(appender))
                .map_err(failed)?,
            thread::Builder::new()
                .name("paguro-kv-read".into())
                .spawn(move || for_reader.read_all(&loads))
                .map_err(failed)?,
        ];
        Ok(Self { shared, reader: Some(reader), threads })
    }

    /// Reads what is in a store, whoever has it open, and checks every byte of its items if `verify` is true. Nothing is
    /// changed. The second number is that of damaged items.
    ///
    /// # Errors
    /// [`StoreError::Io`]; a folder without a store is an empty one.
    pub fn inspect(dir: &Path, verify: bool) -> Result<(Info, u64), StoreError> {
        if !dir.exists() {
            return Ok((Info::default(), 0));
        }
        let key = match files::key(dir, false) {
            Ok(key) => key,
            Err(StoreError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                return Ok((Info::default(), 0));
            }
            Err(error) => return Err(error),
        };
        let (log, _, scan) = Log::open(dir, key, u64::MAX)?;
        let info = info(dir, &log, scan);
        let failed = |source| StoreError::Io { action: "read", path: dir.to_owned(), source };
        let damaged = if verify { log.verify().map_err(failed)? } else { 0 };
        Ok((info, damaged))
    }

    /// Bytes of all segments in a folder, whoever has it open.
    pub fn size(dir: &Path) -> u64 {
        let bytes = |number| std::fs::metadata(files::segment(dir, number)).map_or(0, |file| file.len());
        files::segments(dir).unwrap_or_default().into_iter().map(bytes).sum()
    }

    /// Items of one model: everything that the contents depend on besides the tokens is in `identity`.
    pub fn space(&self, identity: &[&[u8]], info: &ModelInfo) -> Space {
        let id = space_id(identity);
        self.shared.removed().remove(&id);
        // Without it, the space only has no name.
        let _ = models::write(&self.shared.dir, &id, info);
        Space::new(self.shared.clone(), self.reader.clone(), id)
    }

    /// Returns its folder.
    pub fn dir(&self) -> &Path {
        &self.shared.dir
    }

    /// Returns its numbers.
    pub fn stats(&self) -> StoreStats {
        self.shared.stats()
    }

    /// Returns what is in it.
    pub fn info(&self) -> Info {
        info(&self.shared.dir, &self.shared.log, Scan::default())
    }

    /// Removes the items of all models with this name. Returns how many spaces they were.
    pub fn remove_model(&self, name: &str) -> usize {
        let spaces = self.shared.spaces_of(name);
        for &space in &spaces {
            self.shared.removed().insert(space);
            self.shared.push(Write::Remove { space });
        }
        spaces.len()
    }

    /// Leaves a note to the process that has the store in a folder open: it removes the items of all models with this name within
    /// seconds; the next owner does if this one ends before.
    ///
    /// # Errors
    /// [`StoreError::Io`]
    pub fn request_removal(dir: &Path, name: &str) -> Result<(), StoreError> {
        let failed = |source| StoreError::Io { action: "write to", path: dir.to_owned(), source };
        models::request_removal(dir, name).map_err(failed)
    }

    /// Removes all items.
    pub fn clear(&self) {
        self.shared.push(Write::Clear);
    }

    /// Waits until everything is written, or for `patience` at most. Returns true if it is.
    pub fn flush(&self, patience: Duration) -> bool {
        self.shared.flush(patience)
    }

    /// Compares the views of the index. For tests.
    ///
    /// # Errors
    /// The difference.
    pub fn check(&self) -> Result<(), String> {
        self.shared.log.index().check()
    }
}

impl Drop for Store {
    /// Writes what waits, for some seconds at most.
    fn drop(&mut self) {
        self.reader = None;
        self.shared.flush(Duration::from_secs(10));
        self.shared.queue().closing = true;
        self.shared.changed.notify_all();
        // The reader ends when the last space is gone; nobody waits for it.
        if let Some(writer) = self.threads.drain(..).next() {
            let _ = writer.join();
        }
    }
}

fn info(dir: &Path, log: &Log, scan: Scan) -> Info {
    let index = log.index();
    let spaces = index.spaces().map(|(space, items, bytes)| (models::read(dir, space), items, bytes));
    let mut spaces: Vec<_> = spaces.collect();
    spaces.sort_by_key(|(_, _, bytes)| std::cmp::Reverse(*bytes));
    Info { spaces, bytes: index.total(), scan }
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn removed(&self) -> MutexGuard<'_, HashSet<Id>> {
        self.removed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn numbers(&self) -> MutexGuard<'_, StoreStats> {
        self.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn stats(&self) -> StoreStats {
        let (items, bytes) = {
            let index = self.log.index();
            (index.len() as u64, index.total())
        };
        let pending_bytes = self.queue().bytes as u64;
        StoreStats { items, bytes, pending_bytes, ..*self.numbers() }
    }

    /// Bytes that the writer takes now.
    pub fn room(&self) -> usize {
        if self.is_off() { 0 } else { QUEUE_BYTES.saturating_sub(self.queue().bytes) }
    }

    pub fn pending_bytes(&self) -> usize {
        self.queue().bytes
    }

    pub fn is_off(&self) -> bool {
        self.numbers().is_off
    }

    pub fn read_speed(&self) -> f64 {
        self.numbers().read_speed
    }

    pub fn write_speed(&self) -> f64 {
        self.numbers().write_speed
    }

    /// A load was refused because of the speed.
    pub fn forgive(&self) {
        self.numbers().read_speed *= FORGIVENESS;
    }

    pub fn save(&self, space: Id, id: Id, payload: Arc<Vec<u8>>) {
        if self.removed().contains(&space) {
            return;
        }
        self.push(Write::Item { space, id, payload });
    }

    fn push(&self, write: Write) {
        if self.is_off() {
            return;
        }
        let mut queue = self.queue();
        if let Write::Item { payload, .. } = &write {
            queue.bytes += payload.len();
        }
        queue.writes.push_back(write);
        drop(queue);
        self.changed.notify_all();
    }

    pub fn flush(&self, patience: Duration) -> bool {
        let mut queue = self.queue();
        let end = Instant::now() + patience;
        while !queue.writes.is_empty() || queue.is_busy {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            queue = self.changed.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Turns the store off, and says so once.
    fn turn_off(&self, what: &str, error: &io::Error) {
        if !std::mem::replace(&mut self.numbers().is_off, true) {
            (self.options.notice)(&format!(
                "the cache on disk is off: cannot {what} {}: {error}; requests go on without it",
                self.dir.display()
            ));
        }
        let mut queue = self.queue();
        queue.writes.clear();
        queue.bytes = 0;
    }

    /// Spaces of all models with this name.
    fn spaces_of(&self, name: &str) -> Vec<Id> {
        let has_name = |space: &Id| models::read(&self.dir, space).is_some_and(|info| info.model == name);
        models::spaces(&self.dir).into_iter().filter(has_name).collect()
    }

    /// Queues the removal of what other processes have left notes about, behind everything that waits to be written.
    fn obey_notes(&self) {
        for name in models::removals(&self.dir) {
            for space in self.spaces_of(&name) {
                self.removed().insert(space);
                self.push(Write::Remove { space });
            }
            self.push(Write::Obeyed { name });
        }
    }

    /// The writer's thread.
    fn write_all(&self, mut appender: Appender) {
        let mut looked = Instant::now();
        loop {
            if looked.elapsed() >= NOTES_EVERY {
                self.obey_notes();
                looked = Instant::now();
            }
            let write = {
                let mut queue = self.queue();
                queue.is_busy = false;
                self.changed.notify_all();
                loop {
                    if let Some(write) = queue.writes.pop_front() {
                        queue.is_busy = true;
                        break Some(write);
                    }
                    if queue.closing {
                        return;
                    }
                    let waited = self.changed.wait_timeout(queue, NOTES_EVERY);
                    queue = waited.unwrap_or_else(PoisonError::into_inner).0;
                    if looked.elapsed() >= NOTES_EVERY {
                        break None;
                    }
                }
            };
            let Some(write) = write else { continue };
            let started = Instant::now();
            let (bytes, result) = match &write {
                Write::Item { space, id, payload } => {
                    (payload.len(), self.log.append(&mut appender, *space, *id, payload))
                }
                // The order of uses may be lost: what is stored can be read from a full disk.
                Write::Uses => match self.log.append_uses(&mut appender) {
                    Err(error) if error.kind() == io::ErrorKind::StorageFull => (0, Ok(())),
                    result => (0, result),
                },
                Write::Remove { space } => {
                    models::remove(&self.dir, space);
                    (0, self.log.remove_space(&mut appender, space))
                }
                Write::Obeyed { name } => {
                    models::forget_removal(&self.dir, name);
                    (0, Ok(()))
                }
                Write::Clear => {
                    models::spaces(&self.dir).iter().for_each(|space| models::remove(&self.dir, space));
                    (0, self.log.clear(&mut appender))
                }
            };
            match result {
                Ok(()) if bytes > 0 => {
                    let mut numbers = self.numbers();
                    numbers.written += 1;
                    numbers.written_bytes += bytes as u64;
                    numbers.write_speed = mean(numbers.write_speed, bytes, started.elapsed());
                }
                Ok(()) => {}
                Err(error) => self.turn_off("write to", &error),
            }
            // The disk is left to others for the rest of the time that these bytes may take.
            let least = Duration::from_secs_f64(bytes as f64 / self.options.write_speed);
            thread::sleep(least.saturating_sub(started.elapsed()));
            let mut queue = self.queue();
            queue.bytes = queue.bytes.saturating_sub(bytes);
        }
    }

    /// The reader's thread.
    fn read_all(&self, loads: &Receiver<Load>) {
        while let Ok(load) = loads.recv() {
            self.read_one(load);
        }
    }

    fn read_one(&self, mut load: Load) {
        let started = Instant::now();
        let mut payloads = Vec::new();
        let (mut first, mut bytes) = (0, 0);
        let mut read = Vec::with_capacity(load.ids.len());
        for (index, id) in load.ids.iter().enumerate() {
            if self.is_off() || load.is_too_slow(index, started.elapsed(), self.read_speed()) {
                break;
            }
            match self.read_item(id) {
                Some(payload) => {
                    bytes += payload.len();
                    payloads.push(payload);
                    read.push(*id);
                }
                None => break,
            }
            if bytes >= CHUNK_BYTES {
                let payloads = std::mem::take(&mut payloads);
                let next = first + payloads.len();
                (load.deliver)(Chunk { first, payloads, is_last: false });
                (first, bytes) = (next, 0);
            }
        }
        let has_read = !read.is_empty();
        {
            let mut index = self.log.index();
            read.iter().for_each(|id| index.touch(id));
            index.read.append(&mut read);
        }
        (load.deliver)(Chunk { first, payloads, is_last: true });
        if has_read {
            self.push(Write::Uses);
        }
    }

    fn read_item(&self, id: &Id) -> Option<Vec<u8>> {
        let started = Instant::now();
        match self.log.read(id) {
            Ok(payload) => {
                let least = Duration::from_secs_f64(payload.len() as f64 / self.options.read_speed);
                thread::sleep(least.saturating_sub(started.elapsed()));
                let mut numbers = self.numbers();
                numbers.read_speed = mean(numbers.read_speed, payload.len(), started.elapsed());
                numbers.read += 1;
                numbers.read_bytes += payload.len() as u64;
                Some(payload)
            }
            Err(ReadError::Missing) => None,
            Err(ReadError::Damaged) => {
                self.numbers().damaged += 1;
                None
            }
            Err(ReadError::Io(error)) => {
                self.turn_off("read", &error);
                None
            }
        }
    }

    /// Removes the names of spaces without items.
    fn forget_empty_models(&self) {
        let full: Vec<Id> = self.log.index().spaces().map(|(space, ..)| *space).collect();
        for space in models::spaces(&self.dir).iter().filter(|space| !full.contains(space)) {
            models::remove(&self.dir, space);
        }
    }
}

/// A new estimate of a speed. It is the mean of times, so that one slow item counts as long as it took.
fn mean(speed: f64, bytes: usize, time: Duration) -> f64 {
    let newest = bytes.max(1) as f64 / time.as_secs_f64().max(1e-6);
    1.0 / ((1.0 - RATE) / speed + RATE / newest)
}
