// Reads K and V in half precision for attention.
//% provides k_four load_values v_four values_at
@group(0) @binding(2) var<storage, read> k_pages: array<vec4<u32>>; // [pages, KV_HEADS, DIM / 8, PAGE] of eight f16
@group(0) @binding(3) var<storage, read> v_pages: array<vec2<u32>>; // [pages, KV_HEADS, PAGE, DIM / 4] of four f16

// Quads of dimensions of K.
const K_QUADS = DIM / 4u;

alias Values = vec2<u32>;
alias ValuesAt = u32;

fn four(x: u32, y: u32) -> vec4<f32> {
  return vec4<f32>(unpack2x16float(x), unpack2x16float(y));
}

fn k_four(k: vec4<u32>, i: u32) -> vec4<f32> {
  return four(k[2u * i], k[2u * i + 1u]);
}

// Returns the address of V of a token; the next tokens follow.
fn values_at(place: u32, token: u32, lane: u32) -> ValuesAt {
  return 2u * place + token * (DIM / 4u) + lane;
}

fn load_values(at: ValuesAt, i: u32) -> Values {
  return v_pages[at + i * (DIM / 4u)];
}

fn v_four(v: Values, token: u32) -> vec4<f32> {
  return four(v.x, v.y);
}
