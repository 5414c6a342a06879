//! Request bodies and large answers: the minimum rate of bodies, and the memory of all of them together.

use std::{
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use axum::response::Response;
use hyper::body::Body as _;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, timeout, timeout_at},
};

use crate::{
    error::ApiError, held, prepare::Client, release::MemoryRelease, settings::HttpLimits,
    shares::ClientShares, units::bytes,
};

/// Bytes of each body that are not counted, so that small requests never wait for large ones.
const FREE: usize = 16 << 10;

/// Granularity of reservations, in bytes.
const STEP: usize = 64 << 10;

/// Approximate bytes of a parsed JSON value besides its text.
const VALUE: usize = 64;

/// Bodies larger than this trigger a release of memory to the system.
const MUCH: usize = 1 << 20;

/// Part of the memory that one client can use.
const PER_CLIENT: usize = 4;

/// Minimum size of an answer that is counted, in bytes.
const LARGE_ANSWER: usize = 1 << 20;

/// Memory of all bodies that are being read, parsed or prepared, and of large answers that are being sent. One client
/// has at most a quarter of it, also while there are no others.
#[derive(Debug)]
pub struct BodyMemory {
    bytes: Arc<Semaphore>,
    /// Part of each client.
    shares: ClientShares,
    /// Time that a body waits for memory of others.
    patience: Duration,
    release: Arc<MemoryRelease>,
}

impl BodyMemory {
    /// Time that a body waits for memory of others.
    pub const PATIENCE: Duration = Duration::from_secs(5);

    /// Creates a budget of `total` bytes.
    pub fn new(total: usize, patience: Duration, release: Arc<MemoryRelease>) -> Self {
        let total = total.min(Semaphore::MAX_PERMITS);
        let shares = ClientShares::new(total / PER_CLIENT);
        Self { bytes: Arc::new(Semaphore::new(total)), shares, patience, release }
    }

    /// Returns the bytes of one client's part.
    pub fn each(&self) -> usize {
        self.shares.each()
    }

    /// Reserves memory for a large answer until it is sent or dropped. An answer beyond the client's part takes all of
    /// that.
    ///
    /// # Errors
    /// Other bodies and answers did not free memory in time.
    pub async fn hold_answer(&self, client: Client, response: Response) -> Result<Response, ApiError> {
        let size = response.body().size_hint().exact().and_then(|size| usize::try_from(size).ok());
        let Some(size) = size.filter(|size| *size >= LARGE_ANSWER) else { return Ok(response) };
        let share = BodyShare::of(client);
        share.grow(self, size.min(self.shares.each()), 0).await?;
        let (head, body) = response.into_parts();
        Ok(Response::from_parts(head, held::until_end_of(body, share)))
    }
}

/// Memory reserved for one request's body, until the last clone is dropped.
#[derive(Clone, Debug, Default)]
pub struct BodyShare(Arc<Mutex<Share>>);

#[derive(Debug, Default)]
struct Share {
    client: Client,
    /// Bytes that have arrived.
    length: usize,
    /// Bytes of the client, and the same number of all bytes.
    permits: Option<(OwnedSemaphorePermit, OwnedSemaphorePermit)>,
    /// Set after a large reservation: schedules a release of memory to the system.
    release: Option<Arc<MemoryRelease>>,
}

impl Drop for Share {
    fn drop(&mut self) {
        if let (Some((permits, _)), Some(release)) = (&self.permits, &self.release)
            && permits.num_permits() > MUCH
        {
            release.soon();
        }
    }
}

impl BodyShare {
    /// Returns the share of a request without a body.
    pub fn of(client: Client) -> Self {
        let share = Self::default();
        share.lock().client = client;
        share
    }

    /// Returns the number of bytes of the body.
    pub fn length(&self) -> usize {
        self.lock().length
    }

    /// Reserves memory for a body that has grown to `length` bytes and `values` JSON values.
    ///
    /// # Errors
    /// The body exceeds the budget, or other bodies did not free memory in time.
    pub async fn grow(&self, memory: &BodyMemory, length: usize, values: usize) -> Result<(), ApiError> {
        let needed = length.saturating_add(values.saturating_mul(VALUE)).saturating_sub(FREE);
        let (has, client) = {
            let mut share = self.lock();
            share.length = length;
            (share.permits.as_ref().map_or(0, |(permits, _)| permits.num_permits()), share.client.clone())
        };
        if needed <= has {
            return Ok(());
        }
        let most = memory.shares.each();
        if needed > most {
            let message = format!(
                "the request takes {}, of which {values} JSON values take 64 bytes each; one client can have a quarter of \
                 --body-memory, {}",
                bytes(needed as u64),
                bytes(most as u64)
            );
            return Err(ApiError::Invalid { param: None, message });
        }
        let more = (needed - has).next_multiple_of(STEP).min(most - has);
        // At most the total, because a semaphore acquires at most `u32::MAX` bytes at a time.
        let more = u32::try_from(more).unwrap_or(u32::MAX);
        let deadline = Instant::now() + memory.patience;
        let own = memory.shares.of(&client);
        let Ok(Ok(own)) = timeout_at(deadline, own.acquire_many_owned(more)).await else {
            let message = "other requests of this client take its quarter of --body-memory; try again later";
            return Err(ApiError::Unavailable(message.into()));
        };
        let all = memory.bytes.clone().acquire_many_owned(more);
        let Ok(Ok(permits)) = timeout_at(deadline, all).await else {
            let message = "the bodies of other requests take all of --body-memory; try again later".into();
            return Err(ApiError::Unavailable(message));
        };
        let mut share = self.lock();
        share.release = Some(memory.release.clone());
        match &mut share.permits {
            Some((of_client, all)) => {
                of_client.merge(own);
                all.merge(permits);
            }
            none => *none = Some((own, permits)),
        }
        Ok(())
    }

    /// Frees the reservation of a body that was discarded.
    pub fn clear(&self) {
        self.lock().permits = None;
    }

    fn lock(&self) -> MutexGuard<'_, Share> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts JSON values in a text that is read in parts. For invalid JSON the count is arbitrary.
#[derive(Clone, Copy, Debug, Default)]
pub struct ValueCounter {
    /// Number of values so far.
    pub values: usize,
    in_string: bool,
    escaped: bool,
}

impl ValueCounter {
    /// Counts the values of the next part.
    pub fn push(&mut self, piece: &[u8]) {
        for part in piece.chunks(64) {
            // Images are strings of megabytes. Without a branch for each byte, the compiler vectorizes this.
            let ends = |any: bool, byte: &u8| any | (*byte == b'"') | (*byte == b'\\');
            if self.in_string && !self.escaped && !part.iter().fold(false, ends) {
                continue;
            }
            part.iter().for_each(|&byte| self.push_byte(byte));
        }
    }

    fn push_byte(&mut self, byte: u8) {
        match (self.in_string, byte) {
            (true, _) if self.escaped => self.escaped = false,
            (true, b'\\') => self.escaped = true,
            (_, b'"') => self.in_string = !self.in_string,
            // A value follows an opening bracket or a comma.
            (false, b',' | b'[' | b'{') => self.values += 1,
            _ => {}
        }
    }
}

/// Minimum rate of a body. Only time spent waiting for the client counts.
#[derive(Debug)]
pub struct Pace {
    /// Minimum bytes per second; 0 for no minimum.
    rate: u64,
    /// Period over which the rate is measured.
    window: Duration,
    waited: Duration,
    bytes: u64,
}

impl Pace {
    /// Period over which the rate is measured.
    const WINDOW: Duration = Duration::from_secs(10);

    /// Starts measuring a body.
    pub fn new(limits: &HttpLimits) -> Self {
        let window = Self::WINDOW.min(limits.body_time);
        Self { rate: limits.body_rate, window, waited: Duration::ZERO, bytes: 0 }
    }

    /// Adds `bytes` received.
    pub fn arrived(&mut self, bytes: usize) {
        self.bytes = self.bytes.saturating_add(bytes as u64);
    }

    /// Waits for the next part of the body.
    ///
    /// # Errors
    /// The rate was below the minimum for the whole period.
    pub async fn wait<T>(&mut self, next: impl Future<Output = T>) -> Result<T, ApiError> {
        let mut next = pin!(next);
        loop {
            let begun = Instant::now();
            let left = self.window.saturating_sub(self.waited);
            if let Ok(part) = timeout(left, &mut next).await {
                self.waited += begun.elapsed();
                return Ok(part);
            }
            let expected = self.rate as f64 * self.window.as_secs_f64();
            if (self.bytes as f64) < expected {
                return Err(ApiError::BodyTooSlow { rate: self.rate });
            }
            (self.waited, self.bytes) = (Duration::ZERO, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_counted_whatever_the_pieces() {
        let long = ",[{".repeat(100);
        let text = format!(r#"{{"a": [1, "x,[{{\"{long}\\\\{long}", {{"b": null}}], "c": []}}"#);
        for size in [1, 3, 64, 100, 1000] {
            let mut counter = ValueCounter::default();
            text.as_bytes().chunks(size).for_each(|piece| counter.push(piece));
            assert_eq!(counter.values, 7, "{size}");
        }
    }

    fn memory(total: usize) -> BodyMemory {
        BodyMemory::new(total, Duration::from_millis(10), Arc::new(MemoryRelease::new(|| {})))
    }

    fn share(client: &str) -> BodyShare {
        BodyShare::of(Client::Key(client.into()))
    }

    #[tokio::test]
    async fn bodies_share_one_memory() {
        let memory = memory(1 << 20);
        let large = ["a", "b", "c", "d"].map(share);
        for one in &large {
            one.grow(&memory, 250 << 10, 0).await.unwrap();
        }
        let (other, small) = (share("e"), share("e"));
        small.grow(&memory, FREE, 0).await.unwrap();
        let refused = other.grow(&memory, 250 << 10, 0).await.unwrap_err();
        assert!(matches!(refused, ApiError::Unavailable(_)), "{refused:?}");
        drop(large);
        other.grow(&memory, 100 << 10, 1000).await.unwrap();
        other.clear();
        assert_eq!(memory.bytes.available_permits(), 1 << 20);
    }

    #[tokio::test]
    async fn a_client_has_a_quarter_even_while_it_is_alone() {
        let memory = memory(1 << 20);
        assert!(share("a").grow(&memory, 300 << 10, 0).await.is_err(), "it can never fit");
        let [first, second] = [share("a"), share("a")];
        first.grow(&memory, 200 << 10, 0).await.unwrap();
        let refused = second.grow(&memory, 200 << 10, 0).await.unwrap_err();
        assert!(matches!(refused, ApiError::Unavailable(_)), "{refused:?}");
        share("b").grow(&memory, 200 << 10, 0).await.unwrap();
        drop(first);
        second.grow(&memory, 200 << 10, 0).await.unwrap();
    }

    #[tokio::test]
    async fn large_answers_count_until_they_are_sent() {
        let memory = memory(64 << 20);
        let client = || Client::Key("a".into());
        let answer = |size: usize| Response::new(vec![0; size].into());
        let first = memory.hold_answer(client(), answer(20 << 20)).await.unwrap();
        assert!(
            memory.hold_answer(client(), answer(2 << 20)).await.is_err(),
            "the first one has the quarter"
        );
        let small = memory.hold_answer(client(), answer(100)).await.unwrap();
        drop(first);
        memory.hold_answer(client(), answer(2 << 20)).await.unwrap();
        drop(small);
        assert_eq!(memory.bytes.available_permits(), 64 << 20);
    }

    #[tokio::test]
    async fn a_body_must_keep_coming() {
        let body_time = Duration::from_millis(50);
        let limits = HttpLimits { body_rate: 1000, body_time, ..HttpLimits::default() };
        let drip = |bytes: usize| async move {
            let mut pace = Pace::new(&limits);
            for _ in 0..20 {
                pace.wait(tokio::time::sleep(Duration::from_millis(10))).await?;
                pace.arrived(bytes);
            }
            Ok::<_, ApiError>(())
        };
        assert_eq!(drip(1000).await, Ok(()));
        assert!(drip(1).await.is_err());
        let mut pace = Pace::new(&limits);
        pace.arrived(75);
        assert!(pace.wait(std::future::pending::<()>()).await.is_err(), "after a good beginning");
    }
}
