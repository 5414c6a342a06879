//! Damage of every kind to a library's files, and the recovery from it.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use crate::common::{Fixture, check, gguf, hub::Fault, inspect};
use paguro_library::{
    Cancel, Digest, Finding, ImportOptions, Library, LibraryError, ModelRecord, Problem, Progress, Rebuilt,
    Repair, VerifyOptions,
};

impl Fixture {
    pub fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    }

    pub fn import(&self, path: &Path, copy: bool) -> ModelRecord {
        let options = ImportOptions { copy, replace: true, ..ImportOptions::default() };
        self.library().import(path, &options, &inspect, &|_| {}).unwrap()
    }

    pub fn blob(&self, bytes: &[u8]) -> PathBuf {
        self.root().join("blobs").join(format!("sha256-{}", Digest::of(bytes).hex()))
    }

    pub fn verify(&self, repair: bool) -> Vec<Finding> {
        let hub = self.hub.client();
        let options = VerifyOptions { name: None, repair: repair.then_some(&hub) };
        self.library().verify(&options, &Cancel::default(), &|_| {}).unwrap().findings
    }

    pub fn rebuild(&self) -> Result<Rebuilt, LibraryError> {
        Library::rebuild(&self.root(), &inspect, &Cancel::default(), &|_| {})
    }

    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<_> = self.library().list().unwrap().iter().map(|m| m.name.short()).collect();
        names.sort();
        names
    }

    /// A library with a pulled model, a copied one, one by reference, and another name for the first.
    pub fn filled() -> (Self, [Vec<u8>; 3]) {
        let f = Self::new();
        let bytes = [gguf(1, 30_000), gguf(2, 20_000), gguf(3, 10_000)];
        f.hub.add("o/m", &[("pulled.gguf", &bytes[0])]);
        f.pull("o/m").unwrap();
        f.import(&f.file("copied.gguf", &bytes[1]), true);
        f.import(&f.file("there.gguf", &bytes[2]), false);
        f.library().copy("m", &"second".parse().unwrap(), false).unwrap();
        (f, bytes)
    }
}

/// Writes over what is protected against it, through all of its names.
fn damage(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).unwrap();
    change(&mut bytes);
    let mut permissions = fs::metadata(path).unwrap().permissions();
    #[allow(clippy::permissions_set_readonly_false)] // it is a temporary file
    permissions.set_readonly(false);
    fs::set_permissions(path, permissions).unwrap();
    fs::write(path, bytes).unwrap();
}

pub fn flip(path: &Path) {
    damage(path, |bytes| {
        let middle = bytes.len() / 2;
        bytes[middle..middle + 64].iter_mut().for_each(|byte| *byte ^= 0x5a);
    });
}

#[test]
fn whatever_brings_the_content_again_mends_a_damaged_blob() {
    type Bring<'a> = (&'a str, &'a dyn Fn(&Fixture, &[u8]));
    let ways: [Bring<'_>; 4] = [
        ("pull", &|f, bytes| {
            f.hub.add("o/same", &[("same.gguf", bytes)]);
            f.pull("o/same").unwrap();
        }),
        ("import --copy", &|f, bytes| drop(f.import(&f.file("copy.gguf", bytes), true))),
        ("import", &|f, bytes| drop(f.import(&f.file("reference.gguf", bytes), false))),
        ("upload", &|f, bytes| f.library().put_blob(bytes, Digest::of(bytes)).unwrap()),
    ];
    for (way, bring) in ways {
        let (f, bytes) = Fixture::filled();
        let before = f.library().resolve("m").unwrap();
        flip(&f.blob(&bytes[0]));
        assert_ne!(fs::read(&before).unwrap(), bytes[0], "{way}: the folder of links has the same file");
        bring(&f, &bytes[0]);
        assert_eq!(fs::read(f.blob(&bytes[0])).unwrap(), bytes[0], "{way}");
        // Not only when the model is asked for again: somebody may have the path already.
        assert_eq!(fs::read(&before).unwrap(), bytes[0], "{way}");
        check(&f.root());
        assert!(f.verify(false).is_empty(), "{way}");
    }
}

#[test]
fn a_model_is_not_made_of_a_damaged_upload() {
    let f = Fixture::new();
    let (library, bytes) = (f.library(), gguf(1, 5000));
    let digest = Digest::of(&bytes);
    library.put_blob(&bytes[..], digest).unwrap();
    flip(&f.blob(&bytes));
    let files = [("m.gguf".to_owned(), digest)];
    let create =
        || library.create_from_blobs(&"m".parse().unwrap(), &files, serde_json::Map::new(), &inspect);
    assert!(matches!(create(), Err(LibraryError::NoBlob(_))));
    assert!(!library.has_blob(&digest), "so the client sends it again");
    library.put_blob(&bytes[..], digest).unwrap();
    create().unwrap();
    check(&f.root());
}

#[test]
fn a_verification_finds_every_kind_of_damage_and_repairs_what_it_can() {
    type Damage<'a> = (&'a dyn Fn(&Fixture, &Path), &'a dyn Fn(&Problem) -> bool);
    let kinds: [Damage<'_>; 5] = [
        (&|_, path| flip(path), &|p| matches!(p, Problem::Content { .. })),
        (&|_, path| damage(path, |bytes| bytes.truncate(100)), &|p| matches!(p, Problem::Size { .. })),
        (&|_, path| damage(path, Vec::clear), &|p| matches!(p, Problem::Size { found: 0, .. })),
        (&|_, path| fs::remove_file(path).unwrap(), &|p| *p == Problem::Missing),
        (
            &|f, path| {
                fs::remove_file(path).unwrap();
                // For the second blob it is gone already.
                let _ = fs::remove_dir_all(f.root().join("models"));
            },
            &|p| *p == Problem::Missing,
        ),
    ];
    for (index, (break_it, is_it)) in kinds.iter().enumerate() {
        let (f, bytes) = Fixture::filled();
        assert!(f.verify(false).is_empty());
        break_it(&f, &f.blob(&bytes[0]));
        break_it(&f, &f.blob(&bytes[1]));
        let findings = f.verify(false);
        assert_eq!(findings.len(), 2, "{index}: {findings:?}");
        assert!(findings.iter().all(|finding| is_it(&finding.problem)), "{index}: {findings:?}");
        // The models are refused from now on, with the way out.
        let error = f.library().resolve("m").unwrap_err().to_string();
        assert!(error.ends_with("`paguro verify o/m:latest --repair` downloads it again"), "{error}");
        let of_first = findings.iter().find(|finding| finding.digest == Digest::of(&bytes[0])).unwrap();
        assert_eq!(of_first.models, ["o/m", "second"]);
        let findings = f.verify(true);
        assert!(findings.iter().all(Finding::is_repaired), "{index}: {findings:?}");
        assert!(f.verify(false).is_empty());
        assert_eq!(check(&f.root()).len(), 4);
    }
}

#[test]
fn a_repair_that_fails_says_why_and_loses_nothing() {
    let (f, bytes) = Fixture::filled();
    // The hub has something else now, and so has the file.
    f.hub.add("o/m", &[("pulled.gguf", &gguf(7, 30_000))]);
    f.file("copied.gguf", &gguf(8, 20_000));
    f.file("there.gguf", &gguf(9, 10_000));
    flip(&f.blob(&bytes[0]));
    flip(&f.blob(&bytes[1]));
    let unused = gguf(4, 4000);
    f.library().put_blob(&unused[..], Digest::of(&unused)).unwrap();
    flip(&f.blob(&unused));
    let rotten = fs::read(f.blob(&bytes[0])).unwrap();
    let failed = |findings: &[Finding]| -> BTreeMap<String, String> {
        let why = |finding: &Finding| match &finding.repair {
            Some(Repair::Failed(why)) => why
                .replace(&f.folder.path().display().to_string(), "")
                .replace(&f.hub.port.to_string(), "HUB"),
            other => panic!("{other:?}"),
        };
        findings.iter().map(|finding| (finding.models.join(" "), why(finding))).collect()
    };
    let failures = failed(&f.verify(true));
    assert_eq!(failures.len(), 4, "{failures:?}");
    assert!(failures["o/m second"].contains("has no file of sha256:"), "{failures:?}");
    assert!(failures["copied"].starts_with("/copied.gguf: the SHA-256 of /copied.gguf is "));
    assert!(failures["there"].starts_with("it lies outside of the library; put the old file back"));
    assert_eq!(failures[""], "it belongs to no model; `paguro prune` deletes it");
    assert_eq!(fs::read(f.blob(&bytes[0])).unwrap(), rotten, "it is all that there is");
    assert_eq!(fs::read(f.folder.path().join("there.gguf")).unwrap(), gguf(9, 10_000), "not ours to change");
    // A download that arrives damaged takes nobody's place.
    f.hub.add("o/m", &[("pulled.gguf", &bytes[0])]);
    f.hub.state().faults = vec![Fault::Flip(5)];
    assert!(failed(&f.verify(true))["o/m second"].contains("was damaged on its way"));
    assert_eq!(fs::read(f.blob(&bytes[0])).unwrap(), rotten);
    let repaired = f.verify(true).into_iter().filter(Finding::is_repaired).count();
    assert_eq!(repaired, 1);
    assert_eq!(fs::read(f.blob(&bytes[0])).unwrap(), bytes[0]);
}

#[test]
fn folders_are_repaired_file_by_file_also_what_the_hub_only_has_git_ids_of() {
    let f = Fixture::new();
    let weights = gguf(1, 9000);
    let files: [(&str, &[u8]); 3] =
        [("config.json", b"{}"), ("model.safetensors", &weights), ("tokenizer.json", b"[1]")];
    f.hub.add("o/st", &files);
    f.pull("o/st").unwrap();
    for (_, bytes) in files {
        damage(&f.blob(bytes), |bytes| bytes[0] ^= 1);
    }
    let findings = f.verify(true);
    assert_eq!(findings.len(), 3);
    assert!(findings.iter().all(Finding::is_repaired), "{findings:?}");
    check(&f.root());
}

#[test]
fn a_verification_can_be_stopped_and_shows_how_far_it_is() {
    let (f, _) = Fixture::filled();
    let (cancel, library) = (Cancel::default(), f.library());
    let stop = |progress: Progress<'_>| match progress {
        Progress::Files(files) => assert_eq!(files.len(), 3),
        Progress::Checking { .. } => cancel.cancel(),
        _ => {}
    };
    let stopped = library.verify(&VerifyOptions::default(), &cancel, &stop);
    assert!(matches!(stopped, Err(LibraryError::Cancelled)));
    let one = VerifyOptions { name: Some("there"), repair: None };
    assert_eq!(library.verify(&one, &Cancel::default(), &|_| {}).unwrap().files, 1);
}
