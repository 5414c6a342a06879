//! Memory of a model with one sequence.

use std::collections::BTreeMap;

use paguro_backend::{KvDtype, KvLayout, MemoryPlan};
use paguro_engine::{Engine, EngineOptions, EnginePlan, PageBudget};
use paguro_model::Model;

use crate::{
    cli::RunOnArgs,
    devices::Devices,
    failure::{Failure, Outcome},
};

/// Memory of a model with one sequence.
#[derive(Debug)]
pub struct Memory {
    pub context: usize,
    /// Name of the device.
    pub device: String,
    pub weights: u64,
    /// Buffers between operations.
    pub buffers: u64,
    /// Conversions of formats that the device does not support: from, to, and the number of matrices.
    pub converted: BTreeMap<(String, String), usize>,
    pub pages: u64,
    pub page_bytes: u64,
    /// State of a sequence besides its pages.
    pub states: u64,
    /// Copy of a state in the prefix cache, and the tokens between two copies.
    pub checkpoint: u64,
    pub checkpoint_interval: usize,
    pub block_size: usize,
    pub kv_dtype: KvDtype,
}

impl Memory {
    /// Computes the memory on a device, without loading the model.
    ///
    /// # Errors
    /// The device cannot be opened, or refuses the model.
    pub fn new(
        model: &Model,
        context: usize,
        kv_dtype: KvDtype,
        (devices, on): (&Devices, &RunOnArgs),
    ) -> Outcome<Self> {
        let options = EngineOptions { max_sequences: 1, kv_dtype, ..EngineOptions::default() };
        let opened = devices.open(on, None, &|_| ())?;
        let backend = &*opened.main().backend;
        let mut converted = BTreeMap::new();
        for matrix in &model.weights.matrices {
            if let Some(format) = backend.device_layout(matrix).converted_to {
                *converted.entry((matrix.format.to_string(), format.to_string())).or_default() += 1;
            }
        }
        let pages = pages(&model.program.kv, context, options.block_size, options.max_batch_tokens);
        let block_size = options.block_size;
        let options = EngineOptions { pages: PageBudget::Pages(pages as usize), ..options };
        let plan = Engine::plan(
            backend,
            &model.program,
            &model.weights,
            model.vision.as_deref(),
            model.max_context,
            &options,
        );
        let plan = plan.map_err(|error| Failure::from_error(&error))?;
        let EnginePlan { page_bytes, checkpoint_bytes: checkpoint, checkpoint_interval, .. } = plan;
        let MemoryPlan { weights, states, buffers, .. } = plan.memory;
        let device = backend.name().to_owned();
        Ok(Self {
            context,
            device,
            weights,
            buffers,
            converted,
            pages,
            page_bytes,
            states,
            checkpoint,
            checkpoint_interval,
            block_size,
            kv_dtype,
        })
    }

    /// Returns the bytes of K and V.
    pub fn kv(&self) -> u64 {
        self.pages.saturating_mul(self.page_bytes)
    }

    /// Returns the sum of all.
    pub fn total(&self) -> u64 {
        self.weights.saturating_add(self.kv()).saturating_add(self.states).saturating_add(self.buffers)
    }
}

/// Returns the maximum number of pages of a sequence with `context` tokens. A layer with a window holds the tokens that
/// the rows of one step attend to, which may begin and end inside of a page.
fn pages(kv: &KvLayout, context: usize, block_size: usize, step: usize) -> u64 {
    let group = |window: Option<u32>| {
        let all = context.div_ceil(block_size);
        window.map_or(all, |window| all.min((window as usize + step).div_ceil(block_size) + 1)) as u64
    };
    kv.groups.iter().map(|g| group(g.window)).sum()
}

#[cfg(test)]
mod tests {
    use paguro_backend::KvGroup;

    use super::*;

    #[test]
    fn windows_bound_the_pages() {
        let group = |window| KvGroup { window, spans: false, layer_slots: 1, kv_heads: 1, head_dim: 1 };
        let mut kv = KvLayout { groups: vec![group(None)] };
        assert_eq!(pages(&kv, 100, 32, 512), 4);
        kv.groups.push(group(Some(64)));
        assert_eq!(pages(&kv, 100, 32, 512), 8);
        // 64 + 512 tokens and a page that both ends share.
        assert_eq!(pages(&kv, 32_000, 32, 512), 1000 + 19);
    }
}
