// Computes x = table[token] * SCALE, [rows, WIDTH], for tokens in this part of the table, with one thread per block of
// 32. A token with the highest bit set is an index into the tokens that the previous step has sampled; if that step
// could not sample, it is token 0. With POSITIONS, the table has learned positions, which are added to x. With GIVEN,
// rows of the step may be given instead: behind the tokens is the number of each row among them, from 1, or 0. With TYPES,
// a token's id is `type * TYPE_IDS + token`, and the embedding of its type is added.
//% needs load_block quad
@group(0) @binding(5) var<storage, read> step: array<u32>; // words of the step, see args.wgsl
@group(0) @binding(6) var<storage, read_write> x: array<f32>; // [rows, WIDTH]
//% if POSITIONS
//% else
@group(0) @binding(7) var<storage, read> sampled: array<u32>; // tokens of the previous step
//% end
//% if GIVEN
@group(0) @binding(8) var<storage, read> given: array<f32>; // [given rows, PARTS, WIDTH]
//% end
//% if TYPES
@group(0) @binding(9) var<storage, read> types: array<f32>; // [types, WIDTH]
//% end

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  let block = id.x;
//% if GIVEN
  let number = step[args.tokens + args.rows + id.y];
  if (number > 0u) {
//% if POSITIONS
//% else
    if (OUT_FIRST == 0u) {
      for (var i = block * 32u; i < min(block * 32u + 32u, WIDTH); i++) {
        x[id.y * WIDTH + i] = given[(number - 1u) * PARTS * WIDTH + i];
      }
    }
//% end
    return;
  }
//% end
//% if POSITIONS
  let token = step[args.positions + id.y];
//% else
  var token = step[args.tokens + id.y];
  if ((token >> 31u) == 1u) {
    token = sampled[token & 0x7fffffffu];
    if (token == 0xffffffffu) { token = 0u; }
  }
//% if TYPES
  let type_at = token / TYPE_IDS * WIDTH;
  token %= TYPE_IDS;
//% end
//% end
  if (block >= BLOCKS || token < OUT_FIRST || token >= OUT_FIRST + OUTPUTS) { return; }
  let w = load_block(token - OUT_FIRST, block);
  for (var j = 0u; j < 8u; j++) {
    let v = quad(w, j) * SCALE;
    for (var c = 0u; c < 4u; c++) {
      let i = block * 32u + j * 4u + c;
//% if POSITIONS
      if (i < WIDTH) { x[id.y * WIDTH + i] += v[c]; }
//% else
//% if TYPES
      if (i < WIDTH) { x[id.y * WIDTH + i] = v[c] + types[type_at + i]; }
//% else
      if (i < WIDTH) { x[id.y * WIDTH + i] = v[c]; }
//% end
//% end
    }
  }
}
