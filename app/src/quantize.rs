//! `paguro quantize` and `paguro convert`: one model file from another.

use std::{
    fs::File,
    io::{BufWriter, Write},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Instant,
};

use paguro_model::{AdapterFile, ModelFile, gguf::Contents};
use paguro_quantize::{Importance, Job, Mixture, QuantizeError, Report, quantize as write_model};
use serde_json::{Map, json};

use crate::{
    adapters,
    cli::{ConvertArgs, QuantizeArgs, WriteArgs},
    failure::{Failure, Outcome},
    interrupt::Interrupt,
    load,
    models::Source,
    output::Output,
    settings::{LibrarySettings, Terminal},
    units,
};

/// Parts of the bar: progress is counted in thousandths.
const PARTS: u64 = 1000;

/// Runs the command.
///
/// # Errors
/// A model that cannot be read, an output that exists or cannot be written.
pub fn quantize(args: &QuantizeArgs, library: &LibrarySettings, terminal: Terminal) -> Outcome<()> {
    let source = Source::find(Some(&args.model), library)?;
    let importance = args.imatrix.as_deref().map(Importance::read).transpose();
    let importance = importance.map_err(|error| Failure::from_error(&error))?;
    write(&source, Vec::new(), Some(args.format()), importance.as_ref(), &args.out, &args.write, terminal)
}

/// Runs `paguro convert`.
///
/// # Errors
/// As [`quantize`]; a folder of which a GGUF file would lose something.
pub fn convert(args: &ConvertArgs, library: &LibrarySettings, terminal: Terminal) -> Outcome<()> {
    let source = Source::find(Some(&args.model), library)?;
    let loras = args.loras.iter().map(|lora| adapters::place(lora, library)).collect::<Outcome<_>>()?;
    write(&source, loras, None, None, &args.out, &args.write, terminal)
}

/// Writes a model with adapters, in a mixture or in the formats that it has.
fn write(
    source: &Source,
    loras: Vec<(PathBuf, f32)>,
    mixture: Option<Mixture>,
    importance: Option<&Importance>,
    out: &Path,
    args: &WriteArgs,
    terminal: Terminal,
) -> Outcome<()> {
    check_output(out, args.replace)?;
    let file = load::file(source)?;
    let mut contents = file.contents().map_err(|error| Failure::from_error(&error))?;
    for (path, scale) in loras {
        let adapter = AdapterFile::open(&path).map_err(|error| Failure::from_error(&error))?;
        adapter.merge(&mut contents, scale).map_err(|error| Failure::from_error(&error))?;
    }
    for name in file.lost_in_gguf() {
        terminal.note(&format!(
            "note: a GGUF file has no place for `{name}`, so the new file lacks these vectors"
        ));
    }
    let differences =
        file.differences_in_llama_cpp(&contents).map_err(|error| Failure::from_error(&error))?;
    for difference in &differences {
        terminal.note(&format!("note: llama.cpp computes this model otherwise: {difference}"));
    }
    let started = Instant::now();
    let report = run(&contents, mixture, importance, out, args, terminal)?;
    let projector = write_projector(&file, out, args.replace, terminal)?;
    let seconds = started.elapsed().as_secs_f64();
    warn(&report, terminal);
    let bits = report.bytes as f64 * 8.0 / report.elements.max(1) as f64;
    if args.json {
        return Output::new().json(&json!({
            "file": out,
            "projector": projector,
            "format": mixture.map(Mixture::name),
            "tensors": report.tensors,
            "formats": report.formats.iter().map(|(name, count)| (name.clone(), json!(count))).collect::<Map<_, _>>(),
            "source_bytes": report.source_bytes,
            "bytes": report.bytes,
            "bits_per_weight": bits,
            "fallbacks": report.fallbacks.iter().map(|(tensor, format)| {
                json!({"tensor": tensor, "format": format.name()})
            }).collect::<Vec<_>>(),
            "requantized": report.requantized,
            "without_importance": report.unweighted,
            "differences_in_llama_cpp": differences,
            "seconds": seconds,
        }));
    }
    let formats: Vec<_> = report.formats.iter().map(|(format, count)| format!("{count} {format}")).collect();
    terminal.status(&format!(
        "{}: {} of {}, {bits:.2} bits per weight, {seconds:.1} s",
        out.display(),
        units::plural(report.tensors, "tensor"),
        units::bytes(report.bytes),
    ));
    terminal.status(&format!("formats: {}", formats.join(", ")));
    Ok(())
}

/// Writes the vision tower of a folder beside the model, in the formats that it has. Returns its file.
fn write_projector(
    file: &ModelFile,
    out: &Path,
    replace: bool,
    terminal: Terminal,
) -> Outcome<Option<PathBuf>> {
    let contents = match file.projector_contents() {
        Ok(None) => return Ok(None),
        Ok(Some(contents)) => contents,
        Err(error) => {
            terminal.note(&format!("note: the vision tower is not written: {error}"));
            return Ok(None);
        }
    };
    let name = out.file_name().unwrap_or_default().to_string_lossy();
    let path = out.with_file_name(format!("mmproj-{name}"));
    check_output(&path, replace)?;
    let failed = |error: std::io::Error| {
        Failure::from_error(&error).hint(format!("the projector was to be written to `{}`", path.display()))
    };
    let mut written =
        File::create(&path).and_then(|file| contents.write(BufWriter::new(file))).map_err(failed)?;
    written.flush().map_err(failed)?;
    terminal.status(&format!("{}: the vision tower", path.display()));
    Ok(Some(path))
}

/// Checks that a file may be written there.
///
/// # Errors
/// It is a folder, its folder does not exist, or it exists and shall not be replaced.
pub fn check_output(out: &Path, replace: bool) -> Outcome<()> {
    if out.is_dir() {
        return Err(Failure::usage(format!("`{}` is a folder", out.display())).hint("name the file to write"));
    }
    let folder = out.parent().filter(|folder| !folder.as_os_str().is_empty());
    if let Some(folder) = folder.filter(|folder| !folder.is_dir()) {
        return Err(Failure::usage(format!("there is no folder `{}`", folder.display())));
    }
    if out.exists() && !replace {
        return Err(Failure::usage(format!("`{}` exists already", out.display()))
            .hint("choose another name, or add --replace"));
    }
    Ok(())
}

fn run(
    contents: &Contents,
    mixture: Option<Mixture>,
    importance: Option<&Importance>,
    out: &Path,
    args: &WriteArgs,
    terminal: Terminal,
) -> Outcome<Report> {
    let stop = Arc::new(AtomicBool::new(false));
    let interrupt = Interrupt::install()?;
    let flag = stop.clone();
    let _armed = interrupt.on_press(move || flag.store(true, Ordering::Relaxed));
    let available = || thread::available_parallelism().map_or(1, usize::from);
    let threads = args.threads.threads.unwrap_or_else(available);
    let bar = terminal.bar(PARTS as usize, "writing");
    let job = Job { contents, mixture, importance, threads, stop: &stop };
    let result = write_model(job, out, |progress| {
        bar.set_position((progress.done * PARTS).checked_div(progress.total).unwrap_or(0));
        bar.set_message(progress.tensor.to_owned());
    });
    bar.finish_and_clear();
    result.map_err(|error| match error {
        QuantizeError::Interrupted => Failure::interrupted(),
        QuantizeError::NeedsImportance { .. } => Failure::from_error(&error)
            .hint("give one with --imatrix FILE; `paguro imatrix` makes it from a text"),
        error => Failure::from_error(&error),
    })
}

/// Notes about tensors that did not become what one would expect.
fn warn(report: &Report, terminal: Terminal) {
    if report.requantized > 0 {
        let tensors = units::plural(report.requantized, "tensor");
        terminal.note(&format!("warning: {tensors} were quantized before; the errors of both add up"));
    }
    if let Some((tensor, format)) = report.fallbacks.first() {
        let tensors = units::plural(report.fallbacks.len(), "tensor");
        terminal.note(&format!(
            "note: rows of {tensors} are no whole blocks of their format; another was taken (`{tensor}`: {format})"
        ));
    }
    if let Some(tensor) = report.unweighted.first() {
        let tensors = units::plural(report.unweighted.len(), "tensor");
        terminal.note(&format!("note: the importance matrix lacks {tensors}, such as `{tensor}`"));
    }
}
