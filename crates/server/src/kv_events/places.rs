//! Connections of a port, with a bound on their number.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    net::{TcpListener, TcpStream},
    task::{AbortHandle, JoinSet},
    time::{Instant, sleep},
};

use super::zmtp::Fault;

/// Maximum number of connections of a port.
pub const CONNECTIONS: usize = 128;
/// Maximum number of connections of one address.
pub const CONNECTIONS_PER_ADDRESS: usize = 64;
/// Connections that are accepted in a tenth of a second. More wait in the system's queue.
const ACCEPTED: u32 = 100;
/// Pause after the system had no more descriptors.
const PAUSE: Duration = Duration::from_millis(100);
/// Time between two warnings about refused connections.
const QUIET: Duration = Duration::from_secs(60);

/// Connections, by number: older ones have smaller numbers.
#[derive(Debug, Default)]
struct Places(Mutex<Entries>);

#[derive(Debug, Default)]
struct Entries {
    next: u64,
    connections: BTreeMap<u64, Entry>,
}

#[derive(Debug)]
struct Entry {
    address: IpAddr,
    phase: Phase,
    since: Instant,
    /// Present from the start of its task.
    task: Option<AbortHandle>,
}

/// Phase of a connection. Those of earlier variants make room for new connections first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// The handshake is not finished.
    Handshake,
    /// Nothing is subscribed, or no request runs. A peer connects again when it needs to.
    Idle,
    /// In use.
    Busy,
}

/// Place of a connection, until it is dropped.
#[derive(Debug)]
pub struct Place {
    places: Arc<Places>,
    number: u64,
}

impl Place {
    /// Sets the phase of the connection.
    pub fn set(&self, phase: Phase) {
        if let Some(entry) = self.places.entries().connections.get_mut(&self.number)
            && entry.phase != phase
        {
            (entry.phase, entry.since) = (phase, Instant::now());
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.entries().connections.remove(&self.number);
    }
}

impl Places {
    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a place for a connection. If all are taken, one that is not in use makes room. Returns `None` if all are in use.
    fn enter(self: &Arc<Self>, address: IpAddr) -> Option<Place> {
        let mut entries = self.entries();
        let of_address = entries.connections.values().filter(|entry| entry.address == address).count();
        let full_for_address = of_address >= CONNECTIONS_PER_ADDRESS;
        if full_for_address || entries.connections.len() >= CONNECTIONS {
            let competes = |entry: &Entry| !full_for_address || entry.address == address;
            let others = entries.connections.iter().filter(|(_, entry)| competes(entry));
            let unused = others.filter(|(_, entry)| entry.phase != Phase::Busy);
            let victim =
                unused.min_by_key(|(_, entry)| (entry.phase, entry.since)).map(|(&number, _)| number);
            let entry = entries.connections.remove(&victim?)?;
            if let Some(task) = entry.task {
                task.abort();
            }
        }
        let number = entries.next;
        entries.next += 1;
        let entry = Entry { address, phase: Phase::Handshake, since: Instant::now(), task: None };
        entries.connections.insert(number, entry);
        Some(Place { places: self.clone(), number })
    }
}

/// Accepts connections and serves each in a task. Ends only when it is dropped, with all connections.
pub async fn accept<F>(listener: TcpListener, serve: impl Fn(TcpStream, Place) -> F)
where
    F: Future<Output = Result<(), Fault>> + Send + 'static,
{
    let (places, mut tasks) = (Arc::new(Places::default()), JoinSet::new());
    let (mut begin, mut accepted, mut warned) = (Instant::now(), 0, None::<Instant>);
    loop {
        let arrived = tokio::select! {
            arrived = listener.accept() => arrived,
            Some(_) = tasks.join_next() => continue,
        };
        let (stream, peer) = match arrived {
            Ok(arrived) => arrived,
            Err(error) => {
                tracing::debug!(%error, "KV events: a connection cannot be accepted");
                sleep(PAUSE).await;
                continue;
            }
        };
        if begin.elapsed() > PAUSE {
            (begin, accepted) = (Instant::now(), 0);
        }
        accepted += 1;
        let Some(place) = places.enter(peer.ip().to_canonical()) else {
            if warned.is_none_or(|warned| warned.elapsed() > QUIET) {
                warned = Some(Instant::now());
                tracing::warn!(%peer, "KV events: a connection was refused; at most {CONNECTIONS} are open, and \
                    {CONNECTIONS_PER_ADDRESS} of one address");
            }
            continue;
        };
        let number = place.number;
        // Batches are small and urgent.
        let _ = stream.set_nodelay(true);
        let serving = serve(stream, place);
        let task = tasks.spawn(async move {
            if let Err(fault) = serving.await {
                tracing::debug!(%peer, %fault, "KV events: a connection has ended");
            }
        });
        if let Some(entry) = places.entries().connections.get_mut(&number) {
            entry.task = Some(task);
        }
        if accepted >= ACCEPTED {
            sleep(PAUSE).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_in_use_are_never_closed_for_others() {
        let places = Arc::new(Places::default());
        let address = |last: u8| IpAddr::from([10, 0, 0, last]);
        let enter = |last: u8, phase: Phase| {
            let place = places.enter(address(last))?;
            place.set(phase);
            Some(place)
        };
        let has = |place: &Place| places.entries().connections.contains_key(&place.number);
        let mut first: Vec<_> =
            (0..CONNECTIONS_PER_ADDRESS).map(|_| enter(1, Phase::Busy).unwrap()).collect();
        assert!(enter(1, Phase::Busy).is_none(), "one address does not occupy all places");
        let idle = enter(2, Phase::Idle).unwrap();
        let half_open: Vec<_> = (3..7).map(|last| enter(last, Phase::Handshake).unwrap()).collect();
        let rest = CONNECTIONS - CONNECTIONS_PER_ADDRESS - 5;
        let mut others: Vec<_> = (0..rest).map(|_| enter(9, Phase::Busy).unwrap()).collect();
        // Half-open ones make room first, the oldest at the front; then idle ones.
        for open in &half_open {
            assert!(has(open) && has(&idle));
            others.push(enter(8, Phase::Busy).unwrap());
            assert!(!has(open));
        }
        others.push(enter(8, Phase::Busy).unwrap());
        assert!(!has(&idle));
        assert!(enter(7, Phase::Busy).is_none());
        assert!(first.iter().chain(&others).all(has));
        // Those of an address that has its share make room among themselves.
        first[5].set(Phase::Idle);
        first.push(enter(1, Phase::Busy).unwrap());
        assert!(!has(&first[5]));
        drop((first, others));
        assert_eq!(places.entries().connections.len(), 0);
    }
}
