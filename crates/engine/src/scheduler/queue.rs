//! The queue: sequences leave it by the rules of [admission], and return to it when they are preempted.
//!
//! Places and pages are shared fairly at two levels: among tenants, and among the requests of a tenant. Sequences that are
//! preempted for their own tenant wait behind its others. Otherwise a running request for one answer is not interrupted.

use std::{cmp::Reverse, collections::BTreeMap, time::Instant};

use super::{
    Scheduler,
    admission::{self, Admission, Candidate, Claims, Demand, Running, Shortage},
};
use crate::{
    fair::Tenant,
    request::Event,
    sequence::{Rank, Sequence},
};

/// Pages of the scheduler's sequences.
struct PageClaims<'a> {
    scheduler: &'a Scheduler,
    /// Sequences that may leave the queue.
    waiting: &'a [&'a Sequence],
}

impl Claims for PageClaims<'_> {
    fn demand(&self, waiting: usize) -> Demand {
        let Scheduler { running, layout, pages, .. } = self.scheduler;
        let head = self.waiting[waiting];
        let cached = head.cached_blocks(layout, pages);
        // A block that another sequence is about to compute need not be computed twice.
        let computes = |other: &Sequence| {
            other.sched.priority >= head.sched.priority && head.could_wait_for(other, cached, layout)
        };
        if running.iter().any(computes) {
            return Demand::InWork;
        }
        Demand::Pages {
            missing: self.scheduler.missing_pages(head, cached),
            claim: head.claim(layout, pages),
        }
    }

    fn claim(&self, running: usize) -> f64 {
        let Scheduler { running: sequences, layout, pages, .. } = self.scheduler;
        let sequence = &sequences[running];
        sequence.claim(layout, pages) + sequence.headroom(layout) as f64
    }
}

/// A sequence that leaves the queue, and the running ones that it displaces.
pub(super) struct Choice {
    pub rank: Rank,
    pub victims: Vec<Rank>,
}

impl Scheduler {
    /// Returns the number of free places. A prompt uses one place for all its branches, until they separate after a step in flight.
    fn free_places(&self) -> usize {
        let separating = self.running.iter().filter(|sequence| sequence.samples());
        let branches: usize = separating.map(|sequence| sequence.branches.len() - 1).sum();
        self.limits.max_sequences - self.running.len() - branches
    }

    /// Raises sequences that have waited for long to the highest waiting priority.
    pub(super) fn raise_long_waits(&mut self) {
        let Some(since) = self.step.checked_sub(self.max_wait_steps) else { return };
        let Some((_, head)) = self.waiting.first_key_value() else { return };
        let top = head.sched.priority;
        let long = |_: &Rank, sequence: &mut Sequence| {
            sequence.sched.priority < top && sequence.sched.waits_since <= since
        };
        let raised: Vec<_> = self.waiting.extract_if(.., long).collect();
        for (_, mut sequence) in raised {
            sequence.sched.priority = top;
            self.waiting.insert(sequence.rank(), sequence);
        }
    }

    /// Moves sequences from the queue to the running ones, where they start at `now`, as long as there is room. Returns false if the
    /// next one preempts others while steps are in flight.
    pub(super) fn admit_all(&mut self, now: Instant) -> bool {
        while let Some(Choice { rank, victims }) = self.next_in_queue() {
            if !victims.is_empty() && !self.in_flight.is_empty() {
                return false;
            }
            for victim in victims {
                self.displace(victim, Some(rank));
            }
            if !self.admit(rank, now) {
                break;
            }
        }
        true
    }

    /// Moves a sequence from the queue to the running ones, where it starts at `now`. Returns false if pages are missing.
    pub(super) fn admit(&mut self, rank: Rank, now: Instant) -> bool {
        // Pages of preempted sequences may be shared with others, or hold a part of the prompt.
        let head = &self.waiting[&rank];
        let cached = head.cached_blocks(&self.layout, &self.pages);
        if self.missing_pages(head, cached) > 0 {
            return false;
        }
        let mut sequence = self.waiting.remove(&rank).expect("it waits");
        let first_time = sequence.prefix.cached_tokens.is_none();
        let Self { layout, pages, states, plan, .. } = self;
        sequence.take_cached(cached, layout, pages);
        sequence.kv.restore_state(layout, pages, states, &mut plan.moves);
        sequence.count_loaded(first_time, layout, pages);
        if sequence.kv.state.is_some() {
            plan.restored.push(sequence.request.id);
        }
        (sequence.sched.runs_since, sequence.sched.restoring_steps, sequence.sched.overtaken) =
            (self.step, 0, 0);
        self.stats.prefix_query_tokens += sequence.tokens.len() as u64;
        self.stats.prefix_hit_tokens += sequence.kv.computed as u64;
        if first_time {
            self.stats.prompt_tokens += sequence.tokens.prompt() as u64;
            self.stats.pictures += sequence.request.pictures.len() as u64;
            let started = Event::Started { cached_tokens: sequence.kv.computed, at: now };
            self.events.push((sequence.request.id, started));
        }
        self.run(sequence);
        true
    }

    /// Chooses the sequence that leaves the queue next.
    pub(super) fn next_in_queue(&self) -> Option<Choice> {
        if self.waiting.is_empty() {
            return None;
        }
        let waiting: Vec<&Sequence> =
            self.waiting.values().filter(|sequence| !sequence.is_loading()).collect();
        let candidates: Vec<_> = waiting.iter().map(|sequence| self.candidate(sequence)).collect();
        let claims = PageClaims { scheduler: self, waiting: &waiting };
        match admission::choose(&candidates, &self.places(), self.free_places(), &claims) {
            Admission::Wait => None,
            Admission::Admit { waiting, victims } => {
                let victims = victims.into_iter().map(|index| self.running[index].rank()).collect();
                Some(Choice { rank: candidates[waiting].rank, victims })
            }
        }
    }

    fn candidate<'a>(&self, sequence: &'a Sequence) -> Candidate<'a> {
        let tenant = &sequence.request.tenant;
        Candidate { rank: sequence.rank(), tenant, tenant_tokens: self.ledger.of(tenant) }
    }

    /// Returns the steps since a sequence left the queue. An empty plan, which is no step, may have taken it out.
    pub(super) fn steps_of(&self, sequence: &Sequence) -> u64 {
        self.step.saturating_sub(sequence.sched.runs_since)
    }

    /// Returns the running sequences as admission sees them, in order.
    fn places(&self) -> Vec<Running<'_>> {
        let place = |sequence| Running {
            candidate: self.candidate(sequence),
            ran: self.steps_of(sequence),
            restoring: match sequence.kv.restores() {
                true => self.steps_of(sequence),
                false => sequence.sched.restoring_steps,
            },
            answers: sequence.request.sampling.len(),
        };
        self.running.iter().map(place).collect()
    }

    /// Returns the missing pages for the prefill of the sequence beside those of the running ones, with one more block
    /// for each that may need it. A sequence always fits alone.
    fn missing_pages(&self, sequence: &Sequence, cached: usize) -> usize {
        if self.running.is_empty() {
            return 0;
        }
        let promised: usize = self.running.iter().map(|running| running.pages_needed(0, &self.layout)).sum();
        let available =
            self.pages.available() - sequence.evictable_in_cached(cached, &self.layout, &self.pages);
        (sequence.pages_needed(cached, &self.layout) + promised).saturating_sub(available)
    }

    /// Returns a running sequence to the queue, for a waiting one or for the pages of others.
    fn displace(&mut self, victim: Rank, claimant: Option<Rank>) {
        let index = self.running.iter().position(|sequence| sequence.rank() == victim).expect("it runs");
        let mut sequence = self.running.remove(index);
        sequence.release(&self.layout, &mut self.pages, &mut self.states);
        sequence.drafts.release();
        self.stats.preemptions += 1;
        sequence.sched.waits_since = self.step;
        let for_own_tenant = claimant
            .and_then(|rank| self.waiting.get(&rank))
            .is_some_and(|claimant| claimant.request.tenant == sequence.request.tenant);
        if for_own_tenant {
            sequence.sched.seniority = self.arrivals;
            self.arrivals += 1;
        }
        self.waiting.insert(sequence.rank(), sequence);
    }

    /// Splits the branches of prompts whose last rows are planned: those with places and pages continue, and the others
    /// wait.
    pub(super) fn open_branches(&mut self) {
        let forks = |sequence: &Sequence| {
            sequence.branches.len() > 1
                && sequence.planned.granted == sequence.remaining()
                && sequence.tokens.generated() < sequence.request.max_tokens
        };
        let ranks: Vec<_> = self.running.iter().filter(|s| forks(s)).map(Sequence::rank).collect();
        let mut free = self.free_places();
        let mut pages = self.pages.available() / self.layout.groups();
        for rank in ranks {
            let Some(index) = self.running.iter().position(|sequence| sequence.rank() == rank) else {
                continue;
            };
            let wanted = self.running[index].branches.len() - 1;
            let room = wanted.min(pages);
            if free < room && self.in_flight.is_empty() {
                let short = Shortage { places: room - free, pages: 0.0, claim: 0.0 };
                let claims = PageClaims { scheduler: self, waiting: &[] };
                let claimant = self.candidate(&self.running[index]);
                let (victims, _) = admission::victims(&claimant, short, &self.places(), &claims);
                let victims: Vec<_> = victims.into_iter().map(|index| self.running[index].rank()).collect();
                free += victims.len();
                for victim in victims {
                    self.displace(victim, None);
                }
            }
            let more = room.min(free);
            (free, pages) = (free - more, pages - more);
            let sequence = self.running.iter_mut().find(|sequence| sequence.rank() == rank);
            let sequence = sequence.expect("no sequence displaces itself");
            if more < wanted {
                let mut rest = sequence.split_off(sequence.branches.start + 1 + more);
                rest.sched.waits_since = self.step;
                self.waiting.insert(rest.rank(), rest);
            }
        }
    }

    /// Returns true if there are pages for all granted rows.
    pub(super) fn has_pages_for_granted(&self) -> bool {
        let granted = self.running.iter().filter(|sequence| sequence.planned.granted > 0);
        let needed: usize =
            granted.map(|sequence| sequence.pages_for_granted(&self.layout, &self.pages)).sum();
        needed <= self.pages.available()
    }

    /// Reserves the pages for the granted rows. If there are too few, displaces other sequences, or grants no rows while steps are in
    /// flight.
    pub(super) fn reserve_pages(&mut self) {
        if !self.in_flight.is_empty() && !self.has_pages_for_granted() {
            self.running.iter_mut().for_each(|sequence| sequence.planned.granted = 0);
        }
        let ranks: Vec<_> =
            self.running.iter().filter(|s| s.planned.granted > 0).map(Sequence::rank).collect();
        for rank in ranks {
            // The sequence may have lost its place to an earlier one.
            while let Some(index) = self.running.iter().position(|sequence| sequence.rank() == rank) {
                let sequence = &mut self.running[index];
                let rows = sequence.planned.granted;
                if sequence.pages_for_granted(&self.layout, &self.pages) <= self.pages.available() {
                    let Self { layout, pages, states, plan, .. } = self;
                    if !sequence.reserve(rows, layout, pages, states, &mut plan.moves) {
                        // Branches of requests move to states of their own in this step.
                        sequence.planned.granted = 0;
                    }
                    break;
                }
                assert!(
                    self.running.len() > 1,
                    "a sequence that does not fit alone is refused when it is submitted"
                );
                let victim = self.page_victim();
                self.displace(victim, None);
            }
        }
    }

    /// Returns the running sequence that loses its pages when there are not enough: of the lowest priority, of the
    /// tenant that claims most, the youngest.
    fn page_victim(&self) -> Rank {
        let mut claims: BTreeMap<&Tenant, f64> = BTreeMap::new();
        for sequence in &self.running {
            *claims.entry(&sequence.request.tenant).or_default() += sequence.claim(&self.layout, &self.pages);
        }
        let order = |sequence: &&Sequence| (Reverse(sequence.sched.priority), sequence.rank());
        let lowest = self.running.iter().map(|sequence| sequence.sched.priority).min();
        let candidates = || self.running.iter().filter(|s| Some(s.sched.priority) == lowest);
        let most = candidates().map(|s| claims[&s.request.tenant]).fold(0.0, f64::max);
        let of_most = candidates().filter(|s| claims[&s.request.tenant] >= most);
        of_most.max_by_key(order).expect("at least one sequence runs").rank()
    }
}
