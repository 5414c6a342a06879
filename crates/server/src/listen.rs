//! Connections: accepted up to a bound, each with a time limit for heads, and ended in order.

use std::{
    io,
    net::SocketAddr,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
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
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    task::JoinSet,
};
use tower::ServiceExt;

use crate::{AppState, Listen, Server};

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

    /// Serves until `stop` is ready. Then nothing is accepted any more, running requests may go on for the time that
    /// the settings give them, and are cut after it. All engines have ended when this returns.
    pub async fn serve(self, stop: impl Future<Output = ()>) {
        let state = self.server.state.clone();
        let connections = Connections {
            router: self.server.router(),
            graceful: Arc::new(GracefulShutdown::new()),
            cut: watch::Sender::new(()),
            room: Arc::new(Semaphore::new(state.settings.limits.connections)),
            crowd: Arc::new(Crowd::new(state.settings.release_memory)),
            head_time: state.settings.limits.head_time,
        };
        let mut tasks = JoinSet::new();
        let models = state.models.clone();
        tasks.spawn(async move { models.unload_unused().await });
        let sockets: Vec<_> = self.listeners.iter().filter_map(Listener::socket).collect();
        for listener in self.listeners {
            tasks.spawn(connections.clone().accept(listener));
        }
        stop.await;
        tracing::info!("stopping");
        // Closes the listeners, so that nobody new can connect.
        tasks.shutdown().await;
        for path in sockets {
            // If somebody has taken it away, nothing is left to do.
            let _ = std::fs::remove_file(path);
        }
        connections.end(&state).await;
        state.models.unload_all().await;
    }
}

#[derive(Clone)]
struct Connections {
    router: Router,
    graceful: Arc<GracefulShutdown>,
    /// Changes when all connections are to end at once.
    cut: watch::Sender<()>,
    room: Arc<Semaphore>,
    crowd: Arc<Crowd>,
    head_time: Duration,
}

/// Counts connections, so that the memory of many is given back when they have gone.
#[derive(Debug)]
struct Crowd {
    open: AtomicUsize,
    /// Most that were open since memory was given back.
    most: AtomicUsize,
    release: fn(),
}

impl Crowd {
    /// Fewer leave little behind.
    const MANY: usize = 128;
    /// The last ones of a crowd may go meanwhile.
    const PAUSE: Duration = Duration::from_millis(500);

    fn new(release: fn()) -> Self {
        Self { open: AtomicUsize::new(0), most: AtomicUsize::new(0), release }
    }

    fn enter(&self) {
        let open = self.open.fetch_add(1, Ordering::Relaxed) + 1;
        self.most.fetch_max(open, Ordering::Relaxed);
    }

    /// Once for every crowd that has gone, memory is given back.
    fn leave(self: &Arc<Self>) {
        let open = self.open.fetch_sub(1, Ordering::Relaxed) - 1;
        let most = self.most.load(Ordering::Relaxed);
        let gone = most >= Self::MANY && open <= most / 4;
        if gone && self.most.compare_exchange(most, open, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            let release = self.release;
            tokio::spawn(async move {
                tokio::time::sleep(Self::PAUSE).await;
                // It walks through all of the heap. A panic there has nobody to go to.
                let _ = tokio::task::spawn_blocking(release).await;
            });
        }
    }
}

impl Connections {
    async fn accept(self, listener: Listener) {
        loop {
            // The semaphore is never closed.
            let Ok(permit) = self.room.clone().acquire_owned().await else { return };
            let accepted = match &listener {
                Listener::Tcp(tcp, address) => tcp.accept().await.map(|(stream, _)| {
                    // Tokens are small and must not wait for more.
                    let _ = stream.set_nodelay(true);
                    let loopback = address.ip().is_loopback();
                    let arrival = Arrival { loopback, private: loopback };
                    self.serve(stream, arrival, permit);
                }),
                #[cfg(unix)]
                Listener::Unix(unix, _) => unix.accept().await.map(|(stream, _)| {
                    self.serve(stream, Arrival { loopback: false, private: true }, permit);
                }),
            };
            if let Err(error) = accepted {
                // A connection that was given up before it was taken, or no more files for now: neither is helped by
                // asking again at once.
                tracing::debug!(%error, "no connection");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }

    fn serve<S>(&self, stream: S, arrival: Arrival, permit: OwnedSemaphorePermit)
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        // The router is shared: a layer of its own would be another one, with all its paths, for every connection.
        let router = self.router.clone();
        let service = service_fn(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(arrival);
            router.clone().oneshot(request)
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(self.head_time)
            .serve_connection(TokioIo::new(stream), service);
        let connection = self.graceful.watch(connection);
        let mut cut = self.cut.subscribe();
        let crowd = self.crowd.clone();
        crowd.enter();
        tokio::spawn(async move {
            let ended = tokio::select! {
                ended = connection => ended,
                _ = cut.changed() => Ok(()),
            };
            if let Err(error) = ended {
                // Clients that go away in the middle of things are nothing to worry about.
                tracing::debug!(%error, "connection ended");
            }
            drop(permit);
            crowd.leave();
        });
    }

    /// Lets running requests end, for a while.
    async fn end(self, state: &AppState) {
        // The tasks that accepted have ended, and their shares with them.
        let Some(graceful) = Arc::into_inner(self.graceful) else { return };
        let time = state.settings.shutdown_time;
        if tokio::time::timeout(time, graceful.shutdown()).await.is_err() {
            tracing::warn!(seconds = time.as_secs_f64(), "requests did not end in time and are cut");
            self.cut.send_replace(());
        }
    }
}
