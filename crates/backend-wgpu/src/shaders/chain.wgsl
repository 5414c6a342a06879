// Runs one link of a chain of launches without barriers: each workgroup waits for a word of another workgroup of the
// previous launch, and writes the successor of that word. `chain.rs` uses it to test whether a device starts workgroups
// in the order of launches.
@coherent @volatile @group(0) @binding(0) var<storage, read_write> words: array<vec4<u32>>; // [LINKS, WORKGROUPS]
@group(0) @binding(1) var<storage, read_write> lost: array<atomic<u32>>; // number of waits that have timed out

const PATIENCE = 0x40000u;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
  if (thread != 0u) { return; }
  let link = args.first;
  var word = 1u;
  if (link > 0u) {
    // The last workgroup of the previous launch starts last, so the first workgroup of this launch waits for it.
    let at = (link - 1u) * WORKGROUPS + WORKGROUPS - 1u - group.x;
    word = 0u;
    // If the wait of one workgroup has timed out, the others stop waiting.
    for (var n = 0u; n < PATIENCE && word == 0u && (n % 256u != 255u || atomicLoad(&lost[0]) == 0u); n++) {
      word = words[at].x;
    }
    if (word == 0u) { atomicAdd(&lost[0], 1u); }
  }
  words[link * WORKGROUPS + group.x].x = word + 1u;
}
