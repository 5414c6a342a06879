//! Scripts of events with the scheduler's decisions. A script is a line of settings and lines of events. The setting
//! `row 9` makes each row of a step take nine of the 100 milliseconds of a step. Events:
//!
//! - `A 10 +3` submits request A with ten prompt tokens and at most three generated ones. Options: `x2` (branches),
//!   `prio 5`, `by X` (a tenant), `in 9` (deadline in seconds), `score 4` (first scored position), `mean` or `last`
//!   (embedding), `like B 8` (begins with eight tokens of B's prompt), `lasts 9` (tokens that later prompts share),
//!   `grammar` (one without an end), `ends` (one that ends after some tokens);
//! - `mask A 9` completes the masks of A that are being computed, in nine milliseconds each; with the setting
//!   `held masks`, they are not completed otherwise;
//! - `step`, `step 3`, `run` (to the end, or until all sequences wait for masks), `cancel A`, `fail` (the next step), `clock 9` (advances by nine seconds).
//!
//! Requests are named in alphabetical order. The result has a line for each step: the computed positions of each
//! sequence (`A 0..10`; `A 10` decodes; `A.1` is branch 1), sequences without rows, page copies, planning ahead, and
//! the free and cached pages after the step; then the received events.

use std::{
    fmt::Write,
    sync::LazyLock,
    time::{Duration, Instant},
};

use expect_test::Expect;
use paguro_backend::PageMove;
use paguro_model::Pooling;

use super::{
    fake::{CONSTRAINTS, Fault, VOCAB},
    rig::{Masks, Rig, Setup},
};
use crate::{Event, Request};

/// Time 0 of a script's clock.
static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Plays a script.
pub fn check(settings: &str, script: &str, expected: Expect) {
    let mut rig = Rig::new(&setup(settings)).expect("pages for one token");
    let mut out = String::new();
    for line in script.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let words: Vec<_> = line.split_whitespace().collect();
        match words[..] {
            ["step"] => step(&mut rig, &mut out),
            ["step", times] => (0..number(times)).for_each(|_| step(&mut rig, &mut out)),
            ["run"] => {
                while !rig.is_idle() {
                    step(&mut rig, &mut out);
                    if rig.planned.is_empty() {
                        // All sequences wait for masks.
                        break;
                    }
                }
            }
            ["fail"] => rig.control.then(Fault::Submit),
            ["clock", seconds] => {
                rig.expire(*START + Duration::from_secs(number(seconds) as u64));
                writeln!(out, "clock; {}", pages(&rig)).unwrap();
                news(&rig, &mut out);
            }
            ["mask", name, ms] => {
                rig.finish_masks(id(name), Duration::from_millis(number(ms) as u64));
                writeln!(out, "mask {name}; {}", pages(&rig)).unwrap();
                news(&rig, &mut out);
            }
            ["cancel", name] => {
                rig.cancel(id(name), None);
                writeln!(out, "cancel {name}; {}", pages(&rig)).unwrap();
                news(&rig, &mut out);
            }
            [name, ref rest @ ..] => {
                if let Err(error) = rig.submit(&request(name, rest)) {
                    writeln!(out, "{name} refused: {error}").unwrap();
                }
            }
            [] => unreachable!("empty lines are left out"),
        }
    }
    expected.assert_eq(&out);
}

fn setup(settings: &str) -> Setup {
    let mut setup = Setup::default();
    for setting in settings.split(',').map(str::trim).filter(|setting| !setting.is_empty()) {
        match setting.split_once(' ') {
            Some(("pages", n)) => setup.pages = number(n),
            Some(("block", n)) => setup.block_size = number(n),
            Some(("rows", n)) => setup.rows = number(n),
            Some(("row", ms)) => setup.times[1] = Duration::from_millis(number(ms) as u64),
            Some(("sequences", n)) => setup.sequences = number(n),
            Some(("scores", n)) => setup.scores = number(n),
            Some(("context", n)) => setup.max_context = number(n),
            Some(("wait", n)) => setup.max_wait_steps = number(n) as u64,
            Some(("windows", list)) => setup.windows = list.split('/').map(|n| n.parse().ok()).collect(),
            Some(("water", marks)) => {
                let (low, high) = marks.split_once('-').expect("low-high");
                (setup.low_water, setup.high_water) = (low.parse().unwrap(), high.parse().unwrap());
            }
            _ if setting == "no cache" => setup.cache = false,
            _ if setting == "carries" => setup.carries = true,
            _ if setting == "held masks" => setup.masks = Masks::Held,
            _ if setting == "encoder" => setup.encoder = true,
            Some(("states", n)) => (setup.states, setup.checkpoint_pages) = (true, number(n)),
            Some(("interval", n)) => setup.checkpoint_blocks = number(n),
            _ => panic!("unknown setting {setting}"),
        }
    }
    setup
}

fn request(name: &str, words: &[&str]) -> Request {
    let mut request = Request::new((0..number(words[0])).map(|at| prompt_token(name, at)).collect());
    let mut words = words[1..].iter();
    while let Some(&word) = words.next() {
        let mut value = || *words.next().expect("a value");
        match word {
            "grammar" => request.constraint = Some(CONSTRAINTS[0].clone()),
            "ends" => request.constraint = Some(CONSTRAINTS[1].clone()),
            "mean" => request.embedding = Some(Pooling::Mean),
            "last" => request.embedding = Some(Pooling::Last),
            "prio" => request.priority = value().parse().unwrap(),
            "by" => request.tenant = Some((*value()).into()),
            "in" => request.deadline = Some(*START + Duration::from_secs(number(value()) as u64)),
            "lasts" => request.lasting_tokens = Some(number(value())),
            "score" => request.score_prompt_from = Some(number(value())),
            "like" => {
                let (other, tokens) = (value(), number(value()));
                (0..tokens).for_each(|at| request.prompt[at] = prompt_token(other, at));
            }
            _ => match word.split_at(1) {
                ("+", n) => request.max_tokens = Some(number(n)),
                ("x", n) => request.branches = number(n),
                _ => panic!("unknown word {word}"),
            },
        }
    }
    request
}

fn number(word: &str) -> usize {
    word.parse().unwrap_or_else(|_| panic!("{word} is not a number"))
}

fn id(name: &str) -> u64 {
    u64::from(name.as_bytes()[0] - b'A')
}

fn prompt_token(name: &str, at: usize) -> u32 {
    ((id(name) as usize * 31 + at * 7) % VOCAB) as u32
}

fn name(request: u64, branch: usize) -> String {
    let letter = char::from(b'A' + request as u8);
    if branch == 0 { letter.to_string() } else { format!("{letter}.{branch}") }
}

fn pages(rig: &Rig) -> String {
    let stats = rig.scheduler.stats();
    format!("free {} cached {}", stats.pages_free(), stats.pages_cached)
}

fn step(rig: &mut Rig, out: &mut String) {
    let moves = rig.step().unwrap_or_else(|problem| panic!("{problem}\n{out}"));
    let mut parts = Vec::new();
    for (request, branch, positions) in &rig.planned {
        let name = name(*request, *branch);
        parts.push(match positions.len() {
            1 => format!("{name} {}", positions.start),
            _ => format!("{name} {}..{}", positions.start, positions.end),
        });
    }
    let mut line = format!("run {}", parts.join(", "));
    if !rig.held.is_empty() {
        let names: Vec<_> = rig.held.iter().map(|&(request, branch)| name(request, branch)).collect();
        write!(line, "; hold {}", names.join(" ")).unwrap();
    }
    for page_move in moves {
        match page_move {
            PageMove::Copy { from, to } => write!(line, "; copy {}>{}", from.0, to.0).unwrap(),
            PageMove::SaveState { state, part: 0, to } => {
                write!(line, "; save {}>{}", state.0, to.0).unwrap();
            }
            PageMove::RestoreState { from, part: 0, state } => {
                write!(line, "; restore {}>{}", from.0, state.0).unwrap();
            }
            _ => {}
        }
    }
    if rig.ahead {
        line += "; ahead";
    }
    writeln!(out, "{line}; {}", pages(rig)).unwrap();
    news(rig, out);
}

fn news(rig: &Rig, out: &mut String) {
    for (request, event) in &rig.news {
        match event {
            Event::Started { cached_tokens: 0, .. } | Event::Token { .. } => {}
            Event::Started { cached_tokens, .. } => {
                writeln!(out, "  {}: {cached_tokens} cached", name(*request, 0)).unwrap()
            }
            Event::Prefilled { tokens, .. } => {
                writeln!(out, "  {}: {tokens} prefilled", name(*request, 0)).unwrap();
            }
            Event::PromptScores { from, scores } => {
                writeln!(out, "  {}: {} scores from {from}", name(*request, 0), scores.len()).unwrap();
            }
            Event::Embedding { values } => {
                writeln!(out, "  {}: an embedding of {}", name(*request, 0), values.len()).unwrap();
            }
            Event::Finished { branch, reason, .. } => {
                writeln!(out, "  {}: {reason:?}", name(*request, *branch)).unwrap()
            }
            Event::Failed(error) => writeln!(out, "  {}: {error}", name(*request, 0)).unwrap(),
        }
    }
}
