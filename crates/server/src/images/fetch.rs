//! Images at URLs. No host is allowed by default, because a server's network has more than its clients can see.
//!
//! A host of the list is resolved once; all of its addresses must be public, and the connection uses the checked addresses.
//! Redirects pass the same checks. Neither proxies nor credentials are used.

use std::{io, str::FromStr, sync::Arc, time::Duration};

use axum::http::Uri;
use paguro_library::is_public;
use serde::Deserialize;
use tokio::sync::Semaphore;
use ureq::{
    Agent, Error,
    config::Config,
    http::{Response, header},
    tls::{RootCerts, TlsConfig},
    unversioned::{
        resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver},
        transport::{DefaultConnector, NextTimeout},
    },
};

use super::{Image, ImageSource};
use crate::{error::ApiError, prepare::Client, shares::ClientShares};

/// Maximum redirects of one image.
const MAX_REDIRECTS: usize = 3;

/// Maximum time to fetch an image, with all redirects.
const PATIENCE: Duration = Duration::from_secs(10);

/// Maximum images that are fetched at one time.
const MOST_FETCHES: usize = 16;

/// Maximum images that are fetched for one client at one time.
const MOST_PER_CLIENT: usize = 4;

/// Problem of an address that is not public.
const PRIVATE: &str = "its host has an address of this machine or of a private network";

/// A host from which images are fetched: `example.org`, `*.example.org`, `example.org:8080`, or `*` for all.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct HostPattern {
    /// Name in lower case; a pattern begins with `*`.
    host: String,
    /// Port; `None` for the default one of the scheme.
    port: Option<u16>,
}

impl FromStr for HostPattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim().to_ascii_lowercase();
        let (host, port) = match text.rsplit_once(':') {
            Some((host, port)) if !host.contains(':') || host.ends_with(']') => {
                let port = port.parse().map_err(|_| format!("`{text}` has no valid port"))?;
                (host, Some(port))
            }
            _ => (text.as_str(), None),
        };
        let name = host.strip_prefix("*.").unwrap_or(host);
        let is_name = !name.is_empty()
            && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-_[]:".contains(&byte));
        if host != "*" && !is_name {
            return Err(format!(
                "`{text}` must be a host, such as `images.example.org`, `*.example.org` or `*` for all public hosts; \
                 a scheme and a path are not a part of it"
            ));
        }
        Ok(Self { host: host.to_owned(), port })
    }
}

impl TryFrom<String> for HostPattern {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl HostPattern {
    fn fits(&self, host: &str, port: u16, default_port: u16) -> bool {
        let host = host.trim_end_matches('.').to_ascii_lowercase();
        let fits = match self.host.strip_prefix('*') {
            Some(end) => host.ends_with(end),
            None => host == self.host,
        };
        fits && port == self.port.unwrap_or(default_port)
    }
}

/// Client for images at URLs.
#[derive(Debug)]
pub struct ImageFetcher {
    hosts: Vec<HostPattern>,
    agent: Agent,
    /// Maximum bytes of an image.
    limit: usize,
    fetches: Arc<Semaphore>,
    of_clients: ClientShares,
}

/// Resolver of names with public addresses only.
#[derive(Debug)]
struct CheckedResolver {
    system: DefaultResolver,
    is_allowed: fn(std::net::IpAddr) -> bool,
}

impl Resolver for CheckedResolver {
    fn resolve(
        &self,
        uri: &Uri,
        config: &Config,
        timeout: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, Error> {
        let found = self.system.resolve(uri, config, timeout)?;
        if found.iter().all(|address| (self.is_allowed)(address.ip())) {
            return Ok(found);
        }
        Err(Error::Io(io::Error::other(PRIVATE)))
    }
}

impl ImageFetcher {
    /// Creates a client for these hosts.
    pub fn new(hosts: Vec<HostPattern>, limit: usize) -> Self {
        Self::with_addresses(hosts, limit, is_public)
    }

    fn with_addresses(
        hosts: Vec<HostPattern>,
        limit: usize,
        is_allowed: fn(std::net::IpAddr) -> bool,
    ) -> Self {
        let config = Agent::config_builder()
            .tls_config(TlsConfig::builder().root_certs(RootCerts::PlatformVerifier).build())
            .proxy(None)
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_global(Some(PATIENCE))
            .user_agent(concat!("paguro/", env!("CARGO_PKG_VERSION")))
            .build();
        let resolver = CheckedResolver { system: DefaultResolver::default(), is_allowed };
        Self {
            hosts,
            agent: Agent::with_parts(config, DefaultConnector::default(), resolver),
            limit,
            fetches: Arc::new(Semaphore::new(MOST_FETCHES)),
            of_clients: ClientShares::new(MOST_PER_CLIENT),
        }
    }

    /// Replaces URLs by the files that are there.
    ///
    /// # Errors
    /// A host is not allowed, or a file cannot be fetched.
    pub async fn fetch_all(&self, client: &Client, images: Vec<&mut Image>) -> Result<(), ApiError> {
        let mut waiting = Vec::new();
        for image in images {
            let ImageSource::Url(url) = &image.source else { continue };
            // All are checked before the first one is fetched.
            let url = self.check(url, None).map_err(|problem| image.refuse(problem))?;
            waiting.push(self.fetch(client, image, url));
        }
        futures_util::future::try_join_all(waiting).await.map(drop)
    }

    async fn fetch(&self, client: &Client, image: &mut Image, url: Uri) -> Result<(), ApiError> {
        let busy = || ApiError::Unavailable("no more images are fetched now".into());
        let own = self.of_clients.of(client);
        let _own = own.acquire().await.map_err(|_| busy())?;
        let permit = self.fetches.clone().acquire_owned().await.map_err(|_| busy())?;
        let (agent, hosts, limit) = (self.agent.clone(), self.hosts.clone(), self.limit);
        let fetched = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            download(&agent, &hosts, url, limit)
        });
        let fetched = fetched.await.map_err(|_| ApiError::Internal("fetching an image has failed".into()))?;
        let bytes = fetched.map_err(|problem| image.refuse(format_args!("cannot be fetched: {problem}")))?;
        image.source = ImageSource::Bytes(bytes.into());
        Ok(())
    }

    fn check(&self, url: &str, before: Option<&Uri>) -> Result<Uri, String> {
        check(&self.hosts, url, before)
    }
}

/// Parses a URL and checks its scheme and host. `before` is the URL that redirects to it.
fn check(hosts: &[HostPattern], url: &str, before: Option<&Uri>) -> Result<Uri, String> {
    if hosts.is_empty() {
        return Err("is at a URL, and this server fetches none; send the image in a data URL, or start the server with \
                    --image-urls HOST"
            .into());
    }
    // The part after `#` is not sent.
    let url = url.split('#').next().unwrap_or_default();
    let url: Uri = url.parse().map_err(|_| "is not a valid URL".to_owned())?;
    let default_port = match (url.scheme_str(), before.and_then(Uri::scheme_str)) {
        (Some("https"), _) => 443,
        (Some("http"), Some("https")) => return Err("is redirected from https to http".into()),
        (Some("http"), _) => 80,
        _ => return Err("is not a URL of http or https".into()),
    };
    let authority = url.authority().ok_or("is a URL without a host")?;
    if authority.as_str().contains('@') {
        return Err("is a URL with a user's name; send it without".into());
    }
    let port = url.port_u16().unwrap_or(default_port);
    if hosts.iter().any(|pattern| pattern.fits(authority.host(), port, default_port)) {
        return Ok(url);
    }
    let host: String = authority.as_str().chars().take(100).collect();
    Err(format!(
        "is at `{host}`, from which this server fetches no images; --image-urls names the allowed hosts"
    ))
}

/// Downloads a file of at most `limit` bytes.
fn download(agent: &Agent, hosts: &[HostPattern], mut url: Uri, limit: usize) -> Result<Vec<u8>, String> {
    for _ in 0..=MAX_REDIRECTS {
        let response =
            agent.get(&url).header(header::ACCEPT, "image/*").call().map_err(|error| problem(&error))?;
        if !response.status().is_redirection() {
            return body(response, limit);
        }
        let location = response.headers().get(header::LOCATION).and_then(|value| value.to_str().ok());
        let location = location.ok_or("the server redirects it to nowhere")?;
        let target = absolute(&url, location)?;
        url = check(hosts, &target, Some(&url))
            .map_err(|problem| format!("the redirect's target {problem}"))?;
    }
    Err(format!("it is redirected more than {MAX_REDIRECTS} times"))
}

/// Returns the URL of a redirect.
fn absolute(from: &Uri, location: &str) -> Result<String, String> {
    let authority = from.authority().map_or("", |authority| authority.as_str());
    let scheme = from.scheme_str().unwrap_or("https");
    if location.starts_with("//") {
        return Ok(format!("{scheme}:{location}"));
    }
    if location.starts_with('/') {
        return Ok(format!("{scheme}://{authority}{location}"));
    }
    if location.contains("://") {
        return Ok(location.to_owned());
    }
    let folder = from.path().rsplit_once('/').map_or("", |(folder, _)| folder);
    Ok(format!("{scheme}://{authority}{folder}/{location}"))
}

fn body(response: Response<ureq::Body>, limit: usize) -> Result<Vec<u8>, String> {
    if response.status() != 200 {
        return Err(format!("the server answers with status {}", response.status().as_u16()));
    }
    let too_large = || format!("it has more than {limit} bytes");
    let body = response.into_body();
    if body.content_length().is_some_and(|length| length > limit as u64) {
        return Err(too_large());
    }
    let bytes = body.into_with_config().limit(limit as u64 + 1).read_to_vec();
    match bytes {
        Ok(bytes) if bytes.len() <= limit => Ok(bytes),
        Ok(_) | Err(Error::BodyExceedsLimit(_)) => Err(too_large()),
        Err(error) => Err(problem(&error)),
    }
}

/// Describes an error without the content of an answer.
fn problem(error: &Error) -> String {
    match error {
        Error::Timeout(_) => format!("it took more than {} seconds", PATIENCE.as_secs()),
        Error::HostNotFound => "its host is unknown".into(),
        Error::Io(error) if error.to_string().contains(PRIVATE) => PRIVATE.into(),
        Error::Io(error) if error.to_string().contains("lookup address") => "its host is unknown".into(),
        Error::Io(error) => format!("the connection failed ({})", error.kind()),
        Error::Tls(_) | Error::Rustls(_) => "the certificate of its host is not trusted".into(),
        _ => "the server's answer is not valid HTTP".into(),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        net::{IpAddr, TcpListener},
        thread,
    };

    use paguro_vision::Detail;

    use super::*;

    fn patterns(list: &[&str]) -> Vec<HostPattern> {
        list.iter().map(|pattern| pattern.parse().unwrap()).collect()
    }

    #[test]
    fn only_hosts_of_the_list_are_allowed() {
        let hosts = patterns(&["a.example", "*.b.example", "c.example:8080", "[2001:db8::1]"]);
        for url in [
            "http://a.example/x.png",
            "https://A.example:443/x?y#z",
            "https://a.example./",
            "http://x.y.b.example",
            "http://c.example:8080/",
            "http://[2001:db8::1]/x",
        ] {
            assert!(check(&hosts, url, None).is_ok(), "{url}");
        }
        for url in [
            "http://b.example/",
            "http://xb.example/",
            "http://a.example.evil.example/",
            "http://a.example:6379/",
            "http://c.example/",
            "http://user:key@a.example/",
            "http://a.example@evil.example/",
            "http://evil.example#a.example",
            "http://evil.example\\@a.example/",
            "ftp://a.example/",
            "file:///etc/passwd",
            "http:///x",
            "http://127.0.0.1/",
            "http://0x7f000001/",
            "//a.example/x",
        ] {
            assert!(check(&hosts, url, None).is_err(), "{url}");
        }
        let https = "https://a.example/".parse().unwrap();
        assert!(check(&hosts, "http://a.example/", Some(&https)).is_err());
        for wrong in ["", "http://a", "a/b", "*b", "a:b", "*.*", "a b"] {
            assert!(wrong.parse::<HostPattern>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn redirects_are_relative_to_the_url() {
        let from: Uri = "https://a.example/x/y.png?z".parse().unwrap();
        for (location, target) in [
            ("/b", "https://a.example/b"),
            ("b?c", "https://a.example/x/b?c"),
            ("//c.example/d", "https://c.example/d"),
            ("http://d.example/", "http://d.example/"),
        ] {
            assert_eq!(absolute(&from, location).as_deref(), Ok(target));
        }
    }

    /// A server that gives one answer to each connection.
    fn serve(answers: Vec<String>) -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        thread::spawn(move || {
            for answer in answers {
                let (mut stream, _) = listener.accept().unwrap();
                let mut request = [0; 1024];
                let _ = stream.read(&mut request);
                let _ = stream.write_all(answer.replace("PORT", &port.to_string()).as_bytes());
            }
        });
        port
    }

    fn fetched(fetcher: &ImageFetcher, url: String) -> Result<Arc<[u8]>, String> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let mut image = Image::from_url("messages[0].content[0]", url, Detail::Auto).unwrap();
        let work = fetcher.fetch_all(&Client::Local, vec![&mut image]);
        runtime.block_on(work).map_err(|error| error.to_string())?;
        match image.source {
            ImageSource::Bytes(bytes) => Ok(bytes),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn private_addresses_are_refused_also_after_a_redirect() {
        let local = |port: u16| vec![HostPattern { host: "*".into(), port: Some(port) }];
        let port = serve(Vec::new());
        for host in
            ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "0x7f.1", "2130706433"]
        {
            let refused = fetched(&ImageFetcher::new(local(port), 100), format!("http://{host}:{port}/"));
            let refused = refused.unwrap_err();
            assert!(refused.contains(PRIVATE) || refused.contains("unknown"), "{host}: {refused}");
        }
        // A public host that redirects into the private network; here, 127.0.0.2 is public.
        fn second(address: IpAddr) -> bool {
            address == IpAddr::from([127, 0, 0, 2])
        }
        let ok = |address: IpAddr| address.is_loopback();
        let redirect = |to: &str| {
            format!("HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        };
        let found = "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\npng".to_owned();
        let port = serve(vec![redirect("http://127.0.0.1:PORT/b"), found.clone()]);
        let fetcher = ImageFetcher::with_addresses(local(port), 100, ok);
        assert_eq!(fetched(&fetcher, format!("http://127.0.0.1:{port}/a")).as_deref(), Ok(&b"png"[..]));
        let listener = TcpListener::bind("127.0.0.2:0");
        if let Ok(listener) = listener {
            let port = listener.local_addr().unwrap().port();
            let answer = redirect(&format!("http://127.0.0.1:{port}/secret"));
            thread::spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                let _ = stream.read(&mut [0; 1024]);
                let _ = stream.write_all(answer.as_bytes());
            });
            let fetcher = ImageFetcher::with_addresses(local(port), 100, second);
            let refused = fetched(&fetcher, format!("http://127.0.0.2:{port}/a")).unwrap_err();
            assert!(refused.contains(PRIVATE), "{refused}");
        }
    }

    #[test]
    fn sizes_statuses_and_redirects_are_bounded() {
        let ok = |address: IpAddr| address.is_loopback();
        let cases = [
            (
                "HTTP/1.1 200 OK\r\nContent-Length: 101\r\nConnection: close\r\n\r\n".to_owned(),
                "more than 100 bytes",
            ),
            (
                format!("HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{}", "x".repeat(101)),
                "more than 100 bytes",
            ),
            ("HTTP/1.1 404 No\r\nContent-Length: 6\r\nConnection: close\r\n\r\nsecret".into(), "status 404"),
            ("HTTP/1.1 302 Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".into(), "nowhere"),
            ("garbage\r\n\r\n".into(), "not valid HTTP"),
        ];
        for (answer, problem) in cases {
            let port = serve(vec![answer]);
            let hosts = vec![HostPattern { host: "*".into(), port: Some(port) }];
            let fetcher = ImageFetcher::with_addresses(hosts, 100, ok);
            let refused = fetched(&fetcher, format!("http://127.0.0.1:{port}/")).unwrap_err();
            assert!(refused.contains(problem) && !refused.contains("secret"), "{refused}");
        }
        let again =
            "HTTP/1.1 302 Found\r\nLocation: /x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".to_owned();
        let port = serve(vec![again; 8]);
        let hosts = vec![HostPattern { host: "*".into(), port: Some(port) }];
        let refused =
            fetched(&ImageFetcher::with_addresses(hosts, 100, ok), format!("http://127.0.0.1:{port}/"));
        assert!(refused.unwrap_err().contains("more than 3 times"));
        let refused = fetched(&ImageFetcher::new(Vec::new(), 100), "http://a.example/x".into()).unwrap_err();
        assert!(refused.contains("--image-urls"), "{refused}");
    }
}
