// A product that is added to the residual stream, and makes a norm's activations of it, but for the factor: whoever takes them makes
// that of the sums of squares. A workgroup has a block of 32.
@group(0) @binding(5) var<storage, read_write> out: array<f32>;          // [OUTPUTS]
@group(0) @binding(7) var<storage, read> weight: array<f32>;             // [OUTPUTS]
@group(0) @binding(11) var<storage, read_write> out_squares: array<f32>; // [OUTPUTS / 32]

var<workgroup> values: array<f32, 32>;
var<workgroup> made_quants: array<vec4<u32>, 2>;

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
  // Eight threads share the quads of the block, where one would have some 300 instructions to itself.
  var v: array<vec4<f32>, 8>;
  var largest = 0.0;
  if (tid < 8u) {
//% for j in 0..8
    v[${j}] = staged_quad(0u, ${j}u);
//% end
    largest = largest_of(v);
    let own = staged_quad(0u, tid);
//% if EMIT_F32
    acts_floats[tid * ACT_BLOCKS + first / 32u] = bitcast<vec4<u32>>(own);
//% end
//% if EMIT_Q8
    made_quants[tid / 4u][tid % 4u] = quants_of(own, largest);
//% end
  }
  if (tid == THREADS - 1u) {
    var sum = 0.0;
    for (var i = 0u; i < 32u; i++) { sum = fma(values[i], values[i], sum); }
    out_squares[first / 32u] = sum;
  }
//% if EMIT_Q8
  workgroupBarrier();
  if (tid == 0u) {
    let q = with_sums(made_quants[0], made_quants[1], largest);
    acts_quants[first / 32u] = q.lo;
    acts_quants[first / 32u + ACT_BLOCKS] = q.hi;
    acts_scales[first / 32u] = vec2<u32>(bitcast<u32>(q.scale), q.sums);
  }
//% end
}
