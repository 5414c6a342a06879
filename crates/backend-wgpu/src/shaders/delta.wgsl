// Computes the gated delta rule for all rows of a sequence: values [rows, HEADS, VALUE_DIM]. A workgroup computes
// COLUMNS columns of a value head; COLUMNS equals the rows of a chunk. Within a chunk that began with the state S, with
// G_t as the sum of decays from the beginning of the chunk to row t:
//   u_t = beta_t (v_t - e^G_t S'k_t - sum over i < t of e^(G_t - G_i) (k_i . k_t) u_i)
//   o_t = e^G_t S'q_t + sum over i <= t of e^(G_t - G_i) (k_i . q_t) u_i
// The scan of Mamba-2 (SCAN) is the same with u_t = beta_t v_t.
// All sums have one order, which does not depend on where a step begins or ends.
// Workgroup memory has the keys of a chunk (KEYS_HELD), unless keys are so large that only that of the row fits.
@group(0) @binding(1) var<storage, read> convolved: array<f32>;        // [rows, CHANNELS]: queries, keys, values
@group(0) @binding(2) var<storage, read> decays: array<f32>;           // [rows, HEADS]
@group(0) @binding(3) var<storage, read> betas: array<f32>;            // [rows, HEADS]
@group(0) @binding(4) var<storage, read_write> values: array<f32>;     // [rows, HEADS, VALUE_DIM] results
@group(0) @binding(5) var<storage, read_write> matrices: array<f32>;   // [states, HEADS, KEY_DIM, VALUE_DIM] S
@group(0) @binding(6) var<storage, read_write> updates: array<f32>;    // [states, CHUNK, HEADS, VALUE_DIM] u
@group(0) @binding(7) var<storage, read> kept_keys: array<f32>;        // [states, CHUNK, KEY_HEADS, KEY_DIM]
@group(0) @binding(8) var<storage, read> kept_decays: array<f32>;      // [states, CHUNK, HEADS] G

const THREADS = PARTS * COLUMNS;
const KEY_QUADS = PARTS * QUADS;   // quads of a key, which is padded with zeros
const KEY_STRIDE = KEY_QUADS + 1u; // padded against bank conflicts

//% if KEYS_HELD
var<workgroup> keys: array<vec4<f32>, CHUNK * KEY_STRIDE>;
//% else
var<workgroup> key: array<vec4<f32>, KEY_QUADS>;
//% end
var<workgroup> query: array<vec4<f32>, KEY_QUADS>;
var<workgroup> us: array<f32, CHUNK * COLUMNS>;
var<workgroup> summed: array<f32, CHUNK>;          // G of the chunk's rows
var<workgroup> sums: array<vec2<f32>, THREADS>;    // partial sums of S'k and S'q
var<workgroup> dots: array<vec2<f32>, THREADS>;    // partial dot products of two rows
var<workgroup> weights: array<vec2<f32>, CHUNK>;   // weights of the chunk's rows, for the update and for the result

fn kept_quad(at: u32, i: u32) -> vec4<f32> {
  var quad = vec4<f32>(0.0);
//% for e in 0..4
  if (4u * i + ${e}u < KEY_DIM) { quad[${e}] = kept_keys[at + 4u * i + ${e}u]; }
//% end
  return quad;
}

fn convolved_quad(at: u32, i: u32) -> vec4<f32> {
  var quad = vec4<f32>(0.0);
//% for e in 0..4
  if (4u * i + ${e}u < KEY_DIM) { quad[${e}] = convolved[at + 4u * i + ${e}u]; }
//% end
  return quad;
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
  for (var i = 0u; i < own.rows; i++) {
    let row = own.first_row + i;
    let position = own.start + i;
    let here = position % CHUNK;
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
    let at = row * CHANNELS + key_head * KEY_DIM;
    for (var q = tid; q < KEY_QUADS; q += THREADS) {
      query[q] = convolved_quad(at, q);
//% if KEYS_HELD
      keys[here * KEY_STRIDE + q] = convolved_quad(at + KEY_HEADS * KEY_DIM, q);
//% else
      key[q] = convolved_quad(at + KEY_HEADS * KEY_DIM, q);
//% end
    }
    if (tid == 0u) {
      var before = 0.0;
      if (here > 0u) { before = summed[here - 1u]; }
      summed[here] = before + decays[row * HEADS + head];
    }
    workgroupBarrier();
    var sum = vec2<f32>(0.0);
//% for j in 0..QUADS
    {
      let quad = part * QUADS + ${j}u;
//% if KEYS_HELD
      sum += vec2<f32>(dot(s_${j}, keys[here * KEY_STRIDE + quad]), dot(s_${j}, query[quad]));
//% else
      sum += vec2<f32>(dot(s_${j}, key[quad]), dot(s_${j}, query[quad]));
//% end
    }
//% end
    sums[tid] = sum;
    let other = tid / PARTS;
    if (other <= here) {
      var product = vec2<f32>(0.0);
      for (var j = 0u; j < QUADS; j++) {
//% if KEYS_HELD
        let q = tid % PARTS * QUADS + j;
        let earlier = keys[other * KEY_STRIDE + q];
        product += vec2<f32>(dot(earlier, keys[here * KEY_STRIDE + q]), dot(earlier, query[q]));
//% else
        // Neighbouring threads read neighbouring quads.
        let q = j * PARTS + tid % PARTS;
        let earlier = key_quad(own, key_head, position - here, other, q);
        product += vec2<f32>(dot(earlier, key[q]), dot(earlier, query[q]));
//% end
      }
      dots[tid] = product;
    }
    workgroupBarrier();
    if (tid <= here) {
      var product = vec2<f32>(0.0);
//% for p in 0..PARTS
      product += dots[tid * PARTS + ${p}u];
//% end
      weights[tid] = exp(summed[here] - summed[tid]) * product;
    }
    workgroupBarrier();
    if (tid < COLUMNS) {
      var all = vec2<f32>(0.0);
//% for p in 0..PARTS
      all += sums[lane + ${p}u * COLUMNS];
//% end
      all *= exp(summed[here]);
      for (var t = 0u; t < here; t++) { all = fma(weights[t], vec2<f32>(us[t * COLUMNS + lane]), all); }
      let v = convolved[row * CHANNELS + 2u * KEY_HEADS * KEY_DIM + value];
//% if SCAN
      let u = betas[row * HEADS + head] * v;
//% else
      let u = betas[row * HEADS + head] * (v - all.x);
//% end
      us[here * COLUMNS + lane] = u;
      if (has_column) { values[row * HEADS * VALUE_DIM + value] = fma(weights[here].y, u, all.y); }
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
