//! Statistics of a driver's compiled kernels: registers, workgroup memory and code size, as far as it reports them
//! (`VK_KHR_pipeline_executable_properties`). No kernel runs, so it takes as long as compiling: seconds, or half a
//! minute with cooperative matrices. Prints a JSON object for each kernel.
//!
//! ```text
//! cargo run --release -p paguro-backend-wgpu --example statistics -- [part of a kernel's name]...
//! ```
//!
//! Kernels are those of an 8B and of a 1B Llama, without and with adapters; with `PAGURO_NUMERICS=exact` without those with cooperative
//! matrices.

use std::{env, process::ExitCode};

use ash::{khr, vk};
use naga::{
    back::spv,
    proc::{BoundsCheckPolicies, BoundsCheckPolicy},
    valid::{Capabilities, ValidationFlags, Validator},
};
use paguro_backend::{AdapterId, AttentionMode, Backend, KvDtype, Limits, LoadError, WeightFormat};
use paguro_backend_conformance::{ModelShape, random_adapter};
use paguro_backend_wgpu::{Gpu, GpuOptions};

fn main() -> ExitCode {
    let names: Vec<String> = env::args().skip(1).collect();
    let wants = |name: &str| names.is_empty() || names.iter().any(|wanted| name.contains(wanted));
    match run(&wants) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run(wants: &dyn Fn(&str) -> bool) -> Result<(), String> {
    let kernels = kernels()?;
    let compiler =
        Compiler::new().map_err(|error| format!("no driver that says what kernels become: {error}"))?;
    for (name, source) in kernels.iter().filter(|(name, _)| wants(name)) {
        let statistics = compiler.statistics(source).map_err(|error| format!("{name}: {error}"))?;
        let shape: Vec<_> = ["BLOCKS", "DIM"].into_iter().filter_map(|name| constant(source, name)).collect();
        let said = statistics.iter().map(|(name, value)| format!(r#","{name}":{value}"#));
        println!(r#"{{"kernel":"{name}","of":"{}"{}}}"#, shape.join(", "), said.collect::<String>());
    }
    Ok(())
}

/// Names and sources of the kernels that models need.
fn kernels() -> Result<Vec<(String, String)>, String> {
    let cooperative = !env::var("PAGURO_NUMERICS").is_ok_and(|numerics| numerics == "exact");
    let gpu = Gpu::open(0, GpuOptions { cooperative, ..GpuOptions::default() })?;
    let shape = |format, hidden, ffn, kv_heads, head_dim| {
        let narrow = ModelShape { windows: vec![None], vocab: 256, ..ModelShape::default() };
        ModelShape { format, hidden, ffn, heads: 32, kv_heads, head_dim, ..narrow }
    };
    for shape in [
        shape(WeightFormat::Q8_0, 4096, 14_336, 8, 128),
        shape(WeightFormat::Q4_K, 4096, 14_336, 8, 128),
        shape(WeightFormat::Q8_0, 2048, 5632, 4, 64),
    ] {
        let model = shape.build(1);
        let limits = Limits {
            block_size: 32,
            pages: 4,
            max_rows: 256,
            max_sequences: 64,
            max_outputs: 4,
            max_context: 4096,
            states: 0,
            kv_dtype: KvDtype::F16,
            attention: AttentionMode::Paged,
            expert_slots: None,
        };
        let failed = |error: LoadError| error.to_string();
        let mut runner = gpu.load(&model.program, model.weights.clone(), limits).map_err(failed)?;
        // An adapter changes most matrices.
        for id in 0..3 {
            let pairs = random_adapter(&model.program, &model.weights, id.into());
            runner.load_adapter(AdapterId(id), &pairs).map_err(failed)?;
        }
        runner.prepare_adapters().map_or(Ok(()), |work| work().map_err(failed))?;
    }
    let mut kernels = gpu.kernels();
    kernels.sort();
    Ok(kernels)
}

/// A constant as a kernel's source declares it.
fn constant(source: &str, name: &str) -> Option<String> {
    let line = source.lines().find_map(|line| line.strip_prefix(&format!("const {name} = ")))?;
    Some(format!("{name} {}", line.trim_end_matches("u;")))
}

/// Returns a kernel in the form that wgpu passes to the driver, and the numbers of its bindings.
fn spirv(source: &str) -> Result<(Vec<u32>, Vec<u32>), String> {
    let module = naga::front::wgsl::parse_str(source).map_err(|error| error.emit_to_string(source))?;
    let info = Validator::new(ValidationFlags::all(), Capabilities::all())
        .validate(&module)
        .map_err(|error| error.emit_to_string(source))?;
    let unchecked = BoundsCheckPolicy::Unchecked;
    let options = spv::Options {
        lang_version: (1, 6),
        flags: spv::WriterFlags::empty(),
        fake_missing_bindings: true,
        bounds_check_policies: BoundsCheckPolicies {
            index: unchecked,
            buffer: unchecked,
            image_load: unchecked,
            binding_array: unchecked,
        },
        zero_initialize_workgroup_memory: spv::ZeroInitializeWorkgroupMemoryMode::None,
        force_loop_bounding: false,
        emit_int_div_checks: false,
        ..Default::default()
    };
    let entry = spv::PipelineOptions { shader_stage: naga::ShaderStage::Compute, entry_point: "main".into() };
    let code = spv::write_vec(&module, &info, &options, Some(&entry)).map_err(|error| error.to_string())?;
    let bindings = module.global_variables.iter().filter_map(|(_, variable)| variable.binding);
    Ok((code, bindings.map(|binding| binding.binding).collect()))
}

/// A separate device, because wgpu's does not request statistics. It lives as long as the process.
struct Compiler {
    device: ash::Device,
    properties: khr::pipeline_executable_properties::Device,
    /// Keeps the driver loaded.
    _entry: ash::Entry,
}

impl Compiler {
    fn new() -> Result<Self, Box<dyn std::error::Error>> {
        // SAFETY: the loader is the one that wgpu has loaded; all structures outlive the calls that they are handed to, features are
        // those that the device says it has, and extensions are asked for by names that it lists.
        unsafe {
            let entry = ash::Entry::load()?;
            let application = vk::ApplicationInfo::default().api_version(vk::API_VERSION_1_3);
            let instance = vk::InstanceCreateInfo::default().application_info(&application);
            let instance = entry.create_instance(&instance, None)?;
            let mut wanted = vec![khr::pipeline_executable_properties::NAME];
            let adapters = instance.enumerate_physical_devices()?;
            let adapter = *adapters.first().ok_or("no device")?;
            let offered = instance.enumerate_device_extension_properties(adapter)?;
            let offers = |name| offered.iter().any(|one| one.extension_name_as_c_str() == Ok(name));
            if !offers(wanted[0]) {
                return Err("the first device's driver has no VK_KHR_pipeline_executable_properties".into());
            }
            let has_matrices = offers(khr::cooperative_matrix::NAME);
            let mut versions = (
                vk::PhysicalDeviceVulkan11Features::default(),
                vk::PhysicalDeviceVulkan12Features::default(),
                vk::PhysicalDeviceVulkan13Features::default(),
            );
            let mut executables = vk::PhysicalDevicePipelineExecutablePropertiesFeaturesKHR::default();
            let mut matrices = vk::PhysicalDeviceCooperativeMatrixFeaturesKHR::default();
            let mut features = vk::PhysicalDeviceFeatures2::default()
                .push_next(&mut versions.0)
                .push_next(&mut versions.1)
                .push_next(&mut versions.2)
                .push_next(&mut executables);
            if has_matrices {
                features = features.push_next(&mut matrices);
                wanted.push(khr::cooperative_matrix::NAME);
            }
            instance.get_physical_device_features2(adapter, &mut features);
            features.features.robust_buffer_access = vk::FALSE;
            let wanted: Vec<_> = wanted.iter().map(|name| name.as_ptr()).collect();
            let queues = [vk::DeviceQueueCreateInfo::default().queue_priorities(&[1.0])];
            let description = vk::DeviceCreateInfo::default()
                .queue_create_infos(&queues)
                .enabled_extension_names(&wanted)
                .push_next(&mut features);
            let device = instance.create_device(adapter, &description, None)?;
            let properties = khr::pipeline_executable_properties::Device::new(&instance, &device);
            Ok(Self { device, properties, _entry: entry })
        }
    }

    /// Returns the driver's statistics of a kernel.
    fn statistics(&self, source: &str) -> Result<Vec<(String, u64)>, Box<dyn std::error::Error>> {
        let (code, numbers) = spirv(source)?;
        let bindings: Vec<_> = numbers
            .into_iter()
            .map(|number| {
                vk::DescriptorSetLayoutBinding::default()
                    .binding(number)
                    .descriptor_type(vk::DescriptorType::STORAGE_BUFFER)
                    .descriptor_count(1)
                    .stage_flags(vk::ShaderStageFlags::COMPUTE)
            })
            .collect();
        // As many bytes as every device has, and so every kernel gets along with.
        let immediates =
            [vk::PushConstantRange::default().stage_flags(vk::ShaderStageFlags::COMPUTE).size(128)];
        let device = &self.device;
        // SAFETY: the code is valid, its bindings and immediates are those of the layout, and everything outlives the calls that it is
        // handed to. Nothing is ever run, and nothing destroyed before the process ends.
        unsafe {
            let module =
                device.create_shader_module(&vk::ShaderModuleCreateInfo::default().code(&code), None)?;
            let set = vk::DescriptorSetLayoutCreateInfo::default().bindings(&bindings);
            let sets = [device.create_descriptor_set_layout(&set, None)?];
            let layout =
                vk::PipelineLayoutCreateInfo::default().set_layouts(&sets).push_constant_ranges(&immediates);
            let stage = vk::PipelineShaderStageCreateInfo::default()
                .stage(vk::ShaderStageFlags::COMPUTE)
                .module(module)
                .name(c"main");
            let pipeline = vk::ComputePipelineCreateInfo::default()
                .stage(stage)
                .layout(device.create_pipeline_layout(&layout, None)?)
                .flags(vk::PipelineCreateFlags::CAPTURE_STATISTICS_KHR);
            let pipelines = device.create_compute_pipelines(vk::PipelineCache::null(), &[pipeline], None);
            let pipeline = pipelines.map_err(|(_, error)| error)?[0];
            let executable = vk::PipelineExecutableInfoKHR::default().pipeline(pipeline);
            let statistics = self.properties.get_pipeline_executable_statistics(&executable)?;
            let said = statistics.iter().map(|one| {
                let name = one.name_as_c_str().map_or("?".into(), |name| name.to_string_lossy());
                (name.into_owned(), one.value.u64)
            });
            Ok(said.collect())
        }
    }
}
