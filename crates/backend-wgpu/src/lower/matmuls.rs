//! Embedding, norms and matmuls.

use std::{iter, ops::Range};

use paguro_backend::{Linear, LoadError, MatrixId, Norm, NormKind};

use crate::ops::{Add, Embed, is_plain};

use super::{
    Acts, Before, Grid, Launch, Lowering, Matmul, Place, Store,
    Value::{F, U},
    When,
    fused::row_scale,
    handoff::Bindings,
    kernels::{self, FEW_ROWS},
    wgsl,
};
use crate::{
    layout::{BLOCK, Layout},
    matrix::{Order, Part},
    template::Constants,
};

/// Inputs of a matmul.
pub(super) struct Inputs<'a> {
    /// Matrices of one layout.
    pub linears: &'a [&'a Linear],
    /// The order of their rows.
    pub order: Order,
    /// Activations.
    pub acts: Acts,
    /// True if sums run in one order in steps of any number of rows, also with cooperative matrices.
    pub in_order: bool,
}

/// Matrices that are joined to one on the device.
pub(super) struct Group<'a> {
    pub linears: Vec<&'a Linear>,
    pub order: Order,
    /// Indices of its matrices.
    members: Vec<usize>,
}

/// Files of a norm.
pub(super) const NORM: &[&str] = wgsl!("args", "quantize", "emit", "row_scale", "norm");

impl Lowering<'_> {
    pub(super) fn embed(&mut self, op: &Embed, body: &mut Vec<Launch>) -> Result<(), LoadError> {
        self.embed_from(op.table, op.scale, false, body)?;
        op.positions.iter().try_for_each(|&table| self.embed_from(table, 1.0, true, body))
    }

    fn embed_from(
        &mut self,
        table: MatrixId,
        scale: f32,
        is_of_positions: bool,
        body: &mut Vec<Launch>,
    ) -> Result<(), LoadError> {
        let hidden = self.program.hidden;
        let linear = Linear { matrix: table, bias: None, bounds: None };
        let inputs = Inputs { linears: &[&linear], order: Order::Joined, acts: Acts::Plain, in_order: false };
        let matrix = self.matrix(&inputs)?;
        for part in &matrix.parts {
            let constants = vec![
                ("BLOCKS", U(matrix.blocks as u32)),
                ("WIDTH", U(hidden as u32)),
                ("OUTPUTS", U(part.rows as u32)),
                ("OUT_FIRST", U(part.first as u32)),
                ("SCALE", F(scale)),
                ("POSITIONS", U(u32::from(is_of_positions))),
            ];
            let mut files: Vec<&str> = wgsl!("args").to_vec();
            files.extend(decoder(matrix.layout));
            files.extend(wgsl!("embed"));
            let what = if is_of_positions { "positions" } else { "embed" };
            let name = format!("{what}_{}", matrix.layout.name());
            let (step, x, sampled) = (self.step.clone(), self.x.clone(), self.tokens.clone());
            let mut buffers = vec![("step", &step), ("x", &x), ("sampled", &sampled)];
            buffers.extend(planes(part));
            let grid = Grid::Each(matrix.blocks.div_ceil(64) as u32);
            let launch = self.launch(&name, &files, constants, &buffers, grid, 0)?;
            body.push(launch);
        }
        Ok(())
    }

    /// Norms the residual stream for matmuls with these matrices, unless the previous launch has done so.
    pub(super) fn norm(
        &mut self,
        norm: Option<Norm>,
        before: Before,
        linears: &[&Linear],
        body: &mut Vec<Launch>,
    ) -> Result<(), LoadError> {
        let hidden = self.program.hidden;
        let (mut constants, norm_buffers) = self.norm_constants(norm, hidden, false)?;
        constants.extend(self.emit_for(linears, hidden));
        constants.extend(self.halves(FEW_ROWS + 1));
        let (x, y, factors) = (self.x.clone(), self.y.clone(), self.factors.clone());
        let made: Vec<_> = self.written_acts(Acts::Normed).collect();
        let mut buffers = vec![("x", &x), ("factors", &factors)];
        buffers.extend(norm_buffers.iter().map(|(name, buffer)| (*name, buffer)));
        buffers.extend(made.iter().map(|(name, buffer)| (*name, buffer)));
        let post;
        if let Before::Pending(pending, scale) = before {
            post = self.vector(pending.weight)?;
            constants.extend([("POST", U(1)), ("REDUCES", U(1)), ("POST_EPS", F(pending.eps))]);
            constants.push(("OUT_SCALE", F(scale)));
            buffers.extend([("y", &y), ("post", &post)]);
        }
        let launch = self.launch("norm", NORM, constants, &buffers, Grid::Rows, 0)?;
        let when = When::unless_one_row(matches!(before, Before::Emitted(_)));
        body.push(Launch { when, ..launch });
        Ok(())
    }

    /// Norms rows of this width for the next matmuls, or leaves them as they are.
    pub(super) fn activations_of(
        &mut self,
        rows: &wgpu::Buffer,
        width: usize,
        norm: Option<Norm>,
        linears: &[&Linear],
        body: &mut Vec<Launch>,
    ) -> Result<(), LoadError> {
        let (mut constants, norm_buffers) = self.norm_constants(norm, width, true)?;
        constants.extend(self.emit_for(linears, width));
        constants.extend(self.halves(FEW_ROWS + 1));
        let mut buffers = vec![("x", rows)];
        buffers.extend(norm_buffers.iter().map(|(name, buffer)| (*name, buffer)));
        body.push(self.launch("norm_rows", NORM, constants, &buffers, Grid::Rows, 0)?);
        Ok(())
    }

    /// Constants and vectors of a norm of rows of this width; without a norm, rows stay as they are.
    /// Matmuls apply a factor to activations unless they are complete.
    pub(super) fn norm_constants(
        &mut self,
        norm: Option<Norm>,
        width: usize,
        is_complete: bool,
    ) -> Result<Bindings, LoadError> {
        let slices = width.next_multiple_of(BLOCK).div_ceil(256);
        // The staging memory of a round fits into half of every device's workgroup memory.
        let rounds = slices.div_ceil(16);
        let slices = slices.div_ceil(rounds);
        let mut constants = vec![
            ("WIDTH", U(width as u32)),
            ("ROUNDS", U(rounds as u32)),
            ("SLICES", U(slices as u32)),
            ("STAGED", U(slices as u32 * 8 * 33)),
        ];
        constants.extend(row_scale(width, norm.map_or(0.0, |norm| norm.eps)));
        let (norms, buffers) = self.norm_vectors(norm)?;
        constants.extend(norms);
        let is_layer = norm.is_some_and(|norm| norm.kind == NormKind::Layer);
        let leaves_factor = !is_complete && norm.as_ref().is_some_and(is_plain);
        constants.push(("FULL", U(u32::from(!leaves_factor))));
        constants.push(("COMPLETE", U(u32::from(is_complete))));
        if is_layer {
            constants.push(("REDUCES", U(1)));
        }
        Ok((constants, buffers))
    }

    /// The kind of a norm, and its vectors.
    fn norm_vectors(&mut self, norm: Option<Norm>) -> Result<Bindings, LoadError> {
        let Some(Norm { kind, weight, bias, eps: _ }) = norm else { return Ok((vec![], vec![])) };
        let constants = vec![
            ("NORMS", U(1)),
            ("LAYER", U(u32::from(kind == NormKind::Layer))),
            ("NORM_BIAS", U(u32::from(bias.is_some()))),
        ];
        let mut buffers = vec![("weight", self.vector(weight)?)];
        if let Some(bias) = bias {
            buffers.push(("norm_bias", self.vector(bias)?));
        }
        Ok((constants, buffers))
    }

    /// Adds a branch to the residual stream.
    pub(super) fn add_branch(
        &mut self,
        add: &Add,
        branch: &wgpu::Buffer,
        body: &mut Vec<Launch>,
    ) -> Result<(), LoadError> {
        let x = self.x.clone();
        self.add_to(&x, Some(branch), add, 1.0, vec![], body)
    }

    /// Adds a pending branch to rows of the residual stream, and scales them.
    pub(super) fn add_to(
        &mut self,
        to: &wgpu::Buffer,
        branch: Option<&wgpu::Buffer>,
        add: &Add,
        out_scale: f32,
        mut constants: Constants,
        body: &mut Vec<Launch>,
    ) -> Result<(), LoadError> {
        let (norms, norm_buffers) = self.norm_vectors(add.post_norm)?;
        let eps = add.post_norm.map_or(0.0, |norm| norm.eps);
        let width = self.program.hidden as u32;
        constants.extend(norms);
        constants.extend([("WIDTH", U(width)), ("SCALE", F(add.scale)), ("EPS", F(eps))]);
        constants.extend([("OUT_SCALE", F(out_scale)), ("BRANCH", U(u32::from(branch.is_some())))]);
        let mut buffers = vec![("x", to)];
        buffers.extend(branch.map(|branch| ("y", branch)));
        buffers.extend(norm_buffers.iter().map(|(name, buffer)| (*name, buffer)));
        body.push(self.launch(
            "add_branch",
            wgsl!("args", "add_branch"),
            constants,
            &buffers,
            Grid::Rows,
            0,
        )?);
        Ok(())
    }

    /// Joins matrices with one layout, in the order that `order` returns for their indices. Returns the destinations of
    /// the matmuls.
    pub(super) fn groups<'l, const N: usize>(
        &self,
        linears: [&'l Linear; N],
        order: impl Fn(&[usize]) -> Order,
    ) -> Vec<(Group<'l>, Place)> {
        let group = |(members, buffer): (Vec<usize>, &wgpu::Buffer)| {
            let linears: Vec<&Linear> = members.iter().map(|&index| linears[index]).collect();
            let stride = linears.iter().map(|linear| self.weights.matrix(linear.matrix).rows).sum();
            let place = Place { buffer: buffer.clone(), stride, first: 0 };
            (Group { linears, order: order(&members), members }, place)
        };
        iter::zip(self.joined(&linears), &self.scratch).map(group).collect()
    }

    /// Joins matrices with one layout, with all results side by side in the rows of one buffer. The first matrix's come
    /// first.
    pub(super) fn side_by_side<'l, const N: usize>(
        &self,
        linears: [&'l Linear; N],
        buffer: &wgpu::Buffer,
    ) -> Vec<(Group<'l>, Place)> {
        let rows = |index: usize| self.weights.matrix(linears[index].matrix).rows;
        let stride = (0..N).map(rows).sum();
        let mut first = 0;
        let group = |members: Vec<usize>| {
            let place = Place { buffer: buffer.clone(), stride, first };
            first += members.iter().map(|&index| rows(index)).sum::<usize>();
            let linears = members.iter().map(|&index| linears[index]).collect();
            (Group { linears, order: Order::Joined, members }, place)
        };
        self.joined(&linears).into_iter().map(group).collect()
    }

    /// Indices of matrices, those with one layout together.
    fn joined(&self, linears: &[&Linear]) -> Vec<Vec<usize>> {
        let layout = |index: usize| Layout::of(self.weights.matrix(linears[index].matrix).format);
        let mut joined: Vec<Vec<usize>> = Vec::new();
        for index in 0..linears.len() {
            match joined.iter_mut().find(|members| layout(members[0]) == layout(index)) {
                Some(members) => members.push(index),
                None => joined.push(vec![index]),
            }
        }
        joined
    }

    /// Adds matmuls of the activations of a norm. Returns the place of each result.
    pub(super) fn matmuls<const N: usize>(
        &mut self,
        linears: [&Linear; N],
        groups: &[(Group<'_>, Place)],
        store: Store,
        when: When,
        body: &mut Vec<Launch>,
    ) -> Result<[Place; N], LoadError> {
        let mut places: [Option<Place>; N] = std::array::from_fn(|_| None);
        for (group, place) in groups {
            let mut own = place.clone();
            for &index in &group.members {
                places[index] = Some(own.clone());
                own.first += match group.order {
                    Order::InTurn => 1,
                    _ => self.weights.matrix(linears[index].matrix).rows,
                };
            }
            let inputs =
                Inputs { linears: &group.linears, order: group.order, acts: Acts::Normed, in_order: false };
            self.matmul(&inputs, place, store, when, body)?;
        }
        Ok(places.map(|place| place.expect("every matmul is in a group")))
    }

    /// Adds a matmul with a norm's activations, to its own buffer.
    pub(super) fn normed_matmul(
        &mut self,
        linear: &Linear,
        buffer: &wgpu::Buffer,
        body: &mut Vec<Launch>,
    ) -> Result<(), LoadError> {
        let stride = self.weights.matrix(linear.matrix).rows;
        let place = Place { buffer: buffer.clone(), stride, first: 0 };
        let inputs = Inputs { linears: &[linear], order: Order::Joined, acts: Acts::Normed, in_order: false };
        self.matmul(&inputs, &place, Store::WRITE, When::Always, body)
    }

    /// Biases of some rows.
    pub(super) fn bias(
        &self,
        inputs: &Inputs<'_>,
        rows: Range<usize>,
    ) -> Result<Option<wgpu::Buffer>, LoadError> {
        if inputs.linears.iter().all(|linear| linear.bias.is_none()) {
            return Ok(None);
        }
        let counts: Vec<usize> =
            inputs.linears.iter().map(|linear| self.weights.matrix(linear.matrix).rows).collect();
        let of = |(matrix, row): (usize, usize)| {
            inputs.linears[matrix].bias.map_or(0.0, |bias| self.weights.vector(bias)[row])
        };
        let biases: Vec<f32> = inputs.order.rows(&counts)[rows].iter().copied().map(of).collect();
        self.device.upload(&biases, "biases").map(Some)
    }

    /// Inputs of a matmul.
    pub(super) fn inputs(&self, inputs: &Inputs<'_>) -> usize {
        self.weights.matrix(inputs.linears[0].matrix).cols
    }

    pub(super) fn matmul(
        &mut self,
        inputs: &Inputs<'_>,
        place: &Place,
        store: Store,
        when: When,
        body: &mut Vec<Launch>,
    ) -> Result<(), LoadError> {
        let matrix = self.matrix(inputs)?;
        let read_acts: Vec<_> = self.read_acts(inputs.acts).collect();
        let halves = self.half_acts(inputs.acts, matrix.layout);
        let (factors, zero) = (self.factors.clone(), self.zero.clone());
        let stack = match inputs.order {
            Order::Stacked(count) => Some((count, self.weights.matrix(inputs.linears[0].matrix).rows)),
            _ => None,
        };
        for part in &matrix.parts {
            let (outputs, first) = stack.map_or((part.rows, part.first), |(_, outputs)| (outputs, 0));
            let numbers = (part.rows / outputs) as u32;
            let mut common = vec![
                ("BLOCKS", U(matrix.blocks as u32)),
                ("OUTPUTS", U(outputs as u32)),
                ("OUT_STRIDE", U(place.stride as u32)),
                ("OUT_FIRST", U((place.first + first) as u32)),
            ];
            if let Some((count, outputs)) = stack {
                common.extend([
                    ("STACK", U(count as u32)),
                    ("FIRST_NUMBER", U((part.first / outputs) as u32)),
                    ("HELD_NUMBERS", U(numbers)),
                ]);
            }
            let mut buffers = vec![("out", &place.buffer), ("row_factors", &factors), ("zero", &zero)];
            buffers.extend(planes(part));
            buffers.extend(read_acts.iter().map(|(name, buffer)| (*name, buffer)));
            buffers.push(("x_halves", &halves));
            let bias = self.bias(inputs, part.first..part.first + part.rows)?;
            buffers.extend(bias.iter().map(|bias| ("bias", bias)));
            common.push(("BIAS", U(u32::from(bias.is_some()))));
            common.push(("FACTORS", U(u32::from(inputs.acts == Acts::Normed))));
            common.extend(store.constants());
            let (mut compiled, mut counters) = (Vec::new(), Vec::new());
            let gates = store.gates.map(|gates| self.gates_finish(gates));
            if let Some((_, to_halves)) = &gates {
                buffers.push(("to_halves", to_halves));
            }
            let kernel = |matmul: &Matmul| {
                let (files, mut constants) =
                    matmul.kernel(self.device, matrix.layout, matrix.blocks, self.halves_at(matrix.layout));
                constants.extend(common.iter().copied());
                let (mut name, mut finish) = (matmul.name(matrix.layout), &wgsl!("store")[..]);
                if let Some((gates, _)) = gates.as_ref().filter(|_| matmul.is_cooperative()) {
                    (name, finish) = (name + "_gate", wgsl!("quantize", "activation", "store_activations"));
                    constants.extend(gates.iter().copied());
                }
                let files = [wgsl!("args"), decoder(matrix.layout), wgsl!("factor"), finish, files].concat();
                (name, files, constants)
            };
            let cooperative = self.device.cooperative.filter(|_| !inputs.in_order);
            let few = store.gates.map_or(0, |gates| gates.few);
            let from = (cooperative, few);
            let mut matmuls =
                kernels::matmuls(self.device, from, matrix.layout, outputs as u32, matrix.blocks);
            matmuls.retain(|matmul| when == When::Always || matmul.most_rows > 1);
            for matmul in &matmuls {
                let (name, files, constants) = kernel(matmul);
                compiled.push(self.kernel(&name, &files, &constants, &buffers));
                counters.push(format!("{name}[{}x{}]", part.rows, self.inputs(inputs)));
            }
            if self.device.as_hardware && matrix.layout != Layout::F32 && stack.is_none() {
                for matmul in [16, 8].into_iter().flat_map(kernels::all_cooperative) {
                    let (name, files, constants) = kernel(&matmul);
                    self.device.show(&name, &files, &constants);
                }
            }
            let grid = Grid::Matmul(outputs as u32, numbers, matmuls.into());
            let counter = self.counter(&counters);
            body.push(Launch { when, kernels: compiled, grid, kv_group: 0, counter, timed_with: None });
        }
        Ok(())
    }
}

/// The files that read a layout.
pub(super) fn decoder(layout: Layout) -> &'static [&'static str] {
    match layout {
        Layout::F32 => wgsl!("acts_float", "f32"),
        Layout::F16 => wgsl!("acts_float", "f16", "halves"),
        Layout::Bf16 => wgsl!("acts_float", "bf16", "halves"),
        Layout::Q2 => wgsl!("acts_int", "q2"),
        Layout::Q3 => wgsl!("acts_int", "q3"),
        Layout::Q4 => wgsl!("acts_int", "q4"),
        Layout::Q5 => wgsl!("acts_int", "q5"),
        Layout::Q6 => wgsl!("acts_int", "q6"),
        Layout::Q8 => wgsl!("acts_int", "q8"),
    }
}

pub(super) fn planes(part: &Part) -> impl Iterator<Item = (&'static str, &wgpu::Buffer)> {
    let names = ["w_quants", "w_high", "w_scales"];
    names.into_iter().zip(&part.planes).filter_map(|(name, plane)| Some((name, plane.as_ref()?)))
}
