//! Products that do, besides, what would be launches of their own before or after them, for steps of one row: there, much of a
//! launch's time is the way from one to the next. The bits are those of the separate launches.

use paguro_backend::{Activation, KvDtype, Linear, LoadError, RopeStyle};

use crate::ops::{Norm, NormGateUp, NormLogits, NormQkvRopeStore, Op};

use super::{
    Acts, Before, Grid, Launch, Lowering, Place, Store,
    Value::{F, U},
    When,
    hands::{self, Parts, Take},
    kernels,
    products::{Group, Inputs, decoder, planes},
    wgsl,
};
use crate::{
    hidden::Hazards,
    layout::{BLOCK, Layout},
    matrix::Order,
    template::Constants,
};

/// What becomes of a product of one row.
pub(super) struct Finish {
    name: &'static str,
    files: Vec<&'static str>,
    constants: Constants,
    buffers: Vec<(&'static str, wgpu::Buffer)>,
    /// Whether a workgroup has a whole block of outputs.
    by_blocks: bool,
    hazards: Hazards,
}

impl Finish {
    /// The same with what it hands over.
    fn with(mut self, (constants, mut buffers): Parts, hazards: Hazards) -> Self {
        self.constants.extend(constants);
        // The first of two buffers of a name is bound.
        buffers.append(&mut self.buffers);
        Self { buffers, hazards, ..self }
    }
}

/// Where the activations of a product of one row come from.
#[derive(Clone, Copy)]
pub(super) enum Source {
    /// They are there.
    Made,
    /// They are there but for the factor of this norm.
    Normed(Norm),
    /// From floats.
    Floats,
}

impl Lowering<'_> {
    /// Products of queries, keys and values, their rotation, and K and V into the pages.
    pub(super) fn queries_keys_values(
        &mut self,
        op: &NormQkvRopeStore,
        before: Before,
        body: &mut Vec<Launch>,
    ) -> Result<(), LoadError> {
        let linears = [&op.q, &op.k, &op.v];
        let rotates = self.rotates(op);
        let groups = self.groups(linears, |members| self.order_of(op, members));
        let mut finishes = vec![];
        for (group, _) in groups.iter().filter(|_| rotates) {
            let mut finish = self.rope_finish(op, &group.linears);
            if let Some(hands) = self.product_hands() {
                finish = finish.with(hands.queries(op.kv.slot, finishes.is_empty()), hands::PRODUCT);
            }
            finishes.push(finish);
        }
        let places = self.after_norm(linears, &groups, before.source(op.norm), finishes, Take::Down, body)?;
        let launch = self.rope_store(op, places, self.is_together(op))?;
        body.push(Launch { when: When::unless_one_row(rotates), ..launch });
        Ok(())
    }

    /// Products of a norm's activations. In steps of one row they are finished in these ways, if there are any.
    fn after_norm<const N: usize>(
        &mut self,
        linears: [&Linear; N],
        groups: &[(Group<'_>, Place)],
        source: Source,
        finishes: Vec<Finish>,
        take: Take,
        body: &mut Vec<Launch>,
    ) -> Result<[Place; N], LoadError> {
        let is_own = !finishes.is_empty() || matches!(source, Source::Normed(_));
        if is_own {
            let mut finishes = finishes.into_iter();
            for (group, place) in groups {
                let inputs = Inputs { linears: &group.linears, order: group.order, acts: Acts::Normed };
                let finish = finishes.next().unwrap_or_else(|| store_finish(place, &Store::Write));
                let take = matches!(source, Source::Normed(_)).then_some(take);
                self.one_row(&inputs, source, finish, take, body)?;
            }
        }
        self.products(linears, groups, When::unless_one_row(is_own), body)
    }

    /// Whether products rotate and store what they make in steps of one row.
    pub(super) fn rotates(&self, op: &NormQkvRopeStore) -> bool {
        let rope = &self.program.ropes[op.rope];
        self.limits.kv_dtype == KvDtype::F16
            && op.q_norm.is_none()
            && op.k_norm.is_none()
            && rope.frequencies.len().is_multiple_of(2)
            && self.is_whole(&[&op.q, &op.k, &op.v])
    }

    /// Whether neighbouring pairs lie together in what products of heads make.
    fn is_together(&self, op: &NormQkvRopeStore) -> bool {
        let rope = &self.program.ropes[op.rope];
        self.rotates(op) && rope.style == RopeStyle::HalfSplit && !rope.frequencies.is_empty()
    }

    /// The order of the rows of some of queries (0), keys (1) and values (2).
    fn order_of(&self, op: &NormQkvRopeStore, members: &[usize]) -> Order {
        match self.is_together(op) {
            false => Order::Joined,
            true => Order::Together {
                matrices: members.iter().filter(|&&member| member < 2).count(),
                head_dim: self.program.kv.head_dim,
                pairs: self.program.ropes[op.rope].frequencies.len(),
            },
        }
    }

    fn rope_finish(&self, op: &NormQkvRopeStore, linears: &[&Linear]) -> Finish {
        let rows = |of: &Linear| match linears.iter().any(|linear| linear.matrix == of.matrix) {
            true => self.weights.matrix(of.matrix).rows as u32,
            false => 0,
        };
        let [q, k, v] = [&op.q, &op.k, &op.v].map(rows);
        let mut constants = vec![
            ("Q_END", U(q)),
            ("K_END", U(q + k)),
            ("HAS_Q", U(u32::from(q > 0))),
            ("HAS_K", U(u32::from(k > 0))),
            ("HAS_V", U(u32::from(v > 0))),
            ("PAIRS", U(self.program.ropes[op.rope].frequencies.len() as u32)),
            ("TOGETHER", U(u32::from(self.is_together(op)))),
        ];
        constants.extend(self.heads(op.kv.group));
        let [k_pages, v_pages] = self.pages[op.kv.slot].clone();
        let [far, near] = self.ropes[op.rope].clone();
        Finish {
            name: "_rope",
            files: [wgsl!("rotate", "finish_rope"), self.v_store()].concat(),
            constants,
            buffers: vec![
                ("step", self.step.clone()),
                ("far", far),
                ("near", near),
                ("queries", self.queries.clone()),
                ("k_pages", k_pages),
                ("v_pages", v_pages),
            ],
            by_blocks: false,
            hazards: Hazards::TOLD,
        }
    }

    /// Gate and up, and what the next product wants of them. Says whether that product gets floats in steps of one row.
    pub(super) fn gate_and_up(
        &mut self,
        op: &NormGateUp,
        before: Before,
        down: &Linear,
        body: &mut Vec<Launch>,
    ) -> Result<bool, LoadError> {
        let linears = [&op.gate, &op.up];
        let gates = self.gates(op, down);
        let order = if gates { Order::InTurn } else { Order::Joined };
        let groups = self.groups(linears, |_| order);
        let finishes = if gates { vec![self.gate_finish(op.activation)] } else { vec![] };
        let places =
            self.after_norm(linears, &groups, before.source(op.norm), finishes, Take::Projected, body)?;
        let launch = self.activate(op.activation, places, gates, down)?;
        body.push(Launch { when: When::unless_one_row(gates), ..launch });
        Ok(gates)
    }

    /// Whether the product of gate and up makes what this next one wants, in steps of one row.
    pub(super) fn gates(&self, op: &NormGateUp, down: &Linear) -> bool {
        let ffn = self.program.ffn;
        let layout = |linear: &Linear| Layout::of(self.weights.matrix(linear.matrix).format);
        layout(&op.gate) == layout(&op.up)
            && ffn.is_multiple_of(BLOCK)
            && self.is_whole(&[&op.gate, &op.up])
            && self.is_whole(&[down])
            && kernels::has_room(self.device, layout(down), ffn / BLOCK)
    }

    fn gate_finish(&self, activation: Activation) -> Finish {
        let finish = Finish {
            name: "_gate",
            files: wgsl!("activation", "finish_gate").to_vec(),
            constants: vec![
                ("ACT_BLOCKS", U((self.program.ffn / BLOCK) as u32)),
                ("GELU", U(u32::from(activation == Activation::GeluTanh))),
            ],
            buffers: vec![("gated", self.acts[2].clone())],
            by_blocks: false,
            hazards: Hazards::TOLD,
        };
        match self.product_hands() {
            Some(hands) => finish.with(hands.gate(), hands::PRODUCT),
            None => finish,
        }
    }

    /// Adds a product to the residual stream, or leaves it for the next norm if it is to be normed first.
    pub(super) fn add(
        &mut self,
        linear: &Linear,
        from_floats: bool,
        post_norm: Option<Norm>,
        next: Option<&Op>,
        body: &mut Vec<Launch>,
    ) -> Result<Before, LoadError> {
        let (buffer, store) = match post_norm {
            Some(_) => (self.y.clone(), Store::Write),
            None => (self.x.clone(), Store::Add),
        };
        let hidden = self.program.hidden;
        let place = Place { buffer, stride: hidden, first: 0 };
        let (last, hazards) = match next {
            Some(Op::NormLogits(_)) => (Some(self.x.clone()), hands::LAST),
            _ => (None, hands::PRODUCT),
        };
        let next = match next {
            Some(Op::NormQkvRopeStore(op)) => Some((op.norm, vec![&op.q, &op.k, &op.v])),
            Some(Op::NormGateUp(op)) => Some((op.norm, vec![&op.gate, &op.up])),
            // What is handed over has eight bits.
            Some(Op::NormLogits(op)) if self.product_hands().is_none() || self.is_quantized(&op.head) => {
                Some((op.norm, vec![&op.head]))
            }
            _ => None,
        };
        let next = next.filter(|(_, linears)| {
            post_norm.is_none()
                && hidden.is_multiple_of(BLOCK)
                && self.is_whole(&[linear])
                && self.is_whole(linears)
        });
        let mut finish = match &next {
            Some((norm, linears)) => Some(self.add_finish(norm, linears)?),
            None => from_floats.then(|| store_finish(&place, &store)),
        };
        if let Some(hands) = self.product_hands() {
            finish = Some(match finish {
                Some(finish) if !from_floats => finish.with(hands.projection(&self.x), hands::PRODUCT),
                Some(finish) if next.is_some() => finish.with(hands.down(true, last), hazards),
                _ => last_finish().with(hands.down(false, last), hazards),
            });
        }
        let inputs = Inputs { linears: &[linear], order: Order::Joined, acts: Acts::Plain };
        let when = When::unless_one_row(finish.is_some());
        if let Some(finish) = finish {
            let (source, take) =
                if from_floats { (Source::Floats, Take::Gated) } else { (Source::Made, Take::Attended) };
            self.one_row(&inputs, source, finish, Some(take), body)?;
        }
        self.product(&inputs, &place, store, when, body)?;
        Ok(match (post_norm, next) {
            (Some(norm), _) => Before::Pending(norm),
            (None, Some(_)) => Before::Emitted,
            (None, None) => Before::Added,
        })
    }

    fn add_finish(&mut self, norm: &Norm, linears: &[&Linear]) -> Result<Finish, LoadError> {
        let mut constants = vec![("STAGED", U(33)), ("SHARED_BLOCKS", U(1)), ("NORMS", U(1))];
        constants.extend(self.emit_for(linears, self.program.hidden));
        let mut buffers = vec![
            ("out", self.x.clone()),
            ("weight", self.vector(norm.weight)?),
            ("out_squares", self.squares.clone()),
        ];
        buffers.extend(self.made(Acts::Normed));
        Ok(Finish {
            name: "_add",
            files: wgsl!("emit", "finish_add").to_vec(),
            constants,
            buffers,
            by_blocks: true,
            hazards: Hazards::TOLD,
        })
    }

    /// Logits of a step of one row, of whose last norm the product before has made all but the factor.
    pub(super) fn one_row_head(
        &mut self,
        op: &NormLogits,
        place: &Place,
        store: &Store,
    ) -> Result<Vec<Launch>, LoadError> {
        let inputs = Inputs { linears: &[&op.head], order: Order::Joined, acts: Acts::Normed };
        let mut finish = store_finish(place, store);
        if self.product_hands().is_some() {
            finish.hazards = hands::LAST;
        }
        let mut head = Vec::new();
        self.one_row(&inputs, Source::Normed(op.norm), finish, Some(Take::Down), &mut head)?;
        Ok(head)
    }

    /// A product of a step of one row, and what it takes where launches hand over.
    fn one_row(
        &mut self,
        inputs: &Inputs<'_>,
        source: Source,
        finish: Finish,
        take: Option<Take>,
        body: &mut Vec<Launch>,
    ) -> Result<(), LoadError> {
        let matrix = self.matrix(inputs)?;
        let [part] = &matrix.parts[..] else { unreachable!("`is_whole` was asked") };
        let layout = matrix.layout;
        let take = take.filter(|_| self.product_hands().is_some());
        let by_blocks = finish.by_blocks || matches!(source, Source::Floats);
        let tile = by_blocks.then_some(BLOCK as u32);
        let mut product = kernels::one_row(self.device, layout, part.rows as u32, tile);
        if take.is_some() && !by_blocks {
            // So that fewer workgroups take what is handed over.
            product = product.with_threads(self.device.most_threads);
        }
        let (files, mut constants) = product.kernel(self.device, layout, matrix.blocks, 0);
        let mut files = [wgsl!("args", "quantize"), decoder(layout), wgsl!("factor"), files].concat();
        constants.extend([
            ("BLOCKS", U(matrix.blocks as u32)),
            ("OUTPUTS", U(part.rows as u32)),
            ("FINISHES", U(u32::from(finish.name != STORE))),
        ]);
        match source {
            Source::Made => constants.push(("FACTORS", U(u32::from(inputs.acts == Acts::Normed)))),
            Source::Normed(norm) => {
                files.extend(wgsl!("row_scale"));
                constants.extend([("NORMED", U(1)), ("EARLY", U(1))]);
                constants.extend(self.row_scale(&norm));
            }
            Source::Floats if layout.is_quantized() => {
                let room = matrix.blocks.next_multiple_of(64) as u32;
                let parts = (2 * room).div_ceil(product.threads(self.device));
                constants.extend([
                    ("OWN_ACTS", U(room)),
                    ("PARTS", U(parts)),
                    ("EARLY", U(3)),
                    ("TWICE", U(1)),
                ]);
            }
            Source::Floats => {}
        }
        let bias = self.bias(inputs, 0..part.rows)?;
        constants.push(("BIAS", U(u32::from(bias.is_some()))));
        constants.extend(finish.constants);
        files.extend(finish.files);
        let mut own = finish.buffers;
        if self.product_hands().is_some() {
            files.extend(wgsl!("clear"));
            constants.push(hands::EMPTY_WORD);
        }
        if let (Some(hands), Some(take)) = (self.product_hands(), take) {
            files.extend(wgsl!("hand", "hand_words"));
            let (takes, buffers) = hands.takes(take, product.threads(self.device));
            constants.extend(takes);
            own.extend(buffers);
            if let Source::Made = source {
                // It starts during attention, and so has time to ask for weights.
                constants.push(("EARLY", U(matrix.blocks.div_ceil(32).min(3) as u32)));
            }
        }
        own.extend(self.taken(inputs.acts));
        own.extend([("row_squares", self.squares.clone()), ("row_factors", self.factors.clone())]);
        let mut buffers: Vec<(&str, &wgpu::Buffer)> =
            own.iter().map(|(name, buffer)| (*name, buffer)).collect();
        buffers.extend(planes(part));
        buffers.extend(bias.iter().map(|bias| ("bias", bias)));
        let name = format!("{}{}", product.name(layout), finish.name);
        self.show_for_few(&name, &files, &constants);
        let kernels = vec![self.kernel_with(&name, &files, &constants, &buffers, &finish.hazards)?];
        let counter = self.counter(&[format!("{name}[{}x{}]", part.rows, self.inputs(inputs))]);
        body.push(Launch {
            when: When::OneRow,
            kernels,
            grid: Grid::Product(part.rows as u32, [product].into()),
            kv_group: 0,
            counter,
            timed_with: None,
        });
        Ok(())
    }

    /// Whether kernels can see these matrices, joined, as one.
    pub(super) fn is_whole(&self, linears: &[&Linear]) -> bool {
        let words = |linear: &&Linear| {
            let matrix = self.weights.matrix(linear.matrix);
            let words = Layout::of(matrix.format).row_words(matrix.cols.div_ceil(BLOCK));
            matrix.rows * words.into_iter().max().unwrap_or(0)
        };
        linears.iter().map(words).sum::<usize>() as u64 * 4 <= self.device.binding_limit()
    }

    /// What [`Source::Normed`] and norms make a factor with.
    pub(super) fn row_scale(&self, norm: &Norm) -> Constants {
        let hidden = self.program.hidden;
        vec![
            // Fours of blocks.
            ("SQUARES", U(hidden.div_ceil(4 * BLOCK) as u32)),
            ("INVERSE_WIDTH", F(1.0 / hidden as f32)),
            ("EPS", F(norm.eps)),
        ]
    }
}

impl Before {
    fn source(self, norm: Norm) -> Source {
        match self {
            Self::Emitted => Source::Normed(norm),
            Self::Added | Self::Pending(_) => Source::Made,
        }
    }
}

/// Name of the finish that is none.
const STORE: &str = "";

fn store_finish(place: &Place, store: &Store) -> Finish {
    let mut constants = vec![("OUT_STRIDE", U(place.stride as u32)), ("OUT_FIRST", U(place.first as u32))];
    constants.extend(store.constants());
    Finish {
        name: STORE,
        files: wgsl!("store").to_vec(),
        constants,
        buffers: vec![("out", place.buffer.clone())],
        by_blocks: false,
        hazards: Hazards::TOLD,
    }
}

/// The last product onto a residual stream that was handed over.
fn last_finish() -> Finish {
    Finish {
        name: "_last",
        files: wgsl!("finish_add").to_vec(),
        constants: vec![],
        buffers: vec![],
        by_blocks: true,
        hazards: Hazards::TOLD,
    }
}
