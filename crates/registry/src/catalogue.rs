//! The catalogue: which models there are, and of which files. A SQLite database, the only truth about what is in the
//! library; everything on disk that it does not name is garbage.

use std::{
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use rusqlite::{
    Connection, OptionalExtension, Row, Transaction, TransactionBehavior, params,
    types::{FromSql, FromSqlError},
};
use serde::de::DeserializeOwned;

use crate::{
    digest::Digest,
    error::RegistryError,
    name::ModelName,
    record::{Details, FileRecord, Format, ModelRecord},
};

/// The steps from an empty database to today's, in order; a database's `user_version` says how many it has taken. A
/// step that has been released is never changed.
const MIGRATIONS: [&str; 1] = [include_str!("migrations/0001.sql")];

/// How long a process waits while another one writes. Transactions take milliseconds.
const BUSY_TIMEOUT: Duration = Duration::from_secs(20);

#[derive(Debug)]
pub(crate) struct Catalogue {
    connection: Mutex<Connection>,
}

impl Catalogue {
    /// Opens the database, makes it if there is none, and brings it up to date. Only one process at a time may do this.
    pub(crate) fn open(path: &Path) -> Result<Self, RegistryError> {
        let mut connection = Connection::open(path)?;
        connection.busy_timeout(BUSY_TIMEOUT)?;
        // WAL lets readers read while somebody writes; FULL makes a commit survive a loss of power.
        connection.pragma_update(None, "journal_mode", "WAL")?;
        connection.pragma_update(None, "synchronous", "FULL")?;
        connection.pragma_update(None, "foreign_keys", true)?;
        migrate(&mut connection, path)?;
        Ok(Self { connection: Mutex::new(connection) })
    }

    fn lock(&self) -> MutexGuard<'_, Connection> {
        // A panic in between has rolled its transaction back.
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All models, those that changed last first.
    pub(crate) fn all(&self) -> Result<Vec<ModelRecord>, RegistryError> {
        let mut connection = self.lock();
        // One transaction, so that models and files are of one moment.
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

    /// All names.
    pub(crate) fn names(&self) -> Result<Vec<ModelName>, RegistryError> {
        let connection = self.lock();
        let mut statement = connection.prepare("SELECT base, tag FROM models ORDER BY base, tag")?;
        Ok(statement.query_map([], name)?.collect::<Result<_, _>>()?)
    }

    /// The model of this name.
    pub(crate) fn get(&self, name: &ModelName) -> Result<Option<ModelRecord>, RegistryError> {
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
    /// [`RegistryError::NameTaken`].
    pub(crate) fn put(&self, model: &ModelRecord, replace: bool) -> Result<(), RegistryError> {
        let mut connection = self.lock();
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let removed = delete(&transaction, &model.name)?;
        if removed && !replace {
            return Err(RegistryError::NameTaken { name: model.name.to_string() });
        }
        let details = &model.details;
        transaction.execute(
            "INSERT INTO models (base, tag, source, format, architecture, parameter_count, quantization, parameters, \
             created_at, modified_at) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)",
            params![
                model.name.base(),
                model.name.tag(),
                json(&model.source)?,
                model.format.name(),
                details.architecture,
                // SQLite has no unsigned numbers; no model has 2^63 weights.
                i64::try_from(details.parameters).unwrap_or(i64::MAX),
                details.quantization,
                json(&model.parameters)?,
                to_millis(model.created_at),
                to_millis(model.modified_at),
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

    /// Forgets a model; whether there was one.
    pub(crate) fn delete(&self, name: &ModelName) -> Result<bool, RegistryError> {
        let mut connection = self.lock();
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let deleted = delete(&transaction, name)?;
        transaction.commit()?;
        Ok(deleted)
    }

    /// Changes a model's parameters; whether there is one.
    pub(crate) fn set_parameters(
        &self,
        name: &ModelName,
        parameters: &serde_json::Map<String, serde_json::Value>,
        now: SystemTime,
    ) -> Result<bool, RegistryError> {
        let changed = self.lock().execute(
            "UPDATE models SET parameters = ?3, modified_at = ?4 WHERE base = ?1 AND tag = ?2",
            params![name.base(), name.tag(), json(parameters)?, to_millis(now)],
        )?;
        Ok(changed > 0)
    }
}

fn migrate(connection: &mut Connection, path: &Path) -> Result<(), RegistryError> {
    let known = MIGRATIONS.len() as i64;
    let found: i64 = connection.query_row("PRAGMA user_version", [], |row| row.get(0))?;
    if found > known {
        let path = path.parent().unwrap_or(path).to_owned();
        return Err(RegistryError::Newer { path, found, known });
    }
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

fn delete(transaction: &Transaction<'_>, name: &ModelName) -> Result<bool, RegistryError> {
    // Its files go with it: ON DELETE CASCADE.
    let deleted = transaction
        .execute("DELETE FROM models WHERE base = ?1 AND tag = ?2", params![name.base(), name.tag()])?;
    Ok(deleted > 0)
}

fn files(transaction: &Transaction<'_>, model: i64) -> Result<Vec<FileRecord>, RegistryError> {
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

/// A row of `models`, still without its files.
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
        },
        parameters: parsed(row, "parameters", from_json)?,
        files: Vec::new(),
        created_at: parsed(row, "created_at", from_millis)?,
        modified_at: parsed(row, "modified_at", from_millis)?,
    })
}

fn name(row: &Row<'_>) -> rusqlite::Result<ModelName> {
    let tag: String = row.get("tag")?;
    parsed(row, "base", |base: String| ModelName::new(&base, &tag).ok())
}

/// A column that has a form of its own.
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

fn json(value: &impl serde::Serialize) -> Result<String, RegistryError> {
    serde_json::to_string(value)
        .map_err(|error| RegistryError::Catalogue(rusqlite::Error::ToSqlConversionFailure(error.into())))
}

/// Paths are kept as text.
fn unicode(path: &Path) -> Result<&str, RegistryError> {
    path.to_str().ok_or_else(|| RegistryError::NotAModel {
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
