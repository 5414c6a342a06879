// Stores V in pages whose words have two tokens of a dimension. Different workgroups write the two halves of a word.
//% provides put_v needs finite nearest_half
enable f16;
//% if HAS_V
@group(0) @binding(10) var<storage, read_write> v_pages: array<f16>; // see pages.rs

fn put_v(token_offset: u32, kv_head: u32, d: u32, x: vec2<f32>) {
  let head = 2u * (token_offset / PAGE * PAGE_WORDS + LAYER_SLOT_AT) + kv_head * PAGE * DIM;
  let at = head + (token_offset % PAGE / 16u * DIM + d) * 16u + token_offset % 16u;
  v_pages[at] = f16(nearest_half(finite(x.x, 65504.0)));
  v_pages[at + 16u] = f16(nearest_half(finite(x.y, 65504.0)));
}
//% end
