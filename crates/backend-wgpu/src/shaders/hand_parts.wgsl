// Handoff of partials of attention: sums, [parts, HEADS, DIM / 4], followed by maxima with sums of weights, [parts,
// HEADS]. The merge clears them after reading.
@coherent @volatile @group(0) @binding(16) var<storage, read_write> parts_handed: array<vec4<u32>>;

fn sum_at(part: u32, head: u32) -> u32 {
  return (part * HEADS + head) * (DIM / 4u);
}

fn top_at(part: u32, head: u32) -> u32 {
  return MOST_PARTS * HEADS * (DIM / 4u) + part * HEADS + head;
}

fn give_part(at: u32, x: vec4<f32>) {
  parts_handed[at] = handed(bitcast<vec4<u32>>(x));
}

//% if TAKES
fn take_part(at: u32) -> vec4<f32> {
  for (var n = 0u; n < patience(); n++) {
    let words = parts_handed[at];
    if (is_there(words)) { return bitcast<vec4<f32>>(words); }
  }
  give_up();
  return vec4<f32>(0.0);
}

fn empty_part(at: u32) {
  parts_handed[at] = vec4<u32>(EMPTY);
}
//% end
