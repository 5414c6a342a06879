//! Read bandwidth of the device's memory, and of the host's.

use std::time::Instant;

use paguro_backend::LoadError;

use crate::{device::Device, hidden::Hazards, matrix::host_plane, template::Value::U};

/// Bytes to read: many times the size of caches.
const BYTES: u64 = 1 << 30;
const SOFTWARE_BYTES: u64 = 64 << 20;
/// Bytes to read over the bus, which has no caches.
const HOST_BYTES: u64 = 256 << 20;
/// Reads in one submission, so that the time of the submission is negligible.
const REPEATS: usize = 20;
/// Workgroups of 256 threads: several for each processor of the largest GPUs.
const WORKGROUPS: u32 = 4224;

/// Memory to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The device's, in order.
    Device,
    /// The device's, in pieces of this many bytes in random order.
    Scattered(usize),
    /// The host's, in order.
    Host,
}

/// See [`crate::Gpu::read_bandwidth`], [`crate::Gpu::scattered_read_bandwidth`] and [`crate::Gpu::link_bandwidth`].
pub fn read_bandwidth(device: &Device, rounds: usize, source: Source) -> Result<f64, LoadError> {
    let (bytes, repeats) = match source {
        _ if device.target.is_software => (SOFTWARE_BYTES, 1),
        Source::Host => (HOST_BYTES, 1),
        Source::Device | Source::Scattered(_) => (BYTES, REPEATS),
    };
    let bytes = bytes.min(device.target.binding_limit);
    let (words, what) = ((bytes / 4) as usize, "a probe of the memory");
    let data = match source {
        Source::Host => host_plane(device, words, what)?.buffer,
        Source::Device | Source::Scattered(_) => device.buffer(words, what)?,
    };
    let sink = device.buffer(4, "a probe of the memory")?;
    let workgroups = WORKGROUPS.min((bytes / 16 / 256 / 4) as u32).max(1);
    let mut constants = vec![("VECS", U((bytes / 16) as u32)), ("STRIDE", U(workgroups * 256))];
    let mut buffers = vec![("data", &data), ("sink", &sink)];
    let order;
    if let Source::Scattered(piece) = source {
        let mut shuffled: Vec<u32> = (0..(bytes / piece as u64) as u32).collect();
        shuffle(&mut shuffled);
        order = device.upload(&shuffled, "a probe of the memory")?;
        constants.push(("PIECE", U((piece / 16) as u32)));
        buffers.push(("order", &order));
    }
    let kernel =
        device.pipeline("read", &[include_str!("shaders/read.wgsl")], &constants, &Hazards::DECLARED);
    device.compile_all()?;
    let group = device.bind(&kernel, &buffers);
    let mut speeds = Vec::new();
    // The first rounds fill the buffer and speed up the clocks.
    for round in 0..rounds + 2 {
        let start = Instant::now();
        let mut encoder = device.inner.create_command_encoder(&Default::default());
        {
            let mut pass = encoder.begin_compute_pass(&Default::default());
            pass.set_pipeline(kernel.inner());
            pass.set_bind_group(0, &group, &[]);
            for _ in 0..repeats {
                pass.dispatch_workgroups(workgroups, 1, 1);
            }
        }
        device.queue.submit([encoder.finish()]);
        device.wait().map_err(|error| LoadError::Device(error.to_string()))?;
        if round >= 2 {
            speeds.push(bytes as f64 * repeats as f64 / start.elapsed().as_secs_f64());
        }
    }
    speeds.sort_by(f64::total_cmp);
    Ok(speeds[speeds.len() / 2])
}

/// Puts a slice into a random order (Fisher and Yates), the same one each time.
fn shuffle(items: &mut [u32]) {
    let mut state = 1_u64;
    for i in (1..items.len()).rev() {
        // Knuth's MMIX generator, of which the upper bits are good.
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        items.swap(i, (state >> 33) as usize % (i + 1));
    }
}
