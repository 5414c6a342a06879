// Reads and writes single words of the handoff (handoff.wgsl).
//% provides peek publish wait_for wait_for_some needs give_up patience
@coherent @volatile @group(0) @binding(17) var<storage, read_write> handoff: array<vec4<u32>>;

// Writes a word. In SPIR-V, to which these kernels are translated, this writes no other word of the vector.
fn publish(at: u32, word: u32) {
  handoff[at / 4u][at % 4u] = select(word, EMPTY + 1u, word == EMPTY);
}

fn peek(at: u32) -> u32 {
  return handoff[at / 4u][at % 4u];
}

//% if AWAIT_ROUNDS
fn wait_for(at: u32) -> u32 {
  for (var n = 0u; n < patience(); n++) {
    let word = peek(at);
    if (word != EMPTY) { return word; }
  }
  give_up();
  return 0u;
}

// Waits for 32 words, which differ between workgroups. If all workgroups polled all words, polling would delay the
// writers.
fn wait_for_some(group: u32, tid: u32) {
  if (tid < 32u) { let word = wait_for(AWAIT_AT + (group * 32u + tid) % AWAITED); }
  workgroupBarrier();
}
//% end
