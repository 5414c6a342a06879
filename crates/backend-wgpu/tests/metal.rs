//! Every kernel in Metal's language: there is no Apple machine among those that test, but the way to one ends in this text. And in
//! SPIR-V, for those with cooperative matrices, which the software driver does not compile.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use naga::{
    back::{msl, spv},
    valid::{Capabilities, ValidationFlags, Validator},
};
use paguro_backend::{
    Activation, AttentionMode, Backend, KvDtype, Limits, RopeStyle, WeightFormat,
    conformance::{Biases, ModelShape},
};
use paguro_backend_wgpu::{Gpu, GpuOptions};

/// Shapes that together reach every kernel and every option of it.
fn shapes() -> Vec<ModelShape> {
    let llama = ModelShape { head_dim: 128, heads: 8, ..ModelShape::default() };
    let mut shapes: Vec<_> = WeightFormat::ALL.into_iter().map(ModelShape::of_format).collect();
    shapes.push(llama.clone());
    shapes.push(ModelShape { rotated: Some(0), ..llama.clone() });
    let mixture = ModelShape::of_format(WeightFormat::Q4_K);
    shapes.push(ModelShape { finer: Some(WeightFormat::Q6_K), ..mixture });
    shapes.push(ModelShape { rope_style: RopeStyle::Interleaved, biases: Biases::All, ..llama.clone() });
    shapes.push(ModelShape {
        windows: vec![Some(21), None],
        qk_norm: true,
        post_norms: true,
        attention_cap: Some(20.0),
        logit_cap: Some(10.0),
        tied: true,
        activation: Activation::GeluTanh,
        ..ModelShape { head_dim: 256, heads: 4, kv_heads: 1, ..ModelShape::default() }
    });
    shapes.extend([(7, 1, 64), (16, 1, 80), (4, 4, 8), (3, 3, 96)].map(|(heads, kv_heads, head_dim)| {
        ModelShape { heads, kv_heads, head_dim, ..ModelShape::default() }
    }));
    shapes
}

#[test]
fn every_kernel_becomes_metal() {
    let gpu = match Gpu::open(0, GpuOptions { as_hardware: true, cooperative: true, ..GpuOptions::default() })
    {
        Ok(gpu) => gpu,
        Err(error) => return println!("skipped: kernels in Metal's language: {error}"),
    };
    for shape in shapes() {
        let model = shape.build(1);
        for (attention, kv_dtype) in [
            (AttentionMode::Paged, KvDtype::F16),
            (AttentionMode::Gather, KvDtype::F16),
            (AttentionMode::Paged, KvDtype::Q8),
        ] {
            let limits = Limits {
                block_size: 32,
                pages: 4,
                max_rows: 64,
                max_sequences: 4,
                max_outputs: 4,
                max_context: 64,
                kv_dtype,
                attention,
            };
            gpu.load(&model.program, model.weights.clone(), limits).unwrap();
        }
    }
    let kernels = gpu.kernels();
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some((name, source)) = kernels.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let text = metal(source).unwrap_or_else(|error| panic!("{name}: {error}\n{source}"));
                    assert!(text.contains("kernel void main_"), "{name} has no entry point:\n{text}");
                }
            });
        }
    });
    assert!(kernels.iter().any(|(name, _)| name.starts_with("coop")), "no cooperative matrices");
    let named = [
        ["attend1_q8", "rope_store_q8", "matvec1_q8_rope", "matvec1_q4_gate", "matvec1_q6_add"],
        ["attend_coop1x16", "attend_coop8x16", "attend_coop1x8", "attend_coop4x8", "attend8"],
        ["attend_fewx16", "attend_fewx8", "attend_coop8x16_few", "rope_store_few", "matvec1_f32_rope_few"],
    ];
    for name in named.as_flattened() {
        assert!(kernels.iter().any(|(kernel, _)| kernel == name), "no {name}");
    }
    println!("{} kernels", kernels.len());
}

fn metal(source: &str) -> Result<String, String> {
    let module = naga::front::wgsl::parse_str(source).map_err(|error| error.emit_to_string(source))?;
    let info = Validator::new(ValidationFlags::all(), Capabilities::all())
        .validate(&module)
        .map_err(|error| error.emit_to_string(source))?;
    // The first version with cooperative matrices; on devices without it, there are none.
    let options = msl::Options { lang_version: (2, 3), ..Default::default() };
    let (text, _) = msl::write_string(&module, &info, &options, &msl::PipelineOptions::default())
        .map_err(|error| error.to_string())?;
    let options = spv::Options { fake_missing_bindings: true, ..Default::default() };
    spv::write_vec(&module, &info, &options, None).map_err(|error| error.to_string())?;
    Ok(text)
}
