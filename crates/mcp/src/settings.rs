//! Settings of tool servers.

use std::{ffi::OsString, fmt, time::Duration};

use ureq::http::{HeaderName, HeaderValue, Uri};

/// Maximum length of a server's name.
const MAX_NAME: usize = 40;

/// Settings of a tool server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct McpServer {
    /// Its name, for display and in calls.
    pub name: String,
    /// Its transport.
    pub transport: McpTransport,
    /// Tools that are called without confirmation.
    pub trust: Trust,
    /// Maximum time to start and to answer.
    pub timeout: Duration,
}

/// Transport of a tool server.
#[derive(Clone, PartialEq, Eq)]
pub enum McpTransport {
    /// A program that this server starts; messages pass through its standard streams.
    Program {
        /// Its path, or a name that is looked up in `PATH`.
        program: String,
        /// Its arguments.
        arguments: Vec<String>,
        /// Its whole environment.
        environment: Vec<(OsString, OsString)>,
    },
    /// An address that serves the transport *Streamable HTTP*.
    Http {
        /// The address.
        url: String,
        /// Headers of every request, such as a key.
        headers: Vec<(String, String)>,
    },
}

/// Tools that are called without confirmation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trust {
    /// All of a server's tools.
    All,
    /// The tools of these names.
    Tools(Vec<String>),
}

impl Trust {
    /// Returns true if a tool is called without confirmation.
    pub fn covers(&self, tool: &str) -> bool {
        match self {
            Self::All => true,
            Self::Tools(names) => names.iter().any(|name| name == tool),
        }
    }
}

impl McpServer {
    /// Default timeout of a server. Programs that are installed on their first run take long.
    pub const TIMEOUT: Duration = Duration::from_secs(60);

    /// Validates the settings without starting the server.
    ///
    /// # Errors
    /// The problem and its solution.
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
                    // The value may be a key, so it is not shown.
                    Some((name, _)) => Err(format!(
                        "the header {name:?} cannot be sent: it has characters that headers do not"
                    )),
                    None => Ok(()),
                }
            }
        }
    }

    /// Returns the program with its arguments, or the address, for display. Secrets are in the environment and the
    /// headers only.
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
    /// Omits the values of the environment and of headers, which are secrets.
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
