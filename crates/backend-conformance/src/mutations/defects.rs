//! Defects of attention, pages, programs, weights, exactness and the contract, with the cases that must catch them.

use paguro_backend::{
    AttentionMode, PageId, PageMove, Scores, Step, StepSequence,
    reference::{round_f16, round_q8},
};

use super::{
    Defect, NONE, Q4, Q8,
    attention::*,
    pages::{one_scale, remembers, toward_zero, untransformed, wraps},
    programs::*,
    weights::*,
};

/// Defects with the cases that must catch them.
pub(super) fn defects() -> Vec<(&'static str, Defect, &'static [&'static str])> {
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
            &["pages", "lengths", "batch_invariance"],
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
            &["batch_invariance", "exact_in_chunks", "exact_with_shared_prefix", "exact_after_preemption"],
        ),
        // Rows
        (
            "embeds the tokens of given rows",
            Defect { step: |step| Step { given: &[], ..step }, ..NONE },
            &["given_rows"],
        ),
        (
            "gives rows to single sequences only",
            Defect { step: only_alone, ..NONE },
            &["given_rows", "exact_rows"],
        ),
        (
            "scales given rows",
            Defect { given: |values, _| values.iter_mut().for_each(|value| *value *= 1.1), ..NONE },
            &["given_rows", "stages"],
        ),
        ("sees a row's own slot", Defect { attention: own_slot, ..NONE }, &["shared_pages"]),
        ("joins in the wrong order", Defect { program: swaps_norms_of_join, ..NONE }, &["joined_rows"]),
        ("adds parts of given rows to other layers", Defect { given: other_parts, ..NONE }, &["given_rows"]),
        (
            "rotates by positions",
            Defect { step: |step| Step { coordinates: &[], ..step }, ..NONE },
            &["rope_axes"],
        ),
        (
            "swaps rows and columns",
            Defect { coordinates: |all| all.iter_mut().for_each(|at| at.swap(1, 2)), ..NONE },
            &["rope_axes"],
        ),
        (
            "has the axes in sections",
            Defect {
                program: |program| program.ropes.iter_mut().for_each(|rope| rope.axes.sort_unstable()),
                ..NONE
            },
            &["rope_axes"],
        ),
        (
            "sees no spans",
            Defect { step: |step| Step { spans: &[], ..step }, ..NONE },
            &["spans", "spans_of_encoders"],
        ),
        (
            "sees one row less of a span",
            Defect { spans: shorter_spans, ..NONE },
            &["spans", "spans_of_encoders"],
        ),
        (
            "sees adjacent spans as one",
            Defect { spans: joined_spans, ..NONE },
            &["spans", "spans_of_encoders"],
        ),
        (
            "sees spans in all layers",
            Defect {
                program: |program| program.kv.groups.iter_mut().for_each(|group| group.spans = true),
                ..NONE
            },
            &["spans", "spans_of_encoders"],
        ),
        ("forgets the window in spans", Defect { attention: spans_without_window, ..NONE }, &["spans"]),
        (
            "scales rows of the residual stream",
            Defect { outcomes: scaled_residuals, ..NONE },
            &["residuals", "stages"],
        ),
        // Adapters
        (
            "ignores adapters",
            Defect { step: |step| Step { adapters: &[], ..step }, ..NONE },
            &["adapters", "bad_adapters"],
        ),
        (
            "has adapters for single sequences only",
            Defect { step: adapted_alone, ..NONE },
            &["adapters", "exact_adapters"],
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
            Defect { program: |program| head(program).scale = 1.0, ..NONE },
            &["scales"],
        ),
        (
            "ignores the scale by position",
            Defect { program: |program| each_attention(program, |op| op.position_scale = None), ..NONE },
            &["position_scale"],
        ),
        (
            "ignores learned positions",
            Defect { program: |program| embed(program).positions = None, ..NONE },
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
            Defect { program: |program| head(program).linear.bias = None, ..NONE },
            &["biases_everywhere"],
        ),
        (
            "ignores the cap of logits",
            Defect { program: |program| head(program).soft_cap = None, ..NONE },
            &["soft_caps"],
        ),
        ("knows no GELU", Defect { program: only_silu, ..NONE }, &["gelu", "activations", "ungated"]),
        (
            "ignores the embedding's scale",
            Defect { program: |program| embed(program).scale = 1.0, ..NONE },
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
            &["format_f32", "batch_invariance"],
        ),
        ("carries another sequence's token", Defect { carried: neighbours, ..NONE }, &["carried_tokens"]),
        ("carries another sequence's row", Defect { carried: rows_of_neighbours, ..NONE }, &["carried_rows"]),
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
        (
            "keeps too few inputs of convolutions",
            Defect { program: keeps_no_dropped_inputs, ..NONE },
            &["exact_states"],
        ),
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
                "batch_invariance",
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
            &["exact_embeddings", "means"],
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
            &["embeddings", "means"],
        ),
        ("loads anything", Defect { checks_weights: false, ..NONE }, &["bad_weights"]),
        ("runs anything", Defect { checks_steps: false, ..NONE }, &["invalid_steps"]),
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
        (
            "rounds experts in slots differently",
            Defect {
                logits: |logits, now| {
                    if now.expert_slots.is_some() {
                        logits[0] += 1e-3;
                    }
                },
                ..NONE
            },
            &["expert_slots"],
        ),
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
