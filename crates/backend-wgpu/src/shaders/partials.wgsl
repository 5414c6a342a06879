// Partials of attention of a row.
//% provides partials_of
struct Partials {
  first: u32,  // index of the first partial
  count: u32,
  number: u32, // number of the first partial, in order of position
  length: u32, // splits of a partial
}

// Returns the partials of a row. In a step of one row, they are derived from the arguments.
fn partials_of(row: u32) -> Partials {
  let length = args.row_length;
  if (length != 0u) {
    let number = args.row_from / length;
    return Partials(0u, (args.row_to - 1u) / length + 1u - number, number, length);
  }
  let at = args.partials + 4u * row;
  return Partials(step[at], step[at + 1u], step[at + 2u], step[at + 3u]);
}
