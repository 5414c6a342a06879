// Biases of scores by the distance of query and key.
//% provides distance_bias
@group(0) @binding(27) var<storage, read> biases: array<f32>; // [HEADS, 2 REACH + 1]

// Returns the bias of a head, for exponents of two. Tokens beyond the last one are as far as the table reaches.
fn distance_bias(head: u32, position: u32, token: u32) -> f32 {
  let distance = min(i32(token) - i32(position), i32(REACH));
  return biases[head * (2u * REACH + 1u) + u32(distance + i32(REACH))] * 1.4426950408889634;
}
