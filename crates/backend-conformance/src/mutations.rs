//! The suite's own test: backends with a defect each, made from the reference, must be caught.

use std::collections::BTreeSet;

use paguro_backend::{
    AttentionMode, Backend, Bytes, Capacity, Carried, KernelCount, KvDtype, Limits, LoadError, Outcome,
    PageContent, PageFormat, PageId, PageMove, Program, Runner, SamplingParams, Scores, Step, StepError,
    StepOutput, StepSequence, Ticket, Want, WeightFormat, Weights,
    reference::{
        AttentionFn, AttentionShape, HeadVectors, KvRounding, Reference, RoundFn, attention, round_f16,
        round_q4, round_q8,
    },
};

mod layers;
mod pages;
mod programs;

use self::{
    pages::{one_scale, remembers, toward_zero, untransformed, wraps},
    programs::*,
};
use super::{CASES, Case, Draw, ModelShape, Subject, Tolerance};

/// A defect. The default has none.
#[derive(Clone, Copy)]
struct Defect {
    attention: AttentionFn,
    kv_dtype: KvDtype,
    round: RoundFn,
    program: fn(&mut Program),
    weights: fn(&mut Weights),
    limits: fn(&mut Limits),
    /// Changes logits, knowing the step.
    logits: fn(&mut [f32], &Circumstances),
    /// Likewise.
    embeddings: fn(&mut [f32], &Circumstances),
    outcomes: fn(&mut Vec<Outcome>),
    block_tables: fn(&mut [PageId], &[StepSequence]),
    sequences: fn(&mut [StepSequence]),
    carried: fn(&mut [Carried]),
    moves: fn(&mut PageMove),
    moves_pages: bool,
    checks_weights: bool,
    checks_steps: bool,
    waits_for_masks: bool,
    params: fn(&mut SamplingParams),
    counts: fn(&mut Vec<KernelCount>),
}

/// Properties that logits must not depend on.
#[derive(Clone, Copy, Default)]
struct Circumstances {
    rows: usize,
    first_page: u32,
    threads: usize,
    steps: u64,
}

const NONE: Defect = Defect {
    attention,
    kv_dtype: KvDtype::F16,
    round: round_f16,
    program: |_| (),
    weights: |_| (),
    limits: |_| (),
    logits: |_, _| (),
    embeddings: |_, _| (),
    outcomes: |_| (),
    block_tables: |_, _| (),
    sequences: |_| (),
    carried: |_| (),
    moves: |_| (),
    moves_pages: true,
    checks_weights: true,
    checks_steps: true,
    waits_for_masks: true,
    params: |_| (),
    counts: |_| (),
};

/// No defect, with eight-bit pages.
const Q8: Defect = Defect { kv_dtype: KvDtype::Q8, round: round_q8, ..NONE };

/// None, in four bits.
const Q4: Defect = Defect { kv_dtype: KvDtype::Q4, round: round_q4, ..NONE };

struct Defective {
    defect: Defect,
    threads: usize,
}

impl Backend for Defective {
    fn name(&self) -> &str {
        "defective"
    }

    fn capacity(&self) -> Capacity {
        Reference::default().capacity()
    }

    fn page_bytes(&self, program: &Program, block_size: usize, kv_dtype: KvDtype) -> usize {
        Reference::default().page_bytes(program, block_size, kv_dtype)
    }

    fn buffer_bytes(&self, program: &Program, limits: &Limits) -> u64 {
        Reference::default().buffer_bytes(program, limits)
    }

    fn load(
        &self,
        program: &Program,
        mut weights: Weights,
        mut limits: Limits,
    ) -> Result<Box<dyn Runner>, LoadError> {
        let mut program = program.clone();
        if !self.defect.checks_weights && program.check(&weights).is_err() {
            let harmless = ModelShape::default().build(0);
            (program, weights) = (harmless.program, harmless.weights);
        }
        (self.defect.program)(&mut program);
        (self.defect.weights)(&mut weights);
        (self.defect.limits)(&mut limits);
        let reference = Reference { kv: KvRounding::F16, poison: Some(1) };
        let Defect { attention, round, .. } = self.defect;
        let inner = reference.load_with(attention, round, &program, weights, limits)?;
        let now = Circumstances { threads: self.threads, ..Circumstances::default() };
        Ok(Box::new(DefectiveRunner { inner: Box::new(inner), defect: self.defect, now }))
    }
}

struct DefectiveRunner {
    inner: Box<dyn Runner>,
    defect: Defect,
    now: Circumstances,
}

impl Runner for DefectiveRunner {
    fn submit(&mut self, step: &Step<'_>) -> Result<Ticket, StepError> {
        let mut pages = step.pages.to_vec();
        (self.defect.block_tables)(&mut pages, step.sequences);
        self.now.rows = step.tokens.len();
        self.now.first_page = step.pages[0].0;
        self.now.steps += 1;
        let params: Vec<SamplingParams> = step
            .outputs
            .iter()
            .map(|output| {
                let Want::Sample(request) = &output.want else { return SamplingParams::default() };
                let mut params = request.params.clone();
                (self.defect.params)(&mut params);
                params
            })
            .collect();
        let mut outputs = step.outputs.to_vec();
        for (output, params) in outputs.iter_mut().zip(&params) {
            let Want::Sample(request) = &mut output.want else { continue };
            request.params = params;
            if !self.defect.waits_for_masks {
                request.mask = request.mask.filter(|mask| mask.known().is_some());
            }
        }
        let mut carried = step.carried.to_vec();
        (self.defect.carried)(&mut carried);
        let mut sequences = step.sequences.to_vec();
        (self.defect.sequences)(&mut sequences);
        let changed =
            Step { pages: &pages, outputs: &outputs, carried: &carried, sequences: &sequences, ..*step };
        match self.inner.submit(&changed) {
            Err(StepError::Invalid(_)) if !self.defect.checks_steps => Ok(Ticket(0)),
            result => result,
        }
    }

    fn collect(&mut self, ticket: Ticket, out: &mut StepOutput) -> Result<(), StepError> {
        self.inner.collect(ticket, out)?;
        for outcome in &mut out.outcomes {
            match outcome {
                Outcome::Logits(logits) => (self.defect.logits)(logits, &self.now),
                Outcome::Embedding(embedding) => (self.defect.embeddings)(embedding, &self.now),
                _ => {}
            }
        }
        (self.defect.outcomes)(&mut out.outcomes);
        Ok(())
    }

    fn carries(&self, want: &Want<'_>) -> bool {
        self.inner.carries(want)
    }

    fn move_pages(&mut self, moves: &[PageMove]) -> Result<(), StepError> {
        let mut moves = moves.to_vec();
        moves.iter_mut().for_each(self.defect.moves);
        if self.defect.moves_pages { self.inner.move_pages(&moves) } else { Ok(()) }
    }

    fn page_format(&self) -> Option<PageFormat> {
        self.inner.page_format()
    }

    fn read_pages(&mut self, pages: &[PageId], out: &mut [u8]) -> Result<(), StepError> {
        self.inner.read_pages(pages, out)
    }

    fn write_pages(&mut self, pages: &[PageId], bytes: &[u8], content: PageContent) -> Result<(), StepError> {
        if self.defect.moves_pages { self.inner.write_pages(pages, bytes, content) } else { Ok(()) }
    }

    fn kernel_counts(&self) -> Vec<KernelCount> {
        let mut counts = self.inner.kernel_counts();
        (self.defect.counts)(&mut counts);
        counts
    }
}

fn subject(defect: Defect) -> Subject {
    Subject {
        backend: Box::new(move |threads| Box::new(Defective { defect, threads })),
        exact_rows: 1,
        has_threads: true,
        // Tolerances of a backend that computes in f16 and quantizes activations: defects must exceed them.
        tolerance: |format| match format {
            WeightFormat::F32 | WeightFormat::F16 | WeightFormat::BF16 => {
                Tolerance { error: 2e-3, reason: "f16" }
            }
            _ => Tolerance { error: 0.15, reason: "quantized activations" },
        },
        kv_dtype: defect.kv_dtype,
        kv: KvRounding::F16,
        unsupported: &[],
        kernel_formats: &WeightFormat::ALL,
        draw: Draw::All,
    }
}

/// Defects with the cases that must catch them.
fn defects() -> Vec<(&'static str, Defect, &'static [&'static str])> {
    vec![
        // Attention
        (
            "ignores the window",
            Defect { attention: no_window, ..NONE },
            &["windows", "alternating_windows", "everything"],
        ),
        (
            "sees one token more",
            Defect { attention: window_plus_one, ..NONE },
            &["windows", "alternating_windows"],
        ),
        (
            "sees one token less",
            Defect { attention: window_minus_one, ..NONE },
            &["windows", "alternating_windows"],
        ),
        (
            "reads one token too far",
            Defect { attention: too_far, ..NONE },
            &["pages", "lengths", "exact_in_company"],
        ),
        (
            "sees its whole chunk",
            Defect { attention: not_causal, ..NONE },
            &["lengths", "exact_in_chunks", "format_q2_k"],
        ),
        (
            "shares K/V heads in the wrong order",
            Defect { attention: wrong_heads, ..NONE },
            &["grouped_heads"],
        ),
        ("ignores the cap of scores", Defect { attention: no_cap, ..NONE }, &["soft_caps"]),
        (
            "loses the first token of each page",
            Defect { attention: skips_page_starts, ..NONE },
            &["pages", "lengths"],
        ),
        // Eight and four bits
        ("stores sixteen bits for eight", Defect { round: round_f16, ..Q8 }, &["format_f32", "long_context"]),
        ("stores eight bits for four", Defect { round: round_q8, ..Q4 }, &["format_f32", "head_dims"]),
        ("has one scale for a whole head", Defect { round: one_scale, ..Q8 }, &["head_dims", "format_f32"]),
        ("rounds heads without the transform", Defect { round: untransformed, ..Q8 }, &["large_keys"]),
        ("rounds toward zero", Defect { round: toward_zero, ..Q8 }, &["format_f32", "gather"]),
        ("wraps the largest element around", Defect { round: wraps, ..Q8 }, &["format_f32", "format_q8_0"]),
        (
            "scales by what it stored before",
            Defect { round: remembers, ..Q8 },
            &["exact_in_company", "exact_in_chunks", "exact_with_shared_prefix", "exact_after_preemption"],
        ),
        // The program
        ("pairs RoPE the other way", Defect { program: other_pairs, ..NONE }, &["ropes", "format_f16"]),
        ("rotates the whole head", Defect { program: rotates_all, ..NONE }, &["ropes"]),
        ("ignores RoPE's magnitude", Defect { program: no_magnitude, ..NONE }, &["ropes"]),
        ("has one RoPE for all layers", Defect { program: one_rope, ..NONE }, &["alternating_windows"]),
        ("ignores eps", Defect { program: no_eps, ..NONE }, &["format_f32"]),
        ("norms queries as keys", Defect { program: no_q_norm, ..NONE }, &["qk_norms"]),
        (
            "ignores norms of queries and keys",
            Defect { program: no_qk_norm, ..NONE },
            &["qk_norms", "qk_norm_kinds"],
        ),
        ("norms heads before RoPE", Defect { program: norms_before_rope, ..NONE }, &["qk_norm_kinds"]),
        ("ignores means", Defect { program: no_mean, ..NONE }, &["layer_norms"]),
        ("ignores biases of norms", Defect { program: no_norm_bias, ..NONE }, &["layer_norms"]),
        ("ignores sinks", Defect { attention: no_sinks, ..NONE }, &["sinks"]),
        ("adds branches one after the other", Defect { program: sequential, ..NONE }, &["parallel"]),
        (
            "ignores the scale of branches",
            Defect {
                program: |program| program.layers.iter_mut().for_each(|layer| layer.branch_scale = 1.0),
                ..NONE
            },
            &["scales"],
        ),
        (
            "ignores the scale of logits",
            Defect { program: |program| program.head.scale = 1.0, ..NONE },
            &["scales"],
        ),
        (
            "ignores the scale by position",
            Defect { program: |program| each_attention(program, |op| op.position_scale = None), ..NONE },
            &["position_scale"],
        ),
        (
            "ignores learned positions",
            Defect { program: |program| program.embed.positions = None, ..NONE },
            &["learned_positions"],
        ),
        (
            "rotates all layers",
            Defect { program: |program| each_attention(program, |op| op.rope = Some(0)), ..NONE },
            &["no_positions"],
        ),
        ("uses one expert less", Defect { program: one_expert_less, ..NONE }, &["experts", "routers"]),
        ("ignores biases of experts", Defect { program: no_expert_bias, ..NONE }, &["experts"]),
        (
            "ignores the bias of the choice",
            Defect { program: |program| each_experts(program, |op| op.router.selection_bias = None), ..NONE },
            &["routers"],
        ),
        (
            "always renormalizes",
            Defect { program: |program| each_experts(program, |op| op.router.renormalize = true), ..NONE },
            &["routers"],
        ),
        (
            "ignores the factor of weights",
            Defect { program: |program| each_experts(program, |op| op.router.factor = 1.0), ..NONE },
            &["routers"],
        ),
        (
            "knows no sigmoid router",
            Defect {
                program: |program| each_experts(program, |op| op.router.scores = Scores::Softmax),
                ..NONE
            },
            &["routers"],
        ),
        (
            "ignores shared experts",
            Defect { program: |program| each_experts(program, |op| op.shared = None), ..NONE },
            &["experts"],
        ),
        ("ignores post norms", Defect { program: no_post_norms, ..NONE }, &["post_norms"]),
        (
            "ignores biases of q, k and v",
            Defect { program: no_qkv_bias, ..NONE },
            &["biases", "biases_everywhere"],
        ),
        (
            "ignores the head's bias",
            Defect { program: |program| program.head.linear.bias = None, ..NONE },
            &["biases_everywhere"],
        ),
        (
            "ignores the cap of logits",
            Defect { program: |program| program.head.soft_cap = None, ..NONE },
            &["soft_caps"],
        ),
        ("knows no GELU", Defect { program: only_silu, ..NONE }, &["gelu", "activations", "ungated"]),
        (
            "ignores the embedding's scale",
            Defect { program: |program| program.embed.scale = 1.0, ..NONE },
            &["tied_head"],
        ),
        (
            "stores all layers in one slot",
            Defect { program: one_slot, ..NONE },
            &["format_f32", "alternating_windows"],
        ),
        ("uses one group's table for all", Defect { program: one_group, ..NONE }, &["alternating_windows"]),
        (
            "uses the first sequence's table",
            Defect { block_tables: first_table, ..NONE },
            &["format_f32", "exact_in_company"],
        ),
        ("carries another sequence's token", Defect { carried: neighbours, ..NONE }, &["carried_tokens"]),
        // Mixers with a state
        (
            "ignores gates of attention",
            Defect { program: |program| each_attention(program, |op| op.gate = None), ..NONE },
            &["attention_gates", "hybrids"],
        ),
        ("shares keys the other way", Defect { program: other_sharing, ..NONE }, &["delta_rules"]),
        (
            "ignores the bias of convolutions",
            Defect { program: no_convolution_bias, ..NONE },
            &["short_convolutions", "hybrids"],
        ),
        ("decays by its strength", Defect { program: decay_by_strength, ..NONE }, &["delta_rules"]),
        ("reads the slot that it writes", Defect { sequences: reads_own_state, ..NONE }, &["exact_states"]),
        ("keeps a copy of tables", Defect { weights: copies_tables, ..NONE }, &["unreadable_tables"]),
        // Weights
        (
            "leaves out rows past a multiple of 16",
            Defect { weights: whole_tiles, ..NONE },
            &["format_f32", "format_q8_0", "format_q4_k"],
        ),
        (
            "leaves out the last block of a row",
            Defect { weights: short_rows, ..NONE },
            &["format_f16", "format_q8_0", "format_q6_k"],
        ),
        (
            "forgets the upper bits of later scales",
            Defect { weights: low_scales, ..NONE },
            &["format_q4_k", "format_q5_k"],
        ),
        ("halves one of 32 columns", Defect { weights: one_column, ..NONE }, &["format_q8_0"]),
        // Exactness
        (
            "depends on the number of rows",
            Defect { logits: |x, now| nudge(x, now.rows), ..NONE },
            &[
                "exact_in_company",
                "exact_in_chunks",
                "exact_in_long_chunks",
                "exact_with_shared_prefix",
                "exact_after_preemption",
            ],
        ),
        (
            "depends on the number of threads",
            Defect { logits: |x, now| nudge(x, now.threads), ..NONE },
            &["exact_on_any_threads", "exact_in_long_chunks"],
        ),
        (
            "depends on where pages lie",
            Defect { logits: |x, now| nudge(x, now.first_page as usize), ..NONE },
            &["exact_in_any_place"],
        ),
        (
            "depends on what ran before",
            Defect { logits: |x, now| nudge(x, now.steps as usize), ..NONE },
            &["exact_in_any_place"],
        ),
        (
            "has embeddings that depend on the number of rows",
            Defect { embeddings: |x, now| nudge(x, now.rows), ..NONE },
            &["exact_embeddings"],
        ),
        ("saves the wrong part of a state", Defect { moves: next_part, ..NONE }, &["exact_states"]),
        (
            "copies no pages",
            Defect { moves_pages: false, ..NONE },
            &["exact_after_copy_on_write", "exact_from_outside", "foreign_pages"],
        ),
        // The contract
        (
            "answers in the wrong order",
            Defect { outcomes: |outcomes| outcomes.reverse(), ..NONE },
            &["outputs", "lengths"],
        ),
        (
            "forgets an answer",
            Defect { outcomes: |outcomes| drop(outcomes.pop()), ..NONE },
            &["outputs", "lengths"],
        ),
        ("always answers the same token", Defect { outcomes: zeroth, ..NONE }, &["outputs"]),
        ("gives NaN", Defect { logits: |x, _| x[0] = f32::NAN, ..NONE }, &["format_f32", "lengths"]),
        (
            "scales embeddings",
            Defect { embeddings: |x, _| x.iter_mut().for_each(|x| *x *= 1.5), ..NONE },
            &["embeddings"],
        ),
        ("loads anything", Defect { checks_weights: false, ..NONE }, &["bad_weights"]),
        ("runs anything", Defect { checks_steps: false, ..NONE }, &["invalid_steps"]),
        ("takes a late mask for none", Defect { waits_for_masks: false, ..NONE }, &["late_masks"]),
        (
            "keeps one token more",
            Defect { params: |params| params.top_k += u32::from(params.top_k > 0), ..NONE },
            &["samples"],
        ),
        (
            "keeps a bit more of the probability",
            Defect { params: |params| params.top_p = (params.top_p + 0.02).min(1.0), ..NONE },
            &["samples"],
        ),
        (
            "keeps only what is more likely",
            Defect { params: |params| params.min_p = (params.min_p * 1.1).min(1.0), ..NONE },
            &["samples"],
        ),
        (
            "counts no tokens",
            Defect { params: |params| params.frequency_penalty = 0.0, ..NONE },
            &["samples"],
        ),
        ("knows one seed", Defect { params: |params| params.seed = 1, ..NONE }, &["outputs", "samples"]),
        ("counts nothing", Defect { counts: |counts| counts.clear(), ..NONE }, &["kernel_counts"]),
        (
            "gathers in secret",
            Defect { limits: |limits| limits.attention = AttentionMode::Gather, ..NONE },
            &["kernel_counts"],
        ),
        (
            "never gathers",
            Defect { limits: |limits| limits.attention = AttentionMode::Paged, ..NONE },
            &["kernel_counts"],
        ),
    ]
}

fn case(name: &str) -> &'static Case {
    CASES.iter().find(|case| case.name == name).expect("a case of this name")
}

#[test]
fn every_defect_is_caught() {
    let mut missed = Vec::new();
    for (name, defect, cases) in defects().into_iter().chain(layers::defects()) {
        for case in cases.iter().map(|name| case(name)) {
            if (case.run)(&subject(defect)).is_ok() {
                missed.push(format!("{} does not notice a backend that {name}", case.name));
            }
        }
    }
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}

/// All cases pass without a defect, bit for bit: the wrapper itself changes nothing.
mod without_a_defect {
    use super::{Draw, NONE, Subject, Tolerance, subject};

    crate::conformance!(Subject {
        draw: Draw::from_env(),
        tolerance: |_| Tolerance { error: 0.0, reason: "the reference is compared with itself" },
        ..subject(NONE)
    });
}

/// The cases that catch defects of quantized pages pass without one.
#[test]
fn quantized_pages_without_a_defect_pass() {
    for sound in [Q8, Q4] {
        let of_type = defects().into_iter().filter(|(_, defect, _)| defect.kv_dtype == sound.kv_dtype);
        let cases: BTreeSet<&str> = of_type.flat_map(|(_, _, cases)| cases.iter().copied()).collect();
        for name in cases {
            assert_eq!((case(name).run)(&subject(sound)), Ok(()), "{name}");
        }
    }
}

fn no_sinks(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    vectors: HeadVectors<'_>,
    shape: &AttentionShape,
    out: &mut [f32],
) {
    attention(q, k, v, HeadVectors { sinks: None, ..vectors }, shape, out);
}

fn no_window(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    vectors: HeadVectors<'_>,
    shape: &AttentionShape,
    out: &mut [f32],
) {
    attention(q, k, v, vectors, &AttentionShape { window: None, ..*shape }, out);
}

fn window_plus_one(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    vectors: HeadVectors<'_>,
    shape: &AttentionShape,
    out: &mut [f32],
) {
    attention(
        q,
        k,
        v,
        vectors,
        &AttentionShape { window: shape.window.map(|window| window + 1), ..*shape },
        out,
    );
}

fn window_minus_one(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    vectors: HeadVectors<'_>,
    shape: &AttentionShape,
    out: &mut [f32],
) {
    attention(
        q,
        k,
        v,
        vectors,
        &AttentionShape { window: shape.window.map(|window| (window - 1).max(1)), ..*shape },
        out,
    );
}

fn no_cap(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    vectors: HeadVectors<'_>,
    shape: &AttentionShape,
    out: &mut [f32],
) {
    attention(q, k, v, vectors, &AttentionShape { soft_cap: None, ..*shape }, out);
}

/// Row by row, each at a position that the defect chooses from row, rows and tokens in the pages.
fn by_rows(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    vectors: HeadVectors<'_>,
    shape: &AttentionShape,
    out: &mut [f32],
    position: fn(usize, usize, usize) -> usize,
) {
    let width = shape.heads * shape.head_dim;
    let (rows, tokens) = (q.len() / width, k.len() / (shape.kv_heads * shape.head_dim));
    for (row, (q, out)) in q.chunks_exact(width).zip(out.chunks_exact_mut(width)).enumerate() {
        let start = position(shape.start + row, shape.start + rows, tokens);
        attention(q, k, v, vectors, &AttentionShape { start, ..*shape }, out);
    }
}

fn too_far(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    vectors: HeadVectors<'_>,
    shape: &AttentionShape,
    out: &mut [f32],
) {
    by_rows(q, k, v, vectors, shape, out, |position, _, tokens| (position + 1).min(tokens - 1));
}

fn not_causal(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    vectors: HeadVectors<'_>,
    shape: &AttentionShape,
    out: &mut [f32],
) {
    by_rows(q, k, v, vectors, shape, out, |_, end, _| end - 1);
}

/// Query head `h` reads K/V head `h % kv_heads`.
fn wrong_heads(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    vectors: HeadVectors<'_>,
    shape: &AttentionShape,
    out: &mut [f32],
) {
    let AttentionShape { heads, kv_heads, head_dim, .. } = *shape;
    let place = |index: usize| {
        let (row, head) = (index / heads, index % heads);
        row * heads + head % kv_heads * (heads / kv_heads) + head / kv_heads
    };
    let mut moved = vec![0.0; q.len()];
    for (index, q) in q.chunks_exact(head_dim).enumerate() {
        moved[place(index) * head_dim..][..head_dim].copy_from_slice(q);
    }
    let mut answer = vec![0.0; q.len()];
    attention(&moved, k, v, vectors, shape, &mut answer);
    for (index, out) in out.chunks_exact_mut(head_dim).enumerate() {
        out.copy_from_slice(&answer[place(index) * head_dim..][..head_dim]);
    }
}

fn skips_page_starts(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    vectors: HeadVectors<'_>,
    shape: &AttentionShape,
    out: &mut [f32],
) {
    let mut v = v.to_vec();
    for page in v.chunks_mut(16 * shape.kv_heads * shape.head_dim).skip(1) {
        page[..shape.kv_heads * shape.head_dim].fill(0.0);
    }
    attention(q, k, &v, vectors, shape, out);
}

/// Replaces full first pages of default size, which are not written any more, by those of the first sequence.
fn first_table(pages: &mut [PageId], sequences: &[StepSequence]) {
    let mut past_first = sequences.iter().filter(|sequence| sequence.start >= 16);
    let Some(first) = past_first.next() else { return };
    for sequence in past_first {
        pages[sequence.tables.start] = pages[first.tables.start];
    }
}

fn reads_own_state(sequences: &mut [StepSequence]) {
    for state in sequences.iter_mut().filter_map(|sequence| sequence.state.as_mut()) {
        state.read = state.write;
    }
}

fn next_part(page_move: &mut PageMove) {
    if let PageMove::SaveState { part, .. } = page_move {
        *part = part.saturating_sub(1);
    }
}

fn whole_tiles(weights: &mut Weights) {
    for matrix in &mut weights.matrices {
        let stride = matrix.format.row_bytes(matrix.cols);
        let mut bytes = matrix.bytes.read().expect("in memory").into_owned();
        bytes[matrix.rows / 16 * 16 * stride..].fill(0);
        matrix.bytes = Bytes::from(bytes);
    }
}

fn short_rows(weights: &mut Weights) {
    for matrix in &mut weights.matrices {
        let stride = matrix.format.row_bytes(matrix.cols);
        let mut bytes = matrix.bytes.read().expect("in memory").into_owned();
        for row in bytes.chunks_exact_mut(stride) {
            row[stride - matrix.format.block_bytes()..].fill(0);
        }
        matrix.bytes = Bytes::from(bytes);
    }
}

/// For Q4_K and Q5_K, whose scales are in bytes 4 to 16 of a block.
fn low_scales(weights: &mut Weights) {
    for matrix in &mut weights.matrices {
        let mut bytes = matrix.bytes.read().expect("in memory").into_owned();
        for block in bytes.chunks_exact_mut(matrix.format.block_bytes()) {
            block[4..12].iter_mut().for_each(|byte| *byte &= 63);
        }
        matrix.bytes = Bytes::from(bytes);
    }
}

/// For Q8_0, the last element of each block.
fn one_column(weights: &mut Weights) {
    for matrix in &mut weights.matrices {
        let mut bytes = matrix.bytes.read().expect("in memory").into_owned();
        for block in bytes.chunks_exact_mut(matrix.format.block_bytes()) {
            block[33] = (block[33] as i8 / 2) as u8;
        }
        matrix.bytes = Bytes::from(bytes);
    }
}
