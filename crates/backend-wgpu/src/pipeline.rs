//! Kernels on the device: described while a model is lowered, and then compiled together on all cores.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use paguro_backend::LoadError;

use crate::{
    device::{ARGS_BYTES, Device, error_text, lock},
    emulate,
    hidden::{self, Hazards},
    template::{Constants, Value, expand},
    threadgroup,
};

/// A kernel.
pub struct Pipeline {
    /// Its name, as it is counted.
    pub name: String,
    /// Lengths of its workgroup arrays, where passes depend on them.
    lengths: OnceLock<Vec<u32>>,
    source: String,
    /// Bytes of its immediate values.
    immediates: u32,
    /// True if wgpu must not inspect it.
    hides: bool,
    layout: wgpu::BindGroupLayout,
    /// Name of each binding, by number.
    bindings: Vec<(u32, String)>,
    /// Result of the compilation.
    compiled: OnceLock<Result<wgpu::ComputePipeline, String>>,
}

impl Pipeline {
    /// Returns wgpu's pipeline.
    ///
    /// # Panics
    /// If it was not compiled: [`Device::compile_all`] precedes all steps.
    pub fn inner(&self) -> &wgpu::ComputePipeline {
        match self.compiled.get() {
            Some(Ok(compiled)) => compiled,
            _ => panic!("kernel {} was not compiled", self.name),
        }
    }
}

impl Pipeline {
    /// Names of its buffers.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.bindings.iter().map(|(_, name)| name.as_str())
    }

    /// Returns true if wgpu must not inspect it.
    pub fn hides(&self) -> bool {
        self.hides
    }

    /// Lengths of its workgroup arrays, where passes depend on them.
    pub fn lengths(&self) -> &[u32] {
        self.lengths.get().map_or(&[], Vec::as_slice)
    }
}

impl Device {
    /// Returns the shared pipeline of these files with these constants. [`Device::compile_all`] compiles it.
    pub fn pipeline(
        &self,
        name: &str,
        files: &[&str],
        constants: &Constants,
        hazards: &Hazards,
    ) -> Arc<Pipeline> {
        let arguments = self.arguments(constants);
        let mut constants = constants.clone();
        constants.push(("ARGUMENTS", Value::U(arguments.len() as u32)));
        if self.starvable {
            constants.push(("STARVABLE", Value::U(1)));
        }
        let mut source = expand(files, &constants, &arguments);
        if self.target.emulated {
            source = emulate::emulate(&source);
        }
        let key = format!("{name}\n{source}");
        let mut pipelines = lock(&self.pipelines);
        pipelines
            .entry(key)
            .or_insert_with(|| Arc::new(self.describe(name, source, arguments.len() as u32, hazards)))
            .clone()
    }

    fn describe(&self, name: &str, source: String, arguments: u32, hazards: &Hazards) -> Pipeline {
        let bindings = bindings(&source);
        let entry = |(binding, name, read_only): &(u32, String, bool)| wgpu::BindGroupLayoutEntry {
            binding: *binding,
            visibility: wgpu::ShaderStages::COMPUTE,
            ty: wgpu::BindingType::Buffer {
                ty: wgpu::BufferBindingType::Storage { read_only: hazards.told_read_only(name, *read_only) },
                has_dynamic_offset: false,
                min_binding_size: None,
            },
            count: None,
        };
        let entries: Vec<_> = bindings.iter().map(entry).collect();
        let layout = self.inner.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
            label: Some(name),
            entries: &entries,
        });
        Pipeline {
            name: name.to_owned(),
            lengths: OnceLock::new(),
            source,
            immediates: ARGS_BYTES + 4 * arguments,
            hides: hazards.hides(),
            layout,
            bindings: bindings.into_iter().map(|(binding, name, _)| (binding, name)).collect(),
            compiled: OnceLock::new(),
        }
    }

    /// Compiles all requested pipelines that are not compiled yet, on all cores.
    ///
    /// # Errors
    /// The compiler's error.
    pub fn compile_all(&self) -> Result<(), LoadError> {
        let some: Vec<_> = lock(&self.pipelines)
            .values()
            .filter(|pipeline| pipeline.compiled.get().is_none())
            .cloned()
            .collect();
        let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let threads = thread::available_parallelism().map_or(1, usize::from).min(some.len());
        thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    while let Some(pipeline) = some.get(next.fetch_add(1, Ordering::Relaxed)) {
                        // Another load may be at it, and is waited for then.
                        pipeline.compiled.get_or_init(|| self.compile(pipeline));
                        self.progress.set(done.fetch_add(1, Ordering::Relaxed) + 1, some.len());
                    }
                });
            }
        });
        let failed = some.iter().find_map(|pipeline| match pipeline.compiled.get() {
            Some(Err(error)) => Some((&pipeline.name, error)),
            _ => None,
        });
        let Some((name, error)) = failed else { return Ok(()) };
        // A later request returns the error again.
        lock(&self.pipelines).retain(|_, pipeline| !matches!(pipeline.compiled.get(), Some(Err(_))));
        let device = &self.target.name;
        Err(LoadError::Device(format!(
            "{device} does not accept the kernel {name}: {error}; run with --device cpu"
        )))
    }

    fn compile(&self, pipeline: &Pipeline) -> Result<wgpu::ComputePipeline, String> {
        let Pipeline { name, source, immediates, hides, layout, bindings, .. } = pipeline;
        if self.is_apple {
            pipeline.lengths.get_or_init(|| threadgroup::lengths(name, source));
        }
        let device = &self.inner;
        let scope = device.push_error_scope(wgpu::ErrorFilter::Validation);
        let pipeline_layout = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label: Some(name),
            bind_group_layouts: &[Some(layout)],
            immediate_size: *immediates,
        });
        let descriptor = wgpu::ShaderModuleDescriptor {
            label: Some(name),
            source: wgpu::ShaderSource::Wgsl(source.into()),
        };
        let module = match hides {
            true => hidden::module(device, name, source, bindings.iter().map(|(binding, _)| *binding)),
            // SAFETY: the kernels are this crate's own. They index by rows, pages, tables and shapes that `Step::validate` and
            // `Program::check` have bounded, with buffers allocated for these bounds, and their loops end.
            false => unsafe {
                device.create_shader_module_trusted(descriptor, wgpu::ShaderRuntimeChecks::unchecked())
            },
        };
        let compiled = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(name),
            layout: Some(&pipeline_layout),
            module: &module,
            entry_point: Some("main"),
            compilation_options: wgpu::PipelineCompilationOptions {
                zero_initialize_workgroup_memory: false,
                ..Default::default()
            },
            cache: None,
        });
        match pollster::block_on(scope.pop()) {
            None => Ok(compiled),
            Some(error) => Err(error_text(&error)),
        }
    }

    /// Binds buffers by their names in the kernel; unused ones are ignored.
    ///
    /// # Panics
    /// If a buffer is missing, which is a defect of the lowering.
    pub fn bind(&self, pipeline: &Pipeline, buffers: &[(&str, &wgpu::Buffer)]) -> wgpu::BindGroup {
        let entries: Vec<_> = pipeline
            .bindings
            .iter()
            .map(|(binding, name)| {
                let buffer = buffers.iter().find(|(known, _)| known == name);
                let (_, buffer) =
                    buffer.unwrap_or_else(|| panic!("kernel {} has no buffer for {name}", pipeline.name));
                wgpu::BindGroupEntry { binding: *binding, resource: buffer.as_entire_binding() }
            })
            .collect();
        self.inner.create_bind_group(&wgpu::BindGroupDescriptor {
            label: Some(&pipeline.name),
            layout: &pipeline.layout,
            entries: &entries,
        })
    }
}

/// Binding number, name, and whether it is only read, of every buffer in a kernel's source.
fn bindings(source: &str) -> Vec<(u32, String, bool)> {
    let mut bindings: Vec<_> = source
        .lines()
        .filter_map(|line| {
            let rest = line.trim_start().trim_start_matches("@coherent @volatile ");
            let rest = rest.strip_prefix("@group(0) @binding(")?;
            let (number, rest) = rest.split_once(')')?;
            let rest = rest.trim_start().strip_prefix("var<storage, ")?;
            let (access, rest) = rest.split_once('>')?;
            let (name, _) = rest.trim_start().split_once(':')?;
            Some((number.parse().ok()?, name.to_owned(), access == "read"))
        })
        .collect();
    bindings.sort();
    bindings
}
