//! Benchmarks of single kernels on a GPU: decode attention over pages in order, scattered and gathered, in half
//! precision and in eight bits; attention of prompts; matmuls with weights of several formats; and sampling; beside the
//! read bandwidth of the memory, in order and in scattered pieces. Prints a JSON object for each.
//!
//! ```text
//! cargo run --release -p paguro-backend-wgpu --example kernels -- [read|attend|attend_q8|prefill|products|layer|sample]...
//! ```

use std::{
    env,
    process::ExitCode,
    time::{Duration, Instant},
};

use paguro_backend::{
    AttentionMode, Backend, KernelCount, KvDtype, Limits, Output, OutputKind, PageId, Runner, SampleRequest,
    Step, StepOutput, StepSequence, WeightFormat, sampling::SamplingParams,
};
use paguro_backend_conformance::{ModelShape, RandomModel, Rng, submit};
use paguro_backend_wgpu::{Gpu, GpuOptions};

const PAGE: usize = 32;
/// Steps before it counts: buffers are cleared.
const WARM_UP: usize = 3;
/// Reads of the probe before the measurement, for about a second, until clocks have reached their full speed.
const WARM_UP_READS: usize = 200;
/// Steps that count.
const STEPS: usize = 12;
/// Layers, as a model has dozens one after the other: timing a pass adds some 10 µs to all of them.
const LAYERS: usize = 16;
/// Maximum bytes of weights, if there are more than four layers. A step reads more than a cache can keep for the next
/// one.
const WEIGHTS_BYTES: usize = 4 << 30;
/// Maximum bytes of pages, if there is more than one layer. A step reads more than a cache can keep for the next one,
/// also for one sequence at 1024: 64 MiB.
const PAGES_BYTES: usize = 16 << 30;

fn main() -> ExitCode {
    let what: Vec<String> = env::args().skip(1).collect();
    let wants = |name: &str| what.is_empty() || what.iter().any(|wanted| wanted == name);
    match run(&wants) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Returns the options from the environment.
fn options() -> GpuOptions {
    GpuOptions {
        cooperative: !env::var("PAGURO_NUMERICS").is_ok_and(|numerics| numerics == "exact"),
        ..GpuOptions::default()
    }
}

fn run(wants: &dyn Fn(&str) -> bool) -> Result<(), String> {
    let gpu = Gpu::open(0, GpuOptions { timed: true, ..options() })?;
    let ceiling = gpu.read_bandwidth(2 * WARM_UP_READS).map_err(|error| error.to_string())? / 1e9;
    println!(r#"{{"kernel":"read","device":"{}","gb_per_s":{ceiling:.1}}}"#, gpu.capacity().description);
    if wants("read") {
        for piece in [4 << 10, 8 << 10, 16 << 10, 64 << 10] {
            let rate =
                gpu.scattered_read_bandwidth(WARM_UP_READS, piece).map_err(|error| error.to_string())? / 1e9;
            println!(r#"{{"kernel":"read","scattered_bytes":{piece},"gb_per_s":{rate:.1}}}"#);
        }
    }
    for (name, kv_dtype) in [("attend", KvDtype::F16), ("attend_q8", KvDtype::Q8)] {
        if !wants(name) {
            continue;
        }
        for (heads, kv_heads, head_dim) in [(32, 8, 128), (32, 4, 64)] {
            for batch in [1, 8, 64] {
                for depth in [1024, 4096, 16_384, 32_768] {
                    for pages in ["ordered", "scattered", "gather"] {
                        let case = Attention { heads, kv_heads, head_dim, batch, depth, pages, kv_dtype };
                        if let Err(error) = case.measure(&gpu, ceiling) {
                            println!(
                                r#"{{"kernel":"{name}","batch":{batch},"depth":{depth},"error":"{error}"}}"#
                            );
                        }
                    }
                }
            }
        }
    }
    if wants("prefill") {
        for (heads, kv_heads, head_dim) in [(32, 8, 128), (32, 4, 64)] {
            for (rows, depth) in
                [(2048, 0), (512, 0), (512, 1536), (2048, 14_336), (512, 14_336), (256, 14_336)]
            {
                Prefill { heads, kv_heads, head_dim, rows, depth, decodes: 0 }.measure(&gpu)?;
            }
            for (depth, decodes) in [(2048, 64), (14_336, 4)] {
                Prefill { heads, kv_heads, head_dim, rows: 128, depth, decodes }.measure(&gpu)?;
            }
        }
    }
    if wants("products") {
        for format in [WeightFormat::Q8_0, WeightFormat::Q4_K, WeightFormat::Q6_K, WeightFormat::F16] {
            for (hidden, ffn) in [(4096, 7168), (4096, 14_336), (2048, 5632)] {
                let layers = Layers::new(format, hidden, ffn);
                for rows in [1, 4, 16, 64, 512, 2048] {
                    layers.measure(&gpu, rows, 1, true)?;
                }
            }
        }
    }
    if wants("layer") {
        for format in [WeightFormat::Q8_0, WeightFormat::Q4_K] {
            for (hidden, ffn) in [(4096, 14_336), (2048, 5632)] {
                let layers = Layers::new(format, hidden, ffn);
                for rows in [1, 4, 16, 64, 512] {
                    layers.measure(&gpu, rows, 500, false)?;
                }
            }
        }
    }
    if wants("sample") {
        let plain = SamplingParams { temperature: 0.8, ..SamplingParams::default() };
        let cut = SamplingParams { top_k: 40, top_p: 0.95, ..plain.clone() };
        let penalized = SamplingParams { repetition_penalty: 1.1, ..cut.clone() };
        let greedy = SamplingParams::default();
        for (name, params) in
            [("greedy", greedy), ("temperature", plain), ("top_k, top_p", cut), ("penalty", penalized)]
        {
            for batch in [1, 64] {
                sampling(&gpu, batch, name, &params)?;
            }
        }
    }
    Ok(())
}

/// One decode step of some sequences.
struct Attention {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    batch: usize,
    depth: usize,
    pages: &'static str,
    kv_dtype: KvDtype,
}

impl Attention {
    fn measure(&self, gpu: &Gpu, ceiling: f64) -> Result<(), String> {
        let &Self { heads, kv_heads, head_dim, batch, depth, pages, kv_dtype } = self;
        let bytes = batch * depth * kv_heads * 2 * kv_dtype.head_bytes(head_dim);
        let layers = (PAGES_BYTES / bytes).clamp(1, LAYERS);
        // The smallest layer whose launches use handoff; attention and merge of one row use it as well.
        let shape = ModelShape {
            format: WeightFormat::Q8_0,
            hidden: 128,
            ffn: 128,
            heads,
            kv_heads,
            head_dim,
            windows: vec![None; layers],
            ..ModelShape::default()
        };
        let model = shape.build(1);
        let attention = if pages == "gather" { AttentionMode::Gather } else { AttentionMode::Paged };
        let mut runner = load(gpu, &model, batch, depth, attention, kv_dtype)?;
        let blocks = depth.div_ceil(PAGE);
        let mut table: Vec<PageId> = (1..=(batch * blocks) as u32).map(PageId).collect();
        if pages == "scattered" {
            Rng::new(1).shuffle(&mut table);
        }
        let (counts, _) = decode(gpu, &mut *runner, batch, depth, &table)?;
        let of = |name: &'static str| counts.iter().filter(move |count| count.name.starts_with(name));
        let nanoseconds: u64 = of("attend").chain(of("gather")).map(|count| count.nanoseconds).sum();
        let launches: u64 = of("attend").map(|count| count.launches).max().unwrap_or(1);
        let each = nanoseconds as f64 / launches as f64;
        let speed = bytes as f64 / each;
        println!(
            r#"{{"kernel":"attend","kv_dtype":"{}","heads":{heads},"kv_heads":{kv_heads},"head_dim":{head_dim},"batch":{batch},"depth":{depth},"pages":"{pages}","microseconds":{:.1},"gb_per_s":{speed:.0},"of_ceiling":{:.3}}}"#,
            kv_dtype.name(),
            each / 1e3,
            speed / ceiling
        );
        Ok(())
    }
}

/// One step of a prompt after some tokens, and of sequences that decode after as many.
struct Prefill {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    rows: usize,
    depth: usize,
    decodes: usize,
}

impl Prefill {
    fn measure(&self, gpu: &Gpu) -> Result<(), String> {
        let &Self { heads, kv_heads, head_dim, rows, depth, decodes } = self;
        let shape = ModelShape { heads, kv_heads, head_dim, windows: vec![None; 4], ..ModelShape::default() };
        let model = shape.build(1);
        let context = depth + rows;
        let (blocks, decode_blocks) = (context.div_ceil(PAGE), (depth + 1).div_ceil(PAGE));
        let pages = blocks + decodes * decode_blocks;
        let limits = Limits {
            block_size: PAGE,
            pages: 1 + pages,
            max_rows: rows + decodes,
            max_sequences: 1 + decodes,
            max_outputs: 1,
            max_context: context,
            states: 0,
            kv_dtype: KvDtype::F16,
            attention: AttentionMode::Paged,
            expert_slots: None,
        };
        let mut runner =
            gpu.load(&model.program, model.weights.clone(), limits).map_err(|error| error.to_string())?;
        let mut table: Vec<PageId> = (1..=pages as u32).map(PageId).collect();
        Rng::new(1).shuffle(&mut table);
        let mut sequences: Vec<_> = (0..decodes)
            .map(|index| StepSequence {
                rows: index..index + 1,
                start: depth,
                tables: index * decode_blocks..(index + 1) * decode_blocks,
                state: None,
            })
            .collect();
        sequences.push(StepSequence {
            rows: decodes..decodes + rows,
            start: depth,
            tables: pages - blocks..pages,
            state: None,
        });
        let (counts, _) = steps(gpu, &mut *runner, &sequences, &table, &[])?;
        let attention = counts.iter().filter(|count| count.name.starts_with("attend"));
        let launches = counts
            .iter()
            .find(|count| count.name.starts_with("rope_store"))
            .map_or(1, |count| count.launches);
        let each = attention.map(|count| count.nanoseconds).sum::<u64>() as f64 / launches as f64;
        let seen = rows * depth + rows * (rows + 1) / 2 + decodes * (depth + 1);
        println!(
            r#"{{"kernel":"prefill","heads":{heads},"kv_heads":{kv_heads},"head_dim":{head_dim},"rows":{rows},"depth":{depth},"decodes":{decodes},"microseconds":{:.1},"tflops":{:.1}}}"#,
            each / 1e3,
            (4 * seen * heads * head_dim) as f64 / each / 1e3,
        );
        Ok(())
    }
}

/// Some layers of a Llama.
struct Layers {
    format: WeightFormat,
    hidden: usize,
    count: usize,
    model: RandomModel,
}

impl Layers {
    fn new(format: WeightFormat, hidden: usize, ffn: usize) -> Self {
        let attention = (hidden + 2 * hidden / 4 + hidden) * format.row_bytes(hidden);
        let bytes = attention + 2 * ffn * format.row_bytes(hidden) + hidden * format.row_bytes(ffn);
        let count = (WEIGHTS_BYTES / bytes).clamp(4, LAYERS);
        let shape = ModelShape {
            format,
            hidden,
            ffn,
            heads: hidden / 128,
            kv_heads: hidden / 512,
            head_dim: 128,
            vocab: 256,
            windows: vec![None; count],
            ..ModelShape::default()
        };
        Self { format, hidden, count, model: shape.build(1) }
    }

    /// Measures a step of one token for each of some sequences: its matmuls, or all of its kernels and the time of a
    /// layer including gaps.
    fn measure(&self, gpu: &Gpu, rows: usize, depth: usize, only_products: bool) -> Result<(), String> {
        let Self { format, hidden, count, model } = self;
        let blocks = depth.div_ceil(PAGE);
        let table: Vec<PageId> = (1..=(rows * blocks) as u32).map(PageId).collect();
        let mut runner = load(gpu, model, rows, depth, AttentionMode::Paged, KvDtype::F16)?;
        for count in decode(gpu, &mut *runner, rows, depth, &table)?.0 {
            let each = count.nanoseconds as f64 / count.launches as f64;
            let product = count.name.strip_suffix(']').and_then(|name| name.split_once('['));
            let shape = product.and_then(|(_, shape)| shape.split_once('x'));
            let Some((outputs, inputs)) = shape else {
                if !only_products {
                    println!(
                        r#"{{"kernel":"{}","format":"{format}","hidden":{hidden},"rows":{rows},"microseconds":{:.1}}}"#,
                        count.name,
                        each / 1e3
                    );
                }
                continue;
            };
            let (outputs, inputs): (usize, usize) =
                (outputs.parse().unwrap_or(0), inputs.parse().unwrap_or(0));
            println!(
                r#"{{"kernel":"{}","format":"{format}","rows":{rows},"microseconds":{:.1},"gb_per_s":{:.0},"tflops":{:.1}}}"#,
                count.name,
                each / 1e3,
                (outputs * format.row_bytes(inputs)) as f64 / each,
                2.0 * (outputs * inputs * rows) as f64 / each / 1e3,
            );
        }
        if !only_products {
            let gpu = Gpu::open(0, options())?;
            let mut runner = load(&gpu, model, rows, depth, AttentionMode::Paged, KvDtype::F16)?;
            let (_, time) = decode(&gpu, &mut *runner, rows, depth, &table)?;
            println!(
                r#"{{"kernel":"layer","format":"{format}","hidden":{hidden},"rows":{rows},"microseconds_per_layer":{:.1}}}"#,
                time.as_secs_f64() * 1e6 / *count as f64
            );
        }
        Ok(())
    }
}

fn load(
    gpu: &Gpu,
    model: &RandomModel,
    batch: usize,
    depth: usize,
    attention: AttentionMode,
    kv_dtype: KvDtype,
) -> Result<Box<dyn Runner>, String> {
    let limits = Limits {
        block_size: PAGE,
        pages: 1 + batch * depth.div_ceil(PAGE),
        max_rows: batch,
        max_sequences: batch,
        max_outputs: batch,
        max_context: depth,
        states: 0,
        kv_dtype,
        attention,
        expert_slots: None,
    };
    gpu.load(&model.program, model.weights.clone(), limits).map_err(|error| error.to_string())
}

/// Measures a step of one token per sequence with a tiny model that has many logits.
fn sampling(gpu: &Gpu, batch: usize, name: &str, params: &SamplingParams) -> Result<(), String> {
    let vocab = 128_256;
    let model =
        ModelShape { vocab, hidden: 32, ffn: 32, windows: vec![None], ..ModelShape::default() }.build(1);
    let mut runner = load(gpu, &model, batch, PAGE, AttentionMode::Paged, KvDtype::F16)?;
    let table: Vec<PageId> = (1..=batch as u32).map(PageId).collect();
    let sequences: Vec<_> = (0..batch)
        .map(|row| StepSequence { rows: row..row + 1, start: 0, tables: row..row + 1, state: None })
        .collect();
    let request =
        SampleRequest { params, draw: 0, history: &[1], prompt_tokens: 0, mask: None, logprobs: None };
    let outputs: Vec<_> = (0..batch).map(|row| Output { row, kind: OutputKind::Sample(request) }).collect();
    let (_, step) = steps(gpu, &mut *runner, &sequences, &table, &outputs)?;
    println!(
        r#"{{"kernel":"sample","params":"{name}","vocab":{vocab},"batch":{batch},"step_microseconds":{:.1}}}"#,
        step.as_secs_f64() * 1e6
    );
    Ok(())
}

/// Runs steps of one token for each sequence: see [`steps`].
fn decode(
    gpu: &Gpu,
    runner: &mut dyn Runner,
    batch: usize,
    depth: usize,
    table: &[PageId],
) -> Result<(Vec<KernelCount>, Duration), String> {
    let blocks = depth.div_ceil(PAGE);
    let sequences: Vec<_> = (0..batch)
        .map(|index| StepSequence {
            rows: index..index + 1,
            start: depth - 1,
            tables: index * blocks..(index + 1) * blocks,
            state: None,
        })
        .collect();
    steps(gpu, runner, &sequences, table, &[])
}

/// Runs steps with these sequences. Prints the times of their kernels, and that of the fastest step.
fn steps(
    gpu: &Gpu,
    runner: &mut dyn Runner,
    sequences: &[StepSequence],
    table: &[PageId],
    outputs: &[Output<'_>],
) -> Result<(Vec<KernelCount>, Duration), String> {
    let tokens = vec![1; sequences.iter().map(|sequence| sequence.rows.len()).sum()];
    let step = Step { tokens: &tokens, sequences, pages: table, outputs, ..Step::default() };
    let mut out = StepOutput::default();
    gpu.read_bandwidth(WARM_UP_READS).map_err(|error| error.to_string())?;
    for _ in 0..WARM_UP {
        submit(runner, &step, &mut out)?;
    }
    let before = runner.kernel_counts();
    let mut fastest = Duration::MAX;
    for _ in 0..STEPS {
        let start = Instant::now();
        submit(runner, &step, &mut out)?;
        fastest = fastest.min(start.elapsed());
    }
    let mut counts = runner.kernel_counts();
    for count in &mut counts {
        if let Some(before) = before.iter().find(|before| before.name == count.name) {
            count.launches -= before.launches;
            count.nanoseconds -= before.nanoseconds;
        }
    }
    counts.retain(|count| count.launches > 0);
    Ok((counts, fastest))
}
