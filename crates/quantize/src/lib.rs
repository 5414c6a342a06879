//! Writing weights in quantized formats: encoders, the mixtures of formats that files are named after, importance matrices,
//! and [`quantize()`], which turns one model file into another.
//!
//! Names, rules and results are those of llama.cpp, so that a file has the size and the quality that its name promises.

mod codebook;
mod importance;
mod iq1;
mod k_quants;
mod lattice;
mod legacy;
mod mixture;
mod points;
mod search;
mod write;

use paguro_backend::WeightFormat::{self, *};

pub use importance::{Importance, ImportanceError};
use iq1::Iq1Encoder;
use lattice::LatticeEncoder;
pub use mixture::{Mixture, UnknownMixture};
pub use write::{Job, Progress, QuantizeError, Report, quantize};

/// An encoder of rows in one format.
#[derive(Debug)]
pub struct Encoder {
    format: WeightFormat,
    tables: Option<Tables>,
}

/// Tables of the formats that need some.
#[derive(Debug)]
enum Tables {
    Iq1(Iq1Encoder),
    Lattice(LatticeEncoder),
}

impl Encoder {
    /// Makes an encoder with its tables; `None` for formats that are only read.
    pub fn new(format: WeightFormat) -> Option<Self> {
        let tables = Iq1Encoder::new(format)
            .map(Tables::Iq1)
            .or_else(|| LatticeEncoder::new(format).map(Tables::Lattice));
        let is_written = !matches!(format, NVFP4 | NVFP4_SCALED);
        is_written.then_some(Self { format, tables })
    }

    /// Returns the format.
    pub fn format(&self) -> WeightFormat {
        self.format
    }

    /// Encodes a row and appends its bytes. `importance` has a weight for each element.
    ///
    /// # Panics
    /// If the row is not a whole number of blocks, or `importance` has another length.
    pub fn encode(&self, row: &[f32], importance: Option<&[f32]>, out: &mut Vec<u8>) {
        let format = self.format;
        assert!(
            row.len().is_multiple_of(format.block_len()),
            "{format}: {} elements are no blocks",
            row.len()
        );
        assert!(importance.is_none_or(|importance| importance.len() == row.len()));
        match format {
            Q4_0 if importance.is_some() => legacy::signed(row, importance, 8, out),
            Q4_1 => legacy::unsigned(row, importance, 15, out),
            Q5_0 => legacy::signed(row, importance, 16, out),
            Q5_1 => legacy::unsigned(row, importance, 31, out),
            Q2_K => k_quants::q2_k(row, importance, out),
            Q3_K => k_quants::q3_k(row, importance, out),
            Q4_K => k_quants::q4_k_or_q5_k(row, importance, 15, out),
            Q5_K => k_quants::q4_k_or_q5_k(row, importance, 31, out),
            Q6_K => k_quants::q6_k(row, importance, out),
            IQ4_NL => codebook::iq4_nl(row, importance, out),
            IQ4_XS => codebook::iq4_xs(row, importance, out),
            MXFP4 => codebook::mxfp4(row, out),
            TQ1_0 | TQ2_0 => legacy::ternary(format, row, out),
            Q1_0 => legacy::q1_0(row, out),
            Q2_0 => legacy::q2_0(row, out),
            _ => match &self.tables {
                Some(Tables::Iq1(iq1)) => iq1.encode(row, importance, out),
                Some(Tables::Lattice(lattice)) => lattice.encode(row, importance, out),
                None => out.extend(format.quantize(row).expect("a format with an encoder")),
            },
        }
    }
}
