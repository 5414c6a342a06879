// Changes the content of pages in one buffer: SAVES parts of a state in them, RESTORES parts of a state from them, or fills
// them with zeros. Workgroups along y have one page each; a page has one part.
@group(0) @binding(0) var<storage, read> places: array<u32>;        // numbers of pages, from args.items on
//% if SAVES
@group(0) @binding(1) var<storage, read> parts: array<u32>;         // [parts, BUFFERS, PAGE_WORDS]
//% end
//% if RESTORES
@group(0) @binding(1) var<storage, read_write> parts: array<u32>;
@group(0) @binding(2) var<storage, read> pages: array<u32>;         // [pages, PAGE_WORDS]
//% else
@group(0) @binding(2) var<storage, read_write> pages: array<u32>;
//% end

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let word = wid.x * 256u + tid;
  if (word >= PAGE_WORDS) { return; }
  let in_page = places[args.items + wid.y] * PAGE_WORDS + word;
  // The number of the buffer is args.first.
  let in_parts = (wid.y * BUFFERS + args.first) * PAGE_WORDS + word;
//% if SAVES
  pages[in_page] = parts[in_parts];
//% else
//% if RESTORES
  parts[in_parts] = pages[in_page];
//% else
  pages[in_page] = 0u;
//% end
//% end
}
