//! The sender of a request, as its headers describe it: a program, the server's own page, or a page of another site.
//!
//! Browsers add `Origin` and `Sec-Fetch-Site`, and pages cannot change them. A page that has rebound its DNS name to
//! this server has the origin of that name, so the name in `Host` decides.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use axum::http::{HeaderMap, Method, Uri, header};

use super::routes::Effect;
use crate::{error::ApiError, settings::ServerSettings};

/// Schemes of applications with an embedded browser. No web site can use them.
const APPS: [&str; 5] = ["app", "capacitor", "tauri", "vscode-file", "vscode-webview"];

/// Name under which containers reach their host.
const DOCKER: &str = "host.docker.internal";

/// Header with the token of the page.
pub const PAGE_TOKEN: &str = "x-paguro-page";

/// Sender of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sender {
    /// A program that is not a browser.
    Program,
    /// A page of this server.
    Page,
    /// A page of an origin that the settings name.
    Allowed,
    /// Something on this machine: a page of another port, an application with an embedded browser, or the user's own
    /// navigation. If all origins are allowed, every other page as well.
    Local,
    /// A page of another site, without an origin.
    Foreign {
        /// True if the user followed a link to this server.
        navigates: bool,
    },
}

/// Name by which a request addresses this server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Name {
    /// A name that no other machine can have: a loopback address, or one that the settings allow.
    Certain,
    /// A name that other machines of a network may claim as well.
    Shared,
}

/// Returns the host that the request addresses.
pub fn host(headers: &HeaderMap, uri: &Uri) -> Option<String> {
    let header = headers.get(header::HOST).and_then(|host| host.to_str().ok());
    header.or_else(|| uri.authority().map(|authority| authority.as_str())).map(str::to_ascii_lowercase)
}

/// Checks the host of a request at a loopback address. A web page that has rebound its DNS name sends that name.
///
/// # Errors
/// The name is not one of this server.
pub fn name(host: Option<&str>, settings: &ServerSettings) -> Result<Name, ApiError> {
    let Some(host) = host else {
        return Err(ApiError::Forbidden("the request has no `Host` header".into()));
    };
    let name = without_port(host);
    let is = |other: &String| other.eq_ignore_ascii_case(name);
    if is_loopback(name) || settings.hosts.iter().any(|other| is(other) || other.eq_ignore_ascii_case(host)) {
        return Ok(Name::Certain);
    }
    if name == DOCKER || settings.own_names.iter().any(is) {
        return Ok(Name::Shared);
    }
    Err(ApiError::Forbidden(format!(
        "this server is not `{host}`: it listens for this machine only; --allow-host {name} allows the name"
    )))
}

/// Returns true for `localhost` and loopback addresses. Names that end with `.localhost` are not among them: some
/// browsers ask DNS for their addresses.
fn is_loopback(name: &str) -> bool {
    let name = name.strip_suffix('.').unwrap_or(name);
    let address = match name.strip_prefix('[').and_then(|name| name.strip_suffix(']')) {
        Some(name) => name.parse::<Ipv6Addr>().ok().map(IpAddr::V6),
        None => name.parse::<Ipv4Addr>().ok().map(IpAddr::V4),
    };
    name.eq_ignore_ascii_case("localhost")
        || address.is_some_and(|address| address.to_canonical().is_loopback())
}

fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    }
}

/// Returns true for the origin of an application with an embedded browser. Tauri on Windows has a host name instead of
/// a scheme.
fn is_app(origin: &str) -> bool {
    let scheme = origin.split_once("://").map(|(scheme, _)| scheme);
    scheme.is_some_and(|scheme| APPS.contains(&scheme))
        || matches!(origin, "http://tauri.localhost" | "https://tauri.localhost")
}

/// Returns true for an origin on this machine: an application, or a page of any port of a loopback address.
pub fn is_local(origin: &str) -> bool {
    let site = match origin.split_once("://") {
        Some(("http" | "https", site)) => site,
        _ => return is_app(origin),
    };
    is_app(origin) || is_loopback(without_port(site))
}

impl Sender {
    /// Returns the sender of a request.
    ///
    /// # Errors
    /// It is a page of an origin that is not allowed.
    pub fn of(headers: &HeaderMap, host: Option<&str>, allowed: &[String]) -> Result<Self, ApiError> {
        // Node's `fetch` sends `Sec-Fetch-Mode` alone; browsers send all of these headers.
        let mut sites = headers.get_all("sec-fetch-site").iter().peekable();
        let has_site = sites.peek().is_some();
        let (mut crosses, mut typed) = (false, false);
        for site in sites {
            crosses |= site != "same-origin" && site != "none";
            typed |= site == "none";
        }
        let mut origins = headers.get_all(header::ORIGIN).iter();
        let Some(origin) = origins.next() else {
            let is = |name: &str, value: &str| headers.get(name).is_some_and(|given| given == value);
            return Ok(match (crosses, has_site) {
                (true, _) => Self::Foreign {
                    navigates: is("sec-fetch-mode", "navigate") && is("sec-fetch-dest", "document"),
                },
                (false, true) if typed => Self::Local,
                (false, true) => Self::Page,
                (false, false) => Self::Program,
            });
        };
        if origins.next().is_some() {
            return Err(ApiError::Forbidden("the request has more than one `Origin` header".into()));
        }
        let Ok(origin) = origin.to_str() else {
            return Err(ApiError::Forbidden("the `Origin` header is not ASCII text".into()));
        };
        let origin = origin.to_ascii_lowercase();
        if allowed.iter().any(|other| other.eq_ignore_ascii_case(&origin)) {
            return Ok(Self::Allowed);
        }
        match origin.split_once("://") {
            Some(("http" | "https", site)) if !crosses && host == Some(site) => Ok(Self::Page),
            _ if is_local(&origin) || allowed.iter().any(|other| other == "*") => Ok(Self::Local),
            _ => Err(ApiError::Forbidden(format!(
                "pages from `{origin}` may not use this server; --cors-origin {origin} allows them"
            ))),
        }
    }

    /// Checks that the sender may use a route without a key. Returns true if it may also change something.
    ///
    /// # Errors
    /// The sender is a page of another site, or the request lacks the token of the page.
    pub fn check(
        self,
        effect: Effect,
        method: &Method,
        name: Name,
        has_token: bool,
    ) -> Result<bool, ApiError> {
        let refused = |message: &str| Err(ApiError::Forbidden(message.into()));
        // A page at such a name sends `GET` without both headers, so it looks like a program.
        let is_certain =
            name == Name::Certain || self == Self::Program && !matches!(*method, Method::GET | Method::HEAD);
        let may_change = match self {
            Self::Allowed => true,
            Self::Program => is_certain,
            Self::Page => is_certain && has_token,
            Self::Local | Self::Foreign { .. } => false,
        };
        match (self, effect) {
            (Self::Foreign { navigates: true }, Effect::Reads) => Ok(false),
            (Self::Foreign { .. }, _) => refused(
                "a page of another site may not do this; --cors-origin allows requests of its scripts",
            ),
            (_, Effect::Reads | Effect::Generates) => Ok(may_change),
            (_, Effect::Shows | Effect::Changes) if may_change => Ok(true),
            (Self::Local, _) => refused(
                "only the server's own page, and pages that --cors-origin names, may do this without an API key",
            ),
            _ if !is_certain => refused(
                "other machines may have this name as well; use http://localhost, or --allow-host with the name",
            ),
            (_, Effect::Shows) => Ok(false),
            (_, Effect::Changes) => {
                refused("the request lacks the token of the server's page; reload the page")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::http::{HeaderName, HeaderValue};

    use super::*;

    #[test]
    fn names_of_this_machine_pass_and_others_do_not() {
        let settings = ServerSettings {
            hosts: vec!["Box.lan".into(), "proxy.localhost".into()],
            own_names: vec!["laptop".into()],
            ..ServerSettings::for_tests()
        };
        let (certain, shared) = (Some(Name::Certain), Some(Name::Shared));
        for (host, expected) in [
            ("localhost:11434", certain),
            ("localhost.", certain),
            ("LOCALHOST", certain),
            ("127.0.0.1", certain),
            ("127.0.0.2:80", certain),
            ("[::1]:80", certain),
            ("[0:0:0:0:0:0:0:1]", certain),
            ("[::ffff:127.0.0.1]:1", certain),
            ("box.lan:1", certain),
            ("proxy.localhost", certain),
            ("host.docker.internal:11434", shared),
            ("laptop:11434", shared),
            ("laptop.local", None),
            ("evil.internal", None),
            ("evil.local", None),
            ("evil.lan", None),
            (".localhost", None),
            ("evil.localhost", None),
            ("localhost.evil.example", None),
            ("127.0.0.1.evil.example", None),
            ("127.0.0.1@evil.example", None),
            ("0.0.0.0:11434", None),
            ("192.168.0.2", None),
            ("[::1", None),
            ("::1", None),
            ("", None),
        ] {
            assert_eq!(name(Some(host), &settings).ok(), expected, "{host}");
        }
        assert!(name(None, &settings).is_err());
    }

    fn sender(headers: &[(&str, &str)], allowed: &[&str]) -> Option<Sender> {
        let pair = |(name, value): &(&str, &str)| {
            (name.parse::<HeaderName>().unwrap(), HeaderValue::try_from(*value).unwrap())
        };
        let mut map = HeaderMap::new();
        for (name, value) in headers.iter().map(pair) {
            map.append(name, value);
        }
        let allowed: Vec<_> = allowed.iter().map(|&origin| origin.to_owned()).collect();
        Sender::of(&map, Some("localhost:11434"), &allowed).ok()
    }

    #[test]
    fn origins_name_the_sender() {
        let allowed = ["https://chat.example", "chrome-extension://Allowed"];
        for (origin, expected) in [
            ("http://localhost:11434", Some(Sender::Page)),
            ("HTTP://LOCALHOST:11434", Some(Sender::Page)),
            ("https://chat.example", Some(Sender::Allowed)),
            ("chrome-extension://allowed", Some(Sender::Allowed)),
            ("http://localhost:3000", Some(Sender::Local)),
            ("http://localhost", Some(Sender::Local)),
            ("https://127.0.0.1:5173", Some(Sender::Local)),
            ("http://[::1]:8080", Some(Sender::Local)),
            ("vscode-webview://abc", Some(Sender::Local)),
            ("app://obsidian.md", Some(Sender::Local)),
            ("http://tauri.localhost", Some(Sender::Local)),
            ("http://tauri.localhost.evil.example", None),
            ("http://evil.localhost", None),
            ("http://localhost.evil.example", None),
            ("http://127.0.0.1.evil.example", None),
            ("http://localhost@evil.example", None),
            ("https://evil.example", None),
            ("HTTP://evil.example", None),
            ("ws://localhost:11434", None),
            ("chrome-extension://abc", None),
            ("moz-extension://abc", None),
            ("file://", None),
            ("http://localhost:11434/", None),
            ("localhost:11434", None),
            ("", None),
            ("null", None),
            ("NULL", None),
        ] {
            assert_eq!(sender(&[("origin", origin)], &allowed), expected, "{origin}");
            let any = sender(&[("origin", origin)], &["*"]);
            assert_eq!(
                any,
                Some(expected.filter(|e| *e == Sender::Page).unwrap_or(Sender::Local)),
                "{origin}"
            );
        }
        for pair in ["https://evil.example", "http://localhost:11434"] {
            assert_eq!(sender(&[("origin", "http://localhost:11434"), ("origin", pair)], &[]), None);
        }
        assert_eq!(sender(&[("origin", "http://l\u{f6}calhost")], &[]), None);
    }

    #[test]
    fn requests_without_an_origin_are_told_by_their_marks() {
        let (site, mode, dest) = ("sec-fetch-site", "sec-fetch-mode", "sec-fetch-dest");
        let foreign = |navigates| Some(Sender::Foreign { navigates });
        for (headers, expected) in [
            (&[][..], Some(Sender::Program)),
            (&[(site, "same-origin")], Some(Sender::Page)),
            (&[(site, "none"), (mode, "navigate")], Some(Sender::Local)),
            (&[(site, "cross-site"), (mode, "no-cors"), (dest, "image")], foreign(false)),
            (&[(site, "same-site"), (mode, "no-cors"), (dest, "script")], foreign(false)),
            (&[(site, "cross-site"), (mode, "navigate"), (dest, "document")], foreign(true)),
            (&[(site, "cross-site"), (mode, "navigate"), (dest, "iframe")], foreign(false)),
            (&[(site, "same-origin"), (site, "cross-site")], foreign(false)),
            (&[(site, "Same-Origin")], foreign(false)),
            (&[(mode, "cors")], Some(Sender::Program)),
            (&[(site, "cross-site"), ("origin", "http://localhost:3000")], Some(Sender::Local)),
            // The port is the same, and the scheme is not.
            (&[(site, "cross-site"), ("origin", "https://localhost:11434")], Some(Sender::Local)),
        ] {
            assert_eq!(sender(headers, &[]), expected, "{headers:?}");
        }
    }
}
