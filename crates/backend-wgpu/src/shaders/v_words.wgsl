// Stores V in pages whose words have two dimensions of a token.
//% provides put_v needs pack
//% if HAS_V
@group(0) @binding(10) var<storage, read_write> v_pages: array<u32>; // see pages.rs

fn put_v(token_offset: u32, kv_head: u32, d: u32, x: vec2<f32>) {
  let head = token_offset / PAGE * PAGE_WORDS + LAYER_SLOT_AT + kv_head * PAGE * (DIM / 2u);
  v_pages[head + token_offset % PAGE * (DIM / 2u) + d / 2u] = pack(x);
}
//% end
