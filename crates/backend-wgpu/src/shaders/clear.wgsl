//% if CLEARED
// Words that launches hand over (hand.wgsl), of a layer to come: EMPTY until they are there. A barrier keeps them from who still takes
// what was there.
@group(0) @binding(19) var<storage, read_write> cleared: array<vec4<u32>>; // [CLEARED]

// Empties them by so many threads, of which this is one.
fn clear(thread: u32, threads: u32) {
  for (var i = thread; i < CLEARED; i += threads) { cleared[i] = vec4<u32>(EMPTY); }
}
//% end
