//! Partials of attention with handoff to their merge instead of a barrier (`handoff_partials.wgsl`): in steps of one row, and
//! of several rows unless their attention reads partials that it has written.

use paguro_backend::{AttentionMode, Limits, LoadError};

use super::{
    Lowering,
    Value::U,
    When,
    handoff::{Bindings, EMPTY, EMPTY_WORD},
    launch::LaunchVariant,
    wgsl,
};
use crate::{
    device::Device,
    hidden::{Hazards, second_name},
    ops::Program,
    plan::Tiling,
    template::Constants,
};

/// Hazards of attention in steps with handoff of words, with the barrier before it.
const ATTENTION: Hazards =
    Hazards { hidden: &["handoff", "cleared", "handoff_partials"], ends: &["queries", "k_pages", "v_pages"] };
/// Hazards of attention with handoff of partials only.
const ATTENTION_PARTIALS: Hazards = Hazards { hidden: &["handoff_partials"], ends: &[] };
/// Hazards of the merge, which waits for partials. Activations have a second name, because attention also writes some if its
/// results are whole; the barrier before their reader covers both.
const MERGE: Hazards = Hazards {
    hidden: &["handoff", "gave_up", "handoff_partials", "acts_quants", "acts_scales", "acts_floats"],
    ends: &[],
};

/// Words that are set to EMPTY with one copy.
const EMPTY_WORDS: usize = 1 << 16;

/// Partials of attention with handoff to the merge, in steps of one row and of several.
pub struct HandoffPartials {
    partials: wgpu::Buffer,
    /// Maximum number of partials.
    most: usize,
    /// Words with the EMPTY value, for clearing.
    empty_words: wgpu::Buffer,
    /// Second name of the tokens for hidden writes.
    pub(super) hidden_tokens: wgpu::Buffer,
    hidden_acts: [wgpu::Buffer; 3],
}

impl LaunchVariant {
    /// Adds the handoff of words in steps of one row.
    fn with(&self, (constants, buffers): Bindings, hazards: &'static Hazards) -> Self {
        let constants = [self.constants.clone(), constants].concat();
        let buffers = [buffers, self.buffers.clone()].concat();
        let files = [&self.files[..], wgsl!("handoff_words", "clear")].concat();
        Self { when: When::OneRow, files, constants, buffers, hazards }
    }
}

impl Lowering<'_> {
    /// Creates the buffer of partials, if the device uses handoff.
    ///
    /// # Errors
    /// Not enough memory.
    pub(super) fn create_handoff_partials(&self) -> Result<Option<HandoffPartials>, LoadError> {
        let Self { device, program, limits, tilings, tokens, acts, .. } = self;
        if !uses_partials_handoff(device, program, limits, tilings) {
            return Ok(None);
        }
        self.empty(acts.iter().chain([tokens]));
        let second = |buffer: &wgpu::Buffer| second_name(&device.inner, buffer);
        // All groups have the same shape.
        let (most, group) = (tilings[0].partials, &program.kv.groups[0]);
        let words = most * group.heads * (group.head_dim + 4);
        let partials = HandoffPartials {
            partials: device.buffer(words, "handoff of partials of attention")?,
            most,
            empty_words: device.upload(&[EMPTY; EMPTY_WORDS], "empty words")?,
            hidden_tokens: second(tokens),
            hidden_acts: acts.each_ref().map(second),
        };
        partials.empty(device);
        Ok(Some(partials))
    }

    /// Returns the variants in which attention to tiles of one row, or of several, writes its results.
    pub(super) fn attention_variants(&self, is_one_row: bool) -> Vec<LaunchVariant> {
        let Some(partials) = &self.handoff_partials else {
            return vec![LaunchVariant::with_barriers(When::Always)];
        };
        let few = partials.variant(When::Always, vec![], vec![], &ATTENTION_PARTIALS);
        match self.word_handoff().filter(|_| is_one_row) {
            None => vec![few],
            Some(handoff) => {
                let one = few.with(handoff.attention(), &ATTENTION);
                vec![one, LaunchVariant { when: When::MoreRows, ..few }]
            }
        }
    }

    /// Returns the variants of the merge. With cooperative matrices, steps of many rows write partials that it reads after
    /// a barrier.
    pub(super) fn merge_variants(&self, kv_group: usize) -> Vec<LaunchVariant> {
        let Some(partials) = &self.handoff_partials else {
            return vec![LaunchVariant::with_barriers(When::Always)];
        };
        let wide = self.tilings[kv_group].wide.map(|wide| wide.from);
        let acts =
            ["acts_quants", "acts_scales", "acts_floats"].into_iter().zip(partials.hidden_acts.clone());
        let buffers = acts.chain([("gave_up", partials.hidden_tokens.clone())]).collect();
        let handoff = self.word_handoff();
        let from = if handoff.is_some() { 2 } else { 1 };
        let when = When::Between(from, wide.unwrap_or(usize::MAX));
        let few = partials.variant(when, vec![("AWAITED", U(1))], buffers, &MERGE);
        let one = handoff.map(|handoff| few.with(handoff.merge(), &MERGE));
        let wide = wide.map(|from| LaunchVariant::with_barriers(When::From(from)));
        one.into_iter().chain([few]).chain(wide).collect()
    }
}

/// Returns true if attention uses handoff to the merge. Programs with states do not, because their steps cannot be
/// repeated, nor do programs whose heads differ between layers.
pub(super) fn uses_partials_handoff(
    device: &Device,
    program: &Program,
    limits: &Limits,
    tilings: &[Tiling],
) -> bool {
    device.uses_handoff()
        && program.kv.is_uniform()
        && tilings.iter().all(|tiling| tiling.emits)
        && limits.attention == AttentionMode::Paged
        && program.state.is_empty()
}

impl HandoffPartials {
    /// Sets all words to EMPTY.
    pub fn empty(&self, device: &Device) {
        let size = self.empty_words.size();
        let mut encoder = device.encoder();
        for at in (0..self.partials.size()).step_by(size as usize) {
            let rest = size.min(self.partials.size() - at);
            encoder.copy_buffer_to_buffer(&self.empty_words, 0, &self.partials, at, rest);
        }
        device.queue.submit([encoder.finish()]);
    }

    /// Returns the variant of attention, or of its merge with its inputs.
    fn variant(
        &self,
        when: When,
        mut constants: Constants,
        mut buffers: Vec<(&'static str, wgpu::Buffer)>,
        hazards: &'static Hazards,
    ) -> LaunchVariant {
        constants.extend([("HANDOFF_PARTIALS", U(1)), ("MOST_PARTIALS", U(self.most as u32)), EMPTY_WORD]);
        buffers.push(("handoff_partials", self.partials.clone()));
        LaunchVariant {
            when,
            files: wgsl!("handoff", "handoff_partials").to_vec(),
            constants,
            buffers,
            hazards,
        }
    }
}
