//! Slow variants of tests, of which a run of CI draws a sample.
//!
//! Each repeats cases that also run elsewhere, on other kernels or another instruction set, and is slow because its
//! code is compiled or emulated. A run draws them by a seed, which it prints; `--all` runs all of them.

use std::time::{SystemTime, UNIX_EPOCH};

use without_pages::WITHOUT_PAGES;

#[path = "../../crates/backend-conformance/src/without_pages.rs"]
mod without_pages;

/// The choice of one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sample {
    /// Every test runs.
    All,
    /// Slow variants run if the seed draws them.
    Seed(u64),
}

/// Slow variants of one kind: every case in every module.
struct Variants {
    package: &'static str,
    /// The test target, as in `tests/{target}.rs`.
    target: &'static str,
    /// Modules of the target; `""` is the whole.
    modules: &'static [&'static str],
    cases: &'static [&'static str],
    /// One of this many is drawn on average, and at least one in total.
    one_in: u64,
}

/// A test that a run leaves out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftOut {
    pub package: &'static str,
    pub target: &'static str,
    pub test: String,
}

const VARIANTS: [Variants; 17] = [
    Variants {
        package: "paguro-backend-cpu",
        target: "conformance",
        modules: &["scalar", "scalar_q8", "scalar_q4", "avx2_q8", "avx2_q4", "neon"],
        cases: &[
            "exact_in_chunks",
            "batch_invariance",
            "exact_in_long_chunks",
            "exact_in_any_place",
            "exact_in_wide_steps",
            "exact_with_shared_prefix",
            "exact_after_copy_on_write",
            "exact_after_preemption",
            "exact_on_any_threads",
            "exact_states",
            "exact_scans",
            "exact_latent",
            "exact_geometry",
            "unusual_head_dims",
            "long_context",
            "bidirectional",
            "encoder_blocks",
            "distance_biases",
            "exact_encoders",
            "exact_from_outside",
        ],
        one_in: 4,
    },
    Variants {
        package: "paguro-backend-cpu",
        target: "conformance",
        modules: &["scalar", "neon"],
        cases: &["exact_embeddings", "exact_experts", "expert_formats"],
        one_in: 4,
    },
    Variants {
        package: "paguro-backend-wgpu",
        target: "conformance",
        modules: &["emulated"],
        cases: &["format_f16", "format_q4_k", "format_q8_0", "many_rows", "long_context"],
        one_in: 10,
    },
    Variants {
        package: "paguro-backend-wgpu",
        target: "conformance",
        modules: &["hardware"],
        cases: &[
            "format_f16",
            "format_q2_k",
            "format_q4_k",
            "format_q5_k",
            "format_q6_k",
            "format_q8_0",
            "many_rows",
            "long_context",
            "batch_invariance",
        ],
        one_in: 4,
    },
    Variants {
        package: "paguro-backend-wgpu",
        target: "conformance",
        modules: &["q8"],
        cases: WITHOUT_PAGES,
        one_in: 12,
    },
    Variants {
        package: "paguro-backend-cpu",
        target: "conformance",
        modules: &["best_q8", "avx2_q8", "scalar_q8"],
        cases: WITHOUT_PAGES,
        one_in: 12,
    },
    // Eight bits: the other cases have kernels of their own.
    Variants {
        package: "paguro-backend-wgpu",
        target: "conformance",
        modules: &["q8"],
        cases: &[
            "format_f16",
            "format_bf16",
            "format_q8_0",
            "unusual_head_dims",
            "qk_norms",
            "alternating_windows",
            "ropes",
            "qk_norm_kinds",
            "no_positions",
            "position_scale",
            "scans",
            "mixer_sums",
            "bare_layers",
            "hybrids",
            "expert_groups",
            "pages",
            "lengths",
            "limits",
            "batch_invariance",
            "exact_in_wide_steps",
            "exact_in_long_chunks",
            "exact_with_shared_prefix",
            "exact_after_preemption",
            "exact_on_any_threads",
            "exact_states",
            "exact_scans",
            "exact_latent",
            "outputs",
            "samples",
            "carried_tokens",
            "invalid_steps",
            "runners_are_separate",
        ],
        one_in: 6,
    },
    // Attention in eight bits: kernels of their own, of the same source as those of F16.
    Variants {
        package: "paguro-backend-wgpu",
        target: "conformance",
        modules: &["q8"],
        cases: &[
            "attention_gates",
            "everything",
            "exact_after_copy_on_write",
            "exact_from_outside",
            "exact_in_any_place",
            "gather",
            "grouped_heads",
            "head_dims",
            "keys_as_values",
            "kv_geometry",
            "large_keys",
            "latent_attention",
            "long_context",
            "many_rows",
            "many_sequences",
            "shared_kv",
            "sinks",
            "soft_caps",
            "windows",
        ],
        one_in: 3,
    },
    Variants {
        package: "paguro-backend-wgpu",
        target: "conformance",
        modules: &["q4"],
        cases: &[
            "attention_gates",
            "exact_from_outside",
            "batch_invariance",
            "exact_latent",
            "everything",
            "head_dims",
            "latent_attention",
            "lengths",
            "long_context",
            "many_rows",
            "shared_kv",
            "unusual_head_dims",
        ],
        one_in: 4,
    },
    // Trained models. The suite runs all of their kernels, and the CPU all of these models.
    Variants {
        package: "paguro",
        target: "it",
        modules: &["families::gpu"],
        cases: &[
            "qwen3moe_tells_its_stories_on_a_gpu",
            "qwen35moe_tells_its_stories_on_a_gpu",
            "lfm2moe_tells_its_stories_on_a_gpu",
            "gemma4_tells_its_stories_on_a_gpu",
            "gemma4moe_tells_its_stories_on_a_gpu",
            "dsv3_tells_its_stories_on_a_gpu",
            "gpt_oss_tells_its_stories_on_a_gpu",
        ],
        one_in: 7,
    },
    // Both compare logits of the embedded model.
    Variants {
        package: "paguro",
        target: "it",
        modules: &["reference::gpu"],
        cases: &[
            "greedy_runs_are_the_reference_s_token_by_token_on_a_gpu",
            "perplexity_on_a_gpu_is_the_cpu_s",
            "the_engine_s_greedy_answers_are_the_reference_s_on_a_gpu",
        ],
        one_in: 4,
    },
    // Architectures, whose shapes the suite has.
    Variants {
        package: "paguro",
        target: "it",
        modules: &["architectures::gpu"],
        cases: &[
            "logits_on_a_gpu_equal_those_of_llama_cpp",
            "logits_on_a_gpu_equal_those_of_transformers",
            "two_hundred_steps_on_a_gpu_are_those_of_the_cpu",
        ],
        one_in: 3,
    },
    // Bits that do not depend on batches, chunks and places: kinds of one property, with kernels that other cases have.
    Variants {
        package: "paguro-backend-wgpu",
        target: "conformance",
        modules: &[""],
        cases: &[
            "exact_in_long_chunks",
            "exact_in_wide_steps",
            "exact_with_shared_prefix",
            "exact_after_copy_on_write",
            "exact_after_preemption",
            "exact_in_any_place",
            "exact_embeddings",
            "exact_experts",
            "exact_states",
            "exact_scans",
            "exact_latent",
            "exact_from_outside",
        ],
        one_in: 3,
    },
    Variants {
        package: "paguro-backend-wgpu",
        target: "conformance",
        modules: &["short"],
        cases: &["alternating_windows", "many_rows", "outputs", "carried_tokens"],
        one_in: 3,
    },
    Variants {
        package: "paguro-backend-wgpu",
        target: "handoff",
        modules: &[""],
        cases: &["same_bits_with_and_without_barriers", "a_step_that_gives_up_is_repeated_without_handoff"],
        one_in: 3,
    },
    // The slowest cases, which need most kernels: at least one kind of pages or matrices in each run.
    Variants {
        package: "paguro-backend-wgpu",
        target: "conformance",
        modules: &["", "cooperative", "q8", "q4"],
        cases: &["exact_geometry"],
        one_in: 8,
    },
    Variants {
        package: "paguro-backend-wgpu",
        target: "conformance",
        modules: &["", "cooperative", "q8", "q4"],
        cases: &["exact_in_chunks"],
        one_in: 8,
    },
];

impl Variants {
    /// Names of all of them.
    fn tests(&self) -> Vec<String> {
        let name = |module: &str, case: &str| match module {
            "" => case.to_owned(),
            _ => format!("{module}::{case}"),
        };
        self.modules.iter().flat_map(|module| self.cases.iter().map(move |case| name(module, case))).collect()
    }
}

impl Sample {
    /// A sample by the time of day.
    pub fn of_now() -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self::Seed(now.as_secs() % 1_000_000)
    }

    /// The tests that this run leaves out, and the number of slow variants that there are.
    pub fn left_out(self) -> (Vec<LeftOut>, usize) {
        let (mut left_out, mut count) = (Vec::new(), 0);
        for variants in VARIANTS {
            let Variants { package, target, one_in, .. } = variants;
            let tests = variants.tests();
            count += tests.len();
            let Self::Seed(seed) = self else { continue };
            // The smallest hash is drawn in any case.
            let hash = |test: &String| hash(seed, &format!("{package} {target} {test}"));
            let always = tests.iter().min_by_key(|test| hash(test)).cloned();
            let drawn = |test: &String| hash(test) % one_in == 0 || Some(test) == always.as_ref();
            let others = tests.iter().filter(|test| !drawn(test));
            left_out.extend(others.map(|test| LeftOut { package, target, test: test.clone() }));
        }
        (left_out, count)
    }
}

/// FNV-1a of the text, mixed with the seed (Fowler, Noll, Vo; finalizer of SplitMix64).
fn hash(seed: u64, text: &str) -> u64 {
    let fnv = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    let mut x = text.bytes().fold(0xcbf2_9ce4_8422_2325, fnv) ^ seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn some_of_every_kind_are_drawn_and_over_seeds_all_of_them() {
        let (none, count) = Sample::All.left_out();
        assert!(none.is_empty());
        let mut always_left_out: Option<HashSet<String>> = None;
        for seed in 0..100 {
            let (left_out, _) = Sample::Seed(seed).left_out();
            assert_eq!(left_out, Sample::Seed(seed).left_out().0);
            assert!(left_out.len() > count / 2, "{seed}: {} of {count} are left out", left_out.len());
            let names: HashSet<String> =
                left_out.into_iter().map(|test| test.package.to_owned() + &test.test).collect();
            for variants in VARIANTS {
                let is_drawn = |test: &String| !names.contains(&(variants.package.to_owned() + test));
                assert!(
                    variants.tests().iter().any(is_drawn),
                    "{seed}: {} {:?}",
                    variants.package,
                    variants.modules
                );
            }
            always_left_out = Some(match always_left_out {
                Some(before) => before.intersection(&names).cloned().collect(),
                None => names,
            });
        }
        assert_eq!(always_left_out, Some(HashSet::new()));
    }
}
