//! Downloads: several files at a time, each resumed where it stopped, and checked before it becomes a blob.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    path::{Path, PathBuf},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use sha1::Sha1;
use sha2::{Digest as _, Sha256};
use ureq::{Body, http::Response};

use super::{
    Check, Hub, RemoteFile, Repository,
    client::{self, Refusal},
};
use crate::{
    cancel::Cancel,
    digest::{Digest, hex},
    error::LibraryError,
    files::CHUNK,
    lock::Lock,
    record::{FileRecord, OnProgress, Progress, Transfer},
    store::Store,
};

impl Hub {
    /// Downloads files of a repository into the store. The caller prevents their deletion by others.
    pub(crate) fn download(
        &self,
        store: &Store,
        repository: &Repository,
        files: &[RemoteFile],
        cancel: &Cancel,
        progress: &OnProgress<'_>,
    ) -> Result<Vec<FileRecord>, LibraryError> {
        let transfers: Vec<Transfer> = files.iter().map(RemoteFile::transfer).collect();
        progress(Progress::Files(&transfers));
        let next = AtomicUsize::new(0);
        let outcome = Mutex::new(Ok(vec![None; files.len()]));
        // The first failure cancels the others; their downloaded parts are kept.
        let cancel = cancel.child();
        let work = || {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(file) = files.get(index) else { return };
                let job = Job { hub: self, store, repository, file, index, cancel: &cancel, progress };
                let done = job.run();
                let mut outcome = outcome.lock().unwrap_or_else(PoisonError::into_inner);
                match (done, &mut *outcome) {
                    (Ok(record), Ok(records)) => records[index] = Some(record),
                    (Err(error), Ok(_)) => {
                        *outcome = Err(error);
                        cancel.cancel();
                    }
                    (_, Err(_)) => {}
                }
            }
        };
        thread::scope(|scope| {
            for _ in 0..self.parallel.min(files.len()) {
                scope.spawn(work);
            }
        });
        let records = outcome.into_inner().unwrap_or_else(PoisonError::into_inner)?;
        Ok(records.into_iter().flatten().collect())
    }
}

impl RemoteFile {
    fn transfer(&self) -> Transfer {
        Transfer { name: self.name(), size: self.size, digest: self.digest() }
    }

    /// Returns its digest, if the hub reports it.
    pub(super) fn digest(&self) -> Option<Digest> {
        match &self.check {
            Check::Sha256(digits) => digits.parse().ok(),
            Check::Git(_) => None,
        }
    }

    /// Returns a key of the content. Downloads of one content share their partial file.
    fn key(&self) -> String {
        match &self.check {
            Check::Sha256(digits) => format!("sha256-{digits}"),
            Check::Git(digits) => format!("git-{digits}"),
        }
    }
}

/// The download of one file.
struct Job<'a> {
    hub: &'a Hub,
    store: &'a Store,
    repository: &'a Repository,
    file: &'a RemoteFile,
    index: usize,
    cancel: &'a Cancel,
    progress: &'a OnProgress<'a>,
}

impl Job<'_> {
    fn run(&self) -> Result<FileRecord, LibraryError> {
        let file = self.index;
        if let Some(record) = self.present()? {
            return Ok(record);
        }
        let key = self.file.key();
        let waiting = || (self.progress)(Progress::Waiting { file });
        let _lock = Lock::exclusive_unless(&self.store.lock_file(&key), self.cancel, waiting)?;
        // The owner of the lock before may have downloaded it.
        if let Some(record) = self.present()? {
            return Ok(record);
        }
        let digest = self.fetch(&self.store.partial_file(&key))?;
        Ok(self.finished(digest))
    }

    /// Returns the file if the library has it intact.
    fn present(&self) -> Result<Option<FileRecord>, LibraryError> {
        let Some(digest) = self.file.digest() else { return Ok(None) };
        let has_size = self.store.blob_size(&digest).is_ok_and(|size| size == self.file.size);
        let here = has_size && self.store.is_sound(&digest, self.cancel, |done| self.checking(done))?;
        Ok(here.then(|| self.finished(digest)))
    }

    fn checking(&self, done: u64) {
        (self.progress)(Progress::Checking { file: self.index, done });
    }

    fn finished(&self, digest: Digest) -> FileRecord {
        let (name, size) = (self.file.name(), self.file.size);
        (self.progress)(Progress::Bytes { file: self.index, done: size });
        (self.progress)(Progress::Finished { file: self.index });
        FileRecord { name, size, digest, location: None }
    }

    /// Downloads into `path`, checks, and makes a blob of it.
    fn fetch(&self, path: &Path) -> Result<Digest, LibraryError> {
        let mut part = Part::open(path, self.file, self.cancel, |done| self.checking(done))?;
        let mut resumed = part.size > 0;
        loop {
            self.complete(&mut part)?;
            let (digest, found) = part.checksums();
            let expected = match &self.file.check {
                Check::Sha256(digits) | Check::Git(digits) => digits,
            };
            if found == *expected {
                drop(part);
                self.store.publish(path, &digest, self.cancel)?;
                return Ok(digest);
            }
            if !resumed {
                drop(part);
                fs::remove_file(path).map_err(LibraryError::io("remove", path))?;
                let (file, expected) = (self.file.path.clone(), expected.clone());
                return Err(LibraryError::Checksum { file, expected, found });
            }
            // Bytes of an earlier process may be the damaged ones, after a loss of power.
            resumed = false;
            part.restart(self.file)?;
        }
    }

    /// Downloads the missing bytes with retries.
    fn complete(&self, part: &mut Part) -> Result<(), LibraryError> {
        let mut tries = 0;
        while part.size < self.file.size {
            let before = part.size;
            let Err(refusal) = self.attempt(part) else { continue };
            if part.size > before {
                tries = 0;
            }
            self.hub.client.wait(refusal, &mut tries, Some(self.index), self.cancel, self.progress)?;
        }
        Ok(())
    }

    fn attempt(&self, part: &mut Part) -> Result<(), Refusal> {
        let Repository { name, commit, .. } = self.repository;
        let path = client::encode(&self.file.path, true);
        let url = format!("{}/{name}/resolve/{commit}/{path}", self.hub.endpoint());
        let what = format!("`{}` in `{name}`", self.file.path);
        let odd = |problem: String| LibraryError::BadAnswer { url: url.clone(), problem };
        let answer = self.hub.client.get(&url, &what, part.size)?;
        if part.size > 0 && !continues(&answer, part.size).map_err(|problem| Refusal::Final(odd(problem)))? {
            part.restart(self.file).map_err(Refusal::Final)?;
        }
        let mut reader = answer.into_body().into_reader();
        let mut buffer = vec![0; CHUNK];
        loop {
            self.cancel.check().map_err(Refusal::Final)?;
            let broken = |problem| {
                let error = LibraryError::Connection { url: url.clone(), problem };
                Refusal::Temporary { error, wait: None }
            };
            let n = match reader.read(&mut buffer) {
                Ok(0) if part.size == self.file.size => return Ok(()),
                Ok(0) => {
                    let problem = format!("it ended after {} of {} bytes", part.size, self.file.size);
                    return Err(broken(problem));
                }
                Ok(n) => n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(broken(error.to_string())),
            };
            if part.size + n as u64 > self.file.size {
                part.restart(self.file).map_err(Refusal::Final)?;
                let problem = format!("it is longer than the {} bytes that were announced", self.file.size);
                return Err(Refusal::Final(odd(problem)));
            }
            part.write(&buffer[..n]).map_err(Refusal::Final)?;
            (self.progress)(Progress::Bytes { file: self.index, done: part.size });
        }
    }
}

/// Returns true if the answer begins at `from`. Not all servers support ranges.
fn continues(answer: &Response<Body>, from: u64) -> Result<bool, String> {
    if answer.status() != 206 {
        return Ok(false);
    }
    let range =
        answer.headers().get("content-range").and_then(|value| value.to_str().ok()).unwrap_or_default();
    let start = range.strip_prefix("bytes ").and_then(|rest| rest.split('-').next()?.parse::<u64>().ok());
    if start == Some(from) {
        Ok(true)
    } else {
        Err(format!("asked for bytes from {from} on, it gives `{range}`"))
    }
}

/// A partial file with the checksums of its bytes.
struct Part {
    file: File,
    path: PathBuf,
    size: u64,
    sha256: Sha256,
    /// Checksum of git's object, for files without a SHA-256 on the hub.
    git: Option<Sha1>,
}

impl Part {
    /// Reads the bytes of an earlier attempt.
    fn open(
        path: &Path,
        remote: &RemoteFile,
        cancel: &Cancel,
        advance: impl Fn(u64),
    ) -> Result<Self, LibraryError> {
        let file = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(path);
        let file = file.map_err(LibraryError::io("open", path))?;
        let mut part = Self { file, path: path.to_owned(), size: 0, sha256: Sha256::new(), git: git(remote) };
        let mut buffer = vec![0; CHUNK];
        loop {
            cancel.check()?;
            let n = part.file.read(&mut buffer).map_err(LibraryError::io("read", path))?;
            if n == 0 {
                break;
            }
            part.count(&buffer[..n]);
            advance(part.size);
        }
        if part.size > remote.size {
            part.restart(remote)?;
        }
        Ok(part)
    }

    fn count(&mut self, bytes: &[u8]) {
        self.sha256.update(bytes);
        if let Some(git) = &mut self.git {
            git.update(bytes);
        }
        self.size += bytes.len() as u64;
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), LibraryError> {
        self.file.write_all(bytes).map_err(LibraryError::io("write", &self.path))?;
        self.count(bytes);
        Ok(())
    }

    fn restart(&mut self, remote: &RemoteFile) -> Result<(), LibraryError> {
        let mut empty = || {
            self.file.set_len(0)?;
            io::Seek::rewind(&mut self.file)
        };
        empty().map_err(LibraryError::io("write", &self.path))?;
        (self.size, self.sha256, self.git) = (0, Sha256::new(), git(remote));
        Ok(())
    }

    /// Returns the SHA-256 and the checksum that the hub reports.
    fn checksums(&self) -> (Digest, String) {
        let digest = Digest::finish(self.sha256.clone());
        let announced = match &self.git {
            Some(git) => hex(&git.clone().finalize()),
            None => digest.hex(),
        };
        (digest, announced)
    }
}

/// Git hashes a header first: <https://git-scm.com/book/en/v2/Git-Internals-Git-Objects>.
fn git(remote: &RemoteFile) -> Option<Sha1> {
    match remote.check {
        Check::Git(_) => Some(Sha1::new_with_prefix(format!("blob {}\0", remote.size))),
        Check::Sha256(_) => None,
    }
}
