//! Programs of random models.

use paguro_backend::{
    Attention, Beside, DeltaRule, Dense, DistanceBias, Embed, Exit, ExpertLatent, Experts, FeedForward, Head,
    Input, Joined, KvGroup, KvSlot, Latent, LatentQuery, LatentShape, Layer, LayerEmbeds, LayerInput, Linear,
    Mixer, Positions, Program, Projection, QkNorm, QkNormKind, Router, SharedExpert, ShortConv, TableId,
    TokenTypes, Weights,
};

use super::{Biases, ExpertsShape, ModelShape, RecurrentShape, arrange::arrange};
use crate::Rng;

/// A program and its weights while they are created.
pub(crate) struct Builder<'a> {
    pub shape: &'a ModelShape,
    pub rng: Rng,
    pub weights: Weights,
}

impl Builder<'_> {
    pub fn program(&mut self) -> Program {
        let shape = self.shape;
        let ModelShape { hidden, vocab, .. } = *shape;
        let (kv, places) = arrange(shape);
        let (shares_pages, width) =
            (shape.pages_of.is_some(), shape.pages_of.as_ref().map_or(hidden, |other| other.hidden));
        let table = self.matrix("embedding", 1, vocab, width, 1.0);
        let positions = shape
            .positions
            .map(|count| Positions { table: self.matrix("positions", 1, count, width, 0.7), count });
        let types = shape.types.map(|count| {
            let table = (0..count * hidden).map(|_| 0.7 * self.rng.normal()).collect();
            TokenTypes { table: self.vector(table), count }
        });
        let embed_norm = shape.embed_norm.then(|| self.norm(hidden));
        let layer_embeds = shape.layer_embeds.map(|width| self.layer_embeds(width));
        let joined = shape.joined.then(|| Joined {
            width,
            token_norm: (!shares_pages).then(|| self.norm(width)),
            given_norm: (!shares_pages).then(|| self.norm(width)),
            linear: self.linear("join", hidden, 2 * width, 1.0, shape.biases == Biases::All),
        });
        let mut states = 0..;
        let layers = places.iter().enumerate().map(|(layer, &place)| {
            let mixer = match shape.mixer(layer) {
                'c' => Mixer::Conv(self.conv(layer, states.next().unwrap_or(0))),
                'd' => Mixer::DeltaRule(self.delta(layer, states.next().unwrap_or(0))),
                'l' => Mixer::Latent(Box::new(self.latent(layer, place))),
                's' => Mixer::Ssd(Box::new(self.ssd(layer, states.next().unwrap_or(0)))),
                'h' => {
                    let attention = self.attention(layer, &kv.groups[place.group], place);
                    self.sum(attention, layer, states.next().unwrap_or(0))
                }
                '-' => Mixer::None,
                _ => Mixer::Attention(self.attention(layer, &kv.groups[place.group], place)),
            };
            let ffn = match shape.experts.filter(|_| layer > 0) {
                _ if shape.networks.chars().nth(layer) == Some('-') => FeedForward::None,
                Some(experts) => FeedForward::Experts(self.experts(layer, &experts)),
                None => FeedForward::Dense(self.dense(layer, shape.ffn)),
            };
            let input = shape.layer_embeds.map(|width| self.layer_input(layer, width));
            let (residual, branch_scale, output_scale) =
                (shape.residual, shape.branch_scale, shape.output_scale);
            let [norm_after_mixer, norm_after_ffn] =
                [(); 2].map(|()| shape.norms_after.then(|| self.norm(hidden)));
            Layer {
                mixer,
                ffn,
                residual,
                norm_after_mixer,
                norm_after_ffn,
                branch_scale,
                input,
                output_scale,
            }
        });
        let layers = layers.collect();
        let norm = self.norm(hidden);
        let linear = match shape.tied {
            true => Linear { matrix: table, bias: None, bounds: None },
            false => self.linear("head", vocab, hidden, 1.0, shape.biases == Biases::All),
        };
        let projection = shares_pages.then(|| Projection {
            width,
            linear: self.linear("projection", width, hidden, 1.0, shape.biases == Biases::All),
        });
        let local = shape.window_heads.map_or(shape.head_dim, |heads| heads.1);
        let mut ropes = vec![(1e4, shape.head_dim), (1e3, local)];
        if shape.mixers.contains('l') {
            ropes.push((1e3, shape.latent.rotated));
        }
        Program {
            hidden,
            vocab,
            bidirectional: shape.bidirectional,
            shares_pages,
            ropes: ropes.into_iter().map(|(base, head_dim)| self.rope(base, head_dim)).collect(),
            kv,
            state: shape.states(),
            input: Input::Tokens(Embed {
                table,
                scale: shape.embed_scale,
                positions,
                types,
                norm: embed_norm,
                layers: layer_embeds,
                joined,
            }),
            given_parts: shape.given_parts,
            layers,
            exit: Exit::Logits(Head {
                norm,
                linear,
                scale: shape.logit_scale,
                soft_cap: shape.logit_cap,
                projection,
            }),
        }
    }

    fn attention(&mut self, layer: usize, group: &KvGroup, place: KvSlot) -> Attention {
        let shape = self.shape;
        let (heads, hidden, head_dim) = (shape.heads, shape.hidden, group.head_dim);
        let name = |what: &str| format!("layer {layer} {what}");
        let qkv = shape.biases != Biases::None;
        // Wide enough scores that attention chooses, and does not merely average.
        let sharp = 1.6;
        let norm = self.pre_norm();
        let q = self.linear(&name("q"), heads * head_dim, hidden, sharp, qkv);
        let is_own = !shape.shares_kv(layer);
        let has_v = is_own && !(shape.keys_as_values && shape.windows[layer].is_none());
        let k = is_own.then(|| self.linear(&name("k"), group.width(), hidden, sharp, qkv));
        let v = has_v.then(|| self.linear(&name("v"), group.width(), hidden, 1.0, qkv));
        if let (Biases::LargeKeys, Some(bias)) = (shape.biases, k.and_then(|k| k.bias)) {
            let heads = self.weights.vectors[bias.0 as usize].chunks_exact_mut(head_dim);
            heads.for_each(|head| head[head_dim - 1] = 40.0);
        }
        let v_norm = (is_own && shape.v_norm).then(|| self.rms_norm(head_dim));
        let qk_norm = shape.qk_norm.map(|kind| {
            let widths = match kind {
                QkNormKind::Row => [heads * head_dim, group.width()],
                QkNormKind::Head | QkNormKind::HeadAfterRope => [head_dim; 2],
            };
            let [q, k] = widths.map(|width| self.rms_norm(width));
            QkNorm { q, k, kind }
        });
        let gate = shape
            .attention_gate
            .then(|| self.linear(&name("gate of attention"), heads * head_dim, hidden, 1.5, qkv));
        let distance_bias = shape.distance_bias.map(|reach| {
            let table = (0..heads * (2 * reach + 1)).map(|_| self.rng.normal()).collect();
            DistanceBias { table: self.vector(table), reach }
        });
        let sinks = shape.sinks.then(|| (0..heads).map(|_| 2.0 + self.rng.normal()).collect());
        Attention {
            norm,
            heads,
            q,
            k,
            v,
            qk_norm,
            v_norm,
            // Layers with a window use the second RoPE, as in Gemma 3.
            rope: (!shape.skips_ropes || layer.is_multiple_of(2))
                .then_some(usize::from(shape.windows[layer].is_some())),
            position_scale: shape.position_scale,
            scale: 1.0 / (head_dim as f32).sqrt(),
            soft_cap: shape.attention_cap,
            distance_bias,
            sinks: sinks.map(|sinks| self.vector(sinks)),
            kv: place,
            gate,
            out: self.onto_stream(&name("project"), 1, heads * head_dim),
            post_norm: shape.post_norms.then(|| self.norm(hidden)),
        }
    }

    fn latent(&mut self, layer: usize, kv: KvSlot) -> Latent {
        let shape = self.shape;
        let (hidden, sizes, all) = (shape.hidden, shape.latent, shape.biases == Biases::All);
        let LatentShape { heads, plain, latent, value, .. } = sizes;
        let name = |what: &str| format!("layer {layer} {what}");
        let norm = self.pre_norm();
        let query = match shape.rank {
            None => LatentQuery::Direct(self.linear(&name("q"), sizes.query_width(), hidden, 1.6, all)),
            Some(rank) => LatentQuery::Down {
                down: self.linear(&name("q down"), rank, hidden, 1.0, all),
                rank,
                norm: self.rms_norm(rank),
                up: self.linear(&name("q up"), sizes.query_width(), rank, 1.6, all),
            },
        };
        Latent {
            norm,
            shape: sizes,
            query,
            down: self.linear(&name("latent"), sizes.key_dim(), hidden, 1.6, all),
            latent_norm: self.rms_norm(latent),
            absorb: self.stack(&name("absorb"), heads, latent, plain, 1.0, false),
            value: self.stack(&name("value"), heads, value, latent, 1.0, false),
            rope: 2,
            position_scale: shape.position_scale,
            scale: 1.0 / (sizes.key_dim() as f32).sqrt(),
            kv,
            out: self.onto_stream(&name("project"), 1, sizes.value_width()),
            post_norm: shape.post_norms.then(|| self.norm(hidden)),
        }
    }

    fn conv(&mut self, layer: usize, state: usize) -> ShortConv {
        let shape = self.shape;
        let width = shape.recurrent.width;
        let name = |what: &str| format!("layer {layer} {what}");
        ShortConv {
            norm: self.pre_norm(),
            width,
            input: self.linear(&name("input"), 3 * width, shape.hidden, 1.2, shape.biases == Biases::All),
            convolution: self.convolution(width),
            out: self.onto_stream(&name("project"), 1, width),
            post_norm: shape.post_norms.then(|| self.norm(shape.hidden)),
            state,
        }
    }

    fn delta(&mut self, layer: usize, state: usize) -> DeltaRule {
        let shape = self.shape;
        let RecurrentShape { delta, sharing, .. } = shape.recurrent;
        let (hidden, heads) = (shape.hidden, delta.value_heads);
        let all = shape.biases == Biases::All;
        let name = |what: &str| format!("layer {layer} {what}");
        let norm = self.pre_norm();
        let qkv = self.linear(&name("qkv"), delta.channels(), hidden, 1.5, all);
        let gate = self.linear(&name("z"), delta.value_width(), hidden, 1.5, all);
        let [alpha, beta] = ["alpha", "beta"].map(|what| self.linear(&name(what), heads, hidden, 1.5, all));
        let convolution = self.convolution(delta.channels());
        // From heads with a memory of a few tokens to heads with more than a chunk.
        let decay = (0..heads).map(|_| -(2.0 * self.rng.normal() - 3.0).exp()).collect();
        let dt = (0..heads).map(|_| self.rng.normal()).collect();
        DeltaRule {
            norm,
            shape: delta,
            sharing,
            qkv,
            gate,
            alpha,
            beta,
            convolution,
            decay: self.vector(decay),
            dt: self.vector(dt),
            out_norm: self.rms_norm(delta.value_dim),
            out: self.onto_stream(&name("project"), 1, delta.value_width()),
            post_norm: shape.post_norms.then(|| self.norm(hidden)),
            state,
        }
    }

    fn layer_embeds(&mut self, width: usize) -> LayerEmbeds {
        let shape = self.shape;
        let count = shape.windows.len();
        let table = self.matrix("embeddings for layers", 1, shape.vocab, count * width, 1.0);
        debug_assert_eq!(table.0 as usize + 1, self.weights.matrices.len());
        self.weights.tables.extend(self.weights.matrices.pop());
        let projection = self.linear("projection for layers", count * width, shape.hidden, 1.0, false);
        LayerEmbeds { table: TableId(0), scale: 0.7, count, width, projection, norm: self.rms_norm(width) }
    }

    fn layer_input(&mut self, layer: usize, width: usize) -> LayerInput {
        let shape = self.shape;
        let name = |what: &str| format!("layer {layer} {what}");
        let all = shape.biases == Biases::All;
        LayerInput {
            index: layer,
            gate: self.linear(&name("input gate"), width, shape.hidden, 1.5, all),
            activation: shape.activation,
            out: self.onto_stream(&name("input"), 1, width),
            post_norm: shape.post_norms.then(|| self.norm(shape.hidden)),
        }
    }

    fn dense(&mut self, layer: usize, ffn: usize) -> Dense {
        let shape = self.shape;
        let hidden = shape.hidden;
        let name = |what: &str| format!("layer {layer} {what}");
        let all = shape.biases == Biases::All;
        Dense {
            norm: self.pre_norm(),
            width: ffn,
            gate: shape.gated.then(|| self.linear(&name("gate"), ffn, hidden, 1.5, all)),
            up: self.linear(&name("up"), ffn, hidden, 1.5, all),
            activation: shape.activation,
            down: self.onto_stream(&name("down"), 1, ffn),
            post_norm: shape.post_norms.then(|| self.norm(hidden)),
        }
    }

    fn experts(&mut self, layer: usize, experts: &ExpertsShape) -> Experts {
        let shape = self.shape;
        let hidden = shape.hidden;
        let ExpertsShape { count, used, width, scores, renormalize, factor, .. } = *experts;
        let name = |what: &str| format!("layer {layer} {what}");
        let all = shape.biases == Biases::All;
        let norm = self.pre_norm();
        let bias = experts.selection_bias.then(|| (0..count).map(|_| 0.3 * self.rng.normal()).collect());
        let beside = experts
            .beside
            .map(|width| Box::new(Beside { dense: self.dense(layer, width), sum_norm: self.norm(hidden) }));
        let router_norm = experts.beside.and_then(|_| self.pre_norm());
        let scales = experts.beside.map(|_| (0..count).map(|_| 1.0 + 0.4 * self.rng.normal()).collect());
        let latent = experts.latent.map(|width| ExpertLatent {
            width,
            down: self.linear(&name("experts in"), width, hidden, 1.0, all),
            up: self.onto_stream(&name("experts out"), 1, width),
        });
        let row = experts.latent.unwrap_or(hidden);
        Experts {
            norm,
            beside,
            router: Router {
                norm: router_norm,
                expert_scale: scales.map(|scales| self.vector(scales)),
                linear: self.router(&name("router"), experts, all),
                scores,
                selection_bias: bias.map(|bias| self.vector(bias)),
                groups: experts.groups,
                used,
                renormalize,
                factor,
            },
            count,
            width,
            latent,
            gate: shape.gated.then(|| self.stack(&name("experts gate"), count, width, row, 1.5, all)),
            up: self.stack(&name("experts up"), count, width, row, 1.5, all),
            activation: shape.activation,
            down: match latent {
                Some(_) => self.stack(&name("experts down"), count, row, width, 1.0, all),
                None => self.onto_stream(&name("experts down"), count, width),
            },
            shared: experts.shared.map(|width| SharedExpert {
                width,
                gate: shape.gated.then(|| self.linear(&name("shared gate"), width, hidden, 1.5, all)),
                up: self.linear(&name("shared up"), width, hidden, 1.5, all),
                down: self.onto_stream(&name("shared down"), 1, width),
                output_gate: experts
                    .output_gate
                    .then(|| self.linear(&name("output gate"), 1, hidden, 1.0, false)),
            }),
            post_norm: shape.post_norms.then(|| self.norm(hidden)),
        }
    }
}
