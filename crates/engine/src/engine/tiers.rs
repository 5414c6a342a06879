//! Copies of pages between the device and the other cache tiers (host memory and disk). They run between two steps.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use paguro_backend::{PageContent, PageId};

use super::worker::Worker;
use crate::{
    disk::Disk,
    events::Medium,
    tiers::{Evicted, Part, Unit},
};

/// Units that are copied out after one step.
const UNITS_PER_STEP: usize = 4;
/// Bytes of evicted units that are copied out at once, unless a single unit is larger.
const BATCH_BYTES: usize = 16 << 20;
/// Time that an engine without other work waits for a load or a mask before it polls commands.
const PAUSE: Duration = Duration::from_millis(2);
/// Maximum time that a shutdown waits for writes to the disk.
const PATIENCE: Duration = Duration::from_secs(10);

/// Units that were loaded for a sequence, with their bytes.
pub(super) struct Loaded {
    owner: (u64, usize),
    units: Vec<(Unit, Arc<Vec<u8>>)>,
    tier: Tier,
    is_last: bool,
}

/// Tier of loaded units.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tier {
    Host,
    Disk,
}

/// Result of saving some units.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Saving {
    /// All units are saved.
    Done,
    /// The queue of the writer is full.
    Full,
    /// Some units were saved, and more may remain.
    Some,
}

impl Worker {
    /// Starts the planned loads. Their bytes are written to pages before the next step is planned, because the planned copies of
    /// states have not run yet.
    pub(super) fn start_loads(&mut self) {
        let Self { scheduler, loaded, .. } = self;
        let Some(tiers) = scheduler.tiers() else { return };
        for load in std::mem::take(&mut tiers.loads) {
            let (sender, owner) = (loaded.0.clone(), load.owner);
            let host = tiers.host.iter_mut();
            let from_host = host.flat_map(|host| {
                load.from_host.iter().filter_map(|unit| Some((*unit, host.get(unit)?))).collect::<Vec<_>>()
            });
            let (units, is_last) = (from_host.collect(), load.from_disk.is_empty());
            // The send cannot fail: this engine owns the receiver.
            let _ = sender.send(Loaded { owner, units, tier: Tier::Host, is_last });
            let Some(disk) = tiers.disk.as_ref().filter(|_| !is_last) else { continue };
            let units: Arc<[Unit]> = load.from_disk.clone().into();
            let deliver = move |chunk: paguro_kv_store::Chunk| {
                let payloads = chunk.payloads.into_iter().map(Arc::new);
                let units = units[chunk.first..].iter().copied().zip(payloads).collect();
                // Without a receiver, the engine has ended and the units are not needed.
                drop(sender.send(Loaded { owner, units, tier: Tier::Disk, is_last: chunk.is_last }));
            };
            disk.start(&load, tiers.page_bytes, Box::new(deliver));
        }
    }

    /// Opens the disk tier when the digest of the weights is known. `None` means that it cannot be computed; the tier is then closed.
    pub(super) fn open_disk(&mut self, weights: Option<&[u8]>) {
        let Some(tiers) = self.scheduler.tiers() else { return };
        match (weights, &mut tiers.disk) {
            (Some(weights), Some(disk)) if disk.space().is_none() => {
                disk.open(weights);
                if let Some(space) = disk.space() {
                    let _ = self.shared.disk.set(space.clone());
                }
            }
            (None, disk) => *disk = None,
            _ => {}
        }
    }

    /// Writes all loaded units into pages of the prefix cache.
    pub(super) fn take_loaded(&mut self) {
        while let Ok(loaded) = self.loaded.1.try_recv() {
            self.place(loaded);
        }
    }

    /// Waits for a load for up to [`PAUSE`].
    pub(super) fn wait_for_load(&mut self) {
        if let Ok(loaded) = self.loaded.1.recv_timeout(PAUSE) {
            self.place(loaded);
        }
    }

    /// Waits for a mask or a load for up to [`PAUSE`], while no sequence can go on.
    pub(super) fn wait_for_parts(&mut self) {
        self.publish();
        if !self.scheduler.wait_for_mask(PAUSE) {
            self.wait_for_load();
        }
    }

    fn place(&mut self, loaded: Loaded) {
        // Planned copies run first, because they may write pages that are allocated below.
        self.make_saves();
        let Loaded { owner, units, tier, is_last } = loaded;
        let keys: Vec<Unit> = units.iter().map(|(unit, _)| *unit).collect();
        let pages = self.scheduler.place(&keys);
        self.rescue();
        let page_bytes = self.scheduler.tiers().map_or(0, |tiers| tiers.page_bytes);
        let (begin, mut bytes) = (Instant::now(), 0);
        for ((unit, payload), pages) in units.iter().zip(pages) {
            let Some(pages) = pages else { continue };
            let content = match unit.part {
                Part::Kv(group) => PageContent::Kv { group },
                Part::Checkpoint => PageContent::State,
            };
            let fits = payload.len() == pages.len() * page_bytes;
            if !fits || self.runner.write_pages(&pages, payload, content).is_err() {
                self.scheduler.forget(&[*unit]);
            } else {
                bytes += payload.len();
            }
        }
        match tier {
            Tier::Host if bytes > 0 => {
                self.scheduler.host().into_iter().for_each(|host| host.record_load(bytes, begin.elapsed()));
            }
            Tier::Host => {}
            Tier::Disk => {
                self.scheduler.disk().into_iter().for_each(|disk| disk.stats.loaded_bytes += bytes as u64)
            }
        }
        if is_last {
            self.scheduler.finish_load(owner);
        }
    }

    /// Runs the planned copies of states.
    fn make_saves(&mut self) {
        let (moves, keys) = self.scheduler.take_saves();
        if !moves.is_empty() && self.runner.move_pages(&moves).is_err() {
            self.scheduler.forget_checkpoints(&keys);
        }
    }

    /// Copies evicted units to the other tiers before their pages are overwritten.
    pub(super) fn rescue(&mut self) {
        let mut evicted = self.scheduler.take_evicted();
        let page_bytes = self.scheduler.tiers().map_or(1, |tiers| tiers.page_bytes).max(1);
        evicted.retain(|it| it.pages.len() == self.scheduler.pages_in(it.unit));
        let most = (BATCH_BYTES / page_bytes).max(1);
        let mut rest = &evicted[..];
        while !rest.is_empty() {
            let mut pages = 0;
            let fits = rest.iter().take_while(|it| {
                pages += it.pages.len();
                pages <= most
            });
            let (batch, later) = rest.split_at(fits.count().max(1));
            self.copy_evicted(batch, page_bytes);
            rest = later;
        }
    }

    /// Reads the pages of a batch of evicted units, and stores the units in the other tiers.
    fn copy_evicted(&mut self, batch: &[Evicted], page_bytes: usize) {
        let Self { scheduler, runner, .. } = self;
        let (Some(tiers), events) = scheduler.tiers_and_events() else { return };
        let mut events = events.as_mut();
        let pages: Vec<PageId> = batch.iter().flat_map(|it| it.pages.iter().copied()).collect();
        let (begin, mut all) = (Instant::now(), vec![0; pages.len() * page_bytes]);
        let read = runner.read_pages(&pages, &mut all);
        let (mut all, time) = (all.as_slice(), begin.elapsed());
        if let Some(host) = tiers.host.as_mut().filter(|_| read.is_ok()) {
            host.record_store(all.len(), time);
        }
        for Evicted { unit, pages, for_disk } in batch {
            let (bytes, rest) = all.split_at(pages.len() * page_bytes);
            all = rest;
            let bytes = read.is_ok().then(|| Arc::new(bytes.to_vec()));
            if let Some(disk) = tiers.disk.as_mut().filter(|_| *for_disk) {
                match &bytes {
                    Some(bytes) if has_room(disk, bytes.len()) => {
                        disk.save(*unit, bytes.clone(), events.as_deref_mut());
                    }
                    _ => disk.stats.dropped += 1,
                }
            }
            if let Some(host) = &mut tiers.host {
                match bytes {
                    Some(bytes) => {
                        let mut evicted = Vec::new();
                        let is_new = host.put(*unit, bytes, |unit| evicted.push(unit));
                        let Some(events) = events.as_deref_mut() else { continue };
                        let of_group = |it: &&Unit| it.part == Part::Kv(events.group);
                        let gone: Vec<_> = evicted.iter().filter(of_group).map(|it| it.key).collect();
                        gone.iter().for_each(|key| events.removed(key, Medium::Host));
                        if is_new && unit.part == Part::Kv(events.group) {
                            events.copied(&unit.key, Medium::Host);
                        }
                    }
                    None => host.stats.dropped += 1,
                }
            }
        }
    }

    /// Queues up to [`UNITS_PER_STEP`] pending units for the disk.
    pub(super) fn save_some(&mut self) -> Saving {
        for count in 0..UNITS_PER_STEP {
            let page_bytes = self.scheduler.tiers().map_or(0, |tiers| tiers.page_bytes);
            let Some(disk) = self.scheduler.disk() else { return Saving::Done };
            if !disk.has_saves() {
                return if count == 0 { Saving::Done } else { Saving::Some };
            }
            // A checkpoint has many pages. The queue is filled to half at most, so there is always room for one.
            if disk.room() < page_bytes || disk.pending_bytes() > disk.room() {
                return Saving::Full;
            }
            match self.scheduler.next_save() {
                Some((unit, pages)) => self.save(unit, &pages),
                // The next unit is a checkpoint whose state has not been copied yet.
                None => break,
            }
        }
        Saving::Some
    }

    /// Queues pending units for the disk while the engine has no other work.
    pub(super) fn save_in_idle_time(&mut self) -> Saving {
        if self.scheduler.disk().is_none_or(|disk| !disk.has_saves()) {
            return Saving::Done;
        }
        self.make_saves();
        self.save_some()
    }

    /// Saves all pending units, for at most [`PATIENCE`].
    pub(super) fn finish_saves(&mut self) {
        let end = Instant::now() + PATIENCE;
        while Instant::now() < end {
            match self.save_in_idle_time() {
                Saving::Done => break,
                Saving::Full
                    if self
                        .scheduler
                        .disk()
                        .is_none_or(|disk| disk.room() == 0 && disk.pending_bytes() == 0) =>
                {
                    break;
                }
                Saving::Full => std::thread::sleep(PAUSE),
                Saving::Some => {}
            }
        }
        if let Some(space) = self.scheduler.disk().and_then(|disk| disk.space()) {
            space.flush(end.saturating_duration_since(Instant::now()));
        }
    }

    fn save(&mut self, unit: Unit, pages: &[PageId]) {
        let Self { scheduler, runner, .. } = self;
        let whole = scheduler.pages_in(unit) == pages.len();
        let (Some(tiers), events) = scheduler.tiers_and_events() else { return };
        let bytes = pages.len() * tiers.page_bytes;
        let Some(disk) = &mut tiers.disk else { return };
        if !whole || !has_room(disk, bytes) {
            disk.stats.dropped += 1;
            return;
        }
        let mut payload = vec![0; bytes];
        match runner.read_pages(pages, &mut payload) {
            Ok(()) => disk.save(unit, Arc::new(payload), events.as_mut()),
            Err(_) => disk.stats.dropped += 1,
        }
    }
}

/// Returns true if the queue of the writer accepts a unit of this size. An empty queue accepts any size.
fn has_room(disk: &Disk, bytes: usize) -> bool {
    disk.room() > 0 && (disk.room() >= bytes || disk.pending_bytes() == 0)
}
