// Writes activations of the next matmul in blocks of 32, [rows, ACT_BLOCKS]: as floats, in eight bits, or both. With
// cooperative matrices, they follow in half precision; with HALVES_ONLY, all matmuls that read them have cooperative matrices, and
// nothing else is written. Only those in half precision include the factor of a norm; other matmuls multiply their results by the factor.
//% provides emit emit_shared stage needs Quantized four_halves largest_of publish quantized quants_of with_sums
//% if PUBLISHES
//% else
//% if EMIT_Q8
@group(0) @binding(8) var<storage, read_write> acts_quants: array<vec4<u32>>; // [rows, 2, ACT_BLOCKS]
//% if HALVES_ONLY
//% else
@group(0) @binding(9) var<storage, read_write> acts_scales: array<vec2<u32>>; // [rows, ACT_BLOCKS] scale; sums of both halves

fn put_quants(row: u32, block: u32, q: Quantized) {
  let at = row * 2u * ACT_BLOCKS + block;
  acts_quants[at] = q.lo;
  acts_quants[at + ACT_BLOCKS] = q.hi;
  acts_scales[row * ACT_BLOCKS + block] = vec2<u32>(bitcast<u32>(q.scale), q.sums);
}
//% end
//% end
//% if EMIT_F32
@group(0) @binding(10) var<storage, read_write> acts_floats: array<vec4<u32>>;  // [rows, 8, ACT_BLOCKS]
//% end
//% end

//% if STAGED
// Values before the conversion, in blocks of 32 with padding against bank conflicts.
var<workgroup> staged: array<f32, STAGED>;

fn stage(i: u32, value: f32) {
  staged[i / 32u * 33u + i % 32u] = value;
}

fn staged_quad(block: u32, j: u32) -> vec4<f32> {
  let at = block * 33u + 4u * j;
  return vec4<f32>(staged[at], staged[at + 1u], staged[at + 2u], staged[at + 3u]);
}
//% end

//% if PUBLISHES
//% else
//% if HALVES
// Writes elements 8 i to 8 i + 7 of a block in the order of matrices of 16 times 16: [rows / 16, 2 ACT_BLOCKS, 16, 16].
fn put_halves(row: u32, block: u32, i: u32, a: vec4<f32>, b: vec4<f32>) {
  let eight = vec4<u32>(four_halves(a), four_halves(b));
  let at = ((row / 16u * ACT_BLOCKS + block) * 32u + row % 16u) * 2u + i / 2u * 32u + i % 2u;
//% if EMIT_Q8
  acts_quants[QUANTS_END + at] = eight;
//% end
//% if EMIT_F32
  acts_floats[FLOATS_END + at] = eight;
//% end
}
//% end

// Writes block `block` of a row from staged block `from_`.
fn emit(row: u32, block: u32, from_: u32, factor: f32) {
  let v = array<vec4<f32>, 8>(
//% for j in 0..8
    staged_quad(from_, ${j}u),
//% end
  );
//% if HALVES_ONLY
//% else
//% if EMIT_F32
//% for j in 0..8
  acts_floats[(row * 8u + ${j}u) * ACT_BLOCKS + block] = bitcast<vec4<u32>>(v[${j}]);
//% end
//% end
//% if EMIT_Q8
  put_quants(row, block, quantized(v));
//% end
//% end
//% if HALVES
  if (args.rows >= HALVES_FROM) {
//% for j in 0..4
    put_halves(row, block, ${j}u, v[2 * ${j}] * factor, v[2 * ${j} + 1] * factor);
//% end
  }
//% end
}
//% end

//% if SHARED_BLOCKS
// This array has words, because a write to a component of a vector may write the whole vector.
var<workgroup> shared_quants: array<u32, SHARED_BLOCKS * 8>;

fn shared_half(at: u32) -> vec4<u32> {
  return vec4<u32>(shared_quants[at], shared_quants[at + 1u], shared_quants[at + 2u], shared_quants[at + 3u]);
}

// Writes a block without a factor with eight threads, of which this one computes quad `j`. A single thread would need
// some 300 instructions while others wait. All threads of a workgroup must call it, also those without a block.
fn emit_shared(has_block: bool, row: u32, block: u32, from_: u32, j: u32) {
  var largest = 0.0;
  if (has_block) {
    let v = array<vec4<f32>, 8>(
//% for i in 0..8
      staged_quad(from_, ${i}u),
//% end
    );
    largest = largest_of(v);
//% if PUBLISHES
    let quants = quants_of(staged_quad(from_, j), largest);
    shared_quants[8u * from_ + j] = quants;
    publish(PUBLISH_AT + (j / 4u * ACT_BLOCKS + block) * 4u + j % 4u, quants);
//% else
//% if HALVES_ONLY
//% else
//% if EMIT_F32
    acts_floats[(row * 8u + j) * ACT_BLOCKS + block] = bitcast<vec4<u32>>(staged_quad(from_, j));
//% end
//% if EMIT_Q8
    shared_quants[8u * from_ + j] = quants_of(staged_quad(from_, j), largest);
//% end
//% end
//% if HALVES
    if (args.rows >= HALVES_FROM && j < 4u) {
      put_halves(row, block, j, staged_quad(from_, 2u * j), staged_quad(from_, 2u * j + 1u));
    }
//% end
//% end
  }
//% if HALVES_ONLY
//% else
//% if EMIT_Q8
  workgroupBarrier();
  if (has_block && j == 0u) {
    let made = with_sums(shared_half(8u * from_), shared_half(8u * from_ + 4u), largest);
//% if PUBLISHES
    publish(PUBLISH_AT + 8u * ACT_BLOCKS + block, bitcast<u32>(made.scale));
    publish(PUBLISH_AT + 9u * ACT_BLOCKS + block, made.sums);
//% else
    put_quants(row, block, made);
//% end
  }
//% end
//% end
}
//% end
