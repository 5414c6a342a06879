//! Disks that are full, read-only, failing or slow, and folders with files of others.

use std::{
    io,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::SystemTime,
};

use super::*;
use crate::{Access, FaultyDisk};

/// A file system in memory of its own; only root can have one.
struct Mount(TempDir);

impl Mount {
    /// Mounts `bytes` bytes. `None`, with a line for people, if the system refuses it.
    fn new(bytes: usize) -> Option<Self> {
        let dir = TempDir::new().unwrap();
        let size = format!("size={bytes}");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &size, "paguro-test"]).arg(dir.path());
        match mount.output() {
            Ok(output) if output.status.success() => Some(Self(dir)),
            _ => {
                println!("skipped: this user cannot mount a file system");
                None
            }
        }
    }

    fn make_read_only(&self) {
        let status = Command::new("mount").args(["-o", "remount,ro"]).arg(self.0.path()).status();
        assert!(status.unwrap().success());
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

/// Saves items `numbers` of 500 to 1,500 bytes.
fn save(space: &Space, numbers: std::ops::Range<usize>) {
    for number in numbers {
        space.save(&item(number), payload(&id(number), 500 + number * 37 % 1000));
    }
}

/// Loads items `numbers` one by one. Returns how many there are; all must be right.
fn count_right(space: &Space, numbers: std::ops::Range<usize>) -> usize {
    let found = numbers.flat_map(|number| {
        let loaded = load(space, &[number], 1000, PATIENCE).pop()?;
        assert!(is_right(&id(number), &loaded), "item {number} is wrong");
        Some(number)
    });
    found.count()
}

fn open_with(dir: &Path, faults: FaultyDisk) -> Store {
    Store::open(dir, StoreOptions { faults: Some(faults), ..options() }).unwrap()
}

#[test]
fn a_full_disk_keeps_what_fits() {
    let Some(mount) = Mount::new(256 << 10) else { return };
    static NOTICES: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let notice = |line: &str| NOTICES.lock().unwrap().push(line.to_owned());
    let store = Store::open(mount.0.path(), StoreOptions { notice, ..options() }).unwrap();
    let one = space(&store, "one");
    save(&one, 0..600);
    assert!(store.flush(PATIENCE));
    assert!(store.stats().is_off && store.stats().written < 600);
    save(&one, 600..610);
    drop((one, store));
    let notices = NOTICES.lock().unwrap();
    assert_eq!(notices.len(), 1);
    assert!(notices[0].contains("No space left on device"), "{}", notices[0]);
    let store = Store::open(mount.0.path(), options()).unwrap();
    let right = count_right(&space(&store, "one"), 0..600);
    assert!((100..600).contains(&right), "{right} items");
    assert_eq!((store.check(), store.stats().damaged), (Ok(()), 0));
}

#[test]
fn a_disk_without_any_space_and_a_read_only_one_are_refused() {
    let Some(mount) = Mount::new(64 << 10) else { return };
    let dir = mount.0.path().join("kv");
    drop(Store::open(&dir, options()).unwrap());
    mount.make_read_only();
    for dir in [&dir, &mount.0.path().join("other")] {
        let error = Store::open(dir, options()).unwrap_err();
        assert!(error.to_string().contains("Read-only file system"), "{error}");
        assert_eq!(Store::inspect(dir, true).unwrap().1, 0);
    }
}

#[test]
fn torn_and_failing_writes_lose_nothing_else() {
    for seed in 0..60 {
        let dir = in_memory();
        let (mut rng, count) = (Rng(seed), Arc::new(AtomicUsize::new(0)));
        let (fails_at, allowed) = (1 + rng.below(40), rng.below(1400));
        let counted = count.clone();
        let store = open_with(
            dir.path(),
            Arc::new(move |access, bytes| match access {
                Access::Write if counted.fetch_add(1, Ordering::Relaxed) == fails_at => match seed % 3 {
                    0 => Err(io::ErrorKind::Other.into()),
                    _ => Ok(allowed.min(bytes - 1)),
                },
                _ => Ok(bytes),
            }),
        );
        save(&space(&store, "one"), 0..60);
        assert!(store.flush(PATIENCE) && store.stats().is_off);
        assert_eq!(store.check(), Ok(()));
        drop(store);
        let store = Store::open(dir.path(), options()).unwrap();
        assert_eq!(count_right(&space(&store, "one"), 0..60), fails_at, "seed {seed}");
        assert_eq!((store.check(), store.stats().damaged), (Ok(()), 0));
    }
}

#[test]
fn a_disk_that_fails_to_read_turns_the_store_off() {
    let dir = in_memory();
    let reads = Arc::new(AtomicUsize::new(0));
    let counted = reads.clone();
    let store = open_with(
        dir.path(),
        Arc::new(move |access, bytes| match access {
            Access::Read if counted.fetch_add(1, Ordering::Relaxed) >= 3 => Err(io::ErrorKind::Other.into()),
            _ => Ok(bytes),
        }),
    );
    let one = space(&store, "one");
    save(&one, 0..10);
    assert!(store.flush(PATIENCE));
    assert_eq!(load(&one, &[0, 1, 2, 3, 4, 5], 1000, PATIENCE).len(), 3);
    assert!(store.stats().is_off && !one.contains(&item(0)));
    assert_eq!(load(&one, &[0], 1000, PATIENCE).len(), 0);
    assert_eq!(reads.load(Ordering::Relaxed), 4, "nothing is read afterwards");
}

#[test]
fn times_of_files_mean_nothing() {
    let dir = in_memory();
    let store = Store::open(dir.path(), options()).unwrap();
    save(&space(&store, "one"), 0..20);
    drop(store);
    let day = Duration::from_secs(86_400);
    let now = SystemTime::now();
    for time in [SystemTime::UNIX_EPOCH, now - day * 365, now + day * 365 * 40] {
        for entry in fs::read_dir(dir.path()).unwrap() {
            fs::File::open(entry.unwrap().path()).unwrap().set_modified(time).unwrap();
        }
        let store = Store::open(dir.path(), options()).unwrap();
        assert_eq!(count_right(&space(&store, "one"), 0..20), 20);
    }
}

#[cfg(unix)]
#[test]
fn files_of_others_are_neither_used_nor_followed() {
    use std::os::unix::fs::symlink;
    let dir = in_memory();
    let store = Store::open(dir.path(), options()).unwrap();
    save(&space(&store, "one"), 0..20);
    drop(store);
    let segment = |number| files::segment(dir.path(), number);
    let outside = dir.path().join("outside");
    fs::write(&outside, "not of the store").unwrap();
    symlink(&outside, segment(10)).unwrap();
    symlink(segment(0), segment(11)).unwrap();
    symlink(dir.path().join("nowhere"), segment(12)).unwrap();
    fs::hard_link(segment(0), segment(13)).unwrap();
    fs::create_dir(segment(14)).unwrap();
    assert!(Command::new("mkfifo").arg(segment(15)).status().unwrap().success());
    fs::File::create(segment(16)).unwrap().set_len(1 << 40).unwrap();
    fs::write(segment(17), vec![0xff; 5000]).unwrap();
    fs::write(segment(u64::MAX), "a number that none follows").unwrap();
    // A record of a later version.
    let mut later = fs::read(segment(0)).unwrap();
    later[8] = 2;
    fs::write(segment(18), later).unwrap();
    fs::write(dir.path().join("digests.json"), "{\"x\": 3").unwrap();
    fs::write(dir.path().join(format!("model-{}.json", "0".repeat(64))), vec![b'['; 100_000]).unwrap();
    for round in 0..2 {
        let store = Store::open(dir.path(), options()).unwrap();
        let one = space(&store, "one");
        assert_eq!(count_right(&one, 0..20), 20);
        save(&one, 100..120);
        assert!(store.flush(PATIENCE) && !store.stats().is_off, "round {round}");
        assert_eq!((count_right(&one, 100..120), store.check()), (20, Ok(())));
        assert!(store.info().bytes <= options().bound, "the largest one is gone");
    }
    assert_eq!(fs::read_to_string(&outside).unwrap(), "not of the store");
    // A lock that is a link to another file, and a key that is none.
    fs::remove_file(dir.path().join("lock")).unwrap();
    symlink(&outside, dir.path().join("lock")).unwrap();
    assert!(Store::open(dir.path(), options()).is_err());
    fs::remove_file(dir.path().join("lock")).unwrap();
    fs::write(dir.path().join("key"), "short").unwrap();
    let store = Store::open(dir.path(), options()).unwrap();
    assert_eq!(count_right(&space(&store, "one"), 0..20), 0, "another key, another store");
}

#[test]
fn notes_of_other_processes_are_obeyed() {
    let dir = in_memory();
    let store = Store::open(dir.path(), options()).unwrap();
    let (one, two) = (space(&store, "one"), space(&store, "two"));
    save(&one, 0..5);
    save(&two, 0..5);
    assert!(store.flush(PATIENCE));
    // Another process asks, and this one ends before it has looked.
    Store::request_removal(dir.path(), "one").unwrap();
    Store::request_removal(dir.path(), "nobody").unwrap();
    drop((one, two, store));
    let store = Store::open(dir.path(), options()).unwrap();
    assert!(store.flush(PATIENCE));
    assert_eq!(count_right(&space(&store, "one"), 0..5), 0);
    assert_eq!(count_right(&space(&store, "two"), 0..5), 5);
    let notes = fs::read_dir(dir.path()).unwrap().flatten();
    assert_eq!(notes.filter(|it| it.file_name().to_string_lossy().starts_with("remove-")).count(), 0);
}
