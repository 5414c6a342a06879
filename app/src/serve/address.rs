//! Resolves `--host` and `--port` to a socket address.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs};

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

#[cfg(test)]
mod tests {
    use super::*;

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
