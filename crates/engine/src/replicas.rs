//! Several engines of one model behind one handle ([decision 24](../../../docs/decisions/0024-replicas.md)).
//!
//! A request goes to the engine with the least work until its first token: the tokens of the prompt that the engine's caches do not have,
//! and the requests before it. An engine whose last step failed gets no requests while another one works.
//!
//! Each engine reports the blocks of its prefix cache as it does for routers (`events`). [`BlockIndex`] keeps their hashes by engine, and
//! passes the events on as those of one cache.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use crate::{
    BlockSet, Engine, EngineOptions, EventSink, KvEvent, Medium, checked_request::CheckedRequest, events,
    handle::Port,
};

/// Work of a request that waits or runs, in tokens of a prompt. A prompt leaves the engine that has its first blocks as soon as other
/// requests there are more work than computing these blocks again.
const REQUEST_TOKENS: usize = 256;

/// Engines of one model that are about to start on equal devices.
#[derive(Debug)]
pub struct Replicas(Arc<BlockIndex>);

impl Replicas {
    /// Prepares `count` engines. `events` gets the events of all of them, as if they had one cache.
    pub fn new(count: usize, events: Option<EventSink>) -> Self {
        let blocks = Blocks { held: vec![Default::default(); count], all: Default::default(), events };
        Self(Arc::new(BlockIndex(Mutex::new(blocks))))
    }

    /// Returns the options to start the engine `number` with, which is below `count`.
    pub fn options(&self, number: usize, options: &EngineOptions) -> EngineOptions {
        let index = self.0.clone();
        let events = EventSink(Arc::new(move |events| index.lock().receive(number, events)));
        EngineOptions { events: Some(events), ..options.clone() }
    }

    /// Joins the engines that have started, with their numbers: those of one model with the same options. `None` without any.
    pub fn join(self, engines: Vec<(usize, Engine)>) -> Option<Engine> {
        (!engines.is_empty()).then(|| Engine::joined(engines, self.0))
    }
}

/// Blocks of the prefix caches of several engines.
#[derive(Debug)]
pub(crate) struct BlockIndex(Mutex<Blocks>);

#[derive(Debug)]
struct Blocks {
    /// Hashes by engine and medium. The first engine has those of the disk, which all share.
    held: Vec<[HashSet<u64>; 3]>,
    /// Blocks that any engine has, by medium.
    all: [BlockSet; 3],
    /// Receiver of their changes.
    events: Option<EventSink>,
}

impl BlockIndex {
    fn lock(&self) -> MutexGuard<'_, Blocks> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the blocks that any engine has, by medium.
    pub fn blocks(&self) -> [BlockSet; 3] {
        self.lock().all
    }

    /// Returns the engines that accept requests in the order in which they are tried for this one.
    pub fn order<'p>(&self, ports: &'p [Port], checked: &CheckedRequest, prompt: &[u32]) -> Vec<&'p Port> {
        let cached = self.cached_tokens(ports, checked, prompt);
        let work = |(port, cached): (&'p Port, usize)| {
            let stats = port.stats();
            let (waiting, tokens) = port.shared.queue.waiting();
            let work = prompt.len() - cached + tokens + REQUEST_TOKENS * (waiting + stats.running);
            // Prompts of equal work fill the caches of all.
            (port.is_failing(), work, stats.pages_used + stats.pages_cached)
        };
        let open = ports.iter().zip(cached).filter(|(port, _)| !port.has_stopped());
        let mut order: Vec<_> = open.map(|(port, cached)| (work((port, cached)), port)).collect();
        order.sort_by_key(|(work, _)| *work);
        order.into_iter().map(|(_, port)| port).collect()
    }

    /// Returns the tokens at the beginning of a prompt that each engine has on its device or in memory of the host.
    fn cached_tokens(&self, ports: &[Port], checked: &CheckedRequest, prompt: &[u32]) -> Vec<usize> {
        let mut cached = vec![0; ports.len()];
        let Some((root, size)) = ports[0].shared.blocks else { return cached };
        let mut parent = root.salted(&checked.prefix_salt, checked.adapters.digest.as_ref()).unwrap_or(root);
        // At least one token is left to compute.
        for (block, tokens) in prompt[..prompt.len() - 1].chunks_exact(size).enumerate() {
            let first = block * size;
            parent = parent.child(tokens, &checked.pictures.extras(first..first + size));
            let hash = events::hash(&parent);
            let blocks = self.lock();
            let mut is_found = false;
            for (port, cached) in ports.iter().zip(&mut cached) {
                let held = &blocks.held[port.number];
                let has = |medium: Medium| held[medium as usize].contains(&hash);
                if *cached == first && (has(Medium::Device) || has(Medium::Host)) {
                    (*cached, is_found) = (first + size, true);
                }
            }
            if !is_found {
                break;
            }
        }
        cached
    }
}

impl Blocks {
    /// Notes the events of an engine, and passes on those that change what all have.
    fn receive(&mut self, engine: usize, events: Vec<KvEvent>) {
        let mut changes = Vec::new();
        for event in events {
            match event {
                KvEvent::Stored { ref hashes, medium, .. } => {
                    let new = hashes.iter().filter(|hash| self.insert(engine, medium, **hash)).count();
                    if new > 0 {
                        changes.push(event);
                    }
                }
                KvEvent::Removed { mut hashes, medium } => {
                    hashes.retain(|hash| self.remove(engine, medium, *hash));
                    if !hashes.is_empty() {
                        changes.push(KvEvent::Removed { hashes, medium });
                    }
                }
            }
        }
        if let Some(EventSink(sink)) = self.events.as_ref().filter(|_| !changes.is_empty()) {
            sink(changes);
        }
    }

    /// Adds a block of an engine. Returns true if no engine had it.
    fn insert(&mut self, engine: usize, medium: Medium, hash: u64) -> bool {
        let is_new = !self.has(medium, hash);
        self.held[holder(engine, medium)][medium as usize].insert(hash);
        if is_new {
            self.all[medium as usize].insert_hash(hash);
        }
        is_new
    }

    /// Removes a block of an engine. Returns true if no engine has it any more.
    fn remove(&mut self, engine: usize, medium: Medium, hash: u64) -> bool {
        let was_held = self.held[holder(engine, medium)][medium as usize].remove(&hash);
        let is_gone = was_held && !self.has(medium, hash);
        if is_gone {
            self.all[medium as usize].remove_hash(hash);
        }
        is_gone
    }

    fn has(&self, medium: Medium, hash: u64) -> bool {
        self.held.iter().any(|held| held[medium as usize].contains(&hash))
    }
}

/// Returns the engine whose set has the blocks of `engine` in this medium.
fn holder(engine: usize, medium: Medium) -> usize {
    match medium {
        Medium::Device | Medium::Host => engine,
        Medium::Disk => 0,
    }
}
