// Reads K and V in eight bits for attention. Bytes are converted to quants plus RAISE, which is cheaper than a
// conversion to quants. Scores therefore start with the negative raise. V's quants times their scales are exact in f32.
// Sums use fma, because a compiler may factor out a common factor of a sum in one kernel and not in another.
//% provides k_four k_scale k_scales load_values v_four values_at
@group(0) @binding(2) var<storage, read> k_pages: array<vec4<u32>>; // [pages, KV_HEADS, K_QUADS / 4, PAGE] of 16, and scales
@group(0) @binding(3) var<storage, read> v_pages: array<vec4<u32>>; // [pages, KV_HEADS, PAGE / 4, DIM / 4] of 4 x 4, and scales

// Quads of dimensions of K; the last ones may be padding. Scales follow them: [DIM / 64, PAGE] of two f16.
const K_QUADS = (DIM + 15u) / 16u * 4u;

struct Values { quants: vec4<u32>, scales: vec4<u32> }
struct ValuesAt { quants: u32, scales: u32, shift: u32 }

const RAISE = 1152.0;

// Returns four quants plus RAISE. The lowest eight bits of a half between 1024 and 1280 are a quant plus 128.
fn raised(x: u32) -> vec4<f32> {
  let even = unpack2x16float((x & 0x00ff00ffu) ^ 0x64806480u);
  let odd = unpack2x16float(((x >> 8u) & 0x00ff00ffu) ^ 0x64806480u);
  return vec4<f32>(even.x, odd.x, even.y, odd.y);
}

fn k_four(k: vec4<u32>, i: u32) -> vec4<f32> {
  return raised(k[i]);
}

// Returns the two scales of the 64 dimensions that include quad number `quad`.
fn k_scales(place: u32, token: u32, quad: u32) -> vec2<f32> {
  let at = place + PAGE / 4u * (K_QUADS + quad / 16u) + token / 4u;
  return unpack2x16float(k_pages[at][token % 4u]);
}

fn k_scale(scales: vec2<f32>, quad: u32) -> f32 {
  return select(scales.x, scales.y, quad / 8u % 2u == 1u);
}

// Returns the address of V of four tokens; the next tokens follow.
fn values_at(place: u32, token: u32, lane: u32) -> ValuesAt {
  let scales = place + PAGE / 4u * (K_QUADS + lane / 16u) + token / 4u;
  return ValuesAt(place + token / 4u * (DIM / 4u) + lane, scales, lane / 8u % 2u * 16u);
}

fn load_values(at: ValuesAt, i: u32) -> Values {
  return Values(v_pages[at.quants + i * (DIM / 4u)], v_pages[at.scales + i] >> vec4<u32>(at.shift));
}

fn v_four(v: Values, token: u32) -> vec4<f32> {
  let scale = unpack2x16float(v.scales[token]).x;
  return fma(raised(v.quants[token]), vec4<f32>(scale), vec4<f32>(-RAISE * scale));
}
