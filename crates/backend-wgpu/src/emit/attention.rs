//! Kernels of attention: rotation and storage, tiles, merges.
//!
//! Latent attention has one K/V head of up to 640 elements. The small matrices of its heads form a stack, and the
//! kernels of matmuls multiply each head of a row with its own matrix.

use paguro_backend::{
    DistanceBias, KvDtype, KvSlot, Latent, LatentShape, PositionScale, QkNorm, QkNormKind, RopeStyle,
};

use super::{
    code::{Code, Coded, Coder, Part, for_few, half_acts, written_acts},
    handoff,
    launch::Grid,
    matmul::{axes, rotations},
    wgsl,
};
use crate::{
    hidden::Hazards,
    layout::{BLOCK, Layout},
    lower::{
        Acts, Attend, Facts, Formats, GROUP_QUERIES, Merge, Node, RopeStore, Slot, Sync, THREADS, TOKENS,
        few_works, kernels::FEW_ROWS, wide_bytes, wide_tiles,
    },
    pages::page_words,
    plan::{COARSE_FROM, COARSE_SPLIT, FINE_SPLIT, RUN, Tile, Wide},
    target::Target,
    template::{
        Constants,
        Value::{F, I, U},
    },
};

impl Coder<'_> {
    /// Returns the launch of norms of heads and rotation, into queries and pages.
    pub fn rope_store(&mut self, op: &RopeStore) -> Coded {
        let group = self.facts.group(op.kv);
        let [q, k, v] = &op.spans;
        let mut constants = vec![
            ("Q_HEADS", U(group.heads as u32)),
            ("NORM_WIDTH", U(group.unpadded_dim as u32)),
            ("ROTATE_AT", U(0)),
            ("Q_STRIDE", U(q.stride as u32)),
            ("K_STRIDE", U(k.stride as u32)),
            ("K_FIRST", U(k.first as u32)),
            ("V_STRIDE", U(v.stride as u32)),
            ("V_FIRST", U(v.first as u32)),
            ("TOGETHER", U(u32::from(op.is_together))),
        ];
        constants.extend(self.stored(op.kv));
        let mut part = Part::new(&[], constants, vec![("q", q.slot), ("k", k.slot), ("v", v.slot)]);
        part = part.with(self.rotation(op.rope, op.position_scale));
        let has_keys = op.linears[1].is_some();
        if let Some(QkNorm { q, k, kind }) = op.qk_norm {
            // The norm of keys has no meaning where there are none.
            let k = if has_keys { k } else { q };
            part.slots.extend([("q_norm", Slot::Vector(q.weight)), ("k_norm", Slot::Vector(k.weight))]);
            part.constants.extend([
                ("QK_NORM", U(1)),
                ("Q_EPS", F(q.eps)),
                ("K_EPS", F(k.eps)),
                ("ROW_NORM", U(u32::from(kind == QkNormKind::Row))),
                ("NORM_FIRST", U(u32::from(kind != QkNormKind::HeadAfterRope))),
                ("NORM_LAST", U(u32::from(kind == QkNormKind::HeadAfterRope))),
            ]);
        }
        if let Some(norm) = op.v_norm {
            part.slots.push(("v_norm", Slot::Vector(norm.weight)));
            part.constants.extend([("V_NORM", U(1)), ("V_EPS", F(norm.eps))]);
        }
        part.constants.push(("HEAD_NORMS", U(u32::from(op.qk_norm.is_some() || op.v_norm.is_some()))));
        // Layers that read the K and V of another layer compute queries only.
        let own = if has_keys { 2 * group.kv_heads } else { 0 };
        let heads = (group.heads + own) as u32;
        let has_norms = op.qk_norm.is_some() || op.v_norm.is_some();
        let is_plain = !has_norms && !self.facts.limits.kv_dtype.is_quantized();
        if is_plain && group.head_dim.is_multiple_of(2) {
            /// Threads of a workgroup.
            const THREADS: u32 = 128;
            let workgroups = (heads * group.head_dim as u32 / 2).div_ceil(THREADS);
            part.constants.extend([("THREADS", U(THREADS)), ("STORED_HEADS", U(heads))]);
            let files = wgsl!("args", "rotate", "rope_store_words");
            return self.store("rope_store_words", part, files, Grid::Each(workgroups), op.kv);
        }
        self.store("rope_store", part, wgsl!("args", "rotate", "rope_store"), Grid::Each(heads), op.kv)
    }

    /// Returns the launch of a kernel that stores K and V in pages.
    fn store(&mut self, name: &str, part: Part, files: &[&'static str], grid: Grid, kv: KvSlot) -> Coded {
        let name = format!("{name}{}", self.suffix());
        let more = match self.facts.limits.kv_dtype.is_quantized() {
            true => wgsl!("hadamard"),
            false => self.v_store(),
        };
        let [k_pages, v_pages] = Slot::pages(kv);
        let slots = vec![
            ("step", Slot::Step),
            ("queries", Slot::Queries),
            ("k_pages", k_pages),
            ("v_pages", v_pages),
        ];
        let files = [files, more].concat();
        let part = part.with(Part::new(&files, vec![("HAS_V", U(1))], slots));
        self.show_for_few(&name, &part);
        Coded::new(name, part, grid).of_group(kv)
    }

    /// Constants and tables of a rotation, and of a scale of queries by their position.
    fn rotation(&self, rope: Option<usize>, scale: Option<PositionScale>) -> Part {
        let of = rope.map(|rope| &self.facts.program.ropes[rope]);
        let is_interleaved = of.is_some_and(|rope| rope.style == RopeStyle::Interleaved);
        let mut constants =
            vec![("PAIRS", U(self.facts.pairs(rope) as u32)), ("INTERLEAVED", U(u32::from(is_interleaved)))];
        constants.extend(axes(self.facts.program, rope));
        if let Some(PositionScale { beta, original }) = scale {
            constants.extend([("BY_POSITION", U(1)), ("SLOPE", F(beta)), ("ORIGINAL", U(original))]);
        }
        Part::new(&[], constants, rotations(rope))
    }

    /// Returns the launch of the norm and rotation of a latent vector, into pages.
    pub fn store_latent(&mut self, op: &Latent) -> Coded {
        let shape = op.shape;
        let mut constants = vec![
            ("Q_HEADS", U(0)),
            ("K_STRIDE", U(shape.key_dim() as u32)),
            ("K_FIRST", U(0)),
            ("LATENT", U(shape.latent as u32)),
            ("NORM_WIDTH", U(shape.latent as u32)),
            ("ROTATE_AT", U(shape.latent as u32)),
            ("QK_NORM", U(1)),
            ("HEAD_NORMS", U(1)),
            ("NORM_FIRST", U(1)),
            ("Q_EPS", F(op.latent_norm.eps)),
            ("K_EPS", F(op.latent_norm.eps)),
        ];
        constants.extend(self.stored(op.kv));
        let weight = Slot::Vector(op.latent_norm.weight);
        let keys = Slot::LatentKeys;
        let slots = vec![("q", keys), ("k", keys), ("v", keys), ("q_norm", weight), ("k_norm", weight)];
        let part = Part::new(&[], constants, slots).with(self.rotation(Some(op.rope), None));
        self.store("rope_store", part, wgsl!("args", "rotate", "rope_store"), Grid::Each(2), op.kv)
    }

    /// Returns the launch of activations of each head's queries for its absorbing matrix, and their rotated elements.
    pub fn latent_queries(&self, op: &Latent, formats: Formats) -> Coded {
        let LatentShape { heads, plain, rotated, latent: width, value: _ } = op.shape;
        let mut constants = vec![
            ("PLAIN", U(plain as u32)),
            ("ROTATED", U(rotated as u32)),
            ("LATENT", U(width as u32)),
            ("STAGED", U(plain.div_ceil(BLOCK) as u32 * 33)),
        ];
        constants.extend(self.heads(op.kv));
        constants.extend(self.emit_for(formats, plain));
        let mut slots = vec![("q", Slot::LatentQueries), ("step", Slot::Step), ("queries", Slot::Queries)];
        slots.extend(written_acts(Acts::Plain));
        let files = wgsl!("args", "quantize", "emit", "rotate", "latent_queries");
        let part = Part::new(files, constants, slots).with(self.rotation(Some(op.rope), op.position_scale));
        Coded::new("latent_queries", part, Grid::Each(heads as u32)).of_group(op.kv)
    }

    /// Returns the launch of the transform of queries for quantized pages.
    pub fn hadamard_queries(&self, kv: KvSlot, heads: usize) -> Coded {
        let files = wgsl!("args", "hadamard", "hadamard_queries");
        let part = Part::new(files, self.heads(kv), vec![("queries", Slot::Queries)]);
        Coded::new("hadamard_queries", part, Grid::Each(heads as u32)).of_group(kv)
    }

    /// Returns the launch that puts pages in the order of the block tables.
    pub fn gather(&self, kv: KvSlot, is_k: bool) -> Coded {
        let Facts { kv: layout, limits, .. } = self.facts;
        let vecs = page_words(layout, limits.block_size, limits.kv_dtype) / 4;
        let slots = vec![
            ("step", Slot::Step),
            ("pages", Slot::Pages { kv, is_k }),
            ("gathered", Slot::Gathered { is_k }),
        ];
        let part = Part::new(wgsl!("args", "gather"), vec![("VECS", U(vecs as u32))], slots);
        Coded::new("gather", part, Grid::Pages)
    }

    /// Returns the launch of attention with one kind of tile.
    pub fn attend(&mut self, op: &Attend, node: &Node) -> Coded {
        let (kv, tiling) = (*self.facts.group(op.kv), self.facts.tilings[op.kv.group]);
        let target = self.facts.target.clone();
        let log2_e = std::f32::consts::LOG2_E;
        let mut constants = vec![
            ("QUERIES_PER_KV", U(kv.queries_per_kv() as u32)),
            ("SCALE", F(if op.soft_cap.is_some() { op.scale } else { op.scale * log2_e })),
        ];
        if op.is_ranged {
            constants.push(("RANGES", U(1)));
        }
        if let Some(window) = kv.window {
            constants.push(("WINDOW", I(window.min(i32::MAX as u32) as i32)));
        }
        if let Some(cap) = op.soft_cap {
            constants.extend([("CAP", U(1)), ("SOFT_CAP", F(cap))]);
        }
        constants.extend(self.stored(op.kv));
        if tiling.emits {
            constants.push(("EMITS", U(1)));
            constants.extend(self.emit_for(node.emits, kv.q_width()));
            constants.extend(self.halves(FEW_ROWS + 1));
        }
        let [k_pages, v_pages] = match op.is_gathered {
            true => [true, false].map(|is_k| Slot::Gathered { is_k }),
            false => Slot::pages(op.kv),
        };
        let mut slots = vec![
            ("step", Slot::Step),
            ("queries", Slot::Queries),
            ("k_pages", k_pages),
            ("v_pages", v_pages),
            ("partial_sums", Slot::PartialSums),
            ("partial_tops", Slot::PartialTops),
        ];
        slots.extend(written_acts(Acts::Plain));
        let mut shared = Part::new(&[], constants, slots);
        if let Some(DistanceBias { table, reach }) = op.distance_bias {
            let constants = vec![("BIASED", U(1)), ("REACH", U(reach as u32))];
            let biases = Part::new(wgsl!("distances"), constants, vec![("biases", Slot::Vector(table))]);
            shared = shared.with(biases);
        }
        let base = if op.is_gathered { "attend_gathered" } else { "attend" };
        let (name, part, workgroups) = match (op.tile, tiling.wide, target.cooperative) {
            (Tile::WideRow | Tile::WideRows, Some(wide), Some(side)) => {
                let groups = if op.tile == Tile::WideRow { 1 } else { wide.groups };
                let part = shared.clone().with(self.wide_emission(op, node));
                (format!("{base}_coop{groups}"), self.wide(&part, op, wide, groups, side), wide.workgroups)
            }
            _ => {
                let (name, part) = self.narrow(base, shared.clone(), op);
                (name, part, tiling.workgroups)
            }
        };
        if op.tile == Tile::Row {
            self.show_wide(base, &shared, op);
        }
        let (part, hazards) = self.hand_over(part, node);
        let grid = Grid::Attention(op.tile, workgroups as u32);
        let kernels = vec![Code { name, counter: None, part, hazards }];
        Coded { kernels, grid, kv_group: op.kv.group, merged: 1 }
    }

    /// Adds the handoff of attention or of its merge.
    fn hand_over(&self, part: Part, node: &Node) -> (Part, &'static Hazards) {
        let is_merge = matches!(node.kernel, crate::lower::Kernel::Merge(_));
        match node.sync {
            Sync::Barriers | Sync::Low(_) => (part, &Hazards::DECLARED),
            Sync::Partials => (
                part.with(self.partials(is_merge)),
                if is_merge { &handoff::MERGE } else { &handoff::ATTENTION_PARTIALS },
            ),
            Sync::Words(layer, link) => (
                part.with(self.partials(is_merge)).with(self.words().writes(layer, link, false, None)),
                if is_merge { &handoff::MERGE } else { &handoff::ATTENTION },
            ),
        }
    }

    /// Returns the kernel of a tile without cooperative matrices, or with those of few rows.
    fn narrow(&mut self, name: &str, shared: Part, op: &Attend) -> (String, Part) {
        let (kv, tiling) = (*self.facts.group(op.kv), self.facts.tilings[op.kv.group]);
        let (target, dtype) = (self.facts.target.clone(), self.facts.limits.kv_dtype);
        let rows = if op.tile == Tile::Row { 1 } else { tiling.rows };
        let queries = (rows * tiling.heads) as u32;
        let mut constants = tile_heads(kv.queries_per_kv(), tiling.heads);
        constants.push(("TILE_ROWS", U(rows as u32)));
        constants.push(("SINGLE_ROWS", U(u32::from(op.tile == Tile::Row))));
        let mut emits: &[&'static str] = &[];
        let blocks = queries * kv.head_dim as u32 / BLOCK as u32;
        if tiling.emits {
            constants.push(("SHARED_BLOCKS", U(blocks)));
            emits = wgsl!("quantize", "emit");
        }
        let part = shared.with(Part::new(emits, constants, vec![]));
        let files = wgsl!("args", "fold", "partials", "splits", "matrices", "stage", "attend_few");
        let few = |part: &Part, side: u32| {
            let part = Part { constants: for_few(&part.constants), ..part.clone() };
            part.with(Part::new(files, few_constants(kv.head_dim, side), vec![]))
        };
        if target.as_hardware && few_works(self.facts.kv, self.facts.limits) {
            for side in [16, 8] {
                self.show(format!("{name}_fewx{side}"), &few(&part, side));
            }
        }
        if let Some(side) = self.facts.few {
            return (format!("{name}_few"), few(&part, side));
        }
        let mut constants = self::constants(&target, kv.head_dim, queries, dtype);
        if tiling.emits {
            debug_assert!(
                queries * kv.head_dim as u32 / 4 <= THREADS,
                "eight threads share a block of results"
            );
            constants.push(("STAGED", U(blocks * 33)));
        }
        let files = match dtype {
            KvDtype::F16 => wgsl!("args", "fold", "partials", "splits", "kv_f16", "attend"),
            KvDtype::Q8 => wgsl!("args", "fold", "partials", "splits", "kv_q8", "attend"),
            KvDtype::Q4 => wgsl!("args", "fold", "partials", "splits", "kv_q4", "attend"),
        };
        let mut part = part.with(Part::new(files, constants, vec![]));
        if tiling.emits && dtype.is_quantized() {
            part.files.extend(wgsl!("hadamard"));
        }
        (format!("{name}{rows}{}", self.suffix()), part)
    }

    /// Returns the way in which attention with cooperative matrices writes activations. If only matmuls with cooperative matrices read
    /// them, a thread writes its own sums.
    fn wide_emission(&self, op: &Attend, node: &Node) -> Part {
        let (kv, tiling) = (self.facts.group(op.kv), self.facts.tilings[op.kv.group]);
        let in_fours = node.emits.halves_only && kv.unpadded_dim.is_multiple_of(4);
        debug_assert!(in_fours || !tiling.emits_padded, "plans rely on it");
        if !in_fours || !(tiling.emits || tiling.emits_padded) {
            return Part::new(&[], vec![("EMITS_BLOCKS", U(u32::from(tiling.emits)))], vec![]);
        }
        let layout = if node.emits.q8 { Layout::Q8 } else { Layout::F16 };
        let mut constants = vec![("EMITS_FOURS", U(1)), ("FOURS_AT", U(2 * self.halves_at(layout)))];
        if !tiling.emits {
            let blocks = kv.out_width().div_ceil(BLOCK) as u32;
            constants.extend([("EMITS", U(1)), ("ACT_BLOCKS", U(blocks))]);
        }
        Part::new(wgsl!("quantize"), constants, vec![("to_halves", half_acts(Acts::Plain, layout))])
    }

    /// Returns the kernel of a tile with cooperative matrices, for `groups` subgroups.
    fn wide(&self, shared: &Part, op: &Attend, wide: Wide, groups: usize, side: u32) -> Part {
        let kv = self.facts.group(op.kv);
        let has_blocks = shared.constants.contains(&("EMITS_BLOCKS", U(1)));
        let emit: &[&str] = if has_blocks { wgsl!("quantize", "emit") } else { &[] };
        let files =
            [wgsl!("args", "fold", "partials", "splits"), emit, wgsl!("matrices", "stage", "attend_coop")];
        let files = files.concat();
        let mut constants = tile_heads(kv.queries_per_kv(), wide.heads);
        let (page, subgroup) = (self.facts.limits.block_size, self.facts.target.subgroup);
        constants.extend(wide_constants(kv.head_dim, page, groups, side, subgroup));
        shared.clone().with(Part::new(&files, constants, vec![]))
    }

    /// Shows all kernels with cooperative matrices.
    fn show_wide(&mut self, name: &str, shared: &Part, op: &Attend) {
        let Facts { target, limits, tilings, .. } = self.facts;
        if !target.as_hardware || !tilings[op.kv.group].emits {
            return;
        }
        let shared = &shared.clone().with(Part::new(&[], vec![("EMITS_BLOCKS", U(1))], vec![]));
        let kv = self.facts.group(op.kv);
        for (side, groups) in [(16, 1), (16, 8), (8, 1), (8, 4)] {
            // Matrices of eight rows are Apple's, whose GPUs have no room for more.
            let has_few = few_works(self.facts.kv, limits);
            let most = crate::threadgroup::MOST as usize;
            let fits = side == 16 || wide_bytes(kv.head_dim, has_few, groups) <= most;
            if let Some(wide) = wide_tiles(kv, limits, target.subgroup, groups).filter(|_| fits) {
                let name = format!("{name}_coop{groups}x{side}");
                let part = self.wide(shared, op, wide, groups, side);
                self.show(name.clone(), &part);
                self.show_for_few(&name, &part);
            }
        }
    }

    /// Returns the launch that merges partials of attention into the activations of the next matmul. For `latent` attention, this
    /// many elements of each head are a separate row.
    pub fn merge(&mut self, op: &Merge, node: &Node) -> Coded {
        let group = self.facts.group(op.kv);
        let dim = if op.latent.is_some() { group.head_dim } else { group.unpadded_dim };
        // The number of heads that form whole blocks.
        let whole = |heads: &usize| op.latent.is_some() || (heads * dim).is_multiple_of(BLOCK);
        let heads = [1, 2, 4].into_iter().find(whole).unwrap_or(4);
        let blocks = (heads * dim).div_ceil(BLOCK) as u32;
        let mut constants = vec![
            ("RUN", U(RUN as u32)),
            ("MERGE_HEADS", U(heads as u32)),
            ("STAGED", U(blocks * 33)),
            ("SHARED_BLOCKS", U(blocks)),
            ("OUTS", U(group.head_dim.div_ceil(THREADS as usize) as u32)),
        ];
        constants.extend(self.emit_for(node.emits, op.latent.unwrap_or(group.out_width())));
        match op.latent {
            Some(latent) => constants.push(("LATENT", U(latent as u32))),
            None => constants.extend(self.halves(FEW_ROWS + 1)),
        }
        constants.extend(self.heads(op.kv));
        let mut slots = vec![
            ("step", Slot::Step),
            ("partial_sums", Slot::PartialSums),
            ("partial_tops", Slot::PartialTops),
            ("gates", Slot::Gates),
        ];
        constants.push(("GATED", U(u32::from(op.is_gated))));
        if let Some(sinks) = op.sinks {
            slots.push(("sinks", Slot::Vector(sinks)));
            constants.push(("SINKS", U(1)));
        }
        slots.extend(written_acts(Acts::Plain));
        let files = wgsl!("args", "fold", "partials", "quantize", "emit", "attend_merge");
        let mut part = Part::new(files, constants, slots);
        let mut name = "attend_merge".to_owned();
        if self.facts.limits.kv_dtype.is_quantized() {
            part = part.with(Part::new(wgsl!("hadamard"), vec![("HADAMARD", U(1))], vec![]));
            name += "_hadamard";
        }
        let (part, hazards) = self.hand_over(part, node);
        let grid = Grid::Merge(group.heads.div_ceil(heads) as u32);
        let kernels = vec![Code { name, counter: None, part, hazards }];
        Coded { kernels, grid, kv_group: op.kv.group, merged: 1 }
    }

    /// Returns the suffix of kernels that access pages of this kind.
    fn suffix(&self) -> &'static str {
        match self.facts.limits.kv_dtype {
            KvDtype::F16 => "",
            KvDtype::Q8 => "_q8",
            KvDtype::Q4 => "_q4",
        }
    }
}

/// Heads of a tile, of a group that shares K and V.
fn tile_heads(group: usize, heads: usize) -> Constants {
    vec![("TILE_HEADS", U(heads as u32)), ("HEAD_TILES", U(group.div_ceil(heads) as u32))]
}

/// Constants of attention with heads of this dimension, for some queries.
fn constants(target: &Target, dim: usize, queries: u32, kv_dtype: KvDtype) -> Constants {
    let dim = dim as u32;
    let fours = queries.div_ceil(4);
    // Fours of dimensions in 16 bytes of K, reads of the same scales, and tokens in a read of V.
    let (k_fours, most_loads, v_tokens) = match kv_dtype {
        KvDtype::F16 => (2, 8, 1),
        KvDtype::Q8 => (4, 4, 4),
        KvDtype::Q4 => (8, 2, 4),
    };
    // Tokens of K of a thread, and reads of each of them at once: eight in all.
    let share = |tokens: usize| {
        let own = (tokens as u32 * fours / THREADS).max(1);
        let most = if target.is_software { 1 } else { (8 / own).min(most_loads) };
        let whole = |&loads: &u32| {
            let shares_scales = kv_dtype == KvDtype::F16 || most_loads.is_multiple_of(loads);
            dim.div_ceil(4 * k_fours).is_multiple_of(loads) && shares_scales
        };
        (own, (1..=most).rev().find(whole).unwrap_or(1))
    };
    let [fine, coarse, short] = [FINE_SPLIT, COARSE_SPLIT, 1].map(share);
    let has_short = fine.0 > 1 && !target.is_software;
    let unroll = if target.is_software { v_tokens.max(2) } else { 16 };
    vec![
        ("THREADS", U(THREADS)),
        ("UNROLL", U(unroll)),
        ("K_FOURS", U(k_fours)),
        ("V_TOKENS", U(v_tokens)),
        ("V_LOADS", U(unroll / v_tokens)),
        ("TOKENS_0", U(fine.0)),
        ("TOKENS_1", U(coarse.0)),
        ("TOKENS_2", U(short.0)),
        ("K_LOADS_0", U(fine.1)),
        ("K_LOADS_1", U(coarse.1)),
        ("K_LOADS_2", U(short.1)),
        ("SHORT", U(u32::from(has_short))),
        ("SIZES", U(if has_short { 3 } else { 2 })),
        // With more queries there are too few registers.
        ("AHEAD", U(u32::from(fours == 1))),
        ("FOURS", U(fours)),
        ("QUERIES_0", U(queries.min(4))),
        ("QUERIES_1", U(queries.saturating_sub(4))),
        ("OUTS", U(dim.div_ceil(THREADS))),
        ("SHARED", U((COARSE_SPLIT as u32 * fours).max(THREADS / (dim / 4) * dim))),
        ("FINE", U(FINE_SPLIT as u32)),
        ("COARSE", U(COARSE_SPLIT as u32)),
        ("COARSE_FROM", U(COARSE_FROM as u32)),
        ("RUN", U(RUN as u32)),
    ]
}

/// Constants of attention of few rows with heads of this dimension, for matrices of this side.
fn few_constants(dim: usize, side: u32) -> Constants {
    vec![
        ("SIDE", U(side)),
        ("SIDE_8", U(u32::from(side == 8))),
        ("PER_16", U(16 / side)),
        ("THREADS", U(2 * dim as u32)),
        ("K_BLOCKS", U((COARSE_SPLIT / (2 * dim)) as u32)),
        ("PIECE_MATRICES", U(dim as u32 / side / 2)),
        ("UNIT_TOKENS", U(32 / side)),
        ("FINE", U(FINE_SPLIT as u32)),
        ("COARSE", U(COARSE_SPLIT as u32)),
        ("COARSE_FROM", U(COARSE_FROM as u32)),
        ("RUN", U(RUN as u32)),
    ]
}

/// Returns the constants for heads of this dimension, `groups` subgroups, and matrices of this side.
fn wide_constants(dim: usize, page: usize, groups: usize, side: u32, subgroup: u32) -> Constants {
    let (dim, tokens, lanes) = (dim as u32, TOKENS as u32, subgroup / GROUP_QUERIES as u32);
    let threads = groups as u32 * subgroup;
    vec![
        ("SIDE", U(side)),
        ("SIDE_8", U(u32::from(side == 8))),
        ("SUBGROUP", U(subgroup)),
        ("THREADS", U(threads)),
        ("GROUPS", U(groups as u32)),
        // Number of subgroups whose queries fit into the tile.
        ("ROUND_GROUPS", U(groups.min(2 * TOKENS / GROUP_QUERIES) as u32)),
        ("TOKENS", U(tokens)),
        ("ONE_PAGE", U(u32::from(page >= TOKENS))),
        ("LOADS", U(tokens * dim / 8 / threads)),
        // A single subgroup has too few registers.
        ("AHEAD", U(u32::from(groups > 1))),
        ("ROWS", U(GROUP_QUERIES as u32 / side)),
        ("DIMS", U(dim / side)),
        ("TOKEN_MATRICES", U(tokens / side)),
        // Sums are looked at 32 dimensions at a time.
        ("PIECES", U(dim / 32)),
        ("PIECE_MATRICES", U(32 / side)),
        ("PIECE_SHARE", U(8 / lanes)),
        ("SHARE", U(tokens / 4 / lanes)),
        ("LANE_BITS", U(lanes.ilog2())),
        ("FINE", U(FINE_SPLIT as u32)),
        ("COARSE", U(COARSE_SPLIT as u32)),
        ("COARSE_FROM", U(COARSE_FROM as u32)),
        ("RUN", U(RUN as u32)),
    ]
}
