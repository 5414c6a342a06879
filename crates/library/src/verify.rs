//! Verification of all files of the library, and repair of damaged ones.

use std::{
    collections::BTreeMap,
    fmt, fs,
    path::{Path, PathBuf},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use crate::{
    cancel::Cancel,
    digest::Digest,
    error::LibraryError,
    files::{entries, hash_file, is_same, kind, name_of, shared_builder},
    hub::Hub,
    library::Library,
    record::{FileRecord, ModelRecord, OnProgress, Progress, Source, Transfer},
};

/// Threads that read at the same time, at most.
const READERS: usize = 8;

/// Choices of a verification.
#[derive(Clone, Copy, Debug, Default)]
pub struct VerifyOptions<'a> {
    /// Only this model, as [`Library::find`] understands names; otherwise all of the library.
    pub name: Option<&'a str>,
    /// Hub from which damaged files are downloaded again; other origins are used as well.
    pub repair: Option<&'a Hub>,
}

/// Result of a verification.
#[derive(Debug, Default)]
pub struct Verified {
    /// Files that were read.
    pub files: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Faults that were found.
    pub findings: Vec<Finding>,
}

/// A damaged file.
#[derive(Debug)]
pub struct Finding {
    /// Names of the models that use it; empty if there are none.
    pub models: Vec<String>,
    /// The file's name in the model.
    pub file: String,
    /// The expected digest.
    pub digest: Digest,
    /// Path outside of the library, if it is an imported reference.
    pub location: Option<PathBuf>,
    /// Its fault.
    pub problem: Problem,
    /// Result of the repair, if requested.
    pub repair: Option<Repair>,
}

/// Fault of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Problem {
    /// The file is missing.
    Missing,
    /// The size differs.
    Size {
        /// Its bytes.
        found: u64,
        /// The bytes that it should have.
        expected: u64,
    },
    /// The size matches, but the content differs.
    Content {
        /// Its digest.
        found: Digest,
    },
    /// The system cannot read it.
    Unreadable(String),
}

/// Result of a repair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Repair {
    /// The file is repaired, from this source.
    Done(String),
    /// The file is unchanged, for this reason.
    Failed(String),
}

impl Finding {
    /// Returns true if the file is whole again.
    pub fn is_repaired(&self) -> bool {
        matches!(self.repair, Some(Repair::Done(_)))
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => write!(f, "it is missing"),
            Self::Size { found, expected } => write!(f, "it has {found} bytes instead of {expected}"),
            Self::Content { found } => write!(f, "its content has changed: its SHA-256 is {found}"),
            Self::Unreadable(problem) => write!(f, "it cannot be read: {problem}"),
        }
    }
}

/// A file that is to be read.
#[derive(Debug)]
pub(crate) struct Item {
    pub(crate) path: PathBuf,
    pub(crate) record: FileRecord,
    /// Names of the models that have it.
    models: Vec<String>,
}

impl Library {
    /// Reads the files of models and compares them with their digests, and lists other files.
    ///
    /// # Errors
    /// An unknown name, a damaged catalogue, [`LibraryError::Cancelled`]. Damaged files are findings, not errors.
    pub fn verify(
        &self,
        options: &VerifyOptions<'_>,
        cancel: &Cancel,
        progress: &OnProgress<'_>,
    ) -> Result<Verified, LibraryError> {
        self.catalogue.check()?;
        if options.repair.is_some() {
            self.writable()?;
        }
        // The lock prevents deletion of files while they are read.
        let _writing = if self.limit().is_none() { Some(self.writing()?) } else { None };
        let models = match options.name {
            Some(name) => vec![self.find(name)?],
            None => self.list()?,
        };
        let mut items = self.items(&models);
        if options.name.is_none() {
            self.add_unused(&mut items)?;
        }
        let problems = read_all(&items, cancel, progress)?;
        let mut verified = Verified { files: items.len(), ..Verified::default() };
        for (item, problem) in items.into_iter().zip(problems) {
            verified.bytes += item.record.size;
            if self.limit().is_none() && item.record.location.is_none() {
                let text = problem.as_ref().map(Problem::to_string);
                self.store.set_damage(&item.record.digest, text.as_deref())?;
            }
            let Some(problem) = problem else { continue };
            let repair = match options.repair {
                Some(hub) => Some(self.repair(&item, hub, cancel, progress)?),
                None => None,
            };
            verified.findings.push(Finding {
                models: item.models,
                file: item.record.name,
                digest: item.record.digest,
                location: item.record.location,
                problem,
                repair,
            });
        }
        Ok(verified)
    }

    /// Lists the files of models, each once, however many models have it.
    pub(crate) fn items(&self, models: &[ModelRecord]) -> Vec<Item> {
        let mut items: BTreeMap<(PathBuf, Digest), Item> = BTreeMap::new();
        for model in models {
            for file in &model.files {
                let path = file.location.clone().unwrap_or_else(|| self.store.blob(&file.digest));
                let item = items.entry((path.clone(), file.digest)).or_insert_with(|| Item {
                    path,
                    record: file.clone(),
                    models: Vec::new(),
                });
                item.models.push(model.name.short());
            }
        }
        let mut items: Vec<Item> = items.into_values().collect();
        items.iter_mut().for_each(|item| item.models.sort());
        // The largest first, so that no thread begins with it when the others are done.
        items.sort_by_key(|item| std::cmp::Reverse(item.record.size));
        items
    }

    /// Adds the blobs that no model has.
    fn add_unused(&self, items: &mut Vec<Item>) -> Result<(), LibraryError> {
        for path in entries(&self.store.blobs())? {
            let name = name_of(&path);
            let Ok(digest) = name.parse::<Digest>() else { continue };
            if items.iter().any(|item| item.path == path) || !path.is_file() {
                continue;
            }
            let size = fs::metadata(&path).map_or(0, |metadata| metadata.len());
            let record = FileRecord { name, size, digest, location: None };
            items.push(Item { path, record, models: Vec::new() });
        }
        Ok(())
    }

    /// Restores a file from its origin. The existing file stays until an intact one replaces it.
    fn repair(
        &self,
        item: &Item,
        hub: &Hub,
        cancel: &Cancel,
        progress: &OnProgress<'_>,
    ) -> Result<Repair, LibraryError> {
        if item.record.location.is_some() {
            return Ok(Repair::Failed(
                "it lies outside of the library; put the old file back, or import the new one with --replace"
                    .into(),
            ));
        }
        if item.models.is_empty() {
            return Ok(Repair::Failed("it belongs to no model; `paguro prune` deletes it".into()));
        }
        let mut failures = Vec::new();
        for origin in self.origins(&item.record)? {
            cancel.check()?;
            let (name, done) = match &origin {
                Origin::Link(path) | Origin::File(path) => {
                    (path.display().to_string(), self.repair_from_file(path, &origin, &item.record, cancel))
                }
                Origin::Hub { endpoint, repo, commit } => {
                    let fetch = || {
                        let hub = hub.at(endpoint)?;
                        hub.fetch_again(&self.store, repo, commit, &item.record, cancel, progress)
                    };
                    (format!("{endpoint}/{repo}"), fetch())
                }
            };
            match done {
                Ok(()) => return Ok(Repair::Done(name)),
                Err(LibraryError::Cancelled) => return Err(LibraryError::Cancelled),
                Err(error) => failures.push(format!("{name}: {error}")),
            }
        }
        Ok(Repair::Failed(match failures.is_empty() {
            true => "nothing is known of where it came from; import or upload it again".into(),
            false => failures.join("; "),
        }))
    }

    fn repair_from_file(
        &self,
        path: &Path,
        origin: &Origin,
        record: &FileRecord,
        cancel: &Cancel,
    ) -> Result<(), LibraryError> {
        let (found, _) = hash_file(path, cancel, |_| {})?;
        if found != record.digest {
            let what = path.display().to_string();
            return Err(LibraryError::DigestMismatch { what, expected: record.digest, found });
        }
        if let Origin::Link(_) = origin {
            let folder = self.store.temporary();
            let beside = shared_builder(0o777)
                .tempdir_in(&folder)
                .map_err(LibraryError::io("make a folder in", &folder))?;
            let link = beside.path().join("link");
            fs::hard_link(path, &link).map_err(LibraryError::io("make a hard link", &link))?;
            return self.store.publish(&link, &record.digest, cancel);
        }
        let file = fs::File::open(path).map_err(LibraryError::io("read", path))?;
        self.store.put(&path.display().to_string(), file, Some(record.digest), cancel, |_| {}).map(drop)
    }

    /// Lists the places where a file may be had again, the nearest first.
    fn origins(&self, wanted: &FileRecord) -> Result<Vec<Origin>, LibraryError> {
        let (mut near, mut hubs) = (Vec::new(), Vec::new());
        let blob = self.store.blob(&wanted.digest);
        let models = self.list()?;
        for model in &models {
            let Some(file) = model.files.iter().find(|file| file.digest == wanted.digest) else { continue };
            let link = self.store.view_of(&model.files).join(&file.name);
            if file.location.is_none() && link.is_file() && !is_same(&link, &blob) {
                near.push(Origin::Link(link));
            }
            near.extend(file.location.clone().map(Origin::File));
            // For a model that was created from others, the first one with an origin.
            let mut source = &model.source;
            for _ in 0..models.len() {
                let Source::Model { name } = source else { break };
                let Some(from) = models.iter().find(|model| model.name.to_string() == *name) else { break };
                source = &from.source;
            }
            match source {
                Source::Import { path } if path.is_dir() => near.push(Origin::File(path.join(&file.name))),
                Source::Import { path } => near.push(Origin::File(path.with_file_name(&file.name))),
                Source::Hub { endpoint, repo, commit } => hubs.push(Origin::Hub {
                    endpoint: endpoint.clone(),
                    repo: repo.clone(),
                    commit: commit.clone(),
                }),
                Source::Upload | Source::Model { .. } => {}
            }
        }
        near.extend(hubs);
        let mut origins: Vec<Origin> = Vec::new();
        for origin in near {
            if !origins.contains(&origin) {
                origins.push(origin);
            }
        }
        Ok(origins)
    }
}

/// A place where a file may be had again.
#[derive(Debug, PartialEq, Eq)]
enum Origin {
    /// A model's link to a blob that is not there any more.
    Link(PathBuf),
    /// The file that was imported.
    File(PathBuf),
    /// The repository that it was pulled from.
    Hub { endpoint: String, repo: String, commit: String },
}

/// Reads all files concurrently and returns the problem of each.
pub(crate) fn read_all(
    items: &[Item],
    cancel: &Cancel,
    progress: &OnProgress<'_>,
) -> Result<Vec<Option<Problem>>, LibraryError> {
    let transfer = |item: &Item| Transfer {
        name: item.record.name.clone(),
        size: item.record.size,
        digest: Some(item.record.digest),
    };
    progress(Progress::Files(&items.iter().map(transfer).collect::<Vec<_>>()));
    let next = AtomicUsize::new(0);
    let problems = Mutex::new(Ok(vec![None; items.len()]));
    let work = || {
        loop {
            let file = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(file) else { return };
            let problem = item.read(cancel, |done| progress(Progress::Checking { file, done }));
            progress(Progress::Finished { file });
            let mut problems = problems.lock().unwrap_or_else(PoisonError::into_inner);
            match (problem, &mut *problems) {
                (Ok(problem), Ok(problems)) => problems[file] = problem,
                (Err(error), problems) => *problems = Err(error),
                _ => {}
            }
        }
    };
    let readers = thread::available_parallelism().map_or(1, usize::from).min(READERS).min(items.len());
    thread::scope(|scope| {
        for _ in 0..readers {
            scope.spawn(work);
        }
    });
    problems.into_inner().unwrap_or_else(PoisonError::into_inner)
}

impl Item {
    /// Reads the file and returns its problem, if there is one.
    fn read(&self, cancel: &Cancel, progress: impl FnMut(u64)) -> Result<Option<Problem>, LibraryError> {
        cancel.check()?;
        let expected = self.record.size;
        match fs::metadata(&self.path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Some(Problem::Missing)),
            Err(error) => return Ok(Some(Problem::Unreadable(error.to_string()))),
            Ok(metadata) => {
                if let Some(kind) = kind(&metadata) {
                    return Ok(Some(Problem::Unreadable(format!("it is {kind}, not a regular file"))));
                }
                if metadata.len() != expected {
                    return Ok(Some(Problem::Size { found: metadata.len(), expected }));
                }
            }
        }
        match hash_file(&self.path, cancel, progress) {
            Ok((found, _)) if found == self.record.digest => Ok(None),
            Ok((found, _)) => Ok(Some(Problem::Content { found })),
            Err(LibraryError::Cancelled) => Err(LibraryError::Cancelled),
            Err(error) => Ok(Some(Problem::Unreadable(error.to_string()))),
        }
    }
}
