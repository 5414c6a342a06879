// Products of rows with A of adapters (LoRA), multiplied by the scale of their use. An item is a use of an adapter with some of
// its rows: words of `adapted`, which `low_rank.rs` describes. OUTPUTS of an item are the ranks of all matrices of the matmul.
//% provides begin_item clear_next load_block padded_ranks store needs Block half_quad publish
@group(0) @binding(24) var<storage, read> adapted: array<u32>;
//% if LOW_HALVES
// [16-row tiles of uses, OUTPUTS / 16, 16, 16], in the order of activations in half precision. Rows of others are zero.
@group(0) @binding(5) var<storage, read_write> low_halves: array<f16>;
//% else
//% if HANDS_LOW
//% else
@group(0) @binding(5) var<storage, read_write> low: array<f32>; // [rows of uses, OUTPUTS]
//% end
//% if HANDS_NEXT
// The products of the next matmul, which this launch clears.
@group(0) @binding(6) var<storage, read_write> next: array<vec4<u32>>;
// Output of the matmul, which runs beside this launch, for wgpu's barriers.
@group(0) @binding(7) var<storage, read_write> out: array<f32>;
//% end
//% end
struct Item {
  first: u32, // row of the use
  end: u32,   // of its rows
  unit: u32,
  ranks: u32,
  low: u32,
  tiles: u32,
  scale: f32,
  is_half: bool,
}
var<private> OUTPUTS: u32;
var<private> own: Item;
var<private> first_row: u32; // of A

//% if HANDS_NEXT
// Clears the words of the item's rows. A matmul has OUTPUTS of a row, and at most MOST_MATRICES times the ranks.
fn clear_next(tid: u32, rows: u32, first: u32) {
  let count = MOST_MATRICES * own.ranks / 4u;
  let from_ = MOST_MATRICES * own.low / 4u + (first - own.first) * count;
  let end = from_ + min(rows, own.end - first) * count;
  for (var i = from_ + tid; i < end; i += THREADS) { next[i] = vec4<u32>(EMPTY); }
}
//% end

// Returns the first row of an item and the first row of A, and sets the variables. The words of an item are at a place that
// depends on arguments only, so that all are loaded at once.
fn begin_item(index: u32) -> vec2<u32> {
//% if WIDE_ITEMS
  let at = adapted[2] + 12u * index;
//% else
  let at = ROWS_AT + 8u * args.rows + 12u * index;
//% end
//% for i in 0..9
  let word_${i} = adapted[at + ${i}u];
//% end
  own = Item(word_0, word_1, word_2, word_3, word_4, word_5, bitcast<f32>(word_6), word_7 != 0u);
  OUTPUTS = MATRICES * own.ranks;
  first_row = MATRICES * own.unit;
  return vec2<u32>(word_8, first_row);
}

// Loads a block of A, of which a row of halves takes half of the room.
fn load_block(row: u32, block: u32) -> Block {
  if (own.is_half) {
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
  let is_own = row >= own.first && row < own.end;
  let value = product * factor * own.scale;
//% if LOW_HALVES
  let tile = MATRICES * (own.tiles + (row / 16u - own.first / 16u) * ((own.ranks + 15u) / 16u));
  // Elements of a quad are in the order 0, 2, 1, 3.
  let place = output % 16u / 4u * 4u + (output % 2u) * 2u + output % 4u / 2u;
  let at = (tile + output / 16u) * 256u + row % 16u * 16u + place;
  low_halves[at] = f16(select(0.0, clamp(value * 0.125, -65504.0, 65504.0), is_own && output < OUTPUTS));
//% else
  let at = MATRICES * own.low + (row - own.first) * OUTPUTS + output;
  if (!is_own) { return; }
//% if HANDS_LOW
  // See `change.wgsl`.
  publish(LOW_AT + at / 4u * 4u * LOW_STRIDE + at % 4u, bitcast<u32>(value));
//% else
  low[at] = value;
//% end
//% end
}
