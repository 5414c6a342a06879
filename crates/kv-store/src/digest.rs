//! Digests of files, remembered as long as the files stay the same: a model of many gigabytes is read for it once.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{Id, files};

/// File with the digests that are known, in the folder of a store.
const KNOWN: &str = "digests.json";
/// Digests that are remembered, at most.
const MOST_KNOWN: usize = 1024;
/// Largest file with known digests that is read.
const MOST_BYTES: u64 = 4 << 20;
/// Age of a file's last change from which on another change shows in its times.
#[cfg(unix)]
const SETTLED: std::time::Duration = std::time::Duration::from_secs(2);

/// Contents of files, as one digest, and what the system says about these files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Digest {
    /// The digest.
    pub id: Id,
    files: Vec<(PathBuf, Stat)>,
}

/// Size, times and number of a file. Any change of its content changes one of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Stat {
    bytes: u64,
    /// Times of the last change of the content and of the file, and the file's number, where the system tells.
    times: [i128; 2],
    number: [u64; 2],
}

impl Stat {
    fn of(file: &File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        #[cfg(unix)]
        {
            use std::os::unix::fs::MetadataExt;
            let time = |seconds: i64, nanoseconds: i64| {
                i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds)
            };
            Ok(Self {
                bytes: metadata.len(),
                times: [
                    time(metadata.mtime(), metadata.mtime_nsec()),
                    time(metadata.ctime(), metadata.ctime_nsec()),
                ],
                number: [metadata.dev(), metadata.ino()],
            })
        }
        #[cfg(not(unix))]
        {
            let since = metadata.modified()?.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
            Ok(Self { bytes: metadata.len(), times: [since.as_nanos() as i128, 0], number: [0; 2] })
        }
    }

    /// True if the digest of the file may be remembered under this.
    fn is_settled(&self) -> bool {
        #[cfg(unix)]
        {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
            now.as_nanos() as i128 - self.times[1] > SETTLED.as_nanos() as i128
        }
        // Without a time that nobody can set, the content is read each time.
        #[cfg(not(unix))]
        false
    }
}

impl Digest {
    /// The digest of bytes in memory.
    pub fn of_bytes(bytes: &[u8]) -> Self {
        Self { id: *blake3::hash(bytes).as_bytes(), files: Vec::new() }
    }

    /// The digest of files, in order. Known digests are kept in `dir`, the folder of a store.
    ///
    /// # Errors
    /// The system's error, or a file that changes while it is read.
    pub fn of_files(dir: &Path, paths: &[PathBuf]) -> io::Result<Self> {
        let mut known = read_known(dir);
        let mut hasher = blake3::Hasher::new();
        let mut found = Vec::with_capacity(paths.len());
        let mut is_new = false;
        for path in paths {
            let file = File::open(path)?;
            let stat = Stat::of(&file)?;
            let name = path.to_string_lossy().into_owned();
            let id = match known.get(&name) {
                Some((old, id)) if *old == stat && stat.is_settled() => *id,
                _ => {
                    let id = read(&file)?;
                    if Stat::of(&file)? != stat {
                        return Err(io::Error::other(format!("{name} changes while it is read")));
                    }
                    if stat.is_settled() {
                        known.insert(name, (stat.clone(), id));
                        is_new = true;
                    }
                    id
                }
            };
            hasher.update(&id);
            found.push((path.clone(), stat));
        }
        if is_new {
            while known.len() > MOST_KNOWN {
                known.pop_first();
            }
            // Without it, the files are read again next time.
            let _ = serde_json::to_vec(&known).map(|bytes| files::replace(&dir.join(KNOWN), &bytes));
        }
        Ok(Self { id: *hasher.finalize().as_bytes(), files: found })
    }

    /// True if the files are still those that were read.
    pub fn is_current(&self) -> bool {
        let same = |(path, stat): &(PathBuf, Stat)| {
            File::open(path).and_then(|file| Stat::of(&file)).is_ok_and(|now| now == *stat)
        };
        self.files.iter().all(same)
    }
}

fn read(file: &File) -> io::Result<Id> {
    let mut hasher = blake3::Hasher::new();
    let (mut buffer, mut file) = (vec![0; 1 << 20], file);
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(*hasher.finalize().as_bytes()),
            count => hasher.update(&buffer[..count]),
        };
    }
}

fn read_known(dir: &Path) -> BTreeMap<String, (Stat, Id)> {
    let mut bytes = Vec::new();
    let file = files::regular(&dir.join(KNOWN)).and_then(|file| {
        if file.metadata()?.len() > MOST_BYTES {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        file.take(MOST_BYTES).read_to_end(&mut bytes)
    });
    file.ok().and_then(|_| serde_json::from_slice(&bytes).ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_digest_is_of_the_content() {
        let dir = tempfile::TempDir::new().unwrap();
        let [one, two] = ["one", "two"].map(|name| dir.path().join(name));
        fs::write(&one, "weights").unwrap();
        fs::write(&two, "weights").unwrap();
        let of = |paths: &[&PathBuf]| {
            let paths: Vec<PathBuf> = paths.iter().map(|path| path.to_path_buf()).collect();
            Digest::of_files(dir.path(), &paths).unwrap()
        };
        let first = of(&[&one]);
        assert_eq!(first.id, of(&[&two]).id, "names do not matter");
        assert_ne!(first.id, of(&[&one, &two]).id);
        assert!(first.is_current());
        // The same length; and the times of a file can be set back.
        let modified = fs::metadata(&one).unwrap().modified().unwrap();
        fs::write(&one, "Weights").unwrap();
        File::options().write(true).open(&one).unwrap().set_modified(modified).unwrap();
        assert!(cfg!(not(unix)) || !first.is_current());
        assert_ne!(of(&[&one]).id, first.id);
    }
}
