//! Errors of the library.

use std::{error::Error, fmt, io, path::PathBuf};

use crate::{digest::Digest, found::Program};

/// Error of the library. The messages name the problem and, if known, the solution.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LibraryError {
    /// No model has this name.
    #[error("there is no model `{name}` in the library{}", did_you_mean(similar))]
    NotFound {
        /// Requested name.
        name: String,
        /// Similar names in the library, best first.
        similar: Vec<String>,
    },
    /// The name matches several models.
    #[error("`{name}` could be {}; give the whole name", list(candidates))]
    Ambiguous {
        /// Requested name.
        name: String,
        /// Names that it could mean.
        candidates: Vec<String>,
    },
    /// A name that no model can have.
    #[error(
        "`{name}` cannot be a model's name: {problem} (a name is `model`, `model:tag` or `owner/model:tag`, of letters, digits, `.`, `_` and `-`)"
    )]
    BadName {
        /// The name.
        name: String,
        /// The reason of the refusal.
        problem: &'static str,
    },
    /// Another model has this name already.
    #[error("the library has a model `{name}` already; remove it first, or choose another name")]
    NameTaken {
        /// The name.
        name: String,
    },
    /// Not a reference to a model on a hub.
    #[error("`{text}` is neither a short name nor a Hugging Face reference: {problem}")]
    BadReference {
        /// The text as given.
        text: String,
        /// The reason of the refusal, and the right form.
        problem: String,
    },
    /// A digest that is not one.
    #[error("`{text}` is not a digest: it must be `sha256:` and 64 hexadecimal digits")]
    BadDigest {
        /// The text as given.
        text: String,
    },
    /// Content that does not match its digest.
    #[error("the SHA-256 of {what} is {found}, expected {expected}")]
    DigestMismatch {
        /// The file or upload.
        what: String,
        /// The expected digest.
        expected: Digest,
        /// The digest of the content.
        found: Digest,
    },
    /// A downloaded file that does not match the hub's checksum.
    #[error(
        "`{file}` was damaged on its way: its checksum is {found}, the hub announced {expected}; try again"
    )]
    Checksum {
        /// The file in the repository.
        file: String,
        /// The checksum that the hub announced.
        expected: String,
        /// The checksum of the downloaded file.
        found: String,
    },
    /// A blob that the library does not have.
    #[error("the library has no blob {0}; it must be uploaded first")]
    NoBlob(Digest),
    /// A file of the library is lost or damaged.
    #[error(
        "`{file}` of the model `{name}` is damaged: {problem}; `paguro verify {name} --repair` downloads it again"
    )]
    Damaged {
        /// The model.
        name: String,
        /// Its file.
        file: String,
        /// The reason.
        problem: String,
    },
    /// A model outside of the library that no longer exists.
    #[error("the model `{name}` was imported by reference, and `{}` {problem}", path.display())]
    Moved {
        /// The model.
        name: String,
        /// Its former path.
        path: PathBuf,
        /// Its state now.
        problem: &'static str,
    },
    /// The path to import holds no model.
    #[error("cannot import `{}`: {problem}", path.display())]
    NotAModel {
        /// The path that was given.
        path: PathBuf,
        /// The reason.
        problem: String,
    },
    /// A model of another program that cannot be used.
    #[error("cannot import `{name}`: {problem}")]
    Unusable {
        /// The model.
        name: String,
        /// The reason.
        problem: String,
    },
    /// Another program has no model of this name.
    #[error(
        "{program} has no model `{name}` on this machine{}{}",
        did_you_mean(similar),
        looked_in(folders, problems)
    )]
    NotFoundThere {
        /// The program.
        program: Program,
        /// Requested name.
        name: String,
        /// Similar names there, best first.
        similar: Vec<String>,
        /// Folders of its models.
        folders: Vec<String>,
        /// Folders that cannot be read.
        problems: Vec<String>,
    },
    /// The caller's look at the model has failed.
    #[error("`{name}` cannot be opened: {source}")]
    Inspect {
        /// The model.
        name: String,
        /// The reason of the refusal.
        source: Box<dyn Error + Send + Sync>,
    },
    /// A model that this version of the program cannot run.
    #[error("this version of Paguro cannot run `{name}`: {problem}")]
    CannotRun {
        /// The model.
        name: String,
        /// The problem.
        problem: String,
    },
    /// A repository in which no model, or more than one, matches the request.
    #[error("{repo}: {problem}{}", there_is(choices))]
    Choice {
        /// The repository.
        repo: String,
        /// The missing or ambiguous part.
        problem: String,
        /// Values that are possible.
        choices: Vec<String>,
    },
    /// A repository with an unsafe file name.
    #[error("{repo} has a file named {file:?}, which could escape its folder; nothing was downloaded")]
    UnsafeFile {
        /// The repository.
        repo: String,
        /// The file's name.
        file: String,
    },
    /// The hub requires a token, or denies access.
    #[error("the hub refuses access to {what} (HTTP {status}{}); {advice}", in_parentheses(message))]
    Unauthorized {
        /// The repository or file.
        what: String,
        /// 401 or 403.
        status: u16,
        /// The hub's message, possibly empty.
        message: String,
        /// Advice for the user.
        advice: &'static str,
    },
    /// The hub does not have it.
    #[error("{endpoint} has no {what} (HTTP 404)")]
    NotOnHub {
        /// The hub.
        endpoint: String,
        /// The repository or file.
        what: String,
    },
    /// The hub answers with an error, also after some patience.
    #[error("{url} answers with HTTP {status}{}", in_parentheses(message))]
    Status {
        /// The address of the request.
        url: String,
        /// The status.
        status: u16,
        /// The hub's message, possibly empty.
        message: String,
    },
    /// The connection to the hub failed, after all retries.
    #[error("cannot get {url}: {problem}")]
    Connection {
        /// The address of the request.
        url: String,
        /// The reason.
        problem: String,
    },
    /// The hub cannot be reached.
    #[error("cannot reach {host}: {problem}")]
    Unreachable {
        /// The host, with its port where that is not the usual one.
        host: String,
        /// The error.
        problem: String,
    },
    /// The hub's answer is not one.
    #[error("{url} returns an invalid answer: {problem}")]
    BadAnswer {
        /// The address of the request.
        url: String,
        /// The reason why the answer is bad.
        problem: String,
    },
    /// An endpoint that is not an address of a hub.
    #[error("`{endpoint}` is not the address of a hub: {problem}")]
    BadEndpoint {
        /// The endpoint as given.
        endpoint: String,
        /// The reason of the refusal.
        problem: &'static str,
    },
    /// The caller has cancelled.
    #[error("cancelled")]
    Cancelled,
    /// No space is left.
    #[error("no space is left on the disk of `{}`; free some (`paguro rm NAME`, `paguro prune`) and try again", path.display())]
    DiskFull {
        /// The file or folder that could not be written.
        path: PathBuf,
    },
    /// A library that cannot be written.
    #[error("the library in `{}` is read-only ({problem}): its models can be used, but not changed", path.display())]
    ReadOnly {
        /// Path.
        path: PathBuf,
        /// The system's error.
        problem: String,
    },
    /// Another process writes to the library.
    #[error("another process is pulling, importing or verifying a model; try again when it is done")]
    Busy,
    /// The catalogue is missing or empty, and there are files that it must have named.
    #[error(
        "the catalogue of the library in `{}` is {problem}, but {blobs} files of models and {manifests} records of models are \
         there; `paguro rebuild` restores it from them (`paguro prune --force` deletes them)",
        path.display()
    )]
    CatalogueLost {
        /// Path of the library.
        path: PathBuf,
        /// `missing`, `empty` or `of another program`.
        problem: &'static str,
        /// Number of files of models.
        blobs: usize,
        /// Number of records beside them.
        manifests: usize,
    },
    /// The catalogue is not a database any more.
    #[error(
        "the library's catalogue is damaged ({problem}); `paguro rebuild` restores it from the records beside the models"
    )]
    CatalogueDamaged {
        /// SQLite's error.
        problem: String,
    },
    /// There are records of models that the catalogue does not contain.
    #[error(
        "the catalogue does not know {}, of which there are records; it may be an old copy, or another library's: `paguro \
         rebuild` restores them, `paguro prune --force` deletes their files",
        list_all(models)
    )]
    UnknownModels {
        /// Their names.
        models: Vec<String>,
    },
    /// A record beside the models that cannot be read.
    #[error("the record `{}` of a model cannot be read: {problem}; move it away to go on without it", path.display())]
    BadManifest {
        /// The file.
        path: PathBuf,
        /// The fault.
        problem: String,
    },
    /// A library that a newer version has made.
    #[error("the library in `{}` is of a newer version of Paguro (format {found}, this one knows {known})", path.display())]
    Newer {
        /// Path.
        path: PathBuf,
        /// Its format.
        found: i64,
        /// The format of this version.
        known: i64,
    },
    /// The system refuses something.
    #[error("cannot {action} `{}`: {source}", path.display())]
    Io {
        /// The attempted action: a verb.
        action: &'static str,
        /// Path of the disk.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The catalogue cannot be read or written.
    #[error("the library's catalogue cannot be read or written: {0}")]
    Catalogue(rusqlite::Error),
}

impl From<rusqlite::Error> for LibraryError {
    fn from(error: rusqlite::Error) -> Self {
        use rusqlite::ErrorCode as Code;
        match error.sqlite_error_code() {
            Some(Code::DiskFull) => Self::DiskFull { path: "library.db".into() },
            Some(Code::DatabaseCorrupt | Code::NotADatabase) => {
                Self::CatalogueDamaged { problem: error.to_string() }
            }
            _ => Self::Catalogue(error),
        }
    }
}

impl LibraryError {
    /// Returns a function for `map_err` that converts an I/O error at a path. A full disk has its own variant.
    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
                Self::DiskFull { path }
            }
            _ => Self::Io { action, path, source },
        }
    }

    /// Returns the system's reason, if it is that nothing may be written here.
    pub(crate) fn read_only(&self) -> Option<String> {
        match self {
            Self::Io { source, .. }
                if matches!(
                    source.kind(),
                    io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied
                ) =>
            {
                Some(source.to_string())
            }
            _ => None,
        }
    }
}

/// "`a`, `b` or `c`".
fn list(names: &[String]) -> String {
    let quoted: Vec<_> = names.iter().map(|name| format!("`{name}`")).collect();
    match quoted.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, rest)) => format!("{} or {last}", rest.join(", ")),
        None => String::new(),
    }
}

/// "`a`, `b` and 3 more".
fn list_all(names: &[String]) -> String {
    const MOST: usize = 5;
    let quoted: Vec<_> = names.iter().take(MOST).map(|name| format!("`{name}`")).collect();
    match names.len().checked_sub(MOST) {
        Some(more @ 1..) => format!("{} and {more} more", quoted.join(", ")),
        _ => quoted.join(", "),
    }
}

fn did_you_mean(similar: &[String]) -> String {
    if similar.is_empty() { String::new() } else { format!(" (did you mean {}?)", list(similar)) }
}

fn looked_in(folders: &[String], problems: &[String]) -> String {
    let problems: String = problems.iter().map(|problem| format!("; {problem}")).collect();
    if folders.is_empty() { problems } else { format!("; its folders are {}{problems}", list_all(folders)) }
}

fn there_is(choices: &[String]) -> String {
    if choices.is_empty() { String::new() } else { format!("; there is {}", choices.join(", ")) }
}

fn in_parentheses(message: &str) -> impl fmt::Display {
    if message.is_empty() { String::new() } else { format!(": {message}") }
}
