//% if CLEARED
// Words of the handoff (hand.wgsl) of a later layer, set to EMPTY before they are written. A barrier separates them
// from readers of the previous values.
@group(0) @binding(19) var<storage, read_write> cleared: array<vec4<u32>>; // [CLEARED]

// Clears them with `threads` threads, of which this is number `thread`.
fn clear(thread: u32, threads: u32) {
  for (var i = thread; i < CLEARED; i += threads) { cleared[i] = vec4<u32>(EMPTY); }
}
//% end
