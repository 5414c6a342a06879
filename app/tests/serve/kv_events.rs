//! Hostile peers at the ports of KV events, beside requests.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    thread,
};

use serde_json::json;

use super::{ask, http::Server};

/// The beginning of a connection, up to a READY of this kind of socket.
fn hello(kind: &str) -> Vec<u8> {
    let mut bytes = vec![0; 64];
    (bytes[0], bytes[9], bytes[10], bytes[11]) = (0xff, 0x7f, 3, 1);
    bytes[12..16].copy_from_slice(b"NULL");
    let length = kind.len() as u8;
    bytes.extend([4, 22 + length]);
    bytes.extend(b"\x05READY\x0bSocket-Type\0\0\0");
    bytes.push(length);
    bytes.extend(kind.as_bytes());
    bytes
}

fn connect(port: u16, bytes: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    // The server may have closed the connection.
    let _ = stream.write_all(bytes);
    stream
}

/// Two ports that are free now.
fn free_ports() -> [u16; 2] {
    let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    listeners.map(|listener| listener.local_addr().unwrap().port())
}

#[test]
fn hostile_peers_of_kv_events_do_not_reach_requests() {
    let ports @ [publisher, replay] = free_ports();
    let endpoints = ports.map(|port| format!("tcp://127.0.0.1:{port}"));
    let arguments = ["--kv-events", &endpoints[0], "--kv-events-replay", &endpoints[1]];
    let mut server = Server::start(&arguments);
    let subscribed = [hello("SUB"), b"\x00\x01\x01".to_vec()].concat();
    let mut good = connect(publisher, &subscribed);
    thread::scope(|scope| {
        let answers = scope.spawn(|| {
            for _ in 0..30 {
                server.post("/v1/chat/completions", &ask(json!({"max_tokens": 40}))).ok();
                server.get("/health");
            }
        });
        // Lengths that nobody has memory for, before and after READY.
        for port in ports {
            for bits in [33, 40, 46, 62] {
                for head in [hello("SUB")[..64].to_vec(), hello("SUB"), hello("REQ")] {
                    for flags in [2, 6] {
                        let length = 1u64 << bits;
                        let mut stream =
                            connect(port, &[&head[..], &[flags], &length.to_be_bytes()].concat());
                        // It is closed. Its type may have been refused first.
                        let _ = stream.read_to_end(&mut Vec::new());
                    }
                }
            }
        }
        let leave = || {
            for _ in 0..50 {
                drop(connect(publisher, &subscribed));
            }
        };
        let leaving: Vec<_> = (0..8).map(|_| scope.spawn(leave)).collect();
        let flood = connect(publisher, &[hello("SUB"), b"\x00\x02\x01x".repeat(100_000)].concat());
        let half_open: Vec<_> = (0..200).map(|at| connect(ports[at % 2], &hello("SUB")[..at % 64])).collect();
        let from_0 = [&b"\x01\x00\x00\x08"[..], &[0; 8]].concat();
        let unread: Vec<_> =
            (0..8).map(|_| connect(replay, &[hello("REQ"), from_0.repeat(3000)].concat())).collect();
        leaving.into_iter().for_each(|thread| thread.join().unwrap());
        answers.join().unwrap();
        drop((flood, half_open, unread));
    });
    // Its events of all that time.
    let mut received: Vec<u8> = Vec::new();
    while !received.windows(11).any(|bytes| bytes == b"BlockStored") {
        let mut bytes = [0; 4096];
        let count = good.read(&mut bytes).unwrap();
        assert!(count > 0, "the subscriber was disconnected");
        received.extend(&bytes[..count]);
    }
    #[cfg(unix)]
    {
        let kill = std::process::Command::new("kill").arg(server.pid().to_string()).status();
        assert!(kill.unwrap().success());
        assert!(server.wait().success());
    }
}
