//! Buffers of mixers with a state.

use paguro_backend::{LoadError, Mixer, Program, STATE_CHUNK};

use crate::buffers::Shared;

/// Intermediate results of mixers with a state, from one phase to the next.
pub struct RecurrentBuffers {
    /// Inputs of convolutions, `[rows, channels]`, or b, c and u of a short one, `[rows, 3 * width]`.
    pub mixed: Shared<f32>,
    /// Queries, keys and values, `[rows, channels]`.
    pub convolved: Shared<f32>,
    /// Gates, `[rows, value_heads * value_dim]`.
    pub z: Shared<f32>,
    /// a, and then decays, `[rows, value_heads]`.
    pub decay: Shared<f32>,
    /// b, and then strengths, or steps of a scan, `[rows, value_heads]`.
    pub beta: Shared<f32>,
    /// Products of a scan's C with B of the rows of the chunk, `[rows, key_heads, STATE_CHUNK]`.
    pub dots: Shared<f32>,
    /// Results of the delta rule or the scan, `[rows, value_heads * value_dim]`.
    pub out: Shared<f32>,
}

impl RecurrentBuffers {
    /// Returns the decay of a row and value head.
    pub fn decay_of(&self, row: usize, head: usize, heads: usize) -> f32 {
        // SAFETY: decays are written in the phase that convolves, and then only read.
        let decay = unsafe { self.decay.get(row * heads + head..row * heads + head + 1) };
        decay[0]
    }
}

/// Widths of the largest mixers with a state.
#[derive(Clone, Copy, Default)]
pub struct RecurrentSizes {
    mixed: usize,
    channels: usize,
    values: usize,
    heads: usize,
    /// Key heads of scans.
    groups: usize,
    key_dim: usize,
    value_dim: usize,
    /// Widest row of a short convolution.
    conv: usize,
}

impl RecurrentSizes {
    /// Returns the sizes of a program.
    pub fn of(program: &Program) -> Self {
        let mut sizes = Self::default();
        for mixer in program.mixers() {
            let shape = match mixer {
                Mixer::Conv(op) => {
                    sizes.mixed = sizes.mixed.max(3 * op.width);
                    sizes.conv = sizes.conv.max(op.width);
                    continue;
                }
                Mixer::DeltaRule(op) => &op.shape,
                Mixer::Ssd(op) => {
                    sizes.groups = sizes.groups.max(op.shape.key_heads);
                    &op.shape
                }
                Mixer::None | Mixer::Attention(_) | Mixer::Latent(_) | Mixer::Sum(_) => continue,
            };
            sizes.mixed = sizes.mixed.max(shape.channels());
            sizes.channels = sizes.channels.max(shape.channels());
            sizes.values = sizes.values.max(shape.value_width());
            sizes.heads = sizes.heads.max(shape.value_heads);
            sizes.key_dim = sizes.key_dim.max(shape.key_dim);
            sizes.value_dim = sizes.value_dim.max(shape.value_dim);
        }
        sizes
    }

    /// Widest row that is an input of a matmul.
    pub fn widest(&self) -> usize {
        self.conv.max(self.values)
    }

    /// Returns the number of elements of a short convolution.
    pub fn conv(&self) -> usize {
        self.conv
    }

    /// Returns the largest heads of keys and values.
    pub fn head(&self) -> (usize, usize) {
        (self.key_dim, self.value_dim)
    }

    /// Floats of the buffers for each row.
    pub fn floats(&self) -> usize {
        self.mixed + self.channels + 2 * self.values + 2 * self.heads + self.groups * STATE_CHUNK
    }

    /// Allocates the buffers for `rows` rows.
    ///
    /// # Errors
    /// [`LoadError::OutOfMemory`]
    pub fn allocate(&self, rows: usize) -> Result<RecurrentBuffers, LoadError> {
        let floats = |width: usize, what: &str| Shared::new(rows * width, what);
        Ok(RecurrentBuffers {
            mixed: floats(self.mixed, "inputs of convolutions")?,
            convolved: floats(self.channels, "convolutions")?,
            z: floats(self.values, "gates of delta rules")?,
            decay: floats(self.heads, "decays of delta rules")?,
            beta: floats(self.heads, "strengths of delta rules")?,
            dots: floats(self.groups * STATE_CHUNK, "products of scans")?,
            out: floats(self.values, "results of delta rules")?,
        })
    }
}
