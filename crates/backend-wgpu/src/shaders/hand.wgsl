// Handoff of words to a launch that starts without a barrier. The reader polls each word until it is not EMPTY. Since
// every word shows by itself whether it is written, no order of visibility is assumed, nor that the four words of a
// read were written together. Reads are volatile, so that each accesses memory. They are not atomic, because four
// atomic reads of a word take much longer than one of 16 bytes and delay the writer.
//
// Workgroups are assumed to start in the order of launches. If they did not, waiting ones could occupy the GPU for
// ever. After some tenths of a second they give up, set a flag, and continue with the words that they have; the host
// then repeats the step. The number of polls is a constant, so that compilers know the bound of the loop; only tests
// make it an argument.
fn patience() -> u32 {
//% if STARVABLE
  return args.patience;
//% else
  return 0x40000u;
//% end
}

// Replaces a float that equals EMPTY by its neighbour.
fn handed(words: vec4<u32>) -> vec4<u32> {
  return select(words, vec4<u32>(EMPTY + 1u), words == vec4<u32>(EMPTY));
}

fn is_there(words: vec4<u32>) -> bool {
  return all(words != vec4<u32>(EMPTY));
}

//% if TAKES
@group(0) @binding(18) var<storage, read_write> gave_up: array<atomic<u32>>; // the last one

fn give_up() {
  atomicStore(&gave_up[arrayLength(&gave_up) - 1u], 1u);
}
//% end
