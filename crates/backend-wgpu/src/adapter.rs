//! GPUs of this machine: the drivers' reports, and the rules derived from them.
//!
//! [`Facts`] are a driver's report. [`Facts::rules`] is a pure function of them, so that a test can check the rules for
//! GPUs that were never tested here.

use std::{sync::LazyLock, time::Duration};

use wgpu::{Backend, DeviceType, Features};

/// Minimum memory of a GPU for `auto`. Some integrated GPUs only offer a reserved part of main memory, smaller than any
/// useful model.
const LEAST_AUTOMATIC: u64 = 2_000_000_000;

/// Maximum size of a buffer, even if the driver allows more: kernels index 16-byte elements with 32 bits.
const LARGEST_BINDING: u64 = (4 << 30) - 16;

/// NVIDIA's vendor id in PCI's list.
const NVIDIA: u32 = 0x10de;

/// Device ids of NVIDIA's GPUs from the Turing generation on begin here.
const FIRST_TURING: u32 = 0x1e00;

/// Target for the duration of a submission where a watchdog may end it or a desktop would stutter.
const SHORT_SUBMISSION: Duration = Duration::from_millis(100);

/// Processors of a GPU whose driver does not report their number. Intel's and Apple's have 8 to 80.
pub const UNKNOWN_PROCESSORS: usize = 32;

/// Workgroups that a software driver runs at once, in pairs.
const SOFTWARE_PROCESSORS: usize = 4;

/// Features without which kernels do not run.
pub fn needed() -> Features {
    Features::IMMEDIATES | Features::SUBGROUP
}

/// Features that cooperative matrices need.
pub fn cooperation() -> Features {
    Features::EXPERIMENTAL_COOPERATIVE_MATRIX | Features::SHADER_F16 | Features::SUBGROUP_BARRIER
}

/// Memory of a device, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Size of its largest heap, or the working set that Metal recommends.
    pub total: u64,
    /// Bytes that this process can still allocate, by the driver's estimate; `None` if it has none.
    pub free: Option<u64>,
    /// Bytes of the host's memory that the driver makes available to kernels.
    pub host: u64,
}

/// Properties of a GPU, as its driver reports them.
#[derive(Clone, Debug)]
pub struct Facts {
    /// Name of the GPU.
    pub name: String,
    /// Name of the driver.
    pub driver: String,
    /// Interface.
    pub backend: Backend,
    /// Discrete, integrated or software.
    pub device_type: DeviceType,
    /// Vendor's PCI id.
    pub vendor: u32,
    /// Device's PCI id.
    pub device: u32,
    /// Threads of the smallest and of the largest subgroup, as wgpu reports them.
    pub subgroups: [u32; 2],
    /// Threads of the largest workgroup.
    pub threads: u32,
    /// Maximum bytes of a buffer and of a binding.
    pub buffers: [u64; 2],
    /// Memory.
    pub memory: Memory,
    /// Number of processors that run workgroups; `None` if the driver reports none.
    pub processors: Option<u32>,
    /// Operating system, as [`std::env::consts::OS`] names it.
    pub os: &'static str,
}

/// Choices made for a GPU from its properties.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Reason for which it cannot be used.
    pub refused: Option<String>,
    /// Reason for which `auto` does not choose it.
    pub not_automatic: Option<String>,
    /// Bytes available to models.
    pub bytes_free: u64,
    /// Bytes of the host's memory available to experts.
    pub host_free: u64,
    /// Largest buffer.
    pub binding_limit: u64,
    /// Threads of the smallest subgroup that a kernel may run in.
    pub subgroup: u32,
    /// True if all subgroups have this many threads.
    pub has_one_subgroup: bool,
    /// Threads of the largest workgroups that kernels are compiled with.
    pub most_threads: u32,
    /// True if launches may use handoff without barriers (`hidden.rs`).
    pub handoff: bool,
    /// Target for the duration of a submission, if there is one.
    pub submission: Option<Duration>,
    /// True if the compiler may not reorder floating-point sums: equal bits in any batch can be promised.
    pub keeps_order: bool,
    /// Number of processors that run workgroups, at least an estimate.
    pub processors: usize,
}

/// Threads per workgroup that every device supports for every kernel.
pub const LEAST_THREADS: u32 = 256;

impl Facts {
    /// Asks an adapter.
    pub fn of(adapter: &wgpu::Adapter) -> Self {
        let (info, limits) = (adapter.get_info(), adapter.limits());
        Self {
            name: info.name,
            driver: info.driver,
            backend: info.backend,
            device_type: info.device_type,
            vendor: info.vendor,
            device: info.device,
            subgroups: [info.subgroup_min_size, info.subgroup_max_size],
            threads: limits.max_compute_invocations_per_workgroup,
            buffers: [limits.max_buffer_size, limits.max_storage_buffer_binding_size],
            memory: memory(adapter),
            processors: processors(adapter),
            os: std::env::consts::OS,
        }
    }

    fn is_apple(&self) -> bool {
        self.backend == Backend::Metal && self.name.starts_with("Apple")
    }

    fn is_nvidia(&self) -> bool {
        self.backend == Backend::Vulkan && self.vendor == NVIDIA
    }

    /// Returns how this GPU is used.
    pub fn rules(&self) -> Rules {
        let is_software = self.device_type == DeviceType::Cpu;
        let is_metal = self.backend == Backend::Metal;
        let [smallest, largest] = match self.is_apple() {
            // Metal does not report the size, so wgpu reports 4 to 64.
            true => [32, 32],
            // No subgroup of WGSL has less than 4.
            false => [self.subgroups[0].max(4), self.subgroups[1]],
        };
        let Memory { total, free, host } = self.memory;
        let bytes_free = match free {
            // The estimate changes as other programs allocate.
            Some(free) => free.min(total) / 20 * 19,
            None => total / 10 * 9,
        };
        // Drivers of Macs with other GPUs report wrong sizes of subgroups.
        let is_refused = is_metal && !self.is_apple();
        let refused =
            is_refused.then(|| format!("{} is not supported: on Metal, only Apple's GPUs are", self.name));
        let not_automatic = if is_software {
            Some("it is a software driver, slower than the CPU backend".to_owned())
        } else if bytes_free < LEAST_AUTOMATIC {
            Some(format!("only {} MB of memory are free for models", bytes_free / 1_000_000))
        } else {
            refused.clone()
        };
        Rules {
            refused,
            not_automatic,
            bytes_free,
            host_free: host / 10 * 9,
            binding_limit: self.buffers[0].min(self.buffers[1]).min(LARGEST_BINDING),
            subgroup: smallest,
            has_one_subgroup: smallest == largest,
            most_threads: match self.is_nvidia() {
                true => self.threads,
                // Elsewhere large workgroups force wide subgroups or spill registers, and Metal's limit depends on the kernel.
                false => LEAST_THREADS,
            },
            // Its processors start workgroups in the order of launches, though no interface promises it. Others have not been tried.
            handoff: self.is_nvidia()
                && self.driver == "NVIDIA"
                && self.device >= FIRST_TURING
                && self.os == "linux",
            submission: (is_metal || self.os == "windows" || self.device_type == DeviceType::IntegratedGpu)
                .then_some(SHORT_SUBMISSION),
            // Metal compiles with fast math, which wgpu cannot disable.
            keeps_order: !is_metal,
            processors: match self.processors {
                Some(processors) => processors.max(1) as usize,
                None if is_software => SOFTWARE_PROCESSORS,
                None => UNKNOWN_PROCESSORS,
            },
        }
    }
}

/// The side of the largest cooperative matrices of halves with sums in single precision, where all subgroups have one size.
pub fn cooperative(adapter: &wgpu::Adapter, rules: &Rules) -> Option<u32> {
    use wgpu::CooperativeScalarType::{F16, F32};
    if !adapter.features().contains(cooperation()) || !rules.has_one_subgroup {
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

/// The only instance of this process. It is never dropped: dropping it unloads the driver's library, but a thread that
/// has used NVIDIA's driver calls it once more when it ends, which was a segmentation fault at the end of `serve`.
static INSTANCE: LazyLock<wgpu::Instance> = LazyLock::new(|| {
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    descriptor.backends = wgpu::Backends::VULKAN | wgpu::Backends::METAL;
    // No dispatch is indirect, and the check for it limits all buffers to 4 GiB.
    descriptor.flags.remove(wgpu::InstanceFlags::VALIDATION_INDIRECT_CALL);
    wgpu::Instance::new(descriptor)
});

/// The adapters of this machine: discrete GPUs first, software last. A GPU that two drivers offer is listed once.
pub fn adapters() -> Vec<wgpu::Adapter> {
    let mut adapters = pollster::block_on(INSTANCE.enumerate_adapters(wgpu::Backends::all()));
    adapters.retain(|adapter| adapter.features().contains(needed()));
    adapters.sort_by_key(|adapter| match adapter.get_info().device_type {
        DeviceType::DiscreteGpu => 0,
        DeviceType::IntegratedGpu => 1,
        DeviceType::VirtualGpu | DeviceType::Other => 2,
        DeviceType::Cpu => 3,
    });
    let mut places = std::collections::HashSet::new();
    adapters.retain(|adapter| {
        let place = adapter.get_info().device_pci_bus_id;
        place.is_empty() || places.insert(place)
    });
    adapters
}

#[cfg(not(target_os = "macos"))]
fn memory(adapter: &wgpu::Adapter) -> Memory {
    use ash::{ext, vk};
    // SAFETY: the handle is only read; nothing of it is changed or destroyed.
    let Some(vulkan) = (unsafe { adapter.as_hal::<wgpu::hal::api::Vulkan>() }) else {
        return Memory::default();
    };
    let (instance, device) = (vulkan.shared_instance().raw_instance(), vulkan.raw_physical_device());
    let mut budget = vk::PhysicalDeviceMemoryBudgetPropertiesEXT::default();
    let says = vulkan.physical_device_capabilities().supports_extension(ext::memory_budget::NAME);
    let mut properties = vk::PhysicalDeviceMemoryProperties2::default();
    if says {
        properties = properties.push_next(&mut budget);
    }
    // SAFETY: instance and physical device live as long as the adapter, and wgpu asks for Vulkan 1.1 or more. The budget is only
    // chained where the device has the extension.
    unsafe { instance.get_physical_device_memory_properties2(device, &mut properties) };
    let heaps = properties.memory_properties;
    let own = heaps.memory_heaps_as_slice().iter().enumerate();
    let own = own.filter(|(_, heap)| heap.flags.contains(vk::MemoryHeapFlags::DEVICE_LOCAL));
    let left = |(index, heap): (usize, &vk::MemoryHeap)| match says {
        true => budget.heap_budget[index].saturating_sub(budget.heap_usage[index]),
        false => heap.size,
    };
    // A software driver has one heap, which is the host's.
    let of_host = heaps.memory_heaps_as_slice().iter().enumerate();
    let is_of_host = |heap: &vk::MemoryHeap| !heap.flags.contains(vk::MemoryHeapFlags::DEVICE_LOCAL);
    let of_host = of_host.filter(|(_, heap)| is_of_host(heap) || heaps.memory_heap_count == 1);
    let host = of_host.map(left).max().unwrap_or(0);
    own.max_by_key(|(_, heap)| heap.size).map_or_else(Memory::default, |(index, heap)| Memory {
        total: heap.size,
        free: says.then(|| left((index, heap))),
        host,
    })
}

/// Returns the number of processors, which NVIDIA's and AMD's drivers report.
#[cfg(not(target_os = "macos"))]
fn processors(adapter: &wgpu::Adapter) -> Option<u32> {
    use ash::{amd, nv, vk};
    // SAFETY: the handle is only read; nothing of it is changed or destroyed.
    let vulkan = unsafe { adapter.as_hal::<wgpu::hal::api::Vulkan>() }?;
    let (instance, device) = (vulkan.shared_instance().raw_instance(), vulkan.raw_physical_device());
    let supports = |name| vulkan.physical_device_capabilities().supports_extension(name);
    let mut of_nvidia = vk::PhysicalDeviceShaderSMBuiltinsPropertiesNV::default();
    let mut of_amd = vk::PhysicalDeviceShaderCorePropertiesAMD::default();
    let mut properties = vk::PhysicalDeviceProperties2::default();
    let (is_nvidia, is_amd) =
        (supports(nv::shader_sm_builtins::NAME), supports(amd::shader_core_properties::NAME));
    if is_nvidia {
        properties = properties.push_next(&mut of_nvidia);
    }
    if is_amd {
        properties = properties.push_next(&mut of_amd);
    }
    // SAFETY: as in `memory`.
    unsafe { instance.get_physical_device_properties2(device, &mut properties) };
    let of_amd = [
        of_amd.shader_engine_count,
        of_amd.shader_arrays_per_engine_count,
        of_amd.compute_units_per_shader_array,
    ];
    match (is_nvidia, is_amd) {
        (true, _) => Some(of_nvidia.shader_sm_count),
        (false, true) => Some(of_amd.into_iter().product()),
        (false, false) => None,
    }
}

/// Metal does not report it.
#[cfg(target_os = "macos")]
fn processors(_: &wgpu::Adapter) -> Option<u32> {
    None
}

#[cfg(target_os = "macos")]
fn memory(adapter: &wgpu::Adapter) -> Memory {
    use objc2_metal::MTLDevice;
    // SAFETY: the handle is only read.
    let Some(metal) = (unsafe { adapter.as_hal::<wgpu::hal::api::Metal>() }) else {
        return Memory::default();
    };
    let device = metal.raw_device();
    let total = device.recommendedMaxWorkingSetSize();
    Memory { total, free: Some(total.saturating_sub(device.currentAllocatedSize() as u64)), host: 0 }
}

#[cfg(test)]
#[path = "adapter/tests.rs"]
mod tests;
