//! Test at the opening of a device: whether launches can use handoff without barriers.
//!
//! Handoff requires that workgroups start in the order of launches, and that written words become visible to running
//! workgroups. No API guarantees either. If both hold, a chain of launches, each waiting for the previous one and with
//! more workgroups than the device runs concurrently, ends soon with the correct words.

use bytemuck::{bytes_of, cast_slice};
use paguro_backend::LoadError;

use crate::{device::Device, hidden::Hazards, plan::Args, template::Value::U};

/// Launches of the chain.
const LINKS: u32 = 200;
/// Workgroups of a launch: several for each processor of the largest GPUs.
const WORKGROUPS: u32 = 2048;
/// Size of the chain for software drivers, which run workgroups one after the other.
const SOFTWARE: [u32; 2] = [8, 16];

/// Words whose writes wgpu does not see.
const HAZARDS: Hazards = Hazards { hidden: &["words", "lost"], ends: &[] };

/// Returns whether the chain held.
///
/// # Errors
/// No memory; the device failed.
pub fn holds(device: &Device) -> Result<bool, LoadError> {
    let [links, workgroups] = if device.target.is_software { SOFTWARE } else { [LINKS, WORKGROUPS] };
    let failed = |error: paguro_backend::StepError| LoadError::Device(error.to_string());
    let words = device.upload(&vec![0_u32; (links * workgroups * 4) as usize], "a chain of launches")?;
    let lost = device.upload(&[0_u32; 4], "a chain of launches")?;
    // Both are written, so that wgpu does not empty them later.
    device.wait().map_err(failed)?;
    let files = [include_str!("shaders/args.wgsl"), include_str!("shaders/chain.wgsl")];
    let kernel = device.pipeline("chain", &files, &vec![("WORKGROUPS", U(workgroups))], &HAZARDS);
    device.compile_all()?;
    let group = device.bind(&kernel, &[("words", &words), ("lost", &lost)]);
    let mut encoder = device.encoder();
    {
        let mut pass = encoder.begin_compute_pass(&Default::default());
        pass.set_pipeline(kernel.inner());
        pass.set_bind_group(0, &group, &[]);
        for first in 0..links {
            pass.set_immediates(0, bytes_of(&Args { first, ..Args::default() }));
            pass.dispatch_workgroups(workgroups, 1, 1);
        }
    }
    device.queue.submit([encoder.finish()]);
    device.wait().map_err(failed)?;
    let size = u64::from(workgroups) * 16;
    let host = device.host_buffer(4 + workgroups as usize * 4, "a chain of launches")?;
    let mut encoder = device.encoder();
    encoder.copy_buffer_to_buffer(&lost, 0, &host, 0, 16);
    encoder.copy_buffer_to_buffer(&words, u64::from(links - 1) * size, &host, 16, size);
    let submission = device.queue.submit([encoder.finish()]);
    let mut held = false;
    let read = device.read(&host, 16 + size as usize, submission, |bytes| {
        let words: &[[u32; 4]] = cast_slice(bytes);
        held = words[0][0] == 0 && words[1..].iter().all(|word| word[0] == links + 1);
    });
    read.map_err(failed)?;
    Ok(held)
}
