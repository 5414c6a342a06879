//! Events of prefix caches over ZeroMQ, as vLLM publishes them, for routers that send a request to the server that has its prefix.
//!
//! A PUB socket sends `[topic, number, batch]`: the number has eight bytes, big-endian, and the batch is MessagePack (`encode.rs`). A ROUTER socket answers a number with all batches from it on that are still known, and then with -1.
//!
//! Both sockets run on one thread of their own and have bounds for everything that a peer can cause (decision 15). So no peer delays
//! requests, the engines or other peers.

mod encode;
mod places;
mod publish;
mod queue;
mod replay;
mod store;
#[cfg(test)]
mod tests;
mod zmtp;

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, UdpSocket},
    sync::Arc,
    thread,
};

use tokio::{runtime, task::JoinSet};

pub use self::{encode::KvEncoding, queue::KvEvents, store::KEPT as BATCHES_KEPT};
use self::{queue::Events, store::Store};

/// Where events go.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KvEventsSettings {
    /// Address of the PUB socket: `tcp://127.0.0.1:5557`. `*` is every address of the machine.
    pub endpoint: String,
    /// Address of the ROUTER socket for replay.
    pub replay: Option<String>,
    /// First part of every message; `{model}` in it is the name of the model, and `{address}` the address of the PUB socket.
    pub topic: String,
    /// Form of the events.
    pub encoding: KvEncoding,
}

impl KvEventsSettings {
    /// Topic by which routers distinguish servers and models.
    pub const TOPIC: &'static str = "kv@{address}@{model}";
}

/// Addresses of the bound sockets, as routers need them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEventsPlaces {
    /// Address of the PUB socket.
    pub endpoint: String,
    /// Address of the ROUTER socket, if there is one.
    pub replay: Option<String>,
    /// Topic of the messages, with `{model}` for the name of the model.
    pub topic: String,
}

/// The other end of [`KvEvents`].
#[derive(Debug)]
pub struct KvReceiver(Events);

/// Bound sockets that publish events.
#[derive(Debug)]
pub struct KvPublisher {
    events: Events,
    topic: String,
    encoding: KvEncoding,
    publisher: TcpListener,
    replay: Option<TcpListener>,
}

impl KvEvents {
    /// Returns a channel for events, and its other end.
    pub fn new() -> (Self, KvReceiver) {
        let (events, receiver) = queue::queue();
        (events, KvReceiver(receiver))
    }
}

impl KvReceiver {
    /// Binds the sockets. Returns the publisher and the addresses of both.
    ///
    /// # Errors
    /// The address that cannot be bound, with the reason.
    pub fn bind(self, settings: KvEventsSettings) -> Result<(KvPublisher, KvEventsPlaces), String> {
        let (publisher, address) = bind(&settings.endpoint)?;
        let (replay, replay_address) = settings.replay.as_deref().map(bind).transpose()?.unzip();
        let place =
            |address: SocketAddr| format!("tcp://{}", SocketAddr::new(reachable(address), address.port()));
        let topic = settings.topic.replace("{address}", &reachable(address).to_string());
        let places = KvEventsPlaces {
            endpoint: place(address),
            replay: replay_address.map(place),
            topic: topic.clone(),
        };
        let encoding = settings.encoding;
        Ok((KvPublisher { events: self.0, topic, encoding, publisher, replay }, places))
    }
}

/// Splits `tcp://HOST:PORT` into its host and port. `*` is every address or any free port, as in ZeroMQ.
fn parse(endpoint: &str) -> Result<(String, u16), String> {
    let form = || format!("`{endpoint}` is no address of the form tcp://HOST:PORT");
    let address = endpoint.strip_prefix("tcp://").ok_or_else(form)?;
    let (host, port) = address.rsplit_once(':').ok_or_else(form)?;
    let port = if port == "*" { 0 } else { port.parse().map_err(|_| form())? };
    let host = match host {
        "" => return Err(form()),
        "*" => "0.0.0.0",
        _ => host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host),
    };
    Ok((host.to_owned(), port))
}

/// Returns an address by which others reach a socket: that of the socket, or one of this machine if the socket is bound at all of them.
fn reachable(address: SocketAddr) -> IpAddr {
    let bound = address.ip().to_canonical();
    if !bound.is_unspecified() {
        return bound;
    }
    // Connecting a UDP socket selects a route and sends nothing. The address is one for documentation (RFC 5737).
    let route = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).and_then(|socket| {
        socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9))?;
        socket.local_addr()
    });
    route.map_or(Ipv4Addr::LOCALHOST.into(), |address| address.ip())
}

fn bind(endpoint: &str) -> Result<(TcpListener, SocketAddr), String> {
    let (host, port) = parse(endpoint)?;
    let bound = TcpListener::bind((host.as_str(), port)).and_then(|listener| {
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        Ok((listener, address))
    });
    bound.map_err(|error| format!("cannot bind `{endpoint}`: {error}"))
}

impl KvPublisher {
    /// Returns the addresses of sockets that are bound at every address of this machine.
    pub fn open_to_all(&self) -> impl Iterator<Item = SocketAddr> {
        let sockets = std::iter::once(&self.publisher).chain(&self.replay);
        let addresses = sockets.filter_map(|socket| socket.local_addr().ok());
        addresses.filter(|address| address.ip().to_canonical().is_unspecified())
    }

    /// Publishes events on a thread of its own until all engines have ended.
    ///
    /// # Errors
    /// The system has no thread or no descriptors.
    pub fn start(self) -> io::Result<()> {
        // One thread: peers compete with each other and not with requests.
        let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
        let run = move || {
            if let Err(error) = runtime.block_on(self.run()) {
                tracing::error!(%error, "KV events are not published");
            }
        };
        thread::Builder::new().name("paguro-kv-events".into()).spawn(run).map(drop)
    }

    async fn run(mut self) -> io::Result<()> {
        let (store, pace) = (Arc::new(Store::new()), Arc::new(replay::Pace::new()));
        let topic = |model: &str| self.topic.replace("{model}", model).into_bytes();
        // The prefix caches of a new process are empty.
        store.push(topic(""), encode::cleared(self.encoding));
        // Connections end with this set.
        let mut ports = JoinSet::new();
        let shared = store.clone();
        let subscribers = tokio::net::TcpListener::from_std(self.publisher)?;
        ports.spawn(places::accept(subscribers, move |stream, place| {
            let store = shared.clone();
            async move { publish::serve(stream, place, &store).await }
        }));
        if let Some(replay) = self.replay {
            let (shared, encoding) = (store.clone(), self.encoding);
            ports.spawn(places::accept(tokio::net::TcpListener::from_std(replay)?, move |stream, place| {
                let (store, pace) = (shared.clone(), pace.clone());
                async move { replay::serve(stream, place, (&store, &pace, encoding)).await }
            }));
        }
        while let Some(lines) = self.events.next().await {
            for (model, batches) in lines {
                for batch in batches {
                    match batch {
                        Some(events) => {
                            let batches = encode::encode(self.encoding, &events);
                            batches.for_each(|batch| store.push(topic(&model), batch));
                        }
                        None => {
                            tracing::warn!(%model, "KV events were dropped: routers are told that its blocks are gone");
                            store.push(topic(&model), encode::cleared(self.encoding));
                        }
                    }
                    // Peers are served between the batches.
                    tokio::task::yield_now().await;
                }
            }
        }
        Ok(())
    }
}
