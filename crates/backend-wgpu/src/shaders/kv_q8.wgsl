// Eight-bit K and V for attention. Bytes are read as quants plus RAISE, which is cheaper than a conversion of each:
// scores start with the negative raise, and V's quants times their scales are exact in f32. Sums use fma, because
// compilers may factor out a common factor of a sum, in one kernel and not in another.
@group(0) @binding(2) var<storage, read> k_pages: array<vec4<u32>>; // [pages, KV_HEADS, K_QUADS / 4, PAGE] of 16, and scales
@group(0) @binding(3) var<storage, read> v_pages: array<vec4<u32>>; // [pages, KV_HEADS, PAGE / 4, DIM / 4] of 4 x 4, and scales

// Fours of dimensions of K, of which the last may be padding. Scales follow them: [DIM / 64, PAGE] of two f16.
const K_QUADS = (DIM + 15u) / 16u * 4u;

struct Values { quants: vec4<u32>, scales: vec4<u32> }
struct ValuesAt { quants: u32, scales: u32, shift: u32 }

const RAISE = 1152.0;

// Four quants and RAISE: the lower bits of halves between 1024 and 1280 are a quant and 128.
fn raised(x: u32) -> vec4<f32> {
  let even = unpack2x16float((x & 0x00ff00ffu) ^ 0x64806480u);
  let odd = unpack2x16float(((x >> 8u) & 0x00ff00ffu) ^ 0x64806480u);
  return vec4<f32>(even.x, odd.x, even.y, odd.y);
}

fn k_four(k: vec4<u32>, i: u32) -> vec4<f32> {
  return raised(k[i]);
}

// The two scales of the 64 dimensions that four number `quad` is among.
fn k_scales(place: u32, token: u32, quad: u32) -> vec2<f32> {
  let at = place + PAGE / 4u * (K_QUADS + quad / 16u) + token / 4u;
  return unpack2x16float(k_pages[at][token % 4u]);
}

fn k_scale(scales: vec2<f32>, quad: u32) -> f32 {
  return select(scales.x, scales.y, quad / 8u % 2u == 1u);
}

// Returns the address of V for four tokens and those after them.
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
