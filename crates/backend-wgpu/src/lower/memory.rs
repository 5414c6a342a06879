//! Sizes of buffers, and the limits of shapes.

use paguro_backend::{AttentionMode, Limits, LoadError};

use super::{
    LOGIT_ROWS, attention, coop_attention, experts::Room, handoff_partials, kernels, latent, layer_input,
    recurrent, unsupported,
};
use crate::{
    adapter::LEAST_THREADS,
    device::Device,
    layout::BLOCK,
    ops::{KvGroup, Program},
    pages::{self, page_bytes, page_words},
    plan::{self, Tiling},
    runner::page_kernel_words,
};

/// Elements of a head, at most: a workgroup of attention has its queries and sums in its memory.
const MOST_HEAD_DIM: usize = 640;
/// Maximum queries of an attention tile, which share reads of K and V.
const TILE_QUERIES: usize = 8;
/// Maximum queries of an attention tile on software drivers, where unrolled code takes long to compile.
const SOFTWARE_TILE_QUERIES: usize = 4;

/// Computes the attention tiles and splits of each K/V group.
pub(super) fn tilings(device: &Device, program: &Program, limits: &Limits) -> Vec<Tiling> {
    program.kv.groups.iter().map(|group| tiling(device, program, group, limits)).collect()
}

fn tiling(device: &Device, program: &Program, of: &KvGroup, limits: &Limits) -> Tiling {
    let (rows, heads, kv_heads, dim) = (limits.max_rows, of.heads, of.kv_heads, of.head_dim);
    let queries_per_kv = of.queries_per_kv();
    let few = coop_attention::few(device, program, limits);
    let most = if device.is_software && few.is_none() { SOFTWARE_TILE_QUERIES } else { TILE_QUERIES };
    // Larger heads have no room for more in the memory of a workgroup.
    let queries = if dim > 128 { most.min(4) } else { most };
    let (tile_heads, head_tiles) = (queries_per_kv.min(queries), queries_per_kv.div_ceil(queries));
    let splits = plan::splits(limits.max_context);
    let partials = rows + (limits.max_sequences * splits).min(8192);
    let partials = partials.min(device.binding_limit() as usize / 4 / (heads * (dim + 4))).max(rows);
    let emits =
        dim.is_multiple_of(BLOCK) && !of.is_latent && queries * dim / 4 <= attention::THREADS as usize;
    Tiling {
        rows: (queries / tile_heads).max(1),
        heads: tile_heads,
        workgroups: kv_heads * head_tiles,
        emits,
        always_merges: program.always_merges(),
        partials,
        // Devices do not report how many workgroups run concurrently. Each processor of an H200 runs two, or three smaller
        // ones.
        busy: match few {
            Some(_) => 3 * device.rules.processors,
            None => 2 * device.rules.processors,
        },
        wide: coop_attention::wide(device, program, of, limits).filter(|_| emits),
    }
}

/// Elements of all sums of partial results of attention, and of all maxima with sums of weights.
pub(super) fn partials(program: &Program, tilings: &[Tiling]) -> [usize; 2] {
    let most = |of: fn(&KvGroup) -> usize| {
        let groups = program.kv.groups.iter().zip(tilings);
        groups.map(|(group, tiling)| tiling.partials * of(group)).max().unwrap_or(0)
    };
    [most(KvGroup::q_width), most(|group| 2 * group.heads)]
}

/// Elements of the widest rows of queries and of keys that matmuls make.
pub(super) fn qkv_widths(program: &Program) -> [usize; 2] {
    let groups = || program.kv.groups.iter().filter(|group| !group.is_latent);
    let kv = groups().map(|group| group.kv_heads * group.head_dim).max().unwrap_or(0);
    [groups().map(KvGroup::q_width).max().unwrap_or(0), kv]
}

/// Returns the blocks of the activation buffers, and the words of their half-precision copies.
pub(super) fn activation_words(device: &Device, program: &Program, limits: &Limits) -> (usize, usize) {
    let mixers = recurrent::Room::of(program).widest;
    let latent = latent::Room::of(program).widest;
    let embeds = layer_input::Room::of(program).width;
    let room = Room::of(device, program, limits);
    let widths =
        [program.hidden, qkv_widths(program)[0], program.ffn, mixers, latent, embeds, room.narrow_width];
    let widest = widths.map(|width| width.div_ceil(BLOCK)).into_iter().max().unwrap_or(1);
    let rows = limits.max_rows.max(LOGIT_ROWS);
    let of_experts = room.act_blocks;
    let for_experts = if of_experts > 0 { (of_experts + BLOCK) * 16 } else { 0 };
    // Cooperative matrices read whole tiles, including unwritten rows and blocks.
    let halves = match device.cooperative {
        None => 0,
        Some(_) => ((rows.next_multiple_of(kernels::MOST_ROWS) * widest + BLOCK) * 16).max(for_experts),
    };
    ((rows * widest).max(of_experts), halves)
}

/// Returns the bytes of all buffers besides weights and pages. A test compares the result with the allocations of a
/// load.
pub fn buffer_bytes(device: &Device, program: &Program, limits: &Limits) -> u64 {
    let Program { hidden, ffn, vocab, .. } = *program;
    let (rows, outputs) = (limits.max_rows, limits.max_outputs.max(1));
    let [q, kv] = qkv_widths(program);
    let tilings = tilings(device, program, limits);
    let (blocks, halves) = activation_words(device, program, limits);
    let pairs: usize = program.ropes.iter().map(|rope| rope.frequencies.len()).sum();
    let rope_tables = 2 * pairs * (limits.max_context.div_ceil(256) + 256);
    let room = Room::of(device, program, limits);
    let matmuls = room.scratch(rows, [q, kv, ffn]).iter().sum::<usize>();
    let branch = if program.has_joins() { rows * hidden } else { 0 };
    // Twice, if steps of many rows use partials without handoff.
    let copies = 1 + usize::from(
        has_wide(&tilings) && handoff_partials::uses_partials_handoff(device, program, limits, &tilings),
    );
    let partials = copies * partials(program, &tilings).iter().sum::<usize>();
    let logit_rows = limits.max_outputs.clamp(1, LOGIT_ROWS);
    let masks = logit_rows.max(outputs.min(256)) * vocab.div_ceil(32);
    let sampling = logit_rows * 2 * (vocab + hidden) + 4 * crate::sampler::room(logit_rows, vocab) + masks;
    let gathered = match limits.attention {
        AttentionMode::Paged => 0,
        AttentionMode::Gather => {
            2 * plan::tables(&program.kv, limits)
                * page_words(&program.kv, limits.block_size, limits.kv_dtype)
        }
    };
    let page_kernels = match pages::have_kinds(program, limits.kv_dtype) {
        true => page_kernel_words(
            program.state.bytes(),
            page_bytes(&program.kv, limits.block_size, limits.kv_dtype),
            limits,
        ),
        false => 0,
    };
    let words = plan::words(&program.kv, limits, &tilings)
        + page_kernels
        + rows * (2 * hidden + program.kv.q_width())
        + 2 * (blocks * 42 + 2 * halves)
        + rope_tables
        + matmuls
        + branch
        + room.words()
        + recurrent::Room::of(program).words(rows)
        + latent::Room::of(program).words(rows)
        + layer_input::Room::of(program).words(rows)
        + partials
        + sampling
        + gathered
        + 12 * outputs;
    4 * words as u64
}

/// Returns true if attention in steps of many rows uses cooperative matrices.
pub(super) fn has_wide(tilings: &[Tiling]) -> bool {
    tilings.iter().any(|tiling| tiling.wide.is_some())
}

/// Returns an error if the program has a shape that the kernels do not support.
pub(super) fn check_supported(device: &Device, program: &Program, limits: &Limits) -> Result<(), LoadError> {
    for KvGroup { head_dim: dim, is_latent, .. } in &program.kv.groups {
        // For larger heads, a workgroup of the merge computes a whole head.
        let fits = if *dim > 256 {
            (dim.is_multiple_of(BLOCK) || *is_latent) && *dim <= MOST_HEAD_DIM
        } else {
            true
        };
        if !dim.is_multiple_of(8) || !fits {
            let supported = format!("multiples of 8 up to 256 and of {BLOCK} up to {MOST_HEAD_DIM} work");
            return Err(unsupported(device, format!("head_dim {dim}"), &supported));
        }
    }
    if !128_usize.is_multiple_of(limits.block_size) || limits.block_size < 16 {
        let what = format!("pages of {} tokens", limits.block_size);
        return Err(unsupported(device, what, "16, 32, 64 and 128 work"));
    }
    if device.limits.max_compute_workgroup_storage_size < 28 << 10
        || device.limits.max_compute_invocations_per_workgroup < LEAST_THREADS
    {
        let what = "attention with its workgroup memory".to_owned();
        return Err(unsupported(device, what, "28 KiB and 256 threads for each workgroup are needed"));
    }
    Ok(())
}
