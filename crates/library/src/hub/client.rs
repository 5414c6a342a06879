//! HTTP, as a hub needs it: a token for the hub alone, redirects, patience.

use std::{
    io::{self, Read},
    net::{IpAddr, Ipv4Addr, ToSocketAddrs},
    sync::{
        OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use ureq::{
    Agent, Body, Proxy, Timeout,
    http::{Response, Uri},
    tls::{RootCerts, TlsConfig},
    unversioned::transport::DefaultConnector,
};

use super::{HubOptions, public::PublicResolver};
use crate::{
    cancel::Cancel,
    error::LibraryError,
    record::{OnProgress, Progress},
};

/// Maximum number of redirects from the hub to a file.
const MAX_REDIRECTS: usize = 10;
/// Longest answer that is read into memory: the list of a repository's files.
const MAX_TEXT: u64 = 64 << 20;
/// Maximum wait that a hub can request.
const MAX_WAIT: Duration = Duration::from_secs(300);
/// Longest wait for a connection.
const MAX_CONNECT: Duration = Duration::from_secs(10);

pub(super) struct Client {
    agent: Agent,
    /// Connects to public addresses only, for redirects of public hubs.
    public: Agent,
    options: HubOptions,
    /// Origin of the hub. The token is sent to it alone.
    origin: Origin,
    /// True if the hub is in a private network or on this machine.
    private: OnceLock<bool>,
    /// True once any server has answered: from then on, a connection that fails is tried again.
    reached: AtomicBool,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("options", &self.options).finish_non_exhaustive()
    }
}

/// Scheme, host and port.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Origin {
    https: bool,
    host: String,
    port: u16,
}

/// Reason of a failed request.
#[derive(Debug)]
pub(super) enum Refusal {
    /// A transient error, with the requested wait before a retry.
    Temporary { error: LibraryError, wait: Option<Duration> },
    /// A permanent error.
    Final(LibraryError),
}

impl Client {
    pub(super) fn new(mut options: HubOptions) -> Result<Self, LibraryError> {
        let bad = |problem| LibraryError::BadEndpoint { endpoint: options.endpoint.clone(), problem };
        let uri: Uri = options.endpoint.parse().map_err(|_| bad("it must be like https://huggingface.co"))?;
        let origin = Origin::of(&uri).ok_or_else(|| bad("it must begin with https:// or http://"))?;
        if uri.query().is_some() {
            return Err(bad("it must not have a query"));
        }
        // A hub on this machine is behind no proxy.
        let proxy = if origin.is_loopback() { None } else { Proxy::try_from_env() };
        let is_proxied = proxy.is_some();
        let tls = TlsConfig::builder().root_certs(RootCerts::PlatformVerifier).build();
        let config = Agent::config_builder()
            .tls_config(tls)
            .proxy(proxy)
            // Errors have texts, and redirects are followed here: the library would drop the token also on the way to
            // the hub itself.
            .http_status_as_error(false)
            .max_redirects(0)
            .user_agent(concat!("paguro/", env!("CARGO_PKG_VERSION")))
            .timeout_resolve(Some(options.read_timeout.min(MAX_CONNECT)))
            .timeout_connect(Some(options.read_timeout.min(MAX_CONNECT)))
            .timeout_recv_response(Some(options.read_timeout))
            .timeout_per_read(Some(options.read_timeout))
            .build();
        let agent = config.new_agent();
        // A proxy resolves names itself, and its own address is often private.
        let public = match is_proxied {
            true => agent.clone(),
            false => Agent::with_parts(config, DefaultConnector::default(), PublicResolver::default()),
        };
        options.endpoint.truncate(options.endpoint.trim_end_matches('/').len());
        Ok(Self { agent, public, options, origin, private: OnceLock::new(), reached: AtomicBool::new(false) })
    }

    pub(super) fn options(&self) -> &HubOptions {
        &self.options
    }

    pub(super) fn endpoint(&self) -> &str {
        &self.options.endpoint
    }

    /// Gets a text, with patience.
    pub(super) fn text(
        &self,
        url: &str,
        what: &str,
        cancel: &Cancel,
        progress: &OnProgress<'_>,
    ) -> Result<String, LibraryError> {
        let mut tries = 0;
        loop {
            let answer = self.get(url, what, 0).and_then(|answer| {
                let mut text = String::new();
                answer.into_body().into_reader().take(MAX_TEXT).read_to_string(&mut text).map_err(
                    |error| {
                        let problem = error.to_string();
                        Refusal::Temporary {
                            error: LibraryError::Connection { url: url.to_owned(), problem },
                            wait: None,
                        }
                    },
                )?;
                Ok(text)
            });
            match answer {
                Ok(text) => return Ok(text),
                Err(refusal) => self.wait(refusal, &mut tries, None, cancel, progress)?,
            }
        }
    }

    /// Waits before the next attempt, or returns the error after the last one. `tries` counts the failed attempts; `file`
    /// is the index of the file that is being downloaded.
    pub(super) fn wait(
        &self,
        refusal: Refusal,
        tries: &mut u32,
        file: Option<usize>,
        cancel: &Cancel,
        progress: &OnProgress<'_>,
    ) -> Result<(), LibraryError> {
        cancel.check()?;
        let (error, wait) = match refusal {
            Refusal::Final(error) => return Err(error),
            Refusal::Temporary { error, wait } => (error, wait),
        };
        if *tries >= self.options.retries || wait.is_some_and(|wait| wait > MAX_WAIT) {
            return Err(error);
        }
        let pause = self.options.pause * 2u32.saturating_pow(*tries);
        *tries += 1;
        let (problem, attempts) = (&*error.to_string(), self.options.retries + 1);
        progress(Progress::Retrying { file, problem, attempt: *tries + 1, attempts });
        cancel.sleep(wait.unwrap_or(pause).max(pause))
    }

    /// Returns a successful answer after redirects. `from` is the first requested byte.
    pub(super) fn get(&self, url: &str, what: &str, from: u64) -> Result<Response<Body>, Refusal> {
        let mut uri: Uri = url.parse().map_err(|_| self.odd(url, "it is not an address"))?;
        for _ in 0..=MAX_REDIRECTS {
            let answer = self.get_once(&uri, from)?;
            let status = answer.status().as_u16();
            match status {
                200..=299 => return Ok(answer),
                301 | 302 | 303 | 307 | 308 => {
                    let location = answer.headers().get("location").and_then(|value| value.to_str().ok());
                    let location = location.ok_or_else(|| self.odd(url, "it redirects to nowhere"))?;
                    uri = self.follow(&uri, location).map_err(|problem| self.odd(url, problem))?;
                }
                _ => return Err(self.refusal(answer, what, &uri)),
            }
        }
        Err(self.odd(url, "it redirects without end"))
    }

    fn get_once(&self, uri: &Uri, from: u64) -> Result<Response<Body>, Refusal> {
        let is_hub = Origin::of(uri).as_ref() == Some(&self.origin);
        let agent = if is_hub || self.is_private() { &self.agent } else { &self.public };
        let mut request = agent.get(uri.clone());
        if from > 0 {
            request = request.header("range", format!("bytes={from}-"));
        }
        if let Some(token) = self.options.token.as_ref().filter(|_| is_hub) {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let answer = request.call().map_err(|error| self.no_answer(uri, &error))?;
        self.reached.store(true, Ordering::Relaxed);
        Ok(answer)
    }

    /// Returns true if the hub is in a private network or on this machine. It may then redirect to such addresses.
    fn is_private(&self) -> bool {
        *self.private.get_or_init(|| {
            self.origin.is_private().unwrap_or_else(|| {
                let found = (&*self.origin.host, self.origin.port).to_socket_addrs();
                found.is_ok_and(|mut found| found.any(|address| !is_public(address.ip())))
            })
        })
    }

    /// Classifies a request without an answer. A retry helps if a server aborts or a working network fails, but not for
    /// an unknown host name or a machine without a network.
    fn no_answer(&self, uri: &Uri, error: &ureq::Error) -> Refusal {
        use io::ErrorKind as Kind;
        use ureq::Error as E;
        let broke_off = match error {
            E::Io(error) => matches!(
                error.kind(),
                Kind::ConnectionReset
                    | Kind::ConnectionAborted
                    | Kind::BrokenPipe
                    | Kind::UnexpectedEof
                    | Kind::Interrupted
            ),
            E::Timeout(Timeout::Connect | Timeout::Resolve) => false,
            E::Timeout(_) | E::Protocol(_) | E::BodyStalled => true,
            _ => false,
        };
        let text = error.to_string();
        if text.contains(PRIVATE) {
            return self.odd(&without_query(uri), PRIVATE);
        }
        let problem = match error {
            E::HostNotFound => "its name cannot be resolved".to_owned(),
            E::Io(error) if text.contains("lookup address") => {
                let reason = error.to_string().replace("failed to lookup address information: ", "");
                format!("its name cannot be resolved ({reason})")
            }
            E::Timeout(Timeout::Resolve) => "its name is not resolved in time".to_owned(),
            E::Timeout(Timeout::Connect) => "it does not accept connections in time".to_owned(),
            _ => {
                let text = text.trim_start_matches("io: ");
                text.split(" (os error").next().unwrap_or(text).to_owned()
            }
        };
        if broke_off || self.reached.load(Ordering::Relaxed) {
            let error = LibraryError::Connection { url: without_query(uri), problem };
            return Refusal::Temporary { error, wait: None };
        }
        let host = uri.authority().map_or("the hub", |authority| authority.as_str()).to_owned();
        Refusal::Final(LibraryError::Unreachable { host, problem })
    }

    /// Resolves a `Location` header.
    fn follow(&self, from: &Uri, location: &str) -> Result<Uri, &'static str> {
        const ODD: &str = "it redirects to something that is not an address";
        let origin = Origin::of(from).ok_or(ODD)?;
        let scheme = if origin.https { "https" } else { "http" };
        let authority = from.authority().ok_or(ODD)?;
        let text = if location.contains("://") {
            location.to_owned()
        } else if location.starts_with("//") {
            format!("{scheme}:{location}")
        } else if location.starts_with('/') {
            format!("{scheme}://{authority}{location}")
        } else {
            return Err(ODD);
        };
        let to: Uri = text.split('#').next().unwrap_or_default().parse().map_err(|_| ODD)?;
        match Origin::of(&to) {
            Some(to) if origin.https && !to.https => Err("it redirects from https to http"),
            Some(to) if to.is_private() == Some(true) && !self.is_private() => Err(PRIVATE),
            Some(_) => Ok(to),
            None => Err(ODD),
        }
    }

    fn odd(&self, url: &str, problem: &str) -> Refusal {
        Refusal::Final(LibraryError::BadAnswer { url: url.to_owned(), problem: problem.to_owned() })
    }

    /// Returns the meaning of an answer that is no success.
    fn refusal(&self, answer: Response<Body>, what: &str, uri: &Uri) -> Refusal {
        let status = answer.status().as_u16();
        let header = |name| answer.headers().get(name).and_then(|value| value.to_str().ok());
        // The text comes from the server: control characters are removed, and its length is limited.
        let message: String = header("x-error-message")
            .unwrap_or_default()
            .chars()
            .filter(|c| !c.is_control())
            .take(300)
            .collect();
        match status {
            401 | 403 => Refusal::Final(LibraryError::Unauthorized {
                what: what.to_owned(),
                status,
                message,
                advice: match &self.options.token {
                    None => "it is private or gated, or its name is wrong: set HF_TOKEN to a token of yours",
                    Some(_) => {
                        "it is private or gated, or its name is wrong: the token in HF_TOKEN does not open it"
                    }
                },
            }),
            404 => {
                let endpoint = self.options.endpoint.clone();
                Refusal::Final(LibraryError::NotOnHub { endpoint, what: what.to_owned() })
            }
            _ => {
                let wait = header("retry-after")
                    .and_then(|value| value.trim().parse().ok())
                    .map(Duration::from_secs);
                let error = LibraryError::Status { url: without_query(uri), status, message };
                match status {
                    408 | 429 | 500..=599 => Refusal::Temporary { error, wait },
                    _ => Refusal::Final(error),
                }
            }
        }
    }
}

impl Origin {
    fn of(uri: &Uri) -> Option<Self> {
        let https = match uri.scheme_str()? {
            "https" => true,
            "http" => false,
            _ => return None,
        };
        let port = uri.port_u16().unwrap_or(if https { 443 } else { 80 });
        Some(Self { https, host: uri.host()?.to_lowercase(), port })
    }

    fn address(&self) -> Option<IpAddr> {
        self.host.trim_start_matches('[').trim_end_matches(']').parse().ok()
    }

    fn is_loopback(&self) -> bool {
        self.host == "localhost" || self.address().is_some_and(|address| address.is_loopback())
    }

    /// Returns true for an address that is not public; `None` for a name.
    fn is_private(&self) -> Option<bool> {
        let name = self.host.trim_end_matches('.');
        if name == "localhost" || name.ends_with(".localhost") {
            return Some(true);
        }
        self.address().map(|address| !is_public(address))
    }
}

/// Problem of a redirect from a public hub to an address that is not public.
pub(super) const PRIVATE: &str =
    "it redirects to an address of this machine or of a private network, which only a hub there may do";

/// Returns true for an address of the public internet.
pub fn is_public(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(address) => {
            let [a, b, c, _] = address.octets();
            let special = address.is_loopback()
                || address.is_private()
                || address.is_link_local()
                || address.is_multicast()
                || a == 0
                || a >= 240
                || (a, b & 0xc0) == (100, 64)
                || (a, b, c) == (192, 0, 0)
                || (a, b & 0xfe) == (198, 18);
            !special
        }
        IpAddr::V6(address) => {
            let embedded = |high: u16, low: u16| {
                is_public(Ipv4Addr::from(u32::from(high) << 16 | u32::from(low)).into())
            };
            match address.segments() {
                // NAT64 and 6to4 contain an address of IPv4, and so do the deprecated compatible addresses.
                [0x64, 0xff9b, 0, 0, 0, 0, high, low] | [0, 0, 0, 0, 0, 0, high, low] => embedded(high, low),
                [0x2002, high, low, ..] => embedded(high, low),
                // Teredo contains an address in reverse bits; the other prefixes are of local networks.
                [0x2001, 0, .., high, low] => embedded(!high, !low),
                [0x64, 0xff9b, 1, ..] => false,
                [0xfec0..0xff00, ..] => false,
                _ => {
                    !(address.is_unique_local() || address.is_unicast_link_local() || address.is_multicast())
                }
            }
        }
    }
}

/// Removes the query of an address, because it may contain a signature.
fn without_query(uri: &Uri) -> String {
    let scheme = uri.scheme_str().unwrap_or_default();
    let authority = uri.host().unwrap_or_default();
    let port = uri.port_u16().map(|port| format!(":{port}")).unwrap_or_default();
    format!("{scheme}://{authority}{port}{}", uri.path())
}

/// Percent-encodes text for an address; `slashes` keeps slashes.
pub(super) fn encode(text: &str, slashes: bool) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => out.push(byte.into()),
            b'/' if slashes => out.push('/'),
            _ => out += &format!("%{byte:02X}"),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(endpoint: &str) -> Result<Client, LibraryError> {
        Client::new(HubOptions { endpoint: endpoint.to_owned(), ..HubOptions::default() })
    }

    #[test]
    fn redirects_lead_to_addresses_and_never_out_of_tls() {
        let client = client("https://hub.example").unwrap();
        let from: Uri = "https://hub.example/a/b".parse().unwrap();
        let follow = |location: &str| client.follow(&from, location).map(|uri| uri.to_string());
        assert_eq!(follow("/c?d=e").unwrap(), "https://hub.example/c?d=e");
        assert_eq!(follow("//cdn.example/c").unwrap(), "https://cdn.example/c");
        assert_eq!(follow("https://cdn.example/c#d").unwrap(), "https://cdn.example/c");
        for bad in ["http://hub.example/c", "file:///etc/passwd", "ftp://x/y", "", "c", "javascript:alert(1)"]
        {
            assert!(follow(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_public_hub_does_not_redirect_into_private_networks() {
        let locations = [
            "https://127.0.0.1/c",
            "https://localhost:1/c",
            "https://x.localhost/c",
            "https://[::1]/c",
            "https://[::ffff:10.0.0.1]/c",
            "https://[64:ff9b::7f00:1]/c",
            "https://[fd00::1]/c",
            "https://[fe80::1]/c",
            "https://10.1.2.3/c",
            "https://172.16.0.1/c",
            "https://192.168.0.1/c",
            "https://169.254.169.254/latest/meta-data",
            "https://100.64.0.1/c",
            "https://0.0.0.0/c",
        ];
        let public = client("https://93.184.215.14").unwrap();
        let private = client("http://192.168.0.7").unwrap();
        let from: Uri = "https://93.184.215.14/a".parse().unwrap();
        for location in locations {
            assert_eq!(public.follow(&from, location), Err(PRIVATE), "{location}");
            assert!(private.follow(&from, location).is_ok(), "{location}");
        }
        for location in ["https://1.1.1.1/c", "https://[2606:4700::1111]/c", "https://172.32.0.1/c"] {
            assert!(public.follow(&from, location).is_ok(), "{location}");
        }
    }

    #[test]
    fn endpoints_are_addresses() {
        assert_eq!(client("https://hub.example/").unwrap().endpoint(), "https://hub.example");
        assert_eq!(client("http://127.0.0.1:9/x").unwrap().endpoint(), "http://127.0.0.1:9/x");
        for bad in ["", "hub.example", "ftp://hub.example", "https://", "https://hub.example/?x=y"] {
            assert!(matches!(client(bad), Err(LibraryError::BadEndpoint { .. })), "{bad}");
        }
    }

    #[test]
    fn only_the_same_scheme_host_and_port_are_the_hub() {
        let origin = |text: &str| Origin::of(&text.parse().unwrap()).unwrap();
        let hub = origin("https://hub.example");
        assert_eq!(hub, origin("https://HUB.example:443/x"));
        for other in ["http://hub.example", "https://hub.example:444", "https://hub.example.evil.example"] {
            assert_ne!(hub, origin(other), "{other}");
        }
        assert!(origin("http://[::1]:80").is_loopback() && origin("http://127.0.0.2").is_loopback());
        assert!(!origin("http://127.0.0.1.example").is_loopback());
    }

    #[test]
    fn odd_characters_are_encoded() {
        assert_eq!(encode("a b/ü#?%.gguf", true), "a%20b/%C3%BC%23%3F%25.gguf");
        assert_eq!(encode("refs/pr/1", false), "refs%2Fpr%2F1");
    }
}
