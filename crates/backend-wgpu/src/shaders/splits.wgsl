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

// What a workgroup has to do.
struct Item {
  first_row: u32,
  rows: u32,
  position: u32, // of the first row
  table: u32,
  first_split: u32,
  splits: u32,
}

// Number `i` of them. That of a step of one row is in the arguments, which are there sooner than what lies in memory.
fn item_of(i: u32) -> Item {
  if (args.row_length != 0u) {
    let part = args.row_from / args.row_length + i;
    let first = max(args.row_from, part * args.row_length);
    return Item(0u, 1u, args.row_position, args.row_table, first, min(args.row_to, (part + 1u) * args.row_length) - first);
  }
  let at = args.items + 8u * i;
  return Item(step[at], step[at + 1u], step[at + 2u], step[at + 3u] + GROUP * step[at + 4u], step[at + 5u], step[at + 6u]);
}

// Where the result of a query of the tile goes, if it is one, and sees something.
fn part_of(query: u32, i: u32) -> u32 {
  let row = query / TILE_HEADS;
  if (args.row_length != 0u) { return select(NO_PART, i, row == 0u); }
  let item = args.items + 8u * i;
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
