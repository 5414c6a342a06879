//! Pulls from a real hub server on loopback, with everything that can go wrong on the way.

use std::{
    fs,
    sync::{
        Barrier, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use crate::common::{Fixture, check, count_files, gguf, hub::Fault, inspect};
use expect_test::expect;
use paguro_library::{
    Cancel, LibraryError, ModelRecord, Progress, PullOptions,
    hub::{Hub, HubOptions},
};

impl Fixture {
    fn pull_with(&self, hub: &Hub, reference: &str) -> Result<ModelRecord, LibraryError> {
        self.library().pull(hub, &reference.parse()?, &PullOptions::default(), &inspect, &|_| {})
    }

    /// A failed pull's message, and the proof that it has left nothing that shows.
    fn refused(&self, reference: &str) -> String {
        let error = self.pull(reference).unwrap_err();
        assert!(check(&self.root()).is_empty());
        error.to_string().replace(&self.hub.port.to_string(), "HUB")
    }
}

#[test]
fn a_model_comes_with_its_checksum_size_and_name() {
    let f = Fixture::new();
    let (small, large) = (gguf(1, 1000), gguf(2, 300_000));
    f.hub
        .add("o/Tiny-GGUF", &[("tiny-Q4_K_M.gguf", &large), ("tiny-Q2_K.gguf", &small), ("README.md", b"x")]);
    let model = f.pull("hf:o/Tiny-GGUF").unwrap();
    assert_eq!(model.name.to_string(), "o/Tiny-GGUF:Q4_K_M");
    assert_eq!(model.size(), 300_000);
    assert_eq!(model.files[0].digest, paguro_library::Digest::of(&large));
    assert_eq!(check(&f.root()), [model]);
    let path = f.library().resolve("tiny-gguf").unwrap();
    assert_eq!(path.file_name().unwrap(), "tiny-Q4_K_M.gguf");
    // Again: everything is here, nothing is sent.
    f.hub.state().sent = 0;
    f.pull("o/Tiny-GGUF").unwrap();
    assert_eq!(f.hub.state().sent, 0);
    assert_eq!(check(&f.root()).len(), 1);
    assert_eq!(f.library().prune(false).unwrap(), paguro_library::Pruned::default());
}

#[test]
fn split_models_and_folders_come_whole() {
    let f = Fixture::new();
    let parts = [gguf(1, 50_000), gguf(2, 60_000)];
    f.hub.add(
        "o/split",
        &[("Q8_0/m 1-00001-of-00002.gguf", &parts[0]), ("Q8_0/m 1-00002-of-00002.gguf", &parts[1])],
    );
    let model = f.pull("o/split:q8_0").unwrap();
    let path = f.library().path(&model).unwrap();
    assert_eq!(path.file_name().unwrap(), "m 1-00001-of-00002.gguf");
    assert_eq!(fs::read(path.with_file_name("m 1-00002-of-00002.gguf")).unwrap(), parts[1]);

    f.hub.add("o/st", &[("config.json", b"{}"), ("model.safetensors", &parts[0]), ("tokenizer.json", b"[]")]);
    let model = f.pull("https://huggingface.co/o/st").unwrap();
    assert_eq!(model.name.to_string(), "o/st:latest");
    let folder = f.library().resolve("st").unwrap();
    assert_eq!(fs::read(folder.join("config.json")).unwrap(), b"{}");
    assert_eq!(check(&f.root()).len(), 2);
    // The first part's content is in both models, and once on disk.
    assert_eq!(count_files(&f.root().join("blobs")), 4);
}

#[test]
fn the_token_goes_to_the_hub_and_to_nobody_else() {
    let f = Fixture::new();
    f.hub.add("o/private", &[("m.gguf", &gguf(1, 1000))]);
    f.hub.state().token = Some("hf_secret".to_owned());
    expect!["the hub refuses access to `o/private` (HTTP 401: Invalid username or password.); it is private or gated, or its name is wrong: set HF_TOKEN to a token of yours"]
        .assert_eq(&f.refused("o/private"));
    f.hub.state().log.clear();
    let options = HubOptions { token: Some("hf_secret".to_owned()), ..f.hub.options() };
    assert!(!format!("{options:?}").contains("hf_"));
    f.pull_with(&Hub::new(options).unwrap(), "o/private").unwrap();
    expect![[r#"
        127.0.0.1:HUB /api/models/o/private/revision/main?blobs=true auth:Bearer hf_secret range:-
        127.0.0.1:HUB /o/private/resolve/0123456789abcdef0123456789abcdef01234567/m.gguf auth:Bearer hf_secret range:-
        127.0.0.1:HUB /moved/o/private/resolve/0123456789abcdef0123456789abcdef01234567/m.gguf auth:Bearer hf_secret range:-
        127.0.0.1:CDN /o/private/resolve/0123456789abcdef0123456789abcdef01234567/m.gguf?signature=s3cret auth:- range:-"#]]
    .assert_eq(&f.hub.log());
    let wrong = HubOptions { token: Some("hf_wrong".to_owned()), ..f.hub.options() };
    let error = f.pull_with(&Hub::new(wrong).unwrap(), "o/private").unwrap_err();
    assert!(error.to_string().contains("the token in HF_TOKEN does not open it"), "{error}");
}

#[test]
fn dropped_connections_are_taken_up_where_they_ended() {
    let f = Fixture::new();
    let bytes = gguf(1, 500_000);
    f.hub.add("o/m", &[("m.gguf", &bytes)]);
    // More often than it would be tried again without progress.
    f.hub.state().faults = vec![Fault::Drop(100_000); 4];
    let model = f.pull("o/m").unwrap();
    assert_eq!(check(&f.root()), [model]);
    let state = f.hub.state();
    assert!(state.log.iter().any(|line| line.contains("range:bytes=")), "{:?}", state.log);
    assert!(state.sent < 510_000, "{} bytes were sent for 500000", state.sent);
}

#[test]
fn a_pull_goes_on_where_an_earlier_one_has_failed() {
    let f = Fixture::new();
    f.hub.add("o/m", &[("m.gguf", &gguf(1, 500_000))]);
    f.hub.state().faults = vec![Fault::Drop(200_000), Fault::Status(404, None)];
    expect!["http://127.0.0.1:HUB has no `m.gguf` in `o/m` (HTTP 404)"].assert_eq(&f.refused("o/m"));
    f.hub.state().sent = 0;
    f.pull("o/m").unwrap();
    let sent = f.hub.state().sent;
    assert!((1..=400_000).contains(&sent), "{sent}");
    assert_eq!(check(&f.root()).len(), 1);
}

#[test]
fn a_server_without_ranges_starts_anew() {
    let f = Fixture::new();
    f.hub.add("o/m", &[("m.gguf", &gguf(1, 500_000))]);
    f.hub.state().no_ranges = true;
    f.hub.state().faults = vec![Fault::Drop(200_000)];
    f.pull("o/m").unwrap();
    assert_eq!(check(&f.root()).len(), 1);
}

#[test]
fn wrong_content_never_becomes_a_model() {
    let f = Fixture::new();
    let bytes = gguf(1, 100_000);
    f.hub.add("o/m", &[("m.gguf", &bytes), ("config.json", b"{}")]);
    f.hub.state().faults = vec![Fault::Flip(5000)];
    let message = f.refused("o/m");
    assert!(message.starts_with("`m.gguf` was damaged on its way: its checksum is "), "{message}");
    f.hub.state().faults = vec![Fault::Longer];
    let message = f.refused("o/m");
    assert!(message.contains("longer than the 100000 bytes that were announced"), "{message}");
    f.hub.lie("o/m", &"ab".repeat(32));
    assert!(f.refused("o/m").contains("the hub announced abab"));
    assert_eq!(count_files(&f.root().join("blobs")), 0);
    // Small files have git's checksum, not SHA-256.
    f.hub.add("o/st", &[("model.safetensors", &bytes), ("config.json", b"{}"), ("tokenizer.json", b"[]")]);
    f.hub.state().faults = vec![Fault::Flip(0); 3];
    assert!(f.refused("o/st").contains("was damaged on its way"));
    // Nothing of all that is in the way of the next attempt.
    f.pull("o/st").unwrap();
    assert_eq!(check(&f.root()).len(), 1);
}

#[test]
fn damage_in_what_an_earlier_process_has_left_is_repaired() {
    let f = Fixture::new();
    let bytes = gguf(1, 300_000);
    f.hub.add("o/m", &[("m.gguf", &bytes)]);
    f.library();
    let digest = paguro_library::Digest::of(&bytes);
    let part = f.root().join("partial").join(format!("sha256-{}", digest.hex()));
    fs::write(&part, vec![7; 100_000]).unwrap();
    f.pull("o/m").unwrap();
    // Longer than the file can be.
    f.library().remove("m").unwrap();
    fs::write(&part, vec![7; 400_000]).unwrap();
    f.pull("o/m").unwrap();
    assert_eq!(check(&f.root()).len(), 1);
    assert!(!part.exists());
}

#[test]
fn a_busy_hub_is_asked_again_and_given_up_in_the_end() {
    let f = Fixture::new();
    f.hub.add("o/m", &[("m.gguf", &gguf(1, 1000))]);
    f.hub.state().list_statuses = vec![(503, None), (429, Some(0))];
    f.hub.state().faults = vec![Fault::Status(429, Some(0)), Fault::Status(502, None), Fault::Hang];
    f.pull("o/m").unwrap();
    f.library().remove("o/m").unwrap();
    f.hub.state().faults = vec![Fault::Status(503, None); 4];
    let message = f.refused("o/m");
    assert!(message.ends_with("m.gguf answers with HTTP 503"), "{message}");
    assert!(!message.contains("s3cret"), "signatures are secrets, too: {message}");
    // A wait of an hour is not waited for.
    f.hub.state().list_statuses = vec![(429, Some(3600))];
    assert!(f.refused("o/m").contains("HTTP 429"));
}

#[test]
fn what_is_not_there_is_said() {
    let f = Fixture::new();
    f.hub.add("o/m", &[("a-Q2_K.gguf", &gguf(1, 10)), ("a-Q8_0.gguf", &gguf(2, 10))]);
    expect!["http://127.0.0.1:HUB has no `o/none` (HTTP 404)"].assert_eq(&f.refused("o/none"));
    expect!["o/m: nothing in it is `Q4_K_M`; there is Q2_K, Q8_0"].assert_eq(&f.refused("o/m:Q4_K_M"));
    f.hub.state().redirect_loop = true;
    assert!(f.refused("o/m").contains("redirects without end"));
    let nobody = HubOptions { endpoint: "http://127.0.0.1:1".to_owned(), ..f.hub.options() };
    let error = f.pull_with(&Hub::new(nobody).unwrap(), "o/m").unwrap_err();
    expect!["cannot reach 127.0.0.1:1: Connection refused"].assert_eq(&error.to_string());
}

#[test]
fn files_that_would_escape_are_refused() {
    for path in ["../evil.gguf", "/etc/evil.gguf", "a/../../evil.gguf", "a\\..\\evil.gguf", "a\0.gguf"] {
        let f = Fixture::new();
        f.hub.add("o/m", &[(path, &gguf(1, 10)), ("fine.gguf", &gguf(2, 10))]);
        let message = f.refused("o/m");
        assert!(message.contains("could escape its folder; nothing was downloaded"), "{path}: {message}");
    }
}

#[test]
fn a_file_that_is_no_model_is_not_listed() {
    let f = Fixture::new();
    f.hub.add("o/m", &[("m.gguf", b"<html>")]);
    assert!(f.refused("o/m").contains("does not begin with GGUF"));
    // The downloaded file belongs to nothing now.
    let pruned = f.library().prune(false).unwrap();
    assert_eq!((pruned.files, pruned.bytes), (1, 6));
}

#[test]
fn a_newer_version_replaces_the_older_and_frees_it() {
    let f = Fixture::new();
    f.hub.add("o/m", &[("m.gguf", &gguf(1, 1000))]);
    let old = f.pull("o/m").unwrap();
    f.hub.add("o/m", &[("m.gguf", &gguf(2, 2000))]);
    let new = f.pull("o/m").unwrap();
    assert_eq!(new.created_at, old.created_at);
    assert_eq!(check(&f.root()), [new]);
    assert_eq!(count_files(&f.root().join("blobs")), 1);
    assert_eq!(count_files(&f.root().join("models")), 1);
}

#[test]
fn two_pulls_of_one_model_share_one_download() {
    let f = Fixture::new();
    f.hub.add("o/m", &[("m.gguf", &gguf(1, 400_000))]);
    f.hub.state().delay = 5;
    let (start, waited) = (Barrier::new(3), AtomicBool::new(false));
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                // Each with its own connections and locks, as processes have them.
                let library = f.library();
                start.wait();
                let notice = |progress: Progress<'_>| {
                    waited.fetch_or(matches!(progress, Progress::Waiting { .. }), Ordering::Relaxed);
                };
                let (hub, options) = (f.hub.client(), PullOptions::default());
                library.pull(&hub, &"o/m".parse().unwrap(), &options, &inspect, &notice).unwrap();
            });
        }
    });
    assert_eq!(f.hub.state().sent, 400_000);
    assert!(waited.load(Ordering::Relaxed));
    assert_eq!(check(&f.root()).len(), 1);
}

#[test]
fn a_cancelled_pull_stops_and_is_gone_on_with() {
    let f = Fixture::new();
    f.hub.add("o/m", &[("m.gguf", &gguf(1, 2_000_000))]);
    f.hub.state().delay = 2;
    let cancel = Cancel::default();
    let options = PullOptions { cancel: cancel.clone(), ..PullOptions::default() };
    let stop_at = |progress: Progress<'_>| {
        if let Progress::Bytes { done: 200_000.., .. } = progress {
            cancel.cancel();
        }
    };
    let hub = f.hub.client();
    let error = f.library().pull(&hub, &"o/m".parse().unwrap(), &options, &inspect, &stop_at).unwrap_err();
    assert!(matches!(error, LibraryError::Cancelled), "{error}");
    assert!(check(&f.root()).is_empty());
    f.hub.state().delay = 0;
    f.hub.state().log.clear();
    f.pull("o/m").unwrap();
    assert!(f.hub.log().contains("range:bytes="));
}

#[test]
fn progress_tells_of_every_file_until_it_is_there() {
    let f = Fixture::new();
    let names: Vec<_> = (1..=6).map(|i| format!("m-Q8_0-{i:05}-of-00006.gguf")).collect();
    let contents: Vec<_> = (1..=6).map(|i| gguf(i, 100_000 + i as usize)).collect();
    let files: Vec<_> = names.iter().zip(&contents).map(|(n, c)| (n.as_str(), c.as_slice())).collect();
    f.hub.add("o/m", &files);
    let seen = Mutex::new((Vec::new(), vec![0; 6], 0));
    let record = |progress: Progress<'_>| {
        let mut seen = seen.lock().unwrap();
        match progress {
            Progress::Files(files) => seen.0 = files.iter().map(|file| (file.size, file.digest)).collect(),
            Progress::Bytes { file, done } => seen.1[file] = done,
            Progress::Finished { file } => {
                assert_eq!(seen.1[file], seen.0[file].0);
                seen.2 += 1;
            }
            Progress::Recording => assert_eq!(seen.2, 6),
            _ => {}
        }
    };
    let options = PullOptions { name: Some("mine".parse().unwrap()), ..PullOptions::default() };
    let hub = f.hub.client();
    let model = f.library().pull(&hub, &"o/m".parse().unwrap(), &options, &inspect, &record).unwrap();
    assert_eq!(model.name.short(), "mine");
    let seen = seen.into_inner().unwrap();
    assert_eq!(seen.0, model.files.iter().map(|file| (file.size, Some(file.digest))).collect::<Vec<_>>());
}
