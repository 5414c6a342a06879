// Work items, splits and partials of attention kernels.
//% provides item_of page_of partial_of seen_by split_begin work_of needs partials_of
const NO_PARTIAL = 0xffffffffu;

// Returns the first token of a split. Splits have FINE tokens up to COARSE_FROM, so that short contexts are
// distributed, and COARSE tokens after it.
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

// Returns the tokens that a row sees: the first one, and their end. With RANGES, rows see others than those before them,
// and the tokens of each row are behind the partials, [rows, 2].
fn seen_by(row: u32, position: u32) -> vec2<u32> {
//% if RANGES
  if (args.row_length == 0u) {
    let at = args.partials + 4u * args.rows + 2u * row;
    return vec2<u32>(step[at], step[at + 1u]);
  }
//% end
  return vec2<u32>(first_seen(position), position + 1u);
}

// Work item of a workgroup.
struct Item {
  first_row: u32,
  rows: u32,
  position: u32, // position of the first row
  begin: u32,    // first token that the rows see
  end: u32,      // end of the tokens that they see
  table: u32,
  first_split: u32,
  splits: u32,
  kv_head: u32,
  first_head: u32,
  heads: u32,
}

// Returns the index of the item and of the head tile of a workgroup. If several sequences decode, all head tiles of an
// item start before those of the next item, because long items must start first.
fn work_of(wid: vec3<u32>) -> vec2<u32> {
//% if SINGLE_ROWS
  if (args.row_length == 0u) { return wid.yx; }
//% end
  return wid.xy;
}

// Returns the item. In a step of one row it is in the arguments, which are available sooner than memory.
fn item_of(work: vec2<u32>) -> Item {
  var item: Item;
  if (args.row_length != 0u) {
    let partial = args.row_from / args.row_length + work.x;
    let first = max(args.row_from, partial * args.row_length);
    item.rows = 1u;
    item.position = args.row_position;
    item.table = args.row_table;
    item.first_split = first;
    item.splits = min(args.row_to, (partial + 1u) * args.row_length) - first;
  } else {
    let at = args.items + 8u * work.x;
    item.first_row = step[at];
    item.rows = step[at + 1u];
    item.position = step[at + 2u];
    item.table = step[at + 3u] + KV_GROUP * step[at + 4u];
    item.first_split = step[at + 5u];
    item.splits = step[at + 6u];
  }
  let last = item.rows - 1u;
  item.begin = seen_by(item.first_row, item.position).x;
  item.end = seen_by(item.first_row + last, item.position + last).y;
  item.kv_head = work.y / HEAD_TILES;
  item.first_head = item.kv_head * QUERIES_PER_KV + work.y % HEAD_TILES * TILE_HEADS;
  item.heads = min(TILE_HEADS, (item.kv_head + 1u) * QUERIES_PER_KV - item.first_head);
  return item;
}

// Returns the index of the partial of a query in the tile, or NO_PARTIAL if the query does not exist or sees no tokens.
// The item is loaded again, because it would occupy registers until then.
fn partial_of(query: u32, work: vec2<u32>) -> u32 {
  let item = item_of(work);
  let row = query / TILE_HEADS;
  let partials = partials_of(item.first_row + min(row, item.rows - 1u));
  let index = item.first_split / partials.length - partials.number;
  if (row >= item.rows || index >= partials.count) { return NO_PARTIAL; }
  return partials.first + index;
}

// Returns the number of page `i` of a split. Past the last page with visible tokens, it is the number of that page.
fn page_of(split: u32, i: u32, table: u32, seen_end: u32) -> u32 {
  let end = min(split_begin(split + 1u), seen_end);
  return step[table + min(split_begin(split) / PAGE + i, (end - 1u) / PAGE)];
}
