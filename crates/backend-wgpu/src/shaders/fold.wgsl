// Adds partials of a softmax. They are relative to integer powers of two, so rescaling them is exact, and a sum does
// not depend on the division into partials.
//% provides join power_of_two Sum
const NOTHING = -1.0e30; // the maximum of no scores

// Returns 2^n for an integer n <= 0.
fn power_of_two(n: f32) -> f32 {
  return select(0.0, bitcast<f32>(u32(i32(max(n, -126.0)) + 127) << 23u), n >= -126.0);
}

// Sum of splits, relative to 2^top.
struct Sum {
  sum: vec4<f32>,
  top: f32,
}

fn join(a: Sum, b: Sum) -> Sum {
  let top = max(a.top, b.top);
  return Sum(fma(a.sum, vec4<f32>(power_of_two(a.top - top)), b.sum * power_of_two(b.top - top)), top);
}
