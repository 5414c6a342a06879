//! Random numbers that are the same on every run.

use std::f32::consts::TAU;

/// SplitMix64 (Steele, Lea, Flood 2014): small, and good enough for test data.
#[derive(Clone, Debug)]
pub struct Rng {
    state: u64,
}

impl Rng {
    /// Returns the generator of this seed.
    pub fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.state ^ self.state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Uniform in `0..end`.
    pub fn below(&mut self, end: usize) -> usize {
        ((u128::from(self.bits()) * end as u128) >> 64) as usize
    }

    /// Uniform in `[0, 1)`.
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 24) as f32
    }

    /// Normal, mean 0, variance 1 (Box and Muller).
    pub fn normal(&mut self) -> f32 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (TAU * self.unit()).cos()
    }

    /// Random tokens of a vocabulary.
    pub fn tokens(&mut self, count: usize, vocab: usize) -> Vec<u32> {
        (0..count).map(|_| self.below(vocab) as u32).collect()
    }

    /// Puts a slice in random order (Fisher and Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }
}
