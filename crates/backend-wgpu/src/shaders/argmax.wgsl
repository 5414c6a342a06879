// Computes the most probable token of each sample among those that its mask allows. Among equal tokens it is the one
// with the lowest id. NaN is ignored, and +inf counts as the largest finite number. The first launch computes the
// maximum of every 2048 tokens; the second, with MERGE, the maximum of those.
@group(0) @binding(0) var<storage, read> samples: array<vec4<u32>>; // [samples, 2] see sample.wgsl
//% if MERGE
@group(0) @binding(1) var<storage, read> best: array<vec2<u32>>;       // [samples, CHUNKS] value, token
@group(0) @binding(2) var<storage, read_write> tokens: array<u32>;     // [samples] the token, or NONE
//% else
@group(0) @binding(1) var<storage, read_write> best: array<vec2<u32>>; // [samples, CHUNKS] value, token
@group(0) @binding(2) var<storage, read> logits: array<f32>;           // [rows, VOCAB]
@group(0) @binding(3) var<storage, read> masks: array<u32>;            // [masks, ceil(VOCAB / 32)]
//% end

const NONE = 0xffffffffu;
const LOWEST = -3.4028234663852886e38;

var<workgroup> values: array<f32, 256>;
var<workgroup> ids: array<u32, 256>;

fn beats(value: f32, id: u32, other: f32, other_id: u32) -> bool {
  return id != NONE && (other_id == NONE || value > other || (value == other && id < other_id));
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  var top = LOWEST;
  var id = NONE;
//% if MERGE
  let sample = samples[2u * wid.x];
  for (var chunk = tid; chunk < CHUNKS; chunk += 256u) {
    let candidate = best[wid.x * CHUNKS + chunk];
    if (beats(bitcast<f32>(candidate.x), candidate.y, top, id)) {
      top = bitcast<f32>(candidate.x);
      id = candidate.y;
    }
  }
//% else
  let sample = samples[2u * wid.y];
//% for i in 0..8
  {
    let token = wid.x * 2048u + ${i}u * 256u + tid;
    if (token < VOCAB) {
      let value = logits[sample.x * VOCAB + token];
      let allowed = sample.y == NONE || ((masks[sample.y + token / 32u] >> (token % 32u)) & 1u) == 1u;
      if (allowed && value >= LOWEST && beats(value, token, top, id)) {
        top = value;
        id = token;
      }
    }
  }
//% end
//% end
  values[tid] = top;
  ids[tid] = id;
  workgroupBarrier();
  for (var n = 128u; n > 0u; n /= 2u) {
    if (tid < n && beats(values[tid + n], ids[tid + n], values[tid], ids[tid])) {
      values[tid] = values[tid + n];
      ids[tid] = ids[tid + n];
    }
    workgroupBarrier();
  }
//% if MERGE
  if (tid == 0u) { tokens[sample.z] = ids[0]; }
//% else
  if (tid == 0u) { best[wid.y * CHUNKS + wid.x] = vec2<u32>(bitcast<u32>(values[0]), ids[0]); }
//% end
}
