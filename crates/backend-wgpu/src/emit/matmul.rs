//! Kernels of matmuls. In steps of one row, where much of a launch's time is its latency, they include operations before and
//! after them. The results are bitwise equal to those of separate launches.

use paguro_backend::QkNorm;

use super::{
    code::{Code, Coded, Coder, Part, Weights, half_acts, read_acts, written_acts},
    handoff,
    launch::Grid,
    rows::{activation_constants, row_scale},
    vectors, wgsl,
};
use crate::{
    hidden::Hazards,
    layout::{BLOCK, Layout},
    lower::{
        Acts, Epilogue, Formats, Input, Link, Matmul, Node, RopeStore, RowClass, Slot, Sync,
        kernels::{self, Matmul as MatmulKernel},
    },
    matrix::Order,
    template::{
        Constants,
        Value::{F, U},
    },
};

/// End of a matmul of one row.
struct Finish {
    name: &'static str,
    part: Part,
    /// Outputs of a workgroup, if they are a whole block or head.
    tile: Option<u32>,
}

impl Coder<'_> {
    /// Returns the launches of a matmul, one for each part of its matrix.
    pub fn matmul(&mut self, op: &Matmul, node: &Node, class: RowClass) -> Vec<Coded> {
        let is_fused =
            !matches!(op.epilogue, Epilogue::Store { .. } | Epilogue::Add(_) | Epilogue::Activations(..));
        if is_fused || op.input != Input::Ready || matches!(node.sync, Sync::Words(..)) {
            return vec![self.one_row(op, node)];
        }
        let target = self.facts.target.clone();
        let weights = self.weights(&op.linears, op.order);
        let Weights { layout, blocks, cols, .. } = weights;
        let stack = match op.order {
            Order::Stacked(count) => Some((count, self.facts.rows(&op.linears[0]))),
            _ => None,
        };
        let mut launches = Vec::new();
        for (index, rows) in weights.parts.iter().cloned().enumerate() {
            let (outputs, first) = stack.map_or((rows.len(), rows.start), |(_, outputs)| (outputs, 0));
            let numbers = (rows.len() / outputs) as u32;
            let mut constants = vec![
                ("BLOCKS", U(blocks as u32)),
                ("OUTPUTS", U(outputs as u32)),
                ("OUT_STRIDE", U(op.out.stride as u32)),
                ("OUT_FIRST", U((op.out.first + first) as u32)),
                ("FACTORS", U(u32::from(op.acts == Acts::Normed))),
            ];
            if let Some((count, outputs)) = stack {
                constants.extend([
                    ("STACK", U(count as u32)),
                    ("FIRST_NUMBER", U((rows.start / outputs) as u32)),
                    ("HELD_NUMBERS", U(numbers)),
                ]);
            }
            constants.extend(store_constants(&op.epilogue));
            let mut slots = vec![("out", op.out.slot), ("row_factors", Slot::Factors), ("zero", Slot::Zero)];
            slots.extend(self.planes(&weights, index));
            slots.extend(read_acts(op.acts));
            slots.push(("x_halves", half_acts(op.acts, layout)));
            let (mut finish, mut suffix) = (Part::new(wgsl!("store"), vec![], vec![]), "");
            let activates =
                matches!(op.epilogue, Epilogue::Activations(..)).then_some(op.linears.len() as u32);
            let stores = matches!(op.epilogue, Epilogue::Store { .. } | Epilogue::Add(_)) && stack.is_none();
            let fours = [outputs, op.out.stride, op.out.first + first].map(|number| number.is_multiple_of(4));
            let has_quads = stores && fours == [true; 3];
            if let Epilogue::Activations(activation, down) = op.epilogue {
                let each = op.linears.len();
                finish = self.gates_finish(activation, each, outputs / each, down);
                suffix = if each == 2 { "_gate" } else { "_activation" };
            }
            let rest = self.bias(&op.linears, op.order, rows.clone());
            let rest = Part::new(&[], constants, slots).with(rest);
            let code = |coder: &Self, kernel: &MatmulKernel| {
                let finish = match kernel.quads(target.subgroup).filter(|_| has_quads) {
                    Some(quads) => {
                        let constants = vec![("STORES_QUADS", U(1)), ("QUADS", U(quads))];
                        Part::new(wgsl!("store_quads"), constants, vec![])
                    }
                    None => finish.clone(),
                };
                let own = activates.and_then(|each| Some(kernel.quads(target.subgroup)? / each));
                let own =
                    own.filter(|&own| own > 0).map(|own| vec![("OWN_ACTIVATIONS", U(1)), ("QUADS", U(own))]);
                let finish = finish.with(Part::new(&[], own.unwrap_or_default(), vec![]));
                let rest = rest.clone().with(finish);
                let (files, constants) =
                    vectors::kernel(kernel, &target, layout, blocks, coder.halves_at(layout));
                let files = [wgsl!("args"), decoder(layout), wgsl!("factor"), &rest.files, files].concat();
                let constants = [constants, rest.constants.clone()].concat();
                let hazards = match node.sync {
                    Sync::Low(_) if !kernel.is_tall() => &handoff::SHRUNK,
                    _ => &Hazards::DECLARED,
                };
                let changes = coder.changes(op, rows.start, kernel, node.sync);
                let part = Part { files, constants, ..rest.clone() }.with(changes);
                let name = kernel.name(layout) + suffix;
                let counter = Some(format!("{name}[{}x{cols}]", rows.len()));
                Code { name, counter, part, hazards }
            };
            let cooperative = target.cooperative.filter(|_| !op.in_order);
            let matmuls = kernels::matmuls(&target, (cooperative, op.few), layout, outputs as u32, blocks);
            let matmuls = kernels::of_class(&matmuls, class);
            if target.as_hardware && layout != Layout::F32 && stack.is_none() {
                for matmul in [16, 8].into_iter().flat_map(kernels::all_cooperative) {
                    let shown = code(self, &matmul);
                    self.show(shown.name, &shown.part);
                }
            }
            let kernels = matmuls.iter().map(|matmul| code(self, matmul)).collect();
            let grid = Grid::Matmul(outputs as u32, numbers, matmuls.into());
            launches.push(Coded { kernels, grid, kv_group: 0, merged: 1 });
        }
        launches
    }

    /// Returns the launch of a matmul of one row.
    fn one_row(&mut self, op: &Matmul, node: &Node) -> Coded {
        let target = self.facts.target.clone();
        let weights = self.weights(&op.linears, op.order);
        let (layout, blocks, rows) = (weights.layout, weights.blocks, weights.parts[0].clone());
        debug_assert_eq!(weights.parts.len(), 1, "the rules look for whole matrices");
        let finish = self.finish(op, node);
        let link = match node.sync {
            Sync::Words(layer, link) => Some((layer, link)),
            Sync::Barriers | Sync::Partials | Sync::Low(_) => None,
        };
        let reads_words = link.is_some() && (op.input != Input::Ready || op.acts == Acts::Plain);
        let tile = finish.tile.or((op.input == Input::Floats).then_some(BLOCK as u32));
        let mut matmul = kernels::one_row(&target, layout, rows.len() as u32, tile);
        if reads_words && tile.is_none() {
            // Fewer workgroups then wait for the handoff.
            matmul = matmul.with_threads(target.most_threads);
        }
        let threads = matmul.threads(&target);
        let (files, mut constants) = vectors::kernel(&matmul, &target, layout, blocks, 0);
        let files = [wgsl!("args", "quantize"), decoder(layout), wgsl!("factor"), files].concat();
        constants.extend([
            ("BLOCKS", U(blocks as u32)),
            ("OUTPUTS", U(rows.len() as u32)),
            ("FINISHES", U(u32::from(!finish.name.is_empty()))),
        ]);
        let mut part = Part::new(&files, constants, self.planes(&weights, 0));
        part.slots.extend(read_acts(op.acts));
        part.slots.extend([("row_squares", Slot::Squares), ("row_factors", Slot::Factors)]);
        part = part.with(input(op.input, op.acts, layout, blocks, threads, self.facts.program.hidden));
        let bias = self.bias(&op.linears, op.order, rows.clone());
        part = part.with(bias).with(finish.part).with(self.changes(op, 0, &matmul, node.sync));
        let hazards = match link {
            None => &Hazards::DECLARED,
            Some((_, Link::Head | Link::Down(true))) => &handoff::LAST,
            Some(_) => &handoff::MATMUL,
        };
        if let Some((layer, link)) = link {
            part = part.with(Part::new(wgsl!("clear"), vec![handoff::EMPTY_WORD], vec![]));
            if reads_words {
                part = part.with(self.words().reads(layer, link, threads));
                if op.input == Input::Ready {
                    // The launch starts during attention and prefetches weights.
                    part.constants.push(("EARLY", U(blocks.div_ceil(32).min(3) as u32)));
                }
            }
        }
        let name = format!("{}{}", matmul.name(layout), finish.name);
        self.show_for_few(&name, &part);
        let counter = Some(format!("{name}[{}x{}]", rows.len(), weights.cols));
        let kernels = vec![Code { name, counter, part, hazards }];
        Coded { kernels, grid: Grid::Matmul(rows.len() as u32, 1, [matmul].into()), kv_group: 0, merged: 1 }
    }

    /// Returns the end of a matmul of one row.
    fn finish(&self, op: &Matmul, node: &Node) -> Finish {
        let link = match node.sync {
            Sync::Words(layer, link) => Some((layer, link)),
            Sync::Barriers | Sync::Partials | Sync::Low(_) => None,
        };
        let words = |part: Part| match link {
            Some((layer, link)) => part.with(self.words().writes(
                layer,
                link,
                matches!(op.epilogue, Epilogue::AddNorm(_)),
                self.pages_of(op),
            )),
            None => part,
        };
        match &op.epilogue {
            Epilogue::Store { .. } | Epilogue::Add(_) if !matches!(link, Some((_, Link::Down(_)))) => {
                let mut constants =
                    vec![("OUT_STRIDE", U(op.out.stride as u32)), ("OUT_FIRST", U(op.out.first as u32))];
                constants.extend(store_constants(&op.epilogue));
                let part = Part::new(wgsl!("store"), constants, vec![("out", op.out.slot)]);
                Finish { name: "", part, tile: None }
            }
            // The last matmul onto a residual stream with handoff.
            Epilogue::Store { .. } | Epilogue::Add(_) => {
                let part = words(Part::new(wgsl!("finish_add"), vec![], vec![]));
                Finish { name: "_last", part, tile: Some(BLOCK as u32) }
            }
            Epilogue::AddNorm(_) => {
                let part = words(self.add_finish(&op.epilogue, node.emits));
                Finish { name: "_add", part, tile: Some(BLOCK as u32) }
            }
            Epilogue::Rope(rope) => {
                let (part, norms) = self.rope_finish(rope, op);
                let (name, part) = (if norms { "_norm_rope" } else { "_rope" }, words(part));
                Finish { name, part, tile: norms.then_some(self.facts.group(rope.kv).head_dim as u32) }
            }
            Epilogue::Gate(activation) => {
                let width = self.facts.rows(&op.linears[0]);
                Finish { name: "_gate", part: words(gate_finish(*activation, width)), tile: None }
            }
            Epilogue::GateOf(activation, up) => {
                let width = self.facts.rows(&op.linears[0]);
                let constants = vec![("EMBED", U(1)), ("UP_FIRST", U(up.first as u32))];
                let embed = Part::new(&[], constants, vec![("up", up.slot)]);
                let part = gate_finish(*activation, width).with(embed);
                Finish { name: "_embed", part, tile: None }
            }
            Epilogue::Activations(..) => unreachable!("steps of one row have no cooperative matrices"),
        }
    }

    /// Returns the end of a matmul of one row that adds to the residual stream, and may write the activations of a norm.
    pub fn add_finish(&self, epilogue: &Epilogue, formats: Formats) -> Part {
        let mut part = Part::new(wgsl!("finish_add"), vec![], vec![("out", Slot::Stream)]);
        if let Epilogue::AddNorm(norm) = epilogue {
            part.files.extend(wgsl!("emit"));
            part.constants.extend([("STAGED", U(33)), ("SHARED_BLOCKS", U(1)), ("NORMS", U(1))]);
            part.constants.extend(self.emit_for(formats, self.facts.program.hidden));
            part.slots.extend([("weight", Slot::Vector(norm.weight)), ("out_squares", Slot::Squares)]);
            part.slots.extend(written_acts(Acts::Normed));
        }
        part
    }

    /// Returns the pages that a matmul of one row writes.
    fn pages_of(&self, op: &Matmul) -> Option<[Slot; 2]> {
        match &op.epilogue {
            Epilogue::Rope(rope) => Some(Slot::pages(rope.kv)),
            _ => None,
        }
    }

    /// Returns the end of a matmul of heads, and true if it norms them.
    fn rope_finish(&self, op: &RopeStore, matmul: &Matmul) -> (Part, bool) {
        let rows = |of: &Option<paguro_backend::Linear>| {
            let own = of.filter(|of| matmul.linears.iter().any(|linear| linear.matrix == of.matrix));
            own.map_or(0, |own| self.facts.rows(&own) as u32)
        };
        let [q, k, v] = op.linears.each_ref().map(rows);
        let mut constants = vec![
            ("Q_END", U(q)),
            ("K_END", U(q + k)),
            ("HAS_Q", U(u32::from(q > 0))),
            ("HAS_K", U(u32::from(k > 0))),
            ("HAS_V", U(u32::from(v > 0))),
            ("PAIRS", U(self.facts.pairs(op.rope) as u32)),
            ("TOGETHER", U(u32::from(op.is_together))),
        ];
        constants.extend(self.heads(op.kv));
        constants.extend(axes(self.facts.program, op.rope));
        let [k_pages, v_pages] = Slot::pages(op.kv);
        let mut slots = vec![
            ("step", Slot::Step),
            ("queries", Slot::Queries),
            ("k_pages", k_pages),
            ("v_pages", v_pages),
        ];
        slots.extend(rotations(op.rope));
        let norms = op.qk_norm.filter(|_| q + k > 0 || op.v_norm.is_some());
        if let Some(QkNorm { q, k, kind: _ }) = norms {
            // The norm of keys has no meaning where there are none.
            let k = if op.linears[1].is_some() { k } else { q };
            constants.extend([("QK_NORM", U(1)), ("Q_EPS", F(q.eps)), ("K_EPS", F(k.eps))]);
            slots.extend([("q_norm", Slot::Vector(q.weight)), ("k_norm", Slot::Vector(k.weight))]);
        }
        if let Some(v_norm) = op.v_norm.filter(|_| v > 0) {
            constants.extend([("V_NORM", U(1)), ("V_EPS", F(v_norm.eps))]);
            slots.push(("v_norm", Slot::Vector(v_norm.weight)));
        }
        let files = [wgsl!("rotate", "finish_rope"), self.v_store()].concat();
        (Part::new(&files, constants, slots), norms.is_some())
    }

    /// Returns the end of a matmul with cooperative matrices that computes `width` activations, of results or of gates and ups, which
    /// alternate: `each` results each.
    fn gates_finish(
        &self,
        activation: paguro_backend::Activation,
        each: usize,
        width: usize,
        down: Layout,
    ) -> Part {
        let mut constants = activation_constants(activation);
        constants.extend([
            ("ACTIVATES", U(1)),
            ("EACH", U(each as u32)),
            ("GATED", U(u32::from(each == 2))),
            ("ACT_BLOCKS", U((width / BLOCK) as u32)),
            ("GATED_AT", U(2 * self.halves_at(down))),
        ]);
        let slots = vec![("to_halves", half_acts(Acts::Plain, down))];
        Part::new(wgsl!("quantize", "activation", "store_activations"), constants, slots)
    }
}

/// Returns the part of a matmul of one row that computes `width` activations, in floats.
pub fn gate_finish(activation: paguro_backend::Activation, width: usize) -> Part {
    let mut constants = vec![("ACT_BLOCKS", U((width / BLOCK) as u32))];
    constants.extend(activation_constants(activation));
    Part::new(wgsl!("activation", "finish_gate"), constants, vec![("gated", Slot::Floats(Acts::Plain))])
}

/// Returns the part of a matmul of one row that makes its activations.
pub fn input(of: Input, acts: Acts, layout: Layout, blocks: usize, threads: u32, hidden: usize) -> Part {
    match of {
        Input::Ready => Part::new(&[], vec![("FACTORS", U(u32::from(acts == Acts::Normed)))], vec![]),
        Input::Squares(eps) => {
            let constants = [vec![("NORMED", U(1)), ("EARLY", U(1))], row_scale(hidden, eps)].concat();
            Part::new(wgsl!("row_scale"), constants, vec![])
        }
        Input::Floats if layout.is_quantized() => {
            let room = blocks.next_multiple_of(64) as u32;
            let parts = (2 * room).div_ceil(threads);
            let constants = vec![
                ("OWN_ACTS", U(room)),
                ("PARTS", U(parts)),
                ("EARLY", U(3)),
                ("TWICE", U(1)),
                ("OWN_BLOCKS", U(blocks as u32)),
            ];
            Part::new(&[], constants, vec![])
        }
        Input::Floats => Part::default(),
    }
}

/// Returns the constants of a rotation by coordinates.
pub fn axes(program: &paguro_backend::Program, rope: Option<usize>) -> Constants {
    let Some(rope) = rope.filter(|&rope| !program.ropes[rope].axes.is_empty()) else { return vec![] };
    let before: usize = program.ropes[..rope].iter().map(|rope| rope.axes.len()).sum();
    vec![("AXES", U(1)), ("AXES_AT", U(before as u32))]
}

/// Returns the tables of a rotation.
pub fn rotations(rope: Option<usize>) -> Vec<(&'static str, Slot)> {
    let table = |rope, is_far| Slot::Rotations { rope, is_far };
    rope.map_or(vec![], |rope| vec![("far", table(rope, true)), ("near", table(rope, false))])
}

/// Returns the constants of the operation on results that are stored.
pub fn store_constants(epilogue: &Epilogue) -> Constants {
    let (scale, cap, adds) = match *epilogue {
        Epilogue::Store { scale, cap } => (scale, cap, false),
        Epilogue::Add(scale) => (scale, None, true),
        _ => (1.0, None, false),
    };
    let mut constants = vec![];
    if scale != 1.0 {
        constants.extend([("SCALED", U(1)), ("SCALE", F(scale))]);
    }
    if let Some(cap) = cap {
        constants.extend([("CAP", U(1)), ("SOFT_CAP", F(cap))]);
    }
    if adds {
        constants.push(("ADD", U(1)));
    }
    constants
}

/// The files that read a layout.
pub fn decoder(layout: Layout) -> &'static [&'static str] {
    match layout {
        Layout::F32 => wgsl!("quads", "acts_float", "f32"),
        Layout::F16 => wgsl!("quads", "acts_float", "f16", "halves"),
        Layout::Bf16 => wgsl!("quads", "acts_float", "bf16", "halves"),
        Layout::Q2 => wgsl!("acts_int", "q2"),
        Layout::Q3 => wgsl!("acts_int", "q3"),
        Layout::Q4 => wgsl!("acts_int", "q4"),
        Layout::Q5 => wgsl!("acts_int", "q5"),
        Layout::Q6 => wgsl!("acts_int", "q6"),
        Layout::Q8 => wgsl!("acts_int", "q8"),
    }
}
