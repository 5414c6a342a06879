//! Rotation and attention.

use paguro_backend::{
    KvDtype, KvSlot, Limits, Linear, LoadError, PositionScale, QkNorm, QkNormKind, Rope, RopeStyle,
};

use crate::ops::{Attend, NormQkvRopeStore};

use super::{
    Grid, Launch, Lowering, Place,
    Value::{F, I, U},
    coop_attention::Named,
    handoff::Bindings,
    kernels::FEW_ROWS,
    launch::LaunchVariant,
    wgsl,
};
use crate::{
    device::Device,
    layout::BLOCK,
    pages::{self, head_words, page_words},
    plan::{COARSE_FROM, COARSE_SPLIT, FINE_SPLIT, RUN, Tile},
    template::Constants,
};

impl Lowering<'_> {
    pub(super) fn rope_store(
        &mut self,
        op: &NormQkvRopeStore,
        [q, k, v]: [Place; 3],
        is_together: bool,
    ) -> Result<Launch, LoadError> {
        let group = self.program.kv.groups[op.kv.group];
        let mut constants = vec![
            ("Q_HEADS", U(group.heads as u32)),
            ("NORM_WIDTH", U(group.head_dim as u32)),
            ("ROTATE_AT", U(0)),
            ("Q_STRIDE", U(q.stride as u32)),
            ("K_STRIDE", U(k.stride as u32)),
            ("K_FIRST", U(k.first as u32)),
            ("V_STRIDE", U(v.stride as u32)),
            ("V_FIRST", U(v.first as u32)),
            ("TOGETHER", U(u32::from(is_together))),
        ];
        constants.extend(self.stored(op.kv));
        let (rotates, rope_tables) = self.rotation(op.rope, op.position_scale);
        constants.extend(rotates);
        let [k_pages, v_pages] = self.pages_of(op.kv);
        let (step, queries) = (self.step.clone(), self.queries.clone());
        let mut buffers = vec![
            ("q", &q.buffer),
            ("k", &k.buffer),
            ("v", &v.buffer),
            ("step", &step),
            ("queries", &queries),
            ("k_pages", &k_pages),
            ("v_pages", &v_pages),
        ];
        buffers.extend(rope_tables.iter().map(|(name, buffer)| (*name, buffer)));
        let norms;
        if let Some(QkNorm { q, k, kind }) = op.qk_norm {
            // The norm of keys has no meaning where there are none.
            let k = if op.k.is_some() { k } else { q };
            norms = [self.vector(q.weight)?, self.vector(k.weight)?];
            buffers.extend([("q_norm", &norms[0]), ("k_norm", &norms[1])]);
            constants.extend([
                ("QK_NORM", U(1)),
                ("Q_EPS", F(q.eps)),
                ("K_EPS", F(k.eps)),
                ("ROW_NORM", U(u32::from(kind == QkNormKind::Row))),
                ("NORM_FIRST", U(u32::from(kind != QkNormKind::HeadAfterRope))),
                ("NORM_LAST", U(u32::from(kind == QkNormKind::HeadAfterRope))),
            ]);
        }
        let v_norm = op.v_norm.map(|norm| self.vector(norm.weight)).transpose()?;
        if let (Some(norm), Some(weight)) = (op.v_norm, &v_norm) {
            buffers.push(("v_norm", weight));
            constants.extend([("V_NORM", U(1)), ("V_EPS", F(norm.eps))]);
        }
        constants.push(("HEAD_NORMS", U(u32::from(op.qk_norm.is_some() || op.v_norm.is_some()))));
        // Layers that read the K and V of another layer compute queries only.
        let own = if op.k.is_some() { 2 * group.kv_heads } else { 0 };
        self.launch_store(constants, &buffers, (group.heads + own) as u32, op.kv)
    }

    /// The launch of a kernel that stores K and V in pages.
    pub(super) fn launch_store(
        &mut self,
        mut constants: Constants,
        buffers: &[(&str, &wgpu::Buffer)],
        heads: u32,
        kv: KvSlot,
    ) -> Result<Launch, LoadError> {
        let name = format!("rope_store{}", self.suffix());
        let mut files = wgsl!("args", "rotate", "rope_store").to_vec();
        if self.limits.kv_dtype.is_quantized() {
            files.extend(wgsl!("hadamard"));
        } else {
            files.extend(self.v_store());
        }
        constants.push(("HAS_V", U(1)));
        self.show_for_few(&name, &files, &constants);
        self.launch(&name, &files, constants, buffers, Grid::Each(heads), kv.group)
    }

    /// Constants and tables of a rotation, and of a scale of queries by their position.
    pub(super) fn rotation(&self, rope: Option<usize>, scale: Option<PositionScale>) -> Bindings {
        let of = rope.map(|rope| &self.program.ropes[rope]);
        let pairs = of.map_or(0, |rope| rope.frequencies.len());
        let is_interleaved = of.is_some_and(|rope| rope.style == RopeStyle::Interleaved);
        let mut constants = vec![("PAIRS", U(pairs as u32)), ("INTERLEAVED", U(u32::from(is_interleaved)))];
        if let Some(PositionScale { beta, original }) = scale {
            constants.extend([("BY_POSITION", U(1)), ("SLOPE", F(beta)), ("ORIGINAL", U(original))]);
        }
        let rope_tables = rope.map(|rope| self.ropes[rope].clone()).into_iter();
        (constants, rope_tables.flat_map(|[far, near]| [("far", far), ("near", near)]).collect())
    }

    pub(super) fn attend(
        &mut self,
        op: &Attend,
        project: &Linear,
        body: &mut Vec<Launch>,
    ) -> Result<(), LoadError> {
        let kv = self.program.kv.groups[op.kv.group];
        let tiling = self.tilings[op.kv.group];
        let (group, window) = (kv.queries_per_kv(), kv.window);
        let log2_e = std::f32::consts::LOG2_E;
        let mut shared = vec![
            ("QUERIES_PER_KV", U(group as u32)),
            ("SCALE", F(if op.soft_cap.is_some() { op.scale } else { op.scale * log2_e })),
        ];
        if let Some(window) = window {
            shared.push(("WINDOW", I(window.min(i32::MAX as u32) as i32)));
        }
        if let Some(cap) = op.soft_cap {
            shared.extend([("CAP", U(1)), ("SOFT_CAP", F(cap))]);
        }
        shared.extend(self.stored(op.kv));
        if tiling.emits {
            shared.push(("EMITS", U(1)));
            shared.extend(self.emit_for(&[project], kv.q_width()));
            shared.extend(self.halves(FEW_ROWS + 1));
        }
        let mut pages = self.pages_of(op.kv);
        let mut name = "attend";
        if let Some(gathered) = self.gathered.clone() {
            name = "attend_gathered";
            let vecs = page_words(&self.program.kv, self.limits.block_size, self.limits.kv_dtype) / 4;
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
        let (partial_sums, partial_tops) = (self.partial_sums.clone(), self.partial_tops.clone());
        let buffers = [
            ("step", &step),
            ("queries", &queries),
            ("k_pages", &k_pages),
            ("v_pages", &v_pages),
            ("partial_sums", &partial_sums),
            ("partial_tops", &partial_tops),
        ];
        let workgroups = tiling.workgroups as u32;
        for (tile, rows) in [(Tile::Row, 1), (Tile::Rows, tiling.rows)] {
            if tile == Tile::Rows && rows == 1 {
                continue;
            }
            let queries = (rows * tiling.heads) as u32;
            let mut constants = shared.clone();
            constants.extend(tile_heads(group, tiling.heads));
            constants.push(("TILE_ROWS", U(rows as u32)));
            constants.push(("SINGLE_ROWS", U(u32::from(tile == Tile::Row))));
            let mut emits: &[&'static str] = &[];
            if tiling.emits {
                let blocks = queries * kv.head_dim as u32 / BLOCK as u32;
                constants.push(("SHARED_BLOCKS", U(blocks)));
                emits = wgsl!("quantize", "emit");
            }
            let grid = Grid::Attention(tile, workgroups);
            let variants = self.attention_variants(tile == Tile::Row);
            if let Some(kernel) = self.attend_few(name, &constants, emits, kv.head_dim) {
                self.push_variants(variants, kernel, &buffers, grid, op.kv.group, body)?;
                continue;
            }
            constants.extend(self::constants(self.device, kv.head_dim, queries, self.limits.kv_dtype));
            if tiling.emits {
                debug_assert!(
                    queries * kv.head_dim as u32 / 4 <= THREADS,
                    "eight threads share a block of results"
                );
                constants.push(("STAGED", U(queries * kv.head_dim as u32 / BLOCK as u32 * 33)));
            }
            let name = format!("{name}{rows}{}", self.suffix());
            let files = match self.limits.kv_dtype {
                KvDtype::F16 => wgsl!("args", "fold", "partials", "splits", "kv_f16", "attend"),
                KvDtype::Q8 => wgsl!("args", "fold", "partials", "splits", "kv_q8", "attend"),
                KvDtype::Q4 => wgsl!("args", "fold", "partials", "splits", "kv_q4", "attend"),
            };
            let mut files = [files, emits].concat();
            if tiling.emits && self.limits.kv_dtype.is_quantized() {
                files.extend(wgsl!("hadamard"));
            }
            self.push_variants(variants, (name, files, constants), &buffers, grid, op.kv.group, body)?;
        }
        self.attend_wide(name, &shared, &buffers, op.kv.group, body)?;
        Ok(())
    }

    /// Adds attention or its merge, once for each variant of writing its results.
    fn push_variants(
        &mut self,
        variants: Vec<LaunchVariant>,
        (name, files, constants): Named,
        buffers: &[(&str, &wgpu::Buffer)],
        grid: Grid,
        kv_group: usize,
        body: &mut Vec<Launch>,
    ) -> Result<(), LoadError> {
        for variant in variants {
            let launch =
                self.launch_variant(variant, (&name, &files, &constants), buffers, grid.clone(), kv_group)?;
            body.push(launch);
        }
        Ok(())
    }

    /// Merges partials of attention into the activations of the next matmul. For `latent` attention, this many elements
    /// of each head are a separate row.
    pub(super) fn merge(
        &mut self,
        project: &Linear,
        attend: &Attend,
        latent: Option<usize>,
        body: &mut Vec<Launch>,
    ) -> Result<(), LoadError> {
        let group = self.program.kv.groups[attend.kv.group];
        let dim = group.head_dim;
        // The number of heads that form whole blocks.
        let whole = |heads: &usize| latent.is_some() || (heads * dim).is_multiple_of(BLOCK);
        let heads = [1, 2, 4].into_iter().find(whole).unwrap_or(4);
        let blocks = (heads * dim).div_ceil(BLOCK) as u32;
        let mut constants = vec![
            ("RUN", U(RUN as u32)),
            ("MERGE_HEADS", U(heads as u32)),
            ("STAGED", U(blocks * 33)),
            ("SHARED_BLOCKS", U(blocks)),
            ("OUTS", U(dim.div_ceil(THREADS as usize) as u32)),
        ];
        constants.extend(self.emit_for(&[project], latent.unwrap_or(group.q_width())));
        match latent {
            Some(latent) => constants.push(("LATENT", U(latent as u32))),
            None => constants.extend(self.halves(FEW_ROWS + 1)),
        }
        constants.extend(self.heads(attend.kv));
        let (step, partial_sums, partial_tops) =
            (self.step.clone(), self.partial_sums.clone(), self.partial_tops.clone());
        let mut buffers =
            vec![("step", &step), ("partial_sums", &partial_sums), ("partial_tops", &partial_tops)];
        let sinks = attend.sinks.map(|sinks| self.vector(sinks)).transpose()?;
        if let Some(sinks) = &sinks {
            buffers.push(("sinks", sinks));
            constants.push(("SINKS", U(1)));
        }
        let gates = attend.is_gated.then(|| self.mixers().gates.clone());
        if let Some(gates) = &gates {
            buffers.push(("gates", gates));
            constants.push(("GATED", U(1)));
        }
        let mut files = wgsl!("args", "fold", "partials", "quantize", "emit", "attend_merge").to_vec();
        let mut name = "attend_merge".to_owned();
        if self.limits.kv_dtype.is_quantized() {
            constants.push(("HADAMARD", U(1)));
            files.extend(wgsl!("hadamard"));
            name += "_hadamard";
        }
        let grid = Grid::Merge(group.heads.div_ceil(heads) as u32);
        let variants = self.merge_variants(attend.kv.group);
        let kernel = (name, files, constants);
        self.push_variants(variants, kernel, &buffers, grid, attend.kv.group, body)?;
        self.timed_with = None;
        Ok(())
    }

    /// Returns the constants for the shapes of heads and pages, and the layer's place in pages.
    pub(super) fn heads(&self, kv_slot: KvSlot) -> Constants {
        let (kv, Limits { block_size, kv_dtype, .. }) = (&self.program.kv, *self.limits);
        let group = kv.groups[kv_slot.group];
        vec![
            ("HEADS", U(group.heads as u32)),
            ("KV_HEADS", U(group.kv_heads as u32)),
            ("DIM", U(group.head_dim as u32)),
            ("HEAD", U(group.unpadded_dim as u32)),
            ("PAGE", U(block_size as u32)),
            ("PAGE_WORDS", U(page_words(kv, block_size, kv_dtype) as u32)),
            ("LAYER_SLOT_AT", U(pages::place(kv, kv_slot, block_size, kv_dtype).1 as u32)),
            ("SIXTEENS", U(u32::from(self.few.is_some()))),
            ("KV_GROUP", U(kv_slot.group as u32)),
        ]
    }

    /// Returns the constants for the pages of a layer.
    pub(super) fn stored(&self, kv_slot: KvSlot) -> Constants {
        let dtype = self.limits.kv_dtype;
        let words = head_words(self.program.kv.groups[kv_slot.group].head_dim, dtype);
        let mut constants = self.heads(kv_slot);
        constants.extend([
            ("QUANTS", U(u32::from(dtype.is_quantized()))),
            ("Q4", U(u32::from(dtype == KvDtype::Q4))),
            ("HEAD_WORDS", U(words as u32)),
        ]);
        constants
    }

    /// Returns the suffix of kernels that access pages of this kind.
    fn suffix(&self) -> &'static str {
        match self.limits.kv_dtype {
            KvDtype::F16 => "",
            KvDtype::Q8 => "_q8",
            KvDtype::Q4 => "_q4",
        }
    }
}

/// Heads of a tile, of a group that shares K and V.
pub(super) fn tile_heads(group: usize, heads: usize) -> Constants {
    vec![("TILE_HEADS", U(heads as u32)), ("HEAD_TILES", U(group.div_ceil(heads) as u32))]
}

/// Threads of a workgroup of attention.
pub(super) const THREADS: u32 = 256;

/// Constants of attention with heads of this dimension, for some queries.
fn constants(device: &Device, dim: usize, queries: u32, kv_dtype: KvDtype) -> Constants {
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
        let most = if device.is_software { 1 } else { (8 / own).min(most_loads) };
        let whole = |&loads: &u32| {
            let shares_scales = kv_dtype == KvDtype::F16 || most_loads.is_multiple_of(loads);
            dim.div_ceil(4 * k_fours).is_multiple_of(loads) && shares_scales
        };
        (own, (1..=most).rev().find(whole).unwrap_or(1))
    };
    let [fine, coarse, short] = [FINE_SPLIT, COARSE_SPLIT, 1].map(share);
    let has_short = fine.0 > 1 && !device.is_software;
    let unroll = if device.is_software { v_tokens.max(2) } else { 16 };
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

/// Cosines and sines of positions 256 i, and of positions below 256 with the rope's magnitude.
pub(super) fn rope_tables(rope: &Rope, context: usize) -> [Vec<f32>; 2] {
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
