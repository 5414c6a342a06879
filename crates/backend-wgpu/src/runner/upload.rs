//! Given rows on their way to the device: rows of an image have tens of megabytes, so the host writes them once, into memory that the
//! device copies from.

use bytemuck::cast_slice;
use paguro_backend::{LoadError, Step, StepError};

use crate::device::Device;

/// Memory of the host for the given rows of one step at a time.
pub struct Upload {
    buffer: wgpu::Buffer,
    /// True if the host may write.
    is_mapped: bool,
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
        let buffer = device.upload_buffer(words, "given rows")?;
        Ok(Self { buffer, is_mapped: true, last: None, bytes: 0 })
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
        let mut commands = device.encoder();
        self.prepare(device, step, to, &mut commands)?;
        self.fill(step)?;
        self.note(number, device.queue.submit([commands.finish()]));
        Ok(())
    }

    /// Adds commands that copy the given rows of a step to a buffer of the device; the rows must be [filled](Upload::fill) in before these are
    /// submitted, which must be [noted](Upload::note). It waits for the copy of earlier rows.
    ///
    /// # Errors
    /// The device failed.
    pub fn prepare(
        &mut self,
        device: &Device,
        step: &Step<'_>,
        to: &wgpu::Buffer,
        commands: &mut wgpu::CommandEncoder,
    ) -> Result<(), StepError> {
        let submission = self.last.take().map(|(_, submission)| submission);
        if !self.is_mapped {
            self.buffer.slice(..).map_async(wgpu::MapMode::Write, |_| ());
            match submission {
                Some(submission) => device.wait_for(submission)?,
                None => device.wait()?,
            }
            self.is_mapped = true;
        }
        self.bytes = step.given.iter().map(|given| size_of_val(given.values) as u64).sum();
        self.copy(commands, to);
        Ok(())
    }

    /// Writes the given rows of the step that is prepared.
    ///
    /// # Errors
    /// The device failed.
    pub fn fill(&mut self, step: &Step<'_>) -> Result<(), StepError> {
        match self.buffer.get_mapped_range_mut(..self.bytes) {
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
        self.is_mapped = false;
        Ok(())
    }

    /// Notes the submission of the step that was prepared.
    pub fn note(&mut self, number: u64, submission: wgpu::SubmissionIndex) {
        self.last = Some((number, submission));
    }

    /// Copies the rows of a step that is repeated. Returns false if those of another step have replaced them.
    pub fn repeat(&mut self, device: &Device, number: u64, to: &wgpu::Buffer) -> bool {
        let is_there = self.last.as_ref().is_some_and(|(step, _)| *step == number);
        if is_there {
            let mut commands = device.encoder();
            self.copy(&mut commands, to);
            self.note(number, device.queue.submit([commands.finish()]));
        }
        is_there
    }

    fn copy(&self, commands: &mut wgpu::CommandEncoder, to: &wgpu::Buffer) {
        commands.copy_buffer_to_buffer(&self.buffer, 0, to, 0, self.bytes);
    }
}

/// Returns the memory for the given rows of a step.
pub fn upload_of(uploads: &mut [Upload], step: u64) -> Option<&mut Upload> {
    let count = uploads.len().max(1);
    uploads.get_mut(step as usize % count)
}
