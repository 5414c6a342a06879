// Transforms heads for quantized pages, in place, as `hadamard` of crates/backend defines it. `heads` heads of HEAD
// elements are APART elements apart. The kernel defines `number_at` and `put_number` to read and write them. All `threads` of a
// workgroup call it after a barrier, and it ends with a barrier.
//% provides hadamard needs number_at put_number

const SPAN = (HEAD + 63u) / 64u * 64u;

// Returns the length of the part of a head that has element `i`.
fn part_length(i: u32) -> u32 {
  var end = HEAD / 64u * 64u;
  if (i < end) { return 64u; }
  for (var length = 32u; length > 1u; length /= 2u) {
    if ((HEAD & length) != 0u) {
      end += length;
      if (i < end) { return length; }
    }
  }
  return 1u;
}

// Returns 1 / sqrt(length).
fn part_norm(length: u32) -> f32 {
  let log = firstLeadingBit(length);
  return select(1.0, 0.70710678118654752, log % 2u == 1u) / f32(1u << (log / 2u));
}

fn hadamard(tid: u32, threads: u32, heads: u32) {
  for (var distance = 1u; distance < 64u; distance *= 2u) {
    for (var pair = tid; pair < heads * SPAN / 2u; pair += threads) {
      let in_head = pair % (SPAN / 2u);
      let low = in_head / distance * 2u * distance + in_head % distance;
      if (low < HEAD && part_length(low) > distance) {
        let at = pair / (SPAN / 2u) * APART + low;
        let a = number_at(at);
        let b = number_at(at + distance);
        put_number(at, a + b);
        put_number(at + distance, a - b);
      }
    }
    workgroupBarrier();
  }
  for (var i = tid; i < heads * SPAN; i += threads) {
    if (i % SPAN < HEAD) {
      let at = i / SPAN * APART + i % SPAN;
      put_number(at, number_at(at) * part_norm(part_length(i % SPAN)));
    }
  }
  workgroupBarrier();
}
