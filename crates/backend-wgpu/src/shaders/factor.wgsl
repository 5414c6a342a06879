// Returns the factor of a row's results, which is 1 unless its activations are those of a norm.
//% provides factor_of squares_of needs row_scale
//% if NORMED
// In a step of one row, the factor is computed here from sums of squares of blocks.
//% if AWAITED
fn squares_of(four: u32) -> vec4<f32> {
  return bitcast<vec4<f32>>(received[5u * BLOCKS / 2u + four]);
}
//% else
@group(0) @binding(12) var<storage, read> row_squares: array<vec4<f32>>; // [SQUARES]

fn squares_of(four: u32) -> vec4<f32> {
  return row_squares[four];
}
//% end

fn factor_of(row: u32) -> f32 {
  return row_scale();
}
//% else
//% if FACTORS
@group(0) @binding(16) var<storage, read> row_factors: array<f32>; // [rows]

fn factor_of(row: u32) -> f32 {
  return row_factors[row];
}
//% else
fn factor_of(row: u32) -> f32 {
  return 1.0;
}
//% end
//% end
