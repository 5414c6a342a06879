//! Models without a file: well-known shapes with random weights, for benchmarks.

use std::{collections::HashMap, sync::Arc};

use clap::ValueEnum;
use half::f16;
use paguro_backend::{
    Activation, Attention, ByteSource, Bytes, Dense, Embed, Exit, Experts, FeedForward, Head, Input, KvGroup,
    KvLayout, KvSlot, Layer, Linear, Matrix, MatrixId, Mixer, Norm, NormKind, Program, QkNorm, QkNormKind,
    Residual, Rope, RopeStyle, Router, Scores, StateLayout, VectorId, WeightFormat, Weights,
};
use paguro_model::Model;

use crate::cli::{ShapeFormat, ShapeName};

/// Number of random bytes; larger matrices repeat them.
const RANDOM_BYTES: usize = 1 << 20;

struct Shape {
    name: &'static str,
    hidden: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    /// Width of a dense network or of an expert.
    ffn: usize,
    vocab: usize,
    /// Number of experts, and of those that a row uses.
    experts: Option<(usize, usize)>,
    /// Window of every second layer. It also selects gpt-oss's sinks, biases and activation.
    window: Option<u32>,
}

impl Shape {
    fn of(name: ShapeName) -> Self {
        let dense = Self {
            name: "TinyLlama 1.1B",
            hidden: 2048,
            layers: 22,
            heads: 32,
            kv_heads: 4,
            head_dim: 64,
            ffn: 5632,
            vocab: 32_000,
            experts: None,
            window: None,
        };
        match name {
            ShapeName::Tinyllama => dense,
            ShapeName::Llama8b => Self {
                name: "Llama 8B",
                hidden: 4096,
                layers: 32,
                kv_heads: 8,
                head_dim: 128,
                ffn: 14_336,
                vocab: 128_256,
                ..dense
            },
            ShapeName::SmallMoe => Self {
                name: "small MoE",
                hidden: 1024,
                layers: 16,
                heads: 16,
                ffn: 512,
                experts: Some((32, 4)),
                ..dense
            },
            ShapeName::Qwen3_30b => Self {
                name: "Qwen3 30B-A3B",
                layers: 48,
                head_dim: 128,
                ffn: 768,
                vocab: 151_936,
                experts: Some((128, 8)),
                ..dense
            },
            ShapeName::GptOss20b => Self {
                name: "gpt-oss 20B",
                hidden: 2880,
                layers: 24,
                heads: 64,
                kv_heads: 8,
                ffn: 2880,
                vocab: 201_088,
                experts: Some((32, 4)),
                window: Some(128),
                ..dense
            },
        }
    }
}

/// Creates a model of this shape. Everything besides program and weights is copied from `like`.
pub fn model(name: ShapeName, format: ShapeFormat, like: Model, context: usize) -> Model {
    let shape = Shape::of(name);
    let mut builder = Builder { pools: HashMap::new(), weights: Weights::default() };
    let program = builder.program(&shape, format);
    let weights = builder.weights;
    let elements = |matrix: &Matrix| (matrix.parts * matrix.rows * matrix.cols) as u64;
    let mut model = like;
    model.name = format!("{} (random)", shape.name);
    model.description.parameters = weights.matrices.iter().map(elements).sum();
    model.description.file_bytes = weights.matrices.iter().map(|matrix| matrix.bytes.len() as u64).sum();
    model.description.quantization =
        format.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned());
    model.context_length = context;
    model.max_context = context;
    model.stop_tokens = Vec::new();
    model.program = program;
    model.weights = weights;
    model
}

struct Builder {
    /// Bytes of each format, as many as its largest matrix needs.
    pools: HashMap<WeightFormat, Arc<dyn ByteSource>>,
    weights: Weights,
}

impl Builder {
    fn program(&mut self, shape: &Shape, format: ShapeFormat) -> Program {
        let Shape { hidden, layers, head_dim, vocab, window, .. } = *shape;
        let (base, better) = match format {
            ShapeFormat::F16 => (WeightFormat::F16, WeightFormat::F16),
            ShapeFormat::Q8_0 => (WeightFormat::Q8_0, WeightFormat::Q8_0),
            ShapeFormat::Q4_0 => (WeightFormat::Q4_0, WeightFormat::Q6_K),
            ShapeFormat::Q4KM => (WeightFormat::Q4_K, WeightFormat::Q6_K),
            ShapeFormat::Mxfp4 => (WeightFormat::Q8_0, WeightFormat::Q8_0),
        };
        let groups = if window.is_some() { 2 } else { 1 };
        let group = |window| KvGroup {
            window,
            spans: false,
            layer_slots: layers.div_ceil(groups),
            kv_heads: shape.kv_heads,
            head_dim,
        };
        let kv = match window {
            None => KvLayout { groups: vec![group(None)] },
            window => KvLayout { groups: vec![group(window), group(None)] },
        };
        let table = self.matrix("embedding", base, 1, vocab, hidden);
        let input = Input::Tokens(Embed {
            table,
            scale: 1.0,
            positions: None,
            types: None,
            norm: None,
            layers: None,
            joined: None,
        });
        let layer = |layer: usize| {
            // Q4_K_M stores these with more bits in half of the layers: the outer ones, and every third between them.
            let outer = layer < layers / 8 || layer >= 7 * layers / 8;
            let more = if outer || (layer - layers / 8) % 3 == 2 { better } else { base };
            let more = if format == ShapeFormat::Q4_0 { base } else { more };
            let place = KvSlot { group: layer % groups, layer_slot: layer / groups };
            Layer {
                mixer: Mixer::Attention(self.attention(shape, place, base, more)),
                ffn: match shape.experts {
                    None => FeedForward::Dense(self.dense(shape, base, more)),
                    Some(experts) => FeedForward::Experts(self.experts(shape, experts, format, base, more)),
                },
                residual: Residual::Sequential,
                norm_after_mixer: None,
                norm_after_ffn: None,
                branch_scale: 1.0,
                input: None,
                output_scale: 1.0,
            }
        };
        let layers = (0..layers).map(layer).collect();
        let linear = self.linear("head", better, vocab, hidden);
        let exit = Exit::Logits(Head {
            norm: self.norm(hidden),
            linear,
            scale: 1.0,
            soft_cap: None,
            projection: None,
        });
        let frequency = |pair: usize| 5e5_f32.powf(-2.0 * pair as f32 / head_dim as f32);
        let rope = Rope {
            style: RopeStyle::Interleaved,
            frequencies: (0..head_dim / 2).map(frequency).collect(),
            axes: Vec::new(),
            magnitude: 1.0,
        };
        Program {
            hidden,
            vocab,
            bidirectional: false,
            shares_pages: false,
            kv,
            state: StateLayout::default(),
            ropes: vec![rope],
            input,
            given_parts: 0,
            layers,
            exit,
        }
    }

    fn attention(&mut self, shape: &Shape, kv: KvSlot, base: WeightFormat, more: WeightFormat) -> Attention {
        let Shape { hidden, heads, head_dim, .. } = *shape;
        let (q, kv_width) = (heads * head_dim, shape.kv_heads * head_dim);
        let gpt_oss = shape.window.is_some();
        Attention {
            norm: Some(self.norm(hidden)),
            heads,
            q: self.biased("q", base, q, hidden, gpt_oss),
            k: Some(self.biased("k", base, kv_width, hidden, gpt_oss)),
            v: Some(self.biased("v", more, kv_width, hidden, gpt_oss)),
            v_norm: None,
            qk_norm: (shape.experts.is_some() && !gpt_oss).then(|| QkNorm {
                q: self.norm(head_dim),
                k: self.norm(head_dim),
                kind: QkNormKind::Head,
            }),
            rope: Some(0),
            position_scale: None,
            scale: 1.0 / (head_dim as f32).sqrt(),
            soft_cap: None,
            distance_bias: None,
            sinks: gpt_oss.then(|| self.vector(heads, 0.0)),
            kv,
            gate: None,
            out: self.biased("out", base, hidden, q, gpt_oss),
            post_norm: None,
        }
    }

    fn dense(&mut self, shape: &Shape, base: WeightFormat, more: WeightFormat) -> Dense {
        let Shape { hidden, ffn, .. } = *shape;
        Dense {
            norm: Some(self.norm(hidden)),
            width: ffn,
            gate: Some(self.linear("gate", base, ffn, hidden)),
            up: self.linear("up", base, ffn, hidden),
            activation: Activation::Silu,
            down: self.linear("down", more, hidden, ffn),
            post_norm: None,
        }
    }

    fn experts(
        &mut self,
        shape: &Shape,
        (count, used): (usize, usize),
        format: ShapeFormat,
        base: WeightFormat,
        more: WeightFormat,
    ) -> Experts {
        let Shape { hidden, ffn, .. } = *shape;
        let gpt_oss = shape.window.is_some();
        let (base, more) = match format {
            ShapeFormat::Mxfp4 => (WeightFormat::MXFP4, WeightFormat::MXFP4),
            _ => (base, more),
        };
        let mut stack = |name, format, rows, cols| Linear {
            matrix: self.matrix(name, format, count, rows, cols),
            bias: gpt_oss.then(|| self.vector(count * rows, 0.0)),
            bounds: None,
        };
        let gate = stack("experts gate", base, ffn, hidden);
        let up = stack("experts up", base, ffn, hidden);
        let down = stack("experts down", more, hidden, ffn);
        Experts {
            norm: Some(self.norm(hidden)),
            router: Router {
                norm: None,
                linear: self.biased("router", WeightFormat::F32, count, hidden, gpt_oss),
                scores: Scores::Softmax,
                selection_bias: None,
                groups: None,
                used,
                renormalize: true,
                factor: 1.0,
                expert_scale: None,
            },
            count,
            width: ffn,
            latent: None,
            gate: Some(gate),
            up,
            activation: match gpt_oss {
                true => Activation::ClampedSwiglu { alpha: 1.702, limit: 7.0 },
                false => Activation::Silu,
            },
            down,
            shared: None,
            beside: None,
            post_norm: None,
        }
    }

    fn norm(&mut self, width: usize) -> Norm {
        Norm { kind: NormKind::Rms, weight: self.vector(width, 1.0), bias: None, eps: 1e-5 }
    }

    fn vector(&mut self, width: usize, value: f32) -> VectorId {
        self.weights.vectors.push(vec![value; width]);
        VectorId(self.weights.vectors.len() as u32 - 1)
    }

    fn biased(&mut self, name: &str, format: WeightFormat, rows: usize, cols: usize, bias: bool) -> Linear {
        let bias = bias.then(|| self.vector(rows, 0.0));
        Linear { bias, ..self.linear(name, format, rows, cols) }
    }

    fn linear(&mut self, name: &str, format: WeightFormat, rows: usize, cols: usize) -> Linear {
        Linear { matrix: self.matrix(name, format, 1, rows, cols), bias: None, bounds: None }
    }

    /// Adds a matrix or a stack of matrices, in Q8_0 if rows are not whole blocks of the format.
    fn matrix(
        &mut self,
        name: &str,
        format: WeightFormat,
        parts: usize,
        rows: usize,
        cols: usize,
    ) -> MatrixId {
        let format = if cols.is_multiple_of(format.block_len()) { format } else { WeightFormat::Q8_0 };
        let len = parts * rows * format.row_bytes(cols);
        let known = self.pools.get(&format).filter(|pool| pool.size() >= len as u64).cloned();
        let pool = known.unwrap_or_else(|| {
            let pool: Arc<dyn ByteSource> = Arc::new(pool(format, len));
            self.pools.insert(format, pool.clone());
            pool
        });
        let bytes = Bytes::new(pool, 0, len);
        self.weights.matrices.push(Matrix { name: name.to_owned(), format, parts, rows, cols, bytes });
        MatrixId(self.weights.matrices.len() as u32 - 1)
    }
}

/// Returns valid blocks of a format that repeat random bytes. The weights are small, so that activations stay finite.
fn pool(format: WeightFormat, bytes: usize) -> Vec<u8> {
    let block_bytes = format.block_bytes();
    let mut random = vec![0; RANDOM_BYTES / block_bytes * block_bytes];
    let mut state = 1_u64;
    let mut bits = || {
        // Knuth's MMIX generator; its upper bits are of good quality.
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as u32
    };
    for block in random.chunks_exact_mut(block_bytes) {
        block.iter_mut().for_each(|byte| *byte = bits() as u8);
        let mut small = |at: usize, size: f32| {
            let value = f16::from_f32(size * (bits() as f32 / (1 << 23) as f32 - 1.0));
            block[at..at + 2].copy_from_slice(&value.to_le_bytes());
        };
        match format {
            WeightFormat::F16 => small(0, 0.04),
            WeightFormat::Q8_0 => small(0, 3e-4),
            WeightFormat::Q6_K => small(208, 1e-5),
            WeightFormat::Q4_K => {
                small(0, 1e-4);
                small(2, 1e-4);
            }
            WeightFormat::Q4_0 => small(0, 5e-3),
            // A power of two.
            WeightFormat::MXFP4 => block[0] = 120,
            _ => {
                let value = 0.04 * (bits() as f32 / (1 << 23) as f32 - 1.0);
                block.copy_from_slice(&format.quantize(&[value]).expect("F32 and BF16 have encoders"));
            }
        }
    }
    let mut pool = random.repeat(bytes.div_ceil(random.len()));
    pool.truncate(bytes);
    pool
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_valid_programs() {
        for name in ShapeName::value_variants() {
            // A layer of each kind and a few experts are enough.
            let shape = Shape::of(*name);
            let experts = shape.experts.map(|_| (4, 2));
            let shape = Shape { layers: 2, vocab: 512, experts, ..shape };
            for format in ShapeFormat::value_variants() {
                let mut builder = Builder { pools: HashMap::new(), weights: Weights::default() };
                let program = builder.program(&shape, *format);
                program.check(&builder.weights).unwrap();
                for matrix in &builder.weights.matrices {
                    matrix.check_finite(&matrix.read().unwrap(), 0).unwrap();
                }
            }
        }
    }
}
