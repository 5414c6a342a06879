//! `paguro bench`: the speed of a model on this machine, and its upper bound.
//!
//! The benchmark submits requests through the engine's handle, as all other clients do.

mod cost;
mod images;
mod measure;
mod memory;
mod report;
mod shape;

pub use images::ImageSize;
pub use measure::token_seconds;
pub use report::kernel_table;

use std::{cmp::Reverse, path::PathBuf, sync::Arc, time::Duration};

use paguro_backend::{ExpertCount, KernelCount};
use paguro_engine::{DraftModel, EngineOptions, PageBudget, PageOrder};
use paguro_model::{LoadOptions, Model};

use crate::{
    adapters, assistant,
    cli::{Attention, BenchArgs, BenchDrafts, KvDtype, Pages, RunOnArgs},
    devices::Devices,
    failure::{Failure, Outcome},
    load::{self, Loaded},
    models::Source,
    settings::{LibrarySettings, Terminal},
};
use cost::Cost;
use images::{ImageCase, ImageRow};
use measure::{Prefixes, Random, Target, measure};
use memory::PeakMemory;
use report::{Row, Sample, Subject, Table};

/// Seed of the prompts and of the scattered pages, so that all runs measure the same work.
const SEED: u64 = 0x5eed;

/// Kind of test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Test {
    /// Prefill of a prompt.
    Prefill,
    /// Decode of an answer.
    Decode,
}

/// Kind, lengths and batch size of one test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    /// Kind of the test.
    pub test: Test,
    /// Timed tokens of each sequence.
    pub tokens: usize,
    /// Tokens of each sequence before the timed ones.
    pub depth: usize,
    /// Number of concurrent sequences.
    pub batch: usize,
    /// Drafts of the answers.
    pub drafts: BenchDrafts,
}

/// Settings of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Setup {
    threads: Option<usize>,
    kv_dtype: KvDtype,
    attention: Attention,
    pages: Pages,
    /// True if requests have the adapters of `--lora`.
    adapted: bool,
}

/// An engine under test.
struct Bench {
    setup: Setup,
    subject: Subject,
    target: Target,
    loaded: Loaded,
    random: Random,
    rows: Vec<Row>,
    images: Vec<ImageRow>,
    /// Kernel counts after the warm-up.
    before: Vec<KernelCount>,
    /// Use of slots by experts after the warm-up.
    experts_before: Vec<ExpertCount>,
}

/// Runs `paguro bench`.
///
/// # Errors
/// A test is invalid, or the engine fails.
pub fn bench(
    args: &BenchArgs,
    library: &LibrarySettings,
    devices: &Devices,
    terminal: Terminal,
) -> Outcome<()> {
    let cases = cases(args)?;
    let longest = cases.iter().map(Case::context).max().unwrap_or(1);
    let model = match args.shape {
        Some(name) => {
            let like = load::file(&Source::Embedded)?.load(&LoadOptions { max_context: Some(longest) });
            let like = like.map_err(|error| Failure::from_error(&error))?;
            Arc::new(shape::model(name, args.format, like, longest))
        }
        None => {
            let source = Source::find(args.model.name.as_deref(), library)?;
            let note = |line: &str| terminal.note(line);
            // A tower takes memory, which measurements of text do not need.
            let file = match args.image.is_empty() {
                true => load::file(&source)?.text_only(),
                false => args.projector.choice().open(&source, note)?,
            };
            let (mut file, draft) = (file, args.draft.source(library)?);
            let assistants = || assistant::of_settings(library);
            assistant::add(&mut file, &source, draft.as_ref(), assistants, note)?;
            // The tokens of an image are known once the model is.
            let least = if args.image.is_empty() { 1 } else { load::default_context(&file) };
            load::writer_of(&file, &source, load::Context::Tokens(longest.max(least)))?
        }
    };
    let images = ImageCase::all(&args.image, &model)?;
    let context = images.iter().map(ImageCase::context).fold(longest, usize::max);
    if context > model.context_length {
        let trained = model.context_length;
        terminal.note(&format!("the model was trained for {trained} tokens; speed does not depend on that"));
    }
    let loras =
        args.loras.iter().map(|lora| Ok(adapters::place(lora, library)?.0)).collect::<Outcome<Vec<_>>>()?;
    let draft = load::draft(args.draft.draft.as_deref(), &model, library)?;
    let mut benches = setups(args)
        .into_iter()
        .map(|setup| {
            let (model, cases) = ((&model, &loras[..], draft.clone()), (&cases[..], &images[..]));
            Bench::start(args, setup, model, cases, (devices, terminal))
        })
        .collect::<Outcome<Vec<_>>>()?;

    let mut memory = PeakMemory::new();
    let bar = terminal.bar(args.rounds * benches.len() * (cases.len() + images.len()), "measuring");
    for (index, case) in cases.iter().enumerate() {
        // Prefixes are computed once for all rounds. Each round measures every setup, so that changes of the clock speed
        // affect all of them.
        let prefixes = benches.iter_mut().map(|bench| bench.prefixes(case)).collect::<Outcome<Vec<_>>>()?;
        for _ in 0..args.rounds {
            for (bench, prefixes) in benches.iter_mut().zip(&prefixes) {
                let bandwidth =
                    devices.read_bandwidth(&args.on, &bench.loaded.stages, bench.setup.threads)?;
                let measured = measure(&bench.target, case, prefixes, &mut bench.random)?;
                bench.rows[index].samples.push(Sample { bandwidth, measured });
                memory.look();
                bar.inc(1);
            }
        }
    }
    for (index, case) in images.iter().enumerate() {
        for _ in 0..args.rounds {
            for bench in &mut benches {
                let times = images::measure(&bench.target.handle, case, &mut bench.random)?;
                bench.images[index].samples.push(times);
                memory.look();
                bar.inc(1);
            }
        }
    }
    bar.finish_and_clear();

    let mut tables = Vec::new();
    for bench in benches {
        let kernels = if args.kernels { Some(bench.kernels()?) } else { None };
        let experts = if args.experts { Some(bench.experts()?) } else { None };
        let Bench { subject, rows, images, .. } = bench;
        tables.push(Table { subject, rows, images, kernels, experts });
    }
    if args.json { report::json(&tables, memory) } else { report::table(&tables, memory, terminal) }
}

const NO_DRAFTS: &[BenchDrafts] = &[BenchDrafts::Off];

/// Returns all cases, prefill before decode. Lengths of 0 are omitted.
fn cases(args: &BenchArgs) -> Outcome<Vec<Case>> {
    let mut cases = Vec::new();
    for (test, lengths) in [(Test::Prefill, &args.prefill), (Test::Decode, &args.decode)] {
        for &tokens in lengths.iter().filter(|&&tokens| tokens > 0) {
            // A prefill has no drafts.
            let drafts = if test == Test::Prefill { NO_DRAFTS } else { &args.speculate[..] };
            for &depth in &args.depth {
                for &batch in &args.batch {
                    cases.extend(drafts.iter().map(|&drafts| Case { test, tokens, depth, batch, drafts }));
                }
            }
        }
    }
    if cases.is_empty() && args.image.is_empty() {
        return Err(Failure::usage("there is nothing to measure: -p and -n are both 0"));
    }
    Ok(cases)
}

/// Returns every combination of threads, K/V encoding, attention and page order, without and with adapters.
fn setups(args: &BenchArgs) -> Vec<Setup> {
    let threads: Vec<_> =
        if args.threads.is_empty() { vec![None] } else { args.threads.iter().copied().map(Some).collect() };
    let mut setups = Vec::new();
    for &threads in &threads {
        for &kv_dtype in &args.kv_dtype {
            for &attention in &args.attention {
                for &pages in &args.pages {
                    let setup = Setup { threads, kv_dtype, attention, pages, adapted: false };
                    setups.push(setup);
                    setups.extend((!args.loras.is_empty()).then_some(Setup { adapted: true, ..setup }));
                }
            }
        }
    }
    setups
}

impl Bench {
    fn start(
        args: &BenchArgs,
        setup: Setup,
        (model, loras, draft): (&Arc<Model>, &[PathBuf], Option<Arc<DraftModel>>),
        (cases, images): (&[Case], &[ImageCase]),
        (devices, terminal): (&Devices, Terminal),
    ) -> Outcome<Self> {
        let options = EngineOptions { draft, ..options(args, setup, cases, images) };
        let chunk = options.max_batch_tokens;
        let on = RunOnArgs { timed: args.kernels, ..args.on.clone() };
        let loaded = load::start(model.clone(), options, false, setup.threads, (devices, &on), terminal)?;
        let used = if setup.adapted { loras } else { &[] };
        let adapter = |path: &PathBuf| adapters::load(path, &loaded.model, &loaded.handle);
        let adapters = used.iter().map(adapter).collect::<Outcome<Vec<_>>>()?;
        let target = Target { handle: loaded.handle.clone(), adapters, temperature: args.temperature };
        let cost = Cost::new(&model.program, &model.weights, setup.kv_dtype.into());
        let subject = Subject {
            model: model.name.clone(),
            format: model.description.quantization.clone(),
            device: loaded.device.clone(),
            threads: loaded.threads,
            kv_dtype: setup.kv_dtype,
            attention: setup.attention,
            pages: setup.pages,
            adapters: used.len(),
        };
        let row = |case: &Case| Row {
            subject: subject.clone(),
            case: *case,
            bytes_per_token: cost.per_token(case, chunk),
            samples: Vec::new(),
        };
        let rows = cases.iter().map(row).collect();
        let image_row = |case: &ImageCase| ImageRow {
            subject: subject.clone(),
            size: case.size,
            tokens: case.tokens(),
            samples: Vec::new(),
        };
        let image_rows = images.iter().map(image_row).collect();
        let mut bench = Self {
            setup,
            target,
            loaded,
            random: Random::new(SEED, model.program.vocab),
            rows,
            images: image_rows,
            subject,
            before: Vec::new(),
            experts_before: Vec::new(),
        };
        // The warm-up causes the first page faults, raises the clock speed and fills caches.
        for test in [Test::Prefill, Test::Decode] {
            let tokens = cases.iter().filter(|case| case.test == test).map(|case| case.tokens.min(64)).max();
            if let Some(tokens) = tokens {
                let case = Case { test, tokens, depth: 0, batch: 1, drafts: BenchDrafts::Off };
                let prefixes = bench.prefixes(&case)?;
                measure(&bench.target, &case, &prefixes, &mut bench.random)?;
            }
        }
        for case in images {
            images::measure(&bench.target.handle, case, &mut bench.random)?;
        }
        bench.before = bench.kernel_counts()?;
        bench.experts_before = bench.expert_counts()?;
        Ok(bench)
    }

    fn prefixes(&mut self, case: &Case) -> Outcome<Prefixes> {
        Prefixes::compute(&self.target, case, &mut self.random)
    }

    fn kernel_counts(&self) -> Outcome<Vec<KernelCount>> {
        self.loaded.handle.kernel_counts().map_err(|error| Failure::from_error(&error))
    }

    fn expert_counts(&self) -> Outcome<Vec<ExpertCount>> {
        self.loaded.handle.expert_counts().map_err(|error| Failure::from_error(&error))
    }

    /// Returns the use of slots by experts since the warm-up, by layer.
    fn experts(&self) -> Outcome<Vec<ExpertCount>> {
        let mut experts = self.expert_counts()?;
        if experts.is_empty() {
            return Err(Failure::new("--experts: all experts are on the device, or the model has none")
                .hint("--expert-slots N leaves N of each layer on the GPU"));
        }
        for (layer, before) in experts.iter_mut().zip(&self.experts_before) {
            layer.hits -= before.hits;
            layer.misses -= before.misses;
            layer.streamed -= before.streamed;
        }
        Ok(experts)
    }

    /// Returns the kernel counts since the warm-up, sorted by descending time.
    fn kernels(&self) -> Outcome<Vec<KernelCount>> {
        let mut kernels = self.kernel_counts()?;
        for kernel in &mut kernels {
            if let Some(before) = self.before.iter().find(|before| before.name == kernel.name) {
                kernel.launches -= before.launches;
                kernel.nanoseconds -= before.nanoseconds;
            }
        }
        kernels.sort_by_key(|kernel| Reverse(kernel.nanoseconds));
        Ok(kernels)
    }
}

/// Returns engine options with exactly as many pages as the largest case needs.
fn options(args: &BenchArgs, setup: Setup, cases: &[Case], images: &[ImageCase]) -> EngineOptions {
    let defaults = EngineOptions::default();
    let block_size = args.page_size.unwrap_or(defaults.block_size);
    let pages = |case: &Case| case.batch * case.context().next_multiple_of(block_size);
    let batch = cases.iter().map(|case| case.batch).max().unwrap_or(1);
    let longest = cases.iter().map(|case| match case.drafts {
        BenchDrafts::Known { length: Some(length), .. } | BenchDrafts::Model(length) => length,
        _ => 0,
    });
    let longest = longest.max().unwrap_or(0);
    let of_images = images.iter().map(|case| case.context().next_multiple_of(block_size));
    let contexts = images.iter().map(ImageCase::context);
    EngineOptions {
        block_size,
        pages: PageBudget::Tokens(cases.iter().map(pages).chain(of_images).max().unwrap_or(block_size)),
        max_context: cases.iter().map(Case::context).chain(contexts).max(),
        max_image_tokens: images.iter().map(ImageCase::largest_part).max(),
        max_sequences: batch,
        max_batch_tokens: args.step.or_default(batch * (1 + longest)),
        // Each drafted row has an output.
        max_scores: defaults.max_scores.max(batch * longest),
        queue_capacity: batch,
        speculate: cases.iter().any(|case| case.drafts != BenchDrafts::Off),
        // No user waits for the next token, so a step may take any time.
        step_time: Duration::MAX,
        kv_dtype: setup.kv_dtype.into(),
        attention: setup.attention.into(),
        page_order: match setup.pages {
            Pages::Ordered => PageOrder::InOrder,
            Pages::Scattered => PageOrder::Scattered { seed: SEED },
        },
        ..defaults
    }
}
