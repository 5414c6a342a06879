//! Random peers of both sockets: bytes, frames and messages, well-formed ones and others, in any order. One subscriber must receive
//! every batch.
//!
//! `PAGURO_FUZZ_CASES` sets their number (300), `PAGURO_FUZZ_SEED` the seed (1).

use std::{
    env,
    io::Read,
    panic,
    sync::{Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use super::peer::{MORE, Peer, Ports, announced, command, frame, greeting, ready, request};

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }

    fn once_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    fn pick<'a, T: ?Sized>(&mut self, items: &[&'a T]) -> &'a T {
        items[self.below(items.len())]
    }

    /// Bytes, few of them most of the time.
    fn bytes(&mut self) -> Vec<u8> {
        let limit = *self.pick(&[&1, &20, &300, &70_000]);
        (0..self.below(limit)).map(|_| self.next() as u8).collect()
    }

    fn handshake(&mut self) -> Vec<u8> {
        let mechanism = self.pick(&[b"NULL", b"NULL", b"NULL", b"PLAI", b"\0ULL"]);
        let major = if self.once_in(8) { self.next() as u8 } else { 3 };
        let mut bytes = greeting(major, self.next() as u8 % 3, mechanism, self.next() as u8 % 2);
        let kind = self.pick(&["SUB", "SUB", "XSUB", "REQ", "REQ", "DEALER", "ROUTER", "PUB", ""]);
        bytes.extend(ready(self.pick(&["Socket-Type", "Socket-Type", "socket-type", "Identity"]), kind));
        bytes
    }

    fn frame(&mut self) -> Vec<u8> {
        match self.below(12) {
            0 => announced(self.next() as u8, 1 << self.below(64)),
            1 => frame(self.next() as u8, &self.bytes()),
            2 => command(&self.bytes()),
            3 => command(&[b"\x04PING\0\0", &self.bytes()[..]].concat()),
            4 | 5 => command(&[b"\x09SUBSCRIBE", &self.bytes()[..]].concat()),
            6 => command(&[b"\x06CANCEL", &self.bytes()[..]].concat()),
            7 => frame(0, &[&[self.next() as u8 % 3], &b"kv@fox"[..self.below(7)]].concat()),
            8 => frame(MORE, &self.bytes()),
            9 => command(b"\x09SUBSCRIBE").repeat(self.below(3000)),
            10 => request(self.next() >> self.below(64)).repeat(1 + self.below(50)),
            _ => [frame(MORE, b"id"), request(0)].concat(),
        }
    }

    /// Bytes of a connection.
    fn script(&mut self) -> Vec<u8> {
        let mut bytes = if self.once_in(6) { self.bytes() } else { self.handshake() };
        for _ in 0..self.below(8) {
            bytes.extend(self.frame());
        }
        if self.once_in(4) && !bytes.is_empty() {
            for _ in 0..1 + self.below(4) {
                let at = self.below(bytes.len());
                bytes[at] = self.next() as u8;
            }
        }
        if self.once_in(4) {
            bytes.truncate(self.below(bytes.len()));
        }
        bytes
    }
}

fn number(name: &str) -> Option<u64> {
    env::var(name).ok()?.parse().ok()
}

#[test]
fn random_peers_cost_a_subscriber_no_batch() {
    static PANICS: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let panics = || PANICS.lock().unwrap_or_else(PoisonError::into_inner);
    let others = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        if thread::current().name() == Some("paguro-kv-events") {
            panics().push(panic.to_string());
        }
        others(panic);
    }));
    let count = number("PAGURO_FUZZ_CASES").unwrap_or(300);
    let seed = number("PAGURO_FUZZ_SEED").unwrap_or(1);
    println!("PAGURO_FUZZ_SEED={seed}");
    let mut random = Random(seed);
    let ports = Ports::open();
    let mut good = ports.subscriber();
    let (begin, mut cases, mut open, mut next) = (Instant::now(), 0u64, Vec::new(), 1);
    while cases < count {
        let address = if random.once_in(2) { ports.publisher } else { ports.replay };
        let script = random.script();
        cases += 1;
        let mut peer = Peer::connect(address);
        // A peer that has been closed, or is not read by the server, does not hold up the others.
        peer.0.set_write_timeout(Some(Duration::from_millis(20))).unwrap();
        peer.send(&script);
        if random.once_in(3) {
            peer.0.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
            let _ = peer.0.read(&mut [0; 4096]);
        }
        if random.once_in(3) {
            open.push(peer);
        }
        if open.len() > 30 {
            open.swap_remove(random.below(30));
        }
        ports.publish(1 + random.below(500));
        assert_eq!(good.batch(), next, "PAGURO_FUZZ_SEED={seed}, case {cases}: {script:02x?}");
        next += 1;
        if cases % 500 == 0 {
            assert_eq!(ports.replay(next - 3), [next - 3, next - 2, next - 1], "PAGURO_FUZZ_SEED={seed}");
        }
        assert!(panics().is_empty(), "PAGURO_FUZZ_SEED={seed}, case {cases}: {:?}\n{script:02x?}", panics());
    }
    println!("{cases} peers in {:?}, {next} batches", begin.elapsed());
}
