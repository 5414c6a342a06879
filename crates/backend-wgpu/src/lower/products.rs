//! Embedding, norms and products.

use paguro_backend::{Activation, Linear, LoadError, MatrixId, Norm};

use super::{
    Grid, Launch, Lowering, Place, Product, Store,
    Value::{F, U},
    bits, kernels, wgsl,
};
use crate::{
    layout::{BLOCK, Layout},
    matrix::Part,
    template::Constants,
};

impl Lowering<'_> {
    pub(super) fn embed(
        &mut self,
        table: MatrixId,
        scale: f32,
        body: &mut Vec<Launch>,
    ) -> Result<(), LoadError> {
        let hidden = self.program.hidden;
        let matrix = self.matrix(&[table])?;
        for part in &matrix.parts {
            let constants = vec![
                ("BLOCKS", U(matrix.blocks as u32)),
                ("WIDTH", U(hidden as u32)),
                ("OUTPUTS", U(part.rows as u32)),
                ("OUT_FIRST", U(part.first as u32)),
                ("SCALE", F(scale)),
            ];
            let mut files: Vec<&str> = wgsl!("args").to_vec();
            files.extend(decoder(matrix.layout));
            files.extend(wgsl!("embed"));
            let name = format!("embed_{}", matrix.layout.name());
            let (step, x, sampled) = (self.step.clone(), self.x.clone(), self.tokens.clone());
            let mut buffers = vec![("step", &step), ("x", &x), ("sampled", &sampled)];
            buffers.extend(planes(part));
            let grid = Grid::Each(matrix.blocks.div_ceil(64) as u32);
            let launch = self.launch(&name, &files, constants, &buffers, grid, 0)?;
            body.push(launch);
        }
        Ok(())
    }

    /// Norms the residual stream for products with these matrices, after a product that is still to be added to it.
    pub(super) fn norm(
        &mut self,
        norm: &Norm,
        pending: Option<Norm>,
        linears: &[&Linear],
        body: &mut Vec<Launch>,
    ) -> Result<(), LoadError> {
        let hidden = self.program.hidden;
        let mut constants = self.norm_constants(norm);
        constants.extend(self.emit_for(linears, hidden));
        let weight = self.vector(norm.weight)?;
        let (x, y) = (self.x.clone(), self.y.clone());
        let mut buffers = vec![("x", &x), ("weight", &weight)];
        let post;
        if let Some(pending) = pending {
            post = self.vector(pending.weight)?;
            constants.extend([("POST", U(1)), ("POST_EPS", F(pending.eps))]);
            buffers.extend([("y", &y), ("post", &post)]);
        }
        let launch =
            self.launch("norm", wgsl!("args", "emit", "norm"), constants, &buffers, Grid::Rows, 0)?;
        body.push(launch);
        Ok(())
    }

    /// What every norm of the residual stream is compiled with.
    pub(super) fn norm_constants(&self, norm: &Norm) -> Constants {
        let slices = self.program.hidden.next_multiple_of(BLOCK).div_ceil(256);
        // What a round stages fits in half of the workgroup memory that any device has.
        let rounds = slices.div_ceil(16);
        let slices = slices.div_ceil(rounds);
        vec![
            ("WIDTH", U(self.program.hidden as u32)),
            ("EPS", F(norm.eps)),
            ("ROUNDS", U(rounds as u32)),
            ("SLICES", U(slices as u32)),
            ("STAGED", U(slices as u32 * 8 * 33)),
        ]
    }

    /// Products of the same activations; those of one layout are one launch. Says where each result lies.
    pub(super) fn products<const N: usize>(
        &mut self,
        linears: [&Linear; N],
        body: &mut Vec<Launch>,
    ) -> Result<[Place; N], LoadError> {
        let layout = |linear: &Linear| Layout::of(self.weights.matrix(linear.matrix).format);
        let mut joined: Vec<(Layout, Vec<usize>)> = Vec::new();
        for (index, linear) in linears.iter().enumerate() {
            let layout = layout(linear);
            match joined.iter_mut().find(|(known, _)| *known == layout) {
                Some((_, members)) => members.push(index),
                None => joined.push((layout, vec![index])),
            }
        }
        let mut places: [Option<Place>; N] = std::array::from_fn(|_| None);
        for (scratch, (_, members)) in joined.iter().enumerate() {
            let group: Vec<&Linear> = members.iter().map(|&index| linears[index]).collect();
            let rows = |linear: &Linear| self.weights.matrix(linear.matrix).rows;
            let stride = group.iter().map(|linear| rows(linear)).sum();
            let mut place = Place { buffer: self.scratch[scratch].clone(), stride, first: 0 };
            for (&index, linear) in members.iter().zip(&group) {
                places[index] = Some(place.clone());
                place.first += rows(linear);
            }
            place.first = 0;
            self.product(&group, &place, Store::Write, body)?;
        }
        Ok(places.map(|place| place.expect("every product is in a group")))
    }

    /// Adds a product to the residual stream, or leaves it for the next norm if it is to be normed first.
    pub(super) fn add(
        &mut self,
        linear: &Linear,
        post_norm: Option<Norm>,
        body: &mut Vec<Launch>,
    ) -> Result<Option<Norm>, LoadError> {
        let (buffer, store) = match post_norm {
            Some(_) => (self.y.clone(), Store::Write),
            None => (self.x.clone(), Store::Add),
        };
        let place = Place { buffer, stride: self.program.hidden, first: 0 };
        self.product(&[linear], &place, store, body)?;
        Ok(post_norm)
    }

    pub(super) fn product(
        &mut self,
        linears: &[&Linear],
        place: &Place,
        store: Store,
        body: &mut Vec<Launch>,
    ) -> Result<(), LoadError> {
        let ids: Vec<MatrixId> = linears.iter().map(|linear| linear.matrix).collect();
        let matrix = self.matrix(&ids)?;
        let bias = match linears.iter().any(|linear| linear.bias.is_some()) {
            false => None,
            true => Some(linears.iter().flat_map(|linear| match linear.bias {
                Some(bias) => self.weights.vector(bias).to_vec(),
                None => vec![0.0; self.weights.matrix(linear.matrix).rows],
            })),
        };
        let bias: Option<Vec<f32>> = bias.map(Iterator::collect);
        for part in &matrix.parts {
            let mut common = vec![
                ("BLOCKS", U(matrix.blocks as u32)),
                ("OUTPUTS", U(part.rows as u32)),
                ("OUT_STRIDE", U(place.stride as u32)),
                ("OUT_FIRST", U((place.first + part.first) as u32)),
            ];
            let mut buffers = vec![("out", &place.buffer)];
            buffers.extend(planes(part));
            let [quants, scales, floats] = self.acts.clone();
            buffers.extend([("x_quants", &quants), ("x_scales", &scales), ("x_floats", &floats)]);
            let own_bias;
            if let Some(bias) = &bias {
                own_bias = self.device.upload(&bias[part.first..part.first + part.rows], "biases")?;
                buffers.push(("bias", &own_bias));
                common.push(("BIAS", U(1)));
            }
            match store {
                Store::Write => {}
                Store::Add => common.push(("ADD", U(1))),
                Store::Cap(cap) => common.extend([("CAP", U(1)), ("SOFT_CAP", F(cap))]),
            }
            let (mut compiled, mut arguments) = (Vec::new(), Vec::new());
            let mut counters = Vec::new();
            let kernel = |product: &Product| {
                let (files, mut constants) =
                    product.kernel(self.device, matrix.layout, matrix.blocks, self.halves_at(matrix.layout));
                constants.extend(common.iter().copied());
                (
                    product.name(matrix.layout),
                    [wgsl!("args"), decoder(matrix.layout), wgsl!("store"), files].concat(),
                    constants,
                )
            };
            let products = kernels::products(self.device, matrix.layout, part.rows as u32);
            for product in &products {
                let (name, files, constants) = kernel(product);
                compiled.push(self.device.pipeline(&name, &files, &constants)?);
                arguments.push(bits(&self.device.arguments(&constants)));
                let inputs = self.weights.matrix(ids[0]).cols;
                counters.push(format!("{name}[{}x{inputs}]", part.rows));
            }
            if self.device.as_hardware && matrix.layout != Layout::F32 {
                for product in [16, 8].into_iter().flat_map(kernels::all_cooperative) {
                    let (name, files, constants) = kernel(&product);
                    self.device.show(&name, &files, &constants);
                }
            }
            let group = self.device.bind(&compiled[0], &buffers);
            let grid = Grid::Product(part.rows as u32, products.into());
            let counter = self.counter(&counters);
            body.push(Launch { kernels: compiled, group, arguments, grid, kv_group: 0, counter });
        }
        Ok(())
    }

    pub(super) fn activate(
        &mut self,
        activation: Activation,
        [gate, up]: [Place; 2],
        down: &Linear,
    ) -> Result<Launch, LoadError> {
        let ffn = self.program.ffn;
        let mut constants = vec![
            ("WIDTH", U(ffn as u32)),
            ("STAGED", U(8 * 33)),
            ("GATE_STRIDE", U(gate.stride as u32)),
            ("UP_STRIDE", U(up.stride as u32)),
            ("UP_FIRST", U(up.first as u32)),
            ("GELU", U(u32::from(activation == Activation::GeluTanh))),
        ];
        constants.extend(self.emit_for(&[down], ffn));
        let buffers = [("gate", &gate.buffer), ("up", &up.buffer)];
        let grid = Grid::Each(ffn.div_ceil(8 * BLOCK) as u32);
        self.launch("activate", wgsl!("args", "emit", "activate"), constants, &buffers, grid, 0)
    }
}

/// The files that read a layout.
fn decoder(layout: Layout) -> &'static [&'static str] {
    match layout {
        Layout::F32 => wgsl!("acts_float", "f32"),
        Layout::F16 => wgsl!("acts_float", "f16", "halves"),
        Layout::Bf16 => wgsl!("acts_float", "bf16", "halves"),
        Layout::Q2 => wgsl!("acts_int", "q2"),
        Layout::Q4 => wgsl!("acts_int", "q4"),
        Layout::Q5 => wgsl!("acts_int", "q5"),
        Layout::Q6 => wgsl!("acts_int", "q6"),
        Layout::Q8 => wgsl!("acts_int", "q8"),
    }
}

fn planes(part: &Part) -> impl Iterator<Item = (&'static str, &wgpu::Buffer)> {
    let names = ["w_quants", "w_high", "w_scales"];
    names.into_iter().zip(&part.planes).filter_map(|(name, plane)| Some((name, plane.as_ref()?)))
}
