// Reads and writes single words of the handoff (hand.wgsl).
@coherent @volatile @group(0) @binding(17) var<storage, read_write> hands: array<vec4<u32>>;

// Writes a word. In SPIR-V, to which these kernels are translated, this writes no other word of the vector.
fn give(at: u32, word: u32) {
  hands[at / 4u][at % 4u] = select(word, EMPTY + 1u, word == EMPTY);
}

fn look(at: u32) -> u32 {
  return hands[at / 4u][at % 4u];
}

//% if TAKE_ROUNDS
fn take(at: u32) -> u32 {
  for (var n = 0u; n < patience(); n++) {
    let word = look(at);
    if (word != EMPTY) { return word; }
  }
  give_up();
  return 0u;
}

// Waits for 32 words, which differ between workgroups. If all workgroups polled all words, polling would delay the
// writers.
fn wait_for_some(group: u32, tid: u32) {
  if (tid < 32u) { let word = take(TAKE_AT + (group * 32u + tid) % TAKES); }
  workgroupBarrier();
}
//% end
