//! Prefixes in other tiers: which are loaded for waiting sequences, and what becomes of the pages.

use std::{
    collections::HashSet,
    time::{Duration, Instant},
};

use paguro_backend::PageId;

use super::Scheduler;
use crate::{
    DiskStats, HostStats,
    cost::Work,
    disk::Disk,
    events::{BlockSet, Events},
    host::Host,
    layout::BlockLayout,
    pages::Pages,
    sequence::{Rank, Sequence},
    tiers::{Evicted, Found, Load, LoadRequest, Part, Tiers, Unit},
};

/// Sequences at the head of the queue whose prefixes are looked for.
const LOOK_AHEAD: usize = 8;

impl Sequence {
    /// Saves its blocks and checkpoints some time later, if it has enough of them: what a hit needs, and nothing else.
    pub fn save_later(&self, layout: &BlockLayout, pages: &mut Pages) {
        let Some(disk) = pages.tiers.as_mut().and_then(|tiers| tiers.disk.as_mut()) else { return };
        if self.kv.computed < disk.least_tokens || self.kv.is_suspect {
            return;
        }
        let blocks = (self.kv.computed / layout.block_size).min(self.kv.keys.len());
        // A later prompt goes on from the end, is the same, or shares the beginning that its rendering keeps.
        let prompt = self.tokens.prompt().saturating_sub(1);
        let ends = [usize::MAX, prompt, self.request.lasting_tokens]
            .map(|end| (end / layout.block_size).min(blocks));
        let sees = |group: usize, block: usize| {
            let sees_from = |end: usize| layout.first_visible(group, end * layout.block_size)..end;
            layout.windows[group].is_none() || ends.iter().any(|&end| sees_from(end).contains(&block))
        };
        for (block, &key) in self.kv.keys[..blocks].iter().enumerate() {
            for group in (0..layout.groups()).filter(|&group| sees(group, block)) {
                disk.save_later(Unit { key, part: Part::Kv(group) });
            }
            if self.kv.checkpoints.binary_search(&((block + 1) * layout.block_size)).is_ok() {
                disk.save_later(Unit { key, part: Part::Checkpoint });
            }
        }
    }

    /// Counts the blocks at its beginning that came from other tiers, when it is admitted.
    pub fn count_loaded(&mut self, first_time: bool, layout: &BlockLayout, pages: &mut Pages) {
        let (Load::Loaded(found, time), Some(tiers)) = (self.prefix.load, &mut pages.tiers) else { return };
        let tokens = self.kv.computed.saturating_sub(found.before * layout.block_size);
        // Blocks behind a window are not loaded, and others may be in pages behind a gap. Both are of use because of the load.
        let loaded = (found.from_host + found.from_disk).max(1);
        let host_tokens = tokens * found.from_host / loaded;
        let disk_tokens = tokens - host_tokens;
        if first_time {
            (self.prefix.host_tokens, self.prefix.disk_tokens) = (host_tokens, disk_tokens);
        }
        let computing = found.computing.mul_f64(tokens as f64 / found.tokens.max(1) as f64);
        let saved = u64::try_from(computing.saturating_sub(time).as_nanos()).unwrap_or(u64::MAX);
        let of = |part: usize| (saved as f64 * part as f64 / tokens.max(1) as f64) as u64;
        if let Some(host) = &mut tiers.host {
            host.stats.hit_tokens += host_tokens as u64;
            host.stats.saved_nanoseconds += of(host_tokens);
        }
        if let Some(disk) = &mut tiers.disk {
            disk.stats.hit_tokens += disk_tokens as u64;
            disk.stats.saved_nanoseconds += of(disk_tokens);
        }
    }

    /// Parts of blocks that a prefix of `blocks` blocks needs.
    fn units(&self, blocks: usize, layout: &BlockLayout) -> impl Iterator<Item = Unit> {
        let kv = (0..blocks).flat_map(move |block| {
            let sees = move |group: &usize| block >= layout.first_visible(*group, blocks * layout.block_size);
            let unit = move |group| Unit { key: self.kv.keys[block], part: Part::Kv(group) };
            (0..layout.groups()).filter(sees).map(unit)
        });
        let last = layout.checkpoints.and(blocks.checked_sub(1));
        kv.chain(last.map(|block| Unit { key: self.kv.keys[block], part: Part::Checkpoint }))
    }
}

impl Scheduler {
    /// Looks in the other tiers for the prefixes of sequences that will soon leave the queue.
    pub(super) fn start_loads(&mut self) {
        if self.pages.tiers.is_none() {
            return;
        }
        let untried = self.soon().filter(|(_, sequence)| sequence.prefix.load == Load::Untried);
        let ranks: Vec<_> = untried.map(|(rank, _)| *rank).collect();
        for rank in ranks {
            // Blocks of the host alone may be worth a load where the disk is too slow.
            let load = match self.load_of(&self.waiting[&rank], true) {
                Some(Err(())) => self.load_of(&self.waiting[&rank], false).or(Some(Err(()))),
                load => load,
            };
            let Self { waiting, pages, layout, .. } = self;
            let (Some(sequence), Some(tiers)) = (waiting.get_mut(&rank), &mut pages.tiers) else { continue };
            sequence.prefix.load = match load {
                None => Load::Declined,
                Some(Err(())) => {
                    match &mut tiers.disk {
                        Some(disk) => disk.decline(),
                        None => tiers.host.iter_mut().for_each(|host| host.stats.declined += 1),
                    }
                    Load::Declined
                }
                Some(Ok((found, load))) => {
                    if let Some(host) = tiers.host.as_mut().filter(|_| !load.from_host.is_empty()) {
                        host.stats.loads += 1;
                    }
                    if let Some(disk) = tiers.disk.as_mut().filter(|_| !load.from_disk.is_empty()) {
                        disk.stats.loads += 1;
                    }
                    tiers.loads.push(load);
                    // The blocks that are there already must not make room for the others.
                    let kept: Vec<Unit> = sequence.units(found.before, layout).collect();
                    pages.refresh(kept.into_iter().rev());
                    Load::Loading(found)
                }
            };
        }
    }

    /// Returns the sequences whose prefixes are looked for.
    pub(super) fn soon(&self) -> impl Iterator<Item = (&Rank, &Sequence)> {
        self.waiting.iter().take(LOOK_AHEAD)
    }

    /// Decides what to load for a sequence, from the host and, if `all` is true, from the disk. An error if computing is faster;
    /// `None` if the tiers have nothing more.
    fn load_of(&self, sequence: &Sequence, all: bool) -> Option<Result<(Found, LoadRequest), ()>> {
        let Self { pages, layout, .. } = self;
        let tiers = pages.tiers.as_ref()?;
        let cached = sequence.cached_blocks(layout, pages);
        let is_here = |unit: Unit| pages.pages_of(unit).is_some();
        let blocks = sequence.blocks_in(layout, |unit| is_here(unit) || tiers.contains(unit, all));
        if blocks <= cached {
            return None;
        }
        let units = sequence.units(blocks, layout).filter(|unit| !is_here(*unit));
        let (from_host, from_disk): (Vec<Unit>, Vec<Unit>) =
            units.partition(|unit| tiers.contains(*unit, false));
        let count = |units: &[Unit]| units.iter().map(|unit| self.pages_in(*unit)).sum::<usize>();
        let (host_pages, disk_pages) = (count(&from_host), count(&from_disk));
        if host_pages + disk_pages > pages.available() {
            return None;
        }
        let begin = Instant::now();
        let computing = self.seconds_of(cached * layout.block_size, blocks * layout.block_size);
        let loading = tiers.seconds(host_pages, disk_pages);
        if loading > computing * tiers.worth {
            return Some(Err(()));
        }
        let keys = |units: &[Unit]| units.iter().map(|unit| unit.key).collect::<HashSet<_>>();
        let (host_keys, disk_keys) = (keys(&from_host), keys(&from_disk));
        let found = Found {
            before: cached,
            from_host: host_keys.difference(&disk_keys).count(),
            from_disk: disk_keys.len(),
            tokens: (blocks - cached) * layout.block_size,
            computing: Duration::from_secs_f64(computing.min(1e6)),
            begin,
        };
        let budget = Duration::from_secs_f64((computing * tiers.worth).min(1e6));
        let owner = (sequence.request.id, sequence.branches.start);
        Some(Ok((found, LoadRequest { owner, from_host, from_disk, budget })))
    }

    /// Seconds needed to compute these positions of a sequence.
    fn seconds_of(&self, mut start: usize, end: usize) -> f64 {
        let mut seconds = 0.0;
        while start < end {
            let rows = (end - start).min(self.limits.max_rows);
            seconds += self.cost.seconds(Work::default().and(start, rows));
            start += rows;
        }
        seconds
    }

    /// Returns the number of pages of a unit.
    pub fn pages_in(&self, unit: Unit) -> usize {
        match unit.part {
            Part::Kv(_) => 1,
            Part::Checkpoint => self.layout.checkpoints.map_or(0, |checkpoints| checkpoints.pages),
        }
    }

    /// Returns true if something can be computed now.
    pub fn has_work(&self) -> bool {
        !self.running.is_empty() || self.waiting.values().any(|sequence| !sequence.is_loading())
    }

    /// Returns the other tiers, if there are any.
    pub fn tiers(&mut self) -> Option<&mut Tiers> {
        self.pages.tiers.as_mut()
    }

    /// Returns the other tiers, and the events for routers.
    pub fn tiers_and_events(&mut self) -> (Option<&mut Tiers>, &mut Option<Events>) {
        (self.pages.tiers.as_mut(), &mut self.pages.events)
    }

    /// Returns the disk tier, if there is one.
    pub fn disk(&mut self) -> Option<&mut Disk> {
        self.tiers()?.disk.as_mut()
    }

    /// Returns the host tier, if there is one.
    pub fn host(&mut self) -> Option<&mut Host> {
        self.tiers()?.host.as_mut()
    }

    pub(super) fn disk_stats(&self) -> DiskStats {
        let disk = self.pages.tiers.as_ref().and_then(|tiers| tiers.disk.as_ref());
        disk.map(Disk::numbers).unwrap_or_default()
    }

    pub(super) fn host_stats(&self) -> HostStats {
        let host = self.pages.tiers.as_ref().and_then(|tiers| tiers.host.as_ref());
        host.map(Host::numbers).unwrap_or_default()
    }

    /// Returns the blocks of the device, of the host and of the disk; those of the disk only if there are events.
    pub(super) fn blocks(&self) -> [BlockSet; 3] {
        let group = self.layout.event_group();
        let tiers = self.pages.tiers.as_ref();
        let host = tiers.and_then(|tiers| tiers.host.as_ref()).map(|host| host.blocks(group));
        let disk = tiers.and_then(|tiers| tiers.disk.as_ref()).map(Disk::blocks);
        [self.pages.blocks(group), host.unwrap_or_default(), disk.unwrap_or_default()]
    }

    /// Takes pages for units that were loaded. Units that the prefix cache has meanwhile, or that have no room, get none.
    pub fn place(&mut self, units: &[Unit]) -> Vec<Option<Vec<PageId>>> {
        let placed: Vec<_> = units.iter().map(|&unit| self.pages.place(unit, self.pages_in(unit))).collect();
        if let Some(events) = &mut self.pages.events {
            let is_new =
                |(unit, pages): &(&Unit, &Option<_>)| pages.is_some() && unit.part == Part::Kv(events.group);
            let keys: Vec<_> = units.iter().zip(&placed).filter(is_new).map(|(unit, _)| unit.key).collect();
            events.placed.extend(keys);
        }
        placed
    }

    /// Sends the events of changes in the prefix cache and its tiers.
    pub fn send_kv_events(&mut self) {
        let Pages { tiers, events: Some(events), .. } = &mut self.pages else { return };
        if let Some(disk) = tiers.as_mut().and_then(|tiers| tiers.disk.as_mut()) {
            disk.report(events);
        }
        events.send();
    }

    /// Sends the events of an engine's end.
    pub fn send_end(&mut self) {
        self.pages.send_end();
    }

    /// Forgets units whose pages could not be filled.
    pub fn forget(&mut self, units: &[Unit]) {
        units.iter().for_each(|&unit| self.pages.forget(unit));
    }

    /// The load for a sequence has ended.
    pub fn finish_load(&mut self, (request, branch): (u64, usize)) {
        let is_it =
            |sequence: &&mut Sequence| sequence.request.id == request && sequence.branches.start == branch;
        let Some(sequence) = self.waiting.values_mut().find(is_it) else { return };
        if let Load::Loading(found) = sequence.prefix.load {
            sequence.prefix.load = Load::Loaded(found, found.begin.elapsed());
        }
        let Some(events) = &mut self.pages.events else { return };
        let keys = sequence.kv.keys.iter().enumerate();
        let placed: Vec<usize> =
            keys.filter(|(_, key)| events.placed.remove(key)).map(|(block, _)| block).collect();
        let group = events.group;
        for block in placed {
            let text = (&*sequence.tokens, &sequence.request.pictures);
            sequence.kv.publish_stored(block, group, text, self.layout.block_size, &mut self.pages);
        }
    }

    /// Returns the next unit to be saved that the prefix cache still has, and its pages. A checkpoint whose copy is
    /// still to be made waits.
    pub fn next_save(&mut self) -> Option<(Unit, Vec<PageId>)> {
        loop {
            let unit = self.disk()?.next_save()?;
            if unit.part == Part::Checkpoint && self.saves.keys.contains(&unit.key) {
                self.disk()?.put_back(unit);
                return None;
            }
            if let Some(pages) = self.pages.pages_of(unit) {
                return Some((unit, pages));
            }
        }
    }

    /// Units that were evicted, with pages that have their bytes until the next step.
    pub fn take_evicted(&mut self) -> Vec<Evicted> {
        let Some(tiers) = &mut self.pages.tiers else { return Vec::new() };
        let mut evicted = tiers.take_evicted();
        // The copy of a checkpoint that was evicted at once has not been made.
        let saved = &self.plan.saved;
        evicted.retain(|it| it.unit.part != Part::Checkpoint || !saved.contains(&it.unit.key));
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
