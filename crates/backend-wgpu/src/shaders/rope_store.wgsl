// Normalizes query and key heads of HEAD elements, applies RoPE, and stores queries, [rows, HEADS, DIM], and K and V in pages,
// with zeros behind them. One workgroup has one head of a row.
//% provides number_at put_number needs angle by_position finite hadamard k_word nearest_half output_of pack put_v rotated_by
@group(0) @binding(0) var<storage, read> q: array<f32>;         // [rows, Q_STRIDE]
@group(0) @binding(1) var<storage, read> k: array<f32>;         // [rows, K_STRIDE]
@group(0) @binding(2) var<storage, read> v: array<f32>;         // [rows, V_STRIDE]
//% if QK_NORM
// Weights of the norms: [HEAD], or with ROW_NORM those of all heads.
@group(0) @binding(6) var<storage, read> q_norm: array<f32>;
@group(0) @binding(7) var<storage, read> k_norm: array<f32>;
//% end
//% if V_NORM
@group(0) @binding(11) var<storage, read> v_norm: array<f32>;   // [HEAD]
//% end
@group(0) @binding(8) var<storage, read_write> queries: array<f32>; // [rows, HEADS, DIM]
// pages.rs defines the layout of pages.
@group(0) @binding(9) var<storage, read_write> k_pages: array<u32>;  // [pages, KV_HEADS, PAGE * HEAD_WORDS]
//% if QUANTS
@group(0) @binding(10) var<storage, read_write> v_pages: array<u32>; // like k_pages
//% end

var<workgroup> head: array<f32, DIM>;
var<workgroup> rotated: array<f32, DIM>;
var<workgroup> squares: array<f32, 64u + DIM / 4u>;

//% if HEAD_NORMS
// Returns the factor of a norm from a sum of squares of each thread.
fn norm_scale(tid: u32, own: f32, width: u32, eps: f32) -> f32 {
  squares[tid] = own;
  workgroupBarrier();
  var sum = 0.0;
  for (var i = 0u; i < 64u; i++) { sum += squares[i]; }
  return 1.0 / sqrt(sum / f32(width) + eps);
}

// Returns the sum of squares of the first NORM_WIDTH elements of a head.
fn head_squares(tid: u32) -> f32 {
  var sum = 0.0;
  for (var i = tid; i < NORM_WIDTH; i += 64u) { sum = fma(head[i], head[i], sum); }
  return sum;
}
//% end

//% if QK_NORM
// Normalizes the head of a query or a key in place.
fn norm_head(tid: u32, row: u32, number: u32, is_q: bool) {
//% if ROW_NORM
  var sum = 0.0;
  let width = select(KV_HEADS, HEADS, is_q) * HEAD;
  for (var i = tid; i < width; i += 64u) {
    var x = 0.0;
    if (is_q) { x = q[row * Q_STRIDE + i]; } else { x = k[row * K_STRIDE + K_FIRST + i]; }
    sum = fma(x, x, sum);
  }
  let from_ = number * HEAD;
//% else
  let sum = head_squares(tid);
  let width = NORM_WIDTH;
  let from_ = 0u;
//% end
  let scale = norm_scale(tid, sum, width, select(K_EPS, Q_EPS, is_q));
  for (var i = tid; i < NORM_WIDTH; i += 64u) {
    if (is_q) { head[i] = head[i] * scale * q_norm[from_ + i]; } else { head[i] = head[i] * scale * k_norm[from_ + i]; }
  }
  workgroupBarrier();
}
//% end

//% if QUANTS
const QUADS = DIM / 4u;
const LARGEST = 127.0 * 65504.0;

fn number_at(i: u32) -> f32 {
  return rotated[i];
}

fn put_number(i: u32, x: f32) {
  rotated[i] = x;
}

fn finite_quad(n: u32) -> vec4<f32> {
  var quad = vec4<f32>(0.0);
  for (var i = 0u; i < 4u; i++) { quad[i] = finite(rotated[4u * n + i], LARGEST); }
  return quad;
}

// Returns the first element with the largest magnitude.
fn extreme_of(a: f32, b: f32) -> f32 {
  return select(a, b, abs(b) > abs(a));
}

// Returns the scale of a block of 32 in half precision. `squares` has the extreme of every four elements.
fn block_scale(block: u32) -> f32 {
  var extreme = 0.0;
  for (var i = 8u * block; i < min(8u * block + 8u, QUADS); i++) { extreme = extreme_of(extreme, squares[i]); }
//% if Q4
  return nearest_half(clamp(extreme / -8.0, -65504.0, 65504.0));
//% else
  return nearest_half(min(abs(extreme) / 127.0, 65504.0));
//% end
}

// Returns the quants of four elements as integers.
fn quants_of_quad(n: u32) -> vec4<i32> {
  let scale = block_scale(n / 8u);
  let inverse = select(0.0, 1.0 / scale, scale != 0.0);
//% if Q4
  return vec4<i32>(clamp(round(finite_quad(n) * inverse), vec4<f32>(-8.0), vec4<f32>(7.0)));
//% else
  return vec4<i32>(clamp(round(finite_quad(n) * inverse), vec4<f32>(-127.0), vec4<f32>(127.0)));
//% end
}

//% if Q4
const OCTETS = (DIM + 7u) / 8u;
const K_WORDS = (DIM + 31u) / 32u * 4u;
//% else
const K_WORDS = (DIM + 15u) / 16u * 4u;
//% end
//% end

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let row = wid.y;
  // This is loaded early, because dependent loads follow.
  let position = step[args.positions + row];
  let token_offset = step[args.token_offsets + KV_GROUP * args.rows + row];
  let is_q = wid.x < Q_HEADS;
  let is_k = !is_q && wid.x < Q_HEADS + KV_HEADS;
  let kv_head = (wid.x - Q_HEADS) % KV_HEADS;
//% if LATENT
  // K and V are one head: a latent vector, elements with RoPE, and padding.
  let is_rotated = true;
  for (var i = tid; i < DIM; i += 64u) {
    head[i] = select(0.0, k[row * K_STRIDE + min(i, K_STRIDE - 1u)], i < K_STRIDE);
  }
//% else
  let is_rotated = is_q || is_k;
  for (var i = tid; i < DIM; i += 64u) {
    if (i >= HEAD) {
      head[i] = 0.0;
    } else if (is_q) {
      head[i] = q[row * Q_STRIDE + wid.x * HEAD + output_of(i)];
    } else if (is_k) {
      head[i] = k[row * K_STRIDE + K_FIRST + kv_head * HEAD + output_of(i)];
    } else {
      head[i] = v[row * V_STRIDE + V_FIRST + kv_head * HEAD + i];
    }
  }
//% end
  workgroupBarrier();
//% if V_NORM
  if (!is_rotated) {
    let scale = norm_scale(tid, head_squares(tid), HEAD, V_EPS);
    for (var i = tid; i < HEAD; i += 64u) { head[i] = head[i] * scale * v_norm[i]; }
    workgroupBarrier();
  }
//% end
//% if NORM_FIRST
  if (is_rotated) { norm_head(tid, row, select(kv_head, wid.x, is_q), is_q); }
//% end
  for (var i = tid; i < DIM; i += 64u) { rotated[i] = head[i]; }
  workgroupBarrier();
//% if PAIRS
  if (is_rotated) {
    for (var pair = tid; pair < PAIRS; pair += 64u) {
//% if INTERLEAVED
      let first = ROTATE_AT + 2u * pair;
      let second = first + 1u;
//% else
      let first = ROTATE_AT + pair;
      let second = first + PAIRS;
//% end
      let both = rotated_by(vec2<f32>(head[first], head[second]), angle(row, position, pair));
      rotated[first] = both.x;
      rotated[second] = both.y;
    }
  }
  workgroupBarrier();
//% end
//% if NORM_LAST
  if (is_q || is_k) {
    for (var i = tid; i < DIM; i += 64u) { head[i] = rotated[i]; }
    workgroupBarrier();
    norm_head(tid, row, select(kv_head, wid.x, is_q), is_q);
    for (var i = tid; i < DIM; i += 64u) { rotated[i] = head[i]; }
    workgroupBarrier();
  }
//% end
//% if QUANTS
  hadamard(tid, 64u, 1u);
//% end
  if (is_q) {
    let factor = by_position(position);
    for (var i = tid; i < DIM; i += 64u) { queries[(row * HEADS + wid.x) * DIM + i] = rotated[i] * factor; }
    return;
  }
//% if QUANTS
  let page = token_offset / PAGE;
  let token = token_offset % PAGE;
  // The scratch page is not read and stays finite for all groups.
  if (page == 0u) { return; }
  let at = page * PAGE_WORDS + LAYER_SLOT_AT + kv_head * PAGE * HEAD_WORDS;
  // `quantize_kv` in crates/backend defines the quants and scales.
  for (var n = tid; n < QUADS; n += 64u) {
    let quad = finite_quad(n);
    squares[n] = extreme_of(extreme_of(quad.x, quad.y), extreme_of(quad.z, quad.w));
  }
  workgroupBarrier();
//% if Q4
  for (var n = tid; n < OCTETS; n += 64u) {
    let low = pack4xU8(vec4<u32>(quants_of_quad(2u * n) + 8));
    let high = pack4xU8(vec4<u32>(quants_of_quad(min(2u * n + 1u, QUADS - 1u)) + 8));
    let quants = low | (high << 4u);
    if (is_k) {
      k_pages[at + (n / 4u * PAGE + token) * 4u + n % 4u] = quants;
    } else {
      v_pages[at + (token / 4u * OCTETS + n) * 4u + token % 4u] = quants;
    }
  }
//% else
  for (var n = tid; n < QUADS; n += 64u) {
    let quants = pack4xI8(quants_of_quad(n));
    if (is_k) {
      k_pages[at + (n / 4u * PAGE + token) * 4u + n % 4u] = quants;
    } else {
      v_pages[at + (token / 4u * QUADS + n) * 4u + token % 4u] = quants;
    }
  }
//% end
  if (tid < (DIM + 63u) / 64u) {
    let scales = pack2x16float(vec2<f32>(block_scale(2u * tid), block_scale(2u * tid + 1u)));
    let scales_at = at + (K_WORDS + tid) * PAGE + token;
    if (is_k) {
      k_pages[scales_at] = scales;
    } else {
      v_pages[scales_at] = scales;
    }
  }
//% else
  for (var i = tid; i < DIM / 2u; i += 64u) {
    let two = vec2<f32>(rotated[2u * i], rotated[2u * i + 1u]);
    if (is_k) {
      k_pages[k_word(token_offset, kv_head, 2u * i)] = pack(two);
    } else {
      put_v(token_offset, kv_head, 2u * i, two);
    }
  }
//% end
}
