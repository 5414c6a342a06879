// Applies RoPE to pairs of elements. All kernels compute it with the same operations, so that results are bitwise
// equal.
//% provides angle by_position finite k_word nearest_half output_of pack rotated_by
@group(0) @binding(13) var<storage, read> step: array<u32>; // words of the step, see args.wgsl
//% if PAIRS
// Cosines and sines of positions 256 i, and of positions below 256. Those of any position follow from both.
@group(0) @binding(14) var<storage, read> far: array<vec2<f32>>;  // [ceil(context / 256), PAIRS]
@group(0) @binding(15) var<storage, read> near: array<vec2<f32>>; // [256, PAIRS]

// Returns the cosine and sine of a pair of a row at a position. With AXES, pairs are rotated by the row's coordinates,
// which are behind the positions, [rows, 3]; the axis of each pair is behind them.
fn angle(row: u32, position: u32, pair: u32) -> vec2<f32> {
//% if AXES
  let coordinates = args.positions + args.rows;
  let at = step[coordinates + 3u * row + step[coordinates + 3u * args.rows + AXES_AT + pair]];
//% else
  let at = position;
//% end
  let a = far[at / 256u * PAIRS + pair];
  let b = near[at % 256u * PAIRS + pair];
  return vec2<f32>(fma(a.x, b.x, -(a.y * b.y)), fma(a.y, b.x, a.x * b.y));
}
//% end

fn rotated_by(x: vec2<f32>, angle: vec2<f32>) -> vec2<f32> {
  return vec2<f32>(fma(x.x, angle.x, -(x.y * angle.y)), fma(x.x, angle.y, x.y * angle.x));
}

//% if BY_POSITION
// Returns the factor of a query at a position.
fn by_position(position: u32) -> f32 {
  return fma(SLOPE, log(1.0 + f32(position / ORIGINAL)), 1.0);
}
//% else
fn by_position(position: u32) -> f32 {
  return 1.0;
}
//% end

// Returns the index of dimension `d` among a head's matmul outputs. If matmuls apply RoPE, the outputs of two
// neighbouring pairs are adjacent, so that a thread has whole words of half-precision numbers at both ends of the
// pairs.
fn output_of(d: u32) -> u32 {
//% if TOGETHER
  if (d < 2u * PAIRS) {
    let pair = d % PAIRS;
    return pair / 2u * 4u + pair % 2u * 2u + d / PAIRS;
  }
//% end
  return d;
}

// Clamps a number to finite values. Pages must be finite, because attention multiplies masked tokens by zero.
fn finite(x: f32, largest: f32) -> f32 {
  let is_nan = (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u;
  return select(clamp(x, -largest, largest), 0.0, is_nan);
}

// Returns the nearest half-precision number, up to 65504, because the rounding of conversions is
// implementation-defined.
fn nearest_half(x: f32) -> f32 {
  // Half-precision numbers below 2^-14 are multiples of 2^-24.
  let small = round(x * 16777216.0) / 16777216.0;
  let bits = bitcast<u32>(x);
  let even = bitcast<f32>((bits + 0xfffu + ((bits >> 13u) & 1u)) & 0xffffe000u);
  return select(even, small, abs(x) < 6.103515625e-5);
}

// Returns two numbers in half precision.
fn pack(x: vec2<f32>) -> u32 {
  return pack2x16float(vec2<f32>(nearest_half(finite(x.x, 65504.0)), nearest_half(finite(x.y, 65504.0))));
}

// Returns the offset of two dimensions of K, from `d` on, in half-precision pages.
fn k_word(token_offset: u32, kv_head: u32, d: u32) -> u32 {
  let head = token_offset / PAGE * PAGE_WORDS + LAYER_SLOT_AT + kv_head * PAGE * (DIM / 2u);
//% if SIXTEENS
  return head + (d / 16u * PAGE + token_offset % PAGE) * 8u + d % 16u / 2u;
//% else
  return head + (d / 8u * PAGE + token_offset % PAGE) * 4u + d % 8u / 2u;
//% end
}
