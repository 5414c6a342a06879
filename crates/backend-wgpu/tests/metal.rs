//! Every kernel for Metal in Metal's language, translated as wgpu does on Apple's GPUs, because no Apple machine runs
//! these tests; and in SPIR-V for those with cooperative matrices, which the software driver does not compile.
//!
//! With `PAGURO_METAL_TEXT=FOLDER`, the texts are written there for Apple's compiler.

use std::{
    collections::BTreeMap,
    env, fs,
    path::PathBuf,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use naga::{
    back::{msl, spv},
    proc::{BoundsCheckPolicies, BoundsCheckPolicy},
    valid::{Capabilities, ValidationFlags, Validator},
};
use paguro_backend::{
    Activation, AttentionMode, ExpertGroups, KvDtype, LatentShape, Limits, NormKind, PositionScale,
    QkNormKind, Residual, RopeStyle, Scores, WeightFormat,
};
use paguro_backend_conformance::{Biases, Draw, ExpertsShape, ModelShape, RecurrentShape};
use paguro_backend_wgpu::{Gpu, GpuOptions, Profile};

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
        qk_norm: Some(QkNormKind::Head),
        post_norms: true,
        attention_cap: Some(20.0),
        logit_cap: Some(10.0),
        tied: true,
        activation: Activation::GeluTanh,
        ..ModelShape { head_dim: 256, heads: 4, kv_heads: 1, ..ModelShape::default() }
    });
    let experts =
        ExpertsShape { width: 256, shared: Some(256), output_gate: true, ..ExpertsShape::default() };
    shapes.push(ModelShape { experts: Some(experts), ..ModelShape::of_format(WeightFormat::Q4_K) });
    shapes.push(ModelShape {
        experts: Some(ExpertsShape {
            count: 1024,
            used: 16,
            scores: Scores::Sigmoid,
            selection_bias: true,
            ..ExpertsShape::default()
        }),
        biases: Biases::All,
        activation: Activation::ClampedSwiglu { alpha: 1.7, limit: 7.0 },
        sinks: true,
        position_scale: Some(PositionScale { beta: 0.3, original: 16 }),
        qk_norm: Some(QkNormKind::Row),
        skips_ropes: true,
        ..ModelShape::default()
    });
    shapes.push(ModelShape {
        norms: NormKind::Layer,
        residual: Residual::Parallel,
        post_norms: true,
        positions: Some(64),
        qk_norm: Some(QkNormKind::HeadAfterRope),
        activation: Activation::Gelu,
        logit_scale: 0.5,
        ..ModelShape::default()
    });
    shapes.push(ModelShape {
        pre_norms: false,
        gated: false,
        activation: Activation::Relu2,
        branch_scale: 0.5,
        ..ModelShape::default()
    });
    let hybrid = ModelShape { mixers: "dca", windows: vec![None; 3], ..ModelShape::default() };
    shapes.push(ModelShape { attention_gate: true, ..hybrid.clone() });
    let recurrent = RecurrentShape { bias: true, ..RecurrentShape::default() };
    shapes.push(ModelShape { recurrent, ..hybrid });
    let groups = Some(ExpertGroups { count: 2, used: 1, best: 2 });
    shapes.push(ModelShape {
        windows: vec![Some(9), None, Some(9), None],
        head_dim: 512,
        window_heads: Some((2, 256)),
        shared_kv: 1,
        keys_as_values: true,
        v_norm: true,
        qk_norm: Some(QkNormKind::Head),
        layer_embeds: Some(256),
        output_scale: 0.5,
        post_norms: true,
        experts: Some(ExpertsShape { beside: Some(256), width: 256, ..ExpertsShape::default() }),
        ..ModelShape::of_format(WeightFormat::Q4_K)
    });
    let latent = LatentShape { heads: 8, plain: 128, rotated: 64, latent: 512, value: 128 };
    let latents = ModelShape { mixers: "ll", windows: vec![None; 2], latent, ..ModelShape::default() };
    shapes.push(ModelShape {
        experts: Some(ExpertsShape { groups, ..ExpertsShape::default() }),
        ..latents.clone()
    });
    shapes.push(ModelShape {
        rank: Some(256),
        position_scale: Some(PositionScale { beta: 0.3, original: 16 }),
        latent: LatentShape { plain: 256, value: 256, ..latent },
        ..ModelShape { mixers: "ll", windows: vec![None; 2], ..ModelShape::of_format(WeightFormat::Q4_K) }
    });
    shapes.extend([(7, 1, 64), (16, 1, 80), (4, 4, 8), (3, 3, 96)].map(|(heads, kv_heads, head_dim)| {
        ModelShape { heads, kv_heads, head_dim, ..ModelShape::default() }
    }));
    shapes
}

/// Name and source of every kernel for Apple's GPUs.
fn kernels() -> Result<Vec<(String, String)>, String> {
    let options = GpuOptions { profile: Profile::Apple, cooperative: true, ..GpuOptions::default() };
    let gpu = Gpu::open(0, options)?;
    for (index, shape) in shapes().into_iter().enumerate() {
        let model = shape.build(1);
        let ways = [
            (AttentionMode::Paged, KvDtype::F16),
            (AttentionMode::Gather, KvDtype::F16),
            (AttentionMode::Paged, KvDtype::Q8),
        ];
        // The first shapes differ in the format of weights, which attention does not see.
        let ways = if (1..WeightFormat::ALL.len()).contains(&index) { &ways[..1] } else { &ways };
        for &(attention, kv_dtype) in ways {
            let limits = Limits {
                block_size: 32,
                pages: 4,
                max_rows: 64,
                max_sequences: 4,
                max_outputs: 4,
                max_context: 64,
                states: if model.program.state.is_empty() { 0 } else { 2 },
                kv_dtype,
                attention,
                expert_slots: None,
            };
            gpu.lower(&model.program, &model.weights, &limits).unwrap();
        }
    }
    Ok(gpu.kernels())
}

/// Draws some kernels of each name: they differ in shapes only.
fn some(all: &[(String, String)], draw: Draw, count: usize) -> Vec<(String, String)> {
    let mut named: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    all.iter().enumerate().for_each(|(index, (name, _))| named.entry(name).or_default().push(index));
    let drawn = named.iter().flat_map(|(name, kernels)| draw.some(name, kernels, count));
    let kernels = Vec::from_iter(drawn.map(|index| all[index].clone()));
    println!("{} of {} kernels, {} names", kernels.len(), all.len(), named.len());
    kernels
}

/// Writes kernels to the folder `PAGURO_WGSL_TEXT`, for `cargo xtask test wgsl`.
#[test]
fn kernels_for_another_compiler() {
    let Some(folder) = env::var_os("PAGURO_WGSL_TEXT").map(PathBuf::from) else { return };
    let all = match kernels() {
        Ok(all) => all,
        Err(error) => return println!("skipped: kernels for another compiler: {error}"),
    };
    fs::create_dir_all(&folder).unwrap();
    for (index, (name, source)) in some(&all, Draw::from_env(), 1).into_iter().enumerate() {
        fs::write(folder.join(format!("{name}-{index}.wgsl")), source).unwrap();
    }
}

#[test]
fn every_kernel_becomes_metal() {
    let folder = env::var_os("PAGURO_METAL_TEXT").map(PathBuf::from);
    let all = match kernels() {
        Ok(all) => all,
        Err(error) => return println!("skipped: kernels in Metal's language: {error}"),
    };
    // Apple's compiler gets all.
    let draw = if folder.is_some() { Draw::All } else { Draw::from_env() };
    let kernels = some(&all, draw, 1);
    folder.iter().for_each(|folder| fs::create_dir_all(folder).unwrap());
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some((name, source)) = kernels.get(index) else { break };
                    // Apple's matrices have eight rows; those of sixteen are only for SPIR-V.
                    if source.contains("coop_mat16x16") {
                        spirv(source).unwrap_or_else(|error| panic!("{name}: {error}\n{source}"));
                        continue;
                    }
                    let (text, size) =
                        metal(source).unwrap_or_else(|error| panic!("{name}: {error}\n{source}"));
                    check(name, source, (&text, size));
                    if let Some(folder) = &folder {
                        // Shapes differ under one name.
                        fs::write(folder.join(format!("{name}-{index}.metal")), text).unwrap();
                    }
                }
            });
        }
    });
    assert!(kernels.iter().any(|(name, _)| name.starts_with("coop")), "no cooperative matrices");
    let expected = [
        ["attend1_q8", "rope_store_q8", "matvec1_q8_rope", "matvec1_q4_gate", "matvec1_q6_add"],
        ["attend_coop1x16", "attend_coop8x16", "attend_coop1x8", "attend_coop4x8", "attend8"],
        [
            "attend_fewx16",
            "attend_fewx8",
            "attend_coop8x16_few",
            "rope_store_words_few",
            "matvec1_f32_rope_few",
        ],
        ["matvec1_q4_experts", "matvec1_q4_routed_gate", "route", "route_tiles", "add_experts"],
    ];
    for name in expected.as_flattened() {
        assert!(kernels.iter().any(|(kernel, _)| kernel == name), "no {name}");
    }
}

/// Bytes of workgroup memory that Apple's GPUs have for a kernel.
const WORKGROUP_MEMORY: u32 = 32 << 10;

/// The text as wgpu has it, and threads of a workgroup: in the newest language that it knows how to ask for, without any of naga's safety nets.
fn metal(source: &str) -> Result<(String, u32), String> {
    let (module, info) = validated(source)?;
    let unchecked = BoundsCheckPolicy::Unchecked;
    let mut bindings: Vec<_> = module.global_variables.iter().filter_map(|(_, var)| var.binding).collect();
    bindings.sort_by_key(|binding| binding.binding);
    let slot = |(slot, binding)| {
        (binding, msl::BindTarget { buffer: Some(slot), mutable: true, ..Default::default() })
    };
    let count = bindings.len() as u8;
    let resources = msl::EntryPointResources {
        resources: (0..).zip(bindings).map(slot).collect(),
        immediates_buffer: Some(count),
        sizes_buffer: Some(count + 1),
    };
    let options = msl::Options {
        lang_version: (4, 0),
        per_entry_point_map: BTreeMap::from([("main".to_owned(), resources)]),
        fake_missing_bindings: false,
        bounds_check_policies: BoundsCheckPolicies {
            index: unchecked,
            buffer: unchecked,
            image_load: unchecked,
            binding_array: unchecked,
        },
        zero_initialize_workgroup_memory: false,
        force_loop_bounding: false,
        emit_int_div_checks: false,
        ..Default::default()
    };
    let entry = (naga::ShaderStage::Compute, "main".to_owned());
    let pipeline = msl::PipelineOptions { entry_point: Some(entry), ..Default::default() };
    let (text, _) =
        msl::write_string(&module, &info, &options, &pipeline).map_err(|error| error.to_string())?;
    let main = info.get_entry_point(0);
    let memory = module
        .global_variables
        .iter()
        .filter(|(handle, var)| var.space == naga::AddressSpace::WorkGroup && !main[*handle].is_empty());
    let lengths: Vec<u32> = memory
        .map(|(_, var)| module.types[var.ty].inner.size(module.to_ctx()).next_multiple_of(16))
        .collect();
    if lengths.iter().sum::<u32>() > WORKGROUP_MEMORY || lengths.len() > 31 {
        return Err(format!("workgroup memory of {lengths:?} bytes"));
    }
    Ok((text, module.entry_points[0].workgroup_size.iter().product()))
}

fn spirv(source: &str) -> Result<(), String> {
    let (module, info) = validated(source)?;
    let options = spv::Options { fake_missing_bindings: true, ..Default::default() };
    spv::write_vec(&module, &info, &options, None).map(|_| ()).map_err(|error| error.to_string())
}

fn validated(source: &str) -> Result<(naga::Module, naga::valid::ModuleInfo), String> {
    let module = naga::front::wgsl::parse_str(source).map_err(|error| error.emit_to_string(source))?;
    let info = Validator::new(ValidationFlags::all(), Capabilities::all())
        .validate(&module)
        .map_err(|error| error.emit_to_string(source))?;
    Ok((module, info))
}

/// Checks the required and forbidden parts of the text.
fn check(name: &str, source: &str, (text, size): (&str, u32)) {
    let count = |text: &str, what: &str| text.matches(what).count();
    assert_eq!(count(text, "kernel void main_"), 1, "{name} has no entry point:\n{text}");
    assert!(size <= 256, "{name} has workgroups of {size} threads");
    let limit = format!("max_total_threads_per_threadgroup({size})");
    assert!(text.contains(&limit), "{name} does not say {limit}");
    // A barrier that is lost gives wrong numbers and no error. A uniform load has one before and one after it.
    let code: String = source.lines().map(|line| line.split("//").next().unwrap_or_default()).collect();
    let barriers = count(&code, "workgroupBarrier()") + 2 * count(&code, "workgroupUniformLoad(");
    assert_eq!(
        count(text, "threadgroup_barrier(metal::mem_flags::mem_threadgroup)"),
        barriers,
        "{name}:\n{text}"
    );
    assert_eq!(
        count(text, "simdgroup_barrier(metal::mem_flags::mem_threadgroup)"),
        count(&code, "subgroupBarrier()"),
        "{name}:\n{text}"
    );
    for net in ["loop_bound", "_buffer_sizes.size", "naga_div", "naga_mod", "DefaultConstructible"] {
        assert!(!text.contains(net), "{name} has {net}:\n{text}");
    }
}
