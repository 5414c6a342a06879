//! Places to listen at, and the life of the server: it accepts connections, and ends them in order.

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
use hyper::{Request, body::Incoming, server::conn::http1, service::service_fn};
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
};

/// Why nothing can be listened at.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen at {place}: {source}")]
pub struct BindError {
    /// Where.
    pub place: String,
    /// What the system says.
    pub source: io::Error,
}

/// A server that listens. What connects meanwhile waits until [`Bound::serve`].
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

/// What a request came through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// Through a loopback address. A web page on this machine may have sent it: its `Host` is to be checked.
    pub loopback: bool,
    /// Only this machine can have sent it.
    pub private: bool,
    /// The client's address; `None` for a Unix socket.
    pub peer: Option<IpAddr>,
}

impl Server {
    /// Listens at all places of the settings.
    ///
    /// # Errors
    /// The first place where that is not possible.
    pub async fn bind(self) -> Result<Bound, BindError> {
        let mut listeners = Vec::new();
        for place in &self.state.settings.listen {
            listeners.push(Listener::bind(place).await?);
        }
        Ok(Bound { server: self, listeners })
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

    /// The file of a Unix socket.
    fn socket(&self) -> Option<PathBuf> {
        match self {
            Self::Tcp(..) => None,
            #[cfg(unix)]
            Self::Unix(_, path) => Some(path.clone()),
        }
    }

    /// A socket file that nobody listens at is what a server that was killed has left.
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
    /// Where it listens, as one would ask for it: `http://127.0.0.1:11434`, `unix:/run/paguro.sock`.
    pub fn places(&self) -> Vec<String> {
        let place = |listener: &Listener| match listener {
            Listener::Tcp(_, address) => format!("http://{address}"),
            #[cfg(unix)]
            Listener::Unix(_, path) => format!("unix:{}", path.display()),
        };
        self.listeners.iter().map(place).collect()
    }

    /// Serves until `stop` is ready. Then nothing is accepted any more. Running requests may go on for the time that the
    /// settings give them, or until `cut` is ready, and are cut then. All engines have ended when this returns.
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
        state.live.end();
        // Closes the listeners, so that nobody new can connect.
        tasks.shutdown().await;
        for path in sockets {
            // If somebody has taken it away, nothing is left to do.
            let _ = std::fs::remove_file(path);
        }
        acceptor.end(&state, cut).await;
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
}

impl Acceptor {
    /// How long a full server waits for a connection to end before it closes another one.
    const PAUSE: Duration = Duration::from_millis(50);

    fn new(router: Router, state: &AppState) -> Self {
        let limits = &state.settings.limits;
        Self {
            router,
            graceful: Arc::new(GracefulShutdown::new()),
            connections: Arc::new(Connections::new(limits.connections_per_client, state.release.clone())),
            room: Arc::new(Semaphore::new(limits.connections)),
            head_time: limits.head_time,
        }
    }

    async fn accept(self, listener: Listener) {
        loop {
            let accepted = match &listener {
                Listener::Tcp(tcp, address) => match tcp.accept().await {
                    Ok((stream, peer)) => {
                        // Tokens are small and must not wait for more.
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
                // A connection that was given up before it was taken, or no more files for now: neither is helped by
                // asking again at once.
                tracing::debug!(%error, "no connection");
                self.connections.close_idle(None);
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }

    /// Finds room for a connection, for which idle ones are closed, and serves it.
    async fn enter<S>(&self, mut stream: S, arrival: Arrival)
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        if !self.connections.admit(arrival.peer) {
            // Whether the client reads it is its own matter; it must not be waited for.
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
        // The router is shared: a layer of its own would be another one, with all its paths, for every connection.
        let router = self.router.clone();
        let connection = entered.connection().clone();
        let stream = WatchedStream::new(stream, connection.clone());
        let service = service_fn(move |mut request: Request<Incoming>| {
            let busy = Busy::new(connection.clone());
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
                // Clients that go away in the middle of things are nothing to worry about.
                tracing::debug!(%error, "connection ended");
            }
            drop(entered);
            drop(permit);
        });
    }

    /// Lets running requests end, for a while.
    async fn end(self, state: &AppState, cut: impl Future<Output = ()>) {
        self.connections.stop();
        // The tasks that accepted have ended, and their shares with them.
        let Some(graceful) = Arc::into_inner(self.graceful) else { return };
        let time = state.settings.shutdown_time;
        let ended = tokio::select! {
            ended = tokio::time::timeout(time, graceful.shutdown()) => ended.is_ok(),
            () = cut => false,
        };
        if !ended {
            tracing::warn!("requests that have not ended are cut");
            self.connections.cut_all();
        }
    }
}

/// The answer to connections beyond a client's share.
const TOO_MANY: &[u8] =
    b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n";
