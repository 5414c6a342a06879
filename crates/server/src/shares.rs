//! Equal shares of a resource, for single clients.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use tokio::sync::Semaphore;

use crate::prepare::Client;

/// Number of clients from which those without reservations are removed.
const MANY_CLIENTS: usize = 1024;

/// Shares of a resource. A client has its share also while there are no others.
#[derive(Debug)]
pub struct ClientShares {
    each: usize,
    clients: Mutex<HashMap<Client, Weak<Semaphore>>>,
}

impl ClientShares {
    /// Creates shares of `each` units.
    pub fn new(each: usize) -> Self {
        Self { each, clients: Mutex::default() }
    }

    /// Returns the units of one share.
    pub fn each(&self) -> usize {
        self.each
    }

    /// Returns the free units of a client.
    pub fn of(&self, client: &Client) -> Arc<Semaphore> {
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(share) = clients.get(client).and_then(Weak::upgrade) {
            return share;
        }
        if clients.len() >= MANY_CLIENTS {
            clients.retain(|_, share| share.strong_count() > 0);
        }
        let share = Arc::new(Semaphore::new(self.each));
        clients.insert(client.clone(), Arc::downgrade(&share));
        share
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_without_reservations_are_forgotten() {
        let shares = ClientShares::new(2);
        let client = |number: usize| Client::Key(number.to_string().into());
        let held = shares.of(&client(0));
        let _permit = held.try_acquire_many(2).unwrap();
        for number in 1..=MANY_CLIENTS {
            assert!(shares.of(&client(number)).try_acquire().is_ok());
        }
        assert!(shares.clients.lock().unwrap().len() < 10);
        assert!(shares.of(&client(0)).try_acquire().is_err());
    }
}
