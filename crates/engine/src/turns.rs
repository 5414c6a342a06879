//! Whose turn it is among requests of one priority: start-time fair queueing (Goyal, Vin, Cheng: Start-time fair
//! queueing, 1996), with tokens for packets.
//!
//! Each priority has a virtual clock, which shows the turn of the last request that was admitted. A request's turn is
//! that clock's, or where its tenant's tokens so far have brought it, if that is later; so a tenant that has had much
//! waits behind those who have had little, and one that was away has saved up nothing. A turn never changes, and those
//! of one tenant come in the order of its requests: with one tenant, this is first come, first served.

use std::{collections::BTreeMap, sync::Arc};

/// Who asks; `None` is one tenant like the others.
pub(crate) type Tenant = Option<Arc<str>>;

/// The clocks of all priorities.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    clocks: BTreeMap<i32, Clock>,
}

/// In tokens.
#[derive(Debug, Default)]
struct Clock {
    now: u64,
    /// Where their tokens have brought the tenants that are ahead of the clock.
    ahead: BTreeMap<Tenant, u64>,
}

impl Turns {
    /// The turn of a request of so many prompt tokens that begins to wait.
    pub fn take(&mut self, priority: i32, tenant: &Tenant, tokens: usize) -> u64 {
        let clock = self.clocks.entry(priority).or_default();
        let turn = clock.ahead.get(tenant).copied().unwrap_or(clock.now);
        clock.ahead.insert(tenant.clone(), turn + tokens as u64);
        turn
    }

    /// The turn of a request that comes to this priority from another one: at once.
    pub fn now(&self, priority: i32) -> u64 {
        self.clocks.get(&priority).map_or(0, |clock| clock.now)
    }

    /// The request with this turn does not wait any more.
    pub fn admitted(&mut self, priority: i32, turn: u64) {
        let clock = self.clocks.entry(priority).or_default();
        clock.now = clock.now.max(turn);
        clock.ahead.retain(|_, reached| *reached > clock.now);
    }

    /// A tenant has had a token beside those of its prompts.
    pub fn charge(&mut self, priority: i32, tenant: &Tenant) {
        let clock = self.clocks.entry(priority).or_default();
        match clock.ahead.get_mut(tenant) {
            Some(reached) => *reached += 1,
            None => drop(clock.ahead.insert(tenant.clone(), clock.now + 1)),
        }
    }
}
