// Samples a token for each sample with a temperature: tokens [samples]. One workgroup has one sample. `argmax.wgsl` has
// already computed the most probable token.
//
// Weights are probabilities relative to the most probable token, whose weight is 1. A weight is rounded to a multiple
// of 1 / WHOLE. So sums are integers, do not depend on the order, and thresholds are exact. The last key to keep is
// found digit by digit: the weights of tokens are summed by the next digit of their key, and the digit at which the sum
// reaches the threshold is the next digit of the last key to keep.
//% provides finite
@group(0) @binding(0) var<storage, read> samples: array<vec4<u32>>; // [samples, 2] row, first mask word or NONE, place, top-k or 0;
                                                                    // temperature, top-p or NONE, min-p, uniform number
@group(0) @binding(1) var<storage, read> logits: array<u32>;        // [rows, VOCAB] bits of f32, because of NaN
@group(0) @binding(2) var<storage, read> masks: array<u32>;         // [masks, ceil(VOCAB / 32)]
@group(0) @binding(3) var<storage, read_write> tokens: array<u32>;  // [samples] most probable token, replaced

const NONE = 0xffffffffu;
const INFINITY = 0x7f800000u;
const LARGEST = 0x7f7fffffu;
const ONE = 0x3f800000u;

var<workgroup> bins: array<atomic<u32>, 2048>;
var<workgroup> sums: array<vec2<u32>, 256>;  // sum of each thread
var<workgroup> groups: array<vec2<u32>, 16>; // sum of each 16 threads
var<workgroup> done: u32;

// Values of the sample.
var<private> row: u32;
var<private> mask: u32;
var<private> temperature: f32;
var<private> min_p: f32;
var<private> best_rank: u32;
var<private> best: f32;
// Last tokens that top-k and top-p keep. A token is its rank or distance, and its id.
var<private> last_k: vec2<u32>;
var<private> last_p: vec2<u32>;

// Adds two sums. A sum has units of 65536 in `x`, and the rest in `y`.
fn add(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
  let low = a.y + b.y;
  return vec2<u32>(a.x + b.x + (low >> 16u), low & 0xffffu);
}

fn minus(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
  let borrow = u32(a.y < b.y);
  return vec2<u32>(a.x - b.x - borrow, (a.y + (borrow << 16u)) - b.y);
}

fn reaches(a: vec2<u32>, b: vec2<u32>) -> bool {
  return a.x > b.x || (a.x == b.x && a.y >= b.y);
}

// Returns a sum of masses from the sums of their upper and lower parts.
fn joined(high: u32, low: u32) -> vec2<u32> {
  return add(vec2<u32>(high >> (16u - LOW_BITS), (high << LOW_BITS) & 0xffffu), vec2<u32>(low >> 16u, low & 0xffffu));
}

// Returns `parts` / 2^32 of a sum, rounded down.
fn portion(sum: vec2<u32>, parts: u32) -> vec2<u32> {
  let p = vec2<u32>(parts & 0xffffu, parts >> 16u);
  let s = vec3<u32>(sum.y, sum.x & 0xffffu, sum.x >> 16u);
  let a = s.x * p.y + ((s.x * p.x) >> 16u);
  let b = s.y * p.x + (a & 0xffffu);
  let c = s.y * p.y + (a >> 16u);
  let d = (c & 0xffffu) + (b >> 16u);
  let e = s.z * p.x + (d & 0xffffu);
  return vec2<u32>(s.z * p.y + (c >> 16u) + (d >> 16u) + (e >> 16u), e & 0xffffu);
}

// Returns a key of a float; larger numbers have larger keys.
fn ordered(bits: u32) -> u32 {
  return bits ^ select(0x80000000u, NONE, bits >= 0x80000000u);
}

// Maps +inf to the largest finite number, and -0 to 0.
fn finite(bits: u32) -> u32 {
  return select(select(bits, LARGEST, bits == INFINITY), 0u, (bits & 0x7fffffffu) == 0u);
}

fn comes_before(a: vec2<u32>, b: vec2<u32>) -> bool {
  return a.x < b.x || (a.x == b.x && a.y <= b.y);
}

struct Candidate {
  // True if the token is allowed, a number, and among those that top-k keeps.
  fine: bool,
  // Distance of its key from that of the most probable token, which has 0.
  rank: u32,
  weight: f32,
  // Distance of its weight's key from that of weight 1, which has 0.
  distance: u32,
}

fn candidate(token: u32, logit: u32) -> Candidate {
  let number = (logit & 0x7fffffffu) <= INFINITY && logit != (INFINITY | 0x80000000u);
  let bits = finite(logit);
  let rank = best_rank - ordered(bits);
  let exponent = (bitcast<f32>(bits) - best) / temperature;
  // Weights near 1 are set to 1. So the most probable token has exactly 1, regardless of the device's `exp`.
  let weight = select(min(exp(max(exponent, -104.0)), 1.0), 1.0, exponent > -3.0e-8);
  let fine = number && token < VOCAB && comes_before(vec2<u32>(rank, token), last_k);
  return Candidate(fine, rank, weight, ONE - bitcast<u32>(weight));
}

fn allowed(token: u32) -> bool {
  return mask == NONE || ((masks[mask + token / 32u] >> (token % 32u)) & 1u) == 1u;
}

fn mass(weight: f32) -> u32 {
  return u32(weight * f32(WHOLE) + 0.5);
}

// Shares the sums of all threads in the workgroup.
fn share(tid: u32, own: vec2<u32>) {
  workgroupBarrier();
  sums[tid] = own;
  workgroupBarrier();
  if (tid < 16u) {
    var sum = sums[tid * 16u];
    for (var i = 1u; i < 16u; i++) { sum = add(sum, sums[tid * 16u + i]); }
    groups[tid] = sum;
  }
  workgroupBarrier();
}

// Returns the sum over all threads.
fn total() -> vec2<u32> {
  var sum = groups[0];
  for (var i = 1u; i < 16u; i++) { sum = add(sum, groups[i]); }
  return sum;
}

struct Found {
  at: u32,
  // Remaining threshold in the group.
  needed: vec2<u32>,
}

// Finds the group whose cumulative sum reaches the threshold.
fn find_group(needed: vec2<u32>) -> Found {
  var found = Found(0u, needed);
  while (found.at < 15u && !reaches(groups[found.at], found.needed)) {
    found.needed = minus(found.needed, groups[found.at]);
    found.at += 1u;
  }
  return found;
}

// Finds the thread whose cumulative sum reaches the threshold.
fn find_thread(needed: vec2<u32>) -> Found {
  let group = find_group(needed);
  var found = Found(group.at * 16u, group.needed);
  while (found.at < group.at * 16u + 15u && !reaches(sums[found.at], found.needed)) {
    found.needed = minus(found.needed, sums[found.at]);
    found.at += 1u;
  }
  return found;
}

fn bin_sum(bin: u32, weighed: bool) -> vec2<u32> {
  let low = atomicLoad(&bins[bin]);
  if (!weighed) { return joined(0u, low); }
  return joined(atomicLoad(&bins[1024u + bin]), low);
}

// Finds the last token to keep. `most` is the number of tokens to keep, by rank of logits; or with `weighed` the
// fraction of all weight to keep, in units of 2^-32. Three levels find the digits of the rank or distance. If only some
// of several equal tokens are kept, two more levels find the digits of the id.
fn last_kept(tid: u32, weighed: bool, most: u32) -> vec2<u32> {
  let digit_bits = select(11u, 10u, weighed);
  let bins_each = select(8u, 4u, weighed); // bins of a thread
  let digits = (1u << digit_bits) - 1u;
  var needed = vec2<u32>(most >> 16u, most & 0xffffu);
  var last = vec2<u32>(0u);
  for (var level = 0u; level < 5u; level++) {
    let by_id = level >= 3u;
    let shift = digit_bits * (select(2u, 4u, by_id) - level);
    let is_first = level == 0u || level == 3u;
    workgroupBarrier();
    for (var i = tid; i < 2048u; i += 256u) { atomicStore(&bins[i], 0u); }
    workgroupBarrier();
    for (var base = 0u; base < VOCAB; base += 256u * LOADS) {
//% for i in 0..LOADS
      let token_${i} = base + ${i}u * 256u + tid;
      let logit_${i} = logits[row * VOCAB + min(token_${i}, VOCAB - 1u)];
//% end
//% for i in 0..LOADS
      {
        let c = candidate(token_${i}, logit_${i});
        let key = select(c.rank, c.distance, weighed);
        let digit_of = select(key, token_${i}, by_id);
        let rest = digit_of ^ select(last.x, last.y, by_id);
        let matches = (is_first || (rest >> (shift + digit_bits)) == 0u) && (!by_id || key == last.x);
        if (c.fine && matches && allowed(token_${i})) {
          let bin = (digit_of >> shift) & digits;
          if (weighed) {
            let m = mass(c.weight);
            if (m > 0u) {
              atomicAdd(&bins[bin], m & ((1u << LOW_BITS) - 1u));
              atomicAdd(&bins[1024u + bin], m >> LOW_BITS);
            }
          } else {
            atomicAdd(&bins[bin], 1u);
          }
        }
      }
//% end
    }
    workgroupBarrier();
    var own = bin_sum(tid * bins_each, weighed);
    for (var i = 1u; i < bins_each; i++) { own = add(own, bin_sum(tid * bins_each + i, weighed)); }
    share(tid, own);
    if (weighed && level == 0u) {
      needed = portion(total(), most);
      needed.y |= u32(needed.x == 0u && needed.y == 0u);
    }
    let thread = find_thread(needed);
    var bin = thread.at * bins_each;
    needed = thread.needed;
    while (bin < (thread.at + 1u) * bins_each - 1u && !reaches(bin_sum(bin, weighed), needed)) {
      needed = minus(needed, bin_sum(bin, weighed));
      bin += 1u;
    }
    if (by_id) { last.y |= bin << shift; } else { last.x |= bin << shift; }
    if (level == 2u) {
      // Tests whether the threshold is reached without the last of the equal tokens.
      var one = 1u;
      if (weighed) { one = mass(bitcast<f32>(ONE - last.x)); }
      let all = bin_sum(bin, weighed);
      let more = add(needed, vec2<u32>(one >> 16u, one & 0xffffu));
      if (tid == 0u) { done = u32(!reaches(all, more)); }
      if (workgroupUniformLoad(&done) == 1u) {
        last.y = NONE;
        break;
      }
    }
  }
  return last;
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let sample = samples[2u * wid.x];
  let values = samples[2u * wid.x + 1u];
  // Tint treats a private variable as non-uniform, regardless of the values written to it.
  let wanted = bitcast<f32>(values.x);
  if (wanted == 0.0) { return; }
  temperature = wanted;
  row = sample.x;
  mask = sample.y;
  min_p = bitcast<f32>(values.z);
  let top = tokens[sample.z];
  let top_bits = finite(logits[row * VOCAB + min(top, VOCAB - 1u)]);
  best = bitcast<f32>(top_bits);
  best_rank = ordered(top_bits);
  last_k = vec2<u32>(NONE);
  last_p = vec2<u32>(NONE);
  if (sample.w != 0u) { last_k = last_kept(tid, false, sample.w); }
  if (values.y != NONE) { last_p = last_kept(tid, true, values.y); }

  // The draw. Tokens are divided in order of id among 16 groups of 16 threads. The group that contains the uniform
  // number is divided again, until each thread has one token.
  var needed = vec2<u32>(0u);
  var begin = 0u;
  var end = VOCAB;
  var piece = VOCAB;
  loop {
    let is_first = piece == VOCAB;
    piece = (piece + 15u) / 16u;
    let first = begin + tid / 16u * piece;
    let stop = min(first + piece, end);
    var high = 0u;
    var low = 0u;
    for (var base = first; base < stop; base += 16u * LOADS) {
//% for i in 0..LOADS
      let token_${i} = base + ${i}u * 16u + tid % 16u;
      let logit_${i} = logits[row * VOCAB + min(token_${i}, VOCAB - 1u)];
//% end
//% for i in 0..LOADS
      if (token_${i} < stop) {
        let c = candidate(token_${i}, logit_${i});
        let kept = c.fine && c.weight >= min_p && comes_before(vec2<u32>(c.distance, token_${i}), last_p);
        if (kept && allowed(token_${i})) {
          let m = mass(c.weight);
          high += m >> LOW_BITS;
          low += m & ((1u << LOW_BITS) - 1u);
        }
      }
//% end
    }
    share(tid, joined(high, low));
    if (is_first) { needed = add(portion(total(), values.w), vec2<u32>(0u, 1u)); }
    if (piece <= 16u) { break; }
    let group = find_group(needed);
    needed = group.needed;
    begin += group.at * piece;
    end = min(begin + piece, end);
  }
  let thread = find_thread(needed).at;
  if (tid == 0u && top != NONE) { tokens[sample.z] = begin + thread / 16u * piece + thread % 16u; }
}
