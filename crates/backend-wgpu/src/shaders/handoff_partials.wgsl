// Handoff of partials of attention: sums, [partials, HEADS, DIM / 4], followed by maxima with sums of weights, [partials,
// HEADS]. The merge clears them after reading.
//% provides clear_partial publish_partial sum_at top_at wait_for_partial needs give_up is_there patience without_empty
@coherent @volatile @group(0) @binding(16) var<storage, read_write> handoff_partials: array<vec4<u32>>;

fn sum_at(partial: u32, head: u32) -> u32 {
  return (partial * HEADS + head) * (DIM / 4u);
}

fn top_at(partial: u32, head: u32) -> u32 {
  return MOST_PARTIALS * HEADS * (DIM / 4u) + partial * HEADS + head;
}

fn publish_partial(at: u32, x: vec4<f32>) {
  handoff_partials[at] = without_empty(bitcast<vec4<u32>>(x));
}

//% if AWAITED
fn wait_for_partial(at: u32) -> vec4<f32> {
  for (var n = 0u; n < patience(); n++) {
    let words = handoff_partials[at];
    if (is_there(words)) { return bitcast<vec4<f32>>(words); }
  }
  give_up();
  return vec4<f32>(0.0);
}

fn clear_partial(at: u32) {
  handoff_partials[at] = vec4<u32>(EMPTY);
}
//% end
