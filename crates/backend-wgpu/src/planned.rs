//! Launches of one step: kernels, arguments and numbers of workgroups.

use std::iter;

use crate::{
    emit::{Grid, Kernel, Launch, Model},
    kernel_statistics::KernelStatistics,
    lower::kernels::matmul,
    plan::{Args, Plan, Tile},
    threadgroup,
};

/// Maximum workgroups along x, for launches with one per page (`gather.wgsl`).
const PAGES_X: u32 = 32768;

/// Polls after which kernels give up waiting for a handoff: some tenths of a second.
pub const PATIENCE: u32 = 0x40000;

/// A launch in this step.
pub struct Planned<'a> {
    launch: &'a Launch,
    /// Index of its kernel.
    variant: usize,
    workgroups: [u32; 2],
    args: Args,
    counter: usize,
}

impl<'a> Planned<'a> {
    /// The kernel of a matmul is selected by `all` rows; this launch may have a part of them.
    fn of(launch: &'a Launch, plan: &Plan, args: Args, all: usize) -> Self {
        let (variant, workgroups) = match &launch.grid {
            &Grid::Each(count) => (0, [count, args.rows]),
            &Grid::Given(count) => (0, [if plan.has_given() { count } else { 0 }, args.rows]),
            Grid::Rows => (0, [args.rows, 1]),
            Grid::Threads => (0, [args.rows.div_ceil(256), 1]),
            &Grid::Merge(count) => {
                (0, [if plan.needs_merge(launch.kv_group) { count } else { 0 }, args.rows])
            }
            &Grid::Pairs { used, each, along_x: true } => (0, [args.rows * used, each]),
            &Grid::Pairs { used, each, along_x: false } => (0, [each, args.rows * used]),
            &Grid::ExpertTiles { tiles, each, along_x: true } => (0, [tiles.most(args.rows), each]),
            &Grid::ExpertTiles { tiles, each, along_x: false } => {
                (0, [each, tiles.most(args.rows) * tiles.tile])
            }
            &Grid::Copies { used, most, each } => (0, [each, (args.rows * used).min(most)]),
            Grid::One => (0, [1, 1]),
            &Grid::Sequences(each) => (0, [each, plan.sequences()]),
            Grid::Pages => (0, [args.rows.min(PAGES_X), args.rows.div_ceil(PAGES_X)]),
            &Grid::Matmul(outputs, numbers, ref matmuls) => {
                let (variant, [x, y]) = matmul(matmuls, all as u32, args.rows, outputs);
                (variant, [x * numbers, y])
            }
            &Grid::LowRank { matrices, of_outputs, ref kernels } => {
                let variant = kernels.iter().position(|kernel| all as u32 <= kernel.most_rows).unwrap_or(0);
                let workgroups =
                    plan.adapted_table(of_outputs, args.first as usize).map_or([0; 2], |table| {
                        let [_, outputs] = kernels[variant].covers();
                        let is_wide = usize::from(kernels[variant].is_cooperative());
                        [table.items[is_wide], (matrices * table.largest as u32).div_ceil(outputs)]
                    });
                (variant, workgroups)
            }
            &Grid::Attention(tile, heads) => {
                let items = plan.items(launch.kv_group, tile);
                // As in `splits.wgsl`.
                let heads_first = tile == Tile::Row && args.row_length == 0;
                (0, if heads_first { [heads, items] } else { [items, heads] })
            }
        };
        Self { launch, variant, workgroups, args, counter: launch.kernels[variant].counter }
    }

    /// A launch for `args.rows` rows.
    pub fn new(launch: &'a Launch, plan: &Plan, args: Args) -> Self {
        Self::of(launch, plan, args, args.rows as usize)
    }

    /// Returns true if it cannot run once more to be timed.
    pub fn runs_once(&self) -> bool {
        self.launch.runs_once
    }

    /// Counter that its time is added to.
    pub fn timed_as(&self) -> usize {
        self.launch.timed_with.unwrap_or(self.counter)
    }

    fn kernel(&self) -> &Kernel {
        &self.launch.kernels[self.variant]
    }

    fn encode(&self, pass: &mut wgpu::ComputePass<'_>, patience: u32) {
        self.kernel().encode(pass, &Args { patience, ..self.args }, self.workgroups);
    }
}

/// Encodes and counts these launches in order. Their kernels give up waiting after `patience` polls.
pub fn encode(
    encoder: &mut wgpu::CommandEncoder,
    launches: &[Planned<'_>],
    kernel_statistics: &mut KernelStatistics,
    patience: u32,
) {
    for pass in threadgroup::passes(launches, |planned| planned.kernel().pipeline.lengths()) {
        encode_all(&mut encoder.begin_compute_pass(&Default::default()), pass.iter(), patience);
    }
    launches.iter().for_each(|planned| kernel_statistics.launched(planned.counter));
}

/// Encodes all launches of a pass, which give up waiting after `patience` polls.
pub fn encode_all<'a>(
    pass: &mut wgpu::ComputePass<'_>,
    launches: impl Iterator<Item = &'a Planned<'a>> + Clone,
    patience: u32,
) {
    // wgpu has a barrier for a buffer's first use before all launches, and for others in their place: these are to be others.
    let ends = launches.clone().flat_map(|planned| &planned.kernel().ends);
    let state = wgpu::BufferUses::STORAGE_READ_WRITE;
    pass.transition_resources(ends.map(|buffer| wgpu::BufferTransition { buffer, state }), iter::empty());
    launches.for_each(|planned| planned.encode(pass, patience));
}

/// Returns the launches for a slice of the output rows: the norm and the head, and before the first slice all layers.
pub fn launches<'a>(model: &'a Model, plan: &Plan, first: usize, count: usize) -> Vec<Planned<'a>> {
    let mut launches = Vec::new();
    if first == 0 {
        let body = model.body.iter().find(|(class, _)| class.holds(plan.class_rows()));
        launches.extend(body.into_iter().flat_map(|(_, body)| body).map(|launch| {
            let mut args = plan.args(launch.kv_group);
            args.rows /= launch.merged;
            match launch.grid {
                Grid::Pages => (args.tokens, args.rows) = plan.tables(),
                Grid::Attention(tile, _) => args.items = plan.first_item(launch.kv_group, tile),
                _ => {}
            }
            Planned::new(launch, plan, args)
        }));
    }
    let all = plan.outputs.logit_rows;
    let means = &plan.outputs.means;
    let stores_norms = plan.embeds || !means.is_empty();
    if let Some(head) = model.head.as_ref().filter(|_| count > 0 && (first < all || stores_norms)) {
        let args = Args { first: first as u32, rows: count as u32, ..plan.args(0) };
        let is_normed = plan.class_rows() == 1 && !stores_norms && !head.one_row.is_empty();
        if !is_normed {
            launches.push(Planned::new(&head.norm, plan, args));
        }
        if first < all {
            let logits = if is_normed { &head.one_row } else { &head.logits };
            launches.extend(logits.iter().map(|launch| Planned::of(launch, plan, args, all)));
        } else if !means.is_empty() {
            let args = Args { first: plan.outputs.rows.len() as u32, rows: means.len() as u32, ..args };
            launches.extend(head.mean.iter().map(|launch| Planned::new(launch, plan, args)));
        }
    }
    launches.retain(|planned| planned.workgroups.iter().all(|&count| count > 0));
    launches
}
