//! Lost, old and foreign catalogues, and the records that restore them.

use std::{fs, path::Path};

use expect_test::expect;
use paguro_library::{Digest, Finding, Library, LibraryError};

use crate::{
    common::{Fixture, check, count_files, gguf},
    damage::flip,
};

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
        let before = f.library().list().unwrap();
        let files = count_files(&f.root().join("blobs"));
        lose(&f.root());
        let error = Library::open(&f.root()).map(drop).unwrap_err();
        assert!(
            matches!(
                error,
                LibraryError::CatalogueLost { blobs: 2, manifests: 4, .. }
                    | LibraryError::CatalogueDamaged { .. }
            ),
            "{name}: {error}"
        );
        assert!(error.to_string().contains("`paguro rebuild`"), "{name}: {error}");
        assert!(Library::open_existing(&f.root()).is_err(), "{name}");
        let rebuilt = f.rebuild().unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(rebuilt.models.len(), 4, "{name}");
        assert_eq!(rebuilt.set_aside.is_some(), name != "removed", "{name}");
        let problems: Vec<_> = rebuilt.models.iter().flat_map(|model| &model.problems).collect();
        assert!(problems.is_empty(), "{name}: {problems:?}");
        check(&f.root());
        let mut after = f.library().list().unwrap();
        after.sort_by(|a, b| a.name.cmp(&b.name));
        for model in before {
            let same = after.iter().find(|other| other.name == model.name).unwrap();
            assert_eq!((&same.files, &same.source), (&model.files, &model.source), "{name}");
            assert_eq!((same.created_at, same.modified_at), (model.created_at, model.modified_at), "{name}");
        }
        f.library().prune(false).unwrap();
        assert_eq!(count_files(&f.root().join("blobs")), files, "{name}");
        assert_eq!(f.rebuild().unwrap().models.len(), 0, "{name}: nothing is left to do");
    }
}

#[test]
fn whoever_wants_the_files_of_a_lost_catalogue_gone_says_so() {
    for (name, lose) in losses() {
        let (f, _) = Fixture::filled();
        lose(&f.root());
        let library = Library::open_anew(&f.root()).unwrap();
        assert!(
            matches!(library.prune(false), Err(LibraryError::UnknownModels { models }) if models.len() == 4)
        );
        assert_eq!(library.prune(true).unwrap().files, 2, "{name}");
        assert!(library.list().unwrap().is_empty());
    }
}

#[test]
fn an_old_copy_of_the_catalogue_deletes_nothing() {
    let (f, bytes) = Fixture::filled();
    let copy = fs::read(f.root().join("library.db")).unwrap();
    let newer = gguf(5, 6000);
    f.import(&f.file("newer.gguf", &newer), true);
    fs::write(f.root().join("library.db"), copy).unwrap();
    let library = f.library();
    let error = library.prune(false).unwrap_err();
    expect![
        "the catalogue does not know `newer`, of which there are records; it may be an old copy, or another library's: `paguro rebuild` restores them, `paguro prune --force` deletes their files"
    ]
    .assert_eq(&error.to_string());
    // Neither does the removal of a model that shares a file with one that is not known.
    f.import(&f.file("same.gguf", &newer), true);
    assert_eq!(library.remove("same").unwrap().freed, Some(0));
    assert_eq!(fs::read(f.blob(&newer)).unwrap(), newer);
    drop(library);
    let rebuilt = f.rebuild().unwrap();
    assert_eq!((rebuilt.models.len(), rebuilt.known, rebuilt.set_aside), (1, 4, None));
    assert_eq!(f.names(), ["copied", "newer", "o/m", "second", "there"]);
    assert_eq!(fs::read(f.blob(&bytes[0])).unwrap(), bytes[0]);
    f.library().prune(false).unwrap();
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
    f.library().remove("there").unwrap();
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
    f.library().remove("second").unwrap();
    f.library().set_defaults("there", serde_json::Map::new()).unwrap();
    assert_eq!(records(), 3);
    // As a library of an older version has been left.
    fs::remove_dir_all(f.root().join("manifests")).unwrap();
    drop(f.library());
    assert_eq!(records(), 3);
    // As a killed process has left them: the catalogue decides.
    let key = |name: &str| Digest::of(name.as_bytes()).hex();
    let path =
        |name: &str, extension: &str| f.root().join("manifests").join(key(name)).with_extension(extension);
    fs::rename(path("copied:latest", "json"), path("copied:latest", "gone")).unwrap();
    fs::copy(path("there:latest", "json"), path("never:latest", "new")).unwrap();
    f.library().prune(false).unwrap();
    assert!(path("copied:latest", "json").exists());
    assert_eq!(records(), 3);
    // One that cannot be read of a model that is known is no matter; of another it keeps everything from being deleted.
    fs::write(path("copied:latest", "json"), "{").unwrap();
    f.library().prune(false).unwrap();
    fs::write(path("unknown:latest", "json"), "{").unwrap();
    assert!(matches!(f.library().prune(false), Err(LibraryError::BadManifest { .. })));
    assert_eq!(f.library().prune(true).unwrap().files, 0);
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
    database.execute_batch(include_str!("../../src/migrations/0001.sql")).unwrap();
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
    assert_eq!(models[0].defaults["system"], "x");
    assert!(models[0].extra.is_empty());
    fs::write(f.root().join("library.db"), "").unwrap();
    assert_eq!(f.rebuild().unwrap().models.len(), 1);
    assert_eq!(f.library().list().unwrap()[0].defaults["system"], "x");
}

#[test]
fn settings_of_a_model_outlive_its_files() {
    let (f, _) = Fixture::filled();
    let database = rusqlite::Connection::open(f.root().join("library.db")).unwrap();
    database.execute("UPDATE models SET extra = '{\"alias\":\"c\"}' WHERE base = 'copied'", []).unwrap();
    drop(database);
    f.import(&f.file("copied.gguf", &gguf(6, 500)), true);
    assert_eq!(f.library().find("copied").unwrap().extra["alias"], "c");
    fs::remove_file(f.root().join("library.db")).unwrap();
    f.rebuild().unwrap();
    assert_eq!(f.library().find("copied").unwrap().extra["alias"], "c");
}
