//! Read bandwidth of the machine, the upper bound of every decode.

use std::{hint::black_box, io, time::Instant};

use memmap2::MmapMut;

use crate::{
    isa::{Isa, simd_kernels},
    simd::Simd,
    thread_pool::{Chunking, ThreadPool},
};

/// Bytes that one round of the probe reads: far more than any cache holds.
const PROBE_BYTES: usize = 1 << 29;
/// Bytes that a thread claims at a time.
const CHUNK: usize = 1 << 20;

simd_kernels! {
    /// Reads, and does nothing else.
    struct ProbeKernels {
        /// Reads all of it, in whole 256 bytes.
        fn read(bytes: &[u8]) -> u8 = read;
    }
}

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

/// See [`ProbeKernels::read`]. Four independent chains, so that only memory is waited for.
#[inline(always)]
fn read<S: Simd>(s: S, bytes: &[u8]) -> u8 {
    let mut all = [s.splat_u8(0); 4];
    for lines in bytes.as_chunks::<64>().0.as_chunks::<4>().0 {
        for (all, line) in all.iter_mut().zip(lines) {
            *all = s.or_u8(*all, s.load_u8(line));
        }
    }
    let mut out = [0; 64];
    s.store_u8(s.or_u8(s.or_u8(all[0], all[1]), s.or_u8(all[2], all[3])), &mut out);
    out.iter().fold(0, |a, &b| a | b)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_read() {
        for isa in Isa::supported() {
            let kernels = ProbeKernels::new(isa);
            let mut bytes = vec![1; 2048];
            assert_eq!(kernels.read(&bytes), 1);
            for at in (0..2048).step_by(61) {
                bytes[at] = 4;
                assert_eq!(kernels.read(&bytes), 5);
                bytes[at] = 1;
            }
        }
    }

    #[test]
    fn bandwidth_is_a_number_of_bytes() {
        let rate = read_bandwidth(2, 1).unwrap();
        assert!((1e6..1e14).contains(&rate), "{rate} bytes a second");
    }
}
