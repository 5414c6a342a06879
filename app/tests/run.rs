//! `paguro run` with a prompt, on the model inside the binary.

use std::{
    io::{BufRead, BufReader, Read},
    process::Stdio,
    thread,
};

use crate::common::{self, STORY, greedy, paguro, run, run_with_input, shared};
use serde_json::json;

#[test]
fn it_tells_a_story() {
    let ran = run(&["run", "--temperature", "0", STORY]);
    let begin = "Once upon a time, there was a shy fox. ";
    assert!(ran.out.starts_with(begin), "{}", ran.out);
    for word in ["fox", "key", "shy", "\n\n"] {
        assert!(ran.out.contains(word), "{word:?} in {}", ran.out);
    }
    assert!(ran.out.len() > 400 && ran.out.ends_with(".\n"), "{}", ran.out);
    assert!(ran.err.starts_with("tales · prompt ") && ran.err.contains(" tok/s · answer "), "{}", ran.err);
    assert!(!ran.err.contains("seed"), "greedy draws nothing: {}", ran.err);
    assert_eq!(ran.code, Some(0));
    // Words after the model are the same prompt, and --quiet is quiet.
    let words: Vec<_> = ["run", "--quiet", "--temperature", "0", "Tales:latest"]
        .into_iter()
        .chain(STORY.split(' '))
        .collect();
    let quiet = run(&words);
    assert_eq!((quiet.out, quiet.err.as_str()), (ran.out, ""));
}

#[test]
fn the_model_can_be_named() {
    let answer = greedy(&["Hello there"])["text"].clone();
    assert_eq!(greedy(&["tales", "Hello there"])["text"], answer);
    assert_eq!(greedy(&["-m", "tales", "Hello there"])["text"], answer);
    // With -m, the first word belongs to the prompt, even if it is a model's name.
    assert_ne!(
        greedy(&["-m", "tales", "tales", "Hello there"])["prompt_tokens"],
        greedy(&["Hello there"])["prompt_tokens"]
    );
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tales/tales-Q8_0.gguf");
    assert_eq!(greedy(&[file, "Hello there"])["text"], answer);
}

/// Flags of llama.cpp and Ollama, and both ways to give a prompt.
#[test]
fn other_programs_flags_are_understood() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), format!("{STORY}\n")).unwrap();
    let plain = greedy(&["--max-tokens", "9", "--ctx", "512", "--device", "cpu", STORY]);
    let path = file.path().to_str().unwrap();
    let ways: [&[&str]; 2] = [
        &["--temp", "0", "-n", "9", "--ctx-size", "512", "-ngl", "0", "-fa", "on", "-f", path],
        &["-m", "tales", "--num-predict=9", "-p", STORY, "--seed", "-1", "--repeat-last-n", "-1", "--mlock"],
    ];
    for way in ways {
        let result = run(&[&["run", "--json", "--top-k", "1"], way].concat()).json();
        assert_eq!((&result["text"], &result["answer_tokens"]), (&plain["text"], &json!(9)), "{way:?}");
    }
}

#[test]
fn a_hugging_face_folder_is_the_same_model() {
    let Some((folder, file)) = shared("model/hf").zip(shared("model/tales-f16.gguf")) else { return };
    let answer = |model: &std::path::Path| greedy(&[model.to_str().unwrap(), STORY])["text"].clone();
    assert_eq!(answer(&folder), answer(&file));
}

#[test]
fn json_is_one_object_with_everything() {
    let result = greedy(&["--max-tokens", "5", STORY]);
    let keys: Vec<_> = result.as_object().unwrap().keys().map(String::as_str).collect();
    let expected = [
        "model",
        "text",
        "finish_reason",
        "answer_tokens",
        "drafted_tokens",
        "accepted_tokens",
        "prompt_tokens",
        "cached_tokens",
        "seed",
        "timings",
    ];
    assert_eq!(keys, expected);
    assert_eq!(result["model"], "Tales 21M");
    assert_eq!(result["finish_reason"], "length");
    assert_eq!(result["answer_tokens"], 5);
    assert!(result["prompt_tokens"].as_u64().unwrap() > 10);
    for timing in
        ["load_ms", "prompt_ms", "prompt_tokens_per_second", "answer_ms", "answer_tokens_per_second"]
    {
        assert!(result["timings"][timing].as_f64().unwrap() > 0.0, "{timing}");
    }
}

#[test]
fn stream_gives_the_same_text_in_pieces() {
    let lines = run(&["run", "--json", "--stream", "--temperature", "0", "Hello there"]).json_lines();
    let (result, pieces) = lines.split_last().unwrap();
    assert!(pieces.len() > 3);
    let text: String = pieces.iter().map(|piece| piece["text"].as_str().unwrap()).collect();
    assert_eq!(result["text"], text);
    assert_eq!(result["event"], "result");
    assert!(pieces.iter().all(|piece| piece["event"] == "text"));
}

#[test]
fn a_seed_gives_the_same_text_and_is_reported() {
    let answer =
        |args: &[&str]| run(&[&["run", "--json", "--max-tokens", "40"], args, &[STORY]].concat()).json();
    let first = answer(&["--temperature", "1.5"]);
    let seed = first["seed"].to_string();
    assert_eq!(answer(&["--temperature", "1.5", "--seed", &seed])["text"], first["text"]);
    let other = (first["seed"].as_u64().unwrap() + 1).to_string();
    let second = answer(&["--temperature", "1.5", "--seed", &other]);
    assert_ne!(second["text"], first["text"]);
    // Branches are the answers of consecutive seeds.
    let both = answer(&["--temperature", "1.5", "--seed", &seed, "--branches", "2"]);
    let texts: Vec<_> =
        both["branches"].as_array().unwrap().iter().map(|branch| branch["text"].clone()).collect();
    assert_eq!(texts, [first["text"].clone(), second["text"].clone()]);
    let plain =
        run(&["run", "--max-tokens", "40", "--temperature", "1.5", "--seed", &seed, "--answers", "2", STORY])
            .ok();
    assert!(plain.starts_with("── 1\n") && plain.contains("\n── 2\n"), "{plain}");
}

#[test]
fn standard_input_is_the_prompt_or_follows_it() {
    let direct = run(&["run", "--temperature", "0", STORY]).ok();
    assert_eq!(run_with_input(&["run", "--temperature", "0"], &format!("{STORY}\n")).ok(), direct);
    let both =
        run_with_input(&["run", "--json", "--temperature", "0", "Tell me a story"], "about a fox\n").json();
    let joined = greedy(&["Tell me a story\n\nabout a fox"]);
    assert_eq!((&both["text"], &both["prompt_tokens"]), (&joined["text"], &joined["prompt_tokens"]));
}

#[test]
fn answers_end_where_they_are_told_to() {
    let whole = greedy(&[STORY]);
    let text = whole["text"].as_str().unwrap();
    let stopped = greedy(&["--stop", "key", "--stop", "never said", STORY]);
    assert_eq!(stopped["text"].as_str().unwrap(), &text[..text.find("key").unwrap()]);
    assert_eq!((&stopped["finish_reason"], &stopped["stop"]), (&json!("stop"), &json!("key")));

    let on_and_on = greedy(&["--ignore-eos", "--max-tokens", "400", "Hello there"]);
    assert_eq!((&on_and_on["finish_reason"], &on_and_on["answer_tokens"]), (&json!("length"), &json!(400)));

    let full = greedy(&["--ignore-eos", "--ctx", "64", "Hello there"]);
    assert_eq!(full["finish_reason"], "context_full");
    let tokens = |result: &serde_json::Value| {
        result["prompt_tokens"].as_u64().unwrap() + result["answer_tokens"].as_u64().unwrap()
    };
    assert_eq!(tokens(&full), 64);
}

#[test]
fn sampling_flags_reach_the_model() {
    let result = greedy(&["--logprobs", "3", "--max-tokens", "4", "Hello there"]);
    let logprobs = result["logprobs"].as_array().unwrap();
    assert_eq!(logprobs.len(), 4);
    for token in logprobs {
        assert_eq!(token["id"], token["top"][0]["id"], "greedy takes the best");
        assert_eq!(token["top"].as_array().unwrap().len(), 3);
        assert!(token["logprob"].as_f64().unwrap() <= 0.0);
    }
    // Forbidden, the best token gives way to the second.
    let (best, second) = (&logprobs[0]["top"][0]["id"], &logprobs[0]["top"][1]["id"]);
    let bias = format!("{best}=-1000");
    let biased = greedy(&["--logprobs", "0", "--max-tokens", "4", "--logit-bias", &bias, "Hello there"]);
    assert_eq!(&biased["logprobs"][0]["id"], second);
    // However hot, the best token is what top-k 1 leaves.
    let one = run(&["run", "--json", "--temperature", "9", "--top-k", "1", "Hello there"]).json();
    assert_eq!(one["text"], greedy(&["Hello there"])["text"]);
    // The continuation repeats "The little girl" after 25 tokens, unless DRY forbids it.
    let dry = |flags: &[&str]| {
        let common = ["--raw", "--ignore-eos", "--max-tokens", "30", "la la la la la la la la la la"];
        greedy(&[flags, &common].concat())["text"].clone()
    };
    let on = ["--dry-multiplier", "50", "--dry-allowed-length", "1"];
    let plain = dry(&[]);
    assert_ne!(dry(&on), plain);
    for off in
        [["--dry-penalty-last-n", "0"], ["--dry-allowed-length", "50"], ["--dry-sequence-breaker", "l"]]
    {
        let flags = [&on[..2], if off[0] == on[2] { &[] } else { &on[2..] }, &off].concat();
        assert_eq!(dry(&flags), plain, "{off:?}");
    }
    // Nothing twice: a penalty that large forbids every token that was there.
    let varied = greedy(&["--presence-penalty", "1000", "--logprobs", "0", "--max-tokens", "30", STORY]);
    let mut ids: Vec<_> =
        varied["logprobs"].as_array().unwrap().iter().map(|t| t["id"].as_u64().unwrap()).collect();
    let count = ids.len();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), count);
}

#[test]
fn raw_continues_the_text_as_it_stands() {
    let raw = greedy(&["--raw", "--max-tokens", "12", "Once upon a time"]);
    let chat = greedy(&["--max-tokens", "12", "Once upon a time"]);
    assert!(raw["prompt_tokens"].as_u64() < chat["prompt_tokens"].as_u64());
    assert!(raw["text"].as_str().unwrap().starts_with([' ', ',']), "{raw}");
    // Special tokens in a raw prompt are recognised: this is the chat template by hand.
    let by_hand =
        greedy(&["--raw", "--max-tokens", "12", "<|user|>\nOnce upon a time<|end|>\n<|assistant|>\n"]);
    assert_eq!((&by_hand["text"], &by_hand["prompt_tokens"]), (&chat["text"], &chat["prompt_tokens"]));
}

#[test]
fn special_tokens_change_what_a_system_message_says() {
    let plain = greedy(&["--max-tokens", "30", "Who are you?"]);
    let named = greedy(&["--system", "Your name is Pip.", "--max-tokens", "30", "Who are you?"]);
    assert!(named["text"].as_str().unwrap().contains("Pip"), "{named}");
    assert!(!plain["text"].as_str().unwrap().contains("Pip"), "{plain}");
}

#[test]
fn threads_pages_and_instruction_sets_change_nothing() {
    let expected = greedy(&["--max-tokens", "48", STORY])["text"].clone();
    assert_eq!(greedy(&["--max-tokens", "48", "--isa", "scalar", STORY])["text"], expected);
    assert_eq!(
        greedy(&["--max-tokens", "48", "--threads", "1", "--page-size", "16", STORY])["text"],
        expected
    );
}

/// Gathering adds in another order, which may decide a tie; nothing else.
#[test]
fn both_ways_of_attention_agree() {
    let tokens = |attention: &str| {
        let result = greedy(&["--max-tokens", "48", "--logprobs", "2", "--attention", attention, STORY]);
        result["logprobs"].as_array().unwrap().clone()
    };
    let logprob = |token: &serde_json::Value| token["logprob"].as_f64().unwrap();
    let mut compared = 0;
    for (paged, gather) in tokens("paged").iter().zip(&tokens("gather")) {
        assert!((logprob(paged) - logprob(gather)).abs() < 0.02, "{paged} {gather}");
        compared += 1;
        if paged["id"] != gather["id"] {
            assert!(logprob(&paged["top"][0]) - logprob(&paged["top"][1]) < 0.02, "no tie: {paged}");
            break;
        }
    }
    assert!(compared > 16);
}

#[test]
fn two_at_once_do_not_disturb_each_other() {
    let expected = run(&["run", "--temperature", "0", STORY]).ok();
    let both: Vec<_> =
        (0..2).map(|_| thread::spawn(|| run(&["run", "--temperature", "0", STORY]).ok())).collect();
    for one in both {
        assert_eq!(one.join().unwrap(), expected);
    }
}

#[test]
fn a_reader_that_goes_away_ends_it_quietly() {
    let mut child = paguro(&["run", "--ignore-eos", STORY]).spawn().unwrap();
    let mut some = [0; 8];
    child.stdout.take().unwrap().read_exact(&mut some).unwrap();
    // The pipe is closed now.
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), String::from_utf8_lossy(&output.stderr).as_ref()), (Some(0), ""));
}

#[cfg(unix)]
#[test]
fn ctrl_c_stops_after_printing_what_there_is() {
    let interrupt = |args: &[&str]| {
        let mut child = paguro(args).stderr(Stdio::piped()).spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut text = String::new();
        out.read_line(&mut text).unwrap();
        let kill =
            std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
        assert!(kill.success());
        out.read_to_string(&mut text).unwrap();
        let output = child.wait_with_output().unwrap();
        (output.status.code(), text, String::from_utf8(output.stderr).unwrap())
    };
    let (code, text, err) = interrupt(&["run", "--ignore-eos", "--temperature", "0", STORY]);
    assert_eq!(code, Some(130), "{err}");
    assert!(text.starts_with("Once upon a time,") && text.ends_with('\n'), "{text}");
    assert!(err.contains("stopped"), "{err}");

    let (code, lines, err) =
        interrupt(&["run", "--json", "--stream", "--ignore-eos", "--temperature", "0", STORY]);
    assert_eq!(code, Some(130), "{err}");
    let last: serde_json::Value = serde_json::from_str(lines.lines().last().unwrap()).unwrap();
    assert_eq!(last["finish_reason"], "cancelled");
}

/// Messages and cache of a session outlive the process.
#[test]
fn a_session_goes_on_where_it_ended() {
    let home = tempfile::tempdir().unwrap();
    let in_home = |args: &[&str]| -> common::Ran {
        paguro(args).env("PAGURO_HOME", home.path()).output().unwrap().into()
    };
    let ask = |session: &str, text: &str| {
        let flags = ["run", "--json", "--temperature", "0", "--max-tokens", "24", "--session", session, text];
        in_home(&flags).json()
    };
    let folder = |name: &str| home.path().join("sessions").join(name);
    let file = |name: &str| folder(name).join("conversation.json");
    let first = ask("garden", &"Tell me a story about a shy fox who lost a key. ".repeat(25));
    assert_eq!(first["cached_tokens"], 0);
    // The same messages without a cache.
    std::fs::create_dir_all(folder("copy")).unwrap();
    std::fs::copy(file("garden"), file("copy")).unwrap();
    let second = ask("garden", "What happened to the key?");
    assert!(second["cached_tokens"].as_u64().unwrap() >= 256, "{second}");
    let computed = ask("copy", "What happened to the key?");
    assert_eq!((&computed["cached_tokens"], &computed["text"]), (&json!(0), &second["text"]));
    let saved: serde_json::Value = serde_json::from_slice(&std::fs::read(file("garden")).unwrap()).unwrap();
    assert_eq!((saved["messages"].as_array().unwrap().len(), &saved["model"]), (4, &json!("tales")));
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = |path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(file("garden")), mode(folder("garden").join("kv"))), (0o600, 0o700));
    }
    let list = in_home(&["sessions", "list", "--json"]).json_lines();
    let names: Vec<_> = list.iter().map(|it| (it["name"].as_str().unwrap(), &it["messages"])).collect();
    assert_eq!(names, [("copy", &json!(4)), ("garden", &json!(4))]);
    assert!(in_home(&["sessions", "ls"]).ok().contains("garden  tales"));
    // Used by another process, which reads its prompt from standard input.
    let mut other = paguro(&["run", "--session", "busy"])
        .env("PAGURO_HOME", home.path())
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let failed = |args: &[&str], error: &str| {
        let ran = in_home(args);
        assert!(ran.code != Some(0) && ran.err.contains(error), "{args:?}: {ran:?}");
    };
    // It has the lock soon after the file with it.
    let lock = folder("busy").join("kv/lock");
    let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !lock.exists() {
        assert!(std::time::Instant::now() < end, "it never begins");
        thread::sleep(std::time::Duration::from_millis(10));
    }
    thread::sleep(std::time::Duration::from_millis(50));
    failed(&["sessions", "rm", "busy"], "the session `busy` is in use by another process");
    failed(&["run", "--session", "busy", "Hi there"], "the session `busy` is in use by another process");
    other.kill().unwrap();
    other.wait().unwrap();
    assert_eq!(in_home(&["sessions", "rm", "garden", "copy"]).ok(), "removed garden\nremoved copy\n");
    assert!(!folder("garden").exists());
    failed(&["sessions", "rm", "garden"], "there is no session `garden`");
    for name in ["../x", ".x", "", "a/b", &"x".repeat(65)] {
        failed(&["run", "--session", name, "Hi there"], "cannot be the name of a session");
    }
    failed(&["run", "--session", "x", "--raw", "Hi there"], "cannot be used with");
}

/// The layers of the model on the CPU and on this machine's first GPU, which may be a software driver.
#[cfg(any(feature = "gpu", target_os = "macos"))]
mod gpu {
    use super::*;
    use crate::common::gpu;

    #[test]
    fn layers_are_divided_between_the_cpu_and_a_gpu() {
        if gpu().is_none() {
            return;
        }
        let short = ["run", "--temperature", "0", "--max-tokens", "8", "--ctx", "256"];
        let plain = run(&[&short[..], &["--device", "cpu", STORY]].concat());
        let ways: [(&[&str], &str); 2] = [
            (&["--device", "gpu:0,cpu", "--gpu-layers", "2"], "2 on gpu:0"),
            (&["--device", "gpu", "-ngl", "1", "-sm", "layer"], "1 on gpu:0"),
        ];
        for (way, place) in ways {
            let divided = run(&[&short[..], way, &[STORY]].concat());
            assert_eq!(divided.out, plain.out, "{}", divided.err);
            assert!(divided.err.contains(place), "{}", divided.err);
        }
        let plan = ["devices", "--plan", "tales", "--device", "gpu,cpu", "--gpu-layers", "2", "--json"];
        let plan = run(&plan).json();
        let stages: Vec<_> = plan["stages"].as_array().unwrap().iter().collect();
        let [first, last] = stages[..] else { panic!("{plan}") };
        assert_eq!((&first["device"], &last["device"]), (&json!("cpu"), &json!("gpu:0")));
        assert_eq!((&first["layers"][0], &first["layers"][1]), (&json!(0), &last["layers"][0]));
        let count = |stage: &serde_json::Value| stage["layers"][1].as_u64().zip(stage["layers"][0].as_u64());
        assert_eq!(count(last).map(|(end, start)| end - start), Some(2));
        let memory = |stage: &serde_json::Value| stage["weights"].as_u64().unwrap();
        assert!(memory(first) > 0 && memory(last) > 0, "{plan}");
        assert!(plan["seconds_per_token"][0]["seconds"].as_f64().is_some_and(|time| time > 0.0), "{plan}");
    }

    /// Memory for a part of the model: the CPU runs the other layers.
    #[test]
    fn layers_beyond_the_memory_of_a_gpu_run_on_the_cpu() {
        if gpu().is_none() {
            return;
        }
        let plan = |memory: &str, device: &str| {
            run(&[
                "devices",
                "--plan",
                "tales",
                "--device",
                device,
                "--memory",
                memory,
                "--ctx",
                "256",
                "--no-trial",
                "--json",
            ])
        };
        let whole = plan("1GB", "gpu,cpu").json();
        assert_eq!(whole["stages"].as_array().map(Vec::len), Some(1), "{whole}");
        assert!(
            whole["seconds_per_token"].is_null() && !whole["least_seconds_per_token"].is_null(),
            "{whole}"
        );
        let needed: u64 = ["weights", "kv", "states", "buffers"]
            .iter()
            .map(|key| whole["stages"][0][key].as_u64().unwrap())
            .sum();
        let less = (needed - 1).to_string();
        let divided = plan(&less, "gpu,cpu").json();
        assert_eq!(divided["stages"][0]["device"], json!("cpu"), "{divided}");
        assert_eq!(divided["stages"][1]["device"], json!("gpu:0"), "{divided}");
        let refused = plan(&less, "gpu");
        assert!(refused.code != Some(0) && refused.err.contains("needs"), "{}", refused.err);
    }
}
