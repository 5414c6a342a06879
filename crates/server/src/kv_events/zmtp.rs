//! The wire protocol of ZeroMQ, as far as PUB and ROUTER sockets need it: ZMTP 3.1 (RFC 37) and 3.0 (RFC 23) with the mechanism NULL.
//!
//! Peers are not trusted. A length is checked before any memory is reserved for it, and each wait has a limit.

use std::{io, time::Duration};

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    time::{Instant, sleep_until, timeout, timeout_at},
};

/// Maximum bytes of a frame, and of a message, from a peer. Subscriptions and requests for replay have some dozens.
pub const MESSAGE_BYTES: usize = 64 << 10;
/// Maximum number of frames in a message from a peer.
const MESSAGE_FRAMES: usize = 16;
/// Maximum time of a handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Maximum time for the rest of a frame to arrive, and for a peer to accept [`CHUNK`] bytes.
const STALL: Duration = Duration::from_secs(30);
/// Bytes that are written at once.
const CHUNK: usize = 64 << 10;
/// Bytes that are read at once.
const READ: usize = 4 << 10;
/// Budget of a peer for each second: frames cost one, and 64 of their bytes one more. Further frames wait, so that no peer occupies
/// the thread.
const BUDGET: usize = 1000;
/// Maximum bytes of a PING's context, which is returned (RFC 37).
const CONTEXT: usize = 16;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// Reason why a connection ends.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// The peer has disconnected, or the network failed.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The peer was too slow.
    #[error("no {0} in time")]
    Slow(&'static str),
    /// The peer violates the protocol, or uses a part that is not supported.
    #[error("{0}")]
    Protocol(&'static str),
    /// A frame is too long.
    #[error("a frame of {0} bytes; at most {MESSAGE_BYTES} are accepted")]
    Long(u64),
}

/// A kind of socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Sends messages to subscribers.
    Pub,
    /// Answers requests.
    Router,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Pub => "PUB",
            Self::Router => "ROUTER",
        }
    }

    /// Kinds of sockets that may connect.
    fn peers(self) -> &'static [&'static str] {
        match self {
            Self::Pub => &["SUB", "XSUB"],
            Self::Router => &["REQ", "DEALER", "ROUTER"],
        }
    }
}

/// A frame from a peer.
#[derive(Debug, PartialEq, Eq)]
pub struct Frame {
    /// True for a command, false for a part of a message.
    pub command: bool,
    /// True if the message has more parts.
    pub more: bool,
    pub body: Vec<u8>,
}

impl Frame {
    /// Reads the first frame. Returns it with its bytes on the wire, or `None` if it is incomplete.
    fn parse(bytes: &[u8]) -> Result<Option<(Self, usize)>, Fault> {
        let Some(&flags) = bytes.first() else { return Ok(None) };
        let (command, more) = (flags & COMMAND != 0, flags & MORE != 0);
        if flags & !(MORE | LONG | COMMAND) != 0 || command && more {
            return Err(Fault::Protocol("a frame with unknown flags"));
        }
        let (begin, length) = if flags & LONG == 0 {
            let Some(&length) = bytes.get(1) else { return Ok(None) };
            (2, u64::from(length))
        } else {
            let Some(length) = bytes.get(1..9).and_then(|length| length.try_into().ok()) else {
                return Ok(None);
            };
            (9, u64::from_be_bytes(length))
        };
        if length > MESSAGE_BYTES as u64 {
            return Err(Fault::Long(length));
        }
        let end = begin + length as usize;
        let frame = |body: &[u8]| (Self { command, more, body: body.to_vec() }, end);
        Ok(bytes.get(begin..end).map(frame))
    }

    /// Splits the body of a command into name and data.
    fn named(&self) -> Result<(&[u8], &[u8]), Fault> {
        let fault = Fault::Protocol("a command without a name");
        let Some((&length, rest)) = self.body.split_first() else { return Err(fault) };
        rest.split_at_checked(length.into()).ok_or(fault)
    }

    /// Reads a command. Unknown ones are ignored, as the protocol wants.
    pub fn as_command(&self) -> Result<Command<'_>, Fault> {
        Ok(match self.named()? {
            (b"SUBSCRIBE", topic) => Command::Subscribe(topic),
            (b"CANCEL", topic) => Command::Cancel(topic),
            // Two bytes of a time after which the peer may be given up.
            (b"PING", [_, _, context @ ..]) if context.len() <= CONTEXT => Command::Ping(context),
            (b"PING", _) => return Err(Fault::Protocol("a malformed PING")),
            (b"ERROR", _) => return Err(Fault::Protocol("the peer reports an error")),
            (b"READY", _) => return Err(Fault::Protocol("a second READY")),
            _ => Command::Unknown,
        })
    }
}

/// A command after the handshake.
#[derive(Debug, PartialEq, Eq)]
pub enum Command<'a> {
    Subscribe(&'a [u8]),
    Cancel(&'a [u8]),
    Ping(&'a [u8]),
    Unknown,
}

/// Appends the head of a frame.
fn head(flags: u8, length: usize, out: &mut Vec<u8>) {
    match u8::try_from(length) {
        Ok(length) => out.extend([flags, length]),
        Err(_) => {
            out.push(flags | LONG);
            out.extend((length as u64).to_be_bytes());
        }
    }
}

/// Returns a frame of a message.
pub fn part(body: &[u8], more: bool) -> Vec<u8> {
    let mut out = Vec::with_capacity(body.len() + 9);
    head(if more { MORE } else { 0 }, body.len(), &mut out);
    out.extend(body);
    out
}

/// Returns the frame of a command.
fn command(name: &str, data: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    head(COMMAND, 1 + name.len() + data.len(), &mut out);
    out.push(name.len() as u8);
    out.extend(name.as_bytes());
    out.extend(data);
    out
}

/// Returns the answer to a PING.
pub fn pong(context: &[u8]) -> Vec<u8> {
    command("PONG", context)
}

/// Returns the 64 bytes that begin a connection.
fn greeting() -> [u8; 64] {
    let mut greeting = [0; 64];
    (greeting[0], greeting[9]) = (0xff, 0x7f);
    (greeting[10], greeting[11]) = (3, 1);
    greeting[12..16].copy_from_slice(b"NULL");
    greeting
}

/// Checks as many bytes of the peer's greeting as there are.
fn check_greeting(bytes: &[u8]) -> Result<(), Fault> {
    let is_old = |at: usize| bytes.get(at).is_some_and(|&byte| byte & 1 == 0);
    if bytes.first().is_some_and(|&byte| byte != 0xff) || is_old(9) {
        return Err(Fault::Protocol("the peer does not speak ZMTP 3"));
    }
    if bytes.get(10).is_some_and(|&major| major < 3) {
        return Err(Fault::Protocol("the peer speaks an older ZMTP"));
    }
    let null = *b"NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    if bytes.get(12..32).is_some_and(|mechanism| mechanism != null) {
        return Err(Fault::Protocol("the peer wants another mechanism than NULL"));
    }
    Ok(())
}

/// Returns the value of `Socket-Type` among the properties of a READY.
fn socket_type(mut properties: &[u8]) -> Result<Option<&[u8]>, Fault> {
    let mut found = None;
    while let Some((&length, rest)) = properties.split_first() {
        let property = || {
            let (name, rest) = rest.split_at_checked(length.into())?;
            let (length, rest) = rest.split_first_chunk()?;
            let (value, rest) = rest.split_at_checked(u32::from_be_bytes(*length).try_into().ok()?)?;
            Some((name, value, rest))
        };
        let Some((name, value, rest)) = property() else {
            return Err(Fault::Protocol("a malformed READY"));
        };
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            found = Some(value);
        }
        properties = rest;
    }
    Ok(found)
}

/// The receiving half of a connection.
#[derive(Debug)]
pub struct Input<R> {
    from: R,
    buffer: Vec<u8>,
    /// Bytes of the buffer that were read.
    read: usize,
    /// Begin of the current second, and the part of the budget that was used.
    second: (Instant, usize),
}

impl<R: AsyncRead + Unpin> Input<R> {
    pub fn new(from: R) -> Self {
        Self { from, buffer: Vec::new(), read: 0, second: (Instant::now(), 0) }
    }

    /// Reads more bytes. The buffer grows with what arrives and not with what was announced.
    async fn fill(&mut self) -> Result<(), Fault> {
        self.buffer.drain(..std::mem::take(&mut self.read));
        self.buffer.reserve(READ);
        let arrived = (&mut self.from).take(READ as u64).read_buf(&mut self.buffer).await?;
        if arrived == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        Ok(())
    }

    async fn greeting(&mut self) -> Result<(), Fault> {
        while self.buffer.len() < greeting().len() {
            self.fill().await?;
            check_greeting(&self.buffer)?;
        }
        self.read = greeting().len();
        Ok(())
    }

    /// Waits for the next frame. Losing this future loses no bytes.
    pub async fn frame(&mut self) -> Result<Frame, Fault> {
        let mut deadline = None;
        loop {
            if let Some((frame, length)) = Frame::parse(&self.buffer[self.read..])? {
                self.pace(1 + length / 64).await;
                self.read += length;
                return Ok(frame);
            }
            if self.read == self.buffer.len() {
                // Peers may be silent between frames. Their buffer is released.
                (self.buffer, self.read) = (Vec::new(), 0);
                self.fill().await?;
            } else {
                let deadline = *deadline.get_or_insert_with(|| Instant::now() + STALL);
                let slow = |_| Fault::Slow("rest of a frame");
                timeout_at(deadline, self.fill()).await.map_err(slow)??;
            }
        }
    }

    /// Waits for the next second if this peer has used its budget.
    async fn pace(&mut self, cost: usize) {
        let (begin, used) = self.second;
        let end = begin + Duration::from_secs(1);
        if Instant::now() >= end {
            self.second = (Instant::now(), cost);
        } else if used < BUDGET {
            self.second = (begin, used + cost);
        } else {
            sleep_until(end).await;
            self.second = (end, cost);
        }
    }

    /// Waits for the next message. A PING before or in it is answered.
    pub async fn message<O: AsyncWrite + Unpin>(
        &mut self,
        output: &mut Output<O>,
    ) -> Result<Vec<Vec<u8>>, Fault> {
        let (mut parts, mut bytes) = (Vec::new(), 0);
        loop {
            let frame = self.frame().await?;
            if frame.command {
                if let Command::Ping(context) = frame.as_command()? {
                    output.push(&pong(context)).await?;
                    output.flush().await?;
                }
                continue;
            }
            bytes += frame.body.len();
            parts.push(frame.body);
            if bytes > MESSAGE_BYTES || parts.len() > MESSAGE_FRAMES {
                return Err(Fault::Protocol("a message with too many parts"));
            }
            if !frame.more {
                return Ok(parts);
            }
        }
    }
}

/// The sending half of a connection. It collects small frames and writes them together.
#[derive(Debug)]
pub struct Output<W> {
    to: W,
    buffer: Vec<u8>,
}

impl<W: AsyncWrite + Unpin> Output<W> {
    pub fn new(to: W) -> Self {
        Self { to, buffer: Vec::new() }
    }

    /// Sends bytes, the small ones with the next [`Output::flush`].
    pub async fn push(&mut self, bytes: &[u8]) -> Result<(), Fault> {
        if self.buffer.len() + bytes.len() > CHUNK {
            self.flush().await?;
        }
        if bytes.len() < CHUNK {
            self.buffer.extend(bytes);
            return Ok(());
        }
        for chunk in bytes.chunks(CHUNK) {
            Self::write(&mut self.to, chunk).await?;
        }
        Ok(())
    }

    /// Sends a part of a message.
    pub async fn part(&mut self, body: &[u8], more: bool) -> Result<(), Fault> {
        let mut bytes = Vec::with_capacity(9);
        head(if more { MORE } else { 0 }, body.len(), &mut bytes);
        self.push(&bytes).await?;
        self.push(body).await
    }

    /// Writes the collected bytes. Idle connections keep no buffer.
    pub async fn flush(&mut self) -> Result<(), Fault> {
        let bytes = std::mem::take(&mut self.buffer);
        if bytes.is_empty() { Ok(()) } else { Self::write(&mut self.to, &bytes).await }
    }

    async fn write(to: &mut W, bytes: &[u8]) -> Result<(), Fault> {
        let written = timeout(STALL, to.write_all(bytes)).await;
        Ok(written.map_err(|_| Fault::Slow("reading of messages"))??)
    }
}

/// Exchanges greetings and the kinds of sockets with a peer.
///
/// # Errors
/// Another version, mechanism or kind of socket, or no handshake in time.
pub async fn handshake<R: AsyncRead + Unpin, W: AsyncWrite + Unpin>(
    kind: Kind,
    input: &mut Input<R>,
    output: &mut Output<W>,
) -> Result<(), Fault> {
    let exchange = async {
        output.push(&greeting()).await?;
        output.flush().await?;
        input.greeting().await?;
        let mut properties = vec![11];
        properties.extend(b"Socket-Type");
        properties.extend((kind.name().len() as u32).to_be_bytes());
        properties.extend(kind.name().as_bytes());
        output.push(&command("READY", &properties)).await?;
        output.flush().await?;
        let frame = input.frame().await?;
        let ready = match frame.named() {
            Ok((b"READY", properties)) if frame.command => properties,
            _ => return Err(Fault::Protocol("no READY after the greeting")),
        };
        let peer = socket_type(ready)?;
        if peer.is_some_and(|peer| kind.peers().iter().any(|name| name.as_bytes() == peer)) {
            return Ok(());
        }
        let reason = "Invalid socket type";
        output.push(&command("ERROR", &[&[reason.len() as u8], reason.as_bytes()].concat())).await?;
        output.flush().await?;
        Err(Fault::Protocol("the peer is a socket of another kind"))
    };
    timeout(HANDSHAKE, exchange).await.map_err(|_| Fault::Slow("handshake"))?
}
