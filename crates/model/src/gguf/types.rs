//! Tensor types by number (`enum ggml_type`), including unsupported ones.

use std::borrow::Cow;

use paguro_backend::WeightFormat;

use crate::tensor::DType;

/// Name, elements in a block, bytes of a block of the types that Paguro does not compute with (ggml.h and
/// ggml-common.h of llama.cpp). Types that were withdrawn from the format have no size.
const OTHERS: [(u32, &str, u64, u64); 15] = [
    (4, "Q4_2 (withdrawn)", 0, 0),
    (5, "Q4_3 (withdrawn)", 0, 0),
    (9, "Q8_1", 32, 36),
    (15, "Q8_K", 256, 292),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (31, "Q4_0_4_4 (withdrawn)", 0, 0),
    (32, "Q4_0_4_8 (withdrawn)", 0, 0),
    (33, "Q4_0_8_8 (withdrawn)", 0, 0),
    (36, "IQ4_NL_4_4 (withdrawn)", 0, 0),
    (37, "IQ4_NL_4_8 (withdrawn)", 0, 0),
    (38, "IQ4_NL_8_8 (withdrawn)", 0, 0),
];

/// Returns a tensor type and the size of its blocks; `None` where the number or the size is not known.
pub(super) fn tensor_type(number: u32) -> (DType, Option<BlockSize>) {
    if let Some(format) = WeightFormat::from_ggml_type(number) {
        let size = BlockSize { len: format.block_len() as u64, bytes: format.block_bytes() as u64 };
        return (DType::Weight(format), Some(size));
    }
    match OTHERS.iter().find(|other| other.0 == number) {
        Some(&(_, name, len, bytes)) => {
            (DType::Other(Cow::Borrowed(name)), (len > 0).then_some(BlockSize { len, bytes }))
        }
        None => (DType::Other(Cow::Owned(format!("{number} (unknown)"))), None),
    }
}

/// Returns the number of a type that is only copied, by its name. Types without a size cannot be copied.
pub(crate) fn number_of_type(name: &str) -> Option<u32> {
    OTHERS.iter().find(|other| other.1 == name && other.2 > 0).map(|other| other.0)
}

/// Elements and bytes of a block.
#[derive(Clone, Copy)]
pub(super) struct BlockSize {
    pub(super) len: u64,
    pub(super) bytes: u64,
}

/// The largest number that [`file_type`] knows.
pub(super) const LAST_FILE_TYPE: u32 = 41;

/// Returns the common name of a `general.file_type` (`enum llama_ftype` of llama.cpp): `Q4_K_M`.
pub(super) fn file_type(number: u32) -> Option<&'static str> {
    const GUESSED: u32 = 1024; // a flag: the writer was not told
    Some(match number & !GUESSED {
        0 => "F32",
        1 => "F16",
        2 => "Q4_0",
        3 => "Q4_1",
        7 => "Q8_0",
        8 => "Q5_0",
        9 => "Q5_1",
        10 => "Q2_K",
        11 => "Q3_K_S",
        12 => "Q3_K_M",
        13 => "Q3_K_L",
        14 => "Q4_K_S",
        15 => "Q4_K_M",
        16 => "Q5_K_S",
        17 => "Q5_K_M",
        18 => "Q6_K",
        19 => "IQ2_XXS",
        20 => "IQ2_XS",
        21 => "Q2_K_S",
        22 => "IQ3_XS",
        23 => "IQ3_XXS",
        24 => "IQ1_S",
        25 => "IQ4_NL",
        26 => "IQ3_S",
        27 => "IQ3_M",
        28 => "IQ2_S",
        29 => "IQ2_M",
        30 => "IQ4_XS",
        31 => "IQ1_M",
        32 => "BF16",
        36 => "TQ1_0",
        37 => "TQ2_0",
        38 => "MXFP4",
        39 => "NVFP4",
        40 => "Q1_0",
        41 => "Q2_0",
        _ => return None,
    })
}
