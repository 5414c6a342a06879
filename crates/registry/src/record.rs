//! Records of models.

use std::{
    error::Error,
    path::{Path, PathBuf},
    time::SystemTime,
};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{digest::Digest, name::ModelName};

/// A model in the library.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelRecord {
    /// Its whole name.
    pub name: ModelName,
    /// Where it came from.
    pub source: Source,
    /// The kind of its files.
    pub format: Format,
    /// Properties that were learned by opening it.
    pub details: Details,
    /// Defaults of requests: options, a system prompt, a template. The library keeps this
    /// object and does not look into it.
    pub parameters: Map<String, Value>,
    /// Its files; the first is the one to open, if it is a GGUF file.
    pub files: Vec<FileRecord>,
    /// When the library got it.
    pub created_at: SystemTime,
    /// When its record changed last.
    pub modified_at: SystemTime,
    /// Settings of the model that are kept when its files are replaced. Of this object the library knows only
    /// [`aliases`](ModelRecord::aliases).
    pub extra: Map<String, Value>,
    /// Names the files and the version of the program of which `details` were learned.
    pub(crate) stamp: String,
}

impl ModelRecord {
    /// Bytes of all its files.
    pub fn size(&self) -> u64 {
        self.files.iter().map(|file| file.size).sum()
    }

    /// Other names by which the model is found: texts in the list `aliases` of [`extra`](ModelRecord::extra).
    pub fn aliases(&self) -> impl Iterator<Item = &str> {
        let list = self.extra.get("aliases").and_then(Value::as_array);
        list.into_iter().flatten().filter_map(Value::as_str)
    }

    /// Names the model's whole content: of its files and parameters. The content of the first is what `sha256sum` prints
    /// of them.
    pub fn digest(&self) -> Digest {
        let mut text = listing(&self.files);
        if !self.parameters.is_empty() {
            text += &Value::Object(self.parameters.clone()).to_string();
        }
        Digest::of(text.as_bytes())
    }
}

/// `sha256sum`'s output for the files.
pub(crate) fn listing(files: &[FileRecord]) -> String {
    files.iter().map(|file| format!("{}  {}\n", file.digest.hex(), file.name)).collect()
}

/// A file of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileRecord {
    /// Its name, without folders.
    pub name: String,
    /// Its bytes.
    pub size: u64,
    /// Its content.
    pub digest: Digest,
    /// Where it lies, if that is not in the library: it was imported by reference.
    pub location: Option<PathBuf>,
}

/// The kind of a model's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// One GGUF file, or several of a split model.
    Gguf,
    /// A folder with `config.json`, safetensors and a tokenizer.
    Safetensors,
}

impl Format {
    /// `gguf` or `safetensors`, as Ollama's API has it, too.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gguf => "gguf",
            Self::Safetensors => "safetensors",
        }
    }
}

/// Where a model came from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Source {
    /// A repository on a hub.
    Hub {
        /// The hub's address.
        endpoint: String,
        /// `owner/repository`.
        repo: String,
        /// The commit.
        commit: String,
    },
    /// A file or folder of this machine.
    Import {
        /// Which.
        path: PathBuf,
    },
    /// Blobs that a client has uploaded.
    Upload,
    /// Another model of this library.
    Model {
        /// Its name at that time.
        name: String,
    },
}

/// Properties of a model that the library's caller learns by opening it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Details {
    /// As the file names it: `llama`, `LlamaForCausalLM`.
    pub architecture: Option<String>,
    /// Number of weights.
    pub parameters: u64,
    /// As people write it: `Q4_K_M`, `BF16`.
    pub quantization: String,
    /// Why the program cannot run the model; `None` if it can.
    pub problem: Option<String>,
    /// The version of the program that has opened the model. Another one opens it again, to learn its own `problem`.
    pub inspected_by: String,
}

/// Opens the model at a path, to learn its [`Details`]. An error keeps the model out of the library.
pub type Inspect<'a> = dyn Fn(&Path) -> Result<Details, Box<dyn Error + Send + Sync>> + 'a;

/// A file that is being fetched or copied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Its name.
    pub name: String,
    /// Its bytes.
    pub size: u64,
    /// Its content, where that is known from the start.
    pub digest: Option<Digest>,
}

/// Progress of a pull or an import.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Progress<'a> {
    /// The files to transfer. Later events name them by their index.
    Files(&'a [Transfer]),
    /// Bytes of a file that have come. The number becomes smaller when a download begins anew.
    Bytes {
        /// Index of the file.
        file: usize,
        /// Bytes.
        done: u64,
    },
    /// Bytes of a file that were here before and have been read, to see whether they are what they should be.
    Checking {
        /// Index of the file.
        file: usize,
        /// Bytes.
        done: u64,
    },
    /// Another process or thread is fetching this file; it is waited for.
    Waiting {
        /// Index of the file.
        file: usize,
    },
    /// The file is here and is what it should be.
    Finished {
        /// Index of the file.
        file: usize,
    },
    /// The hub asks for patience or does not answer; the request is tried again.
    Retrying {
        /// Index of the file; `None` while the list of files is requested.
        file: Option<usize>,
        /// Why.
        problem: &'a str,
        /// Number of the attempt that comes, from 2.
        attempt: u32,
        /// Attempts that there will be at most.
        attempts: u32,
    },
    /// All files are here; the model is opened and recorded.
    Recording,
}

/// Receives the progress of a pull or an import, from several threads.
pub type OnProgress<'a> = dyn Fn(Progress<'_>) + Sync + 'a;
