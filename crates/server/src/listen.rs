//! Listening sockets and the life of the server: it accepts connections and shuts down in order.

use std::{
    future::poll_fn,
    io,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use axum::Router;
use hyper::{Method, Request, body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::GracefulShutdown,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
    sync::{OwnedSemaphorePermit, Semaphore},
    task::JoinSet,
};
use tower::ServiceExt;

use crate::{
    AppState, Listen, Server,
    connections::{Busy, Connections, Entered, WatchedStream},
    paths,
    release::MemoryRelease,
};

/// Error of a listening socket.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen at {place}: {source}")]
pub struct BindError {
    /// Address or path.
    pub place: String,
    /// Error of the system.
    pub source: io::Error,
}

/// A listening server. Connections wait in the system's queue until [`Bound::serve`].
#[derive(Debug)]
pub struct Bound {
    server: Server,
    listeners: Vec<Listener>,
}

#[derive(Debug)]
enum Listener {
    Tcp(TcpListener, SocketAddr),
    #[cfg(unix)]
    Unix(tokio::net::UnixListener, PathBuf),
}

/// Properties of the connection of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// True for a loopback address. A web page on this machine may have sent the request, so its `Host` is checked.
    pub loopback: bool,
    /// True if only this machine can have sent the request.
    pub private: bool,
    /// The client's address; `None` for a Unix socket.
    pub peer: Option<IpAddr>,
}

/// Bound addresses of a server that need not exist yet. Connections wait in the system's queue.
#[derive(Debug, Default)]
pub struct Listening {
    listeners: Vec<Listener>,
}

impl Listening {
    /// Listens at all of these addresses.
    ///
    /// # Errors
    /// The first address that cannot be bound.
    pub async fn bind(places: &[Listen]) -> Result<Self, BindError> {
        let mut listening = Self::default();
        for place in places {
            listening.listeners.push(Listener::bind(place).await?);
        }
        Ok(listening)
    }
}

impl Drop for Listening {
    /// Removes the files of sockets, if no server uses them.
    fn drop(&mut self) {
        for path in self.listeners.iter().filter_map(Listener::socket) {
            // The file may already have been removed.
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Server {
    /// Returns a server at bound addresses.
    pub fn at(self, mut listening: Listening) -> Bound {
        Bound { server: self, listeners: std::mem::take(&mut listening.listeners) }
    }

    /// Listens at all addresses of the settings.
    ///
    /// # Errors
    /// The first address that cannot be bound.
    pub async fn bind(self) -> Result<Bound, BindError> {
        let listening = Listening::bind(&self.state.settings.listen).await?;
        Ok(self.at(listening))
    }
}

impl Listener {
    async fn bind(place: &Listen) -> Result<Self, BindError> {
        let error = |place: String| move |source| BindError { place, source };
        match place {
            Listen::Tcp(address) => {
                let bind = async {
                    let listener = TcpListener::bind(address).await?;
                    let address = listener.local_addr()?;
                    Ok(Self::Tcp(listener, address))
                };
                bind.await.map_err(error(address.to_string()))
            }
            Listen::Unix(path) => {
                Self::bind_unix(path.clone()).await.map_err(error(path.display().to_string()))
            }
        }
    }

    /// Returns the path of a Unix socket.
    fn socket(&self) -> Option<PathBuf> {
        match self {
            Self::Tcp(..) => None,
            #[cfg(unix)]
            Self::Unix(_, path) => Some(path.clone()),
        }
    }

    /// Binds a Unix socket. A socket file without a listener was left by a server that was killed, and is replaced.
    #[cfg(unix)]
    async fn bind_unix(path: PathBuf) -> io::Result<Self> {
        use std::os::unix::fs::{FileTypeExt, PermissionsExt};
        use tokio::net::{UnixListener, UnixStream};
        let is_socket = std::fs::symlink_metadata(&path).is_ok_and(|file| file.file_type().is_socket());
        if is_socket && UnixStream::connect(&path).await.is_err() {
            std::fs::remove_file(&path)?;
        }
        let listener = UnixListener::bind(&path)?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
        Ok(Self::Unix(listener, path))
    }

    #[cfg(not(unix))]
    async fn bind_unix(_path: PathBuf) -> io::Result<Self> {
        Err(io::Error::new(io::ErrorKind::Unsupported, "this system has no Unix sockets"))
    }
}

impl Bound {
    /// Returns the addresses in the form of URLs: `http://127.0.0.1:11434`, `unix:/run/paguro.sock`.
    pub fn places(&self) -> Vec<String> {
        let place = |listener: &Listener| match listener {
            Listener::Tcp(_, address) => format!("http://{address}"),
            #[cfg(unix)]
            Listener::Unix(_, path) => format!("unix:{}", path.display()),
        };
        self.listeners.iter().map(place).collect()
    }

    /// Serves until `stop` is ready, then refuses new requests. Running ones are cut off after the time of the settings, or
    /// when `cut` is ready. All engines have ended when this returns.
    pub async fn serve(self, stop: impl Future<Output = ()>, cut: impl Future<Output = ()>) {
        let state = self.server.state.clone();
        let acceptor = Acceptor::new(self.server.router(), &state);
        let mut tasks = JoinSet::new();
        let models = state.models.clone();
        tasks.spawn(async move { models.unload_unused().await });
        let mut watch = JoinSet::new();
        watch.spawn(acceptor.connections.clone().watch(state.clone()));
        let sockets: Vec<_> = self.listeners.iter().filter_map(Listener::socket).collect();
        for listener in self.listeners {
            tasks.spawn(acceptor.clone().accept(listener));
        }
        stop.await;
        tracing::info!("stopping");
        state.drain.begin();
        state.live.end();
        acceptor.connections.stop();
        let mut cut = std::pin::pin!(cut);
        let end = tokio::time::Instant::now() + state.settings.shutdown_time.max(state.settings.drain_time);
        // Ports stay open, so that routers see the server refuse requests.
        let is_cut = tokio::select! {
            _ = tokio::time::timeout_at(end, state.drain.wait(state.settings.drain_time)) => false,
            () = cut.as_mut() => true,
        };
        tasks.shutdown().await;
        for path in sockets {
            // The file may already have been removed.
            let _ = std::fs::remove_file(path);
        }
        acceptor.end(end, is_cut, cut).await;
        watch.shutdown().await;
        state.models.unload_all().await;
    }
}

/// Accepts connections.
#[derive(Clone)]
struct Acceptor {
    router: Router,
    graceful: Arc<GracefulShutdown>,
    connections: Arc<Connections>,
    room: Arc<Semaphore>,
    head_time: Duration,
    release: Arc<MemoryRelease>,
}

impl Acceptor {
    /// Time that a full server waits for a connection to end before it closes an idle one.
    const PAUSE: Duration = Duration::from_millis(50);
    /// Minimum time for the last bytes of answers to be written.
    const WRITING: Duration = Duration::from_millis(200);

    fn new(router: Router, state: &AppState) -> Self {
        let limits = &state.settings.limits;
        Self {
            router,
            graceful: Arc::new(GracefulShutdown::new()),
            connections: Arc::new(Connections::new(limits.connections_per_client, state.release.clone())),
            room: Arc::new(Semaphore::new(limits.connections)),
            head_time: limits.head_time,
            release: state.release.clone(),
        }
    }

    async fn accept(self, listener: Listener) {
        loop {
            let accepted = match &listener {
                Listener::Tcp(tcp, address) => match tcp.accept().await {
                    Ok((stream, peer)) => {
                        // Tokens are small and must be sent at once.
                        let _ = stream.set_nodelay(true);
                        let loopback = address.ip().is_loopback();
                        let arrival = Arrival { loopback, private: loopback, peer: Some(peer.ip()) };
                        self.enter(stream, arrival).await;
                        Ok(())
                    }
                    Err(error) => Err(error),
                },
                #[cfg(unix)]
                Listener::Unix(unix, _) => match unix.accept().await {
                    Ok((stream, _)) => {
                        self.enter(stream, Arrival { loopback: false, private: true, peer: None }).await;
                        Ok(())
                    }
                    Err(error) => Err(error),
                },
            };
            if let Err(error) = accepted {
                // The connection was aborted before it was accepted, or there are no free file descriptors. Retrying at
                // once helps in neither case.
                tracing::debug!(%error, "no connection");
                self.connections.close_idle(None);
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }

    /// Waits for room for a connection, closing idle ones if necessary, and serves it.
    async fn enter<S>(&self, mut stream: S, arrival: Arrival)
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        if !self.connections.admit(arrival.peer) {
            // One attempt to write: the server does not wait for the client to read it.
            let write = poll_fn(|context| Pin::new(&mut stream).poll_write(context, TOO_MANY));
            let _ = tokio::time::timeout(Duration::ZERO, write).await;
            return;
        }
        let permit = loop {
            let room = self.room.clone();
            if let Ok(permit) = room.clone().try_acquire_owned() {
                break permit;
            }
            self.connections.close_idle(None);
            // The semaphore is never closed.
            if let Ok(Ok(permit)) = tokio::time::timeout(Self::PAUSE, room.acquire_owned()).await {
                break permit;
            }
        };
        let entered = self.connections.enter(arrival.peer);
        self.serve(stream, arrival, entered, permit);
    }

    fn serve<S>(&self, stream: S, arrival: Arrival, entered: Entered, permit: OwnedSemaphorePermit)
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        // The router is shared: an additional layer would copy it with all routes for every connection.
        let router = self.router.clone();
        let connection = entered.connection().clone();
        let stream = WatchedStream::new(stream, connection.clone());
        let release = self.release.clone();
        let service = service_fn(move |mut request: Request<Incoming>| {
            // A server that is only asked for its metrics is quiet.
            let release = (request.method() != Method::GET).then(|| release.clone());
            let busy = Busy::new(connection.clone(), release);
            paths::normalize(&mut request);
            request.extensions_mut().insert(arrival);
            request.extensions_mut().insert(connection.clone());
            let answer = router.clone().oneshot(request);
            async move { answer.await.map(|response| response.map(|body| busy.until_end_of(body))) }
        });
        let served = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(self.head_time)
            .serve_connection(TokioIo::new(stream), service);
        let served = self.graceful.watch(served);
        tokio::spawn(async move {
            let ended = tokio::select! {
                ended = served => ended,
                () = entered.connection().cut() => Ok(()),
            };
            if let Err(error) = ended {
                // Clients may disconnect at any time.
                tracing::debug!(%error, "connection ended");
            }
            drop(entered);
            drop(permit);
        });
    }

    /// Waits until `end` for running requests to end, unless they are cut off.
    async fn end(self, end: tokio::time::Instant, is_cut: bool, cut: impl Future<Output = ()>) {
        // The accepting tasks have ended and dropped their shares.
        let Some(graceful) = Arc::into_inner(self.graceful) else { return };
        // Answers that have ended are still being written.
        let end = end.max(tokio::time::Instant::now() + Self::WRITING);
        let ended = !is_cut
            && tokio::select! {
                ended = tokio::time::timeout_at(end, graceful.shutdown()) => ended.is_ok(),
                () = cut => false,
            };
        if !ended {
            tracing::warn!("requests that have not ended are cut");
            self.connections.cut_all();
        }
    }
}

/// Answer to connections beyond a client's limit.
const TOO_MANY: &[u8] =
    b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n";
