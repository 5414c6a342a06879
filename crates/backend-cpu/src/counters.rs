//! Kernel statistics: launches and times.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use paguro_backend::{KernelCount, KvDtype, MatrixId};
use paguro_cpu_kernels::{isa::Isa, matrix::PackedMatrix};

/// A phase of the forward pass.
#[derive(Clone, Copy, Debug)]
pub enum Kernel<'a> {
    /// Embedding lookup, and the rotations' angles.
    Embed,
    /// Residual add, norm, quantization.
    AddNorm,
    /// Matmuls of these matrices, by the kernels of their formats.
    Matmul(&'a [MatrixId]),
    /// Bias, head norm, rotation, store into the pages.
    RopeStore,
    /// Paged attention.
    Attend,
    /// Sum of splits that workers shared.
    AttendMerge,
    /// Attention the reference way.
    AttendGather,
    /// Quantization of attention's output.
    Quantize,
    /// Activation, gate times up, quantization.
    Activate,
    /// Norms of whole rows of queries and keys.
    QkNorm,
    /// Choice of experts.
    Route,
    /// Rows in the order of their experts.
    Sort,
    /// Sum of a row's experts.
    Combine,
    /// Sampling and log-probabilities.
    Sample,
    /// Convolution, activation and norms.
    Convolve,
    /// The delta rule.
    Delta,
    /// The scan of Mamba-2.
    Scan,
    /// Products of a scan's C and B.
    ScanDots,
    /// Norm and gate of a delta rule's results, quantization.
    NormGate,
    /// Copies of a step's last rows into the states.
    Keep,
    /// Sum of a row's experts of their own width, quantization.
    CombineLatent,
    /// Bias of a convolution's inputs.
    Bias,
    /// Embeddings for layers, from their table and a projection.
    LayerEmbed,
    /// Activation of an input of a layer, times its embedding; quantization.
    LayerInput,
    /// Heads of queries in the order of latent attention's matrices, quantization.
    LatentSplit,
    /// Rotation of absorbed queries and of the latent vector, store into the pages.
    LatentStore,
    /// Heads of latent attention's results, quantization.
    LatentValues,
    /// Rows of these heads, quantization.
    LatentJoin,
    /// Products of rows with A of adapters, where they are not computed beside the matmul.
    AdapterDown,
    /// Products with B of adapters, added to the outputs of a matmul.
    AdapterUp,
}

const FIXED: [&str; 29] = [
    "embed",
    "add_norm_quantize",
    "rope_store",
    "attend",
    "attend_merge",
    "attend_gather",
    "quantize",
    "activate_quantize",
    "sample",
    "qk_norm",
    "route",
    "sort_rows",
    "combine",
    "convolve",
    "delta_rule",
    "norm_gate_quantize",
    "keep_state",
    "bias",
    "layer_embed",
    "layer_input_quantize",
    "latent_split_quantize",
    "latent_store",
    "latent_values_quantize",
    "latent_join_quantize",
    "scan",
    "scan_dots",
    "combine_latent_quantize",
    "adapter_down",
    "adapter_up",
];

#[derive(Default)]
struct Count {
    launches: AtomicU64,
    nanoseconds: AtomicU64,
}

impl Count {
    fn add(&self, time: Duration) {
        self.launches.fetch_add(1, Relaxed);
        self.nanoseconds.fetch_add(time.as_nanos() as u64, Relaxed);
    }
}

/// Counts since load.
pub struct Counters {
    isa: Isa,
    kv_dtype: KvDtype,
    fixed: [Count; FIXED.len()],
    /// Counts by weight format.
    matmuls: Vec<(String, Count)>,
    /// Index into `matmuls` and bytes, by matrix.
    matrices: Vec<(usize, u64)>,
}

impl Counters {
    /// For these matrices and pages.
    pub fn new(isa: Isa, kv_dtype: KvDtype, matrices: &[Arc<PackedMatrix>]) -> Self {
        let mut matmuls: Vec<(String, Count)> = Vec::new();
        let matrices = matrices.iter().map(|matrix| {
            let name = matrix.kernel_name(isa);
            let index = matmuls.iter().position(|(known, _)| *known == name).unwrap_or_else(|| {
                matmuls.push((name, Count::default()));
                matmuls.len() - 1
            });
            (index, matrix.bytes() as u64)
        });
        let matrices = matrices.collect();
        Self { isa, kv_dtype, fixed: Default::default(), matmuls, matrices }
    }

    /// Records one launch. The time of several matmuls in one phase is divided by the bytes that they read.
    pub fn launched(&self, kernel: Kernel<'_>, time: Duration) {
        let fixed = match kernel {
            Kernel::Embed => 0,
            Kernel::AddNorm => 1,
            Kernel::RopeStore => 2,
            Kernel::Attend => 3,
            Kernel::AttendMerge => 4,
            Kernel::AttendGather => 5,
            Kernel::Quantize => 6,
            Kernel::Activate => 7,
            Kernel::Sample => 8,
            Kernel::QkNorm => 9,
            Kernel::Route => 10,
            Kernel::Sort => 11,
            Kernel::Combine => 12,
            Kernel::Convolve => 13,
            Kernel::Delta => 14,
            Kernel::NormGate => 15,
            Kernel::Keep => 16,
            Kernel::Bias => 17,
            Kernel::LayerEmbed => 18,
            Kernel::LayerInput => 19,
            Kernel::LatentSplit => 20,
            Kernel::LatentStore => 21,
            Kernel::LatentValues => 22,
            Kernel::LatentJoin => 23,
            Kernel::Scan => 24,
            Kernel::ScanDots => 25,
            Kernel::CombineLatent => 26,
            Kernel::AdapterDown => 27,
            Kernel::AdapterUp => 28,
            Kernel::Matmul(ids) => {
                let matrix = |id: &MatrixId| self.matrices[id.0 as usize];
                let total: u64 = ids.iter().map(|id| matrix(id).1).sum();
                for id in ids {
                    let (index, bytes) = matrix(id);
                    self.matmuls[index].1.add(time.mul_f64(bytes as f64 / total as f64));
                }
                return;
            }
        };
        self.fixed[fixed].add(time);
    }

    /// Returns the kernels that ran.
    pub fn snapshot(&self) -> Vec<KernelCount> {
        let isa = self.isa;
        let fixed = FIXED.iter().zip(&self.fixed).map(|(&name, count)| {
            let kind = match (name, self.kv_dtype) {
                ("rope_store" | "attend" | "attend_gather", KvDtype::Q8) => "_q8",
                ("rope_store" | "attend" | "attend_gather", KvDtype::Q4) => "_q4",
                _ => "",
            };
            (format!("{name}{kind}/{isa}"), count)
        });
        let matmuls = self.matmuls.iter().map(|(name, count)| (name.clone(), count));
        let counts = matmuls.chain(fixed).map(|(name, count)| KernelCount {
            name,
            launches: count.launches.load(Relaxed),
            nanoseconds: count.nanoseconds.load(Relaxed),
        });
        counts.filter(|count| count.launches > 0).collect()
    }
}
