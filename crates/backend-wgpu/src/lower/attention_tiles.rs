//! Tiles of attention: rows and heads that share reads of K and V, and the steps that use cooperative matrices.

use paguro_backend::{KvDtype, Limits, Program};

use super::{facts::Facts, kernels};
use crate::{
    heads::{KvGroup, KvLayout},
    layout::{BLOCK, Layout},
    plan::{self, Tiling, Wide},
    target::Target,
};

/// Maximum queries of an attention tile, which share reads of K and V.
const TILE_QUERIES: usize = 8;
/// Maximum queries of an attention tile on software drivers, where unrolled code takes long to compile.
const SOFTWARE_TILE_QUERIES: usize = 4;
/// Threads of a workgroup of attention.
pub const THREADS: u32 = 256;
/// Subgroups of a workgroup of attention with cooperative matrices, each with [`GROUP_QUERIES`]: the first number that
/// fits.
const GROUPS: [usize; 4] = [8, 6, 4, 2];
/// Queries of a subgroup.
pub const GROUP_QUERIES: usize = 16;
/// Tokens of a block.
pub const TOKENS: usize = 32;

/// Computes the tiles and splits of a K/V group.
pub fn tiling(facts: &Facts<'_>, of: &KvGroup) -> Tiling {
    let Facts { target, limits, few, .. } = facts;
    let (rows, heads, kv_heads, dim) = (limits.max_rows, of.heads, of.kv_heads, of.head_dim);
    let queries_per_kv = of.queries_per_kv();
    let most = if target.is_software && few.is_none() { SOFTWARE_TILE_QUERIES } else { TILE_QUERIES };
    // Larger heads have no room for more in the memory of a workgroup.
    let queries = if dim > 128 { most.min(4) } else { most };
    let (tile_heads, head_tiles) = (queries_per_kv.min(queries), queries_per_kv.div_ceil(queries));
    let splits = plan::splits(limits.max_context);
    let partials = rows + (limits.max_sequences * splits).min(8192);
    let partials = partials.min(target.binding_limit as usize / 4 / (heads * (dim + 4))).max(rows);
    let emits = dim.is_multiple_of(BLOCK)
        && !of.is_latent
        && !of.is_padded()
        && queries * dim / 4 <= THREADS as usize;
    let always_merges =
        facts.program.attentions().any(|attention| attention.sinks.is_some() || attention.gate.is_some());
    Tiling {
        rows: (queries / tile_heads).max(1),
        heads: tile_heads,
        workgroups: kv_heads * head_tiles,
        emits,
        emits_padded: of.is_padded() && emits_padded(facts, of),
        always_merges,
        partials,
        // Devices do not report how many workgroups a processor runs: two, or three smaller ones, on NVIDIA's.
        busy: if few.is_some() { 3 } else { 2 } * target.processors,
        wide: wide(target, *few, of, limits).filter(|_| emits || of.is_padded() && !of.is_latent),
    }
}

/// Returns true if attention with cooperative matrices can write the activations of heads with padding: only matmuls with cooperative
/// matrices read them, and whole fours and blocks of elements are written.
fn emits_padded(facts: &Facts<'_>, of: &KvGroup) -> bool {
    let has_matrices = facts.weights.is_some()
        && facts.program.attentions().all(|attention| facts.layout(attention.out.matrix) != Layout::F32);
    let has_fours = of.unpadded_dim.is_multiple_of(4) && of.out_width().is_multiple_of(BLOCK);
    has_matrices && has_fours && !of.is_latent && !facts.program.has_bounds()
}

/// Returns true if steps of few rows can use attention with cooperative matrices (`attend_few.wgsl`): models with many
/// query heads per K/V head. With few query heads or large heads, plain code is faster.
pub fn few_works(kv: &KvLayout, limits: &Limits) -> bool {
    let works = |group: &KvGroup| group.head_dim == 64 && group.queries_per_kv() > 4 && !group.is_latent;
    limits.kv_dtype == KvDtype::F16 && kv.groups.iter().all(works)
}

/// Returns the side of the matrices of `attend_few.wgsl`, if the device and the program use it.
pub fn few(target: &Target, program: &Program, kv: &KvLayout, limits: &Limits) -> Option<u32> {
    let has_biases = program.attentions().any(|attention| attention.distance_bias.is_some());
    target.cooperative.filter(|_| target.subgroup == 32 && few_works(kv, limits) && !has_biases)
}

/// Returns the tiling of attention with cooperative matrices, if the device uses them and their memory fits.
fn wide(target: &Target, few: Option<u32>, of: &KvGroup, limits: &Limits) -> Option<Wide> {
    let memory = target.memory_beside_matrices() as usize;
    let fits = |groups: usize| {
        wide_bytes(of.head_dim, few.is_some(), groups) <= memory
            && groups * target.subgroup as usize <= target.workgroup_threads as usize
    };
    target.cooperative?;
    let tiles = |groups: usize| wide_tiles(of, limits, target.subgroup, groups);
    let wide = GROUPS.into_iter().filter(|&groups| fits(groups)).find_map(tiles)?;
    Some(Wide { from: kernels::wide_rows(target), busy: target.processors, ..wide })
}

/// Returns the bytes of workgroup memory of `attend_coop.wgsl`: K and V of a block, and per query its scores, and its weights
/// in half precision.
pub fn wide_bytes(dim: usize, has_few: bool, groups: usize) -> usize {
    let k_tile = TOKENS * (2 * dim + 16);
    let v_tile = if has_few { dim * (2 * TOKENS + 16) } else { k_tile };
    k_tile + v_tile + groups * GROUP_QUERIES * (4 * (TOKENS + 4) + 2 * (TOKENS + 8)) - 16
}

/// Returns the tiling with `groups` subgroups, if the shapes of heads and pages permit it.
pub fn wide_tiles(kv: &KvGroup, limits: &Limits, subgroup: u32, groups: usize) -> Option<Wide> {
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
        busy: 1,
    })
}
