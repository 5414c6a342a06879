//! Measures the speed of matmuls on one thread: bytes per second with one row, operations per second with many.
//!
//! `cargo run --release -p paguro-cpu-kernels --example matmul -- [FORMAT ...]`; `ROWS=1,8,512` and `ISA=avx2` in the
//! environment narrow it down, `COLS=512` takes another number of inputs than 2048. `RANGED=1` has activations of encoders, for Q8_0.

use std::{env, error::Error, hint::black_box, time::Instant};

use paguro_backend::{Matrix, WeightFormat};
use paguro_cpu_kernels::{
    isa::Isa,
    matrix::{Activations, Destination, MatrixKernels, PackedMatrix, RowKind, Rows, Scratch},
    quantize::{QuantBlock, row_blocks},
};

fn main() -> Result<(), Box<dyn Error>> {
    let formats: Vec<WeightFormat> =
        env::args().skip(1).map(|name| name.parse()).collect::<Result<_, _>>()?;
    let formats = if formats.is_empty() { WeightFormat::ALL.to_vec() } else { formats };
    let counts: Vec<usize> = env::var("ROWS")
        .unwrap_or_else(|_| "1,4,8,16,64,512".into())
        .split(',')
        .map(str::parse)
        .collect::<Result<_, _>>()?;
    let isa = match env::var("ISA") {
        Ok(name) => Isa::from_name(&name).ok_or("this machine does not have that instruction set")?,
        Err(_) => Isa::detect(),
    };
    println!("{isa}; one thread; GB/s of weights, GOP/s (two for each multiply-add)");
    for format in formats {
        bench(format, isa, &counts)?;
    }
    Ok(())
}

/// A matrix larger than the last-level cache.
fn bench(format: WeightFormat, isa: Isa, counts: &[usize]) -> Result<(), Box<dyn Error>> {
    let cols = env::var("COLS").map_or(Ok(2048), |cols| cols.parse())?;
    let rows = (64 << 20) / format.row_bytes(cols) / 16 * 16;
    // Any bytes do for speed, as long as the floats in them stay ordinary numbers.
    let bytes: Vec<u8> = (0..rows * format.row_bytes(cols)).map(|i| (i * 37 % 59) as u8).collect();
    let source = Matrix { name: "bench".into(), format, parts: 1, rows, cols, bytes: bytes.into() };
    let is_ranged = env::var_os("RANGED").is_some() && format == WeightFormat::Q8_0;
    let activations = if is_ranged { Activations::Ranged } else { Activations::Signed };
    let packing = Instant::now();
    let matrix = PackedMatrix::pack(&source, activations)?;
    print!(
        "{format:7} packed at {:4.1} GB/s |",
        matrix.bytes() as f64 / packing.elapsed().as_secs_f64() / 1e9
    );
    let kernels = MatrixKernels::new(isa, activations);
    let mut scratch = Scratch::default();
    let most = counts.iter().copied().max().unwrap_or(1);
    let x: Vec<f32> = (0..cols * most).map(|i| (i % 17) as f32 - 8.0).collect();
    let mut blocks = vec![QuantBlock::ZERO; most * row_blocks(cols)];
    for (x, out) in x.chunks_exact(cols).zip(blocks.chunks_exact_mut(row_blocks(cols))) {
        kernels.quantize_row(x, out);
    }
    let input = match matrix.row_kind() {
        RowKind::Quantized => Rows::Quantized { blocks: &blocks, stride: row_blocks(cols) },
        RowKind::Float => Rows::Float { values: &x, stride: cols },
    };
    let mut out = vec![0.0; most * rows];
    let out = Destination::new(&mut out, rows);
    for &count in counts {
        // A part of the outputs will do where there are many rows: short runs are disturbed less.
        let groups = if count > 8 { matrix.groups().min(16384 / count).max(8) } else { matrix.groups() };
        let mut best = f64::INFINITY;
        let begin = Instant::now();
        while begin.elapsed().as_secs_f64() < 0.4 {
            let start = Instant::now();
            matrix.multiply(&kernels, 0, black_box(input), count, 0..groups, &out, &mut scratch);
            best = best.min(start.elapsed().as_secs_f64());
        }
        let share = groups as f64 / matrix.groups() as f64;
        let gb = matrix.bytes() as f64 * share / best / 1e9;
        let gop = 2.0 * (count * cols) as f64 * (groups * 16) as f64 / best / 1e9;
        print!(" {count}: {gb:5.1} GB/s {gop:5.0} GOP/s |");
    }
    println!();
    Ok(())
}
