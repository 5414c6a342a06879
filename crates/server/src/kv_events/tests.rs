//! Endpoints, and peers that violate the protocol, send too much, read nothing, or leave: the sockets continue for all others.

mod fuzz;
mod peer;

use std::{io::Write, net::TcpListener, thread};

use peer::{COMMAND, LONG, MORE, Peer, Ports, announced, command, frame, greeting, ready, request};

use super::{
    KvEvents, KvEventsSettings, parse,
    places::{CONNECTIONS, CONNECTIONS_PER_ADDRESS},
};

/// Outcome of bytes from a peer.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    /// The server closes the connection.
    Closed,
    /// The handshake, or the connection, goes on.
    Open,
}
use End::{Closed, Open};

/// The frame of a first READY.
fn ready_frame(body: &[u8]) -> Vec<u8> {
    [greeting(3, 1, b"NULL", 0), command(body)].concat()
}

/// Bytes from the first on.
fn beginnings(kind: &str) -> Vec<(&'static str, Vec<u8>, End)> {
    let null = |frame: Vec<u8>| [greeting(3, 1, b"NULL", 0), frame].concat();
    let of = |greeting: Vec<u8>| [greeting, ready("Socket-Type", kind)].concat();
    let wrong_signature = |at: usize, byte: u8| {
        let mut bytes = of(greeting(3, 1, b"NULL", 0));
        bytes[at] = byte;
        bytes
    };
    let mut cases = vec![
        ("a request of HTTP", b"GET / HTTP/1.1\r\n\r\n".to_vec(), Closed),
        ("73 bytes of garbage", (0..73u8).map(|at| at.wrapping_mul(151) ^ 90).collect(), Closed),
        ("a peer of ZMTP 1", b"\x01\x00".to_vec(), Closed),
        (
            "a peer of ZMTP 2",
            [&[0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 1, 2, 0, 0][..], &[0; 50]].concat(),
            Closed,
        ),
        ("an even end of the signature", wrong_signature(9, 0x7e), Closed),
        ("a padding of the signature", wrong_signature(5, 9), Open),
        ("version 2.9", of(greeting(2, 9, b"NULL", 0)), Closed),
        ("version 3.0", of(greeting(3, 0, b"NULL", 0)), Open),
        ("version 4.2 as a server", of(greeting(4, 2, b"NULL", 1)), Open),
        ("mechanism PLAIN", of(greeting(3, 1, b"PLAIN", 0)), Closed),
        ("mechanism CURVE", of(greeting(3, 1, b"CURVE", 0)), Closed),
        ("mechanism NULLS", of(greeting(3, 1, b"NULLS", 0)), Closed),
        ("mechanism of 20 bytes", of(greeting(3, 1, b"NULLNULLNULLNULLNULL", 0)), Closed),
        ("another spelling of the property", null(ready("socket-TYPE", kind)), Open),
        ("no type", null(ready("Identity", kind)), Closed),
        ("a publisher", null(ready("Socket-Type", "PUB")), Closed),
        ("a type with a zero", null(ready("Socket-Type", "SUB\0")), Closed),
        ("a message before READY", null(frame(0, b"\x05READY")), Closed),
        ("a command before READY", null(command(b"\x04PING\0\0")), Closed),
        ("an error", null(command(b"\x05ERROR\x02no")), Closed),
        ("a command of no bytes", null(command(b"")), Closed),
        ("a READY without properties", ready_frame(b"\x05READY"), Closed),
        ("a name beyond the end", ready_frame(b"\x05READY\xffSocket-Type\0\0\0\x03SUB"), Closed),
        ("a value beyond the end", ready_frame(b"\x05READY\x0bSocket-Type\xff\xff\xff\xffSUB"), Closed),
        ("half a length of a value", ready_frame(b"\x05READY\x0bSocket-Type\0\0"), Closed),
        ("a name of a command beyond the end", ready_frame(b"\xf0READY"), Closed),
    ];
    cases.extend(lengths().map(|(name, bytes)| (name, null(bytes), Closed)));
    cases
}

/// Heads of frames that must not be read.
fn lengths() -> impl Iterator<Item = (&'static str, Vec<u8>)> {
    let bits = [(16, "2^16"), (33, "2^33"), (40, "2^40"), (46, "2^46"), (62, "2^62"), (63, "2^63")];
    let long = bits.into_iter().map(|(bits, name)| (name, announced(COMMAND, (1 << bits) + 1)));
    let odd = [
        ("the largest length", announced(MORE, u64::MAX)),
        ("a command with more parts", frame(COMMAND | MORE, b"x")),
        ("a reserved flag", frame(8, b"x")),
        ("all flags", frame(!LONG, b"x")),
    ];
    long.chain(odd)
}

/// Bytes after the handshake.
fn continuations(is_publisher: bool) -> Vec<(&'static str, Vec<u8>, End)> {
    let ends = |of_publisher: End, of_router: End| if is_publisher { of_publisher } else { of_router };
    let many = |count: u32, length: usize| -> Vec<u8> {
        let topic = |number: u32| [&number.to_be_bytes()[..], &vec![b'x'; length - 4]].concat();
        (0..count).flat_map(|number| command(&[b"\x09SUBSCRIBE", &topic(number)[..]].concat())).collect()
    };
    let mut cases = vec![
        ("a second READY", ready("Socket-Type", "SUB"), Closed),
        ("an error", command(b"\x05ERROR\x02no"), Closed),
        ("a command of no bytes", command(b""), Closed),
        ("a command beyond its end", command(b"\x20PING"), Closed),
        ("an unknown command", command(b"\x04JUMP\x01\x02"), Open),
        ("a PING without a time", command(b"\x04PING\x01"), Closed),
        ("a PING with a long context", command(&[b"\x04PING\0\0", &[7; 17][..]].concat()), Closed),
        ("an empty message", frame(0, b""), Open),
        ("a message of 64 KiB", frame(0, &[9; 1 << 16]), Open),
        ("parts without end", frame(MORE, b"part").repeat(500), ends(Open, Closed)),
        ("parts of many bytes", frame(MORE, &[9; 40_000]).repeat(2), ends(Open, Closed)),
        ("1025 subscriptions", many(1025, 4), ends(Closed, Open)),
        ("subscriptions of 66 kB", many(66, 1000), ends(Closed, Open)),
        ("one subscription 1100 times", command(b"\x09SUBSCRIBEfox").repeat(1100), Open),
        ("unknown cancels", [command(b"\x06CANCELowl"), frame(0, b"\0owl")].concat(), Open),
        ("a number of seven bytes", [frame(MORE, b""), frame(0, &[0; 7])].concat(), Open),
        ("no number", frame(0, &[0; 8]), Open),
        ("an envelope of 16 kB", [frame(MORE, &[7; 16 << 10]), request(0)].concat(), Open),
    ];
    cases.extend(lengths().map(|(name, bytes)| (name, bytes, Closed)));
    cases
}

#[test]
fn violations_of_the_protocol_end_their_connection_alone() {
    let ports = Ports::open();
    let mut good = ports.subscriber();
    let mut next = 1;
    for (address, kind) in [(ports.publisher, "SUB"), (ports.replay, "REQ")] {
        let beginnings = beginnings(kind).into_iter().map(|case| (false, case));
        let continuations = continuations(kind == "SUB").into_iter().map(|case| (true, case));
        for (begun, (name, bytes, end)) in beginnings.chain(continuations) {
            println!("{kind}: {name}");
            let mut peer = if begun { Peer::open(address, kind) } else { Peer::connect(address) };
            peer.send(&bytes);
            match end {
                Closed => {
                    let answer = peer.closed();
                    let refused = answer.windows(6).any(|bytes| bytes == b"\x05ERROR");
                    assert_eq!(
                        refused,
                        ["no type", "a publisher", "a type with a zero"].contains(&name)
                            || name == "a READY without properties",
                        "{name}"
                    );
                }
                Open => {
                    if !begun {
                        peer.welcome();
                    }
                    peer.ping();
                }
            }
            ports.publish(1);
            assert_eq!(good.batch(), next, "{kind}: {name}");
            next += 1;
        }
    }
    assert_eq!(ports.replay(0), (0..next).collect::<Vec<_>>());
}

#[test]
fn subscriptions_have_the_forms_of_both_versions() {
    let ports = Ports::open();
    let mut peer = Peer::open(ports.publisher, "SUB");
    let mut published = 0;
    for (bytes, receives) in [
        (frame(0, b"\x01kv@fo"), true),
        (frame(0, b"\x00kv@fo"), false),
        (command(b"\x09SUBSCRIBEkv@fox"), true),
        (frame(0, b"\x01kv@"), true),
        (command(b"\x06CANCELkv@fox"), true),
        (command(b"\x06CANCELkv@"), false),
        (command(b"\x09SUBSCRIBEkv@foxes"), false),
        (command(b"\x09SUBSCRIBE"), true),
        // A part of a message is no subscription.
        ([frame(0, b"\x00"), frame(MORE, b"\x01kv@"), frame(0, b"\x01kv@")].concat(), false),
    ] {
        peer.send(&bytes);
        peer.settle();
        ports.publish(1);
        published += 1;
        // The batch comes before the answer to a PING that was sent after it has been published.
        while ports.replay(published).is_empty() {}
        if receives {
            assert_eq!(peer.batch(), published);
        }
        peer.ping();
    }
}

#[test]
fn a_new_subscription_begins_with_the_newest_batch_of_its_topic() {
    let ports = Ports::open();
    let mut other = Peer::open(ports.publisher, "SUB");
    other.send(&command(b"\x09SUBSCRIBEkv@owl"));
    other.ping();
    for number in 1..4 {
        ports.publish(1);
        while ports.replay(number).is_empty() {}
        let mut peer = Peer::open(ports.publisher, "SUB");
        peer.send(&command(b"\x09SUBSCRIBEkv@fox"));
        assert_eq!(peer.batch(), number);
        // One that has it gets it again, and misses nothing.
        peer.send(&command(b"\x09SUBSCRIBEkv@"));
        assert_eq!(peer.batch(), number);
    }
    other.ping();
}

#[test]
fn subscribers_that_come_and_go_cost_others_no_batch() {
    let ports = Ports::open();
    let mut good = ports.subscriber();
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for leaves in 0..40 {
                    let mut peer = Peer::connect(ports.publisher);
                    peer.send(&greeting(3, 1, b"NULL", 0));
                    peer.send(&ready("Socket-Type", "SUB"));
                    peer.send(&command(b"\x09SUBSCRIBE").repeat(leaves * 10));
                    if leaves % 4 == 0 {
                        peer.welcome();
                    }
                }
            });
        }
        for number in 1..2000 {
            ports.publish(10);
            assert_eq!(good.batch(), number);
        }
    });
}

#[test]
fn replays_that_are_not_read_hold_up_nobody() {
    let ports = Ports::open();
    let mut good = ports.subscriber();
    // More than the buffers of a connection.
    for number in 1..=1000 {
        ports.publish(2000);
        assert_eq!(good.batch(), number);
    }
    let unread: Vec<_> = (0..8)
        .map(|_| {
            let mut peer = Peer::open(ports.replay, "DEALER");
            peer.send(&request(0).repeat(3000));
            peer
        })
        .collect();
    for number in 1001..=1200 {
        ports.publish(1);
        assert_eq!(good.batch(), number);
    }
    assert_eq!(ports.replay(0), (0..=1200).collect::<Vec<_>>());
    assert!(unread.iter().all(|peer| peer.0.peer_addr().is_ok()));
}

#[test]
fn unfinished_handshakes_make_room() {
    let ports = Ports::open();
    let mut good = ports.subscriber();
    for address in [ports.publisher, ports.replay] {
        let drips: Vec<_> = (0..CONNECTIONS + 20)
            .map(|length| {
                let mut peer = Peer::connect(address);
                peer.send(&greeting(3, 1, b"NULL", 0)[..length % 64]);
                peer
            })
            .collect();
        // The first ones are closed for later ones.
        drips
            .into_iter()
            .take(CONNECTIONS - CONNECTIONS_PER_ADDRESS)
            .for_each(|mut peer| drop(peer.closed()));
    }
    let mut other = ports.subscriber();
    ports.publish(1);
    assert_eq!((good.batch(), other.batch(), ports.replay(1)), (1, 1, vec![1]));
    // Subscribers that are in use stay, and one address has its share.
    let mut others: Vec<_> = (2..CONNECTIONS_PER_ADDRESS).map(|_| ports.subscriber()).collect();
    let mut refused = Peer::connect(ports.publisher);
    assert!(refused.closed().is_empty() && refused.0.flush().is_ok());
    ports.publish(1);
    for peer in [&mut good, &mut other].into_iter().chain(&mut others) {
        assert_eq!(peer.batch(), 2);
    }
    drop(others);
    // A place is free again as soon as the server has seen that a peer has left.
    loop {
        let mut peer = Peer::connect(ports.publisher);
        peer.send(&greeting(3, 1, b"NULL", 0));
        peer.send(&ready("Socket-Type", "SUB"));
        peer.0.shutdown(std::net::Shutdown::Write).unwrap();
        if !peer.closed().is_empty() {
            break;
        }
    }
}

#[test]
fn endpoints_that_cannot_be_bound_are_named() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = format!("tcp://{}", taken.local_addr().unwrap());
    for endpoint in
        ["nonsense", "ipc:///tmp/x", "tcp://127.0.0.1", "tcp://:5557", "tcp://127.0.0.1:99999", &taken]
    {
        let (_, receiver) = KvEvents::new();
        let settings = KvEventsSettings { endpoint: endpoint.into(), ..KvEventsSettings::default() };
        let error = receiver.bind(settings).unwrap_err();
        assert!(error.contains(&format!("`{endpoint}`")), "{error}");
    }
}

#[test]
fn endpoints_have_the_forms_of_zeromq() {
    let parsed = |endpoint: &str| parse(endpoint).unwrap();
    assert_eq!(parsed("tcp://*:5557"), ("0.0.0.0".to_owned(), 5557));
    assert_eq!(parsed("tcp://127.0.0.1:*"), ("127.0.0.1".to_owned(), 0));
    assert_eq!(parsed("tcp://[::1]:5557"), ("::1".to_owned(), 5557));
    assert_eq!(parsed("tcp://localhost:1"), ("localhost".to_owned(), 1));
    for (endpoint, replay, open) in [
        ("tcp://*:*", "tcp://127.0.0.1:*", 1),
        ("tcp://0:0", "tcp://0.0.0.0:0", 2),
        ("tcp://127.0.0.1:0", "tcp://localhost:0", 0),
    ] {
        let settings = KvEventsSettings {
            endpoint: endpoint.into(),
            replay: Some(replay.into()),
            topic: KvEventsSettings::TOPIC.into(),
            ..KvEventsSettings::default()
        };
        let (publisher, places) = KvEvents::new().1.bind(settings).unwrap();
        assert_eq!(publisher.open_to_all().count(), open, "{endpoint} {replay}");
        // Routers are told a place that they can connect to.
        let host = places.endpoint.strip_prefix("tcp://").and_then(|place| place.rsplit_once(':')).unwrap().0;
        assert_eq!(places.topic, format!("kv@{host}@{{model}}"));
        assert_ne!(host, "0.0.0.0");
    }
}
