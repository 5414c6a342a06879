// Convolution over the rows of a sequence, separate for each channel. A state holds the last KEPT inputs: that of
// position p in row p % KEPT.
@group(0) @binding(1) var<storage, read> mixed: array<f32>;     // [rows, MIXED_STRIDE]

fn input_of(row: u32, c: u32) -> f32 {
  let at = row * MIXED_STRIDE + c;
//% if SHORT
  // b, c, u
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
