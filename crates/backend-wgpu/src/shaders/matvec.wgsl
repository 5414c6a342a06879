// Products of few rows. 32 lanes share the inputs of an output: lane l takes blocks l, l + 32, ... in order; then the lanes'
// sums are added in order. A result depends on nothing but its row and its weights, whatever BATCH and OUTS are.
var<workgroup> sums: array<f32, SUMS>; // [groups, OUTS * BATCH, 33]

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
  let lane = tid % 32u;
  let group = tid / 32u;
  let output = (wid.y * (THREADS / 32u) + group) * OUTS;
  let row = wid.x * BATCH;
  // Past the end, the last ones are computed again and not stored.
//% for o in 0..OUTS
  let from_${o} = min(output + ${o}u, OUTPUTS - 1u);
//% for b in 0..BATCH
  var acc_${o}_${b} = 0.0;
//% end
//% end
  for (var block = lane; block < BLOCKS; block += 32u) {
//% for o in 0..OUTS
    let w_${o} = load_block(from_${o}, block);
//% end
//% for b in 0..BATCH
    let x_${b} = load_acts(min(row + ${b}u, args.rows - 1u), block);
//% for o in 0..OUTS
    acc_${o}_${b} = accumulate(acc_${o}_${b}, w_${o}, x_${b});
//% end
//% end
  }
  let own = group * OUTS * BATCH;
//% for o in 0..OUTS
//% for b in 0..BATCH
  sums[(own + ${o}u * BATCH + ${b}u) * 33u + lane] = acc_${o}_${b};
//% end
//% end
  workgroupBarrier();
  for (var n = lane; n < OUTS * BATCH; n += 32u) {
    var total = 0.0;
    for (var l = 0u; l < 32u; l++) {
      total += sums[(own + n) * 33u + l];
    }
    if (output + n / BATCH < OUTPUTS && row + n % BATCH < args.rows) {
      store(row + n % BATCH, output + n / BATCH, total);
    }
  }
}
