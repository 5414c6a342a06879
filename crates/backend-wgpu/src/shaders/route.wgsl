// Chooses the experts of a row and their weights, [rows, USED], as the contract's `Router` defines. One workgroup has
// one row.
@group(0) @binding(0) var<storage, read> logits: array<f32>;         // [rows, COUNT]
//% if SELECTION
@group(0) @binding(1) var<storage, read> selection: array<f32>;      // [COUNT] bias of the choice
//% end
//% if EXPERT_SCALE
@group(0) @binding(4) var<storage, read> expert_scale: array<f32>;   // [COUNT] factor of a weight
//% end
@group(0) @binding(2) var<storage, read_write> chosen: array<u32>;   // [rows, USED] experts in ascending order
@group(0) @binding(3) var<storage, read_write> weights: array<f32>;  // [rows, USED]

var<workgroup> scores: array<f32, COUNT>;
var<workgroup> ranks: array<f32, COUNT>;     // scores for the choice
var<workgroup> is_chosen: array<u32, COUNT>;
//% if EXPERT_GROUPS
var<workgroup> group_scores: array<f32, EXPERT_GROUPS>;
//% end

// Orders NaN, which a damaged model may compute, last.
fn number(x: f32) -> f32 {
  let is_nan = (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u;
  return select(clamp(x, -1.0e30, 1.0e30), -1.0e30, is_nan);
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let row = wid.x;
  for (var e = tid; e < COUNT; e += 256u) { scores[e] = number(logits[row * COUNT + e]); }
  workgroupBarrier();
//% if SIGMOID
  for (var e = tid; e < COUNT; e += 256u) { scores[e] = 1.0 / (1.0 + exp(-scores[e])); }
//% else
  var largest = scores[0];
  for (var e = 1u; e < COUNT; e++) { largest = max(largest, scores[e]); }
  for (var e = tid; e < COUNT; e += 256u) { ranks[e] = exp(scores[e] - largest); }
  workgroupBarrier();
  var all = 0.0;
  for (var e = 0u; e < COUNT; e++) { all += ranks[e]; }
  for (var e = tid; e < COUNT; e += 256u) { scores[e] = ranks[e] / all; }
//% end
  workgroupBarrier();
  for (var e = tid; e < COUNT; e += 256u) {
//% if SELECTION
    ranks[e] = scores[e] + selection[e];
//% else
    ranks[e] = scores[e];
//% end
  }
  workgroupBarrier();
//% if EXPERT_GROUPS
  // The score of a group is the sum of its BEST largest ranks, in the order of experts. Only experts of the groups with
  // the best scores can be chosen.
  const OF_GROUP = COUNT / EXPERT_GROUPS;
  for (var group = tid; group < EXPERT_GROUPS; group += 256u) {
    let first = group * OF_GROUP;
    var sum = 0.0;
    for (var e = first; e < first + OF_GROUP; e++) {
      var before = 0u;
      for (var other = first; other < first + OF_GROUP; other++) {
        before += u32(ranks[other] > ranks[e] || (ranks[other] == ranks[e] && other < e));
      }
      if (before < BEST) { sum += ranks[e]; }
    }
    group_scores[group] = sum;
  }
  workgroupBarrier();
  for (var e = tid; e < COUNT; e += 256u) {
    let own = group_scores[e / OF_GROUP];
    var before = 0u;
    for (var other = 0u; other < EXPERT_GROUPS; other++) {
      before += u32(group_scores[other] > own || (group_scores[other] == own && other < e / OF_GROUP));
    }
    if (before >= USED_GROUPS) { ranks[e] = -3.0e38; }
  }
  workgroupBarrier();
//% end
  // An expert is chosen if fewer than USED experts precede it. Among equal ranks, the lower id precedes.
  for (var e = tid; e < COUNT; e += 256u) {
    let own = ranks[e];
    var before = 0u;
    for (var other = 0u; other < COUNT; other++) {
      let rank = ranks[other];
      before += u32(rank > own || (rank == own && other < e));
    }
    is_chosen[e] = u32(before < USED);
  }
  workgroupBarrier();
//% if RENORMALIZE
  var total = 0.0;
  for (var e = 0u; e < COUNT; e++) { if (is_chosen[e] == 1u) { total += scores[e]; } }
  total = max(total, 1.1754944e-38);
//% else
  let total = 1.0;
//% end
  for (var e = tid; e < COUNT; e += 256u) {
    if (is_chosen[e] == 1u) {
      var place = 0u;
      for (var other = 0u; other < e; other++) { place += is_chosen[other]; }
      chosen[row * USED + place] = e;
      weights[row * USED + place] = scores[e] / total * FACTOR;
//% if EXPERT_SCALE
      weights[row * USED + place] *= expert_scale[e];
//% end
    }
  }
}
