// Computes the factor of a row's norm from the sums of squares of its blocks. Lane l of 32 adds blocks l, l + 32, ...
// in order, and then the lanes are added in order.
//% provides add_squares row_scale needs squares_of
var<workgroup> lane_squares: array<vec4<f32>, 8>;

// Adds the blocks of each lane. A barrier must follow before `row_scale`. A thread has four lanes, because a write to a
// component of a vector may write the whole vector.
fn add_squares(tid: u32) {
  if (tid < 8u) {
    var sums = vec4<f32>();
    for (var four = tid; four < SQUARES; four += 8u) { sums += squares_of(four); }
    lane_squares[tid] = sums;
  }
}

fn row_scale() -> f32 {
  var all = 0.0;
//% for i in 0..8
  let four_${i} = lane_squares[${i}];
  all = all + four_${i}.x + four_${i}.y + four_${i}.z + four_${i}.w;
//% end
  return 1.0 / sqrt(fma(all, INVERSE_WIDTH, EPS));
}
