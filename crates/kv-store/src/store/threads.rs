//! The two threads of a store: one writes, one reads.

use std::{
    collections::HashSet,
    io,
    sync::{Arc, MutexGuard, PoisonError, mpsc::Receiver},
    thread,
    time::{Duration, Instant},
};

use super::{Queue, Shared, StoreStats, Write};
use crate::{
    Id,
    log::{Appender, ReadError},
    models,
    space::{Chunk, Load},
};

/// Bytes that wait to be written, at most: some of the largest checkpoints.
const QUEUE_BYTES: usize = 192 << 20;
/// Bytes of one [`Chunk`], unless a single item is larger.
const CHUNK_BYTES: usize = 8 << 20;
/// Growth of the estimated speed each time that a load is refused for it, so that a disk which was slow once is tried again.
const FORGIVENESS: f64 = 1.01;
/// Weight of the newest measurement of a speed.
const RATE: f64 = 0.3;
/// Interval at which the owner of a store reads notes of other processes.
const NOTES_EVERY: Duration = Duration::from_secs(3);
/// Time that an item waits for the leader of a shared store to make room for it, and the interval of checks.
const ROOM_PATIENCE: Duration = Duration::from_secs(3);
const ROOM_EVERY: Duration = Duration::from_millis(200);
/// Interval at which a process reads new records of others in a shared store.
const REFRESH_EVERY: Duration = Duration::from_secs(1);

impl Shared {
    pub(super) fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn removed(&self) -> MutexGuard<'_, HashSet<Id>> {
        self.removed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn numbers(&self) -> MutexGuard<'_, StoreStats> {
        self.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn stats(&self) -> StoreStats {
        let (items, bytes) = {
            let index = self.log.index();
            (index.len() as u64, index.total())
        };
        let pending_bytes = self.queue().bytes as u64;
        StoreStats { items, bytes, pending_bytes, ..*self.numbers() }
    }

    /// Returns the bytes that can be queued now.
    pub fn room(&self) -> usize {
        if self.is_off() { 0 } else { QUEUE_BYTES.saturating_sub(self.queue().bytes) }
    }

    pub fn pending_bytes(&self) -> usize {
        self.queue().bytes
    }

    pub fn is_off(&self) -> bool {
        self.numbers().is_off
    }

    pub fn read_speed(&self) -> f64 {
        self.numbers().read_speed
    }

    pub fn write_speed(&self) -> f64 {
        self.numbers().write_speed
    }

    /// Raises the estimated speed of reads, after a load was refused because of it.
    pub fn forgive(&self) {
        self.numbers().read_speed *= FORGIVENESS;
    }

    pub fn save(&self, space: Id, id: Id, payload: Arc<Vec<u8>>) {
        if self.removed().contains(&space) {
            return;
        }
        self.push(Write::Item { space, id, payload });
    }

    pub(super) fn push(&self, write: Write) {
        if self.is_off() {
            return;
        }
        let mut queue = self.queue();
        if let Write::Item { payload, .. } = &write {
            queue.bytes += payload.len();
        }
        queue.writes.push_back(write);
        drop(queue);
        self.changed.notify_all();
    }

    pub fn flush(&self, patience: Duration) -> bool {
        let mut queue = self.queue();
        let end = Instant::now() + patience;
        while !queue.writes.is_empty() || queue.is_busy {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            queue = self.changed.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Turns the store off, and notifies its owner once.
    fn turn_off(&self, what: &str, error: &io::Error) {
        if !std::mem::replace(&mut self.numbers().is_off, true) {
            (self.options.notice)(&format!(
                "the cache on disk is off: cannot {what} {}: {error}; requests go on without it",
                self.dir.display()
            ));
        }
        let mut queue = self.queue();
        queue.writes.clear();
        queue.bytes = 0;
    }

    /// Returns the spaces of all models with this name.
    pub(super) fn spaces_of(&self, name: &str) -> Vec<Id> {
        let has_name = |space: &Id| models::read(&self.dir, space).is_some_and(|info| info.model == name);
        models::spaces(&self.dir).into_iter().filter(has_name).collect()
    }

    /// Becomes the leader of a shared store if there is none.
    fn try_to_lead(&self) -> io::Result<()> {
        let mut leader = self.leader.lock().unwrap_or_else(PoisonError::into_inner);
        if self.log.is_shared() && leader.is_none() {
            *leader = crate::files::lead(&self.dir)?;
            if leader.is_some() {
                self.log.lead();
            }
        }
        Ok(())
    }

    /// Queues the removals that other processes have requested in files, after all pending writes.
    pub(super) fn obey_notes(&self) {
        for name in models::removals(&self.dir) {
            for space in self.spaces_of(&name) {
                self.removed().insert(space);
                self.push(Write::Remove { space });
            }
            self.push(Write::Obeyed { name });
        }
    }

    /// Waits until the leader of a shared store has made room for an item, but not long, and only once for a leader that makes none.
    fn wait_for_room(
        &self,
        to: &mut Appender,
        id: &Id,
        bytes: usize,
        is_patient: &mut bool,
    ) -> io::Result<()> {
        let end = Instant::now() + ROOM_PATIENCE;
        while self.log.lacks_room(id, bytes)? {
            let queue = self.queue();
            if !*is_patient || queue.closing || Instant::now() >= end {
                *is_patient = false;
                return Ok(());
            }
            drop(self.changed.wait_timeout(queue, ROOM_EVERY));
            self.try_to_lead()?;
            self.log.refresh(to)?;
        }
        *is_patient = true;
        Ok(())
    }

    /// Runs the thread that writes.
    pub(super) fn write_all(&self, mut appender: Appender) {
        let mut looked = Instant::now();
        let mut is_patient = true;
        let every = if self.log.is_shared() { REFRESH_EVERY } else { NOTES_EVERY };
        loop {
            if looked.elapsed() >= every {
                self.obey_notes();
                if !self.is_off()
                    && let Err(error) = self.try_to_lead().and_then(|()| self.log.refresh(&mut appender))
                {
                    self.turn_off("read", &error);
                }
                looked = Instant::now();
            }
            let write = {
                let mut queue = self.queue();
                queue.is_busy = false;
                self.changed.notify_all();
                loop {
                    if let Some(write) = queue.writes.pop_front() {
                        queue.is_busy = true;
                        break Some(write);
                    }
                    if queue.closing {
                        return;
                    }
                    let waited = self.changed.wait_timeout(queue, every);
                    queue = waited.unwrap_or_else(PoisonError::into_inner).0;
                    if looked.elapsed() >= every {
                        break None;
                    }
                }
            };
            let Some(write) = write else { continue };
            if let Write::Item { id, payload, .. } = &write
                && let Err(error) = self.wait_for_room(&mut appender, id, payload.len(), &mut is_patient)
            {
                self.turn_off("read", &error);
                continue;
            }
            let started = Instant::now();
            let (bytes, result) = match &write {
                Write::Item { space, id, payload } => {
                    (payload.len(), self.log.append(&mut appender, *space, *id, payload))
                }
                // The order of uses may be lost: what is stored can be read from a full disk.
                Write::Uses => match self.log.append_uses(&mut appender) {
                    Err(error) if error.kind() == io::ErrorKind::StorageFull => (0, Ok(())),
                    result => (0, result),
                },
                Write::Remove { space } => {
                    // In a shared store, others find the space by the name until the note is obeyed.
                    if !self.log.is_shared() {
                        models::remove(&self.dir, space);
                    }
                    (0, self.log.remove_space(&mut appender, space))
                }
                Write::Obeyed { name } => {
                    // Others may still append to segments that have items of the model.
                    if self.log.leads() && self.log.has_compacted() {
                        self.spaces_of(name).iter().for_each(|space| models::remove(&self.dir, space));
                        models::forget_removal(&self.dir, name);
                    }
                    (0, Ok(()))
                }
                Write::Clear => {
                    models::spaces(&self.dir).iter().for_each(|space| models::remove(&self.dir, space));
                    (0, self.log.clear(&mut appender))
                }
            };
            match result {
                Ok(()) if bytes > 0 => {
                    let mut numbers = self.numbers();
                    numbers.written += 1;
                    numbers.written_bytes += bytes as u64;
                    numbers.write_speed = mean(numbers.write_speed, bytes, started.elapsed());
                }
                Ok(()) => {}
                Err(error) => self.turn_off("write to", &error),
            }
            // Limits the rate: the thread sleeps for the rest of the time that these bytes may need.
            let least = Duration::from_secs_f64(bytes as f64 / self.options.write_speed);
            thread::sleep(least.saturating_sub(started.elapsed()));
            let mut queue = self.queue();
            queue.bytes = queue.bytes.saturating_sub(bytes);
        }
    }

    /// Runs the thread that reads.
    pub(super) fn read_all(&self, loads: &Receiver<Load>) {
        while let Ok(load) = loads.recv() {
            self.read_one(load);
        }
    }

    fn read_one(&self, mut load: Load) {
        let started = Instant::now();
        let mut payloads = Vec::new();
        let (mut first, mut bytes) = (0, 0);
        let mut read = Vec::with_capacity(load.ids.len());
        for (index, id) in load.ids.iter().enumerate() {
            if self.is_off() || load.is_too_slow(index, started.elapsed(), self.read_speed()) {
                break;
            }
            match self.read_item(id) {
                Some(payload) => {
                    bytes += payload.len();
                    payloads.push(payload);
                    read.push(*id);
                }
                None => break,
            }
            if bytes >= CHUNK_BYTES {
                let payloads = std::mem::take(&mut payloads);
                let next = first + payloads.len();
                (load.deliver)(Chunk { first, payloads, is_last: false });
                (first, bytes) = (next, 0);
            }
        }
        let has_read = !read.is_empty();
        {
            let mut index = self.log.index();
            read.iter().for_each(|id| index.touch(id));
            index.read.append(&mut read);
        }
        (load.deliver)(Chunk { first, payloads, is_last: true });
        if has_read {
            self.push(Write::Uses);
        }
    }

    fn read_item(&self, id: &Id) -> Option<Vec<u8>> {
        let started = Instant::now();
        match self.log.read(id) {
            Ok(payload) => {
                let least = Duration::from_secs_f64(payload.len() as f64 / self.options.read_speed);
                thread::sleep(least.saturating_sub(started.elapsed()));
                let mut numbers = self.numbers();
                numbers.read_speed = mean(numbers.read_speed, payload.len(), started.elapsed());
                numbers.read += 1;
                numbers.read_bytes += payload.len() as u64;
                Some(payload)
            }
            Err(ReadError::Missing) => None,
            Err(ReadError::Damaged) => {
                self.numbers().damaged += 1;
                None
            }
            Err(ReadError::Io(error)) => {
                self.turn_off("read", &error);
                None
            }
        }
    }

    /// Removes the names of spaces without items.
    pub(super) fn forget_empty_models(&self) {
        let full: Vec<Id> = self.log.index().spaces().map(|(space, ..)| *space).collect();
        for space in models::spaces(&self.dir).iter().filter(|space| !full.contains(space)) {
            models::remove(&self.dir, space);
        }
    }
}

/// Returns a new estimate of a speed: a mean of times, so that a slow item counts for as long as it took.
fn mean(speed: f64, bytes: usize, time: Duration) -> f64 {
    let newest = bytes.max(1) as f64 / time.as_secs_f64().max(1e-6);
    1.0 / ((1.0 - RATE) / speed + RATE / newest)
}
