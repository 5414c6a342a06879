//! Resolves `--host` and `--port` to a socket address.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};

use crate::failure::{Failure, Outcome};

/// Returns the address of `host`: an IP address, with or without brackets, or a name of this machine. IPv4 is
/// preferred, because clients try it first.
///
/// # Errors
/// The name cannot be resolved.
pub fn resolve(host: Option<&str>, port: u16) -> Outcome<SocketAddr> {
    let Some(host) = host.map(str::trim).filter(|host| !host.is_empty()) else {
        return Ok((Ipv4Addr::LOCALHOST, port).into());
    };
    if host == "*" {
        return Ok((Ipv4Addr::UNSPECIFIED, port).into());
    }
    let plain = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    if let Ok(address) = plain.parse::<IpAddr>() {
        return Ok((address, port).into());
    }
    let wrong = |problem: &str| {
        Failure::usage(format!("cannot listen at `{host}`: {problem}")).hint(
            "--host takes an address or a name of this machine, --port the port: --host 0.0.0.0 --port 8080",
        )
    };
    if host.contains(['/', ':']) {
        return Err(wrong("it is neither an address nor a name"));
    }
    let found = (plain, port).to_socket_addrs().map_err(|_| wrong("its name cannot be resolved"))?;
    let mut all: Vec<_> = found.collect();
    all.sort_by_key(SocketAddr::is_ipv6);
    all.first().copied().ok_or_else(|| wrong("it has no address"))
}

/// Returns the URL at which this machine reaches a server that may listen at all addresses.
pub fn from_here(place: &str) -> String {
    place.replace("://0.0.0.0:", "://127.0.0.1:").replace("://[::]:", "://[::1]:")
}

/// Returns the URL at which other machines reach a server that listens at all addresses (`http://0.0.0.0:11434`);
/// `None` for other servers and without a network.
pub fn from_outside(place: &str) -> Option<String> {
    let address: SocketAddr = place.strip_prefix("http://")?.parse().ok()?;
    if !address.ip().is_unspecified() {
        return None;
    }
    // Addresses for documentation (RFC 5737 and 3849). No packet is sent: the system only selects a route.
    let own = |any: IpAddr, other: IpAddr| {
        let socket = UdpSocket::bind((any, 0)).ok()?;
        socket.connect((other, 9)).ok()?;
        Some(socket.local_addr().ok()?.ip()).filter(|ip| !ip.is_loopback() && !ip.is_unspecified())
    };
    let v4 = || own(Ipv4Addr::UNSPECIFIED.into(), Ipv4Addr::new(192, 0, 2, 1).into());
    let v6 = || own(Ipv6Addr::UNSPECIFIED.into(), Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into());
    // A server at [::] accepts IPv4 as well on most systems.
    let ip = v4().or_else(|| v6().filter(|_| address.is_ipv6()))?;
    Some(format!("http://{}", SocketAddr::new(ip, address.port())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_at_all_addresses_has_one_for_other_machines() {
        for place in ["http://127.0.0.1:80", "http://192.168.0.2:80", "http://[::1]:80", "unix:/x"] {
            assert_eq!(from_outside(place), None, "{place}");
        }
        // Without a network there is none.
        for place in ["http://0.0.0.0:8099", "http://[::]:8099"] {
            let address = from_outside(place);
            let is_fine =
                |url: &String| url.ends_with(":8099") && !url.contains("0.0.0.0") && !url.contains("[::]");
            assert!(address.as_ref().is_none_or(is_fine), "{address:?}");
        }
    }

    #[test]
    fn hosts_are_addresses_and_names() {
        let address = |host: Option<&str>| resolve(host, 80).unwrap().to_string();
        for (host, expected) in [
            (None, "127.0.0.1:80"),
            (Some("localhost"), "127.0.0.1:80"),
            (Some("0.0.0.0"), "0.0.0.0:80"),
            (Some("*"), "0.0.0.0:80"),
            (Some("::1"), "[::1]:80"),
            (Some("[::]"), "[::]:80"),
        ] {
            assert_eq!(address(host), expected);
        }
        for wrong in ["http://localhost", "localhost:80", "no such host.invalid"] {
            assert!(
                resolve(Some(wrong), 80).unwrap_err().report(false).unwrap().contains("--host"),
                "{wrong}"
            );
        }
    }
}
