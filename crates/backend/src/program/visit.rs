//! Walks through all fields of a program, in one fixed order.
//!
//! Every type is taken apart without `..`, so a new field does not compile until it is a part of the walk. Everything that
//! needs all references to weights, or all fields, is a [`Visitor`]: the [`digest`](Program::digest), the
//! [excerpt](mod@crate::excerpt), the [check](Program::check) of ids, and sums of weights by their [`Role`].

use super::{
    Activation, Attention, Beside, Bounds, Branch, Dense, DistanceBias, Embed, Exit, ExpertGroups,
    ExpertLatent, Experts, FeedForward, Head, Input, Joined, KvGroup, KvLayout, KvSlot, Layer, LayerEmbeds,
    LayerInput, Linear, MatrixId, Merged, Mixer, Norm, NormKind, Patches, PositionScale, Positions, Program,
    Projection, QkNorm, QkNormKind, Residual, Rope, RopeStyle, Router, RowOp, Scores, SharedExpert, TableId,
    Tap, TokenTypes, VectorId,
};
use crate::{
    Convolution, DeltaRule, DeltaShape, GatedNorm, GroupNorm, KeySharing, Latent, LatentQuery, LatentShape,
    ShortConv, Ssd, StateLayout, StateShape,
};

/// Receives all fields of a program, in order. It may change the ids of weights.
pub trait Visitor {
    /// A reference to a matrix.
    fn matrix(&mut self, id: &mut MatrixId, role: Role) {
        let _ = (id, role);
    }

    /// A reference to a vector.
    fn vector(&mut self, id: &mut VectorId) {
        let _ = id;
    }

    /// A reference to a table.
    fn table(&mut self, id: &mut TableId) {
        let _ = id;
    }

    /// Any other field, in bits: numbers, lengths of lists, and the variants of enums by their index.
    fn number(&mut self, bits: u64) {
        let _ = bits;
    }
}

/// Rows of a step that read a matrix, and its elements that they read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Each row reads one row of the matrix.
    Lookup,
    /// All rows read all of it.
    Layer,
    /// A row reads `used` of `count` parts.
    Experts {
        /// Parts that a row reads.
        used: usize,
        /// All parts.
        count: usize,
    },
    /// Rows whose logits are needed read all of it.
    Head,
}

impl Program {
    /// Calls the visitor with all fields.
    pub fn visit(&mut self, visitor: &mut dyn Visitor) {
        self.walk(&mut Walk { visitor, role: Role::Layer });
    }

    /// Returns all references to matrices with their roles, in the order of the walk; a matrix may occur more than once.
    pub fn matrices(&self) -> Vec<(MatrixId, Role)> {
        struct Found(Vec<(MatrixId, Role)>);
        impl Visitor for Found {
            fn matrix(&mut self, id: &mut MatrixId, role: Role) {
                self.0.push((*id, role));
            }
        }
        let mut found = Found(Vec::new());
        self.clone().visit(&mut found);
        found.0
    }
}

impl Layer {
    /// Calls the visitor with all fields of the layer.
    pub fn visit(&mut self, visitor: &mut dyn Visitor) {
        self.walk(&mut Walk { visitor, role: Role::Layer });
    }
}

/// A visitor, and the role of the next matrices.
struct Walk<'a> {
    visitor: &'a mut dyn Visitor,
    role: Role,
}

impl Walk<'_> {
    /// Walks through fields whose matrices have a role.
    fn with(&mut self, role: Role, fields: &mut [&mut dyn Fields]) {
        let before = std::mem::replace(&mut self.role, role);
        fields.iter_mut().for_each(|field| field.walk(self));
        self.role = before;
    }
}

/// A type that can be walked through.
trait Fields {
    fn walk(&mut self, walk: &mut Walk<'_>);
}

impl Fields for MatrixId {
    fn walk(&mut self, walk: &mut Walk<'_>) {
        walk.visitor.matrix(self, walk.role);
    }
}

impl Fields for VectorId {
    fn walk(&mut self, walk: &mut Walk<'_>) {
        walk.visitor.vector(self);
    }
}

impl Fields for TableId {
    fn walk(&mut self, walk: &mut Walk<'_>) {
        walk.visitor.table(self);
    }
}

macro_rules! numbers {
    ($($type:ty: $bits:expr,)*) => {
        $(impl Fields for $type {
            fn walk(&mut self, walk: &mut Walk<'_>) {
                let bits: fn($type) -> u64 = $bits;
                walk.visitor.number(bits(*self));
            }
        })*
    };
}

numbers! {
    bool: u64::from,
    u8: u64::from,
    u32: u64::from,
    usize: |number| number as u64,
    f32: |number| u64::from(number.to_bits()),
}

impl<T: Fields> Fields for Option<T> {
    fn walk(&mut self, walk: &mut Walk<'_>) {
        self.is_some().walk(walk);
        self.iter_mut().for_each(|value| value.walk(walk));
    }
}

impl<T: Fields> Fields for Vec<T> {
    fn walk(&mut self, walk: &mut Walk<'_>) {
        self.len().walk(walk);
        self.iter_mut().for_each(|value| value.walk(walk));
    }
}

impl<T: Fields> Fields for Box<T> {
    fn walk(&mut self, walk: &mut Walk<'_>) {
        (**self).walk(walk);
    }
}

impl<A: Fields, B: Fields> Fields for (A, B) {
    fn walk(&mut self, walk: &mut Walk<'_>) {
        self.0.walk(walk);
        self.1.walk(walk);
    }
}

/// Structs by their fields, all of which are walked through in this order.
macro_rules! structs {
    ($($type:ident { $($field:ident),* $(,)? })*) => {
        $(impl Fields for $type {
            fn walk(&mut self, walk: &mut Walk<'_>) {
                let Self { $($field),* } = self;
                $($field.walk(walk);)*
            }
        })*
    };
}

/// Enums by their variants. The number of a variant precedes its fields, and never changes its meaning.
macro_rules! enums {
    ($($type:ident { $($number:literal $variant:ident $(($value:ident))? $({ $($field:ident),* })?,)* })*) => {
        $(impl Fields for $type {
            fn walk(&mut self, walk: &mut Walk<'_>) {
                match self {
                    $(Self::$variant $(($value))? $({ $($field),* })? => {
                        walk.visitor.number($number);
                        $($value.walk(walk);)?
                        $($($field.walk(walk);)*)?
                    })*
                }
            }
        })*
    };
}

structs! {
    TokenTypes { table, count }
    Joined { width, token_norm, given_norm, linear }
    LayerEmbeds { table, scale, count, width, projection, norm }
    Layer {
        mixer, ffn, residual, norm_after_mixer, norm_after_ffn, branch_scale, input, output_scale,
    }
    LayerInput { index, gate, activation, out, post_norm }
    Branch { mixer, scale }
    Bounds { input_min, input_max, output_min, output_max }
    Patches { width, ops }
    Merged { rows, width, taps }
    Tap { layers, ops }
    Norm { kind, weight, bias, eps }
    Attention {
        norm, heads, q, k, v, qk_norm, v_norm, rope, position_scale, scale, soft_cap, distance_bias, sinks,
        kv, gate, out, post_norm,
    }
    DistanceBias { table, reach }
    QkNorm { q, k, kind }
    PositionScale { beta, original }
    KvLayout { groups }
    KvGroup { window, spans, layer_slots, kv_heads, head_dim }
    KvSlot { group, layer_slot }
    Rope { style, frequencies, axes, magnitude }
    Dense { norm, width, gate, up, activation, down, post_norm }
    ExpertLatent { width, down, up }
    Beside { dense, sum_norm }
    Router {
        norm, linear, scores, selection_bias, groups, used, renormalize, factor, expert_scale,
    }
    ExpertGroups { count, used, best }
    SharedExpert { width, gate, up, down, output_gate }
    Latent {
        norm, shape, query, down, latent_norm, absorb, value, rope, position_scale, scale, kv, out, post_norm,
    }
    LatentShape { heads, plain, rotated, latent, value }
    StateLayout { layers }
    StateShape { rows, channels, delta }
    DeltaShape { key_heads, value_heads, key_dim, value_dim }
    Convolution { taps, weight, bias }
    ShortConv { norm, width, input, convolution, out, post_norm, state }
    DeltaRule {
        norm, shape, sharing, qkv, gate, alpha, beta, convolution, decay, dt, out_norm, out, post_norm, state,
    }
    Ssd {
        norm, shape, cbv, gate, gate_scale, dt, dt_scale, dt_bias, dt_limits, convolution, decay, skip,
        out_norm, out, post_norm, state,
    }
    GroupNorm { groups, weight, eps }
}

enums! {
    Input { 0 Tokens(embed), 1 Rows, 2 Patches(patches), }
    Exit { 0 Logits(head), 1 Rows, 2 Merged(merged), }
    RowOp {
        0 Norm(norm), 1 Linear { linear, width, activation }, 2 Add, 3 Join(rows), 4 Mean { rows, scale },
        5 Affine { scale, bias }, 6 Activate { activation, gated },
    }
    Residual { 0 Sequential, 1 Parallel, }
    Mixer {
        0 None, 1 Attention(op), 2 Conv(op), 3 DeltaRule(op), 4 Latent(op), 5 Ssd(op), 6 Sum(branches),
    }
    FeedForward { 0 None, 1 Dense(op), 2 Experts(op), }
    NormKind { 0 Rms, 1 Layer, }
    QkNormKind { 0 Head, 1 HeadAfterRope, 2 Row, }
    RopeStyle { 0 Interleaved, 1 HalfSplit, }
    Scores { 0 Softmax, 1 Sigmoid, }
    Activation { 0 Silu, 1 GeluTanh, 2 Gelu, 3 Relu2, 4 ClampedSwiglu { alpha, limit }, }
    LatentQuery { 0 Direct(linear), 1 Down { down, rank, norm, up }, }
    GatedNorm { 0 GateOnly, 1 AfterGate(norm), 2 BeforeGate(norm), }
    KeySharing { 0 Consecutive, 1 Alternating, }
}

impl Fields for Program {
    fn walk(&mut self, walk: &mut Walk<'_>) {
        let Self {
            hidden,
            vocab,
            bidirectional,
            shares_pages,
            kv,
            state,
            ropes,
            input,
            given_parts,
            layers,
            exit,
        } = self;
        hidden.walk(walk);
        vocab.walk(walk);
        bidirectional.walk(walk);
        kv.walk(walk);
        state.walk(walk);
        ropes.walk(walk);
        input.walk(walk);
        given_parts.walk(walk);
        layers.walk(walk);
        exit.walk(walk);
        // Its absence adds nothing, so that other programs keep their digests.
        if *shares_pages {
            shares_pages.walk(walk);
        }
    }
}

impl Fields for Linear {
    fn walk(&mut self, walk: &mut Walk<'_>) {
        let Self { matrix, bias, bounds } = self;
        matrix.walk(walk);
        bias.walk(walk);
        // Their absence adds nothing, so that programs without bounds keep their digests.
        bounds.iter_mut().for_each(|bounds| bounds.walk(walk));
    }
}

impl Fields for Embed {
    fn walk(&mut self, walk: &mut Walk<'_>) {
        let Self { table, scale, positions, types, norm, layers, joined } = self;
        walk.with(Role::Lookup, &mut [table]);
        scale.walk(walk);
        positions.walk(walk);
        types.walk(walk);
        norm.walk(walk);
        layers.walk(walk);
        // Its absence adds nothing, so that other programs keep their digests.
        joined.iter_mut().for_each(|joined| joined.walk(walk));
    }
}

impl Fields for Positions {
    fn walk(&mut self, walk: &mut Walk<'_>) {
        let Self { table, count } = self;
        walk.with(Role::Lookup, &mut [table]);
        count.walk(walk);
    }
}

impl Fields for Head {
    fn walk(&mut self, walk: &mut Walk<'_>) {
        let Self { norm, linear, scale, soft_cap, projection } = self;
        norm.walk(walk);
        walk.with(Role::Head, &mut [linear]);
        scale.walk(walk);
        soft_cap.walk(walk);
        // Its absence adds nothing, so that other programs keep their digests.
        projection.iter_mut().for_each(|projection| projection.walk(walk));
    }
}

impl Fields for Projection {
    fn walk(&mut self, walk: &mut Walk<'_>) {
        let Self { width, linear } = self;
        width.walk(walk);
        walk.with(Role::Head, &mut [linear]);
    }
}

impl Fields for Experts {
    fn walk(&mut self, walk: &mut Walk<'_>) {
        let Self {
            norm,
            router,
            count,
            width,
            latent,
            gate,
            up,
            activation,
            down,
            shared,
            beside,
            post_norm,
        } = self;
        let role = Role::Experts { used: router.used, count: *count };
        norm.walk(walk);
        router.walk(walk);
        count.walk(walk);
        width.walk(walk);
        latent.walk(walk);
        walk.with(role, &mut [gate, up, down]);
        activation.walk(walk);
        shared.walk(walk);
        beside.walk(walk);
        post_norm.walk(walk);
    }
}
