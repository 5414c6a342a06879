// Writes and reads quads of `scores`, which pass between matrices and threads. If matrices have a side of 8, `scores`
// has single numbers.
//% provides stage staged
fn stage(at: u32, x: vec4<f32>) {
//% if SIDE_8
//% for i in 0..4
  scores[4u * at + ${i}u] = x[${i}];
//% end
//% else
  scores[at] = x;
//% end
}

fn staged(at: u32) -> vec4<f32> {
//% if SIDE_8
  return vec4<f32>(scores[4u * at], scores[4u * at + 1u], scores[4u * at + 2u], scores[4u * at + 3u]);
//% else
  return scores[at];
//% end
}
