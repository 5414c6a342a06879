//! A store of pages in a folder. Its two threads are in `threads.rs`.

mod threads;

use std::{
    collections::{HashSet, VecDeque},
    fmt,
    fs::File,
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Condvar, Mutex,
        mpsc::{Sender, channel},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use crate::{
    Id, StoreError,
    files::{self, FaultyDisk},
    log::{Log, Scan},
    models::{self, ModelInfo},
    space::{Load, Space, space_id},
};

/// Bytes per second of reads and writes before the first measurement.
const FIRST_SPEED: f64 = 500e6;
/// Items of more than this many bytes per second are not written.
const WRITE_SPEED: f64 = 400e6;

/// Options of a store.
#[derive(Clone)]
pub struct StoreOptions {
    /// Bytes of all segments, at most.
    pub bound: u64,
    /// Bytes per second that are written, at most.
    pub write_speed: f64,
    /// Bytes per second that are read, at most. For tests of slow disks.
    pub read_speed: f64,
    /// True if other processes may have the store open with the same option. Each reads what all have written.
    pub is_shared: bool,
    /// Errors and delays of the disk, for tests.
    pub faults: Option<FaultyDisk>,
    /// Called once with a line for people when the store is turned off.
    pub notice: fn(&str),
}

impl StoreOptions {
    /// Returns a store of up to `bound` bytes.
    pub fn new(bound: u64) -> Self {
        Self {
            bound,
            write_speed: WRITE_SPEED,
            read_speed: f64::INFINITY,
            is_shared: false,
            faults: None,
            notice: |_| (),
        }
    }
}

impl fmt::Debug for StoreOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreOptions").field("bound", &self.bound).finish_non_exhaustive()
    }
}

/// Statistics of a store. Counters count since it was opened.
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

/// A folder of pages that this process has alone, or shares with others.
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
    /// Held as long as this process removes segments.
    leader: Mutex<Option<File>>,
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
    /// [`StoreError::InUse`] if another process has it, and not both share it; [`StoreError::Io`].
    pub fn open(dir: &Path, options: StoreOptions) -> Result<Self, StoreError> {
        files::folder(dir)?;
        let lock = files::lock(dir, options.is_shared)?;
        let io_error = |source| StoreError::Io { action: "lock", path: dir.to_owned(), source };
        let leader = if options.is_shared { files::lead(dir).map_err(io_error)? } else { None };
        let leads = leader.is_some() || !options.is_shared;
        let key = files::first_key(dir, leads)?;
        if leads {
            files::remove_unfinished(dir);
        }
        let (mut log, appender, scan) = Log::open(dir, key, options.bound, options.is_shared)?;
        if leads {
            log.lead();
        }
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
            leader: Mutex::new(leader),
        });
        shared.obey_notes();
        if leads {
            shared.forget_empty_models();
        }
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

    /// Reads the contents of a store, which other processes may have open, and checks every byte of its items if `verify` is
    /// true. Nothing is changed. The second number is that of damaged items.
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
        let (log, _, scan) = Log::open(dir, key, u64::MAX, true)?;
        let info = info(dir, &log, scan);
        let failed = |source| StoreError::Io { action: "read", path: dir.to_owned(), source };
        let damaged = if verify { log.verify().map_err(failed)? } else { 0 };
        Ok((info, damaged))
    }

    /// Returns the number of bytes of all segments in a folder, which other processes may have open.
    pub fn size(dir: &Path) -> u64 {
        let bytes = |number| std::fs::metadata(files::segment(dir, number)).map_or(0, |file| file.len());
        files::segments(dir).unwrap_or_default().into_iter().map(bytes).sum()
    }

    /// Items of one model. `identity` has all inputs of the contents besides the tokens.
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
        if self.shared.log.is_shared() && models::request_removal(&self.shared.dir, name).is_ok() {
            // Every process obeys the note, this one at once.
            self.shared.obey_notes();
            return spaces.len();
        }
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
        // The reader ends when the last space is dropped. It is not joined.
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
