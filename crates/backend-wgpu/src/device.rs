//! A GPU: its adapter, pipelines and errors.

use std::{
    collections::HashMap,
    num::NonZero,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use paguro_backend::{LoadError, StepError};
use wgpu::{Features, Limits};

use crate::{
    GpuOptions, Profile, Progress,
    adapter::{Facts, LEAST_THREADS, Rules, UNKNOWN_PROCESSORS, cooperation, cooperative, needed},
    chain, emulate, hidden, host,
    pipeline::Pipeline,
    plan::Args,
    target::Target,
    template::{Constants, SHAPES, Value, expand},
    threadgroup,
};

/// A GPU that this process has opened.
pub struct Device {
    /// Properties that the lowering of programs depends on.
    pub target: Target,
    /// Driver and version.
    pub driver: String,
    /// Choices made from the adapter's properties.
    pub rules: Rules,
    /// Bytes available to models.
    pub bytes_free: u64,
    /// Enabled features.
    pub features: Features,
    /// Limits of the device.
    pub limits: Limits,
    /// True if passes observe Metal's limit of workgroup memory.
    pub is_apple: bool,
    /// True if the patience of waiting kernels is an argument.
    pub starvable: bool,
    /// Set after a kernel gave up waiting for a handoff. Each launch is then submitted separately.
    pub in_doubt: AtomicBool,
    /// Receives the numbers of compiled kernels and of all kernels.
    pub progress: Progress,
    /// Called with a line for people when handoff is turned off.
    pub notice: Option<fn(&str)>,
    /// wgpu's.
    pub inner: wgpu::Device,
    /// wgpu's.
    pub queue: wgpu::Queue,
    /// Bytes of all buffers so far.
    pub allocated: AtomicU64,
    /// Submissions until one is lost; negative if none is to be.
    losing: AtomicI64,
    /// Number of submissions until the one whose kernels give up at once; negative for none.
    starving: AtomicI64,
    pub(super) pipelines: Mutex<HashMap<String, Arc<Pipeline>>>,
    /// Names and sources of kernels that are only shown.
    shown: Mutex<Vec<(String, String)>>,
    /// Error that wgpu reported asynchronously.
    failure: Arc<Mutex<Option<String>>>,
}

/// How long a thread asks for the end of a stage's step before it sleeps: a part of a token of most models.
const SPIN: Duration = Duration::from_millis(3);

/// Fewest processors with which threads may ask instead of sleeping; other threads need some.
const SPIN_PROCESSORS: usize = 8;

/// Bytes of [`Args`], as in `args.wgsl`.
pub const ARGS_BYTES: u32 = size_of::<Args>() as u32;

impl Device {
    /// Opens an adapter with all its features; cooperative matrices are enabled only on request.
    ///
    /// # Errors
    /// The driver's error.
    pub fn open(adapter: &wgpu::Adapter, options: GpuOptions) -> Result<Self, String> {
        let GpuOptions { profile, cooperative: with_cooperative, emulated, .. } = options;
        let as_hardware = profile != Profile::Actual;
        let info = adapter.get_info();
        let is_software = info.device_type == wgpu::DeviceType::Cpu && !as_hardware;
        let rules = Facts::of(adapter).rules();
        if let Some(reason) = rules.refused {
            return Err(reason);
        }
        let cooperative = cooperative(adapter, &rules).filter(|_| with_cooperative && !is_software);
        // A step in several passes cannot be repeated, and short submissions leave little to gain.
        let is_bounded = options.submission.or(rules.submission).is_some();
        let handoff =
            !as_hardware && !is_bounded && hidden::works(adapter) && options.handoff.unwrap_or(rules.handoff);
        let mut features = needed() | Features::TIMESTAMP_QUERY & adapter.features();
        if handoff {
            features |= hidden::FEATURES;
        }
        if cooperative.is_some() {
            features |= cooperation();
        }
        if emulated {
            features |= Features::SHADER_F16;
        }
        let mut limits = adapter.limits();
        let is_apple = profile == Profile::Apple || info.backend == wgpu::Backend::Metal;
        if is_apple {
            limits.max_compute_workgroup_storage_size =
                limits.max_compute_workgroup_storage_size.min(threadgroup::MOST);
        }
        // SAFETY: what is experimental is only reached by this crate's own kernels, which a test holds to the reference.
        let experimental = unsafe { wgpu::ExperimentalFeatures::enabled() };
        let request = adapter.request_device(&wgpu::DeviceDescriptor {
            label: Some("paguro"),
            required_features: features,
            required_limits: limits.clone(),
            experimental_features: match cooperative {
                Some(_) => experimental,
                None => wgpu::ExperimentalFeatures::disabled(),
            },
            memory_hints: wgpu::MemoryHints::Performance,
            trace: wgpu::Trace::Off,
        });
        let (inner, queue) =
            pollster::block_on(request).map_err(|error| format!("{} does not open: {error}", info.name))?;
        let failure = Arc::new(Mutex::new(None));
        let (lost, uncaptured) = (failure.clone(), failure.clone());
        inner.set_device_lost_callback(move |reason, message| {
            note(&lost, format!("the device was lost ({reason:?}): {message}"));
        });
        inner.on_uncaptured_error(Arc::new(move |error| note(&uncaptured, error_text(&error))));
        let mut device = Self {
            driver: format!("{} {} ({:?})", info.driver, info.driver_info, info.backend),
            target: Target {
                name: info.name,
                is_software,
                as_hardware,
                emulated,
                cooperative: if emulated { Some(emulate::SIDE) } else { cooperative },
                subgroup: match emulated {
                    true => emulate::SUBGROUP,
                    false if as_hardware => 32,
                    false => rules.subgroup,
                },
                most_threads: match profile {
                    Profile::Actual => rules.most_threads,
                    Profile::Nvidia => limits.max_compute_invocations_per_workgroup,
                    Profile::Apple => LEAST_THREADS,
                },
                workgroup_threads: limits.max_compute_invocations_per_workgroup,
                workgroup_memory: limits.max_compute_workgroup_storage_size,
                workgroups: limits.max_compute_workgroups_per_dimension,
                binding_limit: rules.binding_limit,
                processors: if as_hardware || emulated { UNKNOWN_PROCESSORS } else { rules.processors },
                has_host_memory: host::works(adapter),
                handoff,
                timed: options.timed,
            },
            bytes_free: options.memory.map_or(rules.bytes_free, |memory| memory.min(rules.bytes_free)),
            starvable: options.starvable,
            is_apple,
            rules,
            in_doubt: AtomicBool::new(false),
            progress: options.progress,
            notice: options.notice,
            features,
            limits,
            inner,
            queue,
            allocated: AtomicU64::new(0),
            losing: AtomicI64::new(-1),
            starving: AtomicI64::new(-1),
            pipelines: Mutex::default(),
            shown: Mutex::default(),
            failure,
        };
        device.target.handoff =
            handoff && chain::holds(&device).map_err(|error| format!("{}: {error}", device.target.name))?;
        Ok(device)
    }

    /// Returns true if models loaded from now on use handoff without barriers.
    pub fn uses_handoff(&self) -> bool {
        self.target.handoff && !self.in_doubt.load(Ordering::Relaxed)
    }

    /// Returns the device as the lowering of programs sees it now.
    pub fn now(&self) -> Target {
        Target { handoff: self.uses_handoff(), ..self.target.clone() }
    }

    /// Stores the source of a kernel that this GPU may not support, for inspection.
    pub fn show(&self, name: &str, files: &[&str], constants: &Constants) {
        let mut constants = constants.clone();
        constants.push(("ARGUMENTS", Value::U(0)));
        let kernel = (name.to_owned(), expand(files, &constants, &Constants::new()));
        let mut shown = lock(&self.shown);
        if !shown.contains(&kernel) {
            shown.push(kernel);
        }
    }

    /// Returns the constants of a kernel that are passed as arguments, after `Args`. Of more than the device accepts, the rest
    /// stays in the source.
    pub fn arguments(&self, constants: &Constants) -> Constants {
        if !self.target.is_software {
            return Vec::new();
        }
        let most = (self.inner.limits().max_immediate_size - ARGS_BYTES) / 4;
        let shapes = constants.iter().filter(|(name, _)| SHAPES.contains(name));
        shapes.take(most as usize).copied().collect()
    }

    /// Name and source of every kernel that was compiled or shown.
    pub fn kernels(&self) -> Vec<(String, String)> {
        let pipelines = lock(&self.pipelines);
        let keys = pipelines.keys().filter_map(|key| key.split_once('\n'));
        let compiled = keys.map(|(name, source)| (name.to_owned(), source.to_owned()));
        compiled.chain(lock(&self.shown).iter().cloned()).collect()
    }

    /// Creates a storage buffer of `words` words.
    ///
    /// # Errors
    /// Not enough memory, or the buffer exceeds a binding.
    pub fn buffer(&self, words: usize, what: &str) -> Result<wgpu::Buffer, LoadError> {
        self.buffer_for(words, what, wgpu::BufferUsages::STORAGE)
    }

    /// A buffer that the host reads.
    ///
    /// # Errors
    /// No memory.
    pub fn host_buffer(&self, words: usize, what: &str) -> Result<wgpu::Buffer, LoadError> {
        self.buffer_for(words, what, wgpu::BufferUsages::MAP_READ)
    }

    /// A buffer that the host writes, which is mapped.
    ///
    /// # Errors
    /// No memory.
    pub fn upload_buffer(&self, words: usize, what: &str) -> Result<wgpu::Buffer, LoadError> {
        self.buffer_for(words, what, wgpu::BufferUsages::MAP_WRITE)
    }

    /// A buffer that timestamps are put into.
    ///
    /// # Errors
    /// No memory.
    pub fn query_buffer(&self, words: usize) -> Result<wgpu::Buffer, LoadError> {
        self.buffer_for(words, "timestamps", wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC)
    }

    fn buffer_for(
        &self,
        words: usize,
        what: &str,
        usage: wgpu::BufferUsages,
    ) -> Result<wgpu::Buffer, LoadError> {
        let size = (words as u64 * 4).next_multiple_of(16).max(16);
        let out_of_memory = || LoadError::OutOfMemory {
            device: self.target.name.clone(),
            what: what.to_owned(),
            needed: size,
        };
        let on_device = usage.contains(wgpu::BufferUsages::STORAGE);
        let most = if on_device { self.target.binding_limit } else { self.limits.max_buffer_size };
        if size > most {
            return Err(LoadError::Unsupported {
                device: self.target.name.clone(),
                what: format!("a buffer of {size} bytes for {what}"),
                supported: format!(
                    "its driver allows {most} bytes for one buffer, however much memory is free; a smaller context, fewer \
                     sequences or a smaller --batch-tokens make buffers smaller"
                ),
            });
        }
        let scopes = (
            self.inner.push_error_scope(wgpu::ErrorFilter::Validation),
            self.inner.push_error_scope(wgpu::ErrorFilter::OutOfMemory),
        );
        let is_upload = usage.contains(wgpu::BufferUsages::MAP_WRITE);
        let copies = match (on_device, is_upload) {
            (true, _) => wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::COPY_SRC,
            (false, true) => wgpu::BufferUsages::COPY_SRC,
            (false, false) => wgpu::BufferUsages::COPY_DST,
        };
        let buffer = self.inner.create_buffer(&wgpu::BufferDescriptor {
            label: Some(what),
            size,
            usage: usage | copies,
            mapped_at_creation: is_upload,
        });
        let (validation, memory) = scopes;
        let memory = pollster::block_on(memory.pop());
        let validation = pollster::block_on(validation.pop());
        match (memory, validation) {
            (None, None) => {
                self.allocated.fetch_add(size, Ordering::Relaxed);
                Ok(buffer)
            }
            _ => Err(out_of_memory()),
        }
    }

    /// Creates a buffer with this content.
    ///
    /// # Errors
    /// See [`Device::buffer`].
    pub fn upload<T: bytemuck::NoUninit>(&self, data: &[T], what: &str) -> Result<wgpu::Buffer, LoadError> {
        let bytes: &[u8] = bytemuck::cast_slice(data);
        let buffer = self.buffer(bytes.len().div_ceil(4), what)?;
        self.queue.write_buffer(&buffer, 0, bytes);
        Ok(buffer)
    }

    /// For commands of a step.
    pub fn encoder(&self) -> wgpu::CommandEncoder {
        self.inner.create_command_encoder(&wgpu::CommandEncoderDescriptor { label: Some("step") })
    }

    /// See [`crate::Gpu::lose_submission`].
    pub fn lose_submission(&self, after: u32) {
        self.losing.store(after.into(), Ordering::Relaxed);
    }

    /// Fault injection: true if the next submission of a step is to be lost.
    pub fn loses_next(&self) -> bool {
        is_now(&self.losing)
    }

    /// See [`crate::Gpu::starve_handoff`].
    pub fn starve_handoff(&self, after: u32) {
        self.in_doubt.store(false, Ordering::Relaxed);
        self.starving.store(after.into(), Ordering::Relaxed);
    }

    /// Fault injection: returns true if kernels of the next submission must give up at once.
    pub fn starves_next(&self) -> bool {
        is_now(&self.starving)
    }

    /// Returns a flag that [`Device::is_done`] sets when the device has done all that was submitted until now.
    pub fn end_of_submissions(&self) -> Arc<AtomicBool> {
        let is_done = Arc::new(AtomicBool::new(false));
        let own = Arc::clone(&is_done);
        self.queue.on_submitted_work_done(move || own.store(true, Ordering::Release));
        is_done
    }

    /// Returns true if the device has reached the place of a flag, or has failed.
    pub fn is_done(&self, flag: &AtomicBool) -> bool {
        self.inner.poll(wgpu::PollType::Poll).is_err() || flag.load(Ordering::Acquire)
    }

    /// Waits until the device has done all that was submitted.
    ///
    /// # Errors
    /// The device failed.
    pub fn wait(&self) -> Result<(), StepError> {
        self.poll(None)
    }

    /// Waits for the end of a submission.
    ///
    /// # Errors
    /// The device failed.
    pub fn wait_for(&self, submission: wgpu::SubmissionIndex) -> Result<(), StepError> {
        self.poll(Some(submission))
    }

    fn poll(&self, submission_index: Option<wgpu::SubmissionIndex>) -> Result<(), StepError> {
        let polled = self.inner.poll(wgpu::PollType::Wait { submission_index, timeout: None });
        self.check()?;
        polled.map(|_| ()).map_err(|error| self.failed(&error.to_string()))
    }

    /// Waits for the submission that writes a buffer, and reads its first bytes.
    ///
    /// # Errors
    /// The device failed.
    pub fn read(
        &self,
        buffer: &wgpu::Buffer,
        bytes: usize,
        submission: wgpu::SubmissionIndex,
        look: impl FnOnce(&[u8]),
    ) -> Result<(), StepError> {
        let slice = buffer.slice(..bytes as u64);
        slice.map_async(wgpu::MapMode::Read, |_| ());
        self.wait_for(submission)?;
        match slice.get_mapped_range() {
            Ok(view) => look(&view),
            Err(error) => return Err(self.failed(&error.to_string())),
        }
        buffer.unmap();
        Ok(())
    }

    /// Returns how long a thread may ask for the end of a step before it sleeps: not at all if it would take processors or power from
    /// the device.
    pub fn spin(&self) -> Duration {
        let processors = thread::available_parallelism().map_or(1, NonZero::get);
        let is_discrete = self.inner.adapter_info().device_type == wgpu::DeviceType::DiscreteGpu;
        if is_discrete && processors >= SPIN_PROCESSORS { SPIN } else { Duration::ZERO }
    }

    /// Checks for a reported failure.
    ///
    /// # Errors
    /// The failure.
    pub fn check(&self) -> Result<(), StepError> {
        match &*lock(&self.failure) {
            None => Ok(()),
            Some(failure) => Err(self.failed(failure)),
        }
    }

    fn failed(&self, what: &str) -> StepError {
        StepError::Device(format!(
            "{} failed: {what}; start again, or run with --device cpu",
            self.target.name
        ))
    }
}

/// Counts down, and returns true once, at the end.
fn is_now(count: &AtomicI64) -> bool {
    count.load(Ordering::Relaxed) >= 0 && count.fetch_sub(1, Ordering::Relaxed) == 0
}

fn note(failure: &Mutex<Option<String>>, message: String) {
    // The first one is the cause of the others.
    lock(failure).get_or_insert(message);
}

/// An error in one line.
pub fn error_text(error: &wgpu::Error) -> String {
    let text = error.to_string();
    let lines: Vec<_> = text.lines().map(str::trim).filter(|line| !line.is_empty()).take(6).collect();
    lines.join(" ")
}

/// Locks a mutex whose value no panic leaves inconsistent.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the names of the features that select kernels.
pub fn feature_names(device: &Device) -> Vec<String> {
    let limits = &device.limits;
    let mut names = vec![
        format!("bindings of {} MiB", device.target.binding_limit >> 20),
        format!("subgroups of {} threads", device.target.subgroup),
        format!("workgroups of {} threads", limits.max_compute_invocations_per_workgroup),
        format!("{} KiB of workgroup memory", limits.max_compute_workgroup_storage_size >> 10),
    ];
    names.extend(device.uses_handoff().then(|| "handoff without barriers".to_owned()));
    names.extend(device.target.cooperative.map(|side| format!("cooperative matrices of {side}")));
    names
}
