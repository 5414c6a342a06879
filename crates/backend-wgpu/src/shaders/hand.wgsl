// Words that a launch hands to the next one, which starts without a barrier between them: who takes a word asks until it is there. A
// word says so itself, as it is not EMPTY any more; so nothing is assumed of the order in which others see what a workgroup writes.
// What is assumed is that workgroups start in the order of launches: a GPU full of such that wait would wait for ever. After some tenths
// of a second they give up, say so, and go on with what is there.
const PATIENCE = 0x40000u;
@group(0) @binding(17) var<storage, read_write> hands: array<atomic<u32>>;

fn give(at: u32, word: u32) {
  // A float that looks like EMPTY becomes its neighbour.
  atomicStore(&hands[at], select(word, EMPTY + 1u, word == EMPTY));
}

//% if TAKES
@group(0) @binding(18) var<storage, read_write> gave_up: array<atomic<u32>>; // the last one

fn give_up() {
  atomicStore(&gave_up[arrayLength(&gave_up) - 1u], 1u);
}

fn take(at: u32) -> u32 {
  for (var n = 0u; n < PATIENCE; n++) {
    let word = atomicLoad(&hands[at]);
    if (word != EMPTY) { return word; }
  }
  give_up();
  return 0u;
}

//% if MANY_TAKE
// Waits for 32 words, others in each workgroup. If all asked for all of them all the time, those who write them would have to wait.
fn wait_for_some(group: u32, tid: u32) {
  if (tid < 32u) { let is_there = take(TAKE_AT + (group * 32u + tid) % TAKES); }
  workgroupBarrier();
}
//% end
//% end
