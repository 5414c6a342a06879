//! Flags and commands of other programs: their translation, or a hint.
//!
//! All are rows of one table. A flag with an equivalent is rewritten before the command line is parsed. A flag without
//! effect is ignored. A flag that would change the answer and is not supported is refused with a hint.

use std::ffi::OsString;

use crate::failure::{Failure, Outcome};

/// Commands to which a flag applies.
#[derive(Clone, Copy, PartialEq, Eq)]
enum On {
    Run,
    Serve,
    /// `run` and `serve`, and `bench` and `eval` for flags about devices and memory.
    Both,
    /// `bench` and `eval`.
    Measure,
}

/// Translation of a flag of another program.
enum Becomes {
    /// A flag of ours with the same value.
    Ours(&'static str),
    /// No flag: it does not change the answer, or sets the default. It has no value.
    Nothing,
    /// No flag; its value is ignored.
    NothingWithValue,
    /// No flag; its value is ignored if it is `on`, `off` or `auto`.
    NothingWithSwitch,
    /// Layers on GPUs: 0 is the CPU, and -1, `all` and `auto` are as many as fit.
    GpuLayers,
    /// Division of a model among GPUs; these values do not divide tensors, and need no flag.
    WholeTensors(&'static [&'static str]),
    /// Number of GPUs that run the whole model.
    DataParallel,
    /// Layers whose experts are in the host's memory.
    ExpertLayers,
    /// The experts of all layers are in the host's memory.
    AllExperts,
    /// Places of tensors: those of all experts may be the CPU.
    Tensors,
    /// Type of the KV cache.
    CacheType,
    /// `json` or a schema.
    Format,
    /// An error with this hint.
    Refused(&'static str),
}

use Becomes::{
    AllExperts, CacheType, DataParallel, ExpertLayers, Format, GpuLayers, Nothing, NothingWithSwitch,
    NothingWithValue, Ours, Refused, Tensors, WholeTensors,
};
use On::{Both, Measure, Run, Serve};

const ADAPTERS: &str = "control vectors are not supported; `--lora` loads adapters";
const PROJECTOR: &str =
    "`paguro pull` downloads a projector with its model; --mmproj FILE names one on the disk";
const SPECULATION: &str = "--speculate auto chooses when and how much to draft; --speculate model:3 drafts three tokens by the model's head or draft model in \
     every step; --speculate off drafts nothing";
const TLS: &str = "`paguro serve` speaks HTTP; put a proxy with TLS in front of it";
const ROPE: &str = "RoPE scaling comes from the model's file";
const MIROSTAT: &str = "Paguro samples with --temperature, --top-k, --top-p and --min-p";
const TEMPLATE: &str = "the chat template comes from the model's file; --raw continues a prompt without it";
const SAMPLERS: &str = "the order of the samplers is fixed, see docs/running.md; each has its own flag";
const DEFAULTS: &str =
    "sampling is set by requests; `paguro preset MODEL --set temperature=0.2` sets the defaults of a model";
const CACHE: &str = "the prefix cache is always on, and bounded by --kv-memory";
const GPUS: &str = "--device gpu:N selects a GPU, and --device gpu:0,gpu:1 divides the layers among several";

/// Flags of llama.cpp, Ollama and vLLM, separated by spaces, and their translations.
const FLAGS: &[(On, &str, Becomes)] = &[
    // Sampling.
    (Run, "--temp", Ours("--temperature")),
    (Run, "--n-predict --predict --num-predict --max-new-tokens", Ours("--max-tokens")),
    (Run, "--repeat-last-n", Ours("--penalty-window")),
    (Run, "--repetition-penalty", Ours("--repeat-penalty")),
    (Run, "-s", Ours("--seed")),
    (Run, "-r --reverse-prompt", Ours("--stop")),
    (Run, "--mirostat --mirostat-lr --mirostat-ent --mirostat-tau --mirostat-eta", Refused(MIROSTAT)),
    (
        Run,
        "--typical --typical-p --tfs --tfs-z --dynatemp-range --dynatemp-exp --adaptive-target",
        Refused(MIROSTAT),
    ),
    (Run, "--samplers --sampling-seq --sampler-seq", Refused(SAMPLERS)),
    (Run, "-l", Ours("--logit-bias")),
    (
        Serve,
        "--temp --temperature --top-k --top-p --min-p --top-n-sigma --xtc-probability --xtc-threshold --typical \
         --repeat-penalty --repeat-last-n --presence-penalty --frequency-penalty --dry-multiplier --dry-base \
         --dry-allowed-length --dry-penalty-last-n --dry-sequence-breaker --mirostat --samplers --seed -n \
         --n-predict --predict",
        Refused(DEFAULTS),
    ),
    // The prompt and the answer.
    (Run, "-sys --system-prompt", Ours("--system")),
    (Run, "-j", Ours("--json-schema")),
    (Run, "-jf --json-schema-file", Ours("--json-schema")),
    (Run, "--grammar-file", Ours("--grammar")),
    (Run, "--format", Format),
    (Run, "-no-cnv --no-conversation", Ours("--raw")),
    (Run, "-cnv --conversation -st --single-turn -i --interactive -if", Nothing),
    (Run, "--interactive-first --simple-io --no-display-prompt -e --escape --no-escape", Nothing),
    (Run, "--prompt-cache --prompt-cache-all --prompt-cache-ro", Refused(CACHE)),
    (Run, "-co --no-perf --nowordwrap --multiline-input -mli", Nothing),
    (Run, "--keepalive --ttl", NothingWithValue),
    (Run, "--insecure -y --yes", Nothing),
    (
        Run,
        "--hidethinking",
        Refused(
            "`run` shows all that the model writes; --think=false lets many models answer without thinking",
        ),
    ),
    (Both, "-mm", Ours("--mmproj")),
    (Both, "--mmproj-url -mmu", Refused(PROJECTOR)),
    // The model.
    (Both, "-hf -hfr --hf-repo", Ours("--model")),
    (
        Both,
        "-mu --model-url -hff --hf-file",
        Refused("`paguro pull` gets models: hf:OWNER/REPOSITORY, or an address on huggingface.co"),
    ),
    (Both, "--lora-scaled", Ours("--lora")),
    (Serve, "--lora-modules", Ours("--lora")),
    (Serve, "--enable-lora --lora-init-without-apply", Nothing),
    (Both, "--control-vector", Refused(ADAPTERS)),
    (Both, "-md --model-draft --spec-draft-model -hfd", Ours("--draft")),
    (
        Both,
        "--draft-n --draft-max --draft-min --draft-n-min --draft-p-min --spec-type \
         --spec-draft-n-max --spec-draft-n-min --spec-draft-p-min",
        Refused(SPECULATION),
    ),
    (Both, "--speculative-config", Refused(SPECULATION)),
    (Both, "--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-ext-factor", Refused(ROPE)),
    (Both, "--chat-template --chat-template-file", Refused(TEMPLATE)),
    (Both, "--jinja --no-jinja", Nothing),
    // Memory and devices.
    (Both, "--ctx-size --num-ctx --n-ctx --max-model-len --context-length", Ours("--ctx")),
    (Both, "-b --batch-size --num-batch", Ours("--batch-tokens")),
    (Both, "-ub --ubatch-size -tb --threads-batch --threads-http", NothingWithValue),
    (Both, "-ngl --n-gpu-layers --num-gpu", GpuLayers),
    (Both, "-dev", Ours("--device")),
    (Both, "-ts --tensor-split", Ours("--split")),
    (Both, "-sm --split-mode", WholeTensors(&["layer", "none"])),
    (Both, "-tp --tensor-parallel-size", WholeTensors(&["1"])),
    (Serve, "-dp --data-parallel-size", DataParallel),
    (Both, "-mg --main-gpu", Refused(GPUS)),
    (Both, "-ot --override-tensor", Tensors),
    (Both, "-ncmoe --n-cpu-moe", ExpertLayers),
    (Both, "-cmoe --cpu-moe", AllExperts),
    (Both, "--pipeline-parallel-size", Refused(GPUS)),
    (Both, "-ctk -ctv --cache-type-k --cache-type-v", CacheType),
    (Both, "-fa --flash-attn", NothingWithSwitch),
    (Both, "--mlock --no-mmap --mmap -nkvo --no-kv-offload --no-warmup --warmup", Nothing),
    (Both, "-cb --cont-batching -nocb --no-cont-batching --no-context-shift --swa-full -kvu", Nothing),
    (Both, "--check-tensors --offline", Nothing),
    (Both, "--keep --prio --poll --cpu-mask -C --cpu-strict", NothingWithValue),
    (Both, "--numa -lv --log-verbosity --verbosity", NothingWithValue),
    (Both, "--log-disable --log-colors --log-prefix --log-timestamps", Nothing),
    // The server.
    (Serve, "-a --served-model-name --identifier", Ours("--alias")),
    // LM Studio's `lms server start`.
    (Serve, "-p", Ours("--port")),
    (
        Serve,
        "--cors",
        Refused("--cors-origin ORIGIN names a page that may use the server, and `*` stands for all"),
    ),
    (Serve, "--ttl", Ours("--keep-alive")),
    (Both, "--gpu", Refused("--device selects the device: cpu, gpu or gpu:N")),
    (Serve, "-np --max-num-seqs", Ours("--parallel")),
    (
        Serve,
        "--api-key-file",
        Refused(
            "`paguro keys add NAME` makes keys that every server here knows; --api-key KEY adds one by hand",
        ),
    ),
    (Serve, "--gpu-memory-utilization", Refused("--memory BYTES limits the memory of all loaded models")),
    (Serve, "-to --timeout", Refused("--request-timeout bounds answers, --read-timeout requests")),
    (Serve, "--ssl-key-file --ssl-cert-file --ssl-keyfile --ssl-certfile", Refused(TLS)),
    (Serve, "--slot-save-path --cache-ram -cram --ctx-checkpoints", Refused(CACHE)),
    (Serve, "--pooling", Refused("pooling of embeddings comes from the model's files")),
    (
        Serve,
        "--reasoning-budget --chat-template-kwargs --no-prefill-assistant",
        Refused("it is a field of requests: reasoning_budget, chat_template_kwargs, continue_final_message"),
    ),
    (Both, "--override-kv", Refused("metadata comes from the model's file; `paguro inspect` shows it")),
    (
        Serve,
        "--embedding --embeddings --rerank --reranking --metrics --slots --props --webui --no-webui",
        Nothing,
    ),
    (Serve, "--enable-auto-tool-choice --no-slots --enable-prefix-caching --trust-remote-code", Nothing),
    (
        Serve,
        "--tool-call-parser --reasoning-parser --reasoning-format --cache-reuse --dtype -sps --slot-prompt-similarity",
        NothingWithValue,
    ),
];

/// Commands of other programs, and their equivalents.
const COMMANDS: &[(&str, &str)] = &[
    (
        "create",
        "`paguro import FILE --name NAME` takes a model file in; a running server makes models with other defaults by /api/create",
    ),
    ("mv rename", "`paguro cp OLD NEW`, then `paguro rm OLD`: the files are shared, nothing is copied"),
    (
        "push signin signout login logout whoami",
        "`paguro pull` only reads from Hugging Face; HF_TOKEN, or what `hf auth login` has stored, opens private models",
    ),
    ("load", "a server loads a model at its first request; `paguro run MODEL` runs one without a server"),
    ("log logs", "the log of `paguro serve` is its standard error; docs/service.md has that of a service"),
    (
        "ollama lms",
        "`paguro list --found` shows the models of Ollama and LM Studio, `paguro import` takes them over",
    ),
    ("launch", "start `paguro serve` and point the program at http://127.0.0.1:11434/v1"),
    ("update upgrade", "`paguro pull NAME` updates a model; update the program as you installed it"),
    ("perplexity ppl", "`paguro eval -m MODEL -f TEXT` measures perplexity"),
    ("server api", "`paguro serve` starts the server"),
    ("models tags", "`paguro list` shows the installed models, `paguro search` those that can be pulled"),
    ("status health", "`paguro ps` lists the models that a running server has loaded"),
    (
        "config settings",
        "`paguro serve --help` lists the settings, which are flags, keys of serve.toml and environment variables",
    ),
];

/// Returns `words`, which begin with the program's name, with the flags of other programs translated.
///
/// # Errors
/// An unsupported flag that would change the answer.
pub fn translate(words: Vec<OsString>) -> Outcome<Vec<OsString>> {
    let mut out = Vec::with_capacity(words.len());
    let mut words = words.into_iter().peekable();
    let mut command: Option<On> = None;
    let mut named = false;
    while let Some(word) = words.next() {
        let Some(text) = word.to_str() else {
            out.push(word);
            continue;
        };
        if text == "--" {
            out.push(word);
            out.extend(words);
            break;
        }
        if !text.starts_with('-') || text == "-" {
            // The first word is the program, and the second one the command, unless global flags precede it.
            if !out.is_empty() && !named {
                named = true;
                command = match text {
                    "run" | "chat" => Some(Run),
                    "serve" | "start" => Some(Serve),
                    "bench" | "eval" => Some(Measure),
                    _ => None,
                };
            }
            out.push(word);
            continue;
        }
        let (flag, given) = match text.split_once('=') {
            Some((flag, value)) => (flag, Some(value.to_owned())),
            None => (text, None),
        };
        let Some(becomes) = command.and_then(|on| find(on, flag)) else {
            out.push(word);
            continue;
        };
        let flag = flag.to_owned();
        // A word that begins with a dash is a value only if it is a number.
        let is_value = |next: &OsString| {
            next.to_str().is_some_and(|text| !text.starts_with('-') || text[1..].parse::<f64>().is_ok())
        };
        let mut value = || given.clone().or_else(|| words.next_if(is_value)?.into_string().ok());
        let needed =
            |value: Option<String>| value.ok_or_else(|| Failure::usage(format!("`{flag}` needs a value")));
        match becomes {
            Ours(ours) => {
                out.push(match &given {
                    Some(value) => format!("{ours}={value}").into(),
                    None => (*ours).into(),
                });
            }
            Nothing => {}
            NothingWithValue => drop(value()),
            NothingWithSwitch => {
                let is_switch = |next: &OsString| {
                    next.to_str().is_some_and(|text| matches!(text, "on" | "off" | "auto" | "0" | "1"))
                };
                drop(words.next_if(is_switch));
            }
            GpuLayers => {
                let layers = needed(value())?;
                match layers.as_str() {
                    "0" => out.push("--device=cpu".into()),
                    "-1" | "all" | "auto" => {}
                    _ => out.push(format!("--gpu-layers={layers}").into()),
                }
            }
            WholeTensors(values) => {
                let mode = needed(value())?;
                if !values.contains(&mode.as_str()) {
                    let failure =
                        Failure::usage(format!("`{flag} {mode}`: tensors are not divided among GPUs"));
                    return Err(failure.hint(
                        "--device gpu:0,gpu:1 divides the layers; `paguro serve` with --replicas runs the whole model on each GPU",
                    ));
                }
            }
            DataParallel => {
                let count = needed(value())?;
                match count.parse::<usize>() {
                    Ok(1) => {}
                    Ok(count @ 2..=256) => {
                        let devices: Vec<_> = (0..count).map(|index| format!("gpu:{index}")).collect();
                        out.push(format!("--device={}", devices.join(",")).into());
                        out.push("--replicas".into());
                    }
                    _ => {
                        let failure = Failure::usage(format!("`{flag} {count}`: must be a number of GPUs"));
                        return Err(failure.hint("--device gpu:0,gpu:1 --replicas runs an engine on each"));
                    }
                }
            }
            AllExperts => out.push("--expert-slots=least".into()),
            ExpertLayers => {
                let layers = needed(value())?;
                if layers.parse::<usize>().is_err() {
                    return Err(Failure::usage(format!("`{flag} {layers}`: must be a number of layers")));
                }
                out.push(format!("--expert-slots=all-{layers}").into());
            }
            Tensors => {
                let places = needed(value())?;
                if !is_of_all_experts(&places) {
                    let failure = Failure::usage(format!(
                        "`{flag} {places}`: single tensors have no place of their own"
                    ));
                    return Err(failure.hint(
                        "`exps=CPU` puts the experts of all layers into the host's memory; --expert-slots N leaves N of each \
                         layer on the GPU",
                    ));
                }
                out.push("--expert-slots=least".into());
            }
            CacheType => {
                let given = needed(value())?;
                let ours = match given.to_lowercase().as_str() {
                    "f16" | "bf16" | "f32" => "--kv-dtype=f16",
                    "q8_0" | "q8" => "--kv-dtype=q8",
                    "q4_0" | "q4" => "--kv-dtype=q4",
                    _ => {
                        let failure =
                            Failure::usage(format!("`{flag} {given}`: the KV cache has no such type"));
                        return Err(failure.hint("--kv-dtype is f16, q8 or q4, for K and V together"));
                    }
                };
                // K and V have separate flags.
                if !out.iter().any(|word| word == ours) {
                    out.push(ours.into());
                }
            }
            Format => {
                let format = needed(value())?;
                let schema = if format == "json" { "{\"type\": \"object\"}".to_owned() } else { format };
                out.push(format!("--json-schema={schema}").into());
            }
            Refused(hint) => return Err(Failure::usage(format!("Paguro has no `{flag}`")).hint(hint)),
        }
    }
    Ok(out)
}

/// Returns true if patterns of llama.cpp name the experts of all layers, and their place is the CPU.
fn is_of_all_experts(places: &str) -> bool {
    places.split(',').all(|place| {
        let Some((pattern, "CPU")) = place.rsplit_once('=') else { return false };
        // Numbers, or sets of them, name layers.
        pattern.contains("exps") && !pattern.contains(|c: char| c.is_ascii_digit() || c == '[')
    })
}

fn find(command: On, flag: &str) -> Option<&'static Becomes> {
    let row = |(on, flags, becomes): &&(On, &str, Becomes)| {
        let belongs = match command {
            Measure => {
                *on == Both
                    && matches!(
                        becomes,
                        Nothing
                            | NothingWithSwitch
                            | GpuLayers
                            | WholeTensors(_)
                            | CacheType
                            | AllExperts
                            | ExpertLayers
                            | Tensors
                    )
            }
            _ => *on == Both || *on == command,
        };
        belongs && has(flags, flag)
    };
    FLAGS.iter().find(row).map(|(.., becomes)| becomes)
}

/// Returns our name of the sampling value that other programs call `name`, without dashes.
pub fn sampling_name(name: &str) -> Option<&'static str> {
    match find(Run, &format!("--{name}"))? {
        Ours(ours) => Some(ours.trim_start_matches('-')),
        _ => None,
    }
}

/// Returns true if a list of names has this one.
fn has(names: &str, name: &str) -> bool {
    names.split(' ').any(|known| known == name)
}

/// Returns the equivalent of a command of other programs.
pub fn command(name: &str) -> Option<&'static str> {
    COMMANDS.iter().find(|(names, _)| has(names, name)).map(|(_, hint)| *hint)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use clap::CommandFactory;

    use super::*;
    use crate::cli::Cli;

    fn words(line: &str) -> Vec<OsString> {
        line.split_whitespace().map(Into::into).collect()
    }

    #[test]
    fn flags_become_ours() {
        let table = [
            ("paguro run --temp 0.5 hi", "paguro run --temperature 0.5 hi"),
            ("paguro run --temp=0.5 hi", "paguro run --temperature=0.5 hi"),
            ("paguro -q run -ngl 0 hi", "paguro -q run --device=cpu hi"),
            ("paguro run -ngl 99 hi", "paguro run --gpu-layers=99 hi"),
            ("paguro run -ts 3,1 -sm layer hi", "paguro run --split 3,1 hi"),
            ("paguro serve -tp 1 --data-parallel-size 2", "paguro serve --device=gpu:0,gpu:1 --replicas"),
            ("paguro run -ngl -1 hi", "paguro run hi"),
            ("paguro run -fa on hi", "paguro run hi"),
            ("paguro run -fa hi", "paguro run hi"),
            ("paguro run -ctk q8_0 -ctv q8_0 hi", "paguro run --kv-dtype=q8 hi"),
            ("paguro run -ctk q4_0 hi", "paguro run --kv-dtype=q4 hi"),
            ("paguro run --format json hi", "paguro run --json-schema={\"type\": \"object\"} hi"),
            ("paguro run -no-cnv hi", "paguro run --raw hi"),
            ("paguro run --mlock -tb 4 hi", "paguro run hi"),
            ("paguro serve -np 4 -a x", "paguro serve --parallel 4 --alias x"),
            ("paguro serve -p 1234 --context-length 4096", "paguro serve --port 1234 --ctx 4096"),
            ("paguro run --insecure --ttl 300 hi", "paguro run hi"),
            ("paguro serve -hf a/b:Q8_0", "paguro serve --model a/b:Q8_0"),
            ("paguro run -md x hi", "paguro run --draft x hi"),
            ("paguro run -ncmoe 36 hi", "paguro run --expert-slots=all-36 hi"),
            ("paguro bench --n-cpu-moe=36 -p 5", "paguro bench --expert-slots=all-36 -p 5"),
            ("paguro serve -cmoe x", "paguro serve --expert-slots=least x"),
            ("paguro run -ot exps=CPU hi", "paguro run --expert-slots=least hi"),
            (r"paguro run -ot \.ffn_.*_exps\.=CPU hi", "paguro run --expert-slots=least hi"),
            ("paguro bench -ngl 0 -p 5 -b 1,8", "paguro bench --device=cpu -p 5 -b 1,8"),
            // Other commands have their own flags, and words after `--` are not flags.
            ("paguro rm -f x", "paguro rm -f x"),
            ("paguro run -- --temp", "paguro run -- --temp"),
        ];
        for (given, expected) in table {
            let translated = translate(words(given)).unwrap();
            let joined: Vec<_> = translated.iter().map(|word| word.to_str().unwrap()).collect();
            assert_eq!(joined.join(" "), expected, "{given}");
        }
        assert!(translate(words("paguro serve --temp 0.2")).is_err());
        for refused in [
            "--control-vector x",
            r"-ot blk\.[0-9]\.ffn_.*_exps=CPU",
            "-ot exps=CUDA1",
            "-ncmoe all",
            "--spec-type draft-eagle3",
            "--gpu max",
            "-ctk iq4_nl",
            "--mirostat 2",
            "-ngl",
            "-sm row",
            "-sm tensor",
            "--tensor-parallel-size 2",
            "--rope-scaling=yarn",
        ] {
            assert!(translate(words(&format!("paguro run {refused}"))).is_err(), "{refused}");
        }
    }

    #[test]
    fn no_flag_of_ours_is_taken_and_all_that_become_ours_exist() {
        let cli = Cli::command();
        let flags = |command: &str| {
            let command = cli.find_subcommand(command).unwrap();
            let arguments = command.get_arguments();
            arguments
                .flat_map(|a| {
                    let short = a.get_short().map(|short| format!("-{short}"));
                    short.into_iter().chain(a.get_long().map(|long| format!("--{long}")))
                })
                .collect::<HashSet<_>>()
        };
        let commands = [(Run, flags("run")), (Serve, flags("serve"))];
        for (on, foreign, becomes) in FLAGS {
            for (_, ours) in commands.iter().filter(|(command, _)| *on == Both || on == command) {
                for flag in foreign.split(' ') {
                    assert!(!ours.contains(flag), "{flag} is ours");
                }
                if let Ours(flag) = becomes {
                    assert!(ours.contains(*flag), "there is no {flag}");
                }
            }
        }
        for (names, _) in COMMANDS {
            for name in names.split(' ') {
                assert!(cli.find_subcommand(name).is_none(), "`{name}` is a command of ours");
            }
        }
    }
}
