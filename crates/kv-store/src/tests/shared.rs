//! Stores that several processes have open: logs and stores in one folder, which share nothing but files.

use super::*;
use crate::log::Scan;

const BOUND: u64 = 2 << 20;

/// A process that has the store open.
struct Member {
    log: Log,
    appender: Appender,
    /// Locked while it is the leader.
    leader: Option<fs::File>,
}

impl Member {
    fn open(dir: &Path) -> Self {
        files::folder(dir).unwrap();
        let leader = files::lead(dir).unwrap();
        let key = files::first_key(dir, leader.is_some()).unwrap();
        let (log, appender, _): (_, _, Scan) = Log::open(dir, key, BOUND, true).unwrap();
        let mut member = Self { log, appender, leader };
        member.refresh(dir);
        member
    }

    fn refresh(&mut self, dir: &Path) {
        if self.leader.is_none() {
            self.leader = files::lead(dir).unwrap();
        }
        if self.leader.is_some() {
            self.log.lead();
        }
        self.log.refresh(&mut self.appender).unwrap();
    }

    fn append(&mut self, number: usize, bytes: usize) {
        let id = id(number);
        self.log.append(&mut self.appender, SPACE, id, &payload(&id, bytes)).unwrap();
    }

    fn has(&self, number: usize) -> bool {
        let id = id(number);
        self.log.read(&id).is_ok_and(|found| is_right(&id, &found))
    }
}

#[test]
fn each_process_reads_what_all_have_written() {
    let dir = in_memory();
    let mut all: Vec<_> = (0..3).map(|_| Member::open(dir.path())).collect();
    assert_eq!(all.iter().map(|one| one.log.leads()).collect::<Vec<_>>(), [true, false, false]);
    for number in 0..30 {
        all[number % 3].append(number, 500);
    }
    assert!(!all[0].has(1), "nothing is shared but files");
    for one in &mut all {
        one.refresh(dir.path());
        assert!((0..30).all(|number| one.has(number)));
        assert_eq!(state(&one.log), (30, Ok(())));
    }
    // Records of a segment that goes on.
    all[1].append(31, 700);
    all[2].refresh(dir.path());
    assert!(all[2].has(31));
    // The next leader is one that is there.
    drop(all.remove(0));
    all.iter_mut().for_each(|one| one.refresh(dir.path()));
    assert_eq!(all.iter().filter(|one| one.log.leads()).count(), 1);
}

#[test]
fn a_removed_space_is_gone_when_its_last_writer_has_seen_it() {
    let dir = in_memory();
    let [mut leader, mut other] = [Member::open(dir.path()), Member::open(dir.path())];
    for number in 0..10 {
        other.append(number, 500);
    }
    leader.refresh(dir.path());
    leader.log.remove_space(&mut leader.appender, &SPACE).unwrap();
    assert!(!leader.has(0) && other.has(0) && !leader.log.has_compacted());
    leader.refresh(dir.path());
    assert_eq!(segment_files(dir.path()).len(), 1, "the segment has a writer");
    other.log.remove_space(&mut other.appender, &SPACE).unwrap();
    leader.refresh(dir.path());
    assert!(segment_files(dir.path()).is_empty() && leader.log.has_compacted());
}

#[test]
fn a_lease_without_its_process_holds_nothing_up() {
    let dir = in_memory();
    let mut leader = Member::open(dir.path());
    let mut other = Member::open(dir.path());
    other.append(0, 500);
    let number = files::segments(dir.path()).unwrap()[0];
    assert!(files::is_leased(dir.path(), number));
    drop(other);
    // As a killed process leaves it: the file without a lock.
    fs::write(dir.path().join(format!("writing-{number:016x}")), b"").unwrap();
    assert!(!files::is_leased(dir.path(), number));
    leader.refresh(dir.path());
    assert!(leader.has(0));
}

#[test]
fn random_processes_never_read_a_wrong_item_and_stay_below_the_bound() {
    const ITEMS: usize = 400;
    let dir = in_memory();
    let mut rng = Rng(7);
    let mut all = vec![Member::open(dir.path())];
    let (mut hits, mut stored) = (0, 0);
    for step in 0..6000 {
        let at = rng.below(all.len());
        match rng.below(20) {
            0 if all.len() < 4 => all.push(Member::open(dir.path())),
            // Also the leader, in the middle of everything.
            1 if all.len() > 1 && rng.below(4) == 0 => drop(all.remove(at)),
            2..6 => all[at].refresh(dir.path()),
            6..12 => {
                stored += 1;
                all[at].append(rng.below(ITEMS), 100 + rng.below(30_000));
            }
            12 => {
                let Member { log, appender, .. } = &mut all[at];
                log.append_uses(appender).unwrap();
            }
            _ => {
                let id = id(rng.below(ITEMS));
                match all[at].log.read(&id) {
                    Ok(found) => {
                        assert!(is_right(&id, &found), "step {step}");
                        all[at].log.index().read.push(id);
                        hits += 1;
                    }
                    Err(crate::log::ReadError::Missing) => {}
                    Err(error) => panic!("step {step}: {error:?}"),
                }
            }
        }
        if step % 500 == 0 {
            for one in &mut all {
                one.refresh(dir.path());
                assert_eq!(one.log.index().check(), Ok(()), "step {step}");
            }
            assert_eq!(all.iter().filter(|one| one.log.leads()).count(), 1);
            let bytes = Store::size(dir.path());
            assert!(bytes <= BOUND, "{bytes} bytes at step {step}");
        }
    }
    assert!(hits > 300 && stored > 1000, "{hits} hits of {stored}");
}

#[test]
fn stores_share_items_and_their_removal() {
    let dir = in_memory();
    let open =
        || Store::open(dir.path(), StoreOptions { is_shared: true, ..StoreOptions::new(BOUND) }).unwrap();
    let [one, two] = [open(), open()];
    assert!(matches!(Store::open(dir.path(), StoreOptions::new(BOUND)), Err(StoreError::InUse { .. })));
    let info = ModelInfo { model: "fox".into(), ..ModelInfo::default() };
    let [here, there] = [&one, &two].map(|store| store.space(&[b"weights"], &info));
    let item = Item { key: [5; 32], part: 0 };
    there.save(&item, payload(&[5; 32], 5000));
    let wait = |is_so: &dyn Fn() -> bool| {
        let end = std::time::Instant::now() + PATIENCE;
        while !is_so() {
            assert!(std::time::Instant::now() < end, "it never happens");
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    wait(&|| here.contains(&item));
    here.watch();
    // The one that does not lead removes the model.
    assert_eq!(two.remove_model("fox"), 1);
    wait(&|| !here.contains(&item) && !there.contains(&item));
    wait(&|| Store::size(dir.path()) == 0 && models_of(dir.path()) == 0);
    assert_eq!(here.take_removed(), [here.id(&item)]);
}

/// Number of models with a name, and of notes to remove one.
fn models_of(dir: &Path) -> usize {
    crate::models::spaces(dir).len() + crate::models::removals(dir).len()
}
