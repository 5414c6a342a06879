//! Weight formats: how a row of a matrix is encoded, and what its bytes mean.

/// How the rows of a matrix are encoded. Names and layouts are GGUF's (ggml-common.h of llama.cpp).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(non_camel_case_types)] // the field writes Q4_K
#[allow(missing_docs)] // the names say it all; each layout is documented where it is decoded
pub enum WeightFormat {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
}

impl WeightFormat {
    /// Every format.
    pub const ALL: [WeightFormat; 16] = {
        use WeightFormat::*;
        [F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4]
    };

    /// Elements in a block.
    pub const fn block_len(self) -> usize {
        use WeightFormat::*;
        match self {
            F32 | F16 | BF16 => 1,
            Q4_0 | Q4_1 | Q5_0 | Q5_1 | Q8_0 | IQ4_NL | MXFP4 => 32,
            Q2_K | Q3_K | Q4_K | Q5_K | Q6_K | IQ4_XS => 256,
        }
    }

    /// Bytes of a block.
    pub const fn block_bytes(self) -> usize {
        use WeightFormat::*;
        match self {
            F32 => 4,
            F16 | BF16 => 2,
            Q4_0 | IQ4_NL => 18,
            Q4_1 => 20,
            Q5_0 => 22,
            Q5_1 => 24,
            Q8_0 => 34,
            Q2_K => 84,
            Q3_K => 110,
            Q4_K => 144,
            Q5_K => 176,
            Q6_K => 210,
            IQ4_XS => 136,
            MXFP4 => 17,
        }
    }

    /// Bytes of a row of `cols` elements; `cols` is a multiple of [`WeightFormat::block_len`].
    pub const fn row_bytes(self, cols: usize) -> usize {
        cols / self.block_len() * self.block_bytes()
    }

    /// Decodes one row or a part of it that starts at a block.
    pub fn dequantize(self, bytes: &[u8], out: &mut [f32]) {
        let _ = (bytes, out);
        todo!("decoders of all formats")
    }
}
