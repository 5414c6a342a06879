//! Everything that the passes know of a load: the program, its weights and limits, and the device.

use paguro_backend::{
    AttentionMode, Experts, KvDtype, Limits, Linear, LoadError, MatrixId, Program, QkNormKind, RopeStyle,
    Router, Weights,
};

use super::{
    adapt::Adapted,
    attention_tiles,
    kernels::{self, Shares},
    node::{Pool, RopeStore, RowClass},
};
use crate::{
    adapter::LEAST_THREADS,
    heads::{KvGroup, KvLayout},
    layout::{BLOCK, Layout},
    matrix::Order,
    plan::Tiling,
    target::Target,
};

/// Elements of a head, at most: a workgroup of attention has its queries and sums in its memory.
const MOST_HEAD_DIM: usize = 640;

/// Outputs that 32 threads of a matmul of one row compute, at most: each needs registers.
const MOST_OUTPUTS: usize = 8;

/// Knowledge of the passes.
pub struct Facts<'a> {
    /// The device.
    pub target: Target,
    /// The program.
    pub program: &'a Program,
    /// Its K and V.
    pub kv: &'a KvLayout,
    /// The weights; none where only sizes are computed.
    pub weights: Option<&'a Weights>,
    /// Sizes of steps.
    pub limits: &'a Limits,
    /// Attention tiles and splits of each K/V group.
    pub tilings: Vec<Tiling>,
    /// Side of the cooperative matrices that steps of few rows attend with, if they do.
    pub few: Option<u32>,
    /// Adapters, for the launches of steps with some.
    pub adapted: Option<&'a Adapted>,
}

impl<'a> Facts<'a> {
    /// Collects them.
    ///
    /// # Errors
    /// [`LoadError::Unsupported`] for a shape without kernels.
    pub fn new(
        target: Target,
        program: &'a Program,
        kv: &'a KvLayout,
        weights: Option<&'a Weights>,
        limits: &'a Limits,
    ) -> Result<Self, LoadError> {
        let few = attention_tiles::few(&target, program, kv, limits);
        let mut facts = Self { target, program, kv, weights, limits, tilings: vec![], few, adapted: None };
        facts.check_supported()?;
        facts.tilings = kv.groups.iter().map(|group| attention_tiles::tiling(&facts, group)).collect();
        Ok(facts)
    }

    /// Returns the site of joined matrices, if adapters change them.
    pub fn site(&self, linears: &[Linear], order: Order) -> Option<usize> {
        self.adapted?.sites.iter().position(|site| site.is_of(linears, order))
    }

    /// Returns the classes of rows, whose steps have different nodes.
    pub fn classes(&self) -> Vec<RowClass> {
        let mut borders = vec![1, 2];
        for (_, experts) in self.program.experts() {
            borders.extend(Shares::of(&self.target, experts, self.limits).borders());
            borders.extend(self.slots(experts).map(|slots| slots / experts.router.used + 1));
        }
        borders.extend(self.tilings.iter().filter_map(|tiling| Some(tiling.wide?.from)));
        if self.target.cooperative.is_some() {
            borders.extend([Layout::F16, Layout::Q4, Layout::Q8].map(|l| kernels::few_rows(l) as usize + 1));
        }
        borders.retain(|&border| border <= self.limits.max_rows.max(2));
        borders.sort_unstable();
        borders.dedup();
        let ends = borders.iter().skip(1).copied().chain([usize::MAX]);
        borders.iter().zip(ends).map(|(&from, to)| RowClass { from, to }).collect()
    }

    /// Returns the number of slots for experts, if there are more experts than slots.
    pub fn slots(&self, experts: &Experts) -> Option<usize> {
        self.limits.expert_slots.filter(|&slots| slots < experts.count)
    }

    /// Returns the slots of a layer in steps of a class of rows.
    pub fn pool(&self, layer: usize, experts: &Experts, class: RowClass) -> Option<Pool> {
        let Experts { count, router: Router { used, .. }, .. } = *experts;
        self.slots(experts).map(|slots| Pool {
            layer,
            count,
            used,
            slots,
            streams: class.from * used > slots,
        })
    }

    /// Returns the layout of a matrix; where only sizes are computed, any.
    pub fn layout(&self, matrix: MatrixId) -> Layout {
        self.weights.map_or(Layout::F32, |weights| Layout::of(weights.matrix(matrix).format))
    }

    /// Returns true if a matmul reads activations of eight bits.
    pub fn is_quantized(&self, linear: &Linear) -> bool {
        self.layout(linear.matrix).is_quantized()
    }

    /// Returns the rows of a matrix.
    pub fn rows(&self, linear: &Linear) -> usize {
        self.weights.map_or(0, |weights| weights.matrix(linear.matrix).rows)
    }

    /// Returns the elements of a row of a matrix.
    pub fn cols(&self, linear: &Linear) -> usize {
        self.weights.map_or(0, |weights| weights.matrix(linear.matrix).cols)
    }

    /// Returns true if one binding holds these matrices together.
    pub fn is_whole(&self, linears: &[Linear]) -> bool {
        let words = |linear: &Linear| {
            let words = self.layout(linear.matrix).row_words(self.cols(linear).div_ceil(BLOCK));
            self.rows(linear) * words.into_iter().max().unwrap_or(0)
        };
        linears.iter().map(words).sum::<usize>() as u64 * 4 <= self.target.binding_limit
    }

    /// Returns the K/V group of a layer.
    pub fn group(&self, kv: paguro_backend::KvSlot) -> &'a KvGroup {
        &self.kv.groups[kv.group]
    }

    /// Pairs of a head that are rotated.
    pub fn pairs(&self, rope: Option<usize>) -> usize {
        rope.map_or(0, |rope| self.program.ropes[rope].frequencies.len())
    }

    /// Returns true if pairs of a head are half a head apart.
    pub fn is_split(&self, rope: Option<usize>) -> bool {
        rope.is_some_and(|rope| self.program.ropes[rope].style == RopeStyle::HalfSplit)
    }

    /// Returns true if matmuls of steps of one row can also rotate and store K and V.
    pub fn rotates_in_matmul(&self, op: &RopeStore) -> bool {
        self.limits.kv_dtype == KvDtype::F16
            && !self.group(op.kv).is_padded()
            && op.qk_norm.is_none_or(|norm| self.norms_in_matmul(norm.kind, self.group(op.kv).head_dim))
            && op.v_norm.is_none_or(|_| op.qk_norm.is_some())
            && op.linears[1].is_some() == op.linears[2].is_some()
            && op.position_scale.is_none()
            && self.pairs(op.rope).is_multiple_of(2)
            && self.is_whole(&Vec::from_iter(op.linears.into_iter().flatten()))
    }

    /// Returns true if a workgroup of a matmul of one row can compute a whole head, for its norm.
    fn norms_in_matmul(&self, kind: QkNormKind, head_dim: usize) -> bool {
        let groups = head_dim.min(self.target.most_threads as usize / 32);
        let staged = self.adapted.map_or(0, |_| kernels::STAGED_BYTES);
        let memory = 4 * (34 * head_dim + 64) + staged;
        kind == QkNormKind::Head
            && head_dim.is_multiple_of(groups.max(4))
            && head_dim / groups <= MOST_OUTPUTS
            && memory <= self.target.workgroup_memory as usize
    }

    /// Returns true if attention of a K/V group uses handoff to the merge in steps of a class of rows. Programs with states do
    /// not, because their steps cannot be repeated.
    pub fn hands_partials(&self, class: RowClass, kv_group: usize) -> bool {
        let tiling = &self.tilings[kv_group];
        self.target.handoff
            && tiling.emits
            && tiling.wide.is_none_or(|wide| class.from < wide.from)
            && self.limits.attention == AttentionMode::Paged
            && self.program.state.is_empty()
    }

    /// Returns an error about something without kernels.
    pub fn unsupported(&self, what: String, supported: &str) -> LoadError {
        LoadError::Unsupported { device: self.target.name.clone(), what, supported: supported.to_owned() }
    }

    fn check_supported(&self) -> Result<(), LoadError> {
        for KvGroup { head_dim: dim, is_latent, .. } in &self.kv.groups {
            // For larger heads, a workgroup of the merge computes a whole head.
            let fits = if *dim > 256 {
                (dim.is_multiple_of(BLOCK) || *is_latent) && *dim <= MOST_HEAD_DIM
            } else {
                true
            };
            if !dim.is_multiple_of(8) || !fits {
                let supported = format!("multiples of 8 up to 256 and of {BLOCK} up to {MOST_HEAD_DIM} work");
                return Err(self.unsupported(format!("head_dim {dim}"), &supported));
            }
        }
        if !128_usize.is_multiple_of(self.limits.block_size) || self.limits.block_size < 16 {
            let what = format!("pages of {} tokens", self.limits.block_size);
            return Err(self.unsupported(what, "16, 32, 64 and 128 work"));
        }
        if self.limits.expert_slots.is_some() && !self.target.has_host_memory {
            return Err(LoadError::no_slots(&self.target.name));
        }
        for (_, experts) in self.program.experts() {
            let used = experts.router.used;
            if let Some(slots) = self.slots(experts).filter(|slots| *slots < used) {
                let supported = format!("a row uses {used} experts, and each needs a slot");
                return Err(self.unsupported(format!("experts in {slots} slots"), &supported));
            }
        }
        if self.target.workgroup_memory < 28 << 10 || self.target.workgroup_threads < LEAST_THREADS {
            let what = "attention with its workgroup memory".to_owned();
            return Err(self.unsupported(what, "28 KiB and 256 threads for each workgroup are needed"));
        }
        Ok(())
    }
}
