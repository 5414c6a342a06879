//! API keys. A file stores their SHA-256 hashes. Keys have 256 random bits, so a slow hash would add no protection.

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

/// Permission of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// Generates answers and lists models.
    Inference,
    /// Adds, changes and removes models.
    Models,
    /// Reads the server's status and metrics.
    Admin,
}

impl Scope {
    /// Returns its name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Inference => "inference",
            Self::Models => "models",
            Self::Admin => "admin",
        }
    }
}

/// An API key without its secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ApiKey {
    /// Id for the management of keys; a part of the key itself.
    pub id: String,
    /// Description for people.
    pub name: String,
    /// Scopes of the key.
    pub scopes: Vec<Scope>,
    /// SHA-256 of the key, in hexadecimal digits.
    pub sha256: String,
    /// Seconds since 1970.
    pub created: u64,
}

/// Error of key management.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// The file cannot be read, locked or written.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// The failed action: `read`, `lock` or `write`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// The file is damaged.
    #[error(
        "the file with the keys, {}, is damaged ({problem}); restore it from a backup, or remove it and make new keys",
        path.display()
    )]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Problem and its place.
        problem: String,
    },
    /// No key has this id or name.
    #[error("there is no key `{0}`; `paguro keys list` shows the keys")]
    NotFound(String),
    /// Several keys have this name.
    #[error("{} keys are named `{name}`; remove one by its id: {}", ids.len(), ids.join(", "))]
    Ambiguous {
        /// The name.
        name: String,
        /// Ids of the keys that have it.
        ids: Vec<String>,
    },
}

/// The file with all keys.
#[derive(Clone, Debug)]
pub struct KeyFile {
    path: PathBuf,
}

impl KeyFile {
    /// Creates a handle; the file need not exist.
    pub fn new(path: PathBuf) -> Self {
        Self { path }
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads all keys.
    ///
    /// # Errors
    /// The file cannot be read. The server then denies access instead of granting it without keys.
    pub fn read(&self) -> Result<Vec<ApiKey>, KeyError> {
        let bytes = match fs::read(&self.path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(source) => return Err(KeyError::Io { action: "read", path: self.path.clone(), source }),
        };
        let malformed = |problem| KeyError::Malformed { path: self.path.clone(), problem };
        if bytes.iter().all(|byte| byte.is_ascii_whitespace() || *byte == 0) {
            return Err(malformed("it is empty".to_owned()));
        }
        // An editor of Windows may have written a byte order mark.
        let bytes = bytes.strip_prefix("\u{feff}".as_bytes()).unwrap_or(&bytes);
        let keys: Vec<ApiKey> =
            serde_json::from_slice(bytes).map_err(|error| malformed(error.to_string()))?;
        let is_hash = |text: &str| text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        match keys.iter().find(|key| key.id.is_empty() || !is_hash(&key.sha256)) {
            Some(key) => Err(malformed(format!("the key `{}` has no id or no SHA-256", key.name))),
            None => Ok(keys),
        }
    }

    /// Creates a key and returns it. Only its hash is stored.
    ///
    /// # Errors
    /// [`KeyError`].
    pub fn add(&self, name: &str, scopes: &[Scope]) -> Result<(ApiKey, String), KeyError> {
        let _alone = self.lock()?;
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

    /// Removes the key with this id, or the only one with this name. Running servers refuse it within a second.
    ///
    /// # Errors
    /// [`KeyError`].
    pub fn remove(&self, id_or_name: &str) -> Result<ApiKey, KeyError> {
        let _alone = self.lock()?;
        let mut keys = self.read()?;
        let by_name = || {
            let named: Vec<_> = (0..keys.len()).filter(|&i| keys[i].name == id_or_name).collect();
            match named[..] {
                [index] => Ok(index),
                [] => Err(KeyError::NotFound(id_or_name.to_owned())),
                [..] => Err(KeyError::Ambiguous {
                    name: id_or_name.to_owned(),
                    ids: named.iter().map(|&i| keys[i].id.clone()).collect(),
                }),
            }
        };
        let index = keys.iter().position(|key| key.id == id_or_name).map_or_else(by_name, Ok)?;
        let removed = keys.remove(index);
        self.write(&keys)?;
        Ok(removed)
    }

    /// Waits for the exclusive lock of the file. The system releases it when its holder exits for any reason.
    fn lock(&self) -> Result<fs::File, KeyError> {
        let path = self.path.with_extension("lock");
        let lock = || {
            fs::create_dir_all(self.folder())?;
            let file = fs::OpenOptions::new().create(true).truncate(false).write(true).open(&path)?;
            file.lock()?;
            Ok(file)
        };
        lock().map_err(|source| KeyError::Io { action: "lock", path: path.clone(), source })
    }

    fn folder(&self) -> &Path {
        match self.path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        }
    }

    /// Replaces the file atomically: a temporary file is written beside it, synced and renamed. The caller holds the
    /// lock.
    fn write(&self, keys: &[ApiKey]) -> Result<(), KeyError> {
        const PREFIX: &str = ".keys-";
        let write = || {
            let folder = self.folder();
            // Only the holder of the lock creates such files, so existing ones were left by a process that was killed.
            for entry in fs::read_dir(folder)?.flatten() {
                if entry.file_name().to_string_lossy().starts_with(PREFIX) {
                    fs::remove_file(entry.path())?;
                }
            }
            // `tempfile` makes the file readable by its owner only.
            let mut file = tempfile::Builder::new().prefix(PREFIX).suffix(".new").tempfile_in(folder)?;
            file.write_all(&serde_json::to_vec_pretty(keys)?)?;
            file.as_file().sync_all()?;
            file.persist(&self.path)?;
            #[cfg(unix)]
            fs::File::open(folder)?.sync_all()?;
            Ok(())
        };
        write().map_err(|source: io::Error| KeyError::Io { action: "write", path: self.path.clone(), source })
    }

    /// Returns the identity of the file's current version; `None` if the file does not exist. Each write creates a new
    /// file.
    fn state(&self) -> Option<State> {
        let metadata = fs::metadata(&self.path).ok()?;
        #[cfg(unix)]
        let number = std::os::unix::fs::MetadataExt::ino(&metadata);
        #[cfg(not(unix))]
        let number = 0;
        Some(State { modified: metadata.modified().ok(), size: metadata.len(), number })
    }
}

/// Identity of a version of the file; see [`KeyFile::state`].
#[derive(Debug, PartialEq, Eq)]
struct State {
    modified: Option<SystemTime>,
    size: u64,
    /// Inode number, where files have one.
    number: u64,
}

fn hash(key: &str) -> String {
    Sha256::digest(key.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Interval between two checks of the file.
const FRESH: Duration = Duration::from_millis(500);

/// Keys of a running server: those of the file, at most half a second old, and those of the settings.
#[derive(Debug)]
pub struct Keys {
    file: KeyFile,
    /// Keys of the settings.
    given: Vec<ApiKey>,
    seen: Mutex<Seen>,
}

#[derive(Debug)]
struct Seen {
    looked: Instant,
    state: Option<State>,
    keys: Result<Vec<ApiKey>, String>,
}

impl Keys {
    /// Reads the file and adds the keys of the settings.
    pub fn new(file: KeyFile, given: &[String]) -> Self {
        let seen = Seen::look(&file);
        let scopes = vec![Scope::Inference, Scope::Models, Scope::Admin];
        let key = |(index, key): (usize, &String)| ApiKey {
            id: format!("api-key-{index}"),
            name: "--api-key".to_owned(),
            scopes: scopes.clone(),
            sha256: hash(key),
            created: ids::now(),
        };
        Self { file, given: given.iter().enumerate().map(key).collect(), seen: Mutex::new(seen) }
    }

    /// Returns the file.
    pub fn file(&self) -> &KeyFile {
        &self.file
    }

    /// Returns true if there is any key.
    ///
    /// # Errors
    /// The problem of the file.
    pub fn any(&self) -> Result<bool, String> {
        let given = !self.given.is_empty();
        self.look(|keys| given || !keys.is_empty())
    }

    /// Returns the key whose secret is `shown`.
    ///
    /// # Errors
    /// The problem of the file.
    pub fn find(&self, shown: &str) -> Result<Option<ApiKey>, String> {
        let shown = hash(shown);
        // Hashes are compared, so the time of the comparison reveals nothing about a key.
        self.look(|keys| self.given.iter().chain(keys).find(|key| key.sha256 == shown).cloned())
    }

    fn look<T>(&self, what: impl FnOnce(&[ApiKey]) -> T) -> Result<T, String> {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.looked.elapsed() > FRESH {
            seen.looked = Instant::now();
            // A file that could not be read is read again.
            if seen.keys.is_err() || self.file.state() != seen.state {
                *seen = Seen::look(&self.file);
            }
        }
        seen.keys.as_deref().map(what).map_err(Clone::clone)
    }
}

impl Seen {
    fn look(file: &KeyFile) -> Self {
        // The state is read before the keys, so that a change in between is seen the next time.
        let state = file.state();
        Self { looked: Instant::now(), state, keys: file.read().map_err(|error| error.to_string()) }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    fn key_file() -> (tempfile::TempDir, KeyFile) {
        let folder = tempfile::tempdir().unwrap();
        let file = KeyFile::new(folder.path().join("sub/keys.json"));
        (folder, file)
    }

    #[test]
    fn keys_added_and_removed_at_once_are_neither_lost_nor_revived() {
        let (_folder, file) = key_file();
        thread::scope(|scope| {
            for writer in 0..4 {
                let file = &file;
                scope.spawn(move || {
                    for round in 0..5 {
                        file.add(&format!("{writer}-{round}"), &[Scope::Inference]).unwrap();
                        if round % 2 == 1 {
                            file.remove(&format!("{writer}-{round}")).unwrap();
                        }
                    }
                });
            }
        });
        let mut names: Vec<_> = file.read().unwrap().into_iter().map(|key| key.name).collect();
        names.sort();
        let kept = (0..4).flat_map(|writer| [0, 2, 4].map(|round| format!("{writer}-{round}")));
        assert_eq!(names, kept.collect::<Vec<_>>());
        let files = fs::read_dir(file.folder()).unwrap().count();
        assert_eq!(files, 2, "the keys and the lock");
    }

    #[test]
    fn a_key_is_removed_by_its_id_or_by_a_name_that_is_clear() {
        let (_folder, file) = key_file();
        let first = file.add("bob", &[Scope::Inference]).unwrap().0;
        assert_eq!(file.remove("bob").unwrap(), first);
        let ids = [file.add("bob", &[]).unwrap().0.id, file.add("bob", &[]).unwrap().0.id];
        let error = file.remove("bob").unwrap_err().to_string();
        assert_eq!(error, format!("2 keys are named `bob`; remove one by its id: {}", ids.join(", ")));
        file.remove(&ids[1]).unwrap();
        file.remove("bob").unwrap();
        assert!(matches!(file.remove("bob"), Err(KeyError::NotFound(_))));
    }

    #[test]
    fn a_damaged_file_is_an_error_and_never_an_empty_list() {
        let (_folder, file) = key_file();
        assert!(file.read().unwrap().is_empty(), "there are no keys before the first one");
        file.add("a", &[Scope::Admin]).unwrap();
        let whole = fs::read(&file.path).unwrap();
        let damaged: [&[u8]; 8] =
            [b"", b" \n", b"null", b"{}", b"[{}]", b"[null]", &whole[..whole.len() / 2], &[0; 100]];
        for bytes in damaged {
            fs::write(&file.path, bytes).unwrap();
            for result in [file.read().map(drop), file.add("b", &[]).map(drop), file.remove("a").map(drop)] {
                assert!(matches!(result, Err(KeyError::Malformed { .. })), "{bytes:?}: {result:?}");
            }
            assert_eq!(fs::read(&file.path).unwrap(), bytes, "a damaged file is left alone");
            assert!(Keys::new(file.clone(), &[]).any().is_err());
        }
        fs::write(&file.path, &whole).unwrap();
        assert_eq!(file.read().unwrap().len(), 1);
    }
}
