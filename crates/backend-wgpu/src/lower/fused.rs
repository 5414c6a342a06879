//! Matmuls fused with operations before or after them, for steps of one row, where much of a launch's time is its
//! latency. The results are bitwise equal to those of separate launches.

use paguro_backend::{KvDtype, Linear, LoadError, Norm, RopeStyle};

use crate::ops::{self, NormLogits, NormQkvRopeStore, Op, is_plain};

use super::{
    Acts, Before, Grid, Launch, Lowering, Place, Store,
    Value::{F, U},
    When,
    handoff::{self, Bindings, HandoffInput},
    kernels,
    matmuls::{Group, Inputs, decoder, planes},
    wgsl,
};
use crate::{
    hidden::Hazards,
    layout::{BLOCK, Layout},
    matrix::Order,
    template::Constants,
};

/// Operation after a matmul of one row.
pub(super) struct Finish {
    pub name: &'static str,
    pub files: Vec<&'static str>,
    pub constants: Constants,
    pub buffers: Vec<(&'static str, wgpu::Buffer)>,
    /// True if a workgroup computes a whole block of outputs.
    pub by_blocks: bool,
    pub hazards: Hazards,
}

impl Finish {
    /// Adds the handoff.
    pub(super) fn with(mut self, (constants, mut buffers): Bindings, hazards: Hazards) -> Self {
        self.constants.extend(constants);
        // The first of two buffers of a name is bound.
        buffers.append(&mut self.buffers);
        Self { buffers, hazards, ..self }
    }
}

/// Source of the activations of a matmul of one row.
#[derive(Clone, Copy)]
pub(super) enum Source {
    /// Existing activations.
    Made,
    /// They are stored without the factor of a norm with this epsilon.
    Normed(f32),
    /// Floats, which the kernel quantizes.
    Floats,
}

impl Lowering<'_> {
    /// Matmuls of queries, keys and values, their rotation, and K and V into the pages.
    pub(super) fn queries_keys_values(
        &mut self,
        op: &NormQkvRopeStore,
        before: Before,
        body: &mut Vec<Launch>,
    ) -> Result<(), LoadError> {
        let places = match (&op.k, &op.v) {
            (Some(k), Some(v)) => self.head_matmuls(op, [&op.q, k, v], before, body)?,
            (Some(k), None) => {
                let [q, k] = self.head_matmuls(op, [&op.q, k], before, body)?;
                [q, k.clone(), k]
            }
            (None, _) => {
                let [q] = self.head_matmuls(op, [&op.q], before, body)?;
                [q.clone(), q.clone(), q]
            }
        };
        let launch = self.rope_store(op, places, self.is_together(op))?;
        body.push(Launch { when: When::unless_one_row(self.rotates(op)), ..launch });
        Ok(())
    }

    /// Matmuls of some of queries, keys and values.
    fn head_matmuls<const N: usize>(
        &mut self,
        op: &NormQkvRopeStore,
        linears: [&Linear; N],
        before: Before,
        body: &mut Vec<Launch>,
    ) -> Result<[Place; N], LoadError> {
        let rotates = self.rotates(op);
        let groups = self.groups(linears, |members| self.order_of(op, members));
        let mut finishes = vec![];
        for (group, _) in groups.iter().filter(|_| rotates) {
            let mut finish = self.rope_finish(op, &group.linears);
            if let Some(handoff) = self.word_handoff() {
                finish = finish.with(handoff.queries(op.kv.layer_slot, finishes.is_empty()), handoff::MATMUL);
            }
            finishes.push(finish);
        }
        self.after_norm(linears, &groups, (before.source(), Store::WRITE), finishes, HandoffInput::Down, body)
    }

    /// Adds matmuls with a norm's activations. In steps of one row, `finishes` replace `store`, if there are any.
    pub(super) fn after_norm<const N: usize>(
        &mut self,
        linears: [&Linear; N],
        groups: &[(Group<'_>, Place)],
        (source, store): (Source, Store),
        finishes: Vec<Finish>,
        handoff_input: HandoffInput,
        body: &mut Vec<Launch>,
    ) -> Result<[Place; N], LoadError> {
        let is_own = !finishes.is_empty() || matches!(source, Source::Normed(_));
        if is_own {
            let mut finishes = finishes.into_iter();
            for (group, place) in groups {
                let inputs = Inputs {
                    linears: &group.linears,
                    order: group.order,
                    acts: Acts::Normed,
                    in_order: false,
                };
                let finish = finishes.next().unwrap_or_else(|| store_finish(place, &store));
                let handoff_input = matches!(source, Source::Normed(_)).then_some(handoff_input);
                self.one_row(&inputs, source, finish, handoff_input, body)?;
            }
        }
        self.matmuls(linears, groups, store, When::unless_one_row(is_own), body)
    }

    /// Returns true if matmuls of a step of one row also apply RoPE and store K and V.
    pub(super) fn rotates(&self, op: &NormQkvRopeStore) -> bool {
        self.limits.kv_dtype == KvDtype::F16
            && op.qk_norm.is_none()
            && op.v_norm.is_none()
            && op.k.is_some()
            && op.v.is_some()
            && op.position_scale.is_none()
            && self.pairs(op).is_multiple_of(2)
            && self.is_whole(&Vec::from_iter(op.qkv()))
    }

    /// Returns true if the matmuls of heads write neighbouring pairs together.
    fn is_together(&self, op: &NormQkvRopeStore) -> bool {
        let is_split = |rope: usize| self.program.ropes[rope].style == RopeStyle::HalfSplit;
        self.rotates(op) && op.rope.is_some_and(is_split) && self.pairs(op) > 0
    }

    /// Pairs of a head that are rotated.
    fn pairs(&self, op: &NormQkvRopeStore) -> usize {
        op.rope.map_or(0, |rope| self.program.ropes[rope].frequencies.len())
    }

    /// Returns the order of the rows of joined matrices: queries (0), keys (1) and values (2).
    fn order_of(&self, op: &NormQkvRopeStore, members: &[usize]) -> Order {
        match self.is_together(op) {
            false => Order::Joined,
            true => Order::Together {
                matrices: members.iter().filter(|&&member| member < 2).count(),
                head_dim: self.program.kv.groups[op.kv.group].head_dim,
                pairs: self.pairs(op),
            },
        }
    }

    fn rope_finish(&self, op: &NormQkvRopeStore, linears: &[&Linear]) -> Finish {
        let rows = |of: &Linear| match linears.iter().any(|linear| linear.matrix == of.matrix) {
            true => self.weights.matrix(of.matrix).rows as u32,
            false => 0,
        };
        let rows = |of: Option<&Linear>| of.map_or(0, rows);
        let [q, k, v] = [Some(&op.q), op.k.as_ref(), op.v.as_ref()].map(rows);
        let mut constants = vec![
            ("Q_END", U(q)),
            ("K_END", U(q + k)),
            ("HAS_Q", U(u32::from(q > 0))),
            ("HAS_K", U(u32::from(k > 0))),
            ("HAS_V", U(u32::from(v > 0))),
            ("PAIRS", U(self.pairs(op) as u32)),
            ("TOGETHER", U(u32::from(self.is_together(op)))),
        ];
        constants.extend(self.heads(op.kv));
        let [k_pages, v_pages] = self.pages_of(op.kv);
        let mut buffers = vec![
            ("step", self.step.clone()),
            ("queries", self.queries.clone()),
            ("k_pages", k_pages),
            ("v_pages", v_pages),
        ];
        let rope_tables = op.rope.map(|rope| self.ropes[rope].clone());
        buffers.extend(rope_tables.into_iter().flat_map(|[far, near]| [("far", far), ("near", near)]));
        Finish {
            name: "_rope",
            files: [wgsl!("rotate", "finish_rope"), self.v_store()].concat(),
            constants,
            buffers,
            by_blocks: false,
            hazards: Hazards::DECLARED,
        }
    }

    /// Adds a matmul to the residual stream, or leaves it for the next norm if it is to be normed first, or for an
    /// [`Op::Join`].
    pub(super) fn add(
        &mut self,
        linear: &Linear,
        from_floats: bool,
        add: &ops::Add,
        next: Option<&Op>,
        body: &mut Vec<Launch>,
    ) -> Result<Before, LoadError> {
        let branch = self.branch_of(add);
        let is_direct = add.post_norm.is_none() && !add.waits;
        let (buffer, store) = match is_direct {
            false => (branch.clone(), Store::WRITE),
            true => (self.x.clone(), Store::add(add.scale)),
        };
        let hidden = self.program.hidden;
        let place = Place { buffer, stride: hidden, first: 0 };
        let (last, hazards) = match next {
            Some(Op::NormLogits(_)) => (Some(self.x.clone()), handoff::LAST),
            _ => (None, handoff::MATMUL),
        };
        // Only matmuls lowered for it can apply the factor of a norm.
        let next = match next {
            Some(Op::NormQkvRopeStore(op)) if op.gate.is_none() => {
                op.norm.map(|norm| (norm, op.qkv().collect()))
            }
            Some(Op::NormGateUp(op)) => op.norm.map(|norm| (norm, op.gate.iter().chain([&op.up]).collect())),
            // Activations with handoff have eight bits.
            Some(Op::NormLogits(op)) if self.word_handoff().is_none() || self.is_quantized(&op.head) => {
                Some((op.norm, vec![&op.head]))
            }
            _ => None,
        };
        let next = next.filter(|(norm, linears)| {
            add.is_plain()
                && is_plain(norm)
                && hidden.is_multiple_of(BLOCK)
                && self.is_whole(&[linear])
                && self.is_whole(linears)
        });
        let mut finish = match &next {
            Some((norm, linears)) => Some(self.add_finish(norm, linears)?),
            None => from_floats.then(|| store_finish(&place, &store)),
        };
        if let Some(handoff) = self.word_handoff() {
            finish = Some(match finish {
                Some(finish) if !from_floats => finish.with(handoff.projection(&self.x), handoff::MATMUL),
                Some(finish) if next.is_some() => finish.with(handoff.down(true, last), hazards),
                _ => last_finish().with(handoff.down(false, last), hazards),
            });
        }
        let inputs = Inputs { linears: &[linear], order: Order::Joined, acts: Acts::Plain, in_order: false };
        let when = When::unless_one_row(finish.is_some());
        if let Some(finish) = finish {
            let (source, handoff_input) = if from_floats {
                (Source::Floats, HandoffInput::Gated)
            } else {
                (Source::Made, HandoffInput::Attended)
            };
            self.one_row(&inputs, source, finish, Some(handoff_input), body)?;
        }
        self.matmul(&inputs, &place, store, when, body)?;
        if let Some((norm, _)) = next {
            return Ok(Before::Emitted(norm.eps));
        }
        self.after_branch(add, &branch, body)
    }

    /// State of the input of the next norm after a branch that was not fused with it. `branch` is the branch's output, if it was not
    /// added directly.
    pub(super) fn after_branch(
        &mut self,
        add: &ops::Add,
        branch: &wgpu::Buffer,
        body: &mut Vec<Launch>,
    ) -> Result<Before, LoadError> {
        match add.post_norm.filter(|_| !add.waits) {
            None => Ok(Before::Added),
            Some(norm) if is_plain(&norm) && add.scale == 1.0 => Ok(Before::Pending(norm, 1.0)),
            Some(_) => {
                self.add_branch(add, branch, body)?;
                Ok(Before::Added)
            }
        }
    }

    fn add_finish(&mut self, norm: &Norm, linears: &[&Linear]) -> Result<Finish, LoadError> {
        let mut constants = vec![("STAGED", U(33)), ("SHARED_BLOCKS", U(1)), ("NORMS", U(1))];
        constants.extend(self.emit_for(linears, self.program.hidden));
        let mut buffers = vec![
            ("out", self.x.clone()),
            ("weight", self.vector(norm.weight)?),
            ("out_squares", self.squares.clone()),
        ];
        buffers.extend(self.written_acts(Acts::Normed));
        Ok(Finish {
            name: "_add",
            files: wgsl!("emit", "finish_add").to_vec(),
            constants,
            buffers,
            by_blocks: true,
            hazards: Hazards::DECLARED,
        })
    }

    /// Adds the logits of a step of one row, for which the last matmul has computed all of the norm except its factor.
    pub(super) fn one_row_head(
        &mut self,
        op: &NormLogits,
        place: &Place,
        store: &Store,
    ) -> Result<Vec<Launch>, LoadError> {
        let inputs =
            Inputs { linears: &[&op.head], order: Order::Joined, acts: Acts::Normed, in_order: false };
        let mut finish = store_finish(place, store);
        if self.word_handoff().is_some() {
            finish.hazards = handoff::LAST;
        }
        let mut head = Vec::new();
        self.one_row(&inputs, Source::Normed(op.norm.eps), finish, Some(HandoffInput::Down), &mut head)?;
        Ok(head)
    }

    /// Adds a matmul of a step of one row, with its inputs if launches use handoff.
    pub(super) fn one_row(
        &mut self,
        inputs: &Inputs<'_>,
        source: Source,
        finish: Finish,
        handoff_input: Option<HandoffInput>,
        body: &mut Vec<Launch>,
    ) -> Result<(), LoadError> {
        let matrix = self.matrix(inputs)?;
        let [part] = &matrix.parts[..] else { unreachable!("the caller has checked `is_whole`") };
        let layout = matrix.layout;
        let handoff_input = handoff_input.filter(|_| self.word_handoff().is_some());
        let by_blocks = finish.by_blocks || matches!(source, Source::Floats);
        let tile = by_blocks.then_some(BLOCK as u32);
        let mut matmul = kernels::one_row(self.device, layout, part.rows as u32, tile);
        if handoff_input.is_some() && !by_blocks {
            // Fewer workgroups then wait for the handoff.
            matmul = matmul.with_threads(self.device.most_threads);
        }
        let (files, mut constants) = matmul.kernel(self.device, layout, matrix.blocks, 0);
        let mut files = [wgsl!("args", "quantize"), decoder(layout), wgsl!("factor"), files].concat();
        constants.extend([
            ("BLOCKS", U(matrix.blocks as u32)),
            ("OUTPUTS", U(part.rows as u32)),
            ("FINISHES", U(u32::from(finish.name != STORE))),
        ]);
        match source {
            Source::Made => constants.push(("FACTORS", U(u32::from(inputs.acts == Acts::Normed)))),
            Source::Normed(eps) => {
                files.extend(wgsl!("row_scale"));
                constants.extend([("NORMED", U(1)), ("EARLY", U(1))]);
                constants.extend(row_scale(self.program.hidden, eps));
            }
            Source::Floats if layout.is_quantized() => {
                let room = matrix.blocks.next_multiple_of(64) as u32;
                let parts = (2 * room).div_ceil(matmul.threads(self.device));
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
        if self.word_handoff().is_some() {
            files.extend(wgsl!("clear"));
            constants.push(handoff::EMPTY_WORD);
        }
        if let (Some(handoff), Some(handoff_input)) = (self.word_handoff(), handoff_input) {
            files.extend(wgsl!("handoff", "handoff_words"));
            let (reads, buffers) = handoff.reads(handoff_input, matmul.threads(self.device));
            constants.extend(reads);
            own.extend(buffers);
            if let Source::Made = source {
                // The launch starts during attention and prefetches weights.
                constants.push(("EARLY", U(matrix.blocks.div_ceil(32).min(3) as u32)));
            }
        }
        own.extend(self.read_acts(inputs.acts));
        own.extend([("row_squares", self.squares.clone()), ("row_factors", self.factors.clone())]);
        let mut buffers: Vec<(&str, &wgpu::Buffer)> =
            own.iter().map(|(name, buffer)| (*name, buffer)).collect();
        buffers.extend(planes(part));
        buffers.extend(bias.iter().map(|bias| ("bias", bias)));
        let name = format!("{}{}", matmul.name(layout), finish.name);
        self.show_for_few(&name, &files, &constants);
        let kernels = vec![self.kernel_with(&name, &files, &constants, &buffers, &finish.hazards)];
        let counter = self.counter(&[format!("{name}[{}x{}]", part.rows, self.inputs(inputs))]);
        body.push(Launch {
            when: When::OneRow,
            kernels,
            grid: Grid::Matmul(part.rows as u32, 1, [matmul].into()),
            kv_group: 0,
            counter,
            timed_with: None,
        });
        Ok(())
    }

    /// Returns true if one binding holds these joined matrices.
    pub(super) fn is_whole(&self, linears: &[&Linear]) -> bool {
        let words = |linear: &&Linear| {
            let matrix = self.weights.matrix(linear.matrix);
            let words = Layout::of(matrix.format).row_words(matrix.cols.div_ceil(BLOCK));
            matrix.rows * words.into_iter().max().unwrap_or(0)
        };
        linears.iter().map(words).sum::<usize>() as u64 * 4 <= self.device.binding_limit()
    }
}

/// Constants for the factor of a norm of rows of this width.
pub(super) fn row_scale(width: usize, eps: f32) -> Constants {
    vec![
        // Fours of blocks.
        ("SQUARES", U(width.div_ceil(4 * BLOCK) as u32)),
        ("INVERSE_WIDTH", F(1.0 / width as f32)),
        ("EPS", F(eps)),
    ]
}

impl Before {
    pub(super) fn source(self) -> Source {
        match self {
            Self::Emitted(eps) => Source::Normed(eps),
            Self::Added | Self::Pending(..) => Source::Made,
        }
    }
}

/// Name of the epilogue that does nothing.
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
        hazards: Hazards::DECLARED,
    }
}

/// Returns the end of the last matmul onto a residual stream with handoff.
fn last_finish() -> Finish {
    Finish {
        name: "_last",
        files: wgsl!("finish_add").to_vec(),
        constants: vec![],
        buffers: vec![],
        by_blocks: true,
        hazards: Hazards::DECLARED,
    }
}
