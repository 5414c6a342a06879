//! Given rows on their way to the device: rows of an image have tens of megabytes, so the host writes them once, into memory that the
//! device copies from.

use bytemuck::cast_slice;
use paguro_backend::{LoadError, Step, StepError};

use crate::device::Device;

/// Memory of the host for the given rows of a step.
pub struct Upload {
    buffer: wgpu::Buffer,
    /// The step whose rows it has, and the submission that copies them; none before the first one.
    last: Option<(u64, wgpu::SubmissionIndex)>,
    bytes: u64,
}

impl Upload {
    /// Allocates memory for `words` words.
    ///
    /// # Errors
    /// Not enough memory.
    pub fn new(device: &Device, words: usize) -> Result<Self, LoadError> {
        Ok(Self { buffer: device.upload_buffer(words, "given rows")?, last: None, bytes: 0 })
    }

    /// Writes the given rows of a step, and submits their copy to a buffer of the device. It waits for the copy of earlier rows.
    ///
    /// # Errors
    /// The device failed.
    pub fn write(
        &mut self,
        device: &Device,
        number: u64,
        step: &Step<'_>,
        to: &wgpu::Buffer,
    ) -> Result<(), StepError> {
        if let Some((_, submission)) = self.last.take() {
            self.buffer.slice(..).map_async(wgpu::MapMode::Write, |_| ());
            device.wait_for(submission)?;
        }
        let bytes: usize = step.given.iter().map(|given| size_of_val(given.values)).sum();
        match self.buffer.get_mapped_range_mut(..bytes as u64) {
            Ok(mut view) => {
                let mut at = 0;
                for given in step.given {
                    let values: &[u8] = cast_slice(given.values);
                    view.slice(at..at + values.len()).copy_from_slice(values);
                    at += values.len();
                }
            }
            Err(error) => return Err(StepError::Device(error.to_string())),
        }
        self.buffer.unmap();
        self.bytes = bytes as u64;
        self.last = Some((number, self.submit(device, to)));
        Ok(())
    }

    /// Copies the rows of a step that is repeated. Returns false if those of another step have replaced them.
    pub fn repeat(&mut self, device: &Device, number: u64, to: &wgpu::Buffer) -> bool {
        let is_there = self.last.as_ref().is_some_and(|(step, _)| *step == number);
        if is_there {
            self.last = Some((number, self.submit(device, to)));
        }
        is_there
    }

    fn submit(&self, device: &Device, to: &wgpu::Buffer) -> wgpu::SubmissionIndex {
        let mut commands = device.encoder();
        commands.copy_buffer_to_buffer(&self.buffer, 0, to, 0, self.bytes);
        device.queue.submit([commands.finish()])
    }
}
