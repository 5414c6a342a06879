//! `paguro devices --test`: the conformance suite on a GPU.

use std::{
    panic::{self, AssertUnwindSafe},
    sync::{
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use paguro_backend::{Backend, KvDtype};
use paguro_backend_conformance::{CASES, Case, Draw, gpu_subject};
use paguro_backend_wgpu::Gpu;
use serde_json::json;

use crate::{
    cli::{DevicesArgs, Numerics},
    failure::{Failure, Outcome},
    output::Output,
    settings::Terminal,
};

/// Maximum number of concurrent cases. Each computes its reference on one core and has buffers on the GPU.
const WORKERS: usize = 16;

/// Interval of progress lines without a terminal.
const TOLD_EVERY: Duration = Duration::from_secs(10);

/// Maximum length of a failure in characters; `--json` prints all of it.
const LONGEST: usize = 200;

/// Cases that run with the same kernels and the same kind of pages.
struct Group {
    name: &'static str,
    gpu: Gpu,
    kv_dtype: KvDtype,
    cases: Vec<&'static Case>,
}

/// Runs the suite and prints failures immediately.
///
/// # Errors
/// The GPU does not open, or cases failed.
pub fn test(
    index: usize,
    open: &dyn Fn(Numerics) -> Outcome<Gpu>,
    args: &DevicesArgs,
    out: &mut Output,
    terminal: Terminal,
) -> Outcome<()> {
    if let Some(name) = args.case.iter().find(|name| CASES.iter().all(|case| case.name != **name)) {
        let names: Vec<_> = CASES.iter().map(|case| case.name).collect();
        return Err(Failure::new(format!("the suite has no case `{name}`"))
            .hint(format!("its cases are {}", names.join(", "))));
    }
    let groups = groups(open)?;
    let draw = if args.all { Draw::All } else { Draw::Seed(0) };
    let is_chosen = |case: &Case| args.case.is_empty() || args.case.iter().any(|name| name == case.name);
    let chosen = groups.iter().flat_map(|group| group.cases.iter().map(move |case| (group, *case)));
    let cases: Vec<_> = chosen.filter(|(_, case)| is_chosen(case)).collect();
    let started = Instant::now();
    let bar = terminal.bar(cases.len(), &format!("testing gpu:{index}"));
    if !args.json && !terminal.progress {
        let which = if args.all { "all variants" } else { "a sample of variants; --all runs all of them" };
        out.line(format_args!("testing gpu:{index}: {} cases, {which}", cases.len()))?;
    }
    let (mut failed, mut done, mut told) = (0, 0, started);
    run(&cases, draw, |at, verdict| {
        let (group, case) = cases[at];
        failed += usize::from(verdict.is_err());
        done += 1;
        bar.inc(1);
        bar.set_message(format!("{}: {}", group.name, case.name));
        if args.json {
            return out.json(&json!({"numerics": group.name, "case": case.name, "problem": verdict.err()}));
        }
        if let Err(problem) = verdict {
            // The line must not be printed into the bar.
            bar.suspend(|| {
                out.line(format_args!("FAILED  {}: {}: {}", group.name, case.name, sentence(&problem)))
            })?;
        }
        if !terminal.progress && told.elapsed() >= TOLD_EVERY && done < cases.len() {
            told = Instant::now();
            let left = started.elapsed().as_secs_f64() / done as f64 * (cases.len() - done) as f64;
            out.line(format_args!("[{done}/{}] {failed} failed, about {left:.0} s left", cases.len()))?;
        }
        Ok(())
    })?;
    bar.finish_and_clear();
    match failed {
        0 if args.json => Ok(()),
        0 => out.line(format_args!(
            "gpu:{index} passed all {} cases in {:.0} s",
            cases.len(),
            started.elapsed().as_secs_f64()
        )),
        _ => Err(Failure::new(format!("{failed} of {} cases failed on gpu:{index}", cases.len())).hint(
            "please report them, with the output of `paguro devices` and of `paguro devices --test --json`",
        )),
    }
}

/// Returns the groups for a GPU. Cases about matmuls run once, with pages in half precision, and again only with matrix
/// units.
fn groups(open: &dyn Fn(Numerics) -> Outcome<Gpu>) -> Outcome<Vec<Group>> {
    let exact = open(Numerics::Exact)?;
    let all = || CASES.iter().collect();
    let of_pages: Vec<_> = CASES.iter().filter(|case| case.depends_on_pages()).collect();
    let mut groups = vec![
        Group { name: "exact", gpu: exact.clone(), kv_dtype: KvDtype::F16, cases: all() },
        Group {
            name: "exact, K and V of eight bits",
            gpu: exact.clone(),
            kv_dtype: KvDtype::Q8,
            cases: of_pages.clone(),
        },
        Group { name: "exact, K and V of four bits", gpu: exact, kv_dtype: KvDtype::Q4, cases: of_pages },
    ];
    let fast = open(Numerics::Fast)?;
    if fast.exact_rows() > 1 {
        groups.push(Group { name: "fast", gpu: fast, kv_dtype: KvDtype::F16, cases: all() });
    }
    Ok(groups)
}

/// Runs cases on several threads, and calls `tell` with the index and the verdict of each case.
fn run(
    cases: &[(&Group, &'static Case)],
    draw: Draw,
    mut tell: impl FnMut(usize, Result<(), String>) -> Outcome<()>,
) -> Outcome<()> {
    let next = AtomicUsize::new(0);
    let (sender, verdicts) = mpsc::channel();
    // A panic is reported as a verdict; its backtrace is not printed.
    let hook = panic::take_hook();
    panic::set_hook(Box::new(|_| ()));
    let told = thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from).min(WORKERS) {
            let (sender, next) = (sender.clone(), &next);
            scope.spawn(move || {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some((group, case)) = cases.get(at) else { break };
                    let run = || {
                        let gpu = group.gpu.clone();
                        let exact_rows = gpu.exact_rows();
                        let backend = move || -> Box<dyn Backend> { Box::new(gpu.clone()) };
                        (case.run)(&gpu_subject(backend, exact_rows, group.kv_dtype, draw))
                    };
                    let verdict = panic::catch_unwind(AssertUnwindSafe(run));
                    let verdict =
                        verdict.unwrap_or_else(|panic| Err(format!("it panicked: {}", text(&*panic))));
                    if sender.send((at, verdict)).is_err() {
                        break;
                    }
                }
            });
        }
        drop(sender);
        // Workers end when the receiver is dropped.
        verdicts.into_iter().try_for_each(|(at, verdict)| tell(at, verdict))
    });
    panic::set_hook(hook);
    told
}

/// Returns the message of a panic.
fn text(panic: &(dyn std::any::Any + Send)) -> &str {
    let owned = panic.downcast_ref::<String>().map(String::as_str);
    owned.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a message")
}

/// Shortens a problem to one line of bounded length.
fn sentence(problem: &str) -> String {
    let line = problem.lines().next().unwrap_or_default();
    match line.char_indices().nth(LONGEST) {
        None => line.to_owned(),
        Some((end, _)) => format!("{}... (all of it with --json)", &line[..end]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_one_bounded_line() {
        assert_eq!(sentence("off by 2\nModelShape { .. }"), "off by 2");
        let long = sentence(&"\u{e4}".repeat(500));
        assert!(long.starts_with(&"\u{e4}".repeat(LONGEST)) && long.chars().count() < 250, "{long}");
    }
}
