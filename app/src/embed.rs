//! `paguro embed`: vectors of texts.

use std::{
    cmp::Reverse,
    fs::{self, File},
    io::{self, BufWriter, Read, Seek, SeekFrom, StdoutLock, Write, stdin, stdout},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use paguro_engine::{Batch, EngineOptions, Request, normalize};
use paguro_model::{
    Model, Pooling, map_texts,
    tokenizer::{Cut, SpecialTokens},
};
use serde_json::{Map, Value, json};

use crate::{
    bench::kernel_table,
    cli::{CutAt, EmbedArgs, RunOnArgs},
    devices::Devices,
    failure::{Failure, Outcome},
    load::{self, Loaded},
    models::Source,
    output::Output,
    settings::{LibrarySettings, Terminal},
    units,
};

/// Texts whose vectors are held at the same time. Those of a part are written before the next part is computed.
const PART: usize = 1024;

/// Tokens of these texts, at most, if each has a vector: 128 MiB of bge-m3's.
const PART_TOKENS: usize = 1 << 15;

/// Logits of the rows embedded in one step may take this much memory.
const LOGIT_BYTES: usize = 64 << 20;

/// Runs the command.
///
/// # Errors
/// A text that cannot be read or is too long, by file and line; a model without embeddings.
pub fn embed(
    args: &EmbedArgs,
    library: &LibrarySettings,
    devices: &Devices,
    terminal: Terminal,
) -> Outcome<()> {
    let source = Source::find(Some(&args.model), library)?;
    let texts = read(&args.texts.files, args.texts.whole_files, terminal)?;
    let model = load::model(&source, None)?;
    let pooling = model.pooling.clone().map_err(|error| Failure::from_error(&error))?;
    let width = model.head.width(model.program.hidden);
    let dimensions = args.dimensions.unwrap_or(width);
    if dimensions > width {
        return Err(Failure::usage(format!(
            "--dimensions is {dimensions}, but the model's vectors have {width} values"
        )));
    }
    check_kinds(args, &model, &source)?;
    let before = prompt(&model, args.prompt_name.as_deref())?;
    let bytes = texts.iter().map(|text| text.text.len()).sum();
    let read = |text: &Text| tokens(&model, &before, text, args.texts.truncate);
    let prompts = map_texts(texts.iter().collect(), bytes, || true, read)?;
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(1);
    let tokens: usize = prompts.iter().map(Vec::len).sum();

    let options = EngineOptions {
        max_scores: (LOGIT_BYTES / (4 * model.program.vocab)).clamp(16, 512),
        prefix_cache: false,
        ..EngineOptions::default()
    };
    let on = RunOnArgs { timed: args.kernels, ..args.texts.on.clone() };
    let loaded = start(&model, longest, options, args.texts.threads.threads, (devices, &on), terminal)?;
    let started = Instant::now();
    let mut writer = Writer::new(args.output.as_deref(), dimensions)?;
    let failed = |error: io::Error| match &args.output {
        Some(path) => unwritten(path, &error),
        None => error.into(),
    };
    let bar = terminal.bar(texts.len(), "embedding");
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    let has_rows = args.sparse || args.multi_vector;
    let template = Request {
        embedding: Some(if has_rows { Pooling::All } else { pooling }),
        max_tokens: Some(0),
        ..Request::default()
    };
    let (mut prompts, mut texts) = (prompts.into_iter().peekable(), texts.iter());
    let count = texts.len();
    loop {
        let (mut part, mut left) = (Vec::new(), if args.multi_vector { PART_TOKENS } else { usize::MAX });
        while part.len() < PART
            && let Some(prompt) = prompts.next_if(|prompt: &Vec<u32>| part.is_empty() || prompt.len() <= left)
        {
            left = left.saturating_sub(prompt.len());
            part.push(prompt);
        }
        if part.is_empty() {
            break;
        }
        let mut vectors: Vec<Vectors> = part.iter().map(|_| Vectors::default()).collect();
        let mut batch = Batch::new(loaded.handle.clone(), template.clone(), part.clone());
        let names = texts.clone();
        while let Some(outcome) = runtime.block_on(batch.next()) {
            let embedded = outcome.map_err(|(index, error)| {
                let place = names.clone().nth(index).map(Text::place).unwrap_or_default();
                Failure::new(format!("{place}: {error}"))
            })?;
            let rows = embedded.values;
            let tokens = &part[embedded.index];
            let mut of_text = Vectors::default();
            if let Some(head) = model.head.sparse.as_ref().filter(|_| args.sparse) {
                of_text.sparse = Some(head.weights(tokens, &rows));
            }
            if let Some(head) = model.head.multi_vector.as_ref().filter(|_| args.multi_vector) {
                of_text.multi = Some(head.vectors(&rows));
            }
            let pooled = if has_rows { pooling.pool(&rows, model.program.hidden) } else { rows };
            of_text.dense = model.head.embedding(pooled);
            of_text.dense.truncate(dimensions);
            if !args.no_normalize {
                normalize(&mut of_text.dense);
                of_text.multi.iter_mut().flatten().for_each(|vector| normalize(vector));
            }
            vectors[embedded.index] = of_text;
            bar.inc(1);
        }
        for ((vectors, prompt), text) in vectors.iter().zip(&part).zip(texts.by_ref()) {
            writer.write(text, prompt.len(), vectors).map_err(&failed)?;
        }
    }
    bar.finish_and_clear();
    writer.finish().map_err(&failed)?;
    let seconds = started.elapsed().as_secs_f64();
    terminal.status(&format!(
        "{}, {tokens} tokens, {} tok/s",
        units::plural(count, "text"),
        units::rate(tokens as f64 / seconds)
    ));
    if args.kernels {
        let counts = loaded.handle.kernel_counts();
        let mut kernels = counts.map_err(|error| Failure::from_error(&error))?;
        kernels.sort_by_key(|kernel| Reverse(kernel.nanoseconds));
        kernel_table(&mut Output::new(), &kernels, terminal)?;
    }
    Ok(())
}

/// Starts an engine for texts of up to `longest` tokens, with `options` for the rest. Nothing is generated, so nothing is drafted.
///
/// # Errors
/// As [`load::start`].
pub fn start(
    model: &Arc<Model>,
    longest: usize,
    options: EngineOptions,
    threads: Option<usize>,
    on: (&Devices, &RunOnArgs),
    terminal: Terminal,
) -> Outcome<Loaded> {
    let options = EngineOptions {
        pages: load::pages_of_texts(model, longest),
        max_context: Some(longest),
        speculate: false,
        // Nobody waits for the end of a step.
        step_time: Duration::MAX,
        ..options
    };
    load::start(model.clone(), options, false, threads, on, terminal)
}

/// Vectors of one text.
#[derive(Default)]
struct Vectors {
    dense: Vec<f32>,
    /// Weights of its tokens.
    sparse: Option<Vec<(u32, f32)>>,
    /// Vectors of its tokens.
    multi: Option<Vec<Vec<f32>>>,
}

/// Refuses vectors that the model does not compute, or the output does not hold.
fn check_kinds(args: &EmbedArgs, model: &Model, source: &Source) -> Outcome<()> {
    let has = [
        (args.sparse, "--sparse", model.head.sparse.is_some(), "sparse_linear.pt"),
        (args.multi_vector, "--multi-vector", model.head.multi_vector.is_some(), "colbert_linear.pt"),
    ];
    for (is_asked, flag, exists, file) in has {
        if is_asked && !exists {
            let message = format!("{flag}: the model `{}` has no such vectors", source.short_name());
            return Err(Failure::usage(message)
                .hint(format!("name a folder like that of bge-m3, which has `{file}` beside its weights")));
        }
        if is_asked && args.output.as_deref().is_some_and(is_matrix) {
            return Err(Failure::usage(format!("{flag}: a NumPy array has no place for these vectors"))
                .hint("write JSON lines: --output FILE.jsonl"));
        }
    }
    Ok(())
}

/// True for the name of a NumPy array.
fn is_matrix(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("npy"))
}

/// A text with its place.
#[derive(Debug)]
pub struct Text {
    /// Its file; `None` for standard input.
    pub file: Option<PathBuf>,
    /// Its line, counted from 1; `None` for whole files.
    pub line: Option<usize>,
    /// The text.
    pub text: String,
}

impl Text {
    /// `notes.txt:3`, for messages.
    pub fn place(&self) -> String {
        let file = self.file.as_ref().map_or("standard input".into(), |file| file.display().to_string());
        self.line.map_or_else(|| file.clone(), |line| format!("{file}:{line}"))
    }
}

/// Reads all texts: lines, or whole files. Without files, those of standard input. Blank lines are left out, and counted
/// in a status line.
///
/// # Errors
/// A file that cannot be read, is not UTF-8, or is a text as a whole and blank.
pub fn read(files: &[PathBuf], whole: bool, terminal: Terminal) -> Outcome<Vec<Text>> {
    let standard = [PathBuf::from("-")];
    let files = if files.is_empty() { &standard } else { files };
    let (mut texts, mut blank) = (Vec::new(), 0);
    for path in files {
        let file = (path.as_os_str() != "-").then(|| path.clone());
        let mut bytes = Vec::new();
        match &file {
            None => drop(stdin().lock().read_to_end(&mut bytes)?),
            Some(path) => {
                bytes = fs::read(path)
                    .map_err(|error| Failure::new(format!("cannot read `{}`: {error}", path.display())))?;
            }
        }
        let mut push = |line: Option<usize>, bytes: &[u8]| {
            let text = Text { file: file.clone(), line, text: String::from_utf8_lossy(bytes).into_owned() };
            if std::str::from_utf8(bytes).is_err() {
                return Err(Failure::new(format!("{} is not UTF-8 text", text.place()))
                    .hint("convert it first: iconv -t UTF-8"));
            }
            match (text.text.trim().is_empty(), whole) {
                (true, true) => return Err(Failure::new(format!("{} is empty", text.place()))),
                (true, false) => blank += 1,
                (false, _) => texts.push(text),
            }
            Ok(())
        };
        if whole {
            push(None, &bytes)?;
            continue;
        }
        let lines = bytes.strip_suffix(b"\n").unwrap_or(&bytes);
        if bytes.is_empty() {
            continue;
        }
        for (index, line) in lines.split(|&byte| byte == b'\n').enumerate() {
            push(Some(index + 1), line.strip_suffix(b"\r").unwrap_or(line))?;
        }
    }
    if texts.is_empty() {
        let lines = units::plural(blank, "blank line");
        return Err(Failure::new(match blank {
            0 => "there are no texts".to_owned(),
            _ => format!("there are no texts, only {lines}"),
        }));
    }
    if blank > 0 {
        terminal.status(&format!("{} left out", units::plural(blank, "blank line")));
    }
    Ok(texts)
}

/// The text of the prompt that was chosen.
fn prompt(model: &Model, name: Option<&str>) -> Outcome<String> {
    let Some(name) = name else { return Ok(String::new()) };
    model.prompts.get(name).map(str::to_owned).ok_or_else(|| {
        let known = match model.prompts.named.is_empty() {
            true => "the files of this model define no prompts".to_owned(),
            false => format!("this model has {}", model.prompts.names()),
        };
        Failure::usage(format!("there is no prompt `{name}`: {known}"))
    })
}

/// The tokens of a text.
fn tokens(model: &Model, before: &str, text: &Text, cut: Option<CutAt>) -> Outcome<Vec<u32>> {
    let most = model.context_length;
    let whole = format!("{before}{}", text.text);
    let (tokenizer, special) = (&model.tokenizer, SpecialTokens::Parse);
    let ids = match cut {
        Some(CutAt::End) => tokenizer.encode_within(&whole, special, most, Cut::End),
        Some(CutAt::Start) => tokenizer.encode_within(&whole, special, most, Cut::Start),
        None => tokenizer.encode_prompt(&whole, special),
    };
    if ids.len() > most {
        let (place, count) = (text.place(), ids.len());
        return Err(Failure::new(format!("{place} has {count} tokens, but the model reads at most {most}"))
            .hint("--truncate cuts texts that are too long"));
    }
    if ids.is_empty() {
        return Err(Failure::new(format!("{} has no tokens, so it has no embedding", text.place())));
    }
    Ok(ids)
}

/// Where vectors go.
enum Writer {
    Lines(StdoutLock<'static>),
    LinesTo(BufWriter<File>),
    /// A matrix, whose header gets the number of rows at the end.
    Matrix {
        file: BufWriter<File>,
        rows: usize,
        columns: usize,
    },
}

/// Bytes of the header of an `.npy` file; fixed, so that it can be written twice.
const HEADER: usize = 128;

impl Writer {
    fn new(output: Option<&Path>, columns: usize) -> Outcome<Self> {
        let Some(path) = output else { return Ok(Self::Lines(stdout().lock())) };
        let mut file = BufWriter::new(File::create(path).map_err(|error| unwritten(path, &error))?);
        if is_matrix(path) {
            file.write_all(&header(0, columns)).map_err(|error| unwritten(path, &error))?;
            return Ok(Self::Matrix { file, rows: 0, columns });
        }
        Ok(Self::LinesTo(file))
    }

    fn write(&mut self, text: &Text, tokens: usize, vectors: &Vectors) -> io::Result<()> {
        let Vectors { dense, sparse, multi } = vectors;
        let object = || {
            let mut object =
                json!({"file": text.file, "line": text.line, "tokens": tokens, "embedding": dense});
            if let Some(weights) = sparse {
                let weights = weights.iter().map(|(id, weight)| (id.to_string(), json!(weight)));
                object["lexical_weights"] = Value::Object(weights.collect::<Map<_, _>>());
            }
            if let Some(vectors) = multi {
                object["colbert_vecs"] = json!(vectors);
            }
            object
        };
        match self {
            Self::Lines(out) => writeln!(out, "{}", object()),
            Self::LinesTo(file) => writeln!(file, "{}", object()),
            Self::Matrix { file, rows, .. } => {
                *rows += 1;
                dense.iter().try_for_each(|value| file.write_all(&value.to_le_bytes()))?;
                Ok(())
            }
        }
    }

    fn finish(self) -> io::Result<()> {
        match self {
            Self::Lines(mut out) => out.flush(),
            Self::LinesTo(mut file) => file.flush(),
            Self::Matrix { mut file, rows, columns } => {
                file.seek(SeekFrom::Start(0))?;
                file.write_all(&header(rows, columns))?;
                file.flush()
            }
        }
    }
}

/// Returns the error of an output file.
fn unwritten(path: &Path, error: &io::Error) -> Failure {
    Failure::new(format!("cannot write `{}`: {error}", path.display()))
}

/// The header of a matrix of 32-bit floats, version 1.0 of NumPy's format.
fn header(rows: usize, columns: usize) -> Vec<u8> {
    let length = (HEADER - 10) as u16;
    let text = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {columns}), }}");
    let mut header = b"\x93NUMPY\x01\x00".to_vec();
    header.extend(length.to_le_bytes());
    header.extend(text.as_bytes());
    header.resize(HEADER - 1, b' ');
    header.push(b'\n');
    header
}
