//! Defects of layers that differ, of data that layers share, and of scans.

use paguro_backend::{FeedForward, GatedNorm, Mixer, Program, Ssd};

use super::{Defect, NONE, programs::*};

pub(super) fn defects() -> Vec<(&'static str, Defect, &'static [&'static str])> {
    vec![
        ("reads the K and V of another layer", Defect { program: other_source, ..NONE }, &["shared_kv"]),
        (
            "ignores norms of V",
            Defect { program: |program| each_attention(program, |op| op.v_norm = None), ..NONE },
            &["keys_as_values", "exact_geometry"],
        ),
        ("ignores embeddings for layers", Defect { program: no_inputs, ..NONE }, &["layer_embeds"]),
        ("adds one embedding in all layers", Defect { program: first_input, ..NONE }, &["layer_embeds"]),
        (
            "ignores the scale of layers",
            Defect {
                program: |program| program.layers.iter_mut().for_each(|layer| layer.output_scale = 1.0),
                ..NONE
            },
            &["layer_embeds"],
        ),
        (
            "ignores networks beside experts",
            Defect { program: |program| each_experts(program, |op| op.beside = None), ..NONE },
            &["experts_beside"],
        ),
        (
            "routes by what experts read",
            Defect { program: |program| each_experts(program, |op| op.router.norm = None), ..NONE },
            &["experts_beside"],
        ),
        (
            "ignores scales of experts",
            Defect { program: |program| each_experts(program, |op| op.router.expert_scale = None), ..NONE },
            &["experts_beside"],
        ),
        (
            "ignores groups of experts",
            Defect { program: |program| each_experts(program, |op| op.router.groups = None), ..NONE },
            &["expert_groups"],
        ),
        (
            "scales latent scores by another size",
            Defect { program: other_latent_scale, ..NONE },
            &["latent_attention"],
        ),
        // Scans, sums of mixers, and layers without a mixer or a network
        (
            "skips by another vector",
            Defect { program: |program| each_scan(program, |op| op.skip = op.dt_bias), ..NONE },
            &["scans"],
        ),
        ("norms all groups together", Defect { program: one_norm, ..NONE }, &["scans"]),
        ("gates on the other side of the norm", Defect { program: other_order, ..NONE }, &["scans"]),
        (
            "ignores bounds of steps",
            Defect {
                program: |program| each_scan(program, |op| op.dt_limits = (0.0, f32::INFINITY)),
                ..NONE
            },
            &["mixer_sums"],
        ),
        (
            "ignores scales of a scan",
            Defect {
                program: |program| each_scan(program, |op| (op.gate_scale, op.dt_scale) = (1.0, 1.0)),
                ..NONE
            },
            &["mixer_sums"],
        ),
        ("ignores scales of mixers", Defect { program: no_mixer_scales, ..NONE }, &["mixer_sums"]),
        ("uses one mixer of two", Defect { program: one_mixer, ..NONE }, &["mixer_sums"]),
        (
            "leaves out experts without a gate",
            Defect { program: no_bare_experts, ..NONE },
            &["ungated_experts"],
        ),
        (
            "leaves out networks without a mixer",
            Defect { program: no_bare_networks, ..NONE },
            &["bare_layers"],
        ),
    ]
}

fn each_scan(program: &mut Program, change: impl Fn(&mut Ssd)) {
    for mixer in program.layers.iter_mut().flat_map(|layer| layer.mixer.parts_mut()) {
        if let Mixer::Ssd(op) = mixer {
            change(op);
        }
    }
}

fn one_norm(program: &mut Program) {
    each_scan(program, |op| match &mut op.out_norm {
        GatedNorm::GateOnly => {}
        GatedNorm::AfterGate(norm) | GatedNorm::BeforeGate(norm) => norm.groups = 1,
    });
}

fn other_order(program: &mut Program) {
    each_scan(program, |op| {
        op.out_norm = match op.out_norm {
            GatedNorm::GateOnly => GatedNorm::GateOnly,
            GatedNorm::AfterGate(norm) => GatedNorm::BeforeGate(norm),
            GatedNorm::BeforeGate(norm) => GatedNorm::AfterGate(norm),
        };
    });
}

fn no_mixer_scales(program: &mut Program) {
    for layer in &mut program.layers {
        if let Mixer::Sum(branches) = &mut layer.mixer {
            branches.iter_mut().for_each(|branch| branch.scale = 1.0);
        }
    }
}

fn one_mixer(program: &mut Program) {
    for layer in &mut program.layers {
        if let Mixer::Sum(branches) = &mut layer.mixer {
            branches[0].scale = 0.0;
        }
    }
}

fn no_bare_experts(program: &mut Program) {
    for layer in &mut program.layers {
        if matches!(&layer.ffn, FeedForward::Experts(op) if op.gate.is_none()) {
            layer.ffn = FeedForward::None;
        }
    }
}

fn no_bare_networks(program: &mut Program) {
    for layer in &mut program.layers {
        if matches!(layer.mixer, Mixer::None) {
            layer.ffn = FeedForward::None;
        }
    }
}
