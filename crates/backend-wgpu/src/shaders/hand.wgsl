// Words that a launch hands to the next one, which starts without a barrier between them: who takes a word asks until it is there. A
// word says so itself, as it is not EMPTY any more; so nothing is assumed of the order in which others see what a workgroup writes, nor
// that the four words of a read are of one write. Reads are of volatile memory, so that each really is one; they are not atomic, as
// four atomic reads of a word take much longer than one of 16 bytes, and keep who writes waiting.
// Workgroups are assumed to start in the order of launches. If they did not, waiting ones could fill the GPU for ever. After some
// tenths of a second they give up, set a flag, and go on with the words that they have; the step is then repeated. The number of
// polls is a constant, so that compilers know the bound of the loop; only tests make it an argument.
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
