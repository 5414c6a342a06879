//! Admission as a pure function: the waiting sequence that leaves the queue next, and the running ones that it preempts.
//!
//! **Order.** The head of the queue is the sequence with the first of these keys; each decides only if all keys before it
//! are equal:
//!
//! | Key | First |
//! |-|-|
//! | priority | highest |
//! | places of its tenant | fewest |
//! | tokens computed for its tenant | fewest |
//! | places of its request | fewest |
//! | [rank](Rank) | longest wait |
//!
//! **Passing over.** Another sequence overtakes the head in two cases only:
//!
//! | Head | Next |
//! |-|-|
//! | waits for a block of its prompt that a running sequence computes | any other one; after [`MOST_PASSED_OVER`] such heads, none |
//! | lacks a place, and may preempt none | the first one of another tenant, which may have a claim to the place |
//! | lacks pages, and may preempt too few | none: every page that becomes free is for the head |
//!
//! **Preemption.** A head without room may preempt a running sequence by one of these [rules](Rule). Victims of equal
//! priority have run for at least [`QUANTUM`] steps. A sequence never preempts its own request.
//!
//! | Rule | Victim | Condition |
//! |-|-|-|
//! | [`Rule::Priority`] | of lower priority | none |
//! | [`Rule::TenantHasMore`] | of another tenant | the tenant has more of what the head lacks (places, pages, or both), and has at least as much afterwards, so that the two never preempt each other alternately |
//! | [`Rule::TenantsAlternate`] | of another tenant | the head's tenant has no place, and not more tokens |
//! | [`Rule::RequestHasMore`] | of the same tenant | as for tenants, of the requests |
//! | [`Rule::RequestsAlternate`] | of the same tenant | the head's request has no place; the victim is one of several answers, or claims at least twice the head's pages while pages are short |
//!
//! The rules by which sequences alternate also need a victim that has run for twice the steps that passed until its lost
//! tokens were computed again; otherwise it would lose them again. Steps without its rows count too, so that sequences that take turns in
//! the steps of several lanes get beyond their lost tokens. The first victim has the lowest priority, then the tenant with the most
//! places, then with the most tokens, then the request with the most places, then the shortest wait.

use std::collections::BTreeMap;

use crate::{fair::Tenant, sequence::Rank};

/// Number of steps that a sequence runs before one of its own priority can preempt it.
pub(super) const QUANTUM: u64 = 8;

/// Maximum number of sequences at the head of the queue that wait for blocks of others while later ones pass. It limits
/// the time of a plan.
const MOST_PASSED_OVER: usize = 16;

/// A sequence that claims a place.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate<'a> {
    /// Its priority, request, and time of arrival.
    pub rank: Rank,
    pub tenant: &'a Tenant,
    /// Tokens computed for its tenant so far.
    pub tenant_tokens: u64,
}

/// A sequence that has a place.
#[derive(Clone, Copy, Debug)]
pub(super) struct Running<'a> {
    pub candidate: Candidate<'a>,
    /// Steps since it left the queue.
    pub ran: u64,
    /// Number of these steps until its lost tokens were computed again.
    pub restoring: u64,
    /// Number of answers of its request.
    pub answers: usize,
}

/// Demand of a waiting sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Demand {
    /// A running sequence computes a block that it needs.
    InWork,
    Pages {
        /// Pages that are missing.
        missing: usize,
        /// Pages that it will claim.
        claim: f64,
    },
}

/// Pages of sequences by index. Few of them are needed, so they are computed when they are.
pub(super) trait Claims {
    /// Returns the demand of a waiting sequence.
    fn demand(&self, waiting: usize) -> Demand;

    /// Returns the pages that a running sequence claims, its next block included.
    fn claim(&self, running: usize) -> f64;
}

/// Decision about the next place, by indices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Admission {
    /// This waiting sequence leaves the queue, after these running ones have lost their places.
    Admit { waiting: usize, victims: Vec<usize> },
    /// No sequence leaves the queue.
    Wait,
}

/// Decides which waiting sequence gets a place next; see the [module](self).
pub(super) fn choose(
    waiting: &[Candidate<'_>],
    running: &[Running<'_>],
    free_places: usize,
    claims: &impl Claims,
) -> Admission {
    let mut shares = Shares::default();
    running.iter().for_each(|running| shares.add(&running.candidate, 0.0));
    let order = |candidate: &Candidate<'_>| {
        let (tenant, request) = (shares.tenant(candidate), shares.request(candidate));
        let priority = candidate.rank.priority;
        (priority, tenant.places, candidate.tenant_tokens, request.places, candidate.rank)
    };
    let mut left: Vec<_> = waiting.iter().map(order).zip(0..).collect();
    let mut passed_over = 0;
    while let Some((at, &(_, index))) = left.iter().enumerate().min_by_key(|(_, (order, _))| order) {
        let head = &waiting[index];
        let Demand::Pages { missing, claim } = claims.demand(index) else {
            passed_over += 1;
            if passed_over > MOST_PASSED_OVER {
                return Admission::Wait;
            }
            left.swap_remove(at);
            continue;
        };
        let short = Shortage { places: usize::from(free_places == 0), pages: missing as f64, claim };
        let (victims, enough) = victims(head, short, running, claims);
        if enough {
            return Admission::Admit { waiting: index, victims };
        }
        if missing > 0 {
            return Admission::Wait;
        }
        left.retain(|(_, other)| waiting[*other].tenant != head.tenant);
    }
    Admission::Wait
}

/// The resource that a sequence needs and does not find.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shortage {
    pub places: usize,
    pub pages: f64,
    /// Pages that the sequence will claim.
    pub claim: f64,
}

impl Shortage {
    fn is_covered(&self) -> bool {
        self.places == 0 && self.pages <= 0.0
    }
}

/// Returns the running sequences that `claimant` may preempt to cover its shortage, and true if they suffice.
pub(super) fn victims(
    claimant: &Candidate<'_>,
    mut short: Shortage,
    running: &[Running<'_>],
    claims: &impl Claims,
) -> (Vec<usize>, bool) {
    let mut victims = Vec::new();
    if short.is_covered() {
        return (victims, true);
    }
    let pages: Vec<f64> = (0..running.len()).map(|index| claims.claim(index)).collect();
    let mut shares = Shares::default();
    running.iter().zip(&pages).for_each(|(running, &pages)| shares.add(&running.candidate, pages));
    // The claimant keeps its entitlement until its shortage is covered.
    let starves = Starves {
        tenant: shares.tenant(claimant).places == 0,
        request: shares.request(claimant).places == 0,
    };
    let mut left: Vec<usize> = (0..running.len()).collect();
    while !short.is_covered() {
        let may_go =
            |&index: &usize| rule(claimant, starves, short, &running[index], pages[index], &shares).is_some();
        let order = |&index: &usize| {
            let Candidate { rank, tenant_tokens, .. } = running[index].candidate;
            let places = |share: Share| share.places;
            let tenant = places(shares.tenant(&running[index].candidate));
            let request = places(shares.request(&running[index].candidate));
            (rank.priority, tenant, tenant_tokens, request, rank)
        };
        let Some(victim) = left.iter().copied().filter(may_go).max_by_key(order) else { break };
        left.retain(|&index| index != victim);
        shares.pass(&running[victim].candidate, claimant, pages[victim]);
        short.places = short.places.saturating_sub(1);
        short.pages -= pages[victim];
        victims.push(victim);
    }
    (victims, short.is_covered())
}

/// The reason for which a sequence may be preempted; see the table in the [module](self).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    Priority,
    TenantHasMore,
    TenantsAlternate,
    RequestHasMore,
    RequestsAlternate,
}

/// Levels at which a claimant has no place.
#[derive(Clone, Copy, Debug)]
struct Starves {
    tenant: bool,
    request: bool,
}

/// Returns the rule by which `claimant` may preempt a running sequence that claims `pages` pages.
fn rule(
    claimant: &Candidate<'_>,
    starves: Starves,
    short: Shortage,
    running: &Running<'_>,
    pages: f64,
    shares: &Shares<'_>,
) -> Option<Rule> {
    let Running { candidate: victim, ran, restoring, answers } = running;
    if victim.rank.priority > claimant.rank.priority {
        return Some(Rule::Priority);
    }
    if victim.rank.priority < claimant.rank.priority
        || *ran < QUANTUM
        || victim.rank.request == claimant.rank.request
    {
        return None;
    }
    let has_more = |theirs: Share, own: Share| {
        (short.places == 0 || theirs.places >= own.places + 2)
            && (short.pages <= 0.0 || theirs.pages - pages >= own.pages + short.claim)
    };
    let may_alternate = *ran >= 2 * restoring;
    if victim.tenant != claimant.tenant {
        if has_more(shares.tenant(victim), shares.tenant(claimant)) {
            return Some(Rule::TenantHasMore);
        }
        let alternate = starves.tenant && may_alternate && victim.tenant_tokens >= claimant.tenant_tokens;
        return alternate.then_some(Rule::TenantsAlternate);
    }
    if has_more(shares.request(victim), shares.request(claimant)) {
        return Some(Rule::RequestHasMore);
    }
    let is_large = short.pages > 0.0 && pages >= 2.0 * short.claim;
    let alternate = starves.request && may_alternate && (*answers > 1 || is_large);
    alternate.then_some(Rule::RequestsAlternate)
}

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

impl<'a> Shares<'a> {
    fn tenant(&self, candidate: &Candidate<'_>) -> Share {
        self.tenants.get(candidate.tenant).copied().unwrap_or_default()
    }

    fn request(&self, candidate: &Candidate<'_>) -> Share {
        self.requests.get(&candidate.rank.request).copied().unwrap_or_default()
    }

    /// Both shares of a sequence: those of its tenant and its request.
    fn of(&mut self, candidate: &Candidate<'a>) -> [&mut Share; 2] {
        [
            self.tenants.entry(candidate.tenant).or_default(),
            self.requests.entry(candidate.rank.request).or_default(),
        ]
    }

    fn add(&mut self, candidate: &Candidate<'a>, pages: f64) {
        for share in self.of(candidate) {
            share.places += 1;
            share.pages += pages;
        }
    }

    /// Moves a place from one sequence to another. Its pages are freed.
    fn pass(&mut self, from: &Candidate<'a>, to: &Candidate<'a>, pages: f64) {
        for share in self.of(from) {
            share.places -= 1;
            share.pages -= pages;
        }
        self.of(to).into_iter().for_each(|share| share.places += 1);
    }
}

#[cfg(test)]
mod tests;
