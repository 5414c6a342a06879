// What launches hand over (hand.wgsl) is this until it is there.
const EMPTY = 0x80808080u; // no four quants: they are -127 to 127
//% if CLEARED
// Words of a layer to come, which a barrier keeps from who still takes what was there.
@group(0) @binding(19) var<storage, read_write> cleared: array<vec4<u32>>; // [CLEARED]

// Empties them by so many threads, of which this is one.
fn clear(thread: u32, threads: u32) {
  for (var i = thread; i < CLEARED; i += threads) { cleared[i] = vec4<u32>(EMPTY); }
}
//% end
