//! Buffers in the host's memory that kernels read over the bus. wgpu's own mappable buffers may be in the device's memory, so these
//! are Vulkan's. Vulkan only.

#[cfg(not(target_os = "macos"))]
pub use vulkan::{HostBuffer, works};

#[cfg(not(target_os = "macos"))]
mod vulkan {
    use ash::vk;
    use wgpu::hal::{api::Vulkan, vulkan};

    /// A buffer in the host's memory.
    pub struct HostBuffer {
        /// wgpu's buffer, which kernels read.
        pub buffer: wgpu::Buffer,
        /// Its memory, mapped while the buffer exists.
        memory: *mut u32,
        words: usize,
    }

    /// Returns true if the adapter has memory of its own and reads the host's. A software driver counts, for tests.
    pub fn works(adapter: &wgpu::Adapter) -> bool {
        let info = adapter.get_info();
        info.backend == wgpu::Backend::Vulkan && info.device_type != wgpu::DeviceType::IntegratedGpu
    }

    impl HostBuffer {
        /// Allocates a buffer of `words` words, at least one.
        ///
        /// # Errors
        /// The driver's error.
        pub fn new(device: &wgpu::Device, words: usize, what: &str) -> Result<Self, vk::Result> {
            let size = (4 * words.max(1) as u64).next_multiple_of(16);
            // SAFETY: the handles are only used to create objects, which this function or wgpu destroys.
            let hal = unsafe { device.as_hal::<Vulkan>() }.ok_or(vk::Result::ERROR_FEATURE_NOT_PRESENT)?;
            let (raw, instance) = (hal.raw_device(), hal.shared_instance().raw_instance());
            let description = vk::BufferCreateInfo::default()
                .size(size)
                .usage(vk::BufferUsageFlags::STORAGE_BUFFER)
                .sharing_mode(vk::SharingMode::EXCLUSIVE);
            // SAFETY: the device lives while `hal` is held, and the description is complete.
            let buffer = unsafe { raw.create_buffer(&description, None) }?;
            // SAFETY: both handles are valid.
            let (needs, types) = unsafe {
                let types = instance.get_physical_device_memory_properties(hal.raw_physical_device());
                (raw.get_buffer_memory_requirements(buffer), types)
            };
            let allocated = memory_type(&types, needs.memory_type_bits).and_then(|index| {
                let request =
                    vk::MemoryAllocateInfo::default().allocation_size(needs.size).memory_type_index(index);
                // SAFETY: the type is one of the device's.
                unsafe { raw.allocate_memory(&request, None) }
            });
            let mapped = allocated.and_then(|memory| {
                // SAFETY: the memory is as large as the buffer needs, of a type that it accepts and that the host can map, and new.
                let mapped = unsafe {
                    raw.bind_buffer_memory(buffer, memory, 0)
                        .and_then(|()| raw.map_memory(memory, 0, vk::WHOLE_SIZE, vk::MemoryMapFlags::empty()))
                };
                match mapped {
                    Ok(mapped) => Ok((memory, mapped)),
                    Err(error) => {
                        // SAFETY: nothing uses the memory.
                        unsafe { raw.free_memory(memory, None) };
                        Err(error)
                    }
                }
            });
            let (memory, mapped) = match mapped {
                Ok(mapped) => mapped,
                Err(error) => {
                    // SAFETY: nothing uses the buffer.
                    unsafe { raw.destroy_buffer(buffer, None) };
                    return Err(error);
                }
            };
            // SAFETY: wgpu gets the only handles of both, and destroys them; freeing the memory also unmaps it.
            let managed = unsafe { vulkan::Buffer::from_raw_managed(buffer, memory, 0, needs.size) };
            let description = wgpu::BufferDescriptor {
                label: Some(what),
                size,
                usage: wgpu::BufferUsages::STORAGE,
                mapped_at_creation: false,
            };
            // SAFETY: the buffer is this device's, with this size and usage. Kernels read it only after `write` has written it.
            let buffer = unsafe { device.create_buffer_from_hal::<Vulkan>(managed, &description) };
            Ok(Self { buffer, memory: mapped.cast(), words: words.max(1) })
        }

        /// Writes words from index `at` on. Submissions that follow read them.
        ///
        /// # Panics
        /// If they are not within the buffer.
        pub fn write(&mut self, at: usize, words: &[u32]) {
            assert!(at + words.len() <= self.words, "{} words at {at} of {}", words.len(), self.words);
            // SAFETY: the memory is mapped while `buffer` exists, has this many words, and no submission reads it yet, because
            // kernels are bound to it after the upload.
            unsafe { self.memory.add(at).copy_from_nonoverlapping(words.as_ptr(), words.len()) };
        }
    }

    /// Returns the type of memory of the host, or where the driver has one memory, that.
    fn memory_type(types: &vk::PhysicalDeviceMemoryProperties, accepted: u32) -> Result<u32, vk::Result> {
        let visible = vk::MemoryPropertyFlags::HOST_VISIBLE | vk::MemoryPropertyFlags::HOST_COHERENT;
        let own = vk::MemoryPropertyFlags::DEVICE_LOCAL;
        let find = |is_own: bool| {
            let flags = types.memory_types_as_slice().iter().map(|kind| kind.property_flags);
            let mut types = flags.enumerate().filter(|(index, _)| accepted & 1 << index != 0);
            types.find(|(_, flags)| flags.contains(visible) && flags.contains(own) == is_own)
        };
        let found = find(false).or_else(|| find(true)).map(|(index, _)| index as u32);
        found.ok_or(vk::Result::ERROR_FEATURE_NOT_PRESENT)
    }
}

#[cfg(target_os = "macos")]
pub use metal::{HostBuffer, works};

/// Apple's GPUs have no memory of their own.
#[cfg(target_os = "macos")]
mod metal {
    pub struct HostBuffer {
        pub buffer: wgpu::Buffer,
    }

    pub fn works(_adapter: &wgpu::Adapter) -> bool {
        false
    }

    impl HostBuffer {
        pub fn new(_device: &wgpu::Device, _words: usize, _what: &str) -> Result<Self, std::fmt::Error> {
            Err(std::fmt::Error)
        }

        pub fn write(&mut self, _at: usize, _words: &[u32]) {
            unreachable!("`works` has said so")
        }
    }
}
