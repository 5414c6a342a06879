//! Buffers whose hazards are hidden from wgpu, so that it inserts no barriers between launches that synchronize
//! themselves. For wgpu a kernel only reads them; the driver compiles SPIR-V that wgpu does not inspect. A buffer that
//! other kernels use in wgpu's order has a second name for those. Vulkan only.

/// Differences between a kernel's buffer accesses and those declared to wgpu.
#[derive(Debug)]
pub struct Hazards {
    /// Buffers declared as read-only.
    pub hidden: &'static [&'static str],
    /// Buffers declared as written, so that hidden accesses before this launch have ended.
    pub ends: &'static [&'static str],
}

impl Hazards {
    /// No differences.
    pub const DECLARED: Self = Self { hidden: &[], ends: &[] };

    /// Returns true if the buffer is declared as read-only.
    pub fn told_read_only(&self, name: &str, read_only: bool) -> bool {
        self.hidden.contains(&name) || read_only && !self.ends.contains(&name)
    }

    /// Returns true if wgpu must not inspect the kernel.
    pub fn hides(&self) -> bool {
        !self.hidden.is_empty()
    }
}

#[cfg(not(target_os = "macos"))]
pub use vulkan::{FEATURES, module, second_name, works};

#[cfg(not(target_os = "macos"))]
mod vulkan {
    use std::borrow::Cow;

    use wgpu::{
        hal::{api::Vulkan, vulkan},
        naga::{
            ResourceBinding, ShaderStage,
            back::spv,
            front::wgsl,
            proc::{BoundsCheckPolicies, BoundsCheckPolicy},
            valid::{Capabilities, ValidationFlags, Validator},
        },
    };

    /// Required features.
    pub const FEATURES: wgpu::Features = wgpu::Features::PASSTHROUGH_SHADERS;

    /// Returns true if the adapter supports it.
    pub fn works(adapter: &wgpu::Adapter) -> bool {
        adapter.get_info().backend == wgpu::Backend::Vulkan && adapter.features().contains(FEATURES)
    }

    /// Returns the module that wgpu would pass to the driver, with bindings in wgpu's order.
    ///
    /// # Panics
    /// If the kernel is malformed, because it is a part of this crate.
    pub fn module(
        device: &wgpu::Device,
        name: &str,
        source: &str,
        bindings: impl Iterator<Item = u32>,
    ) -> wgpu::ShaderModule {
        let fail = |error: String| -> ! { panic!("kernel {name}: {error}") };
        let module = wgsl::parse_str(source).unwrap_or_else(|error| fail(error.emit_to_string(source)));
        let info = Validator::new(ValidationFlags::all(), Capabilities::all())
            .validate(&module)
            .unwrap_or_else(|error| fail(error.emit_to_string(source)));
        let unchecked = BoundsCheckPolicy::Unchecked;
        let place = |(index, binding)| {
            let info = spv::BindingInfo { descriptor_set: 0, binding: index, binding_array_size: None };
            (ResourceBinding { group: 0, binding }, info)
        };
        let options = spv::Options {
            lang_version: (1, 3),
            flags: spv::WriterFlags::empty(),
            binding_map: (0..).zip(bindings).map(place).collect(),
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
        let entry = spv::PipelineOptions { shader_stage: ShaderStage::Compute, entry_point: "main".into() };
        let code = spv::write_vec(&module, &info, &options, Some(&entry))
            .unwrap_or_else(|error| fail(error.to_string()));
        // SAFETY: naga has validated it; for what it indexes and how its loops end, see where other kernels are compiled.
        unsafe {
            device.create_shader_module_passthrough(wgpu::ShaderModuleDescriptorPassthrough {
                label: Some(name),
                entry_points: Cow::Owned(vec![wgpu::PassthroughShaderEntryPoint {
                    name: "main".into(),
                    workgroup_size: (0, 0, 0),
                }]),
                spirv: Some(code.into()),
                ..Default::default()
            })
        }
    }

    /// Returns a second handle of a buffer that has been written, which wgpu tracks separately.
    pub fn second_name(device: &wgpu::Device, buffer: &wgpu::Buffer) -> wgpu::Buffer {
        // SAFETY: the handle is only passed on, with the buffer it belongs to.
        let raw = unsafe {
            buffer.as_hal::<Vulkan>().expect("a buffer of Vulkan, as `works` has said").raw_handle()
        };
        let keeps = buffer.clone();
        // SAFETY: the buffer lives until the callback is dropped, and nobody else destroys it.
        let second = unsafe { vulkan::Buffer::from_raw_externally_owned(raw, Box::new(move || drop(keeps))) };
        let description = wgpu::BufferDescriptor {
            label: Some("second name"),
            size: buffer.size(),
            usage: wgpu::BufferUsages::STORAGE,
            mapped_at_creation: false,
        };
        // SAFETY: it is this device's, of this size, initialized by wgpu under its first name, and has this usage, too.
        unsafe { device.create_buffer_from_hal::<Vulkan>(second, &description) }
    }
}

#[cfg(target_os = "macos")]
pub use metal::{FEATURES, module, second_name, works};

/// Metal's launches of one encoder do not run side by side.
#[cfg(target_os = "macos")]
mod metal {
    pub const FEATURES: wgpu::Features = wgpu::Features::empty();

    pub fn works(_adapter: &wgpu::Adapter) -> bool {
        false
    }

    pub fn module(
        _device: &wgpu::Device,
        _name: &str,
        _source: &str,
        _bindings: impl Iterator<Item = u32>,
    ) -> wgpu::ShaderModule {
        unreachable!("`works` was asked")
    }

    pub fn second_name(_device: &wgpu::Device, _buffer: &wgpu::Buffer) -> wgpu::Buffer {
        unreachable!("`works` was asked")
    }
}
