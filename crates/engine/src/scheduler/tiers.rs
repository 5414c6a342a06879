//! Prefixes on disk: which are loaded for waiting sequences, and what becomes of the pages.

use std::time::Duration;

use paguro_backend::PageId;

use super::Scheduler;
use crate::{
    cost::Work,
    disk::{Disk, DiskStats, LoadRequest, Part, Unit},
    layout::Layout,
    pages::Pages,
    sequence::{Load, Sequence},
};

/// Sequences at the head of the queue for which the disk is asked.
const LOOK_AHEAD: usize = 8;

impl Sequence {
    /// Saves its blocks and checkpoints some time later, if it has enough of them: what a hit needs, and nothing else.
    pub fn save_later(&self, layout: &Layout, pages: &mut Pages) {
        let Some(disk) = &mut pages.disk else { return };
        if self.computed < disk.least_tokens || self.is_suspect {
            return;
        }
        let blocks = (self.computed / layout.block_size).min(self.keys.len());
        // A later prompt goes on from the end, is the same, or shares the beginning that its rendering keeps.
        let prompt = self.job.prompt_tokens.saturating_sub(1);
        let ends =
            [usize::MAX, prompt, self.job.lasting_tokens].map(|end| (end / layout.block_size).min(blocks));
        let sees = |group: usize, block: usize| {
            let sees_from = |end: usize| layout.first_visible(group, end * layout.block_size)..end;
            layout.windows[group].is_none() || ends.iter().any(|&end| sees_from(end).contains(&block))
        };
        for (block, &key) in self.keys[..blocks].iter().enumerate() {
            for group in (0..layout.groups()).filter(|&group| sees(group, block)) {
                disk.save_later(Unit { key, part: Part::Kv(group) });
            }
            if self.checkpoints.binary_search(&((block + 1) * layout.block_size)).is_ok() {
                disk.save_later(Unit { key, part: Part::Checkpoint });
            }
        }
    }

    /// Parts of blocks that a prefix of `blocks` blocks needs.
    fn units(&self, blocks: usize, layout: &Layout) -> impl Iterator<Item = Unit> {
        let kv = (0..blocks).flat_map(move |block| {
            let sees = move |group: &usize| block >= layout.first_visible(*group, blocks * layout.block_size);
            let unit = move |group| Unit { key: self.keys[block], part: Part::Kv(group) };
            (0..layout.groups()).filter(sees).map(unit)
        });
        let last = layout.checkpoints.and(blocks.checked_sub(1));
        kv.chain(last.map(|block| Unit { key: self.keys[block], part: Part::Checkpoint }))
    }
}

impl Scheduler {
    /// Asks the disk for the prefixes of sequences that will soon leave the queue.
    pub(super) fn start_loads(&mut self) {
        if self.pages.disk.is_none() {
            return;
        }
        let untried =
            self.waiting.iter().take(LOOK_AHEAD).filter(|(_, sequence)| sequence.load == Load::Untried);
        let ranks: Vec<_> = untried.map(|(rank, _)| *rank).collect();
        for rank in ranks {
            let load = self.load_of(&self.waiting[&rank]);
            let Self { waiting, pages, layout, .. } = self;
            let (Some(sequence), Some(disk)) = (waiting.get_mut(&rank), &mut pages.disk) else { continue };
            sequence.load = match load {
                None => Load::Declined,
                Some((blocks, Err(()))) => {
                    disk.stats.declined += u64::from(blocks > 0);
                    disk.space.decline();
                    Load::Declined
                }
                Some((blocks, Ok(load))) => {
                    disk.stats.loads += 1;
                    disk.loads.push(load);
                    // The blocks that are there already must not make room for the others.
                    let kept: Vec<Unit> = sequence.units(blocks, layout).collect();
                    pages.refresh(kept.into_iter().rev());
                    Load::Loading(blocks)
                }
            };
        }
    }

    /// Decides what to load for a sequence: the number of blocks that the prefix cache has, and the load, or an error if
    /// computing is faster. `None` if the disk has nothing more.
    fn load_of(&self, sequence: &Sequence) -> Option<(usize, Result<LoadRequest, ()>)> {
        let Self { pages, layout, .. } = self;
        let disk = pages.disk.as_ref()?;
        let cached = sequence.cached_blocks(layout, pages);
        let is_here = |unit: Unit| pages.pages_of(unit).is_some();
        let blocks = sequence.blocks_in(layout, |unit| is_here(unit) || disk.contains(unit));
        if blocks <= cached {
            return None;
        }
        let units: Vec<Unit> = sequence.units(blocks, layout).filter(|unit| !is_here(*unit)).collect();
        let count = |unit: &Unit| self.pages_in(*unit);
        let pages_to_load: usize = units.iter().map(count).sum();
        if pages_to_load > pages.available() {
            return None;
        }
        let computing = self.seconds_of(cached * layout.block_size, blocks * layout.block_size) * disk.worth;
        if disk.seconds(pages_to_load) > computing {
            return Some((cached.max(1), Err(())));
        }
        let owner = (sequence.job.id, sequence.branches.start);
        Some((cached, Ok(LoadRequest { owner, units, budget: Duration::from_secs_f64(computing.min(1e6)) })))
    }

    /// Seconds that computing these positions of a sequence takes.
    fn seconds_of(&self, mut start: usize, end: usize) -> f64 {
        let mut seconds = 0.0;
        while start < end {
            let rows = (end - start).min(self.limits.max_rows);
            seconds += self.cost.seconds(Work::default().and(start, rows));
            start += rows;
        }
        seconds
    }

    /// Pages of a unit.
    pub fn pages_in(&self, unit: Unit) -> usize {
        match unit.part {
            Part::Kv(_) => 1,
            Part::Checkpoint => self.layout.checkpoints.map_or(0, |checkpoints| checkpoints.pages),
        }
    }

    /// True if something can be computed now.
    pub fn has_work(&self) -> bool {
        !self.running.is_empty() || self.waiting.values().any(|sequence| !sequence.is_loading())
    }

    /// The disk tier, if there is one.
    pub fn disk(&mut self) -> Option<&mut Disk> {
        self.pages.disk.as_mut()
    }

    pub(super) fn disk_stats(&self) -> DiskStats {
        self.pages.disk.as_ref().map(Disk::numbers).unwrap_or_default()
    }

    /// Takes pages for units that were loaded. Units that the prefix cache has meanwhile, or that have no room, get none.
    pub fn place(&mut self, units: &[Unit]) -> Vec<Option<Vec<PageId>>> {
        units.iter().map(|&unit| self.pages.place(unit, self.pages_in(unit))).collect()
    }

    /// Forgets units whose pages could not be filled.
    pub fn forget(&mut self, units: &[Unit]) {
        units.iter().for_each(|&unit| self.pages.forget(unit));
    }

    /// The load for a sequence has ended.
    pub fn finish_load(&mut self, (request, branch): (u64, usize)) {
        let is_it =
            |sequence: &&mut Sequence| sequence.job.id == request && sequence.branches.start == branch;
        if let Some(sequence) = self.waiting.values_mut().find(is_it)
            && let Load::Loading(blocks) = sequence.load
        {
            sequence.load = Load::Loaded(blocks);
        }
    }

    /// The next unit to be saved that the prefix cache still has, and its pages. A checkpoint whose copy is still to be made waits.
    pub fn next_save(&mut self) -> Option<(Unit, Vec<PageId>)> {
        loop {
            let unit = self.pages.disk.as_mut()?.next_save()?;
            if unit.part == Part::Checkpoint && self.saves.keys.contains(&unit.key) {
                self.pages.disk.as_mut()?.put_back(unit);
                return None;
            }
            if let Some(pages) = self.pages.pages_of(unit) {
                return Some((unit, pages));
            }
        }
    }

    /// Units that were evicted before they were saved, with pages that have their bytes until the next step.
    pub fn take_evicted(&mut self) -> Vec<(Unit, Vec<PageId>)> {
        let Some(disk) = &mut self.pages.disk else { return Vec::new() };
        let mut evicted = disk.take_evicted();
        // The copy of a checkpoint that was evicted at once has not been made.
        let saved = &self.plan.saved;
        evicted.retain(|(unit, _)| unit.part != Part::Checkpoint || !saved.contains(&unit.key));
        evicted
    }

    /// Copies of states that are made before the next step. The caller makes them now, or forgets the checkpoints.
    pub fn take_saves(&mut self) -> (Vec<paguro_backend::PageMove>, Vec<crate::prefix::BlockKey>) {
        (std::mem::take(&mut self.saves.moves), std::mem::take(&mut self.saves.keys))
    }

    /// Forgets the checkpoints after these blocks.
    pub fn forget_checkpoints(&mut self, keys: &[crate::prefix::BlockKey]) {
        keys.iter().for_each(|key| self.pages.forget_checkpoint(key));
    }
}
