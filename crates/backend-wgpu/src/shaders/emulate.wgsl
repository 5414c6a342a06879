// Emulates cooperative matrices and subgroups in plain WGSL (emulate.rs). A thread has eight columns of a row of sums.
// It multiplies the whole row of A by these columns of B, which it reads from memory.
//% needs Rows Sums
struct Columns { at: u32, stride: u32, by_rows: bool }

var<private> me: u32;
var<private> four: u32;
var<workgroup> exchanged: array<vec4<f32>, THREADS>;

fn begin(in_workgroup: u32) {
  me = in_workgroup;
  // The compiler does not know this number, which prevents unrolling.
  four = select(4u, 3u, args.rows == 0xffffffffu);
}

fn own_row() -> u32 {
  return me % 32u / 2u;
}

fn own_column() -> u32 {
  return me % 2u * 8u;
}

// Returns four columns of row `k`, from `column` on.
fn columns_quad(columns: Columns, k: u32, column: u32) -> vec4<f32> {
  if (columns.by_rows) {
    return vec4<f32>(COLUMNS[columns.at + k * columns.stride + column / 4u]);
  }
  let at = columns.at + column * columns.stride + k / 4u;
  return vec4<f32>(
    f32(COLUMNS[at][k % 4u]),
    f32(COLUMNS[at + columns.stride][k % 4u]),
    f32(COLUMNS[at + 2u * columns.stride][k % 4u]),
    f32(COLUMNS[at + 3u * columns.stride][k % 4u]),
  );
}

fn multiply_add(rows: Rows, columns: Columns, sums: Sums) -> Sums {
  var all = sums;
  for (var i = 0u; i < four; i++) {
    let x = select(select(rows[0], rows[1], i == 1u), select(rows[2], rows[3], i == 3u), i > 1u);
    for (var j = 0u; j < four; j++) {
      let k = 4u * i + j;
      all[0] = fma(vec4<f32>(x[j]), columns_quad(columns, k, own_column()), all[0]);
      all[1] = fma(vec4<f32>(x[j]), columns_quad(columns, k, own_column() + 4u), all[1]);
    }
  }
  return all;
}

fn exchange_quad(x: vec4<f32>, mask: u32) -> vec4<f32> {
  workgroupBarrier();
  exchanged[me] = x;
  workgroupBarrier();
  return exchanged[me ^ mask];
}

fn exchange(x: f32, mask: u32) -> f32 {
  return exchange_quad(vec4<f32>(x), mask).x;
}
