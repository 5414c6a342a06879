//! Adapters: loads and unloads beside running requests, the prefix cache, limits and events.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use paguro_backend::{LowRank, Matrix, MatrixId, WeightFormat};
use paguro_backend_conformance::random_adapter;

use super::real::{self, BACKEND, model_of, requests};
use crate::{
    Adapter, AdapterError, AdapterLimits, AdapterWeights, DraftOptions, Engine, EngineOptions, EventSink,
    ExtraKey, Handle, KvEvent, ModelParts, PageBudget, PageOrder, Request, adapters::pieces,
};

fn weights(parts: &ModelParts, seed: u64) -> AdapterWeights {
    let pairs = random_adapter(&parts.program, &parts.weights, seed);
    AdapterWeights { name: format!("adapter-{seed}").into(), pairs }
}

fn load(handle: &Handle, parts: &ModelParts, seed: u64) -> Adapter {
    handle.load_adapter(weights(parts, seed)).unwrap()
}

/// Seeds and scales of the adapters of request `index`: none, one of five, or two.
fn uses(index: usize) -> Vec<(u64, f32)> {
    match index % 7 {
        0 => Vec::new(),
        6 => vec![(1, 0.5), (3, -1.0)],
        seed => vec![(seed as u64, 1.0)],
    }
}

/// Requests with five adapters and none run together, while adapters are loaded, replaced and unloaded: their answers are
/// those of requests that run alone, bit for bit.
#[test]
fn answers_with_adapters_are_bit_for_bit_those_of_solo_runs() {
    for (windows, mixers) in [(&[None, None][..], ""), (&[None, None, None], "dac")] {
        let parts = model_of(windows, mixers);
        let plain = requests(parts.program.vocab);
        let with = |index: usize, adapters: &[Adapter]| {
            let used = uses(index).into_iter();
            let adapters = used.map(|(seed, scale)| (adapters[seed as usize - 1].clone(), scale)).collect();
            Request { adapters, ..plain[index].clone() }
        };
        let options =
            EngineOptions { pages: PageBudget::Tokens(400), prefix_cache: false, ..EngineOptions::default() };
        let solo = Engine::start(&BACKEND, parts.clone(), options).unwrap();
        let adapters: Vec<_> = (1..6).map(|seed| load(&solo.handle(), &parts, seed)).collect();
        let expected: Vec<_> =
            (0..plain.len()).map(|index| real::answer(&solo.handle(), &with(index, &adapters))).collect();
        let base: Vec<_> = plain.iter().map(|request| real::answer(&solo.handle(), request)).collect();
        let same = (0..plain.len()).filter(|&index| expected[index] == base[index]);
        assert_eq!(same.collect::<Vec<_>>(), [0, 7, 14, 21], "adapters change answers");

        let options = EngineOptions {
            block_size: 4,
            pages: PageBudget::Tokens(150),
            max_batch_tokens: 19,
            max_sequences: 12,
            page_order: PageOrder::Scattered { seed: 1 },
            speculate: true,
            ..EngineOptions::default()
        };
        let crowded = Engine::start(&BACKEND, parts.clone(), options).unwrap();
        let handle = crowded.handle();
        for round in 0..3 {
            // Every round has adapters of its own, and the handles of the last one are dropped while its requests run.
            let adapters: Vec<_> = (1..6).map(|seed| load(&handle, &parts, seed)).collect();
            let drafts = DraftOptions { eager: round > 0, ..DraftOptions::default() };
            let all = (0..plain.len()).map(|index| {
                let request = Request { drafts: drafts.clone(), ..with(index, &adapters) };
                if index % 9 == 4 {
                    drop(load(&handle, &parts, 90 + index as u64));
                }
                handle.generate(request).unwrap()
            });
            let all: Vec<_> = all.collect();
            drop(adapters);
            let got = all.into_iter().zip(&plain);
            let got: Vec<_> =
                got.map(|(generation, request)| real::read(generation, request.branches)).collect();
            assert_eq!(got, expected, "{windows:?} {mixers} {round}");
            assert_eq!(handle.check_pages().unwrap(), Ok(()));
        }
        let stats = handle.stats();
        assert!(stats.preemptions > 0 && stats.page_copies > 0, "{stats:?}");
        assert_eq!(stats.pages_used, 0);
    }
}

/// Loads, unloads, requests and cancellations in random order.
#[test]
fn random_loads_and_unloads_change_no_answer() {
    let parts = model_of(&[None, None], "");
    let plain = requests(parts.program.vocab);
    let start = |pages: usize, cache: bool| {
        let options = EngineOptions {
            block_size: 4,
            pages: PageBudget::Tokens(pages),
            max_batch_tokens: 23,
            max_sequences: 8,
            prefix_cache: cache,
            speculate: cache,
            ..EngineOptions::default()
        };
        Engine::start(&BACKEND, parts.clone(), options).unwrap()
    };
    let (solo, crowded) = (start(400, false), start(200, true));
    let all: Vec<_> = (0..5).map(|seed| load(&solo.handle(), &parts, seed)).collect();
    let mut expected = HashMap::new();
    let handle = crowded.handle();
    let mut loaded: [Option<Adapter>; 5] = Default::default();
    let mut running = Vec::new();
    let mut state = 7_u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let mut compared = 0;
    for _ in 0..400 {
        match random(8) {
            // An adapter that was loaded is replaced by the same one; its requests keep the old one.
            0 | 1 => {
                let seed = random(5);
                loaded[seed] = Some(load(&handle, &parts, seed as u64));
            }
            2 => drop(loaded[random(5)].take()),
            3..=5 if running.len() < 16 => {
                let index = random(plain.len());
                let seeds: Vec<usize> =
                    (0..5).filter(|&seed| loaded[seed].is_some() && random(3) == 0).collect();
                let adapters = |of: &dyn Fn(usize) -> Adapter| -> Vec<(Adapter, f32)> {
                    seeds.iter().map(|&seed| (of(seed), 1.0 - seed as f32 / 2.0)).collect()
                };
                let own = |seed: usize| loaded[seed].clone().unwrap();
                let request = Request { adapters: adapters(&own), ..plain[index].clone() };
                running.push((index, seeds.clone(), handle.generate(request).unwrap()));
                expected.entry((index, seeds.clone())).or_insert_with(|| {
                    let adapters = adapters(&|seed| all[seed].clone());
                    real::answer(&solo.handle(), &Request { adapters, ..plain[index].clone() })
                });
            }
            6 if !running.is_empty() => drop(running.swap_remove(random(running.len()))),
            _ if !running.is_empty() => {
                let (index, seeds, generation) = running.swap_remove(random(running.len()));
                let got = real::read(generation, plain[index].branches);
                assert_eq!(got, expected[&(index, seeds)], "{index}");
                compared += 1;
            }
            _ => {}
        }
    }
    drop(running);
    assert!(compared > 40, "{compared}");
    assert_eq!(handle.check_pages().unwrap(), Ok(()));
}

#[test]
fn prefixes_are_shared_with_equal_adapters_only() {
    let parts = model_of(&[None, None], "");
    let engine =
        Engine::start(&BACKEND, parts.clone(), EngineOptions { block_size: 4, ..Default::default() });
    let engine = engine.unwrap();
    let handle = engine.handle();
    let hits = |adapters: Vec<(Adapter, f32)>, salt: &str| {
        let prompt = (0..22).collect();
        let (max_tokens, prefix_salt) = (Some(1), salt.as_bytes().to_vec());
        let request = Request { adapters, max_tokens, prefix_salt, ..Request::new(prompt) };
        let before = handle.stats().prefix_hit_tokens;
        real::answer(&handle, &Request { logprobs: Some(0), ..request });
        handle.stats().prefix_hit_tokens - before
    };
    let (one, two) = (load(&handle, &parts, 1), load(&handle, &parts, 2));
    let uses = [
        vec![],
        vec![(one.clone(), 1.0)],
        vec![(one.clone(), 0.5)],
        vec![(two.clone(), 1.0)],
        vec![(one.clone(), 1.0), (two.clone(), 1.0)],
        vec![(two.clone(), 1.0), (one.clone(), 1.0)],
    ];
    for salt in ["", "salt"] {
        for adapters in &uses {
            assert_eq!(hits(adapters.clone(), salt), 0, "{salt} {adapters:?}");
        }
        for adapters in &uses {
            assert_eq!(hits(adapters.clone(), salt), 20, "{salt} {adapters:?}");
        }
        // A scale of zero is no adapter.
        assert_eq!(hits(vec![(one.clone(), 0.0)], salt), 20);
    }
    // The same file, loaded again.
    drop((one, uses));
    let one = load(&handle, &parts, 1);
    assert_eq!(hits(vec![(one, 1.0)], ""), 20);
}

/// Pieces of a large pair have its rows of A and columns of B, in order.
#[test]
fn large_pairs_are_loaded_in_pieces() {
    let numbers = |rows: usize, cols: usize| Matrix {
        name: "side".into(),
        format: WeightFormat::F32,
        parts: 1,
        rows,
        cols,
        bytes: (0..rows * cols).flat_map(|number| (number as f32).to_le_bytes()).collect::<Vec<_>>().into(),
    };
    let pair = LowRank { matrix: MatrixId(3), a: numbers(20, 7), b: numbers(5, 20), scale: 0.5 };
    assert_eq!(pieces(pair.clone(), 24 * 12).unwrap().len(), 1);
    let floats = |side: &Matrix| Vec::from_iter(side.read().unwrap().chunks_exact(4).map(<[u8]>::to_vec));
    let found = pieces(pair.clone(), 8 * 12).unwrap();
    let (mut a, mut b) = (Vec::new(), vec![Vec::new(); 5]);
    for piece in &found {
        assert_eq!((piece.matrix, piece.scale, piece.b.cols), (pair.matrix, pair.scale, piece.rank()));
        a.extend(floats(&piece.a));
        for (row, part) in b.iter_mut().zip(floats(&piece.b).chunks_exact(piece.rank())) {
            row.extend_from_slice(part);
        }
    }
    assert_eq!(found.iter().map(LowRank::rank).collect::<Vec<_>>(), [8, 8, 4]);
    assert_eq!((a, b.concat()), (floats(&pair.a), floats(&pair.b)));

    let wrong = LowRank { b: numbers(5, 19), ..pair };
    assert_eq!(pieces(wrong, 8).unwrap().len(), 1, "the runner refuses it by its name");
}

#[test]
fn adapters_have_limits() {
    let parts = model_of(&[None], "");
    let bytes = weights(&parts, 1).pairs.iter().map(LowRank::bytes).sum::<u64>();
    let start = |adapters: AdapterLimits| {
        let options = EngineOptions { adapters, ..EngineOptions::default() };
        Engine::start(&BACKEND, parts.clone(), options).unwrap()
    };
    let refused = |handle: &Handle, what: &str| match handle.load_adapter(weights(&parts, 1)) {
        Err(AdapterError::Limit { name, problem }) => {
            assert_eq!(&*name, "adapter-1");
            assert!(problem.contains(what), "{problem}");
        }
        other => panic!("{other:?}"),
    };
    let engine = start(AdapterLimits { count: 2, ..AdapterLimits::default() });
    let handle = engine.handle();
    let held = [load(&handle, &parts, 1), load(&handle, &parts, 1)];
    refused(&handle, "--max-loras");
    drop(held);
    load(&handle, &parts, 1);
    refused(&start(AdapterLimits { rank: 1, ..AdapterLimits::default() }).handle(), "--max-lora-rank");
    let engine = start(AdapterLimits { bytes: bytes * 3 / 2, ..AdapterLimits::default() });
    let held = load(&engine.handle(), &parts, 1);
    refused(&engine.handle(), "--max-lora-memory");
    drop(held);

    // Pairs that do not fit are refused, and leave nothing.
    let mut wrong = weights(&parts, 1);
    wrong.pairs[1].scale = f32::NAN;
    for _ in 0..40 {
        assert!(matches!(handle.load_adapter(wrong.clone()), Err(AdapterError::Load(_))));
    }
    let adapter = load(&handle, &parts, 1);
    let scaled = Request { adapters: vec![(adapter.clone(), f32::INFINITY)], ..Request::new(vec![1]) };
    assert!(handle.generate(scaled).is_err());
    let foreign = Request { adapters: vec![(adapter, 1.0)], ..Request::new(vec![1]) };
    assert!(engine.handle().generate(foreign).is_err());
}

#[test]
fn events_name_the_adapter_of_every_block() {
    let parts = model_of(&[None, None], "");
    let events = Arc::new(Mutex::new(Vec::new()));
    let sink = Arc::clone(&events);
    let sink = EventSink(Arc::new(move |new| sink.lock().unwrap().extend(new)));
    let options = EngineOptions { block_size: 4, events: Some(sink), ..EngineOptions::default() };
    let engine = Engine::start(&BACKEND, parts.clone(), options).unwrap();
    let adapter = load(&engine.handle(), &parts, 1);
    for (adapters, name) in [
        (vec![], None),
        (vec![(adapter.clone(), 1.0)], Some("adapter-1")),
        (vec![(adapter.clone(), 0.5)], Some("adapter-1:0.5")),
    ] {
        let request = Request { adapters, max_tokens: Some(1), ..Request::new((0..9).collect()) };
        real::answer(&engine.handle(), &Request { logprobs: Some(0), ..request });
        let new = std::mem::take(&mut *events.lock().unwrap());
        let [KvEvent::Stored { hashes, extra, .. }] = new.as_slice() else { panic!("{new:?}") };
        let key = name.map(|name| ExtraKey::Adapter(name.into()));
        assert_eq!(
            (hashes.len(), extra.as_slice()),
            (2, &[vec![], vec![]].map(|_: Vec<()>| { key.clone().into_iter().collect::<Vec<_>>() })[..])
        );
    }
}
