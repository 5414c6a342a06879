// What attention's kernels know of splits, and of the parts that results are made in.
const NO_PART = 0xffffffffu;

// Splits are fine up to a position, so that short contexts are shared out, too, and coarse from there on.
fn split_begin(split: u32) -> u32 {
  return select(COARSE_FROM + (split - COARSE_FROM / FINE) * COARSE, split * FINE, split < COARSE_FROM / FINE);
}

fn first_seen(position: u32) -> u32 {
//% if WINDOW
  return u32(max(0, i32(position) + 1 - WINDOW));
//% else
  return 0u;
//% end
}

// Where the result of a query of the tile goes, if it is one, and sees something.
fn part_of(query: u32, item: u32) -> u32 {
  let row = query / TILE_HEADS;
  let rows = step[item + 1u];
  let parts = args.parts + 4u * (step[item] + min(row, rows - 1u));
  let index = step[item + 5u] / step[item + 7u] - step[parts + 2u];
  if (row >= rows || index >= step[parts + 1u]) { return NO_PART; }
  return step[parts] + index;
}

// Page number `i` of a split. Past the last page that has tokens which are seen, it is read again.
fn page_of(split: u32, i: u32, table: u32, seen_end: u32) -> u32 {
  let end = min(split_begin(split + 1u), seen_end);
  return step[table + min(split_begin(split) / PAGE + i, (end - 1u) / PAGE)];
}
