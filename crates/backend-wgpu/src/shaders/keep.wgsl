// Stores the last KEPT inputs of a convolution in the state of their sequence. With a delta rule or a scan (DELTA), also
// stores the keys of the last chunk and its sums of decays. Thread c stores channel c, element c of the keys, and the
// decays of head c. If a sequence writes another state than it reads, the values of rows before the step are copied.
//% needs input_of kept_at sequence_at
@group(0) @binding(2) var<storage, read_write> kept: array<f32>;        // [states, KEPT, CHANNELS]
//% if DELTA
@group(0) @binding(3) var<storage, read> convolved: array<f32>;         // [rows, CHANNELS]: queries, keys, values
@group(0) @binding(4) var<storage, read> decays: array<f32>;            // [rows, HEADS]
@group(0) @binding(5) var<storage, read_write> kept_keys: array<f32>;   // [states, CHUNK, KEY_HEADS * KEY_DIM]
@group(0) @binding(6) var<storage, read_write> kept_decays: array<f32>; // [states, CHUNK, HEADS] sums of decays
//% end

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let own = sequence_at(wid.y);
  let end = own.start + own.rows;
  let copies = own.read != own.write;
  let c = wid.x * 256u + tid;
//% if KEPT
  if (c < CHANNELS) {
    for (var position = max(end, KEPT) - KEPT; position < end; position++) {
      if (position >= own.start) {
        kept[kept_at(own.write, position, c)] = input_of(own.first_row + position - own.start, c);
      } else if (copies) {
        kept[kept_at(own.write, position, c)] = kept[kept_at(own.read, position, c)];
      }
    }
  }
//% end
//% if DELTA
  // The chunk of the last row: keys of its rows, and sums of decays from its first row to each row.
  let chunk = (end - 1u) / CHUNK * CHUNK;
  const KEY_WIDTH = KEY_HEADS * KEY_DIM;
  if (c < KEY_WIDTH) {
    for (var position = chunk; position < end; position++) {
      let i = position - chunk;
      if (position >= own.start) {
        let row = own.first_row + position - own.start;
        kept_keys[(own.write * CHUNK + i) * KEY_WIDTH + c] = convolved[row * CHANNELS + KEY_WIDTH + c];
      } else if (copies) {
        kept_keys[(own.write * CHUNK + i) * KEY_WIDTH + c] = kept_keys[(own.read * CHUNK + i) * KEY_WIDTH + c];
      }
    }
  }
  if (c < HEADS) {
    var sum = 0.0;
    for (var position = chunk; position < end; position++) {
      let i = position - chunk;
      if (position >= own.start) {
        sum += decays[(own.first_row + position - own.start) * HEADS + c];
      } else {
        sum = kept_decays[(own.read * CHUNK + i) * HEADS + c];
      }
      kept_decays[(own.write * CHUNK + i) * HEADS + c] = sum;
    }
  }
//% end
}
