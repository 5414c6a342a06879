//! Parts that all towers have in common: pre-norm layers of attention and a dense network, and their K and V.

use paguro_backend::{
    Activation, Attention, Dense, Exit, FeedForward, Input, KvGroup, KvLayout, KvSlot, Layer, Linear, Matrix,
    Merged, Mixer, Norm, NormKind, Patches, Program, QkNorm, QkNormKind, Residual, Rope, RopeStyle,
    StateLayout, Tap,
};

use super::files::TowerFile;
use crate::error::ModelError;

/// Layers of a tower.
#[derive(Clone, Copy, Debug)]
pub(super) struct Blocks {
    pub(super) layers: usize,
    pub(super) hidden: usize,
    pub(super) heads: usize,
    pub(super) head_dim: usize,
    pub(super) ffn: usize,
    pub(super) norms: NormKind,
    pub(super) eps: f32,
    pub(super) activation: Activation,
    pub(super) gated: bool,
    /// Multiplies scores.
    pub(super) scale: f32,
    /// Norms of queries, keys and values, and norms after both branches (Gemma 4).
    pub(super) gemma4: bool,
    /// Parts that layers of some towers have.
    pub(super) extras: Extras,
    pub(super) names: &'static BlockNames,
}

/// Parts that layers of some towers have.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Extras {
    /// Norms of queries and keys.
    pub(super) qk_norms: Option<QkNormKind>,
    /// Factors of the results of both branches (InternVL).
    pub(super) scales: bool,
}

/// Names of a layer's tensors in folders, after the layer's number.
#[derive(Debug)]
pub(super) struct BlockNames {
    /// Text before the number.
    pub(super) before: &'static str,
    pub(super) norm1: &'static str,
    pub(super) norm2: &'static str,
    pub(super) qkv: &'static str,
    pub(super) q: &'static str,
    pub(super) k: &'static str,
    pub(super) v: &'static str,
    pub(super) out: &'static str,
    pub(super) gate: &'static str,
    pub(super) up: &'static str,
    pub(super) down: &'static str,
    pub(super) q_norm: &'static str,
    pub(super) k_norm: &'static str,
    pub(super) post1: &'static str,
    pub(super) post2: &'static str,
    pub(super) scale1: &'static str,
    pub(super) scale2: &'static str,
}

/// Names in mmproj files.
pub(super) const GGUF: BlockNames = BlockNames {
    before: "v.blk.",
    norm1: "ln1",
    norm2: "ln2",
    qkv: "attn_qkv",
    q: "attn_q",
    k: "attn_k",
    v: "attn_v",
    out: "attn_out",
    gate: "ffn_gate",
    up: "ffn_up",
    down: "ffn_down",
    q_norm: "attn_q_norm",
    k_norm: "attn_k_norm",
    post1: "attn_post_norm",
    post2: "ffn_post_norm",
    scale1: "ls1",
    scale2: "ls2",
};

/// Names of SigLIP's layers in folders.
pub(super) const SIGLIP: BlockNames = BlockNames {
    before: "v.encoder.layers.",
    norm1: "layer_norm1",
    norm2: "layer_norm2",
    q: "self_attn.q_proj",
    k: "self_attn.k_proj",
    v: "self_attn.v_proj",
    out: "self_attn.out_proj",
    up: "mlp.fc1",
    down: "mlp.fc2",
    ..GGUF
};

impl Blocks {
    /// Checks that the numbers have a meaning before anything is allocated for them.
    pub(super) fn check(&self, file: &TowerFile<'_, '_>) -> Result<(), ModelError> {
        let Self { layers, hidden, heads, head_dim, ffn, .. } = *self;
        let tensors = file.tensors.len();
        let usable = [hidden, heads, head_dim, ffn].iter().all(|size| (1..=1 << 20).contains(size));
        if layers > tensors || !usable || heads.checked_mul(head_dim).is_none() {
            return Err(ModelError::Config(format!(
                "the vision tower has {layers} layers of {heads} heads of {head_dim}, rows of {hidden} and {ffn} numbers, \
                 and {tensors} tensors"
            )));
        }
        Ok(())
    }

    /// Lowers all layers, with K and V in slots of the first group.
    pub(super) fn all_layers(
        &self,
        file: &mut TowerFile<'_, '_>,
        rope: Option<usize>,
    ) -> Result<Vec<Layer>, ModelError> {
        (0..self.layers).map(|layer| self.layer(file, layer, 0, rope)).collect()
    }

    /// Lowers a layer whose K and V are in the only slot of group `group`.
    pub(super) fn layer(
        &self,
        file: &mut TowerFile<'_, '_>,
        layer: usize,
        group: usize,
        rope: Option<usize>,
    ) -> Result<Layer, ModelError> {
        let Self {
            hidden,
            heads,
            head_dim,
            ffn,
            norms,
            eps,
            activation,
            gated,
            scale,
            gemma4,
            extras,
            names,
            ..
        } = *self;
        let names = if file.is_hf() { names } else { &GGUF };
        let name = |part: &str| format!("{}{layer}.{part}", names.before);
        let width = heads * head_dim;
        let [q, k, v] = qkv(file, &name(names.qkv), [names.q, names.k, names.v].map(name), width, hidden)?;
        let plain = |file: &mut TowerFile<'_, '_>| {
            let weight = file.tensors.add_vector(vec![1.0; head_dim]);
            Norm { kind: NormKind::Rms, weight, bias: None, eps }
        };
        let (mut qk_norm, mut v_norm, mut post1, mut post2) = (None, None, None, None);
        if gemma4 {
            qk_norm = Some(QkNorm {
                q: file.norm(&name(names.q_norm), head_dim, norms, eps)?,
                k: file.norm(&name(names.k_norm), head_dim, norms, eps)?,
                kind: QkNormKind::Head,
            });
            v_norm = Some(plain(file));
            post1 = Some(file.norm(&name(names.post1), hidden, norms, eps)?);
            post2 = Some(file.norm(&name(names.post2), hidden, norms, eps)?);
        }
        if let Some(kind) = extras.qk_norms {
            let width = if kind == QkNormKind::Row { width } else { head_dim };
            qk_norm = Some(QkNorm {
                q: file.norm(&name(names.q_norm), width, NormKind::Rms, eps)?,
                k: file.norm(&name(names.k_norm), width, NormKind::Rms, eps)?,
                kind,
            });
        }
        let scaled = |file: &mut TowerFile<'_, '_>, linear: &str, cols: usize, by: &str| match extras.scales {
            true => file.scaled(linear, hidden, cols, &name(by)),
            false => file.linear(linear, hidden, cols),
        };
        let mixer = Mixer::Attention(Attention {
            norm: Some(file.norm(&name(names.norm1), hidden, norms, eps)?),
            heads,
            q,
            k: Some(k),
            v: Some(v),
            qk_norm,
            v_norm,
            rope,
            position_scale: None,
            scale,
            soft_cap: None,
            distance_bias: None,
            sinks: None,
            kv: KvSlot { group, layer_slot: 0 },
            gate: None,
            out: scaled(file, &name(names.out), width, names.scale1)?,
            post_norm: post1,
        });
        // Old mmproj files have the names of up and down exchanged.
        let (mut up, mut down) = (name(names.up), name(names.down));
        let is_swapped =
            file.tensors.shape(&format!("{up}.weight")) == Some(&[hidden, ffn][..]) && hidden != ffn;
        if is_swapped {
            std::mem::swap(&mut up, &mut down);
        }
        let gate = if gated { Some(file.linear(&name(names.gate), ffn, hidden)?) } else { None };
        let ffn = FeedForward::Dense(Dense {
            norm: Some(file.norm(&name(names.norm2), hidden, norms, eps)?),
            width: ffn,
            gate,
            up: file.linear(&up, ffn, hidden)?,
            activation,
            down: scaled(file, &down, ffn, names.scale2)?,
            post_norm: post2,
        });
        Ok(Layer {
            mixer,
            ffn,
            residual: Residual::Sequential,
            norm_after_mixer: None,
            norm_after_ffn: None,
            branch_scale: 1.0,
            input: None,
            output_scale: 1.0,
        })
    }

    /// Returns a program of these layers. All layers of a group share a slot: each stores K and V before it attends, and nothing reads
    /// them later.
    pub(super) fn program(
        &self,
        groups: &[bool],
        layers: Vec<Layer>,
        ropes: Vec<Rope>,
        patches: Patches,
        merged: Merged,
    ) -> Program {
        let group = |&spans: &bool| KvGroup {
            window: None,
            spans,
            layer_slots: 1,
            kv_heads: self.heads,
            head_dim: self.head_dim,
        };
        Program {
            hidden: self.hidden,
            vocab: 0,
            bidirectional: true,
            shares_pages: false,
            kv: KvLayout { groups: groups.iter().map(group).collect() },
            state: StateLayout::default(),
            ropes,
            input: Input::Patches(patches),
            given_parts: 1,
            layers,
            exit: Exit::Merged(merged),
        }
    }
}

/// Returns Q, K and V, of one matrix or of three.
pub(super) fn qkv(
    file: &mut TowerFile<'_, '_>,
    fused: &str,
    separate: [String; 3],
    width: usize,
    hidden: usize,
) -> Result<[Linear; 3], ModelError> {
    if !file.tensors.has(&format!("{fused}.weight")) {
        let [q, k, v] = separate.map(|name| file.linear(&name, width, hidden));
        return Ok([q?, k?, v?]);
    }
    let whole = file.tensors.require_matrix(&format!("{fused}.weight"), 3 * width, hidden)?;
    let bias = file.tensors.vector(&format!("{fused}.bias"), 3 * width)?;
    let bytes = width * whole.format.row_bytes(hidden);
    Ok([0, 1, 2].map(|part| {
        let matrix = file.tensors.add_matrix(Matrix {
            name: format!("{}[{part}]", whole.name),
            rows: width,
            bytes: whole.bytes.slice(part * bytes..(part + 1) * bytes),
            ..whole.clone()
        });
        let bias = bias.as_ref().map(|bias| file.tensors.add_vector(bias[part * width..][..width].to_vec()));
        Linear { matrix, bias, bounds: None }
    }))
}

/// Returns the rotation of a head whose first half of the pairs is rotated by the row, and the second by the column, both with the
/// frequencies of half a head.
pub(super) fn rope_of_halves(head_dim: usize, base: f64) -> Rope {
    let half = head_dim / 4;
    let frequency = |pair: usize| base.powf(-((pair % half) as f64) / half as f64) as f32;
    Rope {
        style: RopeStyle::HalfSplit,
        frequencies: (0..2 * half).map(frequency).collect(),
        axes: (0..2 * half).map(|pair| if pair < half { 1 } else { 2 }).collect(),
        magnitude: 1.0,
    }
}

/// Returns the only part of an output.
pub(super) fn single(rows: usize, width: usize, layers: usize, ops: Vec<paguro_backend::RowOp>) -> Merged {
    Merged { rows, width, taps: vec![Tap { layers, ops }] }
}
