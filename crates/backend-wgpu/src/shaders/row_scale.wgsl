// What a norm multiplies a row with, from the sums of squares of its blocks: 32 lanes add up blocks l, l + 32, ... in order, and then
// the lanes are added up in order.
var<workgroup> lane_squares: array<f32, 32>;

fn row_scale(tid: u32) -> f32 {
  if (tid < 32u) {
    var sum = 0.0;
    for (var block = tid; block < NORM_BLOCKS; block += 32u) { sum += squares_of(block); }
    lane_squares[tid] = sum;
  }
  workgroupBarrier();
  var all = 0.0;
  for (var lane = 0u; lane < 32u; lane++) { all += lane_squares[lane]; }
  return 1.0 / sqrt(fma(all, INVERSE_WIDTH, EPS));
}
