// Merges the partials of attention of a row in order, [partials, HEADS, DIM] without the padding behind HEAD elements, applies the gate if there is one, and writes
// activations of the next matmul. One workgroup computes MERGE_HEADS heads of a row, so that it has whole blocks.
//% provides number_at put_number needs clear_partial emit_shared give_up hadamard is_there partials_of patience power_of_two
//% stage sum_at top_at wait_for_partial
@group(0) @binding(0) var<storage, read> step: array<u32>; // words of the step, see args.wgsl
//% if HANDOFF_PARTIALS
//% else
@group(0) @binding(1) var<storage, read> partial_sums: array<vec4<f32>>; // [partials, HEADS, DIM / 4]
@group(0) @binding(2) var<storage, read> partial_tops: array<vec2<f32>>; // [partials, HEADS] maximum, sum of weights
//% end

//% if SINKS
@group(0) @binding(3) var<storage, read> sinks: array<f32>; // [HEADS]
//% end

//% if GATED
@group(0) @binding(4) var<storage, read> gates: array<f32>; // [rows, HEADS, HEAD]
//% end

const QUADS = DIM / 4u;
const CONCURRENT = min(256u / QUADS, 51u); // partials that the threads read concurrently
const CHUNK = 5u * CONCURRENT;             // partials of a round; with heads of 128, all partials of 16,384 tokens

var<workgroup> tops: array<f32, 64>;           // maximum of each subgroup, which has at least 4 threads
var<workgroup> partials: array<vec2<f32>, CHUNK>; // factor, and sum of weights times factor
var<workgroup> chunk: array<vec4<f32>, CHUNK * QUADS>;

//% if HADAMARD
// Accessors of staged results for hadamard.wgsl.
fn number_at(i: u32) -> f32 {
  return staged[i / 32u * 33u + i % 32u];
}

fn put_number(i: u32, x: f32) {
  stage(i, x);
}
//% end

fn top_of(partial: u32, head: u32) -> vec2<f32> {
//% if HANDOFF_PARTIALS
  return wait_for_partial(top_at(partial, head)).xy;
//% else
  return partial_tops[partial * HEADS + head];
//% end
}

@compute @workgroup_size(256)
fn main(
  @builtin(workgroup_id) wid: vec3<u32>,
  @builtin(local_invocation_index) tid: u32,
  @builtin(subgroup_id) subgroup: u32,
  @builtin(num_subgroups) subgroups: u32,
  @builtin(subgroup_invocation_id) in_subgroup: u32,
) {
  let row = wid.y;
  let made = partials_of(row);
  let lane_partial = min(tid / QUADS, CONCURRENT - 1u);
  for (var h = 0u; h < MERGE_HEADS; h++) {
    // Past the last head, the result of the last head is computed again and omitted.
    let head = min(wid.x * MERGE_HEADS + h, HEADS - 1u);
    let at = (made.first * HEADS + head) * QUADS + tid % QUADS;
//% if HANDOFF_PARTIALS
//% else
    // Past the last partial, the last partial is read again.
//% for u in 0..5
    var next_${u} = partial_sums[at + min(${u}u * CONCURRENT + lane_partial, made.count - 1u) * HEADS * QUADS];
//% end
//% end
    var own = vec2<f32>(NOTHING);
    if (tid < made.count) { own = top_of(made.first + tid, head); }
    var top = own.x;
    for (var i = tid + 256u; i < made.count; i += 256u) { top = max(top, top_of(made.first + i, head).x); }
    top = subgroupMax(top);
    if (in_subgroup == 0u) { tops[subgroup] = top; }
    workgroupBarrier();
    for (var i = 0u; i < subgroups; i++) { top = max(top, tops[i]); }
//% for o in 0..OUTS
    var sum_${o} = vec2<f32>(0.0); // sum of weighted values, sum of weights
    var run_${o} = vec2<f32>(0.0);
//% end
    for (var base = 0u; base < made.count; base += CHUNK) {
      let here = min(CHUNK, made.count - base);
      if (tid < here) {
        var partial = own;
        if (base > 0u) { partial = top_of(made.first + base + tid, head); }
        let factor = power_of_two(partial.x - top);
        partials[tid] = vec2<f32>(factor, partial.y * factor);
      }
//% if HANDOFF_PARTIALS
      // The maxima are written, so the sums are probably written as well.
      var all_there = false;
      for (var n = 0u; n < patience() && !all_there; n++) {
//% for u in 0..5
        let next_${u} = handoff_partials[at + min(base + ${u}u * CONCURRENT + lane_partial, made.count - 1u) * QUADS * HEADS];
        if (tid < CONCURRENT * QUADS) { chunk[${u}u * CONCURRENT * QUADS + tid] = bitcast<vec4<f32>>(next_${u}); }
//% end
        all_there = true;
//% for u in 0..5
        all_there = all_there && is_there(next_${u});
//% end
      }
      if (!all_there) { give_up(); }
      workgroupBarrier();
//% else
      if (tid < CONCURRENT * QUADS) {
//% for u in 0..5
        chunk[${u}u * CONCURRENT * QUADS + tid] = next_${u};
//% end
      }
      workgroupBarrier();
      if (base + CHUNK < made.count) {
//% for u in 0..5
        next_${u} = partial_sums[at + min(base + CHUNK + ${u}u * CONCURRENT + lane_partial, made.count - 1u) * HEADS * QUADS];
//% end
      }
//% end
//% for o in 0..OUTS
      if (tid + ${o}u * 256u < DIM) {
        let d = tid + ${o}u * 256u;
        var value = chunk[d / 4u][d % 4u];
        var partial = partials[0];
        for (var i = 0u; i < here; i++) {
          // The next partial is loaded before this one is added.
          let next_value = chunk[min(i + 1u, CHUNK - 1u) * QUADS + d / 4u][d % 4u];
          let next_partial = partials[min(i + 1u, CHUNK - 1u)];
          run_${o} += vec2<f32>(value * partial.x, partial.y);
          value = next_value;
          partial = next_partial;
          if ((made.number + base + i + 1u) * made.length % RUN == 0u || base + i + 1u == made.count) {
            sum_${o} += run_${o};
            run_${o} = vec2<f32>(0.0);
          }
        }
      }
//% end
      workgroupBarrier();
    }
//% for o in 0..OUTS
    {
      let d = tid + ${o}u * 256u;
//% if SINKS
      // If a sink exceeds all scores by more than single precision can represent, the result is zero.
      sum_${o}.y += exp2(min(fma(sinks[head], 1.4426950408889634, -top), 126.0));
//% end
      var value = sum_${o}.x / sum_${o}.y;
//% if HADAMARD
//% if LATENT
      if (d < max(DIM, ACT_BLOCKS * 32u)) { stage(h * DIM + d, select(0.0, value, d < DIM && wid.x * MERGE_HEADS + h < HEADS)); }
//% else
      if (d < HEAD) { stage(h * HEAD + d, select(0.0, value, wid.x * MERGE_HEADS + h < HEADS)); }
//% end
//% else
//% if GATED
      value /= 1.0 + exp(-gates[(row * HEADS + head) * HEAD + min(d, HEAD - 1u)]);
//% end
//% if LATENT
      if (d < ACT_BLOCKS * 32u) { stage(d, select(0.0, value, d < LATENT)); }
//% else
      if (d < HEAD) { stage(h * HEAD + d, select(0.0, value, wid.x * MERGE_HEADS + h < HEADS)); }
//% end
//% end
    }
//% end
    workgroupBarrier();
  }
//% if HADAMARD
  hadamard(tid, 256u, MERGE_HEADS);
  for (var i = tid; i < MERGE_HEADS * APART; i += 256u) {
    var value = number_at(i);
//% if GATED
    value /= 1.0 + exp(-gates[(row * HEADS + min(wid.x * MERGE_HEADS + i / HEAD, HEADS - 1u)) * HEAD + i % HEAD]);
//% end
//% if LATENT
    value = select(0.0, value, i < LATENT);
//% end
    stage(i, value);
  }
  workgroupBarrier();
//% end
  let mine = tid / 8u;
//% if LATENT
  // With latent attention, each head is a separate row of activations.
  emit_shared(mine < ACT_BLOCKS, row * HEADS + wid.x, mine, mine, tid % 8u);
//% else
  let block = wid.x * (MERGE_HEADS * HEAD / 32u) + mine;
  emit_shared(mine < MERGE_HEADS * HEAD / 32u && block < ACT_BLOCKS, row, block, mine, tid % 8u);
//% end
//% if HANDOFF_PARTIALS
  for (var i = tid; i < made.count * QUADS; i += 256u) { clear_partial(sum_at(made.first + i / QUADS, wid.x) + i % QUADS); }
  for (var i = tid; i < made.count; i += 256u) { clear_partial(top_at(made.first + i, wid.x)); }
//% end
}
