// Words that a launch hands to the next one, which starts without a barrier between them: who takes a word asks until it is there. A
// word says so itself, as it is not EMPTY any more; so nothing is assumed of the order in which others see what a workgroup writes, nor
// that the four words of a read are of one write. Reads are of volatile memory, so that each really is one; they are not atomic, as
// four atomic reads of a word take much longer than one of 16 bytes, and keep who writes waiting.
// What is assumed is that workgroups start in the order of launches: a GPU full of such that wait would wait for ever. After
// some tenths of a second they give up, say so, and go on with what is there; the step is then repeated. How many polls that takes is a
// constant, but for tests: as a value it makes a step of one row 8 % slower on an H100.
fn patience() -> u32 {
//% if STARVABLE
  return args.patience;
//% else
  return 0x40000u;
//% end
}

// A float that looks like EMPTY becomes its neighbour.
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
