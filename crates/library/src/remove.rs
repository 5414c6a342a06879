//! Models that leave the library, and files that belong to none.

use crate::{
    error::LibraryError,
    library::{Library, Removed},
    lock::Lock,
    name::ModelName,
    record::FileRecord,
    store::{Kept, Pruned},
};

impl Library {
    /// Removes a model, and deletes those of its files that no other model has. Files that were imported by reference stay.
    /// An alias is refused.
    ///
    /// # Errors
    /// As for [`Library::find`].
    pub fn remove(&self, name: &str) -> Result<Removed, LibraryError> {
        let record = self.find_named(name).or_else(|error| match self.find_alias(name)? {
            // Removing another name of a model may not mean the model.
            Some(record) => {
                Err(LibraryError::NotFound { name: name.to_owned(), similar: vec![record.name.short()] })
            }
            None => Err(error),
        })?;
        let forget = || {
            self.writable()?;
            let changing = self.manifests.change()?;
            let forget = || self.catalogue.delete(&record.name);
            if self.manifests.delete(&changing, &record.name, forget)? {
                return Ok(());
            }
            Err(LibraryError::NotFound { name: name.to_owned(), similar: Vec::new() })
        };
        let mut freed_before = 0;
        match self.freeing(forget) {
            Err(LibraryError::DiskFull { .. }) => {
                // The files are deleted before the catalogue is changed, which takes little time.
                if let Some(_alone) = Lock::try_exclusive(&self.lock_file())? {
                    freed_before = self.store.release(&record.files, &self.kept(Some(&record.name))?)?;
                }
                self.freeing(forget)?;
            }
            done => done?,
        }
        let freed = self.release(&record.files)?.map(|freed| freed + freed_before);
        self.reserve.ensure();
        Ok(Removed { record, freed })
    }

    /// Deletes everything that belongs to no model: unfinished downloads, unused uploads, remains of killed processes.
    /// `force` also deletes files of models that have records but are missing in the catalogue.
    ///
    /// # Errors
    /// [`LibraryError::Busy`] while another process pulls or imports, [`LibraryError::UnknownModels`] unless `force`.
    pub fn prune(&self, force: bool) -> Result<Pruned, LibraryError> {
        self.freeing(|| {
            self.deletable()?;
            let _alone = Lock::exclusive_soon(&self.lock_file())?;
            let names = self.catalogue.names()?;
            let changing = self.manifests.change()?;
            self.manifests.reconcile(&changing, &names)?;
            let unknown = self.manifests.unknown(&names, false)?;
            if force {
                for model in unknown {
                    self.manifests.discard(&changing, model)?;
                }
            } else if !unknown.is_empty() {
                let models: Result<Vec<_>, _> = unknown.into_iter().collect();
                let models = models?.iter().map(|model| model.name.short()).collect();
                return Err(LibraryError::UnknownModels { models });
            }
            self.store.sweep(&self.kept(None)?)
        })
    }

    /// Deletes files that only a removed model has used; `None` if another process is writing and might use them.
    pub(crate) fn release(&self, files: &[FileRecord]) -> Result<Option<u64>, LibraryError> {
        let Some(_alone) = Lock::try_exclusive(&self.lock_file())? else { return Ok(None) };
        self.store.release(files, &self.kept(None)?).map(Some)
    }

    /// Returns the files of all models other than `except`, in the catalogue and in the records beside it, in case the
    /// catalogue is not the right one.
    fn kept(&self, except: Option<&ModelName>) -> Result<Kept, LibraryError> {
        let (mut kept, models) = (Kept::default(), self.catalogue.all()?);
        let names: Vec<_> = models.iter().map(|model| model.name.clone()).collect();
        let others = models.iter().filter(|model| Some(&model.name) != except);
        others.for_each(|model| kept.add(&model.files));
        for model in self.manifests.unknown(&names, false)? {
            kept.add(&model?.files);
        }
        Ok(kept)
    }
}
