//! The ROUTER socket, which repeats batches as `[topic, number, batch]`, and ends with -1 as the number and an empty topic. A replay reads the shared batches while it writes, and the next request of the same
//! client is read when the replay has ended. So a client that does not read keeps no memory of the server.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    time::{Instant, sleep_until},
};

use super::{
    encode::KvEncoding,
    places::{Phase, Place},
    store::Store,
    zmtp::{Fault, Input, Kind, Output, handshake, part},
};

/// Number behind the last batch of a replay.
const END: i64 = -1;
/// Bytes per second of all replays together, so that they do not take the processor from the engine.
const BYTES_PER_SECOND: u64 = 128 << 20;
/// Maximum bytes of the envelope that is repeated with each batch.
const ENVELOPE: usize = 256;

/// Rate of all replays.
#[derive(Debug)]
pub struct Pace(Mutex<Instant>);

impl Pace {
    pub fn new() -> Self {
        Self(Mutex::new(Instant::now()))
    }

    /// Waits until `bytes` more bytes may be sent.
    async fn wait(&self, bytes: usize) {
        let time = Duration::from_nanos(bytes as u64 * 1_000_000_000 / BYTES_PER_SECOND);
        let start = {
            let mut next = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let start = Instant::now().max(*next);
            *next = start + time;
            start
        };
        sleep_until(start).await;
    }
}

/// A request for replay.
#[derive(Debug, PartialEq, Eq)]
struct Request {
    /// Frames up to the empty one, as they are repeated: nothing but the empty one for REQ and DEALER sockets, and an id before it
    /// for REQ sockets that correlate.
    envelope: Vec<u8>,
    /// Number of the first wanted batch.
    first: u64,
}

impl Request {
    /// Reads `["", number]`. Returns `None` for other messages, which vLLM ignores as well.
    fn parse(parts: &[Vec<u8>]) -> Option<Self> {
        let (number, envelope) = parts.split_last()?;
        let (empty, ids) = envelope.split_last()?;
        let envelope: Vec<u8> = envelope.iter().flat_map(|frame| part(frame, true)).collect();
        let is_envelope = empty.is_empty() && ids.iter().all(|id| !id.is_empty());
        let first = u64::from_be_bytes(number.as_slice().try_into().ok()?);
        (is_envelope && envelope.len() <= ENVELOPE).then_some(Self { envelope, first })
    }

    /// Sends the batches that were published before this request.
    async fn answer<W: AsyncWrite + Unpin>(
        &self,
        output: &mut Output<W>,
        (store, pace, form): (&Store, &Pace, KvEncoding),
    ) -> Result<(), Fault> {
        // vLLM sends no topics with arrays.
        let has_topic = form == KvEncoding::Map;
        let (mut next, end) = (self.first, *store.next().borrow());
        while next < end {
            let batches = store.from(next);
            let Some(last) = batches.last() else { break };
            next = last.number + 1;
            for published in batches.iter().take_while(|published| published.number < end) {
                pace.wait(self.envelope.len() + published.batch.len()).await;
                output.push(&self.envelope).await?;
                if has_topic {
                    output.part(&published.topic, true).await?;
                }
                output.part(&published.number.to_be_bytes(), true).await?;
                output.part(&published.batch, false).await?;
            }
            tokio::task::yield_now().await;
        }
        output.push(&self.envelope).await?;
        if has_topic {
            output.part(&[], true).await?;
        }
        output.part(&END.to_be_bytes(), true).await?;
        output.part(&[], false).await?;
        output.flush().await
    }
}

async fn listen<R: AsyncRead + Unpin, W: AsyncWrite + Unpin>(
    input: &mut Input<R>,
    output: &mut Output<W>,
    place: &Place,
    from: (&Store, &Pace, KvEncoding),
) -> Result<(), Fault> {
    loop {
        place.set(Phase::Idle);
        let message = input.message(output).await?;
        let Some(request) = Request::parse(&message) else {
            tracing::debug!("KV events: an invalid request for replay");
            continue;
        };
        place.set(Phase::Busy);
        request.answer(output, from).await?;
    }
}

/// Serves a client until it leaves.
pub async fn serve(
    stream: TcpStream,
    place: Place,
    (store, pace, form): (&Store, &Pace, KvEncoding),
) -> Result<(), Fault> {
    let (from, to) = stream.into_split();
    let (mut input, mut output) = (Input::new(from), Output::new(to));
    handshake(Kind::Router, &mut input, &mut output).await?;
    listen(&mut input, &mut output, &place, (store, pace, form)).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_have_an_envelope_and_a_number() {
        let parse =
            |parts: &[&[u8]]| Request::parse(&parts.iter().map(|part| part.to_vec()).collect::<Vec<_>>());
        let number = 7u64.to_be_bytes();
        let long = [b'x'; ENVELOPE];
        assert_eq!(parse(&[b"", &number]), Some(Request { envelope: vec![1, 0], first: 7 }));
        let correlated = Request { envelope: vec![1, 2, b'i', b'd', 1, 0], first: 7 };
        assert_eq!(parse(&[b"id", b"", &number]), Some(correlated));
        let others: [&[&[u8]]; 6] =
            [&[], &[&number], &[b"", b"7"], &[b"x", &number], &[b"", b"", &number], &[&long, b"", &number]];
        for other in others {
            assert_eq!(parse(other), None, "{other:?}");
        }
    }
}
