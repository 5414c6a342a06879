// Computes the gated delta rule for all rows of a sequence: values [rows, HEADS, VALUE_DIM]. A workgroup computes
// COLUMNS columns of a value head. Within a chunk that began with the state S, with G_t as the sum of decays from the
// beginning of the chunk to row t:
//   u_t = beta_t (v_t - e^G_t S'k_t - sum over i < t of e^(G_t - G_i) (k_i . k_t) u_i)
//   o_t = e^G_t S'q_t + sum over i <= t of e^(G_t - G_i) (k_i . q_t) u_i
// The scan of Mamba-2 (SCAN) is the same with u_t = beta_t v_t.
// Rows are computed in blocks of at most BLOCK_ROWS rows of a chunk: S and the products of keys are the same for all of
// them, and only the last sums, over rows of the block, follow each other. PARTS is at least BLOCK_ROWS.
// All sums have one order, which does not depend on where a step or a block begins or ends.
// Workgroup memory has the keys of a chunk (KEYS_HELD), unless keys are so large that only those of a block fit.
//% needs Sequence sequence_at
//% if WHOLE_QUADS
@group(0) @binding(1) var<storage, read> convolved: array<vec4<f32>>;  // [rows, CHANNELS]: queries, keys, values
@group(0) @binding(7) var<storage, read> kept_keys: array<vec4<f32>>;  // [states, CHUNK, KEY_HEADS, KEY_DIM]
//% else
@group(0) @binding(1) var<storage, read> convolved: array<f32>;
@group(0) @binding(7) var<storage, read> kept_keys: array<f32>;
//% end
@group(0) @binding(2) var<storage, read> decays: array<f32>;           // [rows, HEADS]
@group(0) @binding(3) var<storage, read> betas: array<f32>;            // [rows, HEADS]
@group(0) @binding(4) var<storage, read_write> values: array<f32>;     // [rows, HEADS, VALUE_DIM] results
@group(0) @binding(5) var<storage, read_write> matrices: array<f32>;   // [states, HEADS, KEY_DIM, VALUE_DIM] S
@group(0) @binding(6) var<storage, read_write> updates: array<f32>;    // [states, CHUNK, HEADS, VALUE_DIM] u
@group(0) @binding(8) var<storage, read> kept_decays: array<f32>;      // [states, CHUNK, HEADS] G

const THREADS = PARTS * COLUMNS;
const KEY_QUADS = PARTS * QUADS;   // quads of a key, which is padded with zeros
const KEY_STRIDE = KEY_QUADS + 1u; // padded against bank conflicts

//% if KEYS_HELD
var<workgroup> keys: array<vec4<f32>, CHUNK * KEY_STRIDE>;
//% else
var<workgroup> block_keys: array<vec4<f32>, BLOCK_ROWS * KEY_STRIDE>;
//% end
var<workgroup> queries: array<vec4<f32>, BLOCK_ROWS * KEY_STRIDE>;
var<workgroup> us: array<f32, CHUNK * COLUMNS>;
var<workgroup> summed: array<f32, CHUNK>;                       // G of the chunk's rows
var<workgroup> strengths: array<f32, BLOCK_ROWS>;               // beta of the block's rows
// Parts of S'k and S'q, then v_t - e^G_t S'k_t and e^G_t S'q_t with the sums over earlier rows. A scan has v_t alone.
var<workgroup> sums: array<vec2<f32>, BLOCK_ROWS * THREADS>;
var<workgroup> weights: array<vec2<f32>, BLOCK_ROWS * CHUNK>;   // of the chunk's rows in these sums

// Quad `i` of a key that begins at `at`.
fn kept_quad(at: u32, i: u32) -> vec4<f32> {
//% if WHOLE_QUADS
  return select(vec4<f32>(0.0), kept_keys[at / 4u + min(i, KEY_DIM / 4u - 1u)], 4u * i < KEY_DIM);
//% else
  var quad = vec4<f32>(0.0);
//% for e in 0..4
  if (4u * i + ${e}u < KEY_DIM) { quad[${e}] = kept_keys[at + 4u * i + ${e}u]; }
//% end
  return quad;
//% end
}

// Quad `i` of a query or key that begins at `at`.
fn convolved_quad(at: u32, i: u32) -> vec4<f32> {
//% if WHOLE_QUADS
  return select(vec4<f32>(0.0), convolved[at / 4u + min(i, KEY_DIM / 4u - 1u)], 4u * i < KEY_DIM);
//% else
  var quad = vec4<f32>(0.0);
//% for e in 0..4
  if (4u * i + ${e}u < KEY_DIM) { quad[${e}] = convolved[at + 4u * i + ${e}u]; }
//% end
  return quad;
//% end
}

fn value_at(at: u32) -> f32 {
//% if WHOLE_QUADS
  return convolved[at / 4u][at % 4u];
//% else
  return convolved[at];
//% end
}

//% if KEYS_HELD
//% else
// A quad of the key of row `t` of the chunk from `first` on.
fn key_quad(own: Sequence, key_head: u32, first: u32, t: u32, i: u32) -> vec4<f32> {
  let position = first + t;
  if (position >= own.start) {
    let row = own.first_row + position - own.start;
    return convolved_quad(row * CHANNELS + (KEY_HEADS + key_head) * KEY_DIM, i);
  }
  return kept_quad(((own.read * CHUNK + t) * KEY_HEADS + key_head) * KEY_DIM, i);
}
//% end

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let own = sequence_at(wid.y);
  let head = wid.x / COLUMN_BLOCKS;
//% if ALTERNATING
  let key_head = head % KEY_HEADS;
//% else
  let key_head = head / (HEADS / KEY_HEADS);
//% end
  let lane = tid % COLUMNS;
  let part = tid / COLUMNS;
  let column = wid.x % COLUMN_BLOCKS * COLUMNS + lane;
  let has_column = column < VALUE_DIM;
  let value = head * VALUE_DIM + min(column, VALUE_DIM - 1u);

  // This thread's part of a column of S.
//% for j in 0..QUADS
  var s_${j} = vec4<f32>(0.0);
//% end
  if (own.start > CHUNK && has_column) {
    let at = (own.read * HEADS + head) * KEY_DIM * VALUE_DIM + column;
//% for j in 0..QUADS
//% for e in 0..4
    if (4u * (part * QUADS + ${j}u) + ${e}u < KEY_DIM) {
      s_${j}[${e}] = matrices[at + (4u * (part * QUADS + ${j}u) + ${e}u) * VALUE_DIM];
    }
//% end
//% end
  }
  // The rows of the open chunk are loaded. The chunk is full if the first row begins the next one.
  var open = 0u;
  if (own.start > 0u) { open = (own.start - 1u) % CHUNK + 1u; }
//% if KEYS_HELD
  for (var i = tid; i < open * KEY_QUADS; i += THREADS) {
    let at = ((own.read * CHUNK + i / KEY_QUADS) * KEY_HEADS + key_head) * KEY_DIM;
    keys[i / KEY_QUADS * KEY_STRIDE + i % KEY_QUADS] = kept_quad(at, i % KEY_QUADS);
  }
//% end
  for (var i = part; i < open; i += PARTS) {
    us[i * COLUMNS + lane] = updates[(own.read * CHUNK + i) * HEADS * VALUE_DIM + value];
  }
  if (tid < open) { summed[tid] = kept_decays[(own.read * CHUNK + tid) * HEADS + head]; }
  workgroupBarrier();

  var has_folded = false;
  var count = 0u;
  for (var i = 0u; i < own.rows; i += count) {
    let row = own.first_row + i;
    let position = own.start + i;
    let here = position % CHUNK;
    count = min(min(BLOCK_ROWS, CHUNK - here), own.rows - i);
    if (here == 0u && position > 0u) {
      // The rows of the full chunk are folded into S.
      let last = summed[CHUNK - 1u];
      let rest = exp(last);
//% for j in 0..QUADS
      s_${j} *= rest;
//% end
      for (var t = 0u; t < CHUNK; t++) {
        let u = vec4<f32>(exp(last - summed[t]) * us[t * COLUMNS + lane]);
//% if KEYS_HELD
        let at = t * KEY_STRIDE + part * QUADS;
//% for j in 0..QUADS
        s_${j} = fma(keys[at + ${j}u], u, s_${j});
//% end
//% else
//% for j in 0..QUADS
        s_${j} = fma(key_quad(own, key_head, position - CHUNK, t, part * QUADS + ${j}u), u, s_${j});
//% end
//% end
      }
      has_folded = true;
      workgroupBarrier();
    }
    for (var q = tid; q < count * KEY_QUADS; q += THREADS) {
      let r = q / KEY_QUADS;
      let quad = q % KEY_QUADS;
      let at = (row + r) * CHANNELS + key_head * KEY_DIM;
      queries[r * KEY_STRIDE + quad] = convolved_quad(at, quad);
//% if KEYS_HELD
      keys[(here + r) * KEY_STRIDE + quad] = convolved_quad(at + KEY_HEADS * KEY_DIM, quad);
//% else
      block_keys[r * KEY_STRIDE + quad] = convolved_quad(at + KEY_HEADS * KEY_DIM, quad);
//% end
    }
    if (tid < count) {
      var decay = 0.0;
      if (here > 0u) { decay = summed[here - 1u]; }
//% for r in 0..BLOCK_ROWS
      if (${r}u <= tid) { decay += decays[(row + ${r}u) * HEADS + head]; }
//% end
      summed[here + tid] = decay;
      strengths[tid] = betas[(row + tid) * HEADS + head];
    }
    // The value of the row and column that this thread sums up.
    let v = value_at((row + min(part, count - 1u)) * CHANNELS + 2u * KEY_HEADS * KEY_DIM + value);
    workgroupBarrier();
    for (var r = 0u; r < count; r++) {
      var sum = vec2<f32>(0.0);
//% for j in 0..QUADS
      {
        let quad = part * QUADS + ${j}u;
//% if KEYS_HELD
        let key = keys[(here + r) * KEY_STRIDE + quad];
//% else
        let key = block_keys[r * KEY_STRIDE + quad];
//% end
        sum += vec2<f32>(dot(s_${j}, key), dot(s_${j}, queries[r * KEY_STRIDE + quad]));
      }
//% end
      sums[r * THREADS + tid] = sum;
    }
    let t = tid % CHUNK;
//% for j in 0..ROW_PAIRS
    let r_${j} = tid / CHUNK + ${j}u * (THREADS / CHUNK);
    let own_${j} = min(r_${j}, count - 1u);
    var product_${j} = vec2<f32>(0.0);
//% end
    if (r_0 < count && t < here + count) {
      for (var q = 0u; q < KEY_QUADS; q += 4u) {
//% for e in 0..4
//% if KEYS_HELD
        let earlier_${e} = keys[t * KEY_STRIDE + q + ${e}u];
//% else
        let earlier_${e} = key_quad(own, key_head, position - here, t, q + ${e}u);
//% end
//% for j in 0..ROW_PAIRS
//% if KEYS_HELD
        let key_${e}_${j} = keys[(here + own_${j}) * KEY_STRIDE + q + ${e}u];
//% else
        let key_${e}_${j} = block_keys[own_${j} * KEY_STRIDE + q + ${e}u];
//% end
        let query_${e}_${j} = queries[own_${j} * KEY_STRIDE + q + ${e}u];
        product_${j} += vec2<f32>(dot(earlier_${e}, key_${e}_${j}), dot(earlier_${e}, query_${e}_${j}));
//% end
//% end
      }
//% for j in 0..ROW_PAIRS
      if (r_${j} < count && t <= here + r_${j}) {
        let weight = exp(summed[here + r_${j}] - summed[t]) * product_${j};
//% if SCAN
        weights[r_${j} * CHUNK + t] = vec2<f32>(0.0, weight.y);
//% else
        weights[r_${j} * CHUNK + t] = vec2<f32>(-weight.x, weight.y);
//% end
      }
//% end
    }
    workgroupBarrier();
    // The sums over S and over rows before the block, of all its rows at once.
    if (part < count) {
      let at = part * THREADS + lane;
      let decayed = exp(summed[here + part]);
      var all = vec2<f32>(0.0);
//% for p in 0..PARTS
      all += sums[at + ${p}u * COLUMNS];
//% end
//% if SCAN
      all = vec2<f32>(v, decayed * all.y);
//% else
      all = vec2<f32>(fma(-decayed, all.x, v), decayed * all.y);
//% end
      var t = 0u;
      for (; t + 4u <= here; t += 4u) {
//% for e in 0..4
        all = fma(weights[part * CHUNK + t + ${e}u], vec2<f32>(us[(t + ${e}u) * COLUMNS + lane]), all);
//% end
      }
      for (; t < here; t++) { all = fma(weights[part * CHUNK + t], vec2<f32>(us[t * COLUMNS + lane]), all); }
      sums[at] = all;
    }
    workgroupBarrier();
    // Rows after the last one are also computed, so that the loads of all rows are independent; they are not stored.
    if (tid < COLUMNS) {
//% for r in 0..BLOCK_ROWS
      var all_${r} = sums[${r}u * THREADS + lane];
//% for t in 0..${r}
      all_${r} = fma(weights[${r}u * CHUNK + min(here + ${t}u, CHUNK - 1u)], vec2<f32>(u_${t}), all_${r});
//% end
      let u_${r} = strengths[${r}] * all_${r}.x;
      if (${r}u < count) {
        us[(here + ${r}u) * COLUMNS + lane] = u_${r};
        if (has_column) {
          let own_weight = weights[${r}u * CHUNK + here + ${r}u].y;
          values[(row + ${r}u) * HEADS * VALUE_DIM + value] = fma(own_weight, u_${r}, all_${r}.y);
        }
      }
//% end
    }
    workgroupBarrier();
  }

  if (has_column && (has_folded || own.read != own.write)) {
    let at = (own.write * HEADS + head) * KEY_DIM * VALUE_DIM + column;
//% for j in 0..QUADS
//% for e in 0..4
    if (4u * (part * QUADS + ${j}u) + ${e}u < KEY_DIM) {
      matrices[at + (4u * (part * QUADS + ${j}u) + ${e}u) * VALUE_DIM] = s_${j}[${e}];
    }
//% end
//% end
  }
  let end = (own.start + own.rows - 1u) % CHUNK + 1u;
  for (var i = part; i < end && has_column; i += PARTS) {
    updates[(own.write * CHUNK + i) * HEADS * VALUE_DIM + value] = us[i * COLUMNS + lane];
  }
}
