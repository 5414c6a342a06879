//! The scan of Mamba-2.
//!
//! | operation | launches | kernel file |
//! |-|-|-|
//! | norm | one | `norm.wgsl` |
//! | C, B and values; z; d | one for each layout | `matvec.wgsl`, `matmul.wgsl`, `coop.wgsl` |
//! | convolution, steps and decays | one | `ssd_inputs.wgsl` |
//! | scan | one | `delta.wgsl` |
//! | skip connection, gate, norm, and activations of the output | one | `ssd_norm.wgsl` |
//! | the state after the step's rows | one | `keep.wgsl` |
//! | matmul onto the residual stream | one | `matvec.wgsl`, `matmul.wgsl`, `coop.wgsl` |

use paguro_backend::{GatedNorm, LoadError, Ssd};

use crate::{
    layout::BLOCK,
    ops::{self, Op},
};

use super::{
    Before, Grid, Launch, Lowering, Place, Store,
    Value::{F, U},
    When,
    kernels::FEW_ROWS,
    recurrent::{Buffers, Heads, INPUT_THREADS, StateInputs},
    wgsl,
};

impl Lowering<'_> {
    /// A scan, from the norm to the residual stream.
    pub(super) fn ssd(
        &mut self,
        op: &ops::SsdAdd,
        before: Before,
        next: Option<&Op>,
        body: &mut Vec<Launch>,
    ) -> Result<Before, LoadError> {
        let ssd = &op.ssd;
        let own = self.mixers().clone();
        let linears = [&ssd.cbv, &ssd.gate, &ssd.dt];
        self.norm(ssd.norm, before, &linears, body)?;
        let groups = self.side_by_side(linears, &own.mixed);
        let [mixed, z, d] = self.matmuls(linears, &groups, Store::WRITE, When::Always, body)?;
        self.ssd_inputs(ssd, &own, &d, body)?;
        let heads = Heads { shape: &ssd.shape, alternating: false, scans: true, state: ssd.state };
        self.delta(&heads, &own, body)?;
        self.ssd_norm(ssd, &own, &z, body)?;
        self.keep_delta(&heads, &ssd.convolution, &own, &mixed, body)?;
        self.add(&ssd.out, false, &op.add, next, body)
    }

    /// C, B and values, and steps and decays.
    fn ssd_inputs(
        &mut self,
        op: &Ssd,
        own: &Buffers,
        d: &Place,
        body: &mut Vec<Launch>,
    ) -> Result<(), LoadError> {
        let channels = op.shape.channels();
        let (mut constants, vectors) = self.convolution(&op.convolution, channels)?;
        let units = channels.div_ceil(INPUT_THREADS);
        constants.extend([
            ("MIXED_STRIDE", U(d.stride as u32)),
            ("D_FIRST", U(d.first as u32)),
            ("HEADS", U(op.shape.value_heads as u32)),
            ("CHANNEL_UNITS", U(units as u32)),
            ("DT_SCALE", F(op.dt_scale)),
            ("LEAST", F(op.dt_limits.0)),
            ("MOST", F(op.dt_limits.1.min(f32::MAX))),
        ]);
        let files = wgsl!("args", "sequences", "convolution", "convolve", "ssd_inputs");
        let grid = Grid::Each(units as u32 + 1);
        let inputs = StateInputs { name: "ssd_inputs", files, constants, vectors, grid };
        self.state_inputs(inputs, op.state, [op.decay, op.dt_bias], own, body)
    }

    /// Skip connection, gate and norm of the results, as activations.
    fn ssd_norm(
        &mut self,
        op: &Ssd,
        own: &Buffers,
        z: &Place,
        body: &mut Vec<Launch>,
    ) -> Result<(), LoadError> {
        let width = op.shape.value_width();
        let norm = op.out_norm.norm();
        let group = norm.map_or(width, |norm| width / norm.groups);
        let mut constants = vec![
            ("WIDTH", U(width as u32)),
            ("VALUE_DIM", U(op.shape.value_dim as u32)),
            ("CHANNELS", U(op.shape.channels() as u32)),
            ("FIRST_VALUE", U(2 * op.shape.key_width() as u32)),
            ("GATE_SCALE", F(op.gate_scale)),
            ("Z_STRIDE", U(z.stride as u32)),
            ("Z_FIRST", U(z.first as u32)),
            ("NORM", U(u32::from(norm.is_some()))),
            ("NORM_FIRST", U(u32::from(matches!(op.out_norm, GatedNorm::BeforeGate(_))))),
            ("NORM_GROUP", U(group as u32)),
            ("FACTORS_HERE", U(256_usize.div_ceil(group) as u32 + 1)),
            ("EPS", F(norm.map_or(0.0, |norm| norm.eps))),
            ("STAGED", U(8 * 33)),
        ];
        constants.extend(self.emit_for(&[&op.out], width));
        constants.extend(self.halves(FEW_ROWS + 1));
        let skip = self.vector(op.skip)?;
        let weight = norm.map(|norm| self.vector(norm.weight)).transpose()?;
        let mut buffers =
            vec![("values", &own.values), ("z", &z.buffer), ("convolved", &own.convolved), ("skip", &skip)];
        buffers.extend(weight.iter().map(|weight| ("weight", weight)));
        let files = wgsl!("args", "quantize", "emit", "ssd_norm");
        let grid = Grid::Each(width.div_ceil(8 * BLOCK) as u32);
        body.push(self.launch("ssd_norm", files, constants, &buffers, grid, 0)?);
        Ok(())
    }
}
