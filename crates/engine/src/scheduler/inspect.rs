//! Views of the scheduler for readers, and the count of all pages against all sequences.

use paguro_backend::{Limits, PageId};

use super::Scheduler;
use crate::{layout::BlockLayout, sequence::Sequence};

impl Scheduler {
    /// Returns all sequences, running ones first, each in order of rank, with a flag that is true for running ones.
    pub fn sequences(&self) -> impl Iterator<Item = (&Sequence, bool)> {
        let running = self.running.iter().map(|sequence| (sequence, true));
        running.chain(self.waiting.values().map(|sequence| (sequence, false)))
    }

    /// Returns the pages that only the prefix cache holds, in ascending order.
    pub fn cached_pages(&self) -> impl Iterator<Item = PageId> {
        self.pages.cached()
    }

    /// Returns the division of sequences into blocks.
    pub fn layout(&self) -> &BlockLayout {
        &self.layout
    }

    /// Limits of a step and of the number of sequences.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Recounts all pages and states against all sequences.
    pub fn check(&self) -> Result<(), String> {
        let holds =
            |sequence: &&Sequence| sequence.kv.held_pages().next().is_some() || sequence.kv.state.is_some();
        if let Some(sequence) = self.waiting.values().find(holds) {
            return Err(format!("request {} waits but holds pages or a state", sequence.request.id));
        }
        if !self.running.is_sorted_by_key(Sequence::rank) {
            return Err("running sequences are out of order".into());
        }
        for sequence in &self.running {
            let blocks = self.layout.blocks(sequence.next_position());
            if sequence.kv.tables.iter().any(|table| table.pages.len() != blocks) {
                return Err(format!("request {} has block tables of a wrong length", sequence.request.id));
            }
            if self.states.total() > 0 && sequence.kv.computed > 0 && sequence.kv.state.is_none() {
                return Err(format!("request {} has K and V but no state", sequence.request.id));
            }
        }
        self.states.check(self.running.iter().filter_map(|sequence| sequence.kv.state))?;
        self.pages.check(self.running.iter().flat_map(|sequence| sequence.kv.held_pages()))
    }
}

#[cfg(test)]
impl Scheduler {
    pub fn mask_workers(&mut self) -> &mut crate::mask_workers::MaskWorkers {
        &mut self.mask_workers
    }

    pub fn is_encoder(&self) -> bool {
        self.layout.is_whole
    }

    /// Request and branch of the running sequences that decode and wait for no mask.
    pub fn decoding(&self) -> Vec<(u64, usize)> {
        let decoding =
            self.running.iter().filter(|sequence| !sequence.prefills() && !sequence.sampler.awaits_mask());
        decoding.map(|sequence| (sequence.request.id, sequence.branches.start)).collect()
    }

    /// Request, branch and positions of the rows of the oldest planned step, except for those that have ended.
    pub fn planned(&self) -> Vec<(u64, usize, std::ops::Range<usize>)> {
        let mut cursor = self.in_flight.front().unwrap_or(&self.plan).cursor();
        let planned = self.running.iter().filter_map(|s| {
            let rows = cursor.of(s)?.1.rows;
            Some((s.request.id, s.branches.start, s.kv.computed..s.kv.computed + rows))
        });
        planned.collect()
    }

    /// Returns request and branch of running sequences without a row in planned steps, and of waiting ones.
    pub fn held(&self) -> Vec<(u64, usize)> {
        let idle = self.running.iter().filter(|sequence| sequence.planned.rows == 0);
        idle.chain(self.waiting.values()).map(|s| (s.request.id, s.branches.start)).collect()
    }

    /// Tenants and requests of the running sequences.
    pub fn tenants(&self) -> Vec<(crate::fair::Tenant, u64)> {
        self.running.iter().map(|sequence| (sequence.request.tenant.clone(), sequence.request.id)).collect()
    }

    /// Returns the pages of the running sequences.
    pub fn tables(&self) -> Vec<Vec<PageId>> {
        self.running.iter().map(|sequence| sequence.kv.held_pages().collect()).collect()
    }
}
