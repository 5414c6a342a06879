//! The weights that are made of files, as a hash.

use paguro_model::{LoadOptions, Model, WEIGHTS};

use crate::{
    architectures::{open_gguf, open_hf},
    tiny::models,
};

/// Version of the weights, and the hash of those of one model of each architecture, from both file formats.
const GOLDEN: (u32, u64) = (1, 0x52ae_3879_8acd_2e2f);

/// Pages on disk are read again by later versions with equal [`WEIGHTS`], so other weights of the same files need another one.
#[test]
fn other_weights_have_another_version() {
    // FNV-1a.
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut add = |bytes: &[u8]| {
        for &byte in bytes {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    };
    for tiny in models::all() {
        let options = LoadOptions::default();
        for Model { weights, .. } in [open_gguf(&tiny, &options), open_hf(&tiny, &options)] {
            for matrix in weights.matrices.iter().chain(&weights.tables) {
                add(matrix.format.name().as_bytes());
                add(&matrix.read().expect("a file that is there"));
            }
            for number in weights.vectors.iter().flatten() {
                add(&number.to_bits().to_le_bytes());
            }
        }
    }
    assert_eq!(
        (WEIGHTS, hash),
        GOLDEN,
        "other weights are made of the same files ({hash:#x}): increase `WEIGHTS` and record version and hash in GOLDEN; with \
         other tiny models, record the hash only"
    );
}
