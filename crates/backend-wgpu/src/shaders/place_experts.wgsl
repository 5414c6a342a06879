// Finds places for the chosen experts of a step: one workgroup. A place is a slot of the layer, or from SLOTS on a place of
// the staging area, so each of the COUNT experts has a place of its own. Experts without a slot take the slots that were
// not used for the longest time, and those at these slots take their places in the staging area. With STREAMS, a step
// may choose more experts than there are slots: places remain, and experts without a slot are copied to the staging area.
// `fills` has the copies that `fill_experts.wgsl` makes. With CHOOSES, the experts of a single row are chosen first.
//% needs choose
//% if CHOOSES
//% else
@group(0) @binding(20) var<storage, read> chosen: array<u32>;     // [rows, USED]
//% end
// Steps that used slots, hits, misses, copies to the staging area; then [COUNT] the place of each expert, [COUNT] the
// expert at each place, and [SLOTS] the step of each slot's last use.
@group(0) @binding(1) var<storage, read_write> pool: array<u32>;
@group(0) @binding(2) var<storage, read_write> fills: array<u32>; // their number; then the expert and the place of each

const WORDS = (COUNT + 31u) / 32u;
const PLACES = 4u;
const EXPERTS_AT = PLACES + COUNT;
const USES = EXPERTS_AT + COUNT;

var<workgroup> chosen_bits: array<atomic<u32>, WORDS>; // a bit of each expert
var<workgroup> missing_bits: array<atomic<u32>, WORDS>;
var<workgroup> uses: array<u32, COUNT>;               // of SLOTS slots
var<workgroup> victims: array<u32, COUNT>;            // slots, the one with the oldest use first

// Returns the number of missing experts before this one.
fn missing_before(expert: u32) -> u32 {
  var count = countOneBits(atomicLoad(&missing_bits[expert / 32u]) & ((1u << (expert % 32u)) - 1u));
  for (var word = 0u; word < expert / 32u; word++) { count += countOneBits(atomicLoad(&missing_bits[word])); }
  return count;
}

@compute @workgroup_size(256)
fn main(@builtin(local_invocation_index) tid: u32) {
//% if CHOOSES
  choose(tid, 0u, true);
//% end
  let now = pool[0] + 1u;
  for (var word = tid; word < WORDS; word += 256u) {
    atomicStore(&chosen_bits[word], 0u);
    atomicStore(&missing_bits[word], 0u);
  }
  for (var slot = tid; slot < SLOTS; slot += 256u) { uses[slot] = pool[USES + slot]; }
  workgroupBarrier();
//% if CHOOSES
  for (var pair = tid; pair < USED; pair += 256u) {
    let expert = choice[pair];
//% else
  for (var pair = tid; pair < args.rows * USED; pair += 256u) {
    let expert = chosen[pair];
//% end
    atomicOr(&chosen_bits[expert / 32u], 1u << (expert % 32u));
  }
  workgroupBarrier();
  for (var expert = tid; expert < COUNT; expert += 256u) {
    if (((atomicLoad(&chosen_bits[expert / 32u]) >> (expert % 32u)) & 1u) == 1u) {
      let place = pool[PLACES + expert];
      if (place < SLOTS) {
        uses[place] = now;
      } else {
        atomicOr(&missing_bits[expert / 32u], 1u << (expert % 32u));
      }
    }
  }
  workgroupBarrier();
//% if STREAMS
//% else
  for (var slot = tid; slot < SLOTS; slot += 256u) {
    let own = uses[slot];
    pool[USES + slot] = own;
    var before = 0u;
    for (var other = 0u; other < SLOTS; other++) {
      before += u32(uses[other] < own || (uses[other] == own && other < slot));
    }
    victims[before] = slot;
  }
  // Slots are written again by their new experts.
  storageBarrier();
  workgroupBarrier();
//% end
  for (var expert = tid; expert < COUNT; expert += 256u) {
    if (((atomicLoad(&missing_bits[expert / 32u]) >> (expert % 32u)) & 1u) == 0u) { continue; }
    let index = missing_before(expert);
    let staged = pool[PLACES + expert];
//% if STREAMS
    let place = staged;
//% else
    let place = victims[index];
    let other = pool[EXPERTS_AT + place];
    pool[PLACES + expert] = place;
    pool[PLACES + other] = staged;
    pool[EXPERTS_AT + place] = expert;
    pool[EXPERTS_AT + staged] = other;
    pool[USES + place] = now;
//% end
    fills[1u + 2u * index] = expert;
    fills[2u + 2u * index] = place;
  }
  if (tid == 0u) {
    var all = 0u;
    for (var word = 0u; word < WORDS; word++) { all += countOneBits(atomicLoad(&chosen_bits[word])); }
    let missing = missing_before(32u * WORDS - 1u) + (atomicLoad(&missing_bits[WORDS - 1u]) >> 31u);
    fills[0] = missing;
//% if STREAMS
    pool[3] += missing;
//% else
    pool[0] = now;
    pool[1] += all - missing;
    pool[2] += missing;
//% end
  }
}
