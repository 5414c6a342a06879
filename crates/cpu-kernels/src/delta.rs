//! Kernels of the delta rule and of the scan of Mamba-2: some columns of one value head, over rows of one chunk. See
//! [`paguro_backend::reference::recurrent`] for the formulas.
//!
//! Columns are the lanes of vectors, 16 of them a block. Every sum runs in one order whatever rows are computed
//! together, so that a row has the same bits in any step.

use paguro_backend::STATE_CHUNK;

use crate::{
    isa::simd_kernels,
    simd::{self, LANES, Simd},
};

/// Rows whose products with a matrix are computed together.
const ROWS: usize = 4;
/// Blocks that are computed together for a single row, so that additions do not wait for each other.
const BLOCKS: usize = 4;

/// A row of a tile.
type Vector = [f32; LANES];

simd_kernels! {
    /// Operations of the delta rule, for one instruction set.
    pub struct DeltaKernels {
        /// `out += x ⊙ y`
        fn add_product(out: &mut [f32], x: &[f32], y: &[f32]) = add_product;
        /// `x = scale * x / sqrt(Σx² + eps)`
        fn unit_norm(x: &mut [f32], eps: f32, scale: f32) = unit_norm;
        /// `x = x ⊙ sigmoid(gate)`
        fn sigmoid_gate(x: &mut [f32], gate: &[f32]) = sigmoid_gate;
        /// Some rows of a chunk.
        fn rows(piece: &Piece<'_>, tiles: &mut Tiles<'_>, scratch: &mut DeltaScratch) = rows;
        /// Some rows of a chunk of a scan, whose updates are values times their strengths. `dots` are the products of the first
        /// row's query with the keys of the chunk's rows, and those of row `i` at `i * stride`.
        fn scan(
            piece: &Piece<'_>,
            dots: &[f32],
            stride: usize,
            tiles: &mut Tiles<'_>,
            scratch: &mut DeltaScratch,
        ) = scan;
        /// `Σ x ⊙ y`
        fn dot(x: &[f32], y: &[f32]) -> f32 = dot;
        /// Makes the rows of a full chunk part of the matrices.
        fn fold(has_matrices: bool, key_dim: usize, tiles: &mut Tiles<'_>, scratch: &mut DeltaScratch) = fold;
    }
}

/// Some rows of one sequence and one value head within a chunk.
pub struct Piece<'a> {
    /// Rows of the chunk before these.
    pub first: usize,
    /// Number of rows.
    pub rows: usize,
    /// False in the first chunk of a sequence, whose matrices are zeros.
    pub has_matrices: bool,
    /// Queries of the first row, and those of row `i` at `i * stride`; `[key_dim]` each.
    pub queries: &'a [f32],
    /// Values of the first row, and those of row `i` at `i * stride`: of the first block, up to those of all blocks.
    pub values: &'a [f32],
    /// Floats from one row to the next.
    pub stride: usize,
    /// Strength of the updates of each row, the next one at `beta_stride`.
    pub beta: &'a [f32],
    /// Floats from one strength to the next row's.
    pub beta_stride: usize,
    /// Elements of a query or key.
    pub key_dim: usize,
    /// Columns, the last block's may be fewer than its lanes.
    pub columns: usize,
}

/// Parts of a state for some blocks of one value head.
pub struct Tiles<'a> {
    /// `[blocks, key_dim, LANES]`
    pub matrices: &'a mut [f32],
    /// `[blocks, STATE_CHUNK, LANES]`
    pub updates: &'a mut [f32],
}

/// Scratch memory of one thread.
#[derive(Default)]
pub struct DeltaScratch {
    /// Keys of the rows of the chunk, each padded with zeros, `[STATE_CHUNK, padded]`.
    pub keys: Vec<f32>,
    /// The same, multiplied by the decay up to the chunk's end.
    weighted: Vec<f32>,
    /// Summed decays of the rows of the chunk.
    pub decays: [f32; STATE_CHUNK],
    /// A padded query.
    query: Vec<f32>,
    /// Products of matrices with keys and queries, `[STATE_CHUNK, blocks]` each.
    of_keys: Vec<Vector>,
    of_queries: Vec<Vector>,
    /// Results, `[STATE_CHUNK, blocks * LANES]`.
    pub out: Vec<f32>,
}

impl DeltaScratch {
    /// For keys and values of these widths.
    pub fn new(key_dim: usize, value_dim: usize) -> Self {
        let (padded, blocks) = (key_dim.next_multiple_of(LANES), value_dim.div_ceil(LANES));
        Self {
            keys: vec![0.0; STATE_CHUNK * padded],
            weighted: vec![0.0; STATE_CHUNK * padded],
            decays: [0.0; STATE_CHUNK],
            query: vec![0.0; padded],
            of_keys: vec![[0.0; LANES]; STATE_CHUNK * blocks],
            of_queries: vec![[0.0; LANES]; STATE_CHUNK * blocks],
            out: vec![0.0; STATE_CHUNK * blocks * LANES],
        }
    }

    /// Floats that it consists of.
    pub fn floats(key_dim: usize, value_dim: usize) -> usize {
        let (padded, columns) = (key_dim.next_multiple_of(LANES), value_dim.next_multiple_of(LANES));
        (2 * STATE_CHUNK + 1) * padded + STATE_CHUNK * (3 * columns + 1)
    }

    /// Sets the keys of a row of the chunk.
    pub fn set_key(&mut self, row: usize, key: &[f32]) {
        set_padded(&mut self.keys[row * key.len().next_multiple_of(LANES)..], key);
    }
}

fn set_padded(out: &mut [f32], x: &[f32]) {
    out[..x.len()].copy_from_slice(x);
    out[x.len()..x.len().next_multiple_of(LANES)].fill(0.0);
}

#[inline(always)]
fn add_product<S: Simd>(s: S, out: &mut [f32], x: &[f32], y: &[f32]) {
    assert!(out.len() == x.len() && out.len() == y.len());
    let (outs, out_rest) = out.as_chunks_mut::<LANES>();
    let (xs, x_rest) = x.as_chunks::<LANES>();
    let (ys, y_rest) = y.as_chunks::<LANES>();
    for ((out, x), y) in outs.iter_mut().zip(xs).zip(ys) {
        s.store(s.fma(s.load(x), s.load(y), s.load(out)), out);
    }
    if !out_rest.is_empty() {
        s.store_part(s.fma(s.load_part(x_rest), s.load_part(y_rest), s.load_part(out_rest)), out_rest);
    }
}

/// See [`DeltaKernels::unit_norm`]. Squares are summed in 16 lanes, then across.
#[inline(always)]
fn unit_norm<S: Simd>(s: S, x: &mut [f32], eps: f32, scale: f32) {
    let (vectors, rest) = x.as_chunks_mut::<LANES>();
    let mut squares = s.load_part(rest);
    squares = s.mul(squares, squares);
    for x in &*vectors {
        let x = s.load(x);
        squares = s.fma(x, x, squares);
    }
    let factor = s.splat(scale / (s.reduce_sum(squares) + eps).sqrt());
    for x in vectors {
        s.store(s.mul(s.load(x), factor), x);
    }
    s.store_part(s.mul(s.load_part(rest), factor), rest);
}

#[inline(always)]
fn sigmoid_gate<S: Simd>(s: S, x: &mut [f32], gate: &[f32]) {
    assert_eq!(x.len(), gate.len());
    let (vectors, rest) = x.as_chunks_mut::<LANES>();
    let (gates, gate_rest) = gate.as_chunks::<LANES>();
    for (x, gate) in vectors.iter_mut().zip(gates) {
        s.store(s.mul(s.load(x), simd::sigmoid(s, s.load(gate))), x);
    }
    s.store_part(s.mul(s.load_part(rest), simd::sigmoid(s, s.load_part(gate_rest))), rest);
}

/// Sums of `R` rows and `V` blocks.
type Sums<S, const R: usize, const V: usize> = [[<S as Simd>::F32; V]; R];

/// Products of `R` rows of keys and queries with `V` matrices, each sum in order of the keys' elements.
#[inline(always)]
fn products<S: Simd, const R: usize, const V: usize>(
    s: S,
    matrices: [&[Vector]; V],
    keys: [&[f32]; R],
    queries: [&[f32]; R],
) -> (Sums<S, R, V>, Sums<S, R, V>) {
    let (mut of_keys, mut of_queries) = ([[s.zero(); V]; R], [[s.zero(); V]; R]);
    let elements = matrices[0].len();
    for element in 0..elements {
        let mut row = [s.zero(); V];
        for v in 0..V {
            row[v] = s.load(&matrices[v][element]);
        }
        for r in 0..R {
            let (k, q) = (s.splat(keys[r][element]), s.splat(queries[r][element]));
            for v in 0..V {
                of_keys[r][v] = s.fma(row[v], k, of_keys[r][v]);
                of_queries[r][v] = s.fma(row[v], q, of_queries[r][v]);
            }
        }
    }
    (of_keys, of_queries)
}

/// Fills `of_keys` and `of_queries` of the scratch for all rows of a piece and all blocks.
#[inline(always)]
fn all_products<S: Simd>(s: S, piece: &Piece<'_>, matrices: &[f32], scratch: &mut DeltaScratch) {
    let DeltaScratch { keys, of_keys, of_queries, .. } = scratch;
    let (padded, key_dim) = (piece.key_dim.next_multiple_of(LANES), piece.key_dim);
    let (matrices, _) = matrices.as_chunks::<LANES>();
    let blocks = matrices.len() / key_dim;
    let matrix = |block: usize| &matrices[block * key_dim..(block + 1) * key_dim];
    let key = |row: usize| &keys[(piece.first + row) * padded..][..key_dim];
    let query = |row: usize| &piece.queries[row * piece.stride..][..key_dim];
    let mut row = 0;
    while row + ROWS <= piece.rows {
        for block in 0..blocks {
            let rows = [row, row + 1, row + 2, row + 3];
            let (k, q) = products(s, [matrix(block)], rows.map(key), rows.map(query));
            for r in 0..ROWS {
                s.store(k[r][0], &mut of_keys[(row + r) * blocks + block]);
                s.store(q[r][0], &mut of_queries[(row + r) * blocks + block]);
            }
        }
        row += ROWS;
    }
    for row in row..piece.rows {
        let mut block = 0;
        while block + BLOCKS <= blocks {
            let several = [block, block + 1, block + 2, block + 3];
            let (k, q) = products(s, several.map(matrix), [key(row)], [query(row)]);
            for v in 0..BLOCKS {
                s.store(k[0][v], &mut of_keys[row * blocks + block + v]);
                s.store(q[0][v], &mut of_queries[row * blocks + block + v]);
            }
            block += BLOCKS;
        }
        for block in block..blocks {
            let (k, q) = products(s, [matrix(block)], [key(row)], [query(row)]);
            s.store(k[0][0], &mut of_keys[row * blocks + block]);
            s.store(q[0][0], &mut of_queries[row * blocks + block]);
        }
    }
}

/// Computes the weights of the first `count` rows of the chunk for a row with the cumulative decay `decay`: the decay
/// since each of them.
#[inline(always)]
fn kept<S: Simd>(s: S, decays: &[f32; STATE_CHUNK], decay: f32, out: &mut [f32; STATE_CHUNK]) {
    let decay = s.splat(decay);
    for (decays, out) in decays.as_chunks::<LANES>().0.iter().zip(out.as_chunks_mut::<LANES>().0) {
        // Later rows have other signs, but are not read.
        let since = s.min(s.zero(), s.sub(decay, s.load(decays)));
        s.store(simd::exp(s, since), out);
    }
}

#[inline(always)]
fn rows<S: Simd>(s: S, piece: &Piece<'_>, tiles: &mut Tiles<'_>, scratch: &mut DeltaScratch) {
    let padded = piece.key_dim.next_multiple_of(LANES);
    let (updates, _) = tiles.updates.as_chunks_mut::<LANES>();
    let blocks = updates.len() / STATE_CHUNK;
    if piece.has_matrices {
        all_products(s, piece, tiles.matrices, scratch);
    }
    let DeltaScratch { keys, decays, query, of_keys, of_queries, out, .. } = scratch;
    for index in 0..piece.rows {
        let row = piece.first + index;
        set_padded(query, &piece.queries[index * piece.stride..][..piece.key_dim]);
        let (query, _) = query.as_chunks::<LANES>();
        let (own, _) = keys[row * padded..(row + 1) * padded].as_chunks::<LANES>();
        // Weights of the chunk's rows.
        let mut kept_rows = [0.0; STATE_CHUNK];
        kept(s, decays, decays[row], &mut kept_rows);
        let (mut of_key, mut of_query) = ([0.0; STATE_CHUNK], [0.0; STATE_CHUNK]);
        for i in 0..=row {
            let (key, _) = keys[i * padded..(i + 1) * padded].as_chunks::<LANES>();
            let (mut with_key, mut with_query) = (s.zero(), s.zero());
            for ((key, own), query) in key.iter().zip(own).zip(query) {
                let key = s.load(key);
                with_key = s.fma(key, s.load(own), with_key);
                with_query = s.fma(key, s.load(query), with_query);
            }
            of_key[i] = kept_rows[i] * s.reduce_sum(with_key);
            of_query[i] = kept_rows[i] * s.reduce_sum(with_query);
        }
        let mut since = [0.0; LANES];
        s.store(simd::exp(s, s.splat(decays[row])), &mut since);
        let (since, beta) = (s.load(&since), s.splat(piece.beta[index * piece.beta_stride]));
        let values = &piece.values[index * piece.stride..][..piece.columns];
        for (block, values) in values.chunks(LANES).enumerate() {
            let tile = &mut updates[block * STATE_CHUNK..(block + 1) * STATE_CHUNK];
            let (mut known, mut result) = (s.zero(), s.zero());
            if piece.has_matrices {
                known = s.mul(since, s.load(&of_keys[index * blocks + block]));
                result = s.mul(since, s.load(&of_queries[index * blocks + block]));
            }
            for (i, update) in tile[..row].iter().enumerate() {
                let update = s.load(update);
                known = s.fma(s.splat(of_key[i]), update, known);
                result = s.fma(s.splat(of_query[i]), update, result);
            }
            let update = s.mul(beta, s.sub(s.load_part(values), known));
            s.store(update, &mut tile[row]);
            result = s.fma(s.splat(of_query[row]), update, result);
            let at = (index * blocks + block) * LANES;
            s.store_part(result, &mut out[at..at + LANES]);
        }
    }
}

/// See [`DeltaKernels::dot`]. Summed in 16 lanes, then across.
#[inline(always)]
fn dot<S: Simd>(s: S, x: &[f32], y: &[f32]) -> f32 {
    assert_eq!(x.len(), y.len());
    let (xs, x_rest) = x.as_chunks::<LANES>();
    let (ys, y_rest) = y.as_chunks::<LANES>();
    let mut sum = s.mul(s.load_part(x_rest), s.load_part(y_rest));
    for (x, y) in xs.iter().zip(ys) {
        sum = s.fma(s.load(x), s.load(y), sum);
    }
    s.reduce_sum(sum)
}

/// Products of `R` rows of queries with `V` matrices, each sum in order of the queries' elements.
#[inline(always)]
fn query_products<S: Simd, const R: usize, const V: usize>(
    s: S,
    matrices: [&[Vector]; V],
    queries: [&[f32]; R],
) -> Sums<S, R, V> {
    let mut sums = [[s.zero(); V]; R];
    for element in 0..matrices[0].len() {
        let mut row = [s.zero(); V];
        for v in 0..V {
            row[v] = s.load(&matrices[v][element]);
        }
        for r in 0..R {
            let q = s.splat(queries[r][element]);
            for v in 0..V {
                sums[r][v] = s.fma(row[v], q, sums[r][v]);
            }
        }
    }
    sums
}

/// Fills `of_queries` of the scratch for all rows of a piece and all blocks.
#[inline(always)]
fn all_query_products<S: Simd>(s: S, piece: &Piece<'_>, matrices: &[f32], out: &mut [Vector]) {
    let key_dim = piece.key_dim;
    let (matrices, _) = matrices.as_chunks::<LANES>();
    let blocks = matrices.len() / key_dim;
    let matrix = |block: usize| &matrices[block * key_dim..(block + 1) * key_dim];
    let query = |row: usize| &piece.queries[row * piece.stride..][..key_dim];
    let mut row = 0;
    while row + ROWS <= piece.rows {
        for block in 0..blocks {
            let rows = [row, row + 1, row + 2, row + 3];
            let sums = query_products(s, [matrix(block)], rows.map(query));
            for r in 0..ROWS {
                s.store(sums[r][0], &mut out[(row + r) * blocks + block]);
            }
        }
        row += ROWS;
    }
    for row in row..piece.rows {
        let mut block = 0;
        while block + BLOCKS <= blocks {
            let several = [block, block + 1, block + 2, block + 3];
            let sums = query_products(s, several.map(matrix), [query(row)]);
            for v in 0..BLOCKS {
                s.store(sums[0][v], &mut out[row * blocks + block + v]);
            }
            block += BLOCKS;
        }
        for block in block..blocks {
            let sums = query_products(s, [matrix(block)], [query(row)]);
            s.store(sums[0][0], &mut out[row * blocks + block]);
        }
    }
}

/// See [`DeltaKernels::scan`].
#[inline(always)]
fn scan<S: Simd>(
    s: S,
    piece: &Piece<'_>,
    dots: &[f32],
    stride: usize,
    tiles: &mut Tiles<'_>,
    scratch: &mut DeltaScratch,
) {
    let DeltaScratch { decays, of_queries, out, .. } = scratch;
    if piece.has_matrices {
        all_query_products(s, piece, tiles.matrices, of_queries);
    }
    let (updates, _) = tiles.updates.as_chunks_mut::<LANES>();
    let blocks = updates.len() / STATE_CHUNK;
    for index in 0..piece.rows {
        let row = piece.first + index;
        // Weights of the chunk's rows.
        let mut weights = [0.0; STATE_CHUNK];
        kept(s, decays, decays[row], &mut weights);
        let dots = &dots[index * stride..][..=row];
        weights.iter_mut().zip(dots).for_each(|(weight, dot)| *weight *= dot);
        let since = simd::exp(s, s.splat(decays[row]));
        let strength = s.splat(piece.beta[index * piece.beta_stride]);
        let values = &piece.values[index * piece.stride..][..piece.columns];
        for (block, values) in values.chunks(LANES).enumerate() {
            let tile = &mut updates[block * STATE_CHUNK..(block + 1) * STATE_CHUNK];
            s.store(s.mul(strength, s.load_part(values)), &mut tile[row]);
            let mut result = s.zero();
            if piece.has_matrices {
                result = s.mul(since, s.load(&of_queries[index * blocks + block]));
            }
            for (update, weight) in tile.iter().zip(&weights[..=row]) {
                result = s.fma(s.splat(*weight), s.load(update), result);
            }
            let at = (index * blocks + block) * LANES;
            s.store_part(result, &mut out[at..at + LANES]);
        }
    }
}

#[inline(always)]
fn fold<S: Simd>(
    s: S,
    has_matrices: bool,
    key_dim: usize,
    tiles: &mut Tiles<'_>,
    scratch: &mut DeltaScratch,
) {
    let padded = key_dim.next_multiple_of(LANES);
    let DeltaScratch { keys, weighted, decays, .. } = scratch;
    let mut kept_rows = [0.0; STATE_CHUNK];
    kept(s, decays, decays[STATE_CHUNK - 1], &mut kept_rows);
    for (row, kept) in kept_rows.iter().enumerate() {
        let (keys, weighted) = (&keys[row * padded..][..padded], &mut weighted[row * padded..][..padded]);
        let kept = s.splat(*kept);
        for (key, out) in keys.as_chunks::<LANES>().0.iter().zip(weighted.as_chunks_mut::<LANES>().0) {
            s.store(s.mul(kept, s.load(key)), out);
        }
    }
    let since = simd::exp(s, s.splat(decays[STATE_CHUNK - 1]));
    let (matrices, _) = tiles.matrices.as_chunks_mut::<LANES>();
    let (updates, _) = tiles.updates.as_chunks::<LANES>();
    let blocks = matrices.chunks_exact_mut(key_dim).zip(updates.chunks_exact(STATE_CHUNK));
    for (matrix, updates) in blocks {
        for (first, rows) in matrix.chunks_mut(ROWS).enumerate() {
            let mut sums = [s.zero(); ROWS];
            if has_matrices {
                for (sum, row) in sums.iter_mut().zip(&*rows) {
                    *sum = s.mul(since, s.load(row));
                }
            }
            for (i, update) in updates.iter().enumerate() {
                let update = s.load(update);
                // Padded: there are always as many.
                let keys = &weighted[i * padded + first * ROWS..][..ROWS];
                for (sum, key) in sums.iter_mut().zip(keys) {
                    *sum = s.fma(s.splat(*key), update, *sum);
                }
            }
            for (sum, row) in sums.into_iter().zip(rows) {
                s.store(sum, row);
            }
        }
    }
}
