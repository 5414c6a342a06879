//! Accounts of fair queueing: the tokens computed for each tenant (virtual token counters, after Sheng et al.: Fairness
//! in serving large language models, 2024, and Goyal, Vin, Cheng: Start-time fair queueing, 1996).
//!
//! Every row of a prompt or an answer counts as one token. Tokens from the prefix cache, and rows that are recomputed
//! after a preemption, do not count. Of two tenants with work, the one with the smaller count is next. A returning
//! tenant starts at the smallest count of the active ones, so that idle time accumulates no credit. A tenant with
//! little work is at most [`CREDIT`] behind, so that it cannot block others for long later.

use std::{collections::BTreeMap, sync::Arc};

/// Client for which a request is computed; `None` is a tenant like any other.
pub(crate) type Tenant = Option<Arc<str>>;

/// Most tokens that a tenant can be behind the one that is furthest ahead.
const CREDIT: u64 = 2048;

/// Tokens computed for each tenant.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    tokens: BTreeMap<Tenant, u64>,
    /// The largest of them.
    most: u64,
}

impl Ledger {
    /// A tenant without requests sends one, while the tenants in `active` have some.
    pub fn enter<'a>(&mut self, tenant: &Tenant, active: impl Iterator<Item = &'a Tenant> + Clone) {
        let Some(floor) = active.clone().map(|other| self.of(other)).min() else {
            *self = Self::default();
            return;
        };
        let reached = self.tokens.get(tenant).copied().unwrap_or(0).max(floor);
        self.tokens.insert(tenant.clone(), reached);
        // A tenant that is away and owes nothing is forgotten.
        self.tokens.retain(|other, tokens| {
            *tokens > floor || other == tenant || active.clone().any(|active| active == other)
        });
    }

    /// Counts rows that were computed for a tenant.
    pub fn charge(&mut self, tenant: &Tenant, rows: usize) {
        let reached = self.of(tenant) + rows as u64;
        self.most = self.most.max(reached);
        match self.tokens.get_mut(tenant) {
            Some(tokens) => *tokens = reached,
            None => drop(self.tokens.insert(tenant.clone(), reached)),
        }
    }

    /// Returns the number of tokens computed for a tenant, as far as they count.
    pub fn of(&self, tenant: &Tenant) -> u64 {
        self.tokens.get(tenant).copied().unwrap_or(0).max(self.most.saturating_sub(CREDIT))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_that_comes_back_begins_where_the_last_one_stands() {
        let [a, b, c]: [Tenant; 3] = ["a", "b", "c"].map(|name| Some(name.into()));
        let mut ledger = Ledger::default();
        ledger.enter(&a, [].into_iter());
        ledger.charge(&a, 100);
        ledger.enter(&b, [&a].into_iter());
        assert_eq!((ledger.of(&a), ledger.of(&b)), (100, 100));
        ledger.charge(&b, 7);
        // The tenant keeps its count, up to the credit.
        ledger.enter(&b, [&a].into_iter());
        assert_eq!(ledger.of(&b), 107);
        ledger.charge(&b, 5000);
        assert_eq!(ledger.of(&a), 5107 - CREDIT);
        ledger.enter(&c, [&a, &b].into_iter());
        assert_eq!(ledger.of(&c), ledger.of(&a));
        // The accounts are cleared when no tenant is active.
        ledger.enter(&b, [].into_iter());
        assert_eq!(ledger.of(&b), 0);
    }
}
