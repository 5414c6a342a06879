//! Slow variants of tests, of which a run has a sample.
//!
//! Each repeats cases that also run elsewhere, on other kernels or another instruction set, and is slow because its
//! code is compiled or emulated. The files of the crates that are tested draw them (`seed.rs`); `--all` runs all of them.

use std::collections::BTreeSet;

use anyhow::{Result, bail};

use crate::{
    listing::Listing,
    seed::{Seeds, mix},
};
use without_pages::WITHOUT_PAGES;

#[path = "../../crates/backend-conformance/src/without_pages.rs"]
mod without_pages;

/// The package that depends on all others.
const WHOLE: &str = "paguro";

/// The choice of one run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sample {
    /// Every test runs.
    All,
    /// Slow variants run if the seed of their package draws them.
    Drawn(Seeds),
}

/// Slow variants of one kind: every case in every module.
struct Variants {
    package: &'static str,
    /// The test target, as in `tests/{target}.rs`.
    target: &'static str,
    /// Modules of the target; `""` is the whole.
    modules: &'static [&'static str],
    /// Names of tests in these modules. An empty list stands for all tests of the target that no other kind has.
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

const VARIANTS: [Variants; 18] = [
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
        one_in: 6,
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
        cases: &[
            "format_f16",
            "format_q4_k",
            "format_q8_0",
            "encoder_blocks",
            "many_rows",
            "long_context",
            "bidirectional",
            "towers",
        ],
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
            "joined_rows",
            "towers",
        ],
        one_in: 8,
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
        one_in: 12,
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
        one_in: 8,
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
        one_in: 8,
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
        one_in: 6,
    },
    // Architectures, whose shapes the suite has.
    Variants {
        package: "paguro",
        target: "it",
        modules: &["architectures::gpu"],
        cases: &[
            "logits_on_a_gpu_equal_those_of_llama_cpp",
            "logits_on_a_gpu_equal_those_of_transformers",
            "towers_on_a_gpu_equal_those_of_transformers",
            "two_hundred_steps_on_a_gpu_are_those_of_the_cpu",
        ],
        one_in: 5,
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
        one_in: 6,
    },
    Variants {
        package: "paguro-backend-wgpu",
        target: "conformance",
        modules: &["short"],
        cases: &["alternating_windows", "many_rows", "outputs", "carried_tokens"],
        one_in: 6,
    },
    Variants {
        package: "paguro-backend-wgpu",
        target: "handoff",
        modules: &[""],
        cases: &["same_bits_with_and_without_barriers", "a_step_that_gives_up_is_repeated_without_handoff"],
        one_in: 6,
    },
    // The slowest cases, which need most kernels: at least one kind of pages or matrices in each run.
    Variants {
        package: "paguro-backend-wgpu",
        target: "conformance",
        modules: &["", "cooperative", "q8", "q4"],
        cases: &["exact_geometry"],
        one_in: 12,
    },
    Variants {
        package: "paguro-backend-wgpu",
        target: "conformance",
        modules: &["", "cooperative", "q8", "q4"],
        cases: &["exact_in_chunks"],
        one_in: 12,
    },
    // A software driver runs the kernels of all other cases as well.
    Variants { package: "paguro-backend-wgpu", target: "conformance", modules: &[""], cases: &[], one_in: 8 },
];

/// Modules of tests that exist on other processors alone.
fn is_elsewhere(module: &str) -> bool {
    module.starts_with("avx") && !cfg!(target_arch = "x86_64")
        || module.starts_with("neon") && !cfg!(target_arch = "aarch64")
}

impl Variants {
    fn id(&self) -> String {
        format!("{}::{}", self.package, self.target)
    }

    /// Names of all combinations, some of which a module may lack.
    fn names(&self, module: &str) -> impl Iterator<Item = String> {
        let prefix = if module.is_empty() { String::new() } else { format!("{module}::") };
        self.cases.iter().map(move |case| format!("{prefix}{case}"))
    }

    /// Returns the tests of this kind, and adds modules and cases that do not exist to `missing`.
    fn tests(&self, listing: &Listing, missing: &mut BTreeSet<String>) -> Vec<String> {
        let id = self.id();
        let modules: Vec<_> = self.modules.iter().filter(|module| !is_elsewhere(module)).collect();
        let tests: Vec<_> = modules.iter().flat_map(|module| self.names(module)).collect();
        let tests: Vec<_> = tests.into_iter().filter(|test| listing.has(&id, test)).collect();
        for module in modules.iter().filter(|_| !self.cases.is_empty()) {
            if !self.names(module).any(|name| tests.contains(&name)) {
                missing.insert(format!("{id}: module `{module}`"));
            }
        }
        for case in self.cases {
            if !modules.is_empty() && !tests.iter().any(|test| test.rsplit("::").next() == Some(*case)) {
                missing.insert(format!("{id}: `{case}`"));
            }
        }
        tests
    }
}

impl Sample {
    /// Returns the value of `PAGURO_SAMPLE`, by which tests of a package draw among formats and shapes
    /// (`crates/backend-conformance/src/draw.rs`).
    pub fn of_cases(&self, package: &str) -> String {
        match self {
            Self::All => "all".to_owned(),
            Self::Drawn(seeds) => seeds.get(package).to_string(),
        }
    }

    /// Returns the variables with the seeds of random tests: of proptest, and of the random requests and peers. They follow from
    /// the files of all crates.
    pub fn seeds(&self) -> [(&'static str, String); 2] {
        let seed = match self {
            Self::All => 0,
            Self::Drawn(seeds) => seeds.get(WHOLE),
        };
        ["PROPTEST_RNG_SEED", "PAGURO_FUZZ_SEED"].map(|name| (name, seed.to_string()))
    }

    /// Returns true if one of `one_in` packages of this content draws this.
    pub fn draws(&self, package: &str, name: &str, one_in: u64) -> bool {
        match self {
            Self::All => true,
            Self::Drawn(seeds) => hash(seeds.get(package), name).is_multiple_of(one_in),
        }
    }

    /// Returns the items that run: all, or one.
    pub fn some<'a, T>(&self, package: &str, items: &'a [T]) -> &'a [T] {
        match self {
            Self::All => items,
            Self::Drawn(seeds) => {
                let at = hash(seeds.get(package), "") as usize % items.len().max(1);
                items.get(at..=at).unwrap_or_default()
            }
        }
    }

    /// Returns the tests that this run leaves out, and the number of slow variants that there are.
    ///
    /// # Errors
    /// Names in the lists of this file that no test has.
    pub fn left_out(&self, listing: &Listing) -> Result<(Vec<LeftOut>, usize)> {
        let mut missing = BTreeSet::new();
        let mut kinds: Vec<_> =
            VARIANTS.iter().map(|variants| (variants, variants.tests(listing, &mut missing))).collect();
        // The others are in no list.
        let named: BTreeSet<(String, String)> = kinds
            .iter()
            .flat_map(|(variants, tests)| tests.iter().map(|test| (variants.id(), test.clone())))
            .collect();
        for (variants, tests) in kinds.iter_mut().filter(|(variants, _)| variants.cases.is_empty()) {
            let id = variants.id();
            let others = listing.tests(&id).filter(|test| !named.contains(&(id.clone(), (*test).to_owned())));
            *tests = others.map(str::to_owned).collect();
        }
        if !missing.is_empty() {
            let missing: Vec<_> = missing.into_iter().collect();
            bail!("tests in the lists of xtask/src/sample.rs that do not exist: {}", missing.join(", "));
        }
        let (mut left_out, mut count) = (Vec::new(), 0);
        for (Variants { package, target, one_in, .. }, tests) in kinds {
            count += tests.len();
            let Self::Drawn(seeds) = self else { continue };
            // The smallest hash is drawn in any case.
            let hash = |test: &String| hash(seeds.get(package), &format!("{package} {target} {test}"));
            let always = tests.iter().min_by_key(|test| hash(test)).cloned();
            let drawn = |test: &String| hash(test).is_multiple_of(*one_in) || Some(test) == always.as_ref();
            let others = tests.iter().filter(|test| !drawn(test));
            left_out.extend(others.map(|test| LeftOut { package, target, test: test.clone() }));
        }
        Ok((left_out, count))
    }
}

/// FNV-1a of the text, mixed with the seed (Fowler, Noll, Vo).
fn hash(seed: u64, text: &str) -> u64 {
    let fnv = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    mix(text.bytes().fold(0xcbf2_9ce4_8422_2325, fnv), seed)
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, HashSet};

    use super::*;

    /// A listing with all names of the lists, and others.
    fn listing() -> Listing {
        let mut tests: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for variants in &VARIANTS {
            let names = variants.modules.iter().flat_map(|module| variants.names(module));
            tests.entry(variants.id()).or_default().extend(names);
        }
        let others = tests.entry("paguro-backend-wgpu::conformance".into()).or_default();
        others.extend((0..40).map(|number| format!("other_{number}")));
        let tests: Vec<(&str, Vec<&str>)> = tests
            .iter()
            .map(|(id, names)| (id.as_str(), names.iter().map(String::as_str).collect()))
            .collect();
        let tests: Vec<(&str, &[&str])> = tests.iter().map(|(id, names)| (*id, &names[..])).collect();
        Listing::of(&tests)
    }

    #[test]
    fn some_of_every_kind_are_drawn_and_over_seeds_all_of_them() {
        let listing = listing();
        let packages = ["paguro", "paguro-backend-cpu", "paguro-backend-wgpu"];
        let (none, count) = Sample::All.left_out(&listing).unwrap();
        assert!(none.is_empty());
        let mut always_left_out: Option<HashSet<String>> = None;
        for seed in 0..200 {
            let sample = Sample::Drawn(Seeds::fixed(&packages, seed));
            let (left_out, _) = sample.left_out(&listing).unwrap();
            assert_eq!(left_out, sample.left_out(&listing).unwrap().0);
            assert!(left_out.len() > count / 2, "{seed}: {} of {count} are left out", left_out.len());
            let names: HashSet<String> =
                left_out.into_iter().map(|test| test.package.to_owned() + &test.test).collect();
            for variants in VARIANTS.iter().filter(|variants| !variants.cases.is_empty()) {
                let tests = variants.tests(&listing, &mut BTreeSet::new());
                let is_drawn = |test: &String| !names.contains(&(variants.package.to_owned() + test));
                assert!(tests.iter().any(is_drawn), "{seed}: {} {:?}", variants.package, variants.modules);
            }
            always_left_out = Some(match always_left_out {
                Some(before) => before.intersection(&names).cloned().collect(),
                None => names,
            });
        }
        assert_eq!(always_left_out, Some(HashSet::new()));
    }

    #[test]
    fn names_that_no_test_has_are_an_error() {
        let error = Sample::All.left_out(&Listing::default()).unwrap_err().to_string();
        assert!(
            error.contains("paguro::it: module `families::gpu`") && error.contains("`exact_geometry`"),
            "{error}"
        );
    }

    #[test]
    fn one_item_is_drawn_by_each_seed_and_all_of_them_by_some() {
        let items = [1, 2, 3];
        assert_eq!(Sample::All.some("a", &items), items);
        let drawn = |seed| Sample::Drawn(Seeds::fixed(&["a"], seed)).some("a", &items).to_vec();
        assert!((0..50).all(|seed| drawn(seed).len() == 1 && drawn(seed) == drawn(seed)));
        assert_eq!((0..50).flat_map(drawn).collect::<BTreeSet<_>>().len(), 3);
    }
}
