// Handoff of words to a launch that starts without a barrier. The reader polls each word until it is not EMPTY. Each
// word shows by itself whether it is written. So the handoff assumes no order of visibility, and not that the four
// words of a read were written together. Reads are volatile, so that each accesses memory. They are not atomic, because
// four atomic reads of a word take much longer than one read of 16 bytes and delay the writer.
//
// Workgroups must start in the order of launches. Otherwise, waiting workgroups could occupy the GPU forever. So a wait
// times out after some tenths of a second. The workgroup then sets a flag and continues with the words that it has, and
// the host repeats the step. The number of polls is a constant, so that compilers know the bound of the loop; in tests
// it is an argument.
//% provides give_up is_there patience without_empty
fn patience() -> u32 {
//% if STARVABLE
  return args.patience;
//% else
  return 0x40000u;
//% end
}

// Replaces words that equal EMPTY by the next larger word.
fn without_empty(words: vec4<u32>) -> vec4<u32> {
  return select(words, vec4<u32>(EMPTY + 1u), words == vec4<u32>(EMPTY));
}

fn is_there(words: vec4<u32>) -> bool {
  return all(words != vec4<u32>(EMPTY));
}

//% if GIVES_UP
@group(0) @binding(18) var<storage, read_write> gave_up: array<atomic<u32>>; // its last word is the flag

fn give_up() {
  atomicStore(&gave_up[arrayLength(&gave_up) - 1u], 1u);
}
//% end
