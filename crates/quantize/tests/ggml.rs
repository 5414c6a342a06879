//! Encoders against ggml: the bytes of the same rows, with and without importance.

use paguro_backend::WeightFormat::{self, *};
use paguro_quantize::Encoder;

const ROWS: usize = 4;
const COLS: usize = 2048;

/// Format, whether importance is given, and the FNV-1a hashes of rows that `ggml_quantize_chunk` encoded (llama.cpp of
/// llama-cpp-python 0.3.36, compiled without fused multiply-add).
const EXPECTED: &[(WeightFormat, bool, [u64; ROWS])] = &[
    (Q4_0, false, [0x96800105b1081135, 0x4a47c65adf562e41, 0x073e08445a410553, 0xded3f408bd88dd06]),
    (Q4_0, true, [0x748f57c935e0a0a6, 0x33946d6ede57bf92, 0xf29998914ac9f96e, 0x82e4c522d54b9bcd]),
    (Q4_1, false, [0x79897d638f553a88, 0x05353320df7bc3af, 0xfa51e2f8be64c0ff, 0x399086601962dcb8]),
    (Q4_1, true, [0x23836fd55d593bd9, 0xbbfff118456f424f, 0xd710cabe1a65980a, 0x8b5511beeec25f02]),
    (Q5_0, false, [0x29011e9a54d3d938, 0x0f63019799ac18c9, 0x05df7827d8192e2a, 0x11db9e8b1585b226]),
    (Q5_0, true, [0x9441343578b37296, 0xaef3b3ee29f6b886, 0xe08b7a7e0aa391ae, 0x4c68bae056a7334b]),
    (Q5_1, false, [0x0bdf208721b424d7, 0x47a272666e0b0118, 0x3f8889c8343debf6, 0xe22618fbf8ed7213]),
    (Q5_1, true, [0x4fe57f897b90641a, 0xa258154ddb71c18a, 0x6e3f2c424cf48c18, 0x1f47d4e4429992e4]),
    (Q8_0, false, [0x88ded6ff3d80f19d, 0x5199e80e2671da7a, 0xdc94982ace9939c3, 0xd64f3c313a61211b]),
    (Q8_0, true, [0x88ded6ff3d80f19d, 0x5199e80e2671da7a, 0xdc94982ace9939c3, 0xd64f3c313a61211b]),
    (Q2_K, false, [0xc330fb6a785d406b, 0x77daaeb53950904b, 0x85e0e3dfaa4603f1, 0xe17cbc69a60adde4]),
    (Q2_K, true, [0x4aa9184ca799be69, 0x94cb9702c38d36fc, 0xf38d0fa71ea76fa4, 0xc341426ed35cfcab]),
    (Q3_K, false, [0x90f0767f7e2459f2, 0xc2fb323e6400526f, 0x7b76e85cb276d2ae, 0xce3b050fdb20a57a]),
    (Q3_K, true, [0x5d98986675ef889f, 0xc6a04e79eba32708, 0x49f04adf8291785b, 0xc13120a1289883f2]),
    (Q4_K, false, [0x27e79d4b7a5da3e6, 0xd50b41a6339ef837, 0xdec4fc3f78e7e018, 0x37b754cc7bf95e8c]),
    (Q4_K, true, [0x3c9db60f3aa0eecf, 0x66301ffa13460a17, 0x13844661301e2810, 0x693810fd968446c5]),
    (Q5_K, false, [0x1f7e1b54f76a449f, 0xd6b750b9b3daaaf0, 0xc728be4e48d247bd, 0xe9a5dd75c39e5e49]),
    (Q5_K, true, [0x36941dafe2273f24, 0x0359145cac777dfe, 0xf65f303975da7bb7, 0xeb11f1e5fe521eec]),
    (Q6_K, false, [0x267d8326150ccf7f, 0xbea0f55c91b4213f, 0x757db58b16186671, 0x832da2012133a5b1]),
    (Q6_K, true, [0xdf6827c72057eb2d, 0x3e9d35aa75da13ad, 0xacc37c59bb3d3d87, 0x9dd65ddc7ceba3c1]),
    (IQ4_NL, false, [0xe438395ffaf34b7e, 0x3f6711cca6bacbeb, 0x74ba52e1ab571d49, 0xfacd184f1a4d9740]),
    (IQ4_NL, true, [0x75224d81a80b6913, 0xe86616f30348e62b, 0x120346c2c5dd4a67, 0x32fa6c9789dff629]),
    (IQ4_XS, false, [0x29f16203568c643c, 0xcc2c0c427bcc62e4, 0x3e77d572b5eaf4d3, 0x33aff81bcf94b211]),
    (IQ4_XS, true, [0x84db56594e6d63cb, 0xb6c9d75f18ed9266, 0xcbc01973456c4d6f, 0x52154e92e0628c21]),
    (MXFP4, false, [0x347b2e0027d72dc3, 0x84f03dc3ce3e26bb, 0xe5da2d8bd6037a92, 0x377ec33ee025817c]),
    (MXFP4, true, [0x347b2e0027d72dc3, 0x84f03dc3ce3e26bb, 0xe5da2d8bd6037a92, 0x377ec33ee025817c]),
    (TQ1_0, false, [0x1af65e6cd09c399b, 0x21065a31defa879c, 0x51aebf8fdad98cda, 0x24958e4d9a886a05]),
    (TQ1_0, true, [0x1af65e6cd09c399b, 0x21065a31defa879c, 0x51aebf8fdad98cda, 0x24958e4d9a886a05]),
    (TQ2_0, false, [0x9c400674987a45b2, 0x5c165746fcebf467, 0xa37d462787ea6b7f, 0xbba35eb09cab718a]),
    (TQ2_0, true, [0x9c400674987a45b2, 0x5c165746fcebf467, 0xa37d462787ea6b7f, 0xbba35eb09cab718a]),
    (Q1_0, false, [0x02b5a29e8490792e, 0x1a2bc4ffa2eb4b5d, 0x55784f8df6f81cfd, 0x37774457176020dc]),
    (Q1_0, true, [0x02b5a29e8490792e, 0x1a2bc4ffa2eb4b5d, 0x55784f8df6f81cfd, 0x37774457176020dc]),
    (Q2_0, false, [0x8268547955a05e26, 0x2249090d4d3dde59, 0xa20f9b14817813c8, 0x7f105f905a7042db]),
    (Q2_0, true, [0x8268547955a05e26, 0x2249090d4d3dde59, 0xa20f9b14817813c8, 0x7f105f905a7042db]),
    (IQ3_S, false, [0x18d4b0257b6ebd02, 0x31eb379d15ce03a0, 0x9e8f6a17db8a178f, 0xe152dc9652adcd20]),
    (IQ3_S, true, [0x422b62d74e3fbeac, 0x1e0858fb3c87c102, 0x741356dc7eb39486, 0x283772a0b6066e72]),
    (IQ3_XXS, false, [0xad6fc89465a86ff3, 0x85abc85e6a974af4, 0xfc6e6b4dd8e7c7ea, 0x9308628ac0ff7b36]),
    (IQ3_XXS, true, [0x727b5c591d996ed2, 0x8e371f9363f314de, 0x4b7190070c5c90ea, 0xeab2338a14568345]),
    (IQ2_S, false, [0x8b4ff76ee061bfec, 0x2ae3ec38c2c96081, 0xbfbe8894497a7acf, 0x4005fc0ae1334610]),
    (IQ2_S, true, [0x5d7ac553e624f3d0, 0x5aec7c7e65725c1a, 0xfa2526d6ee78ab39, 0x8e185780c9b80b83]),
    (IQ1_S, true, [0xf34af1e297f2e2b0, 0xdf2d34d3c8e5592d, 0x96289ff8a47045ba, 0x45f2bf3124402a86]),
    (IQ1_M, false, [0x422da3872db190b7, 0xbaba803e1715e1f7, 0xcced660f85256b90, 0x85cabfcc15f365b4]),
    (IQ1_M, true, [0x7f8a3661cbdc1808, 0x1a17d82494956c39, 0x3e15d41f1b89d3f6, 0x7338335f5ee790da]),
    (IQ2_XS, true, [0xbc4eb8f5fe3d8294, 0xacd0384267785a36, 0xd4b8d55c69e308c0, 0xa79d62543df000eb]),
];

#[test]
fn bytes_are_those_of_ggml() {
    let (rows, importance) = inputs();
    let mut different = Vec::new();
    for &(format, weighted, expected) in EXPECTED {
        let encoder = Encoder::new(format).unwrap();
        for (index, (row, expected)) in rows.as_chunks::<COLS>().0.iter().zip(expected).enumerate() {
            let mut bytes = Vec::new();
            encoder.encode(row, weighted.then_some(&importance), &mut bytes);
            assert_eq!(bytes.len(), format.row_bytes(COLS));
            if fnv(&bytes) != expected {
                different.push(format!("{format}, importance {weighted}, row {index}"));
            }
        }
    }
    assert!(different.is_empty(), "{}", different.join("\n"));
}

/// The encoder of ggml stores some negative numbers without their sign while it searches, so bytes differ. Its weighted error for
/// these rows is 3.904e6.
#[test]
fn iq2_xxs_is_no_worse_than_that_of_ggml() {
    let (rows, importance) = inputs();
    let encoder = Encoder::new(IQ2_XXS).unwrap();
    let mut error = 0.0;
    for row in rows.as_chunks::<COLS>().0 {
        let (mut bytes, mut decoded) = (Vec::new(), vec![0.0; COLS]);
        encoder.encode(row, Some(&importance), &mut bytes);
        IQ2_XXS.dequantize(&bytes, &mut decoded);
        let errors = decoded.iter().zip(row).zip(&importance);
        error += errors.map(|((y, x), weight)| f64::from(weight * (y - x) * (y - x))).sum::<f64>();
    }
    assert!(error < 3.9e6, "{error}");
}

fn fnv(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Rows of bell-shaped values; the second has blocks of zeros, of equal values, of one value, of one sign, tiny and large ones.
fn inputs() -> (Vec<f32>, Vec<f32>) {
    let mut state = 1u64;
    let mut next = || {
        let mut sum = 0;
        for _ in 0..4 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            sum += (state >> 48) as i32;
        }
        (sum - 131_070) as f32 / 65_536.0
    };
    let mut rows = Vec::new();
    for row in 0..ROWS {
        for i in 0..COLS {
            let x = next();
            rows.push(match (row, i / 256) {
                (1, 0) => 0.0,
                (1, 1) => 0.5,
                (1, 2) => {
                    if i % 256 == 7 {
                        -3.0
                    } else {
                        0.0
                    }
                }
                (1, 3) => x * 1e-6,
                (1, 4) => x.abs(),
                (1, 5) => -x.abs(),
                (1, 6) => x * 1000.0,
                (1, _) => {
                    if x < 0.0 {
                        -1.0
                    } else {
                        1.0
                    }
                }
                (2, _) => x * x * x,
                _ => x,
            });
        }
    }
    let importance = (0..COLS).map(|i| {
        let x = next();
        if i % 97 == 0 { 0.0 } else { x * x }
    });
    (rows, importance.collect())
}
