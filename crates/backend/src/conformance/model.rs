//! Small models with random weights, of every shape that a program can have.

use half::f16;

use super::Rng;
use crate::{
    Activation, Attend, Bytes, DownAdd, Embed, KvGroup, KvLayout, KvSlot, Linear, Matrix, MatrixId, Norm,
    NormGateUp, NormLogits, NormQkvRopeStore, Op, Program, ProjectAdd, Rope, RopeStyle, VectorId,
    WeightFormat, Weights,
};

/// What a random model looks like. The default is a small Llama; cases change what they are about.
#[derive(Clone, Debug)]
pub struct ModelShape {
    /// Encoding of all matrices.
    pub format: WeightFormat,
    /// Encoding of those that mixtures such as Q4_K_M make finer, values and down; `None` is as all others.
    pub finer: Option<WeightFormat>,
    /// See [`Program::hidden`].
    pub hidden: usize,
    /// See [`Program::vocab`].
    pub vocab: usize,
    /// See [`Program::heads`].
    pub heads: usize,
    /// See [`KvLayout::kv_heads`].
    pub kv_heads: usize,
    /// See [`KvLayout::head_dim`].
    pub head_dim: usize,
    /// See [`Program::ffn`].
    pub ffn: usize,
    /// The sliding window of each layer, and so the number of layers.
    pub windows: Vec<Option<u32>>,
    /// Layer slots in a page; layers of one window that do not fit in one group's pages form another group. `None`
    /// makes one group for each window.
    pub slots: Option<usize>,
    /// How RoPE pairs elements.
    pub rope_style: RopeStyle,
    /// How many elements of a head RoPE rotates; `None` is all of them.
    pub rotated: Option<usize>,
    /// See [`Rope::magnitude`].
    pub rope_magnitude: f32,
    /// Which products have a bias.
    pub biases: Biases,
    /// Norms of query and key heads.
    pub qk_norm: bool,
    /// Norms after attention and feed-forward.
    pub post_norms: bool,
    /// Soft cap of attention scores.
    pub attention_cap: Option<f32>,
    /// Soft cap of logits.
    pub logit_cap: Option<f32>,
    /// Whether the head is the embedding's table.
    pub tied: bool,
    /// See [`Embed::scale`].
    pub embed_scale: f32,
    /// The gate's activation.
    pub activation: Activation,
}

/// Which products of a random model have a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Biases {
    /// None.
    None,
    /// Those of q, k and v (Qwen 2).
    Qkv,
    /// Every product's.
    All,
}

impl Default for ModelShape {
    fn default() -> Self {
        Self {
            format: WeightFormat::F32,
            finer: None,
            hidden: 64,
            vocab: 131,
            heads: 4,
            kv_heads: 2,
            head_dim: 64,
            ffn: 96,
            windows: vec![None; 2],
            slots: None,
            rope_style: RopeStyle::HalfSplit,
            rotated: None,
            rope_magnitude: 1.0,
            biases: Biases::None,
            qk_norm: false,
            post_norms: false,
            attention_cap: None,
            logit_cap: None,
            tied: false,
            embed_scale: 1.0,
            activation: Activation::Silu,
        }
    }
}

impl ModelShape {
    /// A small Llama with matrices of this format and dimensions that its blocks divide.
    pub fn of_format(format: WeightFormat) -> Self {
        let small = Self { format, ..Self::default() };
        match format.block_len() {
            // Nothing needs to be a multiple of anything.
            1 => Self { hidden: 72, ffn: 109, ..small },
            32 => Self { hidden: 96, ffn: 160, ..small },
            _ => Self { hidden: 256, ffn: 512, ..small },
        }
    }

    /// A model of this shape; the same one for the same seed.
    pub fn build(&self, seed: u64) -> RandomModel {
        let mut builder = Builder { shape: self, rng: Rng::new(seed), weights: Weights::default() };
        let program = builder.program();
        RandomModel { program, weights: builder.weights }
    }
}

/// A model without a meaning.
#[derive(Clone, Debug)]
pub struct RandomModel {
    /// Its operations.
    pub program: Program,
    /// Its weights, scaled so that activations stay of order one.
    pub weights: Weights,
}

struct Builder<'a> {
    shape: &'a ModelShape,
    rng: Rng,
    weights: Weights,
}

impl Builder<'_> {
    fn program(&mut self) -> Program {
        let shape = self.shape;
        let ModelShape { hidden, vocab, heads, kv_heads, head_dim, ffn, .. } = *shape;
        let (kv, places) = arrange(shape);
        let all = shape.biases == Biases::All;
        let qkv = shape.biases != Biases::None;
        // Wide enough scores that attention chooses, and does not merely average.
        let sharp = 1.6;

        let table = self.matrix("embedding", vocab, hidden, 1.0);
        let mut ops = vec![Op::Embed(Embed { table, scale: shape.embed_scale })];
        for (layer, &kv) in places.iter().enumerate() {
            let name = |what: &str| format!("layer {layer} {what}");
            ops.push(Op::NormQkvRopeStore(NormQkvRopeStore {
                norm: self.norm(hidden),
                q: self.linear(&name("q"), heads * head_dim, hidden, sharp, qkv),
                k: self.linear(&name("k"), kv_heads * head_dim, hidden, sharp, qkv),
                v: self.linear(&name("v"), kv_heads * head_dim, hidden, 1.0, qkv),
                q_norm: shape.qk_norm.then(|| self.norm(head_dim)),
                k_norm: shape.qk_norm.then(|| self.norm(head_dim)),
                // Layers with a window turn by the second rope, as Gemma 3's do.
                rope: usize::from(shape.windows[layer].is_some()),
                kv,
            }));
            let scale = 1.0 / (head_dim as f32).sqrt();
            ops.push(Op::Attend(Attend { scale, soft_cap: shape.attention_cap, kv }));
            ops.push(Op::ProjectAdd(ProjectAdd {
                project: self.linear(&name("project"), hidden, heads * head_dim, 1.0, all),
                post_norm: shape.post_norms.then(|| self.norm(hidden)),
            }));
            ops.push(Op::NormGateUp(NormGateUp {
                norm: self.norm(hidden),
                gate: self.linear(&name("gate"), ffn, hidden, 1.5, all),
                up: self.linear(&name("up"), ffn, hidden, 1.5, all),
                activation: shape.activation,
            }));
            ops.push(Op::DownAdd(DownAdd {
                down: self.linear(&name("down"), hidden, ffn, 1.0, all),
                post_norm: shape.post_norms.then(|| self.norm(hidden)),
            }));
        }
        let norm = self.norm(hidden);
        let head = match shape.tied {
            true => Linear { matrix: table, bias: None },
            false => self.linear("head", vocab, hidden, 1.0, all),
        };
        ops.push(Op::NormLogits(NormLogits { norm, head, soft_cap: shape.logit_cap }));
        let ropes = [1e4, 1e3].map(|base| self.rope(base)).to_vec();
        Program { hidden, vocab, heads, ffn, kv, ropes, ops }
    }

    fn rope(&self, base: f32) -> Rope {
        let rotated = self.shape.rotated.unwrap_or(self.shape.head_dim);
        let frequency = |pair: usize| base.powf(-2.0 * pair as f32 / rotated as f32);
        Rope {
            style: self.shape.rope_style,
            frequencies: (0..rotated / 2).map(frequency).collect(),
            magnitude: self.shape.rope_magnitude,
        }
    }

    fn norm(&mut self, width: usize) -> Norm {
        let weight = (0..width).map(|_| 1.0 + 0.2 * self.rng.normal()).collect();
        // Large enough that a forgotten eps shows.
        Norm { weight: self.vector(weight), eps: 0.05 }
    }

    fn linear(&mut self, name: &str, rows: usize, cols: usize, gain: f32, bias: bool) -> Linear {
        let matrix = self.matrix(name, rows, cols, gain / (cols as f32).sqrt());
        let bias = bias.then(|| (0..rows).map(|_| 0.5 * self.rng.normal()).collect());
        Linear { matrix, bias: bias.map(|bias| self.vector(bias)) }
    }

    fn vector(&mut self, vector: Vec<f32>) -> VectorId {
        self.weights.vectors.push(vector);
        VectorId(self.weights.vectors.len() as u32 - 1)
    }

    fn matrix(&mut self, name: &str, rows: usize, cols: usize, rms: f32) -> MatrixId {
        let is_finer = name.ends_with(" v") || name.ends_with(" down");
        let format = self.shape.finer.filter(|_| is_finer).unwrap_or(self.shape.format);
        self.weights.matrices.push(random_matrix(name, format, rows, cols, rms, &mut self.rng));
        MatrixId(self.weights.matrices.len() as u32 - 1)
    }
}

/// Gives each layer its group and slot.
fn arrange(shape: &ModelShape) -> (KvLayout, Vec<KvSlot>) {
    let count = |window| shape.windows.iter().filter(|other| **other == window).count();
    let most = shape.windows.iter().map(|&window| count(window)).max().unwrap_or(0);
    let slots = shape.slots.unwrap_or(most);
    let mut groups: Vec<KvGroup> = Vec::new();
    let mut used: Vec<usize> = Vec::new();
    let mut places = Vec::new();
    for &window in &shape.windows {
        let open = (0..groups.len()).find(|&group| groups[group].window == window && used[group] < slots);
        let group = open.unwrap_or_else(|| {
            groups.push(KvGroup { window });
            used.push(0);
            groups.len() - 1
        });
        places.push(KvSlot { group, slot: used[group] });
        used[group] += 1;
    }
    (KvLayout { groups, slots, kv_heads: shape.kv_heads, head_dim: shape.head_dim }, places)
}

/// A matrix of random valid blocks: every quant, scale and high bit random, the f16 scales such that elements have
/// this root mean square. Scales of either sign occur.
pub fn random_matrix(
    name: &str,
    format: WeightFormat,
    rows: usize,
    cols: usize,
    rms: f32,
    rng: &mut Rng,
) -> Matrix {
    assert!(
        cols.is_multiple_of(format.block_len()),
        "{format} needs columns in blocks of {}",
        format.block_len()
    );
    let blocks = rows * cols / format.block_len();
    let bytes: Vec<u8> = (0..blocks).flat_map(|_| random_block(format, rms, rng)).collect();
    Matrix { name: name.to_owned(), format, rows, cols, bytes: Bytes::from(bytes) }
}

fn random_block(format: WeightFormat, rms: f32, rng: &mut Rng) -> Vec<u8> {
    use WeightFormat::*;
    // Where the f16 scale is, and the f16 minimum with the multiple of the scale that centres the block.
    let (scale, minimum) = match format {
        F32 | F16 | BF16 => {
            let value = rms * rng.normal();
            return format.quantize(&[value]).expect("plain formats have encoders");
        }
        MXFP4 => return random_mxfp4(rms, rng),
        Q4_0 | Q5_0 | Q8_0 | IQ4_NL | IQ4_XS => (0, None),
        Q4_1 => (0, Some((2, -7.5))),
        Q5_1 => (0, Some((2, -15.5))),
        Q2_K => (80, Some((82, 1.5))),
        Q3_K => (108, None),
        Q4_K => (0, Some((2, 7.5))),
        Q5_K => (0, Some((2, 15.5))),
        Q6_K => (208, None),
    };
    let mut block: Vec<u8> = (0..format.block_bytes()).map(|_| rng.bits() as u8).collect();
    let set_scale = |block: &mut [u8], d: f32| {
        block[scale..scale + 2].copy_from_slice(&f16::from_f32(d).to_le_bytes());
        if let Some((at, multiple)) = minimum {
            block[at..at + 2].copy_from_slice(&f16::from_f32(d * multiple).to_le_bytes());
        }
    };
    // Decoded with a scale of one, the block tells what its scale must be.
    set_scale(&mut block, 1.0);
    let mut decoded = vec![0.0; format.block_len()];
    format.dequantize(&block, &mut decoded);
    let raw = (decoded.iter().map(|x| x * x).sum::<f32>() / decoded.len() as f32).sqrt();
    let sign = if rng.bits() & 1 == 0 { 1.0 } else { -1.0 };
    set_scale(&mut block, sign * rms * (0.5 + rng.unit()) / raw.max(1e-3));
    block
}

/// MXFP4's scale is a power of two.
fn random_mxfp4(rms: f32, rng: &mut Rng) -> Vec<u8> {
    // The sixteen values have a root mean square of 2.9; half of the blocks are one power smaller.
    let exponent = (rms / 2.9).log2().round() as i32 - (rng.bits() & 1) as i32;
    let mut block = vec![(127 + exponent) as u8];
    block.extend((0..16).map(|_| rng.bits() as u8));
    block
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_weights_are_of_the_size_that_was_asked_for() {
        for format in WeightFormat::ALL {
            let matrix = random_matrix("m", format, 64, 512, 0.05, &mut Rng::new(1));
            let mut row = vec![0.0; 512];
            let mut sum = 0.0;
            let bytes = matrix.read().unwrap();
            for encoded in bytes.chunks_exact(format.row_bytes(512)) {
                format.dequantize(encoded, &mut row);
                sum += row.iter().map(|x| x * x).sum::<f32>();
            }
            let rms = (sum / (64.0 * 512.0)).sqrt();
            assert!((0.03..0.08).contains(&rms), "{format}: {rms}");
        }
    }

    #[test]
    fn layers_fill_groups_of_equal_windows() {
        let arranged = |windows: &[Option<u32>], slots| {
            let (kv, places) =
                arrange(&ModelShape { windows: windows.to_vec(), slots, ..ModelShape::default() });
            let groups: Vec<_> = kv.groups.iter().map(|group| group.window.unwrap_or(0)).collect();
            let places: Vec<_> = places.iter().map(|place| (place.group, place.slot)).collect();
            format!("{groups:?} {} {places:?}", kv.slots)
        };
        assert_eq!(arranged(&[None, None], None), "[0] 2 [(0, 0), (0, 1)]");
        assert_eq!(arranged(&[Some(5), None, Some(5)], None), "[5, 0] 2 [(0, 0), (1, 0), (0, 1)]");
        assert_eq!(arranged(&[Some(5), None, Some(5)], Some(1)), "[5, 0, 5] 1 [(0, 0), (1, 0), (2, 0)]");
    }
}
