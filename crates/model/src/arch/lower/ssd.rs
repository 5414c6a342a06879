//! The scan of Mamba-2. Files have one matrix for z, x, B, C and d, in this order; a program has C, B and x in the order of a delta
//! rule's queries, keys and values, and z and d by themselves.

use paguro_backend::{
    Attention, Branch, Convolution, DeltaShape, GatedNorm, GroupNorm, KvSlot, Mixer, Norm, Ssd,
};

use super::{Lowering, Part, recurrent::Rows};
use crate::{
    arch::{SsdConfig, SsdNorm},
    error::ModelError,
};

impl Lowering<'_, '_> {
    /// Returns a scan that reads the stream through `norm`.
    pub(super) fn ssd(
        &mut self,
        layer: usize,
        config: &SsdConfig,
        norm: Option<Norm>,
        state: usize,
    ) -> Result<Ssd, ModelError> {
        let SsdConfig { taps, shape, limits, gate_scale, dt_scale, .. } = *config;
        let (heads, width, keys) = (shape.value_heads, shape.value_width(), shape.key_width());
        let rows = |first: usize, len: usize| Rows { first, len, step: 0, count: 1 };
        let (z, x, b, c) =
            (rows(0, width), rows(width, width), rows(2 * width, keys), rows(2 * width + keys, keys));
        let dt = rows(2 * (width + keys), heads);
        let input = self.names.layer(layer, Part::SsmIn);
        let [cbv, gate, dt] =
            self.pick_rows(&input, 2 * (width + keys) + heads, [&[c, b, x], &[z], &[dt]])?;
        let convolution = self.ssd_convolution(layer, taps, &shape, config.channel_scales)?;
        let decay = self.decays(layer, heads)?;
        let [dt_bias, skip] = [Part::DeltaDt, Part::SsmSkip].map(|part| self.names.layer(layer, part));
        let (dt_bias, skip) = (self.flat(&dt_bias, heads)?, self.flat(&skip, heads)?);
        let out_norm = match config.norm {
            SsdNorm::None => GatedNorm::GateOnly,
            SsdNorm::AfterGate => GatedNorm::AfterGate(self.group_norm(layer, &shape)?),
            SsdNorm::BeforeGate => GatedNorm::BeforeGate(self.group_norm(layer, &shape)?),
        };
        Ok(Ssd {
            norm,
            shape,
            cbv,
            gate,
            gate_scale,
            dt,
            dt_scale,
            dt_bias: self.tensors.add_vector(dt_bias),
            dt_limits: limits,
            convolution,
            decay: self.tensors.add_vector(decay),
            skip: self.tensors.add_vector(skip),
            out_norm,
            out: self.linear(layer, Part::DeltaOut, self.config.hidden, width)?,
            post_norm: None,
            state,
        })
    }

    /// Attention and a scan side by side, which read one norm.
    pub(super) fn attention_beside_scan(
        &mut self,
        layer: usize,
        config: &SsdConfig,
        place: KvSlot,
        state: usize,
    ) -> Result<Mixer, ModelError> {
        let multipliers = self.config.multipliers;
        let attention = self.attention(layer, place)?;
        let norm = attention.norm.map(|norm| self.scaled(norm, multipliers.scan_in));
        let ssd = self.ssd(layer, config, norm, state)?;
        let norm = attention.norm.map(|norm| self.scaled(norm, multipliers.attention_in));
        let attention = Mixer::Attention(Attention { norm, ..attention });
        Ok(Mixer::Sum(vec![
            Branch { mixer: attention, scale: multipliers.attention_out },
            Branch { mixer: Mixer::Ssd(Box::new(ssd)), scale: multipliers.scan_out },
        ]))
    }

    /// Returns a norm whose output is multiplied by `scale`.
    pub(super) fn scaled(&mut self, norm: Norm, scale: f32) -> Norm {
        if scale == 1.0 {
            return norm;
        }
        let mut times = |id| {
            let vector: Vec<f32> = self.tensors.weights.vector(id).iter().map(|x| x * scale).collect();
            self.tensors.add_vector(vector)
        };
        Norm { weight: times(norm.weight), bias: norm.bias.map(times), ..norm }
    }

    fn group_norm(&mut self, layer: usize, shape: &DeltaShape) -> Result<GroupNorm, ModelError> {
        let name = format!("{}.weight", self.names.layer(layer, Part::DeltaNorm));
        let weight = self.flat(&name, shape.value_width())?;
        Ok(GroupNorm {
            groups: shape.key_heads,
            weight: self.tensors.add_vector(weight),
            eps: self.config.norm_eps,
        })
    }

    /// Returns a convolution over x, B and C in files, and over C, B and x in the program. Scales are those of C, B and
    /// x.
    fn ssd_convolution(
        &mut self,
        layer: usize,
        taps: usize,
        shape: &DeltaShape,
        scales: [f32; 3],
    ) -> Result<Convolution, ModelError> {
        let (width, keys, channels) = (shape.value_width(), shape.key_width(), shape.channels());
        let name = self.names.layer(layer, Part::Conv);
        let by_channel = self.flat(&format!("{name}.weight"), taps * channels)?;
        let bias = self.tensors.vector(&format!("{name}.bias"), channels)?;
        let parts = [width + keys..channels, width..width + keys, 0..width];
        let order: Vec<(usize, f32)> =
            parts.into_iter().zip(scales).flat_map(|(part, scale)| part.map(move |c| (c, scale))).collect();
        let weight = (0..taps)
            .flat_map(|tap| order.iter().map(move |&(channel, scale)| (channel * taps + tap, scale)))
            .map(|(index, scale)| scale * by_channel[index])
            .collect();
        let bias: Option<Vec<f32>> =
            bias.map(|bias| order.iter().map(|&(channel, _)| bias[channel]).collect());
        Ok(Convolution {
            taps,
            weight: self.tensors.add_vector(weight),
            bias: bias.map(|bias| self.tensors.add_vector(bias)),
        })
    }

    /// Reads the decays of a layer's heads. Those of Hugging Face folders are logarithms of their magnitudes.
    ///
    /// # Errors
    /// A state that grows, because it overflows sooner or later.
    pub(super) fn decays(&mut self, layer: usize, heads: usize) -> Result<Vec<f32>, ModelError> {
        let name = self.names.layer(layer, Part::DeltaDecay);
        let mut decays = self.flat(&name, heads)?;
        if self.names.is_hf() {
            decays.iter_mut().for_each(|decay| *decay = -decay.exp());
        }
        match decays.iter().position(|decay| !(decay.is_finite() && *decay <= 0.0)) {
            None => Ok(decays),
            Some(head) => Err(ModelError::Config(format!(
                "tensor `{name}`: the decay of head {head} is {}, and states decay with numbers of at most 0",
                decays[head]
            ))),
        }
    }

    /// Returns the `len` numbers `name` in any shape: files differ in the position of dimensions of size one.
    pub(super) fn flat(&mut self, name: &str, len: usize) -> Result<Vec<f32>, ModelError> {
        match self.tensors.shape(name) {
            Some(shape) if shape.iter().try_fold(1_usize, |all, &dim| all.checked_mul(dim)) == Some(len) => {
                self.tensors.values(name, shape)
            }
            _ => self.tensors.require_vector(name, len),
        }
    }
}
