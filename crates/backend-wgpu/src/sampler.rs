//! Data for sampling on the device: see `adjust.wgsl`, `argmax.wgsl`, `sample.wgsl`.

use paguro_backend::{
    SampleRequest, Sampled, TokenMask,
    sampling::{PenaltyScratch, penalties, uniform},
};

use crate::lower::LOGIT_ROWS;

/// Value of an offset for no mask or no top-p, and the device's result if no token can be sampled.
const NONE: u32 = Sampled::NO_TOKEN;
/// Tokens of a vocabulary that the device draws from, at most: it finds them by two digits of ten bits.
const MOST_TOKENS: usize = 1 << 20;
/// Maximum temperature for the device, which may flush the inverse of a larger one to 0.
const HOTTEST: f32 = 8.507_059e37; // 2^126
/// Maximum tokens with bias or penalties per row of logits.
const EDITS: usize = 4096;

/// Tokens of the vocabulary that a workgroup of `argmax.wgsl` compares.
pub const CHUNK: usize = 2048;

/// Returns the maximum tokens with bias or penalties for `rows` rows of logits.
pub fn room(rows: usize, vocab: usize) -> usize {
    rows * vocab.min(EDITS)
}

/// Returns the integer weight of 1, and the bits of the lower part of a weight: the largest for which sums of the two
/// parts over a whole vocabulary stay below 2^32.
pub fn whole(vocab: usize) -> (u32, u32) {
    let low_bits = 14.min(32 - vocab.next_power_of_two().ilog2());
    let high = (u32::MAX / vocab.max(1) as u32).min(1 << 14);
    (high << low_bits, low_bits)
}

/// The samples of a slice of the output rows.
pub struct Sampler<'a> {
    vocab: usize,
    room: usize,
    /// Eight words per sample.
    pub samples: Vec<[u32; 8]>,
    /// Bias and penalties.
    pub edits: Vec<[u32; 4]>,
    /// The masks that samples name, in order.
    pub masks: Vec<&'a TokenMask>,
}

/// Buffers of penalties, which are reused from step to step.
#[derive(Default)]
pub struct Scratch {
    penalties: PenaltyScratch,
    /// For each token, its place among a sample's edits and one more, or 0; all zero between calls.
    places: Vec<u32>,
}

impl<'a> Sampler<'a> {
    /// Creates an empty list with room for `room` edits.
    pub fn new(vocab: usize, room: usize) -> Self {
        Self { vocab, room, samples: Vec::new(), edits: Vec::new(), masks: Vec::new() }
    }

    /// Adds a sample of a row of logits whose token goes to `place`, if the device can sample it. `alone` is true if
    /// the row has no other output, so that its logits may be modified.
    pub fn add(
        &mut self,
        row: usize,
        request: &SampleRequest<'a>,
        place: usize,
        alone: bool,
        scratch: &mut Scratch,
    ) -> bool {
        let params = request.params;
        let draws = params.temperature > 0.0;
        let adjusts = params.penalizes() || !params.logit_bias.is_empty();
        if request.logprobs.is_some()
            || params.needs_host()
            || params.temperature > HOTTEST
            || draws && self.vocab > MOST_TOKENS
            || request.mask.is_some() && self.masks.len() == LOGIT_ROWS
            || adjusts && !(alone && self.edit(row, request, scratch))
        {
            return false;
        }
        let mask = request.mask.map_or(NONE, |mask| {
            self.masks.push(mask);
            ((self.masks.len() - 1) * self.vocab.div_ceil(32)) as u32
        });
        // In units of 2^-32.
        let parts = |share: f64| (share * 2_f64.powi(32)) as u32;
        let top_k = if (params.top_k as usize) < self.vocab { params.top_k } else { 0 };
        let top_p = if params.top_p < 1.0 { parts(f64::from(params.top_p)) } else { NONE };
        // A device may flush subnormal numbers to 0.
        let temperature = if draws { params.temperature.max(f32::MIN_POSITIVE) } else { 0.0 };
        self.samples.push([
            row as u32,
            mask,
            place as u32,
            top_k,
            temperature.to_bits(),
            top_p,
            params.min_p.to_bits(),
            parts(uniform(params.seed, request.draw)),
        ]);
        true
    }

    /// Adds the edits of a row's logits, one per token, if there is room.
    fn edit(&mut self, row: usize, request: &SampleRequest<'_>, scratch: &mut Scratch) -> bool {
        let (params, vocab, start) = (request.params, self.vocab, self.edits.len());
        let Scratch { penalties: buffers, places } = scratch;
        places.resize(vocab, 0);
        let edits = &mut self.edits;
        let mut edit = |token: usize, change: &dyn Fn(&mut [u32; 4])| {
            if places[token] == 0 {
                edits.push([(row * vocab + token) as u32, 0, 1_f32.to_bits(), 0]);
                places[token] = (edits.len() - start) as u32;
            }
            change(&mut edits[start + places[token] as usize - 1]);
        };
        for &(token, bias) in &params.logit_bias {
            edit(token as usize, &|edit| edit[1] = (f32::from_bits(edit[1]) + bias).to_bits());
        }
        penalties(request, vocab, buffers, |token, repetition, subtracted| {
            edit(token, &|edit| (edit[2], edit[3]) = (repetition.to_bits(), subtracted.to_bits()));
        });
        for edit in &self.edits[start..] {
            places[edit[0] as usize % vocab] = 0;
        }
        let fits = self.edits.len() <= self.room;
        if !fits {
            self.edits.truncate(start);
        }
        fits
    }
}

/// Returns true if the device can sample this token in any batch and continue with it. Only the host knows the fallback
/// of a mask that excludes all tokens, and the effect of the previous token on penalties.
pub fn carries(request: &SampleRequest<'_>, vocab: usize) -> bool {
    let params = request.params;
    request.mask.is_none()
        && request.logprobs.is_none()
        && !params.penalizes()
        && !params.needs_host()
        && params.temperature <= HOTTEST
        && params.logit_bias.len() <= EDITS.min(vocab)
        && (params.temperature == 0.0 || vocab <= MOST_TOKENS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_of_weights_stay_within_words() {
        for vocab in [1, 2, 131, 65_536, 128_256, 262_144, 262_208, 1 << 20] {
            let (whole, low_bits) = whole(vocab);
            let largest = |part: u32| u64::from(part) * vocab as u64;
            assert!(largest(whole >> low_bits) < 1 << 32, "{vocab}");
            assert!(largest((1 << low_bits) - 1) < 1 << 32, "{vocab}");
            assert_eq!(whole as f32 as u32, whole, "{vocab}: kernels make a float of it");
            assert!(whole >= 1 << 23, "{vocab}");
        }
    }
}
