//% provides clear
//% if CLEARED
// Sets the words of the handoff (handoff.wgsl) of a later layer to EMPTY, before they are written. A barrier separates
// this from readers of the previous values.
@group(0) @binding(19) var<storage, read_write> cleared: array<vec4<u32>>;

// Clears the words with `threads` threads, of which this is number `thread`.
fn clear(thread: u32, threads: u32) {
  for (var i = thread; i < arrayLength(&cleared); i += threads) { cleared[i] = vec4<u32>(EMPTY); }
}
//% end
