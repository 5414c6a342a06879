//! Kernel statistics: launches by name, and optionally times.
//!
//! While launches are timed, only attention and its merge use handoff, and count as one kernel.

use paguro_backend::{KernelCount, LoadError, StepError};

use crate::device::Device;

/// Counts since load.
pub struct KernelStatistics {
    names: Vec<String>,
    launches: Vec<u64>,
    nanoseconds: Vec<u64>,
    clock: Option<Clock>,
}

/// The device's clock, read before and after all launches of a kernel. Reading it between two launches would prevent
/// their overlap.
struct Clock {
    queries: wgpu::QuerySet,
    resolved: wgpu::Buffer,
    host: wgpu::Buffer,
    /// Nanoseconds of a tick.
    period: f64,
}

impl KernelStatistics {
    /// Creates the statistics of kernels with these names, with times if requested and supported.
    ///
    /// # Errors
    /// Not enough memory for the timestamps.
    pub fn new(device: &Device, names: Vec<String>) -> Result<Self, LoadError> {
        let count = names.len();
        let clock = Self::clock(device, count)?;
        Ok(Self { names, launches: vec![0; count], nanoseconds: vec![0; count], clock })
    }

    /// Adds the kernels of a list of names that begins with the known ones.
    ///
    /// # Errors
    /// As [`KernelStatistics::new`].
    pub fn extend(&mut self, device: &Device, names: &[String]) -> Result<(), LoadError> {
        self.clock = Self::clock(device, names.len())?;
        self.names = names.to_vec();
        self.launches.resize(names.len(), 0);
        self.nanoseconds.resize(names.len(), 0);
        Ok(())
    }

    /// Names of the kernels.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    fn clock(device: &Device, count: usize) -> Result<Option<Clock>, LoadError> {
        Ok(match device.target.timed && device.features.contains(wgpu::Features::TIMESTAMP_QUERY) {
            false => None,
            true => Some(Clock {
                queries: device.inner.create_query_set(&wgpu::QuerySetDescriptor {
                    label: Some("kernels"),
                    ty: wgpu::QueryType::Timestamp,
                    count: 2 * count as u32,
                }),
                resolved: device.query_buffer(4 * count)?,
                host: device.host_buffer(4 * count, "timestamps")?,
                period: f64::from(device.queue.get_timestamp_period()),
            }),
        })
    }

    /// A kernel was launched.
    pub fn launched(&mut self, kernel: usize) {
        self.launches[kernel] += 1;
    }

    /// Times kernels, if requested: `encode` encodes all launches of one.
    ///
    /// # Errors
    /// The device failed.
    pub fn time(
        &mut self,
        device: &Device,
        kernels: &[usize],
        encode: impl Fn(&mut wgpu::ComputePass<'_>, usize),
    ) -> Result<(), StepError> {
        let Some(clock) = &self.clock else { return Ok(()) };
        let mut encoder = device.inner.create_command_encoder(&Default::default());
        for (index, &kernel) in kernels.iter().enumerate() {
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor {
                label: Some(&self.names[kernel]),
                timestamp_writes: Some(wgpu::ComputePassTimestampWrites {
                    query_set: &clock.queries,
                    beginning_of_pass_write_index: Some(2 * index as u32),
                    end_of_pass_write_index: Some(2 * index as u32 + 1),
                }),
            });
            encode(&mut pass, kernel);
        }
        let count = 2 * kernels.len();
        encoder.resolve_query_set(&clock.queries, 0..count as u32, &clock.resolved, 0);
        encoder.copy_buffer_to_buffer(&clock.resolved, 0, &clock.host, 0, count as u64 * 8);
        let submission = device.queue.submit([encoder.finish()]);
        let (nanoseconds, period) = (&mut self.nanoseconds, clock.period);
        device.read(&clock.host, count * 8, submission, |bytes| {
            let times: Vec<u64> =
                bytes.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
            for (pair, &kernel) in times.as_chunks::<2>().0.iter().zip(kernels) {
                nanoseconds[kernel] += (pair[1].saturating_sub(pair[0]) as f64 * period) as u64;
            }
        })
    }

    /// Returns the kernels that ran.
    pub fn snapshot(&self) -> Vec<KernelCount> {
        let counts = self.names.iter().zip(&self.launches).zip(&self.nanoseconds);
        counts
            .filter(|((_, launches), _)| **launches > 0)
            .map(|((name, &launches), &nanoseconds)| KernelCount {
                name: name.clone(),
                launches,
                nanoseconds,
            })
            .collect()
    }
}
