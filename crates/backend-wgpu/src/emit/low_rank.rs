//! Kernels of adapters (LoRA): products with A, and the part of a matmul that adds products with B.

use super::{
    code::{Code, Coded, Coder, Part, half_acts, read_acts},
    handoff,
    launch::Grid,
    matmul::input,
    vectors, wgsl,
};
use crate::{
    hidden::Hazards,
    layout::{BLOCK, Layout},
    low_rank::ROWS_AT,
    lower::{
        Input, Link, MATRICES, Matmul, Node, RowClass, Slot, Sync,
        kernels::{self, Kind::Vectors, Matmul as MatmulKernel},
    },
    matrix::Order,
    template::{Constants, Value::U},
};

/// Blocks of A that a thread loads before activations are ready, at most.
const MOST_EARLY: usize = 4;

impl Coder<'_> {
    /// Returns the launch of the products of a matmul's activations with A of adapters.
    pub fn shrink(&mut self, op: &Matmul, node: &Node, class: RowClass) -> Coded {
        let target = &self.facts.target.clone();
        let (layout, cols) = (self.facts.layout(op.linears[0].matrix), self.facts.cols(&op.linears[0]));
        let blocks = cols.div_ceil(BLOCK);
        let matrices = op.linears.len() as u32;
        let cooperative = target.cooperative.filter(|_| !op.in_order && layout != Layout::F32);
        let matmuls = kernels::of_class(&kernels::low_rank(target, cooperative, blocks), class);
        let code = |coder: &Self, kernel: &MatmulKernel| {
            let is_wide = kernel.is_cooperative();
            let threads = kernel.threads(target);
            let (files, mut constants) =
                vectors::kernel(kernel, target, Layout::F32, blocks, coder.halves_at(layout));
            let acts: &[&'static str] = match layout.is_quantized() {
                true => wgsl!("quantize", "acts_int"),
                false => wgsl!("acts_float"),
            };
            let files = [wgsl!("args", "quads", "f32", "factor", "shrink"), acts, files].concat();
            constants.extend([
                ("SHRINKS", U(1)),
                ("BLOCKS", U(blocks as u32)),
                ("MATRICES", U(matrices)),
                ("ROWS_AT", U(ROWS_AT as u32)),
                ("WIDE_ITEMS", U(u32::from(is_wide))),
                ("LOW_HALVES", U(u32::from(is_wide))),
                ("WEIGHTS_IN_FLOATS", U(u32::from(layout.is_quantized()))),
            ]);
            let mut slots = coder.adapted(op);
            slots.extend([("w_quants", Slot::A(coder.site(op))), ("zero", Slot::Zero)]);
            slots.extend([("row_squares", Slot::Squares), ("row_factors", Slot::Factors)]);
            slots.extend(read_acts(op.acts));
            slots.push(("x_halves", half_acts(op.acts, layout)));
            let mut part = Part::new(&files, constants, slots).with(input(
                op.input,
                op.acts,
                layout,
                blocks,
                threads,
                coder.facts.program.hidden,
            ));
            let mut hazards: &'static Hazards = &Hazards::DECLARED;
            match node.sync {
                Sync::Words(layer, link) => {
                    hazards = &handoff::MATMUL;
                    // A workgroup that makes activations itself has no registers for more.
                    let most = if op.input == Input::Floats { 1 } else { MOST_EARLY };
                    let early = blocks.div_ceil(kernels::low_rank_lanes(target, blocks) as usize).min(most);
                    part.constants.retain(|(name, _)| *name != "EARLY");
                    part.constants.extend([("EARLY", U(early as u32)), ("HANDS_LOW", U(1))]);
                    part.constants.push(handoff::EMPTY_WORD);
                    part.constants.extend(coder.words().low(link));
                    part = part.with(coder.words().reads(layer, link, threads));
                }
                Sync::Low(own) if !is_wide => {
                    hazards = &handoff::SHRINK;
                    part = part.with(handoff::low(own));
                    part.constants.extend([("HANDS_LOW", U(1)), ("HANDS_NEXT", U(1))]);
                    part.constants.push(("MOST_MATRICES", U(MATRICES as u32)));
                    part.slots.extend([("next", Slot::LowWords(1 - own)), ("out", op.out.slot)]);
                }
                Sync::Barriers | Sync::Partials | Sync::Low(_) => {}
            }
            let name = format!("shrink{}", kernel.covers()[0]);
            let counter = Some(format!("{name}[{matrices}x{cols}]"));
            Code { name, counter, part, hazards }
        };
        for side in [16, 8].into_iter().filter(|_| target.as_hardware && layout != Layout::F32) {
            if let Some(kernel) = kernels::low_rank(target, Some(side), blocks).last() {
                let shown = code(self, kernel);
                self.show(format!("{}x{side}", shown.name), &shown.part);
            }
        }
        let kernels = matmuls.iter().map(|kernel| code(self, kernel)).collect();
        let of_outputs = is_of_outputs(op);
        Coded {
            kernels,
            grid: Grid::LowRank { matrices, of_outputs, kernels: matmuls.into() },
            kv_group: 0,
            merged: 1,
        }
    }

    /// Returns the part of a matmul by this kernel whose first output is output `first` of its site. Tall kernels add products with
    /// B to the sums of cooperative matrices.
    pub fn changes(&self, op: &Matmul, first: usize, kernel: &MatmulKernel, sync: Sync) -> Part {
        if op.site.is_none() {
            return Part::default();
        }
        let is_tall = kernel.is_tall();
        let counts: Vec<usize> = op.linears.iter().map(|linear| self.facts.rows(linear)).collect();
        let mut handed = Part::default();
        let mut constants: Constants = vec![
            (if is_tall { "WIDE_CHANGES" } else { "CHANGES" }, U(1)),
            ("MATRICES", U(counts.len() as u32)),
            ("ALTERNATES", U(u32::from(op.order == Order::InTurn))),
            ("CHANGED", U(counts.iter().sum::<usize>() as u32)),
            ("FIRST_CHANGED", U(first as u32)),
            ("ROWS_AT", U(ROWS_AT as u32)),
        ];
        let ends = ["END_1", "END_2", "END_3"].into_iter().zip(1..counts.len());
        constants.extend(ends.map(|(name, end)| (name, U(counts[..end].iter().sum::<usize>() as u32))));
        match sync {
            // Those of the first layer pass a barrier.
            Sync::Words(0, Link::Queries(_)) | Sync::Barriers | Sync::Partials => {}
            Sync::Words(_, link) => {
                constants.push(("TAKES_LOW", U(1)));
                constants.extend(self.words().low(link));
            }
            Sync::Low(_) if is_tall => {}
            Sync::Low(own) => {
                let mut part = handoff::low(own);
                part.constants.extend([("TAKES_LOW", U(1)), ("GIVES_UP", U(1))]);
                part.seconds.extend([("gave_up", Slot::Tokens), ("out", op.out.slot)]);
                handed = part;
            }
        }
        let [_, outputs] = kernel.covers();
        let ahead = kernels::staged_vectors(outputs);
        if let Vectors { rows, outputs, lanes, .. } = kernel.kind {
            constants.push(("KEEPS_USE", U(u32::from(rows * outputs <= lanes))));
        }
        let threads = kernel.threads(&self.facts.target);
        let loads = (ahead * outputs).div_ceil(threads);
        constants.push(("CHANGE_AT", U(if threads >= 2 * outputs { outputs } else { 0 })));
        constants.extend([("AHEAD", U(ahead)), ("LOW_AHEAD", U(2 * ahead)), ("AHEAD_LOADS", U(loads))]);
        let mut slots = self.adapted(op);
        slots.push(("b", Slot::B(self.site(op))));
        let is_quantized = self.facts.is_quantized(&op.linears[0]);
        let files: &[&'static str] = if is_quantized { wgsl!("quads", "change") } else { wgsl!("change") };
        Part::new(files, constants, slots).with(handed)
    }

    fn site(&self, op: &Matmul) -> usize {
        op.site.expect("only matmuls of sites have changes")
    }

    /// Returns the tables of adapters, and low-rank products.
    fn adapted(&self, op: &Matmul) -> super::code::Slots {
        let of_outputs = is_of_outputs(op);
        vec![("adapted", Slot::Adapted { of_outputs }), ("low", Slot::Low), ("low_halves", Slot::LowHalves)]
    }
}

/// Returns true for a matmul of the rows with outputs.
fn is_of_outputs(op: &Matmul) -> bool {
    op.out.slot == Slot::Logits
}
