// Applies RoPE to the results of a matmul in a step of one row, and stores queries, keys and values. Outputs up to
// Q_END are queries, those up to K_END are keys, and the others are values. A thread has four outputs of a head. If
// weights with several layouts need several matmuls, each kernel declares only the buffers that it writes, so that the
// matmuls do not wait for each other.
//% provides finish prefetch needs angle clear k_word pack put_v rotated_by
//% if HAS_Q
@group(0) @binding(8) var<storage, read_write> queries: array<f32>;  // [rows, HEADS, DIM]
//% end
//% if HAS_K
@group(0) @binding(9) var<storage, read_write> k_pages: array<u32>;  // see pages.rs
//% end

struct Prefetched { token_offset: u32, angles: vec4<f32> }

fn prefetch(tid: u32, first: u32) -> Prefetched {
  var prefetched: Prefetched;
//% if CLEARED
  clear(first / TILE * THREADS + tid, OUTPUTS / TILE * THREADS);
//% end
  if (tid >= TILE / 4u) { return prefetched; }
  prefetched.token_offset = step[args.token_offsets + KV_GROUP * args.rows];
//% if PAIRS
  let pair = (first + 4u * tid) % DIM / 2u;
  let position = step[args.positions];
  prefetched.angles = vec4<f32>(angle(position, min(pair, PAIRS - 1u)), angle(position, min(pair + 1u, PAIRS - 1u)));
//% end
  return prefetched;
}

fn finish(tid: u32, first: u32, prefetched: Prefetched) {
  let output = first + 4u * tid;
  if (tid >= TILE / 4u || output >= OUTPUTS) { return; }
  let at = output % DIM; // index in its head
  var x = vec4<f32>(totals[4u * tid], totals[4u * tid + 1u], totals[4u * tid + 2u], totals[4u * tid + 3u]);
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
