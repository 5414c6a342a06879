//! Output of `bench`.

use paguro_backend::{ExpertCount, KernelCount};
use serde_json::{Value, json};

use super::{Case, Test, images::ImageRow, measure::Measured, memory::PeakMemory};
use crate::{
    cli::{Attention, BenchDrafts, KvDtype, Pages},
    failure::Outcome,
    output::Output,
    settings::Terminal,
    units,
};

/// An engine whose speed is measured.
#[derive(Clone, Debug)]
pub struct Subject {
    /// The model's name.
    pub model: String,
    /// Encoding of its weights.
    pub format: String,
    /// Name of the device.
    pub device: String,
    /// CPU threads.
    pub threads: usize,
    /// Encoding of the KV cache.
    pub kv_dtype: KvDtype,
    /// Kind of attention.
    pub attention: Attention,
    /// Order of pages.
    pub pages: Pages,
    /// Number of adapters of the requests.
    pub adapters: usize,
}

impl Subject {
    /// Returns the fields of `--json`.
    pub fn json(&self) -> Value {
        json!({
            "model": self.model,
            "format": self.format,
            "device": self.device,
            "threads": self.threads,
            "kv_dtype": kv_dtype(self.kv_dtype),
            "attention": attention(self.attention),
            "pages": pages(self.pages),
            "adapters": self.adapters,
        })
    }
}

/// The samples of one case on one engine.
#[derive(Clone, Debug)]
pub struct Row {
    /// The measured engine.
    pub subject: Subject,
    /// The measured case.
    pub case: Case,
    /// Bytes read per token.
    pub bytes_per_token: f64,
    /// Samples in order.
    pub samples: Vec<Sample>,
}

/// One measurement, and the bandwidth probed in the same round.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// Speed.
    pub measured: Measured,
    /// Bytes per second of plain reads with the same number of threads.
    pub bandwidth: f64,
}

impl Row {
    fn speeds(&self) -> Vec<f64> {
        self.samples.iter().map(|sample| sample.measured.tokens_per_second).collect()
    }

    /// Returns the drafted tokens that were checked, and the accepted ones.
    fn drafted(&self) -> (u64, u64) {
        let samples = self.samples.iter().map(|sample| sample.measured);
        samples.fold((0, 0), |(drafted, accepted), it| (drafted + it.drafted, accepted + it.accepted))
    }

    /// Returns the number of answers that differ from those without drafts.
    fn changed(&self) -> u64 {
        self.samples.iter().map(|sample| sample.measured.changed).sum()
    }

    /// Returns a column about drafts.
    fn drafts(&self) -> String {
        let text = match self.drafted() {
            (0, _) => self.case.drafts.to_string(),
            (drafted, accepted) => {
                format!("{} {:.0}%", self.case.drafts, 100.0 * accepted as f64 / drafted as f64)
            }
        };
        match self.changed() {
            0 => text,
            changed => format!("{text}, {changed} changed"),
        }
    }

    /// Returns the fraction of the read bandwidth that the median sample uses. Each sample is compared with the probe
    /// of its own round, because the speed of a shared machine's memory varies.
    fn ceiling_fraction(&self) -> f64 {
        median(
            self.samples
                .iter()
                .map(|sample| self.bytes_per_token * sample.measured.tokens_per_second / sample.bandwidth)
                .collect(),
        )
    }

    fn json(&self, memory: PeakMemory) -> Value {
        let Case { test, tokens, depth, batch, drafts } = self.case;
        let (drafted, accepted) = self.drafted();
        let mut object = self.subject.json();
        let measured = json!({
            "test": name(test),
            "tokens": tokens,
            "depth": depth,
            "batch": batch,
            "speculate": drafts.to_string(),
            "drafted_tokens": drafted,
            "accepted_tokens": accepted,
            "changed_answers": self.changed(),
            "tokens_per_second": self.speeds(),
            "bytes_per_token": self.bytes_per_token.round(),
            "read_bandwidth": self.samples.iter().map(|sample| sample.bandwidth.round()).collect::<Vec<_>>(),
            "ceiling_fraction": self.ceiling_fraction(),
            "peak_resident_bytes": memory.bytes(),
        });
        if let (Some(object), Value::Object(measured)) = (object.as_object_mut(), measured) {
            object.extend(measured);
        }
        object
    }
}

/// Results of one engine.
#[derive(Clone, Debug)]
pub struct Table {
    /// The engine.
    pub subject: Subject,
    /// Rows of text; none if only images are measured.
    pub rows: Vec<Row>,
    /// Rows of images.
    pub images: Vec<ImageRow>,
    /// Kernels that ran, over all rows, if requested.
    pub kernels: Option<Vec<KernelCount>>,
    /// Use of slots by experts, over all rows, if requested.
    pub experts: Option<Vec<ExpertCount>>,
}

/// Prints one JSON object per row.
///
/// # Errors
/// The error of standard output.
pub fn json(tables: &[Table], memory: PeakMemory) -> Outcome<()> {
    let mut out = Output::new();
    for Table { subject: _, rows, images, kernels, experts } in tables {
        let objects = rows.iter().map(|row| row.json(memory)).chain(images.iter().map(ImageRow::json));
        for mut object in objects {
            if let Some(kernels) = kernels {
                object["kernels"] = kernels
                    .iter()
                    .map(|kernel| json!({"name": kernel.name, "launches": kernel.launches, "nanoseconds": kernel.nanoseconds}))
                    .collect();
            }
            if let Some(experts) = experts {
                object["experts"] = experts.iter().map(expert_json).collect();
            }
            out.json(&object)?;
        }
    }
    Ok(())
}

/// Prints a table.
///
/// # Errors
/// The error of standard output.
pub fn table(tables: &[Table], memory: PeakMemory, terminal: Terminal) -> Outcome<()> {
    let mut out = Output::new();
    let several = tables.len() > 1;
    for Table { subject: first, rows, images, kernels, experts } in tables {
        let head = format!(
            "{} {}, {}, {}",
            first.model,
            first.format,
            first.device,
            units::plural(first.threads, "thread")
        );
        let setup = format!(
            ", {} KV cache, {} attention, {} pages",
            kv_dtype(first.kv_dtype),
            attention(first.attention),
            pages(first.pages)
        );
        let setup = match first.adapters {
            0 => setup,
            count => format!("{setup}, {}", units::plural(count, "adapter")),
        };
        out.line(terminal.bold(&if several { head + &setup } else { head }))?;
        if !rows.is_empty() {
            text_rows(&mut out, rows, terminal)?;
        }
        if !images.is_empty() {
            out.line(terminal.dim(&ImageRow::head()))?;
            images.iter().try_for_each(|row| out.line(row.line()))?;
            out.line(terminal.dim("milliseconds, medians; the prompt is everything but the image"))?;
        }
        if let Some(kernels) = kernels {
            kernel_table(&mut out, kernels, terminal)?;
        }
        if let Some(experts) = experts {
            expert_table(&mut out, experts, terminal)?;
        }
        out.line("")?;
    }
    if let Some(peak) = memory.bytes() {
        out.line(terminal.dim(&format!("peak resident memory {}", units::bytes(peak))))?;
    }
    Ok(())
}

/// Prints the rows of text.
fn text_rows(out: &mut Output, rows: &[Row], terminal: Terminal) -> Outcome<()> {
    let has_drafts = rows.iter().any(|row| row.case.drafts != BenchDrafts::Off);
    out.line(terminal.dim(&format!(
        "{:8} {:>6} {:>6} {:>5}  {:>9}  {:>15}  {:>9}  {:>7}{}",
        "test",
        "tokens",
        "depth",
        "batch",
        "tok/s",
        "(min .. max)",
        "reads",
        "ceiling",
        if has_drafts { "  drafts accepted" } else { "" }
    )))?;
    for row in rows {
        let Case { test, tokens, depth, batch, .. } = row.case;
        let speeds = row.speeds();
        let middle = median(speeds.clone());
        let (low, high) =
            (speeds.iter().copied().fold(f64::MAX, f64::min), speeds.iter().copied().fold(0.0, f64::max));
        out.line(format_args!(
            "{:8} {tokens:>6} {depth:>6} {batch:>5}  {:>9}  {:>15}  {:>9}  {:>6.1}%{}",
            name(test),
            units::rate(middle),
            format!("{} .. {}", units::rate(low), units::rate(high)),
            format!("{:.1} GB/s", middle * row.bytes_per_token / 1e9),
            100.0 * row.ceiling_fraction(),
            if has_drafts { format!("  {}", row.drafts()) } else { String::new() },
        ))?;
    }
    let probe = median(rows.iter().flat_map(|row| &row.samples).map(|sample| sample.bandwidth).collect());
    out.line(terminal.dim(&format!(
        "the ceiling is reading: {:.1} GB/s with {}, probed in this run; prefill is bound by arithmetic instead",
        probe / 1e9,
        units::plural(rows[0].subject.threads, "thread")
    )))?;
    Ok(())
}

/// Prints the launches and times of kernels.
///
/// # Errors
/// The output is closed.
pub fn kernel_table(out: &mut Output, kernels: &[KernelCount], terminal: Terminal) -> Outcome<()> {
    let total = kernels.iter().map(|kernel| kernel.nanoseconds).sum::<u64>().max(1);
    let width = kernels.iter().map(|kernel| kernel.name.len()).max().unwrap_or(0).max("kernel".len());
    out.line("")?;
    out.line(
        terminal.dim(&format!("{:width$}  {:>10}  {:>10}  {:>6}", "kernel", "launches", "ms", "share")),
    )?;
    for kernel in kernels {
        out.line(format_args!(
            "{:width$}  {:>10}  {:>10.1}  {:>5.1}%",
            kernel.name,
            kernel.launches,
            kernel.nanoseconds as f64 / 1e6,
            100.0 * kernel.nanoseconds as f64 / total as f64
        ))?;
    }
    Ok(())
}

fn expert_json(layer: &ExpertCount) -> Value {
    let &ExpertCount { layer, slots, hits, misses, streamed, bytes } = layer;
    json!({
        "layer": layer, "slots": slots, "hits": hits, "misses": misses, "streamed": streamed, "bytes_of_expert": bytes,
    })
}

/// Prints the use of slots by layer, and in all layers.
fn expert_table(out: &mut Output, experts: &[ExpertCount], terminal: Terminal) -> Outcome<()> {
    out.line("")?;
    out.line(terminal.dim(&format!(
        "{:>7}  {:>5}  {:>9}  {:>9}  {:>6}  {:>10}  {:>10}",
        "experts", "slots", "hits", "misses", "hit", "copied", "streamed"
    )))?;
    let row = |name: &str, layers: &[ExpertCount]| {
        let sum = |of: fn(&ExpertCount) -> u64| layers.iter().map(of).sum::<u64>();
        let (hits, misses) = (sum(|layer| layer.hits), sum(|layer| layer.misses));
        format!(
            "{name:>7}  {:>5}  {hits:>9}  {misses:>9}  {:>5.1}%  {:>10}  {:>10}",
            layers[0].slots,
            100.0 * hits as f64 / (hits + misses).max(1) as f64,
            units::bytes(sum(|layer| layer.misses * layer.bytes)),
            units::bytes(sum(|layer| layer.streamed * layer.bytes)),
        )
    };
    for layer in experts {
        out.line(row(&layer.layer.to_string(), std::slice::from_ref(layer)))?;
    }
    out.line(row("all", experts))
}

fn name(test: Test) -> &'static str {
    match test {
        Test::Prefill => "prefill",
        Test::Decode => "decode",
    }
}

fn kv_dtype(dtype: KvDtype) -> &'static str {
    paguro_backend::KvDtype::from(dtype).name()
}

fn attention(attention: Attention) -> &'static str {
    match attention {
        Attention::Paged => "paged",
        Attention::Gather => "gather",
    }
}

fn pages(pages: Pages) -> &'static str {
    match pages {
        Pages::Ordered => "ordered",
        Pages::Scattered => "scattered",
    }
}

/// Returns the median: the middle value, or the mean of the two middle values.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0]), 2.5);
    }

    #[test]
    fn each_sample_is_held_against_its_own_round() {
        let measured = |tokens_per_second| Measured { tokens_per_second, ..Measured::default() };
        let row = Row {
            subject: Subject {
                model: "m".into(),
                format: "Q8_0".into(),
                device: "cpu".into(),
                threads: 2,
                kv_dtype: KvDtype::F16,
                attention: Attention::Paged,
                pages: Pages::Ordered,
                adapters: 0,
            },
            case: Case { test: Test::Decode, tokens: 4, depth: 0, batch: 1, drafts: BenchDrafts::Off },
            bytes_per_token: 100.0,
            // The machine was half as fast in the second round: the share of the ceiling is the same.
            samples: vec![
                Sample { measured: measured(8.0), bandwidth: 1000.0 },
                Sample { measured: measured(4.0), bandwidth: 500.0 },
            ],
        };
        assert_eq!(row.ceiling_fraction(), 0.8);
        assert_eq!(row.json(PeakMemory::new())["tokens_per_second"], json!([8.0, 4.0]));
    }
}
