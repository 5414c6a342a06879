// Chooses the experts of a row and their weights, as the contract's `Router` defines. A workgroup of CHOOSERS threads
// chooses for one row.
//% provides choose
@group(0) @binding(21) var<storage, read> logits: array<f32>;       // [rows, COUNT]
//% if SELECTION
@group(0) @binding(22) var<storage, read> selection: array<f32>;    // [COUNT] bias of the choice
//% end
//% if EXPERT_SCALE
@group(0) @binding(23) var<storage, read> expert_scale: array<f32>; // [COUNT] factor of a weight
//% end
@group(0) @binding(20) var<storage, read_write> chosen: array<u32>;  // [rows, USED] experts in ascending order
@group(0) @binding(24) var<storage, read_write> weights: array<f32>; // [rows, USED]

const FOURS = (COUNT + 3u) / 4u;
const LEAST = -3.0e38;
const PARTS = max(CHOOSERS / COUNT, 1u); // threads that share the comparisons of an expert

//% if BY_LOGIT
//% else
var<workgroup> scores: array<vec4<f32>, FOURS>;
//% end
var<workgroup> ranks: array<vec4<f32>, FOURS>;               // what the choice compares; past the last expert, LEAST
var<workgroup> preceding: array<atomic<u32>, COUNT>;         // number of experts that precede each
var<workgroup> is_chosen: array<atomic<u32>, (COUNT + 31u) / 32u>; // a bit of each expert
var<workgroup> choice: array<u32, COUNT>;                    // experts in ascending order
//% if EXPERT_GROUPS
const OF_GROUP = COUNT / EXPERT_GROUPS;
var<workgroup> group_scores: array<f32, EXPERT_GROUPS>;
//% end

// Orders NaN, which a damaged model may compute, last.
fn number(x: f32) -> f32 {
  let is_nan = (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u;
  return select(clamp(x, -1.0e30, 1.0e30), -1.0e30, is_nan);
}

fn rank_of(expert: u32) -> f32 {
  return ranks[expert / 4u][expert % 4u];
}

// Returns the score of an expert. A softmax is not divided by its sum; `most` is its largest logit.
fn score_of(expert: u32, most: f32) -> f32 {
//% if BY_LOGIT
  return exp(rank_of(expert) - most);
//% else
  return scores[expert / 4u][expert % 4u];
//% end
}

// Computes `choice`, and stores it and its weights if `stores`.
fn choose(tid: u32, row: u32, stores: bool) {
  for (var e = tid; e < COUNT; e += CHOOSERS) { atomicStore(&preceding[e], 0u); }
  for (var word = tid; word < (COUNT + 31u) / 32u; word += CHOOSERS) { atomicStore(&is_chosen[word], 0u); }
//% if BY_LOGIT
  // A softmax has the order of its logits.
  for (var four = tid; four < FOURS; four += CHOOSERS) {
    var own = vec4<f32>(LEAST);
//% for c in 0..4
    if (4u * four + ${c}u < COUNT) { own[${c}] = number(logits[row * COUNT + 4u * four + ${c}u]); }
//% end
    ranks[four] = own;
  }
  workgroupBarrier();
//% else
  for (var four = tid; four < FOURS; four += CHOOSERS) {
    var own = vec4<f32>(-1.0e30);
//% for c in 0..4
    if (4u * four + ${c}u < COUNT) { own[${c}] = number(logits[row * COUNT + 4u * four + ${c}u]); }
//% end
    scores[four] = own;
  }
  workgroupBarrier();
//% if SIGMOID
  for (var four = tid; four < FOURS; four += CHOOSERS) { scores[four] = 1.0 / (1.0 + exp(-scores[four])); }
//% else
  for (var four = tid; four < FOURS; four += CHOOSERS) {
    var largest = scores[0];
    for (var other = 1u; other < FOURS; other++) { largest = max(largest, scores[other]); }
    let most = max(max(largest.x, largest.y), max(largest.z, largest.w));
    ranks[four] = exp(scores[four] - most);
  }
  workgroupBarrier();
  for (var four = tid; four < FOURS; four += CHOOSERS) {
    var all = 0.0;
    for (var other = 0u; other < FOURS; other++) {
      let more = ranks[other];
      all = all + more.x + more.y + more.z + more.w;
    }
    scores[four] = ranks[four] / all;
  }
//% end
  workgroupBarrier();
  for (var four = tid; four < FOURS; four += CHOOSERS) {
    var own = scores[four];
//% for c in 0..4
    if (4u * four + ${c}u < COUNT) {
//% if SELECTION
      own[${c}] += selection[4u * four + ${c}u];
//% end
    } else {
      own[${c}] = LEAST;
    }
//% end
    ranks[four] = own;
  }
  workgroupBarrier();
//% end
//% if EXPERT_GROUPS
  // The score of a group is the sum of its BEST largest ranks, in the order of experts. Only experts of the groups with
  // the best scores can be chosen.
  for (var group = tid; group < EXPERT_GROUPS; group += CHOOSERS) {
    let first = group * OF_GROUP;
    var sum = 0.0;
    for (var e = first; e < first + OF_GROUP; e++) {
      var before = 0u;
      for (var other = first; other < first + OF_GROUP; other++) {
        before += u32(rank_of(other) > rank_of(e) || (rank_of(other) == rank_of(e) && other < e));
      }
      if (before < BEST) { sum += rank_of(e); }
    }
    group_scores[group] = sum;
  }
  workgroupBarrier();
  for (var four = tid; four < FOURS; four += CHOOSERS) {
    var own = ranks[four];
    for (var c = 0u; c < 4u; c++) {
      let group = min((4u * four + c) / OF_GROUP, EXPERT_GROUPS - 1u);
      let score = group_scores[group];
      var before = 0u;
      for (var other = 0u; other < EXPERT_GROUPS; other++) {
        before += u32(group_scores[other] > score || (group_scores[other] == score && other < group));
      }
      if (before >= USED_GROUPS) { own[c] = LEAST; }
    }
    ranks[four] = own;
  }
  workgroupBarrier();
//% end
  // An expert is chosen if fewer than USED experts precede it. Among equal ranks, the lower id precedes.
  for (var i = tid; i < COUNT * PARTS; i += CHOOSERS) {
    let e = i % COUNT;
    let own = rank_of(e);
    var before = 0u;
    for (var four = i / COUNT; four < FOURS; four += PARTS) {
      let rank = ranks[four];
//% for c in 0..4
      before += u32(rank[${c}] > own || (rank[${c}] == own && 4u * four + ${c}u < e));
//% end
    }
    atomicAdd(&preceding[e], before);
  }
  workgroupBarrier();
  for (var e = tid; e < COUNT; e += CHOOSERS) {
    if (atomicLoad(&preceding[e]) < USED) { atomicOr(&is_chosen[e / 32u], 1u << (e % 32u)); }
  }
  workgroupBarrier();
  for (var e = tid; e < COUNT; e += CHOOSERS) {
    let word = atomicLoad(&is_chosen[e / 32u]);
    if (((word >> (e % 32u)) & 1u) == 1u) {
      var place = countOneBits(word & ((1u << (e % 32u)) - 1u));
      for (var before = 0u; before < e / 32u; before++) { place += countOneBits(atomicLoad(&is_chosen[before])); }
      choice[place] = e;
    }
  }
  workgroupBarrier();
  if (!stores) { return; }
  for (var place = tid; place < USED; place += CHOOSERS) {
    var most = 0.0;
    var total = 1.0;
//% if BY_LOGIT
    most = rank_of(choice[0]);
    for (var i = 1u; i < USED; i++) { most = max(most, rank_of(choice[i])); }
//% if RENORMALIZE
//% else
    total = 0.0;
    for (var e = 0u; e < COUNT; e++) { total += score_of(e, most); }
//% end
//% end
//% if RENORMALIZE
    total = 0.0;
    for (var i = 0u; i < USED; i++) { total += score_of(choice[i], most); }
    total = max(total, 1.1754944e-38);
//% end
    chosen[row * USED + place] = choice[place];
    weights[row * USED + place] = score_of(choice[place], most) / total * FACTOR;
//% if EXPERT_SCALE
    weights[row * USED + place] *= expert_scale[choice[place]];
//% end
  }
}
