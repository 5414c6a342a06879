// Sums the weighted results of a row's experts (CHOSEN), in ascending order of their ids, or takes one result for each row, and
// adds the result of the shared expert.
//% provides sum_of_experts needs result_at
//% if EXPERTS_OF_ROW
//% else
@group(0) @binding(11) var<storage, read> results: array<f32>;      // [places, WIDTH] results of experts, or [rows, WIDTH]
//% end
//% if CHOSEN
@group(0) @binding(12) var<storage, read> weights: array<f32>;      // [rows, USED] weights of experts
//% end
//% if TILED
@group(0) @binding(13) var<storage, read> places: array<u32>;       // [rows, USED] see route_tiles.wgsl
//% end
//% if SHARED_EXPERT
@group(0) @binding(14) var<storage, read> shared_out: array<f32>;   // [rows, WIDTH]
//% end
//% if OUTPUT_GATE
@group(0) @binding(15) var<storage, read> output_gate: array<f32>;  // [rows]
//% end

fn sum_of_experts(row: u32, i: u32) -> f32 {
  var y = 0.0;
//% if SHARED_EXPERT
  y = shared_out[row * WIDTH + i];
//% end
//% if OUTPUT_GATE
  y /= 1.0 + exp(-output_gate[row]);
//% end
//% if CHOSEN
  for (var j = row * USED; j < (row + 1u) * USED; j++) {
//% if TILED
    let place = places[j];
//% else
    let place = j;
//% end
//% if EXPERTS_OF_ROW
    y = fma(weights[j], result_at(place, i), y);
//% else
    y = fma(weights[j], results[place * WIDTH + i], y);
//% end
  }
//% else
  y += results[row * WIDTH + i];
//% end
  return y;
}
