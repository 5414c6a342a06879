//! The host tier over the reference backend: bits of answers, its bound, displaced sequences, and both tiers together.

use std::thread;

use paguro_backend::KvDtype;
use paguro_backend_conformance::Rng;
use tempfile::TempDir;

use super::{
    disk::{answer, cache, start_with, store, wait_until_written},
    real::{Answer, model_of},
};
use crate::{Engine, HostMemory, ModelParts};

const PLENTY: u64 = 64 << 20;

/// Prompts and their answers without any cache.
fn expected(parts: &ModelParts, kv_dtype: KvDtype, count: usize) -> Vec<(Vec<u32>, Answer)> {
    let solo = start_with(parts, kv_dtype, 400, None, None);
    let mut rng = Rng::new(41);
    let prompts = (0..count).map(|_| rng.tokens(80, parts.program.vocab));
    let with_answer = |prompt: Vec<u32>| {
        let answer = answer(&solo.handle(), &prompt).0;
        (prompt, answer)
    };
    prompts.map(with_answer).collect()
}

/// Runs all requests concurrently; some sequences are paused and moved out of the pages.
fn run_together(engine: &Engine, expected: &[(Vec<u32>, Answer)]) {
    thread::scope(|scope| {
        for (prompt, expected) in expected {
            let handle = engine.handle();
            scope.spawn(move || assert_eq!(&answer(&handle, prompt).0, expected));
        }
    });
}

#[test]
fn evicted_blocks_come_back_with_the_same_bits() {
    for (windows, mixers, kv_dtype) in [
        (&[None, Some(21)][..], "", KvDtype::F16),
        (&[Some(9), None, Some(9)], "", KvDtype::Q8),
        (&[None, None, None], "dac", KvDtype::F16),
    ] {
        let what = format!("{windows:?} {mixers} {kv_dtype:?}");
        let parts = model_of(windows, mixers);
        let expected = expected(&parts, kv_dtype, 6);
        // Memory of the device for two of them.
        let engine = start_with(&parts, kv_dtype, 200, None, Some(HostMemory::new(PLENTY)));
        let handle = engine.handle();
        for round in 0..3 {
            for (prompt, expected) in &expected {
                let (tokens, usage) = answer(&handle, prompt);
                assert_eq!(&tokens, expected, "{what}");
                assert!(round == 0 || usage.cached_tokens >= 60, "{what}, round {round}: {usage:?}");
            }
        }
        run_together(&engine, &expected);
        let stats = handle.stats();
        assert!(stats.host.hit_tokens > 400 && stats.host.dropped == 0, "{what}: {stats:?}");
        assert!(stats.host.saved_nanoseconds > 0 && stats.host.bytes <= PLENTY, "{what}: {stats:?}");
        assert_eq!(handle.check_pages().unwrap(), Ok(()));
        handle.clear_prefix_cache();
        assert_eq!(answer(&handle, &expected[0].0).1.cached_tokens, 0, "{what}");
    }
}

#[test]
fn engines_share_the_memory_of_the_host() {
    let parts = model_of(&[None], "");
    let expected = expected(&parts, KvDtype::F16, 6);
    let run = |engine: &Engine| {
        for (prompt, expected) in expected.iter().chain(&expected) {
            assert_eq!(&answer(&engine.handle(), prompt).0, expected);
        }
        assert_eq!(engine.handle().check_pages().unwrap(), Ok(()));
        engine.handle().stats().host
    };
    let start = |memory| start_with(&parts, KvDtype::F16, 200, None, Some(memory));
    let page = {
        let host = run(&start(HostMemory::new(PLENTY)));
        host.bytes / host.units as u64
    };
    let memory = HostMemory::new(30 * page);
    let (one, two) = (start(memory.clone()), start(memory.clone()));
    let first = run(&one);
    assert_eq!(first.bytes, 30 * page, "the longest unused ones made room");
    // Its memory is all in use until the first engine ends.
    let second = run(&two);
    assert!(second.bytes == 0 && second.dropped > 0, "{second:?}");
    one.shutdown();
    assert_eq!(run(&two).bytes, 30 * page);
    // No unit fits.
    let none = run(&start(HostMemory::new(page - 1)));
    assert_eq!((none.bytes, none.hit_tokens), (0, 0));
}

#[test]
fn a_prefix_comes_from_both_tiers() {
    let parts = model_of(&[None, Some(21)], "");
    let expected = expected(&parts, KvDtype::F16, 6);
    let dir = TempDir::new().unwrap();
    // The host has room for about three of them.
    let host = HostMemory::new(76_800);
    let disk = cache(store(dir.path(), f64::INFINITY));
    let engine = start_with(&parts, KvDtype::F16, 200, Some(disk), Some(host));
    let handle = engine.handle();
    for round in 0..3 {
        // Back and forth: those that were used last are on the host, and the others only on the disk.
        let order: Vec<_> = match round % 2 {
            0 => expected.iter().collect(),
            _ => expected.iter().rev().collect(),
        };
        for (prompt, expected) in order {
            let (tokens, usage) = answer(&handle, prompt);
            assert_eq!(&tokens, expected);
            assert!(usage.host_tokens + usage.disk_tokens <= usage.cached_tokens);
            wait_until_written(&handle);
        }
    }
    run_together(&engine, &expected);
    let stats = handle.stats();
    assert!(stats.host.hit_tokens > 0 && stats.disk.hit_tokens > 0, "{stats:?}");
    assert_eq!(handle.check_pages().unwrap(), Ok(()));
}
