//! Open connections: their idle times, blocked writes, and the number of each client.

use std::{
    collections::HashMap,
    io::{self, IoSlice},
    net::IpAddr,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::{Duration, Instant},
};

use axum::body::Body;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::Notify,
};

use crate::{AppState, held, prepare::Client, release::MemoryRelease};

/// Interval between two checks of all connections.
const INTERVAL: Duration = Duration::from_millis(200);

/// Time after the deadline in which the final error can still be written.
const AFTER_DEADLINE: Duration = Duration::from_secs(1);

/// Time that a connection may block on writing during shutdown.
const WHILE_STOPPING: Duration = Duration::from_secs(1);

/// Number of connections whose memory is worth a release to the system.
const MANY: usize = 128;

/// All open connections.
#[derive(Debug)]
pub struct Connections {
    table: Mutex<Table>,
    next: AtomicU64,
    /// Maximum number of connections of one remote client.
    per_client: usize,
    stopping: AtomicBool,
    release: Arc<MemoryRelease>,
}

#[derive(Debug, Default)]
struct Table {
    open: HashMap<u64, Arc<Connection>>,
    /// Number of connections of each remote client.
    clients: HashMap<Client, usize>,
    /// Maximum number of open connections since the last release of memory.
    most: usize,
}

/// One connection.
#[derive(Debug)]
pub struct Connection {
    id: u64,
    /// Address of a remote client; `None` for this machine.
    client: Option<Client>,
    activity: Mutex<Activity>,
    cut: Notify,
}

#[derive(Debug)]
struct Activity {
    /// Number of requests that are being read or answered.
    requests: usize,
    /// Time at which `requests` became 0.
    idle_since: Instant,
    /// Time since which writing to the client has blocked.
    blocked_since: Option<Instant>,
    /// Time by which the answer must have ended.
    deadline: Option<Instant>,
    /// True while the connection is being closed.
    closing: bool,
}

/// Registration of an open connection; dropping it removes the connection.
#[derive(Debug)]
pub struct Entered {
    connection: Arc<Connection>,
    connections: Arc<Connections>,
}

impl Connections {
    /// Creates an empty table.
    pub fn new(per_client: usize, release: Arc<MemoryRelease>) -> Self {
        Self {
            table: Mutex::default(),
            next: AtomicU64::new(0),
            per_client,
            stopping: AtomicBool::new(false),
            release,
        }
    }

    /// Returns true if a client may open another connection. At its limit, its longest idle connection is closed first.
    pub fn admit(&self, peer: Option<IpAddr>) -> bool {
        let Some(client) = elsewhere(peer) else { return true };
        let open = self.table().clients.get(&client).copied().unwrap_or(0);
        open < self.per_client || self.close_idle(Some(&client))
    }

    /// Registers a connection.
    pub fn enter(self: &Arc<Self>, peer: Option<IpAddr>) -> Entered {
        let client = elsewhere(peer);
        let activity = Activity {
            requests: 0,
            idle_since: Instant::now(),
            blocked_since: None,
            deadline: None,
            closing: false,
        };
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let connection =
            Arc::new(Connection { id, client, activity: Mutex::new(activity), cut: Notify::new() });
        let mut table = self.table();
        if let Some(client) = &connection.client {
            *table.clients.entry(client.clone()).or_default() += 1;
        }
        table.open.insert(id, connection.clone());
        table.most = table.most.max(table.open.len());
        drop(table);
        Entered { connection, connections: self.clone() }
    }

    /// Closes the connection with the longest idle time, of one client or of all. Returns false if none is idle.
    pub fn close_idle(&self, of: Option<&Client>) -> bool {
        let table = self.table();
        let idle = table.open.values().filter(|connection| of.is_none() || connection.client.as_ref() == of);
        let idle = idle.filter_map(|connection| {
            let activity = connection.activity();
            let idle = activity.requests == 0 && activity.blocked_since.is_none() && !activity.closing;
            idle.then_some((activity.idle_since, connection))
        });
        let Some((_, connection)) = idle.min_by_key(|(since, _)| *since) else { return false };
        connection.close();
        true
    }

    /// Starts the shutdown: connections that block on writing are closed after a short time.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
    }

    /// Closes all connections.
    pub fn cut_all(&self) {
        self.table().open.values().for_each(|connection| connection.close());
    }

    /// Closes connections that block on writing for too long, and releases memory to the system. Never returns.
    pub async fn watch(self: Arc<Self>, state: AppState) {
        let mut ticks = tokio::time::interval(INTERVAL);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let stopping = self.stopping.load(Ordering::Relaxed);
            let patience = state.settings.limits.write_time;
            let patience = if stopping { patience.min(WHILE_STOPPING) } else { patience };
            self.cut_blocked(Instant::now(), patience);
            if let Some(release) = self.release.due(Instant::now()) {
                // The release scans the whole heap, so it runs on another thread. A panic there is ignored.
                let _ = tokio::task::spawn_blocking(release).await;
            }
        }
    }

    fn cut_blocked(&self, now: Instant, patience: Duration) {
        for connection in self.table().open.values() {
            let Activity { blocked_since, deadline, closing, .. } = *connection.activity();
            let Some(since) = blocked_since.filter(|_| !closing) else { continue };
            let late =
                deadline.is_some_and(|deadline| now.saturating_duration_since(deadline) >= AFTER_DEADLINE);
            if late || now.saturating_duration_since(since) >= patience {
                tracing::info!("a client that does not read its answer is cut off");
                connection.close();
            }
        }
    }

    fn leave(&self, connection: &Connection) {
        let mut table = self.table();
        table.open.remove(&connection.id);
        if let Some(client) = &connection.client
            && let Some(count) = table.clients.get_mut(client)
        {
            *count -= 1;
            if *count == 0 {
                table.clients.remove(client);
            }
        }
        // Schedules one release after most connections of a peak have closed.
        if table.most >= MANY && table.open.len() <= table.most / 4 {
            table.most = table.open.len();
            table.open.shrink_to_fit();
            self.release.soon();
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the address of a remote client; `None` for this machine.
fn elsewhere(peer: Option<IpAddr>) -> Option<Client> {
    peer.filter(|peer| !peer.to_canonical().is_loopback()).map(Client::at)
}

impl Entered {
    /// Returns the connection.
    pub fn connection(&self) -> &Arc<Connection> {
        &self.connection
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        self.connections.leave(&self.connection);
    }
}

impl Connection {
    /// Sets the time by which the current answer must have ended.
    pub fn set_deadline(&self, deadline: tokio::time::Instant) {
        self.activity().deadline = Some(deadline.into_std());
    }

    /// Waits until the connection must be closed.
    pub async fn cut(&self) {
        self.cut.notified().await;
    }

    fn close(&self) {
        self.activity().closing = true;
        self.cut.notify_one();
    }

    /// Records whether a write has blocked.
    fn wrote(&self, blocked: bool) {
        let mut activity = self.activity();
        match blocked {
            true => drop(activity.blocked_since.get_or_insert_with(Instant::now)),
            false => activity.blocked_since = None,
        }
    }

    fn activity(&self) -> MutexGuard<'_, Activity> {
        self.activity.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Marks a connection as busy until its answer has been written.
#[derive(Debug)]
pub struct Busy {
    connection: Arc<Connection>,
    /// Set if the answer's memory is worth a release to the system.
    release: Option<Arc<MemoryRelease>>,
}

impl Busy {
    /// Starts a request. `release` returns freed memory to the system some time after the answer.
    pub fn new(connection: Arc<Connection>, release: Option<Arc<MemoryRelease>>) -> Self {
        let mut activity = connection.activity();
        activity.requests += 1;
        activity.deadline = None;
        drop(activity);
        Self { connection, release }
    }

    /// Ends the request when this body is dropped.
    pub fn until_end_of(self, body: Body) -> Body {
        held::until_end_of(body, self)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let now = Instant::now();
        let mut activity = self.connection.activity();
        activity.requests -= 1;
        activity.idle_since = now;
        if let Some(release) = &self.release {
            release.when_quiet(now);
        }
    }
}

/// A stream that records blocked writes.
#[derive(Debug)]
pub struct WatchedStream<S> {
    stream: S,
    connection: Arc<Connection>,
}

impl<S> WatchedStream<S> {
    /// Wraps the stream of a connection.
    pub fn new(stream: S, connection: Arc<Connection>) -> Self {
        Self { stream, connection }
    }

    fn note<T>(&self, poll: Poll<T>) -> Poll<T> {
        self.connection.wrote(poll.is_pending());
        poll
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for WatchedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for WatchedStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let poll = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.note(poll)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let poll = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.note(poll)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connections(per_client: usize) -> Arc<Connections> {
        Arc::new(Connections::new(per_client, Arc::new(MemoryRelease::new(|| {}))))
    }

    fn is_closing(entered: &Entered) -> bool {
        entered.connection.activity().closing
    }

    #[test]
    fn the_longest_idle_connection_is_closed() {
        let all = connections(10);
        let [first, second, third] = [0; 3].map(|_| all.enter(None));
        let busy = Busy::new(first.connection.clone(), None);
        assert!(all.close_idle(None));
        assert_eq!([&first, &second, &third].map(is_closing), [false, true, false]);
        assert!(all.close_idle(None));
        assert!(is_closing(&third) && !all.close_idle(None));
        drop(busy);
        assert!(all.close_idle(None) && is_closing(&first));
    }

    #[test]
    fn a_client_has_a_share_and_this_machine_all() {
        let all = connections(2);
        let peer = Some("10.0.0.1".parse().unwrap());
        let kept = [0; 2].map(|_| all.enter(peer));
        let busy = kept.each_ref().map(|entered| Busy::new(entered.connection.clone(), None));
        assert!(!all.admit(peer));
        assert!(all.admit(Some("10.0.0.2".parse().unwrap())));
        drop(busy);
        assert!(all.admit(peer) && is_closing(&kept[0]));
        let local = Some("::ffff:127.0.0.1".parse().unwrap());
        let local: Vec<_> = (0..5).map(|_| all.enter(local)).collect();
        assert!(all.admit(local[0].connection.client.as_ref().map(|_| "10.0.0.3".parse().unwrap())));
        drop((kept, local));
        assert!(all.table().clients.is_empty());
    }

    #[test]
    fn who_does_not_read_is_cut() {
        let all = connections(10);
        let [fine, blocked, late] = [0; 3].map(|_| all.enter(None));
        let now = Instant::now();
        blocked.connection.wrote(true);
        late.connection.wrote(true);
        late.connection.set_deadline(now.into());
        let cut = |after: u64| {
            all.cut_blocked(now + Duration::from_secs(after), Duration::from_secs(30));
            [&fine, &blocked, &late].map(is_closing)
        };
        assert_eq!(cut(0), [false; 3]);
        assert_eq!(cut(2), [false, false, true]);
        blocked.connection.wrote(false);
        blocked.connection.wrote(true);
        assert_eq!(cut(40), [false, true, true]);
    }
}
