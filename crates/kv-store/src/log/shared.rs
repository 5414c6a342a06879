//! A store that several processes have open.
//!
//! Each process appends to segments of its own, whose leases it holds, and reads those of all. One process is the leader: it evicts,
//! and compacts or removes segments to which no process appends. If it ends, another one becomes the leader. The others store no more
//! than fits. All look for new records of the others from time to time.
//!
//! No record is read unless all of it is valid at its place, so a record that is being written, or whose writer was killed, is not
//! there. A segment that was removed stays readable for those who have it open.

use std::{
    collections::BTreeSet,
    fs, io,
    sync::{MutexGuard, PoisonError, atomic::Ordering},
};

use super::{Appender, Log, Scan};
use crate::{Id, files, record::HEADER};

/// Segments of room that the leader makes for others at once.
const ROOM: u64 = 3;
/// Segments that stay free when a process that does not lead has written its last item: the leader needs one for compaction.
const RESERVE: u64 = 2;

impl Log {
    /// Segments to be compacted later.
    pub(super) fn pending(&self) -> MutexGuard<'_, BTreeSet<u64>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if other processes may have the store open.
    pub fn is_shared(&self) -> bool {
        self.is_shared
    }

    /// Makes this process the leader.
    pub fn lead(&self) {
        self.leads.store(true, Ordering::Relaxed);
    }

    /// Returns true if all segments that were to be compacted are.
    pub fn has_compacted(&self) -> bool {
        self.pending().is_empty()
    }

    /// Returns true if another process appends to a segment.
    pub(super) fn is_of_another(&self, to: &Appender, number: u64) -> bool {
        self.is_shared
            && to.active.as_ref().is_none_or(|active| active.number != number)
            && files::is_leased(&self.dir, number)
    }

    /// Returns true if `bytes` more bytes fit without removing any. If not, the leader is asked for room.
    pub(super) fn has_room(&self, bytes: u64) -> io::Result<bool> {
        let fits = self.index().total() + bytes + RESERVE * self.segment_bytes <= self.bound;
        if !fits {
            // Without the note, the item is only not stored.
            let _ = files::want_room(&self.dir);
        }
        Ok(fits)
    }

    /// Returns true if an item can only be stored after the leader has made room for it, for which it is asked.
    pub fn lacks_room(&self, id: &Id, payload_bytes: usize) -> io::Result<bool> {
        let bytes = (HEADER + payload_bytes) as u64;
        let may_fit = !self.leads() && bytes <= self.bound / 4 && self.index().get(id).is_none();
        Ok(may_fit && !self.has_room(bytes)?)
    }

    /// Reads what other processes have written, forgets what they have removed, and makes room for them.
    pub fn refresh(&self, to: &mut Appender) -> io::Result<()> {
        if !self.is_shared {
            return Ok(());
        }
        let numbers = files::segments(&self.dir)?;
        let own = to.active.as_ref().map(|active| active.number);
        for &number in numbers.iter().filter(|number| Some(**number) != own) {
            let Ok(metadata) = fs::metadata(files::segment(&self.dir, number)) else { continue };
            let (bytes, identity) = (metadata.len(), files::identity(&metadata));
            let known = self.index().segments.get(&number).map(|it| (it.scanned, it.bytes, it.identity));
            match known {
                // Another file, or one that was cut.
                Some((scanned, _, before)) if before != identity || bytes < scanned => {
                    self.index().forget_segment(number);
                    self.scan(number, &mut Scan::default(), false);
                }
                Some((_, before, _)) if before == bytes => {}
                _ => self.scan(number, &mut Scan::default(), false),
            }
        }
        // New places of items were read before the old ones are forgotten.
        let known: Vec<u64> = self.index().segments.keys().copied().collect();
        for number in known {
            if Some(number) != own && numbers.binary_search(&number).is_err() {
                self.index().forget_segment(number);
            }
        }
        to.next_segment = to.next_segment.max(numbers.last().map_or(0, |last| last + 1));
        if self.leads() {
            self.serve_others(to)?;
        }
        Ok(())
    }

    /// Does what others have waited for.
    fn serve_others(&self, to: &mut Appender) -> io::Result<()> {
        let pending = std::mem::take(&mut *self.pending());
        for number in pending {
            self.compact(to, number)?;
        }
        if files::is_room_wanted(&self.dir) {
            self.make_room(to, ROOM * self.segment_bytes)?;
        }
        Ok(())
    }
}
