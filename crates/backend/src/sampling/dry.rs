//! DRY ("don't repeat yourself"): a penalty of tokens that continue a repetition of earlier text
//! (<https://github.com/oobabooga/text-generation-webui/pull/5677>, with the names of llama.cpp).

use std::{collections::BTreeMap, sync::Arc};

/// Parameters of DRY.
///
/// If the last `n` tokens have occurred before and `n` is at least [`allowed_length`](Self::allowed_length),
/// `multiplier * base ^ (n - allowed_length)` is subtracted from the logit of the token that followed them. Of several
/// occurrences the longest counts.
#[derive(Clone, Debug, PartialEq)]
pub struct Dry {
    /// Penalty of the shortest repetition; `0` is off.
    pub multiplier: f32,
    /// Factor of the penalty for each token more.
    pub base: f32,
    /// Length of the shortest repetition that is penalized.
    pub allowed_length: u32,
    /// Number of last tokens, of prompt and output, that are looked at; `None` looks at all.
    pub window: Option<u32>,
    /// Tokens that end a repetition, in ascending order. They are never penalized.
    pub breakers: Arc<[u32]>,
}

impl Default for Dry {
    fn default() -> Self {
        Self { multiplier: 0.0, base: 1.75, allowed_length: 2, window: None, breakers: Arc::default() }
    }
}

impl Dry {
    /// Returns true if it can have an effect.
    pub fn is_on(&self) -> bool {
        self.multiplier > 0.0 && self.window != Some(0)
    }
}

/// Largest exponent of a base: larger powers are no numbers. (llama.cpp's.)
const MAX_LN: f32 = 88.722_84;

/// Buffers, reused from call to call.
#[derive(Clone, Debug, Default)]
pub(super) struct Scratch {
    /// The window, last token first.
    reversed: Vec<u32>,
    /// The Z-array: for each position, the length of the longest common prefix with the beginning.
    lengths: Vec<usize>,
    penalties: BTreeMap<u32, f32>,
}

impl Scratch {
    /// Returns the penalized tokens and the amounts to subtract, in time proportional to the window.
    pub fn penalties(&mut self, dry: &Dry, history: &[u32]) -> &mut BTreeMap<u32, f32> {
        let Self { reversed, lengths, penalties } = self;
        penalties.clear();
        if !dry.is_on() {
            return penalties;
        }
        let breaks = |token: &u32| dry.breakers.binary_search(token).is_ok();
        let window = dry.window.map_or(usize::MAX, |window| window as usize);
        reversed.clear();
        reversed.extend(history.iter().rev().take(window));
        // Tokens before a breaker are not part of a repetition.
        let most = reversed.iter().position(breaks).unwrap_or(reversed.len());
        let allowed = dry.allowed_length.max(1) as usize;
        if most < allowed {
            return penalties;
        }
        z_array(reversed, lengths);
        for place in 1..reversed.len() {
            let (length, next) = (lengths[place].min(most), reversed[place - 1]);
            if length >= allowed && !breaks(&next) {
                let longest = penalties.entry(next).or_insert(0.0);
                *longest = longest.max(length as f32);
            }
        }
        let most = if dry.base > 1.0 { MAX_LN / dry.base.ln() } else { f32::MAX };
        for penalty in penalties.values_mut() {
            let exponent = (*penalty - allowed as f32).min(most.floor());
            *penalty = (dry.multiplier * dry.base.powf(exponent)).min(f32::MAX);
        }
        penalties
    }
}

/// Computes the Z-array of a text: for each position, the length of the longest common prefix of the text and its
/// suffix from there (Gusfield: Algorithms on Strings, Trees, and Sequences, 1997).
fn z_array(text: &[u32], lengths: &mut Vec<usize>) {
    lengths.clear();
    lengths.resize(text.len(), 0);
    let (mut left, mut right) = (0, 0);
    for place in 1..text.len() {
        let mut length = if place < right { lengths[place - left].min(right - place) } else { 0 };
        while place + length < text.len() && text[length] == text[place + length] {
            length += 1;
        }
        if place + length > right {
            (left, right) = (place, place + length);
        }
        lengths[place] = length;
    }
}
