//! Pages between the runner and the disk, between two steps.

use std::time::{Duration, Instant};

use paguro_backend::{PageContent, PageId, StepError};
use paguro_kv_store::Chunk;

use super::Worker;
use crate::disk::{Part, Unit};

/// Units that are copied out after one step.
const UNITS_PER_STEP: usize = 4;
/// Time that the engine waits for the disk when it has nothing else to do, before it looks for commands.
const PAUSE: Duration = Duration::from_millis(2);
/// Time that a shutdown waits for the disk.
const PATIENCE: Duration = Duration::from_secs(10);

/// Units that were loaded for a sequence.
pub(super) struct Loaded {
    owner: (u64, usize),
    /// Those of the whole load.
    units: std::sync::Arc<[Unit]>,
    chunk: Chunk,
}

/// Whether more units can be saved now.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Saving {
    /// All are saved.
    Done,
    /// The writer has enough for now.
    Full,
    /// Some were saved.
    Some,
}

impl Worker {
    /// Starts the loads that were planned.
    pub(super) fn start_loads(&mut self) {
        let Self { scheduler, loaded, .. } = self;
        let Some(disk) = scheduler.disk() else { return };
        for load in std::mem::take(&mut disk.loads) {
            let (sender, owner) = (loaded.0.clone(), load.owner);
            let units: std::sync::Arc<[Unit]> = load.units.clone().into();
            // If the engine is gone, nobody needs them.
            let deliver = move |chunk| drop(sender.send(Loaded { owner, units: units.clone(), chunk }));
            disk.start(&load, Box::new(deliver));
        }
    }

    /// Writes what was loaded into pages of the prefix cache.
    pub(super) fn take_loaded(&mut self) {
        while let Ok(loaded) = self.loaded.1.try_recv() {
            self.place(loaded);
        }
    }

    /// Waits for a load, for a moment.
    pub(super) fn wait_for_load(&mut self) {
        if let Ok(loaded) = self.loaded.1.recv_timeout(PAUSE) {
            self.place(loaded);
        }
    }

    fn place(&mut self, loaded: Loaded) {
        // Pages that are taken now must not be written by a copy that was planned before.
        self.make_saves();
        let Loaded { owner, units, chunk: Chunk { first, payloads, is_last } } = loaded;
        let units = &units[first..first + payloads.len()];
        let pages = self.scheduler.place(units);
        self.rescue();
        let page_bytes = self.scheduler.disk().map_or(0, |disk| disk.page_bytes);
        for ((unit, payload), pages) in units.iter().zip(&payloads).zip(pages) {
            let Some(pages) = pages else { continue };
            let content = match unit.part {
                Part::Kv(group) => PageContent::Kv { group },
                Part::Checkpoint => PageContent::State,
            };
            let fits = payload.len() == pages.len() * page_bytes;
            if !fits || self.runner.write_pages(&pages, payload, content).is_err() {
                self.scheduler.forget(&[*unit]);
            }
        }
        if is_last {
            self.scheduler.finish_load(owner);
        }
    }

    /// Makes the copies of states that wait for the next step.
    fn make_saves(&mut self) {
        let (moves, keys) = self.scheduler.take_saves();
        if !moves.is_empty() && self.runner.move_pages(&moves).is_err() {
            self.scheduler.forget_checkpoints(&keys);
        }
    }

    /// Copies out units that were evicted, before their pages are written.
    pub(super) fn rescue(&mut self) {
        for (unit, pages) in self.scheduler.take_evicted() {
            self.save(unit, &pages);
        }
    }

    /// Copies out some of the units that wait to be saved.
    pub(super) fn save_some(&mut self) -> Saving {
        for count in 0..UNITS_PER_STEP {
            let Some(disk) = self.scheduler.disk() else { return Saving::Done };
            if !disk.has_saves() {
                return if count == 0 { Saving::Done } else { Saving::Some };
            }
            // Pages of a checkpoint are many; half of the queue always has room for one.
            if disk.room() < disk.page_bytes || disk.space.pending_bytes() > disk.room() {
                return Saving::Full;
            }
            match self.scheduler.next_save() {
                Some((unit, pages)) => self.save(unit, &pages),
                // A checkpoint waits for the copy of its state.
                None => break,
            }
        }
        Saving::Some
    }

    /// Copies units out while there is nothing else to do.
    pub(super) fn save_in_idle_time(&mut self) -> Saving {
        if self.scheduler.disk().is_none_or(|disk| !disk.has_saves()) {
            return Saving::Done;
        }
        self.make_saves();
        self.save_some()
    }

    /// Saves everything that waits, for some seconds at most.
    pub(super) fn finish_saves(&mut self) {
        let end = Instant::now() + PATIENCE;
        while Instant::now() < end {
            match self.save_in_idle_time() {
                Saving::Done => break,
                Saving::Full
                    if self
                        .scheduler
                        .disk()
                        .is_none_or(|disk| disk.room() == 0 && disk.space.pending_bytes() == 0) =>
                {
                    break;
                }
                Saving::Full => std::thread::sleep(PAUSE),
                Saving::Some => {}
            }
        }
        if let Some(disk) = self.scheduler.disk() {
            disk.space.flush(end.saturating_duration_since(Instant::now()));
        }
    }

    fn save(&mut self, unit: Unit, pages: &[PageId]) {
        let Self { scheduler, runner, .. } = self;
        let whole = scheduler.pages_in(unit) == pages.len();
        let Some(disk) = scheduler.disk() else { return };
        let bytes = pages.len() * disk.page_bytes;
        // An empty queue takes a unit of any size.
        if !whole || (disk.room() < bytes && disk.space.pending_bytes() > 0) || disk.room() == 0 {
            disk.stats.dropped += 1;
            return;
        }
        let mut payload = vec![0; bytes];
        let read: Result<(), StepError> = runner.read_pages(pages, &mut payload);
        match read {
            Ok(()) => disk.save(unit, payload),
            Err(_) => disk.stats.dropped += 1,
        }
    }
}
