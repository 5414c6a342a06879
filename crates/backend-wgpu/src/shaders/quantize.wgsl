// Converts activations: blocks of 32 to eight bits (quants, a scale, and the sums of both halves of the quants), and quads
// to half precision.
//% provides four_halves largest_in largest_of quantized quants_of with_sums Quantized
struct Quantized { lo: vec4<u32>, hi: vec4<u32>, scale: f32, sums: u32 }

fn largest_of(v: array<vec4<f32>, 8>) -> f32 {
  var most = vec4<f32>(0.0);
//% for j in 0..8
  most = max(most, abs(v[${j}]));
//% end
  return largest_in(most);
}

fn largest_in(quad: vec4<f32>) -> f32 {
  return max(max(quad.x, quad.y), max(quad.z, quad.w));
}

// Returns the quants of a quad of a block. After adding 3 * 2^22, the last byte has the nearest integer. GPUs add
// several times as fast as they round or convert.
fn quants_of(v: vec4<f32>, largest: f32) -> u32 {
  let inverse = select(0.0, 127.0 / largest, largest > 1.0e-30);
  let q = bitcast<vec4<u32>>(fma(v, vec4<f32>(inverse), vec4<f32>(12582912.0))) & vec4<u32>(255u);
  return q.x | (q.y << 8u) | (q.z << 16u) | (q.w << 24u);
}

// Returns a quantized block from its quants.
fn with_sums(lo: vec4<u32>, hi: vec4<u32>, largest: f32) -> Quantized {
  let ones = 0x01010101u;
  let low = dot4I8Packed(lo.x, ones) + dot4I8Packed(lo.y, ones) + dot4I8Packed(lo.z, ones) + dot4I8Packed(lo.w, ones);
  let high = dot4I8Packed(hi.x, ones) + dot4I8Packed(hi.y, ones) + dot4I8Packed(hi.z, ones) + dot4I8Packed(hi.w, ones);
  return Quantized(lo, hi, largest * (1.0 / 127.0), (u32(low) & 0xffffu) | (u32(high) << 16u));
}

fn quantized(v: array<vec4<f32>, 8>) -> Quantized {
  let largest = largest_of(v);
//% for j in 0..8
  let q_${j} = quants_of(v[${j}], largest);
//% end
  return with_sums(vec4<u32>(q_0, q_1, q_2, q_3), vec4<u32>(q_4, q_5, q_6, q_7), largest);
}

// Returns a quad of activations divided by 8, so that neither small scales of weights nor large activations leave the range
// of half precision. The elements are in the order 0, 2, 1, 3, in which the conversion of quants is fastest.
fn four_halves(quad: vec4<f32>) -> vec2<u32> {
  let most = vec4<f32>(65504.0);
  let x = min(max(quad * 0.125, -most), most);
  return vec2<u32>(pack2x16float(x.xz), pack2x16float(x.yw));
}
