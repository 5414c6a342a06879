// A product that is added to the residual stream, and makes a norm's activations of it, but for the factor: whoever takes them makes
// that of the sums of squares. A workgroup has a block of 32.
@group(0) @binding(5) var<storage, read_write> out: array<f32>;          // [OUTPUTS]
@group(0) @binding(7) var<storage, read> weight: array<f32>;             // [OUTPUTS]
@group(0) @binding(11) var<storage, read_write> out_squares: array<f32>; // [OUTPUTS / 32]

var<workgroup> values: array<f32, 32>;

struct Asked { x: f32, weight: f32 }

fn ask(tid: u32, first: u32) -> Asked {
  var asked: Asked;
  if (tid < 32u) { asked = Asked(out[first + tid], weight[first + tid]); }
  return asked;
}

fn finish(tid: u32, first: u32, asked: Asked) {
  if (tid < 32u) {
    let value = asked.x + totals[tid];
    out[first + tid] = value;
    values[tid] = value;
    stage(tid, value * asked.weight);
  }
  workgroupBarrier();
  if (tid == THREADS - 1u) {
    var sum = 0.0;
    for (var i = 0u; i < 32u; i++) { sum = fma(values[i], values[i], sum); }
    out_squares[first / 32u] = sum;
  }
  emit_shared(tid < 8u, 0u, first / 32u, 0u, tid);
}
