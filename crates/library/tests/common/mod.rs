//! Helpers of the library's tests.
#![allow(dead_code)] // each test file uses its part

pub mod hub;

use std::{
    collections::BTreeSet,
    error::Error,
    fs,
    io::Read,
    path::{Path, PathBuf},
};

use hub::TestHub;
use paguro_library::{Details, Digest, Library, LibraryError, ModelRecord, PullOptions};

/// A library, a folder for files, and a hub.
pub struct Fixture {
    pub hub: TestHub,
    pub folder: tempfile::TempDir,
}

impl Fixture {
    pub fn new() -> Self {
        Self { hub: TestHub::start(), folder: tempfile::tempdir().unwrap() }
    }

    pub fn root(&self) -> PathBuf {
        self.folder.path().join("library")
    }

    pub fn library(&self) -> Library {
        Library::open(&self.root()).unwrap()
    }

    pub fn pull(&self, reference: &str) -> Result<ModelRecord, LibraryError> {
        let options = PullOptions::default();
        self.library().pull(&self.hub.client(), &reference.parse()?, &options, &inspect, &|_| {})
    }
}

/// Inspects a "model" as an application would: it must begin as its format does. The rest is made up.
pub fn inspect(path: &Path) -> Result<Details, Box<dyn Error + Send + Sync>> {
    let file = if path.is_dir() { path.join("model.safetensors") } else { path.to_owned() };
    let mut magic = [0; 4];
    fs::File::open(&file)?.read_exact(&mut magic)?;
    if path.is_dir() {
        fs::read(path.join("config.json"))?;
    } else if &magic != b"GGUF" {
        return Err(format!("{} does not begin with GGUF", file.display()).into());
    }
    Ok(Details {
        architecture: Some("llama".into()),
        parameters: 1000,
        quantization: "Q4_0".into(),
        ..Details::default()
    })
}

/// A file that begins as a GGUF file does, of `size` bytes that differ by seed.
pub fn gguf(seed: u64, size: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        // xorshift64: https://doi.org/10.18637/jss.v008.i14
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    let mut bytes = b"GGUF".to_vec();
    bytes.resize_with(size.max(4), &mut next);
    bytes
}

/// Checks the invariants of a library after any end of its writers: listed models are complete.
pub fn check(root: &Path) -> Vec<ModelRecord> {
    let library = Library::open(root).unwrap();
    let models = library.list().unwrap();
    let names: BTreeSet<_> = models.iter().map(|model| model.name.to_string().to_lowercase()).collect();
    assert_eq!(names.len(), models.len(), "a name twice");
    for model in &models {
        assert_eq!(library.find(&model.name.to_string()).unwrap(), *model);
        let path = library.path(model).unwrap();
        inspect(&path).unwrap();
        let folder = if path.is_dir() { &path } else { path.parent().unwrap() };
        assert!(!model.files.is_empty());
        for file in &model.files {
            let bytes = fs::read(folder.join(&file.name)).unwrap();
            assert_eq!((bytes.len() as u64, Digest::of(&bytes)), (file.size, file.digest), "{}", file.name);
        }
    }
    // Blobs are what their names say, whether a model has them or not.
    for blob in fs::read_dir(root.join("blobs")).unwrap() {
        let path = blob.unwrap().path();
        let name: Digest = path.file_name().unwrap().to_str().unwrap().parse().unwrap();
        assert_eq!(Digest::of(&fs::read(&path).unwrap()), name);
    }
    models
}

/// Number of files below a folder.
pub fn count_files(folder: &Path) -> usize {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.map(|path| if path.is_dir() { count_files(&path) } else { 1 }).sum()
}
