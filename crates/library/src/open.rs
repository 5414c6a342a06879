//! Opening of a library, also if it is read-only, on a full disk, or without its catalogue.
//!
//! A library that cannot be written is read-only, without a lock and without SQLite's side files. On a full disk,
//! commands that free space use the [reserve](crate::reserve) first.

use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use crate::{
    catalogue::{self, Catalogue, Contents},
    error::LibraryError,
    files::shared_builder,
    library::Library,
    lock::Lock,
    manifest::Manifests,
    reserve::Reserve,
    store::{Pruned, Store},
};

/// Reason for which a library cannot be written.
#[derive(Clone, Debug)]
pub(crate) enum Limit {
    /// The system does not allow it.
    ReadOnly(String),
    /// The catalogue could only be opened for reading, because the disk is full.
    Full,
}

impl Library {
    /// Opens the library in this folder, and creates it if necessary. A library that cannot be written, or whose disk
    /// is full, can be read; changes fail.
    ///
    /// # Errors
    /// The folder cannot be created, or the catalogue is lost, damaged or of a newer version.
    pub fn open(root: &Path) -> Result<Self, LibraryError> {
        if !root.is_dir() {
            fs::create_dir_all(root).map_err(LibraryError::io("make the folder", root))?;
        }
        // Hard links to relative paths would depend on the working directory.
        let root = root.canonicalize().map_err(LibraryError::io("open", root))?;
        let opening = match Lock::exclusive(&root.join("open.lock")) {
            Ok(lock) => lock,
            Err(error) => return Self::open_read_only(root, error),
        };
        let library =
            Self::parts(&root, &root.join(catalogue::FILE), |path| match Catalogue::contents(path)? {
                Contents::Catalogue => Ok(()),
                contents => lost(&root, contents),
            });
        // A rebuild acquires the two locks in the other order.
        drop(opening);
        match library {
            Err(error) if error.read_only().is_some() => Self::open_read_only(root, error),
            Err(error) => Err(error),
            Ok(library) => library.complete(),
        }
    }

    /// Opens the library in this folder if it exists.
    ///
    /// # Errors
    /// As for [`Library::open`], or the folder cannot be read, so that it may have a library.
    pub fn open_existing(root: &Path) -> Result<Option<Self>, LibraryError> {
        let exists = |path: &Path| match fs::metadata(path) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(LibraryError::io("read the library", root)(error)),
        };
        if !exists(root)? {
            return Ok(None);
        }
        if !exists(&root.join(catalogue::FILE))? {
            fs::read_dir(root).map_err(LibraryError::io("read the library", root))?;
            if holdings(root) == (0, 0) {
                return Ok(None);
            }
        }
        Self::open(root).map(Some)
    }

    /// Opens the library in this folder with an empty catalogue, and renames a lost or damaged one. The files of its
    /// models then belong to no model.
    ///
    /// # Errors
    /// As for [`Library::open`].
    pub fn open_anew(root: &Path) -> Result<Self, LibraryError> {
        match Self::open(root) {
            Err(LibraryError::CatalogueLost { .. } | LibraryError::CatalogueDamaged { .. }) => {}
            opened => return opened,
        }
        let root = root.canonicalize().map_err(LibraryError::io("open", root))?;
        let opening = Lock::exclusive(&root.join("open.lock"))?;
        set_aside(&root)?;
        let library = Self::parts(&root, &root.join(catalogue::FILE), |_| Ok(()))?;
        drop(opening);
        library.complete()
    }

    /// Opens the parts of a library that can be written, with the catalogue at `path`. The caller holds `open.lock`.
    pub(crate) fn parts(
        root: &Path,
        path: &Path,
        check: impl FnOnce(&Path) -> Result<(), LibraryError>,
    ) -> Result<Self, LibraryError> {
        let store = Store::new(root);
        let (manifests, reserve) = (Manifests::new(root), Reserve::new(root));
        let open = || {
            check(path)?;
            store.make_folders()?;
            manifests.make_folder()?;
            Catalogue::open(path)
        };
        let (catalogue, limit) = match open() {
            Ok(catalogue) => (catalogue, None),
            Err(error) if path.is_file() && is_for_lack_of_space(&error, root) => {
                (Catalogue::open_read_only(path)?, Some(Limit::Full))
            }
            Err(error) => return Err(error),
        };
        let limit = Mutex::new(limit);
        Ok(Self { root: root.to_owned(), catalogue, store, manifests, reserve, limit })
    }

    /// Adds files that libraries of older versions do not have.
    fn complete(self) -> Result<Self, LibraryError> {
        if self.limit().is_none() {
            self.reserve.ensure();
            self.complete_manifests()?;
        }
        Ok(self)
    }

    /// Opens a read-only library. `error` is the error of the attempt to write.
    fn open_read_only(root: PathBuf, error: LibraryError) -> Result<Self, LibraryError> {
        let Some(problem) = error.read_only() else { return Err(error) };
        let path = root.join(catalogue::FILE);
        match Catalogue::contents(&path)? {
            Contents::Catalogue => {}
            contents => {
                lost(&root, contents)?;
                // The library is empty and cannot be filled.
                return Err(LibraryError::ReadOnly { path: root, problem });
            }
        }
        let catalogue = Catalogue::open_read_only(&path)?;
        let (store, manifests, reserve) = (Store::new(&root), Manifests::new(&root), Reserve::new(&root));
        let limit = Mutex::new(Some(Limit::ReadOnly(problem)));
        Ok(Self { root, catalogue, store, manifests, reserve, limit })
    }

    /// Says why the library cannot be written, if it cannot.
    pub fn not_writable(&self) -> Option<LibraryError> {
        let path = self.root.clone();
        self.limit().map(|limit| match limit {
            Limit::ReadOnly(problem) => LibraryError::ReadOnly { path, problem },
            Limit::Full => LibraryError::DiskFull { path },
        })
    }

    /// Returns the reason for which the library cannot be written, if there is one.
    pub(crate) fn limit(&self) -> Option<Limit> {
        self.limit.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Refuses to change a library that cannot be written.
    pub(crate) fn writable(&self) -> Result<(), LibraryError> {
        match self.not_writable() {
            None => Ok(()),
            // There may be space again.
            Some(LibraryError::DiskFull { .. }) => self.reopen(),
            Some(error) => Err(error),
        }
    }

    /// Refuses to delete anything from a library that cannot be written for another reason than a full disk.
    pub(crate) fn deletable(&self) -> Result<(), LibraryError> {
        match self.not_writable() {
            None | Some(LibraryError::DiskFull { .. }) => Ok(()),
            Some(error) => Err(error),
        }
    }

    fn reopen(&self) -> Result<(), LibraryError> {
        let _opening = Lock::exclusive(&self.root.join("open.lock"))?;
        let reopen = || {
            self.store.make_folders()?;
            self.manifests.make_folder()?;
            self.catalogue.reopen()
        };
        reopen().map_err(|error| self.lack_of_space(error))?;
        *self.limit.lock().unwrap_or_else(PoisonError::into_inner) = None;
        Ok(())
    }

    /// Runs an operation that frees space. On a full disk, the reserve and then incomplete files are deleted for it.
    pub(crate) fn freeing<T>(&self, work: impl Fn() -> Result<T, LibraryError>) -> Result<T, LibraryError> {
        let attempt = || work().map_err(|error| self.lack_of_space(error));
        let mut done = attempt();
        if matches!(done, Err(LibraryError::DiskFull { .. })) && self.reserve.free() {
            done = attempt();
        }
        if matches!(done, Err(LibraryError::DiskFull { .. }))
            && let Some(alone) = Lock::try_exclusive(&self.lock_file())?
        {
            self.store.sweep_unfinished(&mut Pruned::default())?;
            drop(alone);
            done = attempt();
        }
        if done.is_ok() {
            self.reserve.ensure();
        }
        done
    }

    /// Recognises SQLite's various errors for a full disk.
    pub(crate) fn lack_of_space(&self, error: LibraryError) -> LibraryError {
        if is_for_lack_of_space(&error, &self.root) {
            LibraryError::DiskFull { path: self.root.clone() }
        } else {
            error
        }
    }

    /// Writes the records that are missing beside the models.
    pub(crate) fn complete_manifests(&self) -> Result<(), LibraryError> {
        let names = self.catalogue.names()?;
        if names.iter().all(|name| self.manifests.has(name)) {
            return Ok(());
        }
        let complete = || {
            let changing = self.manifests.change()?;
            self.manifests.reconcile(&changing, &names)?;
            for name in names.iter().filter(|name| !self.manifests.has(name)) {
                if let Some(model) = self.catalogue.get(name)? {
                    self.manifests.put(&changing, &model, || Ok(()))?;
                }
            }
            Ok(())
        };
        match complete() {
            // The next time, perhaps: the models can be used without.
            Err(LibraryError::DiskFull { .. }) => Ok(()),
            done => done,
        }
    }
}

/// Returns an error if the catalogue is missing or invalid although there are files of models.
pub(crate) fn lost(root: &Path, contents: Contents) -> Result<(), LibraryError> {
    let (blobs, manifests) = holdings(root);
    let problem = match contents {
        Contents::Missing => "missing",
        Contents::Empty => "empty",
        Contents::Foreign => "of another program",
        Contents::Catalogue => return Ok(()),
    };
    if (blobs, manifests) == (0, 0) && contents != Contents::Foreign {
        return Ok(());
    }
    Err(LibraryError::CatalogueLost { path: root.to_owned(), problem, blobs, manifests })
}

/// Counts the contents of a library without its catalogue.
fn holdings(root: &Path) -> (usize, usize) {
    (Store::new(root).count(), Manifests::new(root).count())
}

/// Renames the file in the catalogue's place and returns its new path, if there is one.
pub(crate) fn set_aside(root: &Path) -> Result<Option<PathBuf>, LibraryError> {
    let path = root.join(catalogue::FILE);
    let free = |number: &usize| !root.join(format!("library-old-{number}.db")).exists();
    let number = (1..).find(free).unwrap_or(usize::MAX);
    let aside = root.join(format!("library-old-{number}.db"));
    for extension in ["db-wal", "db-shm", "db"] {
        let (from, to) = (path.with_extension(extension), aside.with_extension(extension));
        if from.exists() {
            fs::rename(&from, &to).map_err(LibraryError::io("rename", &from))?;
        }
    }
    Ok(aside.exists().then_some(aside))
}

/// Returns true if a full disk caused an error: the error states it, or could be caused by it and nothing can be
/// written.
fn is_for_lack_of_space(error: &LibraryError, root: &Path) -> bool {
    use rusqlite::ErrorCode as Code;
    let could_be = match error {
        LibraryError::DiskFull { .. } => return true,
        LibraryError::Catalogue(error) => matches!(
            error.sqlite_error_code(),
            Some(Code::SystemIoFailure | Code::CannotOpen | Code::OutOfMemory)
        ),
        _ => false,
    };
    could_be && matches!(write_something(root), Err(LibraryError::DiskFull { .. }))
}

/// Writes as much as SQLite does at least.
fn write_something(root: &Path) -> Result<(), LibraryError> {
    let write = || {
        let mut file = shared_builder(0o666).prefix(".full-").tempfile_in(root)?;
        file.write_all(&[1; 64 << 10])?;
        file.as_file().sync_all()
    };
    write().map_err(LibraryError::io("write", root))
}
