//! Models of other programs on this machine: Ollama's, LM Studio's, those of the Hugging Face cache, and those of any
//! folder.
//!
//! The folders are untrusted. Files are recognised by their first bytes, small files are read up to a limit, and links
//! may lead anywhere but in circles. A model that cannot be used is listed with the reason.
//!
//! An import links files into the blobs, unless the file system or the permissions refuse it, and then refers to them. A
//! linked blob has the permissions of the other program, which may change its content; verification reads it like any
//! other. `paguro serve` uses the same readers for folders.

mod folder;
mod hf_cache;
mod lm_studio;
mod ollama;

use std::{
    fmt,
    path::{Path, PathBuf},
};

pub use ollama::OllamaSettings;

use crate::{
    error::LibraryError,
    import::{self, Found},
    name::{LATEST, Meaning, ModelName, meaning, similar},
    record::{Details, Format},
};

/// A program whose models are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// Ollama.
    Ollama,
    /// LM Studio.
    LmStudio,
    /// Hugging Face's libraries and command line.
    HfCache,
    /// None: files in a folder.
    Folder,
}

impl Program {
    /// The programs with folders of their own.
    pub const ALL: [Self; 3] = [Self::Ollama, Self::LmStudio, Self::HfCache];

    /// Returns the prefix of its models' names in commands; empty for a folder.
    pub fn prefix(self) -> &'static str {
        match self {
            Self::Ollama => "ollama:",
            Self::LmStudio => "lmstudio:",
            Self::HfCache => "hf-cache:",
            Self::Folder => "",
        }
    }

    /// Splits a program's prefix from a text: `ollama:qwen3:4b`.
    pub fn split(text: &str) -> Option<(Self, &str)> {
        let split = |program: Self| {
            let head = text.get(..program.prefix().len())?;
            head.eq_ignore_ascii_case(program.prefix()).then(|| (program, &text[head.len()..]))
        };
        Self::ALL.into_iter().find_map(split)
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ollama => "Ollama",
            Self::LmStudio => "LM Studio",
            Self::HfCache => "the Hugging Face cache",
            Self::Folder => "the folder",
        })
    }
}

/// Folders of other programs. They need not exist.
#[derive(Clone, Debug, Default)]
pub struct Stores {
    /// Ollama's folders of models.
    pub ollama: Vec<PathBuf>,
    /// LM Studio's folders of models.
    pub lm_studio: Vec<PathBuf>,
    /// Folders `hub` of the Hugging Face cache.
    pub hf_cache: Vec<PathBuf>,
}

/// A model of another program.
#[derive(Debug)]
pub struct FoundModel {
    /// The program.
    pub program: Program,
    /// Its name there: `qwen3:4b`, `publisher/repository/file`, `owner/repository`.
    pub name: String,
    /// Size of the known files in bytes.
    pub bytes: u64,
    /// The model that it changes, if it is an adapter (LoRA). The other fields are those of the adapter.
    pub base: Option<Box<Self>>,
    /// Settings that Ollama has stored with it.
    pub settings: OllamaSettings,
    /// Its files, or the reason for which it cannot be used.
    pub(crate) found: Result<Found, String>,
    /// Its name in the library, where the file's name does not decide.
    pub(crate) library_name: Naming,
}

/// Derivation of a model's name in the library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Naming {
    /// This name.
    Name(ModelName),
    /// The repository, and the quantization as tag.
    Repository(String),
    /// The file's name, as for every import.
    File,
}

/// Models that were found, and folders that could not be read.
#[derive(Debug, Default)]
pub struct Listing {
    /// The models by name.
    pub models: Vec<FoundModel>,
    /// Folders that cannot be read, with the reason.
    pub problems: Vec<String>,
}

impl FoundModel {
    /// Returns the name for commands: `ollama:qwen3:4b`.
    pub fn reference(&self) -> String {
        match self.program {
            Program::Folder => {
                self.path().map_or_else(|| self.name.clone(), |path| path.display().to_string())
            }
            program => format!("{}{}", program.prefix(), self.name),
        }
    }

    /// Returns the reason for which it cannot be used.
    pub fn problem(&self) -> Option<&str> {
        self.found.as_ref().err().map(String::as_str)
    }

    /// Returns the path to open: a GGUF file or a folder.
    pub fn path(&self) -> Option<&Path> {
        self.found.as_ref().ok().map(|found| found.open.as_path())
    }

    /// Returns true if an import gives it this name in the library.
    pub fn is_named(&self, name: &ModelName) -> bool {
        match &self.library_name {
            Naming::Name(own) => own == name,
            Naming::Repository(base) => name.base().eq_ignore_ascii_case(base),
            Naming::File => name.to_string().eq_ignore_ascii_case(&self.name),
        }
    }

    /// Returns the path of the file that encodes images.
    pub fn projector(&self) -> Option<&Path> {
        let files = &self.found.as_ref().ok()?.files;
        files.iter().find(|file| import::is_projector(&file.name)).map(|file| file.path.as_path())
    }

    /// Returns the files.
    pub(crate) fn files(&self) -> Result<&Found, LibraryError> {
        self.found
            .as_ref()
            .map_err(|problem| LibraryError::Unusable { name: self.reference(), problem: problem.clone() })
    }

    /// Returns its name in the library.
    pub(crate) fn library_name(&self, details: &Details) -> Result<ModelName, LibraryError> {
        let found = self.files()?;
        match &self.library_name {
            Naming::Name(name) => Ok(name.clone()),
            Naming::File => import::name(found, details),
            Naming::Repository(base) if found.format == Format::Safetensors => ModelName::new(base, LATEST),
            Naming::Repository(base) => {
                let named = import::name(found, details)?;
                // Two files of one quantization differ by their names.
                let tag = if named.tag() == LATEST { named.base() } else { named.tag() };
                ModelName::new(base, tag)
            }
        }
    }

    /// Returns the names by which a command may mean this model, the whole one first.
    fn names(&self) -> Vec<ModelName> {
        let whole = self.name.rsplit_once(':').filter(|(_, tag)| !tag.contains('/'));
        let (base, tag) = whole.unwrap_or((self.name.as_str(), LATEST));
        let base: Vec<_> = base.split('/').map(ModelName::part_from).collect();
        let names = [base.join("/")].into_iter().chain(match self.program {
            Program::LmStudio | Program::HfCache if base.len() > 2 => Some(base[..2].join("/")),
            _ => None,
        });
        names.filter_map(|base| ModelName::new(&base, tag).ok()).collect()
    }
}

/// Maximum length of a name or problem, in characters.
const MOST_SHOWN: usize = 500;

/// Returns a text of other programs for display, without control characters, which could change a terminal.
fn plain(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(MOST_SHOWN).collect()
}

impl Listing {
    fn sort(&mut self) {
        self.models.sort_by(|a, b| a.name.cmp(&b.name));
    }

    /// Adds a model whose files are `found`.
    fn add(
        &mut self,
        program: Program,
        name: String,
        library_name: Naming,
        found: Result<Found, LibraryError>,
    ) {
        let found = found.map_err(|error| match error {
            LibraryError::NotAModel { path, problem } => format!("{}: {problem}", path.display()),
            error => error.to_string(),
        });
        let (name, found) = (plain(&name), found.map_err(|problem| plain(&problem)));
        let size = |file: &import::FoundFile| std::fs::metadata(&file.path).map_or(0, |file| file.len());
        let bytes = found.as_ref().map_or(0, |found| found.files.iter().map(size).sum());
        let settings = OllamaSettings::default();
        self.models.push(FoundModel { program, name, bytes, settings, found, library_name, base: None });
    }
}

impl Stores {
    fn folders(&self, program: Program) -> &[PathBuf] {
        match program {
            Program::Ollama => &self.ollama,
            Program::LmStudio => &self.lm_studio,
            Program::HfCache => &self.hf_cache,
            Program::Folder => &[],
        }
    }

    /// Returns the models of a program.
    pub fn models(&self, program: Program) -> Listing {
        let mut listing = Listing::default();
        let mut seen = Vec::new();
        for folder in self.folders(program) {
            // A folder may be a link to another one.
            let real = match folder.canonicalize() {
                Ok(real) => real,
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                Err(error) => {
                    listing.problems.push(format!("cannot read `{}`: {error}", folder.display()));
                    continue;
                }
            };
            if seen.contains(&real) {
                continue;
            }
            seen.push(real);
            let added = match program {
                Program::Ollama => ollama::add(folder, &mut listing),
                Program::LmStudio => lm_studio::add(folder, &mut listing),
                Program::HfCache => hf_cache::add(folder, &mut listing),
                Program::Folder => Ok(()),
            };
            listing.problems.extend(added.err().map(|error| error.to_string()));
        }
        listing.sort();
        listing
    }

    /// Returns a program's model with this name.
    ///
    /// # Errors
    /// [`LibraryError::NotFoundThere`] with similar names, [`LibraryError::Ambiguous`].
    pub fn find(&self, program: Program, name: &str) -> Result<FoundModel, LibraryError> {
        let Listing { mut models, problems } = self.models(program);
        let exact = models.iter().position(|model| model.name.eq_ignore_ascii_case(name));
        if let Some(at) = exact {
            return Ok(models.swap_remove(at));
        }
        let names: Vec<(ModelName, usize)> = models
            .iter()
            .enumerate()
            .flat_map(|(at, model)| model.names().into_iter().map(move |name| (name, at)))
            .collect();
        let plain = name.strip_suffix(".gguf").unwrap_or(name);
        let meant: Vec<usize> = match meaning(plain, names.iter().map(|(name, _)| name)) {
            Meaning::One(found) => {
                names.iter().filter(|(name, _)| name == found).map(|(_, at)| *at).collect()
            }
            Meaning::Several(found) => {
                names.iter().filter(|(name, _)| found.contains(&name)).map(|(_, at)| *at).collect()
            }
            Meaning::None => {
                let folders = self.folders(program).iter().map(|folder| folder.display().to_string());
                return Err(LibraryError::NotFoundThere {
                    program,
                    name: name.to_owned(),
                    similar: similar(plain, names.iter().map(|(name, _)| name)),
                    folders: folders.collect(),
                    problems,
                });
            }
        };
        match meant[..] {
            [at] => Ok(models.swap_remove(at)),
            _ => Err(LibraryError::Ambiguous {
                name: format!("{}{name}", program.prefix()),
                candidates: meant.iter().map(|&at| models[at].reference()).collect(),
            }),
        }
    }
}

/// Returns the models of a folder: a store of Ollama, a Hugging Face cache, or files and folders below it.
///
/// # Errors
/// The folder cannot be read.
pub fn in_folder(folder: &Path) -> Result<Listing, LibraryError> {
    let mut listing = Listing::default();
    if folder.join("manifests").is_dir() && folder.join("blobs").is_dir() {
        ollama::add(folder, &mut listing)?;
    } else if hf_cache::is_cache(folder)? {
        hf_cache::add(folder, &mut listing)?;
    } else {
        for model in folder::scan(folder, &mut listing.problems)? {
            listing.add(Program::Folder, model.name, Naming::File, model.found);
        }
    }
    listing.sort();
    Ok(listing)
}

#[cfg(test)]
mod tests;
