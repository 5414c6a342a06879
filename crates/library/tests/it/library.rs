//! Importing, finding, naming, removing: everything but pulls.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    thread,
};

use crate::common::{check, count_files, gguf, inspect};
use expect_test::expect;
use paguro_library::{
    Digest, Format, ImportOptions, Library, LibraryError, ModelName, ModelRecord, Pruned, Source,
};
use serde_json::{Map, json};

struct Fixture {
    folder: tempfile::TempDir,
    library: Library,
}

impl Fixture {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let library = Library::open(&folder.path().join("library")).unwrap();
        Self { folder, library }
    }

    fn root(&self) -> &Path {
        self.library.root()
    }

    fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, bytes).unwrap();
        path
    }

    fn import(&self, path: &Path, copy: bool) -> Result<ModelRecord, LibraryError> {
        let options = ImportOptions { copy, ..ImportOptions::default() };
        self.library.import(path, &options, &inspect, &|_| {})
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<_> = self.library.list().unwrap().iter().map(|model| model.name.short()).collect();
        names.sort();
        names
    }
}

fn name(text: &str) -> ModelName {
    text.parse().unwrap()
}

#[test]
fn an_import_by_reference_leaves_the_file_where_it_is() {
    let f = Fixture::new();
    let path = f.file("tiny-Q4_0.gguf", &gguf(1, 1000));
    let model = f.import(&path, false).unwrap();
    assert_eq!(model.name.to_string(), "tiny:Q4_0");
    assert_eq!((model.format, model.size()), (Format::Gguf, 1000));
    assert_eq!(f.library.resolve("tiny").unwrap(), path);
    assert_eq!(count_files(&f.root().join("blobs")), 0);
    assert_eq!(check(f.root()), [model]);
    // A change of the file is noticed when the model is asked for.
    fs::write(&path, gguf(1, 999)).unwrap();
    let error = f.library.resolve("tiny").unwrap_err().to_string();
    assert!(error.ends_with("tiny-Q4_0.gguf` has changed since; import it again"), "{error}");
    fs::remove_file(&path).unwrap();
    assert!(f.library.resolve("tiny").unwrap_err().to_string().ends_with("is not there any more"));
    assert_eq!(f.library.remove("tiny").unwrap().freed, Some(0));
}

#[test]
fn a_copy_is_the_librarys_own() {
    let f = Fixture::new();
    let bytes = gguf(1, 700_000);
    let path = f.file("tiny.gguf", &bytes);
    f.import(&path, true).unwrap();
    fs::remove_file(&path).unwrap();
    let found = f.library.resolve("tiny").unwrap();
    assert_eq!(fs::read(&found).unwrap(), bytes);
    assert_eq!(found.file_name().unwrap(), "tiny.gguf");
    assert!(fs::metadata(&found).unwrap().permissions().readonly());
    check(f.root());
    assert_eq!(f.library.remove("tiny").unwrap().freed, Some(700_000));
    assert_eq!(count_files(&f.root().join("blobs")) + count_files(&f.root().join("models")), 0);
}

#[test]
fn the_same_content_is_on_disk_once_and_a_damaged_blob_is_mended() {
    let f = Fixture::new();
    let model = f.import(&f.file("one.gguf", &gguf(1, 5000)), true).unwrap();
    let blob = f.root().join("blobs").join(format!("sha256-{}", model.files[0].digest.hex()));
    #[cfg(unix)]
    let file_of = |path: &Path| std::os::unix::fs::MetadataExt::ino(&fs::metadata(path).unwrap());
    #[cfg(unix)]
    let before = file_of(&blob);
    f.import(&f.file("two.gguf", &gguf(1, 5000)), true).unwrap();
    #[cfg(unix)]
    for path in [&blob, &f.library.resolve("one").unwrap(), &f.library.resolve("two").unwrap()] {
        assert_eq!(file_of(path), before, "{}", path.display());
    }
    assert_eq!(count_files(&f.root().join("tmp")), 0);
    fs::remove_file(&blob).unwrap();
    fs::write(&blob, "short").unwrap();
    f.import(&f.file("three.gguf", &gguf(1, 5000)), true).unwrap();
    assert_eq!(check(f.root()).len(), 3);
}

#[test]
fn folders_and_split_models_are_imported_whole() {
    let f = Fixture::new();
    for (name, bytes) in [("config.json", "{}"), ("model.safetensors", "0123"), ("notes.txt", "x")] {
        f.file(&format!("hf/{name}"), bytes.as_bytes());
    }
    let folder = f.folder.path().join("hf");
    for copy in [false, true] {
        let options = ImportOptions { copy, replace: true, ..ImportOptions::default() };
        let model = f.library.import(&folder, &options, &inspect, &|_| {}).unwrap();
        assert_eq!((model.format, model.files.len()), (Format::Safetensors, 2));
        check(f.root());
    }
    f.file("big-00001-of-00002.gguf", &gguf(1, 100));
    let second = f.folder.path().join("big-00002-of-00002.gguf");
    let error = f.import(&f.folder.path().join("big-00001-of-00002.gguf"), true).unwrap_err().to_string();
    assert!(error.ends_with("big-00002-of-00002.gguf` is missing"), "{error}");
    fs::write(&second, gguf(2, 100)).unwrap();
    // Any of its files will do.
    let model = f.import(&second, true).unwrap();
    assert_eq!((model.name.short().as_str(), model.files.len()), ("big", 2));
    assert_eq!(f.library.resolve("big").unwrap().file_name().unwrap(), "big-00001-of-00002.gguf");
    check(f.root());
}

#[test]
fn what_is_no_model_is_refused_and_leaves_nothing() {
    let f = Fixture::new();
    let refuse = |path: &Path| {
        let error = f.import(path, true).unwrap_err().to_string();
        error.replace(&f.folder.path().display().to_string(), "")
    };
    expect!["`/bad.gguf` cannot be opened: /bad.gguf does not begin with GGUF"]
        .assert_eq(&refuse(&f.file("bad.gguf", b"nothing")));
    expect!["cannot import `/notes.txt`: it is neither a folder nor a GGUF file, which begins with `GGUF`"]
        .assert_eq(&refuse(&f.file("notes.txt", b"nothing")));
    expect!["cannot open `/none.gguf`: No such file or directory (os error 2)"]
        .assert_eq(&refuse(&f.folder.path().join("none.gguf")));
    fs::create_dir(f.folder.path().join("empty")).unwrap();
    expect![
        "cannot import `/empty`: the folder has no config.json; to import a GGUF file in it, name the file"
    ]
    .assert_eq(&refuse(&f.folder.path().join("empty")));
    assert!(f.names().is_empty());
    assert_eq!(count_files(&f.root().join("blobs")) + count_files(&f.root().join("tmp")), 0);
}

#[test]
fn a_name_is_taken_once_unless_it_may_be_replaced() {
    let f = Fixture::new();
    let old = f.import(&f.file("a/tiny.gguf", &gguf(1, 100)), true).unwrap();
    let second = f.file("b/tiny.gguf", &gguf(2, 200));
    let error = f.import(&second, true).unwrap_err();
    assert!(matches!(&error, LibraryError::NameTaken { name } if name == "tiny:latest"), "{error}");
    let options =
        ImportOptions { name: Some(name("TINY")), copy: true, replace: true, ..ImportOptions::default() };
    let new = f.library.import(&second, &options, &inspect, &|_| {}).unwrap();
    assert_eq!((new.created_at, new.size()), (old.created_at, 200));
    assert_eq!(f.names(), ["TINY"]);
    assert_eq!(count_files(&f.root().join("blobs")), 1, "the old one's blob has gone");
}

#[test]
fn copies_share_their_blobs_and_are_independent() {
    let f = Fixture::new();
    f.import(&f.file("tiny-Q4_0.gguf", &gguf(1, 1000)), true).unwrap();
    f.library.copy("tiny", &name("other:x"), false).unwrap();
    assert_eq!(f.names(), ["other:x", "tiny:Q4_0"]);
    assert_eq!(count_files(&f.root().join("blobs")), 1);
    assert!(matches!(f.library.copy("tiny", &name("OTHER:X"), false), Err(LibraryError::NameTaken { .. })));
    assert!(f.library.copy("tiny", &name("tiny:q4_0"), true).is_err(), "onto itself");
    assert_eq!(f.library.remove("tiny").unwrap().freed, Some(0));
    assert_eq!(check(f.root()).len(), 1);
    assert_eq!(f.library.remove("other").unwrap().freed, Some(1000));
    assert!(f.names().is_empty());
}

#[test]
fn names_that_are_not_there_or_not_clear_are_said() {
    let f = Fixture::new();
    let path = f.file("llama.gguf", &gguf(1, 100));
    f.import(&path, false).unwrap();
    for copy in ["meta/llama3:Q4_0", "meta/llama3:Q8_0"] {
        f.library.copy("llama", &name(copy), false).unwrap();
    }
    let refuse = |query: &str| f.library.find(query).unwrap_err().to_string();
    expect!["there is no model `lama` in the library (did you mean `llama`, `meta/llama3:Q4_0` or `meta/llama3:Q8_0`?)"]
        .assert_eq(&refuse("lama"));
    expect!["there is no model `zzz` in the library"].assert_eq(&refuse("zzz"));
    expect!["`llama3` could be `meta/llama3:Q4_0` or `meta/llama3:Q8_0`; give the whole name"]
        .assert_eq(&refuse("llama3"));
    assert_eq!(f.library.find("LLAMA3:q8_0").unwrap().name.to_string(), "meta/llama3:Q8_0");
    for odd in ["../llama", "", ":", "llama/../../etc", "'; DROP TABLE models; --"] {
        assert!(matches!(f.library.find(odd), Err(LibraryError::NotFound { .. })), "{odd}");
    }
}

#[test]
fn models_are_made_of_uploaded_blobs() {
    let f = Fixture::new();
    let bytes = gguf(1, 100_000);
    let digest = Digest::of(&bytes);
    let defaults: Map<_, _> =
        json!({"system": "Be brief.", "options": {"temperature": 0.5}}).as_object().unwrap().clone();
    let files = [("model.gguf".to_owned(), digest)];
    let create = |files: &[(String, Digest)]| {
        f.library.create_from_blobs(&name("mario"), files, defaults.clone(), &inspect)
    };
    assert!(!f.library.has_blob(&digest));
    assert!(matches!(create(&files), Err(LibraryError::NoBlob(found)) if found == digest));
    let error = f.library.put_blob(&bytes[1..], digest).unwrap_err();
    assert!(matches!(error, LibraryError::DigestMismatch { expected, .. } if expected == digest));
    assert!(!f.library.has_blob(&digest));
    f.library.put_blob(&bytes[..], digest).unwrap();
    f.library.put_blob(&bytes[..], digest).unwrap();
    assert!(f.library.has_blob(&digest));
    let model = create(&files).unwrap();
    assert_eq!((&model.source, &model.defaults), (&Source::Upload, &defaults));
    assert_ne!(model.digest(), f.library.copy("mario", &name("x"), false).map(|_| digest).unwrap());
    assert!(create(&[("../m.gguf".to_owned(), digest)]).is_err());
    assert!(create(&[]).is_err());
    // From a model, with other defaults; also over itself.
    let luigi = f.library.create_from_model(&name("luigi"), "mario", Map::new()).unwrap();
    assert_eq!(luigi.source, Source::Model { name: "mario:latest".into() });
    assert_ne!(luigi.digest(), model.digest());
    let again = f.library.create_from_model(&name("mario"), "mario", Map::new()).unwrap();
    assert_eq!(again.digest(), luigi.digest());
    let changed = f.library.set_defaults("luigi", defaults).unwrap();
    assert_eq!(f.library.find("luigi").unwrap().digest(), changed.digest());
    assert_eq!(changed.digest(), model.digest());
    assert_eq!(check(f.root()).len(), 3);
}

#[test]
fn a_reader_that_fails_leaves_no_blob() {
    struct Broken(usize);
    impl io::Read for Broken {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.0 = self.0.checked_sub(1).ok_or(io::ErrorKind::ConnectionReset)?;
            buffer.fill(1);
            Ok(buffer.len())
        }
    }
    let f = Fixture::new();
    assert!(f.library.put_blob(Broken(3), Digest::of(b"x")).is_err());
    assert_eq!(count_files(f.root().join("tmp").as_path()), 0);
}

#[test]
fn prune_takes_what_belongs_to_nothing_and_nothing_else() {
    let f = Fixture::new();
    f.import(&f.file("tiny.gguf", &gguf(1, 1000)), true).unwrap();
    f.library.put_blob(&b"unused"[..], Digest::of(b"unused")).unwrap();
    fs::write(f.root().join("partial/sha256-x"), b"half").unwrap();
    fs::write(f.root().join("tmp/y"), b"left").unwrap();
    fs::create_dir_all(f.root().join("models/gone")).unwrap();
    assert_eq!(f.library.prune(false).unwrap(), Pruned { files: 3, bytes: 14 });
    assert_eq!(f.library.prune(false).unwrap(), Pruned::default());
    assert_eq!(check(f.root()).len(), 1);
    // Not while somebody writes.
    let lock = File::open(f.root().join("library.lock")).unwrap();
    lock.lock_shared().unwrap();
    assert!(matches!(f.library.prune(false), Err(LibraryError::Busy)));
    assert_eq!(f.library.remove("tiny").unwrap().freed, None);
    lock.unlock().unwrap();
    assert_eq!(f.library.prune(false).unwrap(), Pruned { files: 1, bytes: 1000 });
}

#[test]
fn lost_files_are_said_and_lost_links_made_again() {
    let f = Fixture::new();
    let model = f.import(&f.file("tiny.gguf", &gguf(1, 1000)), true).unwrap();
    let path = f.library.path(&model).unwrap();
    fs::remove_file(&path).unwrap();
    assert_eq!(f.library.path(&model).unwrap(), path);
    check(f.root());
    fs::remove_dir_all(path.parent().unwrap()).unwrap();
    let blob = f.root().join("blobs").join(format!("sha256-{}", model.files[0].digest.hex()));
    fs::remove_file(blob).unwrap();
    let error = f.library.path(&model).unwrap_err().to_string();
    assert!(error.starts_with("`tiny.gguf` of the model `tiny:latest` is damaged: "), "{error}");
}

#[test]
fn a_library_of_a_newer_version_is_left_alone() {
    let f = Fixture::new();
    let database = rusqlite::Connection::open(f.root().join("library.db")).unwrap();
    database.pragma_update(None, "user_version", 1000).unwrap();
    let error = Library::open(f.root()).unwrap_err();
    assert!(matches!(error, LibraryError::Newer { found: 1000, .. }), "{error}");
    fs::write(f.root().join("library.db"), "not a database at all, but long enough to be one").unwrap();
    fs::remove_file(f.root().join("library.db-wal")).ok();
    assert!(matches!(Library::open(f.root()), Err(LibraryError::CatalogueDamaged { .. })));
}

#[test]
fn looking_for_a_library_makes_none() {
    let folder = tempfile::tempdir().unwrap();
    assert!(Library::open_existing(&folder.path().join("x")).unwrap().is_none());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn many_threads_and_connections_at_once_lose_nothing() {
    let f = Fixture::new();
    let paths: Vec<_> = (0..4).map(|i| f.file(&format!("m{i}.gguf"), &gguf(i % 2, 5000))).collect();
    thread::scope(|scope| {
        for (i, path) in paths.iter().enumerate() {
            let f = &f;
            scope.spawn(move || {
                for round in 0..8 {
                    let library = Library::open(f.root()).unwrap();
                    let own = format!("m{i}");
                    let options = ImportOptions { copy: true, ..ImportOptions::default() };
                    library.import(path, &options, &inspect, &|_| {}).unwrap();
                    library.copy(&own, &name(&format!("c{i}-{round}")), false).unwrap();
                    assert_eq!(fs::read(library.resolve(&own).unwrap()).unwrap(), gguf(i as u64 % 2, 5000));
                    library.remove(&own).unwrap();
                }
            });
        }
    });
    assert_eq!(check(f.root()).len(), 32);
    assert_eq!(count_files(&f.root().join("blobs")), 2);
}
