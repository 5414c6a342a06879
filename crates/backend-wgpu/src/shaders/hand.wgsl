// Words that a launch hands to the next one, which starts without a barrier between them: who takes a word asks until it is there. A
// word says so itself, as it is not EMPTY any more; so nothing is assumed of the order in which others see what a workgroup writes, nor
// that the four words of a read are of one write. Reads are of volatile memory, so that each really is one; they are not atomic, as
// four atomic reads of a word take much longer than one of 16 bytes, and keep who writes waiting.
// What is assumed is that workgroups start in the order of launches: a GPU full of such that wait would wait for ever. After some tenths
// of a second they give up, say so, and go on with what is there.
const PATIENCE = 0x40000u;
@coherent @volatile @group(0) @binding(17) var<storage, read_write> hands: array<vec4<u32>>;

// A float that looks like EMPTY becomes its neighbour.
fn handed(words: vec4<u32>) -> vec4<u32> {
  return select(words, vec4<u32>(EMPTY + 1u), words == vec4<u32>(EMPTY));
}

// In SPIR-V, to which these kernels are translated, this writes one word only.
fn give(at: u32, word: u32) {
  hands[at / 4u][at % 4u] = select(word, EMPTY + 1u, word == EMPTY);
}

fn look(at: u32) -> u32 {
  return hands[at / 4u][at % 4u];
}

fn is_there(words: vec4<u32>) -> bool {
  return all(words != vec4<u32>(EMPTY));
}

//% if HANDS_PARTS
// Parts of attention's results, which the merge empties when it has taken them: sums, [parts, HEADS, DIM / 4], and behind them, [parts,
// HEADS], maxima with sums of weights.
@coherent @volatile @group(0) @binding(16) var<storage, read_write> parts_handed: array<vec4<u32>>;

fn sum_at(part: u32, head: u32) -> u32 {
  return (part * HEADS + head) * (DIM / 4u);
}

fn top_at(part: u32, head: u32) -> u32 {
  return MOST_PARTS * HEADS * (DIM / 4u) + part * HEADS + head;
}

fn give_part(at: u32, x: vec4<f32>) {
  parts_handed[at] = handed(bitcast<vec4<u32>>(x));
}
//% end

//% if TAKES
@group(0) @binding(18) var<storage, read_write> gave_up: array<atomic<u32>>; // the last one

fn give_up() {
  atomicStore(&gave_up[arrayLength(&gave_up) - 1u], 1u);
}

fn take(at: u32) -> u32 {
  for (var n = 0u; n < PATIENCE; n++) {
    let word = look(at);
    if (word != EMPTY) { return word; }
  }
  give_up();
  return 0u;
}

//% if HANDS_PARTS
fn take_part(at: u32) -> vec4<f32> {
  for (var n = 0u; n < PATIENCE; n++) {
    let words = parts_handed[at];
    if (is_there(words)) { return bitcast<vec4<f32>>(words); }
  }
  give_up();
  return vec4<f32>(0.0);
}

fn empty_part(at: u32) {
  parts_handed[at] = vec4<u32>(EMPTY);
}
//% end

//% if TAKE_ROUNDS
// Waits for 32 words, others in each workgroup. If all asked for all of them all the time, those who write them would have to wait.
fn wait_for_some(group: u32, tid: u32) {
  if (tid < 32u) { let word = take(TAKE_AT + (group * 32u + tid) % TAKES); }
  workgroupBarrier();
}
//% end
//% end
