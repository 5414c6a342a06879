//! Partials of attention with handoff to their merge instead of a barrier (`hand_parts.wgsl`): in steps of one row, and
//! of several rows unless their attention reads partials that it has written.

use paguro_backend::{AttentionMode, Limits, LoadError};

use super::{
    Lowering,
    Value::U,
    When,
    hands::{EMPTY, EMPTY_WORD, Parts},
    launch::Way,
    wgsl,
};
use crate::{
    device::Device,
    hidden::{Hazards, second_name},
    ops::Program,
    plan::Tiling,
    template::Constants,
};

/// Attention, with the barrier before it.
const ATTENTION: Hazards =
    Hazards { hidden: &["hands", "cleared", "parts_handed"], ends: &["queries", "k_pages", "v_pages"] };
/// Attention with handoff of partials only.
const ATTENTION_PARTS: Hazards = Hazards { hidden: &["parts_handed"], ends: &[] };
/// The merge, which waits for partials. Activations have a second name, because attention also writes some if its
/// results are whole; the barrier before their reader covers both.
const MERGE: Hazards = Hazards {
    hidden: &["hands", "gave_up", "parts_handed", "acts_quants", "acts_scales", "acts_floats"],
    ends: &[],
};

/// Words that are made so at once.
const EMPTY_WORDS: usize = 1 << 16;

/// Partials of attention with handoff to the merge, in steps of one row and of several.
pub struct HandedParts {
    parts: wgpu::Buffer,
    /// Maximum number of partials.
    most: usize,
    /// Words with the EMPTY value, for clearing.
    empty_words: wgpu::Buffer,
    /// Second name of the tokens for hidden writes.
    pub(super) hidden_tokens: wgpu::Buffer,
    hidden_acts: [wgpu::Buffer; 3],
}

impl Way {
    /// Adds the handoff of words in steps of one row.
    fn with(&self, (constants, buffers): Parts, hazards: &'static Hazards) -> Self {
        let constants = [self.constants.clone(), constants].concat();
        let buffers = [buffers, self.buffers.clone()].concat();
        let files = [&self.files[..], wgsl!("hand_words", "clear")].concat();
        Self { when: When::OneRow, files, constants, buffers, hazards }
    }
}

impl Lowering<'_> {
    /// Creates the buffer of partials, if the device uses handoff.
    ///
    /// # Errors
    /// Not enough memory.
    pub(super) fn handed_parts(&self) -> Result<Option<HandedParts>, LoadError> {
        let Self { device, program, limits, tilings, tokens, acts, .. } = self;
        if !hands_parts(device, program, limits, tilings) {
            return Ok(None);
        }
        self.empty(acts.iter().chain([tokens]));
        let second = |buffer: &wgpu::Buffer| second_name(&device.inner, buffer);
        // Groups are uniform.
        let (most, group) = (tilings[0].parts, &program.kv.groups[0]);
        let words = most * group.heads * (group.head_dim + 4);
        let parts = HandedParts {
            parts: device.buffer(words, "parts of attention that are handed over")?,
            most,
            empty_words: device.upload(&[EMPTY; EMPTY_WORDS], "empty words")?,
            hidden_tokens: second(tokens),
            hidden_acts: acts.each_ref().map(second),
        };
        parts.empty(device);
        Ok(Some(parts))
    }

    /// Returns the ways in which attention to tiles of one row, or of several, writes its results.
    pub(super) fn attention_ways(&self, is_one_row: bool) -> Vec<Way> {
        let Some(parts) = &self.handed_parts else { return vec![Way::told(When::Always)] };
        let few = parts.way(When::Always, vec![], vec![], &ATTENTION_PARTS);
        match self.product_hands().filter(|_| is_one_row) {
            None => vec![few],
            Some(hands) => {
                let one = few.with(hands.attention(), &ATTENTION);
                vec![one, Way { when: When::MoreRows, ..few }]
            }
        }
    }

    /// Returns the ways of the merge. With cooperative matrices, steps of many rows write partials that it reads after
    /// a barrier.
    pub(super) fn merge_ways(&self, kv_group: usize) -> Vec<Way> {
        let Some(parts) = &self.handed_parts else { return vec![Way::told(When::Always)] };
        let wide = self.tilings[kv_group].wide.map(|wide| wide.from);
        let acts = ["acts_quants", "acts_scales", "acts_floats"].into_iter().zip(parts.hidden_acts.clone());
        let buffers = acts.chain([("gave_up", parts.hidden_tokens.clone())]).collect();
        let hands = self.product_hands();
        let from = if hands.is_some() { 2 } else { 1 };
        let when = When::Between(from, wide.unwrap_or(usize::MAX));
        let few = parts.way(when, vec![("TAKES", U(1))], buffers, &MERGE);
        let one = hands.map(|hands| few.with(hands.merge(), &MERGE));
        let wide = wide.map(|from| Way::told(When::From(from)));
        one.into_iter().chain([few]).chain(wide).collect()
    }
}

/// Returns true if attention uses handoff to the merge. Programs with states do not, because their steps cannot be
/// repeated, nor do programs whose heads differ between layers.
pub(super) fn hands_parts(device: &Device, program: &Program, limits: &Limits, tilings: &[Tiling]) -> bool {
    device.hands_over_still()
        && program.kv.is_uniform()
        && tilings.iter().all(|tiling| tiling.emits)
        && limits.attention == AttentionMode::Paged
        && program.state.is_empty()
}

impl HandedParts {
    /// Sets all words to EMPTY.
    pub fn empty(&self, device: &Device) {
        let size = self.empty_words.size();
        let mut encoder = device.encoder();
        for at in (0..self.parts.size()).step_by(size as usize) {
            let rest = size.min(self.parts.size() - at);
            encoder.copy_buffer_to_buffer(&self.empty_words, 0, &self.parts, at, rest);
        }
        device.queue.submit([encoder.finish()]);
    }

    /// Returns the way of attention, or of its merge with its inputs.
    fn way(
        &self,
        when: When,
        mut constants: Constants,
        mut buffers: Vec<(&'static str, wgpu::Buffer)>,
        hazards: &'static Hazards,
    ) -> Way {
        constants.extend([("HANDS_PARTS", U(1)), ("MOST_PARTS", U(self.most as u32)), EMPTY_WORD]);
        buffers.push(("parts_handed", self.parts.clone()));
        Way { when, files: wgsl!("hand", "hand_parts").to_vec(), constants, buffers, hazards }
    }
}
