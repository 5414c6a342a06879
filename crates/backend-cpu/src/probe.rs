//! Read bandwidth of the machine, the upper bound of every decode.

use std::{hint::black_box, io, time::Instant};

use memmap2::MmapMut;
use paguro_cpu_kernels::{isa::Isa, probe::ProbeKernels};

use crate::thread_pool::{Chunking, ThreadPool};

/// Bytes that one round of the probe reads: far more than any cache holds.
const PROBE_BYTES: usize = 1 << 29;
/// Bytes that a thread claims at a time.
const CHUNK: usize = 1 << 20;

/// Measures the read bandwidth of this machine with `threads` threads, in bytes per second: the median of `rounds`
/// rounds over 512 MiB in huge pages if the system provides them, like weights.
///
/// # Errors
/// Not enough memory or threads.
pub fn read_bandwidth(threads: usize, rounds: usize) -> io::Result<f64> {
    let mut memory = MmapMut::map_anon(PROBE_BYTES)?;
    #[cfg(target_os = "linux")]
    let _ = memory.advise(memmap2::Advice::HugePage);
    memory.fill(1);
    let mut pool = ThreadPool::new(threads)?;
    let kernels = ProbeKernels::new(Isa::detect());
    let mut rates: Vec<f64> = (0..rounds.max(1))
        .map(|_| {
            let start = Instant::now();
            pool.run(PROBE_BYTES / CHUNK, Chunking::Guided(1), |_, chunks| {
                black_box(kernels.read(&memory[chunks.start * CHUNK..chunks.end * CHUNK]));
            });
            PROBE_BYTES as f64 / start.elapsed().as_secs_f64()
        })
        .collect();
    rates.sort_by(f64::total_cmp);
    Ok(rates[rates.len() / 2])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bandwidth_is_a_number_of_bytes() {
        let rate = read_bandwidth(2, 1).unwrap();
        assert!((1e6..1e14).contains(&rate), "{rate} bytes a second");
    }
}
