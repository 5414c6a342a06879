//! The buffers of a model, for the largest step.

use std::collections::HashMap;

use paguro_backend::{AttentionMode, Limits, LoadError, Weights};

use super::{
    LOGIT_ROWS, Lowering, attention, coop_attention,
    experts::Room,
    handoff_partials, latent, layer_input,
    memory::{activation_words, check_supported, has_wide, partials, qkv_widths, tilings},
    recurrent,
};
use crate::{
    device::Device,
    layout::BLOCK,
    ops::Program,
    pages::{self, page_words},
    plan,
};

impl<'a> Lowering<'a> {
    /// Allocates all buffers for `limits`.
    ///
    /// # Errors
    /// [`LoadError`]
    pub fn new(
        device: &'a Device,
        program: &'a Program,
        weights: &'a Weights,
        limits: &'a Limits,
    ) -> Result<Self, LoadError> {
        check_supported(device, program, limits)?;
        let Program { hidden, ffn, .. } = *program;
        let rows = limits.max_rows;
        let few = coop_attention::few(device, program, limits);
        let tilings = tilings(device, program, limits);
        let (blocks, halves) = activation_words(device, program, limits);
        let buffer = |words: usize, what: &str| device.buffer(words, what);
        let page_words = page_words(&program.kv, limits.block_size, limits.kv_dtype);
        let half = |what: &str| buffer(limits.pages * page_words, what);
        let mut pages = Vec::new();
        for _ in 0..pages::buffers(&program.kv, limits.block_size, limits.kv_dtype) {
            pages.push([half("pages of K")?, half("pages of V")?]);
        }
        let gathered = match limits.attention {
            AttentionMode::Paged => None,
            AttentionMode::Gather => {
                let words = plan::tables(&program.kv, limits) * page_words;
                Some([buffer(words, "gathered K")?, buffer(words, "gathered V")?])
            }
        };
        let mut ropes = Vec::new();
        for rope in &program.ropes {
            let [far, near] = attention::rope_tables(rope, limits.max_context);
            ropes.push([device.upload(&far, "rotations")?, device.upload(&near, "rotations")?]);
        }
        let acts = || -> Result<[wgpu::Buffer; 3], LoadError> {
            Ok([
                buffer(blocks * 8 + halves, "activations")?,
                buffer(blocks * 2, "activations")?,
                buffer(blocks * 32 + halves, "activations")?,
            ])
        };
        let [q, kv] = qkv_widths(program);
        // Partials with handoff have a separate buffer.
        let has_handoff = handoff_partials::uses_partials_handoff(device, program, limits, &tilings);
        let leaves_none = has_handoff && !has_wide(&tilings);
        let [sums, tops] = if leaves_none { [0; 2] } else { partials(program, &tilings) };
        let room = Room::of(device, program, limits);
        let words = room.scratch(rows, [q, kv, ffn]);
        let scratch = |index: usize| buffer(words[index], "matmuls");
        let mut lowering = Self {
            step: buffer(plan::words(&program.kv, limits, &tilings), "steps")?,
            x: buffer(rows * hidden, "the residual stream")?,
            y: buffer(rows * hidden, "matmuls")?,
            waiting: program.has_joins().then(|| buffer(rows * hidden, "a branch")).transpose()?,
            experts: room.buffers(device)?,
            mixers: recurrent::Room::of(program).buffers(device, rows)?,
            states: recurrent::states(device, program, limits)?,
            latents: latent::Room::of(program).buffers(device, rows)?,
            embeds: layer_input::Room::of(program).buffers(device, rows)?,
            acts: acts()?,
            normed: acts()?,
            squares: buffer(hidden.div_ceil(4 * BLOCK) * 4, "squares")?,
            factors: buffer(rows.max(LOGIT_ROWS), "factors")?,
            zero: buffer(1, "zero")?,
            act_blocks: blocks,
            scratch: [scratch(0)?, scratch(1)?, scratch(2)?],
            queries: buffer(rows * program.kv.q_width(), "queries")?,
            partial_sums: buffer(sums, "partial attention")?,
            // The last word is `gave_up` in `handoff.wgsl`.
            tokens: buffer(limits.max_outputs.max(1) + 1, "sampled tokens")?,
            partial_tops: buffer(tops, "partial attention")?,
            device,
            program,
            weights,
            limits,
            matrices: HashMap::new(),
            vectors: HashMap::new(),
            counters: Vec::new(),
            tilings,
            few,
            pages,
            gathered,
            ropes,
            handoff: None,
            handoff_partials: None,
            timed_with: None,
        };
        lowering.handoff_partials = lowering.create_handoff_partials()?;
        lowering.handoff = lowering.create_handoff()?;
        Ok(lowering)
    }
}
