//! Mixtures of experts, as phases of the team:
//!
//! | phase | shared by | reads | writes |
//! |-|-|-|-|
//! | dense network beside the experts, if there is one | | `products`, `x` | `x`, `products` |
//! | add, norm, quantize | row | `products`, `x` | `x`, `rows` |
//! | router | 16 experts | `rows` | `logits` |
//! | route | row | `logits` | `ids`, `weights` |
//! | sort | row of an expert | `rows` | `expert rows` |
//! | shared expert, if there is one: gate, up, activate, down | | `rows` | `products` |
//! | gate, up | 16 outputs of an expert | `expert rows` | `gate`, `up` |
//! | activate, quantize | row of an expert and slice | `gate`, `up` | `expert rows` |
//! | down | 16 outputs of an expert | `expert rows` | `out` |
//! | combine | row | `out`, `weights`, `products` | `products` |
//!
//! For experts with rows of their own width, a matmul precedes sorting, and another one is applied to a row's sum
//! before it is added.
//!
//! The leader sorts rows by expert between routing and sorting, so that each expert's weights are read once for all of
//! its rows. A row of an expert is computed like a row of any matmul, and a row's experts are added in ascending order
//! of ids, so results do not depend on the batch.

use std::ops::Range;

use paguro_backend::{
    Activation, Beside, ExpertGroups, ExpertLatent, Experts, FeedForward, Linear, MatrixId, Program, Router,
    Scores,
};

use crate::{
    counters::Kernel,
    forward::{AllPending, Input, Kinds, Member, Pass, Pending},
    matrix::Output,
    ops,
    quantize::{BLOCK, row_blocks},
    shared::Shared,
    team::Portions,
};

/// Outputs of a row that one member activates at once.
const ACTIVATE_SLICE: usize = 8 * BLOCK;

/// Buffers between the phases of a mixture of experts; `slots` is rows times experts per row.
pub struct ExpertBuffers {
    /// Logits of the router, `[rows, experts]`.
    pub logits: Shared<f32>,
    /// Logits of the output gate of the shared expert, `[rows]`.
    pub output_gate: Shared<f32>,
    /// Chosen experts, ascending for each row, `[rows, used]`.
    pub ids: Shared<u32>,
    /// Their weights, `[rows, used]`.
    pub weights: Shared<f32>,
    /// Input of the experts, `[slots, hidden]`, and later of their last product, `[slots, width]`.
    pub input: Input,
    /// `[slots, width]`
    pub gate: Shared<f32>,
    /// `[slots, width]`
    pub up: Shared<f32>,
    /// Outputs of the experts, `[slots, hidden]`, or as wide as their rows.
    pub out: Shared<f32>,
    /// Rows of experts of their own width.
    pub latent: Shared<f32>,
    /// Sums of such experts, `[rows, hidden]`.
    pub latent_out: Shared<f32>,
}

/// Largest dimensions of the mixtures of experts in a program; zeros without any.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExpertSizes {
    /// Experts.
    pub count: usize,
    /// Experts of a row.
    pub used: usize,
    /// Width of an expert.
    pub width: usize,
    /// Width of a shared expert, or of a network beside experts.
    pub shared: usize,
    /// Elements of a sum of experts that is normed by itself.
    pub sum: usize,
    /// Elements of a row of experts of their own width.
    pub latent: usize,
}

impl ExpertSizes {
    /// Returns the sizes of a program.
    pub fn of(program: &Program) -> Self {
        let mut sizes = Self::default();
        for layer in &program.layers {
            if let FeedForward::Experts(experts) = &layer.ffn {
                let shared = experts.shared.as_ref().map_or(0, |shared| shared.width);
                if let Some(beside) = &experts.beside {
                    sizes.shared = sizes.shared.max(beside.dense.width);
                    sizes.sum = program.hidden;
                }
                sizes.latent = sizes.latent.max(experts.latent.map_or(0, |latent| latent.width));
                sizes.count = sizes.count.max(experts.count);
                sizes.used = sizes.used.max(experts.router.used);
                sizes.width = sizes.width.max(experts.width);
                sizes.shared = sizes.shared.max(shared);
            }
        }
        sizes
    }
}

/// Rows sorted by expert.
#[derive(Debug, Default)]
pub struct Grouping {
    /// Experts that some row has chosen: those with most rows first, so that all members end together.
    experts: Vec<usize>,
    /// Slots of each expert: `first[e]..first[e + 1]`.
    first: Vec<usize>,
    /// Row of each slot.
    rows: Vec<usize>,
    /// Slot of each choice, `[rows, used]`.
    slots: Vec<usize>,
}

impl Grouping {
    /// With room for the largest step.
    pub fn new(sizes: ExpertSizes, max_rows: usize) -> Self {
        let slots = max_rows * sizes.used;
        Self {
            experts: Vec::with_capacity(sizes.count),
            first: Vec::with_capacity(sizes.count + 1),
            rows: Vec::with_capacity(slots),
            slots: Vec::with_capacity(slots),
        }
    }

    /// Sorts choices, `[rows, used]`, of `count` experts: by expert, then by row.
    fn sort(&mut self, ids: &[u32], used: usize, count: usize) {
        self.first.clear();
        self.first.resize(count + 1, 0);
        ids.iter().for_each(|&id| self.first[id as usize + 1] += 1);
        for expert in 0..count {
            self.first[expert + 1] += self.first[expert];
        }
        self.rows.clear();
        self.rows.resize(ids.len(), 0);
        self.slots.clear();
        for (choice, &id) in ids.iter().enumerate() {
            // Counted up here, and back by one expert below.
            let slot = self.first[id as usize];
            self.first[id as usize] += 1;
            self.rows[slot] = choice / used;
            self.slots.push(slot);
        }
        self.first.rotate_right(1);
        self.first[0] = 0;
        self.experts.clear();
        let Self { experts, first, .. } = self;
        experts.extend((0..count).filter(|&expert| first[expert] < first[expert + 1]));
        experts.sort_by_key(|&expert| (first[expert].wrapping_sub(first[expert + 1]), expert));
    }

    fn slots_of(&self, expert: usize) -> Range<usize> {
        self.first[expert]..self.first[expert + 1]
    }

    /// The expert of a slot.
    fn expert_of(&self, slot: usize) -> usize {
        self.first.partition_point(|&first| first <= slot) - 1
    }
}

impl Pass<'_> {
    /// A mixture of experts. Returns its output, `[rows, hidden]`.
    pub fn experts(&mut self, op: &Experts, mut pending: AllPending, product: usize) -> Pending {
        let (model, buffers, rows) = (self.model, self.buffers, self.rows());
        if let Some(Beside { dense, .. }) = op.beside.as_deref() {
            // Its output stays in the product until `combine`, which adds bias and norm.
            self.dense(dense, pending, product);
            pending = AllPending::NONE;
        }
        let inputs = Kinds::of(model, &[op.gate.unwrap_or(op.up), op.up]);
        let mut all = Kinds::of(model, &[op.router.linear]);
        all = all.and(op.latent.map_or(inputs, |latent| Kinds::of(model, &[latent.down])));
        if let Some(norm) = op.router.norm {
            self.add_norm(Some(norm), pending, Kinds::of(model, &[op.router.linear]));
            self.route(&op.router, op.count);
            pending = AllPending::NONE;
        }
        if let Some(shared) = &op.shared {
            let or_up = |linear: Option<Linear>| linear.unwrap_or(shared.up);
            let linears = [or_up(shared.gate), shared.up, or_up(shared.output_gate)];
            all = all.and(Kinds::of(model, &linears));
        }
        self.add_norm(op.norm, pending, all);
        if op.router.norm.is_none() {
            self.route(&op.router, op.count);
        }
        let grouping = std::mem::take(self.grouping);
        match op.latent {
            None => self.sort_rows(&grouping, inputs),
            Some(latent) => {
                self.multiply(rows, [(latent.down.matrix, &buffers.experts.latent)]);
                self.add_bias(latent.down, &buffers.experts.latent, latent.width);
                self.sort_latent(&grouping, latent.width, inputs);
            }
        }
        if let Some(shared) = &op.shared {
            if let Some(gate) = shared.output_gate {
                self.multiply(rows, [(gate.matrix, &buffers.experts.output_gate)]);
            }
            self.gated(shared.gate, shared.up, shared.width, op.activation, shared.down, product);
        }
        let experts = &buffers.experts;
        let up = (op.up.matrix, &experts.up);
        match op.gate {
            Some(gate) => self.multiply_experts(&grouping, [(gate.matrix, &experts.gate), up]),
            None => self.multiply_experts(&grouping, [up]),
        }
        self.activate_experts(op, op.activation, &grouping);
        self.multiply_experts(&grouping, [(op.down.matrix, &experts.out)]);
        if let Some(latent) = op.latent {
            self.combine_latent(op, latent, &grouping);
        }
        self.combine(op, &grouping, product);
        *self.grouping = grouping;
        Pending { product, bias: None, post_norm: op.post_norm, scale: 1.0 }
    }

    /// Chooses the experts of each row, and sorts rows by them.
    fn route(&mut self, router: &Router, count: usize) {
        let (model, rows) = (self.model, self.rows());
        let buffers = &self.buffers.experts;
        self.multiply(rows, [(router.linear.matrix, &buffers.logits)]);
        let used = router.used;
        self.phase(Kernel::Route, rows, Portions::Guided(4), |member, range| {
            for row in range {
                let logits = member.write(&buffers.logits, row, count);
                if let Some(bias) = router.linear.bias {
                    model.rows.add(logits, model.vector(bias));
                }
                let at = row * used..(row + 1) * used;
                // SAFETY: only this member has this row in this phase.
                let (ids, weights) =
                    unsafe { (buffers.ids.get_mut(at.clone()), buffers.weights.get_mut(at)) };
                let bias = router.selection_bias.map(|bias| model.vector(bias));
                choose(logits, &mut member.own.row, router, bias, ids, weights);
                if let Some(scales) = router.expert_scale {
                    let scales = model.vector(scales);
                    ids.iter().zip(weights).for_each(|(&id, weight)| *weight *= scales[id as usize]);
                }
            }
        });
        // SAFETY: no phase is open.
        let ids = unsafe { buffers.ids.get(0..rows * used) };
        self.grouping.sort(ids, used, count);
    }

    /// Copies rows of the input into the order of their experts.
    fn sort_rows(&mut self, grouping: &Grouping, kinds: Kinds) {
        let hidden = self.model.program.hidden;
        let (from, to) = (&self.buffers.input, &self.buffers.experts.input);
        self.phase(Kernel::Sort, grouping.rows.len(), Portions::Guided(4), |_, range| {
            for slot in range {
                let row = grouping.rows[slot];
                if kinds.quantized {
                    let (from_start, to_start) = (row * from.quantized_stride, slot * to.quantized_stride);
                    let blocks = row_blocks(hidden);
                    // SAFETY: only this member writes this slot, and nobody writes rows in this phase.
                    unsafe {
                        to.quantized
                            .get_mut(to_start..to_start + blocks)
                            .copy_from_slice(from.quantized.get(from_start..from_start + blocks));
                    }
                }
                if kinds.float {
                    let (from_start, to_start) = (row * from.float_stride, slot * to.float_stride);
                    // SAFETY: as above.
                    unsafe {
                        to.float
                            .get_mut(to_start..to_start + hidden)
                            .copy_from_slice(from.float.get(from_start..from_start + hidden));
                    }
                }
            }
        });
    }

    /// Copies rows of the experts' own width into the order of their experts.
    fn sort_latent(&mut self, grouping: &Grouping, width: usize, kinds: Kinds) {
        let buffers = &self.buffers.experts;
        self.phase(Kernel::Sort, grouping.rows.len(), Portions::Guided(4), |member, range| {
            for slot in range {
                let row = member.read(&buffers.latent, grouping.rows[slot], width);
                member.set_input(&buffers.input, slot, 0, row, kinds, true);
            }
        });
    }

    /// Multiplies the rows of each expert with its matrices; groups of outputs of all experts are shared as one list.
    fn multiply_experts<const N: usize>(
        &mut self,
        grouping: &Grouping,
        products: [(MatrixId, &Shared<f32>); N],
    ) {
        let model = self.model;
        let ids = products.map(|(id, _)| id);
        let per_expert: usize = ids.iter().map(|&id| model.matrix(id).groups()).sum();
        let input = &self.buffers.experts.input;
        for &expert in &grouping.experts {
            self.add_squares(&ids, expert, input, grouping.slots_of(expert));
        }
        let count = per_expert * grouping.experts.len();
        self.phase(Kernel::Products(&ids), count, Portions::Guided(4), |member, range| {
            for index in range.start / per_expert..range.end.div_ceil(per_expert) {
                let expert = grouping.experts[index];
                let slots = grouping.slots_of(expert);
                let groups = ops::part(&range, index * per_expert, per_expert);
                let mut offset = 0;
                for (id, out) in products {
                    let matrix = model.matrix(id);
                    let part = ops::part(&groups, offset, matrix.groups());
                    offset += matrix.groups();
                    let width = matrix.rows();
                    let rows = slots.start * width..slots.end * width;
                    assert!(rows.end <= out.len());
                    // SAFETY: the range is inside, see above; it is written by group of outputs of an expert in this
                    // phase, and read by nobody.
                    let out = unsafe { Output::from_raw(out.as_ptr().add(rows.start), rows.len(), width) };
                    // SAFETY: inputs are only read in this phase.
                    let input = unsafe { input.rows(matrix.row_kind(), slots.clone()) };
                    let scratch = &mut member.own.scratch;
                    matrix.multiply(&model.products, expert, input, slots.len(), part, &out, scratch);
                }
            }
        });
    }

    fn activate_experts(&mut self, op: &Experts, activation: Activation, grouping: &Grouping) {
        let (model, buffers, width) = (self.model, &self.buffers.experts, op.width);
        let slices = width.div_ceil(ACTIVATE_SLICE);
        let kinds = Kinds::of(model, &[op.down]);
        let count = grouping.rows.len() * slices;
        self.phase(Kernel::Activate, count, Portions::Guided(slices.div_ceil(4)), |member, range| {
            for unit in range {
                let (slot, first) = (unit / slices, unit % slices * ACTIVATE_SLICE);
                let end = width.min(first + ACTIVATE_SLICE);
                let at = slot * width + first..slot * width + end;
                let expert = grouping.expert_of(slot);
                let bias = |linear: Linear| {
                    linear.bias.map(|bias| &model.vector(bias)[expert * width..][first..end])
                };
                // SAFETY: only this member has this slice of this slot in this phase.
                let (gate, up) = unsafe { (buffers.gate.get_mut(at.clone()), buffers.up.get_mut(at)) };
                let gate = op.gate.map(|linear| (gate, bias(linear)));
                let active = model.activate(gate, (up, bias(op.up)), activation);
                member.set_input(&buffers.input, slot, first, active, kinds, end == width);
            }
        });
    }

    /// Adds up the experts of each row, of their own width, and multiplies the sums with their matrix.
    fn combine_latent(&mut self, op: &Experts, latent: ExpertLatent, grouping: &Grouping) {
        let (buffers, width) = (self.buffers, latent.width);
        let kinds = Kinds::of(self.model, &[latent.up]);
        self.phase(Kernel::CombineLatent, self.rows(), Portions::Guided(1), |member, range| {
            for row in range {
                let sum = member.write(&buffers.experts.latent, row, width);
                sum.fill(0.0);
                member.add_experts(op, grouping, row, sum);
                member.set_input(&buffers.input, row, 0, sum, kinds, true);
            }
        });
        self.multiply(self.rows(), [(latent.up.matrix, &buffers.experts.latent_out)]);
    }

    /// Adds up the experts of each row.
    fn combine(&mut self, op: &Experts, grouping: &Grouping, product: usize) {
        let hidden = self.model.program.hidden;
        self.phase(Kernel::Combine, self.rows(), Portions::Guided(1), |member, range| {
            for row in range {
                member.combine_row(op, grouping, product, row, hidden);
            }
        });
    }
}

impl Member<'_> {
    fn combine_row(&mut self, op: &Experts, grouping: &Grouping, product: usize, row: usize, hidden: usize) {
        let (model, buffers) = (self.model, &self.buffers.experts);
        let product = self.write(&self.buffers.products[product], row, hidden);
        let mut own_sum = std::mem::take(&mut self.own.sum);
        // With a network beside the experts, the product has its output.
        let sum = if op.beside.is_some() { &mut own_sum[..hidden] } else { &mut *product };
        match &op.shared {
            None => sum.fill(0.0),
            Some(shared) => {
                if let Some(bias) = shared.down.bias {
                    model.rows.add(sum, model.vector(bias));
                }
                if let Some(gate) = &shared.output_gate {
                    let bias = gate.bias.map_or(0.0, |bias| model.vector(bias)[0]);
                    let logit = self.read(&buffers.output_gate, row, 1)[0] + bias;
                    model.rows.scale(sum, 1.0 / (1.0 + (-logit).exp()));
                }
            }
        }
        match op.latent {
            None => self.add_experts(op, grouping, row, sum),
            Some(latent) => {
                self.add_row_bias(latent.up.bias, sum);
                model.rows.add(sum, self.read(&buffers.latent_out, row, hidden));
            }
        }
        if let Some(Beside { dense, sum_norm }) = op.beside.as_deref() {
            if let Some(bias) = dense.down.bias {
                model.rows.add(product, model.vector(bias));
            }
            let normed = &mut self.own.row[..hidden];
            model.norm(Some(*sum_norm), &own_sum[..hidden], normed);
            model.norm(dense.post_norm, product, &mut own_sum[..hidden]);
            product.copy_from_slice(&own_sum[..hidden]);
            model.rows.add(product, normed);
        }
        self.own.sum = own_sum;
    }
}

impl Member<'_> {
    /// Adds the weighted outputs of a row's experts.
    fn add_experts(&self, op: &Experts, grouping: &Grouping, row: usize, sum: &mut [f32]) {
        let (model, buffers) = (self.model, &self.buffers.experts);
        let (used, width) = (op.router.used, sum.len());
        for choice in row * used..(row + 1) * used {
            let (slot, weight) = (grouping.slots[choice], self.read(&buffers.weights, choice, 1)[0]);
            let out = self.write(&buffers.out, slot, width);
            if let Some(bias) = op.down.bias {
                let expert = grouping.expert_of(slot);
                model.rows.add(out, &model.vector(bias)[expert * width..][..width]);
            }
            model.rows.add_scaled(sum, out, weight);
        }
    }
}

/// Chooses the experts of a row from its logits, see [`Router`]. In double precision, because there are few. `ranks`
/// has room for a number per expert.
fn choose(
    logits: &[f32],
    ranks: &mut [f32],
    router: &Router,
    selection_bias: Option<&[f32]>,
    ids: &mut [u32],
    weights: &mut [f32],
) {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let exp = |logit: f32| f64::from(logit - largest).exp();
    let total: f64 = match router.scores {
        Scores::Softmax => logits.iter().map(|&logit| exp(logit)).sum(),
        _ => 1.0,
    };
    let score = |logit: f32| match router.scores {
        Scores::Softmax => exp(logit) / total,
        _ => 1.0 / (1.0 + (-f64::from(logit)).exp()),
    };
    // Without a bias, logits have the same order as scores.
    if selection_bias.is_none() && router.groups.is_none() {
        largest_of(logits, ids);
    } else {
        let ranks = &mut ranks[..logits.len()];
        for (index, (rank, &logit)) in ranks.iter_mut().zip(logits).enumerate() {
            *rank = score(logit) as f32 + selection_bias.map_or(0.0, |bias| bias[index]);
        }
        if let Some(groups) = router.groups {
            keep_groups(ranks, groups);
        }
        largest_of(ranks, ids);
    }
    let scores = |id: u32| score(logits[id as usize]);
    let divisor = match router.renormalize {
        true => ids.iter().map(|&id| scores(id)).sum::<f64>().max(f64::from(f32::MIN_POSITIVE)),
        false => 1.0,
    };
    for (weight, &id) in weights.iter_mut().zip(&*ids) {
        *weight = (scores(id) / divisor * f64::from(router.factor)) as f32;
    }
}

/// Lowers the ranks of experts whose groups are not used below all others.
fn keep_groups(ranks: &mut [f32], ExpertGroups { count, used, best }: ExpertGroups) {
    let size = ranks.len() / count;
    // The sum of the best, counted down from all of a group: groups are small.
    let score = |group: usize| -> f64 {
        let ranks = &ranks[group * size..(group + 1) * size];
        let is_best = |&(index, rank): &(usize, &f32)| {
            let better = |(other, other_rank): (usize, &f32)| {
                other_rank > rank || (other_rank == rank && other < index)
            };
            ranks.iter().enumerate().filter(|&other| better(other)).count() < best
        };
        ranks.iter().enumerate().filter(is_best).map(|(_, &rank)| f64::from(rank)).sum()
    };
    let scores: Vec<f64> = (0..count).map(score).collect();
    for group in 0..count {
        let better = |other: &usize| {
            scores[*other] > scores[group] || (scores[*other] == scores[group] && *other < group)
        };
        if (0..count).filter(better).count() >= used {
            ranks[group * size..(group + 1) * size].fill(f32::NEG_INFINITY);
        }
    }
}

/// Fills `ids` with the indices of the largest numbers, in ascending order; among equals, the lowest indices count.
fn largest_of(ranks: &[f32], ids: &mut [u32]) {
    // An insertion sort: the first `chosen` are descending in rank, and among equals ascending in index.
    let mut chosen = 0;
    for (index, &rank) in ranks.iter().enumerate() {
        let better = |&&id: &&u32| ranks[id as usize] >= rank;
        let at = ids[..chosen].iter().take_while(better).count();
        if at < ids.len() {
            chosen = (chosen + 1).min(ids.len());
            ids.copy_within(at..chosen - 1, at + 1);
            ids[at] = index as u32;
        }
    }
    ids.sort_unstable();
}

#[cfg(test)]
mod tests {
    use paguro_backend::reference::ops;
    use paguro_backend_conformance::Rng;

    use super::*;

    #[test]
    fn choices_are_those_of_the_reference() {
        let mut rng = Rng::new(1);
        for (count, used) in [(1, 1), (4, 1), (8, 2), (8, 8), (60, 4), (512, 16)] {
            let groups = |count, used, best| Some(ExpertGroups { count, used, best });
            for (scores, renormalize, biased, groups) in [
                (Scores::Softmax, true, false, None),
                (Scores::Softmax, false, true, None),
                (Scores::Sigmoid, true, true, None),
                (Scores::Sigmoid, true, true, groups(4, 2, 2)),
                (Scores::Softmax, false, false, groups(4, 3, 1)),
            ] {
                let size = groups.map_or(count, |groups| count / groups.count);
                let fits = |groups: ExpertGroups| size >= groups.best && used <= size * groups.used;
                if groups.is_some_and(|groups| !count.is_multiple_of(groups.count) || !fits(groups)) {
                    continue;
                }
                let linear = Linear { matrix: MatrixId(0), bias: None };
                let router = Router {
                    norm: None,
                    linear,
                    scores,
                    selection_bias: None,
                    groups,
                    used,
                    renormalize,
                    factor: 1.5,
                    expert_scale: None,
                };
                // Some are equal.
                let logits: Vec<f32> = (0..count).map(|_| (rng.normal() * 4.0).round() / 2.0).collect();
                let bias: Option<Vec<f32>> = biased.then(|| (0..count).map(|_| rng.normal()).collect());
                let expected = ops::route(&logits, &router, bias.as_deref());
                let (mut ids, mut weights) = (vec![0; used], vec![0.0; used]);
                let mut ranks = vec![0.0; count];
                choose(&logits, &mut ranks, &router, bias.as_deref(), &mut ids, &mut weights);
                for (index, (expert, weight)) in expected.into_iter().enumerate() {
                    assert_eq!(ids[index] as usize, expert, "{used} of {count}");
                    assert!((weights[index] - weight).abs() < 1e-6, "{} is not {weight}", weights[index]);
                }
            }
        }
    }

    #[test]
    fn rows_are_sorted_by_expert() {
        let mut grouping = Grouping::default();
        // Rows 0 to 3 with two of five experts each.
        grouping.sort(&[0, 3, 3, 4, 0, 3, 1, 3], 2, 5);
        assert_eq!(grouping.experts, [3, 0, 1, 4]);
        assert_eq!(grouping.rows, [0, 2, 3, 0, 1, 2, 3, 1]);
        assert_eq!(grouping.slots, [0, 3, 4, 7, 1, 5, 2, 6]);
        let experts: Vec<usize> = (0..8).map(|slot| grouping.expert_of(slot)).collect();
        assert_eq!(experts, [0, 0, 1, 3, 3, 3, 3, 4]);
    }
}
