//! Events of prefix caches over ZeroMQ, as vLLM publishes them, for routers that send a request to the server that has its prefix.
//!
//! A PUB socket sends `[topic, number, batch]`: the number has eight bytes, big-endian, and the batch is MessagePack, arrays in the order of
//! vLLM's fields. A ROUTER socket answers a number with all batches from it on that are still known, and then with -1.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use paguro_engine::{EventSink, KvEvent, Medium};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

/// Batches that are kept for replay.
const KEPT: usize = 10_000;
/// Bytes of these, at most.
const KEPT_BYTES: usize = 64 << 20;
/// Number behind the last batch of a replay.
const END: i64 = -1;

/// Where events go.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KvEventsSettings {
    /// Address of the PUB socket: `tcp://127.0.0.1:5557`. `*` is every address of the machine.
    pub endpoint: String,
    /// Address of the ROUTER socket for replay.
    pub replay: Option<String>,
    /// First part of every message; `{model}` in it is the name of the model.
    pub topic: String,
}

/// Events of all models on their way to the publisher.
#[derive(Clone, Debug)]
pub struct KvEvents(UnboundedSender<(Arc<str>, Vec<KvEvent>)>);

/// Sockets that publish events.
pub struct KvPublisher {
    settings: KvEventsSettings,
    events: UnboundedReceiver<(Arc<str>, Vec<KvEvent>)>,
    publisher: PubSocket,
    replay: Option<RouterSocket>,
    kept: Kept,
}

impl std::fmt::Debug for KvPublisher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KvPublisher").field("settings", &self.settings).finish_non_exhaustive()
    }
}

/// The last batches.
#[derive(Debug, Default)]
struct Kept {
    batches: VecDeque<(u64, Vec<u8>)>,
    bytes: usize,
    next: u64,
}

impl Kept {
    /// Keeps a batch and returns its number.
    fn push(&mut self, batch: &[u8]) -> u64 {
        let number = self.next;
        self.next += 1;
        self.bytes += batch.len();
        self.batches.push_back((number, batch.to_vec()));
        while self.batches.len() > KEPT || self.bytes > KEPT_BYTES {
            let Some((_, oldest)) = self.batches.pop_front() else { break };
            self.bytes -= oldest.len();
        }
        number
    }
}

impl KvEvents {
    /// Returns a channel for events, and its other end.
    pub fn new() -> (Self, KvReceiver) {
        let (sender, receiver) = unbounded_channel();
        (Self(sender), KvReceiver(receiver))
    }

    /// Returns the sink for the engine of a model.
    pub fn of(&self, model: &str) -> EventSink {
        let (sender, model): (_, Arc<str>) = (self.0.clone(), model.into());
        // Without a publisher, there are no subscribers.
        EventSink(Arc::new(move |events| drop(sender.send((model.clone(), events)))))
    }
}

/// The other end of [`KvEvents`].
#[derive(Debug)]
pub struct KvReceiver(UnboundedReceiver<(Arc<str>, Vec<KvEvent>)>);

impl KvReceiver {
    /// Binds the sockets. Returns the publisher and the addresses of both.
    ///
    /// # Errors
    /// The address that cannot be bound, with the reason.
    pub async fn bind(
        self,
        settings: KvEventsSettings,
    ) -> Result<(KvPublisher, String, Option<String>), String> {
        let mut publisher = PubSocket::new();
        let place = bind(&mut publisher, &settings.endpoint).await?;
        let (mut replay, mut replay_place) = (None, None);
        if let Some(endpoint) = &settings.replay {
            let mut socket = RouterSocket::new();
            replay_place = Some(bind(&mut socket, endpoint).await?);
            replay = Some(socket);
        }
        let publisher = KvPublisher { settings, events: self.0, publisher, replay, kept: Kept::default() };
        Ok((publisher, place, replay_place))
    }
}

async fn bind(socket: &mut impl Socket, endpoint: &str) -> Result<String, String> {
    // `*` is ZeroMQ's word for every address.
    let address = endpoint.replacen("://*:", "://0.0.0.0:", 1);
    let bound = socket.bind(&address).await;
    bound.map(|endpoint| endpoint.to_string()).map_err(|error| format!("cannot bind `{endpoint}`: {error}"))
}

impl KvPublisher {
    /// Publishes events until all senders are gone.
    pub async fn run(mut self) {
        // The prefix caches of a new process are empty.
        self.publish("", &cleared()).await;
        loop {
            let request = async {
                match &mut self.replay {
                    Some(socket) => socket.recv().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                received = self.events.recv() => match received {
                    Some((model, events)) => self.publish(&model, &encode(&events)).await,
                    None => return,
                },
                request = request => match request {
                    Ok(request) => self.answer(request).await,
                    Err(error) => tracing::debug!(%error, "replay of KV events"),
                },
            }
        }
    }

    async fn publish(&mut self, model: &str, batch: &[u8]) {
        let number = self.kept.push(batch);
        let topic = self.settings.topic.replace("{model}", model);
        let frames = [topic.into_bytes(), number.to_be_bytes().to_vec(), batch.to_vec()];
        if let Err(error) = self.publisher.send(message(frames)).await {
            tracing::debug!(%error, "KV events");
        }
    }

    /// Answers `[client, "", number]` with the batches from this number on.
    async fn answer(&mut self, request: ZmqMessage) {
        let Some(socket) = &mut self.replay else { return };
        let frames = request.into_vec();
        let [client, empty, number] = frames.as_slice() else { return };
        let Ok(first) = <[u8; 8]>::try_from(&number[..]) else { return };
        let first = u64::from_be_bytes(first);
        let batches = self.kept.batches.iter().filter(|(number, _)| *number >= first);
        let batches = batches.map(|(number, batch)| (number.to_be_bytes(), batch.as_slice()));
        for (number, batch) in batches.chain([(END.to_be_bytes(), &[][..])]) {
            let frames = [client.to_vec(), empty.to_vec(), number.to_vec(), batch.to_vec()];
            if let Err(error) = socket.send(message(frames)).await {
                tracing::debug!(%error, "replay of KV events");
                return;
            }
        }
    }
}

fn message<const N: usize>(frames: [Vec<u8>; N]) -> ZmqMessage {
    let [first, rest @ ..] = &frames[..] else { return ZmqMessage::from(Vec::new()) };
    let mut message = ZmqMessage::from(first.clone());
    rest.iter().for_each(|frame| message.push_back(frame.clone().into()));
    message
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// Returns a batch of one event: all blocks are gone.
fn cleared() -> Vec<u8> {
    let mut out = Vec::new();
    write(&mut out, |out| {
        rmp::encode::write_array_len(out, 2)?;
        rmp::encode::write_f64(out, now())?;
        rmp::encode::write_array_len(out, 1)?;
        rmp::encode::write_array_len(out, 1)?;
        rmp::encode::write_str(out, "AllBlocksCleared")
    });
    out
}

/// Returns a batch: its time and its events.
fn encode(events: &[KvEvent]) -> Vec<u8> {
    let mut out = Vec::new();
    write(&mut out, |out| {
        rmp::encode::write_array_len(out, 2)?;
        rmp::encode::write_f64(out, now())?;
        rmp::encode::write_array_len(out, events.len() as u32)?;
        events.iter().try_for_each(|event| encode_event(out, event))
    });
    out
}

type Written = Result<(), rmp::encode::ValueWriteError>;

/// Writes to memory, which does not fail.
fn write(out: &mut Vec<u8>, encode: impl FnOnce(&mut Vec<u8>) -> Written) {
    if let Err(error) = encode(out) {
        tracing::error!(%error, "KV events");
    }
}

fn encode_event(out: &mut Vec<u8>, event: &KvEvent) -> Written {
    match event {
        KvEvent::Stored { hashes, parent, tokens, block_size, medium } => {
            rmp::encode::write_array_len(out, 7)?;
            rmp::encode::write_str(out, "BlockStored")?;
            encode_numbers(out, hashes.iter().copied())?;
            match parent {
                Some(parent) => drop(rmp::encode::write_uint(out, *parent)?),
                None => nil(out)?,
            }
            encode_numbers(out, tokens.iter().map(|&token| token.into()))?;
            rmp::encode::write_uint(out, *block_size as u64)?;
            // No adapter.
            nil(out)?;
            rmp::encode::write_str(out, name(*medium))
        }
        KvEvent::Removed { hashes, medium } => {
            rmp::encode::write_array_len(out, 3)?;
            rmp::encode::write_str(out, "BlockRemoved")?;
            encode_numbers(out, hashes.iter().copied())?;
            rmp::encode::write_str(out, name(*medium))
        }
    }
}

fn nil(out: &mut Vec<u8>) -> Written {
    rmp::encode::write_nil(out).map_err(rmp::encode::ValueWriteError::InvalidMarkerWrite)
}

fn encode_numbers(out: &mut Vec<u8>, numbers: impl ExactSizeIterator<Item = u64>) -> Written {
    rmp::encode::write_array_len(out, numbers.len() as u32)?;
    numbers.into_iter().try_for_each(|number| rmp::encode::write_uint(out, number).map(drop))
}

/// vLLM's name of a medium. Pages of a device are `GPU`, also on a CPU: routers know these three.
fn name(medium: Medium) -> &'static str {
    match medium {
        Medium::Device => "GPU",
        Medium::Host => "CPU",
        Medium::Disk => "DISK",
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;
    use zeromq::{ReqSocket, SubSocket};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    fn stored(hash: u64) -> KvEvent {
        KvEvent::Stored {
            hashes: vec![hash],
            parent: None,
            tokens: vec![1, 300],
            block_size: 2,
            medium: Medium::Device,
        }
    }

    #[test]
    fn events_are_arrays_in_the_order_of_vllm() {
        let removed = KvEvent::Removed { hashes: vec![7], medium: Medium::Disk };
        let bytes = encode(&[stored(9), removed]);
        assert_eq!(&bytes[..2], [0x92, 0xcb], "an array of the time and the events");
        let mut expected = vec![0x92, 0x97, 0xab];
        expected.extend(b"BlockStored");
        expected.extend([0x91, 9, 0xc0, 0x92, 1, 0xcd, 1, 44, 2, 0xc0, 0xa3]);
        expected.extend(b"GPU");
        expected.extend([0x93, 0xac]);
        expected.extend(b"BlockRemoved");
        expected.extend([0x91, 7, 0xa4]);
        expected.extend(b"DISK");
        assert_eq!(&bytes[10..], expected);
        assert_eq!(&cleared()[10..], [&[0x91, 0x91, 0xb0], &b"AllBlocksCleared"[..]].concat());
    }

    #[test]
    fn the_last_batches_are_kept() {
        let mut kept = Kept::default();
        for number in 0..KEPT as u64 + 10 {
            assert_eq!(kept.push(b"batch"), number);
        }
        assert_eq!((kept.batches.len(), kept.batches[0].0), (KEPT, 10));
        kept.push(&vec![0; KEPT_BYTES]);
        assert_eq!((kept.batches.len(), kept.bytes), (1, KEPT_BYTES));
    }

    #[tokio::test]
    async fn batches_are_published_and_replayed() {
        let (events, receiver) = KvEvents::new();
        let settings = KvEventsSettings {
            endpoint: "tcp://127.0.0.1:0".into(),
            replay: Some("tcp://127.0.0.1:0".into()),
            topic: "kv@{model}".into(),
        };
        let (publisher, place, replay) = receiver.bind(settings).await.unwrap();
        let task = tokio::spawn(publisher.run());
        let mut subscriber = SubSocket::new();
        subscriber.connect(&place).await.unwrap();
        subscriber.subscribe("kv@fox").await.unwrap();
        let sink = events.of("fox");
        // A subscription takes a moment; events before it are for the replay.
        let first = timeout(PATIENCE, async {
            loop {
                (sink.0)(vec![stored(5)]);
                if let Ok(message) = timeout(Duration::from_millis(20), subscriber.recv()).await {
                    return message.unwrap().into_vec();
                }
            }
        });
        let first = first.await.unwrap();
        assert_eq!((first.len(), &first[0][..]), (3, &b"kv@fox"[..]));
        assert!(u64::from_be_bytes(first[1][..].try_into().unwrap()) >= 1, "number 0 is `AllBlocksCleared`");
        let mut client = ReqSocket::new();
        client.connect(&replay.unwrap()).await.unwrap();
        client.send(ZmqMessage::from(0u64.to_be_bytes().to_vec())).await.unwrap();
        let answer = timeout(PATIENCE, client.recv()).await.unwrap().unwrap().into_vec();
        assert_eq!(&answer[0][..], 0u64.to_be_bytes());
        assert!(answer[1].ends_with(b"AllBlocksCleared"));
        drop((events, sink));
        timeout(PATIENCE, task).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn an_address_that_cannot_be_bound_is_named() {
        let (_, receiver) = KvEvents::new();
        let settings = KvEventsSettings { endpoint: "nonsense".into(), ..KvEventsSettings::default() };
        let error = receiver.bind(settings).await.unwrap_err();
        assert!(error.starts_with("cannot bind `nonsense`: "), "{error}");
    }
}
