//! API keys. A file keeps their hashes: a key has 256 random bits, so its SHA-256 tells nobody what it was, and a slow
//! hash would protect nothing more.

use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant, SystemTime},
};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::ids;

/// What a key may be used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// Asking models, and asking which there are.
    Inference,
    /// Changing which there are.
    Models,
    /// Seeing what the server does.
    Admin,
}

impl Scope {
    /// Its name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Inference => "inference",
            Self::Models => "models",
            Self::Admin => "admin",
        }
    }
}

/// A key, without the key itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ApiKey {
    /// Names it, for those who manage keys; part of the key itself.
    pub id: String,
    /// What it is for, for people.
    pub name: String,
    /// What it may be used for.
    pub scopes: Vec<Scope>,
    /// SHA-256 of the key, in hexadecimal digits.
    pub sha256: String,
    /// Seconds since 1970.
    pub created: u64,
}

/// Why keys cannot be managed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// The file cannot be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// `read` or `write`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The file is damaged.
    #[error("{}: {source}; mend it, or remove it and make new keys", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Where.
        source: serde_json::Error,
    },
    /// No key has this id.
    #[error("there is no key `{0}`; `paguro keys list` shows those there are")]
    NotFound(String),
}

/// The file with all keys.
#[derive(Clone, Debug)]
pub struct KeyFile {
    path: PathBuf,
}

impl KeyFile {
    /// The file need not exist.
    pub fn new(path: PathBuf) -> Self {
        Self { path }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All keys.
    ///
    /// # Errors
    /// A file that cannot be read: better no access than access without keys.
    pub fn read(&self) -> Result<Vec<ApiKey>, KeyError> {
        let bytes = match fs::read(&self.path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(source) => return Err(KeyError::Io { action: "read", path: self.path.clone(), source }),
        };
        let malformed = |source| KeyError::Malformed { path: self.path.clone(), source };
        serde_json::from_slice(&bytes).map_err(malformed)
    }

    /// Makes a key and returns it; it is nowhere else.
    ///
    /// # Errors
    /// [`KeyError`].
    pub fn add(&self, name: &str, scopes: &[Scope]) -> Result<(ApiKey, String), KeyError> {
        let mut keys = self.read()?;
        let id = ids::new("")[..8].to_owned();
        let secret = ids::new(&format!("pg-{id}-")) + &ids::new("");
        let mut scopes = scopes.to_vec();
        scopes.sort();
        scopes.dedup();
        let key = ApiKey { id, name: name.to_owned(), scopes, sha256: hash(&secret), created: ids::now() };
        keys.push(key.clone());
        self.write(&keys)?;
        Ok((key, secret))
    }

    /// Removes a key; servers that run forget it within a second.
    ///
    /// # Errors
    /// [`KeyError`].
    pub fn remove(&self, id: &str) -> Result<ApiKey, KeyError> {
        let mut keys = self.read()?;
        let index = keys.iter().position(|key| key.id == id);
        let removed = keys.remove(index.ok_or_else(|| KeyError::NotFound(id.to_owned()))?);
        self.write(&keys)?;
        Ok(removed)
    }

    /// Whole or not at all: written beside, then renamed.
    fn write(&self, keys: &[ApiKey]) -> Result<(), KeyError> {
        let write = || {
            let folder = self.path.parent().unwrap_or(Path::new("."));
            fs::create_dir_all(folder)?;
            let beside = self.path.with_extension("new");
            let mut options = fs::OpenOptions::new();
            options.write(true).create(true).truncate(true);
            #[cfg(unix)]
            std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
            let mut file = options.open(&beside)?;
            file.write_all(&serde_json::to_vec_pretty(keys)?)?;
            file.sync_all()?;
            fs::rename(&beside, &self.path)
        };
        write().map_err(|source| KeyError::Io { action: "write", path: self.path.clone(), source })
    }

    /// When it changed last; `None` if it is not there.
    fn modified(&self) -> Option<SystemTime> {
        fs::metadata(&self.path).ok()?.modified().ok()
    }
}

fn hash(key: &str) -> String {
    Sha256::digest(key.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// How long a change of the file may go unnoticed.
const FRESH: Duration = Duration::from_millis(500);

/// The keys as a running server sees them: what the file says now, or said half a second ago.
#[derive(Debug)]
pub struct Keys {
    file: KeyFile,
    seen: Mutex<Seen>,
}

#[derive(Debug)]
struct Seen {
    looked: Instant,
    modified: Option<SystemTime>,
    keys: Result<Vec<ApiKey>, String>,
}

impl Keys {
    /// Reads the file.
    pub fn new(file: KeyFile) -> Self {
        let seen = Seen::look(&file);
        Self { file, seen: Mutex::new(seen) }
    }

    /// Whether there are any.
    ///
    /// # Errors
    /// What is wrong with the file.
    pub fn any(&self) -> Result<bool, String> {
        self.look(|keys| !keys.is_empty())
    }

    /// The key that was shown.
    ///
    /// # Errors
    /// What is wrong with the file.
    pub fn find(&self, shown: &str) -> Result<Option<ApiKey>, String> {
        let shown = hash(shown);
        // Hashes are compared, so the time that it takes says nothing about a key.
        self.look(|keys| keys.iter().find(|key| key.sha256 == shown).cloned())
    }

    fn look<T>(&self, what: impl FnOnce(&[ApiKey]) -> T) -> Result<T, String> {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.looked.elapsed() > FRESH {
            seen.looked = Instant::now();
            // A file that could not be read is tried again.
            if seen.keys.is_err() || self.file.modified() != seen.modified {
                *seen = Seen::look(&self.file);
            }
        }
        seen.keys.as_deref().map(what).map_err(Clone::clone)
    }
}

impl Seen {
    fn look(file: &KeyFile) -> Self {
        // Asked before it is read: a change in between is seen the next time.
        let modified = file.modified();
        Self { looked: Instant::now(), modified, keys: file.read().map_err(|error| error.to_string()) }
    }
}
