//! Errors are one clear line and a hint, with the correct exit code: 1 for failures, 2 for a wrong command line.

use std::fs;

use crate::common::{self, paguro, run};
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
            hint: to ask the built-in model: paguro run tales "some/folder Hello"
            exit 2"#]],
    );
    check(
        &["run", "llama3.2"],
        expect![[r#"
        error: there is no model `llama3.2`
        hint: `paguro pull llama3.2:3b` downloads Llama 3.2 3B Instruct (2.0 GB)
        hint: to ask the built-in model: paguro run tales "llama3.2"
        exit 2"#]],
    );
    check(
        &["run", "qwen3:0.6b", "hi"],
        expect![[r#"
        error: there is no model `qwen3:0.6b`
        hint: `paguro pull qwen3:0.6b` downloads Qwen3 0.6B (639.0 MB)
        hint: to ask the built-in model: paguro run tales "qwen3:0.6b hi"
        exit 2"#]],
    );
    check(
        &["run", "Tell", "me", "a", "story"],
        expect![[r#"
        error: there is no model `Tell`
        hint: a model is `tales`, a GGUF file, a Hugging Face folder, or one of the library; `paguro pull` gets more
        hint: `paguro search` lists well-known models, `paguro list` those that are here
        hint: to ask the built-in model: paguro run tales "Tell me a story"
        exit 2"#]],
    );
    check(
        &["run", "hello"],
        expect![[r#"
        error: there is no model `hello`
        hint: a model is `tales`, a GGUF file, a Hugging Face folder, or one of the library; `paguro pull` gets more
        hint: `paguro search` lists well-known models, `paguro list` those that are here
        hint: to ask the built-in model: paguro run tales "hello"
        exit 2"#]],
    );
    check(
        &["run", "tael", "hi"],
        expect![[r#"
        error: there is no model `tael`
        hint: did you mean `tales`?
        hint: to ask the built-in model: paguro run tales "tael hi"
        exit 2"#]],
    );
    check(
        &["run", "hf.co/Qwen/X:Q8_0"],
        expect![[r#"
        error: there is no model `hf.co/Qwen/X:Q8_0`
        hint: to get it from Hugging Face: paguro pull hf:Qwen/X:Q8_0
        hint: to ask the built-in model: paguro run tales "hf.co/Qwen/X:Q8_0"
        exit 2"#]],
    );
    check(
        &["pull", "tales"],
        expect![[r#"
        error: `tales` is the model inside this binary; there is nothing to download
        hint: paguro run tales "Tell me a story"
        exit 2"#]],
    );
    check(
        &["pull", "lama3.2"],
        expect![[r#"
        error: `lama3.2` is neither a short name nor a Hugging Face reference: did you mean llama3.2:1b, llama3.2:3b, llama3.1:8b?
        hint: `paguro search` lists well-known models and those on the hub
        exit 2"#]],
    );
    check(
        &["pull", "llama3.2:70b"],
        expect![[r#"
        error: `llama3.2:70b` is neither a short name nor a Hugging Face reference: there is no size `70b` of `llama3.2` among the short names: 1b, 3b
        hint: `paguro search` lists well-known models and those on the hub
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
            hint: to ask the built-in model: paguro run tales "empty Hello"
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
        &["run", "--ctx", "5", "Hello there"],
        expect![[r#"
            error: the prompt has 9 tokens, but prompt and answer together can have 5
            hint: shorten it, or make the context larger: -c N
            exit 1"#]],
    );
}

#[test]
fn flags_that_cannot_be() {
    check(
        &["run", "--temperature", "-1", "Hello there"],
        expect![[r#"
            error: invalid value '-1' for '--temperature <T>': must be a number, 0 or greater

            For more information, try '--help'.
            exit 2"#]],
    );
    check(
        &["run", "--temperature", "warm", "Hello there"],
        expect![[r#"
        error: invalid value 'warm' for '--temperature <T>': must be a number, 0 or greater

        For more information, try '--help'.
        exit 2"#]],
    );
    check(
        &["run", "--top-p", "0", "Hello there"],
        expect![[r#"
        error: invalid value '0' for '--top-p <P>': must be greater than 0 and at most 1

        For more information, try '--help'.
        exit 2"#]],
    );
    check(
        &["run", "--logit-bias", "5000=3", "Hello there"],
        expect![[r#"
            error: logit_bias must be of tokens in the vocabulary, not token 5000
            exit 2"#]],
    );
    check(
        &["run", "--logit-bias", "x", "Hello there"],
        expect![[r#"
        error: invalid value 'x' for '--logit-bias <ID=V>': must be ID=VALUE, a token id and what to add to its logit

        For more information, try '--help'.
        exit 2"#]],
    );
    // The supported instruction sets depend on the machine.
    let isa = run(&["run", "--isa", "mmx", "Hello there"]);
    assert_eq!(isa.code, Some(2));
    assert!(
        isa.err.starts_with("error: this machine cannot run `mmx`\nhint: it can run ")
            && isa.err.contains("scalar")
    );
    check(
        &["run", "--page-size", "33", "Hello there"],
        expect![[r#"
        error: cpu cannot run pages of 33 tokens; sizes that are multiples of 16 work
        exit 1"#]],
    );
    check(
        &["run", "--max-tokns", "3", "Hello there"],
        expect![[r#"
            error: `--max-tokns` is not an option of `paguro run`
            hint: did you mean `--max-tokens`?
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
fn variables_that_cannot_be_are_named() {
    for (name, value, rule) in [
        ("PAGURO_DEVICE", "bogus", "must be auto, cpu, gpu or gpu:N"),
        ("PAGURO_KV_DTYPE", "q3", "must be one of f16, q8, q4"),
        ("PAGURO_THREADS", "0", "must be at least 1"),
    ] {
        let mut command = paguro(&["run", "-n", "1", "Hello there"]);
        let ran: common::Ran = command.env(name, value).output().unwrap().into();
        let error = format!("error: the environment variable {name} is \"{value}\": {rule}\n");
        assert!(ran.err.starts_with(&error) && ran.code == Some(2), "{}", ran.err);
    }
    // The flag takes precedence over the variable.
    let mut command = paguro(&["run", "-n", "1", "--threads", "x", "Hello there"]);
    let ran: common::Ran = command.env("PAGURO_THREADS", "0").output().unwrap().into();
    assert!(ran.err.starts_with("error: invalid value 'x' for '--threads"), "{}", ran.err);
}

#[test]
fn words_of_other_programs_get_an_answer() {
    check(
        &["stop", "tales", "--url", "http://127.0.0.1:1"],
        expect![[r#"
            error: no server answers at http://127.0.0.1:1: io: Connection refused (os error 111)
            hint: start one with `paguro serve`, or set its address with --url or --port
            exit 1"#]],
    );
    for (word, near) in [("rnu", "run"), ("lst", "list"), ("serv", "serve"), ("imprt", "import")] {
        let ran = run(&[word, "hi"]);
        assert!(ran.err.ends_with(&format!("hint: did you mean `{near}`?\n")), "{}", ran.err);
    }
    check(
        &["frob"],
        expect![[r#"
        error: `frob` is not a command of paguro
        hint: `paguro --help` lists the commands
        exit 2"#]],
    );
    check(
        &["Tell me a story"],
        expect![[r#"
        error: `Tell me a story` is not a command of paguro
        hint: to ask the built-in model: paguro run "Tell me a story"
        exit 2"#]],
    );
    check(
        &["short.gguf"],
        expect![[r#"
        error: `short.gguf` is not a command of paguro
        hint: to run a model: paguro run short.gguf
        exit 2"#]],
    );
    check(
        &["run", "--control-vector", "x", "Hello there"],
        expect![[r#"
        error: Paguro has no `--control-vector`
        hint: control vectors are not supported; `--lora` loads adapters
        exit 2"#]],
    );
    check(
        &["serve", "--temp", "0.2"],
        expect![[r#"
        error: Paguro has no `--temp`
        hint: sampling is set by requests; `paguro preset MODEL --set temperature=0.2` sets the defaults of a model
        exit 2"#]],
    );
    check(
        &["run", "--frob", "Hello there"],
        expect![[r#"
        error: `--frob` is not an option of `paguro run`
        hint: `paguro run --help` lists the options
        exit 2"#]],
    );
    check(
        &["run", "--keep-alive", "5m", "Hello there"],
        expect![[r#"
        error: `--keep-alive` is not an option of `paguro run`
        hint: it is one of `paguro serve`
        exit 2"#]],
    );
    check(
        &["list", "x"],
        expect![[r#"
        error: `paguro list` takes no further argument: `x`
        hint: `paguro list --help` lists the arguments; put a text with spaces into quotes
        exit 2"#]],
    );
    check(
        &["bench", "tales", "-m", "tales"],
        expect![[r#"
            error: the model is given twice: `tales` and `--model tales`
            hint: leave one of them out
            exit 2"#]],
    );
    check(
        &["eval"],
        expect![[r#"
        error: there is no text
        hint: name the model, then the file with the text
        exit 2"#]],
    );
    check(
        &["run", "tales", "-p", "Hello there", "more"],
        expect![[r#"
        error: the prompt is given twice: as words and as a flag
        hint: leave out --prompt or --file, or the words
        exit 2"#]],
    );
    check(
        &["tokenize", "hello", "world"],
        expect![[r#"
        error: there is no model `hello`
        hint: a model is `tales`, a GGUF file, a Hugging Face folder, or one of the library; `paguro pull` gets more
        hint: `paguro search` lists well-known models, `paguro list` those that are here
        hint: the first of several words is the model; put a text into quotes
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
fn layers_are_divided_among_devices_that_exist() {
    check(
        &["run", "--device", "cpu", "--gpu-layers", "2", "tales", "Hello"],
        expect![[r#"
        error: the layers of a model are divided only with a GPU
        hint: --device gpu,cpu divides the layers between the two
        exit 2"#]],
    );
    check(
        &["run", "-sm", "row", "tales", "Hello"],
        expect![[r#"
        error: `-sm row`: tensors are not divided among GPUs
        hint: --device gpu:0,gpu:1 divides the layers; `paguro serve` with --replicas runs the whole model on each GPU
        exit 2"#]],
    );
}

#[test]
fn help_goes_to_standard_output() {
    for command in ["run", "bench", "eval", "tokenize", "inspect", "devices"] {
        let help = run(&[command, "--help"]).ok();
        assert!(help.contains("Usage: paguro"), "{help}");
    }
    assert_eq!(run(&[]).code, Some(2));
    let version = run(&["--version"]).ok();
    assert!(version.starts_with("paguro ") && version.contains("cpu "), "{version}");
    assert_eq!((run(&["version"]).ok(), run(&["-v"]).ok()), (version.clone(), version));
    for shell in ["bash", "zsh", "fish"] {
        let script = run(&["completions", shell]).ok();
        assert!(script.contains("tokenize") && script.contains("top-k"), "{shell}");
    }
    let manual = run(&["man"]).ok();
    assert!(
        manual.starts_with(".ie") && manual.contains("PAGURO SERVE") && manual.contains("penalty"),
        "{manual}"
    );
    let mut command = paguro(&["search", "coder", "--offline"]);
    let searched: common::Ran = command.env("PAGURO_PROT", "1").output().unwrap().into();
    assert_eq!(searched.err, "PAGURO_PROT is set, and nothing reads it; did you mean PAGURO_PORT?\n");
    assert!(searched.ok().contains("qwen2.5-coder:1.5b        1.5B    1.1 GB"));
}
