// Adds the results of a matmul to the residual stream, [OUTPUTS], in a step of one row. With NORMS, it also writes the
// activations of a norm without the norm's factor, which the reader computes from sums of squares. A workgroup has a
// block of 32 outputs.
//% provides finish prefetch needs emit_shared peek publish stage wait_for
//% if NORMS
@group(0) @binding(7) var<storage, read> weight: array<f32>; // [OUTPUTS]
//% end
//% if HANDOFF
// The residual stream passes by handoff within a layer. After a barrier it is in memory, from X_FIRST on.
//% if AWAITS_X
@group(0) @binding(5) var<storage, read_write> out: array<f32>;

fn load_x(i: u32) -> f32 { return bitcast<f32>(peek(X_AT + i)); }

fn x_of(i: u32, prefetched: f32) -> f32 {
  if (bitcast<u32>(prefetched) != EMPTY) { return prefetched; }
  return bitcast<f32>(wait_for(X_AT + i));
}

fn put_x(i: u32, value: f32) { out[X_FIRST + i] = value; }
//% else
@group(0) @binding(5) var<storage, read> x: array<f32>;

fn load_x(i: u32) -> f32 { return x[X_FIRST + i]; }

fn x_of(i: u32, prefetched: f32) -> f32 { return prefetched; }

fn put_x(i: u32, value: f32) { publish(X_AT + i, bitcast<u32>(value)); }
//% end
//% if NORMS
fn put_squares(block: u32, sum: f32) { publish(SQUARES_AT + block, bitcast<u32>(sum)); }
//% end
//% else
@group(0) @binding(5) var<storage, read_write> out: array<f32>;          // [OUTPUTS]

fn load_x(i: u32) -> f32 { return out[i]; }

fn x_of(i: u32, prefetched: f32) -> f32 { return prefetched; }

fn put_x(i: u32, value: f32) { out[i] = value; }
//% if NORMS
@group(0) @binding(11) var<storage, read_write> out_squares: array<f32>; // [OUTPUTS / 32]

fn put_squares(block: u32, sum: f32) { out_squares[block] = sum; }
//% end
//% end

var<workgroup> values: array<f32, 32>;

struct Prefetched { x: f32, weight: f32 }

fn prefetch(tid: u32, first: u32) -> Prefetched {
  var prefetched: Prefetched;
  if (tid < 32u) {
    prefetched.x = load_x(first + tid);
//% if NORMS
    prefetched.weight = weight[first + tid];
//% end
  }
  return prefetched;
}

fn finish(tid: u32, first: u32, prefetched: Prefetched) {
  if (tid < 32u) {
    let value = x_of(first + tid, prefetched.x) + totals[tid];
    put_x(first + tid, value);
//% if NORMS
    values[tid] = value;
    stage(tid, value * prefetched.weight);
//% end
  }
//% if NORMS
  workgroupBarrier();
  if (tid == THREADS - 1u) {
    var sum = 0.0;
    for (var i = 0u; i < 32u; i++) { sum = fma(values[i], values[i], sum); }
    put_squares(first / 32u, sum);
  }
  emit_shared(tid < 8u, 0u, first / 32u, 0u, tid);
//% end
}
