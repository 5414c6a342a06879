//! Hugging Face's hub, or another one with its interface (`HF_ENDPOINT`): what is in a repository, and its files.

mod choose;
mod client;
mod download;
mod reference;
mod search;

use std::time::Duration;

use serde::Deserialize;

pub(crate) use choose::choose;
pub use reference::{Choice, Reference};
pub use search::Found;

use crate::{
    cancel::Cancel,
    error::RegistryError,
    record::{FileRecord, OnProgress},
    store::Store,
};
use client::Client;

/// Where the hub is, unless somebody says otherwise.
pub const HUGGING_FACE: &str = "https://huggingface.co";

/// How to talk to a hub.
#[derive(Clone)]
pub struct HubOptions {
    /// Its address, [`HUGGING_FACE`].
    pub endpoint: String,
    /// Says who asks. It is sent to the endpoint and to nobody else, wherever that redirects to.
    pub token: Option<String>,
    /// Files that are downloaded at the same time.
    pub parallel: usize,
    /// How often something that may be temporary is tried again, without any progress in between.
    pub retries: u32,
    /// How long it is waited before the first of these; twice as long before each further one.
    pub pause: Duration,
    /// How long a connection may be silent.
    pub silence: Duration,
}

impl Default for HubOptions {
    fn default() -> Self {
        Self {
            endpoint: HUGGING_FACE.to_owned(),
            token: None,
            parallel: 4,
            retries: 5,
            pause: Duration::from_secs(1),
            silence: Duration::from_secs(30),
        }
    }
}

impl std::fmt::Debug for HubOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Tokens do not belong in logs.
        let token = self.token.as_ref().map(|_| "(secret)");
        f.debug_struct("HubOptions")
            .field("endpoint", &self.endpoint)
            .field("token", &token)
            .finish_non_exhaustive()
    }
}

/// A hub.
#[derive(Debug)]
pub struct Hub {
    client: Client,
    parallel: usize,
}

/// Files of a repository at one commit.
#[derive(Clone, Debug)]
pub(crate) struct Repository {
    /// `owner/repository`, as the hub writes it.
    pub(crate) name: String,
    pub(crate) commit: String,
    pub(crate) files: Vec<RemoteFile>,
}

/// A file of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RemoteFile {
    /// Its path, with `/`.
    pub(crate) path: String,
    pub(crate) size: u64,
    pub(crate) check: Check,
}

/// Checks that the hub provides for a file's content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Check {
    /// Large files: SHA-256, 64 hexadecimal digits.
    Sha256(String),
    /// Small files: git's object id, 40 hexadecimal digits.
    Git(String),
}

impl RemoteFile {
    /// Without its folders.
    pub(crate) fn name(&self) -> &str {
        self.path.rsplit('/').next().unwrap_or_default()
    }
}

/// The answer to `GET /api/models/{repo}/revision/{revision}?blobs=true`, as far as it is needed:
/// <https://huggingface.co/docs/hub/api>.
#[derive(Deserialize)]
struct ModelInfo {
    id: String,
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    blob_id: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    #[serde(alias = "oid")]
    sha256: String,
    size: u64,
}

impl Hub {
    /// Talks to nobody yet.
    ///
    /// # Errors
    /// [`RegistryError::BadEndpoint`].
    pub fn new(options: HubOptions) -> Result<Self, RegistryError> {
        let parallel = options.parallel.max(1);
        Ok(Self { client: Client::new(options)?, parallel })
    }

    /// Returns the hub at another address, which does not get this one's token.
    pub(crate) fn at(&self, endpoint: &str) -> Result<Self, RegistryError> {
        let options = self.client.options().clone();
        let token = options.token.clone().filter(|_| endpoint == self.endpoint());
        Self::new(HubOptions { endpoint: endpoint.to_owned(), token, ..options })
    }

    /// Downloads a file again that a model of this repository and commit has.
    ///
    /// # Errors
    /// A repository that does not have the file any more, at that commit or now; what keeps it from coming.
    pub(crate) fn fetch_again(
        &self,
        store: &Store,
        repo: &str,
        commit: &str,
        wanted: &FileRecord,
        cancel: &Cancel,
        progress: &OnProgress<'_>,
    ) -> Result<(), RegistryError> {
        let at = |revision: &str| {
            let revision = revision.to_owned();
            let reference = Reference { repo: repo.to_owned(), revision, choice: None };
            self.repository(&reference, cancel, progress)
        };
        let repository = match at(commit) {
            // Histories are rewritten; what counts is the content.
            Err(RegistryError::NotOnHub { .. }) => at("main")?,
            found => found?,
        };
        let is_it = |file: &&RemoteFile| match file.digest() {
            Some(digest) => digest == wanted.digest,
            None => file.name() == wanted.name && file.size == wanted.size,
        };
        let gone = || RegistryError::NotOnHub {
            endpoint: self.endpoint().to_owned(),
            what: format!("file of {} in `{repo}`", wanted.digest),
        };
        let file = repository.files.iter().find(is_it).cloned().ok_or_else(gone)?;
        let records = self.download(store, &repository, &[file], cancel, progress)?;
        // Of small files the hub does not tell the digest before.
        if records.iter().any(|record| record.digest == wanted.digest) { Ok(()) } else { Err(gone()) }
    }

    /// Its address, without a slash at its end.
    pub fn endpoint(&self) -> &str {
        self.client.endpoint()
    }

    /// Reads the list of a repository's files.
    pub(crate) fn repository(
        &self,
        reference: &Reference,
        cancel: &Cancel,
        progress: &OnProgress<'_>,
    ) -> Result<Repository, RegistryError> {
        let revision = client::encode(&reference.revision, false);
        let url = format!("{}/api/models/{}/revision/{revision}?blobs=true", self.endpoint(), reference.repo);
        let what = match reference.revision.as_str() {
            "main" => format!("`{}`", reference.repo),
            revision => format!("`{}` at `{revision}`", reference.repo),
        };
        let text = self.client.text(&url, &what, cancel, progress)?;
        let bad = |problem: String| RegistryError::BadAnswer { url: url.clone(), problem };
        let info: ModelInfo = serde_json::from_str(&text).map_err(|error| bad(error.to_string()))?;
        if info.sha.is_empty() || !info.sha.bytes().all(|b| b.is_ascii_alphanumeric()) {
            return Err(bad(format!("{:?} is no commit", info.sha)));
        }
        // It becomes a model's name and part of addresses; the hub may only change its case or follow a renaming.
        let name =
            info.id.parse::<Reference>().map_err(|_| bad(format!("{:?} is no repository", info.id)))?.repo;
        let files =
            info.siblings.into_iter().map(|file| remote_file(file, &name, &bad)).collect::<Result<_, _>>()?;
        Ok(Repository { name, commit: info.sha, files })
    }
}

fn remote_file(
    file: Sibling,
    repo: &str,
    bad: &dyn Fn(String) -> RegistryError,
) -> Result<RemoteFile, RegistryError> {
    let path = file.rfilename;
    // Of the chosen files only the last part becomes a name on disk; a list with any of these is not to be trusted.
    let odd = |part: &str| part.is_empty() || part == "." || part == ".." || part.contains('\\');
    if path.split('/').any(odd) || path.chars().any(char::is_control) {
        return Err(RegistryError::UnsafeFile { repo: repo.to_owned(), file: path });
    }
    let digits = |text: &str, count| text.len() == count && text.bytes().all(|b| b.is_ascii_hexdigit());
    match (file.lfs, file.blob_id, file.size) {
        (Some(lfs), ..) if digits(&lfs.sha256, 64) => {
            Ok(RemoteFile { path, size: lfs.size, check: Check::Sha256(lfs.sha256.to_lowercase()) })
        }
        (None, Some(id), Some(size)) if digits(&id, 40) => {
            Ok(RemoteFile { path, size, check: Check::Git(id.to_lowercase()) })
        }
        _ => Err(bad(format!("the size or the checksum of {path:?} is missing"))),
    }
}
