//! Admission: the order in which requests leave the queue, and the choice of sequences to preempt for them.
//!
//! Places and pages are shared fairly at two levels: among tenants, and among the requests of a tenant. The next
//! sequence has the highest waiting priority; then the tenant with the fewest places, then with the fewest tokens so
//! far; then the request with the fewest places; then the longest wait. Another sequence overtakes it only while it
//! waits for a block of its prompt that a running sequence computes.
//!
//! Without room, it may preempt:
//!
//! - sequences of lower priority;
//! - a sequence of a tenant that has more places or pages, and will still have at least as many afterwards, so that the
//!   two never preempt each other alternately;
//! - if its tenant has no place: a sequence of any tenant that has had as many tokens. If tenants outnumber places,
//!   they alternate in this way;
//! - within its tenant, by the same rule, a sequence of a request that has more. If its request has no place: also the
//!   last branch of a request for several answers, and a sequence that claims at least twice its pages. These then wait
//!   behind the others of their tenant. Otherwise a running request for one answer is not interrupted.
//!
//! Sequences of equal priority are preempted only after they have run for [`QUANTUM`] steps, and alternately only after
//! they have run for twice the time of recomputing the tokens that an earlier preemption has lost.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use super::Scheduler;
use crate::{
    fair::Tenant,
    request::Event,
    sequence::{Rank, Sequence},
};

/// Number of steps that a sequence runs before one of its own priority can preempt it.
pub(super) const QUANTUM: u64 = 8;

/// Maximum number of sequences at the head of the queue that wait for blocks of others while later ones pass. It limits
/// the time of a plan.
const MOST_PASSED_OVER: usize = 16;

/// Places and pages that tenants and requests hold.
#[derive(Default)]
struct Shares<'a> {
    tenants: BTreeMap<&'a Tenant, Share>,
    requests: BTreeMap<u64, Share>,
}

#[derive(Clone, Copy, Default)]
struct Share {
    places: usize,
    pages: f64,
}

impl Share {
    /// Moves a place to another share. The pages are freed.
    fn give(&mut self, to: &mut Share, pages: f64) {
        self.places -= 1;
        self.pages -= pages;
        to.places += 1;
    }
}

impl<'a> Shares<'a> {
    fn tenant(&self, sequence: &Sequence) -> Share {
        self.tenants.get(&sequence.request.tenant).copied().unwrap_or_default()
    }

    fn request(&self, sequence: &Sequence) -> Share {
        self.requests.get(&sequence.request.id).copied().unwrap_or_default()
    }

    fn add(&mut self, sequence: &'a Sequence, pages: f64) {
        let tenant = self.tenants.entry(&sequence.request.tenant).or_default();
        for share in [tenant, self.requests.entry(sequence.request.id).or_default()] {
            share.places += 1;
            share.pages += pages;
        }
    }

    /// Moves a place from one sequence to another.
    fn pass(&mut self, from: &'a Sequence, to: &'a Sequence, pages: f64) {
        let mut gained = Share::default();
        self.tenants.entry(&from.request.tenant).or_default().give(&mut gained, pages);
        self.tenants.entry(&to.request.tenant).or_default().places += gained.places;
        self.requests.entry(from.request.id).or_default().give(&mut gained, pages);
        self.requests.entry(to.request.id).or_default().places += 1;
    }
}

/// The resource that a sequence needs and does not find.
#[derive(Clone, Copy)]
struct Shortage {
    places: usize,
    pages: f64,
    /// Pages that the sequence will claim.
    claim: f64,
}

impl Scheduler {
    /// Returns the number of free places. A prompt uses one place for all its branches.
    fn free_places(&self) -> usize {
        self.limits.max_sequences - self.running.len()
    }

    /// Raises sequences that have waited for long to the highest waiting priority.
    pub(super) fn raise_long_waits(&mut self) {
        let Some(since) = self.step.checked_sub(self.max_wait_steps) else { return };
        let Some((_, head)) = self.waiting.first_key_value() else { return };
        let top = head.priority;
        let long =
            |_: &Rank, sequence: &mut Sequence| sequence.priority < top && sequence.waits_since <= since;
        let raised: Vec<_> = self.waiting.extract_if(.., long).collect();
        for (_, mut sequence) in raised {
            sequence.priority = top;
            self.waiting.insert(sequence.rank(), sequence);
        }
    }

    /// Moves the next sequence from the queue to the running ones, where it starts at `now`. Returns false if the queue
    /// is empty or there is no room.
    pub(super) fn admit_next(&mut self, now: Instant) -> bool {
        let Some((rank, victims)) = self.next_in_queue() else { return false };
        for victim in victims {
            self.displace(victim, Some(rank));
        }
        // Pages of preempted sequences may be shared with others, or hold a part of the prompt.
        let head = &self.waiting[&rank];
        let cached = head.cached_blocks(&self.layout, &self.pages);
        if self.missing_pages(head, cached) > 0 {
            return false;
        }
        let mut sequence = self.waiting.remove(&rank).expect("it waits");
        let first_time = sequence.cached_tokens.is_none();
        let Self { layout, pages, states, plan, .. } = self;
        sequence.take_cached(cached, layout, pages);
        sequence.restore_state(layout, pages, states, &mut plan.moves);
        sequence.count_loaded(first_time, layout, pages);
        if sequence.state.is_some() {
            plan.restored.push(sequence.request.id);
        }
        (sequence.runs_since, sequence.restoring_steps, sequence.overtaken) = (self.step, 0, 0);
        self.stats.prefix_query_tokens += sequence.tokens.len() as u64;
        self.stats.prefix_hit_tokens += sequence.computed as u64;
        if first_time {
            self.stats.prompt_tokens += sequence.request.prompt_tokens as u64;
            self.stats.pictures += sequence.request.pictures.len() as u64;
            let started = Event::Started { cached_tokens: sequence.computed, at: now };
            self.events.push((sequence.request.id, started));
        }
        self.run(sequence);
        true
    }

    /// Returns the sequence that leaves the queue next, and the running ones that it displaces.
    fn next_in_queue(&self) -> Option<(Rank, Vec<Rank>)> {
        if self.waiting.is_empty() {
            return None;
        }
        let mut places: (BTreeMap<&Tenant, usize>, BTreeMap<u64, usize>) = Default::default();
        for sequence in &self.running {
            *places.0.entry(&sequence.request.tenant).or_default() += 1;
            *places.1.entry(sequence.request.id).or_default() += 1;
        }
        let order = |sequence: &Sequence| {
            let of_tenant = places.0.get(&sequence.request.tenant).copied().unwrap_or(0);
            let of_request = places.1.get(&sequence.request.id).copied().unwrap_or(0);
            let tokens = self.ledger.of(&sequence.request.tenant);
            (Reverse(sequence.priority), of_tenant, tokens, of_request, sequence.rank())
        };
        let mut in_work = BTreeSet::new();
        let mut without_place: BTreeSet<&Tenant> = BTreeSet::new();
        loop {
            let left = self.waiting.values().filter(|sequence| {
                !in_work.contains(&sequence.rank())
                    && !without_place.contains(&sequence.request.tenant)
                    && !sequence.is_loading()
            });
            let head = left.min_by_key(|sequence| order(sequence))?;
            let cached = head.cached_blocks(&self.layout, &self.pages);
            // A block that another sequence is about to compute need not be computed twice.
            let computes = |other: &Sequence| {
                other.priority >= head.priority && head.could_wait_for(other, cached, &self.layout)
            };
            if self.running.iter().any(computes) {
                in_work.insert(head.rank());
                if in_work.len() > MOST_PASSED_OVER {
                    return None;
                }
                continue;
            }
            let short = Shortage {
                places: usize::from(self.free_places() == 0),
                pages: self.missing_pages(head, cached) as f64,
                claim: head.claim(&self.layout, &self.pages),
            };
            if short.places == 0 && short.pages == 0.0 {
                return Some((head.rank(), Vec::new()));
            }
            let (victims, enough) = self.victims(head, short);
            if enough {
                return Some((head.rank(), victims));
            }
            if short.pages > 0.0 {
                // A place or page that becomes free is for this sequence.
                return None;
            }
            // Another tenant may have a claim to the place.
            without_place.insert(&head.request.tenant);
        }
    }

    /// Returns the missing pages for the prefill of the sequence beside those of the running ones, with one more block
    /// for each that may need it. A sequence always fits alone.
    fn missing_pages(&self, sequence: &Sequence, cached: usize) -> usize {
        if self.running.is_empty() {
            return 0;
        }
        let to_come = |sequence: &Sequence, cached| {
            sequence.pages_to_come(cached, &self.layout) + sequence.headroom(&self.layout)
        };
        let promised: usize = self.running.iter().map(|running| to_come(running, 0)).sum();
        let available =
            self.pages.available() - sequence.evictable_in_cached(cached, &self.layout, &self.pages);
        (to_come(sequence, cached) + promised).saturating_sub(available)
    }

    /// Returns the running sequences that `claimant` may preempt to cover its shortage, and true if they suffice.
    fn victims(&self, claimant: &Sequence, mut short: Shortage) -> (Vec<Rank>, bool) {
        let mut shares = Shares::default();
        let mut left: Vec<(&Sequence, f64)> = Vec::new();
        for sequence in &self.running {
            let pages = sequence.claim(&self.layout, &self.pages) + sequence.headroom(&self.layout) as f64;
            shares.add(sequence, pages);
            let has_run = self.step - sequence.runs_since >= QUANTUM;
            if sequence.priority < claimant.priority || sequence.priority == claimant.priority && has_run {
                left.push((sequence, pages));
            }
        }
        let starves = (shares.tenant(claimant).places == 0, shares.request(claimant).places == 0);
        let mut victims = Vec::new();
        while short.places > 0 || short.pages > 0.0 {
            let may_go = |(sequence, pages): &(&Sequence, f64)| {
                sequence.priority < claimant.priority
                    || self.is_ahead_of(claimant, starves, sequence, *pages, short, &shares)
            };
            let order = |(sequence, _): &(&Sequence, f64)| {
                let (tenant, request) = (shares.tenant(sequence), shares.request(sequence));
                let tokens = self.ledger.of(&sequence.request.tenant);
                (Reverse(sequence.priority), tenant.places, tokens, request.places, sequence.rank())
            };
            let best = (0..left.len()).filter(|&i| may_go(&left[i])).max_by_key(|&i| order(&left[i]));
            let Some(best) = best else { break };
            let (victim, pages) = left.swap_remove(best);
            shares.pass(victim, claimant, pages);
            short.places = short.places.saturating_sub(1);
            short.pages -= pages;
            victims.push(victim.rank());
        }
        (victims, short.places == 0 && short.pages <= 0.0)
    }

    /// Returns true if a running sequence of the claimant's priority has a resource to which the claimant is entitled;
    /// see the [module](self).
    fn is_ahead_of(
        &self,
        claimant: &Sequence,
        (tenant_starves, request_starves): (bool, bool),
        running: &Sequence,
        pages: f64,
        short: Shortage,
        shares: &Shares<'_>,
    ) -> bool {
        if running.request.id == claimant.request.id {
            return false;
        }
        let has_more = |theirs: Share, own: Share| {
            (short.places > 0 && theirs.places >= own.places + 2)
                || (short.pages > 0.0 && theirs.pages - pages >= own.pages + short.claim)
        };
        // A sequence that has just recomputed its lost tokens would lose them again.
        let may_alternate = self.step - running.runs_since >= 2 * running.restoring_steps;
        if running.request.tenant != claimant.request.tenant {
            let tokens = |sequence: &Sequence| self.ledger.of(&sequence.request.tenant);
            has_more(shares.tenant(running), shares.tenant(claimant))
                || (tenant_starves && may_alternate && tokens(running) >= tokens(claimant))
        } else {
            let has_branches = running.request.sampling.len() > 1;
            let is_large = short.pages > 0.0 && pages >= 2.0 * short.claim;
            has_more(shares.request(running), shares.request(claimant))
                || (request_starves && may_alternate && (has_branches || is_large))
        }
    }

    /// Returns a running sequence to the queue, for a waiting one or for the pages of others.
    fn displace(&mut self, victim: Rank, claimant: Option<Rank>) {
        let index = self.running.iter().position(|sequence| sequence.rank() == victim).expect("it runs");
        let mut sequence = self.running.remove(index);
        sequence.release(&self.layout, &mut self.pages, &mut self.states);
        self.stats.preemptions += 1;
        sequence.waits_since = self.step;
        let for_own_tenant = claimant
            .and_then(|rank| self.waiting.get(&rank))
            .is_some_and(|claimant| claimant.request.tenant == sequence.request.tenant);
        if for_own_tenant {
            sequence.seniority = self.arrivals;
            self.arrivals += 1;
        }
        self.waiting.insert(sequence.rank(), sequence);
    }

    /// Splits the branches of prompts whose last rows are planned: those with places and pages continue, and the others
    /// wait.
    pub(super) fn open_branches(&mut self) {
        let forks = |sequence: &Sequence| {
            sequence.branches.len() > 1
                && sequence.granted == sequence.remaining()
                && sequence.generated() < sequence.request.max_tokens
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
            if free < room {
                let short = Shortage { places: room - free, pages: 0.0, claim: 0.0 };
                let (victims, _) = self.victims(&self.running[index], short);
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
                rest.waits_since = self.step;
                self.waiting.insert(rest.rank(), rest);
            }
        }
    }

    /// Reserves the pages for the granted rows. If there are too few, displaces other sequences.
    pub(super) fn reserve_pages(&mut self) {
        let ranks: Vec<_> = self.running.iter().filter(|s| s.granted > 0).map(Sequence::rank).collect();
        for rank in ranks {
            // The sequence may have lost its place to an earlier one.
            while let Some(index) = self.running.iter().position(|sequence| sequence.rank() == rank) {
                let sequence = &mut self.running[index];
                let rows = sequence.granted;
                if sequence.pages_for(rows, &self.layout, &self.pages) <= self.pages.available() {
                    let Self { layout, pages, states, plan, .. } = self;
                    if !sequence.reserve(rows, layout, pages, states, &mut plan.moves) {
                        // Branches of requests move to states of their own in this step.
                        sequence.granted = 0;
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
        let order = |sequence: &&Sequence| (Reverse(sequence.priority), sequence.rank());
        let lowest = self.running.iter().map(|sequence| sequence.priority).min();
        let candidates = || self.running.iter().filter(|s| Some(s.priority) == lowest);
        let most = candidates().map(|s| claims[&s.request.tenant]).fold(0.0, f64::max);
        let of_most = candidates().filter(|s| claims[&s.request.tenant] >= most);
        of_most.max_by_key(order).expect("at least one sequence runs").rank()
    }
}
