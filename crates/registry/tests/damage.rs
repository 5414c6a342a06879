//! Damage of every kind to a library's files, and the recovery from it.

mod common;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use common::{Fixture, check, count_files, gguf, hub::Fault, inspect};
use expect_test::{Expect, expect};
use paguro_registry::{
    Cancel, Digest, Finding, ImportOptions, ModelRecord, Problem, Progress, Rebuilt, Registry, RegistryError,
    Repair, VerifyOptions,
};

impl Fixture {
    fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    }

    fn import(&self, path: &Path, copy: bool) -> ModelRecord {
        let options = ImportOptions { copy, replace: true, ..ImportOptions::default() };
        self.registry().import(path, &options, &inspect, &|_| {}).unwrap()
    }

    fn blob(&self, bytes: &[u8]) -> PathBuf {
        self.root().join("blobs").join(format!("sha256-{}", Digest::of(bytes).hex()))
    }

    fn verify(&self, repair: bool) -> Vec<Finding> {
        let hub = self.hub.client();
        let options = VerifyOptions { name: None, repair: repair.then_some(&hub) };
        self.registry().verify(&options, &Cancel::default(), &|_| {}).unwrap().findings
    }

    fn rebuild(&self) -> Result<Rebuilt, RegistryError> {
        Registry::rebuild(&self.root(), &inspect, &Cancel::default(), &|_| {})
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<_> = self.registry().list().unwrap().iter().map(|m| m.name.short()).collect();
        names.sort();
        names
    }

    /// A library with a pulled model, a copied one, one by reference, and another name for the first.
    fn filled() -> (Self, [Vec<u8>; 3]) {
        let f = Self::new();
        let bytes = [gguf(1, 30_000), gguf(2, 20_000), gguf(3, 10_000)];
        f.hub.add("o/m", &[("pulled.gguf", &bytes[0])]);
        f.pull("o/m").unwrap();
        f.import(&f.file("copied.gguf", &bytes[1]), true);
        f.import(&f.file("there.gguf", &bytes[2]), false);
        f.registry().copy("m", &"second".parse().unwrap(), false).unwrap();
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

fn flip(path: &Path) {
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
        ("upload", &|f, bytes| f.registry().put_blob(bytes, Digest::of(bytes)).unwrap()),
    ];
    for (way, bring) in ways {
        let (f, bytes) = Fixture::filled();
        let before = f.registry().resolve("m").unwrap();
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
    let (registry, bytes) = (f.registry(), gguf(1, 5000));
    let digest = Digest::of(&bytes);
    registry.put_blob(&bytes[..], digest).unwrap();
    flip(&f.blob(&bytes));
    let files = [("m.gguf".to_owned(), digest)];
    let create =
        || registry.create_from_blobs(&"m".parse().unwrap(), &files, serde_json::Map::new(), &inspect);
    assert!(matches!(create(), Err(RegistryError::NoBlob(_))));
    assert!(!registry.has_blob(&digest), "so the client sends it again");
    registry.put_blob(&bytes[..], digest).unwrap();
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
        let error = f.registry().resolve("m").unwrap_err().to_string();
        assert!(error.ends_with("`paguro verify o/m:latest --repair` gets it again"), "{error}");
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
    f.registry().put_blob(&unused[..], Digest::of(&unused)).unwrap();
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
    assert!(failures["copied"].starts_with("/copied.gguf: /copied.gguf is not what it should be"));
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
    let (cancel, registry) = (Cancel::default(), f.registry());
    let stop = |progress: Progress<'_>| match progress {
        Progress::Files(files) => assert_eq!(files.len(), 3),
        Progress::Checking { .. } => cancel.cancel(),
        _ => {}
    };
    let stopped = registry.verify(&VerifyOptions::default(), &cancel, &stop);
    assert!(matches!(stopped, Err(RegistryError::Cancelled)));
    let one = VerifyOptions { name: Some("there"), repair: None };
    assert_eq!(registry.verify(&one, &Cancel::default(), &|_| {}).unwrap().files, 1);
}

/// A way to lose a catalogue, and its name.
type Loss = (&'static str, fn(&Path));

fn losses() -> Vec<Loss> {
    fn alone(root: &Path, then: impl FnOnce(&Path)) {
        for name in ["library.db", "library.db-wal", "library.db-shm"] {
            let _ = fs::remove_file(root.join(name));
        }
        then(&root.join("library.db"));
    }
    vec![
        ("removed", |root| alone(root, |_| {})),
        ("emptied", |root| alone(root, |path| fs::write(path, "").unwrap())),
        ("zeros", |root| alone(root, |path| fs::write(path, [0; 40_960]).unwrap())),
        ("text", |root| alone(root, |path| fs::write(path, "no database".repeat(1000)).unwrap())),
        ("torn", |root| {
            let bytes = fs::read(root.join("library.db")).unwrap();
            alone(root, |path| fs::write(path, &bytes[..bytes.len() / 2]).unwrap());
        }),
        ("another program's", |root| {
            alone(root, |path| {
                let database = rusqlite::Connection::open(path).unwrap();
                database.execute_batch("CREATE TABLE bookmarks (url TEXT); PRAGMA user_version = 1").unwrap();
            });
        }),
        ("no tables", |root| {
            alone(root, |path| {
                let database = rusqlite::Connection::open(path).unwrap();
                database.execute_batch("CREATE TABLE x (y); DROP TABLE x").unwrap();
            });
        }),
    ]
}

#[test]
fn a_lost_catalogue_is_said_leads_to_no_deletion_and_is_rebuilt() {
    for (name, lose) in losses() {
        let (f, _) = Fixture::filled();
        let before = f.registry().list().unwrap();
        let files = count_files(&f.root().join("blobs"));
        lose(&f.root());
        let error = Registry::open(&f.root()).map(drop).unwrap_err();
        assert!(
            matches!(
                error,
                RegistryError::CatalogueLost { blobs: 2, manifests: 4, .. }
                    | RegistryError::CatalogueDamaged { .. }
            ),
            "{name}: {error}"
        );
        assert!(error.to_string().contains("`paguro rebuild`"), "{name}: {error}");
        assert!(Registry::open_existing(&f.root()).is_err(), "{name}");
        let rebuilt = f.rebuild().unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(rebuilt.models.len(), 4, "{name}");
        assert_eq!(rebuilt.set_aside.is_some(), name != "removed", "{name}");
        let problems: Vec<_> = rebuilt.models.iter().flat_map(|model| &model.problems).collect();
        assert!(problems.is_empty(), "{name}: {problems:?}");
        check(&f.root());
        let mut after = f.registry().list().unwrap();
        after.sort_by(|a, b| a.name.cmp(&b.name));
        for model in before {
            let same = after.iter().find(|other| other.name == model.name).unwrap();
            assert_eq!((&same.files, &same.source), (&model.files, &model.source), "{name}");
            assert_eq!((same.created_at, same.modified_at), (model.created_at, model.modified_at), "{name}");
        }
        f.registry().prune(false).unwrap();
        assert_eq!(count_files(&f.root().join("blobs")), files, "{name}");
        assert_eq!(f.rebuild().unwrap().models.len(), 0, "{name}: nothing is left to do");
    }
}

#[test]
fn whoever_wants_the_files_of_a_lost_catalogue_gone_says_so() {
    for (name, lose) in losses() {
        let (f, _) = Fixture::filled();
        lose(&f.root());
        let registry = Registry::open_anew(&f.root()).unwrap();
        assert!(
            matches!(registry.prune(false), Err(RegistryError::UnknownModels { models }) if models.len() == 4)
        );
        assert_eq!(registry.prune(true).unwrap().files, 2, "{name}");
        assert!(registry.list().unwrap().is_empty());
    }
}

#[test]
fn an_old_copy_of_the_catalogue_deletes_nothing() {
    let (f, bytes) = Fixture::filled();
    let copy = fs::read(f.root().join("library.db")).unwrap();
    let newer = gguf(5, 6000);
    f.import(&f.file("newer.gguf", &newer), true);
    fs::write(f.root().join("library.db"), copy).unwrap();
    let registry = f.registry();
    let error = registry.prune(false).unwrap_err();
    expect![
        "the catalogue does not know `newer`, of which there are records; it may be an old copy, or another library's: `paguro rebuild` restores them, `paguro prune --force` deletes their files"
    ]
    .assert_eq(&error.to_string());
    // Neither does the removal of a model that shares a file with one that is not known.
    f.import(&f.file("same.gguf", &newer), true);
    assert_eq!(registry.remove("same").unwrap().freed, Some(0));
    assert_eq!(fs::read(f.blob(&newer)).unwrap(), newer);
    drop(registry);
    let rebuilt = f.rebuild().unwrap();
    assert_eq!((rebuilt.models.len(), rebuilt.known, rebuilt.set_aside), (1, 4, None));
    assert_eq!(f.names(), ["copied", "newer", "o/m", "second", "there"]);
    assert_eq!(fs::read(f.blob(&bytes[0])).unwrap(), bytes[0]);
    f.registry().prune(false).unwrap();
    check(&f.root());
}

#[test]
fn a_rebuild_says_what_is_damaged_and_a_repair_gets_it() {
    let (f, bytes) = Fixture::filled();
    flip(&f.blob(&bytes[0]));
    fs::remove_file(f.folder.path().join("there.gguf")).unwrap();
    fs::write(f.root().join("library.db"), "").unwrap();
    let rebuilt = f.rebuild().unwrap();
    let damaged = rebuilt.models.iter().filter(|restored| !restored.problems.is_empty());
    let mut damaged: Vec<_> = damaged.map(|restored| restored.model.name.short()).collect();
    damaged.sort();
    assert_eq!(damaged, ["o/m", "second", "there"]);
    let repaired = f.verify(true).into_iter().filter(Finding::is_repaired).count();
    assert_eq!(repaired, 1);
    f.registry().remove("there").unwrap();
    check(&f.root());
}

#[test]
fn without_records_the_folders_of_links_tell_what_there_was() {
    let (f, bytes) = Fixture::filled();
    fs::remove_dir_all(f.root().join("manifests")).unwrap();
    fs::write(f.root().join("library.db"), "").unwrap();
    // Only the link has the content.
    fs::remove_file(f.blob(&bytes[1])).unwrap();
    let rebuilt = f.rebuild().unwrap();
    assert_eq!(rebuilt.unreadable, Vec::<String>::new());
    assert_eq!(f.names(), ["copied", "pulled"]);
    check(&f.root());
}

#[test]
fn records_follow_the_catalogue_and_old_libraries_get_theirs() {
    let (f, _) = Fixture::filled();
    let records = || {
        let folder = f.root().join("manifests");
        fs::read_dir(folder).unwrap().filter(|e| e.as_ref().unwrap().path().extension().is_some()).count()
    };
    assert_eq!(records(), 4);
    f.registry().remove("second").unwrap();
    f.registry().set_parameters("there", serde_json::Map::new()).unwrap();
    assert_eq!(records(), 3);
    // As a library of an older version has been left.
    fs::remove_dir_all(f.root().join("manifests")).unwrap();
    drop(f.registry());
    assert_eq!(records(), 3);
    // As a killed process has left them: the catalogue decides.
    let key = |name: &str| Digest::of(name.as_bytes()).hex();
    let path =
        |name: &str, extension: &str| f.root().join("manifests").join(key(name)).with_extension(extension);
    fs::rename(path("copied:latest", "json"), path("copied:latest", "gone")).unwrap();
    fs::copy(path("there:latest", "json"), path("never:latest", "new")).unwrap();
    f.registry().prune(false).unwrap();
    assert!(path("copied:latest", "json").exists());
    assert_eq!(records(), 3);
    // One that cannot be read of a model that is known is no matter; of another it keeps everything from being deleted.
    fs::write(path("copied:latest", "json"), "{").unwrap();
    f.registry().prune(false).unwrap();
    fs::write(path("unknown:latest", "json"), "{").unwrap();
    assert!(matches!(f.registry().prune(false), Err(RegistryError::BadManifest { .. })));
    assert_eq!(f.registry().prune(true).unwrap().files, 0);
    check(&f.root());
}

#[test]
fn a_library_of_an_older_version_is_brought_up_to_date() {
    let f = Fixture::new();
    let bytes = gguf(1, 3000);
    let blob = f.blob(&bytes);
    fs::create_dir_all(blob.parent().unwrap()).unwrap();
    fs::write(&blob, &bytes).unwrap();
    let database = rusqlite::Connection::open(f.root().join("library.db")).unwrap();
    database.execute_batch(include_str!("../src/migrations/0001.sql")).unwrap();
    database
        .execute_batch(&format!(
            "INSERT INTO models VALUES (7, 'old', 'Q4_0', '{{\"kind\":\"upload\"}}', 'gguf', 'llama', 9, 'Q4_0', \
             '{{\"system\":\"x\"}}', 1000, 2000);
             INSERT INTO files VALUES (7, 0, 'old.gguf', 3000, '{}', NULL);
             PRAGMA user_version = 1; PRAGMA journal_mode = WAL",
            Digest::of(&bytes).hex()
        ))
        .unwrap();
    drop(database);
    let models = check(&f.root());
    assert_eq!((models[0].name.short().as_str(), models[0].size()), ("old:Q4_0", 3000));
    assert_eq!(models[0].parameters["system"], "x");
    assert!(models[0].extra.is_empty());
    fs::write(f.root().join("library.db"), "").unwrap();
    assert_eq!(f.rebuild().unwrap().models.len(), 1);
    assert_eq!(f.registry().list().unwrap()[0].parameters["system"], "x");
}

#[test]
fn settings_of_a_model_outlive_its_files() {
    let (f, _) = Fixture::filled();
    let database = rusqlite::Connection::open(f.root().join("library.db")).unwrap();
    database.execute("UPDATE models SET extra = '{\"alias\":\"c\"}' WHERE base = 'copied'", []).unwrap();
    drop(database);
    f.import(&f.file("copied.gguf", &gguf(6, 500)), true);
    assert_eq!(f.registry().find("copied").unwrap().extra["alias"], "c");
    fs::remove_file(f.root().join("library.db")).unwrap();
    f.rebuild().unwrap();
    assert_eq!(f.registry().find("copied").unwrap().extra["alias"], "c");
}

#[test]
fn models_that_cannot_run_are_refused_and_marked() {
    let f = Fixture::new();
    let cannot = |path: &Path| {
        let mut details = inspect(path)?;
        details.problem = Some("architecture `mamba`".to_owned());
        details.inspected_by = "1".to_owned();
        Ok(details)
    };
    let path = f.file("m.gguf", &gguf(1, 100));
    let import = |force| {
        let options = ImportOptions { force, ..ImportOptions::default() };
        f.registry().import(&path, &options, &cannot, &|_| {})
    };
    let error = import(false).unwrap_err().to_string();
    assert!(error.ends_with("m.gguf`: architecture `mamba`"), "{error}");
    assert!(f.names().is_empty());
    import(true).unwrap();
    let problem = |version: &str, inspect: &paguro_registry::Inspect<'_>| {
        f.registry().list_with_problems(version, inspect).unwrap().remove(0).1
    };
    let never = |_: &Path| panic!("it is known already");
    assert_eq!(problem("1", &never).as_deref(), Some("architecture `mamba`"));
    // Another version may be able to.
    let can = |path: &Path| {
        let details = inspect(path)?;
        Ok(paguro_registry::Details { inspected_by: "2".to_owned(), ..details })
    };
    assert_eq!(problem("2", &can), None);
    assert_eq!(problem("2", &never), None);
    // So may another file.
    fs::write(&path, gguf(2, 100)).unwrap();
    let later = std::time::SystemTime::now() + std::time::Duration::from_secs(10);
    fs::File::options().write(true).open(&path).unwrap().set_modified(later).unwrap();
    assert_eq!(problem("2", &cannot).as_deref(), Some("architecture `mamba`"));
    fs::remove_file(&path).unwrap();
    assert!(problem("1", &never).unwrap().ends_with("is not there any more"));
}

#[cfg(unix)]
#[test]
fn what_is_not_a_regular_file_is_refused_at_once() {
    let f = Fixture::new();
    let at = |name: &str| f.folder.path().join(name);
    fs::create_dir(at("pipes")).unwrap();
    for pipe in ["pipe.gguf", "pipes/config.json"] {
        assert!(std::process::Command::new("mkfifo").arg(at(pipe)).status().unwrap().success());
    }
    let _socket = std::os::unix::net::UnixListener::bind(at("socket.gguf")).unwrap();
    let link = |to: &str, from: &str| std::os::unix::fs::symlink(to, at(from)).unwrap();
    link("/dev/zero", "zero.gguf");
    link("loop.gguf", "loop.gguf");
    link("pipe.gguf", "split-00002-of-00002.gguf");
    fs::write(at("split-00001-of-00002.gguf"), gguf(1, 10)).unwrap();
    fs::create_dir(at("around")).unwrap();
    link(".", "around/around");
    link("/proc/self", "proc");
    link("/proc/kmsg", "messages.gguf");
    fs::create_dir(at("system")).unwrap();
    link("/proc/kmsg", "system/config.json");
    fs::create_dir(at("folder.gguf")).unwrap();
    let refuse = |name: &str, expected: Expect| {
        let options = ImportOptions::default();
        let error = f.registry().import(&at(name), &options, &inspect, &|_| {}).unwrap_err().to_string();
        expected.assert_eq(&error.replace(&f.folder.path().display().to_string(), ""));
    };
    refuse("pipe.gguf", expect!["cannot import `/pipe.gguf`: it is a pipe, not a regular file"]);
    refuse("socket.gguf", expect!["cannot import `/socket.gguf`: it is a socket, not a regular file"]);
    refuse("zero.gguf", expect!["cannot import `/zero.gguf`: it is a device, not a regular file"]);
    refuse("loop.gguf", expect!["cannot open `/loop.gguf`: Too many levels of symbolic links (os error 40)"]);
    refuse(
        "split-00001-of-00002.gguf",
        expect!["cannot import `/split-00002-of-00002.gguf`: it is a pipe, not a regular file"],
    );
    refuse("pipes", expect!["cannot import `/pipes/config.json`: it is a pipe, not a regular file"]);
    if cfg!(target_os = "linux") {
        refuse("messages.gguf", expect!["cannot import `/messages.gguf`: it is empty"]);
        refuse("system", expect!["cannot import `/system/config.json`: it is empty"]);
    }
    let no_model = "the folder has no config.json; to import a GGUF file in it, name the file";
    for folder in ["around", "around/around/around", "proc", "folder.gguf"] {
        let options = ImportOptions::default();
        let error = f.registry().import(&at(folder), &options, &inspect, &|_| {}).unwrap_err().to_string();
        assert!(error.ends_with(no_model), "{error}");
    }
}
