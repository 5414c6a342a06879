//! Rotation and attention.

use paguro_backend::{Attend, Linear, LoadError, NormQkvRopeStore, Program, Rope, RopeStyle};

use super::{
    Grid, Launch, Lowering, Place, TILE_QUERIES,
    Value::{F, I, U},
    wgsl,
};
use crate::{
    device::Device,
    layout::BLOCK,
    plan::{COARSE_FROM, COARSE_SPLIT, FINE_SPLIT, Tile},
    template::Constants,
};

impl Lowering<'_> {
    pub(super) fn rope_store(
        &mut self,
        op: &NormQkvRopeStore,
        [q, k, v]: [Place; 3],
    ) -> Result<Launch, LoadError> {
        let Program { heads, .. } = *self.program;
        let kv_heads = self.program.kv.kv_heads;
        let rope = &self.program.ropes[op.rope];
        let mut constants = vec![
            ("Q_STRIDE", U(q.stride as u32)),
            ("K_STRIDE", U(k.stride as u32)),
            ("K_FIRST", U(k.first as u32)),
            ("V_STRIDE", U(v.stride as u32)),
            ("V_FIRST", U(v.first as u32)),
            ("PAIRS", U(rope.frequencies.len() as u32)),
            ("INTERLEAVED", U(u32::from(rope.style == RopeStyle::Interleaved))),
        ];
        constants.extend(self.heads(op.kv.group));
        let [k_pages, v_pages] = self.pages[op.kv.slot].clone();
        let [far, near] = self.ropes[op.rope].clone();
        let (step, queries) = (self.step.clone(), self.queries.clone());
        let mut buffers = vec![
            ("q", &q.buffer),
            ("k", &k.buffer),
            ("v", &v.buffer),
            ("step", &step),
            ("far", &far),
            ("near", &near),
            ("queries", &queries),
            ("k_pages", &k_pages),
            ("v_pages", &v_pages),
        ];
        let (q_norm, k_norm);
        if let Some(norm) = op.q_norm {
            q_norm = self.vector(norm.weight)?;
            buffers.push(("q_norm", &q_norm));
            constants.extend([("Q_NORM", U(1)), ("Q_EPS", F(norm.eps))]);
        }
        if let Some(norm) = op.k_norm {
            k_norm = self.vector(norm.weight)?;
            buffers.push(("k_norm", &k_norm));
            constants.extend([("K_NORM", U(1)), ("K_EPS", F(norm.eps))]);
        }
        let grid = Grid::Each((heads + 2 * kv_heads) as u32);
        self.launch("rope_store", wgsl!("args", "rope_store"), constants, &buffers, grid, op.kv.group)
    }

    pub(super) fn attend(
        &mut self,
        op: &Attend,
        project: &Linear,
        body: &mut Vec<Launch>,
    ) -> Result<(), LoadError> {
        let kv = &self.program.kv;
        let group = self.program.heads / kv.kv_heads;
        let teams = Teams::new(self.device, kv.head_dim);
        let window = kv.groups[op.kv.group].window;
        let log2_e = std::f32::consts::LOG2_E;
        let mut constants = vec![
            ("TILE_HEADS", U(self.tiling.heads as u32)),
            ("HEAD_TILES", U(group.div_ceil(self.tiling.heads) as u32)),
            ("GROUP_HEADS", U(group as u32)),
            ("FINE", U(FINE_SPLIT as u32)),
            ("COARSE", U(COARSE_SPLIT as u32)),
            ("COARSE_FROM", U(COARSE_FROM as u32)),
            ("LANES", U(teams.lanes)),
            ("TEAMS", U(THREADS / teams.lanes)),
            ("VPL", U(teams.vectors)),
            ("UNROLL", U(teams.unroll)),
            ("ONE_PAGE", U(u32::from(THREADS / teams.lanes * teams.unroll <= self.limits.block_size as u32))),
            ("SCALE", F(if op.soft_cap.is_some() { op.scale } else { op.scale * log2_e })),
        ];
        if let Some(window) = window {
            constants.push(("WINDOW", I(window.min(i32::MAX as u32) as i32)));
        }
        if let Some(cap) = op.soft_cap {
            constants.extend([("CAP", U(1)), ("SOFT_CAP", F(cap))]);
        }
        constants.extend(self.heads(op.kv.group));
        let mut pages = self.pages[op.kv.slot].clone();
        let mut name = "attend";
        if let Some(gathered) = self.gathered.clone() {
            name = "attend_gathered";
            let vecs = kv.kv_heads * kv.head_dim * self.limits.block_size / 8;
            let constants = vec![("VECS", U(vecs as u32))];
            for (pages, gathered) in pages.iter().zip(&gathered) {
                let step = self.step.clone();
                let buffers = [("step", &step), ("pages", pages), ("gathered", gathered)];
                let files = wgsl!("args", "gather");
                body.push(self.launch("gather", files, constants.clone(), &buffers, Grid::Pages, 0)?);
            }
            pages = gathered;
        }
        let [k_pages, v_pages] = pages;
        let (step, queries) = (self.step.clone(), self.queries.clone());
        let (part_sums, part_tops) = (self.part_sums.clone(), self.part_tops.clone());
        let buffers = [
            ("step", &step),
            ("queries", &queries),
            ("k_pages", &k_pages),
            ("v_pages", &v_pages),
            ("part_sums", &part_sums),
            ("part_tops", &part_tops),
        ];
        let workgroups = self.tiling.workgroups as u32;
        for (tile, rows) in [(Tile::Row, 1), (Tile::Rows, self.tiling.rows)] {
            if tile == Tile::Rows && rows == 1 {
                continue;
            }
            let queries = ((rows * self.tiling.heads) as u32).next_power_of_two();
            let halves = queries.min(2);
            let fold = fold(queries, teams.lanes);
            let mut constants = constants.clone();
            constants.extend([("HALVES", U(halves)), ("HALF", U(queries / halves))]);
            if self.tiling.emits {
                let blocks = queries as usize * kv.head_dim / BLOCK;
                constants.extend([("EMITS", U(1)), ("STAGED", U(blocks as u32 * 33))]);
                constants.extend(self.emit_for(&[project], self.program.heads * kv.head_dim));
            }
            let [args, power, emit, attend] = *wgsl!("args", "fold", "emit", "attend");
            let grid = Grid::Attention(tile, workgroups);
            let name = format!("{name}{rows}");
            let files = match self.tiling.emits {
                true => [args, power, &fold, emit, attend].to_vec(),
                false => [args, power, &fold, attend].to_vec(),
            };
            body.push(self.launch(&name, &files, constants, &buffers, grid, op.kv.group)?);
        }
        self.merge_group = op.kv.group;
        Ok(())
    }

    pub(super) fn merge(&mut self, project: &Linear) -> Result<Launch, LoadError> {
        let dim = self.program.kv.head_dim;
        let width = self.program.heads * dim;
        // As many heads as make whole blocks.
        let heads = [1, 2, 4].into_iter().find(|heads| (heads * dim).is_multiple_of(BLOCK)).unwrap_or(4);
        let mut constants =
            vec![("MERGE_HEADS", U(heads as u32)), ("STAGED", U((heads * dim).div_ceil(BLOCK) as u32 * 33))];
        constants.extend(self.emit_for(&[project], width));
        constants.extend(self.heads(self.merge_group));
        let (step, part_sums, part_tops) =
            (self.step.clone(), self.part_sums.clone(), self.part_tops.clone());
        let buffers = [("step", &step), ("part_sums", &part_sums), ("part_tops", &part_tops)];
        let files = wgsl!("args", "fold", "emit", "attend_merge");
        let grid = Grid::Merge(self.program.heads.div_ceil(heads) as u32);
        self.launch("attend_merge", files, constants, &buffers, grid, self.merge_group)
    }

    /// Shapes of heads and pages.
    pub(super) fn heads(&self, kv_group: usize) -> Constants {
        let kv = &self.program.kv;
        vec![
            ("HEADS", U(self.program.heads as u32)),
            ("KV_HEADS", U(kv.kv_heads as u32)),
            ("DIM", U(kv.head_dim as u32)),
            ("PAGE", U(self.limits.block_size as u32)),
            ("GROUP", U(kv_group as u32)),
        ]
    }
}

/// Threads of a workgroup of attention.
const THREADS: u32 = 128;

/// How the threads of attention share a token.
struct Teams {
    /// Threads of a team.
    lanes: u32,
    /// Times eight dimensions that each of them has.
    vectors: u32,
    /// Tokens that a team reads at once.
    unroll: u32,
}

impl Teams {
    fn new(device: &Device, dim: usize) -> Self {
        let all = (dim / 8) as u32;
        let most = device.team_limit() as u32;
        // Not less than there are queries: each needs a lane that has its score.
        let lanes = all.next_power_of_two().max(TILE_QUERIES as u32).min(most);
        let vectors = all.div_ceil(lanes);
        let unroll = if device.is_software { 2 } else { 4 };
        Self { lanes, vectors, unroll: (unroll / vectors).max(1) }
    }
}

/// A function that adds up the scores that each lane of a team has for its part of the dimensions. With every step half as many
/// scores are left for a lane, so that in the end each has the whole score of one query; all sums have the order of a tree.
fn fold(queries: u32, lanes: u32) -> String {
    let names = |prefix: &str, count: u32| (0..count).map(|i| format!("{prefix}_{i}")).collect::<Vec<_>>();
    let parameters: String = names("s", queries).iter().map(|name| format!(", {name}: f32")).collect();
    let mut source = format!("fn fold(lane: u32{parameters}) -> f32 {{\n");
    let mut left = names("s", queries);
    let mut mask = lanes / 2;
    while mask > 0 {
        let half = left.len().div_ceil(2);
        let sums = names(&format!("m{mask}"), half as u32);
        for (index, sum) in sums.iter().enumerate() {
            let a = &left[index];
            let line = match left.get(index + half) {
                Some(b) => format!(
                    "let {sum} = select({a}, {b}, (lane & {mask}u) != 0u) + \
                     subgroupShuffleXor(select({b}, {a}, (lane & {mask}u) != 0u), {mask}u);"
                ),
                None => format!("let {sum} = {a} + subgroupShuffleXor({a}, {mask}u);"),
            };
            source.push_str(&format!("  {line}\n"));
        }
        left = sums;
        mask /= 2;
    }
    source + &format!("  return {};\n}}\n", left[0])
}

/// Cosines and sines of positions 256 i, and of positions below 256 with the rope's magnitude.
pub(super) fn turns(rope: &Rope, context: usize) -> [Vec<f32>; 2] {
    let table = |positions: usize, step: usize, magnitude: f64| {
        let position = |index: usize| (index * step) as f64;
        (0..positions)
            .flat_map(|index| {
                rope.frequencies.iter().map(move |&frequency| position(index) * f64::from(frequency))
            })
            .flat_map(|angle| [(magnitude * angle.cos()) as f32, (magnitude * angle.sin()) as f32])
            .collect()
    };
    [table(context.div_ceil(256), 256, 1.0), table(256, 1, f64::from(rope.magnitude))]
}
