// Applies bias and penalties to the logits of single tokens, in place. One thread applies one edit.
@group(0) @binding(0) var<storage, read> edits: array<vec4<u32>>; // [edits] index, bias, repetition and other penalties
@group(0) @binding(1) var<storage, read_write> logits: array<f32>; // [rows, VOCAB]

@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x >= args.rows) { return; }
  let edit = edits[id.x];
  let repetition = bitcast<f32>(edit.z);
  var logit = logits[edit.x] + bitcast<f32>(edit.y);
  // A device may round even a division by one.
  if (repetition != 1.0) {
    if (logit > 0.0) { logit /= repetition; } else { logit *= repetition; }
  }
  logits[edit.x] = logit - bitcast<f32>(edit.w);
}
