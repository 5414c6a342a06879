// Empties hands (hand.wgsl) for a layer to come, which a barrier keeps from who still takes words from them.
//% if CLEARED
@group(0) @binding(19) var<storage, read_write> cleared: array<vec4<u32>>; // [CLEARED]

// By so many threads, of which this is one.
fn clear(thread: u32, threads: u32) {
  for (var i = thread; i < CLEARED; i += threads) { cleared[i] = vec4<u32>(0x80808080u); }
}
//% end
