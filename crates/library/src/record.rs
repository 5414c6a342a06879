//! Records of models.

use std::{
    error::Error,
    path::{Path, PathBuf},
    time::SystemTime,
};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{adapter::AdapterDetails, digest::Digest, import::is_assistant, name::ModelName};

/// A model in the library, or an adapter.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelRecord {
    /// Full name.
    pub name: ModelName,
    /// Origin of the model.
    pub source: Source,
    /// Format of the files.
    pub format: Format,
    /// Properties that [`Inspect`] returned.
    pub details: Details,
    /// Defaults of the model's requests: `options`, a `system` prompt, first `messages`. The library does not interpret
    /// this object.
    pub defaults: Map<String, Value>,
    /// Files of the model. For [`Format::Gguf`], the first one is the file to open.
    pub files: Vec<FileRecord>,
    /// Time at which the model was added.
    pub created_at: SystemTime,
    /// Time of the last change of this record.
    pub modified_at: SystemTime,
    /// Settings of the model that are kept when its files are replaced. The library interprets only
    /// [`aliases`](ModelRecord::aliases) and [`base`](ModelRecord::base).
    pub extra: Map<String, Value>,
    /// Identifies the program version that inspected the files, and the state of the files at that time.
    pub(crate) stamp: String,
}

impl ModelRecord {
    /// Returns the number of bytes of all files.
    pub fn size(&self) -> u64 {
        self.files.iter().map(|file| file.size).sum()
    }

    /// Returns the file of the assistant that was stored with the model. An assistant without a model has none.
    pub fn assistant(&self) -> Option<&FileRecord> {
        self.files.iter().skip(1).find(|file| is_assistant(&file.name))
    }

    /// Returns other names by which the model is found: the texts in the list `aliases` of
    /// [`extra`](ModelRecord::extra).
    pub fn aliases(&self) -> impl Iterator<Item = &str> {
        let list = self.extra.get("aliases").and_then(Value::as_array);
        list.into_iter().flatten().filter_map(Value::as_str)
    }

    /// Returns the digest of the files and of [`defaults`](ModelRecord::defaults). Without defaults, it is the SHA-256
    /// of the output of `sha256sum` for the files.
    pub fn digest(&self) -> Digest {
        let mut text = listing(&self.files);
        if !self.defaults.is_empty() {
            text += &Value::Object(self.defaults.clone()).to_string();
        }
        Digest::of(text.as_bytes())
    }
}

/// Returns the output of `sha256sum` for the files.
pub(crate) fn listing(files: &[FileRecord]) -> String {
    files.iter().map(|file| format!("{}  {}\n", file.digest.hex(), file.name)).collect()
}

/// A file of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileRecord {
    /// Name without folders.
    pub name: String,
    /// Size in bytes.
    pub size: u64,
    /// Digest of the content.
    pub digest: Digest,
    /// Path outside of the library, if the file was imported without a copy.
    pub location: Option<PathBuf>,
}

/// Format of a model's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// One GGUF file, or all files of a split model.
    Gguf,
    /// A folder with `config.json`, safetensors and a tokenizer, or with an adapter in safetensors.
    Safetensors,
}

impl Format {
    /// Returns `gguf` or `safetensors`, as in Ollama's API.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gguf => "gguf",
            Self::Safetensors => "safetensors",
        }
    }
}

/// Origin of a model.
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
        /// Path of the file or folder.
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

/// Properties of a model that the library's caller reads from its files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Details {
    /// Architecture as the file names it: `llama`, `LlamaForCausalLM`.
    pub architecture: Option<String>,
    /// Number of weights.
    pub parameters: u64,
    /// Name of the quantization: `Q4_K_M`, `BF16`.
    pub quantization: String,
    /// Properties of an adapter (LoRA); `None` for models.
    pub adapter: Option<AdapterDetails>,
    /// Reason for which the program cannot run the model; `None` if it can.
    pub problem: Option<String>,
    /// Version of the program that has inspected the model. Another version inspects it again, because `problem` may
    /// differ.
    pub inspected_by: String,
}

/// Function that opens the model at a path and returns its [`Details`]. An error keeps the model out of the library.
pub type Inspect<'a> = dyn Fn(&Path) -> Result<Details, Box<dyn Error + Send + Sync>> + 'a;

/// A file that is being downloaded or copied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Name of the file.
    pub name: String,
    /// Size in bytes.
    pub size: u64,
    /// Digest of the content, if it is known before the transfer.
    pub digest: Option<Digest>,
}

/// Progress of a pull or an import.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Progress<'a> {
    /// The files to transfer. Later events name them by their index.
    Files(&'a [Transfer]),
    /// Received bytes of a file. The number decreases when a download restarts.
    Bytes {
        /// Index of the file.
        file: usize,
        /// Number of bytes received so far.
        done: u64,
    },
    /// Verified bytes of a file that existed before.
    Checking {
        /// Index of the file.
        file: usize,
        /// Number of bytes verified so far.
        done: u64,
    },
    /// Another process or thread is downloading this file. This one waits for it.
    Waiting {
        /// Index of the file.
        file: usize,
    },
    /// The file is present and verified.
    Finished {
        /// Index of the file.
        file: usize,
    },
    /// The hub requests a pause or does not answer; the request is retried.
    Retrying {
        /// Index of the file; `None` while the list of files is requested.
        file: Option<usize>,
        /// Reason of the retry.
        problem: &'a str,
        /// Number of the next attempt, from 2.
        attempt: u32,
        /// Maximum number of attempts.
        attempts: u32,
    },
    /// All files are present. The model is inspected and added to the catalogue.
    Recording,
}

/// Receives the progress of a pull or an import, from several threads.
pub type OnProgress<'a> = dyn Fn(Progress<'_>) + Sync + 'a;
