// Activations in eight bits: a block of 32 as quants and a scale, with the sums of both halves of the quants.
struct Quantized { lo: vec4<u32>, hi: vec4<u32>, scale: f32, sums: u32 }

fn quantized(v: array<vec4<f32>, 8>) -> Quantized {
  var most = vec4<f32>(0.0);
//% for j in 0..8
  most = max(most, abs(v[${j}]));
//% end
  let largest = max(max(most.x, most.y), max(most.z, most.w));
  let inverse = select(0.0, 127.0 / largest, largest > 1.0e-30);
//% for j in 0..8
  let q_${j} = pack4xI8(vec4<i32>(round(v[${j}] * inverse)));
//% end
  let ones = 0x01010101u;
  let low = dot4I8Packed(q_0, ones) + dot4I8Packed(q_1, ones) + dot4I8Packed(q_2, ones) + dot4I8Packed(q_3, ones);
  let high = dot4I8Packed(q_4, ones) + dot4I8Packed(q_5, ones) + dot4I8Packed(q_6, ones) + dot4I8Packed(q_7, ones);
  let sums = (u32(low) & 0xffffu) | (u32(high) << 16u);
  return Quantized(vec4<u32>(q_0, q_1, q_2, q_3), vec4<u32>(q_4, q_5, q_6, q_7), largest * (1.0 / 127.0), sums);
}
