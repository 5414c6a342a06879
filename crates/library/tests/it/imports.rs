//! Imports that are refused.

use std::{fs, path::Path};

use expect_test::{Expect, expect};
use paguro_library::ImportOptions;

use crate::common::{Fixture, gguf, inspect};

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
        f.library().import(&path, &options, &cannot, &|_| {})
    };
    let error = import(false).unwrap_err().to_string();
    assert!(error.ends_with("m.gguf`: architecture `mamba`"), "{error}");
    assert!(f.names().is_empty());
    import(true).unwrap();
    let problem = |version: &str, inspect: &paguro_library::Inspect<'_>| {
        f.library().list_with_problems(version, inspect).unwrap().remove(0).1
    };
    let never = |_: &Path| panic!("it is known already");
    assert_eq!(problem("1", &never).as_deref(), Some("architecture `mamba`"));
    // Another version may be able to.
    let can = |path: &Path| {
        let details = inspect(path)?;
        Ok(paguro_library::Details { inspected_by: "2".to_owned(), ..details })
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
        let error = f.library().import(&at(name), &options, &inspect, &|_| {}).unwrap_err().to_string();
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
        let error = f.library().import(&at(folder), &options, &inspect, &|_| {}).unwrap_err().to_string();
        assert!(error.ends_with(no_model), "{error}");
    }
}
