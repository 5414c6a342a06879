// Arguments of a dispatch. `tokens` to `sequences`, and `row_table`, are offsets into the step's words.
struct Args {
  rows: u32,      // rows of this dispatch
  first: u32,     // first output row, if the outputs of a step are divided into slices
  tokens: u32,    // [rows] token of each row
  positions: u32, // [rows] position of each row
  token_offsets: u32, // [groups, rows] place of K and V of each row: page * PAGE + position % PAGE
  items: u32,     // [items, 8] work items of attention, see splits.wgsl
  partials: u32,  // [rows, 4] partials of each row, see partials.wgsl
  outputs: u32,   // [outputs] row of each output
  sequences: u32, // [rows] sequence of each row; then [sequences, 5], see sequences.wgsl
  whole: u32,     // 1 if attention leaves no row's result in partials
  // Work of attention in a step of one row.
  row_position: u32, // position of the row
  row_table: u32,    // block table of the row
  row_from: u32,     // first split
  row_to: u32,       // end of the splits
  row_length: u32,   // splits of a partial; 0 in a step of several rows
  patience: u32,     // polls of a handoff before the wait of a kernel times out
  // First use of an adapter by the row of a step of one row, see `low_rank.rs`.
  adapter_unit: u32,  // first unit
  adapter_ranks: u32, // ranks, or 0; bit 30 if there are others; bit 31 for half precision
//% for i in 0..ARGUMENTS
  constant_${i}: u32,
//% end
}
var<immediate> args: Args;
