//! Items by id, in order of their last use.

use std::{
    collections::{BTreeMap, HashMap},
    fs::File,
    sync::Arc,
};

use crate::{Id, record::Place};

/// All items of a store, in memory.
#[derive(Debug, Default)]
pub(crate) struct Index {
    items: HashMap<Id, Entry>,
    /// The longest unused first.
    uses: BTreeMap<u64, Id>,
    clock: u64,
    pub segments: BTreeMap<u64, Segment>,
    /// Items and their bytes by space.
    spaces: HashMap<Id, (u64, u64)>,
    /// Ids of items that were read since the last record of uses.
    pub read: Vec<Id>,
    /// Removed items of spaces that subscribe to removals.
    removed: HashMap<Id, Vec<Id>>,
}

/// A file of records.
#[derive(Debug)]
pub(crate) struct Segment {
    pub file: Arc<File>,
    pub bytes: u64,
    /// Bytes of records that the index has.
    pub live: u64,
    /// Bytes up to which its records were read.
    pub scanned: u64,
    /// Identity of the file.
    pub identity: u64,
}

/// An item's record.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub place: Place,
    pub space: Id,
    /// Bytes of the record.
    pub bytes: u64,
    used: u64,
}

impl Index {
    pub fn get(&self, id: &Id) -> Option<Entry> {
        self.items.get(id).copied()
    }

    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Adds an item whose record has been written, or moves it to another place. It is then the last one that was used, unless
    /// it was only moved.
    pub fn put(&mut self, id: Id, space: Id, place: Place, bytes: u64) {
        let used = self.forget(&id).map(|entry| entry.used);
        let used = used.unwrap_or_else(|| {
            self.clock += 1;
            self.clock
        });
        self.items.insert(id, Entry { place, space, bytes, used });
        self.uses.insert(used, id);
        let of_space = self.spaces.entry(space).or_default();
        (of_space.0, of_space.1) = (of_space.0 + 1, of_space.1 + bytes);
        if let Some(segment) = self.segments.get_mut(&place.segment) {
            segment.live += bytes;
        }
    }

    /// Makes an item the last one that was used.
    pub fn touch(&mut self, id: &Id) {
        if let Some(entry) = self.items.get_mut(id) {
            self.uses.remove(&entry.used);
            self.clock += 1;
            entry.used = self.clock;
            self.uses.insert(entry.used, *id);
        }
    }

    pub fn forget(&mut self, id: &Id) -> Option<Entry> {
        let entry = self.items.remove(id)?;
        self.uses.remove(&entry.used);
        if let Some(segment) = self.segments.get_mut(&entry.place.segment) {
            segment.live -= entry.bytes;
        }
        if let Some(of_space) = self.spaces.get_mut(&entry.space) {
            (of_space.0, of_space.1) = (of_space.0 - 1, of_space.1 - entry.bytes);
            if of_space.0 == 0 {
                self.spaces.remove(&entry.space);
            }
        }
        Some(entry)
    }

    /// Remembers the items of a space that are removed from now on.
    pub fn watch(&mut self, space: Id) {
        self.removed.entry(space).or_default();
    }

    /// Items of a watched space that were removed since the last call.
    pub fn take_removed(&mut self, space: &Id) -> Vec<Id> {
        self.removed.get_mut(space).map(std::mem::take).unwrap_or_default()
    }

    /// Forgets an item for good.
    pub fn remove(&mut self, id: &Id) -> bool {
        let Some(entry) = self.forget(id) else { return false };
        if let Some(removed) = self.removed.get_mut(&entry.space) {
            removed.push(*id);
        }
        true
    }

    /// Notes that an item of a watched space was not stored.
    pub fn refuse(&mut self, space: &Id, id: Id) {
        if let Some(removed) = self.removed.get_mut(space) {
            removed.push(id);
        }
    }

    /// Forgets a segment and all items in it.
    pub fn forget_segment(&mut self, number: u64) {
        for (id, _) in self.of_segment(number) {
            self.remove(&id);
        }
        self.segments.remove(&number);
    }

    /// Forgets the item that has been unused for the longest time.
    pub fn evict(&mut self) -> bool {
        let oldest = self.uses.first_key_value().map(|(_, id)| *id);
        oldest.is_some_and(|id| self.remove(&id))
    }

    /// Forgets all items of a space and returns the segments that have their records.
    pub fn forget_space(&mut self, space: &Id) -> Vec<u64> {
        let of_space =
            |(id, entry): (&Id, &Entry)| (entry.space == *space).then_some((*id, entry.place.segment));
        let (ids, mut segments): (Vec<Id>, Vec<u64>) = self.items.iter().filter_map(of_space).unzip();
        for id in &ids {
            self.remove(id);
        }
        segments.sort_unstable();
        segments.dedup();
        segments
    }

    /// Items of a segment in the order of their places.
    pub fn of_segment(&self, segment: u64) -> Vec<(Id, Entry)> {
        let here = self.items.iter().filter(|(_, entry)| entry.place.segment == segment);
        let mut items: Vec<_> = here.map(|(id, entry)| (*id, *entry)).collect();
        items.sort_unstable_by_key(|(_, entry)| entry.place.offset);
        items
    }

    /// Returns the number of bytes of all segments.
    pub fn total(&self) -> u64 {
        self.segments.values().map(|segment| segment.bytes).sum()
    }

    /// Returns the number of bytes of all items.
    pub fn live(&self) -> u64 {
        self.segments.values().map(|segment| segment.live).sum()
    }

    /// Items and bytes of each space.
    pub fn spaces(&self) -> impl Iterator<Item = (&Id, u64, u64)> {
        self.spaces.iter().map(|(space, (items, bytes))| (space, *items, *bytes))
    }

    /// Compares the views of the items.
    ///
    /// # Errors
    /// The difference.
    pub fn check(&self) -> Result<(), String> {
        if self.uses.len() != self.items.len() {
            return Err(format!("{} items have {} uses", self.items.len(), self.uses.len()));
        }
        let mut live: BTreeMap<u64, u64> = BTreeMap::new();
        for (id, entry) in &self.items {
            if self.uses.get(&entry.used) != Some(id) {
                return Err("an item is not in the order of uses".into());
            }
            let Some(segment) = self.segments.get(&entry.place.segment) else {
                return Err("an item is in a segment that does not exist".into());
            };
            if entry.place.offset + entry.bytes > segment.bytes {
                return Err("an item ends behind its segment".into());
            }
            *live.entry(entry.place.segment).or_default() += entry.bytes;
        }
        for (number, segment) in &self.segments {
            if live.get(number).copied().unwrap_or(0) != segment.live {
                return Err(format!("segment {number} counts {} live bytes", segment.live));
            }
        }
        Ok(())
    }
}
