//! Tensor types by number (`enum ggml_type`), including those that are only listed.

use std::borrow::Cow;

use paguro_backend::WeightFormat;

use crate::tensor::DType;

/// Name, elements in a block, bytes of a block of the types that Paguro does not compute with (ggml.h and
/// ggml-common.h of llama.cpp). Types that were withdrawn from the format have no size.
const OTHERS: [(u32, &str, u64, u64); 27] = [
    (4, "Q4_2 (withdrawn)", 0, 0),
    (5, "Q4_3 (withdrawn)", 0, 0),
    (9, "Q8_1", 32, 36),
    (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56),
    (31, "Q4_0_4_4 (withdrawn)", 0, 0),
    (32, "Q4_0_4_8 (withdrawn)", 0, 0),
    (33, "Q4_0_8_8 (withdrawn)", 0, 0),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (36, "IQ4_NL_4_4 (withdrawn)", 0, 0),
    (37, "IQ4_NL_4_8 (withdrawn)", 0, 0),
    (38, "IQ4_NL_8_8 (withdrawn)", 0, 0),
    (40, "NVFP4", 64, 36),
    (41, "Q1_0", 128, 18),
    (42, "Q2_0", 64, 18),
];

/// A tensor type and the size of its blocks; `None` where the number or the size is not known.
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

/// How many elements lie in how many bytes.
#[derive(Clone, Copy)]
pub(super) struct BlockSize {
    pub(super) len: u64,
    pub(super) bytes: u64,
}

/// What people call a file of this `general.file_type` (`enum llama_ftype` of llama.cpp): `Q4_K_M`.
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
        21 => "Q2_K_S",
        25 => "IQ4_NL",
        30 => "IQ4_XS",
        32 => "BF16",
        38 => "MXFP4",
        _ => return None,
    })
}
