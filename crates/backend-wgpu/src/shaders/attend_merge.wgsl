// Partial attention of a row's splits, added up in order, as activations of the next product; one workgroup for MERGE_HEADS
// heads of a row, so that it has whole blocks.
@group(0) @binding(0) var<storage, read> step: array<u32>;
@group(0) @binding(1) var<storage, read> part_sums: array<f32>;       // [parts, HEADS, DIM]
@group(0) @binding(2) var<storage, read> part_tops: array<vec2<f32>>; // [parts, HEADS] maximum, sum of weights

var<workgroup> tops: array<f32, 256>;
var<workgroup> parts: array<vec2<f32>, 256>; // factor, weight times factor

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let row = wid.y;
  let first = step[args.parts + 2u * row];
  let count = step[args.parts + 2u * row + 1u];
  for (var h = 0u; h < MERGE_HEADS; h++) {
    // Past the last head, its result is computed again and left out.
    let head = min(wid.x * MERGE_HEADS + h, HEADS - 1u);
    var most = NOTHING;
    for (var i = tid; i < count; i += 256u) { most = max(most, part_tops[(first + i) * HEADS + head].x); }
    tops[tid] = most;
    workgroupBarrier();
    for (var n = 128u; n > 0u; n /= 2u) {
      if (tid < n) { tops[tid] = max(tops[tid], tops[tid + n]); }
      workgroupBarrier();
    }
    let top = tops[0];
    var sum = 0.0;
    var total = 0.0;
    for (var base = 0u; base < count; base += 256u) {
      let here = min(256u, count - base);
      if (tid < here) {
        let part = part_tops[(first + base + tid) * HEADS + head];
        let factor = power_of_two(part.x - top);
        parts[tid] = vec2<f32>(factor, part.y * factor);
      }
      workgroupBarrier();
      if (tid < DIM) {
        let at = ((first + base) * HEADS + head) * DIM + tid;
        var i = 0u;
        for (; i + 8u <= here; i += 8u) {
//% for u in 0..8
          let sum_${u} = part_sums[at + (i + ${u}u) * HEADS * DIM];
//% end
//% for u in 0..8
          sum += sum_${u} * parts[i + ${u}u].x;
          total += parts[i + ${u}u].y;
//% end
        }
        for (; i < here; i++) {
          sum += part_sums[at + i * HEADS * DIM] * parts[i].x;
          total += parts[i].y;
        }
      }
      workgroupBarrier();
    }
    if (tid < DIM) {
      stage(h * DIM + tid, select(0.0, sum / total, wid.x * MERGE_HEADS + h < HEADS));
    }
  }
  workgroupBarrier();
  let block = wid.x * (MERGE_HEADS * DIM / 32u) + tid;
  if (tid < MERGE_HEADS * DIM / 32u && block < ACT_BLOCKS) {
    emit(row, block, tid);
  }
}
