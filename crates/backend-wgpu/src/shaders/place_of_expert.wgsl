// Finds the weights of an expert: its place in the planes. With POOL, the layer's experts are in slots.
//% provides place_of_expert
//% if POOL
@group(0) @binding(25) var<storage, read> pool: array<u32>; // see place_experts.wgsl

fn place_of_expert(expert: u32) -> u32 {
  if (expert >= COUNT) { return expert; }
  return pool[4u + expert];
}
//% else
fn place_of_expert(expert: u32) -> u32 {
  return expert;
}
//% end
