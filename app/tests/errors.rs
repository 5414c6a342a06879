//! What goes wrong is one clear line and a hint, with the right exit code: 1 failed, 2 wrong command line.

mod common;

use std::fs;

use common::{paguro, run};
use expect_test::{Expect, expect};

/// Runs in a folder with something of everything.
fn check(args: &[&str], expected: Expect) {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| fs::write(folder.path().join(name), bytes).unwrap();
    write("notes.txt", b"Just some text, long enough to be read.");
    write("short.gguf", b"GGUF\x03\0\0\0");
    write("latin1.txt", b"caf\xe9");
    fs::create_dir(folder.path().join("empty")).unwrap();
    fs::create_dir(folder.path().join("broken")).unwrap();
    write("broken/config.json", b"{}");
    let ran: common::Ran = paguro(args).current_dir(folder.path()).output().unwrap().into();
    assert_eq!(ran.out, "", "errors go to standard error");
    expected.assert_eq(&format!("{}exit {}", ran.err, ran.code.unwrap()));
}

#[test]
fn models_that_are_not_there() {
    check(
        &["run", "missing.gguf", "Hello"],
        expect![[r#"
        error: there is no model `missing.gguf`
        hint: give a GGUF file, a Hugging Face folder, or `tales`, the model inside this binary
        exit 2"#]],
    );
    check(
        &["run", "./missing"],
        expect![[r#"
        error: there is no model `./missing`
        hint: give a GGUF file, a Hugging Face folder, or `tales`, the model inside this binary
        exit 2"#]],
    );
    check(
        &["run", "some/folder", "Hello"],
        expect![[r#"
        error: there is no model `some/folder`
        hint: to get it from Hugging Face: paguro pull hf:some/folder
        exit 2"#]],
    );
    check(
        &["run", "-m", "tale", "Hello"],
        expect![[r#"
        error: there is no model `tale`
        hint: did you mean `tales`?
        exit 2"#]],
    );
    check(
        &["inspect", "shor.gguf"],
        expect![[r#"
        error: there is no model `shor.gguf`
        hint: did you mean `short.gguf`?
        exit 2"#]],
    );
    check(
        &["run", "empty", "Hello"],
        expect![[r#"
        error: `empty` is a folder without a model: it has no config.json
        hint: to use it as the prompt, write: paguro run tales "empty"
        exit 2"#]],
    );
    check(
        &["bench", "-m", "."],
        expect![[r#"
        error: `.` is a folder without a model: it has no config.json
        hint: models in it: `broken`, `short.gguf`
        exit 2"#]],
    );
}

#[test]
fn files_that_are_no_models() {
    check(
        &["run", "notes.txt", "Hello"],
        expect![[r#"
            error: `notes.txt`: not a GGUF file: it begins with "Just som"
            hint: a model is a GGUF file or a Hugging Face folder
            exit 1"#]],
    );
    check(
        &["run", "short.gguf", "Hello"],
        expect![[r#"
        error: `short.gguf`: truncated or corrupt GGUF file: the list of tensors at byte 8 needs 8 bytes, but only 0 are left; is the download complete?
        exit 1"#]],
    );
    check(
        &["inspect", "broken"],
        expect![[r#"
        error: no model at `broken`: the folder has neither model.safetensors nor model.safetensors.index.json
        hint: a model is a GGUF file or a Hugging Face folder
        exit 1"#]],
    );
}

#[test]
fn prompts_that_cannot_be() {
    check(
        &["run"],
        expect![[r#"
        error: there is no prompt: none was given, and standard input is empty
        hint: give the prompt as an argument, or run on a terminal to chat
        exit 2"#]],
    );
    check(
        &["run", " "],
        expect![[r#"
        error: the prompt is empty
        hint: paguro run tales "Tell me a story"
        exit 2"#]],
    );
    check(
        &["run", "--ctx", "5", "Hello"],
        expect![[r#"
        error: the prompt has 8 tokens, but prompt and answer together can have 5; shorten it or give the engine a larger context and more pages
        hint: -c N makes the context larger
        exit 1"#]],
    );
}

#[test]
fn flags_that_cannot_be() {
    check(
        &["run", "--temperature", "-1", "Hello"],
        expect![[r#"
            error: invalid value '-1' for '--temperature <T>': must be a number, 0 or greater

            For more information, try '--help'.
            exit 2"#]],
    );
    check(
        &["run", "--temperature", "warm", "Hello"],
        expect![[r#"
        error: invalid value 'warm' for '--temperature <T>': must be a number, 0 or greater

        For more information, try '--help'.
        exit 2"#]],
    );
    check(
        &["run", "--top-p", "0", "Hello"],
        expect![[r#"
        error: invalid value '0' for '--top-p <P>': must be greater than 0 and at most 1

        For more information, try '--help'.
        exit 2"#]],
    );
    check(
        &["run", "--logit-bias", "5000=3", "Hello"],
        expect![[r#"
            error: logit_bias must be of tokens in the vocabulary, not token 5000
            exit 2"#]],
    );
    check(
        &["run", "--logit-bias", "x", "Hello"],
        expect![[r#"
        error: invalid value 'x' for '--logit-bias <ID=V>': must be ID=VALUE, a token id and what to add to its logit

        For more information, try '--help'.
        exit 2"#]],
    );
    // What it can run depends on the machine.
    let isa = run(&["run", "--isa", "mmx", "Hello"]);
    assert_eq!(isa.code, Some(2));
    assert!(
        isa.err.starts_with("error: this machine cannot run `mmx`\nhint: it can run ")
            && isa.err.contains("scalar")
    );
    check(
        &["run", "--page-size", "33", "Hello"],
        expect![[r#"
        error: cpu cannot run pages of 33 tokens; sizes that are multiples of 16 work
        exit 1"#]],
    );
    check(
        &["run", "--max-tokns", "3", "Hello"],
        expect![[r#"
        error: unexpected argument '--max-tokns' found

          tip: a similar argument exists: '--max-tokens'

        Usage: paguro run --max-tokens <N> [MODEL | PROMPT]...

        For more information, try '--help'.
        exit 2"#]],
    );
    check(
        &["bench", "-p", "0", "-n", "0"],
        expect![[r#"
        error: there is nothing to measure: -p and -n are both 0
        exit 2"#]],
    );
    check(
        &["bench", "-d", "1,x"],
        expect![[r#"
            error: invalid value 'x' for '--depth <TOKENS,...>': must be a whole number

            For more information, try '--help'.
            exit 2"#]],
    );
}

#[test]
fn texts_that_cannot_be_evaluated() {
    check(
        &["eval", "-f", "missing.txt"],
        expect![[r#"
        error: cannot read `missing.txt`: No such file or directory (os error 2)
        exit 1"#]],
    );
    check(
        &["eval", "-f", "notes.txt"],
        expect![[r#"
        error: the text has 12 tokens, but windows of 512 need at least 1024
        hint: take a longer text, or a smaller context with -c
        exit 1"#]],
    );
    check(
        &["eval", "-f", "latin1.txt"],
        expect![[r#"
        error: `latin1.txt` is not UTF-8 text (at byte 3)
        exit 1"#]],
    );
}

#[test]
fn help_goes_to_standard_output() {
    for command in ["run", "bench", "eval", "tokenize", "inspect", "devices"] {
        let help = run(&[command, "--help"]).ok();
        assert!(help.contains("Usage: paguro"), "{help}");
    }
    assert_eq!(run(&[]).code, Some(2));
    assert!(run(&["--version"]).ok().starts_with("paguro "));
}
