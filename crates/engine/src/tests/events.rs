//! Events for routers: what they say is what the caches have.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex},
};

use paguro_backend::KvDtype;
use paguro_backend_conformance::Rng;
use tempfile::TempDir;

use super::{
    disk::{answer, cache, store},
    real::{BACKEND, model_of},
};
use crate::{BlockSet, Engine, EngineOptions, EventSink, HostMemory, KvEvent, Medium, PageBudget, Request};

const BLOCK: usize = 4;

/// The view of a router.
#[derive(Default)]
struct Router {
    blocks: HashSet<(u64, u8)>,
    /// Tokens of each block on the device, with the hash before.
    texts: Vec<(u64, Option<u64>, Vec<u32>)>,
    /// Blocks with a salt.
    salted: usize,
}

impl Router {
    fn receive(&mut self, events: Vec<KvEvent>) {
        for event in events {
            match event {
                KvEvent::Stored { hashes, mut parent, tokens, extra, block_size, medium, .. } => {
                    assert_eq!(block_size, BLOCK);
                    let on_device = medium == Medium::Device;
                    assert!(
                        !on_device || parent.is_none_or(|parent| self.blocks.contains(&(parent, 0))),
                        "an unknown parent"
                    );
                    assert_eq!((tokens.len(), extra.len()), (hashes.len() * BLOCK, hashes.len()));
                    assert!(
                        extra[1..].iter().all(Vec::is_empty) && (parent.is_none() || extra[0].is_empty())
                    );
                    self.salted += extra[0].len();
                    for (index, &hash) in hashes.iter().enumerate() {
                        assert!(self.blocks.insert((hash, medium as u8)), "{medium:?} has it already");
                        let text = (hash, parent, tokens[index * BLOCK..][..BLOCK].to_vec());
                        parent = Some(hash);
                        if on_device {
                            self.texts.push(text);
                        } else {
                            assert!(self.texts.contains(&text), "a copy has another text than the block");
                        }
                    }
                }
                KvEvent::Removed { hashes, medium } => {
                    for hash in hashes {
                        assert!(self.blocks.remove(&(hash, medium as u8)), "{medium:?} never had it");
                    }
                }
            }
        }
    }

    fn set(&self, medium: Medium) -> BlockSet {
        let blocks = self.blocks.iter().filter(|(_, of)| *of == medium as u8);
        blocks.fold(BlockSet::default(), |set, (hash, _)| BlockSet {
            count: set.count + 1,
            digest: set.digest ^ hash,
        })
    }

    fn count(&self, medium: Medium) -> u64 {
        self.set(medium).count
    }

    /// Blocks at the beginning of a prompt on the device.
    fn prefix(&self, prompt: &[u32]) -> usize {
        let mut parent = None;
        let here = prompt.chunks_exact(BLOCK).take_while(|block| {
            let found = self.texts.iter().find(|(hash, before, tokens)| {
                *before == parent && tokens == block && self.blocks.contains(&(*hash, Medium::Device as u8))
            });
            parent = found.map(|(hash, ..)| *hash);
            found.is_some()
        });
        here.count()
    }
}

#[test]
fn a_router_knows_what_the_caches_have() {
    let parts = model_of(&[Some(21), None], "");
    let mut rng = Rng::new(51);
    let prompts: Vec<_> = (0..6).map(|_| rng.tokens(80, parts.program.vocab)).collect();
    let dir = TempDir::new().unwrap();
    let router = Arc::new(Mutex::new(Router::default()));
    let receiver = router.clone();
    let options = EngineOptions {
        block_size: BLOCK,
        pages: PageBudget::Tokens(200),
        max_batch_tokens: 16,
        max_sequences: 3,
        kv_dtype: KvDtype::F16,
        disk: Some(cache(store(dir.path(), f64::INFINITY))),
        host: Some(HostMemory::new(20_000)),
        events: Some(EventSink(Arc::new(move |events| receiver.lock().unwrap().receive(events)))),
        ..EngineOptions::default()
    };
    let engine = Engine::start(&BACKEND, parts, options).unwrap();
    let handle = engine.handle();
    for round in 0..2 {
        for prompt in &prompts {
            let known = router.lock().unwrap().prefix(prompt);
            let (_, usage) = answer(&handle, prompt);
            let on_device = usage.cached_tokens - usage.host_tokens - usage.disk_tokens;
            assert!(on_device <= known * BLOCK, "round {round}: {usage:?}, but {known} blocks");
            let known = router.lock().unwrap().prefix(prompt);
            assert_eq!(known, 20, "round {round}");
        }
    }
    {
        let router = router.lock().unwrap();
        assert!(router.count(Medium::Host) > 0 && router.count(Medium::Disk) > 60);
        assert!(router.count(Medium::Device) > 20);
        assert_eq!(router.salted, 0);
        // The counters are of the caches themselves.
        let sets = [Medium::Device, Medium::Host, Medium::Disk].map(|medium| router.set(medium));
        assert_eq!(sets, handle.stats().blocks);
    }
    // Another salt has other hashes.
    let before = router.lock().unwrap().texts.len();
    let salted = Request { prefix_salt: b"salt".to_vec(), ..Request::new(prompts[5].clone()) };
    let mut generation = handle.generate(Request { max_tokens: Some(1), ..salted }).unwrap();
    while generation.next_blocking().is_some() {}
    let stored = router.lock().unwrap().texts.len() - before;
    assert_eq!((stored, router.lock().unwrap().salted > 0), (20, true), "all of its blocks are new");
    engine.shutdown();
    let router = router.lock().unwrap();
    assert_eq!((router.count(Medium::Device), router.count(Medium::Host)), (0, 0));
}
