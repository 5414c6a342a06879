//! Every format on every instruction set of this machine, against the file formats' own decoders and `f64`.

use half::f16;
use paguro_backend::{Matrix, WeightFormat};

use super::*;
use crate::quantize::row_blocks;

/// A small generator, so that each case is the same on every run (SplitMix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number in `-1..1`.
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

/// Random bytes are valid blocks of every format once their floats are sensible numbers.
fn random_matrix(format: WeightFormat, rows: usize, cols: usize) -> Matrix {
    use WeightFormat::*;
    let mut random = Random((rows * 7919 + cols) as u64);
    let mut bytes: Vec<u8> = (0..rows * format.row_bytes(cols)).map(|_| random.next() as u8).collect();
    for block in bytes.chunks_exact_mut(format.block_bytes()) {
        let halves: &[usize] = if format.is_quantized() { format.halves() } else { &[] };
        for &at in halves {
            block[at..at + 2].copy_from_slice(&f16::from_f32(random.unit() * 0.02).to_le_bytes());
        }
        match format {
            F32 => block.copy_from_slice(&random.unit().to_le_bytes()),
            F16 => block.copy_from_slice(&f16::from_f32(random.unit()).to_le_bytes()),
            BF16 => block.copy_from_slice(&half::bf16::from_f32(random.unit()).to_le_bytes()),
            MXFP4 => block[0] = 110 + block[0] % 16,
            NVFP4_SCALED => {
                block[..4].copy_from_slice(&0.37f32.to_le_bytes());
                block[4..8].iter_mut().for_each(|scale| *scale %= 64);
            }
            NVFP4 => block[..4].iter_mut().for_each(|scale| *scale %= 64),
            // Exponent bits of d: between 2^-10 and 2^-3.
            IQ1_M => {
                block[55] = block[55] & 0x8f | 0x10;
                block[53] |= 0x80;
            }
            _ => {}
        }
    }
    Matrix { name: "random".into(), format, parts: 1, rows, cols, bytes: bytes.into() }
}

/// Activations of `count` rows with outliers, as in models, and the memory around them.
struct Input {
    activations: Activations,
    x: Vec<f32>,
    cols: usize,
    /// One more row than needed: noise that must not be read.
    blocks: Vec<QuantBlock>,
    values: Vec<f32>,
    values_stride: usize,
}

impl Input {
    fn new(isa: Isa, activations: Activations, count: usize, cols: usize) -> Self {
        let mut random = Random(cols as u64);
        let x: Vec<f32> =
            (0..count * cols).map(|i| random.unit() * if i % 61 == 0 { 20.0 } else { 1.0 }).collect();
        let noise = QuantBlock { quants: [127; 32], scale: 1e30, scaled_sum: -1e30, ..QuantBlock::ZERO };
        let kernels = MatrixKernels::new(isa, activations);
        let mut blocks = vec![noise; (count + 1) * row_blocks(cols)];
        for (x, out) in x.chunks_exact(cols).zip(blocks.chunks_exact_mut(row_blocks(cols))) {
            kernels.quantize_row(x, out);
            *out.last_mut().unwrap() = noise; // only keeps rows apart
        }
        let values_stride = cols + 5;
        let mut values = vec![1e30; (count + 1) * values_stride];
        for (x, out) in x.chunks_exact(cols).zip(values.chunks_exact_mut(values_stride)) {
            out[..cols].copy_from_slice(x);
        }
        Self { activations, x, cols, blocks, values, values_stride }
    }

    fn rows(&self, kind: RowKind) -> Rows<'_> {
        match kind {
            RowKind::Quantized => Rows::Quantized { blocks: &self.blocks, stride: row_blocks(self.cols) },
            RowKind::Float => Rows::Float { values: &self.values, stride: self.values_stride },
        }
    }

    /// Returns the numbers of row `row` with the kernels' precision, and the sums of the magnitudes that they are made of.
    fn exact(&self, row: usize, kind: RowKind) -> Vec<(f64, f64)> {
        match kind {
            RowKind::Quantized => self.blocks[row * row_blocks(self.cols)..][..self.cols.div_ceil(32)]
                .iter()
                .flat_map(|b| {
                    let least = match self.activations {
                        Activations::Signed => 0.0,
                        Activations::Ranged => f64::from(b.scaled_sum),
                    };
                    b.quants.map(|q| {
                        let part = f64::from(b.scale) * f64::from(q);
                        (least + part, least.abs() + part.abs())
                    })
                })
                .take(self.cols)
                .collect(),
            RowKind::Float => self.x[row * self.cols..][..self.cols]
                .iter()
                .map(|&x| (f64::from(x), f64::from(x.abs())))
                .collect(),
        }
    }
}

const UNTOUCHED: f32 = -7.25e20;

/// Multiplies the first `count` rows, `[count][outputs]`, in two calls with half of the groups each, into
/// a larger field of which nothing else may change.
fn multiply(isa: Isa, matrix: &PackedMatrix, input: &Input, count: usize, scratch: &mut Scratch) -> Vec<u32> {
    let (outputs, stride) = (matrix.rows(), matrix.rows() + 3);
    let mut out = vec![UNTOUCHED; count * stride];
    let kernels = MatrixKernels::new(isa, matrix.activations());
    let target = Destination::new(&mut out, stride);
    let middle = matrix.groups() / 2;
    for groups in [0..middle, middle..matrix.groups()] {
        matrix.multiply(&kernels, 0, input.rows(matrix.row_kind()), count, groups, &target, scratch);
    }
    let mut bits = Vec::new();
    for row in out.chunks_exact(stride) {
        assert!(row[outputs..].iter().all(|&x| x == UNTOUCHED), "wrote past the outputs");
        bits.extend(row[..outputs].iter().map(|x| x.to_bits()));
    }
    bits
}

fn check_format(format: WeightFormat) {
    check_format_with(format, Activations::Signed);
}

fn check_format_with(format: WeightFormat, activations: Activations) {
    let mut cols = vec![256, 1024];
    if format.block_len() <= 32 {
        cols.extend([32, 64, 96, 160]);
    }
    if format.block_len() == 1 {
        cols.extend([1, 75, 129]);
    }
    let mut scratch = Scratch::default();
    let mut shapes: Vec<_> =
        cols.into_iter().flat_map(|cols| [1, 15, 16, 17, 100].map(|outputs| (cols, outputs))).collect();
    // More inputs than go by at a time with many rows, and a rest.
    let wide = 3 * 1024 + 256;
    shapes.push((wide, 33));
    for (cols, outputs) in shapes {
        let source = random_matrix(format, outputs, cols);
        let matrix = PackedMatrix::pack(&source, activations).unwrap();
        let input = Input::new(Isa::detect(), activations, 257, cols);
        let most = if outputs == 100 || cols == wide { 257 } else { 13 };
        let case = format!("{format} [{outputs}, {cols}]");

        let best = multiply(Isa::detect(), &matrix, &input, most, &mut scratch);
        check_reference(&source, &matrix, &input, &best, most, &case);
        for isa in Isa::supported() {
            let all = multiply(isa, &matrix, &input, most, &mut scratch);
            assert!(all == best, "{case}: {isa} differs from {}", Isa::detect());
            for count in (1..=13).chain([64, 241]).filter(|&count| count < most) {
                let some = multiply(isa, &matrix, &input, count, &mut scratch);
                assert!(some == best[..some.len()], "{case}: {isa} differs with {count} rows");
            }
        }
    }
}

/// Results are exact except for single-precision rounding: a few roundings per 32 inputs (per input for float weights),
/// each at most 2^-24 of a partial sum, which is at most the sum of all magnitudes. With minimums, magnitudes are those
/// of scale * quant and of the minimum, which may be a few times their difference.
fn check_reference(
    source: &Matrix,
    matrix: &PackedMatrix,
    input: &Input,
    got: &[u32],
    count: usize,
    case: &str,
) {
    let (bytes, stride) = (source.read().unwrap(), source.format.row_bytes(source.cols));
    let mut w = vec![0.0; source.cols];
    for row in [0, 1, 5, 7, 12, 100, 255, 256].into_iter().filter(|&row| row < count) {
        let x = input.exact(row, matrix.row_kind());
        for o in 0..source.rows {
            source.format.dequantize(&bytes[o * stride..][..stride], &mut w);
            let (mut sum, mut size) = (0.0, 0.0);
            for (w, (x, magnitude)) in w.iter().zip(&x) {
                sum += f64::from(*w) * x;
                size += f64::from(w.abs()) * magnitude;
            }
            let steps = if matrix.row_kind() == RowKind::Float { x.len() } else { x.len() / 8 + 8 };
            let bound = size * (steps as f64).sqrt() * 8.0 * 2f64.powi(-24) + 1e-30;
            let got = f64::from(f32::from_bits(got[row * source.rows + o]));
            assert!(
                (got - sum).abs() <= bound,
                "{case}: output {o} of row {row} is {got}, not {sum} ± {bound:e}"
            );
        }
    }
}

macro_rules! formats {
    ($($name:ident: $format:ident;)*) => {
        $( #[test] fn $name() { check_format(WeightFormat::$format); } )*

        #[test]
        fn every_format_is_tested() {
            assert_eq!([$(WeightFormat::$format),*], WeightFormat::ALL);
        }
    };
}

formats! {
    f32: F32;
    f16: F16;
    bf16: BF16;
    q4_0: Q4_0;
    q4_1: Q4_1;
    q5_0: Q5_0;
    q5_1: Q5_1;
    q8_0: Q8_0;
    q2_k: Q2_K;
    q3_k: Q3_K;
    q4_k: Q4_K;
    q5_k: Q5_K;
    q6_k: Q6_K;
    iq1_s: IQ1_S;
    iq1_m: IQ1_M;
    iq2_xxs: IQ2_XXS;
    iq2_xs: IQ2_XS;
    iq2_s: IQ2_S;
    iq3_xxs: IQ3_XXS;
    iq3_s: IQ3_S;
    iq4_nl: IQ4_NL;
    iq4_xs: IQ4_XS;
    tq1_0: TQ1_0;
    tq2_0: TQ2_0;
    q1_0: Q1_0;
    q2_0: Q2_0;
    mxfp4: MXFP4;
    nvfp4: NVFP4;
    nvfp4_scaled: NVFP4_SCALED;
}

#[test]
fn q8_0_with_ranged_activations() {
    check_format_with(WeightFormat::Q8_0, Activations::Ranged);
}

#[test]
fn sums_of_weights_are_rounded_by_one_at_most() {
    let format = WeightFormat::Q8_0;
    let rows: Vec<[i8; 32]> =
        (-128..=127).map(|quant| std::array::from_fn(|i| if i == 9 { quant / 2 } else { quant })).collect();
    let scale = f16::from_f32(0.01);
    let bytes: Vec<u8> = rows
        .iter()
        .flat_map(|row| scale.to_le_bytes().into_iter().chain(row.map(|quant| quant as u8)))
        .collect();
    let source =
        Matrix { name: "one sign".into(), format, parts: 1, rows: rows.len(), cols: 32, bytes: bytes.into() };
    let matrix = PackedMatrix::pack(&source, Activations::Ranged).unwrap();
    for isa in Isa::supported() {
        // All are the least one, so that the sum of the weights is all that counts.
        let mut input = Input::new(isa, Activations::Ranged, 1, 32);
        MatrixKernels::new(isa, Activations::Ranged)
            .quantize_row(&[3.0; 32], &mut input.blocks[..row_blocks(32)]);
        let out = multiply(isa, &matrix, &input, 1, &mut Scratch::default());
        for (row, out) in rows.iter().zip(out) {
            let sum: i32 = row.iter().map(|&quant| i32::from(quant)).sum();
            let got = f64::from(f32::from_bits(out)) / (3.0 * f64::from(scale.to_f32()));
            let bound = if sum.abs() <= 2048 { 0.001 } else { 1.001 };
            assert!((got - f64::from(sum)).abs() <= bound, "{isa}: {sum} became {got}");
        }
    }
}

#[test]
fn packed_rows_decode_to_the_same_bits() {
    let ranged = (WeightFormat::Q8_0, Activations::Ranged);
    let all = WeightFormat::ALL.into_iter().map(|format| (format, Activations::Signed));
    for (format, activations) in all.chain([ranged]) {
        for cols in [format.block_len() * 3, 512] {
            let source = random_matrix(format, 35, cols);
            let matrix = PackedMatrix::pack(&source, activations).unwrap();
            let (mut want, mut got) = (vec![0.0; cols], vec![0.0; cols]);
            let bytes = source.read().unwrap();
            for (row, encoded) in bytes.chunks_exact(format.row_bytes(cols)).enumerate() {
                format.dequantize(encoded, &mut want);
                matrix.dequantize_row(row, &mut got);
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert!(bits(&want) == bits(&got), "{format}, row {row}: {want:?} {got:?}");
            }
        }
    }
}

#[test]
fn every_exponent_of_mxfp4_counts() {
    // Row e has scale 2^(e - 127) and weights of one (2 * 0.5): its product with ones is 32 * 2^(e - 127).
    let bytes: Vec<u8> = (0..=240u8).flat_map(|e| std::iter::once(e).chain([0x22; 16])).collect();
    let format = WeightFormat::MXFP4;
    let source =
        Matrix { name: "exponents".into(), format, parts: 1, rows: 241, cols: 32, bytes: bytes.into() };
    let matrix = PackedMatrix::pack(&source, Activations::Signed).unwrap();
    let mut input = Input::new(Isa::detect(), Activations::Signed, 1, 32);
    MatrixKernels::new(Isa::detect(), Activations::Signed).quantize_row(&[127.0; 32], &mut input.blocks);
    for isa in Isa::supported() {
        let out = multiply(isa, &matrix, &input, 1, &mut Scratch::default());
        for (e, out) in out.into_iter().enumerate() {
            let want = 32.0 * 127.0 * 2f64.powi(e as i32 - 127);
            assert!((f64::from(f32::from_bits(out)) / want - 1.0).abs() < 1e-6, "{isa}: exponent {e}");
        }
    }
}

#[test]
fn not_a_number_is_not_hidden() {
    for (format, activations) in
        [(WeightFormat::Q4_K, Activations::Signed), (WeightFormat::Q8_0, Activations::Ranged)]
    {
        let matrix = PackedMatrix::pack(&random_matrix(format, 17, 512), activations).unwrap();
        for isa in Isa::supported() {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut x = vec![0.5; 512];
                x[300] = bad;
                let mut input = Input::new(isa, activations, 1, 512);
                MatrixKernels::new(isa, activations).quantize_row(&x, &mut input.blocks[..row_blocks(512)]);
                let out = multiply(isa, &matrix, &input, 1, &mut Scratch::default());
                assert!(
                    out.into_iter().all(|x| !f32::from_bits(x).is_finite()),
                    "{isa}: {bad} vanished in {format}"
                );
            }
        }
    }
}

#[test]
fn several_threads_pack_one_matrix() {
    let source = random_matrix(WeightFormat::Q6_K, 1000, 256);
    let alone = PackedMatrix::pack(&source, Activations::Signed).unwrap();
    let packing = Packing::new(&source, Activations::Signed).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| packing.work());
        }
    });
    assert!(packing.finish().unwrap().memory.bytes() == alone.memory.bytes());
}

#[test]
fn shapes_that_do_not_fit_their_bytes_are_refused() {
    let good = random_matrix(WeightFormat::Q4_K, 3, 512);
    for (rows, cols) in [(3, 256), (4, 512), (0, 512), (3, 0), (3, 500), (usize::MAX, 512)] {
        let Err(error) = PackedMatrix::pack(&Matrix { rows, cols, ..good.clone() }, Activations::Signed)
        else {
            panic!("[{rows}, {cols}] was packed")
        };
        assert!(matches!(error, LoadError::BadWeights { .. }), "{error}");
    }
}
