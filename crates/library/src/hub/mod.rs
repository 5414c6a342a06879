//! Hugging Face's hub, or another one with its interface (`HF_ENDPOINT`): lists and downloads of repositories.
//!
//! One request lists a commit's files with their checksums, `choose` selects files, and `download` downloads them. The
//! list is untrusted: a file name is checked, and is used on disk only as a plain name. A public hub cannot redirect to
//! this machine or into a private network: `public` checks the addresses that the connection uses.

mod choose;
mod client;
mod download;
mod public;
mod reference;
mod search;

use std::time::Duration;

use serde::Deserialize;

pub(crate) use choose::choose;
pub use client::is_public;
pub use reference::{Choice, Reference};
pub use search::Found;

use crate::{
    cancel::Cancel,
    error::LibraryError,
    record::{FileRecord, OnProgress},
    store::Store,
};
use client::Client;

/// Default endpoint.
pub const HUGGING_FACE: &str = "https://huggingface.co";

/// Options of connections to a hub.
#[derive(Clone)]
pub struct HubOptions {
    /// Its address, [`HUGGING_FACE`].
    pub endpoint: String,
    /// Access token. It is sent to the endpoint only, not to targets of redirects.
    pub token: Option<String>,
    /// Files that are downloaded at the same time.
    pub parallel: usize,
    /// Maximum number of retries without progress after transient errors.
    pub retries: u32,
    /// Pause before the first retry; it doubles for each further one.
    pub pause: Duration,
    /// Maximum time without data on a connection.
    pub read_timeout: Duration,
}

impl Default for HubOptions {
    fn default() -> Self {
        Self {
            endpoint: HUGGING_FACE.to_owned(),
            token: None,
            parallel: 4,
            retries: 5,
            pause: Duration::from_secs(1),
            read_timeout: Duration::from_secs(30),
        }
    }
}

impl std::fmt::Debug for HubOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The token is a secret.
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
    /// Returns the name in the library: the file's own without folders. Names of module files keep their folder.
    pub(crate) fn name(&self) -> String {
        let own = || self.path.rsplit('/').next().unwrap_or_default().to_owned();
        crate::import::module_file(&self.path).unwrap_or_else(own)
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
    /// Creates a client without connecting.
    ///
    /// # Errors
    /// [`LibraryError::BadEndpoint`].
    pub fn new(options: HubOptions) -> Result<Self, LibraryError> {
        let parallel = options.parallel.max(1);
        Ok(Self { client: Client::new(options)?, parallel })
    }

    /// Returns the hub at another address, which does not get this one's token.
    pub(crate) fn at(&self, endpoint: &str) -> Result<Self, LibraryError> {
        let options = self.client.options().clone();
        let token = options.token.clone().filter(|_| endpoint == self.endpoint());
        Self::new(HubOptions { endpoint: endpoint.to_owned(), token, ..options })
    }

    /// Downloads a file of a model of this repository and commit again.
    ///
    /// # Errors
    /// The repository does not contain the file any more, neither at that commit nor now, or the download fails.
    pub(crate) fn fetch_again(
        &self,
        store: &Store,
        repo: &str,
        commit: &str,
        wanted: &FileRecord,
        cancel: &Cancel,
        progress: &OnProgress<'_>,
    ) -> Result<(), LibraryError> {
        let at = |revision: &str| {
            let revision = revision.to_owned();
            let reference = Reference { repo: repo.to_owned(), revision, choice: None };
            self.repository(&reference, cancel, progress)
        };
        let repository = match at(commit) {
            // Histories may be rewritten; only the content matters.
            Err(LibraryError::NotOnHub { .. }) => at("main")?,
            found => found?,
        };
        let is_it = |file: &&RemoteFile| match file.digest() {
            Some(digest) => digest == wanted.digest,
            None => file.name() == wanted.name && file.size == wanted.size,
        };
        let gone = || LibraryError::NotOnHub {
            endpoint: self.endpoint().to_owned(),
            what: format!("file of {} in `{repo}`", wanted.digest),
        };
        let file = repository.files.iter().find(is_it).cloned().ok_or_else(gone)?;
        let records = self.download(store, &repository, &[file], cancel, progress)?;
        // The hub does not report the digests of small files in advance.
        if records.iter().any(|record| record.digest == wanted.digest) { Ok(()) } else { Err(gone()) }
    }

    /// Returns its address, without a slash at its end.
    pub fn endpoint(&self) -> &str {
        self.client.endpoint()
    }

    /// Reads the list of a repository's files.
    pub(crate) fn repository(
        &self,
        reference: &Reference,
        cancel: &Cancel,
        progress: &OnProgress<'_>,
    ) -> Result<Repository, LibraryError> {
        let revision = client::encode(&reference.revision, false);
        let url = format!("{}/api/models/{}/revision/{revision}?blobs=true", self.endpoint(), reference.repo);
        let what = match reference.revision.as_str() {
            "main" => format!("`{}`", reference.repo),
            revision => format!("`{}` at `{revision}`", reference.repo),
        };
        let text = self.client.text(&url, &what, cancel, progress)?;
        let bad = |problem: String| LibraryError::BadAnswer { url: url.clone(), problem };
        let info: ModelInfo = serde_json::from_str(&text).map_err(|error| bad(error.to_string()))?;
        if info.sha.is_empty() || !info.sha.bytes().all(|b| b.is_ascii_alphanumeric()) {
            return Err(bad(format!("{:?} is no commit", info.sha)));
        }
        // The name becomes a part of model names and addresses, so the hub may only change its case or resolve a
        // renaming.
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
    bad: &dyn Fn(String) -> LibraryError,
) -> Result<RemoteFile, LibraryError> {
    let path = file.rfilename;
    // Only the last component becomes a name on disk, but a list with such a name is not trusted.
    let odd = |part: &str| part.is_empty() || part == "." || part == ".." || part.contains('\\');
    if path.split('/').any(odd) || path.chars().any(char::is_control) {
        return Err(LibraryError::UnsafeFile { repo: repo.to_owned(), file: path });
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
