// Applies RoPE, and stores queries, K and V as `rope_store.wgsl` does, for pages of half precision and heads without norms. A thread has
// two neighbouring dimensions of a head of a row, and waits for no other one.
//% needs angle by_position k_word output_of pack put_v rotated_by
@group(0) @binding(0) var<storage, read> q: array<f32>;                   // [rows, Q_STRIDE]
@group(0) @binding(1) var<storage, read> k: array<f32>;                   // [rows, K_STRIDE]
@group(0) @binding(2) var<storage, read> v: array<f32>;                   // [rows, V_STRIDE]
@group(0) @binding(8) var<storage, read_write> queries: array<vec2<f32>>; // [rows, HEADS, DIM / 2]
// pages.rs defines the layout of pages.
@group(0) @binding(9) var<storage, read_write> k_pages: array<u32>;       // [pages, KV_HEADS, PAGE * HEAD_WORDS]

const TWOS = DIM / 2u;

// Returns an element of a head: those of queries are before those of K, and these before those of V. Padding is zero.
fn element(row: u32, head: u32, i: u32) -> f32 {
  let kv_head = (head - Q_HEADS) % KV_HEADS;
  var x = 0.0;
  if (i >= HEAD) {
    x = 0.0;
  } else if (head < Q_HEADS) {
    x = q[row * Q_STRIDE + head * HEAD + output_of(i)];
  } else if (head < Q_HEADS + KV_HEADS) {
    x = k[row * K_STRIDE + K_FIRST + kv_head * HEAD + output_of(i)];
  } else {
    x = v[row * V_STRIDE + V_FIRST + kv_head * HEAD + i];
  }
  return x;
}

// Returns an element after the rotation.
fn rotated(row: u32, position: u32, head: u32, i: u32) -> f32 {
//% if PAIRS
  if (head < Q_HEADS + KV_HEADS && i < 2u * PAIRS) {
//% if INTERLEAVED
    let pair = i / 2u;
    let second = i % 2u;
    let both = vec2<f32>(element(row, head, 2u * pair), element(row, head, 2u * pair + 1u));
//% else
    let pair = i % PAIRS;
    let second = i / PAIRS;
    let both = vec2<f32>(element(row, head, pair), element(row, head, pair + PAIRS));
//% end
    let turned = rotated_by(both, angle(row, position, pair));
    return select(turned.x, turned.y, second == 1u);
  }
//% end
  return element(row, head, i);
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let row = wid.y;
  let index = wid.x * THREADS + tid;
  if (index >= STORED_HEADS * TWOS) { return; }
  let position = step[args.positions + row];
  let token_offset = step[args.token_offsets + KV_GROUP * args.rows + row];
  let head = index / TWOS;
  let d = index % TWOS * 2u;
  let two = vec2<f32>(rotated(row, position, head, d), rotated(row, position, head, d + 1u));
  if (head < Q_HEADS) {
    queries[(row * HEADS + head) * TWOS + d / 2u] = two * by_position(position);
  } else if (head < Q_HEADS + KV_HEADS) {
    k_pages[k_word(token_offset, head - Q_HEADS, d)] = pack(two);
  } else {
    put_v(token_offset, head - Q_HEADS - KV_HEADS, d, two);
  }
}
