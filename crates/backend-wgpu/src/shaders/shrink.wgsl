// Products of rows with A of adapters (LoRA), multiplied by the scale of their use. An item is a use of an adapter with some of
// its rows: words of `adapted`, which `low_rank.rs` describes. OUTPUTS of an item are the ranks of all matrices of the matmul.
//% provides begin_item load_block padded_ranks store needs Block half_quad publish
@group(0) @binding(24) var<storage, read> adapted: array<u32>;
//% if LOW_HALVES
// [16-row tiles of uses, OUTPUTS / 16, 16, 16], in the order of activations in half precision. Rows of others are zero.
@group(0) @binding(5) var<storage, read_write> low_halves: array<f16>;
//% else
//% if HANDS_LOW
//% else
@group(0) @binding(5) var<storage, read_write> low: array<f32>; // [rows of uses, OUTPUTS]
//% end
//% end
var<private> OUTPUTS: u32;
var<private> use_at: u32;
var<private> first_row: u32; // of A

// Returns the first row of an item and the first row of A, and sets the variables.
fn begin_item(index: u32) -> vec2<u32> {
  let at = adapted[ITEMS] + 2u * index;
  use_at = adapted[2] + 8u * adapted[at];
  OUTPUTS = MATRICES * adapted[use_at + 3u];
  first_row = MATRICES * adapted[use_at + 2u];
  return vec2<u32>(adapted[at + 1u], first_row);
}

// Loads a block of A, of which a row of halves takes half of the room.
fn load_block(row: u32, block: u32) -> Block {
  if (adapted[use_at + 7u] != 0u) {
    let at = (8u * first_row + 4u * (row - first_row)) * BLOCKS + block;
//% for j in 0..4
    let w_${j} = bitcast<vec4<u32>>(w_quants[at + ${j}u * BLOCKS]);
//% end
    return Block(
//% for j in 0..4
      half_quad(w_${j}.x, w_${j}.y), half_quad(w_${j}.z, w_${j}.w),
//% end
    );
  }
  let at = row * 8u * BLOCKS + block;
  return Block(
//% for j in 0..8
    w_quants[at + ${j}u * BLOCKS],
//% end
  );
}

// Returns OUTPUTS with those that fill the last matrix.
fn padded_ranks() -> u32 {
  return (OUTPUTS + 15u) / 16u * 16u;
}

fn store(row: u32, output: u32, product: f32, factor: f32) {
  let first = adapted[use_at];
  let is_own = row >= first && row < adapted[use_at + 1u];
  let value = product * factor * bitcast<f32>(adapted[use_at + 6u]);
//% if LOW_HALVES
  let tile = MATRICES * (adapted[use_at + 5u] + (row / 16u - first / 16u) * ((adapted[use_at + 3u] + 15u) / 16u));
  // Elements of a quad are in the order 0, 2, 1, 3.
  let place = output % 16u / 4u * 4u + (output % 2u) * 2u + output % 4u / 2u;
  let at = (tile + output / 16u) * 256u + row % 16u * 16u + place;
  low_halves[at] = f16(select(0.0, clamp(value * 0.125, -65504.0, 65504.0), is_own && output < OUTPUTS));
//% else
  let at = MATRICES * adapted[use_at + 4u] + (row - first) * OUTPUTS + output;
  if (!is_own) { return; }
//% if HANDS_LOW
  publish(LOW_AT + at, bitcast<u32>(value));
//% else
  low[at] = value;
//% end
//% end
}
