// Inputs of a convolution over the rows of a sequence, separate for each channel. A state has the last KEPT inputs,
// [KEPT, CHANNELS]; the input of position p is in row p % KEPT.
//% provides input_of kept_at
@group(0) @binding(1) var<storage, read> mixed: array<f32>;     // [rows, MIXED_STRIDE]

fn input_of(row: u32, c: u32) -> f32 {
  let at = row * MIXED_STRIDE + c;
//% if SHORT
  // A row has b, c and u, [3, CHANNELS].
  return mixed[at] * mixed[at + 2u * CHANNELS];
//% else
  return mixed[at];
//% end
}

//% if KEPT
fn kept_at(state: u32, position: u32, c: u32) -> u32 {
  return (state * KEPT + position % KEPT) * CHANNELS + c;
}
//% end
