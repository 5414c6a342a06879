//! Keys of the metadata, except those of RoPE.

use paguro_backend::{NormKind, Scores};

use super::{Export, Original};
use crate::{
    arch::{Config, Recurrent, SsdConfig, config::Distances},
    error::ModelError,
    gguf::{Array, Value},
};

impl Export<'_> {
    /// Writes all keys of the architecture.
    pub(super) fn keys(&mut self, short: &Config, original: &Original) -> Result<(), ModelError> {
        let config = self.config;
        let architecture = config.definition.gguf;
        self.metadata.set("general.architecture", Value::String(architecture.to_owned()));
        self.size("context_length", config.context_length);
        self.size("embedding_length", config.hidden);
        self.size("block_count", config.layers.len() + self.heads);
        if self.heads > 0 {
            self.size("nextn_predict_layers", self.heads);
        }
        self.size("vocab_size", self.program.vocab);
        self.dimensions();
        self.mixers();
        let eps = match config.block.norms {
            NormKind::Rms => "attention.layer_norm_rms_epsilon",
            NormKind::Layer => "attention.layer_norm_epsilon",
        };
        self.number(eps, config.norm_eps.into());
        self.windows();
        self.experts();
        self.rope(short, original)?;
        let known = |key: &str| config.definition.gguf_keys.contains(&key);
        let scales = [
            ("embedding_scale", config.embed_scale),
            ("residual_scale", config.branch_scale),
            ("attention.scale", config.attention_scale),
            ("logit_scale", config.logit_scale),
        ];
        for (key, scale) in scales.into_iter().filter(|scale| known(scale.0)) {
            self.number(key, scale.into());
        }
        let caps = [
            ("attn_logit_softcapping", config.attention_soft_cap),
            ("final_logit_softcapping", config.logit_soft_cap),
        ];
        for (key, cap) in caps {
            if let Some(cap) = cap {
                self.number(key, cap.into());
            }
        }
        if config.block.bidirectional {
            self.set("attention.causal", Value::Bool(false));
        }
        if known("n_deepstack_layers") && original.deepstack > 0 {
            self.size("n_deepstack_layers", original.deepstack);
        }
        for (key, value) in (config.definition.further_gguf_keys)(config) {
            self.set(key, value);
        }
        if let Some(types) = self.program.embed().and_then(|embed| embed.types) {
            self.metadata.set("tokenizer.ggml.token_type_count", Value::U32(types.count as u32));
        }
        if config.block.distances == Distances::Alibi {
            self.number("attention.max_alibi_bias", 8.0);
        }
        if let Some(scale) = config.position_scale {
            self.number("attention.temperature_scale", scale.beta.into());
            self.size("rope.scaling.original_context_length", scale.original as usize);
            if config.latent.is_some() {
                self.size("attention.temperature_length", scale.original as usize);
            }
        }
        Ok(())
    }

    /// Writes heads of attention, and widths of feed-forward networks. Layers without them have zeros where the architecture needs that.
    fn dimensions(&mut self) {
        let config = self.config;
        let layers = 0..config.layers.len();
        if !config.block.attention {
            self.size("attention.head_count", 0);
            return self.size("feed_forward_length", 0);
        }
        self.size("attention.head_count", config.heads);
        let is_conv = matches!(config.recurrent, Some(Recurrent::Conv { .. }));
        let kv_heads = |layer: usize| match config.attends(layer) || !(config.block.zeros || is_conv) {
            true => config.kv_heads_of(layer),
            false => 0,
        };
        let ffn = |layer: usize| match config.experts {
            _ if !config.layers[layer].network => 0,
            Some(experts) if config.block.zeros && config.layers[layer].experts => experts.width,
            _ => config.ffn_of(layer),
        };
        self.by_layer("attention.head_count_kv", &layers.clone().map(kv_heads).collect::<Vec<_>>());
        self.by_layer("feed_forward_length", &layers.map(ffn).collect::<Vec<_>>());
        let dim = |has_window: bool| {
            let layer = config.layers.iter().position(|layer| layer.window.is_some() == has_window);
            layer.map_or(config.head_dim, |layer| config.head_dim_of(layer))
        };
        let (key, value) = match config.latent {
            Some((shape, _)) => (shape.key_dim(), shape.latent),
            None if config.block.own_ropes => (dim(false), dim(false)),
            None => (config.head_dim, config.head_dim),
        };
        self.size("attention.key_length", key);
        self.size("attention.value_length", value);
        if config.block.own_ropes {
            self.size("attention.key_length_swa", dim(true));
            self.size("attention.value_length_swa", dim(true));
        }
    }

    /// Writes the keys of latent attention, of mixers with a state, and of Gemma 4's layers.
    fn mixers(&mut self) {
        let config = self.config;
        if let Some((shape, rank)) = config.latent {
            self.size("attention.key_length_mla", shape.plain + shape.rotated);
            self.size("attention.value_length_mla", shape.value);
            self.size("attention.kv_lora_rank", shape.latent);
            if let Some(rank) = rank {
                self.size("attention.q_lora_rank", rank);
            }
        }
        if config.block.own_ropes {
            let shared = config.layers.iter().filter(|layer| layer.geometry.shares_kv).count();
            self.size("attention.shared_kv_layers", shared);
            self.size("embedding_length_per_layer_input", config.layer_embed);
        }
        let (taps, shape) = match config.recurrent {
            None => return,
            Some(Recurrent::Conv { taps }) => return self.size("shortconv.l_cache", taps),
            Some(Recurrent::Delta { taps, shape, .. } | Recurrent::Ssd(SsdConfig { taps, shape, .. })) => {
                (taps, shape)
            }
        };
        self.size("ssm.conv_kernel", taps);
        self.size("ssm.state_size", shape.key_dim);
        self.size("ssm.group_count", shape.key_heads);
        self.size("ssm.time_step_rank", shape.value_heads);
        self.size("ssm.inner_size", shape.value_width());
        if matches!(config.recurrent, Some(Recurrent::Delta { .. })) {
            let recurrent = config.layers.iter().map(|layer| layer.recurrent);
            let recurrent = recurrent.chain(std::iter::repeat_n(false, self.heads)).collect();
            self.set("attention.recurrent_layers", Value::Array(Array::Bool(recurrent)));
        }
    }

    fn windows(&mut self) {
        let windows = self.config.layers.iter().map(|layer| layer.window);
        let Some(window) = windows.clone().flatten().next() else { return };
        // In files, windows of encoders count in both directions together, as `Config::set_spans` reads them.
        let window = if self.config.block.bidirectional { 2 * (window - 1) } else { window };
        self.size("attention.sliding_window", window as usize);
        let local: Vec<bool> = windows.map(|window| window.is_some()).collect();
        if self.config.block.own_ropes || !local.iter().all(|&local| local) {
            self.set("attention.sliding_window_pattern", Value::Array(Array::Bool(local)));
        }
    }

    fn experts(&mut self) {
        let Some(experts) = self.config.experts else { return };
        self.size("expert_count", experts.count);
        self.size("expert_used_count", experts.used);
        self.size("expert_feed_forward_length", experts.width);
        if experts.latent > 0 {
            self.size("moe_latent_size", experts.latent);
        }
        if self.config.latent.is_some() && experts.shared == 0 {
            self.size("expert_shared_count", 0);
        }
        if experts.shared > 0 {
            self.size("expert_shared_feed_forward_length", experts.shared);
            self.size("expert_shared_count", experts.shared.div_ceil(experts.width));
        }
        if experts.dense_layers > 0 {
            self.size("leading_dense_block_count", experts.dense_layers);
        }
        if let Some(groups) = experts.groups {
            self.size("expert_group_count", groups.count);
            self.size("expert_group_used_count", groups.used);
        }
        self.number("expert_weights_scale", experts.factor.into());
        self.set("expert_weights_norm", Value::Bool(experts.renormalize));
        let function = match experts.scores {
            Scores::Softmax => 1,
            Scores::Sigmoid => 2,
        };
        self.size("expert_gating_func", function);
    }
}
