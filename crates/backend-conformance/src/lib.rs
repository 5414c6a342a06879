//! The suite that every backend instantiates.
//!
//! Small models with random weights run through a backend and through the [`reference`](mod@paguro_backend::reference);
//! logits must agree within justified tolerances of the backend. Then they run through the backend alone, in other
//! batches, chunks and pages, with other numbers of threads, and must be equal bit for bit. In a backend crate's
//! `tests/conformance.rs`:
//!
//! ```
//! use paguro_backend::{KvDtype, WeightFormat, reference::{KvRounding, Reference}};
//! use paguro_backend_conformance::{Draw, Subject, Tolerance};
//!
//! fn subject() -> Subject {
//!     Subject {
//!         backend: Box::new(|_threads| Box::new(Reference::default())),
//!         has_threads: false,
//!         exact_rows: 1,
//!         tolerance: |format| match format {
//!             WeightFormat::F32 => Tolerance { error: 1e-5, reason: "sums in another order" },
//!             _ => Tolerance { error: 1e-4, reason: "..." },
//!         },
//!         kv_dtype: KvDtype::F16,
//!         kv: KvRounding::F32,
//!         unsupported: &[],
//!         refused: &[],
//!         kernel_formats: &WeightFormat::ALL,
//!         draw: Draw::All,
//!     }
//! }
//!
//! paguro_backend_conformance::conformance!(subject());
//! # fn main() {}
//! ```
//!
//! Each case becomes a separate test. [`RandomModel`] and [`Driver`] also serve tests of other crates.

mod adapters;
mod assistants;
mod carried;
mod compare;
mod contract;
mod draw;
mod drive;
mod encoders;
mod exactness;
mod experts;
mod geometry;
mod gpu;
mod heads;
mod latent;
mod model;
#[cfg(test)]
mod mutations;
mod numbers;
mod page_io;
mod random;
mod recurrent;
mod rng;
mod rows;
mod sampling;
mod scans;
mod towers;
mod without_pages;

pub use adapters::random_adapter;
pub use draw::Draw;
pub use drive::{DriveOptions, Driver, SequenceId, submit};
pub use gpu::gpu_subject;
pub use model::{Biases, ExpertsShape, ModelShape, PagesOf, RandomModel, RecurrentShape, Spans};
pub use random::random_matrix;
pub use rng::Rng;

use paguro_backend::{Backend, KvDtype, WeightFormat, reference::KvRounding};

/// The backend under test.
pub struct Subject {
    /// Makes it, for a number of threads. Fresh arenas may be filled with large finite noise.
    pub backend: Box<dyn Fn(usize) -> Box<dyn Backend>>,
    /// True if it uses threads.
    pub has_threads: bool,
    /// Minimum number of rows with which a step's logits are bitwise equal in any batch; if it is more than 1, steps of
    /// fewer rows are only compared with the reference.
    pub exact_rows: usize,
    /// Tolerance of logits by the format of matrices, with a reason.
    pub tolerance: fn(WeightFormat) -> Tolerance,
    /// Type of its pages: a backend instantiates the suite for each supported one.
    pub kv_dtype: KvDtype,
    /// Rounding of K and V in pages of [`KvDtype::F16`], for the reference.
    pub kv: KvRounding,
    /// Formats that it refuses to load.
    pub unsupported: &'static [WeightFormat],
    /// Words of its refusals of programs and steps whose rows are not those of a text. Cases of such rows pass if it refuses them by
    /// one of these names.
    pub refused: &'static [&'static str],
    /// Formats that together use all of its matmul kernels: bit-exactness for these implies it for all others.
    pub kernel_formats: &'static [WeightFormat],
    /// Selection of variants of a case that differ in formats or shapes only. Every case runs with at least one.
    pub draw: Draw,
}

impl Subject {
    /// Returns the default options of cases.
    pub(crate) fn options(&self) -> DriveOptions {
        DriveOptions { kv_dtype: self.kv_dtype, ..DriveOptions::default() }
    }

    /// Returns the default options of comparisons of bits.
    pub(crate) fn exact_options(&self) -> DriveOptions {
        DriveOptions { least_rows: self.exact_rows, ..self.options() }
    }
}

/// Tolerance of logits.
#[derive(Clone, Copy, Debug)]
pub struct Tolerance {
    /// Maximum error of a logit, in units of the row's root mean square. The root mean square of the errors over all
    /// logits of a run may be a quarter of it: noise of that size seldom exceeds four times itself, and a small but
    /// systematic defect is detected.
    pub error: f32,
    /// Source of the error.
    pub reason: &'static str,
}

impl Tolerance {
    /// Tolerance of a backend with K and V in f16 and, for quantized weights, activations in eight bits.
    pub fn of_8_bit_activations(format: WeightFormat) -> Self {
        match format {
            WeightFormat::F32 | WeightFormat::F16 | WeightFormat::BF16 => {
                Self { error: 5e-3, reason: "f32 sums, and K or V on the other side of an f16 rounding" }
            }
            _ => Self {
                error: 0.25,
                reason: "activations have 8 bits: half a step is 0.4 % of a block's largest, in the inputs of every \
                         matmul of every layer, and random models sharpen it in their attention",
            },
        }
    }
}

/// Success, or the problem.
pub type Verdict = Result<(), String>;

/// A property that a backend must have.
pub struct Case {
    /// Its name, and that of its test.
    pub name: &'static str,
    /// Checks it.
    pub run: fn(&Subject) -> Verdict,
}

impl Case {
    /// Returns true if the case depends on the type of pages. The others are about matmuls and operations around
    /// attention.
    pub fn depends_on_pages(&self) -> bool {
        !without_pages::WITHOUT_PAGES.contains(&self.name)
    }
}

/// All cases; `conformance!` lists the same names.
pub const CASES: &[Case] = &[
    Case { name: "format_f32", run: |subject| numbers::format(subject, WeightFormat::F32) },
    Case { name: "format_f16", run: |subject| numbers::format(subject, WeightFormat::F16) },
    Case { name: "format_bf16", run: |subject| numbers::format(subject, WeightFormat::BF16) },
    Case { name: "format_q4_0", run: |subject| numbers::format(subject, WeightFormat::Q4_0) },
    Case { name: "format_q4_1", run: |subject| numbers::format(subject, WeightFormat::Q4_1) },
    Case { name: "format_q5_0", run: |subject| numbers::format(subject, WeightFormat::Q5_0) },
    Case { name: "format_q5_1", run: |subject| numbers::format(subject, WeightFormat::Q5_1) },
    Case { name: "format_q8_0", run: |subject| numbers::format(subject, WeightFormat::Q8_0) },
    Case { name: "format_q2_k", run: |subject| numbers::format(subject, WeightFormat::Q2_K) },
    Case { name: "format_q3_k", run: |subject| numbers::format(subject, WeightFormat::Q3_K) },
    Case { name: "format_q4_k", run: |subject| numbers::format(subject, WeightFormat::Q4_K) },
    Case { name: "format_q5_k", run: |subject| numbers::format(subject, WeightFormat::Q5_K) },
    Case { name: "format_q6_k", run: |subject| numbers::format(subject, WeightFormat::Q6_K) },
    Case { name: "format_iq1_s", run: |subject| numbers::format(subject, WeightFormat::IQ1_S) },
    Case { name: "format_iq1_m", run: |subject| numbers::format(subject, WeightFormat::IQ1_M) },
    Case { name: "format_iq2_xxs", run: |subject| numbers::format(subject, WeightFormat::IQ2_XXS) },
    Case { name: "format_iq2_xs", run: |subject| numbers::format(subject, WeightFormat::IQ2_XS) },
    Case { name: "format_iq2_s", run: |subject| numbers::format(subject, WeightFormat::IQ2_S) },
    Case { name: "format_iq3_xxs", run: |subject| numbers::format(subject, WeightFormat::IQ3_XXS) },
    Case { name: "format_iq3_s", run: |subject| numbers::format(subject, WeightFormat::IQ3_S) },
    Case { name: "format_iq4_nl", run: |subject| numbers::format(subject, WeightFormat::IQ4_NL) },
    Case { name: "format_iq4_xs", run: |subject| numbers::format(subject, WeightFormat::IQ4_XS) },
    Case { name: "format_tq1_0", run: |subject| numbers::format(subject, WeightFormat::TQ1_0) },
    Case { name: "format_tq2_0", run: |subject| numbers::format(subject, WeightFormat::TQ2_0) },
    Case { name: "format_q1_0", run: |subject| numbers::format(subject, WeightFormat::Q1_0) },
    Case { name: "format_q2_0", run: |subject| numbers::format(subject, WeightFormat::Q2_0) },
    Case { name: "format_mxfp4", run: |subject| numbers::format(subject, WeightFormat::MXFP4) },
    Case { name: "format_nvfp4", run: |subject| numbers::format(subject, WeightFormat::NVFP4) },
    Case { name: "format_nvfp4_scaled", run: |subject| numbers::format(subject, WeightFormat::NVFP4_SCALED) },
    Case { name: "mixed_formats", run: numbers::mixed_formats },
    Case { name: "grouped_heads", run: numbers::grouped_heads },
    Case { name: "many_sequences", run: numbers::many_sequences },
    Case { name: "head_dims", run: numbers::head_dims },
    Case { name: "unusual_head_dims", run: numbers::unusual_head_dims },
    Case { name: "biases", run: numbers::biases },
    Case { name: "biases_everywhere", run: numbers::biases_everywhere },
    Case { name: "large_keys", run: numbers::large_keys },
    Case { name: "qk_norms", run: numbers::qk_norms },
    Case { name: "post_norms", run: numbers::post_norms },
    Case { name: "soft_caps", run: numbers::soft_caps },
    Case { name: "windows", run: numbers::windows },
    Case { name: "alternating_windows", run: numbers::alternating_windows },
    Case { name: "ropes", run: numbers::ropes },
    Case { name: "tied_head", run: numbers::tied_head },
    Case { name: "gelu", run: numbers::gelu },
    Case { name: "layer_norms", run: numbers::layer_norms },
    Case { name: "norm_places", run: numbers::norm_places },
    Case { name: "activations", run: numbers::activations },
    Case { name: "ungated", run: numbers::ungated },
    Case { name: "parallel", run: numbers::parallel },
    Case { name: "qk_norm_kinds", run: numbers::qk_norm_kinds },
    Case { name: "no_positions", run: numbers::no_positions },
    Case { name: "learned_positions", run: numbers::learned_positions },
    Case { name: "position_scale", run: numbers::position_scale },
    Case { name: "sinks", run: numbers::sinks },
    Case { name: "scales", run: numbers::scales },
    Case { name: "bidirectional", run: encoders::bidirectional },
    Case { name: "encoder_blocks", run: encoders::encoder_blocks },
    Case { name: "distance_biases", run: encoders::distance_biases },
    Case { name: "exact_encoders", run: encoders::exact_encoders },
    Case { name: "means", run: encoders::means },
    Case { name: "kv_geometry", run: geometry::kv_geometry },
    Case { name: "shared_kv", run: geometry::shared_kv },
    Case { name: "keys_as_values", run: geometry::keys_as_values },
    Case { name: "layer_embeds", run: geometry::layer_embeds },
    Case { name: "experts_beside", run: geometry::experts_beside },
    Case { name: "unreadable_tables", run: geometry::unreadable_tables },
    Case { name: "experts", run: experts::experts },
    Case { name: "routers", run: experts::routers },
    Case { name: "expert_formats", run: experts::formats },
    Case { name: "short_convolutions", run: recurrent::short_convolutions },
    Case { name: "delta_rules", run: recurrent::delta_rules },
    Case { name: "hybrids", run: recurrent::hybrids },
    Case { name: "attention_gates", run: recurrent::attention_gates },
    Case { name: "scans", run: scans::scans },
    Case { name: "mixer_sums", run: scans::mixer_sums },
    Case { name: "bare_layers", run: scans::bare_layers },
    Case { name: "ungated_experts", run: scans::ungated_experts },
    Case { name: "given_rows", run: rows::given_rows },
    Case { name: "rope_axes", run: rows::rope_axes },
    Case { name: "spans", run: rows::spans },
    Case { name: "spans_of_encoders", run: rows::spans_of_encoders },
    Case { name: "residuals", run: rows::residuals },
    Case { name: "stages", run: rows::stages },
    Case { name: "joined_rows", run: heads::joined_rows },
    Case { name: "exact_heads", run: heads::exact },
    Case { name: "shared_pages", run: assistants::shared_pages },
    Case { name: "towers", run: towers::towers },
    Case { name: "latent_attention", run: latent::latent_attention },
    Case { name: "expert_groups", run: latent::expert_groups },
    Case { name: "adapters", run: adapters::adapters },
    Case { name: "bad_adapters", run: adapters::refusals },
    Case { name: "everything", run: numbers::everything },
    Case { name: "pages", run: numbers::pages },
    Case { name: "lengths", run: numbers::lengths },
    Case { name: "many_rows", run: numbers::many_rows },
    Case { name: "embeddings", run: numbers::embeddings },
    Case { name: "limits", run: numbers::limits },
    Case { name: "long_context", run: numbers::long_context },
    Case { name: "gather", run: numbers::gather },
    Case { name: "batch_invariance", run: exactness::batches },
    Case { name: "exact_in_chunks", run: exactness::chunks },
    Case { name: "exact_in_long_chunks", run: exactness::long_chunks },
    Case { name: "exact_in_wide_steps", run: exactness::wide_steps },
    Case { name: "exact_with_shared_prefix", run: exactness::shared_prefix },
    Case { name: "exact_after_copy_on_write", run: exactness::copy_on_write },
    Case { name: "exact_after_preemption", run: exactness::preemption },
    Case { name: "exact_on_any_threads", run: exactness::threads },
    Case { name: "exact_in_any_place", run: exactness::places },
    Case { name: "exact_embeddings", run: exactness::embeddings },
    Case { name: "exact_experts", run: experts::exact },
    Case { name: "expert_slots", run: experts::slots },
    Case { name: "exact_states", run: recurrent::exact },
    Case { name: "exact_scans", run: scans::exact },
    Case { name: "exact_rows", run: rows::exact },
    Case { name: "exact_latent", run: latent::exact },
    Case { name: "exact_adapters", run: adapters::exact },
    Case { name: "exact_geometry", run: geometry::exact },
    Case { name: "exact_from_outside", run: page_io::exact },
    Case { name: "foreign_pages", run: page_io::refusals },
    Case { name: "outputs", run: contract::outputs },
    Case { name: "samples", run: sampling::samples },
    Case { name: "carried_tokens", run: carried::carried_tokens },
    Case { name: "carried_rows", run: carried::carried_rows },
    Case { name: "bad_weights", run: contract::bad_weights },
    Case { name: "invalid_steps", run: contract::invalid_steps },
    Case { name: "kernel_counts", run: contract::kernel_counts },
    Case { name: "runners_are_separate", run: contract::runners_are_separate },
];

/// Defines a test of every [case](CASES) for a [`Subject`]. With `maybe` in front, for a `Result` of one: without the
/// device, the tests print the reason and pass. With `; only` and names behind it, for these cases.
#[macro_export]
macro_rules! conformance {
    (maybe $subject:expr) => {
        $crate::conformance!(@with maybe [$subject]);
    };
    (maybe $subject:expr; only $($case:ident)*) => {
        $crate::conformance!(@maybe [$subject] $($case)*);
    };
    ($subject:expr) => {
        $crate::conformance!(@with tests [$subject]);
    };
    (@with $what:ident [$($subject:expr)?]) => {
        $crate::conformance! { @$what [$($subject)?]
            format_f32 format_f16 format_bf16 format_q4_0 format_q4_1 format_q5_0 format_q5_1 format_q8_0
            format_q2_k format_q3_k format_q4_k format_q5_k format_q6_k
            format_iq1_s format_iq1_m format_iq2_xxs format_iq2_xs format_iq2_s format_iq3_xxs format_iq3_s format_iq4_nl
            format_iq4_xs format_tq1_0 format_tq2_0 format_q1_0 format_q2_0 format_mxfp4 format_nvfp4 format_nvfp4_scaled
            mixed_formats grouped_heads many_sequences head_dims unusual_head_dims biases biases_everywhere large_keys qk_norms post_norms soft_caps
            windows alternating_windows ropes tied_head gelu layer_norms norm_places activations ungated parallel
            qk_norm_kinds no_positions learned_positions position_scale sinks scales bidirectional encoder_blocks distance_biases exact_encoders means kv_geometry
            shared_kv keys_as_values layer_embeds experts_beside unreadable_tables
            experts routers expert_formats short_convolutions delta_rules hybrids attention_gates
            scans mixer_sums bare_layers ungated_experts
            given_rows rope_axes spans spans_of_encoders residuals stages joined_rows exact_heads shared_pages towers latent_attention expert_groups adapters bad_adapters everything pages lengths many_rows embeddings
            limits long_context gather
            batch_invariance exact_in_chunks exact_in_long_chunks exact_in_wide_steps
            exact_with_shared_prefix exact_after_copy_on_write exact_after_preemption exact_on_any_threads
            exact_in_any_place exact_embeddings exact_experts expert_slots exact_states exact_scans exact_rows exact_latent
            exact_adapters exact_geometry exact_from_outside foreign_pages outputs samples carried_tokens carried_rows
            bad_weights invalid_steps kernel_counts runners_are_separate
        }
    };
    (@tests [$subject:expr] $($case:ident)*) => {
        $(
            #[test]
            fn $case() {
                $crate::check(stringify!($case), &$subject);
            }
        )*
    };
    (@maybe [$subject:expr] $($case:ident)*) => {
        $(
            #[test]
            fn $case() {
                match $subject {
                    Ok(subject) => $crate::check(stringify!($case), &subject),
                    Err(reason) => println!("skipped: the conformance suite: {reason}"),
                }
            }
        )*
    };
    (@names [] $($case:ident)*) => {
        [$(stringify!($case)),*]
    };
}

/// Runs one case.
///
/// # Panics
/// With the problem, if the backend fails the case.
pub fn check(name: &str, subject: &Subject) {
    let case =
        CASES.iter().find(|case| case.name == name).expect("`conformance!` and `CASES` list the same names");
    if let Err(problem) = (case.run)(subject) {
        panic!("{problem}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_macro_lists_all_cases() {
        let names: Vec<&str> = CASES.iter().map(|case| case.name).collect();
        assert_eq!(names, crate::conformance!(@with names []));
        for name in without_pages::WITHOUT_PAGES {
            assert!(names.contains(name), "there is no case {name}");
        }
    }
}
