//! Files and constants of the kernels of matmuls.

use super::wgsl;
use crate::{
    layout::Layout,
    lower::kernels::{
        Kind::{Cooperative, Tiles, Vectors},
        Matmul,
    },
    target::Target,
    template::{Constants, Value::U},
};

/// Returns the files of a kernel of a matmul, and their constants.
pub fn kernel(
    of: &Matmul,
    target: &Target,
    layout: Layout,
    blocks: usize,
    halves_at: u32,
) -> (&'static [&'static str], Constants) {
    match of.kind {
        Vectors { rows, outputs, threads, lanes, memory } => {
            let constants = vec![
                ("MATMUL", U(1)),
                ("THREADS", U(threads)),
                ("OUTS", U(outputs)),
                ("BATCH", U(rows)),
                ("LANES", U(lanes)),
                ("PARTED", U(u32::from(lanes > 32))),
                ("SUMS", U((threads / lanes * outputs * rows * (lanes + 1)).max(memory / 4))),
            ];
            (wgsl!("matvec"), constants)
        }
        Tiles { rows, outputs, threads } => {
            let deep = depth(layout);
            let items = of.covers().map(|side| side * deep);
            let constants = vec![
                ("MATMUL", U(1)),
                ("THREADS", U(threads)),
                ("ROWS", U(rows)),
                ("OUTS", U(outputs)),
                ("DEEP", U(deep)),
                ("X_LOADS", U(items[0].div_ceil(threads))),
                ("W_LOADS", U(items[1].div_ceil(threads))),
                ("WHOLE", U(u32::from(items.iter().all(|items| items.is_multiple_of(threads))))),
                ("TAIL", U(u32::from(!blocks.is_multiple_of(32 * deep as usize)))),
            ];
            (wgsl!("matmul"), constants)
        }
        Cooperative { side, columns, teams, groups, matrices, deep } => {
            let team = groups * target.subgroup;
            let items = side * matrices[1] * deep;
            let constants = vec![
                ("SIDE", U(side)),
                ("SIDE_8", U(u32::from(side == 8))),
                ("SUBGROUP", U(target.subgroup)),
                ("THREADS", U(of.threads(target))),
                ("COLUMNS", U(columns)),
                ("K_GROUPS", U(teams)),
                ("ROLLED", U(u32::from(groups == 1))),
                ("ROW_GROUPS", U(groups)),
                ("SHARED", U(u32::from(groups > 1))),
                ("TEAM", U(team)),
                ("ROWS", U(matrices[0])),
                ("OUTS", U(matrices[1])),
                ("DEEP", U(deep)),
                ("STEPS", U(32 * deep / side)),
                ("TAIL", U(u32::from(!blocks.is_multiple_of((teams * deep) as usize)))),
                ("LOADS", U(items.div_ceil(team))),
                ("WHOLE", U(u32::from(items.is_multiple_of(team)))),
                ("HALVES_AT", U(halves_at)),
            ];
            match layout.is_quantized() {
                true => (wgsl!("matrices", "coop_int", "coop"), constants),
                false => (wgsl!("matrices", "coop_float", "coop"), constants),
            }
        }
    }
}

/// Returns the blocks of a stage of tiles: two if they fit into 28 KiB of workgroup memory.
fn depth(layout: Layout) -> u32 {
    if layout == Layout::F32 { 1 } else { 2 }
}
