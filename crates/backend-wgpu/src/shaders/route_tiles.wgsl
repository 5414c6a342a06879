// Groups the rows of a step by expert: places [rows, USED], sources [tiles * TILE], tile_experts [tiles]. A pair is a
// row and one of its experts. The pairs of an expert get consecutive places, in tiles of TILE places with one expert
// each. The order of an expert's pairs does not affect results, because each pair has its own sums. One workgroup
// computes all.
@group(0) @binding(0) var<storage, read> chosen: array<u32>;             // [rows, USED] experts of each row
@group(0) @binding(1) var<storage, read_write> places: array<u32>;       // [rows, USED] place of each pair
@group(0) @binding(2) var<storage, read_write> sources: array<u32>;      // [tiles * TILE] row of each place, or 0
@group(0) @binding(3) var<storage, read_write> tile_experts: array<u32>; // [tiles] expert of each tile, or NO_EXPERT

var<workgroup> counts: array<atomic<u32>, COUNT>;
var<workgroup> firsts: array<u32, COUNT>; // first tile of each expert

@compute @workgroup_size(256)
fn main(@builtin(local_invocation_index) tid: u32) {
  let pairs = args.rows * USED;
  let tiles = pairs / TILE + min(COUNT, pairs);
  for (var e = tid; e < COUNT; e += 256u) { atomicStore(&counts[e], 0u); }
  for (var i = tid; i < tiles; i += 256u) { tile_experts[i] = NO_EXPERT; }
  for (var i = tid; i < tiles * TILE; i += 256u) { sources[i] = 0u; }
  storageBarrier();
  workgroupBarrier();
  for (var pair = tid; pair < pairs; pair += 256u) { atomicAdd(&counts[chosen[pair]], 1u); }
  workgroupBarrier();
  if (tid == 0u) {
    var next = 0u;
    for (var e = 0u; e < COUNT; e++) {
      firsts[e] = next;
      next += (atomicLoad(&counts[e]) + TILE - 1u) / TILE;
    }
  }
  workgroupBarrier();
  for (var e = tid; e < COUNT; e += 256u) {
    let own = (atomicLoad(&counts[e]) + TILE - 1u) / TILE;
    for (var i = 0u; i < own; i++) { tile_experts[firsts[e] + i] = e; }
    atomicStore(&counts[e], 0u);
  }
  workgroupBarrier();
  for (var pair = tid; pair < pairs; pair += 256u) {
    let e = chosen[pair];
    let place = firsts[e] * TILE + atomicAdd(&counts[e], 1u);
    places[pair] = place;
    sources[place] = pair / USED;
  }
}
