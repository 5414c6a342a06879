// Applies RoPE to the results of a matmul in a step of one row, and stores queries, keys and values. Outputs up to
// Q_END are queries, those up to K_END are keys, and the others are values. A thread has four outputs of a head. If
// weights with several layouts need several matmuls, each kernel declares only the buffers that it writes, so that the
// matmuls do not wait for each other. With QK_NORM, a workgroup has all outputs of a head, and norms those of queries and
// keys first, with V_NORM also those of values.
//% provides finish prefetch needs angle clear k_word output_of pack put_v rotated_by
//% if HAS_Q
@group(0) @binding(8) var<storage, read_write> queries: array<f32>;  // [rows, HEADS, DIM]
//% end
//% if HAS_K
@group(0) @binding(9) var<storage, read_write> k_pages: array<u32>;  // see pages.rs
//% end
//% if QK_NORM
@group(0) @binding(20) var<storage, read> q_norm: array<f32>; // [DIM]
@group(0) @binding(21) var<storage, read> k_norm: array<f32>; // [DIM]
//% if V_NORM
@group(0) @binding(22) var<storage, read> v_norm: array<f32>; // [DIM]
//% end

var<workgroup> thread_squares: array<f32, 64>;

// Returns the factor of the norm of the workgroup's head, with the sums of rope_store.wgsl.
fn head_scale(tid: u32, eps: f32, is_v: bool) -> f32 {
  if (tid < 64u) {
    var own = 0.0;
    for (var i = tid; i < DIM; i += 64u) {
      let x = totals[select(output_of(i), i, is_v)];
      own = fma(x, x, own);
    }
    thread_squares[tid] = own;
  }
  workgroupBarrier();
  var sum = 0.0;
  for (var i = 0u; i < 64u; i++) { sum += thread_squares[i]; }
  return 1.0 / sqrt(sum / f32(DIM) + eps);
}
//% end

// Dimensions of four outputs of a head, from `at` on: two pairs.
fn dims_of(at: u32) -> vec4<u32> {
//% if TOGETHER
  if (at < 2u * PAIRS) { return vec4<u32>(at / 2u, at / 2u + PAIRS, at / 2u + 1u, at / 2u + 1u + PAIRS); }
//% end
  return vec4<u32>(at, at + 1u, at + 2u, at + 3u);
}

struct Prefetched { token_offset: u32, angles: vec4<f32>, norms: vec4<f32> }

fn prefetch(tid: u32, first: u32) -> Prefetched {
  var prefetched: Prefetched;
//% if CLEARED
  clear(first / TILE * THREADS + tid, OUTPUTS / TILE * THREADS);
//% end
  if (tid >= TILE / 4u) { return prefetched; }
//% if QK_NORM
  let at = (first + 4u * tid) % DIM;
  let dims = dims_of(at);
//% for c in 0..4
  prefetched.norms[${c}] = select(k_norm[dims[${c}]], q_norm[dims[${c}]], first < Q_END);
//% if V_NORM
  if (first >= K_END) { prefetched.norms[${c}] = v_norm[at + ${c}u]; }
//% end
//% end
//% end
  prefetched.token_offset = step[args.token_offsets + KV_GROUP * args.rows];
//% if PAIRS
  let pair = (first + 4u * tid) % DIM / 2u;
  let position = step[args.positions];
  let last = PAIRS - 1u;
  prefetched.angles = vec4<f32>(angle(0u, position, min(pair, last)), angle(0u, position, min(pair + 1u, last)));
//% end
  return prefetched;
}

fn finish(tid: u32, first: u32, prefetched: Prefetched) {
//% if QK_NORM
  let is_v = first >= K_END;
//% if V_NORM
  let scale = head_scale(tid, select(select(K_EPS, Q_EPS, first < Q_END), V_EPS, is_v), is_v);
//% else
  let scale = head_scale(tid, select(K_EPS, Q_EPS, first < Q_END), is_v);
//% end
//% end
  let output = first + 4u * tid;
  if (tid >= TILE / 4u || output >= OUTPUTS) { return; }
  let at = output % DIM; // index in its head
  var x = vec4<f32>(totals[4u * tid], totals[4u * tid + 1u], totals[4u * tid + 2u], totals[4u * tid + 3u]);
//% if V_NORM
  x = x * scale * prefetched.norms;
//% else
//% if QK_NORM
  if (output < K_END) { x = x * scale * prefetched.norms; }
//% end
//% end
  // `x` has two pairs of neighbouring dimensions, which begin at `ends`.
  var ends = vec2<u32>(at, at + 2u);
  if (output < K_END && at < 2u * PAIRS) {
    x = vec4<f32>(rotated_by(x.xy, prefetched.angles.xy), rotated_by(x.zw, prefetched.angles.zw));
//% if TOGETHER
    x = x.xzyw;
    ends = vec2<u32>(at / 2u, at / 2u + PAIRS);
//% end
  }
//% if HAS_Q
  if (output < Q_END) {
    let head = output / DIM * DIM;
    queries[head + ends.x] = x.x;
    queries[head + ends.x + 1u] = x.y;
    queries[head + ends.y] = x.z;
    queries[head + ends.y + 1u] = x.w;
  }
//% end
//% if HAS_K
  if (output >= Q_END && output < K_END) {
    let head = (output - Q_END) / DIM;
    k_pages[k_word(prefetched.token_offset, head, ends.x)] = pack(x.xy);
    k_pages[k_word(prefetched.token_offset, head, ends.y)] = pack(x.zw);
  }
//% end
//% if HAS_V
  if (output >= K_END) {
    let head = (output - K_END) / DIM;
    put_v(prefetched.token_offset, head, ends.x, x.xy);
    put_v(prefetched.token_offset, head, ends.y, x.zw);
  }
//% end
}
