// Arguments of a dispatch. `tokens` to `outputs`, and `row_table`, are offsets into the step's words.
struct Args {
  rows: u32,      // rows of this dispatch
  first: u32,     // its first output row, where outputs come in slices
  tokens: u32,    // [rows] token of each row
  positions: u32, // [rows] position of each row
  slots: u32,     // [groups, rows] where K and V of each row go: page * PAGE + position % PAGE
  items: u32,     // [items, 8] what attention has to do
  parts: u32,     // [rows, 4] first partial result of each row, how many there are, number of the first, their splits
  outputs: u32,   // [outputs] row of each output
  sequences: u32, // [rows] sequence of each row, and [sequences, 5]: see sequences.wgsl
  whole: u32,     // whether attention leaves no row's result in parts
  // Work of attention in a step of one row:
  row_position: u32, // its position
  row_table: u32,    // its block table
  row_from: u32,     // its first split
  row_to: u32,       // where its splits end
  row_length: u32,   // of how many splits its parts are; 0 in a step of more rows
  patience: u32,     // polls after which a kernel gives up waiting for what another one hands over
//% for i in 0..ARGUMENTS
  constant_${i}: u32,
//% end
}
var<immediate> args: Args;
