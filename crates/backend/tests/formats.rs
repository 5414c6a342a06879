//! Decoders against vectors of the Python package `gguf`, bit for bit (`formats/make_vectors.py` made them), and
//! against our own encoders.

use std::panic::catch_unwind;

use paguro_backend::WeightFormat;
use proptest::prelude::*;

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.chars().map(|c| c.to_digit(16).expect("a hex digit") as u8).collect();
    digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

#[test]
fn every_format_decodes_as_gguf_does() {
    let mut seen = Vec::new();
    for line in include_str!("formats/vectors.txt").lines() {
        let [name, bytes, expected] = line.split(' ').collect::<Vec<_>>()[..] else {
            panic!("not a vector: {line}")
        };
        let format: WeightFormat = name.parse().expect("a format");
        let bytes = hex(bytes);
        let expected: Vec<f32> =
            hex(expected).chunks(4).map(|b| f32::from_le_bytes(b.try_into().expect("four bytes"))).collect();
        assert_eq!(format.row_bytes(expected.len()), bytes.len(), "{format}");
        let mut decoded = vec![f32::NAN; expected.len()];
        format.dequantize(&bytes, &mut decoded);
        for (i, (ours, theirs)) in decoded.iter().zip(&expected).enumerate() {
            // Zeros of either sign are equal.
            assert!(ours == theirs, "{format} element {i}: {ours:e}, gguf says {theirs:e}");
        }
        seen.push(format);
    }
    assert_eq!(seen.len(), WeightFormat::ALL.len());
    assert!(WeightFormat::ALL.iter().all(|format| seen.contains(format)));
}

#[test]
fn names_and_numbers_lead_back() {
    for format in WeightFormat::ALL {
        assert_eq!(format.to_string().parse(), Ok(format));
        assert_eq!(format.name().to_lowercase().parse(), Ok(format));
        assert_eq!(WeightFormat::from_ggml_type(format.ggml_type()), Some(format));
    }
    assert_eq!(WeightFormat::from_ggml_type(9), None); // Q8_1, never stored
    assert_eq!(WeightFormat::from_ggml_type(u32::MAX), None);
    let error = "Q4_K_M".parse::<WeightFormat>().expect_err("the name of a mixture, not of a format");
    assert!(error.to_string().starts_with("unknown weight format `Q4_K_M`; known are F32, F16"), "{error}");
}

#[test]
fn wrong_lengths_are_refused_by_name() {
    let wrong = [(0, 32), (18, 31), (17, 32), (19, 32), (18, 64), (36, 32)];
    for (bytes, elements) in wrong {
        let result =
            catch_unwind(|| WeightFormat::Q4_0.dequantize(&vec![0; bytes], &mut vec![0.0; elements]));
        let message = *result.expect_err("must not decode").downcast::<String>().expect("a message");
        assert!(message.starts_with("Q4_0:"), "{message}");
    }
    WeightFormat::Q4_0.dequantize(&[], &mut []);
}

#[test]
fn only_simple_formats_are_written() {
    use WeightFormat::*;
    for format in WeightFormat::ALL {
        let written = format.quantize(&vec![0.0; format.block_len()]);
        assert_eq!(written.is_some(), [F32, F16, BF16, Q4_0, Q8_0].contains(&format), "{format}");
        assert!(written.is_none_or(|bytes| bytes.len() == format.block_bytes()));
    }
}

proptest! {
    /// What is encoded decodes to within half a step of the format.
    #[test]
    fn encoders_round_to_the_nearest(values in prop::collection::vec(-100.0f32..100.0, 64)) {
        let extreme = |i: usize| values[i / 32 * 32..][..32].iter().fold(0.0, |a: f32, x| a.max(x.abs()));
        for format in [WeightFormat::F32, WeightFormat::F16, WeightFormat::BF16, WeightFormat::Q8_0, WeightFormat::Q4_0] {
            let bytes = format.quantize(&values).expect("an encoder");
            let mut decoded = vec![0.0; values.len()];
            format.dequantize(&bytes, &mut decoded);
            for (i, (x, y)) in values.iter().zip(&decoded).enumerate() {
                let step = match format {
                    WeightFormat::F32 => 0.0,
                    WeightFormat::F16 => x.abs() / 2048.0,
                    WeightFormat::BF16 => x.abs() / 256.0,
                    // Half a step, and the scale itself is rounded to f16.
                    WeightFormat::Q8_0 => extreme(i) * (0.5 / 127.0 + 1.0 / 2048.0),
                    // Sixteen levels from -8 to 7: the far end on the other side is a whole step away.
                    _ => extreme(i) * (1.0 / 8.0 + 1.0 / 2048.0),
                };
                prop_assert!((x - y).abs() <= step + 1e-6, "{}: {} became {}", format, x, y);
            }
        }
    }
}
