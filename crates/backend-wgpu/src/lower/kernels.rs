//! Selection of the kernel of a matmul.

use paguro_backend::{Experts, Limits};

use super::{
    facts::Facts,
    node::{self, RowClass},
};
use crate::{layout::Layout, target::Target};

/// A matmul kernel.
#[derive(Clone, Copy, Debug)]
pub struct Matmul {
    /// Maximum rows of a step that uses it.
    pub most_rows: u32,
    /// The kind, with its numbers.
    pub kind: Kind,
}

/// Kind of a matmul kernel.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// Each group of `lanes` threads computes `rows` × `outputs` results. The workgroup has `threads` threads and declares
    /// at least `memory` bytes of workgroup memory.
    Vectors { rows: u32, outputs: u32, threads: u32, lanes: u32, memory: u32 },
    /// Tiles: each of `threads` threads, in rows of 16, computes `rows` × `outputs` results.
    Tiles { rows: u32, outputs: u32, threads: u32 },
    /// Cooperative matrices with this side: `columns` adjacent tiles, each computed by `teams` teams of `groups`
    /// subgroups along rows, with `matrices` matrices along rows and outputs per subgroup. A stage has `deep` blocks.
    Cooperative { side: u32, columns: u32, teams: u32, groups: u32, matrices: [u32; 2], deep: u32 },
}

use Kind::{Cooperative, Tiles, Vectors};

/// Rows of a kernel of vectors, if there are several.
const VECTOR_ROWS: u32 = 4;
/// Threads of a workgroup of vectors.
const VECTOR_THREADS: u32 = 256;
/// Threads that share the inputs of an output of vectors.
const LANES: u32 = 32;
/// The same for low-rank products, which have few outputs: at least this number, and at most the other.
const LOW_RANK_LANES: [usize; 2] = [128, 512];
/// The kernel of up to [`VECTOR_ROWS`] rows. It declares more workgroup memory than it needs: NVIDIA's driver allocates
/// as many registers per thread as leave room for all workgroups whose memory fits, and with five concurrent workgroups
/// instead of seven more loads are in flight.
const FEW: Kind = Vectors { rows: VECTOR_ROWS, outputs: 3, threads: 128, lanes: LANES, memory: 8448 };
/// Minimum number of outputs for each processor with which a matmul of one row occupies a device.
const WIDE: u32 = 62;
/// Maximum rows for which no matmul uses cooperative matrices. From the next row on, activations have copies in half
/// precision.
pub const FEW_ROWS: u32 = 4;
/// Blocks of weights that a thread loads before it computes, at most.
const MOST_EARLY: usize = 16;
/// Blocks of a stage of cooperative matrices.
const SPLIT_DEEP: u32 = 2;
/// Maximum rows for which longer tiles would leave too few workgroups.
const SHORT_ROWS: u32 = 1024;
/// Rows of the longest tile of cooperative matrices.
pub const MOST_ROWS: usize = 256;

/// Borders of the batch-size classes of a device with cooperative matrices: maximum rows for which workgroups split the
/// inputs of an output among teams, and for which those with few outputs still do. The suite computes whole steps of the
/// next class, so emulated ones have fewer rows.
fn class_rows(target: &Target) -> [u32; 2] {
    if target.emulated { [48, 64] } else { [128, 256] }
}

/// Kernels of a matmul with the given outputs and blocks of inputs, by number of rows. If `cooperative` is given, steps of
/// more than `few` and more than [`few_rows`] rows use cooperative matrices with this side.
pub fn matmuls(
    target: &Target,
    (cooperative, few): (Option<u32>, u32),
    layout: Layout,
    outputs: u32,
    blocks: usize,
) -> Vec<Matmul> {
    let of = |most_rows: u32, kind: Kind| Matmul { most_rows, kind };
    let (software, processors) = (target.is_software, target.processors as u32);
    // Weights of four bits are loaded fast, so a group computes two outputs if enough workgroups remain.
    let both = layout == Layout::Q4 && !software && outputs >= WIDE * processors;
    let one = vectors(1, 1 + u32::from(both));
    let mut matmuls = vec![of(1, one)];
    if layout.is_quantized() && !software {
        matmuls.push(of(VECTOR_ROWS, FEW));
    }
    // With less unrolled code, software drivers compile kernels in a fraction of the time.
    let several = if software { vectors(2, 1) } else { vectors(VECTOR_ROWS, 4) };
    match cooperative.filter(|_| layout != Layout::F32) {
        None if software => {
            let tiles = Tiles { rows: 1, outputs: 2, threads: 256 };
            matmuls.extend([of(3, several), of(u32::MAX, tiles)]);
        }
        None => {
            let tiles = Tiles { rows: 8, outputs: 4, threads: 128 };
            // Matmuls with few outputs, such as those of routers, have few tiles of 64 rows and 64 outputs, which would leave
            // most of a device idle.
            let most_rows = (processors * 64 * 64 / outputs.max(1)).max(128);
            matmuls.extend([of(most_rows, several), of(u32::MAX, tiles)]);
        }
        Some(side) => {
            let few = few_rows(layout).max(few);
            let [split_rows, team_rows] = class_rows(target);
            matmuls.push(of(few, several));
            let splits = split(side, target, [few, split_rows], outputs, blocks as u32);
            matmuls.extend(splits);
            let teams = tall_teams(processors, side, outputs);
            let tall = tall(side, team_rows, teams);
            matmuls.extend(if fits(target, &tall[0]) && teams > 1 { &tall[..] } else { &tall[1..] });
        }
    }
    matmuls
}

fn vectors(rows: u32, outputs: u32) -> Kind {
    Vectors { rows, outputs, threads: VECTOR_THREADS, lanes: LANES, memory: 0 }
}

/// Returns the kernel of a matmul of one row, with `tile` outputs per workgroup if given.
pub fn one_row(target: &Target, layout: Layout, outputs: u32, tile: Option<u32>) -> Matmul {
    let Some(tile) = tile else { return matmuls(target, (None, 0), layout, outputs, 1)[0] };
    let threads = (32 * tile).min(target.most_threads);
    let outputs = tile / (threads / LANES);
    Matmul { most_rows: 1, kind: Vectors { rows: 1, outputs, threads, lanes: LANES, memory: 0 } }
}

/// Bytes of workgroup memory for B and products of adapters in a matmul of one row, at most.
pub const STAGED_BYTES: usize = 64 * 4 * 16 + 512 + 256 * 4;

/// Returns the number of vectors of B, each of four or eight ranks, that a matmul of one row with `tile` outputs per workgroup loads
/// before activations are ready.
pub fn staged_vectors(tile: u32) -> u32 {
    (256 / tile).clamp(1, 4)
}

/// Rows of the tiles of cooperative matrices of low-rank products.
pub const LOW_RANK_TILE: usize = 16;

/// Returns the most rows of an item of low-rank products without cooperative matrices.
pub fn low_rank_rows(target: &Target) -> usize {
    if target.is_software { 2 } else { VECTOR_ROWS as usize }
}

/// Returns the number of threads that share the inputs of a low-rank product, of `blocks` blocks: one for each, if there are as many.
pub fn low_rank_lanes(target: &Target, blocks: usize) -> u32 {
    let [least, most] = LOW_RANK_LANES;
    let most = most.min(target.most_threads as usize).max(least);
    let lanes = blocks.div_ceil(blocks.div_ceil(most).max(1));
    lanes.next_multiple_of(LANES as usize).max(least) as u32
}

/// Kernels of low-rank products of `blocks` blocks of inputs, by number of rows. Those with cooperative matrices are for the steps in
/// which matmuls have longer tiles. All others sum in one order.
pub fn low_rank(target: &Target, cooperative: Option<u32>, blocks: usize) -> Vec<Matmul> {
    let lanes = low_rank_lanes(target, blocks);
    let vectors = |most_rows: u32, rows: u32, outputs: u32, threads: u32| {
        let threads = (threads / lanes).max(1) * lanes;
        Matmul { most_rows, kind: Vectors { rows, outputs, threads, lanes, memory: 0 } }
    };
    let several = |most_rows: u32| vectors(most_rows, low_rank_rows(target) as u32, 2, VECTOR_THREADS);
    // A few large workgroups beside those of the matmul, which are often one for each processor.
    let mut kernels = vec![vectors(1, 1, 1, target.most_threads.min(1024))];
    match cooperative {
        None => kernels.push(several(u32::MAX)),
        Some(side) => {
            let wide = |teams: u32| {
                let matrices = [LOW_RANK_TILE as u32 / side, 32 / side];
                let kind = Cooperative { side, columns: 1, teams, groups: 1, matrices, deep: SPLIT_DEEP };
                Matmul { most_rows: u32::MAX, kind }
            };
            kernels.push(several(class_rows(target)[0]));
            kernels.push(if fits(target, &wide(8)) { wide(8) } else { wide(4) });
        }
    }
    kernels
}

/// Returns true if all steps of a class compute this matmul with cooperative matrices.
pub fn is_cooperative(facts: &Facts<'_>, class: RowClass, op: &node::Matmul) -> bool {
    let layout = facts.layout(op.linears[0].matrix);
    facts.target.cooperative.is_some()
        && layout != Layout::F32
        && !op.in_order
        && class.from > few_rows(layout).max(op.few) as usize
}

/// Returns true if a workgroup of a matmul of one row has room for its own activations beside its sums.
pub fn has_room(target: &Target, layout: Layout, blocks: usize) -> bool {
    let bytes = 40 * blocks.next_multiple_of(64) + (8 << 10);
    !layout.is_quantized() || bytes <= target.workgroup_memory as usize
}

/// Returns true if a workgroup of `sum_matvec.wgsl` has room for the sums of as many experts, and their activations.
pub fn has_room_for_sums(target: &Target, experts: usize, blocks: usize) -> bool {
    let outputs = 32 * 32 / target.most_threads.min(1024) as usize;
    let bytes = 4 * 32 * experts * 34 + 40 * (experts * blocks).next_multiple_of(64) + (1 << 10);
    bytes <= target.workgroup_memory as usize && experts * outputs <= MOST_EARLY
}

/// Returns the number of rows from which all matmuls of a step sum in the same order.
pub fn exact_rows(target: &Target) -> usize {
    match target.cooperative {
        None => 1,
        Some(_) => 1 + class_rows(target)[1] as usize,
    }
}

/// Returns the number of rows from which steps use attention with cooperative matrices.
pub fn wide_rows(target: &Target) -> usize {
    1 + class_rows(target)[0] as usize
}

/// Maximum rows of a matmul without cooperative matrices. Quants have fast dot products of bytes, so cooperative matrices
/// pay later than for floats, and last for Q8, which has the most bytes to convert.
pub fn few_rows(layout: Layout) -> u32 {
    match layout {
        Layout::F32 | Layout::F16 | Layout::Bf16 => FEW_ROWS,
        Layout::Q8 => 12,
        Layout::Q2 | Layout::Q3 | Layout::Q4 | Layout::Q5 | Layout::Q6 => 8,
    }
}

/// Returns true if a workgroup of cooperative matrices has room on the device.
fn fits(target: &Target, matmul: &Matmul) -> bool {
    matmul.shared_bytes() <= target.memory_beside_matrices()
        && matmul.threads(target) <= target.workgroup_threads
}

/// Returns the kernels with cooperative matrices whose workgroups split inputs among teams, or have several adjacent
/// tiles of outputs, with as many subgroups as fit. They are for steps of more than `rows[0]` and up to `rows[1]` rows.
fn split(side: u32, target: &Target, rows: [u32; 2], outputs: u32, blocks: u32) -> Vec<Matmul> {
    let of = |most: u32| {
        let (tiles, stages) = (outputs.div_ceil(2 * side), blocks.div_ceil(SPLIT_DEEP));
        let [columns, teams] = shares(target.processors as u32, tiles, stages, most);
        splits(side, rows, columns, teams)
    };
    let most = of(8);
    if most.iter().all(|matmul| fits(target, matmul)) { most } else { of(4) }
}

/// Returns the faster split of `most` subgroups of a workgroup: the number of adjacent tiles, and the number of teams
/// that share the inputs of each. Both occupy a processor equally, but adjacent tiles read activations once, and teams
/// have more workgroups. A processor runs one workgroup. The work before and after the stages takes as long as about two
/// and a half stages.
fn shares(processors: u32, tiles: u32, stages: u32, most: u32) -> [u32; 2] {
    let teams = |columns: u32| 1 << (most / columns).ilog2();
    let time = |&columns: &u32| {
        let rounds = tiles.div_ceil(columns).div_ceil(processors);
        // Stages are longer where more subgroups wait for each other's memory.
        rounds * (2 * stages.div_ceil(teams(columns)) + 5) * (6 + columns * teams(columns))
    };
    let columns = (1..=most).rev().min_by_key(time).unwrap_or(1);
    [columns, teams(columns)]
}

/// Returns the kernels with `columns` adjacent tiles and `teams` teams, whose tiles have 16, 32 and 64 rows with matrices
/// of 16, for more rows than `few` up to `most`.
fn splits(side: u32, [few, most]: [u32; 2], columns: u32, teams: u32) -> Vec<Matmul> {
    let tiles = [(16, 1), (32, 2), (most, 4)].into_iter().filter(|&(most_rows, _)| most_rows > few);
    let matmul = |(most_rows, rows)| Matmul {
        most_rows,
        kind: Cooperative { side, columns, teams, groups: 1, matrices: [rows, 2], deep: SPLIT_DEEP },
    };
    tiles.map(matmul).collect()
}

/// Returns the number of teams of longer tiles in steps of up to two of them: two, if tiles are too few to occupy the
/// device with one.
fn tall_teams(processors: u32, side: u32, outputs: u32) -> u32 {
    if 2 * outputs.div_ceil(4 * side) <= processors { 2 } else { 1 }
}

/// The kernels with cooperative matrices of this side that have four subgroups along rows: of shorter tiles, for up to
/// `team_rows` rows with `teams` teams, and of shorter and of longer tiles without teams.
fn tall(side: u32, team_rows: u32, teams: u32) -> [Matmul; 3] {
    [(team_rows, 2, teams), (SHORT_ROWS, 2, 1), (u32::MAX, 4, 1)].map(|(most_rows, rows, teams)| Matmul {
        most_rows,
        kind: Cooperative { side, columns: 1, teams, groups: 4, matrices: [rows, 4], deep: 2 },
    })
}

/// Returns the kernel for one expert and one row.
pub fn of_pairs() -> Matmul {
    Matmul { most_rows: 1, kind: vectors(1, 1) }
}

/// Rows of a short tile of rows that share an expert.
const SHORT_TILE: u32 = 16;

/// Returns the rows of a short and of a long tile. In the largest step, an expert has `rows_of_expert` rows on average.
pub fn tile_rows(target: &Target, rows_of_expert: usize) -> [u32; 2] {
    match target.is_software {
        true => [SHORT_TILE; 2],
        false => [SHORT_TILE, if rows_of_expert >= 48 { 64 } else { 32 }],
    }
}

/// Returns the kernel for tiles of rows of one expert.
pub fn of_tiles(target: &Target, tile: u32) -> Matmul {
    let kind = match target.is_software {
        true => Tiles { rows: tile / 16, outputs: 2, threads: 256 },
        false => Tiles { rows: tile / 8, outputs: 4, threads: 128 },
    };
    Matmul { most_rows: u32::MAX, kind }
}

/// Returns the kernel with cooperative matrices of this side. All tile heights sum in one order.
pub fn of_cooperative_tiles(side: u32, tile: u32) -> Matmul {
    let rows = tile / side;
    let kind = if tile == SHORT_TILE {
        // One subgroup has all rows of its outputs.
        Cooperative { side, columns: 4, teams: 1, groups: 1, matrices: [rows, 2], deep: 2 }
    } else {
        let groups = rows.min(4);
        Cooperative { side, columns: 1, teams: 1, groups, matrices: [rows / groups, 4], deep: 2 }
    };
    Matmul { most_rows: u32::MAX, kind }
}

/// All kernels with cooperative matrices of this side.
pub fn all_cooperative(side: u32) -> Vec<Matmul> {
    let shared = [[1, 4], [1, 8], [2, 4], [7, 1]].into_iter();
    shared
        .flat_map(|[columns, teams]| splits(side, [FEW_ROWS, 128], columns, teams))
        .chain(tall(side, 256, 2))
        .collect()
}

/// Returns the kernel of a matmul for a step of `all` rows, and its workgroups for `rows` of them. Rows are along x, so
/// that workgroups that run at the same time share weights.
pub fn matmul(matmuls: &[Matmul], all: u32, rows: u32, outputs: u32) -> (usize, [u32; 2]) {
    let kernel = matmuls.iter().position(|matmul| all <= matmul.most_rows).unwrap_or(0);
    let covers = matmuls[kernel].covers();
    (kernel, [rows.div_ceil(covers[0]), outputs.div_ceil(covers[1])])
}

impl Matmul {
    /// Rows and outputs of a workgroup.
    pub fn covers(&self) -> [u32; 2] {
        match self.kind {
            Vectors { rows, outputs, threads, lanes, .. } => [rows, threads / lanes * outputs],
            Tiles { rows, outputs, threads } => [threads / 16 * rows, 16 * outputs],
            Cooperative { side, columns, groups, matrices, .. } => {
                [side * groups * matrices[0], side * matrices[1] * columns]
            }
        }
    }

    /// Threads of a workgroup.
    pub fn threads(&self, target: &Target) -> u32 {
        match self.kind {
            Vectors { threads, .. } | Tiles { threads, .. } => threads,
            Cooperative { .. } => self.groups() * target.subgroup,
        }
    }

    /// Sets the threads of a workgroup of vectors.
    pub fn with_threads(mut self, to: u32) -> Self {
        if let Vectors { threads, .. } = &mut self.kind {
            *threads = to;
        }
        self
    }

    /// Returns true for cooperative matrices.
    pub fn is_cooperative(&self) -> bool {
        matches!(self.kind, Cooperative { .. })
    }

    /// Returns true for cooperative matrices whose tiles are those of steps with many rows.
    pub fn is_tall(&self) -> bool {
        matches!(self.kind, Cooperative { groups, .. } if groups > 1)
    }

    /// Returns the fours of results that a thread stores of each matrix, if a subgroup of this many threads can store its own sums.
    pub fn quads(&self, subgroup: u32) -> Option<u32> {
        let Cooperative { side, columns: 1, teams: 1, groups, .. } = self.kind else { return None };
        let quads = side * side / 4;
        (side == 16 && groups > 1 && quads.is_multiple_of(subgroup)).then_some(quads / subgroup)
    }

    /// Subgroups of cooperative matrices.
    fn groups(&self) -> u32 {
        let Cooperative { columns, teams, groups, .. } = self.kind else { return 0 };
        columns * teams * groups
    }

    /// Bytes of workgroup memory of cooperative matrices: a piece of weights in half precision for each team, and a matrix of each
    /// subgroup.
    fn shared_bytes(&self) -> u32 {
        let Cooperative { side, teams, deep, .. } = self.kind else { return 0 };
        teams * self.covers()[1] * (64 * deep + 16) + self.groups() * side * side * 4
    }

    /// Its name, for weights in a layout.
    pub fn name(&self, layout: Layout) -> String {
        let ([rows, outputs], layout) = (self.covers(), layout.name());
        match self.kind {
            Vectors { rows: 1, .. } => format!("matvec1_{layout}"),
            Vectors { .. } => format!("matvec{rows}x{outputs}_{layout}"),
            Tiles { .. } => format!("matmul{rows}_{layout}"),
            Cooperative { .. } => format!("coop{rows}x{outputs}_{layout}"),
        }
    }
}

/// Division of a step's rows into tiles of one expert each (`route_tiles.wgsl`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertTiles {
    /// Number of experts.
    pub count: u32,
    /// Experts of a row.
    pub used: u32,
    /// Places of a tile.
    pub tile: u32,
}

impl ExpertTiles {
    /// Returns the maximum number of tiles of a step with `rows` rows.
    pub fn most(self, rows: u32) -> u32 {
        let pairs = rows * self.used;
        pairs / self.tile + self.count.min(pairs)
    }
}

/// Fewest rows of a step with tiles of cooperative matrices.
const TILED_ROWS: usize = 17;

/// Distribution of the rows of a step to experts.
#[derive(Clone, Copy)]
pub struct Shares {
    /// Rows from which on they are grouped by expert.
    tiled_from: usize,
    /// Rows from which on their tiles are long.
    long_from: usize,
    /// Short and long tiles.
    tiles: [ExpertTiles; 2],
}

impl Shares {
    /// Returns the distribution to a mixture of experts.
    pub fn of(target: &Target, experts: &Experts, limits: &Limits) -> Self {
        let (count, used) = (experts.count, experts.router.used);
        // With fewer than two rows for each expert, a tile is mostly empty.
        let tiled_from = (2 * count / used).max(2);
        let tiled_from = match target.cooperative {
            // All tiles have cooperative matrices. Other kernels for few rows would save less time than they cost.
            Some(_) => tiled_from.max(TILED_ROWS),
            None => tiled_from,
        };
        let [short, long] = tile_rows(target, limits.max_rows * used / count);
        // The number of rows at which the average expert fills a short tile.
        let long_from =
            if short == long { tiled_from } else { tiled_from.max(short as usize * count / used) };
        let tiles = |tile| ExpertTiles { count: count as u32, used: used as u32, tile };
        Self { tiled_from, long_from, tiles: [tiles(short), tiles(long)] }
    }

    /// Returns the first rows of other classes of steps.
    pub fn borders(self) -> [usize; 2] {
        [self.tiled_from, self.long_from]
    }

    /// Returns the tiles of steps of a class of rows, if they have some.
    pub fn tiles(self, class: RowClass) -> Option<ExpertTiles> {
        let is_long = class.from >= self.long_from;
        (class.from >= self.tiled_from).then_some(self.tiles[usize::from(is_long)])
    }
}

/// Returns the kernels that steps of a class of rows use.
pub fn of_class(matmuls: &[Matmul], class: RowClass) -> Vec<Matmul> {
    let kernel = |rows: usize| {
        let rows = u32::try_from(rows).unwrap_or(u32::MAX);
        matmuls.iter().position(|matmul| rows <= matmul.most_rows).unwrap_or(0)
    };
    matmuls[kernel(class.from)..=kernel(class.to - 1)].to_vec()
}
