//! Pictures that sequences wait for: their order, and the rows that the encoder has computed.

use std::{cmp::Reverse, collections::BTreeSet, sync::Arc, time::Duration};

use super::Scheduler;
use crate::{
    RequestError,
    encoder::{Done, Job},
    sequence::Sequence,
    snapshot::PicturesSnapshot,
};

impl Scheduler {
    /// Gives running sequences the rows of their pictures that are in the cache.
    pub(super) fn take_encoded(&mut self) {
        let Self { running, encoder_cache, stats, .. } = self;
        for sequence in running.iter_mut() {
            while let Some((picture, _)) = sequence.first_picture() {
                let key = sequence.request.pictures.key(picture);
                let Some(rows) = encoder_cache.find(&key) else { break };
                sequence.encoded[picture] = Some(rows);
            }
        }
        stats.encoder_cache_hits = encoder_cache.hits;
    }

    /// Returns the picture to encode next: by priority, then that of the tenant with the fewest tokens, then the oldest one.
    pub fn next_picture(&self) -> Option<Job> {
        let waiting = self.running.iter().enumerate().filter_map(|(index, sequence)| {
            let (picture, _) = sequence.first_picture()?;
            let tokens = self.ledger.of(&sequence.request.tenant);
            Some(((Reverse(sequence.sched.priority), tokens, index), sequence, picture))
        });
        let (_, sequence, picture) = waiting.min_by(|one, other| one.0.cmp(&other.0))?;
        let pictures = &sequence.request.pictures;
        Some(Job {
            key: pictures.key(picture),
            rows: pictures.rows(picture),
            pixels: Arc::clone(pictures.pixels(picture)),
        })
    }

    /// Returns true if a running sequence needs the picture with this key.
    pub fn wants_picture(&self, key: &[u8; 32]) -> bool {
        self.running.iter().any(|sequence| needs(sequence, key))
    }

    /// Keeps the rows of an encoded picture. Without rows, requests that need them fail.
    pub fn finish_picture(&mut self, done: Done) {
        self.stats.encoder_times = self.stats.encoder_times.and(done.times);
        match done.result {
            Ok(rows) => {
                self.stats.encoded_pictures += 1;
                self.encoder_cache.keep(done.key, rows);
            }
            Err(problem) => {
                let failed = self.running.iter().filter(|sequence| needs(sequence, &done.key));
                let failed = failed.map(|s| (s.request.id, RequestError::Picture(problem.clone()))).collect();
                self.fail_requests(failed);
            }
        }
    }

    /// Describes pictures for readers. `busy` is the key of the one that is encoded.
    pub fn pictures_snapshot(&self, busy: Option<[u8; 32]>) -> PicturesSnapshot {
        let mut waiting = BTreeSet::new();
        for (sequence, _) in self.sequences() {
            let pictures = &sequence.request.pictures;
            let places = pictures.places_in(sequence.kv.computed..sequence.tokens.len());
            let missing = places.filter(|place| sequence.encoded[place.picture].is_none());
            waiting.extend(missing.map(|place| pictures.key(place.picture)));
        }
        waiting.retain(|key| busy != Some(*key) && !self.encoder_cache.contains(key));
        let (kept, kept_rows, kept_bytes, most_bytes) = self.encoder_cache.sizes();
        PicturesSnapshot {
            waiting: waiting.len(),
            is_encoding: busy.is_some(),
            kept,
            kept_rows,
            kept_bytes,
            most_bytes,
        }
    }

    /// Records the time that the encoder has computed so far.
    pub fn record_encoder(&mut self, computed: Duration) {
        self.stats.encoder_nanoseconds = u64::try_from(computed.as_nanos()).unwrap_or(u64::MAX);
    }

    /// Returns the time for which the encoder may compute after a step: as much as a chunk of a prompt gets.
    pub fn encoder_time(&self) -> Duration {
        let decodes = self.running.iter().any(|sequence| !sequence.prefills());
        let steps = if decodes { 0.5 } else { 2.0 };
        // Without readers, steps have no limit.
        Duration::try_from_secs_f64(steps * self.step_time).unwrap_or(Duration::MAX)
    }
}

/// Returns true if a sequence cannot go on to its end without the picture with this key.
fn needs(sequence: &Sequence, key: &[u8; 32]) -> bool {
    let pictures = &sequence.request.pictures;
    let mut places = pictures.places_in(sequence.kv.computed..sequence.tokens.len());
    places.any(|place| sequence.encoded[place.picture].is_none() && pictures.key(place.picture) == *key)
}
