//! Stored responses, in memory and of bounded size. The oldest ones of the key with most bytes are evicted first, so no
//! key evicts those of others.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use axum::body::Bytes;

use super::request::Item;
use crate::{error::ApiError, generate::Message, images::Image};

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
    /// The newest response with an item, by the item's id.
    items: HashMap<String, String>,
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
    /// Items of its input and output with their ids.
    pub items: Arc<[(String, Item)]>,
}

/// One turn of a conversation. Turns with a common past share it.
#[derive(Debug)]
pub struct Turn {
    /// Previous turns.
    pub before: Option<Arc<Turn>>,
    /// Messages of this turn.
    pub messages: Vec<Message>,
    /// Ids of its items.
    pub ids: Vec<String>,
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

    /// Returns true if the conversation has the item with this id.
    pub fn has(&self, id: &str) -> bool {
        let mut turn = Some(self);
        let mut turns = std::iter::from_fn(|| {
            let this = turn?;
            turn = this.before.as_deref();
            Some(this)
        });
        turns.any(|turn| turn.ids.iter().any(|own| own == id))
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
            let images: usize = message.images.iter().map(Image::bytes).sum();
            message.content.len() + images + message.reasoning.as_ref().map_or(0, String::len) + calls + 256
        };
        self.messages.iter().map(text).sum::<usize>() + self.ids.iter().map(|id| id.len() + 24).sum::<usize>()
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
        inner.items.extend(stored.items.iter().map(|(item, _)| (item.clone(), id.to_owned())));
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

    /// Returns an item of this tenant's responses.
    ///
    /// # Errors
    /// [`ApiError::NotFound`].
    pub fn item(&self, id: &str, tenant: Option<&str>) -> Result<Item, ApiError> {
        let inner = self.lock();
        let stored = inner.items.get(id).and_then(|response| inner.responses.get(response));
        let stored = stored.filter(|stored| stored.tenant.as_deref() == tenant);
        let item = stored.and_then(|stored| stored.items.iter().find(|(own, _)| own == id));
        item.map(|(_, item)| item.clone()).ok_or_else(|| {
            ApiError::NotFound(format!(
                "there is no item `{id}`: its response was deleted, evicted or not stored; send the item itself"
            ))
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
        for (item, _) in stored.items.iter() {
            if self.items.get(item).is_some_and(|response| response == id) {
                self.items.remove(item);
            }
        }
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
        // An id is in the list of items, in the map, and in the turn.
        let items = self.items.iter().map(|(id, item)| 2 * id.len() + 96 + item.bytes());
        self.body.len() + self.turn.bytes() + items.sum::<usize>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_evicts_its_own_responses() {
        let store = ResponseStore::default();
        let put = |id: &str, tenant: &str, bytes: usize| {
            let turn = Arc::new(Turn { before: None, messages: Vec::new(), ids: Vec::new() });
            store.put(
                id,
                Stored {
                    tenant: Some(tenant.into()),
                    body: vec![0; bytes].into(),
                    turn,
                    items: Arc::default(),
                },
            );
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
