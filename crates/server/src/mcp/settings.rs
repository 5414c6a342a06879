//! How servers of tools are set up.

use std::{ffi::OsString, fmt, time::Duration};

use axum::http::{HeaderName, HeaderValue, Uri};

use crate::keys::Scope;

/// Longest name of a server.
const MAX_NAME: usize = 40;

/// A server of tools.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct McpServer {
    /// Its name, for people and in calls.
    pub name: String,
    /// The way to it.
    pub transport: McpTransport,
    /// Scope that a key needs to see and call its tools.
    pub scope: Scope,
    /// Tools that the page calls without a question.
    pub trust: Trust,
    /// How long it may take to start and to answer.
    pub timeout: Duration,
}

/// The way to a server of tools.
#[derive(Clone, PartialEq, Eq)]
pub enum McpTransport {
    /// A program that is started, and spoken to through its standard streams.
    Program {
        /// Its path, or a name that is found as a shell would.
        program: String,
        /// Its arguments.
        arguments: Vec<String>,
        /// Its whole environment.
        environment: Vec<(OsString, OsString)>,
    },
    /// An address of the transport *Streamable HTTP*.
    Http {
        /// The address.
        url: String,
        /// Headers of every request: often a key.
        headers: Vec<(String, String)>,
    },
}

/// Tools that are called without a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trust {
    /// All of a server's tools.
    All,
    /// The tools of these names.
    Tools(Vec<String>),
}

impl Trust {
    /// True if a tool is called without a question.
    pub fn covers(&self, tool: &str) -> bool {
        match self {
            Self::All => true,
            Self::Tools(names) => names.iter().any(|name| name == tool),
        }
    }
}

impl McpServer {
    /// How long a server may take unless it is told otherwise. Programs that are installed when they first run take long.
    pub const TIMEOUT: Duration = Duration::from_secs(60);

    /// Checks what can be checked without starting it.
    ///
    /// # Errors
    /// What is wrong, and how it would be right.
    pub fn check(&self) -> Result<(), String> {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        if self.name.is_empty() || self.name.len() > MAX_NAME || !self.name.chars().all(is_plain) {
            return Err(format!(
                "the name {:?} must have 1 to {MAX_NAME} letters, digits, `-` or `_`",
                self.name.chars().take(80).collect::<String>()
            ));
        }
        match &self.transport {
            McpTransport::Program { program, .. } if program.trim().is_empty() => {
                Err("`command` is empty".into())
            }
            McpTransport::Program { .. } => Ok(()),
            McpTransport::Http { url, headers } => {
                let parsed = url.parse::<Uri>().ok();
                let is_web = parsed.is_some_and(|uri| {
                    matches!(uri.scheme_str(), Some("http" | "https"))
                        && uri.host().is_some_and(|host| !host.is_empty())
                });
                if !is_web {
                    return Err(format!("`url` must begin with http:// or https://, and is {url:?}"));
                }
                let bad = headers.iter().find(|(name, value)| {
                    name.parse::<HeaderName>().is_err() || value.parse::<HeaderValue>().is_err()
                });
                match bad {
                    // The value may be a key.
                    Some((name, _)) => Err(format!(
                        "the header {name:?} cannot be sent: it has characters that headers do not"
                    )),
                    None => Ok(()),
                }
            }
        }
    }

    /// The program with its arguments, or the address, for people. Neither has secrets as the environment and headers do.
    pub fn place(&self) -> String {
        match &self.transport {
            McpTransport::Program { program, arguments, .. } => {
                let words = [program].into_iter().chain(arguments).map(String::as_str);
                words.collect::<Vec<_>>().join(" ")
            }
            McpTransport::Http { url, .. } => url.split('?').next().unwrap_or_default().to_owned(),
        }
    }
}

impl fmt::Debug for McpTransport {
    /// Without values of the environment and of headers, which are secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Program { program, .. } => {
                f.debug_struct("Program").field("program", program).finish_non_exhaustive()
            }
            Self::Http { .. } => f.debug_struct("Http").finish_non_exhaustive(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_addresses_are_checked() {
        let http = |name: &str, url: &str, header: &str| {
            let headers = vec![("Authorization".to_owned(), header.to_owned())];
            McpServer {
                name: name.to_owned(),
                transport: McpTransport::Http { url: url.to_owned(), headers },
                scope: Scope::Admin,
                trust: Trust::Tools(Vec::new()),
                timeout: McpServer::TIMEOUT,
            }
            .check()
        };
        assert_eq!(http("search-1", "https://example.com/mcp", "Bearer x"), Ok(()));
        for (name, url, header, problem) in [
            ("", "http://localhost/", "x", "1 to 40 letters"),
            ("a b", "http://localhost/", "x", "1 to 40 letters"),
            (&"a".repeat(41), "http://localhost/", "x", "1 to 40 letters"),
            ("a", "file:///etc/passwd", "x", "must begin with http://"),
            ("a", "example.com", "x", "must begin with http://"),
            ("a", "http://", "x", "must begin with http://"),
            ("a", "http://localhost/", "two\nlines", "\"Authorization\" cannot be sent"),
        ] {
            let error = http(name, url, header).unwrap_err();
            assert!(error.contains(problem), "{error}");
            assert!(!error.contains("two"), "{error}");
        }
    }
}
