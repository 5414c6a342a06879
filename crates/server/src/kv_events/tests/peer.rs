//! A peer of the sockets that can send any bytes.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use paguro_engine::{EventSink, KvEvent, Medium};

use super::super::{KvEncoding, KvEvents, KvEventsSettings};

/// Longest wait for anything.
const PATIENCE: Duration = Duration::from_secs(60);

pub const MORE: u8 = 1;
pub const LONG: u8 = 2;
pub const COMMAND: u8 = 4;

/// Both sockets, and an engine that sends events.
pub struct Ports {
    pub publisher: SocketAddr,
    pub replay: SocketAddr,
    pub engine: EventSink,
}

impl Ports {
    pub fn open() -> Self {
        let (events, receiver) = KvEvents::new();
        let any = "tcp://127.0.0.1:*".to_owned();
        let settings = KvEventsSettings {
            endpoint: any.clone(),
            replay: Some(any),
            topic: "kv@{model}".into(),
            encoding: KvEncoding::Map,
        };
        let (publisher, places) = receiver.bind(settings).unwrap();
        publisher.start().unwrap();
        let address = |place: &str| place.strip_prefix("tcp://").unwrap().parse().unwrap();
        Self {
            publisher: address(&places.endpoint),
            replay: address(&places.replay.unwrap()),
            engine: events.of("fox"),
        }
    }

    /// Publishes a batch.
    pub fn publish(&self, hashes: usize) {
        (self.engine.0)(vec![KvEvent::Removed { hashes: vec![u64::MAX; hashes], medium: Medium::Device }]);
    }

    /// A subscriber whose subscription is known to the server.
    pub fn subscriber(&self) -> Peer {
        let mut peer = Peer::open(self.publisher, "SUB");
        peer.send(&command(b"\x09SUBSCRIBEkv@"));
        // The newest batch, again.
        assert!(peer.message()[0].starts_with(b"kv@"));
        peer.ping();
        peer
    }

    /// Requests all batches from a number on, as a DEALER socket does. Returns their numbers.
    pub fn replay(&self, first: u64) -> Vec<u64> {
        let mut peer = Peer::open(self.replay, "DEALER");
        peer.send(&request(first));
        let mut numbers = Vec::new();
        loop {
            let message = peer.message();
            let [empty, topic, number, batch] = &message[..] else { panic!("{message:?}") };
            assert!(empty.is_empty());
            let number = u64::from_be_bytes(number[..].try_into().unwrap());
            if number == u64::MAX {
                assert!(batch.is_empty() && topic.is_empty());
                return numbers;
            }
            assert!(!batch.is_empty() && topic.starts_with(b"kv@"));
            numbers.push(number);
        }
    }
}

pub struct Peer(pub TcpStream);

impl Peer {
    pub fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        Self(stream)
    }

    /// Connects and finishes the handshake.
    pub fn open(address: SocketAddr, kind: &str) -> Self {
        let mut peer = Self::connect(address);
        peer.send(&greeting(3, 1, b"NULL", 0));
        peer.send(&ready("Socket-Type", kind));
        peer.welcome();
        peer
    }

    /// Reads the server's side of the handshake.
    pub fn welcome(&mut self) {
        let greeting = self.read(64);
        assert_eq!((greeting[0], &greeting[9..16]), (0xff, &b"\x7f\x03\x01NULL"[..]));
        let (flags, body) = self.frame();
        assert_eq!((flags, &body[..18]), (COMMAND, &b"\x05READY\x0bSocket-Type"[..]));
    }

    /// Sends bytes. The server may have closed the connection.
    pub fn send(&mut self, bytes: &[u8]) {
        let _ = self.0.write_all(bytes);
    }

    fn read(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.0.read_exact(&mut bytes).unwrap();
        bytes
    }

    /// Reads a frame; its flags are without `LONG`.
    pub fn frame(&mut self) -> (u8, Vec<u8>) {
        let flags = self.read(1)[0];
        let length = match flags & LONG {
            0 => self.read(1)[0].into(),
            _ => u64::from_be_bytes(self.read(8).try_into().unwrap()),
        };
        (flags & !LONG, self.read(length as usize))
    }

    /// Reads a message.
    pub fn message(&mut self) -> Vec<Vec<u8>> {
        let mut parts = Vec::new();
        loop {
            let (flags, body) = self.frame();
            assert_eq!(flags & COMMAND, 0, "{body:?}");
            parts.push(body);
            if flags & MORE == 0 {
                return parts;
            }
        }
    }

    /// Reads a batch of a subscriber. Returns its number.
    pub fn batch(&mut self) -> u64 {
        let message = self.message();
        let [topic, number, batch] = &message[..] else { panic!("{message:?}") };
        assert_eq!((&topic[..], batch.is_empty()), (&b"kv@fox"[..], false));
        u64::from_be_bytes(number[..].try_into().unwrap())
    }

    /// Waits until the server has obeyed all that was sent before.
    pub fn ping(&mut self) {
        self.send(&command(b"\x04PING\x00\x64fox"));
        assert_eq!(self.frame(), (COMMAND, b"\x04PONGfox".to_vec()));
    }

    /// Waits until the server has obeyed all that was sent before, and skips batches.
    pub fn settle(&mut self) {
        self.send(&command(b"\x04PING\x00\x64fox"));
        while self.frame() != (COMMAND, b"\x04PONGfox".to_vec()) {}
    }

    /// Reads until the server closes the connection. Returns what it has sent before.
    pub fn closed(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        match self.0.read_to_end(&mut bytes) {
            Err(error) if error.kind() != std::io::ErrorKind::ConnectionReset => {
                panic!("the connection is open: {error}")
            }
            _ => bytes,
        }
    }
}

/// The beginning of a connection.
pub fn greeting(major: u8, minor: u8, mechanism: &[u8], as_server: u8) -> Vec<u8> {
    let mut bytes = vec![0; 64];
    (bytes[0], bytes[9], bytes[10], bytes[11]) = (0xff, 0x7f, major, minor);
    bytes[12..12 + mechanism.len()].copy_from_slice(mechanism);
    bytes[32] = as_server;
    bytes
}

/// A frame with these flags; it is long if it must be.
pub fn frame(flags: u8, body: &[u8]) -> Vec<u8> {
    match u8::try_from(body.len()) {
        Ok(length) => [&[flags, length], body].concat(),
        Err(_) => [&announced(flags, body.len() as u64), body].concat(),
    }
}

/// The head of a long frame.
pub fn announced(flags: u8, length: u64) -> Vec<u8> {
    [&[flags | LONG], &length.to_be_bytes()[..]].concat()
}

pub fn command(body: &[u8]) -> Vec<u8> {
    frame(COMMAND, body)
}

/// A READY with one property.
pub fn ready(name: &str, value: &str) -> Vec<u8> {
    let mut body = b"\x05READY".to_vec();
    body.push(name.len() as u8);
    body.extend(name.as_bytes());
    body.extend((value.len() as u32).to_be_bytes());
    body.extend(value.as_bytes());
    command(&body)
}

/// A request for replay from a number on.
pub fn request(first: u64) -> Vec<u8> {
    [frame(MORE, b""), frame(0, &first.to_be_bytes())].concat()
}
