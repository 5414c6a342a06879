//! Models without a file: shapes that people know, with random weights, for machines that only measure.

use std::{collections::HashMap, sync::Arc};

use clap::ValueEnum;
use paguro_backend::{
    Activation, Attend, ByteSource, Bytes, DownAdd, Embed, KvGroup, KvLayout, KvSlot, Linear, Matrix,
    MatrixId, Norm, NormGateUp, NormLogits, NormQkvRopeStore, Op, Program, ProjectAdd, Rope, RopeStyle,
    VectorId, WeightFormat, Weights,
    conformance::{Rng, random_matrix},
};
use paguro_model::Model;

use crate::cli::{ShapeFormat, ShapeName};

/// Elements that are really random; larger matrices repeat them.
const RANDOM_ROWS: usize = 4096;
const RANDOM_COLS: usize = 256;
/// Root mean square of the weights: activations stay finite with it, and nothing else matters here.
const RMS: f32 = 0.02;

struct Shape {
    name: &'static str,
    hidden: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    ffn: usize,
    vocab: usize,
}

impl Shape {
    fn of(name: ShapeName) -> Self {
        match name {
            ShapeName::Tinyllama => Self {
                name: "TinyLlama 1.1B",
                hidden: 2048,
                layers: 22,
                heads: 32,
                kv_heads: 4,
                head_dim: 64,
                ffn: 5632,
                vocab: 32_000,
            },
            ShapeName::Llama8b => Self {
                name: "Llama 8B",
                hidden: 4096,
                layers: 32,
                heads: 32,
                kv_heads: 8,
                head_dim: 128,
                ffn: 14_336,
                vocab: 128_256,
            },
        }
    }
}

/// A model of this shape; all but its program and weights is another model's.
pub fn model(name: ShapeName, format: ShapeFormat, like: Model, context: usize) -> Model {
    let shape = Shape::of(name);
    let mut builder = Builder { pools: HashMap::new(), weights: Weights::default() };
    let program = builder.program(&shape, format);
    let weights = builder.weights;
    let elements = |matrix: &Matrix| (matrix.rows * matrix.cols) as u64;
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
    /// Bytes of each format, as many as its largest matrix has.
    pools: HashMap<WeightFormat, Arc<dyn ByteSource>>,
    weights: Weights,
}

impl Builder {
    fn program(&mut self, shape: &Shape, format: ShapeFormat) -> Program {
        let Shape { hidden, layers, heads, kv_heads, head_dim, ffn, vocab, .. } = *shape;
        let (q, kv) = (heads * head_dim, kv_heads * head_dim);
        let (base, better) = match format {
            ShapeFormat::F16 => (WeightFormat::F16, WeightFormat::F16),
            ShapeFormat::Q8_0 => (WeightFormat::Q8_0, WeightFormat::Q8_0),
            ShapeFormat::Q4_0 => (WeightFormat::Q4_0, WeightFormat::Q6_K),
            ShapeFormat::Q4KM => (WeightFormat::Q4_K, WeightFormat::Q6_K),
        };
        let mut ops =
            vec![Op::Embed(Embed { table: self.matrix("embedding", base, vocab, hidden), scale: 1.0 })];
        for layer in 0..layers {
            // Q4_K_M keeps these better in half of the layers: the outer ones, and every third in between.
            let outer = layer < layers / 8 || layer >= 7 * layers / 8;
            let more = if outer || (layer - layers / 8) % 3 == 2 { better } else { base };
            let more = if format == ShapeFormat::Q4_0 { base } else { more };
            let kv_slot = KvSlot { group: 0, slot: layer };
            ops.push(Op::NormQkvRopeStore(NormQkvRopeStore {
                norm: self.norm(hidden),
                q: self.linear("q", base, q, hidden),
                k: self.linear("k", base, kv, hidden),
                v: self.linear("v", more, kv, hidden),
                q_norm: None,
                k_norm: None,
                rope: 0,
                kv: kv_slot,
            }));
            let scale = 1.0 / (head_dim as f32).sqrt();
            ops.push(Op::Attend(Attend { scale, soft_cap: None, kv: kv_slot }));
            let project = self.linear("project", base, hidden, q);
            ops.push(Op::ProjectAdd(ProjectAdd { project, post_norm: None }));
            ops.push(Op::NormGateUp(NormGateUp {
                norm: self.norm(hidden),
                gate: self.linear("gate", base, ffn, hidden),
                up: self.linear("up", base, ffn, hidden),
                activation: Activation::Silu,
            }));
            ops.push(Op::DownAdd(DownAdd { down: self.linear("down", more, hidden, ffn), post_norm: None }));
        }
        let head = self.linear("head", better, vocab, hidden);
        ops.push(Op::NormLogits(NormLogits { norm: self.norm(hidden), head, soft_cap: None }));
        let frequency = |pair: usize| 5e5_f32.powf(-2.0 * pair as f32 / head_dim as f32);
        let rope = Rope {
            style: RopeStyle::Interleaved,
            frequencies: (0..head_dim / 2).map(frequency).collect(),
            magnitude: 1.0,
        };
        let kv = KvLayout { groups: vec![KvGroup { window: None }], slots: layers, kv_heads, head_dim };
        Program { hidden, vocab, heads, ffn, kv, ropes: vec![rope], ops }
    }

    fn norm(&mut self, width: usize) -> Norm {
        self.weights.vectors.push(vec![1.0; width]);
        Norm { weight: VectorId(self.weights.vectors.len() as u32 - 1), eps: 1e-5 }
    }

    fn linear(&mut self, name: &str, format: WeightFormat, rows: usize, cols: usize) -> Linear {
        Linear { matrix: self.matrix(name, format, rows, cols), bias: None }
    }

    fn matrix(&mut self, name: &str, format: WeightFormat, rows: usize, cols: usize) -> MatrixId {
        let len = rows * format.row_bytes(cols);
        let known = self.pools.get(&format).filter(|pool| pool.size() >= len as u64).cloned();
        let pool = known.unwrap_or_else(|| {
            let pool: Arc<dyn ByteSource> = Arc::new(pool(format, len));
            self.pools.insert(format, pool.clone());
            pool
        });
        let bytes = Bytes::new(pool, 0, len);
        self.weights.matrices.push(Matrix { name: name.to_owned(), format, rows, cols, bytes });
        MatrixId(self.weights.matrices.len() as u32 - 1)
    }
}

/// Valid blocks of a format: as many bytes, each row of random ones after the other and again.
fn pool(format: WeightFormat, bytes: usize) -> Vec<u8> {
    let random = random_matrix("random", format, RANDOM_ROWS, RANDOM_COLS, RMS, &mut Rng::new(1));
    random.read().expect("in memory").iter().copied().cycle().take(bytes).collect()
}
