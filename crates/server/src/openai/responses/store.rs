//! Stored responses, in memory and of bounded size. The oldest ones of the key with most bytes are evicted first, so no
//! key evicts those of others.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use axum::body::Bytes;

use crate::{error::ApiError, generate::Message};

/// Maximum bytes of all stored responses and their messages.
const MOST_BYTES: usize = 64 << 20;

/// The store.
#[derive(Debug, Default)]
pub struct ResponseStore {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    responses: HashMap<String, Stored>,
    tenants: HashMap<Option<String>, Owned>,
    bytes: usize,
}

/// Responses of one key.
#[derive(Debug, Default)]
struct Owned {
    /// Ids, oldest first.
    order: VecDeque<String>,
    bytes: usize,
}

/// A stored response.
#[derive(Clone, Debug)]
pub struct Stored {
    /// Id of the key of its request. Only this key can read it.
    pub tenant: Option<String>,
    /// The response's JSON.
    pub body: Bytes,
    /// Conversation up to its end.
    pub turn: Arc<Turn>,
}

/// One turn of a conversation. Turns with a common past share it.
#[derive(Debug)]
pub struct Turn {
    /// Previous turns.
    pub before: Option<Arc<Turn>>,
    /// Messages of this turn.
    pub messages: Vec<Message>,
}

impl Turn {
    /// Returns all messages, oldest first.
    pub fn all_messages(&self) -> Vec<Message> {
        let mut turns = vec![self];
        while let Some(before) = turns.last().and_then(|turn| turn.before.as_deref()) {
            turns.push(before);
        }
        turns.iter().rev().flat_map(|turn| turn.messages.iter().cloned()).collect()
    }

    /// Returns the bytes of all messages.
    pub fn all_bytes(&self) -> usize {
        let mut turn = Some(self);
        let turns = std::iter::from_fn(|| {
            let this = turn?;
            turn = this.before.as_deref();
            Some(this.bytes())
        });
        turns.sum()
    }

    fn bytes(&self) -> usize {
        let text = |message: &Message| {
            let calls: usize =
                message.tool_calls.iter().map(|call| call.name.len() + call.arguments.len()).sum();
            message.content.len() + message.reasoning.as_ref().map_or(0, String::len) + calls + 256
        };
        self.messages.iter().map(text).sum()
    }
}

impl Drop for Turn {
    /// Drops turns in a loop, because the recursion of a long conversation could overflow the stack.
    fn drop(&mut self) {
        let mut before = self.before.take();
        while let Some(mut turn) = before.and_then(Arc::into_inner) {
            before = turn.before.take();
        }
    }
}

impl ResponseStore {
    /// Stores a response.
    pub fn put(&self, id: &str, stored: Stored) {
        let mut inner = self.lock();
        let bytes = stored.bytes();
        let owned = inner.tenants.entry(stored.tenant.clone()).or_default();
        owned.order.push_back(id.to_owned());
        owned.bytes += bytes;
        inner.bytes += bytes;
        inner.responses.insert(id.to_owned(), stored);
        while inner.bytes > MOST_BYTES {
            let largest = inner.tenants.values().max_by_key(|owned| owned.bytes);
            let Some(oldest) = largest.and_then(|owned| owned.order.front().cloned()) else { break };
            inner.remove(&oldest);
        }
    }

    /// Returns a response of this tenant.
    ///
    /// # Errors
    /// [`ApiError::NotFound`].
    pub fn get(&self, id: &str, tenant: Option<&str>) -> Result<Stored, ApiError> {
        let inner = self.lock();
        let stored = inner.responses.get(id).filter(|stored| stored.tenant.as_deref() == tenant);
        stored.cloned().ok_or_else(|| {
            ApiError::NotFound(format!("there is no response `{id}`: it was deleted, evicted or not stored"))
        })
    }

    /// Deletes a response of this tenant.
    ///
    /// # Errors
    /// [`ApiError::NotFound`].
    pub fn delete(&self, id: &str, tenant: Option<&str>) -> Result<(), ApiError> {
        self.get(id, tenant)?;
        let mut inner = self.lock();
        inner.remove(id);
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn remove(&mut self, id: &str) {
        let Some(stored) = self.responses.remove(id) else { return };
        let bytes = stored.bytes();
        self.bytes -= bytes;
        if let Some(owned) = self.tenants.get_mut(&stored.tenant) {
            owned.bytes -= bytes;
            owned.order.retain(|other| other != id);
            if owned.order.is_empty() {
                self.tenants.remove(&stored.tenant);
            }
        }
    }
}

impl Stored {
    fn bytes(&self) -> usize {
        self.body.len() + self.turn.bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_evicts_its_own_responses() {
        let store = ResponseStore::default();
        let put = |id: &str, tenant: &str, bytes: usize| {
            let turn = Arc::new(Turn { before: None, messages: Vec::new() });
            store.put(id, Stored { tenant: Some(tenant.into()), body: vec![0; bytes].into(), turn });
        };
        let has = |id: &str, tenant: &str| store.get(id, Some(tenant)).is_ok();
        put("a1", "a", 10 << 20);
        put("b1", "b", 30 << 20);
        put("b2", "b", 30 << 20);
        assert_eq!(
            [has("a1", "a"), has("b1", "b"), has("b2", "b"), has("a1", "b")],
            [true, false, true, false]
        );
        put("large", "a", MOST_BYTES + 1);
        assert!(!has("a1", "a") && !has("large", "a") && has("b2", "b"));
        store.delete("b2", Some("b")).unwrap();
        let inner = store.lock();
        assert!(inner.bytes == 0 && inner.responses.is_empty() && inner.tenants.is_empty());
    }
}
