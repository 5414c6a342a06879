//! What the machine's GPUs are and can do.

use wgpu::Features;

/// Features without which kernels do not run.
pub fn needed() -> Features {
    Features::IMMEDIATES | Features::SUBGROUP
}

/// Features that products with cooperative matrices take.
pub fn cooperation() -> Features {
    Features::EXPERIMENTAL_COOPERATIVE_MATRIX | Features::SHADER_F16 | Features::SUBGROUP_BARRIER
}

/// Threads of the smallest and of the largest subgroups.
pub fn subgroups(info: &wgpu::AdapterInfo) -> [u32; 2] {
    match info.backend {
        // Metal knows no number and so says 4 to 64, but Apple's GPUs have 32.
        wgpu::Backend::Metal if info.name.starts_with("Apple") => [32, 32],
        // No subgroup of WGSL has less than 4.
        _ => [info.subgroup_min_size.max(4), info.subgroup_max_size],
    }
}

/// Whether the GPU is known to start the workgroups of a launch before those of the next one: NVIDIA's do, though no interface promises it.
pub fn starts_in_order(info: &wgpu::AdapterInfo) -> bool {
    info.backend == wgpu::Backend::Vulkan && info.vendor == 0x10de
}

/// The side of the largest cooperative matrices of halves with sums in single precision, where all subgroups have one size.
pub fn cooperative(adapter: &wgpu::Adapter) -> Option<u32> {
    use wgpu::CooperativeScalarType::{F16, F32};
    let [smallest, largest] = subgroups(&adapter.get_info());
    if !adapter.features().contains(cooperation()) || smallest != largest {
        return None;
    }
    let kinds = adapter.cooperative_matrix_properties();
    [16, 8].into_iter().find(|&side| {
        kinds.iter().any(|kind| {
            [kind.m_size, kind.n_size, kind.k_size] == [side; 3]
                && (kind.ab_type, kind.cr_type) == (F16, F32)
                && !kind.saturating_accumulation
        })
    })
}

/// The adapters of this machine: real GPUs first, software last.
pub fn adapters() -> Vec<wgpu::Adapter> {
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    descriptor.backends = wgpu::Backends::VULKAN | wgpu::Backends::METAL;
    let instance = wgpu::Instance::new(descriptor);
    let mut adapters = pollster::block_on(instance.enumerate_adapters(wgpu::Backends::all()));
    adapters.retain(|adapter| adapter.features().contains(needed()));
    adapters.sort_by_key(|adapter| match adapter.get_info().device_type {
        wgpu::DeviceType::DiscreteGpu => 0,
        wgpu::DeviceType::IntegratedGpu => 1,
        wgpu::DeviceType::VirtualGpu | wgpu::DeviceType::Other => 2,
        wgpu::DeviceType::Cpu => 3,
    });
    adapters
}

/// Bytes of the adapter's own memory. On Metal the driver's largest buffer, which is most of the memory that it lends, stands for it.
pub fn memory(adapter: &wgpu::Adapter) -> u64 {
    #[cfg(not(target_os = "macos"))]
    {
        // SAFETY: the adapter is only asked for what it has; nothing of it is changed or destroyed.
        let vulkan = unsafe { adapter.as_hal::<wgpu::hal::api::Vulkan>() };
        if let Some(vulkan) = vulkan {
            let instance = vulkan.shared_instance().raw_instance();
            // SAFETY: instance and physical device live as long as the adapter.
            let memory =
                unsafe { instance.get_physical_device_memory_properties(vulkan.raw_physical_device()) };
            // The first bit says that a heap is the device's own.
            let own = memory.memory_heaps_as_slice().iter().filter(|heap| heap.flags.as_raw() & 1 == 1);
            return own.map(|heap| heap.size).max().unwrap_or(0);
        }
    }
    adapter.limits().max_buffer_size
}
