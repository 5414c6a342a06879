// Computes the output of the convolution of convolution.wgsl for a row and a channel.
//% provides convolve needs Sequence input_of kept_at
@group(0) @binding(2) var<storage, read> inputs: array<f32>;    // [states, KEPT, CHANNELS]
@group(0) @binding(3) var<storage, read> taps: array<f32>;      // [TAPS, CHANNELS]
//% if CONV_BIAS
@group(0) @binding(4) var<storage, read> conv_bias: array<f32>; // [CHANNELS]
//% end

fn convolve(row: u32, c: u32, own: Sequence) -> f32 {
//% if CONV_BIAS
  var sum = conv_bias[c];
//% else
  var sum = 0.0;
//% end
//% if KEPT
  let here = row - own.first_row;
  let position = own.start + here;
  for (var back = min(TAPS - 1u, position); back > 0u; back--) {
    var x = 0.0;
    if (back <= here) { x = input_of(row - back, c); } else { x = inputs[kept_at(own.read, position - back, c)]; }
    sum = fma(taps[(TAPS - 1u - back) * CHANNELS + c], x, sum);
  }
//% end
  return fma(taps[(TAPS - 1u) * CHANNELS + c], input_of(row, c), sum);
}
