//! Searching a hub for repositories with GGUF files.

use serde::Deserialize;

use super::{Hub, Reference, client};
use crate::{cancel::Cancel, error::LibraryError};

/// Longest text of a search.
const MAX_QUERY: usize = 200;

/// A repository that a search has found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// `owner/repository`.
    pub repo: String,
    /// Downloads in the last month.
    pub downloads: u64,
    /// True if access must be granted to the owner of a token.
    pub gated: bool,
}

/// One entry of the answer to `GET /api/models?search=...`: <https://huggingface.co/docs/hub/api>.
#[derive(Deserialize)]
struct Entry {
    id: String,
    #[serde(default)]
    downloads: u64,
    /// `false`, or how access is granted.
    #[serde(default)]
    gated: serde_json::Value,
}

impl Hub {
    /// Finds repositories with GGUF files by words of their names, most downloaded first.
    ///
    /// # Errors
    /// The hub cannot be reached, or its answer is invalid.
    pub fn search(&self, text: &str, most: usize, cancel: &Cancel) -> Result<Vec<Found>, LibraryError> {
        let text: String = text.trim().chars().take(MAX_QUERY).collect();
        let url = format!(
            "{}/api/models?search={}&filter=gguf&sort=downloads&direction=-1&limit={most}",
            self.endpoint(),
            client::encode(&text, false)
        );
        let answer = self.client.text(&url, &format!("`{text}`"), cancel, &|_| {})?;
        let entries: Vec<Entry> = serde_json::from_str(&answer)
            .map_err(|error| LibraryError::BadAnswer { url, problem: error.to_string() })?;
        // The list is untrusted: a name that is no repository is left out.
        let plain = |id: &str| id.parse::<Reference>().is_ok_and(|reference| reference.repo == id);
        let found = entries.into_iter().filter(|entry| plain(&entry.id)).take(most).map(|entry| Found {
            gated: !matches!(entry.gated, serde_json::Value::Null | serde_json::Value::Bool(false)),
            repo: entry.id,
            downloads: entry.downloads,
        });
        Ok(found.collect())
    }
}
