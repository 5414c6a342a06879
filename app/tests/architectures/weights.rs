//! The random models: headers as `make.py` wrote them, weights computed here as there.

use half::{bf16, f16};
use paguro_backend::WeightFormat;
use serde_json::Value;

/// The whole GGUF file of a case: its header with the weights appended.
pub fn gguf(header: &[u8], case: &Value, blocks: &Value) -> Vec<u8> {
    let mut file = header.to_vec();
    for tensor in case["tensors"].as_array().expect("tensors") {
        let (name, center, spread) = (text(&tensor[0]), number(&tensor[1]), number(&tensor[2]));
        let (format, elements) = (text(&tensor[3]), number(&tensor[4]) as usize);
        let format: WeightFormat = format.parse().expect("a weight format");
        file.resize(file.len().next_multiple_of(32), 0);
        match format {
            WeightFormat::F32 | WeightFormat::F16 | WeightFormat::BF16 => {
                let values = uniform(name, elements).map(|noise| noise * spread + center);
                for value in values {
                    match format {
                        WeightFormat::F16 => file.extend(f16::from_f32(value).to_le_bytes()),
                        WeightFormat::BF16 => file.extend(bf16::from_f32(value).to_le_bytes()),
                        _ => file.extend(value.to_le_bytes()),
                    }
                }
            }
            _ => push_blocks(&mut file, name, format, elements, spread, &blocks[format.to_string()]),
        }
    }
    file.resize(file.len().next_multiple_of(32), 0);
    file
}

/// Random bytes, with scales of a sensible size put in.
fn push_blocks(
    file: &mut Vec<u8>,
    name: &str,
    format: WeightFormat,
    elements: usize,
    scale: f32,
    scales: &Value,
) {
    let count = elements / format.block_len();
    let start = file.len();
    let size = count * format.block_bytes();
    let bytes = bits(name, size.div_ceil(8)).flat_map(u64::to_le_bytes);
    file.extend(bytes.take(size));
    let scales = scales.as_array().expect("where the scales are");
    let noise = uniform(&format!("{name}.scales"), count);
    let signs = bits(&format!("{name}.signs"), count);
    for ((block, noise), sign) in file[start..].chunks_exact_mut(format.block_bytes()).zip(noise).zip(signs) {
        let value = scale * (1.0 + noise);
        let value = if scales.len() == 1 && sign & 1 == 1 { -value } else { value };
        for place in scales {
            let (offset, multiple) = (number(&place[0]) as usize, number(&place[1]));
            block[offset..][..2].copy_from_slice(&f16::from_f32(value * multiple).to_le_bytes());
        }
        let scale_bytes = match format {
            WeightFormat::MXFP4 => 1,
            WeightFormat::NVFP4 => 4,
            _ => 0,
        };
        for byte in &mut block[..scale_bytes] {
            *byte = scale as u8 + (*byte & 3);
        }
        if format == WeightFormat::IQ1_M {
            let bits = f16::from_f32(value).to_bits();
            for i in 0..4 {
                block[49 + 2 * i] = block[49 + 2 * i] & 15 | ((bits >> (4 * i) & 15) as u8) << 4;
            }
        }
    }
}

/// The first `count` tokens of the prompt of all cases.
pub fn tokens(count: usize, vocab: u64) -> Vec<u32> {
    below("tokens", count, vocab)
}

/// Numbers below `end`, as the name says.
pub fn below(name: &str, count: usize, end: u64) -> Vec<u32> {
    bits(name, count).map(|bits| (bits % end) as u32).collect()
}

/// SplitMix64, started at the name's FNV-1a hash.
fn bits(name: &str, count: usize) -> impl Iterator<Item = u64> + use<> {
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    });
    (1..=count as u64).map(move |index| {
        let z = hash.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    })
}

/// In `[-0.5, 0.5)`, with 24 bits.
pub fn uniform(name: &str, count: usize) -> impl Iterator<Item = f32> + use<> {
    bits(name, count).map(|bits| (bits >> 40) as f32 / 16_777_216.0 - 0.5)
}

/// Adler-32 (RFC 1950): whether the file is the one that llama.cpp has read.
pub fn adler32(bytes: &[u8]) -> u32 {
    let (a, b) = bytes.iter().fold((1_u32, 0_u32), |(a, b), &byte| {
        let a = (a + u32::from(byte)) % 65521;
        (a, (b + a) % 65521)
    });
    b << 16 | a
}

fn text(value: &Value) -> &str {
    value.as_str().expect("a string")
}

pub fn number(value: &Value) -> f32 {
    value.as_f64().expect("a number") as f32
}
