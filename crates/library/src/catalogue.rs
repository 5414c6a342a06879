//! The catalogue: the models and their files, in a SQLite database. It is authoritative as long as it is intact;
//! [`Contents`] distinguishes an intact catalogue from a damaged one.

use std::{
    ops::{Deref, DerefMut},
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use rusqlite::{
    Connection, OpenFlags, OptionalExtension, Row, Transaction, TransactionBehavior, params,
    types::{FromSql, FromSqlError},
};
use serde::de::DeserializeOwned;

use crate::{
    digest::Digest,
    error::LibraryError,
    name::ModelName,
    record::{Details, FileRecord, Format, ModelRecord},
};

/// Migrations in order. `user_version` of a database is the number of applied ones. A released migration is never
/// changed.
const MIGRATIONS: [&str; 3] = [
    include_str!("migrations/0001.sql"),
    include_str!("migrations/0002.sql"),
    include_str!("migrations/0003.sql"),
];

/// Timeout for the write lock of another process. Transactions take milliseconds.
const BUSY_TIMEOUT: Duration = Duration::from_secs(20);

/// The file's name in the library.
pub(crate) const FILE: &str = "library.db";

#[derive(Debug)]
pub(crate) struct Catalogue {
    path: PathBuf,
    opened: Mutex<Opened>,
}

/// A connection, and a copy of the database that it may be of.
#[derive(Debug)]
struct Opened {
    // Closed before the copy is removed.
    connection: Connection,
    _copy: Option<tempfile::TempDir>,
}

/// The connection, for one thread at a time.
struct Guard<'a>(MutexGuard<'a, Opened>);

impl Deref for Guard<'_> {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        &self.0.connection
    }
}

impl DerefMut for Guard<'_> {
    fn deref_mut(&mut self) -> &mut Connection {
        &mut self.0.connection
    }
}

impl From<Connection> for Opened {
    fn from(connection: Connection) -> Self {
        Self { connection, _copy: None }
    }
}

/// State of the file at the catalogue's path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Contents {
    /// No file.
    Missing,
    /// A file without anything in it.
    Empty,
    /// A database with other tables.
    Foreign,
    /// A catalogue, of this or another version.
    Catalogue,
}

impl Catalogue {
    /// Examines the database without changing it.
    ///
    /// # Errors
    /// The file is not a database, or it is damaged.
    pub(crate) fn contents(path: &Path) -> Result<Contents, LibraryError> {
        let size = |path: &Path| std::fs::metadata(path).map(|metadata| metadata.len());
        // The last writes may be in the log only.
        let logged = size(&path.with_extension("db-wal")).unwrap_or(0) > 0;
        match size(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Contents::Missing),
            Ok(0) if !logged => return Ok(Contents::Empty),
            _ => {}
        }
        let connection = open_to_read(path, None)?.connection;
        let tables: Vec<String> = connection
            .prepare("SELECT name FROM sqlite_master WHERE type = 'table'")?
            .query_map([], |row| row.get(0))?
            .collect::<Result<_, _>>()?;
        let has = |name: &str| tables.iter().any(|table| table == name);
        Ok(match (version(&connection)?, tables.is_empty()) {
            (0, true) => Contents::Empty,
            (1.., _) if has("models") && has("files") => Contents::Catalogue,
            _ => Contents::Foreign,
        })
    }

    /// Opens the database, creates it if necessary, and applies migrations. Only one process may do this at a time.
    pub(crate) fn open(path: &Path) -> Result<Self, LibraryError> {
        let opened = open_to_write(path)?.into();
        Ok(Self { path: path.to_owned(), opened: Mutex::new(opened) })
    }

    /// Opens a database in a folder in which nothing may be written, or can be.
    pub(crate) fn open_read_only(path: &Path) -> Result<Self, LibraryError> {
        let opened = open_to_read(path, Some(MIGRATIONS.len() as i64))?;
        Ok(Self { path: path.to_owned(), opened: Mutex::new(opened) })
    }

    /// Opens a database that was opened to be read in order to write it.
    pub(crate) fn reopen(&self) -> Result<(), LibraryError> {
        let opened = open_to_write(&self.path)?.into();
        *self.opened.lock().unwrap_or_else(PoisonError::into_inner) = opened;
        Ok(())
    }

    /// Reads all of the database; an error if it is damaged anywhere.
    pub(crate) fn check(&self) -> Result<(), LibraryError> {
        let problem: String = self.lock().query_row("PRAGMA quick_check(1)", [], |row| row.get(0))?;
        if problem == "ok" { Ok(()) } else { Err(LibraryError::CatalogueDamaged { problem }) }
    }

    fn lock(&self) -> Guard<'_> {
        // A panic in between has rolled its transaction back.
        Guard(self.opened.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns all models, most recently changed first.
    pub(crate) fn all(&self) -> Result<Vec<ModelRecord>, LibraryError> {
        let mut connection = self.lock();
        // One transaction, so that models and files are consistent.
        let transaction = connection.transaction()?;
        let mut models = transaction
            .prepare("SELECT * FROM models ORDER BY modified_at DESC, id DESC")?
            .query_map([], |row| Ok((row.get("id")?, record(row)?)))?
            .collect::<Result<Vec<(i64, ModelRecord)>, _>>()?;
        for (id, model) in &mut models {
            model.files = files(&transaction, *id)?;
        }
        Ok(models.into_iter().map(|(_, model)| model).collect())
    }

    /// Returns all names.
    pub(crate) fn names(&self) -> Result<Vec<ModelName>, LibraryError> {
        let connection = self.lock();
        let mut statement = connection.prepare("SELECT base, tag FROM models ORDER BY base, tag")?;
        Ok(statement.query_map([], name)?.collect::<Result<_, _>>()?)
    }

    /// Returns the model of this name.
    pub(crate) fn get(&self, name: &ModelName) -> Result<Option<ModelRecord>, LibraryError> {
        let mut connection = self.lock();
        let transaction = connection.transaction()?;
        let found = transaction
            .query_row(
                "SELECT * FROM models WHERE base = ?1 AND tag = ?2",
                params![name.base(), name.tag()],
                |row| Ok((row.get("id")?, record(row)?)),
            )
            .optional()?;
        let Some((id, mut model)) = found else { return Ok(None) };
        model.files = files(&transaction, id)?;
        Ok(Some(model))
    }

    /// Records a model, in place of another one of its name if `replace` allows it.
    ///
    /// # Errors
    /// [`LibraryError::NameTaken`].
    pub(crate) fn put(&self, model: &ModelRecord, replace: bool) -> Result<(), LibraryError> {
        let mut connection = self.lock();
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let removed = delete(&transaction, &model.name)?;
        if removed && !replace {
            return Err(LibraryError::NameTaken { name: model.name.to_string() });
        }
        let details = &model.details;
        transaction.execute(
            "INSERT INTO models (base, tag, source, format, architecture, parameter_count, quantization, parameters, \
             created_at, modified_at, problem, inspected_by, stamp, extra, adapter) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15)",
            params![
                model.name.base(),
                model.name.tag(),
                json(&model.source)?,
                model.format.name(),
                details.architecture,
                // SQLite has no unsigned numbers; no model has 2^63 weights.
                i64::try_from(details.parameters).unwrap_or(i64::MAX),
                details.quantization,
                json(&model.defaults)?,
                to_millis(model.created_at),
                to_millis(model.modified_at),
                details.problem,
                details.inspected_by,
                model.stamp,
                json(&model.extra)?,
                details.adapter.as_ref().map(json).transpose()?,
            ],
        )?;
        let id = transaction.last_insert_rowid();
        for (position, file) in model.files.iter().enumerate() {
            let location = file.location.as_deref().map(unicode).transpose()?;
            transaction.execute(
                "INSERT INTO files (model, position, name, size, digest, location) VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
                params![id, position as i64, file.name, file.size as i64, file.digest.hex(), location],
            )?;
        }
        Ok(transaction.commit()?)
    }

    /// Forgets a model; returns whether there was one.
    pub(crate) fn delete(&self, name: &ModelName) -> Result<bool, LibraryError> {
        let mut connection = self.lock();
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let deleted = delete(&transaction, name)?;
        transaction.commit()?;
        Ok(deleted)
    }

    /// Replaces the inspected properties of a model, unless the model has changed meanwhile.
    pub(crate) fn set_details(&self, model: &ModelRecord) -> Result<(), LibraryError> {
        let details = &model.details;
        self.lock().execute(
            "UPDATE models SET architecture = ?3, parameter_count = ?4, quantization = ?5, problem = ?6, \
             inspected_by = ?7, stamp = ?8, adapter = ?10 WHERE base = ?1 AND tag = ?2 AND modified_at = ?9",
            params![
                model.name.base(),
                model.name.tag(),
                details.architecture,
                i64::try_from(details.parameters).unwrap_or(i64::MAX),
                details.quantization,
                details.problem,
                details.inspected_by,
                model.stamp,
                to_millis(model.modified_at),
                details.adapter.as_ref().map(json).transpose()?,
            ],
        )?;
        Ok(())
    }
}

fn open_to_write(path: &Path) -> Result<Connection, LibraryError> {
    let mut connection = Connection::open(path)?;
    connection.busy_timeout(BUSY_TIMEOUT)?;
    if connection.is_readonly(rusqlite::MAIN_DB)? {
        let denied = std::io::ErrorKind::PermissionDenied.into();
        return Err(LibraryError::io("write", path)(denied));
    }
    // WAL allows reads during a write; FULL makes commits durable on power loss.
    connection.pragma_update(None, "journal_mode", "WAL")?;
    connection.pragma_update(None, "synchronous", "FULL")?;
    connection.pragma_update(None, "foreign_keys", true)?;
    connection.pragma_update(None, "temp_store", "MEMORY")?;
    migrate(&mut connection, path)?;
    Ok(connection)
}

/// Opens a database without writing any file beside it. If `wanted` is a newer version than the database's, a migrated
/// copy is opened.
fn open_to_read(path: &Path, wanted: Option<i64>) -> Result<Opened, LibraryError> {
    let usable = |connection: Connection| -> Result<Option<Connection>, LibraryError> {
        connection.busy_timeout(BUSY_TIMEOUT)?;
        let found = version(&connection)?;
        Ok((wanted.is_none_or(|wanted| found >= wanted)).then_some(connection))
    };
    let flags =
        OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_URI | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    // This connection sees the writes of others, but needs a writer's files beside the database, or a writable folder.
    match Connection::open_with_flags(path, flags).map_err(LibraryError::from).and_then(usable) {
        Ok(Some(connection)) => {
            refuse_newer(&connection, path)?;
            return Ok(connection.into());
        }
        Err(error @ LibraryError::CatalogueDamaged { .. }) => return Err(error),
        // A copy, or another way to open it.
        Ok(None) | Err(_) => {}
    }
    let log = path.with_extension("db-wal");
    let logged = std::fs::metadata(&log).is_ok_and(|metadata| metadata.len() > 0);
    if !logged {
        let connection = Connection::open_with_flags(immutable(path), flags)?;
        if let Some(connection) = usable(connection)? {
            refuse_newer(&connection, path)?;
            return Ok(connection.into());
        }
    }
    let copy = tempfile::tempdir().map_err(LibraryError::io("make a folder in", std::env::temp_dir()))?;
    let copied = copy.path().join(FILE);
    std::fs::copy(path, &copied).map_err(LibraryError::io("copy", path))?;
    if logged {
        std::fs::copy(&log, copied.with_extension("db-wal")).map_err(LibraryError::io("copy", &log))?;
    }
    let connection = if wanted.is_some() { open_to_write(&copied)? } else { Connection::open(&copied)? };
    Ok(Opened { connection, _copy: Some(copy) })
}

/// Returns the URI with which SQLite assumes that the file does not change: <https://www.sqlite.org/uri.html>.
fn immutable(path: &Path) -> String {
    let path = path.to_string_lossy().replace('\\', "/");
    let path = path.replace('%', "%25").replace('?', "%3f").replace('#', "%23");
    let slash = if path.starts_with('/') { "" } else { "/" };
    format!("file://{slash}{path}?immutable=1")
}

fn version(connection: &Connection) -> Result<i64, LibraryError> {
    Ok(connection.query_row("PRAGMA user_version", [], |row| row.get(0))?)
}

/// Refuses a database of a newer version.
fn refuse_newer(connection: &Connection, path: &Path) -> Result<(), LibraryError> {
    let (known, found) = (MIGRATIONS.len() as i64, version(connection)?);
    if found > known {
        let path = path.parent().unwrap_or(path).to_owned();
        return Err(LibraryError::Newer { path, found, known });
    }
    Ok(())
}

fn migrate(connection: &mut Connection, path: &Path) -> Result<(), LibraryError> {
    refuse_newer(connection, path)?;
    let (known, found) = (MIGRATIONS.len() as i64, version(connection)?);
    if found == known {
        return Ok(());
    }
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    for step in &MIGRATIONS[found.max(0) as usize..] {
        transaction.execute_batch(step)?;
    }
    transaction.pragma_update(None, "user_version", known)?;
    Ok(transaction.commit()?)
}

fn delete(transaction: &Transaction<'_>, name: &ModelName) -> Result<bool, LibraryError> {
    // Its files go with it: ON DELETE CASCADE.
    let deleted = transaction
        .execute("DELETE FROM models WHERE base = ?1 AND tag = ?2", params![name.base(), name.tag()])?;
    Ok(deleted > 0)
}

fn files(transaction: &Transaction<'_>, model: i64) -> Result<Vec<FileRecord>, LibraryError> {
    let mut statement = transaction
        .prepare("SELECT name, size, digest, location FROM files WHERE model = ?1 ORDER BY position")?;
    let file = |row: &Row<'_>| {
        Ok(FileRecord {
            name: row.get("name")?,
            size: row.get::<_, i64>("size")? as u64,
            digest: parsed(row, "digest", |text: String| text.parse::<Digest>().ok())?,
            location: row.get::<_, Option<String>>("location")?.map(PathBuf::from),
        })
    };
    Ok(statement.query_map([model], file)?.collect::<Result<_, _>>()?)
}

/// Returns a row of `models`, still without its files.
fn record(row: &Row<'_>) -> rusqlite::Result<ModelRecord> {
    Ok(ModelRecord {
        name: name(row)?,
        source: parsed(row, "source", from_json)?,
        format: parsed(row, "format", |text: String| match text.as_str() {
            "gguf" => Some(Format::Gguf),
            "safetensors" => Some(Format::Safetensors),
            _ => None,
        })?,
        details: Details {
            architecture: row.get("architecture")?,
            parameters: row.get::<_, i64>("parameter_count")? as u64,
            quantization: row.get("quantization")?,
            adapter: parsed(row, "adapter", |text: Option<String>| {
                text.map(from_json).map_or(Some(None), |adapter| adapter.map(Some))
            })?,
            problem: row.get("problem")?,
            inspected_by: row.get("inspected_by")?,
        },
        defaults: parsed(row, "parameters", from_json)?,
        files: Vec::new(),
        created_at: parsed(row, "created_at", from_millis)?,
        modified_at: parsed(row, "modified_at", from_millis)?,
        extra: parsed(row, "extra", from_json)?,
        stamp: row.get("stamp")?,
    })
}

fn name(row: &Row<'_>) -> rusqlite::Result<ModelName> {
    let tag: String = row.get("tag")?;
    parsed(row, "base", |base: String| ModelName::new(&base, &tag).ok())
}

/// Reads a column that is parsed from text.
fn parsed<Raw: FromSql, T>(
    row: &Row<'_>,
    column: &str,
    parse: impl Fn(Raw) -> Option<T>,
) -> rusqlite::Result<T> {
    let index = row.as_ref().column_index(column)?;
    let kind = row.get_ref(index)?.data_type();
    let bad = || {
        let error = FromSqlError::Other(format!("`{column}` has a value of another form").into());
        rusqlite::Error::FromSqlConversionFailure(index, kind, Box::new(error))
    };
    parse(row.get(index)?).ok_or_else(bad)
}

fn from_json<T: DeserializeOwned>(text: String) -> Option<T> {
    serde_json::from_str(&text).ok()
}

fn json(value: &impl serde::Serialize) -> Result<String, LibraryError> {
    serde_json::to_string(value)
        .map_err(|error| LibraryError::Catalogue(rusqlite::Error::ToSqlConversionFailure(error.into())))
}

/// Converts a path to text.
fn unicode(path: &Path) -> Result<&str, LibraryError> {
    path.to_str().ok_or_else(|| LibraryError::NotAModel {
        path: path.to_owned(),
        problem: "its path is not Unicode; rename it, or import a copy".to_owned(),
    })
}

fn to_millis(time: SystemTime) -> i64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as i64)
}

fn from_millis(millis: i64) -> Option<SystemTime> {
    UNIX_EPOCH.checked_add(Duration::from_millis(u64::try_from(millis).ok()?))
}
