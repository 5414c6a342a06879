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

/// Every f16, float or exponent of a block that its elements are multiples of is looked at.
#[test]
fn values_that_are_not_finite_are_found() {
    let mut values = [0.0; 256];
    for format in WeightFormat::ALL {
        let (len, bytes) = (format.block_len(), format.block_bytes());
        let mut block = vec![0x11; 3 * bytes];
        assert!(format.is_finite(&block), "{format}");
        let mut found = 0;
        for at in 2 * bytes..3 * bytes - 1 {
            let old = [block[at], block[at + 1]];
            for bad in [[0xFF, 0x7C], [0x80, 0x7F], [0x00, 0xFC], [0xFF, 0xFF]] {
                block[at..at + 2].copy_from_slice(&bad);
                format.dequantize(&block[2 * bytes..], &mut values[..len]);
                let is_finite = values[..len].iter().all(|value| value.is_finite());
                // Scales that are NaN by the definitions of MXFP4 and NVFP4; decoders make numbers of them.
                let scales = bad.iter().zip(at - 2 * bytes..);
                let is_nan = match format {
                    WeightFormat::MXFP4 => at == 2 * bytes && bad[0] == 0xFF,
                    WeightFormat::NVFP4 => scales.into_iter().any(|(b, at)| at < 4 && b & 0x7F == 0x7F),
                    WeightFormat::NVFP4_SCALED => {
                        scales.into_iter().any(|(b, at)| (4..8).contains(&at) && b & 0x7F == 0x7F)
                    }
                    _ => false,
                };
                // A scale of no quants hides it in the decoded values.
                if !is_finite || is_nan {
                    assert!(!format.is_finite(&block), "{format} {at} {bad:?}");
                    found += 1;
                }
            }
            block[at..at + 2].copy_from_slice(&old);
            assert!(format.is_finite(&block), "{format} {at}");
        }
        // The exponent of IQ1_M is in two words.
        assert!(found > 0 || format == WeightFormat::IQ1_M, "{format}");
        format.spoil(&mut block[bytes..]);
        assert!(!format.is_finite(&block), "{format}");
    }
}

#[test]
fn names_and_numbers_lead_back() {
    for format in WeightFormat::ALL {
        assert_eq!(format.to_string().parse(), Ok(format));
        assert_eq!(format.name().to_lowercase().parse(), Ok(format));
        let has_number = format.ggml_type() != u32::MAX;
        assert_eq!(WeightFormat::from_ggml_type(format.ggml_type()), has_number.then_some(format));
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
    /// Encoded values decode to within half a step of the format.
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
