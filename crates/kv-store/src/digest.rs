//! Digests of files, remembered as long as the files stay the same: a model of many gigabytes is read for it once.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
    time::SystemTime,
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

/// Files of a model and their metadata in the file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelFiles {
    files: Vec<(PathBuf, Stat)>,
}

/// Size, times and number of a file. Any change of its content changes one of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Stat {
    bytes: u64,
    /// Times of the last change of the content and of the file, and the file's number, where the system reports them.
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

    /// Returns true if the digest of the file may be remembered under this. A clock that was set back makes files
    /// unsettled, which costs time and nothing else.
    fn is_settled(&self, now: SystemTime) -> bool {
        #[cfg(unix)]
        {
            let now = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
            now.as_nanos() as i128 - self.times[1] > SETTLED.as_nanos() as i128
        }
        // Without a time that programs cannot set, the content is read each time.
        #[cfg(not(unix))]
        {
            let _ = now;
            false
        }
    }
}

/// Returns the digest of bytes in memory.
pub fn digest_of(bytes: &[u8]) -> Id {
    *blake3::hash(bytes).as_bytes()
}

impl ModelFiles {
    /// Returns the state of these files. A model that is opened afterwards has the content that [`ModelFiles::digest`] names.
    ///
    /// # Errors
    /// The system's.
    pub fn of(paths: &[PathBuf]) -> io::Result<Self> {
        let file = |path: &PathBuf| Ok((path.clone(), Stat::of(&File::open(path)?)?));
        Ok(Self { files: paths.iter().map(file).collect::<io::Result<_>>()? })
    }

    /// Returns the digest of the files, in order, if `dir`, the folder of a store, remembers it. Reads none of the files.
    pub fn known_digest(&self, dir: &Path) -> Option<Id> {
        let (known, now) = (read_known(dir), SystemTime::now());
        let ids = self.files.iter().map(|(path, stat)| known_id(&known, path, stat, now));
        ids.collect::<Option<Vec<_>>>().map(|ids| combine(&ids))
    }

    /// Reads the files and returns their digest, which is remembered in `dir`, the folder of a store. `goes_on` is called after each
    /// mebibyte, and ends the work when it returns false.
    ///
    /// # Errors
    /// The system's error, a file that has changed since [`ModelFiles::of`], or [`io::ErrorKind::Interrupted`].
    pub fn digest(&self, dir: &Path, goes_on: &dyn Fn() -> bool) -> io::Result<Id> {
        let known = read_known(dir);
        let mut new = Vec::new();
        let mut ids = Vec::with_capacity(self.files.len());
        for (path, stat) in &self.files {
            if let Some(id) = known_id(&known, path, stat, SystemTime::now()) {
                ids.push(id);
                continue;
            }
            let file = File::open(path)?;
            let is_same = |file: &File| Stat::of(file).is_ok_and(|now| now == *stat);
            let id = if is_same(&file) { Some(read(&file, goes_on)?) } else { None };
            let Some(id) = id.filter(|_| is_same(&file)) else {
                return Err(io::Error::other(format!("{} has changed", path.display())));
            };
            if stat.is_settled(SystemTime::now()) {
                new.push((path.to_string_lossy().into_owned(), (stat.clone(), id)));
            }
            ids.push(id);
        }
        if !new.is_empty() {
            // Another model's digest may have been added meanwhile.
            let mut known = read_known(dir);
            known.extend(new);
            while known.len() > MOST_KNOWN {
                known.pop_first();
            }
            // Without it, the files are read again next time.
            let _ = serde_json::to_vec(&known).map(|bytes| files::replace(&dir.join(KNOWN), &bytes));
        }
        Ok(combine(&ids))
    }

    /// Returns true if the files are still those of [`ModelFiles::of`].
    pub fn is_current(&self) -> bool {
        let same = |(path, stat): &(PathBuf, Stat)| {
            File::open(path).and_then(|file| Stat::of(&file)).is_ok_and(|now| now == *stat)
        };
        self.files.iter().all(same)
    }
}

/// Digests of files by path.
type Known = BTreeMap<String, (Stat, Id)>;

fn known_id(known: &Known, path: &Path, stat: &Stat, now: SystemTime) -> Option<Id> {
    let (old, id) = known.get(path.to_string_lossy().as_ref())?;
    (old == stat && stat.is_settled(now)).then_some(*id)
}

fn combine(ids: &[Id]) -> Id {
    let mut hasher = blake3::Hasher::new();
    for id in ids {
        hasher.update(id);
    }
    *hasher.finalize().as_bytes()
}

fn read(file: &File, goes_on: &dyn Fn() -> bool) -> io::Result<Id> {
    let mut hasher = blake3::Hasher::new();
    let (mut buffer, mut file) = (vec![0; 1 << 20], file);
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(*hasher.finalize().as_bytes()),
            count => drop(hasher.update(&buffer[..count])),
        }
        if !goes_on() {
            return Err(io::ErrorKind::Interrupted.into());
        }
    }
}

fn read_known(dir: &Path) -> Known {
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
            let files = ModelFiles::of(&paths).unwrap();
            let digest = files.digest(dir.path(), &|| true).unwrap();
            (files, digest)
        };
        let (files, first) = of(&[&one]);
        assert_eq!(first, of(&[&two]).1, "names do not matter");
        assert_ne!(first, of(&[&one, &two]).1);
        assert!(files.is_current());
        // The same length; and the times of a file can be set back.
        let modified = fs::metadata(&one).unwrap().modified().unwrap();
        fs::write(&one, "Weights").unwrap();
        File::options().write(true).open(&one).unwrap().set_modified(modified).unwrap();
        if cfg!(unix) {
            assert!(!files.is_current() && files.digest(dir.path(), &|| true).is_err());
        }
        assert_ne!(of(&[&one]).1, first);
        let stopped = ModelFiles::of(&[one]).unwrap().digest(dir.path(), &|| false);
        assert_eq!(stopped.unwrap_err().kind(), io::ErrorKind::Interrupted);
    }

    #[cfg(unix)]
    #[test]
    fn a_digest_is_remembered_only_while_no_clock_can_hide_a_change() {
        let dir = tempfile::TempDir::new().unwrap();
        let path = dir.path().join("model");
        fs::write(&path, "weights").unwrap();
        let files = ModelFiles::of(&[path]).unwrap();
        let stat = &files.files[0].1;
        let changed = SystemTime::UNIX_EPOCH + std::time::Duration::from_nanos(stat.times[1] as u64);
        assert!(stat.is_settled(changed + SETTLED * 2));
        // At once, and by a clock that was set back.
        assert!(!stat.is_settled(changed) && !stat.is_settled(changed - SETTLED * 1000));
        assert!(!stat.is_settled(SystemTime::UNIX_EPOCH));
        files.digest(dir.path(), &|| true).unwrap();
        assert_eq!(files.known_digest(dir.path()), None, "the file is too young");
    }
}
