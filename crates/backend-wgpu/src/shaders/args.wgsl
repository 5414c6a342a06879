// What differs from dispatch to dispatch. All but `rows`, `first` and `whole` are offsets into the step's words.
struct Args {
  rows: u32,      // rows of this dispatch
  first: u32,     // its first output row, where outputs come in slices
  tokens: u32,    // [rows] token of each row
  positions: u32, // [rows] position of each row
  slots: u32,     // [groups, rows] where K and V of each row go: page * PAGE + position % PAGE
  items: u32,     // [items, 8] what attention has to do
  parts: u32,     // [rows, 4] first partial result of each row, how many there are, number of the first, their splits
  outputs: u32,   // [outputs] row of each output
  whole: u32,     // no offset: whether attention leaves no row's result in parts
//% for i in 0..ARGUMENTS
  constant_${i}: u32,
//% end
}
var<immediate> args: Args;
