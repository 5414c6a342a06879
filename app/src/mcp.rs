//! `[[mcp]]` tables of a server's settings file: tool servers for the chat of the web page.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsString,
};

use paguro_mcp::{McpServer, McpTransport, Trust};
use paguro_server::{McpSetting, Scope};
use serde::Deserialize;

use crate::{
    cli::Time,
    failure::{Failure, Outcome},
};

/// One `[[mcp]]` table.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct McpOptions {
    name: String,
    /// Program that the server starts, alone or in a list with its arguments.
    command: Option<Command>,
    #[serde(default)]
    args: Vec<String>,
    /// Environment variables of the program, in addition to the inherited ones.
    #[serde(default)]
    env: BTreeMap<String, String>,
    /// URL of the tool server, instead of `command`.
    url: Option<String>,
    #[serde(default)]
    headers: BTreeMap<String, String>,
    scope: Option<Scope>,
    trusted: Option<Trusted>,
    timeout: Option<Time>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged, expecting = "`command` must be a program, or a list of a program and its arguments")]
enum Command {
    Program(String),
    Words(Vec<String>),
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged, expecting = "`trusted` must be true, false, or a list of tools")]
enum Trusted {
    All(bool),
    Tools(Vec<String>),
}

/// Environment variables that programs inherit, in upper case. All others may contain secrets, so they are not inherited.
const INHERITED_VARIABLES: [&str; 24] = [
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "TERM",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TMPDIR",
    "TEMP",
    "TMP",
    "APPDATA",
    "LOCALAPPDATA",
    "COMSPEC",
    "HOMEDRIVE",
    "HOMEPATH",
    "PATHEXT",
    "PROGRAMFILES",
    "SYSTEMDRIVE",
    "SYSTEMROOT",
    "USERNAME",
    "USERPROFILE",
];

/// Returns the variables of an environment that programs inherit.
pub fn inherited(environment: impl Iterator<Item = (OsString, OsString)>) -> Vec<(OsString, OsString)> {
    let is_inherited = |(name, _): &(OsString, OsString)| {
        name.to_str().is_some_and(|name| INHERITED_VARIABLES.contains(&name.to_uppercase().as_str()))
    };
    environment.filter(is_inherited).collect()
}

/// Converts the tables of a file to tool servers. Their programs inherit `environment`.
///
/// # Errors
/// A table has invalid settings, or the name of an earlier table. The message names it and the reason.
pub fn servers(options: &[McpOptions], environment: &[(OsString, OsString)]) -> Outcome<Vec<McpSetting>> {
    let mut names = BTreeSet::new();
    let server = |options: &McpOptions| {
        let server = options.server(environment).and_then(|server| server.check().map(|()| server));
        let server =
            server.map_err(|problem| Failure::usage(format!("mcp {:?}: {problem}", options.name)))?;
        if !names.insert(server.name.clone()) {
            return Err(Failure::usage(format!("two tool servers have the name {:?}", server.name)));
        }
        Ok(McpSetting { server, scope: options.scope.unwrap_or(Scope::Admin) })
    };
    options.iter().map(server).collect()
}

impl McpOptions {
    fn server(&self, environment: &[(OsString, OsString)]) -> Result<McpServer, String> {
        let transport = match (&self.command, &self.url) {
            (Some(command), None) if self.headers.is_empty() => {
                let (program, mut arguments) = match command {
                    Command::Program(program) => (program.clone(), Vec::new()),
                    Command::Words(words) => {
                        let (program, rest) = words.split_first().ok_or("`command` is empty")?;
                        (program.clone(), rest.to_vec())
                    }
                };
                arguments.extend(self.args.iter().cloned());
                let own = self.env.iter().map(|(name, value)| (name.into(), value.into()));
                let environment = environment.iter().cloned().chain(own).collect();
                McpTransport::Program { program, arguments, environment }
            }
            (None, Some(url)) if self.args.is_empty() && self.env.is_empty() => McpTransport::Http {
                url: url.clone(),
                headers: self.headers.iter().map(|(name, value)| (name.clone(), value.clone())).collect(),
            },
            (Some(_), None) => return Err("`headers` belong to `url`, but it has `command`".into()),
            (None, Some(_)) => return Err("`args` and `env` belong to `command`, but it has `url`".into()),
            (Some(_), Some(_)) => {
                return Err("it has both `command` and `url`; keep one of them".into());
            }
            (None, None) => {
                return Err("it has neither `command` nor `url`; set one of them".into());
            }
        };
        let trust = match &self.trusted {
            Some(Trusted::All(true)) => Trust::All,
            Some(Trusted::Tools(tools)) => Trust::Tools(tools.clone()),
            Some(Trusted::All(false)) | None => Trust::Tools(Vec::new()),
        };
        Ok(McpServer {
            name: self.name.clone(),
            transport,
            trust,
            timeout: self.timeout.map_or(McpServer::TIMEOUT, |time| time.0),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Vec<McpSetting>, String> {
        #[derive(Deserialize)]
        struct File {
            mcp: Vec<McpOptions>,
        }
        let file: File = toml::from_str(text).map_err(|error| error.to_string())?;
        let environment =
            inherited([("PATH".into(), "/bin".into()), ("SECRET".into(), "1".into())].into_iter());
        servers(&file.mcp, &environment).map_err(|failure| failure.message().to_owned())
    }

    #[test]
    fn programs_and_addresses_are_read() {
        let servers = read(
            r#"
            [[mcp]]
            name = "files"
            command = ["npx", "-y"]
            args = ["server-filesystem", "/notes"]
            env = { LEVEL = "2" }
            trusted = ["read_file"]
            [[mcp]]
            name = "search"
            url = "https://example.com/mcp"
            headers = { Authorization = "Bearer secret" }
            scope = "inference"
            trusted = true
            timeout = "5s"
            "#,
        )
        .unwrap();
        let [files, search] = &servers[..] else { panic!("{servers:?}") };
        let McpTransport::Program { program, arguments, environment } = &files.server.transport else {
            panic!()
        };
        assert_eq!((program.as_str(), arguments.join(" ").as_str()), ("npx", "-y server-filesystem /notes"));
        assert_eq!(environment, &[("PATH".into(), "/bin".into()), ("LEVEL".into(), "2".into())]);
        assert_eq!((files.scope, search.scope), (Scope::Admin, Scope::Inference));
        assert!(files.server.trust.covers("read_file") && !files.server.trust.covers("write_file"));
        assert!(search.server.trust.covers("anything") && search.server.timeout.as_secs() == 5);
        assert!(!format!("{servers:?}").contains("secret"));
    }

    #[test]
    fn mistakes_are_named() {
        for (text, problem) in [
            ("name = 'a'", "neither `command` nor `url`"),
            ("name = 'a'\ncommand = 'x'\nurl = 'http://localhost'", "both `command` and `url`"),
            ("name = 'a'\ncommand = 'x'\nheaders = { A = 'b' }", "`headers` belong to `url`"),
            ("name = 'a'\nurl = 'http://localhost'\nargs = ['b']", "`args` and `env` belong to `command`"),
            ("name = 'a'\ncommand = []", "`command` is empty"),
            ("name = 'a'\ncommand = ' '", "`command` is empty"),
            ("name = 'a b'\ncommand = 'x'", "1 to 40 letters"),
            ("name = 'a'\nurl = 'ftp://x'", "must begin with http://"),
            ("name = 'a'\ncomand = 'x'", "unknown field `comand`"),
            ("name = 'a'\ncommand = 3", "must be a program"),
            ("name = 'a'\ncommand = 'x'\nscope = 'root'", "unknown variant `root`"),
            ("name = 'a'\ncommand = 'x'\n[[mcp]]\nname = 'a'\ncommand = 'y'", "two tool servers"),
        ] {
            let error = read(&format!("[[mcp]]\n{text}")).unwrap_err();
            assert!(error.contains(problem), "{text}: {error}");
        }
    }
}
