//! Small random models, written as GGUF files and as Hugging Face folders: the same weights in both.

#![allow(dead_code)] // each test uses its part

pub mod gguf;
pub mod models;
pub mod run;
pub mod safetensors;

/// Numbers that look random and are the same on every run (splitmix64).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    /// Less than `bound`.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    /// Between -1 and 1.
    pub fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

/// A tensor of f32.
#[derive(Clone)]
pub struct Tensor {
    pub name: String,
    /// Outermost dimension first.
    pub shape: Vec<usize>,
    pub values: Vec<f32>,
}

impl Tensor {
    pub fn new(name: impl Into<String>, shape: &[usize], mut value: impl FnMut() -> f32) -> Self {
        let values = (0..shape.iter().product()).map(|_| value()).collect();
        Self { name: name.into(), shape: shape.to_vec(), values }
    }

    pub fn bytes(&self) -> Vec<u8> {
        self.values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }
}
