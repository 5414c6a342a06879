//! Attention with cooperative matrices: the steps that use it, and its kernels.

use paguro_backend::{KvDtype, Limits, LoadError};

use crate::ops::{KvGroup, Program};

use super::{Grid, Launch, Lowering, Value::U, attention::tile_heads, kernels, wgsl};
use crate::{
    device::Device,
    layout::BLOCK,
    plan::{COARSE_FROM, COARSE_SPLIT, FINE_SPLIT, RUN, Tile, Wide},
    template::Constants,
};

/// A kernel's name, files and constants.
pub(super) type Named = (String, Vec<&'static str>, Constants);

impl Lowering<'_> {
    /// Adds attention with cooperative matrices for steps of few rows, if it is used.
    pub(super) fn attend_few(
        &self,
        name: &str,
        constants: &Constants,
        emits: &[&'static str],
        dim: usize,
    ) -> Option<Named> {
        let name = format!("{name}_few");
        let files: Vec<&str> =
            [wgsl!("args", "fold", "partials", "splits", "matrices", "stage", "attend_few"), emits].concat();
        let all = |side: u32| [for_few(constants), few_constants(dim, side)].concat();
        if self.device.as_hardware && few_works(self.program, self.limits) {
            for side in [16, 8] {
                self.device.show(&format!("{name}x{side}"), &files, &all(side));
            }
        }
        self.few.map(|side| (name, files, all(side)))
    }

    /// Adds attention with cooperative matrices for steps of many rows, if it is used. `shared` are constants.
    pub(super) fn attend_wide(
        &mut self,
        name: &str,
        shared: &Constants,
        buffers: &[(&str, &wgpu::Buffer)],
        kv_group: usize,
        body: &mut Vec<Launch>,
    ) -> Result<(), LoadError> {
        let files = wgsl!(
            "args",
            "fold",
            "partials",
            "splits",
            "quantize",
            "emit",
            "matrices",
            "stage",
            "attend_coop"
        );
        let kv = self.program.kv.groups[kv_group];
        let (dim, page, subgroup) = (kv.head_dim, self.limits.block_size, self.device.subgroup);
        let group = kv.queries_per_kv();
        let constants = |wide: Wide, groups: usize, side: u32| {
            let mut constants = shared.clone();
            constants.extend(tile_heads(group, wide.heads));
            constants.extend(wide_constants(dim, page, groups, side, subgroup));
            constants
        };
        if let (Some(wide), Some(side)) = (self.tilings[kv_group].wide, self.device.cooperative) {
            for (tile, groups) in [(Tile::WideRow, 1), (Tile::WideRows, wide.groups)] {
                let grid = Grid::Attention(tile, wide.workgroups as u32);
                let name = format!("{name}_coop{groups}");
                let constants = constants(wide, groups, side);
                body.push(self.launch(&name, files, constants, buffers, grid, kv_group)?);
            }
        }
        for (side, groups) in [(16, 1), (16, 8), (8, 1), (8, 4)] {
            let wide = wide_tiles(&kv, self.limits, subgroup, groups);
            // Matrices of eight rows are Apple's, whose GPUs have no room for more.
            let has_few = few_works(self.program, self.limits);
            let fits = side == 16 || wide_bytes(dim, has_few, groups) <= crate::threadgroup::MOST as usize;
            let shows = self.device.as_hardware && self.tilings[kv_group].emits;
            if let Some(wide) = wide.filter(|_| fits && shows) {
                let name = format!("{name}_coop{groups}x{side}");
                let constants = constants(wide, groups, side);
                self.device.show(&name, files, &constants);
                self.show_for_few(&name, files, &constants);
            }
        }
        Ok(())
    }

    /// Returns the files that store V in half precision.
    pub(super) fn v_store(&self) -> &'static [&'static str] {
        match self.few {
            Some(_) => V_HALVES,
            None => V_WORDS,
        }
    }

    /// Shows the variant of a kernel for the layout of V that `attend_few.wgsl` needs.
    pub(super) fn show_for_few(&self, name: &str, files: &[&str], constants: &Constants) {
        let knows_pages = constants.iter().any(|(name, _)| *name == "SIXTEENS");
        if self.device.as_hardware && knows_pages && few_works(self.program, self.limits) {
            let of = |file| if V_WORDS.contains(&file) { V_HALVES[0] } else { file };
            let files: Vec<_> = files.iter().map(|&file| of(file)).collect();
            self.device.show(&format!("{name}_few"), &files, &for_few(constants));
        }
    }
}

/// Access to V in pages, in the layout for plain attention and in that for cooperative matrices.
const V_WORDS: &[&str] = wgsl!("v_words");
const V_HALVES: &[&str] = wgsl!("v_halves");

/// Returns true if steps of few rows can use attention with cooperative matrices (`attend_few.wgsl`): models with many
/// query heads per K/V head. With few query heads or large heads, plain code is faster.
fn few_works(program: &Program, limits: &Limits) -> bool {
    let works = |group: &KvGroup| group.head_dim == 64 && group.queries_per_kv() > 4 && !group.is_latent;
    limits.kv_dtype == KvDtype::F16 && program.kv.groups.iter().all(works)
}

/// Returns the side of the matrices of `attend_few.wgsl`, if the device and the program use it.
pub(super) fn few(device: &Device, program: &Program, limits: &Limits) -> Option<u32> {
    device.cooperative.filter(|_| device.subgroup == 32 && few_works(program, limits))
}

/// Returns the constants of kernels that access pages in the layout for `attend_few.wgsl`.
fn for_few(constants: &Constants) -> Constants {
    let is = |name: &str, value| if name == "SIXTEENS" { U(1) } else { value };
    constants.iter().map(|&(name, value)| (name, is(name, value))).collect()
}

/// Constants of attention of few rows with heads of this dimension, for matrices of this side.
fn few_constants(dim: usize, side: u32) -> Constants {
    vec![
        ("SIDE", U(side)),
        ("SIDE_8", U(u32::from(side == 8))),
        ("PER_16", U(16 / side)),
        ("THREADS", U(2 * dim as u32)),
        ("K_BLOCKS", U((COARSE_SPLIT / (2 * dim)) as u32)),
        ("PIECE_MATRICES", U(dim as u32 / side / 2)),
        ("UNIT_TOKENS", U(32 / side)),
        ("FINE", U(FINE_SPLIT as u32)),
        ("COARSE", U(COARSE_SPLIT as u32)),
        ("COARSE_FROM", U(COARSE_FROM as u32)),
        ("RUN", U(RUN as u32)),
    ]
}

/// Subgroups of a workgroup of attention with cooperative matrices, each with [`GROUP_QUERIES`]: the first number that
/// fits.
const GROUPS: [usize; 3] = [8, 4, 2];
/// Queries of a subgroup.
const GROUP_QUERIES: usize = 16;
/// Tokens of a block.
const TOKENS: usize = 32;

/// Returns the tiling of attention with cooperative matrices, if the device uses them and their memory fits.
pub(super) fn wide(device: &Device, program: &Program, of: &KvGroup, limits: &Limits) -> Option<Wide> {
    let dim = of.head_dim;
    let threads = device.limits.max_compute_invocations_per_workgroup as usize;
    let memory = device.memory_beside_matrices() as usize;
    let has_few = few(device, program, limits).is_some();
    let fits = |groups: usize| {
        wide_bytes(dim, has_few, groups) <= memory && groups * device.subgroup as usize <= threads
    };
    device.cooperative?;
    let tiles = |groups: usize| wide_tiles(of, limits, device.subgroup, groups);
    let wide = GROUPS.into_iter().filter(|&groups| fits(groups)).find_map(tiles)?;
    Some(Wide { from: kernels::wide_rows(device), ..wide })
}

/// Returns the bytes of workgroup memory of `attend_coop.wgsl`: K and V of a block, and per query its scores, and its weights
/// in half precision.
fn wide_bytes(dim: usize, has_few: bool, groups: usize) -> usize {
    let k_tile = TOKENS * (2 * dim + 16);
    let v_tile = if has_few { dim * (2 * TOKENS + 16) } else { k_tile };
    k_tile + v_tile + groups * GROUP_QUERIES * (4 * (TOKENS + 4) + 2 * (TOKENS + 8)) - 16
}

/// Returns the tiling with `groups` subgroups, if the shapes of heads and pages permit it.
fn wide_tiles(kv: &KvGroup, limits: &Limits, subgroup: u32, groups: usize) -> Option<Wide> {
    let group = kv.queries_per_kv();
    let heads = group.min(GROUP_QUERIES);
    let reads = TOKENS * kv.head_dim / 8;
    let works = limits.kv_dtype == KvDtype::F16
        && kv.head_dim.is_multiple_of(BLOCK)
        && [16, 32].contains(&subgroup)
        && reads.is_multiple_of(groups * subgroup as usize);
    works.then_some(Wide {
        from: 1,
        groups,
        rows: groups * GROUP_QUERIES / heads,
        heads,
        workgroups: kv.kv_heads * group.div_ceil(heads),
        busy: 128,
    })
}

/// Returns the constants for heads of this dimension, `groups` subgroups, and matrices of this side.
fn wide_constants(dim: usize, page: usize, groups: usize, side: u32, subgroup: u32) -> Constants {
    let (dim, tokens, lanes) = (dim as u32, TOKENS as u32, subgroup / GROUP_QUERIES as u32);
    let threads = groups as u32 * subgroup;
    vec![
        ("SIDE", U(side)),
        ("SIDE_8", U(u32::from(side == 8))),
        ("SUBGROUP", U(subgroup)),
        ("THREADS", U(threads)),
        ("GROUPS", U(groups as u32)),
        // Number of subgroups whose queries fit into the tile.
        ("ROUND_GROUPS", U(groups.min(2 * TOKENS / GROUP_QUERIES) as u32)),
        ("TOKENS", U(tokens)),
        ("ONE_PAGE", U(u32::from(page >= TOKENS))),
        ("LOADS", U(tokens * dim / 8 / threads)),
        // A single subgroup has too few registers.
        ("AHEAD", U(u32::from(groups > 1))),
        ("ROWS", U(GROUP_QUERIES as u32 / side)),
        ("DIMS", U(dim / side)),
        ("TOKEN_MATRICES", U(tokens / side)),
        // Sums are looked at 32 dimensions at a time.
        ("PIECES", U(dim / 32)),
        ("PIECE_MATRICES", U(32 / side)),
        ("PIECE_SHARE", U(8 / lanes)),
        ("SHARE", U(tokens / 4 / lanes)),
        ("LANE_BITS", U(lanes.ilog2())),
        ("FINE", U(FINE_SPLIT as u32)),
        ("COARSE", U(COARSE_SPLIT as u32)),
        ("COARSE_FROM", U(COARSE_FROM as u32)),
        ("RUN", U(RUN as u32)),
    ]
}
