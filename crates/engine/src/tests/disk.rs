//! The disk tier over the reference backend: bits of answers, restarts, eviction, slow and damaged disks, swapped models.

use std::{
    fs, io,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use paguro_backend::{KvDtype, SamplingParams};
use paguro_backend_conformance::Rng;
use paguro_kv_store::{Access, Store, StoreOptions};
use tempfile::TempDir;

use super::real::{Answer, BACKEND, model_of};
use crate::{
    DiskCache, DiskStats, Engine, EngineOptions, Event, Handle, HostMemory, ModelParts, PageBudget, Request,
    Usage,
};

const STORE_BYTES: u64 = 64 << 20;

pub(super) fn store(dir: &Path, read_speed: f64) -> Arc<Store> {
    Arc::new(Store::open(dir, StoreOptions { read_speed, ..StoreOptions::new(STORE_BYTES) }).unwrap())
}

/// An engine with room for `tokens` tokens, and with a store if there is one.
fn start(parts: &ModelParts, kv_dtype: KvDtype, tokens: usize, disk: Option<DiskCache>) -> Engine {
    start_with(parts, kv_dtype, tokens, disk, None)
}

/// The same with memory of the host.
pub(super) fn start_with(
    parts: &ModelParts,
    kv_dtype: KvDtype,
    tokens: usize,
    disk: Option<DiskCache>,
    host: Option<Arc<HostMemory>>,
) -> Engine {
    let options = EngineOptions {
        block_size: 4,
        pages: PageBudget::Tokens(tokens),
        max_batch_tokens: 16,
        max_sequences: 3,
        prefix_cache: disk.is_some() || host.is_some(),
        kv_dtype,
        disk,
        host,
        ..EngineOptions::default()
    };
    Engine::start(&BACKEND, parts.clone(), options).unwrap()
}

/// A cache that saves short sequences, and that loads at any speed.
pub(super) fn cache(store: Arc<Store>) -> DiskCache {
    DiskCache { least_tokens: 16, worth: 1e9, ..DiskCache::new(store, "model", Some(b"digest")) }
}

pub(super) fn answer(handle: &Handle, prompt: &[u32]) -> (Answer, Usage) {
    let sampling = SamplingParams { temperature: 0.9, seed: 4, ..SamplingParams::default() };
    let request =
        Request { max_tokens: Some(12), sampling, logprobs: Some(0), ..Request::new(prompt.to_vec()) };
    let mut generation = handle.generate(request).unwrap();
    let mut tokens = Vec::new();
    while let Some(event) = generation.next_blocking() {
        match event {
            Event::Token { token, logprob, .. } => tokens.push((token, logprob.unwrap().to_bits())),
            Event::Finished { usage, .. } => return (vec![tokens], usage),
            Event::Failed(error) => panic!("{error}"),
            _ => {}
        }
    }
    panic!("the request never finished")
}

/// Prompts of two turns: the second begins with the first and its answer.
fn turns(engine: &Engine, rng: &mut Rng, vocab: usize) -> [Vec<u32>; 2] {
    let first = rng.tokens(90, vocab);
    let (expected, _) = answer(&engine.handle(), &first);
    let mut second = first.clone();
    second.extend(expected[0].iter().map(|(token, _)| *token));
    second.extend(rng.tokens(9, vocab));
    [first, second]
}

#[test]
fn answers_after_a_restart_are_bit_for_bit_those_of_solo_runs() {
    for (windows, mixers, kv_dtype) in [
        (&[None, None][..], "", KvDtype::F16),
        (&[None, None], "", KvDtype::Q8),
        (&[Some(9), None, Some(9)], "", KvDtype::F16),
        (&[Some(21)], "", KvDtype::Q4),
        (&[None, None, None], "dac", KvDtype::F16),
    ] {
        let what = format!("{windows:?} {mixers} {kv_dtype:?}");
        let parts = model_of(windows, mixers);
        let solo = start(&parts, kv_dtype, 400, None);
        let mut rng = Rng::new(31);
        let [first, second] = turns(&solo, &mut rng, parts.program.vocab);
        let expected = [&first, &second].map(|prompt| answer(&solo.handle(), prompt).0);
        let dir = TempDir::new().unwrap();
        let before = start(&parts, kv_dtype, 400, Some(cache(store(dir.path(), f64::INFINITY))));
        assert_eq!(answer(&before.handle(), &first).0, expected[0], "{what}");
        before.shutdown();
        for (prompt, expected) in [(&second, &expected[1]), (&first, &expected[0])] {
            let after = start(&parts, kv_dtype, 400, Some(cache(store(dir.path(), f64::INFINITY))));
            let (tokens, usage) = answer(&after.handle(), prompt);
            assert_eq!(&tokens, expected, "{what}");
            let stats = after.handle().stats().disk;
            // A hit of a model with states ends at a checkpoint.
            assert!(usage.disk_tokens >= 64 && usage.cached_tokens == usage.disk_tokens, "{what}: {usage:?}");
            assert_eq!((stats.hit_tokens, stats.loads), (usage.disk_tokens as u64, 1), "{what}");
            assert_eq!(after.handle().check_pages().unwrap(), Ok(()));
            after.shutdown();
        }
    }
}

#[test]
fn conversations_that_take_turns_come_back_from_the_disk() {
    let parts = model_of(&[None, Some(21)], "");
    let solo = start(&parts, KvDtype::F16, 400, None);
    let mut rng = Rng::new(32);
    let prompts: Vec<_> = (0..6).map(|_| rng.tokens(80, parts.program.vocab)).collect();
    let expected: Vec<_> = prompts.iter().map(|prompt| answer(&solo.handle(), prompt).0).collect();
    let dir = TempDir::new().unwrap();
    // Memory for two of them.
    let engine = start(&parts, KvDtype::F16, 200, Some(cache(store(dir.path(), f64::INFINITY))));
    let mut returned = 0;
    for round in 0..3 {
        for (prompt, expected) in prompts.iter().zip(&expected) {
            let (tokens, usage) = answer(&engine.handle(), prompt);
            assert_eq!(&tokens, expected);
            // A load that takes longer than computing the prompt is not awaited.
            assert!([0, 76].contains(&usage.cached_tokens), "round {round}: {usage:?}");
            returned += usize::from(round > 0 && usage.cached_tokens == 76);
        }
    }
    assert!(returned > 6, "{returned} of 12 conversations");
    // All at once, of which some are displaced.
    thread::scope(|scope| {
        for (prompt, expected) in prompts.iter().zip(&expected) {
            let handle = engine.handle();
            scope.spawn(move || assert_eq!(&answer(&handle, prompt).0, expected));
        }
    });
    let stats = engine.handle().stats();
    assert!(stats.disk.hit_tokens > 400 && stats.disk.dropped == 0, "{stats:?}");
    assert_eq!(engine.handle().check_pages().unwrap(), Ok(()));
}

#[test]
fn other_weights_and_formats_share_nothing() {
    let parts = model_of(&[None], "");
    let prompt = Rng::new(33).tokens(80, parts.program.vocab);
    let dir = TempDir::new().unwrap();
    let hits = |weights: &[u8], kv_dtype| {
        let cache = DiskCache { weights: Some(weights.to_vec()), ..cache(store(dir.path(), f64::INFINITY)) };
        let engine = start(&parts, kv_dtype, 400, Some(cache));
        let usage = answer(&engine.handle(), &prompt).1;
        engine.shutdown();
        usage.disk_tokens
    };
    assert_eq!(hits(b"one", KvDtype::F16), 0);
    assert_eq!(hits(b"another", KvDtype::F16), 0, "another file of the same name");
    assert_eq!(hits(b"one", KvDtype::Q8), 0, "other pages");
    assert_eq!(hits(b"one", KvDtype::Q4), 0, "other pages");
    assert_eq!(hits(b"one", KvDtype::F16), 76);
}

#[test]
fn damaged_files_are_computed_again() {
    let parts = model_of(&[None, None], "");
    let prompt = Rng::new(34).tokens(90, parts.program.vocab);
    let dir = TempDir::new().unwrap();
    let engine = start(&parts, KvDtype::F16, 400, Some(cache(store(dir.path(), f64::INFINITY))));
    let (expected, _) = answer(&engine.handle(), &prompt);
    engine.shutdown();
    let segment = fs::read_dir(dir.path())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| path.extension().is_some_and(|extension| extension == "kv"))
        .unwrap();
    let bytes = fs::read(&segment).unwrap();
    // A hit needs the first 22 of 25 items.
    for round in 0..7 {
        let mut changed = bytes.clone();
        let at = (round * 2 + 1) * bytes.len() / 16;
        changed[at] ^= 0x10;
        fs::write(&segment, &changed).unwrap();
        let engine = start(&parts, KvDtype::F16, 400, Some(cache(store(dir.path(), f64::INFINITY))));
        let (tokens, usage) = answer(&engine.handle(), &prompt);
        assert_eq!(tokens, expected, "damaged at {at}");
        assert!(usage.disk_tokens < 88, "damaged at {at}: {usage:?}");
        engine.shutdown();
        // Items that were computed again are in a new segment.
        for entry in fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path()) {
            if entry != segment && entry.extension().is_some_and(|extension| extension == "kv") {
                fs::remove_file(entry).unwrap();
            }
        }
    }
}

#[test]
fn a_load_that_is_slower_than_computing_is_not_done() {
    let parts = model_of(&[None], "");
    let mut rng = Rng::new(35);
    let prompts: Vec<_> = (0..4).map(|_| rng.tokens(80, parts.program.vocab)).collect();
    let dir = TempDir::new().unwrap();
    let engine = start(&parts, KvDtype::F16, 400, Some(cache(store(dir.path(), f64::INFINITY))));
    let expected: Vec<_> = prompts.iter().map(|prompt| answer(&engine.handle(), prompt).0).collect();
    engine.shutdown();
    // A page takes longer than the whole prompt.
    let slow = DiskCache { worth: 1.0, ..cache(store(dir.path(), 5e3)) };
    let engine = start(&parts, KvDtype::F16, 400, Some(slow));
    for (prompt, expected) in prompts.iter().zip(&expected) {
        let (tokens, usage) = answer(&engine.handle(), prompt);
        assert_eq!(&tokens, expected);
        assert!(usage.disk_tokens <= 4, "{usage:?}");
    }
    let DiskStats { loads, declined, .. } = engine.handle().stats().disk;
    assert!(loads <= 2 && declined >= 2, "{loads} loads, {declined} declined");
}

/// Waits until everything is on disk.
pub(super) fn wait_until_written(handle: &Handle) {
    let end = Instant::now() + Duration::from_secs(30);
    while !handle.stats().disk.has_caught_up() {
        assert!(Instant::now() < end, "{:?}", handle.stats().disk);
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn what_is_computed_before_the_digest_is_known_is_saved_afterwards() {
    let parts = model_of(&[None], "");
    let prompt = Rng::new(36).tokens(80, parts.program.vocab);
    let dir = TempDir::new().unwrap();
    let early = DiskCache { weights: None, ..cache(store(dir.path(), f64::INFINITY)) };
    let engine = start(&parts, KvDtype::F16, 400, Some(early.clone()));
    let handle = engine.handle();
    let (expected, _) = answer(&handle, &prompt);
    let stats = handle.stats().disk;
    assert!(stats.is_opening && stats.waiting >= 20 && !stats.has_caught_up(), "{stats:?}");
    handle.set_weights_digest(Some(b"digest"));
    wait_until_written(&handle);
    assert_eq!(answer(&handle, &prompt).0, expected);
    engine.shutdown();
    drop((handle, early));
    let engine = start(&parts, KvDtype::F16, 400, Some(cache(store(dir.path(), f64::INFINITY))));
    let (tokens, usage) = answer(&engine.handle(), &prompt);
    assert_eq!((tokens, usage.disk_tokens), (expected.clone(), 76));
    engine.shutdown();
    // Files that cannot be read.
    let none = DiskCache { weights: None, ..cache(store(dir.path(), f64::INFINITY)) };
    let engine = start(&parts, KvDtype::F16, 400, Some(none));
    engine.handle().set_weights_digest(None);
    assert_eq!(answer(&engine.handle(), &prompt).0, expected);
    assert!(!engine.handle().stats().disk.exists);
}

#[test]
fn a_failing_disk_changes_no_answer() {
    let parts = model_of(&[None, Some(21)], "");
    let solo = start(&parts, KvDtype::F16, 400, None);
    let mut rng = Rng::new(37);
    let prompts: Vec<_> = (0..5).map(|_| rng.tokens(80, parts.program.vocab)).collect();
    let expected: Vec<_> = prompts.iter().map(|prompt| answer(&solo.handle(), prompt).0).collect();
    for fails_at in [0, 3, 30, 90, 200] {
        let dir = TempDir::new().unwrap();
        let count = AtomicUsize::new(0);
        let faults = move |access, bytes: usize| match (access, count.fetch_add(1, Ordering::Relaxed)) {
            (Access::Write, number) if number >= fails_at => Ok(bytes / 2),
            (Access::Read, number) if number >= fails_at => Err(io::ErrorKind::Other.into()),
            _ => Ok(bytes),
        };
        let options = StoreOptions { faults: Some(Arc::new(faults)), ..StoreOptions::new(STORE_BYTES) };
        let store = Arc::new(Store::open(dir.path(), options).unwrap());
        let engine = start(&parts, KvDtype::F16, 200, Some(cache(store.clone())));
        for round in 0..3 {
            for (prompt, expected) in prompts.iter().zip(&expected) {
                assert_eq!(&answer(&engine.handle(), prompt).0, expected, "{fails_at}, round {round}");
            }
        }
        assert!(store.stats().is_off, "{fails_at}");
        assert_eq!(engine.handle().check_pages().unwrap(), Ok(()));
    }
}
