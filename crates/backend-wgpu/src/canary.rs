//! Detection of submissions that the device has not run.
//!
//! On Metal, wgpu cannot distinguish a command buffer that failed (a watchdog, too little memory, a fault) from one
//! that succeeded, and the host would read results of an earlier step. Therefore each submission ends with a copy of
//! the step's mark to its own place, and a step is valid only if all its marks have arrived. A repeated step has
//! another mark.

use paguro_backend::{LoadError, StepError};

use crate::device::Device;

/// Maximum number of submissions of [`paguro_backend::Runner::move_pages`] between two steps.
const MOVES: usize = 256;

/// Marks of the two steps that may be on the device.
pub struct Canaries {
    /// The mark of the step that is being submitted.
    mark: wgpu::Buffer,
    /// Readback buffer of each of the two steps: answers, and marks behind them.
    host: [wgpu::Buffer; 2],
    /// Bytes of the answers.
    answers: usize,
    /// Maximum number of submissions of a step.
    most: usize,
    /// Submissions so far.
    counts: [usize; 2],
    /// Marks of the two steps.
    marks: [u32; 2],
    /// The last mark that was assigned.
    last: u32,
    /// The mark that is on the device.
    on_device: u32,
    /// Commands that are held instead of submitted.
    held: Option<Vec<wgpu::CommandBuffer>>,
}

impl Canaries {
    /// Creates the buffers for steps with at most `submissions` submissions and `answers` words of results.
    ///
    /// # Errors
    /// Not enough memory.
    pub fn new(device: &Device, answers: usize, submissions: usize) -> Result<Self, LoadError> {
        let most = submissions + MOVES;
        let host = || device.host_buffer(answers + most, "answers of a step");
        Ok(Self {
            mark: device.buffer(1, "the mark of a step")?,
            host: [host()?, host()?],
            answers: 4 * answers,
            most,
            counts: [0; 2],
            marks: [0; 2],
            last: 0,
            on_device: 0,
            held: None,
        })
    }

    /// The host's buffer for answers of a step.
    pub fn answers(&self, step: u64) -> &wgpu::Buffer {
        &self.host[flight_index(step)]
    }

    /// Holds commands from now on.
    pub fn hold(&mut self) {
        self.held = Some(Vec::new());
    }

    /// Returns true if commands are held.
    pub fn holds(&self) -> bool {
        self.held.is_some()
    }

    /// Submits the commands that are held.
    pub fn release(&mut self, device: &Device) -> Option<wgpu::SubmissionIndex> {
        self.held.take().map(|held| device.queue.submit(held))
    }

    /// Submits commands of a step, or of page moves before it. Returns nothing if they are held.
    ///
    /// # Errors
    /// Too many submissions.
    pub fn submit(
        &mut self,
        device: &Device,
        step: u64,
        mut commands: wgpu::CommandEncoder,
    ) -> Result<Option<wgpu::SubmissionIndex>, StepError> {
        let count = &mut self.counts[flight_index(step)];
        let mark = &mut self.marks[flight_index(step)];
        if *count == self.most {
            return Err(StepError::Invalid(format!("more than {count} submissions for one step")));
        }
        if *count == 0 {
            self.last = self.last.wrapping_add(1);
            *mark = self.last;
        }
        if self.on_device != *mark {
            device.queue.write_buffer(&self.mark, 0, &mark.to_le_bytes());
            self.on_device = *mark;
        }
        let at = (self.answers + 4 * *count) as u64;
        commands.copy_buffer_to_buffer(&self.mark, 0, &self.host[flight_index(step)], at, 4);
        *count += 1;
        let commands = (!device.loses_next()).then(|| commands.finish());
        if let Some(held) = &mut self.held {
            held.extend(commands);
            return Ok(None);
        }
        Ok(Some(device.queue.submit(commands)))
    }

    /// Forgets the submissions of a step that failed before it was complete, or that is to be repeated.
    pub fn forget(&mut self, step: u64) {
        self.counts[flight_index(step)] = 0;
    }

    /// Forgets a step that is held, or that failed while it was encoded to be held.
    pub fn discard(&mut self, step: u64) {
        self.forget(step);
        self.held = None;
    }

    /// Waits for a step's last submission and reads the first `bytes` bytes of its answers.
    ///
    /// # Errors
    /// The device failed, or did not run everything.
    pub fn read(
        &mut self,
        device: &Device,
        step: u64,
        bytes: usize,
        submission: wgpu::SubmissionIndex,
        look: impl FnOnce(&[u8]),
    ) -> Result<(), StepError> {
        let count = std::mem::take(&mut self.counts[flight_index(step)]);
        let (mut missing, mark) = (0, self.marks[flight_index(step)].to_le_bytes());
        device.read(&self.host[flight_index(step)], self.answers + 4 * count, submission, |words| {
            let marks = words[self.answers..].as_chunks::<4>().0;
            missing = marks.iter().filter(|found| **found != mark).count();
            if missing == 0 {
                look(&words[..bytes]);
            }
        })?;
        match missing {
            0 => Ok(()),
            _ => Err(StepError::Device(format!(
                "{} did not run {missing} of {count} command buffers of a step: its driver may have stopped them for taking too \
                 long, or have run out of memory; try a smaller --batch-tokens or --ctx, or --device cpu",
                device.target.name
            ))),
        }
    }
}

/// Returns the index of a step's buffers.
fn flight_index(step: u64) -> usize {
    step as usize % 2
}
