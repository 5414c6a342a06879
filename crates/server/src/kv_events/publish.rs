//! The PUB socket. Each subscriber reads the shared batches at its own speed; one that is too slow misses the oldest.
//!
//! A new subscription begins with the newest batch of its topics again. Its number shows a reader how many it has missed, so that a
//! router that was restarted requests a replay at once, and not after the next change.

use std::{
    collections::BTreeSet,
    ops::Bound,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    sync::Notify,
};

use super::{
    places::{Phase, Place},
    store::Store,
    zmtp::{Command, Fault, Input, Kind, Output, handshake, pong},
};

/// Maximum number of subscriptions of a connection.
const SUBSCRIPTIONS: usize = 1024;
/// Maximum bytes of these.
const SUBSCRIPTION_BYTES: usize = 64 << 10;

/// Prefixes of topics that a subscriber wants.
#[derive(Debug, Default)]
struct Topics {
    prefixes: BTreeSet<Vec<u8>>,
    bytes: usize,
}

impl Topics {
    fn add(&mut self, prefix: &[u8]) -> Result<(), Fault> {
        if self.prefixes.contains(prefix) {
            return Ok(());
        }
        self.bytes += prefix.len();
        if self.prefixes.len() >= SUBSCRIPTIONS || self.bytes > SUBSCRIPTION_BYTES {
            return Err(Fault::Protocol("too many subscriptions"));
        }
        self.prefixes.insert(prefix.to_vec());
        Ok(())
    }

    fn remove(&mut self, prefix: &[u8]) {
        if self.prefixes.remove(prefix) {
            self.bytes -= prefix.len();
        }
    }

    /// Returns true if a prefix of the topic is subscribed. The search takes few steps for any number of prefixes: the largest
    /// entry that is not greater than the topic is a prefix of it, or shares a beginning with it in which all others are.
    fn has(&self, mut topic: &[u8]) -> bool {
        loop {
            let mut below = self.prefixes.range::<[u8], _>((Bound::Unbounded, Bound::Included(topic)));
            let Some(candidate) = below.next_back() else { return false };
            if topic.starts_with(candidate) {
                return true;
            }
            let common = topic.iter().zip(candidate).take_while(|(a, b)| a == b).count();
            topic = &topic[..common];
        }
    }
}

/// State that the two halves of a connection share.
#[derive(Debug, Default)]
struct Subscriber {
    topics: Mutex<Topics>,
    /// Answer to the last PING.
    pong: Mutex<Option<Vec<u8>>>,
    /// True if there is a new subscription.
    is_new: AtomicBool,
    wake: Notify,
}

impl Subscriber {
    fn topics(&self) -> MutexGuard<'_, Topics> {
        self.topics.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pong(&self) -> MutexGuard<'_, Option<Vec<u8>>> {
        self.pong.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn subscribe(&self, topic: &[u8]) -> Result<(), Fault> {
        self.topics().add(topic)?;
        self.is_new.store(true, Ordering::Release);
        self.wake.notify_one();
        Ok(())
    }

    /// Obeys the peer. Returns only with the fault that ends the connection.
    async fn listen<R: AsyncRead + Unpin>(&self, input: &mut Input<R>, place: &Place) -> Result<(), Fault> {
        let mut inside = false;
        loop {
            let frame = input.frame().await?;
            if frame.command {
                match frame.as_command()? {
                    Command::Subscribe(topic) => self.subscribe(topic)?,
                    Command::Cancel(topic) => self.topics().remove(topic),
                    Command::Ping(context) => {
                        *self.pong() = Some(pong(context));
                        self.wake.notify_one();
                    }
                    Command::Unknown => {}
                }
            } else {
                // ZMTP 3.0 has messages for subscriptions. Others, of XSUB sockets, have no receiver here.
                match frame.body.split_first() {
                    Some((1, topic)) if !inside && !frame.more => self.subscribe(topic)?,
                    Some((0, topic)) if !inside && !frame.more => self.topics().remove(topic),
                    _ => {}
                }
                inside = frame.more;
            }
            place.set(if self.topics().prefixes.is_empty() { Phase::Idle } else { Phase::Busy });
        }
    }

    /// Sends batches to the peer.
    async fn publish<W: AsyncWrite + Unpin>(
        &self,
        output: &mut Output<W>,
        store: &Store,
    ) -> Result<(), Fault> {
        let mut news = store.next();
        let mut next = *news.borrow_and_update();
        loop {
            let pong = self.pong().take();
            if let Some(pong) = pong {
                output.push(&pong).await?;
            }
            if self.is_new.swap(false, Ordering::Acquire) {
                let newest = store.newest(|topic| self.topics().has(topic));
                next = newest.map_or(next, |newest| next.min(newest));
            }
            let batches = store.from(next);
            for published in &batches {
                next = published.number + 1;
                if self.topics().has(&published.topic) {
                    output.part(&published.topic, true).await?;
                    output.part(&published.number.to_be_bytes(), true).await?;
                    output.part(&published.batch, false).await?;
                }
            }
            output.flush().await?;
            if batches.is_empty() {
                tokio::select! {
                    changed = news.changed() => if changed.is_err() { return Ok(()) },
                    () = self.wake.notified() => {}
                }
            } else {
                tokio::task::yield_now().await;
            }
        }
    }
}

/// Serves a subscriber until it leaves.
pub async fn serve(stream: TcpStream, place: Place, store: &Store) -> Result<(), Fault> {
    let (from, to) = stream.into_split();
    let (mut input, mut output) = (Input::new(from), Output::new(to));
    handshake(Kind::Pub, &mut input, &mut output).await?;
    place.set(Phase::Idle);
    let subscriber = Subscriber::default();
    tokio::select! {
        ended = subscriber.listen(&mut input, &place) => ended,
        ended = subscriber.publish(&mut output, store) => ended,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tokio::io::{AsyncReadExt, duplex};

    use super::{
        super::{store::KEPT, zmtp::part},
        *,
    };

    #[tokio::test]
    async fn a_subscriber_that_does_not_read_misses_the_oldest_batches() {
        let store = Store::new();
        let subscriber = Subscriber::default();
        subscriber.topics().add(b"fox").unwrap();
        let (to, mut from) = duplex(256);
        let mut output = Output::new(to);
        let read = async {
            tokio::task::yield_now().await;
            for number in 0..3 * KEPT as u64 {
                store.push(b"fox".to_vec(), number.to_be_bytes().to_vec());
                store.push(b"owl".to_vec(), Vec::new());
                // The writer goes on until its pipe is full.
                tokio::task::yield_now().await;
            }
            let length = part(b"fox", true).len() + 2 * part(&[0; 8], true).len();
            let mut numbers = Vec::new();
            while numbers.last() != Some(&(6 * KEPT as u64 - 2)) {
                let mut message = vec![0; length];
                from.read_exact(&mut message).await.unwrap();
                let number = |at: usize| u64::from_be_bytes(message[at..at + 8].try_into().unwrap());
                assert_eq!(number(length - 18), 2 * number(length - 8), "a batch has its number");
                numbers.push(number(length - 18));
            }
            numbers
        };
        let numbers = tokio::select! {
            ended = subscriber.publish(&mut output, &store) => panic!("{ended:?}"),
            numbers = read => numbers,
        };
        let gaps: Vec<_> = numbers.windows(2).filter(|pair| pair[1] != pair[0] + 2).collect();
        let [gap] = gaps[..] else { panic!("{gaps:?}") };
        assert!(gap[0] < 2 * KEPT as u64 && gap[1] == 5 * KEPT as u64, "{gap:?}");
    }

    proptest! {
        #[test]
        fn a_topic_matches_if_it_begins_with_a_subscription(
            prefixes in prop::collection::vec("[ab]{0,5}", 0..12),
            removed in prop::collection::vec("[ab]{0,5}", 0..4),
            topic in "[ab]{0,7}",
        ) {
            let mut topics = Topics::default();
            prefixes.iter().for_each(|prefix| topics.add(prefix.as_bytes()).unwrap());
            removed.iter().for_each(|prefix| topics.remove(prefix.as_bytes()));
            let left = prefixes.iter().filter(|prefix| !removed.contains(prefix));
            let expected = left.clone().any(|prefix| topic.starts_with(prefix.as_str()));
            prop_assert_eq!(topics.has(topic.as_bytes()), expected);
            let bytes: usize = left.collect::<BTreeSet<_>>().iter().map(|prefix| prefix.len()).sum();
            prop_assert_eq!(topics.bytes, bytes);
        }
    }
}
