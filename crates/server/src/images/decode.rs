//! Decoding of images on threads of their own.
//!
//! The threads are few and have a low priority, so that answers of other clients do not wait for pixels. Clients are queued
//! fairly, image by image. The memory of all images that are being decoded is bounded.

use std::{
    collections::VecDeque,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
};

use paguro_vision::{Limits, Pixels, Processor, decode};
use prometheus_client::metrics::counter::Counter;

use super::PlannedImage;
use crate::{
    error::ApiError,
    prepare::{Client, IsWanted, Preparation, Size},
};

/// Maximum bytes of pixels that are kept for later turns of a conversation.
const MOST_CACHED: usize = 64 << 20;

/// Threads that decode images.
#[derive(Debug)]
pub struct ImageDecoder {
    threads: Preparation,
    limits: Limits,
    memory: Arc<Memory>,
    cache: Arc<Mutex<Cache>>,
    decoded: Counter,
}

/// Memory of images that are being decoded.
#[derive(Debug)]
struct Memory {
    free: Mutex<u64>,
    changed: Condvar,
}

/// Reserved memory.
struct Reserved<'m>(&'m Memory, u64);

/// Pixels of the last images.
#[derive(Debug, Default)]
struct Cache {
    /// By client and key; the last one was used last. Clients do not learn of each other's images by the time that theirs
    /// take.
    images: VecDeque<(Client, [u8; 32], Arc<Pixels>)>,
    bytes: usize,
}

impl ImageDecoder {
    /// Creates the threads, which start on demand. All images together take at most `memory` bytes while they are decoded; `decoded`
    /// counts them.
    pub fn new(limits: Limits, memory: u64, decoded: Counter) -> Self {
        let cores = std::thread::available_parallelism().map_or(2, |cores| cores.get());
        Self {
            threads: Preparation::in_background((cores / 2).max(1)),
            limits,
            memory: Arc::new(Memory { free: Mutex::new(memory), changed: Condvar::new() }),
            cache: Arc::default(),
            decoded,
        }
    }

    /// Returns the pixels of an image, resampled for the model.
    ///
    /// # Errors
    /// The file is damaged.
    pub async fn pixels(
        &self,
        client: &Client,
        image: &Arc<PlannedImage>,
        processor: &Processor,
    ) -> Result<Arc<Pixels>, ApiError> {
        if let Some(pixels) = lock(&self.cache).find(client, &image.key) {
            return Ok(pixels);
        }
        let (owner, image, processor) = (client.clone(), image.clone(), processor.clone());
        let (memory, cache, limits) = (self.memory.clone(), self.cache.clone(), self.limits);
        let decoded = self.decoded.clone();
        let work = move |_: &IsWanted<'_>| {
            // Another request may have decoded it meanwhile.
            if let Some(pixels) = lock(&cache).find(&owner, &image.key) {
                return Ok(pixels);
            }
            let reserved = memory.reserve(image.header.memory);
            let picture = decode(&image.bytes, &limits).map_err(|error| {
                let path = &*image.path;
                ApiError::invalid(path, format!("`{path}` {error}"))
            })?;
            let pixels = Arc::new(processor.prepare(&picture, &image.plan));
            decoded.inc();
            drop((picture, reserved));
            lock(&cache).insert(owner, image.key, pixels.clone());
            Ok(pixels)
        };
        self.threads.run(client, Size::Small, work).await
    }
}

impl Memory {
    /// Waits for memory. More than all is all.
    fn reserve(&self, bytes: u64) -> Reserved<'_> {
        let mut free = lock(&self.free);
        while *free < bytes {
            free = self.changed.wait(free).unwrap_or_else(PoisonError::into_inner);
        }
        *free -= bytes;
        Reserved(self, bytes)
    }
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        *lock(&self.0.free) += self.1;
        self.0.changed.notify_all();
    }
}

impl Cache {
    fn find(&mut self, client: &Client, key: &[u8; 32]) -> Option<Arc<Pixels>> {
        let at = self.images.iter().position(|(owner, other, _)| other == key && owner == client)?;
        let image = self.images.remove(at)?;
        let pixels = image.2.clone();
        self.images.push_back(image);
        Some(pixels)
    }

    fn insert(&mut self, client: Client, key: [u8; 32], pixels: Arc<Pixels>) {
        if pixels.rgb.len() > MOST_CACHED || self.find(&client, &key).is_some() {
            return;
        }
        self.bytes += pixels.rgb.len();
        self.images.push_back((client, key, pixels));
        while self.bytes > MOST_CACHED {
            let Some((_, _, oldest)) = self.images.pop_front() else { break };
            self.bytes -= oldest.rgb.len();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
