//! Stores whose files are damaged, full, shared or killed.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{
        Mutex,
        mpsc::{Receiver, channel},
    },
    time::Duration,
};

use tempfile::TempDir;

use crate::{
    Chunk, Id, Item, ModelInfo, Space, Store, StoreError, StoreOptions, files,
    log::{Appender, Log},
};

mod disks;
mod shared;

const PATIENCE: Duration = Duration::from_secs(30);
const SPACE: Id = [3; 32];

/// A generator with equal numbers for equal seeds (SplitMix64).
struct Rng(u64);

impl Rng {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % end.max(1) as u64) as usize
    }
}

fn id(number: usize) -> Id {
    *blake3::hash(&number.to_le_bytes()).as_bytes()
}

/// The only right content of an item.
fn payload(id: &Id, bytes: usize) -> Vec<u8> {
    let mut payload = vec![0; bytes];
    blake3::Hasher::new_keyed(id).finalize_xof().fill(&mut payload);
    payload
}

fn is_right(id: &Id, found: &[u8]) -> bool {
    payload(id, found.len()) == found && found.len() >= 100
}

fn open(dir: &Path, bound: u64) -> (Log, Appender) {
    files::folder(dir).unwrap();
    let (log, appender, _) = Log::open(dir, files::key(dir, true).unwrap(), bound, false).unwrap();
    (log, appender)
}

/// Number of items, and whether the views of the index agree.
fn state(log: &Log) -> (usize, Result<(), String>) {
    let index = log.index();
    (index.len(), index.check())
}

fn segment_files(dir: &Path) -> Vec<PathBuf> {
    files::segments(dir).unwrap().into_iter().map(|number| files::segment(dir, number)).collect()
}

/// A folder whose files need no disk, where the system has one.
fn in_memory() -> TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| TempDir::new()).unwrap()
}

/// Appends items `numbers`, of 100 to 700 bytes.
fn append(log: &Log, to: &mut Appender, numbers: std::ops::Range<usize>) {
    for number in numbers {
        let id = id(number);
        log.append(to, SPACE, id, &payload(&id, 100 + number * 37 % 600)).unwrap();
    }
}

#[test]
fn items_survive_a_restart_and_their_order_of_use_does() {
    let dir = TempDir::new().unwrap();
    let (log, mut to) = open(dir.path(), 1 << 20);
    append(&log, &mut to, 0..20);
    log.index().touch(&id(0));
    log.index().read.push(id(0));
    log.append_uses(&mut to).unwrap();
    let (log, _) = open(dir.path(), 1 << 20);
    assert_eq!(state(&log), (20, Ok(())));
    assert!((0..20).all(|number| is_right(&id(number), &log.read(&id(number)).unwrap())));
    assert!(log.index().evict());
    assert!(log.index().get(&id(0)).is_some() && log.index().get(&id(1)).is_none());
}

#[test]
fn no_mutation_of_the_files_yields_a_wrong_item() {
    const ITEMS: usize = 14;
    let dir = in_memory();
    for part in 0..3 {
        // Each open begins a segment.
        let (log, mut to) = open(dir.path(), 1 << 20);
        append(&log, &mut to, part * ITEMS / 3..(part + 1) * ITEMS / 3);
        log.index().read.push(id(0));
        log.append_uses(&mut to).unwrap();
    }
    // Items of another store, which are valid there.
    let foreign = TempDir::new().unwrap();
    let (log, mut to) = open(foreign.path(), 1 << 20);
    append(&log, &mut to, 0..ITEMS);
    let foreign = fs::read(&segment_files(foreign.path())[0]).unwrap();
    let paths = segment_files(dir.path());
    let originals: Vec<Vec<u8>> = paths.iter().map(|path| fs::read(path).unwrap()).collect();
    let key = files::key(dir.path(), false).unwrap();
    let (mut rng, mut right, mut lost) = (Rng(1), 0, 0);
    for round in 0..10_000 {
        let file = rng.below(paths.len());
        let mut bytes = originals[file].clone();
        let (at, to) = (rng.below(bytes.len()), rng.below(bytes.len()));
        let len = rng.below(bytes.len() - at.max(to));
        match rng.below(9) {
            0 => bytes[at] ^= 1 << rng.below(8),
            1 => bytes.truncate(at),
            2 => bytes[at..at + len].fill(rng.below(256) as u8),
            3 => bytes.copy_within(at..at + len, to),
            4 => {
                let other = &originals[rng.below(originals.len())];
                let len = len.min(other.len().saturating_sub(at));
                let from = at.min(other.len() - len);
                bytes[at..at + len].copy_from_slice(&other[from..from + len]);
            }
            5 => bytes = originals[rng.below(originals.len())].clone(),
            6 => bytes = foreign.clone(),
            7 => bytes.extend_from_slice(&originals[file][at..]),
            _ => drop(bytes.drain(at..at + len)),
        }
        fs::write(&paths[file], &bytes).unwrap();
        let (log, ..) = Log::open(dir.path(), key, 1 << 20, false).unwrap();
        assert_eq!(log.index().check(), Ok(()));
        for number in 0..ITEMS {
            match log.read(&id(number)) {
                Ok(found) if is_right(&id(number), &found) => right += 1,
                Ok(_) => panic!("round {round}: a wrong item"),
                Err(_) => lost += 1,
            }
        }
        fs::write(&paths[file], &originals[file]).unwrap();
    }
    // The mutations matter, and hide no more than what is in the same file.
    assert!(lost > 10_000 && right > 80_000, "{right} {lost}");
}

#[test]
fn files_that_are_changed_while_the_store_is_open_yield_no_wrong_item() {
    let dir = TempDir::new().unwrap();
    let (log, mut to) = open(dir.path(), 1 << 20);
    append(&log, &mut to, 0..20);
    let path = &segment_files(dir.path())[0];
    let mut bytes = fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(path, &bytes[..bytes.len() - 50]).unwrap();
    let right =
        (0..20).filter(|&number| log.read(&id(number)).is_ok_and(|found| is_right(&id(number), &found)));
    assert_eq!(right.count(), 18);
    assert_eq!(state(&log), (18, Ok(())));
}

#[test]
fn a_store_stays_within_its_bound_and_keeps_what_was_used_last() {
    let dir = TempDir::new().unwrap();
    let bound = 2 << 20;
    let (log, mut to) = open(dir.path(), bound);
    for number in 0..4000 {
        append(&log, &mut to, number..number + 1);
        if number % 16 == 0 && log.read(&id(7)).is_ok() {
            log.index().touch(&id(7));
        }
        let files: u64 = segment_files(dir.path()).iter().map(|path| fs::metadata(path).unwrap().len()).sum();
        assert!(files <= bound && files == log.index().total(), "{files} bytes");
    }
    assert_eq!(log.index().check(), Ok(()));
    assert!(is_right(&id(7), &log.read(&id(7)).unwrap()), "it was used all the time");
    assert!(log.read(&id(8)).is_err() && log.read(&id(3999)).is_ok());
    let live = log.index().live();
    assert!(live > bound / 2, "{live} bytes are used");
    // The same after a restart.
    let (log, _) = open(dir.path(), bound);
    assert_eq!(log.verify().unwrap(), 0);
    assert_eq!(state(&log).1, Ok(()));
    assert!(log.read(&id(3999)).is_ok());
}

#[test]
fn a_write_that_was_cut_off_anywhere_loses_only_itself() {
    let dir = TempDir::new().unwrap();
    let (log, mut to) = open(dir.path(), 1 << 20);
    append(&log, &mut to, 0..6);
    let whole = fs::metadata(&segment_files(dir.path())[0]).unwrap().len();
    append(&log, &mut to, 6..7);
    let path = segment_files(dir.path())[0].clone();
    let bytes = fs::read(&path).unwrap();
    for end in whole as usize..bytes.len() {
        fs::write(&path, &bytes[..end]).unwrap();
        let (log, mut to) = open(dir.path(), 1 << 20);
        assert_eq!(log.index().len(), 6, "cut at {end}");
        if end % 50 == 0 {
            append(&log, &mut to, 6..7);
            let (log, _) = open(dir.path(), 1 << 20);
            assert_eq!(log.index().len(), 7, "appended after a cut at {end}");
            fs::remove_file(&segment_files(dir.path())[1]).unwrap();
        }
    }
}

fn options() -> StoreOptions {
    StoreOptions::new(8 << 20)
}

fn space(store: &Store, model: &str) -> Space {
    let info = ModelInfo { model: model.into(), format: "test".into(), block_size: 32 };
    store.space(&[model.as_bytes()], &info)
}

fn item(number: usize) -> Item {
    Item { key: id(number), part: 0 }
}

fn load(space: &Space, numbers: &[usize], bytes: usize, budget: Duration) -> Vec<Vec<u8>> {
    let (sender, chunks): (_, Receiver<Chunk>) = channel();
    let items: Vec<Item> = numbers.iter().map(|&number| item(number)).collect();
    space.load(&items, bytes, budget, Box::new(move |chunk| drop(sender.send(chunk))));
    let mut payloads = Vec::new();
    loop {
        let chunk = chunks.recv_timeout(PATIENCE).unwrap();
        assert_eq!(chunk.first, payloads.len());
        payloads.extend(chunk.payloads);
        if chunk.is_last {
            return payloads;
        }
    }
}

#[test]
fn spaces_are_apart_and_are_removed_one_by_one() {
    let dir = TempDir::new().unwrap();
    let store = Store::open(dir.path(), options()).unwrap();
    let (one, two) = (space(&store, "one"), space(&store, "two"));
    one.save(&item(1), b"of one".repeat(9));
    two.save(&item(1), b"of two".repeat(9));
    two.save(&Item { part: 1, ..item(1) }, b"part".repeat(9));
    assert!(store.flush(PATIENCE));
    assert_eq!(load(&one, &[1, 2], 54, PATIENCE), [b"of one".repeat(9)]);
    assert_eq!(load(&two, &[1], 54, PATIENCE), [b"of two".repeat(9)]);
    let names = |store: &Store| {
        let mut names: Vec<_> =
            store.info().spaces.into_iter().map(|(it, items, _)| (it.unwrap().model, items)).collect();
        names.sort();
        names
    };
    assert_eq!(names(&store), [("one".into(), 1), ("two".into(), 2)]);
    assert_eq!((store.remove_model("two"), store.flush(PATIENCE)), (1, true));
    assert_eq!(names(&store), [("one".into(), 1)]);
    assert!(one.contains(&item(1)) && !two.contains(&item(1)));
    two.save(&item(5), vec![5; 200]);
    assert!(store.flush(PATIENCE) && !two.contains(&item(5)), "a model that was removed saves nothing more");
    let secret = b"of two".repeat(9);
    for path in segment_files(dir.path()) {
        let bytes = fs::read(path).unwrap();
        assert!(!bytes.windows(secret.len()).any(|window| window == secret), "its bytes are gone");
    }
    store.clear();
    assert!(store.flush(PATIENCE) && segment_files(dir.path()).is_empty() && !one.contains(&item(1)));
    assert_eq!(store.check(), Ok(()));
}

#[test]
fn a_store_has_one_owner_and_is_private() {
    let dir = TempDir::new().unwrap();
    let folder = dir.path().join("kv");
    let store = Store::open(&folder, options()).unwrap();
    space(&store, "one").save(&item(1), vec![1; 500]);
    assert!(store.flush(PATIENCE));
    assert!(matches!(Store::open(&folder, options()), Err(StoreError::InUse { .. })));
    let (info, damaged) = Store::inspect(&folder, true).unwrap();
    assert_eq!((info.spaces.len(), info.spaces[0].1, damaged), (1, 1, 0));
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&folder), 0o700);
        for entry in fs::read_dir(&folder).unwrap() {
            assert_eq!(mode(&entry.unwrap().path()), 0o600);
        }
    }
    drop(store);
    assert!(Store::open(&folder, options()).is_ok());
    assert!(Store::inspect(&dir.path().join("none"), true).is_ok());
}

#[test]
fn a_disk_that_fails_turns_the_store_off_with_one_message() {
    static NOTICES: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let dir = TempDir::new().unwrap();
    let notice = |line: &str| NOTICES.lock().unwrap().push(line.to_owned());
    let store = Store::open(dir.path(), StoreOptions { notice, ..options() }).unwrap();
    let space = space(&store, "one");
    // No segment can be created.
    fs::create_dir(files::segment(dir.path(), 0)).unwrap();
    (0..20).for_each(|number| space.save(&item(number), vec![1; 500]));
    assert!(store.flush(PATIENCE));
    assert!(store.stats().is_off && space.room() == 0 && !space.contains(&item(1)));
    assert!(load(&space, &[1], 500, PATIENCE).is_empty());
    let notices = NOTICES.lock().unwrap();
    assert_eq!(notices.len(), 1);
    assert!(notices[0].starts_with("the cache on disk is off: cannot write to "), "{}", notices[0]);
}

#[test]
fn a_slow_disk_is_given_up_within_the_budget() {
    let dir = TempDir::new().unwrap();
    let slow = StoreOptions { read_speed: 100e3, ..options() };
    let store = Store::open(dir.path(), slow).unwrap();
    let space = space(&store, "one");
    let bytes = 10_000;
    (0..40).for_each(|number| space.save(&item(number), vec![1; bytes]));
    assert!(store.flush(PATIENCE));
    // All of it would take four seconds.
    let numbers: Vec<usize> = (0..40).collect();
    let loaded = load(&space, &numbers, bytes, Duration::from_millis(500));
    assert!(loaded.len() < 10, "{} items", loaded.len());
    assert!(space.read_speed() < 100e6, "{}", space.read_speed());
}
