// Reads the sequences of a step and the slots of their states.
//% provides sequence_at sequence_of Sequence
@group(0) @binding(0) var<storage, read> step: array<u32>; // words of the step, see args.wgsl

struct Sequence {
  first_row: u32,
  rows: u32,
  start: u32, // position of the first row
  read: u32,  // slot of the state before these rows; not used at position 0
  write: u32, // slot of the state after them
}

fn sequence_at(index: u32) -> Sequence {
  let at = args.sequences + args.rows + 5u * index;
  return Sequence(step[at], step[at + 1u], step[at + 2u], step[at + 3u], step[at + 4u]);
}

fn sequence_of(row: u32) -> Sequence {
  return sequence_at(step[args.sequences + row]);
}
